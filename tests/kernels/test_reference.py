"""The reference backend against float64 attention on the same codes: every feature, at a tolerance that a bug exceeds.

With P in FP16 the only error left is P's own rounding, 2^-11 of a weight, so a wrong mask, scale or sum cannot hide
behind FP8's 2^-4. What E4M3 does to P is then held against a second computation of the contract's formula.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fp8attn
from fp8attn import Recipe
from fp8attn.analysis.exact import exact_attention, exact_attention_quantized
from fp8attn.kernels.problem import AttentionProblem, Masking
from fp8attn.kernels.reference import State, attend, attend_keys, finish, merge, quantize_qkv
from fp8attn.testing import QKV, AttentionShape, OutlierSpec, make_qkv, masks, outlier_specs, qkv, recipes, shapes

# |out - exact| <= sum_j |dp_j| |v_j| / l with |dp_j| <= 2^-11 p_j twice (the weight and the sum of the weights), so
# 2^-10 of the largest |v|; FP16's subnormals add 2^-33 of the row's mass a key, FP32 sums 2^-24 sqrt(keys).
FP16_P = 2.0**-10 * 1.1
# the sum of weights is off by at most 2^-11 of itself, plus FP32's rounding of logits and of an lse of that size
LSE_TOLERANCE = 2.0**-11 * 1.1


@st.composite
def problems(draw: st.DrawFn) -> tuple[QKV, dict[str, Any], Recipe]:
    """Inputs, the arguments that say who sees whom and how, and a recipe with exact-as-possible weights."""
    shape = draw(shapes(max_seqlen=40, head_dims=(8, 16, 24), head_dims_v=(4, 16, 24)))
    data = draw(qkv(shapes=st.just(shape), outliers=outlier_specs(magnitudes=(1.0, 5.0))))
    sides = st.integers(-1, 12)
    options: dict[str, Any] = {
        "is_causal": draw(st.booleans()),
        "causal_alignment": draw(st.sampled_from(["top_left", "bottom_right"])),
        "window": draw(st.none() | st.tuples(sides, sides)),
        "attn_mask": draw(st.none() | masks(shape=shape)),
        "softcap": draw(st.sampled_from([None, 5.0])),
        "sinks": draw(st.sampled_from([None, torch.linspace(-2, 4, shape.num_q_heads)])),
        "scale": draw(st.sampled_from([None, 0.3, -0.2, 0.0])),
    }
    return data, options, draw(recipes(p_format="fp16", v_format=st.sampled_from(["e4m3", "e5m2"])))


def assert_within_p_rounding(
    actual: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor], v_max: float
) -> None:
    out, lse = actual
    error = (out.double() - expected[0]).abs().max().item() if out.numel() else 0.0
    assert error <= FP16_P * v_max + 1e-6, f"output is off by {error / v_max:.2e} of the largest value"
    finite = expected[1].isfinite()
    assert torch.equal(lse[~finite].double(), expected[1][~finite])
    lse_error = (lse.double() - expected[1])[finite].abs()
    assert (lse_error <= LSE_TOLERANCE + 1e-6 * expected[1][finite].abs()).all(), f"lse off by {lse_error.max():.2e}"


@settings(max_examples=250)
@given(problems())
def test_every_feature_agrees_with_float64_on_the_same_codes(problem: tuple[QKV, dict[str, Any], Recipe]) -> None:
    data, options, recipe = problem
    visible = {key: options[key] for key in ("attn_mask", "is_causal", "causal_alignment", "window", "scale")}
    quantized = fp8attn.quantize(*data, recipe, **visible)
    actual = fp8attn.attention_quantized(quantized, return_lse=True, **options)
    v = quantized.v.dequantize()
    v_max = v.abs().max().item() + (0.0 if quantized.v_mean is None else quantized.v_mean.abs().max().item())
    assert_within_p_rounding(actual, exact_attention_quantized(quantized, **options), v_max)


def test_hidden_padding_may_hold_anything() -> None:
    data = make_qkv(AttentionShape(2, 4, 2, 24, 40, 16))
    mask = torch.ones(2, 1, 1, 40, dtype=torch.bool)
    mask[0, ..., 30:] = False
    mask[1, ..., :5] = False
    clean = fp8attn.attention(*data, attn_mask=mask, enable_gqa=True, return_lse=True)
    for filler in (torch.nan, torch.inf, 1e30):
        k, v = data.k.clone(), data.v.clone()
        k[0, :, 30:], v[0, :, 30:], k[1, :, :5], v[1, :, :5] = filler, filler, filler, filler
        padded = fp8attn.attention(data.q, k, v, attn_mask=mask, enable_gqa=True, return_lse=True)
        assert torch.equal(padded[0], clean[0]) and torch.equal(padded[1], clean[1])
    # and the padded sequence is the short one
    alone = fp8attn.attention(data.q[:1], data.k[:1, :, :30], data.v[:1, :, :30], enable_gqa=True)
    assert torch.equal(alone, clean[0][:1])


def test_keys_beyond_a_causal_diagonal_may_hold_anything() -> None:
    data = make_qkv(AttentionShape(1, 2, 2, 8, 40, 16))
    k, v = data.k.clone(), data.v.clone()
    k[:, :, 8:], v[:, :, 8:] = torch.nan, torch.nan
    a = fp8attn.attention(data.q, k, v, is_causal=True)
    assert torch.equal(a, fp8attn.attention(data.q, k[:, :, :8], v[:, :, :8], is_causal=True))


def one_tile(quantized: fp8attn.QuantizedQKV, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """The contract's steps 3 to 5 for keys that fit one tile, in float64 numpy, P8 by ml_dtypes."""
    q, k, v = (x.dequantize().double().numpy() for x in (quantized.q, quantized.k, quantized.v))
    s = scale * math.log2(math.e) * q @ k.swapaxes(-1, -2)
    m = np.ceil(s.max(axis=-1, keepdims=True))
    p = (np.exp2(s - m) * 256).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    total = p.sum(axis=-1, keepdims=True)
    return p @ v / total, math.log(2) * (m + np.log2(total) - 8)[..., 0]


def test_e4m3_weights_are_the_contracts() -> None:
    data = make_qkv(AttentionShape(1, 2, 2, 200, 128, 64), seed=7)
    quantized = fp8attn.quantize(*data, Recipe(smooth_k=False))
    out, lse = fp8attn.attention_quantized(quantized, return_lse=True)
    expected, expected_lse = one_tile(quantized, 0.125)
    # FP32 logits move a weight across a rounding boundary in about 1e-6/2^-4 of cases, by 2^-4 of itself
    relative = np.linalg.norm(out.numpy() - expected) / np.linalg.norm(expected)
    assert relative < 1e-4
    np.testing.assert_allclose(lse.numpy(), expected_lse, atol=1e-4)


@settings(max_examples=30)
@given(
    data=qkv(shapes=shapes(max_seqlen=150, max_batch=1, head_dims=(16,))),
    tile_k=st.sampled_from([16, 64, 512]),
    tile_q=st.integers(8, 200),
    v_scale=st.sampled_from(["channel", "token"]),
)
def test_tiles_do_not_matter(data: QKV, tile_k: int, tile_q: int, v_scale: str) -> None:
    """Integer references make the rounding of P the same in any schedule, but for P's subnormal tail."""
    masking = Masking(data.q.shape[2], data.k.shape[2], data.q.device, is_causal=True, causal_alignment="bottom_right")
    problem = AttentionProblem(quantize_qkv(*data, Recipe(v_scale=v_scale), masking, scale=0.25), masking, 0.25)
    out, lse = attend(problem)
    other, other_lse = attend(problem, tile_q=tile_q, tile_k=tile_k)
    # P's absolute step below 2^-6 is 2^-9, rounded at most half of it away in either schedule: 2^-9 of 2^(m - 8) a key,
    # and a row's mass is at least 2^(m - 1)
    v_max = problem.qkv.v.dequantize().abs().max()
    assert ((out - other).abs() <= data.k.shape[2] * 2.0**-16 * v_max).all()
    if data.outliers.kind == "none":
        # the bound is far off where few keys lie in the tail: design, section 4, has 3e-4 for data like this
        assert (out - other).norm() <= 3e-4 * out.norm() + 1e-12
    finite = lse.isfinite()
    assert torch.equal(finite, other_lse.isfinite())
    # the same half steps against a sum of at least 2^7: 150 keys * 2^-16 = 2.3e-3 if none cancelled; half of it is held
    assert ((lse - other_lse)[finite].abs() < 1e-3).all()


@pytest.mark.parametrize("magnitude", [1.0, 1e3, 1e6, 1e12])
def test_a_huge_value_token_does_not_take_the_others_weight(magnitude: float) -> None:
    """With a scale a token, small values vanish beside a huge one; their weights must still count in the sum."""
    data = make_qkv(AttentionShape(1, 1, 1, 20, 100, 16))
    v = data.v.clone()
    v[:, :, 7] *= magnitude
    out, lse = fp8attn.attention(data.q, data.k, v, recipe="causal_safe", return_lse=True)
    expected, expected_lse = exact_attention(data.q, data.k, v)
    assert (lse - expected_lse).abs().max() < 0.05  # FP8 logits of this data are off by 0.02
    assert (out - expected).norm() < 0.05 * expected.norm()  # FP8


def as_problem(data: QKV, recipe: Recipe = Recipe(), **options: Any) -> AttentionProblem:  # noqa: B008 (immutable)
    masking = Masking(data.q.shape[2], data.k.shape[2], data.q.device)
    return AttentionProblem(quantize_qkv(*data, recipe, masking, scale=0.25), masking, 0.25, **options)


def states_close(a: State, b: State) -> None:
    """Equal up to FP32 addition: 2^-24 of the sums a merge; m exactly."""
    assert torch.equal(a.m, b.m)
    torch.testing.assert_close(a.l, b.l, rtol=2**-21, atol=0)
    torch.testing.assert_close(a.acc, b.acc, rtol=0, atol=2**-20 * float(a.acc.abs().max() + 1))


@settings(max_examples=40)
@given(
    data=qkv(shapes=st.just(AttentionShape(2, 4, 2, 9, 150, 16))),
    cuts=st.tuples(st.integers(0, 150), st.integers(0, 150)),
    options=st.sampled_from([{}, {"sinks": torch.linspace(-1, 3, 4)}, {"softcap": 4.0}]),
    smooth=st.booleans(),
)
def test_any_split_of_the_keys_equals_the_whole(
    data: QKV, cuts: tuple[int, int], options: dict[str, Any], smooth: bool
) -> None:
    problem = as_problem(data, Recipe(smooth_k=smooth, smooth_v=smooth), **options)
    first, second = sorted(cuts)
    a, b, c = (attend_keys(problem, keys) for keys in (range(first), range(first, second), range(second, 150)))
    states_close(merge(merge(a, b), c), merge(a, merge(b, c)))  # associative
    forth, back = merge(a, b), merge(b, a)
    assert all(torch.equal(getattr(forth, n), getattr(back, n)) for n in ("m", "l", "acc"))  # commutative, exactly
    out, lse = finish(problem, merge(merge(a, b), c))
    whole, whole_lse = attend(problem)
    # the parts have references of their own, so P's tail differs: design, section 4
    assert (out - whole).norm() <= 3e-4 * whole.norm()
    torch.testing.assert_close(lse, whole_lse, atol=1e-3, rtol=0)  # as in test_tiles_do_not_matter


def test_an_empty_state_is_neutral() -> None:
    problem = as_problem(make_qkv(AttentionShape(1, 4, 2, 9, 50, 16)))
    empty, full = attend_keys(problem, range(0)), attend_keys(problem, range(50))
    assert (empty.m == -torch.inf).all()
    for merged in (merge(empty, full), merge(full, empty)):
        assert all(torch.equal(getattr(merged, n), getattr(full, n)) for n in ("m", "l", "acc"))
    both = merge(empty, empty)
    out, lse = finish(problem, both)
    assert (out == 0).all() and (lse == -torch.inf).all()


@settings(max_examples=60)
@given(
    data=qkv(shapes=shapes(min_seqlen=2, max_seqlen=150, self_attention=True, head_dims=(16,))),
    cut=st.integers(1, 149),
    magnitude=st.sampled_from([1.0, 100.0, 1e6]),
)
def test_causal_safe_never_lets_a_later_token_change_an_earlier_row(data: QKV, cut: int, magnitude: float) -> None:
    cut = min(cut, data.q.shape[2] - 1)
    changed = [x.clone() for x in data]
    for x in changed:
        x[:, :, cut:] = torch.randn_like(x[:, :, cut:]) * magnitude
    run = {"is_causal": True, "enable_gqa": True, "recipe": "causal_safe", "return_lse": True}
    before, after = fp8attn.attention(*data, **run), fp8attn.attention(*changed, **run)
    assert torch.equal(before[0][:, :, :cut], after[0][:, :, :cut])
    assert torch.equal(before[1][:, :, :cut], after[1][:, :, :cut])
    assert not torch.equal(before[0][:, :, cut:], after[0][:, :, cut:])


@settings(max_examples=40)
@given(data=qkv(shapes=shapes(max_seqlen=128, head_dims=(16,))), seed=st.integers(0, 1000))
def test_permuting_keys_and_values_together_changes_nothing(data: QKV, seed: int) -> None:
    order = torch.randperm(data.k.shape[2], generator=torch.Generator().manual_seed(seed))
    # without statistics and with scales that know no order, every code is the same; one tile, so every weight too
    run = {"recipe": Recipe(k_scale="token", smooth_k=False, balance="none"), "enable_gqa": True}
    a = fp8attn.attention(*data, **run)
    b = fp8attn.attention(data.q, data.k[:, :, order], data.v[:, :, order], **run)
    # sums of at most 128 products in FP32 in another order
    assert (a - b).norm() <= 128 * 2**-24 * a.norm() + 128 * 2**-24 * float(data.v.abs().max())


@settings(max_examples=30)
@given(data=qkv(shapes=shapes(max_seqlen=64, head_dims=(16, 48)), outliers=outlier_specs(magnitudes=(1.0, 5.0))))
def test_smoothing_changes_neither_softmax_nor_lse(data: QKV) -> None:
    """Without rounding (16-bit everything) smoothing and rotation leave attention alone, the lse's shift included."""
    plain = Recipe.from_name("bf16").replace(q_format="fp16", k_format="fp16", v_format="fp16", p_format="fp16")
    smooth = plain.replace(rotate="haar", balance="rms", smooth_k=True, smooth_v=True)
    a, a_lse = fp8attn.attention(*data, recipe=plain, enable_gqa=True, return_lse=True)
    b, b_lse = fp8attn.attention(*data, recipe=smooth, enable_gqa=True, return_lse=True)
    # FP16 rounds q and k by 2^-11 each: a logit moves by at most 2^-10 |q||k| scale, in either run
    norms = float(data.q.norm(dim=-1).max() * data.k.norm(dim=-1).max())
    logit_error = 2 * 2**-10 * norms / math.sqrt(data.q.shape[-1])
    assert (a_lse - b_lse).abs().max() <= logit_error + 1e-3
    assert (a - b).abs().max() <= 2 * (logit_error + 2**-10) * float(data.v.abs().max())


@pytest.mark.parametrize("recipe", ["default", "bf16", "causal_safe", "fa3_paper", "per_tensor"])
def test_large_values_of_either_sign_never_give_nan(recipe: str) -> None:
    data = make_qkv(AttentionShape(1, 2, 2, 4, 300, 16))
    v = (data.v * 1e38).clamp(-3.4e38, 3.4e38)
    assert not fp8attn.attention(data.q, data.k, v, recipe=recipe).isnan().any()


@pytest.mark.parametrize("cut", [1, 2, 33, 64, 100])
def test_causal_safe_gives_a_shorter_sequence_the_same_codes(cut: int) -> None:
    q, k, v = make_qkv(AttentionShape(2, 4, 2, 300, 300, 64), seed=3)
    run = {"is_causal": True, "enable_gqa": True, "recipe": "causal_safe"}
    full, short = fp8attn.attention(q, k, v, **run), fp8attn.attention(*(x[:, :, :cut] for x in (q, k, v)), **run)
    # the same codes and weights; a matrix product of another size may sum in another order: FP32, 128 terms a tile
    assert (full[:, :, :cut] - short).abs().max() <= 128 * 2**-24 * v.abs().max()


@pytest.mark.parametrize("magnitude", [1e-40, 1e-20, 1.0, 1e20, 3e38])
@pytest.mark.parametrize("recipe", ["default", "per_tensor", "causal_safe", "bf16"])
def test_finite_input_never_gives_nan(magnitude: float, recipe: str) -> None:
    data = make_qkv(AttentionShape(1, 2, 1, 20, 30, 16), outliers=OutlierSpec("massive_token", 100.0))
    q, k, v = ((x / x.abs().max()).clamp(-1, 1) * magnitude for x in data)
    out, lse = fp8attn.attention(q, k, v, recipe=recipe, enable_gqa=True, return_lse=True, sinks=torch.zeros(2))
    assert not out.isnan().any() and not lse.isnan().any()


def test_finite_mask_sentinels_are_not_minus_infinity() -> None:
    """Every logit far below a mask constant such as -5e4: the softmax is still a softmax."""
    k = torch.full((1, 1, 3, 128), 1880.0) + torch.tensor([0.0, 2.0, 4.0])[:, None]
    q = torch.full((1, 4, 1, 128), -448.0)
    v = torch.eye(3, 128)[None, None]
    quantized = fp8attn.quantize(q, k, v, "per_tensor")
    out, lse = fp8attn.attention_quantized(quantized, return_lse=True)
    expected, expected_lse = exact_attention_quantized(quantized)
    assert (expected_lse < -1e5).all()
    torch.testing.assert_close(out.double(), expected, atol=2**-5, rtol=0)  # E4M3 weights
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=0.05)


def test_masked_rows_by_kind() -> None:
    data = make_qkv(AttentionShape(1, 1, 1, 6, 10, 16))
    visible = torch.ones(6, 10, dtype=torch.bool)
    visible[-1] = False
    lowest = torch.zeros(6, 10).masked_fill(~visible, torch.finfo(torch.float32).min)
    for mask in (visible, torch.zeros(6, 10).masked_fill(~visible, -torch.inf)):
        out, lse = fp8attn.attention(*data, attn_mask=mask, return_lse=True)
        assert (out[..., -1, :] == 0).all() and (lse[..., -1] == -torch.inf).all()
        assert lse[..., :-1].isfinite().all()
    out = fp8attn.attention(*data, attn_mask=lowest)
    mean = fp8attn.quantize(*data).v.dequantize().mean(dim=2)
    torch.testing.assert_close(out[..., -1, :], mean, rtol=0, atol=1e-6)
