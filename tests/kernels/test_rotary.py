"""``Rotary``: positions turned in front of the quantizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8attn.kernels.problem import Rotary
from fp8attn.kernels.reference.quantize import quantize_qkv as reference_quantize_qkv
from fp8attn.recipe import Recipe
from quantizer import PLAIN, ULP, Case, case, check, randn, turned, values


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("channels", "dimensions"), [(16, 2), (6, 2), (16, 3)])
def test_rotary_is_a_product_of_complex_numbers(channels: int, dimensions: int, interleaved: bool) -> None:
    x = randn(2, 3, 9, 16, seed=1)
    angles = randn(*(2, 20, channels // 2)[3 - dimensions :], seed=2)
    rotary = Rotary(angles.cos(), angles.sin(), interleaved)
    assert rotary.channels == channels
    # Two products and a sum of the pair's members, each rounded once: 3 ulp / 2 of the pair's norm, under 4 here
    torch.testing.assert_close(rotary.rotate(x, 4).double(), turned(x.double(), rotary, 4), rtol=0, atol=4 * 2 * ULP)


def test_rotary_positions() -> None:
    """Query i stands at i + diagonal, key j at j: what turned tensors, quantized without rotary, give."""
    c = case(
        Recipe(rotate="none", **PLAIN), seqlen_q=5, seqlen_k=9, rotary=(64, False, 2), dtype=torch.float32,
        causal_alignment="bottom_right", is_causal=True,
    )  # fmt: skip
    by_hand = Case(c.rotary.rotate(c.q, 4), c.rotary.rotate(c.k), c.v, c.recipe, c.masking, c.smoothing)
    one, two = c.run(reference_quantize_qkv), by_hand.run(reference_quantize_qkv)
    assert torch.equal(values(one.q), values(two.q)) and torch.equal(values(one.k), values(two.k))
    check(c)


@pytest.mark.parametrize(
    ("tables", "error", "words"),
    [
        ((torch.ones(4, 2, dtype=torch.int32), torch.ones(4, 2)), TypeError, "cos must be a floating-point tensor"),
        ((torch.ones(4, 2), [1.0]), TypeError, "sin must be a floating-point tensor, got list"),
        ((torch.ones(4, 2), torch.ones(4, 2, dtype=torch.float16)), TypeError, "one dtype"),
        ((torch.ones(4, 2), torch.ones(4, 3)), ValueError, r"\(4, 2\) and \(4, 3\)"),
        ((torch.ones(4), torch.ones(4)), ValueError, r"\(positions, pairs\)"),
        ((torch.ones(4, 0), torch.ones(4, 0)), ValueError, r"\(positions, pairs\)"),
    ],
)
def test_rotary_refuses(tables: tuple[Any, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Rotary(*tables)


def test_rotary_checks_what_a_problem_needs() -> None:
    rotary = Rotary(torch.ones(10, 4), torch.ones(10, 4))
    rotary.check(2, 3, 10, 7, 8)
    rotary.check(2, 0, 10, 50, 8)
    for sizes, words in [
        ((2, 3, 10, 7, 6), "4 pairs of channels, head_dim 6 has 3"),
        ((2, 4, 10, 7, 8), "10 positions, 11 are needed"),
        ((2, 1, 11, 0, 8), "10 positions, 11 are needed"),
        ((2, 4, 2, -2, 8), "query 0 would stand at position -2"),
    ]:
        with pytest.raises(ValueError, match=words):
            rotary.check(*sizes)
    with pytest.raises(ValueError, match="batch 1 or 3"):
        Rotary(torch.ones(2, 10, 4), torch.ones(2, 10, 4)).check(3, 1, 1, 0, 8)
