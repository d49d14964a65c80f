"""The forward pass: online softmax over tiles of keys with FP32 accumulation (the contract's steps 3 to 5).

A row's state is two numbers and a vector: an integer reference ``m`` (the running maximum of its logits in log2 units,
rounded up), the sum ``l`` of its rounded weights and the sum ``acc`` of weights times values, both in units of
2^(m - 8). States of disjoint keys merge exactly, because every rescale is by a power of two: split keys and ring
attention are sums of states.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fp8attn.formats import Format, get_format
from fp8attn.kernels.problem import AttentionProblem
from fp8attn.kernels.reference.tensor_core import tensor_core_matmul
from fp8attn.scaling import ceil_pow2

__all__ = ["State", "attend", "attend_keys", "finish", "merge"]

LOG2E = math.log2(math.e)
P_SCALE = 256.0  # 2^8: weights are rounded in (0, 256], of which E4M3 keeps 2^-17 of the largest weight
_LARGEST_LOGIT = 1e38
_LARGEST_FACTOR = torch.finfo(torch.float32).max
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_TILE_ELEMENTS = 2**18  # logits of a tile: a few megabytes of working set, which stays in a CPU's cache


@dataclass(frozen=True)
class State:
    """Partial attention of some query rows over some keys; empty when m is -inf.

    Attributes:
        m: (..., 1) integer-valued FP32, or -inf.
        l: (..., 1) sum of the rounded weights, in units of 2^(m - 8).
        acc: (..., Dv) sum of rounded weights times value codes, in the same units.
    """

    m: torch.Tensor
    l: torch.Tensor  # noqa: E741 (the literature's name)
    acc: torch.Tensor


def merge(a: State, b: State) -> State:
    """The state of both sets of keys: associative and commutative, and an empty state is neutral."""
    m = torch.maximum(a.m, b.m)
    alpha, beta = _rescale(a.m, m), _rescale(b.m, m)
    return State(m, a.l * alpha + b.l * beta, a.acc * alpha + b.acc * beta)


def _rescale(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    # 0 for an empty old state. The difference of two -inf would be NaN; of two NaN it should be.
    return torch.exp2(old - torch.where(new == -torch.inf, 0.0, new))


def attend(
    problem: AttentionProblem, *, tile_q: int | None = None, tile_k: int = 128
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every query over all its keys.

    Returns:
        out (B, Hq, Sq, Dv) and lse (B, Hq, Sq), both FP32.
    """
    qkv = problem.qkv
    batch, num_q_heads, seqlen_q, _ = qkv.q.shape
    out = torch.empty(batch, num_q_heads, seqlen_q, qkv.v.shape[-1], dtype=torch.float32, device=qkv.q.device)
    lse = torch.empty(batch, num_q_heads, seqlen_q, dtype=torch.float32, device=qkv.q.device)
    if tile_q is None:
        tile_q = max(16, _TILE_ELEMENTS // max(1, num_q_heads * tile_k))
    for b in range(batch if num_q_heads else 0):
        decoded = _decode_kv(problem, b)
        for rows in _tiles(0, seqlen_q, tile_q):
            first, end = problem.masking.key_range(rows)
            state = _attend_rows(problem, b, rows, range(first, end), tile_k, decoded)
            out[b, :, rows], lse[b, :, rows] = finish(problem, state, b, rows)
    return out, lse


def attend_keys(problem: AttentionProblem, keys: range, *, tile_k: int = 128) -> State:
    """The state of all queries over some of the keys, (B, Hq, Sq, ...): one part of a split."""
    rows = slice(0, problem.masking.seqlen_q)
    states = [
        _attend_rows(problem, b, rows, keys, tile_k, _decode_kv(problem, b)) for b in range(problem.qkv.q.shape[0])
    ]
    return State(*(torch.stack([getattr(s, name) for s in states]) for name in ("m", "l", "acc")))


def finish(
    problem: AttentionProblem, state: State, batch: int | slice = slice(None), rows: slice = slice(None)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and natural-log lse from the state of all keys: sinks, value scales and means come in here, once.

    ``batch`` and ``rows`` say which part of the problem the state is of; all of it by default.
    """
    qkv = problem.qkv
    m, l, acc = state.m, state.l, state.acc  # noqa: E741
    shift = None
    if qkv.logit_shift is not None and problem.softcap is None:  # with a softcap the shift is in the logits already
        shift = problem.scale * qkv.logit_shift[batch][..., rows, None]
    l_keys = l
    if problem.sinks is not None:
        sink = problem.sinks[:, None, None].expand_as(m)
        sink2 = ((sink if shift is None else sink - shift) * LOG2E).clamp(-_LARGEST_LOGIT, _LARGEST_LOGIT)
        covered = torch.maximum(m, sink2.ceil())
        alpha = _rescale(m, covered)
        m, l_keys, acc = covered, l * alpha, acc * alpha
        l = l_keys + P_SCALE * torch.exp2(sink2 - m)  # noqa: E741
    weights_sum = torch.where(l == 0, 1.0, l)  # no visible key and no sink: 0 / 1
    out = acc / weights_sum
    if qkv.v.granularity.kind not in ("token", "block"):  # those are in acc already
        out = out * qkv.v.scale.expand(qkv.k.shape[0], qkv.k.shape[1], 1, -1)[batch].repeat_interleave(
            problem.group, dim=-3
        )
    if qkv.v_mean is not None:
        out = out + qkv.v_mean[batch].repeat_interleave(problem.group, dim=-3) * (l_keys / weights_sum)
    lse = (m + torch.log2(l) - math.log2(P_SCALE)) / LOG2E
    if shift is not None:
        lse = lse + shift
    lse = torch.where(l == 0, -torch.inf, lse)
    if problem.sinks is not None:
        lse = torch.where(state.m == -torch.inf, sink, lse)
    return out, lse.squeeze(-1)


def _tiles(start: int, stop: int, size: int) -> Iterator[slice]:
    """Tiles of ``size`` aligned to its multiples, the first and last of them cut to [start, stop)."""
    for first in range(start - start % size, stop, size) if start < stop else ():
        yield slice(max(first, start), min(first + size, stop))


class _KeysValues(NamedTuple):
    """One batch entry's keys and values in FP32, with one row a token."""

    k: torch.Tensor  # (Hkv, Sk, D)
    k_scale: torch.Tensor  # (Hkv, Sk, 1)
    v: torch.Tensor  # (Hkv, Sk, Dv)
    v_scale: torch.Tensor | None  # (Hkv, Sk, 1) if the scale differs from key to key


def _decode_kv(problem: AttentionProblem, batch: int) -> _KeysValues:
    k, v = problem.qkv.k, problem.qkv.v
    k_scale = k.expanded_scale().expand(*k.shape[:3], 1)[batch]
    v_scale = v.expanded_scale()[batch] if v.granularity.kind in ("token", "block") else None
    return _KeysValues(k.format.decode(k.rows()[batch]), k_scale, v.format.decode(v.rows()[batch]), v_scale)


def _attend_rows(
    problem: AttentionProblem,
    batch: int,
    rows: slice,
    keys: range,
    tile_k: int,
    decoded: _KeysValues,
) -> State:
    """The state of some query rows of one batch entry over ``keys``: m, l (Hq, M, 1) and acc (Hq, M, Dv)."""
    qkv, group = problem.qkv, problem.group
    k, k_scale, v, v_scale = decoded
    p_format, (accumulation, bits) = get_format(qkv.recipe.p_format), qkv.recipe.accumulator
    # The models are of FP8 products: a tensor core sums INT8 exactly, and 16 bits to FP32's precision.
    qk_modelled, pv_modelled = (
        accumulation != "fp32" and all(x.dtype in _FP8 for x in formats)
        for formats in ((qkv.q.format, qkv.k.format), (p_format, qkv.v.format))
    )
    num_kv_heads, num_rows = k.shape[0], rows.stop - rows.start
    per_kv_head = (num_kv_heads, group * num_rows, -1)  # one product serves all query heads of a kv head

    q = qkv.q.format.decode(qkv.q.rows()[batch, :, rows]).reshape(*per_kv_head[:2], qkv.q.shape[-1])
    q_scale = qkv.q.expanded_scale().expand(*qkv.q.shape[:3], 1)[batch, :, rows]
    # Logits go to log2 units with the scales, except that a softcap acts on natural ones.
    units = 1.0 if problem.softcap is not None else LOG2E
    row_scale = (q_scale * (problem.scale * units)).reshape(*per_kv_head[:2], 1)
    shift = None
    if problem.softcap is not None and qkv.logit_shift is not None:
        shift = (problem.scale * qkv.logit_shift[batch, :, rows]).reshape(*per_kv_head[:2], 1)

    m = q.new_full((*per_kv_head[:2], 1), -torch.inf)
    l = torch.zeros_like(m)  # noqa: E741
    acc = q.new_zeros(*per_kv_head[:2], v.shape[-1])
    for tile in _tiles(keys.start, keys.stop, tile_k):
        kt, vt = k[:, tile], v[:, tile]
        s = tensor_core_matmul(q, kt.mT, fraction_bits=bits) if qk_modelled else torch.bmm(q, kt.mT)
        # The factors first: bounded, they make no NaN of a logit of 0.
        s.mul_((row_scale * k_scale[:, tile].mT).clamp_(max=_LARGEST_FACTOR))
        if problem.softcap is not None:
            if shift is not None:
                s.add_(shift)
            s.div_(problem.softcap).tanh_().mul_(problem.softcap)
        hidden = _hidden(problem, batch, rows, tile, s, units)
        if problem.softcap is not None:
            s.mul_(LOG2E)
        s.clamp_(-_LARGEST_LOGIT, _LARGEST_LOGIT)
        if hidden is not None:
            s.view(num_kv_heads, group, num_rows, -1).masked_fill_(hidden, -torch.inf)

        m_old, m = m, torch.maximum(m, s.amax(dim=-1, keepdim=True).ceil())
        alpha = _rescale(m_old, m)
        p = s.sub_(torch.where(m == -torch.inf, 0.0, m) - math.log2(P_SCALE)).exp2_()
        if v_scale is None:
            p_format.round_nonnegative_(p)
            row_sum, tile_scale = p.sum(dim=-1, keepdim=True), None
        else:
            p, row_sum, tile_scale = _round_scaled_weights(p, v_scale[:, tile].mT, p_format)
        l = l * alpha + row_sum  # noqa: E741
        if pv_modelled and accumulation == "tensor_core":
            acc = tensor_core_matmul(p, vt, acc * alpha, fraction_bits=bits)
        else:
            pv = tensor_core_matmul(p, vt, fraction_bits=bits) if pv_modelled else torch.bmm(p, vt)
            acc = acc.mul_(alpha).add_(pv if tile_scale is None else pv * tile_scale)
    heads = (num_kv_heads * group, num_rows, -1)
    return State(m.reshape(heads), l.reshape(heads), acc.reshape(heads))


def _hidden(
    problem: AttentionProblem, batch: int, rows: slice, keys: slice, s: torch.Tensor, units: float
) -> torch.Tensor | None:
    """What the tile's rows do not see, (Hkv or 1, group or 1, M or 1, N or 1), or None; adds an additive mask to s."""
    masking = problem.masking
    hidden = None
    if masking.banded(rows, keys):
        row = torch.arange(rows.start, rows.stop, device=s.device)
        hidden = ~masking.band(row, torch.arange(keys.start, keys.stop, device=s.device))[None, None]
    mask = masking.mask_tile(batch, rows, keys)
    if mask is None:
        return hidden
    mask = mask.unflatten(0, (-1, problem.group)) if mask.shape[0] > 1 else mask[None]
    if mask.dtype == torch.bool:
        masked = ~mask
    else:
        masked = mask == -torch.inf
        s.view(s.shape[0], problem.group, rows.stop - rows.start, -1).add_(mask.to(torch.float32) * units)
    return masked if hidden is None else masked | hidden


def _round_scaled_weights(
    p: torch.Tensor, v_scale: torch.Tensor, p_format: Format
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rounded weights of values that have a scale each: what is rounded is the weight times its value's scale.

    ``v_scale`` (Hkv, 1, N). The product is taken relative to the row's largest visible scale in the tile, rounded up to
    a power of two: a scale that the row does not see, such as a later token's, cannot push its weights into underflow.
    Returns what the tensor core multiplies, the sum of the weights, and the row's scale (1 or M rows).

    The sum takes the weights really used, except where the product is below the format's normal range: a value too
    small to matter beside a huge one may vanish, its weight may not, or the rest would be blown up to sum to one.
    """
    tiny = torch.finfo(torch.float32).tiny
    largest = torch.where(p > 0, v_scale, 0.0).amax(dim=-1, keepdim=True)
    tile_scale = ceil_pow2(largest.clamp(min=tiny))
    # At most 1 for visible keys; the bounds keep hidden ones (0 * relative) and vanishing ones (0 / relative) from NaN.
    relative = (v_scale / tile_scale).clamp(tiny, 1.0)
    product = p * relative
    rounded = p_format.round_nonnegative_(product.clone())
    used = torch.where(product < p_format.smallest_normal, p, rounded / relative)
    return rounded, used.sum(dim=-1, keepdim=True), tile_scale
