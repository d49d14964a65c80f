"""Exact attention against a naive softmax, against torch, and on the inputs that break attention libraries."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fp8attn.analysis import exact, exact_attention, exact_logits, exact_probabilities

# float64 sums of at most 64 terms of size O(10): 64 * 2^-53 * 10 = 7e-14, for logits and for the output each.
ROUNDING = 1e-12


def naive(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    causal_alignment: str = "top_left",
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """One row at a time, with plain Python for who sees whom."""
    batch, num_q_heads, seqlen_q, head_dim = query.shape
    group, seqlen_k = num_q_heads // key.shape[1], key.shape[2]
    if attn_mask is not None:
        attn_mask = attn_mask.broadcast_to(batch, num_q_heads, seqlen_q, seqlen_k)
    out = torch.zeros(*query.shape[:3], value.shape[3], dtype=torch.float64)
    lse = torch.full(query.shape[:3], -math.inf, dtype=torch.float64)
    for b in range(batch):
        for h in range(num_q_heads):
            for i in range(seqlen_q):
                position = i if causal_alignment == "top_left" else i + seqlen_k - seqlen_q
                visible, logits = [], []
                for j in range(seqlen_k):
                    if is_causal and j > position:
                        continue
                    if window is not None:
                        left, right = window
                        if left not in (None, -1) and j < position - left:
                            continue
                        if right not in (None, -1) and j > position + right:
                            continue
                    s = float(query[b, h, i].double() @ key[b, h // group, j].double())
                    s *= 1 / math.sqrt(head_dim) if scale is None else scale
                    if softcap:
                        s = softcap * math.tanh(s / softcap)
                    if attn_mask is not None:
                        entry = attn_mask[b, h, i, j].item()
                        if entry is False or entry == -math.inf:
                            continue
                        s += 0.0 if entry is True else entry
                    visible.append(j)
                    logits.append(s)
                if sinks is not None:
                    logits.append(float(sinks[h]))
                if not logits:
                    continue
                logits_tensor = torch.tensor(logits, dtype=torch.float64)
                lse[b, h, i] = torch.logsumexp(logits_tensor, 0)
                weights = torch.softmax(logits_tensor, 0)
                if visible:
                    out[b, h, i] = weights[: len(visible)] @ value[b, h // group, visible].double()
    return out, lse


def close(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], atol: float = ROUNDING) -> None:
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want, atol=atol, rtol=ROUNDING, equal_nan=True)


def qkv(seed: int, batch=1, num_kv_heads=1, group=1, seqlen_q=4, seqlen_k=4, dim=8, dim_v=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, num_kv_heads * group, seqlen_q, dim, generator=generator)
    key = torch.randn(batch, num_kv_heads, seqlen_k, dim, generator=generator)
    value = torch.randn(batch, num_kv_heads, seqlen_k, dim_v, generator=generator)
    return query.to(dtype), key.to(dtype), value.to(dtype)


sides = st.one_of(st.none(), st.integers(-1, 9))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_equals_the_definition(data: st.DataObject) -> None:
    draw = data.draw
    shape: dict[str, Any] = {
        "batch": draw(st.integers(1, 2)),
        "num_kv_heads": draw(st.integers(1, 2)),
        "group": draw(st.sampled_from([1, 2, 3])),
        "seqlen_q": draw(st.integers(0, 8)),
        "seqlen_k": draw(st.integers(0, 9)),
        "dim": draw(st.sampled_from([1, 3, 8])),
        "dim_v": draw(st.sampled_from([1, 5])),
    }
    seed = draw(st.integers(0, 2**32 - 1))
    query, key, value = qkv(seed, **shape, dtype=draw(st.sampled_from([torch.float32, torch.float16, torch.float64])))
    batch, num_q_heads, seqlen_q, _ = query.shape
    generator = torch.Generator().manual_seed(seed + 1)
    full = (batch, num_q_heads, seqlen_q, key.shape[2])
    mask_shape = tuple(size if draw(st.booleans()) else 1 for size in full)[draw(st.integers(0, 2)) :]
    kind = draw(st.sampled_from(["none", "bool", "additive"]))
    mask = None
    if kind == "bool":
        mask = torch.rand(mask_shape, generator=generator) < 0.6
    elif kind == "additive":
        mask = torch.randn(mask_shape, generator=generator)
        mask = mask.masked_fill(torch.rand(mask_shape, generator=generator) < 0.4, -math.inf)
    options = {
        "is_causal": draw(st.booleans()),
        "causal_alignment": draw(st.sampled_from(["top_left", "bottom_right"])),
        "window": draw(st.one_of(st.none(), st.tuples(sides, sides))),
        "softcap": draw(st.sampled_from([None, 0.0, 0.5, 3.0])),
        "sinks": torch.randn(num_q_heads, generator=generator) if draw(st.booleans()) else None,
        "scale": draw(st.sampled_from([None, 0.0, 2.5])),
    }
    tile_rows, tile_keys = draw(st.sampled_from([(512, 1024), (3, 4), (1, 1), (4, 3)]))
    with pytest.MonkeyPatch.context() as patch:  # small tiles, so that these small shapes cross their borders
        patch.setattr(exact, "_TILE_ROWS", tile_rows)
        patch.setattr(exact, "_TILE_KEYS", tile_keys)
        actual = exact_attention(query, key, value, mask, **options)
    close(actual, naive(query, key, value, mask, **options))


@pytest.mark.parametrize(
    ("is_causal", "mask_kind"), [(False, None), (True, None), (False, "bool"), (False, "additive")]
)  # torch takes a mask or is_causal
def test_equals_torch_across_real_tiles(is_causal: bool, mask_kind: str | None) -> None:
    query, key, value = qkv(0, num_kv_heads=2, group=2, seqlen_q=700, seqlen_k=1500, dim=16, dim_v=16)
    mask = None
    if mask_kind:
        mask = torch.randn(700, 1500, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        mask = mask > -1 if mask_kind == "bool" else mask
    out, lse = exact_attention(query, key, value, mask, is_causal=is_causal)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.double(), key.double(), value.double(), mask, is_causal=is_causal, enable_gqa=True
    )
    # 1500 terms of size O(1): 1500 * 2^-53 = 2e-13
    torch.testing.assert_close(out, expected, atol=ROUNDING, rtol=0)
    logits = query.double() @ key.double().repeat_interleave(2, 1).transpose(2, 3) / 4
    if is_causal:
        logits = logits.masked_fill(~torch.ones(700, 1500, dtype=torch.bool).tril(), -math.inf)
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask
    torch.testing.assert_close(lse, logits.logsumexp(-1), atol=ROUNDING, rtol=0)


def test_result_depends_on_no_tile_size(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = qkv(3, seqlen_q=40, seqlen_k=64)
    query = query * 30  # logits up to hundreds: a running maximum that were wrong would overflow
    options = {"is_causal": True, "causal_alignment": "bottom_right", "window": (17, -1), "sinks": torch.tensor([2.0])}
    whole = exact_attention(query, key, value, **options)
    monkeypatch.setattr(exact, "_TILE_ROWS", 7)
    monkeypatch.setattr(exact, "_TILE_KEYS", 5)
    # logits of size 300 round to 300 * 2^-53 * 8 products = 3e-13 each, and that is a weight's relative error
    close(exact_attention(query, key, value, **options), whole, atol=1e-11)


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32])
def test_row_without_a_key(mask_dtype: torch.dtype) -> None:
    query, key, value = qkv(0, seqlen_q=6, seqlen_k=10)
    keep = torch.ones(1, 1, 6, 10, dtype=torch.bool)
    keep[..., -1, :] = False
    mask = keep if mask_dtype == torch.bool else torch.zeros(keep.shape).masked_fill(~keep, -math.inf)
    out, lse = exact_attention(query, key, value, mask)
    assert out[0, 0, -1].eq(0).all() and lse[0, 0, -1] == -math.inf
    assert out[0, 0, :-1].ne(0).all() and lse[0, 0, :-1].isfinite().all()
    out, lse = exact_attention(query, key, value, mask, sinks=torch.tensor([1.5]))
    assert out[0, 0, -1].eq(0).all() and lse[0, 0, -1] == 1.5


def test_finfo_min_everywhere_is_the_mean_of_v() -> None:
    query, key, value = qkv(0, seqlen_q=6, seqlen_k=10)
    out, lse = exact_attention(query, key, value, torch.full((6, 10), torch.finfo(torch.float32).min))
    # -3.4e38 swallows the logits: every weight is exactly 1/10
    torch.testing.assert_close(out[0, 0], value[0, 0].double().mean(0).expand(6, 8), atol=ROUNDING, rtol=0)
    assert lse.isfinite().all()


def test_very_negative_logits_stay_a_softmax() -> None:
    query = torch.full((1, 4, 1, 128), 448.0, dtype=torch.bfloat16)
    key = -1880.0 + torch.arange(3.0).view(1, 1, 3, 1).expand(1, 1, 3, 128)
    value = torch.randn(1, 1, 3, 128, generator=torch.Generator().manual_seed(0))
    out, lse = exact_attention(query, key, value, scale=1e-3)
    # logits -0.448 * 128 * (1880, 1879, 1878): 57.3 apart, so the last key has all the weight up to e^-57
    logit = -448.0 * 128 * 1878 * 1e-3
    torch.testing.assert_close(out, value[:, :, 2:].double().expand(1, 4, 1, 128), atol=1e-12, rtol=0)
    torch.testing.assert_close(lse, torch.full((1, 4, 1), logit, dtype=torch.float64), atol=0, rtol=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("hide", ["bool", "additive", "causal", "window"])
def test_hidden_keys_and_values_never_leak(bad: float, hide: str) -> None:
    query, key, value = qkv(0, num_kv_heads=2, group=2, seqlen_q=5, seqlen_k=9)
    options: dict[str, Any] = {}
    keep = (torch.arange(9) < 6).expand(5, 9)
    if hide == "bool":
        options["attn_mask"] = keep
    elif hide == "additive":
        options["attn_mask"] = torch.zeros(5, 9).masked_fill(~keep, -math.inf)
    elif hide == "causal":
        options["is_causal"] = True
    else:
        options["window"] = (-1, 1)  # row 4 sees keys up to 5
    expected = exact_attention(query, key, value, **options)
    key[:, :, 6:], value[:, :, 6:] = bad, bad
    close(exact_attention(query, key, value, **options), expected, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_value_touches_only_the_rows_that_see_it(bad: float) -> None:
    query, key, value = qkv(0, seqlen_q=6, seqlen_k=6)
    clean, _ = exact_attention(query, key, value, is_causal=True)
    value[0, 0, 3, 2] = bad
    out, _ = exact_attention(query, key, value, is_causal=True)
    expected = clean.clone()
    expected[0, 0, 3:, 2] = bad
    torch.testing.assert_close(out, expected, atol=ROUNDING, rtol=0, equal_nan=True)


def test_nan_in_a_visible_key_or_query_is_not_hidden() -> None:
    query, key, value = qkv(0, seqlen_q=3, seqlen_k=3)
    key[0, 0, 1, 0] = math.nan
    out, lse = exact_attention(query, key, value, is_causal=True)
    assert out[0, 0, 0].isfinite().all() and lse[0, 0, 0].isfinite()
    assert out[0, 0, 1:].isnan().all() and lse[0, 0, 1:].isnan().all()


def test_inputs_are_not_modified_and_strides_do_not_matter() -> None:
    query, key, value = (tensor.transpose(1, 2).contiguous() for tensor in qkv(0, num_kv_heads=2, group=2, seqlen_k=7))
    before = [tensor.clone() for tensor in (query, key, value)]
    strided = exact_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True)
    packed = exact_attention(*(tensor.transpose(1, 2).contiguous() for tensor in (query, key, value)), is_causal=True)
    close(strided, packed, atol=0)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip((query, key, value), before, strict=True))


OPTIONS: list[dict[str, Any]] = [
    {},
    {"is_causal": True, "causal_alignment": "bottom_right", "scale": 0.7},
    {"window": (2, 1), "softcap": 1.5},
    {"sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])},
    {"attn_mask": torch.tensor([True, False, True, True, False, True, True])},
    {"attn_mask": torch.linspace(-3, 3, 7), "is_causal": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_probabilities_are_those_of_attention(options: dict[str, Any]) -> None:
    """Weights times values is attention's output, and logits' log-sum-exp its lse, for any rows."""
    query, key, value = qkv(1, num_kv_heads=2, group=2, seqlen_q=5, seqlen_k=7)
    out, lse = exact_attention(query, key, value, **options)
    for rows in (None, slice(1, None, 3), slice(0, 0)):
        weights = exact_probabilities(query, key, rows=rows, **options)
        picked = slice(None) if rows is None else rows
        got = weights @ value.double().repeat_interleave(2, dim=1)
        torch.testing.assert_close(got, out[:, :, picked], atol=ROUNDING, rtol=0)
        if "sinks" not in options:
            logits = exact_logits(query, key, rows=rows, **options)
            torch.testing.assert_close(logits.logsumexp(-1), lse[:, :, picked], atol=ROUNDING, rtol=0)


def test_a_row_that_sees_nothing_has_no_weights() -> None:
    query, key, _ = qkv(0, seqlen_q=3, seqlen_k=2)
    weights = exact_probabilities(query, key, is_causal=True, causal_alignment="bottom_right")
    assert weights[0, 0, 0].tolist() == [0.0, 0.0] and weights[0, 0, 1].tolist() == [1.0, 0.0]
    with pytest.raises(ValueError, match="sinks must be"):
        exact_probabilities(query, key, sinks=torch.zeros(9))


Q, K, V = qkv(0, num_kv_heads=2, group=3)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"query": Q[0]}, ValueError, r"query must be \(batch, heads, sequence, head_dim\), got shape \(6, 4, 8\)"),
        ({"query": Q.int()}, TypeError, "query must be a floating tensor, got torch.int32"),
        ({"key": K[..., :4]}, ValueError, r"key must be .* D=8 as in query, got \(1, 2, 4, 4\)"),
        ({"value": V[:, :, :3]}, ValueError, r"value must be .* \(1, 2, 4\), got \(1, 2, 3, 8\)"),
        ({"query": Q[:, :5]}, ValueError, "query heads must be a multiple of kv heads, got 5 and 2"),
        ({"enable_gqa": False}, ValueError, "enable_gqa=True"),
        ({"attn_mask": torch.ones(5, 4)}, ValueError, r"broadcast to .*\(1, 6, 4, 4\), got \(5, 4\)"),
        ({"attn_mask": torch.ones(1, 1, 1, 4, 4)}, ValueError, "broadcast to"),
        ({"attn_mask": torch.ones(4, 4).int()}, TypeError, "boolean or floating, got torch.int32"),
        ({"causal_alignment": "left"}, ValueError, "'top_left' or 'bottom_right', got 'left'"),
        ({"window": (-2, 0)}, ValueError, r"window must be \(left, right\).*got \(-2, 0\)"),
        ({"window": 4}, ValueError, "window must be .*got 4"),
        ({"softcap": -1.0}, ValueError, "softcap must be finite and positive .*got -1.0"),
        ({"softcap": math.nan}, ValueError, "softcap"),
        ({"sinks": torch.zeros(2)}, ValueError, r"sinks must be \(6,\)"),
    ],
)
def test_refusals(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"query": Q, "key": K, "value": V, **changes}
    with pytest.raises(error, match=message):
        exact_attention(**arguments)
