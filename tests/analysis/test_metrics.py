"""Metrics against their formulas in numpy, by hand on small numbers, and where a score could be flattered."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8attn.analysis import metrics
from fp8attn.analysis.metrics import METRICS, calc_diff, cosine, lse_error, max_abs_error, relative_error, rmse, sqnr_db

TENSOR_METRICS = [rmse, relative_error, sqnr_db, cosine, max_abs_error, calc_diff]
# Sums of at most a few hundred float64 products: n * eps = 2e-13 at worst.
ROUNDING = 1e-12


def numpy_formulas(x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    error = np.sqrt(((x - y) ** 2).sum())
    norm_x, norm_y = np.sqrt((x**2).sum()), np.sqrt((y**2).sum())
    return {
        "rmse": np.sqrt(((x - y) ** 2).mean()),
        "relative_error": error / norm_y,
        "sqnr_db": 20 * np.log10(norm_y / error),
        "cosine": (x * y).sum() / (norm_x * norm_y),
        "max_abs_error": np.abs(x - y).max(),
        "calc_diff": 1 - 2 * (x * y).sum() / (norm_x**2 + norm_y**2),
    }


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    seed=st.integers(0, 2**32 - 1),
    noise=st.sampled_from([1e-2, 0.3, 5.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_formulas(shape: list[int], seed: int, noise: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randn(shape, generator=generator).to(dtype)
    x = (y + noise * torch.randn(shape, generator=generator)).to(dtype)
    if torch.equal(x, y):  # one element whose noise is below its dtype's rounding
        return
    for name, value in numpy_formulas(x.double().numpy(), y.double().numpy()).items():
        # calc_diff's textbook form cancels from 1, which leaves an absolute error of a few eps
        assert getattr(metrics, name)(x, y) == pytest.approx(value, rel=ROUNDING, abs=ROUNDING), name


def test_by_hand() -> None:
    x, y = torch.tensor([3.0, 3.0, 0.0, 0.0]), torch.tensor([3.0, 4.0, 0.0, 0.0])
    assert rmse(x, y) == 0.5
    assert relative_error(x, y) == 0.2
    assert sqnr_db(x, y) == pytest.approx(20 * math.log10(5), rel=ROUNDING)
    assert cosine(x, y) == pytest.approx(21 / math.sqrt(18 * 25), rel=ROUNDING)
    assert max_abs_error(x, y) == 1.0
    assert calc_diff(x, y) == pytest.approx(1 / 43, rel=ROUNDING)


def test_exact_match() -> None:
    x = torch.tensor([1.0, -2.0])
    assert (rmse(x, x), relative_error(x, x), max_abs_error(x, x), calc_diff(x, x)) == (0, 0, 0, 0)
    assert sqnr_db(x, x) == math.inf
    assert cosine(x, x) == pytest.approx(1.0, rel=ROUNDING)


def test_zero_reference() -> None:
    zero, x = torch.zeros(3), torch.tensor([0.0, 1.0, 0.0])
    assert (relative_error(zero, zero), sqnr_db(zero, zero), cosine(zero, zero), calc_diff(zero, zero)) == (
        0,
        math.inf,
        1,
        0,
    )
    assert (relative_error(x, zero), sqnr_db(x, zero), cosine(x, zero), calc_diff(x, zero)) == (
        math.inf,
        -math.inf,
        0,
        1,
    )
    assert (relative_error(zero, x), sqnr_db(zero, x), cosine(zero, x)) == (1, 0, 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("reference", [[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])
def test_non_finite_output_never_scores_well(bad: float, reference: list[float]) -> None:
    expected = torch.tensor(reference)
    actual = torch.tensor([reference[0], bad, reference[2]])
    for metric in (rmse, relative_error, max_abs_error):
        value = metric(actual, expected)
        assert math.isnan(value) or value == math.inf, metric.__name__
    assert math.isnan(sqnr_db(actual, expected)) or sqnr_db(actual, expected) == -math.inf
    assert not cosine(actual, expected) > 0
    assert not calc_diff(actual, expected) < 1


def test_float64_arithmetic() -> None:
    # 2^24 + 1 and squares of 1e30 do not exist in float32
    assert max_abs_error(torch.tensor([2.0**24 + 1], dtype=torch.float64), torch.tensor([2.0**24])) == 1.0
    assert relative_error(torch.tensor([2e30]), torch.tensor([1e30])) == pytest.approx(1.0, rel=1e-6)  # 1e30 in float32
    # 1 - 2<x,y>/(..) would round to 0 here: the difference is 1e-20 of 1
    assert calc_diff(torch.tensor([1.0 + 2e-10], dtype=torch.float64), torch.tensor([1.0])) == pytest.approx(
        2e-20, rel=1e-4
    )


def test_lse_rows() -> None:
    infinity = math.inf
    same = torch.tensor([1.0, -infinity, 2.0])
    assert lse_error(same, same) == 0
    assert lse_error(torch.tensor([1.25, -infinity, 2.5]), same) == 0.5
    assert lse_error(torch.tensor([1.0, 5.0, 2.0]), same) == infinity, "a row that sees nothing must be -inf"
    assert lse_error(torch.tensor([1.0, infinity, 2.0]), same) == infinity, "and not +inf"
    assert lse_error(torch.tensor([-infinity, -infinity, 2.0]), same) == infinity
    assert math.isnan(lse_error(torch.tensor([math.nan, -infinity, 2.0]), same))
    assert not lse_error(torch.tensor([1.0, math.nan, 2.0]), same) < infinity


def test_measure_collects_the_five() -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(1, 2, 3, 4, generator=generator)
    x, lse = y + 0.1, torch.randn(1, 2, 3, generator=generator)
    figures = metrics.measure(x, y, lse + 0.5, lse)
    assert tuple(figures) == METRICS
    for name in METRICS[:4]:
        assert figures[name] == getattr(metrics, name)(x, y)
    assert figures["lse_error"] == lse_error(lse + 0.5, lse)


@pytest.mark.parametrize("metric", [*TENSOR_METRICS, lse_error])
def test_shapes_must_agree(metric) -> None:
    with pytest.raises(ValueError, match=r"one shape, got \(2, 1\) and \(1, 2\)"):
        metric(torch.ones(2, 1), torch.ones(1, 2))
