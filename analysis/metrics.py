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
===================  ==================================  =======================  ==============================
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = [
    "METRICS",
    "calc_diff",
    "cosine",
    "lse_error",
    "max_abs_error",
    "measure",
    "relative_error",
    "rmse",
    "sqnr_db",
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
