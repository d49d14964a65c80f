"""The model of the FP8 tensor core, against products that an H200 computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fp8attn.kernels.reference.tensor_core import tensor_core_matmul

PRODUCTS = load_file(Path(__file__).with_name("h200_products.safetensors"))


@pytest.mark.parametrize("case", ["k32wide", "k64", "k128pos", "acc"])
def test_the_model_is_the_h200_bit_for_bit(case: str) -> None:
    """Random signs and magnitudes, one to four steps of 32 products, from zero or added to an accumulator."""
    a, b, out = (PRODUCTS[f"{case}.{name}"].float() for name in ("a", "b", "out"))
    acc = PRODUCTS.get(f"{case}.acc")
    assert torch.equal(tensor_core_matmul(a, b.mT, acc), out)
    # The data tell: another width, or exact sums, would not pass.
    assert not torch.equal(tensor_core_matmul(a, b.mT, acc, fraction_bits=14), out)
    exact = a.double() @ b.double().mT + (0.0 if acc is None else acc.double())
    assert 5e-5 < (out - exact).norm() / exact.norm() < 5e-4


def test_zeros_stay_zeros() -> None:
    a, b = torch.zeros(3, 64), torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
    a[1] = 1
    result = tensor_core_matmul(a, b)
    assert (result[[0, 2]] == 0).all() and (result[1] != 0).all()
    assert torch.equal(tensor_core_matmul(a, b, torch.ones(3, 5))[0], torch.ones(5))
