"""What a recipe does before it rounds, in float64: the same values as the quantizer's, and nothing lost yet."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8attn.recipe import Recipe
from fp8attn.transforms import Smoothing, balance_factors, channel_mean, make_transform, mean_out_helps

__all__ = ["fit_smoothing", "rotated", "smoothed"]


def fit_smoothing(q: Tensor, k: Tensor, v: Tensor, recipe: Recipe, weights: Tensor, rows: slice) -> Smoothing:
    """The statistics that the recipe asks for, over all tokens, finite or not: the quantizer's wherever it uses all.

    (The quantizer leaves out what no query sees, and takes the balance of every n-th query where there are thousands.)

    Args:
        weights: (B, Hq, R, Sk), the attention probabilities of the queries ``rows``: ``smooth_k="auto"`` decides by
            them.

    >>> q, k, v = (torch.ones(1, 1, 4, 2) * x for x in (1.0, 4.0, 2.0))
    >>> smoothing = fit_smoothing(q, k, v, Recipe(smooth_k=False), torch.ones(1, 1, 4, 4) / 4, slice(None))
    >>> smoothing.k_mean, smoothing.balance.flatten().tolist()
    (None, [2.0, 2.0])
    """
    k_mean = balance = None
    if recipe.smooth_k:
        k_mean = channel_mean(k)
        if recipe.smooth_k == "auto":
            rotate, balanced = recipe.rotate != "none", recipe.balance == "rms"
            helps = mean_out_helps(q[:, :, rows], k, weights, rotated=rotate, balanced=balanced, q=q)
            k_mean = torch.where(helps[:, :, None, None], k_mean, 0.0)
    if recipe.balance == "rms":
        balance = balance_factors(q, k if k_mean is None else k - k_mean)
    return Smoothing(k_mean=k_mean, v_mean=channel_mean(v) if recipe.smooth_v else None, balance=balance)


def smoothed(q: Tensor, k: Tensor, v: Tensor, smoothing: Smoothing) -> tuple[Tensor, Tensor, Tensor]:
    """q b, (k - c) / b and v - mean v, float64."""
    q, k, v = q.double(), k.double(), v.double()
    if smoothing.k_mean is not None:
        k = k - smoothing.k_mean
    if smoothing.balance is not None:
        balance = smoothing.balance.double()
        q, k = q * balance.repeat_interleave(q.shape[1] // k.shape[1], dim=1), k / balance
    return q, k, v if smoothing.v_mean is None else v - smoothing.v_mean


def rotated(x: Tensor, recipe: Recipe) -> Tensor:
    """x R with the recipe's matrix."""
    return x if recipe.rotate == "none" else make_transform(recipe.rotate, x.shape[-1], seed=recipe.seed).apply(x)
