"""The forward pass in Triton: the contract's steps 3 to 5, tile by tile.

A program owns ``block_m`` query rows of one head and walks the keys that they see in tiles of ``block_n``. Per tile:
FP8 scores; a new integer reference m, the running maximum rounded up; weights 2^(S - m + 8), rounded; their sum; and
their product with the values, which starts from zero in the tensor core and is folded into FP32 registers by the
multiply-add that rescales the old sum (so two-level accumulation costs no instruction).

Three loops walk the keys: tiles that the window cuts on the left, tiles that every row sees whole, and tiles that the
diagonal, the window or the end of the sequence cuts on the right. Only the first and last compute visibility, in tiles
of ``edge_n``. Where query tiles do not fill the GPU, several programs share the keys of a tile (``splits``) and
``_combine`` merges their states, exactly, as every rescale is by a power of two.

Codes are read through tensor descriptors (TMA where the GPU has it), which fill with zeros beyond the end of a head: no
tile reads another head's NaN. Offsets into anything else are 64 bits wide.

A packed batch (``packed.py``) is one launch too: a program finds its sequence, and goes on as if that were the batch.

Where logits may exceed 1e38, which the contract clamps, the scale that would take them there is bounded instead.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from fp8attn.formats import get_format
from fp8attn.kernels.portable.numerics import (
    FP8_DTYPES,
    INTERPRETED,
    TRITON_DTYPES,
    block_boundary,
    cast,
    decode,
    fragments_hold,
    load_scalar,
    operand_e4m3,
    product,
    program_id,
    row_sums,
)
from fp8attn.kernels.portable.packed import ALIGNMENT, PackedProblem, PackedTensor, bounds, find_sequence, first_unit
from fp8attn.kernels.portable.tuning import Config, choose_config, choose_splits, programs
from fp8attn.kernels.problem import AttentionProblem
from fp8attn.scaling import QuantizedTensor

__all__ = ["attend"]

_LOG2E = tl.constexpr(math.log2(math.e))
_LARGEST_LOGIT = tl.constexpr(1e38)
_LARGEST_FACTOR = tl.constexpr(torch.finfo(torch.float32).max)
_SMALLEST = tl.constexpr(2.0**-126)
_ALIGNMENT = tl.constexpr(ALIGNMENT)
_ONE_SCALE = tl.constexpr(2**30)  # tokens that share a scale where all do
_P_BITS = tl.constexpr(8.0)  # weights are rounded in units of 2^-8
_FRAGMENTS_HOLD: dict[str, bool] = {}  # of compiled kernels by their hash


@triton.jit
def _scores(q, k_desc, plane, n, K_DTYPE: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr):
    """Raw FP32 products of a query tile, in chunks of the head dim, with the keys from n on."""
    s = product(q[0], tl.reshape(k_desc.load([plane, n, 0]), [BLOCK_N, CHUNK]).T, K_DTYPE)
    for i in tl.static_range(1, len(q)):
        s += product(q[i], tl.reshape(k_desc.load([plane, n, i * CHUNK]), [BLOCK_N, CHUNK]).T, K_DTYPE)
    return s


@triton.jit
def _int8_nan(q, k_desc, plane, n, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr):
    """Which pairs meet INT8's NaN, the code -128, that integer products do not know."""
    rows = tl.max((q[0] == -128).to(tl.int32), 1)
    keys = tl.max((tl.reshape(k_desc.load([plane, n, 0]), [BLOCK_N, CHUNK]) == -128).to(tl.int32), 1)
    for i in tl.static_range(1, len(q)):
        rows = tl.maximum(rows, tl.max((q[i] == -128).to(tl.int32), 1))
        k = tl.reshape(k_desc.load([plane, n, i * CHUNK]), [BLOCK_N, CHUNK])
        keys = tl.maximum(keys, tl.max((k == -128).to(tl.int32), 1))
    return (rows[:, None] + keys[None, :]) > 0


@triton.jit
def _visible(
    rows, keys, seqlen_q, seqlen_k, diagonal, left, right, mask, stride_mq, stride_mk,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Who sees whom in a tile, and what an additive mask adds (in natural units)."""
    if HAS_RIGHT:
        visible = (keys[None, :] - rows[:, None] <= right + diagonal) & (keys < seqlen_k)[None, :]
    else:
        visible = (keys < seqlen_k)[None, :]
    if HAS_LEFT:
        visible = visible & (keys[None, :] >= (rows + (diagonal - left))[:, None])
    bias = 0.0
    if MASK != "none":
        inside = (rows < seqlen_q)[:, None] & (keys < seqlen_k)[None, :]
        at = rows.to(tl.int64)[:, None] * stride_mq + keys.to(tl.int64)[None, :] * stride_mk
        if MASK == "bool":
            visible = visible & (tl.load(mask + at, mask=inside, other=0) != 0)
        else:
            bias = tl.load(mask + at, mask=inside, other=-float("inf"))
            visible = visible & (bias != -float("inf"))  # before FP64's least become FP32's -inf: those hide nothing
            bias = bias.to(tl.float32)
    return visible, bias


@triton.jit
def _capped(s, softcap, KIND: tl.constexpr):
    """softcap * tanh(s / softcap). ``KIND`` is ``"large"`` where a rounding error of the softcap's size would show."""
    capped = softcap * (1.0 - 2.0 / (tl.exp2(s * (2.0 * _LOG2E / softcap)) + 1.0))
    if KIND == "large":
        x = s / softcap
        x2 = x * x  # Taylor's series; the next term is 17/315 x^6, 5e-8 of the value at the limit
        capped = tl.where(tl.abs(x) < 0.1, s * (1.0 + x2 * (-1.0 / 3.0 + x2 * (2.0 / 15.0))), capped)
    return capped


@triton.jit
def _permuted(p, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Columns in the order in which ``permuted_columns`` stores keys; moves nothing between registers."""
    return tl.reshape(tl.permute(tl.reshape(p, [BLOCK_M, BLOCK_N // 16, 2, 4, 2]), [0, 1, 3, 2, 4]), [BLOCK_M, BLOCK_N])


@triton.jit
def _tile(
    q, k_desc, v_desc, k_scale, k_factor, v_scale, mask, plane, first_key, n, acc, m, l, row_factor, shift, rows,
    seqlen_q, seqlen_k, stride_ks, stride_vs, stride_mq, stride_mk,
    diagonal, left, right, softcap, largest_factor, first_slice,
    MASKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr,
    SHIFT: tl.constexpr, NEGATE: tl.constexpr, UNBOUNDED: tl.constexpr,
    K_PER_KEY: tl.constexpr, V_PER_KEY: tl.constexpr, V_ROWS: tl.constexpr, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr,
    K_DTYPE: tl.constexpr, V_DTYPE: tl.constexpr, P_DTYPE: tl.constexpr, P_SMALLEST_NORMAL: tl.constexpr,
    FRAGMENTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """Takes the keys from n to n + BLOCK_N into the state (acc, m, l). ``k_factor`` is their scale if they share it.

    ``first_key``: where the codes of the sequence begin in their plane.
    """
    keys = n + tl.arange(0, BLOCK_N)
    factor = row_factor * k_factor
    s = _scores(q, k_desc, plane, first_key + n, K_DTYPE, BLOCK_N, CHUNK)
    if NEGATE:
        s = -s
    if q[0].dtype == tl.int8:
        s = tl.where(_int8_nan(q, k_desc, plane, first_key + n, BLOCK_N, CHUNK), float("nan"), s)
    if SOFTCAP != "none" or MASK == "additive" or K_PER_KEY or UNBOUNDED:
        # Everything that needs whole logits: to log2 units first, then what the masks say.
        if K_PER_KEY:
            scales = tl.load(k_scale + (keys // K_SIZE) * stride_ks, mask=keys < seqlen_k, other=1.0)
            s = s * tl.minimum(row_factor[:, None] * scales[None, :], _LARGEST_FACTOR)
        else:
            s = s * tl.minimum(factor, _LARGEST_FACTOR)[:, None]
        if SOFTCAP != "none":  # the factors are natural then
            if SHIFT:
                s += shift[:, None]
            s = _capped(s, softcap, SOFTCAP)
        factor = tl.full([BLOCK_M], 1.0, tl.float32)
        visible, bias = _visible(
            rows, keys, seqlen_q, seqlen_k, diagonal, left, right, mask, stride_mq, stride_mk, HAS_LEFT, HAS_RIGHT, MASK
        )
        if SOFTCAP != "none":
            s = (s + bias) * _LOG2E
        elif MASK == "additive":
            s = s + bias * _LOG2E
        s = tl.where(s > _LARGEST_LOGIT, _LARGEST_LOGIT, tl.where(s < -_LARGEST_LOGIT, -_LARGEST_LOGIT, s))
        if MASKED:
            s = tl.where(visible, s, -float("inf"))
    else:
        # The factor goes into the exponent's multiply-add. Bounded, it overflows no logit and turns no -inf into NaN.
        factor = tl.minimum(factor, largest_factor)
        if MASKED:
            factor = tl.maximum(factor, _SMALLEST)
            visible, bias = _visible(
                rows, keys, seqlen_q, seqlen_k, diagonal, left, right, mask, stride_mq, stride_mk,
                HAS_LEFT, HAS_RIGHT, MASK,
            )  # fmt: skip
            s = tl.where(visible, s, -float("inf"))

    m_new = tl.maximum(m, tl.ceil(tl.max(s, 1) * factor))
    reference = m_new
    if MASKED:  # a row that has seen no key yet
        reference = tl.maximum(m_new, -_LARGEST_LOGIT)
    alpha = tl.exp2(m - reference)
    p = tl.exp2(s * factor[:, None] - (reference - _P_BITS)[:, None])

    if V_PER_KEY:
        # What is rounded is the weight times its value's scale, relative to the largest scale that the row sees.
        scales = tl.load(v_scale + (keys // V_SIZE) * stride_vs, mask=keys < seqlen_k, other=0.0)[None, :]
        largest = tl.maximum(tl.max(tl.where(p > 0, scales, 0.0), 1), _SMALLEST)
        bits = (largest.to(tl.int32, bitcast=True) + 0x007FFFFF) & 0x7F800000  # up to a power of two
        tile_scale = bits.to(tl.float32, bitcast=True)
        inverse = (0x7F000000 - bits).to(tl.float32, bitcast=True)
        relative = tl.minimum(tl.maximum(scales * inverse[:, None], _SMALLEST), 1.0)
        scaled = p * relative
        p8 = cast(scaled, P_DTYPE)
        used = tl.where(scaled < P_SMALLEST_NORMAL, p, decode(p8) / relative)
        row_sum = tl.sum(used, 1)
        if not V_ROWS:
            p8 = cast(_permuted(scaled, BLOCK_M, BLOCK_N), P_DTYPE)
    else:
        if V_ROWS:
            p8 = cast(p, P_DTYPE)
        elif FRAGMENTS and P_DTYPE == tl.float8e4nv:
            p8 = operand_e4m3(_permuted(p, BLOCK_M, BLOCK_N))
        else:
            p8 = cast(_permuted(p, BLOCK_M, BLOCK_N), P_DTYPE)
        row_sum = row_sums(p8, FRAGMENTS)
    l = l * alpha + row_sum
    new = ()
    for i in tl.static_range(len(acc)):
        column = (first_slice + i) * SLICE
        if V_ROWS:
            v = tl.reshape(v_desc.load([plane, first_key + n, column]), [BLOCK_N, SLICE])
        else:
            v = tl.reshape(v_desc.load([plane, column, first_key + n]), [SLICE, BLOCK_N]).T
        pv = product(p8, v, V_DTYPE)
        if V_PER_KEY:
            pv = pv * tile_scale[:, None]
        new = new + (acc[i] * alpha[:, None] + pv,)  # type: ignore[assignment]
        if i + 1 < len(acc):  # one product in flight: two would not fit beside the accumulators
            block_boundary(n, i)
    return new, m_new, l


@triton.jit
def _finish(m, l, sinks, head, shift, SINKS: tl.constexpr, SHIFT: tl.constexpr):
    """From the state of all keys: what acc is to be multiplied by, the mean value's weight, and the lse."""
    factor = tl.full(m.shape, 1.0, tl.float32)
    total = l
    if SINKS:
        sink = tl.load(sinks + head)
        sink2 = (sink - shift) * _LOG2E if SHIFT else tl.zeros_like(m) + sink * _LOG2E
        sink2 = tl.where(
            sink2 > _LARGEST_LOGIT, _LARGEST_LOGIT, tl.where(sink2 < -_LARGEST_LOGIT, -_LARGEST_LOGIT, sink2)
        )
        covered = tl.maximum(m, tl.ceil(sink2))
        factor = tl.exp2(m - covered)  # 0 for a row without keys, whose m is -inf
        total = l * factor + tl.exp2(sink2 - covered + _P_BITS)
        lse_m = covered
    else:
        lse_m = m
    divisor = tl.where(total == 0, 1.0, total)
    lse = (lse_m + tl.log2(divisor) - _P_BITS) / _LOG2E
    if SHIFT:
        lse += shift
    lse = tl.where(l == 0, sink if SINKS else -float("inf"), lse)  # no visible key; NaN is something else
    factor = factor / divisor
    return factor, l * factor, lse


@triton.jit
def _store_slice(
    acc, factor, mean_weight, out, v_scale, v_mean, stride_vc, column, row_offsets, in_rows, head_dim_v,
    V_PER_KEY: tl.constexpr, V_MEAN: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    columns = column + tl.arange(0, SLICE)
    inside = columns < head_dim_v
    result = acc * factor[:, None]
    if not V_PER_KEY:
        result *= tl.load(v_scale + columns * stride_vc, mask=inside, other=0.0)[None, :]
    if V_MEAN:
        result += tl.load(v_mean + columns, mask=inside, other=0.0)[None, :] * mean_weight[:, None]
    at = row_offsets[:, None] + columns[None, :]
    tl.store(out + at, cast(result, out.dtype.element_ty), mask=in_rows[:, None] & inside[None, :])


@triton.jit
def _tile_scale(k_scale, n, seqlen_k, stride_ks, K_SIZE: tl.constexpr, K_PER_KEY: tl.constexpr):
    """The scale that the keys of the tile at n share; 1 where they have their own, or beyond the last key."""
    if K_PER_KEY:
        return 1.0
    return load_scalar(k_scale + (tl.maximum(tl.minimum(n, seqlen_k - 1), 0) // K_SIZE) * stride_ks)


@triton.jit
def _place(work, seqlen_q, num_q_heads, splits, BLOCK_M: tl.constexpr, SLICE_GROUPS: tl.constexpr, LAST: tl.constexpr):
    """(query tile, group of value slices, head, split, batch) of a program.

    Neighbours in the grid share keys and values: query tiles first, then heads, then sequences.
    """
    query_tiles = tl.cdiv(seqlen_q, BLOCK_M)
    query_tile = work % query_tiles
    work = work // query_tiles
    if LAST:  # with a right limit the last tile sees most keys: longest first
        query_tile = query_tiles - 1 - query_tile
    slice_group = work % SLICE_GROUPS
    work = work // SLICE_GROUPS
    head = work % num_q_heads
    work = work // num_q_heads
    return query_tile, slice_group, head, work % splits, work // splits


@triton.jit
def _packed_place(
    work, cu_seqlens, sequences, query_tiles, total, num_q_heads,
    BLOCK_M: tl.constexpr, SLICE_GROUPS: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """(Query tile, group of value slices, head, sequence, its first token, its length) of a program of a packed batch.

    There is room for ``query_tiles``; programs without one get -1.
    """
    sequence, begin, length, tile = find_sequence(cu_seqlens, sequences, work % query_tiles, BLOCK_M, total)
    work = work // query_tiles
    tiles = tl.cdiv(length, BLOCK_M)
    tile = tl.where(tile < tiles, tiles - 1 - tile if LAST else tile, -1)
    return tile, work % SLICE_GROUPS, work // SLICE_GROUPS, sequence, begin, length


@triton.jit
def _first_scale(sequence, head, heads, begin, length, stride_b, stride_h, SIZE: tl.constexpr):
    """Where the scales of a head of a packed sequence begin; ``SIZE`` tokens share one (``PackedTensor``)."""
    if SIZE < _ONE_SCALE:
        return first_unit(begin.to(tl.int64), sequence, SIZE) * heads + head * tl.cdiv(length, SIZE)
    return sequence.to(tl.int64) * stride_b + head * stride_h


@triton.jit
def _forward(
    q_desc, k_desc, v_desc, k_edge_desc, v_edge_desc, q_scale, k_scale, v_scale, logit_shift, v_mean, sinks, mask,
    out, lse, part_m, part_l,
    scale, softcap, largest_factor,
    seqlen_q, seqlen_k, head_dim_v, num_q_heads, group, diagonal, left, right, splits, key_tiles_a_split,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs, stride_vc,
    stride_mb, stride_mh, stride_mq, stride_mk, q_cu_seqlens, k_cu_seqlens, sequences, query_tiles,
    BOTTOM_RIGHT: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, EVEN: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr,
    NEGATE: tl.constexpr, SINKS: tl.constexpr, SHIFT: tl.constexpr, V_MEAN: tl.constexpr, SPLIT: tl.constexpr,
    UNBOUNDED: tl.constexpr, K_PER_KEY: tl.constexpr, V_PER_KEY: tl.constexpr, V_ROWS: tl.constexpr,
    Q_SIZE: tl.constexpr, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr,
    K_DTYPE: tl.constexpr, V_DTYPE: tl.constexpr, P_DTYPE: tl.constexpr, P_SMALLEST_NORMAL: tl.constexpr,
    FRAGMENTS: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, SLICES: tl.constexpr, SLICE: tl.constexpr, SLICE_GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EDGE_N: tl.constexpr, EDGE_STAGES: tl.constexpr,
):  # fmt: skip
    PACKED: tl.constexpr = q_cu_seqlens is not None
    first_query, first_key, total_q = 0, 0, seqlen_q
    if PACKED:
        query_tile, slice_group, head, batch, first_token, seqlen_q = _packed_place(
            tl.program_id(0), q_cu_seqlens, sequences, query_tiles, seqlen_q, num_q_heads, BLOCK_M, SLICE_GROUPS,
            HAS_RIGHT,
        )  # fmt: skip
        if query_tile < 0:
            return
        first_k_token, seqlen_k = bounds(k_cu_seqlens, batch, seqlen_k)
        first_query = first_unit(first_token, batch, _ALIGNMENT) * _ALIGNMENT
        first_key = first_unit(first_k_token, batch, _ALIGNMENT) * _ALIGNMENT
        diagonal = seqlen_k - seqlen_q if BOTTOM_RIGHT else 0
        q_plane = head
        kv_head = head // group
        kv_plane = kv_head
        first_token = first_token.to(tl.int64)
        if SHIFT:
            logit_shift += first_token * num_q_heads
        q_scale += _first_scale(batch, head, num_q_heads, first_token, seqlen_q, stride_qb, stride_qh, Q_SIZE)
        k_scale += _first_scale(
            batch, kv_head, num_q_heads // group, first_k_token, seqlen_k, stride_kb, stride_kh, K_SIZE
        )
        if V_PER_KEY:
            v_scale += _first_scale(
                batch, kv_head, num_q_heads // group, first_k_token, seqlen_k, stride_vb, stride_vh, V_SIZE
            )
        split = 0
    else:
        query_tile, slice_group, head, split, batch = _place(
            tl.program_id(0), seqlen_q, num_q_heads, splits, BLOCK_M, SLICE_GROUPS, HAS_RIGHT
        )
        q_plane = batch * num_q_heads + head
        kv_head = head // group
        kv_plane = batch * (num_q_heads // group) + kv_head
        batch = batch.to(tl.int64)

        q_scale += batch * stride_qb + head * stride_qh
        k_scale += batch * stride_kb + kv_head * stride_kh
        if V_PER_KEY:
            v_scale += batch * stride_vb + kv_head * stride_vh
    if MASK != "none":
        mask += batch * stride_mb + head.to(tl.int64) * stride_mh

    first_row = query_tile * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    in_rows = rows < seqlen_q
    q = ()
    for i in tl.static_range(CHUNKS):
        chunk = q_desc.load([q_plane, first_query + first_row, i * CHUNK])
        q = q + (tl.reshape(chunk, [BLOCK_M, CHUNK]),)  # type: ignore[assignment]
    row_factor = tl.load(q_scale + (rows // Q_SIZE) * stride_qs, mask=in_rows, other=0.0) * scale
    shift = tl.zeros([BLOCK_M], tl.float32)
    if SHIFT and SOFTCAP != "none":  # without a softcap the shift comes in at the end
        shift = scale * tl.load(logit_shift + q_plane.to(tl.int64) * seqlen_q + rows, mask=in_rows, other=0.0)
        if NEGATE:
            shift = -shift

    # The keys that some row sees, and among them those that every row sees: whole tiles, counted from key 0.
    last_row = tl.minimum(first_row + BLOCK_M, seqlen_q) - 1
    begin = 0
    end = seqlen_k
    whole_begin = 0
    whole_end = seqlen_k // BLOCK_N * BLOCK_N
    if HAS_LEFT:
        begin = tl.maximum(first_row + diagonal - left, 0) // EDGE_N * EDGE_N
        whole_begin = tl.cdiv(tl.maximum(last_row + diagonal - left, 0), BLOCK_N) * BLOCK_N
    if HAS_RIGHT:
        end = tl.minimum(last_row + 1 + diagonal + right, seqlen_k)
        whole_end = tl.minimum(tl.maximum(first_row + diagonal + right + 1, 0) // BLOCK_N * BLOCK_N, whole_end)
    if SPLIT:  # parts of whole tiles, whatever the limits are
        begin = tl.maximum(begin, split * key_tiles_a_split * BLOCK_N)
        end = tl.minimum(end, (split + 1) * key_tiles_a_split * BLOCK_N)
    end = tl.maximum(end, begin)
    whole_begin = tl.minimum(tl.maximum(whole_begin, tl.cdiv(begin, BLOCK_N) * BLOCK_N), end)
    whole_end = tl.maximum(tl.minimum(whole_end, end // BLOCK_N * BLOCK_N), whole_begin)
    if MASK != "none":
        whole_end = whole_begin

    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = ()
    for _ in tl.static_range(SLICES):
        acc = acc + (tl.zeros([BLOCK_M, SLICE], tl.float32),)  # type: ignore[assignment]
    first_slice = slice_group * SLICES

    if HAS_LEFT:
        for n in tl.range(begin, whole_begin, EDGE_N, num_stages=EDGE_STAGES):
            k_factor = _tile_scale(k_scale, n, seqlen_k, stride_ks, K_SIZE, K_PER_KEY)
            acc, m, l = _tile(
                q, k_edge_desc, v_edge_desc, k_scale, k_factor, v_scale, mask, kv_plane, first_key, n, acc, m, l,
                row_factor, shift, rows, seqlen_q, seqlen_k, stride_ks, stride_vs, stride_mq, stride_mk,
                diagonal, left, right, softcap, largest_factor, first_slice,
                True, HAS_LEFT, HAS_RIGHT, MASK, SOFTCAP, SHIFT, NEGATE, UNBOUNDED, K_PER_KEY, V_PER_KEY,
                V_ROWS, K_SIZE, V_SIZE, K_DTYPE, V_DTYPE, P_DTYPE, P_SMALLEST_NORMAL, FRAGMENTS,
                BLOCK_M, EDGE_N, CHUNK, SLICE,
            )  # fmt: skip
    if MASK == "none":
        k_next = _tile_scale(k_scale, whole_begin, seqlen_k, stride_ks, K_SIZE, K_PER_KEY)
        for n in tl.range(whole_begin, whole_end, BLOCK_N):
            k_factor = k_next  # asked for a tile ahead: nothing waits for it
            k_next = _tile_scale(k_scale, n + BLOCK_N, seqlen_k, stride_ks, K_SIZE, K_PER_KEY)
            acc, m, l = _tile(
                q, k_desc, v_desc, k_scale, k_factor, v_scale, mask, kv_plane, first_key, n, acc, m, l,
                row_factor, shift, rows, seqlen_q, seqlen_k, stride_ks, stride_vs, stride_mq, stride_mk,
                diagonal, left, right, softcap, largest_factor, first_slice,
                False, HAS_LEFT, HAS_RIGHT, MASK, SOFTCAP, SHIFT, NEGATE, UNBOUNDED, K_PER_KEY, V_PER_KEY,
                V_ROWS, K_SIZE, V_SIZE, K_DTYPE, V_DTYPE, P_DTYPE, P_SMALLEST_NORMAL, FRAGMENTS,
                BLOCK_M, BLOCK_N, CHUNK, SLICE,
            )  # fmt: skip
    if HAS_RIGHT or MASK != "none" or not EVEN:
        for n in tl.range(whole_end, end, EDGE_N, num_stages=EDGE_STAGES):
            k_factor = _tile_scale(k_scale, n, seqlen_k, stride_ks, K_SIZE, K_PER_KEY)
            acc, m, l = _tile(
                q, k_edge_desc, v_edge_desc, k_scale, k_factor, v_scale, mask, kv_plane, first_key, n, acc, m, l,
                row_factor, shift, rows, seqlen_q, seqlen_k, stride_ks, stride_vs, stride_mq, stride_mk,
                diagonal, left, right, softcap, largest_factor, first_slice,
                True, HAS_LEFT, HAS_RIGHT, MASK, SOFTCAP, SHIFT, NEGATE, UNBOUNDED, K_PER_KEY, V_PER_KEY,
                V_ROWS, K_SIZE, V_SIZE, K_DTYPE, V_DTYPE, P_DTYPE, P_SMALLEST_NORMAL, FRAGMENTS,
                BLOCK_M, EDGE_N, CHUNK, SLICE,
            )  # fmt: skip

    if not PACKED:
        query_tile, slice_group, head, split, batch = _place(
            program_id(), seqlen_q, num_q_heads, splits, BLOCK_M, SLICE_GROUPS, HAS_RIGHT
        )
    rows = query_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = rows < seqlen_q
    q_plane = batch.to(tl.int64) * num_q_heads + head
    if PACKED:
        q_plane = head.to(tl.int64)
    kv_head = head // group
    first_slice = slice_group * SLICES
    if SPLIT:
        plane_rows = (q_plane * splits + split) * seqlen_q + rows
        tl.store(part_m + plane_rows, m, mask=in_rows)
        tl.store(part_l + plane_rows, l, mask=in_rows)
        for i in tl.static_range(SLICES):
            columns = (first_slice + i) * SLICE + tl.arange(0, SLICE)
            at = plane_rows[:, None] * head_dim_v + columns[None, :]
            tl.store(out + at, acc[i], mask=in_rows[:, None] & (columns < head_dim_v)[None, :])
    else:
        plane_rows = q_plane * seqlen_q + rows
        if SHIFT and SOFTCAP == "none":
            shift = (scale / _LOG2E) * tl.load(logit_shift + plane_rows, mask=in_rows, other=0.0)
            if NEGATE:
                shift = -shift
        factor, mean_weight, row_lse = _finish(m, l, sinks, head, shift, SINKS, SHIFT and SOFTCAP == "none")
        out_rows = plane_rows
        if PACKED:  # out is (T, H, Dv), lse (H, T)
            out_rows = (first_token + rows) * num_q_heads + head
            plane_rows = q_plane * total_q + first_token + rows
        if slice_group == 0:
            tl.store(lse + plane_rows, row_lse, mask=in_rows)
        if not V_PER_KEY:
            v_scale += batch.to(tl.int64) * stride_vb + kv_head * stride_vh
        if V_MEAN:
            v_mean += (batch.to(tl.int64) * (num_q_heads // group) + kv_head) * head_dim_v
        for i in tl.static_range(SLICES):
            _store_slice(
                acc[i], factor, mean_weight, out, v_scale, v_mean, stride_vc, (first_slice + i) * SLICE,
                out_rows * head_dim_v, in_rows, head_dim_v, V_PER_KEY, V_MEAN, SLICE,
            )  # fmt: skip


@triton.jit
def _combine(
    part_acc, part_m, part_l, v_scale, logit_shift, v_mean, sinks, out, lse, scale,
    seqlen_q, head_dim_v, num_q_heads, group, splits, stride_vb, stride_vh, stride_vc,
    SINKS: tl.constexpr, SHIFT: tl.constexpr, V_MEAN: tl.constexpr, V_PER_KEY: tl.constexpr,
    SLICE: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Merges the states of the splits and finishes: one program a tile of rows and a slice of channels."""
    query_tiles = tl.cdiv(seqlen_q, BLOCK_M)
    slices = tl.cdiv(head_dim_v, SLICE)
    work = tl.program_id(0)
    query_tile = work % query_tiles
    work = work // query_tiles
    column = (work % slices) * SLICE
    plane = (work // slices).to(tl.int64)
    head = (plane % num_q_heads).to(tl.int32)
    batch = plane // num_q_heads
    kv_head = head // group
    rows = query_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = rows < seqlen_q
    columns = column + tl.arange(0, SLICE)
    inside = in_rows[:, None] & (columns < head_dim_v)[None, :]

    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, SLICE], tl.float32)
    for split in range(splits):
        at = (plane * splits + split) * seqlen_q + rows
        m_part = tl.load(part_m + at, mask=in_rows, other=-float("inf"))
        l_part = tl.load(part_l + at, mask=in_rows, other=0.0)
        acc_part = tl.load(part_acc + at[:, None] * head_dim_v + columns[None, :], mask=inside, other=0.0)
        m_new = tl.maximum(m, m_part)
        reference = tl.where(m_new == -float("inf"), 0.0, m_new)
        alpha, beta = tl.exp2(m - reference), tl.exp2(m_part - reference)
        l = l * alpha + l_part * beta
        acc = acc * alpha[:, None] + acc_part * beta[:, None]
        m = m_new
    shift = tl.zeros([BLOCK_M], tl.float32)
    if SHIFT:
        shift = scale * tl.load(logit_shift + plane * seqlen_q + rows, mask=in_rows, other=0.0)
    factor, mean_weight, row_lse = _finish(m, l, sinks, head, shift, SINKS, SHIFT)
    if column == 0:
        tl.store(lse + plane * seqlen_q + rows, row_lse, mask=in_rows)
    v_scale += batch * stride_vb + kv_head * stride_vh
    if V_MEAN:
        v_mean += (batch * (num_q_heads // group) + kv_head) * head_dim_v
    _store_slice(
        acc, factor, mean_weight, out, v_scale, v_mean, stride_vc, column, (plane * seqlen_q + rows) * head_dim_v,
        in_rows, head_dim_v, V_PER_KEY, V_MEAN, SLICE,
    )  # fmt: skip


def attend(
    problem: AttentionProblem,
    *,
    config: Config | None = None,
    splits: int | None = None,
    compiled: list[Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every query over all its keys.

    ``config`` and ``splits`` (programs that share a query tile's keys) are chosen by shape and GPU unless given. The
    kernels that were launched are appended to ``compiled``, for those who want to look at them.

    Returns:
        out (B, Hq, Sq, Dv) in ``problem.qkv.dtype`` and lse (B, Hq, Sq) in FP32; of a ``PackedProblem`` (T, Hq, Dv) and
        (Hq, T), 0 and -inf for tokens of no sequence.
    """
    qkv, masking = problem.qkv, problem.masking
    packing = problem.packing if isinstance(problem, PackedProblem) else None
    batch, num_q_heads, seqlen_q, head_dim = qkv.q.shape
    seqlen_k, head_dim_v, device = qkv.k.shape[2], qkv.v.shape[3], qkv.q.device
    out = torch.empty(batch, num_q_heads, seqlen_q, head_dim_v, dtype=qkv.dtype, device=device)
    lse = torch.empty(batch, num_q_heads, seqlen_q, dtype=torch.float32, device=device)
    if packing is not None:
        out = torch.zeros(seqlen_q, num_q_heads, head_dim_v, dtype=qkv.dtype, device=device)
        lse = torch.full((num_q_heads, seqlen_q), -torch.inf, dtype=torch.float32, device=device)
        splits = 1
    if lse.numel() == 0:
        return out, lse
    q_format, p_format = qkv.q.format, get_format(qkv.recipe.p_format)
    if config is None:
        config = choose_config(problem)
    slices = -(-head_dim_v // config.slice_v)
    slice_groups = -(-slices // config.slices_v)
    if splits is None:
        splits = choose_splits(problem, config)
    key_tiles = -(-seqlen_k // config.block_n)
    splits = max(1, min(splits, key_tiles))
    split = splits > 1

    # FP8 weights need values with their keys together; anything wider takes them as rows.
    v_rows = p_format.dtype.itemsize > 1
    q, k, v = _planes(qkv.q), _planes(qkv.k), _planes(_in_layout(qkv.v, "rows" if v_rows else "permuted_columns"))
    arch = _arch()
    if 0 < arch < 89:  # the compiler knows no FP8 there: 16-bit products of what is read as bytes
        k, v = (x.view(torch.uint8) if x.dtype in FP8_DTYPES else x for x in (k, v))
    q_desc = TensorDescriptor.from_tensor(q, [1, config.block_m, config.chunk])
    k_desc, v_desc = _key_value_descriptors(k, v, config.block_n, config, v_rows)
    k_edge_desc, v_edge_desc = _key_value_descriptors(k, v, config.edge_n, config, v_rows)

    softcap = problem.softcap
    # tanh comes with FP32's error of 1, a logit with that of the softcap: from here on it would show
    softcap_kind = "none" if softcap is None else "large" if softcap > 100 else "small"
    if softcap is not None:
        softcap = min(max(softcap, 1e-36), 1e36)  # so that its reciprocal is a normal number too
    q_scale, k_scale, v_scale = (_broadcast_scale(x) for x in (qkv.q, qkv.k, qkv.v))
    k_size = _tokens_a_scale(qkv.k)
    v_per_key = qkv.v.granularity.kind in ("token", "block")
    mask, mask_kind = masking.mask, "none"
    mask_strides = [0, 0, 0, 0]
    if mask is not None:
        mask_kind = "bool" if mask.dtype == torch.bool else "additive"
        mask_strides = [0 if mask.shape[i] == 1 else mask.stride(i) for i in range(4)]
        mask = mask.view(torch.uint8) if mask_kind == "bool" else mask
    # Logits in log2 units, natural ones under a softcap. No factor above this one lets a logit reach 1e38.
    units = 1.0 if softcap is not None else _LOG2E.value
    largest_factor = 1e38 / (q_format.max * qkv.k.format.max * head_dim)
    target, parts_m, parts_l = out, lse, lse
    if split:
        target = torch.empty(batch, num_q_heads, splits, seqlen_q, head_dim_v, dtype=torch.float32, device=device)
        parts_m, parts_l = torch.empty(2, batch, num_q_heads, splits, seqlen_q, dtype=torch.float32, device=device)
    shift = qkv.logit_shift if qkv.logit_shift is None else qkv.logit_shift.contiguous()
    v_mean = qkv.v_mean if qkv.v_mean is None else qkv.v_mean.contiguous()
    sinks = problem.sinks if problem.sinks is None else problem.sinks.contiguous()
    # Fused multiply-adds: the exponent and the rescaled sums rely on them, and Triton 3.10 turns them off by default.
    options: dict[str, Any] = {"num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": True}
    if config.max_registers is not None:
        options["maxnreg"] = config.max_registers
    grid, query_tiles = programs(problem, config) * splits, 0
    cu_seqlens: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if packing is not None:
        query_tiles = packing.queries.units(config.block_m)
        grid = query_tiles * num_q_heads * slice_groups
        cu_seqlens = packing.queries.cu_seqlens, packing.keys.cu_seqlens
    launch = partial(
        _forward[(grid,)],
        q_desc, k_desc, v_desc, k_edge_desc, v_edge_desc, q_scale, k_scale, v_scale, shift, v_mean, sinks, mask,
        target, lse, parts_m, parts_l,
        abs(problem.scale) * units, softcap or 0.0, min(largest_factor, 1e30),
        seqlen_q, seqlen_k, head_dim_v, num_q_heads, problem.group,
        masking.diagonal, masking.left or 0, masking.right or 0, splits, -(-key_tiles // splits),
        *q_scale.stride()[:3], *k_scale.stride()[:3], *v_scale.stride(),
        *mask_strides, *cu_seqlens, 0 if packing is None else packing.queries.count, query_tiles,
        BOTTOM_RIGHT=packing is not None and masking.causal_alignment == "bottom_right",
        HAS_LEFT=masking.left is not None, HAS_RIGHT=masking.right is not None,
        EVEN=packing is None and seqlen_k % config.block_n == 0, MASK=mask_kind, SOFTCAP=softcap_kind,
        NEGATE=problem.scale < 0,
        SINKS=sinks is not None, SHIFT=shift is not None, V_MEAN=v_mean is not None, SPLIT=split,
        UNBOUNDED=not (q_format.scaled and qkv.k.format.scaled),
        K_PER_KEY=k_size % config.block_n != 0, V_PER_KEY=v_per_key, V_ROWS=v_rows,
        Q_SIZE=_tokens_a_scale(qkv.q), K_SIZE=k_size, V_SIZE=_tokens_a_scale(qkv.v),
        K_DTYPE=TRITON_DTYPES[qkv.k.format.dtype], V_DTYPE=TRITON_DTYPES[qkv.v.format.dtype],
        P_DTYPE=TRITON_DTYPES[p_format.dtype], P_SMALLEST_NORMAL=p_format.smallest_normal,
        CHUNKS=-(-head_dim // config.chunk), CHUNK=config.chunk,
        SLICES=min(config.slices_v, slices), SLICE=config.slice_v, SLICE_GROUPS=slice_groups,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, EDGE_N=config.edge_n,
        EDGE_STAGES=1 if config.slices_v > 1 else config.stages,  # no registers for more beside many accumulators
        **options,
    )  # fmt: skip
    # A mask is read in a layout of its own, which the compiler may then prefer for the weights.
    fragments = arch == 90 and mask_kind == "none"
    kernel = launch(FRAGMENTS=fragments)
    if fragments and not _in_fragments(kernel):
        kernel = launch(FRAGMENTS=False)
    kernels = [kernel]
    if split:
        block_m = min(16, triton.next_power_of_2(seqlen_q))
        slice_v = min(128, triton.next_power_of_2(head_dim_v))
        kernel = _combine[(-(-seqlen_q // block_m) * batch * num_q_heads * -(-head_dim_v // slice_v),)](
            target, parts_m, parts_l, v_scale, shift, v_mean, sinks, out, lse, problem.scale,
            seqlen_q, head_dim_v, num_q_heads, problem.group, splits, *v_scale.stride()[:2], v_scale.stride(3),
            SINKS=sinks is not None, SHIFT=shift is not None and softcap is None, V_MEAN=v_mean is not None,
            V_PER_KEY=v_per_key, SLICE=slice_v, BLOCK_M=block_m,
        )  # fmt: skip
        kernels.append(kernel)
    if compiled is not None:
        compiled += kernels
    return out, lse


def _in_fragments(kernel: Any) -> bool:
    """Whether a compiled kernel holds its weights as ``FRAGMENTS`` takes for granted; else it computes nonsense."""
    known: bool | None = _FRAGMENTS_HOLD.get(kernel.hash)
    if known is None:
        known = _FRAGMENTS_HOLD[kernel.hash] = fragments_hold(kernel.asm["ttgir"])
    return known


def _arch() -> int:
    """What kernels are compiled for, as in sm_90; 0 in the interpreter."""
    if INTERPRETED.value:
        return 0
    return int(triton.runtime.driver.active.get_current_target().arch)


def _key_value_descriptors(
    k: torch.Tensor, v: torch.Tensor, block_n: int, config: Config, v_rows: bool
) -> tuple[TensorDescriptor, TensorDescriptor]:
    v_box = [1, block_n, config.slice_v] if v_rows else [1, config.slice_v, block_n]
    return TensorDescriptor.from_tensor(k, [1, block_n, config.chunk]), TensorDescriptor.from_tensor(v, v_box)


def _planes(x: QuantizedTensor) -> torch.Tensor:
    """Codes as (B * H, rows, columns), as a tensor descriptor wants them: strides of 16 bytes, aligned, not empty."""
    codes = x.codes.flatten(0, 1)
    if codes.numel() == 0:  # nothing will be read, but a descriptor must have something to describe
        return codes.new_zeros(max(1, codes.shape[0]), max(1, codes.shape[1]), 16)
    unit = 16 // codes.element_size()
    aligned = codes.stride(2) == 1 and codes.data_ptr() % 16 == 0
    if aligned and all(codes.stride(i) % unit == 0 and codes.stride(i) > 0 for i in (0, 1)):
        return codes
    planes, rows, columns = codes.shape
    storage = torch.empty(planes, rows, -(-columns // unit) * unit, dtype=codes.dtype, device=codes.device)
    storage[..., :columns].copy_(codes)
    return storage[..., :columns]


def _in_layout(x: QuantizedTensor, layout: str) -> QuantizedTensor:
    return x if isinstance(x, PackedTensor) else x.to_layout(layout)  # made in the one that is wanted


def _broadcast_scale(x: QuantizedTensor) -> torch.Tensor:
    """The scale (B, H, tokens or blocks or 1, channels or 1), with a stride of 0 where it has one value for an axis.

    Of a packed batch the first axis is sequences, or a scale that has many values a sequence lies flat in the third.
    """
    batch, heads = x.shape[:2]
    if isinstance(x, PackedTensor):
        if x.scale.ndim == 2:
            return x.scale.flatten()[None, None, :, None]
        batch = x.scale.shape[0]
    scale = x.scale if x.scale.numel() else x.scale.new_ones(batch, heads, 1, 1)  # without tokens, one to point at
    strides = [0 if scale.shape[i] == 1 else scale.stride(i) for i in range(4)]
    return scale.as_strided((batch, heads, *scale.shape[2:]), strides)


def _tokens_a_scale(x: QuantizedTensor) -> int:
    """How many consecutive tokens share a scale: ``_ONE_SCALE`` stands for all."""
    return {"token": 1, "block": x.granularity.size}.get(x.granularity.kind, _ONE_SCALE.value)
