# mypy: ignore-errors
"""The first two kernels of ``statistics.py``: records of chunks, and from them the statistics of whole heads."""

from __future__ import annotations

import triton
import triton.language as tl

from fp8attn.kernels.portable.numerics import widen
from fp8attn.kernels.portable.statistics_parts import (
    LARGEST,
    balance_of,
    bound,
    chunk_of,
    hypotenuse,
    records_of,
    row_pointer,
    safe_norm,
    those_in_use,
)

__all__ = ["merge_kernel", "partials_kernel"]


# ---- 1. Records ------------------------------------------------------------------------------------------------------


@triton.jit
def _plain_tile(base, steps, start, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr):
    channel = tl.arange(0, triton.next_power_of_2(HEAD_DIM))[None, :]
    pointers = row_pointer(base, steps, 0, 0, start + tl.arange(0, ROWS), HEAD_DIM)[:, None] + channel
    return widen(tl.load(pointers, mask=channel < HEAD_DIM, other=0.0))


@triton.jit
def _plain_moments(base, steps, first, end, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, CENTERED: tl.constexpr):
    """Mean and norm per channel of whole tiles of rows that all count, and whether they can be trusted.

    Few instructions an element: nothing is done about tokens that are not finite or over the bound, nor about squares
    that overflow or vanish, but afterwards it shows. Deviations are from the mean of the first of t tiles. Its distance
    to the mean of all is at most the root of (deviations' squares / rows of a tile), so that taking it out again
    subtracts from the squares at most t / (t + 1) of them, and what rounding they have grows at most (t + 1)-fold.
    """
    BLOCK_D: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    pivot = tl.zeros([BLOCK_D], tl.float32)
    if CENTERED:
        pivot = tl.sum(_plain_tile(base, steps, first, HEAD_DIM, ROWS), 0) * (1.0 / ROWS)
    sums = tl.zeros([ROWS, BLOCK_D], tl.float32)
    squares = sums
    for start in tl.range(first, end, ROWS, num_stages=3):  # fetched ahead
        x = _plain_tile(base, steps, start, HEAD_DIM, ROWS)
        if CENTERED:
            x -= pivot[None, :]
            sums += x
        squares = tl.fma(x, x, squares)
    sums, squares = tl.sum(sums, 0), tl.sum(squares, 0)
    shift = tl.div_rn(sums, (end - first).to(tl.float32))
    about_mean = squares - sums * shift
    # NaN, infinity and values over the bound leave squares or a mean that are not small. Squares of less than 2^-75 may
    # have vanished, 2^24 of them from a sum of 2^-96 without being missed. A channel that is constant, or nearly, is
    # looked at again: only exact will do. Long chunks whose first tile is unlike the others are, too.
    trusted = (about_mean > 2.0**-96) & (squares < 2.0**110) & (tl.abs(pivot) < 2.0**55) & (about_mean > squares / 64)
    trusted = trusted | (tl.arange(0, BLOCK_D) >= HEAD_DIM)
    return pivot + shift, tl.sqrt_rn(about_mean), tl.min(trusted.to(tl.int32), 0) > 0


@triton.jit
def _guarded_moments(
    base, steps, in_use, in_use_strides, batch, first, end,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """Count, mean and norm of the rows that count, and whether all rows do and are within the bound.

    A tile's mean is corrected by the mean deviation from it. That makes it exact for a constant channel, whose
    deviations are whole units in the last place and so are sums of them: its norm is 0.
    """
    BLOCK_D: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    channel = tl.arange(0, BLOCK_D)
    n = 0.0
    mean = tl.zeros([BLOCK_D], tl.float32)
    norm = tl.zeros([BLOCK_D], tl.float32)
    plain = 1
    for start in tl.range(first, end, ROWS):
        token = start + tl.arange(0, ROWS)
        pointers = row_pointer(base, steps, 0, 0, token, HEAD_DIM)[:, None] + channel[None, :]
        inside = (token < end)[:, None] & (channel < HEAD_DIM)[None, :]
        x = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
        largest = tl.max(tl.where(x == x, tl.abs(x), float("inf")), 1)
        keep = those_in_use((token < end) & (largest < float("inf")), in_use, in_use_strides, batch, token)
        plain = tl.minimum(plain, tl.min(((keep & (largest <= LARGEST)) | (token >= end)).to(tl.int32), 0))
        x = bound(tl.where(keep[:, None], x, 0.0))
        tile_n = tl.sum(keep.to(tl.float32), 0)
        total = tl.maximum(n + tile_n, 1.0)
        if CENTERED:
            divisor = tl.maximum(tile_n, 1.0)
            tile_mean = tl.div_rn(tl.sum(x, 0), divisor)
            x = tl.where(keep[:, None], x - tile_mean[None, :], 0.0)
            shift = tl.div_rn(tl.sum(x, 0), divisor)
            tile_mean += shift
            x = tl.where(keep[:, None], x - shift[None, :], 0.0)
            share = tl.div_rn(tile_n, total)
            difference = tile_mean - mean
            mean += difference * share
            norm = hypotenuse(norm, difference * tl.sqrt_rn(n * share))
        norm = hypotenuse(norm, safe_norm(x, 0))
        n += tile_n
    return n, mean, norm, plain


@triton.jit
def _record(
    x, steps, in_use, in_use_strides, records, counts, record, channels, index, heads, chunks, seqlen, cu_seqlens,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, CENTERED: tl.constexpr, SAMPLE: tl.constexpr,
):  # fmt: skip
    """Write the record of chunk ``index`` of a tensor (B, H, S, D): mean and norm of every channel.

    To ``counts`` goes the number n of rows that count, or -1 - n if some row does not or is over the bound.
    """
    BLOCK_D: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    batch, head, _, begin, first, end, step = chunk_of(index, heads, chunks, seqlen, cu_seqlens, SAMPLE)
    base = row_pointer(x, steps, batch, head, begin, HEAD_DIM)
    steps = (steps[0], steps[1], steps[2] * step)
    if in_use is not None:
        in_use_strides = (in_use_strides[0], in_use_strides[1] * step)
        if cu_seqlens is not None:
            in_use += begin
    n = (end - first).to(tl.float32)
    mean = tl.zeros([BLOCK_D], tl.float32)
    norm = tl.zeros([BLOCK_D], tl.float32)
    trusted = (end - first) % ROWS == 0
    if cu_seqlens is not None:
        trusted = trusted & (first < end)
    if in_use is not None:
        for start in tl.range(first, end, ROWS):
            token = start + tl.arange(0, ROWS)
            used = those_in_use(token < end, in_use, in_use_strides, batch, token)
            trusted = trusted & (tl.min(used.to(tl.int32), 0) > 0)
    if trusted:
        mean, norm, trusted = _plain_moments(base, steps, first, end, HEAD_DIM, ROWS, CENTERED)
    if not trusted:
        n, mean, norm, plain = _guarded_moments(
            base, steps, in_use, in_use_strides, batch, first, end, HEAD_DIM, (ROWS + 1) // 2, CENTERED
        )
        n = tl.where(plain > 0, n, -1.0 - n)
    channel = tl.arange(0, BLOCK_D)
    inside = channel < HEAD_DIM
    to = records + record.to(tl.int64) * 2 * channels + channel
    if CENTERED:
        tl.store(to, mean, mask=inside)
    tl.store(to + channels, norm, mask=inside)
    tl.store(counts + record, n)


@triton.jit(
    do_not_specialize=[
        "q_steps", "k_steps", "v_steps", "q_in_use_strides", "k_in_use_strides",
        "channels", "programs", "chunks", "heads", "seqlens",
    ]
)  # fmt: skip
def partials_kernel(
    q, q_steps, k, k_steps, v, v_steps, q_in_use, q_in_use_strides, k_in_use, k_in_use_strides,
    records, counts, channels, programs, chunks, heads, seqlens, q_cu_seqlens, k_cu_seqlens,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, ROWS: tl.constexpr, ROWS_V: tl.constexpr,
    WITH_Q: tl.constexpr, WITH_K: tl.constexpr, WITH_V: tl.constexpr, CENTER_K: tl.constexpr, SAMPLE: tl.constexpr,
):  # fmt: skip
    """Programs of q first, then those of k, then of v. ``chunks``: for each, how many a head and how long."""
    record = tl.program_id(0)
    first_of_v = programs[0] + programs[1]
    if WITH_Q and record < programs[0]:
        _record(
            q, q_steps, q_in_use, q_in_use_strides, records, counts, record, channels,
            record, heads[0], chunks[0], seqlens[0], q_cu_seqlens, HEAD_DIM, ROWS, False, SAMPLE,
        )  # fmt: skip
    if WITH_K and record >= programs[0] and record < first_of_v:
        _record(
            k, k_steps, k_in_use, k_in_use_strides, records, counts, record, channels,
            record - programs[0], heads[1], chunks[1], seqlens[1], k_cu_seqlens, HEAD_DIM, ROWS, CENTER_K, 0,
        )  # fmt: skip
    if WITH_V and record >= first_of_v:
        _record(
            v, v_steps, k_in_use, k_in_use_strides, records, counts, record, channels,
            record - first_of_v, heads[1], chunks[2], seqlens[1], k_cu_seqlens, HEAD_DIM_V, ROWS_V, True, 0,
        )  # fmt: skip


# ---- 2. Statistics of whole heads ------------------------------------------------------------------------------------


@triton.jit
def _merged(records, counts, channels, first, number, channel, inside, CENTERED: tl.constexpr):
    """Count, mean and norm per channel of ``number`` records from ``first`` on, and whether all their rows count
    and are within the bound."""
    n = 0.0
    plain = 1
    mean = tl.zeros(channel.shape, tl.float32)
    norm = tl.zeros(channel.shape, tl.float32)
    for start in tl.range(0, number, 64):
        i = start + tl.arange(0, 64)
        record = first + i
        weight = tl.load(counts + record, mask=i < number, other=0.0)
        plain = tl.minimum(plain, tl.min((weight >= 0).to(tl.int32), 0))
        weight = tl.where(weight < 0, -1.0 - weight, weight)
        block_n = tl.sum(weight, 0)
        held = (weight > 0)[:, None] & inside[None, :]
        pointers = records + (record.to(tl.int64) * 2 * channels)[:, None] + channel[None, :]
        block_norm = safe_norm(tl.load(pointers + channels, mask=held, other=0.0), 0)
        total = tl.maximum(n + block_n, 1.0)
        if CENTERED:
            means = tl.load(pointers, mask=held, other=0.0)
            safe_n = tl.maximum(block_n, 1.0)
            # Corrected as in _moments, so that records of one mean have this mean and no spread.
            block_mean = tl.div_rn(tl.sum(weight[:, None] * means, 0), safe_n)
            off = tl.where(held, means - block_mean[None, :], 0.0)
            shift = tl.div_rn(tl.sum(weight[:, None] * off, 0), safe_n)
            block_mean += shift
            off = tl.where(held, off - shift[None, :], 0.0) * tl.sqrt_rn(weight)[:, None]
            block_norm = hypotenuse(block_norm, safe_norm(off, 0))
            share = tl.div_rn(block_n, total)
            difference = block_mean - mean
            mean += difference * share
            norm = hypotenuse(norm, difference * tl.sqrt_rn(n * share))
        norm = hypotenuse(norm, block_norm)
        n += block_n
    return n, mean, norm, plain


@triton.jit(do_not_specialize=["channels", "programs", "chunks", "group", "head_dim", "head_dim_v", "heads", "seqlens"])
def merge_kernel(
    records, counts, channels, k_mean, v_mean, balance, candidates, programs, chunks, group, head_dim, head_dim_v,
    heads, seqlens, q_cu_seqlens, k_cu_seqlens,
    SMOOTH_K: tl.constexpr, AUTO: tl.constexpr, SMOOTH_V: tl.constexpr, BALANCED: tl.constexpr, BLOCK: tl.constexpr,
    SAMPLE: tl.constexpr,
):  # fmt: skip
    """One program a kv head and ``BLOCK`` channels.

    With ``AUTO`` it writes what the decision needs to ``candidates`` (B * Hkv, 5, D): the mean, the balance without and
    with the mean taken out, the rms of balanced keys that are taken as they are, and 1 where all keys count and are
    within the bound.
    """
    kv_head = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < head_dim
    at = kv_head.to(tl.int64) * head_dim + channel
    if SMOOTH_K or BALANCED:
        first, number = records_of(kv_head, 1, heads, chunks[1], seqlens[1], k_cu_seqlens)
        n, mean, norm, plain = _merged(
            records, counts, channels, programs[0] + first, number, channel, inside, SMOOTH_K
        )
        spread = tl.div_rn(norm, tl.sqrt_rn(tl.maximum(n, 1.0)))
        q_rms = tl.zeros(channel.shape, tl.float32)
        if BALANCED:
            first, number = records_of(kv_head, group, heads, chunks[0], seqlens[0], q_cu_seqlens, SAMPLE)
            q_n, _, q_norm, _ = _merged(records, counts, channels, first, number, channel, inside, False)
            q_rms = tl.div_rn(q_norm, tl.sqrt_rn(tl.maximum(q_n, 1.0)))
        if AUTO:
            rms = hypotenuse(mean, spread)
            before = tl.full(channel.shape, 1.0, tl.float32)
            after = before
            if BALANCED:
                before, after = balance_of(q_rms, rms), balance_of(q_rms, spread)
            at = kv_head.to(tl.int64) * 5 * head_dim + channel
            tl.store(candidates + at, mean, mask=inside)
            tl.store(candidates + head_dim + at, before, mask=inside)
            tl.store(candidates + 2 * head_dim + at, after, mask=inside)
            tl.store(candidates + 3 * head_dim + at, tl.div_rn(rms, before), mask=inside)
            tl.store(candidates + 4 * head_dim + at, tl.zeros(channel.shape, tl.float32) + plain, mask=inside)
        else:
            if SMOOTH_K:
                tl.store(k_mean + at, mean, mask=inside)
            if BALANCED:
                tl.store(balance + at, balance_of(q_rms, spread), mask=inside)
    if SMOOTH_V:
        inside = channel < head_dim_v
        first, number = records_of(kv_head, 1, heads, chunks[2], seqlens[1], k_cu_seqlens)
        first += programs[0] + programs[1]
        _, mean, _, _ = _merged(records, counts, channels, first, number, channel, inside, True)
        tl.store(v_mean + kv_head.to(tl.int64) * head_dim_v + channel, mean, mask=inside)
