"""Metrics against their formulas in numpy, by hand on small numbers, and where a score could be flattered."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
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


def test_relative_errors_of_elements() -> None:
    x, y = torch.tensor([3.0, 3.0, 0.0]), torch.tensor([3.0, 5.0, 0.0])
    assert metrics.relative_l1(x, y) == 2 / 8
    assert metrics.max_relative_error(x, y) == 2 / 5
    assert metrics.max_relative_error(torch.ones(1), torch.zeros(1)) == math.inf
    assert math.isnan(metrics.max_relative_error(torch.tensor([math.nan, 1.0]), torch.ones(2)))
    assert metrics.max_relative_error(torch.ones(0), torch.ones(0)) == 0.0


def test_probabilities() -> None:
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(2, 3, 5, generator=generator, dtype=torch.float64).softmax(-1) for _ in range(2))
    expected = scipy.stats.entropy(y.numpy(), x.numpy(), axis=-1).mean()
    assert metrics.kl_divergence(x, y) == pytest.approx(expected, rel=ROUNDING)
    assert metrics.kl_divergence(y, y) == 0.0 and metrics.top1_agreement(y, y) == 1.0
    hidden = torch.cat([y, torch.zeros(2, 1, 5)], dim=1)  # rows that see nothing say nothing
    also = torch.cat([x, torch.zeros(2, 1, 5)], dim=1)
    assert metrics.kl_divergence(also, hidden) == pytest.approx(expected, rel=ROUNDING)
    assert (
        metrics.top1_agreement(also, hidden)
        == metrics.top1_agreement(x, y)
        == (x.argmax(-1) == y.argmax(-1)).double().mean().item()
    )
    assert metrics.kl_divergence(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, 0.5]])) == math.inf
    assert metrics.top1_agreement(torch.tensor([[math.nan, 0.9]]), torch.tensor([[0.1, 0.9]])) == 0.0
    assert metrics.top1_agreement(torch.zeros(1, 2), torch.zeros(1, 2)) == 1.0


def test_heads_and_rows() -> None:
    x, y = torch.zeros(2, 3, 4, 2), torch.ones(2, 3, 4, 2)
    x[1, 2], x[0, 1, 0] = 3.0, 1.0
    expected = torch.ones(2, 3, dtype=torch.float64)
    expected[1, 2], expected[0, 1] = 2.0, math.sqrt(0.75)
    assert torch.allclose(metrics.by_head(rmse, x, y), expected, rtol=ROUNDING)
    assert metrics.worst_head(rmse, x, y) == (1, 2, 2.0)
    x[0, 0, 0, 0] = math.nan
    assert metrics.worst_head(rmse, x, y)[:2] == (0, 0)
    with pytest.raises(ValueError, match="there is no head"):
        metrics.worst_head(rmse, torch.zeros(0, 3, 1), torch.zeros(0, 3, 1))
    rows = torch.arange(1.0, 101.0)[:, None]
    found = metrics.row_quantiles(torch.zeros(100, 1), rows, (0.0, 0.5, 0.99, 1.0))
    assert found == {0.0: 1.0, 0.5: 1.0, 0.99: 1.0, 1.0: 1.0}
    found = metrics.row_quantiles(torch.ones(100, 1) + rows, torch.ones(100, 1), (0.0, 0.5, 0.99, 1.0))
    assert found == {0.0: 1.0, 0.5: 50.0, 0.99: 99.0, 1.0: 100.0}
    assert math.isnan(metrics.row_quantiles(torch.tensor([[math.nan], [1.0]]), torch.ones(2, 1))[1.0])


def test_confidence_intervals_cover_the_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(400):
        _, low, high = metrics.confidence_interval(torch.randn(5, generator=generator).tolist(), 0.9)
        covered += low <= 0.0 <= high
    assert 340 <= covered <= 380  # 360 +- 6 expected, three of them each way
    mean, low, high = metrics.confidence_interval([2.0])
    assert mean == 2.0 and math.isnan(low) and math.isnan(high)
    for values, confidence in (([], 0.9), ([1.0], 1.0)):
        with pytest.raises(ValueError, match=r"a mean needs values and a confidence in \(0, 1\)"):
            metrics.confidence_interval(values, confidence)


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
