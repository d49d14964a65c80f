"""Formats that differ, bytes that are no codes, and rotations of odd sizes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import fp8attn
from fp8attn import Recipe
from oracle import PLAIN, Where, assert_right, relative_error

MIXES = [("bf16", "e4m3"), ("fp16", "e4m3"), ("fp16", "e5m2"), ("e4m3", "e5m2"), ("e5m2", "e4m3"), ("fp16", "fp16")]


@pytest.mark.parametrize(
    ("q_format", "k_format", "p_format", "v_format"),
    [
        *((*mix, "e4m3", "e4m3") for mix in [*MIXES, ("int8", "int8")]),
        *(("e4m3", "e4m3", *mix) for mix in MIXES),
        ("int8", "int8", "fp16", "e5m2"),
        ("e5m2", "e4m3", "bf16", "e5m2"),
    ],
)
def test_formats_that_differ(where: Where, q_format: str, k_format: str, p_format: str, v_format: str) -> None:
    """16-bit queries beside an FP8 cache, two FP8 formats at once: converted, never reinterpreted. Seen in vllm."""
    formats = {"q_format": q_format, "k_format": k_format, "p_format": p_format, "v_format": v_format}
    seqlen_q, seqlen_k = where.pick((3, 40), (200, 300))
    qkv, out, lse = where.run(*where.qkv(1, 2, 1, seqlen_q, seqlen_k, 32), PLAIN.replace(**formats))
    assert_right(where, qkv, out, lse)


def test_bytes_are_not_codes(where: Where) -> None:
    """E4M3 data handed over as uint8, and formats taken for each other, as in a cache of another dtype."""
    q, k, v = where.qkv(1, 2, 1, 3, 4, 16)
    qkv = fp8attn.quantize(q, k, v, backend=where.backend)
    for wrong in (torch.uint8, torch.float8_e5m2, torch.int8):
        with pytest.raises(ValueError, match=f"codes have dtype {wrong}, format e4m3 has torch.float8_e4m3fn"):
            dataclasses.replace(qkv.k, codes=qkv.k.codes.view(wrong))
    for mixed in ((q.bfloat16(), k.half(), v.half()), (q, k.bfloat16(), v)):
        with pytest.raises(TypeError, match="must have one dtype"):
            fp8attn.attention(*mixed, enable_gqa=True, backend=where.backend)


@pytest.mark.parametrize("head_dim", [80, 96, 112, 192, pytest.param(576, marks=pytest.mark.gpu)])
def test_rotations_of_other_sizes_than_powers_of_two(where: Where, head_dim: int) -> None:
    """Padded to a power of two, rotated and cut off again, or scaled by the wrong norm. Seen in ik_llama.cpp, vllm."""
    if head_dim > 256 and where.device == "cpu":
        pytest.skip("large: for a GPU")
    q, k, v = where.qkv(1, 2, 1, 5, where.pick(20, 300), head_dim, head_dim_v=64)
    recipe = Recipe(balance="none", smooth_k=False)
    qkv, out, lse = where.run(q, k, v, recipe)
    assert_right(where, qkv, out, lse)
    fine = fp8attn.quantize(q, k, v, recipe.replace(q_format="fp16", k_format="fp16"), backend=where.backend)
    rotated, rotated_k = fine.q.dequantize().double(), fine.k.dequantize().double()
    assert rotated.shape == q.shape
    # FP16 rounds a value by 2^-11: norms by as much, products of two such vectors by 2^-10 of both norms
    norms, k_norms = q.double().norm(dim=-1), k.double().norm(dim=-1)
    assert ((rotated.norm(dim=-1) / norms - 1).abs() < 2**-11).all()
    error = (rotated @ rotated_k.mT - q.double() @ k.double().mT).abs()
    assert (error <= 2**-10 * norms[..., None] * k_norms[..., None, :]).all()
    assert relative_error(rotated, q) > 0.5  # it did rotate
