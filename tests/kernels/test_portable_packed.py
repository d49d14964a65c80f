"""Packed batches in one launch: every sequence as if it were alone, wherever it lies, however long others are."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import fp8attn
from fp8attn import Recipe
from fp8attn.kernels.portable import statistics
from fp8attn.kernels.problem import Rotary
from fp8attn.transforms import Smoothing
from oracle import MODEL, relative_error

LENGTHS = ((5, 9), (0, 3), (40, 150), (1, 1), (8, 0), (17, 20))  # queries and keys
FAST_LENGTHS = ((300, 300), (0, 0), (1, 2100), (129, 131), (1500, 1500), (64, 0), (5, 700))


def rotary(positions: int, pairs: int, *, interleaved: bool = False) -> Rotary:
    angles = torch.arange(positions)[:, None] * 0.3 ** torch.arange(pairs)
    return Rotary(angles.cos(), angles.sin(), interleaved)


def frozen(heads: int, head_dim: int) -> Smoothing:
    generator = torch.Generator().manual_seed(7)
    mean, balance = torch.randn(2, 1, heads, 1, head_dim, generator=generator)
    return Smoothing(k_mean=mean, balance=balance.exp())


PLAIN = Recipe(balance="none", smooth_k=False)
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "causal": {"is_causal": True, "recipe": PLAIN},
    "causal, statistics": {"is_causal": True},
    "causal from the first key": {"is_causal": True, "causal_alignment": "top_left", "recipe": PLAIN},
    "window": {"window": (40, 3), "recipe": Recipe(smooth_v=True)},
    "softcap and sinks": {"softcap": 3.0, "sinks": torch.tensor([0.5, -1.0]), "recipe": PLAIN},
    "a scale a head": {"recipe": "fa3"},
    "a scale a tensor": {"recipe": "per_tensor", "is_causal": True},
    "blocks": {"recipe": PLAIN.replace(q_scale="block:32", k_scale="block:64", v_scale="block:16")},
    "a scale a value": {"recipe": PLAIN.replace(v_scale="token", scale_mode="pow2")},
    "16 bits beside 8": {"recipe": "mixed"},
    "16 bits": {"recipe": "bf16", "is_causal": True},
    "no rotation": {"recipe": Recipe(rotate="none")},
    "rotary": {"rotary": rotary(150, 16), "lengths": ((2, 2), (0, 0), (20, 150)), "recipe": PLAIN, "is_causal": True},
    "rotary in pairs of neighbours": {"rotary": rotary(150, 8, interleaved=True), "lengths": ((2, 2), (20, 150))},
    "frozen statistics": {"smoothing": frozen(1, 32), "recipe": Recipe()},
    "values of another size": {"head_dim_v": 48, "recipe": PLAIN},
    "one sequence": {"lengths": ((30, 200),), "is_causal": True},
    "many": {"lengths": tuple((i % 3, i % 5) for i in range(16)), "recipe": PLAIN},
}


def packed(
    lengths: tuple[tuple[int, int], ...], head_dim: int, head_dim_v: int, device: str, dtype: torch.dtype
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(q, k, v) of 2 heads and 1 kv head, and (cu_seqlens_q, cu_seqlens_k)."""
    generator = torch.Generator().manual_seed(0)
    cu = [torch.tensor([0, *itertools.accumulate(side)], dtype=torch.int32) for side in zip(*lengths, strict=True)]
    tensors = [
        torch.randn(int(cu[min(i, 1)][-1]), heads, dim, generator=generator).to(device, dtype)
        for i, (heads, dim) in enumerate(((2, head_dim), (1, head_dim), (1, head_dim_v)))
    ]
    return tensors, [x.to(device) for x in cu]


def alone(
    tensors: list[torch.Tensor], lengths: tuple[tuple[int, int], ...], **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequence by sequence, by ``attention``."""
    outs, lses = [], []
    options = {"causal_alignment": "bottom_right", **options}
    q_begin = k_begin = 0
    for seqlen_q, seqlen_k in lengths:
        parts = [
            x[begin : begin + length].transpose(0, 1)[None]
            for x, begin, length in zip(
                tensors, (q_begin, k_begin, k_begin), (seqlen_q, seqlen_k, seqlen_k), strict=True
            )
        ]
        q_begin, k_begin = q_begin + seqlen_q, k_begin + seqlen_k
        if seqlen_q:
            out, lse = fp8attn.attention(*parts, enable_gqa=True, return_lse=True, backend="triton", **options)
            outs.append(out[0].transpose(0, 1))
            lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, dim=1)


@pytest.mark.parametrize("name", CASES)
def test_sequences_have_the_same_bits_alone(name: str) -> None:
    options = dict(CASES[name])
    lengths = options.pop("lengths", LENGTHS)
    tensors, cu = packed(lengths, 32, options.pop("head_dim_v", 32), "cpu", torch.float32)
    out, lse = fp8attn.attention_varlen(*tensors, *cu, return_lse=True, backend="triton", **options)
    expected, expected_lse = alone(tensors, lengths, **options)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


def test_sequences_have_samples_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 40 queries every tenth, of 17 every fourth, of 5 all; in one chunk or several a head."""
    monkeypatch.setattr(statistics, "_SAMPLED_QUERIES", 4)
    monkeypatch.setattr(statistics, "_CHUNK", 2)
    monkeypatch.setattr(statistics, "_TILE_ELEMENTS", 64)
    test_sequences_have_the_same_bits_alone("default")


def test_where_another_kernel_quantizes_them_alone_they_agree() -> None:
    """BF16 queries and keys of head dim 64, that a batch of equal lengths quantizes by the folded kernel."""
    tensors, cu = packed(LENGTHS, 64, 64, "cpu", torch.bfloat16)
    out = fp8attn.attention_varlen(*tensors, *cu, is_causal=True, backend="triton")
    assert relative_error(out, alone(tensors, LENGTHS, is_causal=True)[0]) <= MODEL


def test_the_longest_length_must_be_one() -> None:
    tensors, cu = packed(LENGTHS, 32, 32, "cpu", torch.float32)
    for name, least in (("max_seqlen_q", 40), ("max_seqlen_k", 150)):
        bounded = fp8attn.attention_varlen(*tensors, *cu, recipe=PLAIN, backend="triton", **{name: least})
        assert torch.equal(bounded, fp8attn.attention_varlen(*tensors, *cu, recipe=PLAIN, backend="triton"))
        with pytest.raises(ValueError, match=f"{name} must be at least the longest sequence's"):
            fp8attn.attention_varlen(*tensors, *cu, backend="triton", **{name: least - 1})
        with pytest.raises(TypeError, match=f"{name} must be an int or None"):
            fp8attn.attention_varlen(*tensors, *cu, backend="triton", **{name: 150.0})


# ---- On a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["default", "fa3", "mixed"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_compiled_sequences_are_as_alone(recipe: str, is_causal: bool) -> None:
    tensors, cu = packed(FAST_LENGTHS, 128, 128, "cuda", torch.bfloat16)
    options: dict[str, Any] = {"recipe": recipe, "is_causal": is_causal}
    out, lse = fp8attn.attention_varlen(*tensors, *cu, return_lse=True, backend="triton", **options)
    expected, expected_lse = alone(tensors, FAST_LENGTHS, **options)
    # Split keys have largest weights of their own.
    assert relative_error(out, expected) <= 2 * MODEL
    finite = expected_lse.isfinite()
    assert torch.equal(finite, lse.isfinite()) and (lse - expected_lse)[finite].abs().max() <= 2 * MODEL


@pytest.mark.gpu
def test_a_graph_reads_the_lengths_that_are_there_when_it_is_replayed() -> None:
    """And waits for nothing. Tokens after the last sequence get 0 and -inf."""
    tensors, cu = packed(FAST_LENGTHS, 128, 128, "cuda", torch.bfloat16)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        result = fp8attn.attention_varlen(*tensors, *cu, is_causal=True, return_lse=True, backend="triton")
        assert isinstance(result, tuple)
        return result

    run()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run()
    others = ((700, 700), (1, 1), (0, 0), (800, 1000), (3, 64), (2, 2), (1, 9))
    for x, side in zip(cu, zip(*others, strict=True), strict=True):
        x.copy_(torch.tensor([0, *itertools.accumulate(side)]))
    graph.replay()
    expected, expected_lse = alone(tensors, others, is_causal=True)
    used = len(expected)
    assert relative_error(out[:used], expected) <= 2 * MODEL
    assert (lse[:, :used] - expected_lse).abs().max() <= 2 * MODEL
    assert (out[used:] == 0).all() and (lse[:, used:] == -torch.inf).all()
