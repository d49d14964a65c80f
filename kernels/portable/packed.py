"""Packed batches: sequences of any length one after another, which the kernels take as one batch.

``cu_seqlens`` stays on the device. A kernel's programs are laid out for the lengths that are possible; each finds its
sequence by binary search, moves its pointers there, and goes on as if that were the only one.

Whatever is rounded up to a *unit* of tokens (tiles, blocks that share a scale, aligned rows) needs room for
``total // unit + sequences`` units in all: sequence b's begin at ``cu_seqlens[b] // unit + b``, which leaves every
sequence its own number, rounded up, however long the others are (``first_unit``). So nothing has to be summed up before
a kernel can start.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from fp8attn.kernels.problem import AttentionProblem, Masking, Packing, QuantizedQKV, Rotary, Sequences
from fp8attn.scaling import QuantizedTensor

__all__ = [
    "ALIGNMENT",
    "PackedProblem",
    "PackedQKV",
    "PackedTensor",
    "bounds",
    "find_sequence",
    "first_unit",
    "in_use",
    "rotary_by_token",
]

#: Codes of a sequence begin at a multiple of so many rows. No tile that is cut at the end of a sequence is longer, so
#: none reads another sequence's codes.
ALIGNMENT = 128
_IN_USE_TILE = 1024


@dataclass(frozen=True, eq=False)
class PackedTensor(QuantizedTensor):
    """What the packed kernels hand each other: codes as of a batch of one, in which sequences begin at aligned rows.

    ``codes`` is (1, H, R, D), or (1, H, D, R) in permuted columns, with R rows as ``first_unit`` counts them; what
    belongs to no token is 0 in values and arbitrary elsewhere. ``scale`` holds token and block scales sequence after
    sequence, each as it would be alone, (H, blocks); other scales have one entry a sequence: (N, H or 1, 1, D or 1).
    """

    total: int = 0

    def __post_init__(self) -> None:
        pass  # none of the shapes that a QuantizedTensor checks hold here

    @property
    def shape(self) -> torch.Size:
        """(1, H, T, D) for T tokens in all."""
        channels = self.codes.shape[-1 if self.layout == "rows" else -2]
        return torch.Size([1, self.codes.shape[1], self.total, channels])


@dataclass(frozen=True, eq=False)
class PackedQKV(QuantizedQKV):
    """``PackedTensor``s. ``logit_shift`` is flat: sequence after sequence, (H, tokens); ``v_mean`` (N, Hkv, 1, Dv)."""

    def __post_init__(self) -> None:
        pass


@dataclass(frozen=True)
class PackedProblem(AttentionProblem):
    """``masking`` is of all tokens: of it, only what holds for every sequence alike is meant."""

    packing: Packing | None = None


# ---- Address arithmetic ----------------------------------------------------------------------------------------------


@triton.jit
def first_unit(begin, sequence, unit):
    """Number of the first unit (of ``unit`` tokens) of the sequence whose first token is ``begin``."""
    return begin // unit + sequence


@triton.jit
def bounds(cu_seqlens, sequence, total):
    """(First token, length) of a sequence, int32; within the tokens there are, whatever ``cu_seqlens`` holds."""
    begin = tl.minimum(tl.maximum(tl.load(cu_seqlens + sequence).to(tl.int32), 0), total)
    end = tl.minimum(tl.maximum(tl.load(cu_seqlens + sequence + 1).to(tl.int32), begin), total)
    return begin, end - begin


@triton.jit
def find_sequence(cu_seqlens, sequences, number, unit, total):
    """(Sequence, first token, length, place in the sequence) of the unit with that ``number``.

    Beyond its own units a sequence has spare ones; their place is beyond its end.
    """
    low = number * 0
    high = low + sequences
    while high - low > 1:
        middle = (low + high) // 2
        begin, _ = bounds(cu_seqlens, middle, total)
        reached = first_unit(begin, middle, unit) <= number
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    begin, length = bounds(cu_seqlens, low, total)
    return low, begin, length, number - first_unit(begin, low, unit)


# ---- Tokens in use ---------------------------------------------------------------------------------------------------


@triton.jit
def _in_use_kernel(
    flags, cu_seqlens, cu_others, sequences, total, total_others, left, right,
    QUERIES: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    sequence, begin, length, tile = find_sequence(cu_seqlens, sequences, tl.program_id(0), TILE, total)
    _, others = bounds(cu_others, sequence, total_others)
    token = tile * TILE + tl.arange(0, TILE)
    used = token < length
    # A query has its diagonal key at token + diagonal, a key its diagonal query at token - diagonal.
    diagonal = 0
    if BOTTOM_RIGHT:
        diagonal = others - length if QUERIES else length - others
    if QUERIES:
        if HAS_RIGHT:
            used = used & (token + diagonal + right >= 0)
        if HAS_LEFT:
            used = used & (token + diagonal - left < others)
    else:
        if HAS_LEFT:
            used = used & (token >= diagonal - left)
        if HAS_RIGHT:
            used = used & (token < others + diagonal + right)
    tl.store(flags + begin + token, used.to(tl.uint8), mask=token < length)


def in_use(packing: Packing, masking: Masking) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """``Masking.in_use`` of a packed batch: (1, Tq) and (1, Tk), by position; None where all tokens always are."""
    if masking.left is None and masking.right is None:
        return None, None
    flags = []
    for own, others in ((packing.queries, packing.keys), (packing.keys, packing.queries)):
        made = torch.empty(1, own.total, dtype=torch.bool, device=own.cu_seqlens.device)
        if made.numel():
            with torch.cuda.device_of(made):
                _in_use_kernel[(own.units(_IN_USE_TILE),)](
                    made.view(torch.uint8), own.cu_seqlens, others.cu_seqlens, own.count, own.total, others.total,
                    masking.left or 0, masking.right or 0,
                    QUERIES=own is packing.queries, BOTTOM_RIGHT=masking.causal_alignment == "bottom_right",
                    HAS_LEFT=masking.left is not None, HAS_RIGHT=masking.right is not None,
                    TILE=_IN_USE_TILE, num_warps=4,
                )  # fmt: skip
        flags.append(made)
    return flags[0], flags[1]


# ---- Rotary tables ---------------------------------------------------------------------------------------------------


def rotary_by_token(rotary: Rotary, own: Sequences, diagonals: Sequences | None) -> Rotary:
    """Tables with a row a token, for tokens that are numbered through the batch.

    Positions count from each sequence's first key: where ``diagonals`` are given (the keys, for queries that are
    aligned at the bottom right), a sequence's last token stands where its last key does. A position that the tables do
    not have makes NaN.
    """
    token = torch.arange(own.total, device=own.cu_seqlens.device)
    cu_seqlens = own.cu_seqlens.to(torch.int64)
    sequence = (torch.searchsorted(cu_seqlens, token, right=True) - 1).clamp(0, own.count - 1)
    position = token - cu_seqlens[sequence]
    if diagonals is not None:
        others = diagonals.cu_seqlens.to(torch.int64)
        position += (others[sequence + 1] - others[sequence]) - (cu_seqlens[sequence + 1] - cu_seqlens[sequence])
    positions = rotary.cos.shape[-2]
    known = ((position >= 0) & (position < positions))[:, None]
    rows = position.clamp(0, positions - 1)
    cos, sin = (
        torch.where(known, table.reshape(positions, -1)[rows], torch.nan).to(table.dtype)
        for table in (rotary.cos, rotary.sin)
    )
    return Rotary(cos, sin, rotary.interleaved)
