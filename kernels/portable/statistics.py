"""Smoothing statistics on the device: mean keys, mean values, balance, and whether taking the mean key out helps.

Four kernels at most, each a plain grid over independent programs; what they hand on lies in fixed places and is summed
in a fixed order, so that the same input gives the same bits:

1. ``_partials_kernel`` reads q, k and v once. A program takes a chunk of one head's tokens and writes a *record*: how
   many tokens count, and per channel their mean and the norm of the deviations from it.
2. ``_merge_kernel`` merges the records of a head, and of a kv head's query heads.
3. ``_weigh_kernel``, for ``smooth_k="auto"``: attention of sampled query rows over a chunk of keys, which yields the
   weighted error of both candidates, c = 0 and c = mean.
4. ``_decide_kernel`` merges those and decides.

Sums of squares are kept as their roots, *norms*, and merged with a power of two taken out, so that nothing overflows or
vanishes between 2^-126 and 2^90. Means and norms are merged by the formulas of Chan, Golub and LeVeque ("Updating
formulae and a pairwise algorithm for computing sample variances", 1979): deviations are always from a mean of the same
tokens, so that an offset, however large, cancels before it is squared.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from fp8attn.kernels.portable.device import row_alignment, vectorizable
from fp8attn.kernels.portable.numerics import INTERPRETED, decode, widen
from fp8attn.kernels.portable.packed import bounds, find_sequence, first_unit
from fp8attn.kernels.portable.packed import in_use as packed_in_use
from fp8attn.kernels.problem import Masking
from fp8attn.recipe import Recipe
from fp8attn.transforms import Smoothing

if TYPE_CHECKING:
    from fp8attn.kernels.problem import Packing, Rotary, Sequences

__all__ = ["fit_smoothing"]

_LARGEST = tl.constexpr(2.0**90)  # finite inputs are brought under it, as in the reference
_SAMPLED_ROWS = 64  # query rows a head on which smooth_k="auto" decides, as in the reference

# How programs share a head's tokens: a function of its length alone, so that a sequence's statistics do not depend on
# the batch it is in. A chunk is long enough to pay off what its program begins and ends with, and 64 records of a head
# are merged at once.
_CHUNK, _KEY_CHUNK = 1024, 704
_MOST_CHUNKS = 64
_TILE_ELEMENTS = 4096  # tokens x channels in registers: 32 a thread, as many sums and as many squares
_MOST_KEY_CHUNKS = 32
_KEY_TILE = 64
_MERGED_CHANNELS = 32  # a program of the second kernel; 128 bytes of a record
_NO_LIMIT = 2**31 - 1


def fit_smoothing(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    recipe: Recipe,
    masking: Masking,
    *,
    scale: float,
    rotary: Rotary | None = None,
    packing: Packing | None = None,
    rotary_q: Rotary | None = None,
) -> Smoothing:
    """The statistics that the recipe asks for, as the reference's ``fit_smoothing`` but of the tensors as they come.

    Queries (B, Hq, Sq, D), keys (B, Hkv, Sk, D) and values (B, Hkv, Sk, Dv) in float32, bfloat16 or float16 and of any
    strides. Statistics are over the tokens in use whose every channel is finite in that head; finite values count as at
    most 2^90 in magnitude. ``scale``, the softmax scale, serves the decision of ``smooth_k="auto"`` alone.

    ``rotary`` turns queries and keys first. That runs in PyTorch, in FP32: two more tensors in memory.

    Nothing waits for the device and shapes follow from shapes, so that CUDA graphs capture it once it has run. The
    answer does not depend on strides. A tensor that cannot be read in aligned vectors (a last axis that is not
    contiguous, strides that are no multiple of what the head dim allows, a storage offset) is copied first.

    With ``packing`` the tensors are a packed batch, and every sequence gets the statistics that it has alone: (N, Hkv,
    1, D). Rotary tables have a row a token then, those of queries in ``rotary_q``.
    """
    batch, num_q_heads, seqlen_q, head_dim = q.shape
    queries, keys = (None, None) if packing is None else (packing.queries, packing.keys)
    if keys is not None:
        batch = keys.count
    num_kv_heads, seqlen_k, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    balanced, auto = recipe.balance == "rms", recipe.smooth_k == "auto"
    if 0 in (num_q_heads, num_kv_heads) or not (balanced or recipe.smooth_k or recipe.smooth_v):
        return Smoothing()

    def statistic(wanted: bool | str, channels: int) -> torch.Tensor | None:
        shape = (batch, num_kv_heads, 1, channels)
        return torch.empty(shape, dtype=torch.float32, device=q.device) if wanted else None

    k_mean, balance = statistic(recipe.smooth_k, head_dim), statistic(balanced, head_dim)
    v_mean = statistic(recipe.smooth_v, head_dim_v)
    if batch == 0:
        return Smoothing(k_mean, v_mean, balance)
    if rotary is not None and rotary_q is not None:
        q, k = rotary_q.rotate(_bounded(q)), rotary.rotate(_bounded(k))
    elif rotary is not None:
        q, k = rotary.rotate(_bounded(q), masking.diagonal), rotary.rotate(_bounded(k))
    q = vectorizable(q) if balanced or auto else q
    k = vectorizable(k) if balanced or recipe.smooth_k else k
    v = vectorizable(v) if recipe.smooth_v else v
    in_use = masking.in_use if packing is None else packed_in_use(packing, masking)
    queries_in_use, keys_in_use = (None if t is None else t.to(q.device) for t in in_use)
    tiles = ((q, queries, _rows(head_dim)), (k, keys, _rows(head_dim)), (v, keys, _rows(head_dim_v)))
    every, chunks = zip(*(_all_chunks(x, own, max(rows, _CHUNK), _MOST_CHUNKS) for x, own, rows in tiles), strict=True)
    programs = (
        every[0] if balanced else 0,
        every[1] if balanced or recipe.smooth_k else 0,
        every[2] if recipe.smooth_v else 0,
    )
    channels = max(head_dim, head_dim_v if recipe.smooth_v else 0)
    records, counts, candidates = (
        torch.empty(shape, dtype=torch.float32, device=q.device)
        for shape in (
            (sum(programs), 2, channels),
            (sum(programs),),
            (batch * num_kv_heads if auto else 0, 5, head_dim),
        )
    )
    with torch.cuda.device_of(q):
        if sum(programs):
            _partials_kernel[(sum(programs),)](
                q, _steps(q), k, _steps(k), v, _steps(v),
                queries_in_use, _strides(queries_in_use, 2), keys_in_use, _strides(keys_in_use, 2),
                records, counts, channels, programs, chunks, (num_q_heads, num_kv_heads), (seqlen_q, seqlen_k),
                _cu_seqlens(queries), _cu_seqlens(keys),
                HEAD_DIM=head_dim, HEAD_DIM_V=head_dim_v, ROWS=_rows(head_dim), ROWS_V=_rows(head_dim_v),
                WITH_Q=programs[0] > 0, WITH_K=programs[1] > 0, WITH_V=programs[2] > 0,
                CENTER_K=bool(recipe.smooth_k), num_warps=4,
            )  # fmt: skip
        _merge_kernel[(batch * num_kv_heads, triton.cdiv(channels, _MERGED_CHANNELS))](
            records, counts, channels, k_mean, v_mean, balance, candidates, programs, chunks,
            num_q_heads // num_kv_heads, head_dim, head_dim_v,
            num_kv_heads, (seqlen_q, seqlen_k), _cu_seqlens(queries), _cu_seqlens(keys),
            SMOOTH_K=bool(recipe.smooth_k), AUTO=auto, SMOOTH_V=recipe.smooth_v, BALANCED=balanced,
            BLOCK=_MERGED_CHANNELS, num_warps=4,
        )  # fmt: skip
        if auto:
            states, norms, key_chunks = _weigh(
                q, k, queries_in_use, keys_in_use, candidates, recipe, masking, scale, packing
            )
            most = min(_MOST_KEY_CHUNKS, -(-keys.longest // _KEY_CHUNK)) if keys is not None else states.shape[1]
            _decide_kernel[(batch * num_kv_heads,)](
                states, norms, candidates, k_mean, balance, num_q_heads // num_kv_heads, states.shape[1],
                num_kv_heads, key_chunks, seqlen_k, _cu_seqlens(keys),
                HEAD_DIM=head_dim, CHUNKS=triton.next_power_of_2(max(1, most)),
                ROWS=_SAMPLED_ROWS, BLOCK_D=triton.next_power_of_2(head_dim), num_warps=4,
            )  # fmt: skip
    return Smoothing(k_mean, v_mean, balance)


def _weigh(
    q: torch.Tensor,
    k: torch.Tensor,
    queries_in_use: torch.Tensor | None,
    keys_in_use: torch.Tensor | None,
    candidates: torch.Tensor,
    recipe: Recipe,
    masking: Masking,
    scale: float,
    packing: Packing | None,
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """Of the sampled rows: what their attention to each chunk of keys leaves to merge (B * Hq, chunks, 4, rows), and
    what errors are to be multiplied by (B * Hq, 2, rows), NaN where a row is not finite.

    Also how keys are cut, as ``_chunk_of`` takes it. Of a packed batch the states are (Hq, chunks of all sequences, 4,
    rows) in size, and numbered by ``_records_of``.
    """
    batch, num_q_heads, seqlen_q, head_dim = q.shape
    num_kv_heads, seqlen_k = k.shape[1:3]
    queries, keys = (None, None) if packing is None else (packing.queries, packing.keys)
    every, key_chunks = _all_chunks(k, keys, _KEY_CHUNK, _MOST_KEY_CHUNKS)
    chunks = every // (batch * num_kv_heads) if seqlen_q else 0
    count = batch if keys is None else keys.count
    states = torch.empty(batch * num_q_heads, chunks, 4, _SAMPLED_ROWS, dtype=torch.float32, device=q.device)
    norms = torch.empty(count * num_q_heads, 2, _SAMPLED_ROWS, dtype=torch.float32, device=q.device)
    left, right = (_NO_LIMIT if limit is None else min(limit, _NO_LIMIT) for limit in (masking.left, masking.right))
    mask, rotated = masking.mask, recipe.rotate != "none"
    # Channels at a time. Keys are fetched ahead where all of them are one block: what every head of a usual size in 16
    # bits is. More would not fit the shared memory of every GPU, nor its registers.
    one_block = rotated and head_dim <= 128 and q.dtype.itemsize == 2
    block_d = min(max(16, triton.next_power_of_2(head_dim)), 128 if one_block else 64 if rotated else 32)
    if chunks:
        _weigh_kernel[(batch * num_q_heads * chunks,)](
            q, _steps(q), k, _steps(k),
            queries_in_use, _strides(queries_in_use, 2), keys_in_use, _strides(keys_in_use, 2), mask, _strides(mask, 4),
            candidates, states, norms, scale * math.log2(math.e), key_chunks, (num_q_heads, num_kv_heads),
            (seqlen_q, seqlen_k), (masking.diagonal, left, right), _cu_seqlens(queries), _cu_seqlens(keys),
            BOTTOM_RIGHT=packing is not None and masking.causal_alignment == "bottom_right",
            HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_K=_KEY_TILE, ROWS=_SAMPLED_ROWS,
            ROTATED=rotated, BANDED=(left, right) != (_NO_LIMIT, _NO_LIMIT),
            num_warps=4, num_stages=3 if block_d >= head_dim else 1,
        )  # fmt: skip
    return states, norms, key_chunks


# ---- Shapes and strides ----------------------------------------------------------------------------------------------


def _chunks(seqlen: int, tile: int, most: int) -> tuple[int, int]:
    """How many chunks a sequence is cut into, and the length of one, a multiple of ``tile`` tokens."""
    length = tile * max(1, -(-seqlen // (tile * most)))
    return -(-seqlen // length), length


def _all_chunks(x: torch.Tensor, sequences: Sequences | None, tile: int, most: int) -> tuple[int, tuple[int, ...]]:
    """How many chunks a tensor (B, H, S, D) is cut into, over all heads, and how, as ``_chunk_of`` takes it.

    Of a packed batch the number is what there is room for: as many as the longest sequence may have for each (the first
    of what ``_chunk_of`` takes), or if it is less, as many as fit all tokens (the first is 0 then).
    """
    batch, heads, seqlen, _ = x.shape
    if sequences is None:
        number, length = _chunks(seqlen, tile, most)
        return batch * heads * number, (number, length)
    number = min(most, -(-sequences.longest // tile))
    alike, packed = sequences.count * number, sequences.units(tile)
    return heads * min(alike, packed), (number if alike <= packed else 0, tile, most, sequences.count)


def _cu_seqlens(sequences: Sequences | None) -> torch.Tensor | None:
    return None if sequences is None else sequences.cu_seqlens


def _rows(head_dim: int) -> int:
    """Tokens a tile of the first kernel."""
    return max(1, min(128, _TILE_ELEMENTS // triton.next_power_of_2(head_dim)))


def _strides(x: torch.Tensor | None, axes: int) -> tuple[int, ...]:
    """In elements, 0 along axes of one element, which then serve any index."""
    return (0,) * axes if x is None else tuple(0 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True))


def _steps(x: torch.Tensor) -> tuple[int, ...]:
    """The strides of batch, head and token, in units of the alignment: the kernels multiply by that constant.

    So the compiler knows the alignment and chooses the same vectors, and with them the same order of sums, for all
    strides of a head dim.
    """
    return tuple(stride // row_alignment(x.shape[3]) for stride in _strides(x, 4)[:3])


def _bounded(x: torch.Tensor) -> torch.Tensor:
    x = x.to(torch.float32)
    return torch.where(x.isinf(), x, x.clamp(-_LARGEST.value, _LARGEST.value))


# ---- Numerics --------------------------------------------------------------------------------------------------------


@triton.jit
def _power(x):
    """The power of two at or below x >= 0, at least 2^-126."""
    return tl.maximum((x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True), 2.0**-126)


@triton.jit
def _inverse(power):
    """1 / power of a power of two between 2^-126 and 2^126, exactly."""
    return (0x7F000000 - power.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def _norm(x, axis: tl.constexpr):
    """Root of the sum of squares along ``axis``."""
    power = _power(tl.max(tl.abs(x), axis))
    y = x * tl.expand_dims(_inverse(power), axis)
    return power * tl.sqrt_rn(tl.sum(y * y, axis))


@triton.jit
def _hypotenuse(x, y):
    """sqrt(x^2 + y^2)."""
    power = _power(tl.maximum(tl.abs(x), tl.abs(y)))
    inverse = _inverse(power)
    return power * tl.sqrt_rn((x * inverse) * (x * inverse) + (y * inverse) * (y * inverse))


@triton.jit
def _balance(q_rms, k_rms):
    """``transforms.balance_factors`` of channels' rms."""
    factor = tl.div_rn(tl.sqrt_rn(k_rms), tl.sqrt_rn(tl.where(q_rms > 0, q_rms, 1.0)))
    return tl.where((q_rms > 0) & (k_rms > 0), tl.minimum(tl.maximum(factor, 2.0**-126), 2.0**126), 1.0)


@triton.jit
def _bound(x):
    """Finite values brought under 2^90; FP16 has none beyond."""
    return tl.minimum(tl.maximum(x, -_LARGEST), _LARGEST)


# ---- 1. Records ------------------------------------------------------------------------------------------------------


@triton.jit
def _chunk_of(index, heads, chunks, seqlen, cu_seqlens):
    """(batch, head, number in the head, where its tokens begin, first token, one past the last) of a chunk.

    ``chunks``: how many a head, and how long. With ``cu_seqlens`` (``_all_chunks``) a sequence is cut as it would be
    alone, and followed by empty chunks; tokens are counted from where it begins. ``_records_of`` knows, too, how chunks
    are numbered.
    """
    if cu_seqlens is None:
        sequence, head = index // chunks[0] // heads, index // chunks[0] % heads
        chunk, begin, first = index % chunks[0], 0, index % chunks[0] * chunks[1]
        end = tl.minimum(first + chunks[1], seqlen)
    else:
        sequence = index // heads
        if chunks[0] > 0:
            sequence = sequence // chunks[0]
        else:
            sequence, _, _, _ = find_sequence(cu_seqlens, chunks[3], sequence, chunks[1], seqlen)
        begin, length = bounds(cu_seqlens, sequence, seqlen)
        number, size = _packed_chunks(length, chunks)
        of_sequence = index - _packed_chunks_before(sequence, begin, chunks) * heads
        number = tl.maximum(number, 1)
        chunk = of_sequence % number
        head = tl.minimum(of_sequence // number, heads - 1)
        first = tl.where(of_sequence < number * heads, chunk * size, length)
        end = tl.minimum(first + size, length)
    return sequence.to(tl.int64), head.to(tl.int64), chunk, begin, first, end


@triton.jit
def _packed_chunks(length, chunks):
    """``_chunks`` of a sequence: how many, and how long."""
    size = chunks[1] * tl.maximum(tl.cdiv(length, chunks[1] * chunks[2]), 1)
    number = tl.cdiv(length, size)
    return tl.where(chunks[0] > 0, tl.minimum(number, chunks[0]), number), size


@triton.jit
def _packed_chunks_before(sequence, begin, chunks):
    """Of one head, how many chunks the sequences before this one have room for."""
    return tl.where(chunks[0] > 0, sequence * chunks[0], first_unit(begin, sequence, chunks[1]))


@triton.jit
def _records_of(kv_head, group, heads, chunks, seqlen, cu_seqlens):
    """(First, number) of the chunks of a kv head, and of its ``group`` of heads; ``heads``: kv heads."""
    if cu_seqlens is None:
        number = chunks[0]
        first = kv_head * number
    else:
        sequence = kv_head // heads
        begin, length = bounds(cu_seqlens, sequence, seqlen)
        number, _ = _packed_chunks(length, chunks)
        first = _packed_chunks_before(sequence, begin, chunks) * heads + kv_head % heads * number
    return first * group, number * group


@triton.jit
def _row_pointer(x, steps, batch, head, token, HEAD_DIM: tl.constexpr):
    """Where a token's channels begin; ``steps`` as ``_steps`` makes them."""
    ALIGNMENT: tl.constexpr = (HEAD_DIM | 16) & -(HEAD_DIM | 16)  # the largest power of two in both, as row_alignment
    offset = tl.cast(steps[0], tl.int64) * batch + tl.cast(steps[1], tl.int64) * head
    return x + (offset + tl.cast(steps[2], tl.int64) * token) * ALIGNMENT


@triton.jit
def _in_use(keep, flags, strides, batch, token):
    """``keep`` for the tokens that ``flags`` (B, S) marks; all if it is None."""
    if flags is not None:
        pointers = flags + tl.cast(strides[0], tl.int64) * batch + tl.cast(strides[1], tl.int64) * token
        keep = keep & (tl.load(pointers, mask=keep, other=0) != 0)
    return keep


@triton.jit
def _plain_tile(base, steps, start, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr):
    channel = tl.arange(0, triton.next_power_of_2(HEAD_DIM))[None, :]
    pointers = _row_pointer(base, steps, 0, 0, start + tl.arange(0, ROWS), HEAD_DIM)[:, None] + channel
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
        pointers = _row_pointer(base, steps, 0, 0, token, HEAD_DIM)[:, None] + channel[None, :]
        inside = (token < end)[:, None] & (channel < HEAD_DIM)[None, :]
        x = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
        largest = tl.max(tl.where(x == x, tl.abs(x), float("inf")), 1)
        keep = _in_use((token < end) & (largest < float("inf")), in_use, in_use_strides, batch, token)
        plain = tl.minimum(plain, tl.min(((keep & (largest <= _LARGEST)) | (token >= end)).to(tl.int32), 0))
        x = _bound(tl.where(keep[:, None], x, 0.0))
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
            norm = _hypotenuse(norm, difference * tl.sqrt_rn(n * share))
        norm = _hypotenuse(norm, _norm(x, 0))
        n += tile_n
    return n, mean, norm, plain


@triton.jit
def _record(
    x, steps, in_use, in_use_strides, records, counts, record, channels, index, heads, chunks, seqlen, cu_seqlens,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """Write the record of chunk ``index`` of a tensor (B, H, S, D): mean and norm of every channel.

    To ``counts`` goes the number n of rows that count, or -1 - n if some row does not or is over the bound.
    """
    BLOCK_D: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    batch, head, _, begin, first, end = _chunk_of(index, heads, chunks, seqlen, cu_seqlens)
    base = _row_pointer(x, steps, batch, head, begin, HEAD_DIM)
    if in_use is not None and cu_seqlens is not None:
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
            used = _in_use(token < end, in_use, in_use_strides, batch, token)
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
def _partials_kernel(
    q, q_steps, k, k_steps, v, v_steps, q_in_use, q_in_use_strides, k_in_use, k_in_use_strides,
    records, counts, channels, programs, chunks, heads, seqlens, q_cu_seqlens, k_cu_seqlens,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, ROWS: tl.constexpr, ROWS_V: tl.constexpr,
    WITH_Q: tl.constexpr, WITH_K: tl.constexpr, WITH_V: tl.constexpr, CENTER_K: tl.constexpr,
):  # fmt: skip
    """Programs of q first, then those of k, then of v. ``chunks``: for each, how many a head and how long."""
    record = tl.program_id(0)
    first_of_v = programs[0] + programs[1]
    if WITH_Q and record < programs[0]:
        _record(
            q, q_steps, q_in_use, q_in_use_strides, records, counts, record, channels,
            record, heads[0], chunks[0], seqlens[0], q_cu_seqlens, HEAD_DIM, ROWS, False,
        )  # fmt: skip
    if WITH_K and record >= programs[0] and record < first_of_v:
        _record(
            k, k_steps, k_in_use, k_in_use_strides, records, counts, record, channels,
            record - programs[0], heads[1], chunks[1], seqlens[1], k_cu_seqlens, HEAD_DIM, ROWS, CENTER_K,
        )  # fmt: skip
    if WITH_V and record >= first_of_v:
        _record(
            v, v_steps, k_in_use, k_in_use_strides, records, counts, record, channels,
            record - first_of_v, heads[1], chunks[2], seqlens[1], k_cu_seqlens, HEAD_DIM_V, ROWS_V, True,
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
        block_norm = _norm(tl.load(pointers + channels, mask=held, other=0.0), 0)
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
            block_norm = _hypotenuse(block_norm, _norm(off, 0))
            share = tl.div_rn(block_n, total)
            difference = block_mean - mean
            mean += difference * share
            norm = _hypotenuse(norm, difference * tl.sqrt_rn(n * share))
        norm = _hypotenuse(norm, block_norm)
        n += block_n
    return n, mean, norm, plain


@triton.jit(do_not_specialize=["channels", "programs", "chunks", "group", "head_dim", "head_dim_v", "heads", "seqlens"])
def _merge_kernel(
    records, counts, channels, k_mean, v_mean, balance, candidates, programs, chunks, group, head_dim, head_dim_v,
    heads, seqlens, q_cu_seqlens, k_cu_seqlens,
    SMOOTH_K: tl.constexpr, AUTO: tl.constexpr, SMOOTH_V: tl.constexpr, BALANCED: tl.constexpr, BLOCK: tl.constexpr,
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
        first, number = _records_of(kv_head, 1, heads, chunks[1], seqlens[1], k_cu_seqlens)
        n, mean, norm, plain = _merged(
            records, counts, channels, programs[0] + first, number, channel, inside, SMOOTH_K
        )
        spread = tl.div_rn(norm, tl.sqrt_rn(tl.maximum(n, 1.0)))
        q_rms = tl.zeros(channel.shape, tl.float32)
        if BALANCED:
            first, number = _records_of(kv_head, group, heads, chunks[0], seqlens[0], q_cu_seqlens)
            q_n, _, q_norm, _ = _merged(records, counts, channels, first, number, channel, inside, False)
            q_rms = tl.div_rn(q_norm, tl.sqrt_rn(tl.maximum(q_n, 1.0)))
        if AUTO:
            rms = _hypotenuse(mean, spread)
            before = tl.full(channel.shape, 1.0, tl.float32)
            after = before
            if BALANCED:
                before, after = _balance(q_rms, rms), _balance(q_rms, spread)
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
                tl.store(balance + at, _balance(q_rms, spread), mask=inside)
    if SMOOTH_V:
        inside = channel < head_dim_v
        first, number = _records_of(kv_head, 1, heads, chunks[2], seqlens[1], k_cu_seqlens)
        first += programs[0] + programs[1]
        _, mean, _, _ = _merged(records, counts, channels, first, number, channel, inside, True)
        tl.store(v_mean + kv_head.to(tl.int64) * head_dim_v + channel, mean, mask=inside)


# ---- 3. Weighted errors on sampled rows ------------------------------------------------------------------------------


@triton.jit
def _sampled_row(i, sampled, seqlen):
    """The i-th of linspace(0, seqlen - 1, sampled), rounded. No value lies halfway: the 63 gaps of 64 rows are odd."""
    gaps = tl.maximum(sampled - 1, 1)
    return (2 * i.to(tl.int64) * (seqlen - 1) + gaps) // (2 * gaps)


@triton.jit
def _tile(pointers, inside, keep):
    """FP32 values, and which rows of ``keep`` are finite. Other rows become 0 and values are bounded: what does not
    count might overflow when squared, and no weight of 0 would stop that."""
    x = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    keep = keep & (tl.max(tl.where(x == x, tl.abs(x), float("inf")), 1) < float("inf"))
    return _bound(tl.where(keep[:, None], x, 0.0)), keep


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
    return channel, _bound(q), mean, before, after


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
        before = _hypotenuse(before, _norm(q * b_before[None, :], 1))
        after = _hypotenuse(after, _norm(q * b_after[None, :], 1))
    return before, after, finite


@triton.jit
def _weighed(
    rows, keys, k_steps, k_in_use, k_in_use_strides, mask, mask_strides, candidates, log2_scale, batch, head, band,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, ROTATED: tl.constexpr, BANDED: tl.constexpr,
    PLAIN: tl.constexpr,
):  # fmt: skip
    """What ``_weigh_kernel`` finds for its rows of its keys: m, l and the squares of e_0 and e_1.

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
            usable = _in_use(usable, k_in_use, k_in_use_strides, batch, key)
        pointers = _row_pointer(k_base, k_steps, 0, 0, key, HEAD_DIM)[:, None]
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
def _weigh_kernel(
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
    batch, kv_head, chunk, k_begin, first, end = _chunk_of(index // group, heads[1], chunks, seqlens[1], k_cu_seqlens)
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
    row = _sampled_row(i, sampled, seqlen_q)
    seen_by = _in_use(i < sampled, q_in_use, q_in_use_strides, batch, row)
    q_base = _row_pointer(q, q_steps, batch, head, q_begin + row, HEAD_DIM)[:, None]
    k_base = _row_pointer(k, k_steps, batch, kv_head, k_begin, HEAD_DIM)

    # What the head's keys are measured in, and without rotation its queries
    every = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
    k_rms = tl.load(candidates + 3 * HEAD_DIM + every, mask=every < HEAD_DIM, other=0.0)
    if not ROTATED:
        k_rms *= tl.load(candidates + HEAD_DIM + every, mask=every < HEAD_DIM, other=1.0)
    inverse_unit = _inverse(_power(tl.max(k_rms, 0)))
    q_unit = tl.full([ROWS], 1.0, tl.float32)
    if not ROTATED:  # a few channels at a time, to need few registers
        q_unit = tl.zeros([ROWS], tl.float32)
        for first_channel in tl.range(0, HEAD_DIM, 16):
            some = first_channel + tl.arange(0, 16)
            inside = (i < sampled)[:, None] & (some < HEAD_DIM)[None, :]
            q_part, _ = _tile(q_base + some[None, :], inside, i < sampled)
            q_unit = tl.maximum(q_unit, tl.max(tl.abs(q_part), 1))
        q_unit = _power(q_unit)
    q_inverse = _inverse(q_unit)

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
        state, number = _records_of(batch * heads[1] + kv_head, group, heads[1], chunks, seqlens[1], k_cu_seqlens)
        state += member * (number // group) + chunk
    to = states + state * 4 * ROWS + i
    tl.store(to, tl.where(seen_by, largest, -float("inf")))
    tl.store(to + ROWS, total)
    tl.store(to + 2 * ROWS, q_unit * tl.sqrt_rn(error_before))
    tl.store(to + 3 * ROWS, q_unit * tl.sqrt_rn(error_after))


# ---- 4. The decision -------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["group", "chunks", "heads", "key_chunks", "seqlen_k"])
def _decide_kernel(
    states, norms, candidates, k_mean, balance, group, chunks, heads, key_chunks, seqlen_k, k_cu_seqlens,
    HEAD_DIM: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program a kv head: ``transforms.mean_out_helps``, and with it the mean to take out and the balance."""
    kv_head = tl.program_id(0).to(tl.int64)
    first = kv_head * group * chunks
    if k_cu_seqlens is not None:
        first, _ = _records_of(kv_head, group, heads, key_chunks, seqlen_k, k_cu_seqlens)
        _, chunks = _records_of(kv_head, 1, heads, key_chunks, seqlen_k, k_cu_seqlens)
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
        power = _power(tl.max(tl.max(tl.maximum(error_before, error_after), 0), 0))
        error_before *= _inverse(power)
        error_after *= _inverse(power)
        mass = tl.sum(weight * total, 0)
        mass = tl.where(counts, mass, 1.0)
        rows = tl.maximum(tl.sum(counts.to(tl.float32), 0), 1.0)
        mean_before = tl.sum(tl.sum(weight * error_before * error_before, 0) / mass, 0) / rows
        mean_after = tl.sum(tl.sum(weight * error_after * error_after, 0) / mass, 0) / rows
        before = _hypotenuse(before, power * tl.sqrt_rn(mean_before))
        after = _hypotenuse(after, power * tl.sqrt_rn(mean_after))
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
