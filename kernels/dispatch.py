"""The table that picks an implementation."""

from __future__ import annotations

import torch

from fp8attn.kernels import reference
from fp8attn.kernels.problem import AttentionProblem

__all__ = ["BACKENDS", "run"]

#: Backends by name, the fastest first. Each takes an ``AttentionProblem`` and returns (out, lse) in FP32.
BACKENDS = {"reference": reference.attend}


def run(problem: AttentionProblem, backend: str = "auto") -> tuple[torch.Tensor, torch.Tensor]:
    """Solve the problem on ``backend``; ``"auto"`` takes the first of ``BACKENDS``.

    Raises:
        ValueError: an unknown backend.
    """
    if backend == "auto":
        backend = next(iter(BACKENDS))
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of auto, {', '.join(BACKENDS)}, got {backend!r}")
    with torch.autocast(problem.qkv.q.device.type, enabled=False):
        return BACKENDS[backend](problem)
