# mypy: ignore-errors
"""The last two kernels of ``statistics.py``: what taking the mean key out does to sampled rows, and the decision."""

from __future__ import annotations

import triton
import triton.language as tl

from fp8attn.kernels.portable.numerics import INTERPRETED, decode, widen
from fp8attn.kernels.portable.packed import bounds
from fp8attn.kernels.portable.statistics_parts import (
    bound,
    chunk_of,
    hypotenuse,
    inverse_power,
    power_of_two,
    records_of,
    row_pointer,
    safe_norm,
    those_in_use,
)

__all__ = ["decide_kernel", "sampled_row", "weigh_kernel"]


# ---- 3. Weighted errors on sampled rows ------------------------------------------------------------------------------


@triton.jit
def sampled_row(i, sampled, seqlen):
    """The i-th of linspace(0, seqlen - 1, sampled), rounded. No value lies halfway: the 63 gaps of 64 rows are odd."""
    gaps = tl.maximum(sampled - 1, 1)
    return (2 * i.to(tl.int64) * (seqlen - 1) + gaps) // (2 * gaps)


@triton.jit
def _tile(pointers, inside, keep):
    """FP32 values, and which rows of ``keep`` are finite. Other rows become 0 and values are bounded: what does not
    count might overflow when squared, and no weight of 0 would stop that."""
    x = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    keep = keep & (tl.max(tl.where(x == x, tl.abs(x), float("inf")), 1) < float("inf"))
    return bound(tl.where(keep[:, None], x, 0.0)), keep


@triton.jit
def _scores(a, b, dtype: tl.constexpr):
    """``a @ b.T`` of values that ``dtype`` holds exactly, to FP32's accuracy."""
    if INTERPRETED:
        return tl.dot(a, tl.trans(decode(b)), input_precision="ieee")
    if dtype == tl.float32:
        return tl.dot(a, tl.trans(b), input_precision="tf32x3")
    return tl.dot(a.to(dtype), tl.trans(b.to(dtype)))


@triton.jit
def _channel_block(
    q_base, candidates, block, sampled, inverse_unit,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """Of a block of channels: their numbers, the sampled rows, the mean key, and what keys are multiplied by before and
    after it is taken out."""
    channel = block * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = channel < HEAD_DIM
    # A row that is not finite is left out in the end, whatever its scores.
    q = tl.load(q_base + channel[None, :], mask=sampled[:, None] & inside[None, :], other=0.0).to(tl.float32)
    mean = tl.load(candidates + channel, mask=inside, other=0.0)
    before = tl.zeros([BLOCK_D], tl.float32) + inverse_unit
    after = before
    if ROTATED:  # else the balance cancels
        # Bounded: the keys of a channel so weak that this matters vanish beside the others.
        before = tl.div_rn(before, tl.load(candidates + HEAD_DIM + channel, mask=inside, other=1.0))
        after = tl.div_rn(after, tl.load(candidates + 2 * HEAD_DIM + channel, mask=inside, other=1.0))
        before = tl.minimum(before, 2.0**126)
        after = tl.minimum(after, 2.0**126)
    return channel, bound(q), mean, before, after


@triton.jit
def _balanced_norms(q_base, candidates, rows, HEAD_DIM: tl.constexpr):
    """Of the sampled rows (``rows``: which there are): |q b_0|, |q b_1| and which are finite."""
    before = tl.zeros(rows.shape, tl.float32)
    after = before
    finite = rows
    BLOCK_D: tl.constexpr = min(64, triton.next_power_of_2(HEAD_DIM))
    for first in tl.range(0, HEAD_DIM, BLOCK_D):
        channel = first + tl.arange(0, BLOCK_D)
        inside = channel < HEAD_DIM
        q, finite = _tile(q_base + channel[None, :], rows[:, None] & inside[None, :], finite)
        b_before = tl.load(candidates + HEAD_DIM + channel, mask=inside, other=1.0)
        b_after = tl.load(candidates + 2 * HEAD_DIM + channel, mask=inside, other=1.0)
        before = hypotenuse(before, safe_norm(q * b_before[None, :], 1))
        after = hypotenuse(after, safe_norm(q * b_after[None, :], 1))
    return before, after, finite


@triton.jit
def _weighed(
    rows, keys, k_steps, k_in_use, k_in_use_strides, mask, mask_strides, candidates, log2_scale, batch, head, band,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, ROTATED: tl.constexpr, BANDED: tl.constexpr,
    PLAIN: tl.constexpr,
):  # fmt: skip
    """What ``weigh_kernel`` finds for its rows of its keys: m, l and the squares of e_0 and e_1.

    ``PLAIN``: all keys of the head count and are within the bound.
    """
    q_base, row, sampled, seen_by, q_inverse = rows
    k_base, first, end, inverse_unit = keys
    ROWS: tl.constexpr = row.shape[0]
    CHANNEL_BLOCKS: tl.constexpr = (HEAD_DIM + BLOCK_D - 1) // BLOCK_D
    largest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    error_before = tl.zeros([ROWS], tl.float32)
    error_after = tl.zeros([ROWS], tl.float32)
    if CHANNEL_BLOCKS == 1:
        channel, q_tile, mean, factor_before, factor_after = _channel_block(
            q_base, candidates, 0, sampled, inverse_unit, HEAD_DIM, BLOCK_D, ROTATED
        )
    for start in tl.range(first, end, BLOCK_K):
        key = start + tl.arange(0, BLOCK_K)
        usable = key < end
        if not PLAIN:
            usable = those_in_use(usable, k_in_use, k_in_use_strides, batch, key)
        pointers = row_pointer(k_base, k_steps, 0, 0, key, HEAD_DIM)[:, None]
        scores = tl.zeros([ROWS, BLOCK_K], tl.float32)
        if ROTATED:
            before = tl.zeros([BLOCK_K], tl.float32)
            after = tl.zeros([BLOCK_K], tl.float32)
        else:
            before = tl.zeros([ROWS, BLOCK_K], tl.float32)
            after = tl.zeros([ROWS, BLOCK_K], tl.float32)
        for block in tl.range(0, CHANNEL_BLOCKS):
            if CHANNEL_BLOCKS > 1:
                channel, q_tile, mean, factor_before, factor_after = _channel_block(
                    q_base, candidates, block, sampled, inverse_unit, HEAD_DIM, BLOCK_D, ROTATED
                )
            inside = (key < end)[:, None] & (channel < HEAD_DIM)[None, :]
            if PLAIN:
                codes = tl.load(pointers + channel[None, :], mask=inside, other=0.0)
                scores += _scores(q_tile, codes, k_base.dtype.element_ty)
                k_tile = widen(codes)
            else:
                k_tile, usable = _tile(pointers + channel[None, :], inside, usable)
                scores += _scores(q_tile, k_tile, k_base.dtype.element_ty)
            k_before = k_tile * factor_before[None, :]
            k_after = (k_tile - mean[None, :]) * factor_after[None, :]
            if ROTATED:
                before += tl.sum(k_before * k_before, 1)
                after += tl.sum(k_after * k_after, 1)
            else:
                q_squares = (q_tile * q_inverse[:, None]) * (q_tile * q_inverse[:, None])
                before += _scores(q_squares, k_before * k_before, tl.float32)
                after += _scores(q_squares, k_after * k_after, tl.float32)
        if CHANNEL_BLOCKS > 1:
            # What was added before a later block showed that the row does not count.
            before = tl.where(usable if ROTATED else usable[None, :], before, 0.0)
            after = tl.where(usable if ROTATED else usable[None, :], after, 0.0)
        logits = scores * log2_scale
        if BANDED or mask is not None:
            visible = usable[None, :] & seen_by[:, None]
            if BANDED:
                offset = key[None, :] - (row.to(tl.int32)[:, None] + band[0])
                visible = visible & (offset >= -band[1]) & (offset <= band[2])
            if mask is not None:
                at = tl.cast(mask_strides[0], tl.int64) * batch + tl.cast(mask_strides[1], tl.int64) * head
                at += tl.cast(mask_strides[2], tl.int64) * row[:, None]
                at += tl.cast(mask_strides[3], tl.int64) * key[None, :]
                entry = tl.load(mask + at, mask=visible, other=0)
                if mask.dtype.element_ty.is_floating():
                    entry = entry.to(tl.float32)
                    visible = visible & (entry > -float("inf"))
                    logits += entry * 1.4426950408889634  # log2(e)
                else:
                    visible = visible & (entry != 0)
            logits = tl.where(visible, logits, -float("inf"))
        # The minimum of NaN and a number is the number: logits of usable keys that are NaN become +inf.
        limit = tl.where(usable, float("inf"), -float("inf"))
        if INTERPRETED:
            logits = tl.where(logits == logits, logits, float("inf"))
        logits = tl.minimum(logits, limit[None, :])
        higher = tl.maximum(largest, tl.max(logits, 1))
        # Neither infinity is subtracted from itself; a row that reaches +inf is of no use any more.
        reference = tl.where(tl.abs(higher) < float("inf"), higher, 0.0)
        weights = tl.exp2(logits - reference[:, None])
        decay = tl.exp2(largest - reference)
        total = total * decay + tl.sum(weights, 1)
        if ROTATED:
            error_before = error_before * decay + tl.sum(weights * before[None, :], 1)
            error_after = error_after * decay + tl.sum(weights * after[None, :], 1)
        else:
            error_before = error_before * decay + tl.sum(weights * before, 1)
            error_after = error_after * decay + tl.sum(weights * after, 1)
        largest = higher
    return largest, total, error_before, error_after


@triton.jit(
    do_not_specialize=[
        "q_steps", "k_steps", "q_in_use_strides", "k_in_use_strides", "mask_strides",
        "chunks", "heads", "seqlens", "band",
    ]
)  # fmt: skip
def weigh_kernel(
    q, q_steps, k, k_steps, q_in_use, q_in_use_strides, k_in_use, k_in_use_strides, mask, mask_strides,
    candidates, states, norms, log2_scale, chunks, heads, seqlens, band, q_cu_seqlens, k_cu_seqlens,
    BOTTOM_RIGHT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr, ROTATED: tl.constexpr, BANDED: tl.constexpr,
):  # fmt: skip
    """Attention of a head's sampled rows to one chunk of keys; the query heads that read the same chunk are neighbours.

    Of a row r it writes the largest logit m (in log2 units; +inf if any is infinite or NaN: the row is then left out),
    the sum l of the weights 2^(logit - m), and the weighted norms e_0, e_1 of the errors: with rotation
    e_c^2 = sum_j 2^(logit - m) |(k_j - c) / b_c|^2, which lacks the factor |q_r b_c|; without it
    sum_i q_ri^2 (k_ji - c_i)^2 stands for the two norms, from which the balance cancels. The keys have a power of two
    of the head taken out.
    """
    group = heads[0] // heads[1]
    index = tl.num_programs(0) - 1 - tl.program_id(0)  # backwards: the last keys are still in the cache
    member = index % group
    batch, kv_head, chunk, k_begin, first, end, _ = chunk_of(index // group, heads[1], chunks, seqlens[1], k_cu_seqlens)
    q_begin, seqlen_q, seqlen_k, diagonal = 0, seqlens[0], seqlens[1], band[0]
    if k_cu_seqlens is not None:
        if first >= end:
            return
        q_begin, seqlen_q = bounds(q_cu_seqlens, batch, seqlens[0])
        _, seqlen_k = bounds(k_cu_seqlens, batch, seqlens[1])
        diagonal = seqlen_k - seqlen_q if BOTTOM_RIGHT else 0
        if q_in_use is not None:
            q_in_use += q_begin
        if k_in_use is not None:
            k_in_use += k_begin
    head = kv_head * group + member
    candidates += (batch * heads[1] + kv_head) * 5 * HEAD_DIM
    i = tl.arange(0, ROWS)
    sampled = tl.minimum(seqlen_q, ROWS)
    row = sampled_row(i, sampled, seqlen_q)
    seen_by = those_in_use(i < sampled, q_in_use, q_in_use_strides, batch, row)
    q_base = row_pointer(q, q_steps, batch, head, q_begin + row, HEAD_DIM)[:, None]
    k_base = row_pointer(k, k_steps, batch, kv_head, k_begin, HEAD_DIM)

    # What the head's keys are measured in, and without rotation its queries
    every = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
    k_rms = tl.load(candidates + 3 * HEAD_DIM + every, mask=every < HEAD_DIM, other=0.0)
    if not ROTATED:
        k_rms *= tl.load(candidates + HEAD_DIM + every, mask=every < HEAD_DIM, other=1.0)
    inverse_unit = inverse_power(power_of_two(tl.max(k_rms, 0)))
    q_unit = tl.full([ROWS], 1.0, tl.float32)
    if not ROTATED:  # a few channels at a time, to need few registers
        q_unit = tl.zeros([ROWS], tl.float32)
        for first_channel in tl.range(0, HEAD_DIM, 16):
            some = first_channel + tl.arange(0, 16)
            inside = (i < sampled)[:, None] & (some < HEAD_DIM)[None, :]
            q_part, _ = _tile(q_base + some[None, :], inside, i < sampled)
            q_unit = tl.maximum(q_unit, tl.max(tl.abs(q_part), 1))
        q_unit = power_of_two(q_unit)
    q_inverse = inverse_power(q_unit)

    if end == seqlen_k:  # one chunk of a head, of those that begin early
        before, after, finite = _balanced_norms(q_base, candidates, i < sampled, HEAD_DIM)
        to = norms + (batch * heads[0] + head) * 2 * ROWS + i
        tl.store(to, tl.where(finite, before, float("nan")) if ROTATED else tl.where(finite, 1.0, float("nan")))
        tl.store(to + ROWS, after if ROTATED else tl.full([ROWS], 1.0, tl.float32))
    rows, keys = (q_base, row, i < sampled, seen_by, q_inverse), (k_base, first, end, inverse_unit)
    if tl.load(candidates + 4 * HEAD_DIM) > 0:  # all keys count and are within the bound: they are taken as they are
        largest, total, error_before, error_after = _weighed(
            rows, keys, k_steps, k_in_use, k_in_use_strides, mask, mask_strides, candidates, log2_scale, batch, head,
            (diagonal, band[1], band[2]), HEAD_DIM, BLOCK_D, BLOCK_K, ROTATED, BANDED, True,
        )  # fmt: skip
    else:
        largest, total, error_before, error_after = _weighed(
            rows, keys, k_steps, k_in_use, k_in_use_strides, mask, mask_strides, candidates, log2_scale, batch, head,
            (diagonal, band[1], band[2]), HEAD_DIM, BLOCK_D, BLOCK_K, ROTATED, BANDED, False,
        )  # fmt: skip
    if k_cu_seqlens is None:
        state = (batch * heads[0] + head) * chunks[0] + chunk
    else:
        state, number = records_of(batch * heads[1] + kv_head, group, heads[1], chunks, seqlens[1], k_cu_seqlens)
        state += member * (number // group) + chunk
    to = states + state * 4 * ROWS + i
    tl.store(to, tl.where(seen_by, largest, -float("inf")))
    tl.store(to + ROWS, total)
    tl.store(to + 2 * ROWS, q_unit * tl.sqrt_rn(error_before))
    tl.store(to + 3 * ROWS, q_unit * tl.sqrt_rn(error_after))


# ---- 4. The decision -------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["group", "chunks", "heads", "key_chunks", "seqlen_k"])
def decide_kernel(
    states, norms, candidates, k_mean, balance, group, chunks, heads, key_chunks, seqlen_k, k_cu_seqlens,
    HEAD_DIM: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program a kv head: ``transforms.mean_out_helps``, and with it the mean to take out and the balance."""
    kv_head = tl.program_id(0).to(tl.int64)
    first = kv_head * group * chunks
    if k_cu_seqlens is not None:
        first, _ = records_of(kv_head, group, heads, key_chunks, seqlen_k, k_cu_seqlens)
        _, chunks = records_of(kv_head, 1, heads, key_chunks, seqlen_k, k_cu_seqlens)
    chunk = tl.arange(0, CHUNKS)[:, None]
    i = tl.arange(0, ROWS)
    candidates += kv_head * 5 * HEAD_DIM
    # Errors of the kv head: the norm over query heads of each head's root mean square over its rows that see a key
    before = 0.0
    after = 0.0
    for member in tl.range(0, group):
        norm = norms + (kv_head * group + member) * 2 * ROWS + i
        norm_before, norm_after = tl.load(norm), tl.load(norm + ROWS)  # anything where there are no keys
        state = first + member * chunks + chunk
        at = state * 4 * ROWS + i[None, :]
        held = (chunk < chunks) & (norm_before == norm_before)[None, :]
        largest = tl.load(states + at, mask=held, other=-float("inf"))
        highest = tl.max(largest, 0)
        counts = tl.abs(highest) < float("inf")
        reference = tl.where(counts, highest, 0.0)
        weighs = counts[None, :] & (largest > -float("inf"))
        weight = tl.where(weighs, tl.exp2(tl.minimum(largest - reference[None, :], 0.0)), 0.0)
        total = tl.load(states + at + ROWS, mask=weighs, other=0.0)
        error_before = tl.load(states + at + 2 * ROWS, mask=weighs, other=0.0)
        error_after = tl.load(states + at + 3 * ROWS, mask=weighs, other=0.0)
        error_before *= tl.where(counts, norm_before, 0.0)[None, :]
        error_after *= tl.where(counts, norm_after, 0.0)[None, :]
        power = power_of_two(tl.max(tl.max(tl.maximum(error_before, error_after), 0), 0))
        error_before *= inverse_power(power)
        error_after *= inverse_power(power)
        mass = tl.sum(weight * total, 0)
        mass = tl.where(counts, mass, 1.0)
        rows = tl.maximum(tl.sum(counts.to(tl.float32), 0), 1.0)
        mean_before = tl.sum(tl.sum(weight * error_before * error_before, 0) / mass, 0) / rows
        mean_after = tl.sum(tl.sum(weight * error_after * error_after, 0) / mass, 0) / rows
        before = hypotenuse(before, power * tl.sqrt_rn(mean_before))
        after = hypotenuse(after, power * tl.sqrt_rn(mean_after))
    helps = after < before
    channel = tl.arange(0, BLOCK_D)
    inside = channel < HEAD_DIM
    candidates += channel
    to = kv_head * HEAD_DIM + channel
    tl.store(k_mean + to, tl.where(helps, tl.load(candidates, mask=inside, other=0.0), 0.0), mask=inside)
    if balance is not None:
        unsmoothed = tl.load(candidates + HEAD_DIM, mask=inside, other=1.0)
        smoothed = tl.load(candidates + 2 * HEAD_DIM, mask=inside, other=1.0)
        tl.store(balance + to, tl.where(helps, smoothed, unsmoothed), mask=inside)
