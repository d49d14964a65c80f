"""Smoothing statistics on the device: mean keys, mean values, balance, and whether taking the mean key out helps.

Four kernels at most, each a plain grid over independent programs; what they hand on lies in fixed places and is summed
in a fixed order, so that the same input gives the same bits:

1. ``partials_kernel`` reads k, v and a sample of q once. A program takes a chunk of one head's tokens and writes a
   *record*: how many tokens count, and per channel their mean and the norm of the deviations from it.
2. ``merge_kernel`` merges the records of a head, and of a kv head's query heads.
3. ``weigh_kernel``, for ``smooth_k="auto"``: attention of sampled query rows over a chunk of keys, which yields the
   weighted error of both candidates, c = 0 and c = mean.
4. ``decide_kernel`` merges those and decides.

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

from fp8attn.kernels.portable.device import row_alignment, vectorizable
from fp8attn.kernels.portable.moments_kernel import merge_kernel, partials_kernel
from fp8attn.kernels.portable.packed import in_use as packed_in_use
from fp8attn.kernels.portable.statistics_parts import LARGEST
from fp8attn.kernels.portable.weigh_kernel import decide_kernel, weigh_kernel
from fp8attn.kernels.problem import Masking
from fp8attn.recipe import Recipe
from fp8attn.transforms import Smoothing

if TYPE_CHECKING:
    from collections.abc import Callable

    from fp8attn.kernels.problem import Packing, Rotary, Sequences

__all__ = ["fit_smoothing"]

_SAMPLED_ROWS = 64  # query rows a head on which smooth_k="auto" decides, as in the reference
_SAMPLED_QUERIES = 1024  # a head at least, if there are as many, of which queries' rms is taken, as in the reference

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
    meanwhile: Callable[[], None] | None = None,
) -> Smoothing:
    """The statistics that the recipe asks for, as the reference's ``fit_smoothing`` but of the tensors as they come.

    Queries (B, Hq, Sq, D), keys (B, Hkv, Sk, D) and values (B, Hkv, Sk, Dv) in float32, bfloat16 or float16 and of any
    strides. Statistics are over the tokens in use whose every channel is finite in that head; finite values count as at
    most 2^90 in magnitude. Of queries a sample will do: every n-th, n = max(1, Sq // 1024). ``scale``, the softmax
    scale, serves the decision of ``smooth_k="auto"`` alone.

    ``rotary`` turns queries and keys first. That runs in PyTorch, in FP32: two more tensors in memory.

    Nothing waits for the device and shapes follow from shapes, so that CUDA graphs capture it once it has run. The
    answer does not depend on strides. A tensor that cannot be read in aligned vectors (a last axis that is not
    contiguous, strides that are no multiple of what the head dim allows, a storage offset) is copied first.

    With ``packing`` the tensors are a packed batch, and every sequence gets the statistics that it has alone: (N, Hkv,
    1, D). Rotary tables have a row a token then, those of queries in ``rotary_q``.

    ``meanwhile`` launches what else there is to do, if anything is fitted, when the kernel that reads everything has
    been launched: the others leave memory idle.
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
    cuts = [
        _all_chunks(x, own, max(_rows(x.shape[3]), _CHUNK), _MOST_CHUNKS, sample)
        for x, own, sample in ((q, queries, _SAMPLED_QUERIES), (k, keys, 0), (v, keys, 0))
    ]
    every, chunks = zip(*cuts, strict=True)
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
            partials_kernel[(sum(programs),)](
                q, _steps(q), k, _steps(k), v, _steps(v),
                queries_in_use, _strides(queries_in_use, 2), keys_in_use, _strides(keys_in_use, 2),
                records, counts, channels, programs, chunks, (num_q_heads, num_kv_heads), (seqlen_q, seqlen_k),
                _cu_seqlens(queries), _cu_seqlens(keys),
                HEAD_DIM=head_dim, HEAD_DIM_V=head_dim_v, ROWS=_rows(head_dim), ROWS_V=_rows(head_dim_v),
                WITH_Q=programs[0] > 0, WITH_K=programs[1] > 0, WITH_V=programs[2] > 0,
                CENTER_K=bool(recipe.smooth_k), SAMPLE=_SAMPLED_QUERIES, num_warps=4,
            )  # fmt: skip
        if meanwhile is not None:
            meanwhile()
        merge_kernel[(batch * num_kv_heads, triton.cdiv(channels, _MERGED_CHANNELS))](
            records, counts, channels, k_mean, v_mean, balance, candidates, programs, chunks,
            num_q_heads // num_kv_heads, head_dim, head_dim_v,
            num_kv_heads, (seqlen_q, seqlen_k), _cu_seqlens(queries), _cu_seqlens(keys),
            SMOOTH_K=bool(recipe.smooth_k), AUTO=auto, SMOOTH_V=recipe.smooth_v, BALANCED=balanced,
            BLOCK=_MERGED_CHANNELS, SAMPLE=_SAMPLED_QUERIES, num_warps=4,
        )  # fmt: skip
        if auto:
            states, norms, key_chunks = _weigh(
                q, k, queries_in_use, keys_in_use, candidates, recipe, masking, scale, packing
            )
            most = min(_MOST_KEY_CHUNKS, -(-keys.longest // _KEY_CHUNK)) if keys is not None else states.shape[1]
            decide_kernel[(batch * num_kv_heads,)](
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

    Also how keys are cut, as ``chunk_of`` takes it. Of a packed batch the states are (Hq, chunks of all sequences, 4,
    rows) in size, and numbered by ``records_of``.
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
        weigh_kernel[(batch * num_q_heads * chunks,)](
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


def _all_chunks(
    x: torch.Tensor, sequences: Sequences | None, tile: int, most: int, sample: int = 0
) -> tuple[int, tuple[int, ...]]:
    """How many chunks a tensor (B, H, S, D) is cut into, over all heads, and how, as ``chunk_of`` takes it.

    Of a packed batch the number is what there is room for: as many as the longest sequence may have for each (the first
    of what ``chunk_of`` takes), or if it is less, as many as fit all tokens (the first is 0 then).
    """
    batch, heads, seqlen, _ = x.shape
    if sequences is None:
        step = max(1, seqlen // sample) if sample else 1
        number, length = _chunks(-(-seqlen // step), tile, most)
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
    return torch.where(x.isinf(), x, x.clamp(-LARGEST.value, LARGEST.value))
