r"""What FP8 will cost, in closed form, before anything is quantized.

A float format rounds x to a step that depends on x's power of two alone, so its error has variance step^2 / 12, known
for every element: ``Format.step`` (INT8's step is the same everywhere). With scale s and f the format's step,

    nu(x) = (s f(x / s))^2 / 12        and 0 for a group's largest magnitude where the scale is FP32, which is exact.

Errors of different elements are taken for independent, of each other and of the data. A logit S = q . k is then off by

    Var S = sum_i nu(q_i) k_i^2 + q_i^2 nu(k_i) + nu(q_i) nu(k_i)                                                  (1)

What lies within half a step of 0 or of the exact largest becomes that and is off by the distance.

A random rotation makes of any row numbers of variance |q|^2 / D that are normal if no channel stands out (QuIP#,
arXiv:2402.04396, lemma 3.1). The three largest channels are not left to that: a Hadamard matrix turns them into
(+-a +- b +- c) / sqrt(D), each sign as often as the other, and the rest is normal around these. Order statistics give
the largest of a group, and with it the scale; nu becomes its mean over that distribution, and

    Var S = (1 + c) (nu_q |k|^2 + |q|^2 nu_k) + D nu_q nu_k                                                       (2)

with c = 0 where channels of queries, or of keys, are not correlated. Where both are, as the two of a rotary pair that
hardly turns, entries of q that a rotation makes large meet entries of k that it makes large, or small. A Hadamard
matrix with random signs gives c = 2 sum_{a != b} Q_ab K_ab / (tr Q tr K) to the products of squares, Q and K being the
second moments of a head's queries and keys; a Haar matrix the same with a = b.

Smoothing and balance act before: (1) and (2) are of q b and (k - c) / b. With nu proportional to x^2 these are the
2 e^2 sum_i q_i^2 k_i^2, 2 e^2 |q|^2 |k|^2 / D and, averaged over balanced rows, 2 e^2 (sum_i a_i)^2 / D with a_i =
rms(q_i) rms(k_i): so a rotation helps if outliers of q and k share channels and hurts if they do not, and behind a
balance it never loses (Cauchy-Schwarz).

The softmax turns errors of logits, weights and values into the output's. With weights p_j and output o of a row,

    |do|^2 = sum_j p_j^2 (sm^2 Var S_j + nu(P_j) / P_j^2) |v_j - o|^2 + p_j^2 sum_c nu(v_jc)                        (3)

to first order: a mean over 1 / sum_j p_j^2 keys, the *effective number of keys*, which is what averages errors out.

Where it does not hold, ``Prediction.notes`` says so: where so few channels, elements or different rows decide that one
draw is no average, and where errors of logits are too large for a softmax that is linear in them. Of (3) that leaves
errors of q shared by all keys of a row, where keys and values are alike, so that it is rougher than (1) and (2).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8attn.formats import Format, get_format
from fp8attn.recipe import Recipe
from fp8attn.scaling import Granularity, ceil_pow2
from fp8attn.transforms import make_transform

from .exact import exact_logits, exact_probabilities
from .preparation import fit_smoothing, smoothed

__all__ = ["Prediction", "incoherence_bound", "predict", "rank"]

_NODES = 6  # of the largest magnitude's distribution, at equal probabilities
# Where notes begin. Sums of that few terms are no averages, which the tests show family by family.
_MANY = 48  # elements
_CHANNELS = {True: 2.5, False: 16.0}  # of matrices of +-1 with the three largest turned exactly, and of others
_ALIKE = 0.9
_LINEAR = 0.5  # an error of logits up to which exp(x) is 1 + x well enough
_HADAMARD = ("hadamard", "random_hadamard", "block_hadamard")  # matrices of +-1, up to a factor
_SIGNS = ((1.0, 1.0, 1.0), (1.0, 1.0, -1.0), (1.0, -1.0, 1.0), (1.0, -1.0, -1.0))  # of three channels, up to one sign


@dataclass(frozen=True)
class Prediction:
    """What a recipe will cost on given queries, keys and values.

    Attributes:
        logit_error: (B, Hq) rms error of the logits that are visible, after the softmax scale.
        value_error: relative Frobenius error of the quantized values.
        output_error: relative Frobenius error of attention's output.
        effective_keys: (B, Hq) mean over the rows of 1 / sum_j p_j^2.
        notes: where an assumption does not hold.
    """

    logit_error: Tensor
    value_error: float
    output_error: float
    effective_keys: Tensor
    notes: tuple[str, ...] = ()


def predict(
    q: Tensor, k: Tensor, v: Tensor, recipe: str | Recipe = "default", *, max_rows: int = 512, **options: Any
) -> Prediction:
    """The error that a recipe will have on q (B, Hq, Sq, D), k (B, Hkv, Sk, D) and v (B, Hkv, Sk, Dv).

    Nothing is rotated, quantized or run in FP8; the exact logits of at most ``max_rows`` queries a head, evenly spaced,
    tell which errors matter.

    Args:
        recipe: a preset's name or a ``Recipe``.
        max_rows: 512 know an rms to a few percent.
        options: those of :func:`~fp8attn.analysis.exact_attention`: masks, ``scale``, ``softcap``, ``sinks``.

    Raises:
        ValueError: shapes or options do not fit, or ``max_rows`` is below 1.

    >>> q, k, v = (torch.randn(1, 2, 256, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    >>> prediction = predict(q, k, v, "per_tensor")
    >>> 0.02 < prediction.output_error < 0.06, prediction.logit_error.shape
    (True, torch.Size([1, 2]))
    """
    if max_rows < 1:
        raise ValueError(f"max_rows must be at least 1, got {max_rows}")
    recipe = Recipe.resolve(recipe)
    batch, num_q_heads, seqlen_q, head_dim = q.shape
    if not q.numel() or not k.numel():  # no logits, no errors
        nothing = torch.zeros(batch, num_q_heads, dtype=torch.float64, device=q.device)
        return Prediction(nothing, 0.0, 0.0, nothing)
    group = num_q_heads // max(1, k.shape[1])
    scale = options.pop("scale", None)
    scale = head_dim**-0.5 if scale is None else float(scale)
    rows = slice(0, seqlen_q, max(1, -(-seqlen_q // max_rows)))
    logits = exact_logits(q, k, rows=rows, scale=scale, **{n: x for n, x in options.items() if n != "sinks"})
    weights = exact_probabilities(q, k, rows=rows, scale=scale, **options)
    slope: Tensor | float = 1.0  # of the softcap
    if softcap := options.get("softcap"):
        slope = 1 - (exact_logits(q, k, rows=rows, scale=scale, softcap=softcap) / softcap).square()

    queries, keys, values = smoothed(q, k, v, fit_smoothing(q, k, v, recipe, weights, rows))
    v = v.double()
    spread = _spread(recipe.rotate, head_dim)
    q_energy, q_noise = _energy_and_noise(queries, spread, recipe.q_format, recipe.q_scale, recipe)
    k_energy, k_noise = _energy_and_noise(keys, spread, recipe.k_format, recipe.k_scale, recipe)
    v_noise = _noise(values, get_format(recipe.v_format), recipe.v_scale, recipe.scale_mode).sum(-1)

    squares = torch.zeros(2, dtype=torch.float64, device=q.device)  # of the output's error, of the output
    logit_error = torch.zeros(batch, num_q_heads, dtype=torch.float64, device=q.device)
    effective = torch.zeros_like(logit_error)
    p_format = get_format(recipe.p_format)
    for b in range(batch):
        for h in range(num_q_heads):
            g = h // group
            qe, qn, ke, kn = q_energy[b, h, rows], q_noise[b, h, rows], k_energy[b, g], k_noise[b, g]
            variance = qn @ ke.mT + qe @ kn.mT
            if spread is not None:
                variance = variance * (1 + _met(queries[b, h], keys[b, g], spread, recipe.rotate))
            variance = (variance + (spread or 1) * qn @ kn.mT) * scale**2
            if isinstance(slope, Tensor):
                variance = variance * slope[b, h].square()
            visible = logits[b, h] > -torch.inf
            count = visible.sum().clamp(min=1)
            logit_error[b, h] = (torch.where(visible, variance, 0.0).sum() / count).sqrt()
            p = weights[b, h]
            out = p @ v[b, g]
            # |v_j - o|^2 without a tensor of rows x keys x channels
            apart = (v[b, g].square().sum(-1) - 2 * out @ v[b, g].mT + out.square().sum(-1, keepdim=True)).clamp(min=0)
            error = (p.square() * variance + _weight_noise(p, p_format)) * apart + p.square() * v_noise[b, g]
            squares[0] += error.sum()
            squares[1] += out.square().sum()
            mass = p.square().sum(-1)
            seen = mass > 0
            effective[b, h] = (1 / mass[seen]).mean() if seen.any() else 0.0
    return Prediction(
        logit_error,
        _root(v_noise.sum(), v.square().sum()),
        _root(squares[0], squares[1]),
        effective,
        tuple(_notes(queries, keys, spread, recipe, logit_error)),
    )


def rank(
    q: Tensor, k: Tensor, v: Tensor, recipes: Mapping[str, Recipe], **options: Any
) -> list[tuple[str, Prediction]]:
    """Predictions of several recipes, the one whose output is expected to be best first.

    >>> from fp8attn.recipe import PRESETS
    >>> q, k, v = (torch.randn(1, 2, 64, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    >>> [name for name, _ in rank(q, k, v, {name: PRESETS[name] for name in ("per_tensor", "bf16")})]
    ['bf16', 'per_tensor']
    """
    predictions = [(name, predict(q, k, v, recipe, **options)) for name, recipe in recipes.items()]
    return sorted(predictions, key=lambda pair: pair[1].output_error)


def incoherence_bound(dim: int, probability: float = 0.99) -> float:
    """What the incoherence of a randomly rotated vector stays under with at least this probability.

    From P(max_i |x_i| > t |x| / sqrt(D)) <= 2 D exp(-t^2 / 2): t = sqrt(2 log(2 D / (1 - probability))) (QuIP#,
    arXiv:2402.04396, lemma 3.1; :func:`fp8attn.transforms.incoherence` measures t). A union bound: what is seen is
    about 15% less.

    >>> [round(incoherence_bound(dim), 2) for dim in (64, 128, 256)]
    [4.35, 4.51, 4.66]
    """
    if dim < 1 or not 0 <= probability < 1:
        raise ValueError(f"dim must be at least 1 and probability in [0, 1), got {dim} and {probability}")
    return math.sqrt(2 * math.log(2 * dim / (1 - probability)))


# ---- Errors of elements ----------------------------------------------------------------------------------------------


def _spread(rotate: str, head_dim: int) -> int | None:
    """Over how many channels a rotation spreads each; None if over none."""
    if rotate in ("none", "sign_flip", "permutation"):
        return None
    if rotate == "block_hadamard":
        blocks = make_transform(rotate, head_dim).blocks  # type: ignore[attr-defined]
        return blocks[0].dim
    return head_dim


def _met(queries: Tensor, keys: Tensor, spread: int, rotate: str) -> Tensor:
    """c of (2): how much large entries of rotated queries (S, D) meet large entries of rotated keys."""
    if not queries.shape[0] or not keys.shape[0]:
        return queries.new_zeros(())
    moments = [x.mT @ x / x.square().sum().clamp(min=1e-300) for x in (queries, keys)]
    together = moments[0] * moments[1]
    if rotate in _HADAMARD:  # an entry of +-1 squared is 1: channels by themselves are spread evenly
        together = together - torch.diag(together.diagonal())
    blocks = torch.arange(together.shape[0], device=together.device) // spread
    return 2 * torch.where(blocks[:, None] == blocks, together, 0.0).sum()


def _notes(queries: Tensor, keys: Tensor, spread: int | None, recipe: Recipe, logit_error: Tensor) -> Iterator[str]:
    """Which assumptions of the module's text smoothed and balanced queries and keys do not meet."""
    if not queries.numel() or not keys.numel():
        return
    if logit_error.max() > _LINEAR:
        yield (
            f"logits are off by {logit_error.max():.2g}, more than {_LINEAR}: the output's error is more than first "
            "order and this prediction of it a rough one"
        )
    for name, x in (("queries", queries), ("keys", keys)):
        elements = float(_effective(x.square().flatten()))
        if elements < _MANY:
            yield f"{elements:.0f} elements hold the energy of all {name}: too few for an average"
        rows = x[0, 0].new_zeros(()) if spread is None else _alikeness(x).max()
        if rows > _ALIKE:
            yield f"{rows:.0%} of a head's {name} is in their mean: a rotation draws one error for all of them"
    if spread is None:
        return
    if recipe.rotate in ("hadamard", "dct"):
        yield f"rotate={recipe.rotate!r} has no random signs: rows that it is aligned with do not become normal"
    group = queries.shape[1] // keys.shape[1]
    shares = queries.square().mean((0, 2)).sqrt() * keys.square().mean((0, 2)).sqrt().repeat_interleave(group, dim=0)
    channels, needed = float(_effective(shares).min()), _CHANNELS[recipe.rotate in _HADAMARD]
    if channels < needed:
        yield f"{channels:.1f} channels hold a head's logits: too few for a rotation to make rows normal"


def _effective(shares: Tensor) -> Tensor:
    """(sum a)^2 / sum a^2 over the last axis: how many of them there are, if those that matter are alike."""
    squares = shares.square().sum(-1)
    return torch.where(squares > 0, shares.sum(-1).square() / squares, shares.shape[-1])


def _alikeness(x: Tensor) -> Tensor:
    """|mean row|^2 / mean |row|^2, (B, H)."""
    energy = x.square().sum(-1).mean(-1)
    return torch.where(energy > 0, x.mean(2).square().sum(-1) / energy, 0.0)


def _energy_and_noise(
    x: Tensor, spread: int | None, format: str, granularity: str, recipe: Recipe
) -> tuple[Tensor, Tensor]:
    """Of (B, H, S, D): squares and error variances (B, H, S, D); or, where a rotation spreads n channels each, the sum
    of squares over the n and the error variance of one of them, (B, H, S, D / n)."""
    fmt = get_format(format)
    if spread is None:
        return x.square(), _noise(x, fmt, granularity, recipe.scale_mode)
    blocks = x.unflatten(-1, (-1, spread))
    energy = blocks.square().sum(-1)
    turned = recipe.rotate in _HADAMARD and spread > 3
    # (B, H, S, m, 3); of a matrix with other entries nothing of the kind is known
    largest = blocks.abs().topk(3, dim=-1).values if turned else blocks.new_zeros(*energy.shape, 3)
    rest = (energy - largest.square().sum(-1)).clamp(min=0)
    centers = (largest @ largest.new_tensor(_SIGNS).mT).abs()
    rotated = _Rotated(spread, centers / math.sqrt(spread), (rest / spread).sqrt())
    return energy, _rotated_noise(rotated, fmt, Granularity.parse(granularity), recipe.scale_mode)


class _Rotated(NamedTuple):
    """How the n entries of each rotated block are distributed: normal around any center, or its negative."""

    n: int
    centers: Tensor  # (B, H, S, m, 4), not negative
    deviation: Tensor  # (B, H, S, m)

    def within(self, limit: Tensor) -> Tensor:
        """P(|y| < limit); the limit's axes are (B, H, S, m) or more after these."""
        more = (1,) * (limit.dim() - self.deviation.dim())
        unit = (self.deviation * math.sqrt(2)).clamp(min=torch.finfo(torch.float64).tiny)
        shares = [
            torch.special.erf((limit - sign * center.view(*center.shape, *more)) / unit.view(*unit.shape, *more))
            for center in self.centers.unbind(-1)
            for sign in (1, -1)
        ]
        return torch.stack(shares).mean(0)

    def square_about(self, point: Tensor | float, low: Tensor, high: Tensor) -> Tensor:
        """E[(|y| - point)^2; low < |y| < high], all (B, H, S, m)."""
        deviation = self.deviation.clamp(min=1e-30)
        total = torch.zeros_like(deviation)
        for center in (sign * center for center in self.centers.unbind(-1) for sign in (1, -1)):
            start, end = (low - center) / deviation, (high - center) / deviation
            share = (torch.special.erf(end / math.sqrt(2)) - torch.special.erf(start / math.sqrt(2))) / 2
            at_start, at_end = (torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi) for z in (start, end))
            offset = center - point
            total += offset.square() * share + 2 * offset * deviation * (at_start - at_end)
            total += deviation.square() * (share + start * at_start - end * at_end)
        return total / self.centers.shape[-1]


def _noise(x: Tensor, fmt: Format, granularity: str, scale_mode: str) -> Tensor:
    """nu of every element, with the scales that the quantizer will choose."""
    magnitudes = x.abs()
    if not fmt.scaled:
        return fmt.step(magnitudes).square() / 12
    groups = Granularity.parse(granularity)
    amax = groups.amax(magnitudes)
    scale = groups.expand(_scale(amax, fmt, scale_mode), x.shape[-2])
    steps = fmt.step(magnitudes / scale) * scale
    noise = torch.where(magnitudes < steps / 2, magnitudes.square(), steps.square() / 12)
    if scale_mode == "fp32":
        below = groups.expand(amax, x.shape[-2]) - magnitudes
        noise = torch.where(below < _top_step(fmt) * scale / 2, below.square(), noise)
    return noise


def _scale(amax: Tensor, fmt: Format, scale_mode: str) -> Tensor:
    scale = torch.where(amax > 0, amax / fmt.max, 1.0).clamp(min=torch.finfo(torch.float32).tiny)
    return ceil_pow2(scale.float()).double() if scale_mode == "pow2" else scale


def _rotated_noise(rotated: _Rotated, fmt: Format, groups: Granularity, scale_mode: str) -> Tensor:
    """Mean nu of every block's entries (B, H, S, m), averaged over what their group's largest is."""
    deviation = rotated.deviation
    steps, bounds = _binades(fmt, deviation.device)
    if not fmt.scaled:
        anything = torch.full_like(deviation, float(bounds[-1]))
        return _mean_noise(rotated, steps, bounds, torch.ones_like(deviation), anything, 0.0)
    members = rotated.n * deviation.shape[-1] * _tokens(groups, deviation.shape)
    noise = torch.zeros_like(deviation)
    for node in range(_NODES):
        amax = _largest(rotated, groups, (node + 0.5) / _NODES)
        scale = _scale(amax, fmt, scale_mode)
        unit = groups.expand(scale, deviation.shape[-2]).expand_as(deviation)
        limit = groups.expand(amax, deviation.shape[-2]).expand_as(deviation)
        noise += _mean_noise(rotated, steps, bounds, unit, limit, _top_step(fmt) if scale_mode == "fp32" else 0.0)
    # With an FP32 scale the largest of a group is exact, and the others lie below it.
    return noise / _NODES * (1 - 1 / members if scale_mode == "fp32" else 1)


def _mean_noise(
    rotated: _Rotated, steps: Tensor, bounds: Tensor, unit: Tensor, limit: Tensor, top_step: float
) -> Tensor:
    """E[nu(y)] where |y| is known to lie below ``limit``, which is exact if ``top_step`` is not 0.

    ``steps``, ``bounds`` and ``top_step`` are in ``unit``.
    """
    low = torch.minimum(steps[0] / 2 * unit, limit)  # below it y becomes 0
    high = torch.maximum(limit - top_step / 2 * unit, low)  # above it the limit
    between = (bounds * unit[..., None]).clamp(low[..., None], high[..., None])
    squares = (rotated.within(between).diff(dim=-1) * steps.square()).sum(-1) * unit.square() / 12
    squares += rotated.square_about(0.0, torch.zeros_like(low), low) + rotated.square_about(limit, high, limit)
    return squares / rotated.within(limit).clamp(min=1e-300)


def _top_step(fmt: Format) -> float:
    return float(fmt.step(torch.tensor(fmt.max)))


def _tokens(groups: Granularity, shape: torch.Size) -> int:
    return {"token": 1, "block": min(groups.size, shape[2]), "head": shape[2], "tensor": shape[:3].numel()}[groups.kind]


def _largest(rotated: _Rotated, groups: Granularity, probability: float) -> Tensor:
    """The quantile of the largest magnitude of every group, in the scale's shape: of prod_rows P(|y| < t)^n."""
    high = groups.amax((rotated.centers.amax(-1) + rotated.deviation * 12).amax(-1, keepdim=True))
    low = high * 1e-3
    target = math.log(probability)
    for _ in range(16):  # to 2^-16 of the largest there can be
        middle = (low + high) / 2
        at = groups.expand(middle, rotated.deviation.shape[-2]).expand_as(rotated.deviation)
        logs = rotated.n * torch.log(rotated.within(at).clamp(min=1e-300)).sum(-1, keepdim=True)
        below = _sums(groups, logs) < target
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2


def _sums(groups: Granularity, per_token: Tensor) -> Tensor:
    """Sum over each group of (B, H, S, 1), in the scale's shape."""
    if groups.kind == "token":
        return per_token
    if groups.kind == "block":
        size = min(groups.size, per_token.shape[2])
        padded = torch.nn.functional.pad(per_token, (0, 0, 0, -per_token.shape[2] % size))
        return padded.unflatten(2, (-1, size)).sum(3)
    return per_token.sum(2, keepdim=True) if groups.kind == "head" else per_token.sum().reshape(1, 1, 1, 1)


def _binades(fmt: Format, device: torch.device) -> tuple[Tensor, Tensor]:
    """Steps of a format and where each begins and ends: (n,) and (n + 1,), from 0 on."""
    if fmt.is_integer:
        edges = [0.0, fmt.max]
    else:
        top = math.frexp(fmt.max)[1]
        edges = [0.0, *(2.0**e for e in range(max(fmt.min_exponent, -60) + 1, top)), fmt.max]
    bounds = torch.tensor(edges, dtype=torch.float64, device=device)
    return fmt.step((bounds[:-1] + bounds[1:]) / 2), bounds


def _weight_noise(p: Tensor, fmt: Format) -> Tensor:
    """Error variance of rounded softmax weights (R, Sk), which are scaled so that the largest is in (2^7, 2^8]."""
    largest = p.amax(-1, keepdim=True)
    scale = torch.where(largest > 0, ceil_pow2(largest.float()).double() * 2.0**-8, 1.0)
    return torch.where(p > 0, (fmt.step(p / scale) * scale).square() / 12, 0.0)


def _root(part: Tensor, whole: Tensor) -> float:
    return float((part / whole).sqrt()) if whole > 0 else 0.0
