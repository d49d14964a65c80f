"""Number formats: what a code can hold, and the one cast that makes codes.

``E4M3`` (the *fn* variant: no infinity, largest value 448) and ``E5M2`` are the FP8 formats of Micikevicius et al.,
"FP8 Formats for Deep Learning" (arXiv:2209.05433). ``INT8``, ``FP16`` and ``BF16`` stand beside them for comparisons.

>>> import torch
>>> from fp8attn.formats import E4M3
>>> E4M3.decode(E4M3.cast(torch.tensor([0.3, 17.0, 1e6, float("nan")]))).tolist()
[0.3125, 16.0, 448.0, nan]
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

__all__ = ["BF16", "E4M3", "E5M2", "FORMATS", "FP16", "INT8", "Format", "get_format"]

_EXPONENT_MASK = 0x7F800000  # of an FP32


@dataclass(frozen=True)
class Format:
    """One number format.

    Attributes:
        name: how recipes spell it.
        dtype: the torch dtype of its codes.
        max: largest finite value.
        mantissa_bits: stored fraction bits (``INT8``: 0, its steps are all 1).
        min_exponent: exponent of the smallest normal value.
        scaled: whether a quantizer scales blocks to the format's range; BF16 has FP32's and is used as it is.
    """

    name: str
    dtype: torch.dtype
    max: float
    mantissa_bits: int
    min_exponent: int
    scaled: bool = True

    @property
    def is_integer(self) -> bool:
        return self.dtype == torch.int8

    @property
    def eps(self) -> float:
        """Relative step: the gap above 1. Rounding moves a normal value by at most ``eps / 2`` of itself."""
        return 2.0**-self.mantissa_bits

    @property
    def smallest_normal(self) -> float:
        return 2.0**self.min_exponent

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive value; also the absolute step below ``smallest_normal``."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @property
    def clip_limit(self) -> float:
        """Magnitudes up to here round to ``max``; beyond, the saturating cast clips them."""
        step = 1.0 if self.is_integer else 2.0 ** (math.frexp(self.max)[1] - 1 - self.mantissa_bits)
        return self.max + step / 2

    def round(self, x: torch.Tensor) -> torch.Tensor:
        """The format's value nearest to each element, as FP32: ``decode(cast(x))`` without the codes.

        One rounding from FP32, ties to even. Magnitudes beyond ``max``, infinity included, become ``max``. NaN stays
        NaN. The sign of zero is kept, except by ``INT8``, which has one zero. FP64 input is rounded to FP32 first.
        """
        x = x.to(torch.float32)
        clamped = x.clamp(-self.max, self.max)  # NaN passes through
        if self.is_integer:
            return clamped.round_().add_(0.0)  # -0 + 0 is +0
        if self.dtype == torch.bfloat16:
            return clamped.to(torch.bfloat16).to(torch.float32)
        # _round_to_step turns what rounds to -0 into +0
        return torch.copysign(self._round_to_step(clamped), x)

    def round_nonnegative_(self, x: torch.Tensor) -> torch.Tensor:
        """``round`` in place, for FP32 values known to lie in [0, max] (or NaN): the softmax's weights."""
        if self.dtype == torch.bfloat16:
            return x.copy_(x.to(torch.bfloat16))
        return self._round_to_step(x, out=x)

    def _round_to_step(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        # Adding and taking away 1.5 * 2^23 steps makes FP32's own rounding (to nearest, ties to even) drop everything
        # below one step, where a step is 2^-mantissa_bits of the value's power of two, or of the smallest normal's.
        # Unlike torch's cast to FP8 it is the same on every version and device, and on a CPU it is four times faster.
        magic = (x.view(torch.int32) & _EXPONENT_MASK).view(torch.float32)
        magic.clamp_(min=self.smallest_normal).mul_(1.5 * 2.0 ** (23 - self.mantissa_bits))
        return torch.add(x, magic, out=out).sub_(magic)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        """The gap between neighbouring values of the format at each magnitude: rounding moves x by half of it at most.

        The step of x's power of two, of the smallest normal value's below that, and 1 for ``INT8``. In x's dtype.

        >>> E4M3.step(torch.tensor([0.0, 1.0, 1.9, 448.0])).tolist()
        [0.001953125, 0.125, 0.125, 32.0]
        """
        if self.is_integer:
            return torch.ones_like(x)
        exponent = torch.frexp(x.abs().clamp(min=self.smallest_normal)).exponent - 1
        return torch.ldexp(torch.ones_like(x), exponent - self.mantissa_bits)

    def cast(self, x: torch.Tensor) -> torch.Tensor:
        """The saturating cast: codes of ``dtype`` for a floating tensor of any shape.

        ``round`` does the rounding, so the conversion to ``dtype`` is exact and no version of torch can differ in it
        (before 2.12 its own cast turned magnitudes above 464 into NaN). ``INT8`` has no NaN: there the code -128, which
        no finite value gets, stands for it.
        """
        rounded = self.round(x)
        if self.is_integer:
            rounded = torch.where(rounded.isnan(), -128.0, rounded)
        return rounded.to(self.dtype)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """FP32 values of ``codes``; exact."""
        if codes.dtype != self.dtype:
            raise TypeError(f"codes of format {self.name} have dtype {self.dtype}, got {codes.dtype}")
        values = codes.to(torch.float32)
        if self.is_integer:
            values = torch.where(codes == -128, torch.nan, values)
        return values

    def codes(self) -> torch.Tensor:
        """All codes of an 8-bit format in the order of their bit patterns, shape (256,).

        >>> E5M2.decode(E5M2.codes())[:3]
        tensor([0.0000e+00, 1.5259e-05, 3.0518e-05])
        """
        if self.dtype.itemsize != 1:
            raise ValueError(f"only 8-bit formats list their codes, got {self.name}")
        return torch.arange(256, dtype=torch.int32, device="cpu").to(torch.uint8).view(self.dtype)

    def __repr__(self) -> str:
        return f"{self.name.upper()}(max={self.max:g}, eps={self.eps:g})"


E4M3 = Format("e4m3", torch.float8_e4m3fn, 448.0, mantissa_bits=3, min_exponent=-6)
E5M2 = Format("e5m2", torch.float8_e5m2, 57344.0, mantissa_bits=2, min_exponent=-14)
INT8 = Format("int8", torch.int8, 127.0, mantissa_bits=0, min_exponent=0)
FP16 = Format("fp16", torch.float16, 65504.0, mantissa_bits=10, min_exponent=-14)
BF16 = Format("bf16", torch.bfloat16, torch.finfo(torch.bfloat16).max, mantissa_bits=7, min_exponent=-126, scaled=False)

FORMATS = {f.name: f for f in (E4M3, E5M2, INT8, FP16, BF16)}


def get_format(name: str | Format) -> Format:
    """The format of that name; ``ValueError`` lists the accepted names.

    >>> get_format("e4m3").max
    448.0
    """
    if isinstance(name, Format):
        return name
    if name not in FORMATS:
        raise ValueError(f"unknown format {name!r}; accepted: {', '.join(FORMATS)}")
    return FORMATS[name]
