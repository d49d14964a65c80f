"""What the Triton backend can run, known without importing Triton's kernels: a table's entry, not an implementation."""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache

import torch

from fp8attn.formats import get_format
from fp8attn.recipe import Recipe

__all__ = ["LARGEST_HEAD_DIM", "LARGEST_HEAD_DIM_V", "unsupported", "v_layout"]

LARGEST_HEAD_DIM, LARGEST_HEAD_DIM_V = 576, 512  # multi-head latent attention's


def unsupported(device: torch.device, recipe: Recipe, head_dim: int, head_dim_v: int) -> str | None:
    """None if the kernels run such a problem, else the reason and what to do about it, as the end of a sentence.

    It depends on nothing that a tensor holds and never waits for a device.
    """
    if not _installed("triton"):
        return "Triton is not installed: pip install triton"
    interpreted = _interpreter_is_on()
    if device.type != "cuda" and not interpreted:
        return (
            f"Triton runs on CUDA devices, not on {device.type}; "
            "for tests on a CPU set TRITON_INTERPRET=1 before Python starts"
        )
    if device.type not in ("cuda", "cpu"):
        return f"Triton runs on CUDA devices, and in its interpreter on a CPU, not on {device.type}"
    if device.type == "cuda":
        if interpreted:
            return "TRITON_INTERPRET=1 turns Triton's compiler off: unset it to use the GPU"
        reason = _gpu_lacks(device, recipe)
        if reason is not None:
            return reason
    if recipe.accumulation != "fp32":
        return f"accumulation={recipe.accumulation!r} models a tensor core for studies, on backend='reference' alone"
    for name, dim, largest in (
        ("query's", head_dim, LARGEST_HEAD_DIM),
        ("value's", head_dim_v, LARGEST_HEAD_DIM_V),
    ):
        if dim > largest:
            return f"the {name} head_dim is at most {largest} there, got {dim}"
    return None


def v_layout(recipe: Recipe) -> str:
    """How the quantizer stores values: as FP8 tensor cores want them where such a product takes them."""
    narrow = all(get_format(name).dtype.itemsize == 1 for name in (recipe.v_format, recipe.p_format))
    return "permuted_columns" if narrow else "rows"


def _gpu_lacks(device: torch.device, recipe: Recipe) -> str | None:
    if torch.version.hip is not None:
        return "the kernels are for NVIDIA GPUs, and this torch is built for ROCm"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    capability = _capability(torch.cuda.current_device() if device.index is None else device.index)
    has = f"{device} has compute capability {capability[0]}.{capability[1]}"
    if capability < (8, 0):
        return f"{has}, and the kernels need 8.0"
    fp8 = ("e4m3", "e5m2")
    products = ((recipe.q_format, recipe.k_format), (recipe.p_format, recipe.v_format))
    if capability < (8, 9) and any(left in fp8 and right in fp8 for left, right in products):
        return f"{has}, and FP8 products need 8.9; recipe='mixed' (FP8 keys and values, 16-bit products) needs 8.0"
    return None


@lru_cache
def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


@lru_cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def _interpreter_is_on() -> bool:
    return bool(importlib.import_module("triton").knobs.runtime.interpret)
