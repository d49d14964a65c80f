"""Queries and keys of the common case, quantized as fast as memory delivers them; ``folded_kernel.py`` says how."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from fp8attn.formats import Format
from fp8attn.kernels.portable.device import architecture, made_apart, multiprocessors, vectorizable
from fp8attn.kernels.portable.folded_kernel import FoldedPlan, column_order, folded_kernel, prepare_kernel
from fp8attn.kernels.portable.numerics import FP8_DTYPES, TRITON_DTYPES
from fp8attn.kernels.problem import Rotary
from fp8attn.scaling import Granularity

__all__ = ["folds", "launch_folded"]

_TERMS = 3  # of BF16: an FP32 factor's 24 bits


class _Layout(NamedTuple):
    """How a kernel is laid out on the device.

    Tokens a tile; of how many heads a program turns a tile at a time; warps, stages, programs a multiprocessor, and
    registers a thread.
    """

    tile: int
    sharing: int
    warps: int
    stages: int
    programs: int
    registers: int


def _layout(head_dim: int, block: int, rotary: bool, terms: int) -> _Layout:
    """``block``: how many tokens share a scale: 128, 64 or 1."""
    # Measured on an H200. Few warps a program and several programs hide what each of them waits for.
    if head_dim == 64:
        if rotary:
            return _Layout(128, 2, 8, 3, 2, 128) if block == 128 else _Layout(64, 4, 4, 3, 2, 255)
        if terms == 1:
            return _Layout(128, 1, 4, 2, 4, 128) if block == 128 else _Layout(64, 1, 2, 2, 8, 128)
        return _Layout(128, 1, 8, 3, 2, 128) if block == 128 else _Layout(64, 1, 4, 3, 4, 128)
    if block == 128:
        if rotary:
            return _Layout(128, 2, 8, 3, 1, 255)
        return _Layout(128, 1, 8, 2, 2, 128) if terms == 1 else _Layout(128, 1, 8, 3, 1, 255)
    if rotary:
        return _Layout(64, 2, 4, 3, 2, 255)
    return _Layout(64, 1, 4, 2, 4, 128) if terms == 1 else _Layout(64, 1, 4, 3, 2, 255)


def folds(x: torch.Tensor, fmt: Format, granularity: Granularity, rotary: Rotary | None, *, smoothed: bool) -> bool:
    """Whether the kernel takes a Hadamard rotation of x; ``smoothed``: channels are multiplied before it."""
    if architecture() not in (0, 90):  # it is made for the layout of this tensor core's products
        return False
    if fmt.dtype not in FP8_DTYPES or x.shape[3] not in (64, 128):
        return False
    if granularity.kind != "token" and not (granularity.kind == "block" and granularity.size in (64, 128)):
        return False
    if x.dtype != torch.bfloat16 and (x.dtype != torch.float16 or (smoothed and rotary is None)):
        return False
    if rotary is None:
        return True
    return not rotary.interleaved and rotary.channels == x.shape[3] and rotary.cos.dtype == x.dtype


def launch_folded(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor | None,
    granularity: Granularity,
    fmt: Format,
    pow2: bool,
    hadamard: torch.Tensor,
    signs: torch.Tensor,
    matrix_factor: float,
    *,
    rotary: Rotary | None,
    first_position: int,
    mean: torch.Tensor | None,
    multiplier: torch.Tensor | None,
    divisor: torch.Tensor | None,
) -> None:
    """Run the kernel on what ``folds`` accepts, into ``codes``, ``scale`` and ``shift``; 0 marks scales of odd tiles.

    The rotation is ``matrix_factor * [[H, H], [S H, -S H]]`` with ``hadamard`` H and ``signs`` S. ``mean`` is for the
    shift if there is one, with channels multiplied; else it is taken out, and channels are divided.
    """
    x = vectorizable(x)
    if x.stride(2) >= 2**24:  # a tile's offsets have 32 bits
        x = x.contiguous()
    batch, heads, seqlen, head_dim = x.shape
    factor = divisor if multiplier is None else multiplier
    smoothed = next((t for t in (mean, factor) if t is not None), None)
    kv_heads = heads if smoothed is None else smoothed.shape[1]
    terms = _TERMS if factor is not None and rotary is None else 1
    layout = _layout(head_dim, granularity.size if granularity.kind == "block" else 1, rotary is not None, terms)
    tiles = -(-seqlen // layout.tile)
    # A second head's tile and its statistics together would not fit the registers.
    sharing = math.gcd(layout.sharing, heads) if smoothed is None else 1
    role = "" if mean is None else "key" if shift is None else "shift"
    plan = FoldedPlan(
        head_dim=head_dim, tile=layout.tile, blocked=granularity.kind == "block",
        rotary=rotary is not None, sharing=sharing, terms=terms,
        factor=factor is not None and rotary is not None, mean=role,
        dtype=TRITON_DTYPES[fmt.dtype], largest=fmt.max, pow2=pow2, stages=layout.stages,
    )  # fmt: skip
    units, signs = _units(hadamard, signs, torch.float16 if rotary is not None else x.dtype)
    matrices, image = units, None
    mean, factor = (None if t is None else t.to(x.device).contiguous() for t in (mean, factor))
    with torch.cuda.device_of(x):
        if mean is not None or terms > 1:
            if terms > 1:
                matrices = torch.empty(batch * kv_heads, terms, *units.shape, dtype=torch.bfloat16, device=x.device)
            image = None if mean is None else torch.empty(batch * kv_heads, head_dim, device=x.device)
            prepare_kernel[(batch * kv_heads, 3)](
                units, factor, _batch_stride(factor), mean, _batch_stride(mean), matrices, image, kv_heads,
                2.0**9 if rotary is not None else 2.0**40,
                HALF=head_dim // 2, TERMS=terms if terms > 1 else 0, DIVIDES=multiplier is None,
                num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
        if plan.factor and factor is not None and multiplier is None:
            factor = factor.reciprocal()
        tables: tuple[torch.Tensor | int | None, ...] = (None, None, 0, None)
        if rotary is not None:
            cos, sin = vectorizable(rotary.cos), vectorizable(rotary.sin)
            if cos.stride() != sin.stride():
                cos, sin = cos.contiguous(), sin.contiguous()
            tables = (cos, sin, cos.stride(-2), cos.stride(0) if cos.ndim == 3 and len(cos) > 1 else None)
        strides = (0 if size == 1 else stride for size, stride in zip(x.shape[:3], x.stride(), strict=False))
        folded_kernel[(min(batch * heads * tiles // sharing, layout.programs * multiprocessors(x.device)),)](
            x, *strides, codes, codes.stride(1), codes.stride(2), scale, scale.shape[2], shift,
            units, signs, matrices, 0 if terms == 1 else terms * units.numel(), image, factor, _batch_stride(factor),
            heads // kv_heads, matrix_factor, *tables, first_position, batch, heads, seqlen, tiles,
            PLAN=plan, num_warps=layout.warps, num_stages=layout.stages, maxnreg=layout.registers,
            enable_fp_fusion=False,
        )  # fmt: skip


def _batch_stride(statistic: torch.Tensor | None) -> int:
    return 0 if statistic is None or len(statistic) == 1 else statistic.stride(0)


@lru_cache(maxsize=32)
def _units(hadamard: torch.Tensor, signs: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """[H; S H] (D, D/2) with its columns in ``column_order``, and S."""

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        upper = hadamard.cpu().float()
        units = torch.cat([upper, signs.cpu()[:, None] * upper])[:, column_order(len(signs))]
        return units.to(dtype).contiguous().to(hadamard.device), signs

    return made_apart(make)
