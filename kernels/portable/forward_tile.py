# mypy: ignore-errors
"""A tile of keys in ``forward_kernel.py``: FP8 scores, who sees whom, rounded weights, and what they add to the state.

Where logits may exceed 1e38, which the contract clamps, the scale that would take them there is bounded instead.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from fp8attn.kernels.portable.numerics import block_boundary, cast, computed, decode, operand_e4m3, product, row_sums

__all__ = ["LARGEST_LOGIT", "LOG2E", "P_BITS", "take_tile"]

LOG2E = tl.constexpr(math.log2(math.e))
LARGEST_LOGIT = tl.constexpr(1e38)
P_BITS = tl.constexpr(8.0)  # weights are rounded in units of 2^-8
_LARGEST_FACTOR = tl.constexpr(torch.finfo(torch.float32).max)
_SMALLEST = tl.constexpr(2.0**-126)


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
    capped = softcap * (1.0 - 2.0 / (tl.exp2(s * (2.0 * LOG2E / softcap)) + 1.0))
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
def take_tile(
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
            s = (s + bias) * LOG2E
        elif MASK == "additive":
            s = s + bias * LOG2E
        s = tl.where(s > LARGEST_LOGIT, LARGEST_LOGIT, tl.where(s < -LARGEST_LOGIT, -LARGEST_LOGIT, s))
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
        reference = tl.maximum(m_new, -LARGEST_LOGIT)
    alpha = tl.exp2(m - reference)
    p = tl.exp2(s * factor[:, None] - (reference - P_BITS)[:, None])

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
        folded = acc[i] * alpha[:, None] + pv
        if i + 1 < len(acc):  # one product in flight: two would not fit beside the accumulators
            if not HAS_RIGHT:  # Triton 3.9 would compute all sums in the end; with a diagonal this makes it worse
                folded = computed(folded)
            block_boundary(n, i)
        new = new + (folded,)
    return new, m_new, l
