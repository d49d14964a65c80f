"""Casts inside kernels, and the one place that knows what Triton's interpreter does wrong."""

from __future__ import annotations

import re

import torch
import triton
import triton.language as tl

__all__ = [
    "FP8_DTYPES",
    "INTERPRETED",
    "TRITON_DTYPES",
    "add_product",
    "cast",
    "computed",
    "decode",
    "expand_bytes",
    "fragments_hold",
    "load_scalar",
    "operand_e4m3",
    "product",
    "program_id",
    "row_sums",
    "widen",
]

#: Whether kernels run in the interpreter, on a CPU; fixed when Triton is imported (``TRITON_INTERPRET=1``).
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)

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
        # The interpreter drops the carry when rounding up reaches the next power of two (1.996 becomes 1.0), makes 384
        # of E4M3's NaN and infinity of some of E5M2's, and truncates to BF16. What needs no rounding it casts right.
        if dtype == tl.float8e4nv or dtype == tl.float8e5:
            e4m3: tl.constexpr = dtype == tl.float8e4nv
            codes = _round_to_step(x, 3 if e4m3 else 2, 2.0**-6 if e4m3 else 2.0**-14)
            codes = codes.to(dtype).to(tl.uint8, bitcast=True)
            return tl.where(x != x, 0x7F, codes).to(tl.uint8).to(dtype, bitcast=True)
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
def widen(x):
    """FP32 of 16 bits. Triton takes BF16's odd elements out of their register first: twice the instructions."""
    if INTERPRETED or x.dtype != tl.bfloat16:
        return decode(x)
    return tl.inline_asm_elementwise(
        """{ .reg .b32 low, high; shl.b32 low, $2, 16; and.b32 high, $2, 0xffff0000;
        mov.b32 $0, low; mov.b32 $1, high; }""",
        "=f,=f,r", [x], dtype=tl.float32, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def expand_bytes(codes, FORMAT: tl.constexpr):
    """FP8 codes, read as bytes, to FP16; exact. For GPUs that do not know the format (E4M3 needs sm_89)."""
    bits = codes.to(tl.uint16)
    if FORMAT == tl.float8e5:  # the upper byte of an FP16
        return (bits << 8).to(tl.float16, bitcast=True)
    # E4M3 in FP16's places: its exponent counts from 7, FP16's from 15, so 2^8 is missing.
    values = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), values).to(tl.float16)


@triton.jit
def product(a, b, FORMAT: tl.constexpr):
    """FP32 ``a @ b`` of two tiles of codes. If a has 16 bits and b 8, b (of ``FORMAT``, maybe as bytes) is expanded.

    On the GPU it accumulates in the tensor core, from zero. INT8 loses its NaN: the caller's to mend.
    """
    if b.dtype == tl.uint8:
        b = expand_bytes(b, FORMAT)
    if INTERPRETED:
        return tl.dot(decode(a), decode(b), input_precision="ieee")
    if a.dtype.primitive_bitwidth == 16 and b.dtype != a.dtype:
        b = b.to(a.dtype)
    result = tl.dot(a, b)
    return result.to(tl.float32)


@triton.jit
def load_scalar(pointer):
    """One FP32 from global memory. In a loop over tiles ``tl.load`` would stage even this through shared memory."""
    if INTERPRETED:
        return tl.load(pointer)
    return tl.inline_asm_elementwise(
        "ld.global.nc.f32 $0, [$1];", "=f,l", [pointer.to(tl.int64)], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _add_f16x2(a, b):
    return tl.inline_asm_elementwise("add.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def row_sums(p, FRAGMENTS: tl.constexpr):
    """Sums of a tile of softmax weights (at most 256 each, 256 a row) along its rows, in FP32.

    With ``FRAGMENTS`` (sm_90) the 8-bit formats are unpacked to pairs of FP16, as the hardware does it, and added as
    pairs: half the instructions of FP32 sums. FP16 holds half a row's sum (2^15) and loses 2^-12 of a partial sum at an
    addition, at random.
    """
    if not FRAGMENTS or p.dtype.primitive_bitwidth == 16:
        return tl.sum(decode(p), 1)
    # A register holds two pairs of neighbours: the first and third of four outputs are a pair of FP16 each, the others
    # are not used.
    if p.dtype == tl.float8e4nv:
        pairs = tl.inline_asm_elementwise(
            """{ .reg .b16 low, high; mov.b32 {low, high}, $4;
            cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $2, high; mov.b32 $1, $0; mov.b32 $3, $2; }""",
            "=r,=r,=r,=r,r", [p], dtype=tl.int32, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        pairs = tl.inline_asm_elementwise(
            """{ .reg .b16 low, high; mov.b32 {low, high}, $4;
            cvt.rn.f16x2.e5m2x2 $0, low; cvt.rn.f16x2.e5m2x2 $2, high; mov.b32 $1, $0; mov.b32 $3, $2; }""",
            "=r,=r,=r,=r,r", [p], dtype=tl.int32, is_pure=True, pack=4,
        )  # fmt: skip
    pairs, _ = tl.split(tl.reshape(pairs, [p.shape[0], p.shape[1] // 2, 2]))
    return tl.inline_asm_elementwise(
        "{ .reg .b16 a, b; .reg .f32 x, y; mov.b32 {a, b}, $1; cvt.f32.f16 x, a; cvt.f32.f16 y, b; add.f32 $0, x, y; }",
        "=f,r", [tl.reduce(pairs, 1, _add_f16x2)], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def program_id():
    """``tl.program_id(0)``, asked anew: what follows from it need not have been kept in registers until now."""
    if INTERPRETED:
        return tl.program_id(0)
    return tl.inline_asm_elementwise("mov.u32 $0, %ctaid.x;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def operand_e4m3(p):
    """Softmax weights of a tile to E4M3, in the very registers that the next product reads them from. sm_90 only.

    ``p`` (M, N) has its columns in the order of ``scaling.TOKEN_ORDER``. A thread holds, in a row, elements that differ
    first in the last bit of the column (e), then in the row (by 8), then in the column's next bit (h); the product
    wants e and h first, four codes of a row to a register. Cast as they come, codes would have to be picked apart and
    put together again: two instructions for every register. Here the two middle elements of eight change places on
    the way into the cast, which costs nothing, and the tensor is relabelled to say so.
    """
    M: tl.constexpr = p.shape[0]
    N: tl.constexpr = p.shape[1]
    codes = tl.inline_asm_elementwise(
        """{ .reg .b16 a, b, c, d;
        cvt.rn.satfinite.e4m3x2.f32 a, $3, $2; cvt.rn.satfinite.e4m3x2.f32 b, $7, $6;
        cvt.rn.satfinite.e4m3x2.f32 c, $5, $4; cvt.rn.satfinite.e4m3x2.f32 d, $9, $8;
        mov.b32 $0, {a, b}; mov.b32 $1, {c, d}; }""",
        "=r,=r,f,f,f,f,f,f,f,f", [p], dtype=tl.float8e4nv, is_pure=True, pack=8,
    )  # fmt: skip
    codes = tl.reshape(codes, [M // 16, 2, 8, N // 4, 2, 2])
    return tl.reshape(tl.permute(codes, [0, 4, 2, 3, 1, 5]), [M, N])


def fragments_hold(ttgir: str) -> bool:
    """Whether a compiled kernel holds its weights as ``operand_e4m3`` and ``row_sums`` take for granted.

    Triton gives no promise in which registers a tensor lies, but says in its intermediate code where it put it: the
    steps (row, column) from register to register must begin as in the tensor core's fragments. ``row_sums`` needs
    neighbours in pairs, no more.
    """
    layouts = dict(re.findall(r"^(#\w+) = (.+)$", ttgir, re.MULTILINE))
    begins = {8: "#ttg.linear<{register = [[0, 1], [8, 0], [0, 2]", 4: "#ttg.linear<{register = [[0, 1], ["}
    return all(
        layouts.get(layout, "").startswith(begins[int(pack)])
        for pack, layout in re.findall(
            r"elementwise_inline_asm .*packed_element = ([48]) : .*?tensor<[^>]*, (#\w+)>", ttgir
        )
    )


@triton.jit
def add_product(a, b, sums):
    """a @ b + sums, of 16-bit operands."""
    if INTERPRETED:  # its dot takes BF16's bits for numbers
        return tl.dot(decode(a), decode(b), sums, input_precision="ieee")
    return tl.dot(a, b, sums)


@triton.jit
def computed(x):
    """FP32 x, computed where this stands and not where it is first used; costs no instruction."""
    if INTERPRETED:
        return x
    return tl.inline_asm_elementwise("", "=f,0", [x], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit
def block_boundary(n, number: tl.constexpr):
    """Ends the assembler's basic block: exits if n is -1 - number, which a key's number never is.

    The assembler moves nothing across, so that registers are free for what comes after. Each use in a loop needs a
    number of its own, or the assembler knows the condition to be false.
    """
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.eq.s32 p, $1, $2; @p exit; mov.u32 $0, 0; }",
            "=r,r,r", [n, -1 - number], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
