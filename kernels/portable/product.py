# mypy: ignore-errors
"""One product of FP8 codes inside the tensor core, added to its accumulator: what ``fp8attn probe`` looks at."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["INSTRUCTIONS", "tensor_core_product"]

INSTRUCTIONS = ("mma", "wgmma")
"""``mma`` is a warp's, of 16 rows (every GPU with FP8 tensor cores); ``wgmma`` four warps', of 64 (Hopper alone)."""

_ROWS, _COLUMNS, _STEP = 16, 8, 32  # of one mma
_WIDE_ROWS, _WIDE_COLUMNS = 64, 64
_MMA = tl.constexpr(
    "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
    "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
)


@triton.jit
def wgmma_kernel(a, b, c, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    """out = c + a b^T of (ROWS, DEPTH) and (COLUMNS, DEPTH) codes, in one accumulator."""
    row, column, depth = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    left = tl.load(a + row[:, None] * DEPTH + depth[None, :])
    right = tl.load(b + column[None, :] * DEPTH + depth[:, None])
    places = row[:, None] * COLUMNS + column[None, :]
    # Unless told otherwise, Triton may add parts of the product in FP32.
    product = tl.dot(left, right, tl.load(c + places), max_num_imprecise_acc=DEPTH)
    tl.store(out + places, product)


@triton.jit
def mma_kernel(a, b, c, out, STEPS: tl.constexpr):
    """The same by the instruction itself, since Triton makes 16-bit products of FP8 wherever it has no wgmma on Hopper.

    One warp; a, b (STEPS, registers, 32) and c, out (4, 32) hold what thread t has in each register.
    """
    thread = tl.arange(0, 32)
    c0, c1, c2, c3 = (
        tl.load(c + thread), tl.load(c + 32 + thread), tl.load(c + 64 + thread), tl.load(c + 96 + thread),
    )  # fmt: skip
    for step in tl.static_range(STEPS):
        left, right = a + step * 128 + thread, b + step * 64 + thread
        c0, c1, c2, c3 = tl.inline_asm_elementwise(
            _MMA, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            [
                tl.load(left), tl.load(left + 32), tl.load(left + 64), tl.load(left + 96),
                tl.load(right), tl.load(right + 32), c0, c1, c2, c3,
            ],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    tl.store(out + thread, c0)
    tl.store(out + 32 + thread, c1)
    tl.store(out + 64 + thread, c2)
    tl.store(out + 96 + thread, c3)


def tensor_core_product(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, instruction: str) -> torch.Tensor:
    """``c + a @ b`` of E4M3 codes a (16, K) and b (K, 8), K one of 32, 64, 128 and 256.

    Args:
        c: (16, 8) float32, with which the tensor core's accumulator begins.
        instruction: one of ``INSTRUCTIONS``.
    """
    if instruction not in INSTRUCTIONS:
        raise ValueError(f"instruction must be one of {', '.join(INSTRUCTIONS)}, got {instruction!r}")
    depth = a.shape[-1]
    if depth not in (32, 64, 128, 256) or a.shape != (_ROWS, depth) or b.shape != (depth, _COLUMNS):
        raise ValueError(f"a product is of (16, K) and (K, 8), K 32 to 256, got {tuple(a.shape)} and {tuple(b.shape)}")
    if instruction == "wgmma":
        left, right = a.new_zeros(_WIDE_ROWS, depth), b.new_zeros(_WIDE_COLUMNS, depth)
        left[:_ROWS], right[:_COLUMNS] = a, b.mT
        start = c.new_zeros(_WIDE_ROWS, _WIDE_COLUMNS)
        start[:_ROWS, :_COLUMNS] = c
        out = torch.empty_like(start)
        wgmma_kernel[(1,)](left, right, start, out, _WIDE_ROWS, _WIDE_COLUMNS, depth, num_warps=4)
        return out[:_ROWS, :_COLUMNS]
    # Thread 4 g + t has rows g and g + 8, columns 2 t and 2 t + 1 of the sum, and of a row or column of codes four from
    # 4 t and four from 4 t + 16 on (PTX ISA, "Matrix fragments for mma.m16n8k32").
    steps = depth // _STEP
    left = a.contiguous().view(torch.int32).view(2, 8, steps, 2, 4).permute(2, 3, 0, 1, 4)
    right = b.mT.contiguous().view(torch.int32).view(8, steps, 2, 4).permute(1, 2, 0, 3)
    start = c.view(2, 8, 4, 2).permute(0, 3, 1, 2).contiguous()
    out = torch.empty_like(start)
    mma_kernel[(1,)](left.contiguous(), right.contiguous(), start, out, steps, num_warps=1)
    return out.permute(0, 2, 3, 1).reshape(_ROWS, _COLUMNS)
