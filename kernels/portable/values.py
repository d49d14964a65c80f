# mypy: disable-error-code="no-untyped-def, no-untyped-call, operator, assignment, attr-defined, misc"
"""Values with a scale for every channel: its largest magnitude over all tokens, then the codes.

Two passes over memory that nothing can join. What makes them fast: the first keeps a maximum for each element of a tile
in registers and reduces once a chunk; the second goes backwards, over values that the first left in the cache; and both
do at every element what NaN, infinity and extreme magnitudes need, which costs less than to find out whether they are
there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fp8attn.formats import Format
from fp8attn.kernels.portable.device import multiprocessors
from fp8attn.kernels.portable.numerics import INTERPRETED, TRITON_DTYPES, cast, decode
from fp8attn.kernels.portable.quantize_tile import scale_of

__all__ = ["launch_values"]

_CODES_PROGRAMS = 4  # of 4 warps a multiprocessor; measured on an H200, as what follows
_AMAX_TOKENS = 1024  # a program at most
_AMAX_PROGRAMS = 2  # a multiprocessor at least, if there are tokens for them


class ValuesPlan(NamedTuple):
    """What the kernels are compiled for.

    Attributes:
        head_dim, span, tile: channels, padded to a power of two; tokens a tile.
        dtype, largest: of the codes; pow2: how scales are chosen.
        bound: what finite inputs are clamped to.
        columns: whether codes are stored as permuted columns; else as rows.
    """

    head_dim: int
    span: int
    tile: int
    dtype: tl.dtype
    largest: float
    pow2: bool
    bound: float
    columns: bool


@triton.jit
def _load(x_ptr, x_s, x_d, first, row, seqlen, in_use_ptr, mean, PLAN: tl.constexpr):
    """FP32 tokens ``first`` + ``row`` less the mean; 0 where there are none and where they are not in use."""
    channel = tl.arange(0, PLAN.span)
    kept = first + row < seqlen
    if in_use_ptr is not None:
        kept &= tl.load(in_use_ptr + first + row, mask=kept, other=0) != 0
    start = x_ptr + tl.cast(first, tl.int64) * x_s
    at = start + row.to(tl.int64)[:, None] * x_s + channel.to(tl.int64)[None, :] * x_d
    x = decode(tl.load(at, mask=kept[:, None] & (channel < PLAN.head_dim)[None, :], other=0.0))
    if mean is not None:
        x = tl.where(tl.abs(x) < float("inf"), tl.clamp(x, -PLAN.bound, PLAN.bound), x)
        x = tl.where(kept[:, None], x - mean[None, :], 0.0)
    return x


@triton.jit
def _amax_kernel(
    x_ptr, x_b, x_h, x_s, x_d, in_use_ptr, in_use_b, mean_ptr, mean_b, amax_ptr, heads, seqlen, chunk, chunks,
    PLAN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Raise the largest finite magnitude of every channel, as bits, by those of a chunk of tokens."""
    sequence = (tl.program_id(0) // chunks).to(tl.int64)
    b, h, first = sequence // heads, sequence % heads, tl.program_id(0) % chunks * chunk
    channel = tl.arange(0, PLAN.span)
    mean = None
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + b * mean_b + h * PLAN.head_dim + channel, mask=channel < PLAN.head_dim, other=0.0)
    in_use = None
    if in_use_ptr is not None:
        in_use = in_use_ptr + b * in_use_b
    largest = tl.full((PLAN.tile, PLAN.span), 0.0, tl.float32)
    for start in tl.range(first, tl.minimum(first + chunk, seqlen), PLAN.tile, num_stages=STAGES):
        x = tl.abs(
            _load(x_ptr + b * x_b + h * x_h, x_s, x_d, start, tl.arange(0, PLAN.tile), seqlen, in_use, mean, PLAN)
        )
        largest = tl.maximum(largest, tl.where(x < float("inf"), x, 0.0))  # NaN compares false
    amax = tl.max(largest, 0)
    if mean_ptr is None:
        amax = tl.minimum(amax, PLAN.bound)
    to = amax_ptr + sequence * PLAN.head_dim + channel
    tl.atomic_max(to, amax.to(tl.int32, bitcast=True), mask=channel < PLAN.head_dim, sem="relaxed")


@triton.jit
def _quotients(x, scale, PLAN: tl.constexpr):
    """x / scale as IEEE rounds it, (tile, span) over (span,); what is beyond the format's range stays beyond it."""
    if INTERPRETED:  # NumPy divides as IEEE does, and has no fused multiply-add
        return x / scale[None, :]
    # Both over the scale's power of two, so that the residual of a product with the reciprocal is a normal number.
    down = (0x7F000000 - (scale.to(tl.int32, bitcast=True) & 0x7F800000)).to(tl.float32, bitcast=True)
    scale *= down
    reciprocal = tl.broadcast_to((1.0 / scale)[None, :], x.shape)
    x *= down[None, :]
    about = x * reciprocal
    exact = tl.fma(tl.fma(about, tl.broadcast_to(-scale[None, :], x.shape), x), reciprocal, about)
    return tl.where(tl.abs(about) < float("inf"), exact, about)  # the residual of infinity is NaN


@triton.jit
def _codes_kernel(
    x_ptr, x_b, x_h, x_s, x_d, in_use_ptr, in_use_b, mean_ptr, mean_b, amax_ptr, scale_ptr, codes_ptr, head_stride,
    row_stride, heads, seqlen, extent, tiles, count, PLAN: tl.constexpr,
):  # fmt: skip
    """Quantize this program's share of the tiles, the last ones first; ``tiles``: of a head; ``count``: of all."""
    programs, program = tl.num_programs(0), tl.program_id(0)
    begin = program * (count // programs) + tl.minimum(program, count % programs)
    end = begin + count // programs + (program < count % programs).to(tl.int32)
    channel = tl.arange(0, PLAN.span)
    exists = channel < PLAN.head_dim
    place = tl.arange(0, PLAN.tile)
    row = place
    if PLAN.columns:  # as columns store tokens, ``scaling.TOKEN_ORDER``: what is stored together is loaded together
        slot = place % 16
        row = place - slot + slot // 4 * 2 + slot // 2 % 2 * 8 + slot % 2
    for back in range(begin, end):
        item = count - 1 - back
        sequence, first = tl.cast(item // tiles, tl.int64), item % tiles * PLAN.tile
        b, h = sequence // heads, sequence % heads
        mean = None
        if mean_ptr is not None:
            mean = tl.load(mean_ptr + b * mean_b + h * PLAN.head_dim + channel, mask=exists, other=0.0)
        in_use = None
        if in_use_ptr is not None:
            in_use = in_use_ptr + b * in_use_b
        x = _load(x_ptr + b * x_b + h * x_h, x_s, x_d, first, row, seqlen, in_use, mean, PLAN)
        amax = tl.load(amax_ptr + sequence * PLAN.head_dim + channel, mask=exists, other=0)
        scale = scale_of(amax.to(tl.float32, bitcast=True), PLAN)
        tl.store(scale_ptr + sequence * PLAN.head_dim + channel, scale, mask=exists & (channel * 0 + first == 0))
        x = _quotients(x, scale, PLAN)
        if INTERPRETED or PLAN.dtype == tl.int8:  # FP8 casts saturate; NaN compares false
            x = tl.where(x > PLAN.largest, PLAN.largest, tl.where(x < -PLAN.largest, -PLAN.largest, x))
        codes = cast(x, PLAN.dtype)
        to, used = codes_ptr + sequence * head_stride, first + place < extent
        if PLAN.columns:
            at = to + channel.to(tl.int64)[:, None] * row_stride + (first + place)[None, :]
            tl.store(at, tl.trans(codes), mask=exists[:, None] & used[None, :])
        else:
            at = to + tl.cast(first, tl.int64) * row_stride + place[:, None] * row_stride + channel[None, :]
            tl.store(at, codes, mask=used[:, None] & exists[None, :])


def launch_values(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    fmt: Format,
    pow2: bool,
    bound: float,
    *,
    columns: bool,
    in_use: torch.Tensor | None,
    mean: torch.Tensor | None,
) -> None:
    """Quantize x (B, H, S, D) into ``codes``, as permuted columns or rows, and ``scale`` (B, H, 1, D).

    ``mean`` (B or 1, H, 1, D) is taken out of the tokens that are ``in_use`` (B or 1, S).
    """
    batch, heads, seqlen, head_dim = x.shape
    span = max(16, triton.next_power_of_2(head_dim))
    extent = codes.shape[3] if columns else seqlen
    plan = ValuesPlan(
        head_dim=head_dim, span=span, tile=max(16, min(64, 8192 // span)) if span >= 128 else 32,
        dtype=TRITON_DTYPES[fmt.dtype], largest=fmt.max, pow2=pow2, bound=bound, columns=columns,
    )  # fmt: skip
    flags = None if in_use is None else in_use.to(x.device).contiguous().view(torch.uint8)
    mean = None if mean is None else mean.to(x.device).contiguous()
    amax = torch.zeros(scale.shape, dtype=torch.int32, device=x.device)  # a word of zero bits is also 0.0
    of_input = (
        x, *x.stride(), flags, 0 if flags is None or len(flags) == 1 else seqlen,
        mean, 0 if mean is None or len(mean) == 1 else mean.stride(0), amax,
    )  # fmt: skip
    tiles = triton.cdiv(extent, plan.tile)
    processors = multiprocessors(x.device)
    with torch.cuda.device_of(x):
        # A maximum is the same however tokens are shared out.
        fair = triton.cdiv(batch * heads * seqlen, _AMAX_PROGRAMS * processors)
        chunk = plan.tile * triton.cdiv(min(fair, _AMAX_TOKENS), plan.tile)
        chunks = triton.cdiv(seqlen, chunk)
        _amax_kernel[(batch * heads * chunks,)](
            *of_input, heads, seqlen, chunk, chunks,
            PLAN=plan, STAGES=3, num_warps=4, num_stages=3, enable_fp_fusion=False,
        )  # fmt: skip
        _codes_kernel[(min(batch * heads * tiles, _CODES_PROGRAMS * processors),)](
            *of_input, scale, codes, codes.stride(1), codes.stride(2), heads, seqlen, extent, tiles,
            batch * heads * tiles, PLAN=plan, num_warps=4, num_stages=1, maxnreg=128, enable_fp_fusion=False,
        )  # fmt: skip
