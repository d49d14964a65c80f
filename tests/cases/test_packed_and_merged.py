"""Packed sequences, some of them empty, and states of parts of the keys, some of them empty."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import fp8attn
from oracle import INF, ROTATED, Where, assert_right, attention64, relative_error


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "heads", "kv_heads", "head_dim"),
    [
        ([0, 0, 1, 1, 2], [0, 0, 3, 3, 8], 9, 3, 64),
        ([0, 0, 0, 0, 1], [0, 0, 0, 0, 1], 21, 7, 120),
        ([0, 0, 2, 2, 3], [0, 2, 2, 4, 7], 2, 1, 32),  # the second has queries and no keys, the third keys alone
        pytest.param([0, 0, 1208, 2048, 2048], [0, 5, 1300, 2200, 2210], 4, 4, 256, marks=pytest.mark.gpu),
    ],
)
def test_empty_sequences_of_a_packed_batch(
    where: Where, cu_q: list[int], cu_k: list[int], heads: int, kv_heads: int, head_dim: int
) -> None:
    """Fewer tokens than sequences, sequences without queries, keys, or both. Seen in flash-attention."""
    if max(cu_q) > 1000 and where.device == "cpu":
        pytest.skip("large: for a GPU")
    q, k, v = (x[0].transpose(0, 1) for x in where.qkv(1, heads, kv_heads, cu_q[-1], cu_k[-1], head_dim))
    cu = [torch.tensor(c, dtype=torch.int32, device=where.device) for c in (cu_q, cu_k)]
    run: dict[str, Any] = {"recipe": where.pick(ROTATED, "default"), "backend": where.backend}
    out, lse = fp8attn.attention_varlen(q, k, v, *cu, is_causal=True, return_lse=True, **run)
    assert out.shape == (cu_q[-1], heads, head_dim) and lse.shape == (heads, cu_q[-1])
    options: dict[str, Any] = {"is_causal": True, "causal_alignment": "bottom_right"}
    for n in range(len(cu_q) - 1):
        rows, keys = slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n + 1])
        if rows.start == rows.stop:
            continue
        if keys.start == keys.stop:
            assert (out[rows] == 0).all() and (lse[:, rows] == -INF).all()
            continue
        alone = (q[None, rows].transpose(1, 2), k[None, keys].transpose(1, 2), v[None, keys].transpose(1, 2))
        qkv = fp8attn.quantize(*alone, **run, **options)
        assert_right(where, qkv, out[None, rows].transpose(1, 2), lse[None, :, rows], **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_merging_states_of_which_some_are_empty(where: Where, dtype: torch.dtype) -> None:
    """-inf - -inf: parts of the keys of which some rows, or all, see nothing. Seen in vllm, flashinfer.

    Merged in an order that starts with an empty part, and with no other.
    """
    seqlen, cuts = where.pick((48, [0, 16, 16, 32, 48]), (700, [0, 256, 256, 512, 700]))
    q, k, v = where.qkv(1, 2, 1, seqlen, seqlen, 64, dtype=dtype)
    whole, whole_lse = attention64(q, k, v, is_causal=True)
    mixed, parts = ROTATED.replace(q_format="fp16", p_format="fp16"), []
    for start, stop in itertools.pairwise(cuts):
        visible = torch.ones(seqlen, stop - start, dtype=torch.bool, device=where.device).tril(-start)
        parts.append(
            fp8attn.attention(
                q, k[:, :, start:stop], v[:, :, start:stop], visible,
                enable_gqa=True, return_lse=True, backend=where.backend, recipe=mixed,
            )
        )  # fmt: skip
    assert (parts[2][1][:, :, 0] == -INF).all()
    out, lse = fp8attn.merge_states(*zip(*parts[::-1], strict=True))
    assert out.isfinite().all() and lse.isfinite().all()
    # K and V in FP8 with weights in FP16: half of FP8's relative step, 2^-4 / sqrt(3) a value, in K and in V
    assert relative_error(out, whole) < 2 * 2**-4 / 3**0.5
    # a logit is a sum of 64 products, each off by that: q.k / 8 by 2^-4 / sqrt(3) of its size, 5 times that at most
    assert ((lse - whole_lse).abs() < 5 * 2**-4 / 3**0.5).all()
    none, none_lse = fp8attn.merge_states([parts[1][0]] * 2, [parts[1][1]] * 2)
    assert (none == 0).all() and (none_lse == -INF).all()
