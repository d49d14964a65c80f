"""Merging finished partial results by their log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["merge_states"]


def merge_states(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over all keys, from attention over disjoint parts of them.

    ``out = sum_i exp(lse_i - lse) out_i`` with ``lse = log sum_i exp(lse_i)`` (FlashAttention-2's and ring attention's
    identity), in FP32. The order of the parts and how they are grouped make no difference beyond FP32 rounding. An
    empty part, lse -inf (or +inf, as FlashAttention-2 marks it), adds nothing; all empty gives out 0 and lse -inf.
    Parts must be computed without attention sinks; a sink is itself a part, with out 0 and lse the sink's logit.

    Args:
        outs: tensors (..., S, Dv) of one shape and dtype.
        lses: natural-log sums (..., S).

    Returns:
        out in the dtype of ``outs`` and lse in FP32.

    Raises:
        ValueError: no parts, a different number of outs and lses, or shapes that do not fit.

    >>> import torch, fp8attn
    >>> q, k, v = (torch.randn(1, 2, 64, 32) for _ in range(3))
    >>> halves = [fp8attn.attention(q, k[:, :, h], v[:, :, h], return_lse=True) for h in (slice(0, 32), slice(32, 64))]
    >>> out, lse = fp8attn.merge_states(*zip(*halves))
    >>> out.shape, lse.shape
    (torch.Size([1, 2, 64, 32]), torch.Size([1, 2, 64]))
    """
    if len(outs) == 0 or len(outs) != len(lses):
        raise ValueError(f"outs and lses must be as many and at least one, got {len(outs)} and {len(lses)}")
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if out.shape != outs[0].shape or out.dtype != outs[0].dtype:
            raise ValueError(
                f"outs must have one shape and dtype, got {tuple(outs[0].shape)} {outs[0].dtype} for part 0 "
                f"and {tuple(out.shape)} {out.dtype} for part {i}"
            )
        if not out.is_floating_point() or out.dtype.itemsize < 2 or out.dim() == 0:
            raise ValueError(f"outs must be floating tensors (..., S, Dv), got {out.dtype} {tuple(out.shape)}")
        if lse.shape != out.shape[:-1]:
            raise ValueError(f"lses[{i}] must have shape {tuple(out.shape[:-1])}, got {tuple(lse.shape)}")
    stacked = torch.stack([lse.to(torch.float32) for lse in lses])
    stacked = torch.where(stacked == torch.inf, -torch.inf, stacked)
    lse = torch.logsumexp(stacked, dim=0)
    weights = torch.exp(stacked - torch.where(lse == -torch.inf, 0.0, lse))
    # An empty part's out is not used, whatever it holds.
    total = torch.zeros(outs[0].shape, dtype=torch.float32, device=outs[0].device)
    for weight, out in zip(weights[..., None], outs, strict=True):
        total += torch.where(weight > 0, out.to(torch.float32), 0.0) * weight
    return total.to(outs[0].dtype), lse
