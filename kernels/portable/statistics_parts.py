# mypy: ignore-errors
"""What the kernels of the statistics share: norms that neither overflow nor vanish, and where chunks of tokens lie."""

from __future__ import annotations

import triton
import triton.language as tl

from fp8attn.kernels.portable.packed import bounds, find_sequence, first_unit

__all__ = [
    "LARGEST",
    "balance_of",
    "bound",
    "chunk_of",
    "hypotenuse",
    "inverse_power",
    "power_of_two",
    "records_of",
    "row_pointer",
    "safe_norm",
    "sampling_step",
    "those_in_use",
]

LARGEST = tl.constexpr(2.0**90)  # finite inputs are brought under it, as in the reference


# ---- Norms -----------------------------------------------------------------------------------------------------------


@triton.jit
def power_of_two(x):
    """The power of two at or below x >= 0, at least 2^-126."""
    return tl.maximum((x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True), 2.0**-126)


@triton.jit
def inverse_power(power):
    """1 / power of a power of two between 2^-126 and 2^126, exactly."""
    return (0x7F000000 - power.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def safe_norm(x, axis: tl.constexpr):
    """Root of the sum of squares along ``axis``."""
    power = power_of_two(tl.max(tl.abs(x), axis))
    y = x * tl.expand_dims(inverse_power(power), axis)
    return power * tl.sqrt_rn(tl.sum(y * y, axis))


@triton.jit
def hypotenuse(x, y):
    """sqrt(x^2 + y^2)."""
    power = power_of_two(tl.maximum(tl.abs(x), tl.abs(y)))
    inverse = inverse_power(power)
    return power * tl.sqrt_rn((x * inverse) * (x * inverse) + (y * inverse) * (y * inverse))


@triton.jit
def balance_of(q_rms, k_rms):
    """``transforms.balance_factors`` of channels' rms."""
    factor = tl.div_rn(tl.sqrt_rn(k_rms), tl.sqrt_rn(tl.where(q_rms > 0, q_rms, 1.0)))
    return tl.where((q_rms > 0) & (k_rms > 0), tl.minimum(tl.maximum(factor, 2.0**-126), 2.0**126), 1.0)


@triton.jit
def bound(x):
    """Finite values brought under 2^90; FP16 has none beyond."""
    return tl.minimum(tl.maximum(x, -LARGEST), LARGEST)


# ---- Where chunks lie ------------------------------------------------------------------------------------------------


@triton.jit
def chunk_of(index, heads, chunks, seqlen, cu_seqlens, SAMPLE: tl.constexpr = 0):
    """(batch, head, number in the head, where its tokens begin, first token, one past the last, step) of a chunk.

    ``chunks``: how many a head, and how long. With ``cu_seqlens`` (``_all_chunks``) a sequence is cut as it would be
    alone, and followed by empty chunks; tokens are counted from where it begins. ``records_of`` knows, too, how chunks
    are numbered. With ``SAMPLE`` only every ``step``-th token is one (``sampling_step``).
    """
    if cu_seqlens is None:
        sequence, head = index // chunks[0] // heads, index // chunks[0] % heads
        chunk, begin, first = index % chunks[0], 0, index % chunks[0] * chunks[1]
        step = sampling_step(seqlen, SAMPLE)
        end = tl.minimum(first + chunks[1], tl.cdiv(seqlen, step))
    else:
        sequence = index // heads
        if chunks[0] > 0:
            sequence = sequence // chunks[0]
        else:
            sequence, _, _, _ = find_sequence(cu_seqlens, chunks[3], sequence, chunks[1], seqlen)
        begin, length = bounds(cu_seqlens, sequence, seqlen)
        step = sampling_step(length, SAMPLE)
        length = tl.cdiv(length, step)
        number, size = _packed_chunks(length, chunks)
        of_sequence = index - _packed_chunks_before(sequence, begin, chunks) * heads
        number = tl.maximum(number, 1)
        chunk = of_sequence % number
        head = tl.minimum(of_sequence // number, heads - 1)
        first = tl.where(of_sequence < number * heads, chunk * size, length)
        end = tl.minimum(first + size, length)
    return sequence.to(tl.int64), head.to(tl.int64), chunk, begin, first, end, step


@triton.jit
def sampling_step(length, SAMPLE: tl.constexpr):
    """Every which token of a sequence counts, so that ``SAMPLE`` of them do at least, where there are as many."""
    return tl.maximum(length // SAMPLE, 1) if SAMPLE > 0 else 1


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
def records_of(kv_head, group, heads, chunks, seqlen, cu_seqlens, SAMPLE: tl.constexpr = 0):
    """(First, number) of the chunks of a kv head, and of its ``group`` of heads; ``heads``: kv heads."""
    if cu_seqlens is None:
        number = chunks[0]
        first = kv_head * number
    else:
        sequence = kv_head // heads
        begin, length = bounds(cu_seqlens, sequence, seqlen)
        number, _ = _packed_chunks(tl.cdiv(length, sampling_step(length, SAMPLE)), chunks)
        first = _packed_chunks_before(sequence, begin, chunks) * heads + kv_head % heads * number
    return first * group, number * group


@triton.jit
def row_pointer(x, steps, batch, head, token, HEAD_DIM: tl.constexpr):
    """Where a token's channels begin; ``steps`` as ``_steps`` makes them."""
    ALIGNMENT: tl.constexpr = (HEAD_DIM | 16) & -(HEAD_DIM | 16)  # the largest power of two in both, as row_alignment
    offset = tl.cast(steps[0], tl.int64) * batch + tl.cast(steps[1], tl.int64) * head
    return x + (offset + tl.cast(steps[2], tl.int64) * token) * ALIGNMENT


@triton.jit
def those_in_use(keep, flags, strides, batch, token):
    """``keep`` for the tokens that ``flags`` (B, S) marks; all if it is None."""
    if flags is not None:
        pointers = flags + tl.cast(strides[0], tl.int64) * batch + tl.cast(strides[1], tl.int64) * token
        keep = keep & (tl.load(pointers, mask=keep, other=0) != 0)
    return keep
