"""Casts inside kernels, and the one place that knows what Triton's interpreter does wrong."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["INTERPRETED", "TRITON_DTYPES", "cast", "decode", "product"]

#: Whether kernels run in the interpreter, on a CPU; fixed when Triton is imported (``TRITON_INTERPRET=1``).
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

#: The kernels' names for the dtypes of codes.
TRITON_DTYPES = {
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
    torch.int8: tl.int8,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
}


@triton.jit
def cast(x, dtype: tl.constexpr):
    """FP32 values within the format's range (or NaN) to codes: one rounding, to nearest even, as ``Format.cast``.

    INT8 has no NaN: the code -128 stands for it. The range is the caller's to keep: compiled FP8 casts saturate,
    but not in the interpreter, and 16-bit ones never do.
    """
    if dtype == tl.int8:
        magic: tl.constexpr = 12582912.0  # 1.5 * 2^23: adding it leaves no fraction bits, rounded to nearest even
        return tl.where(x != x, -128.0, (x + magic) - magic).to(tl.int8)
    if INTERPRETED:
        # The interpreter drops the carry when rounding up reaches the next power of two (1.996 becomes 1.0) and makes
        # E4M3's NaN 384. A value that needs no rounding it casts right.
        if dtype == tl.float8e4nv:
            codes = _round_to_step(x, 3, 2.0**-6).to(dtype).to(tl.uint8, bitcast=True)
            return tl.where(x != x, 0x7F, codes).to(tl.uint8).to(dtype, bitcast=True)
        if dtype == tl.float8e5:
            x = _round_to_step(x, 2, 2.0**-14)
        if dtype == tl.bfloat16:  # the upper half of the bits; near FP32's largest a step's magic number would overflow
            bits = x.to(tl.uint32, bitcast=True)
            codes = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            return tl.where(x != x, 0x7FC0, codes).to(tl.uint16).to(dtype, bitcast=True)
    return x.to(dtype)


@triton.jit
def _round_to_step(x, mantissa_bits: tl.constexpr, smallest_normal: tl.constexpr):
    # ``Format._round_to_step``: FP32's own rounding drops what is below one step.
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    magic = tl.maximum(power, smallest_normal) * (1.5 * 2.0 ** (23 - mantissa_bits))
    return (x + magic) - magic


@triton.jit
def decode(codes):
    """Codes to FP32; exact. INT8's -128 becomes NaN."""
    x = codes.to(tl.float32)
    if codes.dtype == tl.int8:
        x = tl.where(codes == -128, float("nan"), x)
    if INTERPRETED:  # it reads NaN (and E5M2's infinities) as numbers, and BF16's subnormal numbers as 0
        if codes.dtype == tl.float8e4nv:
            x = tl.where((codes.to(tl.uint8, bitcast=True) & 0x7F) == 0x7F, float("nan"), x)
        if codes.dtype == tl.float8e5:  # the upper byte of an FP16
            bits = codes.to(tl.uint8, bitcast=True).to(tl.uint16) << 8
            x = bits.to(tl.float16, bitcast=True).to(tl.float32)
        if codes.dtype == tl.bfloat16:  # the upper half of an FP32
            x = (codes.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x


@triton.jit
def product(a, b):
    """FP32 ``a @ b`` of two tiles of codes. If one has 16 bits and the other 8, the narrow one is expanded.

    On the GPU it accumulates in the tensor core, from zero. INT8 loses its NaN: the caller's to mend.
    """
    if INTERPRETED:
        return tl.dot(decode(a), decode(b), input_precision="ieee")
    if a.dtype == tl.int8:
        return tl.dot(a, b).to(tl.float32)
    if a.dtype.primitive_bitwidth == 16 and b.dtype.primitive_bitwidth == 8:
        b = b.to(a.dtype)
    return tl.dot(a, b)
