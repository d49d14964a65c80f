# mypy: ignore-errors
"""The kernel of ``folded.py``: queries and keys of the common case, as fast as memory delivers them.

What makes it fast, beside ``quantize_kernel.py``, which does the same for everything:

- **The input is the operand.** 16-bit tokens are copied to shared memory ahead of time and multiplied from there as
  they are; nothing is done to them on the way. Balance is a factor of the matrix's rows (``prepare_kernel``), and the
  mean key is taken out after the rotation, as its image: (x - m) R = x R - m R. Rotary embedding alone needs the
  values in registers, before the product.
- **The result is where it is stored from.** Of a product a thread of the tensor core holds the columns
  8 j + 2 t + e of the rows 16 w + 8 b + g (its own t, w and g; all of j, b and e). So the matrix's columns are
  permuted (``column_order``) and the tile's rows taken in another order (``_row_order``), until they are the neighbours
  that one store of 16 bytes takes: only names change, no data moves between threads.
- **The odd tile is somebody else's.** Where a scale shows that a tile needs care (NaN, infinity, extreme magnitudes) it
  is written as 0, which is no scale, and ``redo_kernel`` quantizes that tile again.

H_D = [[H, H], [S H, -S H]] with signs S, so with x = [low, high] only P = low H and Q = high S H are products, and the
result is [P + Q, P - Q]: "folded".
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from fp8attn.kernels.portable.numerics import add_product, cast, decode, widen
from fp8attn.kernels.portable.quantize_tile import scale_of

__all__ = ["FoldedPlan", "column_order", "folded_kernel", "prepare_kernel"]


class FoldedPlan(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        head_dim, tile: channels, a power of two; tokens a tile.
        blocked: whether a tile is a block, with one scale; else every token has one.
        rotary: whether tokens are turned first.
        sharing: of how many heads a program turns a tile at a time, with tables that it loads once.
        terms: how many 16-bit terms the matrix has, one product each (without rotary embedding).
        factor: whether channels are multiplied one by one, after rotary embedding; without that, the terms hold it.
        mean: "" or what the mean's image is for: "key", to take it out; "shift", to be multiplied with.
        dtype, largest: of the codes; pow2: how scales are chosen.
        stages: of the pipeline that copies tokens to shared memory.
    """

    head_dim: int
    tile: int
    blocked: bool
    rotary: bool
    sharing: int
    terms: int
    factor: bool
    mean: str
    dtype: tl.dtype
    largest: float
    pow2: bool
    stages: int


def column_order(half: int) -> list[int]:
    """The channel in each of a product's ``half`` columns."""
    return [half // 4 * (n // 2 % 4) + n // 8 * 2 + n % 2 for n in range(half)]


@triton.jit
def _row_order(PLAN: tl.constexpr):
    """The token in each of a product's rows."""
    m = tl.arange(0, PLAN.tile)
    return m // 8 % 2 * (PLAN.tile // 2) + m // 16 * 8 + m % 8


@triton.jit
def _in_order(x, PLAN: tl.constexpr):
    """A product with its rows and columns back in order."""
    HALF: tl.constexpr = PLAN.head_dim // 2
    x = tl.reshape(x, (PLAN.tile // 16, 2, 8, HALF // 8, 4, 2))
    return tl.reshape(tl.permute(x, (1, 0, 2, 4, 3, 5)), (PLAN.tile, HALF))


@triton.jit
def _halves(ptr, PLAN: tl.constexpr):
    """A vector of the head dim: its halves."""
    channel = tl.arange(0, PLAN.head_dim // 2)
    return tl.load(ptr + channel), tl.load(ptr + PLAN.head_dim // 2 + channel)


# ---- The matrix, with statistics -------------------------------------------------------------------------------------


@triton.jit
def _fitting(factor):
    """NaN where it is too small or too large for an input over the bound to show in the result."""
    return tl.where((factor >= 2.0**-20) & (factor <= 2.0**20), factor, float("nan"))


@triton.jit
def prepare_kernel(
    units, factor_ptr, factor_b, mean_ptr, mean_b, terms_ptr, image_ptr, heads, largest_mean,
    HALF: tl.constexpr, TERMS: tl.constexpr, DIVIDES: tl.constexpr,
):  # fmt: skip
    """Of a kv head, one program writes the upper half of the matrix, its rows times (or over) ``factor``, in ``TERMS``
    BF16 terms that add up to it; one the lower half; and one the image of mean over factor.

    ``units`` (2 HALF, HALF) is [H; S H] of +-1 with its columns in ``column_order``. Statistics too large or too small
    for what ``folded_kernel`` assumes become NaN, which makes every tile of the head one that needs care.
    """
    index, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, h = index // heads, index % heads
    row, column = tl.arange(0, HALF), tl.arange(0, HALF)
    at = row[:, None] * HALF + column[None, :]
    if part < 2:
        if TERMS > 0:
            factor = _fitting(tl.load(factor_ptr + b * factor_b + (h * 2 + part) * HALF + row))
            by = tl.div_rn(tl.full((HALF,), 1.0, tl.float32), factor) if DIVIDES else factor
            rest = tl.load(units + part * HALF * HALF + at).to(tl.float32) * by[:, None]
            to = terms_ptr + (index * TERMS * 2 + part) * HALF * HALF + at
            for term in tl.static_range(TERMS):
                value = cast(rest, tl.bfloat16)
                tl.store(to + term * 2 * HALF * HALF, value)
                rest -= decode(value)
    elif mean_ptr is not None:
        sums = ()
        for half in tl.static_range(2):
            inside = h * 2 * HALF + half * HALF + row
            mean = tl.load(mean_ptr + b * mean_b + inside)
            if factor_ptr is not None:
                mean = tl.div_rn(mean, _fitting(tl.load(factor_ptr + b * factor_b + inside)))
            mean = tl.where(tl.abs(mean) <= largest_mean, mean, float("nan"))
            unit = tl.load(units + half * HALF * HALF + at).to(tl.float32)
            sums = sums + (tl.sum(mean[:, None] * unit, 0),)
        image = image_ptr + index * 2 * HALF + HALF // 4 * (column // 2 % 4) + column // 8 * 2 + column % 2
        tl.store(image, sums[0] + sums[1])
        tl.store(image + HALF, sums[0] - sums[1])


# ---- Tiles -----------------------------------------------------------------------------------------------------------


@triton.jit
def _load_terms(ptr, PLAN: tl.constexpr):
    """Both halves of the matrix: for each a tuple of terms."""
    HALF: tl.constexpr = PLAN.head_dim // 2
    at = ptr + tl.arange(0, HALF)[:, None] * HALF + tl.arange(0, HALF)[None, :]
    TERMS: tl.constexpr = PLAN.terms
    upper, lower = (), ()
    for term in tl.static_range(TERMS):
        upper = upper + (tl.load(at + (term * 2) * HALF * HALF),)
        lower = lower + (tl.load(at + (term * 2 + 1) * HALF * HALF),)
    return upper, lower


@triton.jit
def _load_tile(ptr, last, row_stride, PLAN: tl.constexpr):
    """The low and the high channels of the tile that begins at ``ptr``, its rows in ``_row_order``.

    Beyond the sequence's last token (counted from the tile's first) that is read again: nothing is written from it, and
    it raises no maximum.
    """
    row, channel = tl.minimum(_row_order(PLAN), last), tl.arange(0, PLAN.head_dim // 2)
    at = ptr + row[:, None] * row_stride + channel[None, :]
    return tl.load(at), tl.load(at + PLAN.head_dim // 2)


@triton.jit
def _multiplied(x, terms, PLAN: tl.constexpr):
    """x (tile, half) times the sum of the terms, small ones first."""
    sums = tl.full((PLAN.tile, PLAN.head_dim // 2), 0.0, tl.float32)
    for i in tl.static_range(len(terms)):
        sums = add_product(x, terms[len(terms) - 1 - i], sums)
    return sums


@triton.jit
def _split_multiplied(x, unit, signs, PLAN: tl.constexpr):
    """FP32 x (tile, half), as the sum of two FP16 values each, times ``signs`` times ``unit``."""
    if signs is not None:
        x *= signs[None, :]
    near = x.to(tl.float16)
    rest = (x - near.to(tl.float32)).to(tl.float16)
    sums = add_product(rest, unit, tl.full((PLAN.tile, PLAN.head_dim // 2), 0.0, tl.float32))
    return add_product(near, unit, sums)


@triton.jit
def _load_tables(cos_ptr, sin_ptr, row_stride, last, PLAN: tl.constexpr):
    """Rotary tables for a tile's rows; the pointers are to the position of the first."""
    row, pair = tl.minimum(_row_order(PLAN), last), tl.arange(0, PLAN.head_dim // 2)
    at = row[:, None] * row_stride + pair[None, :]
    return tl.load(cos_ptr + at), tl.load(sin_ptr + at)


@triton.jit
def _turned(low, high, cos, sin):
    """Rotary embedding, as FP32."""
    low, high, cos, sin = widen(low), widen(high), widen(cos), widen(sin)
    return tl.fma(high, sin * -1.0, low * cos), tl.fma(low, sin, high * cos)


@triton.jit
def _is_usual(amax, floor, PLAN: tl.constexpr):
    """Whether what a scale covers needed no care."""
    if PLAN.rotary:  # of the two FP16 terms of an element nothing that matters vanished, and none overflowed
        return (amax >= tl.maximum(2.0**-4, floor)) & (amax <= 2.0**11)
    usual = (amax >= tl.maximum(2.0**-60, floor)) & (amax <= 2.0**60)
    return usual if PLAN.mean == "key" else usual | (amax == 0)


@triton.jit
def _store_tile(
    p, q, image, codes_ptr, row_stride, scale_ptr, shift_ptr, token, seqlen, matrix_factor, PLAN: tl.constexpr
):
    """Combine the products of a tile that begins at ``token``; scale, cast and store it.

    ``codes_ptr`` is to the tile, ``scale_ptr`` and ``shift_ptr`` are to the sequence. A scale of 0 marks what needs
    care: what is not finite (which shows in every channel of a row: a maximum that ignores NaN finds infinity or
    nothing but NaN), a magnitude at which the assumptions do not hold, or keys beside which their mean is so large that
    taking it out afterwards loses bits.
    """
    HALF: tl.constexpr = PLAN.head_dim // 2
    row, channel = tl.arange(0, PLAN.tile), tl.arange(0, HALF)
    kept = token + row < seqlen
    p, q = _in_order(p, PLAN), _in_order(q, PLAN)
    low, high = p + q, p - q
    floor = 0.0
    if PLAN.mean == "key":
        low, high = low - image[0][None, :], high - image[1][None, :]
        largest = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1)
        floor = tl.max(tl.maximum(tl.abs(image[0]), tl.abs(image[1])), 0) * 2.0**-5
    else:
        largest = tl.max(tl.abs(p) + tl.abs(q), 1)  # of |p + q| and |p - q|; rounding is the same for both signs
    if PLAN.mean == "shift":
        # x m = (x b R) (m / b R) for an orthogonal R
        left, right = tl.broadcast_to(image[0][None, :], low.shape), tl.broadcast_to(image[1][None, :], low.shape)
        shift = tl.sum(tl.fma(low, left, high * right), 1) * (1.0 / PLAN.head_dim)
        tl.store(shift_ptr + token + row, shift, mask=kept)
    amax = largest * matrix_factor
    if PLAN.blocked:
        amax = tl.max(tl.where(amax <= 2.0**60, amax, float("inf")), 0)  # NaN compares false
    scale = scale_of(amax, PLAN)
    marked = tl.where(_is_usual(amax, floor * matrix_factor, PLAN), scale, 0.0)
    if PLAN.blocked:
        tl.store(scale_ptr + token // PLAN.tile, marked)
        by = tl.full((PLAN.tile,), 0.0, tl.float32) + matrix_factor / scale
    else:
        tl.store(scale_ptr + token + row, marked, mask=kept)
        by = matrix_factor / scale
    to = codes_ptr + row[:, None] * row_stride + channel[None, :]
    tl.store(to, cast(low * by[:, None], PLAN.dtype), mask=kept[:, None])
    tl.store(to + HALF, cast(high * by[:, None], PLAN.dtype), mask=kept[:, None])


@triton.jit
def folded_kernel(
    x_ptr, x_b, x_h, x_s, codes_ptr, head_stride, row_stride, scale_ptr, blocks, shift_ptr,
    units_ptr, signs_ptr, terms_ptr, terms_stride, image_ptr, factor_ptr, factor_b, group, matrix_factor,
    cos_ptr, sin_ptr, table_p, table_b, first_position, batch, heads, seqlen, tiles, PLAN: tl.constexpr,
):  # fmt: skip
    """Quantize this program's share of the tiles; ``tiles``: of a sequence. ``group`` heads share statistics.

    Without rotary embedding a program works through sequences, for which it loads the matrix once. With it, heads run
    fastest, and rotary tables are found in the cache.
    """
    HALF: tl.constexpr = PLAN.head_dim // 2
    count, programs, program = tiles * heads * batch // PLAN.sharing, tl.num_programs(0), tl.program_id(0)
    begin = program * (count // programs) + tl.minimum(program, count % programs)
    end = begin + count // programs + (program < count % programs).to(tl.int32)
    if PLAN.rotary:
        channel = tl.arange(0, HALF)
        unit = tl.load(units_ptr + channel[:, None] * HALF + channel[None, :])
        signs = tl.load(signs_ptr + channel)
        # The next item's head, sequence and token are counted on: divisions take long.
        sharing: tl.constexpr = PLAN.sharing
        h, b = begin % (heads // sharing) * sharing, begin // (heads // sharing) % batch
        tile = begin // (heads // sharing * batch)
        for _ in tl.range(begin, end, num_stages=PLAN.stages):
            b_long, token = tl.cast(b, tl.int64), tile * PLAN.tile
            sequence, last = tl.cast(b * heads + h, tl.int64), seqlen - 1 - token
            start = x_ptr + b_long * x_b + tl.cast(h, tl.int64) * x_h + tl.cast(token, tl.int64) * x_s
            at = tl.cast(first_position + token, tl.int64) * table_p
            if table_b is not None:
                at += b_long * table_b
            cos, sin = _load_tables(cos_ptr + at, sin_ptr + at, table_p, last, PLAN)
            raw = ()
            for i in tl.static_range(sharing):
                raw = raw + _load_tile(start + tl.cast(x_h, tl.int64) * i, last, x_s, PLAN)
            for i in tl.static_range(sharing):
                low, high = _turned(raw[2 * i], raw[2 * i + 1], cos, sin)
                image = None
                if PLAN.factor:
                    factor = _halves(factor_ptr + b_long * factor_b + (h + i) // group * PLAN.head_dim, PLAN)
                    low, high = low * _fitting(factor[0])[None, :], high * _fitting(factor[1])[None, :]
                if PLAN.mean != "":
                    image = _halves(image_ptr + (b_long * (heads // group) + (h + i) // group) * PLAN.head_dim, PLAN)
                _store_tile(
                    _split_multiplied(low, unit, None, PLAN), _split_multiplied(high, unit, signs, PLAN), image,
                    codes_ptr + (sequence + i) * head_stride + tl.cast(token, tl.int64) * row_stride, row_stride,
                    scale_ptr + (sequence + i) * blocks,
                    shift_ptr + (sequence + i) * seqlen if PLAN.mean == "shift" else 0,
                    token, seqlen, matrix_factor, PLAN,
                )  # fmt: skip
            h += sharing
            b += (h == heads).to(tl.int32)
            h = tl.where(h == heads, 0, h)
            tile += (b == batch).to(tl.int32)
            b = tl.where(b == batch, 0, b)
    else:
        for number in range(begin // tiles, (end + tiles - 1) // tiles):
            sequence = tl.cast(number, tl.int64)
            b, h = tl.cast(number // heads, tl.int64), tl.cast(number % heads, tl.int64)
            statistics = b * (heads // group) + h // group
            image = None
            upper, lower = _load_terms(terms_ptr + statistics * terms_stride, PLAN)
            if PLAN.mean != "":
                image = _halves(image_ptr + statistics * PLAN.head_dim, PLAN)
            first, end_here = tl.maximum(begin - number * tiles, 0), tl.minimum(end - number * tiles, tiles)
            for tile in tl.range(first, end_here, num_stages=PLAN.stages):
                token = tile * PLAN.tile
                start = x_ptr + b * x_b + h * x_h + tl.cast(token, tl.int64) * x_s
                low, high = _load_tile(start, seqlen - 1 - token, x_s, PLAN)
                _store_tile(
                    _multiplied(low, upper, PLAN), _multiplied(high, lower, PLAN), image,
                    codes_ptr + sequence * head_stride + tl.cast(token, tl.int64) * row_stride, row_stride,
                    scale_ptr + sequence * blocks, shift_ptr + sequence * seqlen if PLAN.mean == "shift" else 0,
                    token, seqlen, matrix_factor, PLAN,
                )  # fmt: skip
