"""Scales of zeros and beside padding, and casts at the edges of a format."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

import fp8attn
from fp8attn.formats import get_format
from fp8attn.scaling import quantize_tensor
from oracle import INF, NAN, PLAIN, Where, assert_right, relative_error


def test_zeros_stay_zeros_and_touch_no_neighbour(where: Where) -> None:
    """A block of zeros has no largest value to scale by: 0/0. Seen in aiter, torchao."""
    size, block = where.pick((64, 32), (256, 128))
    q, k, v = where.qkv(1, 1, 1, size, size, size)
    k[:, :, block:] = 0
    k[..., block:] = 0  # one non-zero tile
    v[..., 0] = 0
    recipe = PLAIN.replace(k_scale=f"block:{block}", q_scale=f"block:{block}")
    qkv, out, lse = where.run(q, k, v, recipe)
    assert_right(where, qkv, out, lse)
    for part, x in ((qkv.k, k), (qkv.v, v)):
        assert part.scale.isfinite().all() and (part.scale > 0).all()
        values = part.dequantize()
        assert (values[x == 0] == 0).all()
        # half a step of E4M3: 2^-4 of a value, or of its smallest normal under the scale
        assert ((values - x).abs() <= x.abs() / 16 + part.expanded_scale() * 2**-10).all()
    assert (out[..., 0] == 0).all()


@pytest.mark.parametrize("recipe", ["default", "per_tensor", "causal_safe"])
def test_keys_that_are_all_zero_weigh_alike(where: Where, recipe: str) -> None:
    """A scale of 0 and its 0/0 again: every score is 0, so the answer is the mean value and the log of the length."""
    seqlen = where.pick(50, 1000)
    q, k, v = where.qkv(1, 2, 2, 3, seqlen, 64)
    qkv, out, lse = where.run(q, torch.zeros_like(k), v, recipe)
    assert (qkv.k.dequantize() == 0).all() and (qkv.k.scale > 0).all()
    # weights of 2^8 have no rounding error, but for values with a scale each, whose products with them have FP8's
    mean, own_scales = qkv.v.dequantize().mean(dim=2, keepdim=True), recipe in ("causal_safe", "fa3_paper")
    assert relative_error(out, mean.expand(out.shape)) <= (2**-4 if own_scales else where.limit)
    assert ((lse - math.log(seqlen)).abs() <= (2**-4 if own_scales else where.limit)).all()


@pytest.mark.parametrize(("seqlen", "head_dim"), [(13, 13), (1, 13), (33, 24)])
@pytest.mark.parametrize("granularity", ["token", "block:16", "head", "tensor"])
def test_padding_is_no_part_of_a_largest_value(where: Where, seqlen: int, head_dim: int, granularity: str) -> None:
    """Lanes beyond a row's or a sequence's end, read for a scale. Seen in aiter.

    Around the tensors, in the same memory, lies what would be far the largest.
    """

    def framed(x: torch.Tensor) -> torch.Tensor:
        frame = torch.full((*x.shape[:2], x.shape[2] + 64, x.shape[3] + 64), 1e30, device=x.device)
        inside = frame[:, :, 32 : 32 + x.shape[2], 32 : 32 + x.shape[3]]
        return inside.copy_(x)

    recipe = PLAIN.replace(q_scale=granularity, k_scale=granularity)
    data = where.qkv(1, 2, 1, seqlen, seqlen, head_dim)
    qkv, out, lse = where.run(*(framed(x) for x in data), recipe)
    for part, x in ((qkv.q, data[0]), (qkv.k, data[1]), (qkv.v, data[2])):
        amax = part.granularity.amax(x.abs())
        torch.testing.assert_close(part.scale, amax / 448, rtol=2**-23, atol=0)  # one division
    assert_right(where, qkv, out, lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_the_cast_saturates_and_rounds_to_even(where: Where, fmt: str, dtype: torch.dtype) -> None:
    """Overflow to NaN or to the largest value, by version and device; carries and denormals. Seen in torchao.

    A tensor whose largest value is the format's has the scale 1, so its codes are the cast alone: of every code, of the
    middle between any two, of what lies just beside it, of infinities and of NaN.
    """
    largest = get_format(fmt).max
    numpy_fmt = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[fmt]
    every = np.arange(256, dtype=np.uint8).view(numpy_fmt).astype(np.float32)
    every = np.sort(every[np.isfinite(every)])
    middles = (every[1:] + every[:-1]) / 2
    x = np.concatenate([every, middles, middles * (1 + 2.0**-20), middles * (1 - 2.0**-20), [-0.0, 2.0**-10, 1e-30]])
    x = torch.tensor(x, dtype=torch.float32).to(dtype).clamp(-largest, largest).float().numpy()
    expected = torch.from_numpy(x.astype(numpy_fmt).view(np.uint8).copy())
    special = torch.tensor([INF, -INF, NAN])
    x = torch.cat([torch.from_numpy(x), special])
    x = torch.cat([x, x.new_zeros(-len(x) % 64)]).to(where.device, dtype)
    rows = x.view(1, 1, -1, 64)
    recipe = PLAIN.replace(q_format=fmt, k_format=fmt, v_format=fmt, q_scale="tensor", k_scale="tensor")
    recipe = recipe.replace(v_scale="tensor")
    qkv = fp8attn.quantize(rows, rows, rows, recipe, backend=where.backend)
    for part in (qkv.q, qkv.k, qkv.v):
        assert (part.scale == 1).all()
        codes = part.rows().reshape(-1)
        as_bytes = codes.view(torch.uint8).cpu()[: len(expected)]
        zero = (as_bytes & 0x7F) == 0  # the sign of what rounds to zero is nobody's concern
        assert torch.equal(as_bytes[~zero], expected[~zero]) and ((expected & 0x7F)[zero] == 0).all()
        plus, minus, nan = codes.float()[len(expected) : len(expected) + 3].tolist()
        assert (plus, minus) == (largest, -largest) and math.isnan(nan)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.filterwarnings("ignore::fp8attn.scaling.QuantizationWarning")
def test_a_static_scale_clips_alike_everywhere(device: str, dtype: torch.dtype, scale: float) -> None:
    """464 is halfway to a code that E4M3 does not have, 465 beyond; torch and hardware made NaN or 448 of them."""
    x = torch.tensor([[448.0, 464.0, 465.0, 480.0, 1e3, 6.5e4, INF, 2**-9 * scale, 2**-10 * scale, 0.0]], dtype=dtype)
    x = torch.cat([x, -x, torch.full_like(x, NAN)]).to(device)
    values = quantize_tensor(x, "e4m3", "tensor", scale=scale).dequantize().cpu()
    top = [448.0 * scale] * 7
    expected = torch.tensor([*top, 2**-9 * scale, 0.0, 0.0])
    assert torch.equal(values[0], expected) and torch.equal(values[1], -expected)
    assert values[2].isnan().all()
