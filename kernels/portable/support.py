"""What the Triton backend can run, known without importing Triton: its entry in the table of backends reads this."""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache

import torch

from fp8attn.formats import get_format
from fp8attn.recipe import Recipe

__all__ = ["LARGEST_HEAD_DIM", "LARGEST_HEAD_DIM_V", "gpu_lacks", "unsupported", "v_layout"]

LARGEST_HEAD_DIM, LARGEST_HEAD_DIM_V = 576, 512  # multi-head latent attention's


def unsupported(device: torch.device, recipe: Recipe, head_dim: int, head_dim_v: int) -> str | None:
    """None if the kernels run such a problem, else why not and what to do about it, as a clause.

    It depends on nothing that a tensor holds and never waits for a device.
    """
    if not _installed("triton"):
        return "Triton is not installed (pip install triton)"
    interpreted = bool(importlib.import_module("triton").knobs.runtime.interpret)
    if device.type not in ("cuda", "cpu"):
        return f"Triton runs on CUDA devices, not on {device.type}"
    if device.type == "cpu" and not interpreted:
        return "Triton runs on CUDA devices; on a CPU only in its interpreter, for tests (TRITON_INTERPRET=1)"
    if device.type == "cuda":
        if interpreted:
            return "Triton's interpreter is on, which is for CPUs (unset TRITON_INTERPRET)"
        if torch.version.hip is not None:
            return "the kernels are for NVIDIA GPUs and this torch is built for ROCm"
        if not torch.cuda.is_available():
            return "torch finds no CUDA device"
        index = torch.cuda.current_device() if device.index is None else device.index
        lacks = gpu_lacks(_capability(index), recipe)
        if lacks is not None:
            return lacks
    if recipe.accumulation != "fp32":
        return f"accumulation={recipe.accumulation!r} is a model for studies, which the reference alone has"
    for whose, dim, largest in (
        ("query", head_dim, LARGEST_HEAD_DIM),
        ("value", head_dim_v, LARGEST_HEAD_DIM_V),
    ):
        if dim > largest:
            return f"its {whose} head_dim is at most {largest}, got {dim}"
    return None


def gpu_lacks(capability: tuple[int, int], recipe: Recipe) -> str | None:
    """What a GPU of that compute capability lacks to run the recipe, if anything."""
    has = f"the GPU has compute capability {capability[0]}.{capability[1]}"
    if capability < (8, 0):
        return f"{has} and the kernels need 8.0"
    fp8 = ("e4m3", "e5m2")
    products = ((recipe.q_format, recipe.k_format), (recipe.p_format, recipe.v_format))
    if capability < (8, 9) and any(left in fp8 and right in fp8 for left, right in products):
        return f"{has} and FP8 products need 8.9 (recipe='mixed', FP8 keys and values in 16-bit products, runs on 8.0)"
    return None


def v_layout(recipe: Recipe) -> str:
    """How the quantizer stores values: as FP8 tensor cores want them where they are in an FP8 product."""
    narrow = all(get_format(name).dtype.itemsize == 1 for name in (recipe.v_format, recipe.p_format))
    return "permuted_columns" if narrow else "rows"


@lru_cache
def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


@lru_cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)
