"""The model of the FP8 tensor core, against products that an H200 computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fp8attn import Recipe
from fp8attn.kernels.problem import AttentionProblem, Masking
from fp8attn.kernels.reference import attend, quantize_qkv
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


@pytest.mark.parametrize("accumulation", ["tensor_core", "tensor_core_two_level"])
@pytest.mark.parametrize(
    ("q_format", "k_format", "scores"),
    [("e4m3", "e4m3", True), ("e5m2", "e4m3", True), ("int8", "int8", False), ("fp16", "e4m3", False)],
)
@pytest.mark.parametrize(
    ("p_format", "v_format", "values"),
    [("e4m3", "e4m3", True), ("e4m3", "e5m2", True), ("fp16", "e4m3", False), ("bf16", "bf16", False)],
)
def test_attention_models_products_of_two_fp8_operands_alone(
    q_format: str, k_format: str, scores: bool, p_format: str, v_format: str, values: bool, accumulation: str
) -> None:
    """INT8 is summed exactly, and 16 bits to FP32's precision: there the model has nothing to take away."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 70, 64, generator=generator) for _ in range(3))
    formats = {"q_format": q_format, "k_format": k_format, "p_format": p_format, "v_format": v_format}
    masking = Masking(70, 70, q.device)
    (out, lse), (modelled, modelled_lse) = (
        attend(AttentionProblem(quantize_qkv(q, k, v, recipe, masking, scale=0.125), masking, 0.125))
        for recipe in (
            Recipe(rotate="none", balance="none", smooth_k=False, accumulation=name, **formats)  # type: ignore[arg-type]
            for name in ("fp32", accumulation)
        )
    )
    assert torch.equal(lse, modelled_lse) != scores
    assert torch.equal(out, modelled) != (scores or values)
