"""Tile sizes, warps and stages of the forward kernel, and how keys are split when queries are few."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from fp8attn.formats import get_format
from fp8attn.kernels.problem import AttentionProblem

__all__ = ["Config", "choose_config", "choose_splits", "table_path"]


@dataclass(frozen=True)
class Config:
    """How a forward program works.

    Attributes:
        block_m, block_n: query rows a program and keys a tile.
        edge_n: keys a tile where the diagonal, a window or the end of the sequence cuts it: smaller, to waste less and
            because visibility takes registers.
        chunk: channels of the head dim a product takes at a time.
        slice_v, slices_v: value channels an accumulator holds, and accumulators a program.
        warps, stages: of a program, and tiles in flight.
        max_registers: a thread's limit, None for the compiler's choice.
    """

    block_m: int
    block_n: int
    edge_n: int
    chunk: int
    slice_v: int
    slices_v: int
    warps: int
    stages: int
    max_registers: int | None = None


def table_path(gpu: str) -> Path:
    """The file that holds a GPU's table, by its name: ``tuned/nvidia-h200.json``."""
    return Path(__file__).parent / "tuned" / (re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json")


def choose_config(problem: AttentionProblem) -> Config:
    qkv = problem.qkv
    head_dim, head_dim_v = qkv.q.shape[-1], qkv.v.shape[-1]
    wide = 16 if get_format(qkv.recipe.p_format).dtype.itemsize > 1 or qkv.q.codes.dtype.itemsize > 1 else 8
    chunk = _power_of_two(head_dim, 32, 128 if head_dim > 256 else 256)
    slice_v = _power_of_two(head_dim_v, 16, 64 if head_dim_v > 128 else 128)
    slices_v = min(4, -(-head_dim_v // slice_v))
    registers = 168 if wide == 8 and max(head_dim, head_dim_v) <= 128 else None
    block_n = 128 if head_dim <= (256 if wide == 8 else 128) else 64
    if head_dim > 256:
        block_n = 32
    return Config(64, block_n, min(64, block_n), chunk, slice_v, slices_v, 4, 2, registers)


def choose_splits(problem: AttentionProblem, config: Config, programs: int) -> int:
    """Programs that share a query tile's keys: as many as keep the GPU full, each with at least four key tiles."""
    if problem.qkv.q.device.type != "cuda":
        return 1
    multiprocessors = torch.cuda.get_device_properties(problem.qkv.q.device).multi_processor_count
    key_tiles = -(-problem.qkv.k.shape[2] // config.block_n)
    return max(1, min(2 * multiprocessors // programs, key_tiles // 4))


def _power_of_two(n: int, least: int, most: int) -> int:
    power = least
    while power < min(n, most):
        power *= 2
    return power
