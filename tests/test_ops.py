"""The public functions: SDPA's meaning, layouts, strides, packed sequences, merging, and every refusal's message."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

import fp8attn
from fp8attn import Recipe
from fp8attn.scaling import quantize_tensor
from fp8attn.testing import QKV, AttentionShape, make_qkv, qkv, recipes, shapes
from fp8attn.transforms import Smoothing, make_transform

sdpa = torch.nn.functional.scaled_dot_product_attention
# Nothing narrower than FP16: what is left is 2^-11 a value, so SDPA's meaning shows, and no FP8 error hides a bug.
FINE = Recipe.from_name("bf16").replace(q_format="fp16", k_format="fp16", v_format="fp16", p_format="fp16")
DATA = make_qkv(AttentionShape(2, 6, 2, 20, 33, 16), seed=1)


def close_to_sdpa(out: torch.Tensor, expected: torch.Tensor) -> None:
    # logits of |q||k|/4 <= 10 move by 10 * 2^-10, weights by that and 2^-10, outputs of size 3 by 3 * 1.1e-2
    torch.testing.assert_close(out, expected, atol=3e-2, rtol=0)
    assert (out - expected).norm() <= 2e-3 * expected.norm() + 1e-6  # such errors are random and mostly cancel


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_means_what_sdpa_means(is_causal: bool, scale: float | None, mask: str | None) -> None:
    attn_mask = None
    if mask is not None:
        attn_mask = torch.rand(2, 1, 20, 33, generator=torch.Generator().manual_seed(3)) > 0.3
        attn_mask[..., 0] = True
    band = torch.ones(20, 33, dtype=torch.bool).tril()
    visible = band if attn_mask is None else band & attn_mask
    if mask == "float":
        attn_mask = torch.randn(2, 1, 20, 33).masked_fill(~attn_mask, -torch.inf)
        visible = attn_mask.masked_fill(~band, -torch.inf)
    out = fp8attn.attention(*DATA, attn_mask, 0.0, is_causal, scale, True, recipe=FINE)
    close_to_sdpa(out, sdpa(*DATA, visible if is_causal else attn_mask, 0.0, False, scale=scale, enable_gqa=True))


def test_three_dimensions_and_batch_broadcast() -> None:
    q, k, v = DATA.q[:, 0], DATA.k[:1, 0], DATA.v[:1, 0]
    out, lse = fp8attn.attention(q, k, v, recipe=FINE, return_lse=True)
    assert lse.shape == (2, 20)
    close_to_sdpa(out, sdpa(q, k.expand(2, -1, -1), v.expand(2, -1, -1)))
    mask = torch.ones(2, 20, 33, dtype=torch.bool).tril(5)
    close_to_sdpa(
        fp8attn.attention(q, k, v, mask, recipe=FINE), sdpa(q, k.expand(2, -1, -1), v.expand(2, -1, -1), mask)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_output_has_the_querys_dtype(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in DATA)
    out, lse = fp8attn.attention(q, k, v, enable_gqa=True, return_lse=True)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    wide = fp8attn.attention(q.float(), k.float(), v.float(), enable_gqa=True)
    assert torch.equal(out, wide.to(dtype))  # one rounding, of the result


def test_bshd_is_bhsd_transposed() -> None:
    expected, expected_lse = fp8attn.attention(*DATA, enable_gqa=True, return_lse=True)
    out, lse = fp8attn.attention(
        *(x.transpose(1, 2).contiguous() for x in DATA), enable_gqa=True, return_lse=True, layout="bshd"
    )
    assert torch.equal(out.transpose(1, 2), expected) and torch.equal(lse, expected_lse)


def variants(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same values with other strides."""
    wide = torch.full((*x.shape[:3], 2 * x.shape[3] + 3), 7.0)
    wide[..., 3::2] = x
    fused = torch.randn(x.shape[0], x.shape[2], 3, x.shape[1], x.shape[3])
    fused[:, :, 1] = x.transpose(1, 2)
    return {
        "transposed": x.transpose(1, 2).contiguous().transpose(1, 2),
        "channels strided": wide[..., 3::2],
        "slice of a fused projection": fused[:, :, 1].transpose(1, 2),
        "channels first": x.mT.contiguous().mT,
    }


@pytest.mark.parametrize("which", [0, 1, 2])
def test_strides_do_not_matter(which: int) -> None:
    expected = fp8attn.attention(*DATA, is_causal=True, enable_gqa=True)
    for name, variant in variants(list(DATA)[which]).items():
        inputs = list(DATA)
        inputs[which] = variant
        assert torch.equal(variant, list(DATA)[which])
        assert torch.equal(fp8attn.attention(*inputs, is_causal=True, enable_gqa=True), expected), name


def test_expanded_heads_equal_shared_heads() -> None:
    """The rows are quantized alike either way; balance pools other queries, so it is off."""
    recipe = Recipe(balance="none", smooth_k=False)
    k, v = (x.repeat_interleave(3, dim=1) for x in (DATA.k, DATA.v))
    shared = fp8attn.attention(*DATA, recipe=recipe, enable_gqa=True)
    torch.testing.assert_close(fp8attn.attention(DATA.q, k, v, recipe=recipe), shared, atol=1e-6, rtol=1e-6)
    one = DATA.k[:, :1].expand(-1, 6, -1, -1), DATA.v[:, :1].expand(-1, 6, -1, -1)
    mqa = fp8attn.attention(DATA.q, DATA.k[:, :1], DATA.v[:, :1], recipe=recipe, enable_gqa=True)
    torch.testing.assert_close(fp8attn.attention(DATA.q, *one, recipe=recipe), mqa, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("ratio", [1, 3, 5, 6, 7, 9, 12])
@pytest.mark.parametrize("seqlen_q", [1, 5])
def test_any_head_ratio(ratio: int, seqlen_q: int) -> None:
    data = make_qkv(AttentionShape(1, 2 * ratio, 2, seqlen_q, 19, 16), seed=ratio)
    expected = sdpa(data.q, data.k.repeat_interleave(ratio, 1), data.v.repeat_interleave(ratio, 1))
    close_to_sdpa(fp8attn.attention(*data, recipe=FINE, enable_gqa=True), expected)


@given(data=qkv(shapes=shapes(max_seqlen=20)), recipe=recipes())
def test_inputs_are_never_modified(data: QKV, recipe: Recipe) -> None:
    before = [x.clone() for x in data]
    mask = torch.zeros(data.q.shape[2], data.k.shape[2])
    sinks = torch.zeros(data.q.shape[1])
    fp8attn.attention(*data, mask, enable_gqa=True, recipe=recipe, sinks=sinks, softcap=3.0)
    assert all(torch.equal(a, b) for a, b in zip(before, data, strict=True))
    assert (mask == 0).all() and (sinks == 0).all()


def test_out_takes_the_result_with_any_strides() -> None:
    expected = fp8attn.attention(*DATA, enable_gqa=True)
    out = torch.empty(2, 20, 6, 16).transpose(1, 2)
    assert fp8attn.attention(*DATA, enable_gqa=True, out=out) is out
    assert torch.equal(out, expected)
    qkv_ = fp8attn.quantize(*DATA)
    assert fp8attn.attention_quantized(qkv_, out=out.zero_()) is out
    assert torch.equal(out, expected)


@given(data=qkv(shapes=shapes(max_seqlen=20)), recipe=recipes())
def test_quantize_once_run_many_times(data: QKV, recipe: Recipe) -> None:
    quantized = fp8attn.quantize(*data, recipe)
    direct = fp8attn.attention(*data, recipe=recipe, enable_gqa=True, return_lse=True)
    for _ in range(2):
        out, lse = fp8attn.attention_quantized(quantized, return_lse=True)
        assert torch.equal(out, direct[0]) and torch.equal(lse, direct[1])


def test_quantized_qkv_goes_to_a_file_and_back(tmp_path: Path) -> None:
    recipe = Recipe(smooth_k=True, smooth_v=True)
    quantized = fp8attn.quantize(*(x.bfloat16() for x in DATA), recipe)
    quantized.save(tmp_path / "qkv.safetensors")
    loaded = fp8attn.QuantizedQKV.load(tmp_path / "qkv.safetensors")
    assert (loaded.recipe, loaded.dtype) == (recipe, torch.bfloat16)
    a, b = (fp8attn.attention_quantized(x, sinks=torch.ones(6), return_lse=True) for x in (quantized, loaded))
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
    with pytest.raises(ValueError, match=r'metadata "fp8attn" must be "quantized-qkv-1", got "quantized-tensor-1"'):
        quantized.q.save(tmp_path / "q.safetensors")
        fp8attn.QuantizedQKV.load(tmp_path / "q.safetensors")


def test_frozen_smoothing_is_used_as_it_is() -> None:
    stats = Smoothing(k_mean=torch.full((1, 2, 1, 16), 0.5), balance=torch.full((1, 2, 1, 16), 2.0))
    out, lse = fp8attn.attention(*DATA, recipe=FINE, enable_gqa=True, smoothing=stats, return_lse=True)
    quantized = fp8attn.quantize(*DATA, FINE, smoothing=stats)
    torch.testing.assert_close(quantized.k.dequantize(), (DATA.k - 0.5) / 2, atol=2**-10, rtol=2**-10)
    torch.testing.assert_close(quantized.logit_shift, 0.5 * DATA.q.sum(-1), atol=1e-5, rtol=1e-5)
    close_to_sdpa(out, sdpa(*DATA, enable_gqa=True))
    logits = 0.25 * DATA.q @ DATA.k.repeat_interleave(3, 1).mT
    torch.testing.assert_close(lse, logits.logsumexp(-1), atol=1e-2, rtol=0)  # FP16 logits, as above
    with pytest.raises(ValueError, match=r"smoothing.k_mean must have shape \(2, 2, 1, 16\) or \(1, 2, 1, 16\)"):
        fp8attn.attention(*DATA, enable_gqa=True, smoothing=Smoothing(k_mean=torch.zeros(2, 3, 1, 16)))


@pytest.mark.parametrize(
    "given", [Smoothing(), Smoothing(balance=torch.full((1, 2, 1, 16), 2.0))], ids=["none", "some"]
)
def test_what_frozen_smoothing_lacks_is_not_fitted(given: Smoothing) -> None:
    recipe = Recipe(smooth_k=True, smooth_v=True)
    quantized = fp8attn.quantize(*DATA, recipe, smoothing=given)
    assert quantized.logit_shift is None and quantized.v_mean is None
    balance = given.balance if given.balance is not None else torch.ones(1)
    expected = make_transform(recipe.rotate, 16, seed=recipe.seed).apply(DATA.k / balance)
    # 2^-4 of a code's value, and of E4M3's smallest normal under the block's scale
    assert ((quantized.k.dequantize() - expected).abs() <= expected.abs() / 16 + quantized.k.scale * 2**-10).all()


def test_windows_count_inclusively() -> None:
    q, k = torch.zeros(1, 1, 10, 16), torch.zeros(1, 1, 10, 16)
    v = torch.eye(10, 16)[None, None]

    def seen(**options: Any) -> list[list[int]]:
        weights = fp8attn.attention(q, k, v, recipe=FINE, **options)[0, 0]
        return [row.nonzero().flatten().tolist() for row in weights]

    for width in (1, 2, 4, 9, 10, 11):
        expected = [list(range(max(0, i - width + 1), i + 1)) for i in range(10)]
        assert seen(window=(width - 1, 0)) == expected == seen(window=(width - 1, -1), is_causal=True)
    assert seen(window=(1, 2)) == [[j for j in range(10) if i - 1 <= j <= i + 2] for i in range(10)]
    assert seen(window=(-1, -1)) == seen()


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(2, 5), (5, 2), (3, 128), (1, 40)])
def test_causal_alignments(seqlen_q: int, seqlen_k: int) -> None:
    data = make_qkv(AttentionShape(1, 1, 1, seqlen_q, seqlen_k, 16))
    for alignment, diagonal in (("top_left", 0), ("bottom_right", seqlen_k - seqlen_q)):
        visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).tril(diagonal)
        out, lse = fp8attn.attention(*data, is_causal=True, causal_alignment=alignment, recipe=FINE, return_lse=True)
        close_to_sdpa(out, sdpa(*data, visible).nan_to_num())
        empty = ~visible.any(-1)
        assert (out[..., empty, :] == 0).all() and (lse[..., empty] == -torch.inf).all()
        assert int(empty.sum()) == (max(0, seqlen_q - seqlen_k) if alignment == "bottom_right" else 0)


@pytest.mark.parametrize(
    "sizes", [(0, 6, 2, 20, 33), (2, 6, 2, 0, 33), (2, 6, 2, 20, 0), (2, 6, 2, 0, 0), (1, 0, 0, 4, 4)]
)
def test_empty_problems(sizes: tuple[int, ...]) -> None:
    data = make_qkv(AttentionShape(*sizes, 16, 24))
    for recipe in ("default", "causal_safe", "per_tensor", Recipe(smooth_k=True, smooth_v=True)):
        out, lse = fp8attn.attention(*data, recipe=recipe, enable_gqa=True, is_causal=True, return_lse=True)
        assert out.shape == (*sizes[:2], sizes[3], 24)
        assert (out == 0).all() and (lse == -torch.inf).all()
    if sizes[4] == 0 and sizes[1]:
        sinks = torch.arange(6.0)
        _, lse = fp8attn.attention(*data, enable_gqa=True, sinks=sinks, return_lse=True)
        assert (lse == sinks[:, None]).all()


def test_softcap_acts_on_true_logits_before_the_mask() -> None:
    big = make_qkv(AttentionShape(1, 2, 2, 8, 8, 16))
    q = big.q * 5
    logits = 0.25 * q @ big.k.mT
    for cap in (5.0, 50.0):
        expected = (cap * torch.tanh(logits / cap)).masked_fill(~torch.ones(8, 8).tril().bool(), -torch.inf)
        out = fp8attn.attention(q, big.k, big.v, is_causal=True, softcap=cap, recipe=FINE)
        torch.testing.assert_close(out, expected.softmax(-1) @ big.v, atol=3e-2, rtol=0)  # as close_to_sdpa
    off = fp8attn.attention(q, big.k, big.v, recipe=FINE)
    assert torch.equal(fp8attn.attention(q, big.k, big.v, softcap=0, recipe=FINE), off)
    assert not torch.allclose(fp8attn.attention(q, big.k, big.v, softcap=5.0, recipe=FINE), off, atol=0.1)


def test_a_sink_takes_weight_and_joins_the_lse() -> None:
    sinks = torch.tensor([-torch.inf, 0.0, 1.0, 5.0, 100.0, -100.0])
    for recipe in (FINE, FINE.replace(smooth_k=True)):
        out, lse = fp8attn.attention(*DATA, sinks=sinks, recipe=recipe, enable_gqa=True, return_lse=True)
        plain, plain_lse = fp8attn.attention(*DATA, recipe=recipe, enable_gqa=True, return_lse=True)
        expected_lse = torch.logaddexp(plain_lse, sinks[:, None])
        torch.testing.assert_close(lse, expected_lse, atol=2e-3, rtol=1e-6)  # 2^-11 of P's sum, and FP32
        torch.testing.assert_close(out, plain * (plain_lse - expected_lse).exp()[..., None], atol=1e-3, rtol=2e-3)


# ---- what surrounds a call


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seqlen", [1, 2, 40])
def test_autocast_does_not_apply(dtype: torch.dtype, seqlen: int) -> None:
    data = make_qkv(AttentionShape(1, 2, 2, seqlen, seqlen, 64))
    expected = fp8attn.attention(*data, is_causal=True)
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(fp8attn.attention(*data, is_causal=True), expected)
        quantized = fp8attn.quantize(*data, is_causal=True)
        assert torch.equal(fp8attn.attention_quantized(quantized, is_causal=True), expected)


def test_the_callers_defaults_and_random_state_do_not_matter() -> None:
    expected = fp8attn.attention(*DATA, is_causal=True, window=(5, 0), enable_gqa=True)
    state = torch.random.get_rng_state()
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        out = fp8attn.attention(*DATA, is_causal=True, window=(5, 0), enable_gqa=True)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert torch.equal(out, expected)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_fake_mode_leaves_nothing_behind() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    transform = make_transform("haar", 24, seed=77)
    with FakeTensorMode(), contextlib.suppress(AssertionError):  # real and fake tensors do not mix
        transform.matrix()
    assert type(transform.matrix()) is torch.Tensor
    assert type(transform.apply(torch.ones(2, 24))) is torch.Tensor


# ---- masks and quantized values


def test_a_light_key_is_not_a_hidden_one() -> None:
    """A very negative mask hides nothing from a row that sees nothing else."""
    ones = torch.ones(1, 1, 4, 16)
    mask = torch.tensor([torch.finfo(torch.float32).min, 0, 0, 0]).expand(4, 4)
    for options in ({"is_causal": True}, {"window": (0, 0)}):
        assert (fp8attn.attention(ones, ones, ones, mask, **options) == 1).all()


def test_an_expanded_mask_means_what_its_parts_do() -> None:
    mask = torch.rand(33, generator=torch.Generator().manual_seed(5)) > 0.5
    whole = mask.expand(2, 6, 20, 33)
    expected = fp8attn.attention(*DATA, whole.clone(), enable_gqa=True)
    assert torch.equal(fp8attn.attention(*DATA, whole, enable_gqa=True), expected)
    assert torch.equal(fp8attn.attention(*DATA, mask.view(1, 1, 1, -1), enable_gqa=True), expected)


@pytest.mark.parametrize("additive", [False, True])
def test_keys_left_out_when_quantizing_stay_out(additive: bool) -> None:
    mask = torch.ones(2, 1, 1, 33, dtype=torch.bool)
    mask[0, ..., 20:] = False
    quantized = fp8attn.quantize(*DATA, attn_mask=mask)
    expected = fp8attn.attention(*DATA, mask, enable_gqa=True)
    assert torch.equal(fp8attn.attention_quantized(quantized), expected)
    later = torch.zeros(20, 33) if additive else torch.ones(20, 33, dtype=torch.bool)
    assert torch.equal(fp8attn.attention_quantized(quantized, later), expected)


@pytest.mark.parametrize("options", [{"is_causal": True}, {"window": (-1, 0)}])
def test_keys_out_of_reach_when_quantizing_stay_out(options: dict[str, Any]) -> None:
    q = DATA.q[:, :, :3]
    beyond = fp8attn.quantize(q, DATA.k, DATA.v, FINE, **options)
    within = fp8attn.quantize(q, DATA.k[:, :, :3], DATA.v[:, :, :3], FINE)
    assert torch.equal(fp8attn.attention_quantized(beyond), fp8attn.attention_quantized(within))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.int8}, "dtype must be float32, bfloat16 or float16, got torch.int8"),
        ({"logit_shift": torch.zeros(2, 6, 20, dtype=torch.int32)}, "logit_shift must be torch.float32 of shape"),
        ({"logit_shift": torch.zeros(2, 6, 19)}, r"logit_shift must be torch.float32 of shape \(2, 6, 20\), got"),
        ({"v_mean": torch.zeros(2, 2, 1, 16).half()}, "v_mean must be torch.float32 of shape"),
        ({"keys_in_use": torch.zeros(2, 32, dtype=torch.bool)}, "keys_in_use must be torch.bool of shape"),
        ({"recipe": Recipe.from_name("bf16")}, "q must be bf16 by tensor, as its recipe says, got e4m3 by token"),
        ({"k": quantize_tensor(DATA.k, "e5m2", "block")}, "k must be e4m3 by block"),
        ({"k": quantize_tensor(DATA.k, "e4m3", "channel")}, "got e4m3 by channel"),
        ({"q": quantize_tensor(DATA.q[:, :5], "e4m3", "token")}, "must be a multiple of num_kv_heads, got 5 and 2"),
        ({"q": quantize_tensor(DATA.q[0], "e4m3", "token")}, r"q must have 4 dimensions \(B, H, S, D\)"),
        ({"q": quantize_tensor(DATA.q[..., :0], "e4m3", "token")}, "head_dim must be at least 1"),
        ({"v": quantize_tensor(DATA.v[:, :, :9], "e4m3", "channel")}, r"v.codes must be of shape \(2, 2, 33, 16\)"),
    ],
    ids=lambda x: str(x)[:40] if isinstance(x, str) else "",
)
def test_a_quantized_value_fits_together_or_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(fp8attn.quantize(*DATA), **change)


def test_a_file_that_lost_a_part_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "qkv.safetensors"
    fp8attn.quantize(*DATA, Recipe(smooth_k=True)).save(path)
    with safe_open(path, "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name in tensors:
        save_file({key: value for key, value in tensors.items() if key != name}, path, metadata)
        with pytest.raises(ValueError, match=r"qkv.safetensors: "):
            fp8attn.QuantizedQKV.load(path)
    for key in ("recipe", "dtype", "q.format", "v.granularity", "extras"):
        save_file(tensors, path, {**metadata, key: "[" * 100_000})
        with pytest.raises(ValueError, match=r"qkv.safetensors: "):
            fp8attn.QuantizedQKV.load(path)


# ---- packed sequences

LENGTHS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5)


@given(lengths=LENGTHS, is_causal=st.booleans(), alignment=st.sampled_from(["top_left", "bottom_right"]))
def test_packed_sequences_get_what_they_get_alone(
    lengths: list[tuple[int, int]], is_causal: bool, alignment: str
) -> None:
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0) for n in zip(*lengths, strict=True))
    g = torch.Generator().manual_seed(len(lengths))
    q = torch.randn(int(cu_q[-1]), 6, 16, generator=g)
    k, v = torch.randn(int(cu_k[-1]), 2, 16, generator=g), torch.randn(int(cu_k[-1]), 2, 24, generator=g)
    options = {"is_causal": is_causal, "causal_alignment": alignment, "return_lse": True}
    out, lse = fp8attn.attention_varlen(q, k, v, cu_q.int(), cu_k, **options)
    assert out.shape == (len(q), 6, 24) and lse.shape == (6, len(q))
    for n in range(len(lengths)):
        a, b = slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n + 1])
        alone, alone_lse = fp8attn.attention(
            q[a].transpose(0, 1)[None],
            k[b].transpose(0, 1)[None],
            v[b].transpose(0, 1)[None],
            enable_gqa=True,
            **options,
        )
        assert torch.equal(out[a], alone[0].transpose(0, 1)) and torch.equal(lse[:, a], alone_lse[0])


def test_varlen_is_bottom_right_by_default() -> None:
    q, k, v = torch.randn(2, 1, 16), torch.randn(5, 1, 16), torch.randn(5, 1, 16)
    cu_q, cu_k = torch.tensor([0, 2]), torch.tensor([0, 5])
    out = fp8attn.attention_varlen(q, k, v, cu_q, cu_k, is_causal=True, recipe=FINE)
    mask = torch.ones(2, 5, dtype=torch.bool).tril(3)
    close_to_sdpa(out[:, 0], sdpa(q[None, :, 0], k[None, :, 0], v[None, :, 0], mask)[0])


# ---- merging


@given(parts=st.integers(1, 4), seed=st.integers(0, 1000), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_merge_states_is_attention_over_all_keys(parts: int, seed: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(seed)
    logits, v = torch.randn(2, 3, 5, 12, generator=g) * 5, torch.randn(2, 3, 12, 8, generator=g)
    pieces = [(s.softmax(-1) @ x, s.logsumexp(-1)) for s, x in zip(
        logits.chunk(parts, -1), v.chunk(parts, -2), strict=True)]  # fmt: skip
    outs, lses = [o.to(dtype) for o, _ in pieces], [lse for _, lse in pieces]
    out, lse = fp8attn.merge_states(outs, lses)
    # each part is rounded once, and so is the result; a weight is the exp of a difference of two FP32 lses
    eps = torch.finfo(dtype).eps + 2**-22 * float(lse.abs().max())
    torch.testing.assert_close(out.float(), logits.softmax(-1) @ v, atol=2 * eps * float(v.abs().max()), rtol=0)
    torch.testing.assert_close(lse, logits.logsumexp(-1), atol=1e-5, rtol=1e-6)
    back, back_lse = fp8attn.merge_states(outs[::-1], lses[::-1])
    torch.testing.assert_close(back, out, atol=2 * eps * float(v.abs().max()), rtol=0)
    torch.testing.assert_close(back_lse, lse, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_merging_empty_states(dtype: torch.dtype) -> None:
    inf = torch.inf
    some, garbage = torch.full((1, 64), 3.0, dtype=dtype), torch.full((1, 64), torch.nan, dtype=dtype)
    for a, b, expected, value in ((-inf, -inf, -inf, 0.0), (-inf, 1.0, 1.0, 3.0), (inf, 1.0, 1.0, 3.0)):
        for order in ((0, 1), (1, 0)):
            outs = [garbage, some if b == 1.0 else garbage]
            lses = [torch.tensor([a]), torch.tensor([b])]
            out, lse = fp8attn.merge_states([outs[i] for i in order], [lses[i] for i in order])
            assert (out == value).all() and lse.item() == expected
    out, lse = fp8attn.merge_states([some, torch.zeros_like(some)], [torch.tensor([0.0]), torch.tensor([2.0])])
    assert lse.item() == pytest.approx(2.1269, abs=1e-4)  # a sink of 2 as a part: ln(1 + e^2)
    assert out[0, 0].item() == pytest.approx(3 / (1 + torch.e**2), rel=2 * torch.finfo(dtype).eps)


# ---- refusals

Q, K, V = DATA
NO_TOKENS = torch.zeros(0, 2, 16)
NO_SEQUENCES = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.tensor([0]))


def call(*args: Any, **options: Any) -> Callable[[], Any]:
    return lambda: fp8attn.attention(*args, **{"enable_gqa": True, **options})


def varlen(**changes: Any) -> Callable[[], Any]:
    tokens = torch.zeros(6, 2, 16)
    args = {"query": tokens, "key": tokens, "value": tokens}
    args |= {"cu_seqlens_q": torch.tensor([0, 6]), "cu_seqlens_k": torch.tensor([0, 6])}
    return lambda: fp8attn.attention_varlen(**(args | changes))


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (call(Q, K, V, dropout_p=0.1), ValueError, r"dropout_p must be 0, got 0.1: FP8 attention is for inference"),
        (call(Q.clone().requires_grad_(), K, V), ValueError, r"query requires a gradient .* torch.no_grad\(\)"),
        (call(Q, K, V.clone().requires_grad_()), ValueError, "value requires a gradient"),
        (call(Q.double(), K, V), TypeError, "query must be float32, bfloat16 or float16, got torch.float64"),
        (call(Q, K.long(), V), TypeError, "key must be float32, bfloat16 or float16, got torch.int64"),
        (
            call(Q, K.to(torch.float8_e4m3fn), V),
            TypeError,
            r"float8_e4m3fn; quantized .* fp8attn.attention_q",
        ),
        (call(Q, K.to(torch.uint8), V), TypeError, "got torch.uint8; quantized inputs go to"),
        (call(Q, K.half(), V), TypeError, "must have one dtype, got torch.float32 and key torch.float16"),
        (call(Q, K, None), TypeError, "value must be a torch.Tensor, got NoneType"),
        (call(Q, K.to("meta"), V), ValueError, "must be on one device, got cpu, key meta"),
        (call(Q[0, 0], K[0, 0], V[0, 0]), ValueError, r"must all have 4 dimensions \(B, H, S, D\), or all 3"),
        (call(Q, K[0], V), ValueError, r"got key \(2, 33, 16\) and query \(2, 6, 20, 16\)"),
        (call(Q, K, V, layout="sbhd"), ValueError, r"layout must be one of \('bhsd', 'bshd'\), got 'sbhd'"),
        (
            call(Q.repeat(2, 1, 1, 1)[:3], K, V),
            ValueError,
            "batch sizes must agree or be 1, got query 3, key 2",
        ),
        (call(Q, K, V[:, :, :5]), ValueError, "key and value must agree in heads and length, got 2 heads of 33 tokens"),
        (call(Q, K, V[:, :1]), ValueError, "and 1 of 33"),
        (call(Q[..., :8], K, V), ValueError, "query and key must have one head_dim, got 8 and 16"),
        (call(Q[..., :0], K[..., :0], V), ValueError, "head_dim must be at least 1, got query 0 and value 16"),
        (call(Q[:, :5], K, V), ValueError, "num_q_heads must be a multiple of num_kv_heads, got 5 and 2"),
        (call(Q[:, :1], K, V), ValueError, "num_q_heads must be a multiple of num_kv_heads, got 1 and 2"),
        (call(Q, K[:, :0], V[:, :0]), ValueError, "num_q_heads must be a multiple of num_kv_heads, got 6 and 0"),
        (call(Q, K, V, enable_gqa=False), ValueError, "query has 6 heads and key 2; pass enable_gqa=True"),
        (
            call(Q, K, V, causal_alignment="lower_right"),
            ValueError,
            "causal_alignment must be one of",
        ),
        (call(Q, K, V, window=4), ValueError, r"window must be \(left, right\).* \(W - 1, 0\); got 4"),
        (call(Q, K, V, window=(1, 2, 3)), ValueError, r"window must be \(left, right\)"),
        (call(Q, K, V, window=(-2, 0)), ValueError, r"-1 for no limit; .*got \(-2, 0\)"),
        (call(Q, K, V, window=(1.0, 0)), ValueError, r"window must be \(left, right\)"),
        (call(Q, K, V, scale=float("nan")), ValueError, "scale must be finite and at most 1e.30, got nan"),
        (call(Q, K, V, scale=10**400), ValueError, "scale must be finite and at most"),
        (call(Q, K, V, softcap="a"), TypeError, "softcap must be a number, got str"),
        (call(Q, K, V, is_causal="no"), TypeError, "is_causal must be a bool, got 'no'"),
        (call(Q, K, V, sinks=torch.zeros(6, requires_grad=True)), ValueError, "sinks requires a gradient"),
        (call(Q, K, V, torch.zeros(20, 33, requires_grad=True)), ValueError, "attn_mask requires a gradient"),
        (call(Q, K, V, out=torch.zeros(2, 6, 20, 16, requires_grad=True)), ValueError, "out requires a gradient"),
        (call(Q, K, V, smoothing=1), TypeError, "smoothing must be a fp8attn.transforms.Smoothing, got int"),
        (call(Q, K, V, smoothing=Smoothing(balance=torch.ones(1, 2, 1, 16, device="meta"))), ValueError, "got meta"),
        (lambda: Smoothing(balance=torch.zeros(1, 2, 1, 16)), ValueError, "balance must lie between"),
        (lambda: Smoothing(k_mean=torch.full((1, 2, 1, 16), torch.inf)), ValueError, "k_mean must be finite"),
        (call(Q, K, V, scale="1"), TypeError, "scale must be a number, got str"),
        (
            call(Q, K, V, softcap=-1.0),
            ValueError,
            "finite and positive, or None or 0 for none, got -1.0",
        ),
        (call(Q, K, V, softcap=float("inf")), ValueError, "softcap must be finite and positive"),
        (call(Q, K, V, softcap=float("nan")), ValueError, "softcap must be finite and positive"),
        (call(Q, K, V, sinks=torch.zeros(2)), ValueError, r"sinks must be a floating tensor of shape .* = \(6,\), got"),
        (call(Q, K, V, sinks=torch.zeros(6, device="meta")), ValueError, "sinks must be on cpu, got meta"),
        (call(Q, K, V, torch.zeros(20, 32)), ValueError, r"broadcastable to \(B, Hq, Sq, Sk\) = \(2, 6, 20, 33\), got"),
        (
            call(Q, K, V, torch.zeros(20, 33).long()),
            TypeError,
            "attn_mask must be boolean or floating, got torch.int64",
        ),
        (call(Q, K, V, [1.0]), TypeError, "attn_mask must be a torch.Tensor, got list"),
        (call(Q, K, V, torch.zeros(20, 33, device="meta")), ValueError, "attn_mask must be on cpu, got meta"),
        (call(Q, K, V, recipe="best"), ValueError, "unknown recipe 'best'; accepted: default"),
        (call(Q, K, V, recipe=None), TypeError, "recipe must be a Recipe or a preset's name"),
        (call(Q, K, V, backend="cuda"), ValueError, "backend must be one of auto, triton, reference"),
        (
            call(Q, K, V, out=torch.zeros(2, 6, 20, 15)),
            ValueError,
            r"out must be \(2, 6, 20, 16\) torch.float32",
        ),
        (call(Q, K, V, out=torch.zeros(2, 6, 20, 16).half()), ValueError, "got .* torch.float16 on cpu"),
        (call(Q[..., :13], K[..., :13], V), ValueError, r"13.*(12|16).*haar"),
        (lambda: fp8attn.attention_quantized(Q), TypeError, "qkv must be a QuantizedQKV as fp8attn.quantize makes it"),
        (lambda: fp8attn.merge_states([], []), ValueError, "at least one, got 0 and 0"),
        (lambda: fp8attn.merge_states([Q, Q[:1]], [Q[..., 0]] * 2), ValueError, "outs must have one shape and dtype"),
        (lambda: fp8attn.merge_states([Q], [Q]), ValueError, r"lses\[0\] must have shape \(2, 6, 20\), got"),
        (
            varlen(query=torch.zeros(1, 6, 2, 16)),
            ValueError,
            "query must have 3 dimensions",
        ),
        (lambda: fp8attn.merge_states([Q.long()], [Q[..., 0]]), ValueError, "outs must be floating tensors"),
        (lambda: fp8attn.merge_states([Q[0, 0, 0, 0]], [Q]), ValueError, "outs must be floating tensors"),
        (
            varlen(query=NO_TOKENS, cu_seqlens_q=torch.tensor([0, 0]), recipe="nope"),
            ValueError,
            "unknown recipe 'nope'",
        ),
        (
            varlen(**dict.fromkeys(("query", "key", "value"), NO_TOKENS), backend="nope", **NO_SEQUENCES),
            ValueError,
            "backend must be one of auto",
        ),
        (varlen(cu_seqlens_q=[0, 6]), TypeError, "cu_seqlens_q must be an int32 or int64 tensor, got list"),
        (
            varlen(cu_seqlens_q=torch.tensor([0.0, 6])),
            TypeError,
            "cu_seqlens_q must be an int32 or int64 tensor",
        ),
        (varlen(cu_seqlens_q=torch.tensor([[0, 6]])), ValueError, r"cu_seqlens_q must have shape \(sequences \+ 1,\)"),
        (varlen(cu_seqlens_k=torch.tensor([0, 5])), ValueError, r"cu_seqlens_k must start at 0, never fall and end at"),
        (varlen(cu_seqlens_k=torch.tensor([0, 4, 3, 6])), ValueError, "never fall"),
        (varlen(cu_seqlens_k=torch.tensor([0, 3, 6])), ValueError, "must list as many sequences, got 1 and 2"),
    ],
    ids=lambda x: str(x)[:50] if isinstance(x, str) else "",
)
def test_bad_input_gets_a_clear_error(bad: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        bad()


def test_gradients_are_allowed_where_none_are_asked_for() -> None:
    q = Q.clone().requires_grad_()
    with torch.no_grad():
        assert not fp8attn.attention(q, K, V, enable_gqa=True).requires_grad
    with torch.inference_mode():
        fp8attn.attention(q, K, V, enable_gqa=True)
