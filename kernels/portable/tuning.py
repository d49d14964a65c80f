"""Tile sizes, warps and stages of the forward kernel, and how keys are split when queries are few.

What was measured stands in ``tuned/<gpu>.json``, one file a GPU, written by
``python -m fp8attn.kernels.portable.search``.
A GPU without a file uses the one of its nearest relative; a head dim without a row the next larger one's.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from fp8attn.kernels.problem import AttentionProblem

__all__ = ["Config", "choose_config", "choose_splits", "describe", "programs", "table_path"]

_FALLBACK_GPU = "NVIDIA H200"
_FALLBACK_SHARED_MEMORY = 227 << 10  # bytes a block of that GPU may have
_OTHER_SHARED_MEMORY = 1 << 10  # barriers and reductions, beside the tiles
_SPLIT_TILES = 4  # a program that shares a query tile's keys has at least so many tiles of them


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


def choose_config(problem: AttentionProblem, *, shared_memory: int | None = None) -> Config:
    """The measured configuration for the problem's head dims, formats and kind of mask, made to fit.

    ``shared_memory``: bytes that a block may have, the device's unless given.
    """
    qkv, masking = problem.qkv, problem.masking
    device, gpu = qkv.q.device, _FALLBACK_GPU
    if device.type == "cuda":
        gpu = torch.cuda.get_device_name(device)
        if shared_memory is None:
            properties = torch.cuda.get_device_properties(device)
            shared_memory = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    sizes = tuple(x.codes.element_size() for x in (qkv.q, qkv.k, qkv.v))
    wide = max(sizes[0], sizes[2], _width(qkv.recipe.p_format)) > 1
    banded = masking.left is not None or masking.right is not None or masking.mask is not None
    config = _config(gpu, qkv.q.shape[-1], qkv.v.shape[-1], wide, banded)
    return _fitted(config, qkv.q.shape[-1], sizes, shared_memory or _FALLBACK_SHARED_MEMORY)


@lru_cache(maxsize=256)
def _fitted(config: Config, head_dim: int, sizes: tuple[int, ...], shared_memory: int) -> Config:
    """The configuration with fewer stages and keys a tile, where it would need more shared memory than there is.

    ``sizes``: bytes of a code of q, k and v. A table is made with 8-bit keys and values, on one GPU.
    """
    channels = -(-head_dim // config.chunk) * config.chunk
    while config.block_n > 32 or config.stages > 1:
        key = channels * sizes[1] + config.slice_v * config.slices_v * sizes[2]
        tiles = config.block_m * channels * sizes[0] + config.stages * config.block_n * key
        if tiles + _OTHER_SHARED_MEMORY <= shared_memory:
            break
        if config.stages > 2 or config.block_n == 32:
            config = replace(config, stages=config.stages - 1)
        else:
            block_n = config.block_n // 2
            config = replace(config, block_n=block_n, edge_n=min(config.edge_n, block_n))
    return config


@lru_cache(maxsize=256)
def _config(gpu: str, head_dim: int, head_dim_v: int, wide: bool, banded: bool) -> Config:
    rows = [row for row in _rows(gpu) if (row["wide"], row["banded"]) == (wide, banded)]
    covering = [row for row in rows if row["head_dim"] >= head_dim and row["head_dim_v"] >= head_dim_v]
    if covering:
        row = min(covering, key=lambda row: (row["head_dim"], row["head_dim_v"]))
        return Config(**row["config"])
    # Larger than any measured: small tiles, the head dim in chunks, value channels shared out over programs.
    return Config(64, 32, 32, 64, 64, min(4, -(-head_dim_v // 64)), 4, 2)


@lru_cache(maxsize=8)
def _rows(gpu: str) -> list[dict[str, Any]]:
    path = table_path(gpu)
    if not path.is_file():
        path = table_path(_FALLBACK_GPU)
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return rows


def _width(name: str) -> int:
    return 1 if name in ("e4m3", "e5m2", "int8") else 2


def programs(problem: AttentionProblem, config: Config) -> int:
    """How many query tiles there are, over all heads, sequences and groups of value slices."""
    batch, num_q_heads, seqlen_q, _ = problem.qkv.q.shape
    slices = -(-problem.qkv.v.shape[-1] // config.slice_v)
    return -(-seqlen_q // config.block_m) * batch * num_q_heads * -(-slices // config.slices_v)


def choose_splits(problem: AttentionProblem, config: Config) -> int:
    """Programs that share a query tile's keys: as many as keep the GPU full, each with a few tiles at least."""
    device = problem.qkv.q.device
    if device.type != "cuda":
        return 1
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    key_tiles = -(-problem.qkv.k.shape[2] // config.block_n)
    return max(1, min(2 * multiprocessors // programs(problem, config), key_tiles // _SPLIT_TILES))


def describe(problem: AttentionProblem) -> dict[str, str]:
    """What the forward kernel would do, for ``explain``."""
    config = choose_config(problem)
    said = {
        "tile": f"{config.block_m} query rows, {config.block_n} keys ({config.edge_n} at edges)",
        "head dim": f"in chunks of {config.chunk}, values in {config.slices_v} x {config.slice_v}",
        "program": f"{config.warps} warps, {config.stages} stages",
    }
    if 0 not in problem.qkv.q.shape:
        splits = choose_splits(problem, config)
        said["programs"] = f"{programs(problem, config)}" + (f" x {splits} splits of the keys" if splits > 1 else "")
    return said
