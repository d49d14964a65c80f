"""Who sees whom: masks, causality, windows, and a softcap that must come before them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fp8attn import Recipe
from oracle import INF, PLAIN, Where, assert_right, relative_error


@pytest.mark.parametrize("depth", [6e4, 2.2e6])
@pytest.mark.parametrize("recipe", ["per_tensor", "fa3_paper", "causal_safe"])
def test_logits_far_below_any_mask_constant(where: Where, recipe: str, depth: float) -> None:
    """A kernel that hides keys with a finite constant (-5e4) hides every key whose logit is lower: rows of zeros.

    Seen in flashinfer. Queries and keys point in opposite directions and are long.
    """
    direction = where.randn(128, seed=1) / 128**0.5
    along = torch.linspace(0, 4, where.pick(3, 300), device=where.device)[:, None]
    length = math.sqrt(depth * 128**0.5)
    q = (-length * direction).expand(1, 4, 1, 128)
    k = (length + along * 128**0.5 / length) * direction
    v = where.randn(1, 1, len(along), 16)
    exact = Recipe.from_name(recipe).replace(p_format="fp16", v_scale="channel")
    qkv, out, lse = where.run(q, k[None, None], v, exact)
    _, expected_lse = assert_right(where, qkv, out, lse, largest_logit=depth)
    assert (expected_lse < -5e4).all() and (lse < -5e4).all()


LEAST = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("kind", ["bool", "-inf", *LEAST], ids=str)
@pytest.mark.parametrize("rows", ["the last", "all"])
def test_rows_that_a_mask_hides_whole(where: Where, kind: str | torch.dtype, rows: str) -> None:
    """A row without a key is 0/0. -inf and False hide: 0 and -inf. The least finite number does not: the mean of V.

    Seen in PyTorch, whose backends disagreed.
    """
    seqlen_q, seqlen_k = where.pick((6, 10), (200, 300))
    hidden = torch.zeros(seqlen_q, dtype=torch.bool, device=where.device)
    hidden[slice(-1, None) if rows == "the last" else slice(None)] = True
    visible = ~hidden[:, None].expand(seqlen_q, seqlen_k)
    if kind == "bool":
        mask = visible
    else:
        dtype = kind if isinstance(kind, torch.dtype) else torch.float32
        mask = torch.zeros(visible.shape, dtype=dtype, device=where.device)
        mask = mask.masked_fill(~visible, -INF if kind == "-inf" else torch.finfo(dtype).min)
    qkv, out, lse = where.run(*where.qkv(1, 2, 1, seqlen_q, seqlen_k, 64), attn_mask=mask)
    if isinstance(kind, torch.dtype):
        mean = qkv.v.dequantize().mean(dim=2, keepdim=True).expand(out.shape)
        flat = kind != torch.float16  # -65504 leaves FP32 some bits for the logits
        if flat:
            assert relative_error(out[:, :, hidden], mean[:, :, hidden]) <= where.limit
        assert out.isfinite().all() and lse.isfinite().all()
        assert (lse[:, :, hidden] < -6e4).all()
    else:
        assert_right(where, qkv, out, lse, attn_mask=mask)
        sinks = torch.tensor([-1.0, 2.0], device=where.device)
        _, out, lse = where.run(*where.qkv(1, 2, 1, seqlen_q, seqlen_k, 64), attn_mask=mask, sinks=sinks)
        assert_right(where, qkv, out, lse, attn_mask=mask, sinks=sinks)
        assert (lse[:, :, hidden] == sinks[:, None]).all()


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(2, 5), (5, 2), (3, 128), (1, 129), (65, 33), (33, 65)])
def test_causal_where_lengths_differ(where: Where, seqlen_q: int, seqlen_k: int, alignment: str) -> None:
    """Two meanings of causal, taken for each other. Seen in flash-attention, cutlass."""
    seqlen_q, seqlen_k = where.pick((seqlen_q, seqlen_k), (seqlen_q * 7, seqlen_k * 7))
    options: dict[str, Any] = {"is_causal": True, "causal_alignment": alignment}
    qkv, out, lse = where.run(*where.qkv(1, 2, 1, seqlen_q, seqlen_k, 32), **options)
    assert_right(where, qkv, out, lse, **options)
    empty = max(0, seqlen_q - seqlen_k) if alignment == "bottom_right" else 0
    assert (lse[:, :, :empty] == -INF).all() and lse[:, :, empty:].isfinite().all()


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "window"),
    [
        *((10, 10, (width - 1, 0)) for width in (1, 2, 4)),
        *((66, 66, (width - 1, 0)) for width in (65, 66, 67)),
        (10, 10, (0, 3)), (40, 130, (63, 64)), (40, 130, (64, 63)), (97, 20, (8, 16)), (20, 97, (0, 0)),
    ],
)  # fmt: skip
def test_windows_are_inclusive(
    where: Where, seqlen_q: int, seqlen_k: int, window: tuple[int, int], alignment: str
) -> None:
    """Off by one at the left, and rows whose window holds no key. Seen in transformers, flash-attention."""
    factor = where.pick(1, 8)
    seqlen_q, seqlen_k = seqlen_q * factor, seqlen_k * factor
    left, right = window
    options: dict[str, Any] = {"window": (left * factor, right * factor), "causal_alignment": alignment}
    data = where.qkv(1, 1, 1, seqlen_q, seqlen_k, 32)
    qkv, out, lse = where.run(*data, **options)
    assert_right(where, qkv, out, lse, **options)
    if right == 0 and alignment == "top_left":  # a window of W tokens that ends at the query is causal's last W
        both = where.run(*data, **{**options, "window": (left * factor, -1), "is_causal": True})
        assert torch.equal(both[1], out) and torch.equal(both[2], lse)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_softcap_acts_on_true_logits_before_the_mask(where: Where, is_causal: bool) -> None:
    """Applied to codes without their scales, or after the mask, which then leaks. Seen in flash-attention, Megatron-LM.

    Values of the keys that nobody should see are large, and so would be their trace.
    """
    seqlen = where.pick(40, 400)
    q, k, v = where.qkv(1, 2, 1, seqlen, seqlen, 32)
    q, k = q * 4, k * 3 + 1
    v[:, :, seqlen // 2 :] *= 1e4
    outs = {}
    for softcap in (0, 1.0, 5.0, 50.0, 1e4, 1e30):
        qkv, out, lse = where.run(q, k, v, PLAIN.replace(smooth_k=True), is_causal=is_causal, softcap=softcap)
        assert (qkv.k.scale != 1).all() and qkv.logit_shift is not None
        # tanh comes with FP32's error of its largest value, which is the softcap up to 100 and the logit above
        largest = 2.0**2 * min(max(softcap, 150), 1e4)
        assert_right(where, qkv, out, lse, is_causal=is_causal, softcap=softcap, largest_logit=largest)
        outs[softcap] = out
    small = (0, 5.0, 50.0)
    assert all(relative_error(outs[a], outs[b]) > 0.05 for a in small for b in small if a < b)
    # as good as none, but with the mean key's share within the logits, so weights are rounded elsewhere: E4M3's step
    assert relative_error(outs[1e30], outs[0]) <= 2**-4 / 3**0.5
