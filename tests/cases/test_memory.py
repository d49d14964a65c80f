"""Strides, heads and captured graphs: what is read from where, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fp8attn
from oracle import NAN, ROTATED, Where, assert_right, relative_error


def restrided(x: torch.Tensor, how: str) -> torch.Tensor:
    """The same values with other strides, among others that are wrong."""
    batch, heads, seqlen, head_dim = x.shape
    if how == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "a slice of a fused projection":
        fused = torch.full((batch, seqlen, 3, heads, head_dim), NAN, dtype=x.dtype, device=x.device)
        fused[:, :, 1] = x.transpose(1, 2)
        return fused[:, :, 1].transpose(1, 2)
    if how == "every other channel":
        wide = torch.full((batch, heads, seqlen, 2 * head_dim), NAN, dtype=x.dtype, device=x.device)
        wide[..., 1::2] = x
        return wide[..., 1::2]
    if how == "channels first":
        return x.mT.contiguous().mT
    flat = torch.full((x.numel() + 3,), NAN, dtype=x.dtype, device=x.device)  # "not aligned"
    return flat[3:].view(x.shape).copy_(x)


@pytest.mark.parametrize(
    "how", ["transposed", "a slice of a fused projection", "every other channel", "channels first", "not aligned"]
)
def test_strides_of_inputs_and_output(where: Where, how: str) -> None:
    """Strided tensors read as if they were contiguous. Seen in FlagGems, flash-attention. The same bits."""
    for head_dim in where.pick([40], [64, 128, 256]):
        data = where.qkv(2, *where.pick((2, 1, 9, 20), (4, 2, 300, 500)), head_dim, dtype=torch.bfloat16)
        options: dict[str, Any] = {"is_causal": True, "enable_gqa": True, "backend": where.backend}
        for recipe in where.pick([ROTATED], ["default", "causal_safe"]):
            expected = fp8attn.attention(*data, recipe=recipe, **options)
            strided = [restrided(x, how) for x in data]
            assert all(torch.equal(a, b) for a, b in zip(data, strided, strict=True))
            out = restrided(torch.zeros_like(expected), how)
            assert fp8attn.attention(*strided, recipe=recipe, out=out, **options) is out
            assert torch.equal(out, expected)


@pytest.mark.parametrize(("ratio", "seqlen_q"), [(3, 1), (3, 5), (5, 1), (6, 5), (7, 1), (9, 5), (12, 1)])
def test_head_ratios(where: Where, ratio: int, seqlen_q: int) -> None:
    """Query heads that read another group's keys, at ratios that are no power of two. Seen in fla, sglang."""
    qkv, out, lse = where.run(*where.qkv(1, 2 * ratio, 2, seqlen_q, where.pick(19, 300), 32))
    assert_right(where, qkv, out, lse)


@pytest.mark.parametrize(("heads", "kv_heads"), [(33, 2), (3, 2), (6, 4)])
def test_heads_that_do_not_divide(where: Where, heads: int, kv_heads: int) -> None:
    """The last heads dropped, or read beyond the end."""
    q, k, v = where.qkv(1, heads, kv_heads, 3, 4, 16)
    cu = [torch.tensor([0, n], device=where.device) for n in (3, 4)]
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    calls: list[Callable[[], Any]] = [
        lambda: fp8attn.attention(q, k, v, enable_gqa=True, backend=where.backend),
        lambda: fp8attn.quantize(q, k, v, backend=where.backend),
        lambda: fp8attn.attention_varlen(*packed, *cu, backend=where.backend),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"num_q_heads must be a multiple of num_kv_heads, got {heads} and"):
            call()


@pytest.mark.gpu
def test_a_captured_graph_reads_what_is_in_memory_when_it_is_replayed() -> None:
    """Lengths, scales or codes kept from the capture: right until a graph is replayed. Seen in vllm.

    Decoding with a mask for the length: everything that a step changes is changed in place, and replayed.
    """
    where = Where("triton", "cuda")
    longest = torch.arange(1000, device="cuda")
    length = torch.tensor([700, 30], device="cuda")
    sinks = torch.zeros(8, device="cuda")
    state = [fp8attn.quantize(*where.qkv(2, 8, 2, 1, 1000, 128, seed=seed), "fa3") for seed in (0, 1)]

    def step() -> Any:
        mask = (longest < length[:, None])[:, None, None]
        return fp8attn.attention_quantized(state[0], mask, sinks=sinks, return_lse=True, backend="triton")

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    before = captured[0].clone()
    for name in "qkv":
        ours, theirs = getattr(state[0], name), getattr(state[1], name)
        ours.codes.view(torch.uint8).copy_(theirs.codes.view(torch.uint8))
        ours.scale.copy_(theirs.scale * 2)
    length.copy_(torch.tensor([3, 999]))
    sinks.fill_(1.0)
    graph.replay()
    now = step()
    assert torch.equal(captured[0], now[0]) and torch.equal(captured[1], now[1])
    assert relative_error(now[0], before) > 0.5
