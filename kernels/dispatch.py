"""The table of implementations, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fp8attn.kernels import reference
from fp8attn.kernels.portable import support as triton_support
from fp8attn.kernels.problem import AttentionProblem, Masking, Packing, QuantizedQKV
from fp8attn.recipe import Recipe

__all__ = ["BACKENDS", "Backend", "check_name", "choose", "reasons"]


@dataclass(frozen=True)
class Backend:
    """One implementation.

    Attributes:
        name: how users name it.
        attend: solves an ``AttentionProblem``: (out (B, Hq, Sq, Dv) in FP32 or the problem's ``qkv.dtype``, lse
            (B, Hq, Sq) in FP32). It takes values quantized by any backend, in any layout.
        quantize: the arguments and the result of ``kernels.reference.quantize_qkv``.
        unsupported: by device, recipe, head_dim and head_dim_v: None, or why it cannot run such a problem.
        v_layout: by recipe: the layout (``scaling.LAYOUTS``) in which ``quantize`` stores values.
        describe: what it would do with a problem (tile sizes, splits), by name, from shapes and dtypes alone.
        attend_packed: quantization and attention of a packed batch at once, without waiting for the device: takes (T,
            H, D) tensors in the form (1, H, T, D), recipe, masking, packing and the options of ``quantize`` and
            ``AttentionProblem``, returns (T, Hq, Dv) and (Hq, T). None, or a result of None: sequence by sequence.
    """

    name: str
    attend: Callable[[AttentionProblem], tuple[torch.Tensor, torch.Tensor]]
    quantize: Callable[..., QuantizedQKV]
    unsupported: Callable[[torch.device, Recipe, int, int], str | None]
    v_layout: Callable[[Recipe], str]
    describe: Callable[[AttentionProblem], dict[str, str]] | None = None
    attend_packed: Callable[..., tuple[torch.Tensor, torch.Tensor] | None] | None = None


# Triton's kernels are imported by the first problem that they run: importing Triton takes a second.
def _triton_attend(problem: AttentionProblem) -> tuple[torch.Tensor, torch.Tensor]:
    from fp8attn.kernels.portable.forward import attend

    return attend(problem)


def _triton_quantize(query: torch.Tensor, *args: Any, **options: Any) -> QuantizedQKV:
    if query.device.type == "cuda" and torch.cuda.get_device_capability(query.device) < (8, 9):
        return reference.quantize_qkv(query, *args, **options)  # Triton makes no FP8 there
    from fp8attn.kernels.portable.quantize import quantize_qkv

    return quantize_qkv(query, *args, **options)


def _triton_attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    recipe: Recipe,
    masking: Masking,
    packing: Packing,
    *,
    softcap: float | None,
    sinks: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    if query.device.type == "cuda" and torch.cuda.get_device_capability(query.device) < (8, 9):
        return None  # as the reference quantizes
    from fp8attn.kernels.portable.forward import attend
    from fp8attn.kernels.portable.packed import PackedProblem
    from fp8attn.kernels.portable.quantize import quantize_qkv

    qkv = quantize_qkv(query, key, value, recipe, masking, packing=packing, **options)
    return attend(PackedProblem(qkv, masking, options["scale"], softcap, sinks, packing))


def _triton_describe(problem: AttentionProblem) -> dict[str, str]:
    from fp8attn.kernels.portable.tuning import describe

    return describe(problem)


#: Backends by name, the fastest first; the last, the reference, runs everything.
BACKENDS = {
    backend.name: backend
    for backend in (
        Backend(
            "triton",
            _triton_attend,
            _triton_quantize,
            triton_support.unsupported,
            triton_support.v_layout,
            _triton_describe,
            _triton_attend_packed,
        ),
        Backend("reference", reference.attend, reference.quantize_qkv, lambda *_: None, lambda _: "rows"),
    )
}


def check_name(name: str) -> None:
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"backend must be one of auto, {', '.join(BACKENDS)}, got {name!r}")


def choose(name: str, device: torch.device, recipe: Recipe, head_dim: int, head_dim_v: int) -> Backend:
    """The backend of that name; for ``"auto"`` the first of ``BACKENDS`` that runs such a problem.

    ``auto`` takes kernels on GPUs alone: on a CPU they are interpreted, for tests, and slow.

    Raises:
        ValueError: an unknown backend, or a named one that cannot run the problem, with the reason.
    """
    if name == "auto":
        if device.type != "cuda":  # and what the others need is not looked up
            return BACKENDS["reference"]
        return next(b for b in BACKENDS.values() if b.unsupported(device, recipe, head_dim, head_dim_v) is None)
    check_name(name)
    reason = BACKENDS[name].unsupported(device, recipe, head_dim, head_dim_v)
    if reason is not None:
        raise ValueError(f"backend={name!r} cannot run this: {reason}; backend='auto' takes one that can")
    return BACKENDS[name]


def reasons(name: str, device: torch.device, recipe: Recipe, head_dim: int, head_dim_v: int) -> dict[str, str]:
    """For every backend, why ``choose`` takes it or not; raises as it does."""
    chosen = choose(name, device, recipe, head_dim, head_dim_v)
    said: dict[str, str] = {}
    for backend in BACKENDS.values():
        if backend is chosen:
            reason = "chosen: the fastest that runs this" if name == "auto" else "chosen: asked for"
        elif name != "auto":
            reason = f"skipped: backend={name!r} was asked for"
        elif chosen.name in said:
            reason = f"skipped: {chosen.name} is faster"
        else:
            why = backend.unsupported(device, recipe, head_dim, head_dim_v)
            reason = f"skipped: {why or f'interpreted on {device.type}, and slow; backend={backend.name!r} takes it'}"
        said[backend.name] = reason
    return said
