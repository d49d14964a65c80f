"""Exact attention: the yardstick that every FP8 result is held against.

It is written from the definition of attention, in float64, and shares nothing with the kernels it judges. Queries and
keys are walked in tiles with a running maximum, so that memory grows with the sequence and never with its square.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fp8attn import QuantizedQKV

# One tile of logits is at most this many rows (query heads of one group together) by this many keys: 4 MiB in float64.
_TILE_ROWS = 512
_TILE_KEYS = 1024


def exact_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    causal_alignment: str = "top_left",
    window: Sequence[int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = True,
) -> tuple[Tensor, Tensor]:
    r"""Attention in float64, by the definition.

    For query row i of a head, over the keys j it may see::

        s_ij  = scale * q_i . k_j              then  s = softcap * tanh(s / softcap)  where a softcap is given
        s_ij += attn_mask_ij                   (additive mask)
        out_i = sum_j exp(s_ij) v_j / Z_i      Z_i = sum_j exp(s_ij) [+ exp(sink)]
        lse_i = log Z_i                        (natural logarithm)

    Args:
        query: ``(B, Hq, Sq, D)``, any floating dtype.
        key: ``(B, Hkv, Sk, D)``; ``Hq`` must be a multiple of ``Hkv`` (query head h reads kv head ``h // (Hq / Hkv)``).
        value: ``(B, Hkv, Sk, Dv)``; ``Dv`` may differ from ``D``.
        attn_mask: broadcastable to ``(B, Hq, Sq, Sk)``; boolean (True: may be seen) or floating (added to the logits,
            where -inf hides a key). It combines with ``is_causal`` and ``window``.
        is_causal: key j is visible to row i only if ``j <= p_i``, with the row's diagonal position ``p_i`` below.
        causal_alignment: ``"top_left"``: ``p_i = i``; ``"bottom_right"``: ``p_i = i + Sk - Sq``.
        window: ``(left, right)``, both inclusive: ``p_i - left <= j <= p_i + right``; -1 or None is unlimited.
        softcap: None or 0 is off.
        sinks: ``(Hq,)``, one more logit a head, which takes its share of the sum and has no value.
        scale: softmax scale; ``1 / sqrt(D)`` if None.
        enable_gqa: if False, ``Hq`` must equal ``Hkv``.

    Returns:
        ``out`` ``(B, Hq, Sq, Dv)`` and ``lse`` ``(B, Hq, Sq)``, both float64 on the query's device.
        A row that sees no key has output 0 and the sink, or -inf, as its lse.
        A key or value that a row does not see never touches that row, whatever it holds (NaN and infinity included).

    Raises:
        TypeError: an input is not a floating tensor, or the mask neither boolean nor floating.
        ValueError: shapes, devices or options do not fit; the message says which and what is accepted.

    >>> import torch
    >>> from fp8attn.analysis import exact_attention
    >>> q, k, v = (torch.ones(1, 2, 3, 4) for _ in range(3))
    >>> out, lse = exact_attention(q, k, v, is_causal=True, scale=0.0)
    >>> out.shape, lse[0, 0].exp()                          # equal weights on 1, 2 and 3 visible keys
    (torch.Size([1, 2, 3, 4]), tensor([1.0000, 2.0000, 3.0000], dtype=torch.float64))
    """
    _validate(query, key, value, attn_mask, softcap, sinks, enable_gqa)
    visibility = _visibility(query.shape[2], key.shape[2], is_causal, causal_alignment, window)
    batch, num_q_heads, seqlen_q, head_dim = query.shape
    num_kv_heads, seqlen_k, head_dim_v = key.shape[1], key.shape[2], value.shape[3]
    group = num_q_heads // num_kv_heads if num_kv_heads else 0
    scale = 1.0 / math.sqrt(head_dim) if scale is None else float(scale)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(batch, num_q_heads, seqlen_q, seqlen_k)

    out = torch.zeros(batch, num_q_heads, seqlen_q, head_dim_v, dtype=torch.float64, device=query.device)
    lse = torch.full((batch, num_q_heads, seqlen_q), -math.inf, dtype=torch.float64, device=query.device)
    rows_per_tile = max(1, _TILE_ROWS // max(1, group))
    for b in range(batch):
        for g in range(num_kv_heads):
            heads = slice(g * group, (g + 1) * group)
            keys, values = key[b, g].double(), value[b, g].double()
            sink = None if sinks is None else sinks[heads].double().view(group, 1)
            for start in range(0, seqlen_q, rows_per_tile):
                rows = slice(start, min(start + rows_per_tile, seqlen_q))
                out[b, heads, rows], lse[b, heads, rows] = _attend_rows(
                    query[b, heads, rows].double() * scale,
                    keys,
                    values,
                    None if attn_mask is None else attn_mask[b, heads, rows],
                    visibility,
                    start,
                    softcap,
                    sink,
                )
    return out, lse


def exact_attention_quantized(
    qkv: QuantizedQKV, attn_mask: Tensor | None = None, *, scale: float | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """``exact_attention`` of the values that the codes stand for: what a perfect kernel would return for them.

    The difference to ``exact_attention`` of the original tensors is the price of quantizing q, k and v; the difference
    to what a backend returns is the price of rounding the weights and of accumulating.

    Args:
        qkv: from ``fp8attn.quantize``; means that were taken out of keys and values are put back.
        options: those of ``exact_attention``.

    >>> import fp8attn
    >>> import torch
    >>> from fp8attn.analysis import exact_attention
    >>> q, k, v = (torch.randn(1, 2, 64, 32) for _ in range(3))
    >>> out, lse = exact_attention_quantized(fp8attn.quantize(q, k, v), is_causal=True)
    >>> bool((out - exact_attention(q, k, v, is_causal=True)[0]).abs().max() < 0.5)
    True
    """
    scale = 1.0 / math.sqrt(qkv.q.shape[-1]) if scale is None else float(scale)
    return exact_attention(*dequantized(qkv), attn_mask, scale=scale, **options)


def dequantized(qkv: QuantizedQKV) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in float64 whose products are what the codes stand for, means put back.

    Queries and keys stay rotated and balanced. Where a mean key was taken out they have one channel more, which adds
    what that took from every logit of a row: give ``exact_attention`` a scale.
    """
    query, key, value = (x.dequantize().double() for x in (qkv.q, qkv.k, qkv.v))
    if qkv.logit_shift is not None:
        query = torch.cat([query, qkv.logit_shift[..., None].double()], dim=-1)
        key = torch.cat([key, torch.ones_like(key[..., :1])], dim=-1)
    return query, key, value if qkv.v_mean is None else value + qkv.v_mean


def exact_logits(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    *,
    rows: slice | None = None,
    is_causal: bool = False,
    causal_alignment: str = "top_left",
    window: Sequence[int | None] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    enable_gqa: bool = True,
) -> Tensor:
    """The logits that ``exact_attention`` gives to its softmax, for some of the rows.

    Args:
        rows: which queries, all if None. ``slice(0, None, 16)`` is every 16th.
        query, key, attn_mask, is_causal, causal_alignment, window, softcap, scale, enable_gqa: as there.

    Returns:
        ``(B, Hq, R, Sk)`` float64 for R rows: this is where memory grows with the square of the sequence. -inf where a
        row does not see a key.

    >>> q, k = torch.ones(1, 1, 4, 2), torch.ones(1, 1, 4, 2)
    >>> exact_logits(q, k, rows=slice(0, None, 2), is_causal=True, scale=1.0)[0, 0].tolist()
    [[2.0, -inf, -inf, -inf], [2.0, 2.0, 2.0, -inf]]
    """
    _validate(query, key, key, attn_mask, softcap, None, enable_gqa)
    batch, num_q_heads, seqlen_q, head_dim = query.shape
    seqlen_k, group = key.shape[2], num_q_heads // max(1, key.shape[1])
    visibility = _visibility(seqlen_q, seqlen_k, is_causal, causal_alignment, window)
    rows = slice(None) if rows is None else rows
    index = torch.arange(seqlen_q, device=query.device)[rows]
    scale = 1.0 / math.sqrt(head_dim) if scale is None else float(scale)
    products = (query[:, :, rows].double() * scale) @ key.double().repeat_interleave(group, dim=1).mT
    mask = None if attn_mask is None else attn_mask.expand(batch, num_q_heads, seqlen_q, seqlen_k)[:, :, rows]
    return _finish_logits(products, mask, visibility.mask(index, torch.arange(seqlen_k, device=query.device)), softcap)


def exact_probabilities(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    *,
    rows: slice | None = None,
    sinks: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """The softmax's weights, for some of the rows: ``(B, Hq, R, Sk)`` float64.

    A row sums to 1, less what a sink takes; a row that sees no key is all zero. ``rows`` and the options are those of
    :func:`exact_logits`, ``sinks`` is that of :func:`exact_attention`.

    >>> q, k = torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2)
    >>> exact_probabilities(q, k, is_causal=True)[0, 0].tolist()
    [[1.0, 0.0], [0.5, 0.5]]
    """
    logits = exact_logits(query, key, attn_mask, rows=rows, **options)
    if sinks is not None:
        _validate(query, key, key, attn_mask, None, sinks, True)
        sink = sinks.to(logits).view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, sink], dim=-1)
    # A row of nothing but -inf is nan after the softmax; a NaN of the input stays one.
    weights = logits.softmax(-1).masked_fill((logits == -math.inf).all(-1, keepdim=True), 0.0)
    return weights if sinks is None else weights[..., :-1]


@dataclass(frozen=True)
class _Visibility:
    """Which keys a row may see: ``p + low <= j <= p + high`` with ``p = row + offset``; None is unlimited."""

    offset: int
    low: int | None
    high: int | None

    def key_range(self, first_row: int, last_row: int, seqlen_k: int) -> tuple[int, int]:
        """The keys that some row in ``first_row..last_row`` may see, as a half-open range."""
        begin = 0 if self.low is None else max(0, first_row + self.offset + self.low)
        end = seqlen_k if self.high is None else min(seqlen_k, last_row + self.offset + self.high + 1)
        return begin, end

    def mask(self, rows: Tensor, keys: Tensor) -> Tensor | None:
        """``(rows, keys)``, True where visible; None if every key is."""
        if self.low is None and self.high is None:
            return None
        distance = keys[None, :] - (rows[:, None] + self.offset)
        visible = torch.ones_like(distance, dtype=torch.bool)
        if self.low is not None:
            visible &= distance >= self.low
        if self.high is not None:
            visible &= distance <= self.high
        return visible


def _attend_rows(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    attn_mask: Tensor | None,
    visibility: _Visibility,
    first_row: int,
    softcap: float | None,
    sink: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Output ``(G, R, Dv)`` and lse ``(G, R)`` of the rows ``query`` ``(G, R, D)``, which carry the softmax scale."""
    group, num_rows, _ = query.shape
    flat = query.reshape(group * num_rows, -1)
    row_index = torch.arange(first_row, first_row + num_rows, device=query.device)
    values_finite = bool(torch.isfinite(values).all())

    largest = torch.full((group, num_rows), -math.inf, dtype=torch.float64, device=query.device)
    total = torch.zeros_like(largest)
    weighted = query.new_zeros(group, num_rows, values.shape[1])
    begin, end = visibility.key_range(first_row, first_row + num_rows - 1, keys.shape[0])
    for start in range(begin, end, _TILE_KEYS):
        tile = slice(start, min(start + _TILE_KEYS, end))
        logits = _finish_logits(
            (flat @ keys[tile].T).view(group, num_rows, -1),
            None if attn_mask is None else attn_mask[..., tile],
            visibility.mask(row_index, torch.arange(tile.start, tile.stop, device=query.device)),
            softcap,
        )

        new_largest = torch.maximum(largest, logits.amax(dim=-1))
        reference = new_largest.masked_fill(new_largest == -math.inf, 0.0)  # nothing seen yet: exp(-inf - 0) = 0
        weights = torch.exp(logits - reference[..., None])
        rescale = torch.exp(largest - reference)
        total = total * rescale + weights.sum(dim=-1)
        weighted = weighted * rescale[..., None] + _weigh(weights, logits, values[tile], values_finite)
        largest = new_largest

    if sink is not None:
        new_largest = torch.maximum(largest, sink)
        reference = new_largest.masked_fill(new_largest == -math.inf, 0.0)
        rescale = torch.exp(largest - reference)
        total = total * rescale + torch.exp(sink - reference)
        weighted = weighted * rescale[..., None]
        largest = new_largest
    empty = total == 0
    out = weighted / total.masked_fill(empty, 1.0)[..., None]
    return out, largest + torch.log(total)  # -inf + log 0 = -inf where nothing was seen


def _finish_logits(logits: Tensor, mask: Tensor | None, visible: Tensor | None, softcap: float | None) -> Tensor:
    """Scaled products ``(..., R, K)`` with soft cap and mask; -inf where a key is hidden."""
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    # Hidden keys are replaced, not added to: NaN - inf is NaN. What the position hides, no mask brings back.
    if mask is not None:
        if mask.dtype == torch.bool:
            logits = logits.masked_fill(~mask, -math.inf)
        else:
            logits = (logits + mask.double()).masked_fill(mask == -math.inf, -math.inf)
    return logits if visible is None else logits.masked_fill(~visible, -math.inf)


def _weigh(weights: Tensor, logits: Tensor, values: Tensor, values_finite: bool) -> Tensor:
    """``weights @ values`` in which a key of logit -inf contributes nothing, not even 0 * NaN."""
    group, num_rows, num_keys = weights.shape
    if values_finite:
        return (weights.view(-1, num_keys) @ values).view(group, num_rows, -1)
    seen = (logits != -math.inf).double()
    result = weights @ values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    for kind in (math.inf, -math.inf, math.nan):
        holds = values.isnan() if math.isnan(kind) else values == kind
        result = result + torch.where(seen @ holds.double() > 0, kind, 0.0)
    return result


def _validate(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
    enable_gqa: bool,
) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name} must be a floating tensor, got {got}")
        if tensor.dim() != 4:
            raise ValueError(f"{name} must be (batch, heads, sequence, head_dim), got shape {tuple(tensor.shape)}")
        if tensor.device != query.device:
            raise ValueError(f"{name} is on {tensor.device} and query on {query.device}; one device is needed")
    batch, num_q_heads, seqlen_q, head_dim = query.shape
    num_kv_heads, seqlen_k = key.shape[1:3]
    if key.shape[0] != batch or key.shape[3] != head_dim:
        raise ValueError(
            f"key must be (B, Hkv, Sk, D) with B={batch} and D={head_dim} as in query, got {tuple(key.shape)}"
        )
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"value must be (B, Hkv, Sk, Dv) with key's first three, {tuple(key.shape[:3])}, got {tuple(value.shape)}"
        )
    if num_q_heads != num_kv_heads and (num_kv_heads == 0 or num_q_heads % num_kv_heads):
        raise ValueError(f"query heads must be a multiple of kv heads, got {num_q_heads} and {num_kv_heads}")
    if num_q_heads != num_kv_heads and not enable_gqa:
        raise ValueError(f"query has {num_q_heads} heads, key {num_kv_heads}: pass enable_gqa=True to share kv heads")
    if attn_mask is not None:
        if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
            raise TypeError(f"attn_mask must be boolean or floating, got {attn_mask.dtype}")
        if attn_mask.device != query.device:
            raise ValueError(f"attn_mask is on {attn_mask.device} and query on {query.device}; one device is needed")
        full = (batch, num_q_heads, seqlen_q, seqlen_k)
        fits = attn_mask.dim() <= 4 and all(
            size in (1, want) for size, want in zip(reversed(attn_mask.shape), reversed(full), strict=False)
        )
        if not fits:
            raise ValueError(f"attn_mask must broadcast to (B, Hq, Sq, Sk) = {full}, got {tuple(attn_mask.shape)}")
    if softcap is not None and not (math.isfinite(softcap) and softcap >= 0):
        raise ValueError(f"softcap must be finite and positive (None or 0: off), got {softcap}")
    if sinks is not None and (sinks.shape != (num_q_heads,) or sinks.device != query.device):
        raise ValueError(
            f"sinks must be ({num_q_heads},) on {query.device}, one logit a query head, "
            f"got {tuple(sinks.shape)} on {sinks.device}"
        )


def _visibility(
    seqlen_q: int, seqlen_k: int, is_causal: bool, causal_alignment: str, window: Sequence[int | None] | None
) -> _Visibility:
    if causal_alignment not in ("top_left", "bottom_right"):
        raise ValueError(f"causal_alignment must be 'top_left' or 'bottom_right', got {causal_alignment!r}")
    left, right = (None, None) if window is None else _window_sides(window)
    if is_causal:
        right = 0 if right is None else min(right, 0)
    offset = seqlen_k - seqlen_q if causal_alignment == "bottom_right" else 0
    return _Visibility(offset, None if left is None else -left, right)


def _window_sides(window: Sequence[int | None]) -> tuple[int | None, int | None]:
    sides = tuple(window) if isinstance(window, Sequence) else (window,)
    if len(sides) != 2 or not all(
        side is None or (isinstance(side, int) and not isinstance(side, bool) and side >= -1) for side in sides
    ):
        raise ValueError(f"window must be (left, right), each an int >= 0, or -1 or None for unlimited, got {window!r}")
    left, right = (None if side == -1 else side for side in sides)
    return left, right
