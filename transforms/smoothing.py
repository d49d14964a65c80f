"""Statistics that make queries and keys easier to quantize, and the closed forms that predict how much they help.

Taking a mean key c out of K shifts all logits of a row alike, and dividing K's channels by b while multiplying Q's by b
leaves every logit unchanged: q (k - c) = q k - q c and (q b)(k / b) = q k.

Shapes: q (B, Hq, Sq, D), k (B, Hkv, Sk, D) with Hq a multiple of Hkv, query head h reading kv head h // (Hq / Hkv).
Statistics are per sequence and kv head, (B, Hkv, 1, D) in float32, over the tokens that ``valid``, (B, S) or (B, H, S),
marks; what the other tokens hold does not matter, NaN included. A NaN or infinity in a valid token makes its channel's
statistic non-finite. Nothing here waits for the device or changes its arguments.

Rounding to a floating format has a relative error of variance e^2 (7.0e-4 for E4M3), independent of magnitude. The
error of a logit q.k of rounded q and k then has variance 2 e^2 sum_i q_i^2 k_i^2; after a random rotation, which
spreads both vectors evenly, 2 e^2 |q|^2 |k|^2 / D. Rotation helps where q and k have their large channels in common and
hurts where they do not; with balanced channels, b_i = sqrt(rms k_i / rms q_i), the second form is on average at most
both of them without balance (Cauchy-Schwarz).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Smoothing", "balance_factors", "channel_mean", "channel_rms", "logit_error_variance", "mean_out_helps"]

# Powers of two, so that b and 1 / b are both normal float32 numbers.
_BALANCE_MIN, _BALANCE_MAX = 2.0**-126, 2.0**126


@dataclass(frozen=True, eq=False)
class Smoothing:
    """Fitted statistics, to be computed once and reused; None where that kind of smoothing is off.

    ``k_mean`` (B, Hkv, 1, D), ``v_mean`` (B, Hkv, 1, Dv) and ``balance`` (B, Hkv, 1, D), in float32. The batch axis may
    be 1 for statistics that serve any sequence.
    """

    k_mean: torch.Tensor | None = None
    v_mean: torch.Tensor | None = None
    balance: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("k_mean", "v_mean", "balance"):
            value = getattr(self, name)
            if value is not None and (value.ndim != 4 or value.shape[2] != 1 or value.dtype != torch.float32):
                raise ValueError(
                    f"{name} must be float32 of shape (batch, num_kv_heads, 1, head_dim), "
                    f"got {value.dtype} of shape {tuple(value.shape)}"
                )
            if value is not None and value.device.type == "cpu" and not bool(value.isfinite().all()):
                raise ValueError(f"{name} must be finite")
        b = self.balance
        if b is not None and b.device.type == "cpu" and not bool(((b >= _BALANCE_MIN) & (b <= _BALANCE_MAX)).all()):
            raise ValueError(f"balance must lie between {_BALANCE_MIN:g} and {_BALANCE_MAX:g}")

    def to(self, device: torch.device | str) -> Smoothing:
        """The same statistics on ``device``."""
        moved = (None if t is None else t.to(device) for t in (self.k_mean, self.v_mean, self.balance))
        return Smoothing(*moved)


def channel_mean(x: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
    """Mean over the valid tokens: (B, H, S, D), valid bool -> (B, H, 1, D) float32; 0 where there are none.

    >>> x = torch.tensor([1.0, 3.0, float("nan")]).view(1, 1, 3, 1)
    >>> channel_mean(x, torch.tensor([[True, True, False]])).item()
    2.0
    """
    relative, amax, count = _relative(x, valid)
    return relative.sum(2, keepdim=True) / count * amax


def channel_rms(x: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
    """Root mean square over the valid tokens; shapes as :func:`channel_mean`."""
    relative, amax, count = _relative(x, valid)
    return (relative.square().sum(2, keepdim=True) / count).sqrt() * amax


def balance_factors(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    q_valid: torch.Tensor | None = None,
    k_valid: torch.Tensor | None = None,
) -> torch.Tensor:
    """b_i = sqrt(rms k_i / rms q_i): multiply q by it and divide k by it, and both have the same rms in every channel.

    q (B, Hq, Sq, D) is pooled over the query heads of each kv head; k (B, Hkv, Sk, D) is taken as it is, so take the
    mean key out before. Returns (B, Hkv, 1, D), positive and finite; 1 where either rms is 0 or not finite. For query
    heads use ``b.repeat_interleave(Hq // Hkv, dim=1)``.

    >>> q, k = torch.ones(1, 2, 4, 1), torch.full((1, 1, 4, 1), 9.0)
    >>> balance_factors(q, k).item()
    3.0
    """
    group = _group_size(q, k)
    # One long sequence a kv head, of all its query heads' tokens
    pooled, pooled_valid = _grouped(q, group), None
    if q_valid is not None:
        pooled_valid = _grouped(_checked_valid(q_valid, q, "q_valid").expand(*q.shape[:3], 1), group).squeeze(-1)
    q_rms, k_rms = channel_rms(pooled, pooled_valid), channel_rms(k, k_valid)
    usable = (q_rms > 0) & (k_rms > 0)  # an rms over infinity is NaN, so neither passes
    # The roots before the quotient, which then stays far from the limits of float32.
    factor = (k_rms.sqrt() / q_rms.sqrt()).clamp(_BALANCE_MIN, _BALANCE_MAX)
    return torch.where(usable, factor, 1.0)


def logit_error_variance(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    rotated: bool,
    relative_variance: float,
) -> torch.Tensor:
    """Expected squared error of the logits q.k (before the softmax scale) when q and k are rounded to a float format.

    A pair (row r, key j) has variance 2 e^2 sum_i q_ri^2 k_ji^2, or with a random rotation 2 e^2 |q_r|^2 |k_j|^2 / D.

    Args:
        q: (B, Hq, R, D), all or some of the queries.
        k: (B, Hkv, Sk, D).
        weights: (B, Hq, R, Sk), the attention probabilities: what matters to the output is the error where the weight
            is. Each head's result is the weighted average over all its pairs; NaN weights (the softmax of a fully
            masked row) count as 0. All pairs alike when None.
        rotated: whether q and k are rotated by a random orthogonal transform before rounding.
        relative_variance: e^2 of the format: 7.0e-4 for E4M3.

    Returns:
        (B, Hq) float32; 0 where all weights are 0.
    """
    group = _group_size(q, k)
    rms = _rms_error(_grouped(q.float(), group), k.float(), _grouped_weights(weights, q, k), group, rotated)
    return 2 * relative_variance * rms.square().flatten(1)


def mean_out_helps(
    q_rows: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    rotated: bool,
    balanced: bool,
    q: torch.Tensor | None = None,
    q_valid: torch.Tensor | None = None,
    k_valid: torch.Tensor | None = None,
) -> torch.Tensor:
    """Whether taking the mean key out of K lowers the expected logit error: (B, Hkv) bool, decided on the device.

    Compares :func:`logit_error_variance` for k and for k - mean, averaged over the query heads of each kv head, with
    the balance fitted anew for each if ``balanced``. Keys with a common offset are better without it. Keys of which a
    few attention sinks, far from the mean, take most of the weight are better as they are.

    Args:
        q_rows: (B, Hq, R, D), the query rows to judge by.
        k: (B, Hkv, Sk, D).
        weights: (B, Hq, R, Sk), attention probabilities of those rows. NaN counts as 0, and so does the weight of a
            key that is not valid. All valid keys alike when None.
        rotated, balanced: what else is done to q and k.
        q: (B, Hq, Sq, D), all queries, to fit the balance; ``q_rows`` if None.
        q_valid: (B, Sq) or (B, Hq, Sq), the valid tokens of ``q``. Rows of ``q_rows`` that are not valid need weight 0
            throughout.
        k_valid: (B, Sk) or (B, Hkv, Sk), the valid keys.
    """
    group = _group_size(q_rows, k)
    grouped_weights = _grouped_weights(weights, q_rows, k)
    rows, keys = q_rows.float(), k.float()
    # Padding may hold NaN, which a weight of 0 would not stop; a key set to 0 adds nothing, whatever its weight.
    if q is None and q_valid is not None:
        rows = torch.where(_checked_valid(q_valid, q_rows, "q_valid"), rows, 0.0)
    rows = _grouped(rows, group)
    if grouped_weights is not None:
        rows = torch.where((grouped_weights != 0).any(-1, keepdim=True), rows, 0.0)
    keep = None if k_valid is None else _checked_valid(k_valid, k, "k_valid")
    if keep is not None:
        keys = torch.where(keep, keys, 0.0)
    # Common factors change no comparison, and keep the errors that are compared within float32's range.
    rows, keys = rows / _amax(rows, (2, 3)), keys / _amax(keys, (2, 3))

    def error(keys: torch.Tensor) -> torch.Tensor:
        queries = rows
        if balanced:
            factor = balance_factors(q_rows if q is None else q, keys, q_valid=q_valid, k_valid=k_valid)
            queries, keys = rows * factor, keys / factor
        return _rms_error(queries, keys, grouped_weights, group, rotated)

    centered = keys - channel_mean(keys, k_valid)
    without, with_ = error(keys), error(centered if keep is None else torch.where(keep, centered, 0.0))
    # The squares are of relative values, so that comparing them neither overflows nor vanishes.
    largest = torch.maximum(without, with_).amax(2, keepdim=True)
    return (with_ / largest).square().sum(2) < (without / largest).square().sum(2)


def _rms_error(
    q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor | None, group: int, rotated: bool
) -> torch.Tensor:
    """Root of the pairs' weighted average of sum_i q_i^2 k_i^2, or of |q|^2 |k|^2 / D if rotated.

    q (B, Hkv, G * R, D), k (B, Hkv, Sk, D), weights (B, Hkv, G * R, Sk) -> (B, Hkv, G).
    """
    q_scale, k_scale = _amax(q, (2, 3)), _amax(k, (2, 3))
    q2, k2 = (q / q_scale).square(), (k / k_scale).square()
    if rotated:
        q2, k2 = q2.sum(-1, keepdim=True), k2.sum(-1, keepdim=True) / k.shape[-1]
    if weights is None:
        seen, mass = k2.sum(2, keepdim=True), torch.full(q2.shape[:3], k.shape[2], dtype=q2.dtype, device=q.device)
    else:
        # Keys are summed before channels, so that nothing of size rows x keys is made besides the weights.
        seen, mass = weights @ k2, weights.sum(-1)
    total, mass = (t.unflatten(2, (group, q.shape[2] // group)).sum(3) for t in ((q2 * seen).sum(-1), mass))
    return torch.where(mass > 0, total / mass, 0.0).sqrt() * (q_scale * k_scale).flatten(2)


def _grouped(x: torch.Tensor, group: int) -> torch.Tensor:
    """The query heads of a kv head in one axis: (B, Hq, R, n) -> (B, Hkv, G * R, n)."""
    return x.unflatten(1, (x.shape[1] // group, group)).flatten(2, 3)


def _grouped_weights(weights: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    if weights is None:
        return None
    expected = (*q.shape[:3], k.shape[2])
    if weights.shape != expected:
        raise ValueError(
            f"weights must have shape (batch, num_q_heads, rows, seqlen_k) = {expected}, got {tuple(weights.shape)}"
        )
    return _grouped(weights.float().nan_to_num(0), _group_size(q, k))


def _relative(x: torch.Tensor, valid: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | int]:
    """x over each channel's largest magnitude, with 0 for invalid tokens, that magnitude, and the number of tokens.

    Sums and squares of relative values cannot overflow, nor can squares vanish.
    """
    if x.ndim != 4:
        raise ValueError(f"x must have shape (batch, heads, seqlen, head_dim), got {tuple(x.shape)}")
    values = x.float()
    count: torch.Tensor | int = max(x.shape[2], 1)
    if valid is not None:
        keep = _checked_valid(valid, x, "valid")
        values = torch.where(keep, values, 0.0)
        count = keep.sum(2, keepdim=True).clamp(min=1)
    amax = _amax(values, (2,))
    return values / amax, amax, count


def _amax(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """The largest magnitude over ``dims``, kept as axes of 1; 1 where that is 0, so that one can divide by it."""
    if 0 in (x.shape[d] for d in dims):
        return torch.ones([1 if d in dims else n for d, n in enumerate(x.shape)], device=x.device)
    amax = x.float().abs().amax(dims, keepdim=True)
    return torch.where(amax == 0, 1.0, amax)


def _checked_valid(valid: torch.Tensor, x: torch.Tensor, name: str) -> torch.Tensor:
    """``valid`` as (B, 1 or H, S, 1), to broadcast against x (B, H, S, D)."""
    if valid.dtype != torch.bool:
        raise TypeError(f"{name} must be boolean, got {valid.dtype}")
    per_token, per_head = (x.shape[0], x.shape[2]), tuple(x.shape[:3])
    if tuple(valid.shape) not in (per_token, per_head):
        raise ValueError(
            f"{name} must have shape (batch, seqlen) = {per_token} or (batch, heads, seqlen) = {per_head}, "
            f"got {tuple(valid.shape)}"
        )
    return valid[:, None, :, None] if valid.ndim == 2 else valid[..., None]


def _group_size(q: torch.Tensor, k: torch.Tensor) -> int:
    """Query heads a kv head."""
    if q.ndim != 4 or k.ndim != 4 or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            "q and k must have shapes (batch, num_q_heads, seqlen_q, head_dim) and (batch, num_kv_heads, seqlen_k, "
            f"head_dim), got {tuple(q.shape)} and {tuple(k.shape)}"
        )
    if q.shape[1] == 0 or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"q's heads must be a positive multiple of k's, got {q.shape[1]} and {k.shape[1]}")
    return q.shape[1] // k.shape[1]
