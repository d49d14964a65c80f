"""Error metrics, each defined once.

Every metric takes what was computed (``actual``) and what is right (``expected``), of one shape, and works in float64.
None of them forgives: a NaN in ``actual`` gives NaN or the worst value, never a good score. With x for actual and y for
expected, and |.| the Frobenius norm:

===================  ==================================  =======================  ==============================
metric               formula                             exact match              expected is all zero, actual not
===================  ==================================  =======================  ==============================
rmse                 |x - y| / sqrt(n)                   0                        by the formula
relative_error       |x - y| / |y|                       0                        inf
sqnr_db              20 log10(|y| / |x - y|)             inf                      -inf
cosine               <x, y> / (|x| |y|)                  1                        0
max_abs_error        max |x - y|                         0                        by the formula
calc_diff            1 - 2 <x, y> / (|x|^2 + |y|^2)      0                        1
lse_error            max |x - y|, finite rows            0                        by the formula
relative_l1          sum |x - y| / sum |y|               0                        inf
max_relative_error   max |x - y| / |y|                   0                        inf
===================  ==================================  =======================  ==============================

Two compare probabilities, rows of weights that sum to 1: ``kl_divergence`` and ``top1_agreement``. ``by_head`` and
``worst_head`` take any metric head by head, ``row_quantiles`` show how rows differ, and ``confidence_interval`` says
how well seeds know a mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = [
    "METRICS",
    "by_head",
    "calc_diff",
    "confidence_interval",
    "cosine",
    "kl_divergence",
    "lse_error",
    "max_abs_error",
    "max_relative_error",
    "measure",
    "relative_error",
    "relative_l1",
    "rmse",
    "row_quantiles",
    "sqnr_db",
    "top1_agreement",
    "worst_head",
]

METRICS = ("relative_error", "sqnr_db", "cosine", "max_abs_error", "lse_error")
"""The keys of :func:`measure`, in the order in which tables show them."""


def rmse(actual: Tensor, expected: Tensor) -> float:
    """Root mean square error, ``|x - y| / sqrt(n)``: the metric of FlashAttention-3's Table 3 (arXiv 2407.08608).

    >>> rmse(torch.tensor([3.0, 3.0, 0.0, 0.0]), torch.tensor([3.0, 4.0, 0.0, 0.0]))
    0.5
    """
    actual, expected = _pair(actual, expected)
    return _norm(actual - expected) / math.sqrt(max(1, actual.numel()))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Relative Frobenius error, ``|x - y| / |y|``. Zero for a zero tensor that was met exactly, infinite if it was not.

    >>> relative_error(torch.tensor([3.0, 3.0]), torch.tensor([3.0, 4.0]))
    0.2
    """
    actual, expected = _pair(actual, expected)
    return _ratio(_norm(actual - expected), _norm(expected))


def sqnr_db(actual: Tensor, expected: Tensor) -> float:
    """Signal to quantization noise in dB, ``20 log10(|y| / |x - y|)``: torchao's ``compute_error``. Infinite if exact.

    >>> sqnr_db(torch.tensor([9.0, 0.0]), torch.tensor([10.0, 0.0]))
    20.0
    """
    error = relative_error(actual, expected)
    if error == 0:
        return math.inf
    return -20.0 * math.log10(error) if error < math.inf else -error  # -inf, and NaN stays NaN


def cosine(actual: Tensor, expected: Tensor) -> float:
    """Cosine similarity of the flattened tensors, ``<x, y> / (|x| |y|)``; 1 if both are zero, 0 if only one is.

    It is blind to a common factor, so it is never to be read alone.

    >>> cosine(torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.0]))
    1.0
    """
    actual, expected = _pair(actual, expected)
    norm_actual, norm_expected = _norm(actual), _norm(expected)
    if norm_actual == 0 or norm_expected == 0:
        return math.nan if math.isnan(norm_actual + norm_expected) else float(norm_actual == norm_expected)
    similarity = float(((actual / norm_actual) * (expected / norm_expected)).sum())
    return min(1.0, max(-1.0, similarity)) if not math.isnan(similarity) else math.nan


def max_abs_error(actual: Tensor, expected: Tensor) -> float:
    """Largest absolute difference, ``max |x - y|``; 0 for empty tensors.

    >>> max_abs_error(torch.tensor([1.0, 5.0]), torch.tensor([1.5, 3.0]))
    2.0
    """
    actual, expected = _pair(actual, expected)
    return float((actual - expected).abs().max()) if actual.numel() else 0.0


def relative_l1(actual: Tensor, expected: Tensor) -> float:
    """Relative L1 error, ``sum |x - y| / sum |y|``: SageAttention's (arXiv:2410.02367). Zero for zeros met exactly.

    >>> relative_l1(torch.tensor([3.0, 3.0]), torch.tensor([3.0, 5.0]))
    0.25
    """
    actual, expected = _pair(actual, expected)
    return _ratio(float((actual - expected).abs().sum()), float(expected.abs().sum()))


def max_relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest relative difference of an element, ``max |x - y| / |y|``; infinite where y is 0 and x is not.

    >>> max_relative_error(torch.tensor([1.0, 5.0, 0.0]), torch.tensor([2.0, 4.0, 0.0]))
    0.5
    """
    actual, expected = _pair(actual, expected)
    ratios = torch.where(actual == expected, 0.0, (actual - expected).abs() / expected.abs())
    return float(ratios.max()) if ratios.numel() else 0.0


def calc_diff(actual: Tensor, expected: Tensor) -> float:
    """DeepGEMM's ``calc_diff`` (``testing/numeric.py``), ``1 - 2 <x, y> / (|x|^2 + |y|^2)``; 0 if both are zero.

    It equals ``|x - y|^2 / (|x|^2 + |y|^2)``, which is how it is computed: the form above loses everything under 1e-16.

    >>> round(calc_diff(torch.tensor([1.0, 1.0]), torch.tensor([1.0, 0.0])), 3)
    0.333
    """
    actual, expected = _pair(actual, expected)
    return _ratio(_norm(actual - expected) ** 2, _norm(actual) ** 2 + _norm(expected) ** 2)


def lse_error(actual_lse: Tensor, expected_lse: Tensor) -> float:
    """Largest absolute difference over the rows whose expected lse is finite.

    A row without a visible key has lse -inf: both must agree on it. Infinite where one lse is infinite and the other is
    not the same, NaN where the actual one is NaN.

    >>> lse_error(torch.tensor([1.0, -torch.inf]), torch.tensor([1.5, -torch.inf]))
    0.5
    >>> lse_error(torch.tensor([1.0, 0.0]), torch.tensor([1.5, -torch.inf]))
    inf
    """
    actual, expected = _pair(actual_lse, expected_lse)
    same_infinity = expected.isinf() & (actual == expected)
    difference = (actual - expected).abs().masked_fill(same_infinity, 0.0)
    return float(difference.max()) if difference.numel() else 0.0


def kl_divergence(actual: Tensor, expected: Tensor) -> float:
    """Kullback-Leibler divergence of attention's probabilities in nats: mean over rows of ``sum_j y_j log(y_j / x_j)``.

    Shapes (..., R, Sk). Infinite where x is 0 and y is not. Rows that see no key are left out.

    >>> round(kl_divergence(torch.tensor([[0.5, 0.5]]), torch.tensor([[1.0, 0.0]])), 4)
    0.6931
    """
    actual, expected = _pair(actual, expected)
    rows = torch.where(expected == 0, 0.0 * actual, expected * (expected / actual).log()).sum(-1)
    seen = (expected != 0).any(-1)
    return float(rows[seen].mean()) if seen.any() else 0.0


def top1_agreement(actual: Tensor, expected: Tensor) -> float:
    """Share of rows whose most probable key is the same in both; where several are, one of them will do.

    Shapes (..., R, Sk). Rows that see no key are left out; 1 if there is no other.

    >>> top1_agreement(torch.tensor([[0.6, 0.4], [0.3, 0.7]]), torch.tensor([[0.7, 0.3], [0.5, 0.5]]))
    1.0
    """
    actual, expected = _pair(actual, expected)
    seen = (expected != 0).any(-1)
    if not seen.any():
        return 1.0
    actual, expected = actual[seen], expected[seen]
    chosen = expected.gather(-1, actual.argmax(-1, keepdim=True))[..., 0]
    return float(((chosen == expected.amax(-1)) & ~actual.isnan().any(-1)).double().mean())


def by_head(metric: Callable[[Tensor, Tensor], float], actual: Tensor, expected: Tensor) -> Tensor:
    """Any metric of (B, H, ...) tensors head by head: (B, H) float64.

    >>> by_head(rmse, torch.tensor([[[1.0], [2.0]]]), torch.tensor([[[1.0], [5.0]]])).tolist()
    [[0.0, 3.0]]
    """
    actual, expected = _pair(actual, expected)
    heads = [[metric(x, y) for x, y in zip(*pair, strict=True)] for pair in zip(actual, expected, strict=True)]
    return torch.tensor(heads, dtype=torch.float64).reshape(actual.shape[:2])


def worst_head(metric: Callable[[Tensor, Tensor], float], actual: Tensor, expected: Tensor) -> tuple[int, int, float]:
    """Batch, head and value of the head with the largest value of a metric that grows with the error; NaN is largest.

    >>> worst_head(rmse, torch.tensor([[[1.0], [2.0]]]), torch.tensor([[[1.0], [5.0]]]))
    (0, 1, 3.0)
    """
    values = by_head(metric, actual, expected)
    if not values.numel():
        raise ValueError(f"there is no head in shape {tuple(actual.shape)}")
    batch, head = divmod(int(values.nan_to_num(nan=math.inf).argmax()), values.shape[1])
    return batch, head, float(values[batch, head])


def row_quantiles(
    actual: Tensor, expected: Tensor, quantiles: Sequence[float] = (0.5, 0.9, 0.99, 1.0)
) -> dict[float, float]:
    """Quantiles of the rows' relative errors, ``|x_i - y_i| / |y_i|`` over the last axis: what a mean hides.

    >>> row_quantiles(torch.tensor([[1.0], [2.0], [6.0]]), torch.tensor([[1.0], [4.0], [3.0]]), (0.5, 1.0))
    {0.5: 0.5, 1.0: 1.0}
    """
    actual, expected = _pair(actual, expected)
    error, size = ((actual - expected).norm(dim=-1).flatten(), expected.norm(dim=-1).flatten())
    ratios = torch.where(error == 0, 0.0, error / size)
    if not ratios.numel():
        return dict.fromkeys(quantiles, 0.0)
    ordered = ratios.nan_to_num(nan=math.inf).sort().values  # torch.quantile takes 2^24 elements at most
    found = {q: float(ordered[min(len(ordered) - 1, math.ceil(q * len(ordered)) - 1 if q else 0)]) for q in quantiles}
    return {q: math.nan if ratios.isnan().any() and value == math.inf else value for q, value in found.items()}


def confidence_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """Mean of independent values, and between which bounds Student's t distribution puts the true one.

    The bounds of a single value are NaN: nothing is known of its spread.

    >>> [round(x, 3) for x in confidence_interval([1.0, 2.0, 3.0])]
    [2.0, -0.484, 4.484]
    """
    from scipy.stats import t

    if not values or not 0 < confidence < 1:
        raise ValueError(f"a mean needs values and a confidence in (0, 1), got {len(values)} and {confidence}")
    data = torch.tensor(values, dtype=torch.float64)
    mean = float(data.mean())
    if len(values) == 1:
        return mean, math.nan, math.nan
    half = float(t.ppf((1 + confidence) / 2, len(values) - 1)) * float(data.std()) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def measure(actual: Tensor, expected: Tensor, actual_lse: Tensor, expected_lse: Tensor) -> dict[str, float]:
    """The five figures of a comparison: relative_error, sqnr_db, cosine, max_abs_error and lse_error.

    They are plain floats and may be infinite (``sqnr_db`` of an exact result is ``inf``) or NaN; :func:`json_safe
    <fp8attn.analysis.evaluation.json_safe>` turns those into null where JSON is written.

    Args:
        actual, expected: outputs of one shape, usually ``(B, H, S, Dv)``.
        actual_lse, expected_lse: log-sum-exp of one shape, usually ``(B, H, S)``.

    Raises:
        ValueError: shapes differ.
    """
    return {
        "relative_error": relative_error(actual, expected),
        "sqnr_db": sqnr_db(actual, expected),
        "cosine": cosine(actual, expected),
        "max_abs_error": max_abs_error(actual, expected),
        "lse_error": lse_error(actual_lse, expected_lse),
    }


def _pair(actual: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    if actual.shape != expected.shape:
        raise ValueError(
            f"actual and expected must have one shape, got {tuple(actual.shape)} and {tuple(expected.shape)}; "
            "nothing is broadcast"
        )
    return actual.detach().to(expected.device, torch.float64), expected.detach().to(torch.float64)


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))


def _ratio(error: float, reference: float) -> float:
    if reference == 0:
        return error if error == 0 or math.isnan(error) else math.inf
    return error / reference
