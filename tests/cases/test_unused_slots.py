"""Keys and values that no query sees may hold anything, NaN and infinity included."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fp8attn
from oracle import INF, NAN, PLAIN, Where


@pytest.mark.parametrize("hide", ["mask", "causal", "window"])
def test_what_no_query_sees_may_hold_anything(where: Where, hide: str) -> None:
    """0 * NaN: an unused slot of a cache, or padding, that reaches a product. Seen in flash-attention, flashinfer."""
    seqlen, rows = where.pick(40, 700), 9
    q, k, v = where.qkv(2, 2, 1, rows, seqlen, 16)
    index = torch.arange(seqlen, device=where.device)
    options: dict[str, Any] = {"is_causal": True}
    if hide == "mask":
        mask = index < torch.tensor(where.pick((30, 13), (500, 13)), device=where.device)[:, None]
        unused, options = ~mask, {"attn_mask": mask[:, None, None]}
    elif hide == "causal":
        unused = (index >= rows).expand(2, -1)
    else:  # the last queries look back a little
        unused, options = (index < seqlen - 12).expand(2, -1), {"causal_alignment": "bottom_right", "window": (3, 0)}
    dirty = [torch.where(unused[:, None, :, None], filler, x) for filler, x in ((NAN, k), (INF, v))]
    run: dict[str, Any] = {**options, "enable_gqa": True, "backend": where.backend, "return_lse": True}
    for recipe in where.pick(["default" if hide == "mask" else "causal_safe"], ["default", "causal_safe"]):
        clean, dirtied = (fp8attn.attention(q, *kv, recipe=recipe, **run) for kv in ((k, v), dirty))
        assert clean[0].isfinite().all()
        assert torch.equal(clean[0], dirtied[0]) and torch.equal(clean[1], dirtied[1])
    # a value quantized with the mask keeps those keys hidden without it
    qkv = fp8attn.quantize(q, *dirty, PLAIN, backend=where.backend, **options)
    assert fp8attn.attention_quantized(qkv, backend=where.backend).isfinite().all()


@pytest.mark.parametrize("k_scale", ["token", "block:16"])
def test_codes_and_scales_of_hidden_keys_may_be_nan(where: Where, k_scale: str) -> None:
    """Slots that were never written, after quantization: whole tiles, and the end of the last one.

    Their logits are hidden, not multiplied. (A NaN value is 0 * NaN under an explicit mask, as in PyTorch.)
    """
    seqlen, used = where.pick((150, 64), (1000, 320))
    mask = (torch.arange(seqlen, device=where.device) < used).view(1, 1, 1, -1)
    qkv, *expected = where.run(*where.qkv(1, 2, 1, 5, seqlen, 16), PLAIN.replace(k_scale=k_scale), attn_mask=mask)
    qkv.k.codes.view(torch.uint8)[:, :, used:] = 0x7F
    qkv.k.scale[:, :, used // qkv.k.granularity.size :] = NAN
    dirty = fp8attn.attention_quantized(qkv, mask, return_lse=True, backend=where.backend)
    assert expected[0].isfinite().all()
    assert torch.equal(dirty[0], expected[0]) and torch.equal(dirty[1], expected[1])
