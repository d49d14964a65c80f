r"""Where an error comes from: q, k, v, the softmax weights p, the accumulator, the output's cast.

Attention is run in float64 with any of the four roundings on or off, by the numerical contract's rules; what a backend
returns beyond that is its accumulator's error, and what its output's dtype does to that is the cast's. So the error is
a sum of steps, each of which switches one cause more on:

    total = [q] + [k after q] + [v after q, k] + [p after these] + [accumulator] + [cast]

exactly, and a cause's *share* is <its step, total> / |total|^2: shares sum to 1. What a cause does alone, and what is
left without it, need no order; squares of independent errors add up, so that what total^2 exceeds the sum of squares
alone by (or falls short of) is their *interaction*.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fp8attn.formats import Format, get_format
from fp8attn.ops import attention_quantized, quantize
from fp8attn.recipe import Recipe
from fp8attn.scaling import ceil_pow2
from fp8attn.transforms import Smoothing

from .exact import exact_attention, exact_logits, exact_probabilities
from .preparation import fit_smoothing, rotated, smoothed

__all__ = ["CAUSES", "CauseSplit", "ablations", "split_by_cause"]

CAUSES = ("q", "k", "v", "p", "accumulator", "cast")
"""The order in which they are switched on."""

_ROUNDED = frozenset(CAUSES[:4])
_TILE_KEYS = 128  # the contract's, at whose ends the running maximum moves
_P_EXPONENT = 8  # weights are rounded in (0, 2^8]
_FIT_ROWS = 64
_LOGITS = 2**22  # of float64 in memory at a time


@dataclass(frozen=True)
class CauseSplit:
    """Relative Frobenius errors of attention's output, |error| / |exact|, by cause.

    Attributes:
        total: with all causes, as a caller sees it.
        alone: with this cause only.
        without: with all but this one.
        share: of total^2, with the causes switched on one after the other; they sum to 1 (0 if there is no error).
        interaction: total^2 - sum of alone^2, as a share of total^2.
    """

    total: float
    alone: dict[str, float]
    without: dict[str, float]
    share: dict[str, float]
    interaction: float


def split_by_cause(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    recipe: str | Recipe = "default",
    *,
    backend: str = "auto",
    dtype: torch.dtype | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    **options: Any,
) -> CauseSplit:
    """How much of the error of a recipe on q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv) comes from what.

    The recipe's statistics are fitted here, over all tokens, and quantizing is given the same.

    Args:
        backend: whose accumulator is meant.
        dtype: of the output, q's if None.
        scale, sinks, options: those of :func:`~fp8attn.analysis.exact_attention`.

    >>> q, k, v = (torch.randn(1, 2, 64, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    >>> split = split_by_cause(q, k, v, "per_tensor", dtype=torch.bfloat16)
    >>> round(sum(split.share.values()), 9), split.alone["v"] > split.alone["cast"] > split.alone["accumulator"]
    (1.0, True)
    """
    recipe, dtype = Recipe.resolve(recipe), dtype or q.dtype
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    exact, _ = exact_attention(q, k, v, scale=scale, sinks=sinks, **options)
    if not exact.numel():
        nothing = dict.fromkeys(CAUSES, 0.0)
        return CauseSplit(0.0, nothing, nothing, nothing, 0.0)

    rows = slice(0, None, max(1, q.shape[2] // _FIT_ROWS))
    weights = exact_probabilities(q, k, rows=rows, scale=scale, sinks=sinks, **options)
    smoothing = fit_smoothing(q, k, v, recipe, weights, rows)
    # float32, whose bits every input has, so that codes are of what exact attention was run on
    qkv = quantize(q.float(), k.float(), v.float(), recipe=recipe, smoothing=smoothing)
    out = attention_quantized(qkv, **options, scale=scale, sinks=sinks, backend=backend).double()

    kinds = smoothed(q, k, v, smoothing)
    plain = dict(zip("qkv", (rotated(kinds[0], recipe), rotated(kinds[1], recipe), kinds[2]), strict=True))
    codes = {name: getattr(qkv, name).dequantize().double() for name in "qkv"}
    v_scale = qkv.v.expanded_scale().double() if qkv.v.granularity.kind in ("token", "block") else None
    shift = None
    if smoothing.k_mean is not None:
        keys_mean = smoothing.k_mean.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        shift = (q.double() * keys_mean).sum(-1, keepdim=True)
    p_format = get_format(recipe.p_format)

    @cache  # ten combinations answer every question below
    def run(causes: frozenset[str]) -> Tensor:
        """Attention with these of q, k, v and p rounded."""
        q, k, v = (codes[name] if name in causes else plain[name] for name in "qkv")
        fmt = p_format if "p" in causes else None
        return _attend(q, k, v, fmt, v_scale, shift, smoothing, scale, sinks, options)

    accumulator = out - run(_ROUNDED)

    def error(causes: tuple[str, ...]) -> Tensor:
        result = run(_ROUNDED.intersection(causes))
        if "accumulator" in causes:
            result = result + accumulator
        if "cast" in causes:
            result = result.to(dtype).double()
        return result - exact

    size = exact.norm()
    total = out.to(dtype).double() - exact
    steps, before = {}, torch.zeros_like(exact)
    for number, cause in enumerate(CAUSES):
        after = total if cause == "cast" else error(CAUSES[: number + 1])
        steps[cause], before = after - before, after
    energy = float(total.square().sum())
    alone = {cause: _ratio(error((cause,)).norm(), size) for cause in CAUSES}
    ratio = _ratio(total.norm(), size)
    return CauseSplit(
        total=ratio,
        alone=alone,
        without={cause: _ratio(error(tuple(c for c in CAUSES if c != cause)).norm(), size) for cause in CAUSES},
        share={cause: float((step * total).sum()) / energy if energy else 0.0 for cause, step in steps.items()},
        interaction=1 - sum(x**2 for x in alone.values()) / ratio**2 if ratio else 0.0,
    )


def ablations(recipe: str | Recipe) -> dict[str, Recipe]:
    """The recipe with one thing changed at a time: transform, smoothing and granularity. What changes nothing is out.

    >>> sorted(ablations("fa3"))[:3]
    ['a scale a token', 'balanced', 'keys smoothed']
    """
    recipe = Recipe.resolve(recipe)
    changes: dict[str, dict[str, Any]] = {
        "not rotated": {"rotate": "none"},
        "rotated": {"rotate": "random_hadamard"},
        "not balanced": {"balance": "none"},
        "balanced": {"balance": "rms"},
        "keys not smoothed": {"smooth_k": False},
        "keys smoothed": {"smooth_k": "auto"},
        "values smoothed": {"smooth_v": True},
        "a scale a head": {"q_scale": "head", "k_scale": "head", "v_scale": "head"},
        "a scale a token": {"q_scale": "token", "k_scale": "token"},
        "values' scales by channel": {"v_scale": "channel"},
    }
    if recipe.rotate != "none":
        del changes["rotated"]
    if recipe.smooth_k:
        del changes["keys smoothed"]
    changed = {name: recipe.replace(**change) for name, change in changes.items()}
    return {name: other for name, other in changed.items() if other != recipe}


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p_format: Format | None,
    v_scale: Tensor | None,
    shift: Tensor | None,
    smoothing: Smoothing,
    scale: float,
    sinks: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """Attention of smoothed and rotated q, k and v in float64, its weights rounded to ``p_format`` (None: not at all).

    A row's logits are complete before its softmax, so that the running maximum is known for every tile at once.
    """
    group = q.shape[1] // max(1, k.shape[1])
    capped = bool(options.get("softcap"))
    if shift is not None and capped:  # as one more channel; without a softcap it moves a row's logits all alike
        q, k = torch.cat([q, shift], dim=-1), torch.cat([k, torch.ones_like(k[..., :1])], dim=-1)
    values = v.repeat_interleave(group, dim=1)
    scales = None if v_scale is None else v_scale.repeat_interleave(group, dim=1).mT  # (B, Hq, 1, Sk)
    out = v.new_empty(*q.shape[:3], v.shape[-1])
    for rows in _row_tiles(q.shape[2], q.shape[0] * q.shape[1] * k.shape[2]):
        logits = exact_logits(q, k, rows=rows, scale=scale, **options) * math.log2(math.e)
        padded = torch.nn.functional.pad(logits, (0, -logits.shape[-1] % _TILE_KEYS), value=-math.inf)
        tiles = padded.unflatten(-1, (-1, _TILE_KEYS))
        largest = tiles.amax(-1).cummax(-1).values.ceil()
        reference = largest.repeat_interleave(_TILE_KEYS, dim=-1)[..., : logits.shape[-1]]
        final = largest[..., -1:]
        if sinks is not None:
            sink = sinks.to(logits).view(1, -1, 1, 1)
            if shift is not None and not capped:
                sink = sink - scale * shift[:, :, rows]
            sink = sink * math.log2(math.e)
            final = torch.maximum(final, sink.ceil())
        seen = reference > -math.inf
        weights = torch.where(seen, torch.exp2(logits - torch.where(seen, reference, 0.0) + _P_EXPONENT), 0.0)
        weights, sums = _rounded(weights, p_format, scales)
        moved = torch.where(seen, torch.exp2(reference - torch.where(final > -math.inf, final, 0.0)), 0.0)
        total = keys_total = (sums * moved).sum(-1, keepdim=True)
        if sinks is not None:
            total = total + torch.exp2(sink - final + _P_EXPONENT)
        divisor = torch.where(total == 0, 1.0, total)
        result = (weights * moved) @ values / divisor
        if smoothing.v_mean is not None:
            mean = smoothing.v_mean.double().repeat_interleave(group, dim=1)
            result = result + mean * (keys_total / divisor)
        out[:, :, rows] = result
    return out


def _rounded(p: Tensor, fmt: Format | None, v_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rounded weights and what each adds to the row's sum.

    Where every key's value has a scale of its own, what is rounded is the weight times that scale, relative to the
    largest that a row sees in a tile; the sum takes the weights in use, and those that vanish as they are.
    """
    if fmt is None:
        return p, p
    if v_scale is None:
        rounded = fmt.round(p.float()).double()
        return rounded, rounded
    width = -p.shape[-1] % _TILE_KEYS
    tiles = torch.nn.functional.pad(torch.where(p > 0, v_scale, 0.0), (0, width)).unflatten(-1, (-1, _TILE_KEYS))
    largest = ceil_pow2(tiles.amax(-1).clamp(min=torch.finfo(torch.float32).tiny).float()).double()
    relative = v_scale / largest.repeat_interleave(_TILE_KEYS, dim=-1)[..., : p.shape[-1]]
    relative = relative.clamp(torch.finfo(torch.float32).tiny, 1.0)
    product = p * relative
    rounded = fmt.round(product.float()).double() / relative
    return rounded, torch.where(product < fmt.smallest_normal, p, rounded)


def _row_tiles(seqlen_q: int, logits_per_row: int) -> Iterator[slice]:
    size = max(1, _LOGITS // max(1, logits_per_row))
    for first in range(0, seqlen_q, size):
        yield slice(first, min(first + size, seqlen_q))


def _ratio(error: Tensor, size: Tensor) -> float:
    return float(error / size) if size > 0 else (0.0 if error == 0 else math.inf)
