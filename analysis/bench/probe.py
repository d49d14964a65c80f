"""The FP8 accumulator of the GPU at hand, by each of its instructions."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from fp8attn.analysis.probe import AccumulatorProbe, probe_accumulator
from fp8attn.kernels.portable.product import INSTRUCTIONS, tensor_core_product

__all__ = ["probe_gpu"]


def probe_gpu(device: str = "cuda") -> dict[str, AccumulatorProbe]:
    """Instruction -> what its accumulator keeps; ``wgmma`` is Hopper's alone.

    Raises:
        ValueError: no GPU with FP8 tensor cores.
    """
    if not torch.cuda.is_available():
        raise ValueError("the probe needs a CUDA GPU with FP8 tensor cores, and torch finds no CUDA device")
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise ValueError(f"{name} (compute capability {capability[0]}.{capability[1]}) has no FP8 tensor cores")
    wanted = INSTRUCTIONS if capability[0] == 9 else INSTRUCTIONS[:1]
    found: dict[str, Any] = {
        name: probe_accumulator(partial(tensor_core_product, instruction=name), device) for name in wanted
    }
    return found
