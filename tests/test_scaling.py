"""Quantizers: scale choice, granularity, static scales, files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from fp8attn.formats import E4M3, FORMATS
from fp8attn.scaling import TOKEN_ORDER, Granularity, QuantizationWarning, QuantizedTensor, ceil_pow2, quantize_tensor
from fp8attn.testing import scales

GRANULARITIES = ("tensor", "head", "block", "block:7", "token", "channel")
TINY = torch.finfo(torch.float32).tiny


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def groups(x: torch.Tensor, granularity: str) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
    """Every group of a (B, H, S, D) tensor with the index of its scale, by plain loops."""
    found = []
    size = Granularity.parse(granularity).size
    if granularity == "tensor":
        return [(x, (0, 0, 0, 0))]
    for b in range(x.shape[0]):
        for h in range(x.shape[1]):
            one = x[b, h]
            if granularity == "head":
                found.append((one, (b, h, 0, 0)))
            elif granularity == "token":
                found += [(one[i], (b, h, i, 0)) for i in range(len(one))]
            elif granularity == "channel":
                found += [(one[:, i], (b, h, 0, i)) for i in range(one.shape[1])]
            else:
                found += [(one[i : i + size], (b, h, i // size, 0)) for i in range(0, len(one), size)]
    return found


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("seqlen", [1, 7, 130])
def test_scales_are_each_groups_largest_over_the_formats(granularity: str, seqlen: int) -> None:
    x = randn(2, 3, seqlen, 16)
    quantized = quantize_tensor(x, "e4m3", granularity)
    pairs = groups(x, granularity)
    assert quantized.scale.numel() == len(pairs)
    assert quantized.scale.shape == Granularity.parse(granularity).scale_shape(x.shape)
    for group, index in pairs:
        assert quantized.scale[index] == group.abs().max() / 448
    values = quantized.dequantize()
    for (group, index), (value, _) in zip(pairs, groups(values, granularity), strict=True):
        torch.testing.assert_close(value, E4M3.round(group / quantized.scale[index]) * quantized.scale[index])


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_largest_value_of_a_group_is_exact(granularity: str) -> None:
    x = randn(1, 2, 60, 16, seed=3)
    values = quantize_tensor(x, "e4m3", granularity).dequantize()
    for (group, _), (value, _) in zip(groups(x, granularity), groups(values, granularity), strict=True):
        at = group.abs().flatten().argmax()
        # one division and one product in FP32: 2 roundings of 2^-24, the code in between is 448 exactly
        torch.testing.assert_close(value.flatten()[at], group.flatten()[at], rtol=2**-22, atol=0)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-100, 100), granularity=st.sampled_from(GRANULARITIES))
def test_error_bound_per_code(fmt: str, seed: int, exponent: int, granularity: str) -> None:
    x = (randn(1, 2, 20, 8, seed=seed) ** 3 * 2.0**exponent).contiguous()
    quantized = quantize_tensor(x, fmt, granularity)
    f, scale = FORMATS[fmt], quantized.expanded_scale()
    # half a step of the code, plus the roundings of x / scale and code * scale (2^-23 of x together)
    bound = torch.maximum(x.abs() * f.eps / 2, scale * (f.smallest_subnormal / 2)) + x.abs() * 2**-22
    assert ((quantized.dequantize() - x).abs() <= bound).all()


@given(
    seed=st.integers(0, 2**32 - 1),
    exponent=st.integers(-60, 60),
    granularity=st.sampled_from(GRANULARITIES),
    mode=st.sampled_from(["fp32", "pow2"]),
)
def test_scaling_by_a_power_of_two_changes_no_code(seed: int, exponent: int, granularity: str, mode: str) -> None:
    x = randn(1, 2, 20, 8, seed=seed)
    a = quantize_tensor(x, "e4m3", granularity, scale_mode=mode)
    b = quantize_tensor(x * 2.0**exponent, "e4m3", granularity, scale_mode=mode)
    assert torch.equal(a.codes.view(torch.uint8), b.codes.view(torch.uint8))
    assert torch.equal(a.scale * 2.0**exponent, b.scale)


@given(seed=st.integers(0, 2**32 - 1))
def test_power_of_two_scales_make_granularity_irrelevant_up_to_underflow(seed: int) -> None:
    """Between power-of-two scales only values that are subnormal under the coarsest one can differ."""
    x = randn(1, 2, 40, 16, seed=seed)
    values = {g: quantize_tensor(x, "e4m3", g, scale_mode="pow2") for g in GRANULARITIES}
    coarse = values["tensor"]
    normal = (x / coarse.scale).abs() >= E4M3.smallest_normal
    assert normal.any()
    for quantized in values.values():
        assert torch.equal(quantized.dequantize()[normal], coarse.dequantize()[normal])


@given(seed=st.integers(0, 2**32 - 1), scale=scales(min_exponent=-40, max_exponent=40, powers_of_two=True))
def test_quantizing_twice_changes_nothing(seed: int, scale: float) -> None:
    x = randn(3, 50, 8, seed=seed) * scale
    once = quantize_tensor(x, "e4m3", "token", scale_mode="pow2").dequantize()
    assert torch.equal(quantize_tensor(once, "e4m3", "token", scale_mode="pow2").dequantize(), once)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_negated_input_gives_negated_values(granularity: str) -> None:
    x = randn(1, 2, 30, 16)
    assert torch.equal(
        quantize_tensor(-x, "e4m3", granularity).dequantize(), -quantize_tensor(x, "e4m3", granularity).dequantize()
    )


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("mode", ["fp32", "pow2"])
@pytest.mark.parametrize("fill", [0.0, 1e-45, 1e-40, 3.2e38])
def test_scales_are_finite_and_positive_whatever_the_input(granularity: str, mode: str, fill: float) -> None:
    x = torch.full((1, 2, 20, 4), fill)
    quantized = quantize_tensor(x, "e4m3", granularity, scale_mode=mode)
    assert ((quantized.scale >= TINY) & quantized.scale.isfinite()).all()
    assert quantized.dequantize().isfinite().all()
    if fill == 0.0:
        assert (quantized.scale == 1).all() and (quantized.dequantize() == 0).all()


def test_a_zero_block_leaves_its_neighbours_alone() -> None:
    x = torch.zeros(1, 1, 256, 256)
    x[0, 0, 128:, :128] = randn(128, 128)
    for granularity in ("block", "channel", "token"):
        quantized = quantize_tensor(x, "e4m3", granularity)
        zero = x == 0
        assert (quantized.dequantize()[zero] == 0).all()
        alone = quantize_tensor(x[:, :, 128:, :128], "e4m3", granularity)
        assert torch.equal(quantized.dequantize()[:, :, 128:, :128], alone.dequantize())


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_nan_stays_where_it_is_and_infinity_saturates(granularity: str) -> None:
    x = randn(1, 1, 20, 4)
    clean = quantize_tensor(x, "e4m3", granularity).scale
    x[0, 0, 3, 1], x[0, 0, 9, 2] = torch.nan, -torch.inf
    quantized = quantize_tensor(x, "e4m3", granularity)
    values = quantized.dequantize()
    assert values.isnan().nonzero().tolist() == [[0, 0, 3, 1]]
    assert quantized.codes.float()[0, 0, 9, 2] == -448
    assert (quantized.scale <= clean).all()  # neither raises a scale


@pytest.mark.parametrize("shape", [(0, 4), (3, 0, 8), (2, 0, 5, 8), (0, 2, 5, 8)])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_empty_tensors(shape: tuple[int, ...], granularity: str) -> None:
    quantized = quantize_tensor(torch.zeros(shape), "e4m3", granularity)
    assert quantized.dequantize().shape == shape


def test_strided_and_expanded_inputs_give_the_contiguous_answer() -> None:
    base = randn(2, 50, 3, 32)
    x = base.transpose(1, 2)[..., ::2]
    for granularity in GRANULARITIES:
        a, b = quantize_tensor(x, "e4m3", granularity), quantize_tensor(x.contiguous(), "e4m3", granularity)
        assert torch.equal(a.codes.view(torch.uint8), b.codes.view(torch.uint8)) and torch.equal(a.scale, b.scale)
        one = quantize_tensor(base[:1].expand(4, -1, -1, -1), "e4m3", granularity)
        assert torch.equal(one.dequantize()[3], one.dequantize()[0])


def test_16_bit_formats_are_not_scaled() -> None:
    x = randn(2, 8) * 100
    assert torch.equal(quantize_tensor(x, "bf16", "head").dequantize(), x.bfloat16().float())


def test_fp16_is_scaled_and_so_clips_nothing() -> None:
    x = randn(2, 8) * 1e7
    torch.testing.assert_close(quantize_tensor(x, "fp16", "head").dequantize(), x, rtol=2**-11 + 2**-22, atol=0)


def test_a_block_may_be_longer_than_the_sequence() -> None:
    x = randn(1, 2, 40, 8)
    for size in (41, 10**9, 10**30):
        quantized = quantize_tensor(x, "e4m3", f"block:{size}")
        assert torch.equal(quantized.dequantize(), quantize_tensor(x, "e4m3", "head").dequantize())


@pytest.mark.parametrize("seqlen", [0, 1, 15, 16, 33])
@pytest.mark.parametrize("fmt", ["e4m3", "int8", "fp16"])
def test_layouts_hold_the_same_value(fmt: str, seqlen: int, tmp_path: Path) -> None:
    rows = quantize_tensor(randn(2, 3, seqlen, 8), fmt, "token")
    permuted = rows.to_layout("permuted_columns")
    assert permuted.shape == rows.shape == (2, 3, seqlen, 8)
    assert permuted.codes.shape == (2, 3, 8, -(-seqlen // 16) * 16) and permuted.codes.is_contiguous()
    padded = torch.nn.functional.pad(rows.codes.float(), (0, 0, 0, -seqlen % 16))
    for position in range(padded.shape[-2]):  # straight from the definition
        token = position // 16 * 16 + TOKEN_ORDER[position % 16]
        assert torch.equal(permuted.codes[..., position].float(), padded[..., token, :])
    for same in (permuted.to_layout("rows"), permuted.to("cpu").to_layout("rows")):
        assert torch.equal(same.codes.view(torch.int8), rows.codes.view(torch.int8)) and same.seqlen is None
    assert torch.equal(permuted.dequantize(), rows.dequantize())
    permuted.save(tmp_path / "x.safetensors")
    loaded = QuantizedTensor.load(tmp_path / "x.safetensors")
    assert loaded.layout == "rows" and torch.equal(loaded.dequantize(), rows.dequantize())


def test_layouts_are_checked() -> None:
    rows = quantize_tensor(randn(20, 8), "e4m3", "token")
    for layout, seqlen in (("columns", 20), ("rows", 20), ("permuted_columns", None)):
        with pytest.raises(ValueError, match="layout must be one of"):
            QuantizedTensor(rows.codes, rows.scale, rows.format, rows.granularity, None, layout, seqlen)
    with pytest.raises(ValueError, match=r"codes of 20 tokens must be padded to 16, got shape \(8, 20\)"):
        QuantizedTensor(rows.codes.T, rows.scale, rows.format, rows.granularity, None, "permuted_columns", 20)


def test_static_scale_counts_and_warns() -> None:
    x = torch.tensor([[448.0, 464.0, 465.0, -1e4, 1e-4, 0.0, torch.inf, 1.0]])
    with pytest.warns(QuantizationWarning, match="clipped 2 and flushed to zero 1 of 7 non-zero values"):
        quantized = quantize_tensor(x, "e4m3", "tensor", scale=1.0)
    counts = quantized.clip_counts()
    assert counts is not None
    assert (counts.saturated, counts.underflowed, counts.total) == (2, 1, 8)
    assert quantized.codes.float().tolist()[0] == [448, 448, 448, -448, 0, 0, 448, 1]


@pytest.mark.filterwarnings("error")
def test_a_static_scale_that_fits_is_silent_and_equal_to_the_dynamic_one() -> None:
    x = randn(2, 30, 8)
    for granularity in ("tensor", "head", "token", "channel", "block:7"):
        dynamic = quantize_tensor(x, "e4m3", granularity)
        static = quantize_tensor(x, "e4m3", granularity, scale=dynamic.scale)
        assert torch.equal(static.codes.view(torch.uint8), dynamic.codes.view(torch.uint8))
        assert dynamic.clip_counts() is None and static.clip_counts().saturated == 0


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e39, 1e-45])
def test_static_scales_must_be_finite_and_positive(scale: float) -> None:
    with pytest.raises(ValueError, match="scale must be finite and positive"):
        quantize_tensor(randn(4, 8), scale=scale)


def test_errors_say_what_is_accepted() -> None:
    x = randn(4, 8)
    with pytest.raises(ValueError, match=r"unknown granularity 'row'; accepted: tensor, head, block, token"):
        quantize_tensor(x, "e4m3", "row")
    with pytest.raises(ValueError, match="unknown granularity 'block:0'"):
        Granularity.parse("block:0")
    with pytest.raises(ValueError, match=r"unknown scale_mode 'e8m0'; accepted: fp32, pow2"):
        quantize_tensor(x, scale_mode="e8m0")
    with pytest.raises(ValueError, match=r"x must have at least 2 dimensions \(..., S, D\), got shape \(8,\)"):
        quantize_tensor(x[0])
    with pytest.raises(TypeError, match=r"x must be a float32, bfloat16 or float16 tensor, got torch\.int64"):
        quantize_tensor(torch.zeros(4, 8, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"got torch\.float8_e4m3fn"):
        quantize_tensor(E4M3.cast(x))
    with pytest.raises(ValueError, match=r"scale must be float32 of shape \(4, 1\), got torch.float32 \(1, 8\)"):
        quantize_tensor(x, "e4m3", "token", scale=torch.ones(1, 8))
    with pytest.raises(TypeError, match="scale must be a number or a tensor, got str"):
        quantize_tensor(x, scale="1")  # type: ignore[arg-type]


@given(st.lists(scales(max_exponent=120), min_size=1, max_size=30))
def test_ceil_pow2(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    y = ceil_pow2(x)
    assert (torch.frexp(y)[0] == 0.5).all()
    assert ((y >= x) & (y / 2 < x)).all()


@pytest.mark.parametrize("fmt", list(FORMATS))
@settings(max_examples=10)
@given(granularity=st.sampled_from(GRANULARITIES))
def test_files_round_trip(tmp_path_factory: pytest.TempPathFactory, fmt: str, granularity: str) -> None:
    path = tmp_path_factory.mktemp("files") / "x.safetensors"
    quantized = quantize_tensor(randn(2, 3, 20, 8), fmt, granularity)
    quantized.save(path)
    loaded = QuantizedTensor.load(path)
    assert torch.equal(loaded.dequantize(), quantized.dequantize())
    assert (loaded.format, loaded.granularity) == (quantized.format, quantized.granularity)
    assert [p.name for p in path.parent.iterdir()] == ["x.safetensors"]


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    quantized = quantize_tensor(randn(2, 3, 20, 8), "e4m3", "token")
    quantized.save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        QuantizedTensor.load(path)
    save_file({"x": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match='metadata "fp8attn" must be "quantized-tensor-1", got null'):
        QuantizedTensor.load(path)
    tensors, metadata = quantized.to_tensors()
    for change, message in (
        ({"scale": -quantized.scale}, "every scale must be finite and positive"),
        (
            {"scale": quantized.scale[:, :1]},
            r"scale must be float32 of shape \(2, 3, 20, 1\) \(token\), got",
        ),
        ({"codes": quantized.codes.view(torch.uint8)}, "codes have dtype torch.uint8, format e4m3 has"),
    ):
        with pytest.raises(ValueError, match=message):
            QuantizedTensor.from_tensors({**tensors, **change}, metadata)
    with pytest.raises(ValueError, match="no 'scale' in"):
        QuantizedTensor.from_tensors({"codes": quantized.codes}, metadata)
