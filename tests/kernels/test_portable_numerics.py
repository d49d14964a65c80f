"""Casts inside kernels, over all codes and rounding boundaries, and what the interpreter does to those by itself."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from fp8attn.formats import FORMATS, Format
from fp8attn.kernels.portable.numerics import FP8_DTYPES, TRITON_DTYPES, cast, decode, expand_bytes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NARROW = [f for f in FORMATS.values() if f.dtype in FP8_DTYPES]


@triton.jit
def _cast(x, y, N: tl.constexpr, DTYPE: tl.constexpr, OURS: tl.constexpr):
    i = tl.arange(0, N)
    values = tl.load(x + i)
    tl.store(y + i, cast(values, DTYPE) if OURS else values.to(DTYPE))


@triton.jit
def _decode(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, decode(tl.load(x + i)))


@triton.jit
def _expand(x, y, N: tl.constexpr, DTYPE: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, expand_bytes(tl.load(x + i), DTYPE))


def boundaries(fmt: Format) -> torch.Tensor:
    """Random values of all magnitudes; for 8 bits all codes, the middles between neighbours, and what lies beside."""
    generator = torch.Generator().manual_seed(0)
    powers = torch.exp2(torch.randint(-24, 9, (2**14,), generator=generator).float())
    values = [torch.randn(2**14, generator=generator) * powers, torch.tensor([0.0, -0.0, torch.nan])]
    if fmt.dtype.itemsize == 1:
        codes = fmt.decode(fmt.codes())
        codes = codes[codes.isfinite()].unique()
        middles = (codes[1:] + codes[:-1]) / 2
        up, down = torch.tensor(torch.inf), torch.tensor(-torch.inf)
        values += [codes, middles, middles.nextafter(up), middles.nextafter(down)]
    together = torch.cat(values).clamp(-fmt.max, fmt.max)
    return torch.nn.functional.pad(together, (0, 2**15 - len(together)))


def differs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a, b = a.float().cpu(), b.float().cpu()
    return (a != b) & ~(a.isnan() & b.isnan())


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_cast_is_the_formats(fmt: Format) -> None:
    x = boundaries(fmt)
    y = torch.empty(len(x), dtype=fmt.dtype, device=DEVICE)
    _cast[(1,)](x.to(DEVICE), y, len(x), TRITON_DTYPES[fmt.dtype], True)
    assert not differs(y.cpu(), fmt.cast(x)).any()


@pytest.mark.skipif(DEVICE == "cuda", reason="about the interpreter")
def test_the_interpreters_own_cast_still_needs_the_mend() -> None:
    """When this fails, a newer Triton rounds right, and ``cast`` need not round before it casts."""
    x = torch.full((16,), 1.996)
    y = torch.empty(16, dtype=torch.float8_e4m3fn)
    _cast[(1,)](x, y, 16, tl.float8e4nv, False)
    assert y.float().eq(1.0).all(), "the right code is 2.0"


@pytest.mark.parametrize("fmt", NARROW, ids=lambda f: f.name)
def test_every_code_is_decoded(fmt: Format) -> None:
    codes = fmt.codes().to(DEVICE)
    y = torch.empty(256, device=DEVICE)
    _decode[(1,)](codes, y, 256)
    assert not differs(y, fmt.decode(fmt.codes())).any()


@pytest.mark.parametrize("fmt", NARROW, ids=lambda f: f.name)
def test_every_byte_is_expanded(fmt: Format) -> None:
    """As GPUs without FP8 read it; FP16 holds every code exactly."""
    y = torch.empty(256, dtype=torch.float16, device=DEVICE)
    _expand[(1,)](fmt.codes().view(torch.uint8).to(DEVICE), y, 256, TRITON_DTYPES[fmt.dtype])
    assert not differs(y, fmt.decode(fmt.codes())).any()
