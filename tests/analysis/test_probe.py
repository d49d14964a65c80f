"""The probe sees what an accumulator keeps: the model's, FP32's, ones that round otherwise, and a GPU's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8attn import Recipe
from fp8attn.analysis import AccumulatorProbe, probe_accumulator
from fp8attn.kernels.reference.tensor_core import tensor_core_matmul


@pytest.mark.parametrize("bits", [8, 10, 13, 14, 22])
def test_the_models_bits(bits: int) -> None:
    def product(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return tensor_core_matmul(a.float(), b.float(), c, fraction_bits=bits)

    seen = probe_accumulator(product)
    assert seen == AccumulatorProbe(bits, bits, "toward zero", True, 32)
    assert Recipe(accumulation=seen.accumulation).accumulator == ("tensor_core", bits)
    assert probe_accumulator(product, depth=64) == seen


def test_fp32() -> None:
    seen = probe_accumulator(lambda a, b, c: c + a.float() @ b.float())
    assert (seen.accumulator_bits, seen.product_bits, seen.accumulation) == (23, 23, "fp32")


def test_a_sum_that_is_exact_within_a_step_and_then_rounded_to_nearest() -> None:
    """Steps of 16 products, bfloat16's 7 bits after each, and an accumulator that is kept in FP32 until then."""

    def product(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        for k in range(0, a.shape[1], 16):
            c = (c.double() + a[:, k : k + 16].double() @ b[k : k + 16].double()).bfloat16().float()
        return c

    assert probe_accumulator(product) == AccumulatorProbe(7, 7, "to nearest", False, None)


def test_steps_of_16() -> None:
    def product(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        for k in range(0, a.shape[1], 16):
            c = tensor_core_matmul(a[:, k : k + 16].float(), b[k : k + 16].float(), c, fraction_bits=13)
        return c

    assert probe_accumulator(product) == AccumulatorProbe(13, 13, "toward zero", True, 16)


def test_an_accumulator_that_is_wider_than_products() -> None:
    def product(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return c + tensor_core_matmul(a.float(), b.float(), fraction_bits=13)

    seen = probe_accumulator(product)
    assert (seen.accumulator_bits, seen.product_bits) == (23, 13)


def test_what_is_no_product_is_refused() -> None:
    with pytest.raises(ValueError, match="this is no product"):
        probe_accumulator(lambda a, b, c: c + torch.arange(16.0)[:, None])


@pytest.mark.gpu
@pytest.mark.parametrize("instruction", ["mma", "wgmma"])
@pytest.mark.parametrize("depth", [32, 128, 256])
def test_the_model_with_the_gpus_bits_is_the_gpu(instruction: str, depth: int) -> None:
    from fp8attn.analysis.bench.probe import probe_gpu
    from fp8attn.kernels.portable.product import tensor_core_product

    found = probe_gpu()
    if instruction not in found:
        pytest.skip(f"{torch.cuda.get_device_name()} has no {instruction}")
    seen = found[instruction]
    if "H200" in torch.cuda.get_device_name() and instruction == "wgmma":
        assert seen == AccumulatorProbe(13, 13, "toward zero", True, 32)
    generator = torch.Generator().manual_seed(depth)
    a, b = (torch.randn(shape, generator=generator) * 20 for shape in ((16, depth), (depth, 8)))
    codes = [x.to("cuda", torch.float8_e4m3fn) for x in (a, b)]
    start = torch.randn(16, 8, generator=generator).cuda() * 100
    actual = tensor_core_product(codes[0], codes[1], start, instruction)
    exact = start.double() + codes[0].double() @ codes[1].double()
    assert (actual - exact).norm() < 1e-3 * exact.norm()
    if seen.rounds == "toward zero" and seen.separately and seen.step == 32:
        model = tensor_core_matmul(codes[0].float(), codes[1].float(), start, fraction_bits=seen.product_bits)
        assert torch.equal(actual, model)
