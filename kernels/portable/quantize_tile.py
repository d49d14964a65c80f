# mypy: ignore-errors
"""A tile of tokens in the kernels of ``quantize_kernel.py``: loaded, rotated and scaled in registers, written as codes.

Three things shape the code:

- **Segments.** Half-split rotary embedding pairs channel i with i + R/2. A tile is loaded as one tensor a segment of
  channels, so that both halves of a pair lie in the same register position of one thread, and no data moves between
  threads. Hadamard matrices gain from the same split: H_D = [[H, H], [H, -H]] with H = H_{D/2}, so one addition an
  element halves the work of the tensor core ("fold").
- **Rotation by 16-bit dots, to FP32's accuracy.** Every element is split into the sum of two FP16 values, which holds
  22 bits and a sign; times a matrix of +-1 all products are exact, and the tensor core sums them in FP32. Other
  matrices are split too (three dots). 16-bit inputs that nothing was done to need no split at all.
- **The usual tile needs no care.** NaN, infinity and extreme magnitudes need guards at every step, and a row must be
  scaled to fit FP16. Whether any of it was needed shows in the largest magnitudes that the scales need anyway: a tile
  is first computed without (``USUAL``), and the rare one that turns out not to be usual once more, with care.

A tile travels as a tuple of segments, each (tile, span); a row's magnitudes and scales are (tile,). The types are
Triton's, which mypy does not know; Triton in turn knows no ``*`` inside a tuple.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from fp8attn.kernels.portable.numerics import INTERPRETED, add_product, cast, decode

__all__ = [
    "Plan",
    "kept_rows",
    "load_channels",
    "load_matrix",
    "load_signs",
    "load_tile",
    "place_of",
    "quantize_tile",
    "scale_of",
    "tables_of",
    "tile_rows",
]


class Plan(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        head_dim, widths, spans: channels, those of each segment, and its padded size (a power of two).
        tile, together: rows of a tile, and how many of them belong to one block (``tile_rows``).
        bound: what finite inputs are clamped to.
        rotary: "", "halves" or "interleaved"; pairs: how many of them turn.
        shifts: ``mean`` is for the shift alone; divides: ``factor`` is a divisor.
        terms, folded: the rotation's (``_Rotation``); no terms, no rotation.
        dtype, largest: of the codes; scaled, pow2: how scales are chosen.
        groups: "tile" if a tile holds whole groups, else the granularity's kind, whose scales take two passes;
            only_amax: whether this is the first of them.
        layout: "rows"; "columns" for permuted columns, and "ordered" if tiles are whole groups of 16 of them.
        hopes: whether a tile is first computed without care.
        ahead: whether a tile is loaded while the one before it is worked on; else two programs take turns to wait.
        blackwell: whether the GPU is one (``_largest_of_tile``).
    """

    head_dim: int
    widths: tuple[int, ...]
    spans: tuple[int, ...]
    tile: int
    together: int
    bound: float
    rotary: str
    pairs: int
    shifts: bool
    divides: bool
    terms: int
    folded: bool
    dtype: tl.dtype
    largest: float
    scaled: bool
    pow2: bool
    groups: str
    only_amax: bool
    layout: str
    hopes: bool
    ahead: bool
    blackwell: bool


@triton.constexpr_function
def _start(plan: Plan, i: int) -> int:
    """First channel of a segment."""
    return sum(plan.widths[:i])


@triton.constexpr_function
def _block(plan: Plan, i: int, j: int) -> int:
    """Where ``load_matrix`` put the block from segment i to segment j."""
    return 0 if plan.folded else i * len(plan.spans) + j


@triton.jit
def tile_rows(block, PLAN: tl.constexpr):
    """A tile's rows, alike in every tile: (token counted from the tile's first, place in its block, block) of each.

    A tile holds ``tile // together`` whole blocks, each in ``together`` rows of which the first ``block`` are used; or
    if a block has several chunks, one of these.
    """
    row = tl.arange(0, PLAN.tile)
    if PLAN.layout == "ordered":  # as columns store tokens, TOKEN_ORDER: what is stored together is loaded together
        slot = row % 16
        row += slot // 4 * 2 + slot // 2 % 2 * 8 + slot % 2 - slot
    return row // PLAN.together * block + row % PLAN.together, row % PLAN.together, row // PLAN.together


@triton.jit
def place_of(b, h, tile, heads, block, chunks, PLAN: tl.constexpr):
    """Where a tile lies: (number of the sequence, its first token, its first block, how far into that it begins)."""
    index, skipped = tile // chunks * (PLAN.tile // PLAN.together), tile % chunks * PLAN.tile
    return (b * heads + h).to(tl.int64), index * block + skipped, index, skipped


@triton.jit
def kept_rows(place, rows, in_use_ptr, in_use_offset, block, seqlen):
    """Which rows hold tokens that are in use."""
    _, first, _, skipped = place
    after, inside, _ = rows
    kept = (skipped + inside < block) & (first + after < seqlen)
    if in_use_ptr is not None:
        kept &= tl.load(in_use_ptr + in_use_offset + first + after, mask=kept, other=0) != 0
    return kept


@triton.jit
def load_tile(ptr, rows, kept, stride_s, stride_d, PLAN: tl.constexpr):
    """The rows that are ``kept`` of the tile that begins at ``ptr``; 0 elsewhere."""
    parts = ()
    for i in tl.static_range(len(PLAN.spans)):
        channel = tl.arange(0, PLAN.spans[i])
        offset = (_start(PLAN, i) + channel).to(tl.int64)[None, :] * stride_d
        at = ptr + rows[0].to(tl.int64)[:, None] * stride_s + offset
        parts = parts + (tl.load(at, mask=kept[:, None] & (channel < PLAN.widths[i])[None, :], other=0.0),)
    return parts


@triton.jit
def load_channels(ptr, other: tl.constexpr, PLAN: tl.constexpr):
    """A statistic: segments (span,), ``other`` in the padding."""
    parts = ()
    for i in tl.static_range(len(PLAN.spans)):
        channel = tl.arange(0, PLAN.spans[i])
        parts = parts + (tl.load(ptr + _start(PLAN, i) + channel, mask=channel < PLAN.widths[i], other=other),)
    return parts


@triton.jit
def load_signs(ptr, PLAN: tl.constexpr):
    channel = tl.arange(0, PLAN.spans[1])
    return tl.load(ptr + channel, mask=channel < PLAN.widths[1], other=1.0)


@triton.jit
def load_matrix(ptr, PLAN: tl.constexpr):
    """The matrix in blocks, from segment to segment (``_block``); the one block of a folded matrix."""
    blocks = ()
    count: tl.constexpr = 1 if PLAN.folded else len(PLAN.spans)
    size: tl.constexpr = PLAN.widths[0] if PLAN.folded else PLAN.head_dim
    for i in tl.static_range(count):
        for j in tl.static_range(count):
            row, column = tl.arange(0, PLAN.spans[i]), tl.arange(0, PLAN.spans[j])
            at = ptr + (_start(PLAN, i) + row)[:, None] * size + (_start(PLAN, j) + column)[None, :]
            inside = (row < PLAN.widths[i])[:, None] & (column < PLAN.widths[j])[None, :]
            blocks = blocks + (tl.load(at, mask=inside, other=0.0),)
    return blocks


@triton.jit
def _max_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _largest_of_tile(x, PLAN: tl.constexpr):
    """Of a value a row."""
    if PLAN.blackwell and PLAN.terms > 0:  # Triton 3.6 fails to reduce there what was reduced from a dot: hide that
        x = tl.associative_scan(x, 0, _larger)
    return tl.max(x, axis=0)


@triton.jit
def _finite_magnitude(x, USUAL: tl.constexpr):
    x = tl.abs(x)
    return x if USUAL else tl.where(x < float("inf"), x, 0.0)  # NaN compares false


@triton.jit
def _row_largest(x, USUAL: tl.constexpr):
    """Each row's largest magnitude: of the finite values, or on the assumption that all are, NaN if one is NaN."""
    largest = _largest_of_row(x[0], USUAL)
    for i in tl.static_range(1, len(x)):
        largest = _max_or_nan(largest, _largest_of_row(x[i], USUAL))
    return largest


@triton.jit
def _largest_of_row(x, USUAL: tl.constexpr):
    x = _finite_magnitude(x.to(tl.float32), USUAL)
    if INTERPRETED:  # reduces by a user's function one element at a time; as bits, NaN is above infinity
        return tl.max(x.to(tl.int32, bitcast=True), axis=1).to(tl.float32, bitcast=True)
    return tl.reduce(x, 1, _max_or_nan)


@triton.jit
def _bounded(x, PLAN: tl.constexpr, USUAL: tl.constexpr):
    """FP32, with finite values brought within the bound; NaN and infinity stay."""
    parts = ()
    for i in tl.static_range(len(x)):
        value = decode(x[i])
        if not USUAL:
            value = tl.where(tl.abs(value) < float("inf"), tl.clamp(value, -PLAN.bound, PLAN.bound), value)
        parts = parts + (value,)
    return parts


@triton.jit
def _turned(x, tables, PLAN: tl.constexpr):
    """Rotary embedding. ``tables``: pointers to cos and sin at each row's position, (tile,), and strides of pairs."""
    cos_ptr, cos_c, sin_ptr, sin_c = tables
    turned = ()
    if PLAN.rotary == "halves":
        pair = tl.arange(0, PLAN.spans[0])
        turns = (pair < PLAN.pairs)[None, :]
        cos = tl.load(cos_ptr[:, None] + pair[None, :] * cos_c, mask=turns, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr[:, None] + pair[None, :] * sin_c, mask=turns, other=0.0).to(tl.float32)
        turned = (tl.fma(x[1], sin * -1.0, x[0] * cos), tl.fma(x[0], sin, x[1] * cos)) + x[2:]
    else:
        for i in tl.static_range(len(x)):
            within = tl.arange(0, PLAN.spans[i] // 2)
            pair = _start(PLAN, i) // 2 + within
            turns = ((within * 2 < PLAN.widths[i]) & (pair < PLAN.pairs))[None, :]
            cos = tl.load(cos_ptr[:, None] + pair[None, :] * cos_c, mask=turns, other=0.0).to(tl.float32)
            sin = tl.load(sin_ptr[:, None] + pair[None, :] * sin_c, mask=turns, other=0.0).to(tl.float32)
            left, right = tl.split(tl.reshape(x[i], (PLAN.tile, PLAN.spans[i] // 2, 2)))
            new_left = tl.where(turns, tl.fma(right, sin * -1.0, left * cos), left)
            new_right = tl.where(turns, tl.fma(left, sin, right * cos), right)
            turned = turned + (tl.reshape(tl.join(new_left, new_right), (PLAN.tile, PLAN.spans[i])),)
    return turned


@triton.jit
def _shift(x, mean, PLAN: tl.constexpr, USUAL: tl.constexpr):
    """x . mean of each row, clamped to +-1e38."""
    up, down = 1.0, 1.0
    if not USUAL:  # bring the mean to magnitude 1, so that no sum overflows
        largest = tl.max(tl.abs(mean[0]), axis=0)
        for i in tl.static_range(1, len(mean)):
            largest = tl.maximum(largest, tl.max(tl.abs(mean[i]), axis=0))
        # The biased exponent; up to 253, so that its inverse is a normal number too.
        exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 1), 253)
        up, down = (exponent << 23).to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    total = tl.full((PLAN.tile,), 0.0, tl.float32)
    for i in tl.static_range(len(x)):
        total += tl.sum(x[i] * (mean[i] if USUAL else mean[i] * down)[None, :], axis=1)
    if not USUAL:
        total *= up
        total = tl.where(total > 1e38, 1e38, tl.where(total < -1e38, -1e38, total))  # NaN stays
    return total


@triton.jit
def _store_shift(ptr, shift, rows, place, block, seqlen):
    after, inside, _ = rows
    sequence, first, _, skipped = place
    mask = (skipped + inside < block) & (first + after < seqlen)
    tl.store(ptr + sequence * seqlen + first + after, shift, mask=mask)


@triton.jit
def _smoothed(x, kept, mean, factor, signs, PLAN: tl.constexpr):
    """Minus ``mean``, times or over ``factor``, and if the rotation is folded to x0 + signs x1 and x0 - signs x1."""
    parts = ()
    for i in tl.static_range(len(x)):
        y = x[i]
        if mean is not None and not PLAN.shifts:
            y = tl.where(kept[:, None], y - mean[i][None, :], 0.0)
        if factor is not None and PLAN.divides:
            y = tl.div_rn(y, tl.broadcast_to(factor[i][None, :], y.shape))
        elif factor is not None and not (PLAN.folded and i == 1):
            y *= factor[i][None, :]
        parts = parts + (y,)
    if PLAN.folded:
        by = signs * factor[1] if factor is not None and not PLAN.divides else signs
        by = tl.broadcast_to(by[None, :], parts[1].shape)
        parts = (tl.fma(parts[1], by, parts[0]), tl.fma(parts[1], by * -1.0, parts[0]))
    return parts


@triton.jit
def _without_infinity(x):
    return tl.where(tl.abs(x.to(tl.float32)) == float("inf"), 0.0, x).to(x.dtype)  # NaN stays


@triton.jit
def _rotated(x, high, low, PLAN: tl.constexpr, USUAL: tl.constexpr):
    """(x times the matrix, over ``inverse``; ``inverse``: (tile,), a power of two).

    The dots take 16-bit operands: x as it is (one term), or the sum of two FP16 values for each element. That loses
    2^-23 of it, but among FP16's subnormal numbers 2^-25; unless rows are usual, they are brought to magnitude 2^14.
    """
    inverse, scale = tl.full((PLAN.tile,), 1.0, tl.float32), 1.0
    first, second = x, x
    if PLAN.terms > 1 and not USUAL:
        exponent = _row_largest(x, USUAL).to(tl.int32, bitcast=True) >> 23
        up = tl.minimum(127 + 14 - exponent + 127, 127 + 120)  # biased; with its inverse far from subnormal numbers
        inverse = ((254 - up) << 23).to(tl.float32, bitcast=True)
        scale = (up << 23).to(tl.float32, bitcast=True)[:, None]
    if PLAN.terms > 1:
        first, second = (), ()
        for i in tl.static_range(len(x)):
            y = x[i] if USUAL else x[i] * scale
            near = y.to(tl.float16)
            rest = y - near.to(tl.float32)
            if not USUAL:  # infinity is in the first term alone
                rest = tl.where(tl.abs(y) < float("inf"), rest, 0.0)
            first, second = first + (near,), second + (rest.to(tl.float16),)
    parts = ()
    for j in tl.static_range(len(x)):
        sums = tl.full((PLAN.tile, PLAN.spans[j]), 0.0, tl.float32)
        for i in tl.static_range(len(x)):
            if i == j or not PLAN.folded:
                if PLAN.terms > 1:
                    sums = add_product(second[i], high[_block(PLAN, i, j)], sums)
                if PLAN.terms == 3:  # where both terms of the matrix differ in sign, infinity twice would make NaN
                    sums = add_product(
                        first[i] if USUAL else _without_infinity(first[i]), low[_block(PLAN, i, j)], sums
                    )
                sums = add_product(first[i], high[_block(PLAN, i, j)], sums)
        parts = parts + (sums,)
    return parts, inverse


@triton.jit
def _corrected(x, divisor, reciprocal):
    """x / divisor as IEEE rounds it, from an approximate reciprocal: the residual of the product with it is exact.

    Unless it is a subnormal number: the caller's to exclude.
    """
    about = x * reciprocal
    return tl.fma(tl.fma(about, divisor * -1.0, x), reciprocal, about)


@triton.jit
def _quotient(x, divisor, USUAL: tl.constexpr):
    """x / divisor as IEEE rounds it; divisor is positive, normal and below 2^127, and below 2^-90 only if not USUAL.

    What compiled code computes for ``/`` is approximate, and the correctly rounded division is slow; here the
    reciprocal is made once for all that share it.
    """
    if INTERPRETED:  # NumPy divides as IEEE does, and has no fused multiply-add
        return x / divisor
    if not USUAL:  # both over the divisor's power of two: no residual that matters to a code is a subnormal number
        down = (0x7F000000 - (divisor.to(tl.int32, bitcast=True) & 0x7F800000)).to(tl.float32, bitcast=True)
        divisor *= down
        x *= down
    reciprocal = 1.0 / divisor
    return _corrected(x, tl.broadcast_to(divisor, x.shape), tl.broadcast_to(reciprocal, x.shape))


@triton.jit
def scale_of(amax, PLAN: tl.constexpr):
    """``quantize_tensor``'s scale of groups whose largest finite magnitude is ``amax``."""
    tiny: tl.constexpr = 1.1754943508222875e-38
    # Compiled, right for every significand over each format's largest value (checked exhaustively).
    scale = amax / PLAN.largest if INTERPRETED else _corrected(amax, PLAN.largest, 1.0 / PLAN.largest)
    scale = tl.maximum(scale, tiny)
    if PLAN.pow2:
        scale = ((scale.to(tl.int32, bitcast=True) + 0x007FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(amax > 0, scale, 1.0)


@triton.jit
def _prepared(raw, kept, tables, mean, factor, signs, high, low, matrix_factor, PLAN: tl.constexpr,
              USUAL: tl.constexpr):  # fmt: skip
    """(What is to be quantized, over ``inverse``; ``inverse``; each row's largest magnitude; x . mean).

    ``USUAL`` assumes that all is finite and of usual magnitude; ``_is_usual`` tells from the result.
    """
    x, inverse, shift = _bounded(raw, PLAN, USUAL), (), ()
    if PLAN.rotary != "":
        x = _turned(x, tables, PLAN)
        if not USUAL:  # NaN in the tables, too, goes nowhere but to tokens in use
            clean = ()
            for i in tl.static_range(len(x)):
                clean = clean + (tl.where(kept[:, None], x[i], 0.0),)
            x = clean
    if PLAN.shifts:
        shift = _shift(x, mean, PLAN, USUAL)
    x = _smoothed(x, kept, mean, factor, signs, PLAN)
    if PLAN.terms == 1:  # nothing was done to it, and the bound is a value of its dtype
        operand = ()
        for i in tl.static_range(len(raw)):
            part = raw[i]
            if not USUAL:
                part = tl.where(tl.abs(x[i]) < float("inf"), cast(x[i], raw[i].dtype), part)
            operand = operand + (part,)
        x = operand
    if PLAN.terms > 0:
        x, inverse = _rotated(x, high, low, PLAN, USUAL)
        inverse *= matrix_factor
    largest = _row_largest(x, USUAL)
    if PLAN.terms > 0:
        largest *= inverse
        if not USUAL:
            largest = tl.minimum(largest, 3.4028234663852886e38)
    return x, inverse, largest, shift


@triton.jit
def _is_usual(largest, kept, mean, factor, PLAN: tl.constexpr):
    """Whether nothing in the tile needed care, by the largest magnitude of each row of the result.

    NaN and infinity in a row make NaN or infinity of that. Finite values that should have been brought within the bound
    show in it as well, for a rotation keeps the norm: unless smoothing took them away, or rotary tables whose cos and
    sin are both under 2^-10.
    """
    if PLAN.terms > 1:
        # Up to 2^11, so that the norm is under 2^15 and no element, nor a sum of two, overflows FP16. From 2^-4, so
        # that 2^-25 of an element is about 2^-22 of the norm. Rows without a token are 0, and right.
        usual = ((largest >= 2.0**-4) & (largest <= 2.0**11)) | (kept == 0)
    elif mean is not None or factor is not None:
        usual = ((largest >= 2.0**-80) & (largest <= 2.0**20)) | (largest == 0)
    elif PLAN.terms == 0:  # quotients of smaller values need care
        usual = ((largest >= 2.0**-80) & (largest <= 2.0**80)) | (largest == 0)
    else:
        usual = largest <= 2.0**80
    unusual = _largest_of_tile(tl.where(usual, 0, 1), PLAN)
    # An input over 2^90 less a mean under 2^40 times 2^-20 is over 2^20; and an input under 2^20 over 2^-20, times a
    # mean under 2^40, does not overflow in the shift.
    if mean is not None:
        for i in tl.static_range(len(mean)):
            unusual += tl.max(tl.where(tl.abs(mean[i]) <= 2.0**40, 0, 1), axis=0)
    if factor is not None:
        for i in tl.static_range(len(factor)):
            fits = factor[i] <= 2.0**20 if PLAN.divides else factor[i] >= 2.0**-20
            unusual += tl.max(tl.where(fits, 0, 1), axis=0)
    return unusual == 0


@triton.jit
def _raise_amax(amax_ptr, x, largest, place, blocks, PLAN: tl.constexpr, USUAL: tl.constexpr):
    """Raise the largest magnitudes of the tile's group, or of its channels, to the tile's."""
    sequence = place[0]
    if PLAN.groups == "channel":
        tl.static_assert(PLAN.terms == 0, "a scale per channel is for values, which are not rotated")
        for i in tl.static_range(len(x)):
            channel = tl.arange(0, PLAN.spans[i])
            bits = tl.max(_finite_magnitude(x[i], USUAL), axis=0).to(tl.int32, bitcast=True)
            at = amax_ptr + sequence * PLAN.head_dim + _start(PLAN, i) + channel
            tl.atomic_max(at, bits, mask=channel < PLAN.widths[i], sem="relaxed")
    else:
        bits = _largest_of_tile(largest, PLAN).to(tl.int32, bitcast=True)
        group, exists, _ = _group(place, blocks, PLAN)
        tl.atomic_max(amax_ptr + group, bits, mask=exists, sem="relaxed")


@triton.jit
def _group(place, blocks, PLAN: tl.constexpr):
    """Of the group that the tile is a part of: (number, whether it exists, whether the tile is its first)."""
    sequence, first, index, skipped = place
    if PLAN.groups == "tensor":
        return sequence * 0, index >= 0, (first == 0) & (sequence == 0)
    elif PLAN.groups == "block":  # padding may lie beyond the last
        return sequence * blocks + index, index < blocks, skipped == 0
    else:
        return sequence, index >= 0, first == 0


@triton.jit
def _quantized(
    x, inverse, largest, rows, place, codes_ptr, head_stride, row_stride, scale_ptr, amax_ptr, extent, block, blocks,
    PLAN: tl.constexpr, USUAL: tl.constexpr,
):  # fmt: skip
    """Scale, cast and store a tile."""
    after, inside, block_after = rows
    sequence, first, index, skipped = place
    if PLAN.scaled and PLAN.groups == "tile":
        if PLAN.together > 1:
            shape: tl.constexpr = (PLAN.tile // PLAN.together, PLAN.together)
            scale = scale_of(tl.max(tl.reshape(largest, shape), axis=1), PLAN)
            scale = tl.reshape(tl.broadcast_to(scale[:, None], shape), (PLAN.tile,))
        else:
            scale = scale_of(largest, PLAN)
        at = index + block_after
        tl.store(scale_ptr + sequence * blocks + at, scale, mask=(inside == 0) & (at < blocks))
        scale = scale[:, None]
    elif PLAN.scaled and PLAN.groups != "channel":
        group, exists, leads = _group(place, blocks, PLAN)
        amax = tl.load(amax_ptr + group, mask=exists, other=0)
        scale = scale_of(amax.to(tl.float32, bitcast=True), PLAN)
        tl.store(scale_ptr + group, scale, mask=leads & exists)
    if PLAN.terms > 0:
        by = inverse[:, None]
        if PLAN.scaled:
            by = by / scale
    for i in tl.static_range(len(x)):
        channel = tl.arange(0, PLAN.spans[i])
        at = _start(PLAN, i) + channel
        if PLAN.groups == "channel":
            amax_at = amax_ptr + sequence * PLAN.head_dim + at
            amax = tl.load(amax_at, mask=channel < PLAN.widths[i], other=0)
            scale = scale_of(amax.to(tl.float32, bitcast=True), PLAN)
            here = tl.where(first == 0, PLAN.widths[i], 0)
            tl.store(scale_ptr + sequence * PLAN.head_dim + at, scale, mask=channel < here)
            scale = scale[None, :]
        values = x[i]
        if PLAN.terms > 0:
            values *= by
        elif PLAN.scaled and USUAL:
            values = _quotient(values, scale, True)
        elif PLAN.scaled:
            finite = _quotient(_without_infinity(values), scale, False)
            values = tl.where(tl.abs(values) == float("inf"), values, finite)
        if not USUAL and PLAN.dtype != tl.float32:  # saturate; NaN compares false and stays
            values = tl.where(values > PLAN.largest, PLAN.largest, values)
            values = tl.where(values < -PLAN.largest, -PLAN.largest, values)
        codes = cast(values, PLAN.dtype)
        to = codes_ptr + sequence * head_stride
        if PLAN.layout == "rows":
            to = to + first.to(tl.int64) * row_stride
            used = (skipped + inside < block) & (first + after < extent)
            mask = used[:, None] & (channel < PLAN.widths[i])[None, :]
            tl.store(to + after[:, None] * row_stride + at[None, :], codes, mask=mask)
        else:
            column = tl.arange(0, PLAN.tile)
            if PLAN.layout == "ordered":
                used = (skipped + column % PLAN.together < block) & (first + column < extent)
                column += first
            else:
                used = (skipped + inside < block) & (first + after < extent)
                slot = (first + after) % 16
                column = first + after - slot + slot % 8 // 2 * 4 + slot // 8 * 2 + slot % 2
            mask = (channel < PLAN.widths[i])[:, None] & used[None, :]
            tl.store(to + at.to(tl.int64)[:, None] * row_stride + column[None, :], tl.trans(codes), mask=mask)


@triton.jit
def tables_of(
    b, place, rows, cos_ptr, sin_ptr, cos_b, cos_p, cos_c, sin_b, sin_p, sin_c, first_position, seqlen
):  # fmt: skip
    """A tile's rotary tables as ``_turned`` takes them."""
    # Rows beyond the last token hold zeros, which any position turns into zeros.
    position = (tl.minimum(place[1] + rows[0], seqlen - 1) + first_position).to(tl.int64)
    return cos_ptr + b * cos_b + position * cos_p, cos_c, sin_ptr + b * sin_b + position * sin_p, sin_c


@triton.jit
def quantize_tile(
    raw, start, x_s, x_d, kept, tables, mean, factor, signs, high, low, matrix_factor, rows, place,
    codes_ptr, head_stride, row_stride, scale_ptr, amax_ptr, shift_ptr, seqlen, extent, block, blocks,
    PLAN: tl.constexpr, HOPES: tl.constexpr,
):  # fmt: skip
    """From a loaded tile to codes, or to raised maxima; returns 1 if that took care.

    With ``HOPES`` it is first computed without, and if it needs care loaded again from ``start``: kept in registers all
    the time, it would crowd out others.
    """
    care = 1
    if HOPES:
        x, inverse, largest, shift = _prepared(
            raw, kept, tables, mean, factor, signs, high, low, matrix_factor, PLAN, True
        )
        if PLAN.shifts and not PLAN.only_amax:
            _store_shift(shift_ptr, shift, rows, place, block, seqlen)
        care = 1 - _is_usual(largest, kept, mean, factor, PLAN).to(tl.int32)
        if care == 0:
            if PLAN.only_amax:
                _raise_amax(amax_ptr, x, largest, place, blocks, PLAN, True)
            else:
                _quantized(
                    x, inverse, largest, rows, place, codes_ptr, head_stride, row_stride, scale_ptr, amax_ptr, extent,
                    block, blocks, PLAN, True,
                )  # fmt: skip
    if care == 1:
        if HOPES:
            raw = load_tile(start, rows, kept, x_s, x_d, PLAN)
        guarded, its_inverse, its_largest, its_shift = _prepared(
            raw, kept, tables, mean, factor, signs, high, low, matrix_factor, PLAN, False
        )
        if PLAN.shifts and not PLAN.only_amax:
            _store_shift(shift_ptr, its_shift, rows, place, block, seqlen)
        if PLAN.only_amax:
            _raise_amax(amax_ptr, guarded, its_largest, place, blocks, PLAN, False)
        else:
            _quantized(
                guarded, its_inverse, its_largest, rows, place, codes_ptr, head_stride, row_stride, scale_ptr, amax_ptr,
                extent, block, blocks, PLAN, False,
            )  # fmt: skip
    return care
