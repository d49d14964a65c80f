"""A software model of Hopper's FP8 tensor core, for studies of its accumulator: bit for bit what an H200 computes.

Each step takes 32 products and the accumulator, aligns them to the largest exponent among them, truncates each toward
zero at 13 fraction bits, adds what is left, and truncates the sum to 13 fraction bits of its own. A product's exponent
is the sum of its factors' exponents, whatever the product of their fractions. (DeepSeek-V3, arXiv:2412.19437, section
3.3.2, found about 14 bits; the rest was found by comparing with products that an H200 computed, which the tests hold.)
"""

from __future__ import annotations

import torch

__all__ = ["FRACTION_BITS", "STEP", "tensor_core_matmul"]

FRACTION_BITS = 13
STEP = 32  # products a step
_LEAST_EXPONENT = -100  # below any product of codes, and where a unit is still a normal number: zeros lie there
_CHUNK = 2**23  # products in memory at a time


def tensor_core_matmul(
    a: torch.Tensor, b: torch.Tensor, acc: torch.Tensor | None = None, *, fraction_bits: int = FRACTION_BITS
) -> torch.Tensor:
    """``a @ b`` added to ``acc`` (zero by default) as the model does it.

    Shapes (..., M, K) @ (..., K, N) -> (..., M, N) with equal leading axes, FP32.

    >>> a = torch.full((1, 64), 1.0)
    >>> tensor_core_matmul(a, a.mT).item(), tensor_core_matmul(a * 2**-14, a.mT, torch.ones(1, 1)).item()
    (64.0, 1.0)
    """
    result = a.new_zeros(*a.shape[:-1], b.shape[-1]) if acc is None else acc.clone()
    rows_at_once = max(1, _CHUNK // max(1, STEP * b.shape[-1] * (b.numel() // max(1, b.shape[-1] * b.shape[-2]))))
    a_exponents, b_exponents = _exponents(a), _exponents(b).mT
    b = b.mT
    for first in range(0, a.shape[-2], rows_at_once):
        rows = slice(first, first + rows_at_once)
        part = result[..., rows, :]
        for k in range(0, a.shape[-1], STEP):
            step = slice(k, k + STEP)
            # (..., M, N, 32): FP8 times FP8 is exact in FP32
            products = a[..., rows, None, step] * b[..., None, :, step]
            exponents = a_exponents[..., rows, None, step] + b_exponents[..., None, :, step]
            largest = torch.maximum(exponents.amax(dim=-1), _exponents(part)).clamp_(min=_LEAST_EXPONENT)
            unit = torch.ldexp(torch.ones_like(part), largest - fraction_bits)
            sums = products.div_(unit.unsqueeze(-1)).trunc_().sum(dim=-1)
            part = _truncate(sums.add_((part / unit).trunc_()).mul_(unit), fraction_bits)
        result[..., rows, :] = part
    return result


def _exponents(x: torch.Tensor) -> torch.Tensor:
    """e of |x| in 2^e * [1, 2); below any other for zero."""
    return torch.where(x == 0, 2 * _LEAST_EXPONENT, torch.frexp(x).exponent - 1)


def _truncate(x: torch.Tensor, fraction_bits: int) -> torch.Tensor:
    return (x.view(torch.int32) & -(1 << (23 - fraction_bits))).view(torch.float32)
