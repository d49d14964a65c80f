"""Inputs on which other FP8 attention lost more than FP8 must."""

from __future__ import annotations

import math

import pytest
import torch

import fp8attn
from fp8attn import QuantizedQKV, Recipe, merge_states
from oracle import MODEL, PLAIN, Where, assert_right, attention64, on_codes, relative_error, with_accumulation


def change_by_splitting(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, parts: int = 16) -> float:
    """What a tensor core's model changes by where keys are split: each part has a largest weight of its own."""
    codes = with_accumulation(fp8attn.quantize(q, k, v, PLAIN, backend="reference"), "tensor_core_two_level")
    part = torch.arange(k.shape[2], device=k.device) * parts // k.shape[2]
    whole, *states = (
        fp8attn.attention_quantized(codes, attn_mask=mask, return_lse=True, backend="reference")
        for mask in (None, *((part == i)[None, None, None] for i in range(parts)))
    )
    out, lse = merge_states(*zip(*states, strict=True))
    return max(relative_error(out, whole[0]), (lse - whole[1]).abs().max().item())


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("seqlen_q", [1, 128])
def test_a_needle_in_a_long_context(depth: float, seqlen_q: int) -> None:
    """An accumulator of less than FP32 loses small addends to a large sum, and a needle among 131,072 keys with it.

    Seen on Hopper in vllm, where it also depended on how many heads a GPU had: here one head alone is one of eight.
    """
    where, errors = Where("triton", "cuda"), []
    for seqlen_k in (8192, 131_072):
        q, k, v = where.qkv(1, 8, 1, seqlen_q, seqlen_k, 128)
        v = 1 + 0.1 * v
        needle = int(depth * seqlen_k)
        q = q * 0.1 + 1.0
        k = k * 0.1
        k[:, :, needle] = 0.5 * math.log(seqlen_k) / 128**0.5 / 0.5  # a logit of ln(Sk): half of the weight
        v[:, :, needle] = -3.0
        qkv, out, lse = where.run(q, k, v, PLAIN)
        # Beside the needle's weight those of all other keys, the other half, are among E4M3's smallest numbers: what
        # they are rounded to depends on whether the needle is in the same part.
        tail = change_by_splitting(q[:, :1, :8], k, v)
        assert tail < 2 * MODEL
        expected, _ = assert_right(where, qkv, out, lse, tail=tail)
        errors.append(relative_error(out, expected))
        alone = where.run(q[:, :1], k, v, PLAIN)[1]
        assert relative_error(alone, out[:, :1]) <= MODEL  # other splits of the keys, the same tiles
    assert errors[1] <= 2 * errors[0] + 1e-3  # flat in the number of keys


@pytest.mark.parametrize("recipe", ["per_tensor", "fa3"])
def test_e4m3_is_twice_as_good_as_e5m2(where: Where, recipe: str) -> None:
    """A path that rounds twice, or in the wrong format, loses E4M3's one more bit. Seen in flash-attention."""
    shape = where.pick((1, 4, 2, 64, 96, 64), (2, 32, 2, 512, 2048, 128))
    data = where.qkv(*shape)
    exact, _ = attention64(*data)
    errors = {}
    for fmt in ("e4m3", "e5m2"):
        formats = {f"{x}_format": fmt for x in "qkvp"}
        qkv, out, _ = where.run(*data, Recipe.from_name(recipe).replace(**formats))
        errors[fmt] = relative_error(out, exact)
        # the same pipeline in float64 is as far off: errors add up in squares, so the limit hardly shows
        assert errors[fmt] == pytest.approx(relative_error(on_codes(qkv)[0], exact), rel=0.05)
    # a step of E5M2 is twice as long; the 10% are for the sample
    assert errors["e4m3"] == pytest.approx(errors["e5m2"] / 2, rel=0.1)


@pytest.mark.parametrize(("channels", "offset"), [(3, 300.0), (8, 100.0)])
def test_a_bias_in_a_few_key_channels(where: Where, channels: int, offset: float) -> None:
    """Keys with a constant of 100 to 300 in a few channels, as Qwen2's biases make them: what differs between keys
    falls under FP8's step. Seen in llama.cpp, vllm. Judged by the logits, as a cosine of K would hide it.
    """
    seqlen = where.pick(64, 1024)
    q, k, v = where.qkv(1, 2, 1, seqlen, seqlen, 128)
    bias = torch.zeros(128, device=where.device)
    bias[7 : 7 + channels] = offset
    qkv, out, lse = where.run(q, k + bias, v, "default")
    assert_right(where, qkv, out, lse)

    def logit_error(made: QuantizedQKV) -> float:
        exact = q.double() @ (k + bias).double().mT
        coded = made.q.dequantize().double() @ made.k.dequantize().double().mT
        # a constant added to a row changes no weight
        error = (coded - exact) / 128**0.5
        return (error - error.mean(dim=-1, keepdim=True)).pow(2).mean().sqrt().item()

    # q and k are off by 2^-4 / sqrt(3) of a value at most, in independent directions; logits are N(0, 1)
    assert logit_error(qkv) < 2**0.5 * 2**-4 / 3**0.5
    plain = fp8attn.quantize(q, k + bias, v, "fa3", backend=where.backend)
    assert logit_error(plain) > 3 * logit_error(qkv)  # 4.5 to 20 times, by the sample
    exact, _ = attention64(q, k + bias, v)
    assert relative_error(out, exact) < 3 * 2**-4 / 3**0.5  # q, k and v


@pytest.mark.parametrize("recipe", ["default", "mixed", "causal_safe", "bf16"])
@pytest.mark.parametrize("largest", [3e4, 1e5])
def test_values_beyond_fp16(where: Where, recipe: str, largest: float) -> None:
    """BF16 values above 65504, in a kernel that keeps sums in FP16: infinity, NaN, black images. Seen in ComfyUI."""
    seqlen, head_dim = where.pick((96, 64), (4096, 128))
    q, k, v = where.qkv(1, 2, 2, seqlen, seqlen, head_dim, dtype=torch.bfloat16)
    v = v / v.abs().amax() * largest
    k[..., 5] *= 100
    chosen = Recipe.from_name(recipe).replace(**where.pick({"balance": "none", "smooth_k": False}, {}))
    qkv, out, lse = where.run(q, k, v, chosen)
    assert out.dtype == torch.bfloat16 and out.isfinite().all()
    if chosen.v_scale != "token":
        assert_right(where, qkv, out, lse, largest_logit=2e3)
    exact, _ = attention64(q, k, v)
    # logits reach hundreds, where FP8 is off by whole units: held to q, k and v that FP8 rounded, not to the originals
    coded, _ = on_codes(qkv)
    assert relative_error(out, coded) < 2**-4
    if recipe == "bf16":
        assert relative_error(out, exact) < 2**-6
