# mypy: ignore-errors
"""The kernels of ``forward.py``: query tiles that walk their keys (tile by tile, ``forward_tile.py``), and the merge.

Three loops walk the keys: tiles that the window cuts on the left, tiles that every row sees whole, and tiles that the
diagonal, the window or the end of the sequence cuts on the right. Only the first and last compute visibility, in tiles
of ``EDGE_N``.

Codes are read through tensor descriptors (TMA where the GPU has it), which fill with zeros beyond the end of a head: no
tile reads another head's NaN. Offsets into anything else are 64 bits wide.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8attn.kernels.portable.forward_tile import LARGEST_LOGIT, LOG2E, P_BITS, take_tile
from fp8attn.kernels.portable.numerics import cast, load_scalar, program_id
from fp8attn.kernels.portable.packed import ALIGNMENT, bounds, find_sequence, first_unit

__all__ = ["ONE_SCALE", "combine_kernel", "forward_kernel"]

ONE_SCALE = tl.constexpr(2**30)  # tokens that share a scale where all do
_ALIGNMENT = tl.constexpr(ALIGNMENT)


@triton.jit
def _finish(m, l, sinks, head, shift, SINKS: tl.constexpr, SHIFT: tl.constexpr):
    """From the state of all keys: what acc is to be multiplied by, the mean value's weight, and the lse."""
    factor = tl.full(m.shape, 1.0, tl.float32)
    total = l
    if SINKS:
        sink = tl.load(sinks + head)
        sink2 = (sink - shift) * LOG2E if SHIFT else tl.zeros_like(m) + sink * LOG2E
        sink2 = tl.where(sink2 > LARGEST_LOGIT, LARGEST_LOGIT, tl.where(sink2 < -LARGEST_LOGIT, -LARGEST_LOGIT, sink2))
        covered = tl.maximum(m, tl.ceil(sink2))
        factor = tl.exp2(m - covered)  # 0 for a row without keys, whose m is -inf
        total = l * factor + tl.exp2(sink2 - covered + P_BITS)
        lse_m = covered
    else:
        lse_m = m
    divisor = tl.where(total == 0, 1.0, total)
    lse = (lse_m + tl.log2(divisor) - P_BITS) / LOG2E
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
    if SIZE < ONE_SCALE:
        return first_unit(begin.to(tl.int64), sequence, SIZE) * heads + head * tl.cdiv(length, SIZE)
    return sequence.to(tl.int64) * stride_b + head * stride_h


@triton.jit
def forward_kernel(
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
        q = q + (tl.reshape(chunk, [BLOCK_M, CHUNK]),)
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
        acc = acc + (tl.zeros([BLOCK_M, SLICE], tl.float32),)
    first_slice = slice_group * SLICES

    if HAS_LEFT:
        for n in tl.range(begin, whole_begin, EDGE_N, num_stages=EDGE_STAGES):
            k_factor = _tile_scale(k_scale, n, seqlen_k, stride_ks, K_SIZE, K_PER_KEY)
            acc, m, l = take_tile(
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
            acc, m, l = take_tile(
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
            acc, m, l = take_tile(
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
            shift = (scale / LOG2E) * tl.load(logit_shift + plane_rows, mask=in_rows, other=0.0)
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
def combine_kernel(
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
