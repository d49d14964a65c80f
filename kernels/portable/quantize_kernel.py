# mypy: ignore-errors
"""The kernels of ``quantize.py``: programs that walk tiles (``quantize_tile.py``), all or those that are marked."""

from __future__ import annotations

import triton
import triton.language as tl

from fp8attn.kernels.portable.quantize_tile import (
    kept_rows,
    load_channels,
    load_matrix,
    load_signs,
    load_tile,
    place_of,
    quantize_tile,
    tables_of,
    tile_rows,
)

__all__ = ["quantize_kernel", "redo_kernel"]


@triton.jit
def quantize_kernel(
    x_ptr, x_b, x_h, x_s, x_d, codes_ptr, head_stride, row_stride, scale_ptr, amax_ptr, in_use_ptr, in_use_b,
    cos_ptr, sin_ptr, cos_b, cos_p, cos_c, sin_b, sin_p, sin_c, first_position,
    mean_ptr, mean_group, mean_b, factor_ptr, factor_group, factor_b, shift_ptr,
    high_ptr, low_ptr, signs_ptr, matrix_factor,
    batch, heads, seqlen, extent, block, blocks, chunks, tiles, PLAN: tl.constexpr,
):  # fmt: skip
    """Quantize this program's share of the tiles. A pointer is None where ``_launch`` had no tensor.

    Tiles are numbered with heads running fastest, so that a program which works through heads finds the rotary tables
    of its tokens in the cache.
    """
    count, programs, program = tiles * heads * batch, tl.num_programs(0), tl.program_id(0)
    begin = program * (count // programs) + tl.minimum(program, count % programs)
    end = begin + count // programs + (program < count % programs).to(tl.int32)
    h, b, tile = begin % heads, begin // heads % batch, begin // heads // batch
    rows = tile_rows(block, PLAN)
    high, low = None, None
    if high_ptr is not None:
        high = load_matrix(high_ptr, PLAN)
    if low_ptr is not None:
        low = load_matrix(low_ptr, PLAN)

    place = place_of(b, h, tile, heads, block, chunks, PLAN)
    kept = kept_rows(place, rows, in_use_ptr, b.to(tl.int64) * in_use_b, block, tl.where(begin < end, seqlen, 0))
    start = x_ptr + b.to(tl.int64) * x_b + h.to(tl.int64) * x_h + place[1].to(tl.int64) * x_s
    if PLAN.ahead:
        ahead = load_tile(start, rows, kept, x_s, x_d, PLAN)
    for item in range(begin, end):
        raw = ahead if PLAN.ahead else load_tile(start, rows, kept, x_s, x_d, PLAN)
        start_now, place_now, kept_now, b_now, h_now = start, place, kept, b.to(tl.int64), h
        h += 1
        b += (h == heads).to(tl.int32)
        h = tl.where(h == heads, 0, h)
        tile += (b == batch).to(tl.int32)
        b = tl.where(b == batch, 0, b)
        place = place_of(b, h, tile, heads, block, chunks, PLAN)
        kept = kept_rows(place, rows, in_use_ptr, b.to(tl.int64) * in_use_b, block, tl.where(item + 1 < end, seqlen, 0))
        start = x_ptr + b.to(tl.int64) * x_b + h.to(tl.int64) * x_h + place[1].to(tl.int64) * x_s
        if PLAN.ahead:
            ahead = load_tile(start, rows, kept, x_s, x_d, PLAN)

        mean, factor, signs, tables = None, None, None, None
        if mean_ptr is not None:
            mean = load_channels(mean_ptr + b_now * mean_b + h_now // mean_group * PLAN.head_dim, 0.0, PLAN)
        if factor_ptr is not None:
            factor = load_channels(factor_ptr + b_now * factor_b + h_now // factor_group * PLAN.head_dim, 1.0, PLAN)
        if signs_ptr is not None:
            signs = load_signs(signs_ptr, PLAN)
        if cos_ptr is not None:
            tables = tables_of(
                b_now, place_now, rows, cos_ptr, sin_ptr, cos_b, cos_p, cos_c, sin_b, sin_p, sin_c, first_position,
                seqlen,
            )  # fmt: skip
        care = quantize_tile(
            raw, start_now, x_s, x_d, kept_now, tables, mean, factor, signs, high, low, matrix_factor, rows, place_now,
            codes_ptr, head_stride, row_stride, scale_ptr, amax_ptr, shift_ptr, seqlen, extent, block, blocks, PLAN,
            PLAN.hopes,
        )  # fmt: skip
        if PLAN.ahead and PLAN.hopes:  # noqa: SIM102 - known when compiled
            if care == 1:  # the next tile, too, made room
                ahead = load_tile(start, rows, kept, x_s, x_d, PLAN)


@triton.jit
def redo_kernel(
    x_ptr, x_b, x_h, x_s, x_d, codes_ptr, head_stride, row_stride, scale_ptr, amax_ptr, in_use_ptr, in_use_b,
    cos_ptr, sin_ptr, cos_b, cos_p, cos_c, sin_b, sin_p, sin_c, first_position,
    mean_ptr, mean_group, mean_b, factor_ptr, factor_group, factor_b, shift_ptr,
    high_ptr, low_ptr, signs_ptr, matrix_factor,
    batch, heads, seqlen, extent, block, blocks, chunks, tiles, PLAN: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Quantize again, with care, the tiles that have a scale of 0: those that ``folded_kernel`` found to need it.

    A program looks through the scales of ``SHARE`` tiles at once; as a rule none is marked and that is all.
    """
    GROUPS: tl.constexpr = PLAN.tile // PLAN.together
    item = tl.program_id(0) * SHARE + tl.arange(0, SHARE)
    group = (item % tiles)[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
    exists = (item < batch * heads * tiles)[:, None] & (group < blocks)
    scale = tl.load(scale_ptr + (item // tiles).to(tl.int64)[:, None] * blocks + group, mask=exists, other=1.0)
    marked = tl.min(scale, 1) == 0
    left = tl.sum(marked.to(tl.int32), 0)
    while left > 0:
        which = tl.min(tl.where(marked, item, 2**31 - 1), 0)
        marked = marked & (item != which)
        left -= 1
        rows = tile_rows(block, PLAN)
        high, low = load_matrix(high_ptr, PLAN), None
        if low_ptr is not None:
            low = load_matrix(low_ptr, PLAN)
        b, h = (which // tiles // heads).to(tl.int64), which // tiles % heads
        place = place_of(b, h, which % tiles, heads, block, chunks, PLAN)
        kept = kept_rows(place, rows, in_use_ptr, b * in_use_b, block, seqlen)
        start = x_ptr + b * x_b + h.to(tl.int64) * x_h + place[1].to(tl.int64) * x_s
        mean, factor, signs, tables = None, None, None, None
        if mean_ptr is not None:
            mean = load_channels(mean_ptr + b * mean_b + h // mean_group * PLAN.head_dim, 0.0, PLAN)
        if factor_ptr is not None:
            factor = load_channels(factor_ptr + b * factor_b + h // factor_group * PLAN.head_dim, 1.0, PLAN)
        if signs_ptr is not None:
            signs = load_signs(signs_ptr, PLAN)
        if cos_ptr is not None:
            tables = tables_of(
                b, place, rows, cos_ptr, sin_ptr, cos_b, cos_p, cos_c, sin_b, sin_p, sin_c, first_position, seqlen
            )
        quantize_tile(
            load_tile(start, rows, kept, x_s, x_d, PLAN), start, x_s, x_d, kept, tables, mean, factor, signs, high, low,
            matrix_factor, rows, place, codes_ptr, head_stride, row_stride, scale_ptr, amax_ptr, shift_ptr, seqlen,
            extent, block, blocks, PLAN, False,
        )  # fmt: skip
