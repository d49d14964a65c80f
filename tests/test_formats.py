"""Formats against ml_dtypes, and the rules that ml_dtypes does not share (saturation)."""

from __future__ import annotations

import copy

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8attn.formats import BF16, E4M3, E5M2, FORMATS, FP16, INT8, Format, get_format

ORACLE = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2, FP16: np.float16, BF16: ml_dtypes.bfloat16}
FLOATS = pytest.mark.parametrize("fmt", list(ORACLE), ids=lambda f: f.name)
FP8 = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)


def bits(codes: torch.Tensor) -> np.ndarray:
    return codes.view(torch.uint8 if codes.dtype.itemsize == 1 else torch.int16).numpy()


def oracle_bits(x: torch.Tensor, fmt: Format) -> np.ndarray:
    codes = x.numpy().astype(ORACLE[fmt])
    return codes.view(np.uint8 if codes.dtype.itemsize == 1 else np.int16)


@FP8
def test_all_256_codes_decode_as_ml_dtypes(fmt: Format) -> None:
    theirs = np.arange(256, dtype=np.uint8).view(ORACLE[fmt]).astype(np.float32)
    np.testing.assert_array_equal(fmt.decode(fmt.codes()).numpy(), theirs)


@FP8
def test_every_code_survives_the_cast(fmt: Format) -> None:
    codes = fmt.codes()
    values = fmt.decode(codes)
    finite = values.isfinite()
    np.testing.assert_array_equal(bits(fmt.cast(values))[finite.numpy()], bits(codes)[finite.numpy()])
    assert fmt.decode(fmt.cast(values))[values.isnan()].isnan().all()


@FP8
def test_boundaries_and_their_neighbours_match_ml_dtypes(fmt: Format) -> None:
    """Every representable value, every midpoint between two, and the FP32 numbers right beside them."""
    values = fmt.decode(fmt.codes())
    values = values[values.isfinite()].double().sort().values
    points = torch.cat([values, (values[1:] + values[:-1]) / 2]).float()
    x = torch.cat([points, torch.nextafter(points, torch.tensor(1e9)), torch.nextafter(points, torch.tensor(-1e9))])
    x = x[x.abs() <= fmt.max]
    np.testing.assert_array_equal(bits(fmt.cast(x)), oracle_bits(x, fmt))


@FLOATS
def test_random_values_match_ml_dtypes(fmt: Format) -> None:
    generator = torch.Generator().manual_seed(0)
    exponent = torch.randint(fmt.min_exponent - fmt.mantissa_bits - 2, 12, (200_000,), generator=generator)
    x = torch.randn(200_000, generator=generator) * torch.exp2(exponent.double()).float()
    x = x[x.abs() <= fmt.max]
    np.testing.assert_array_equal(bits(fmt.cast(x)), oracle_bits(x, fmt))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@FP8
def test_16_bit_inputs_are_rounded_once(fmt: Format, dtype: torch.dtype) -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    x = every.float()
    keep = x.abs() <= fmt.max
    np.testing.assert_array_equal(bits(fmt.cast(every[keep])), oracle_bits(x[keep], fmt))


@pytest.mark.parametrize("fmt", list(FORMATS.values()), ids=lambda f: f.name)
def test_saturation_nan_and_infinity(fmt: Format) -> None:
    big = torch.tensor([fmt.max, fmt.clip_limit, 3.4e38, torch.inf])
    assert fmt.decode(fmt.cast(big)).tolist() == [fmt.max] * 4
    assert fmt.decode(fmt.cast(-big)).tolist() == [-fmt.max] * 4
    assert fmt.decode(fmt.cast(torch.tensor([torch.nan, -torch.nan]))).isnan().all()
    assert fmt.round(torch.tensor([torch.nan])).isnan().all()


@pytest.mark.parametrize("x", [448.0, 449.0, 464.0, 465.0, 480.0, 1e4, 6.5e4])
def test_values_around_the_limit_are_448_whatever_torch_does(x: float) -> None:
    """ml_dtypes and torch before 2.12 make NaN of what lies above 464."""
    for dtype in (torch.float32, torch.bfloat16):
        assert E4M3.decode(E4M3.cast(torch.tensor([x, -x], dtype=dtype))).tolist() == [448.0, -448.0]


@FLOATS
def test_limits_are_those_of_ml_dtypes(fmt: Format) -> None:
    info = ml_dtypes.finfo(ORACLE[fmt])
    assert (fmt.max, fmt.eps) == (float(info.max), float(info.eps))
    assert (fmt.smallest_normal, fmt.smallest_subnormal) == (
        float(info.smallest_normal),
        float(info.smallest_subnormal),
    )


def test_signed_zeros() -> None:
    x = torch.tensor([-0.0, -1e-30, 0.0, 1e-30])
    assert bits(E4M3.cast(x)).tolist() == [0x80, 0x80, 0, 0]
    assert INT8.cast(x).tolist() == [0, 0, 0, 0]


def test_int8_rounds_ties_to_even_and_marks_nan() -> None:
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.4, 1000.0, -1000.0, torch.nan])
    assert INT8.cast(x).tolist() == [0, 2, 2, 0, -2, 126, 127, 127, -127, -128]


@pytest.mark.parametrize("fmt", list(FORMATS.values()), ids=lambda f: f.name)
def test_round_is_decode_of_cast(fmt: Format) -> None:
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(1)) * fmt.max / 4
    assert torch.equal(fmt.round(x), fmt.decode(fmt.cast(x)))


@FLOATS
def test_round_nonnegative_is_round_in_place(fmt: Format) -> None:
    x = torch.rand(10_000, generator=torch.Generator().manual_seed(2)).pow(12) * 256
    expected = fmt.round(x)
    assert fmt.round_nonnegative_(x) is x
    assert torch.equal(x, expected)


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=40), st.sampled_from(list(FORMATS.values())))
def test_rounding_is_idempotent_monotone_and_odd(values: list[float], fmt: Format) -> None:
    x = torch.tensor(values).sort().values
    y = fmt.round(x)
    assert torch.equal(fmt.round(y), y)
    assert (y[1:] >= y[:-1]).all()
    assert torch.equal(fmt.round(-x), -y)


@given(st.lists(st.floats(-448, 448, width=32), min_size=1, max_size=40), st.sampled_from([E4M3, E5M2, FP16]))
def test_error_is_at_most_half_a_step(values: list[float], fmt: Format) -> None:
    x = torch.tensor(values).double()
    # nearest value: half the relative step of a normal, half the absolute step of a subnormal
    bound = torch.maximum(x.abs() * fmt.eps / 2, torch.tensor(fmt.smallest_subnormal / 2, dtype=torch.float64))
    assert ((fmt.round(x.float()).double() - x).abs() <= bound).all()


@pytest.mark.parametrize("fmt", [E4M3, E5M2, INT8], ids=lambda f: f.name)
def test_steps_are_the_gaps_between_codes(fmt: Format) -> None:
    values = fmt.decode(fmt.codes())
    values = values[values.isfinite()].abs().unique()
    gaps = values.diff()
    assert torch.equal(fmt.step((values[:-1] + values[1:]) / 2), gaps)
    assert torch.equal(fmt.step(-values[:-1]), gaps)


def test_a_copy_of_a_format_rounds_alike() -> None:
    x = torch.tensor([3.4e38, 1.0, 1e-3])
    for fmt in FORMATS.values():
        assert torch.equal(copy.deepcopy(fmt).round(x), fmt.round(x))


def test_inputs_are_not_modified() -> None:
    x = torch.randn(100) * 1000
    before = x.clone()
    for fmt in FORMATS.values():
        fmt.cast(x), fmt.round(x)
    assert torch.equal(x, before)


def test_errors_say_what_is_accepted() -> None:
    with pytest.raises(ValueError, match=r"unknown format 'fp4'; accepted: e4m3, e5m2, int8, fp16, bf16"):
        get_format("fp4")
    with pytest.raises(TypeError, match=r"codes of format e4m3 have dtype torch.float8_e4m3fn, got torch.uint8"):
        E4M3.decode(torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="only 8-bit formats list their codes, got bf16"):
        BF16.codes()
