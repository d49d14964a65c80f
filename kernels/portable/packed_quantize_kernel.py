# mypy: ignore-errors
"""``quantize_kernel`` over a packed batch (``packed.py``): the same tiles, each of a sequence that it has to find."""

from __future__ import annotations

import triton
import triton.language as tl

from fp8attn.kernels.portable.packed import ALIGNMENT, find_sequence, first_unit
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

__all__ = ["packed_quantize_kernel"]

_ALIGNMENT = tl.constexpr(ALIGNMENT)


@triton.jit
def packed_quantize_kernel(
    x_ptr, x_b, x_h, x_s, x_d, codes_ptr, head_stride, row_stride, scale_ptr, amax_ptr, in_use_ptr, in_use_b,
    cos_ptr, sin_ptr, cos_b, cos_p, cos_c, sin_b, sin_p, sin_c, first_position,
    mean_ptr, mean_group, mean_b, factor_ptr, factor_group, factor_b, shift_ptr,
    high_ptr, low_ptr, signs_ptr, matrix_factor,
    cu_seqlens, sequences, total, heads, heads_a_program, block, chunks, PLAN: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Quantize one tile of some heads; arguments up to ``matrix_factor`` are ``quantize_kernel``'s.

    With ``ALIGNED`` rows of codes go where ``PackedTensor`` has them, else where the tokens are; rotary tables have a
    row a token. The sequence is a batch of one: pointers and sizes are its own.
    """
    unit = PLAN.tile // PLAN.together * block  # tokens of ``chunks`` tiles
    sequence, begin, length, place_of_unit = find_sequence(
        cu_seqlens, sequences, tl.program_id(0) // chunks, unit, total
    )
    tile = place_of_unit * chunks + tl.program_id(0) % chunks
    extent = length if PLAN.layout == "rows" else (length + 15) // 16 * 16
    blocks = tl.cdiv(length, block)
    if (tile > 0) & (place_of_unit * unit >= extent):  # the first has a scale to write, even of an empty sequence
        return
    begin = begin.to(tl.int64)
    row = first_unit(begin, sequence, _ALIGNMENT) * _ALIGNMENT if ALIGNED else begin
    codes_ptr += row * row_stride if PLAN.layout == "rows" else row
    if PLAN.shifts:
        shift_ptr += begin * heads
    if PLAN.scaled:
        if PLAN.groups == "tile" or PLAN.groups == "block":
            first_scale = first_unit(begin, sequence, block) * heads
        elif PLAN.groups == "tensor":
            first_scale = sequence
        else:
            first_scale = sequence * heads * (PLAN.head_dim if PLAN.groups == "channel" else 1)
        scale_ptr += first_scale
        if amax_ptr is not None:
            amax_ptr += first_scale

    rows = tile_rows(block, PLAN)
    high, low, signs = None, None, None
    if high_ptr is not None:
        high = load_matrix(high_ptr, PLAN)
    if low_ptr is not None:
        low = load_matrix(low_ptr, PLAN)
    if signs_ptr is not None:
        signs = load_signs(signs_ptr, PLAN)
    first_head = tl.program_id(1) * heads_a_program
    for h in range(first_head, tl.minimum(first_head + heads_a_program, heads)):
        place = place_of(0, h, tile, heads, block, chunks, PLAN)
        kept = kept_rows(place, rows, in_use_ptr, begin, block, length)
        start = x_ptr + tl.cast(h, tl.int64) * x_h + (begin + place[1]) * x_s
        raw = load_tile(start, rows, kept, x_s, x_d, PLAN)
        mean, factor, tables = None, None, None
        if mean_ptr is not None:
            at = tl.cast(sequence, tl.int64) * mean_b + h // mean_group * PLAN.head_dim
            mean = load_channels(mean_ptr + at, 0.0, PLAN)
        if factor_ptr is not None:
            at = tl.cast(sequence, tl.int64) * factor_b + h // factor_group * PLAN.head_dim
            factor = load_channels(factor_ptr + at, 1.0, PLAN)
        if cos_ptr is not None:  # an empty sequence at the very end has no row of its own
            tables = tables_of(
                0, place, rows, cos_ptr, sin_ptr, 0, cos_p, cos_c, 0, sin_p, sin_c,
                tl.minimum(begin, total - 1), tl.maximum(length, 1),
            )  # fmt: skip
        quantize_tile(
            raw, start, x_s, x_d, kept, tables, mean, factor, signs, high, low, matrix_factor, rows, place, codes_ptr,
            head_stride, row_stride, scale_ptr, amax_ptr, shift_ptr, length, extent, block, blocks, PLAN, PLAN.hopes,
        )  # fmt: skip
