"""The strategies draw what they say, reproducibly, and the assertions catch what they are for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st

from fp8attn import testing
from fp8attn.formats import E4M3, E5M2, INT8, Format
from fp8attn.recipe import Recipe
from fp8attn.testing import (
    HEAD_DIMS,
    OUTLIER_KINDS,
    QKV,
    AttentionShape,
    OutlierSpec,
    assert_close_to_reference,
    assert_orthogonal,
    assert_qk_invariant,
    fp8_codes,
    head_dims,
    make_qkv,
    masks,
    orthogonal_transforms,
    outlier_specs,
    qkv,
    recipes,
    scales,
    shapes,
)
from fp8attn.transforms import RandomHadamard, Transform, has_hadamard

EXAMPLES = settings(max_examples=50, deadline=None)
FIND = settings(max_examples=2000, deadline=None, database=None, suppress_health_check=list(HealthCheck))


def reachable(strategy: st.SearchStrategy[Any], *conditions: Callable[[Any], bool]) -> None:
    """Each condition holds for some value drawn (``find`` raises NoSuchExample otherwise)."""
    for condition in conditions:
        find(strategy, condition, settings=FIND)


@given(head_dims(max_value=128))
@EXAMPLES
def test_head_dims(dim: int) -> None:
    assert dim <= 128 and dim in HEAD_DIMS and has_hadamard(dim)


@given(shapes(max_batch=3, max_kv_heads=2, max_group=3, min_seqlen=0, max_seqlen=9, head_dims=[8, 24]))
@EXAMPLES
def test_shapes_keep_their_limits(shape: AttentionShape) -> None:
    assert 1 <= shape.batch <= 3 and 1 <= shape.num_kv_heads <= 2
    assert shape.num_q_heads % shape.num_kv_heads == 0 and 1 <= shape.num_q_heads // shape.num_kv_heads <= 3
    assert 0 <= shape.seqlen_q <= 9 and 0 <= shape.seqlen_k <= 9 and shape.head_dim in (8, 24)
    assert shape.v == shape.k and shape.scores == (shape.batch, shape.num_q_heads, shape.seqlen_q, shape.seqlen_k)


def test_shapes_reach_their_limits() -> None:
    reachable(
        shapes(min_seqlen=0, max_seqlen=9),
        lambda s: s.seqlen_q == 0,
        lambda s: s.seqlen_k == 9,
        lambda s: s.num_q_heads == 8,
        lambda s: s.seqlen_q != s.seqlen_k,
        lambda s: s.head_dim == 80,
    )
    reachable(shapes(head_dims_v=[16, 48]), lambda s: s.v[3] == 48 and s.k[3] != 48)
    assert find(shapes(self_attention=True), lambda s: s.seqlen_q > 5, settings=FIND).seqlen_k == 6


def test_outlier_specs_reach_every_kind() -> None:
    for kind in OUTLIER_KINDS:
        reachable(outlier_specs(), lambda spec, kind=kind: spec.kind == kind and spec.magnitude == 100)
    assert find(outlier_specs(kinds=["k_offset"], magnitudes=[7.0]), lambda spec: True, settings=FIND).magnitude == 7
    with pytest.raises(ValueError, match=r"kind must be one of 'none', 'iid', .* got 'spiky'"):
        OutlierSpec("spiky")


SHAPE = AttentionShape(2, 4, 2, 96, 128, 64)


def size_ratio(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Every other slice's rms over the median slice's."""
    rms = x.movedim(dim, 0).flatten(1).square().mean(1).sqrt()
    return rms / rms.median()


@pytest.mark.parametrize("kind", OUTLIER_KINDS)
def test_outliers_are_where_they_should_be(kind: str) -> None:
    plain = make_qkv(SHAPE, seed=5)
    q, k, v = make_qkv(SHAPE, outliers=OutlierSpec(kind, magnitude=10.0, rate=2 / 64), seed=5)
    changed_q, changed_k, changed_v = (a != b for a, b in zip((q, k, v), plain, strict=True))
    channels_q, channels_k = (c.flatten(0, 2).any(0) for c in (changed_q, changed_k))
    if kind == "none":
        assert not changed_q.any() and not changed_k.any() and not changed_v.any()
    elif kind == "iid":
        for changed, x, y in zip((changed_q, changed_k, changed_v), (q, k, v), plain, strict=True):
            # Binomial around 2 / 64 with at least 32,768 draws: standard deviation 0.001; five of them
            assert abs(changed.float().mean().item() - 2 / 64) < 0.005
            # 1,024 draws of N(0, 100) at least: the rms of 10 is known to 10 / sqrt(2 x 1024) = 0.22; five of them
            assert abs((x - y)[changed].square().mean().sqrt().item() - 10) < 1.1
    elif kind in ("same_channels", "disjoint_channels"):
        assert channels_q.sum() == channels_k.sum() == 2 and not changed_v.any()
        assert (channels_q & channels_k).sum() == (2 if kind == "same_channels" else 0)
        assert torch.equal(q[changed_q], plain.q[changed_q] * 10)
        assert torch.equal(k[changed_k], plain.k[changed_k] * 10)
    elif kind == "k_offset":
        assert torch.equal(k, plain.k + 10) and not changed_q.any() and not changed_v.any()
    elif kind == "massive_token":
        assert torch.equal(k[:, :, 0], plain.k[:, :, 0] * 10) and torch.equal(v[:, :, 0], plain.v[:, :, 0] * 10)
        assert not changed_k[:, :, 1:].any() and not changed_v[:, :, 1:].any() and not changed_q.any()
    elif kind == "channel_spread":
        for x, y in ((q, plain.q), (k, plain.k)):
            factors = (x / y).flatten(0, 2)
            assert torch.allclose(factors, factors[:1], rtol=1e-6)
            # log10 of the factor is N(0, 1 / 9); 64 draws know its deviation to 9%; three of it
            assert abs(factors[0].log10().std().item() * 3 - 1) < 0.27
        assert not changed_v.any() and not torch.allclose((q / plain.q)[0, 0, 0], (k / plain.k)[0, 0, 0])
    elif kind == "rotary_pairs":
        # Turned back, one channel of one pair in 32 is offset; turning keeps the length of every pair.
        for x, y, first in ((q, plain.q, 32), (k, plain.k, 0)):
            back = torch.view_as_complex(torch.stack([x[..., :32], x[..., 32:]], -1).double())
            angles = torch.outer(torch.arange(first, first + x.shape[2]), 10_000.0 ** -(torch.arange(32) / 32))
            back = torch.view_as_real(back * torch.polar(torch.ones(()).double(), -angles.double()))
            offset = torch.cat([back[..., 0], back[..., 1]], -1) - y
            assert ((offset - 10).abs() < 1e-4).all(2).all(1).all(0).sum() == 1
            assert (offset.abs() < 1e-4).all(2).all(1).all(0).sum() == 63
        assert not changed_v.any()
    else:
        for x, y in zip((q, k, v), plain, strict=True):
            order = y.flatten().argsort()
            assert (x.flatten()[order].diff() >= 0).all() and torch.equal(x.sign(), y.sign())
            near_3 = (y.abs() - 3).abs() < 0.02
            # There the tail falls by (df + 1) / 30 a unit of 30 and the normal's by 3: 0.02 moves the ratio by 5%.
            assert near_3.any() and ((x / y)[near_3].abs() / 10 - 1).abs().max() < 0.06
        heavier, lighter = (make_qkv(SHAPE, outliers=OutlierSpec(kind, m), seed=5).q for m in (2.0, 1.0))
        assert torch.equal(lighter, plain.q) and (heavier.abs() >= lighter.abs() * 0.99)[lighter.abs() > 2].all()


@given(qkv(dtypes=[torch.float32, torch.bfloat16]))
@EXAMPLES
def test_qkv_is_reproduced_by_its_repr(data: QKV) -> None:
    again = eval(repr(data), {**vars(testing), "torch": torch})
    for tensor, other, size in zip(data, again, (data.shape.q, data.shape.k, data.shape.v), strict=True):
        assert torch.equal(tensor, other) and tensor.shape == size and tensor.isfinite().all()
        assert tensor.dtype == other.dtype


def test_qkv_seeds_differ() -> None:
    assert not torch.equal(make_qkv(SHAPE, seed=1).q, make_qkv(SHAPE, seed=2).q)


@given(orthogonal_transforms(), orthogonal_transforms(dim=52), st.from_type(Transform))
@settings(max_examples=20, deadline=None)
def test_orthogonal_transforms(any_dim: Transform, no_hadamard: Transform, registered: Transform) -> None:
    assert any_dim.dim in HEAD_DIMS and no_hadamard.dim == 52
    for transform in (any_dim, no_hadamard, registered):
        assert_orthogonal(transform)


def test_orthogonal_transforms_reach_every_kind() -> None:
    for name in (
        "Identity",
        "Hadamard",
        "RandomHadamard",
        "HaarRandom",
        "DCT",
        "BlockDiagonal",
        "SignFlip",
        "Permutation",
    ):
        reachable(orthogonal_transforms(dim=48), lambda t, name=name: type(t).__name__ == name)
    only = find(orthogonal_transforms(dim=48, names=["haar"]), lambda t: True, settings=FIND)
    assert type(only).__name__ == "HaarRandom"


@pytest.mark.parametrize("fmt", [E4M3, E5M2, INT8], ids=lambda f: f.name)
def test_fp8_codes_reach_what_matters(fmt: Format) -> None:
    def values(codes: torch.Tensor) -> torch.Tensor:
        return fmt.decode(codes)

    reachable(
        fp8_codes(format=fmt.name),
        lambda codes: bool(values(codes).isnan().any()),
        lambda codes: bool((values(codes) == fmt.max).any()),
        lambda codes: bool((values(codes) == -fmt.max).any()),
        lambda codes: bool((values(codes) == fmt.smallest_subnormal).any()),
        lambda codes: len(codes) > 20,
        lambda codes: len(codes) == 1,
    )
    if fmt is E5M2:
        reachable(fp8_codes(format=fmt), lambda codes: bool(values(codes).isinf().any()))
    if fmt is not INT8:
        reachable(fp8_codes(format=fmt), lambda codes: bool((codes.view(torch.uint8) == 128).any()))  # -0

    @given(fp8_codes(format=fmt, allow_nan=False, max_size=7))
    @EXAMPLES
    def no_nan(codes: torch.Tensor) -> None:
        assert codes.dtype == fmt.dtype and 1 <= len(codes) <= 7
        assert not values(codes).isnan().any()

    no_nan()


@given(scales(), scales(powers_of_two=True), scales(min_exponent=-3, max_exponent=4))
@EXAMPLES
def test_scales_are_normal_float32_numbers(scale: float, power: float, limited: float) -> None:
    for value in (scale, power, limited):
        assert torch.tensor(value, dtype=torch.float32).item() == value
        assert 2.0**-126 <= value < float("inf")
    assert torch.frexp(torch.tensor(power)).mantissa == 0.5
    assert 0.125 <= limited < 32


def test_scales_reach_both_ends() -> None:
    reachable(scales(), lambda s: s < 2.0**-120, lambda s: s > 2.0**120, lambda s: 1 < s < 2)


@given(st.data())
@EXAMPLES
def test_masks_broadcast_and_keep_a_key(data: st.DataObject) -> None:
    shape = data.draw(shapes(max_seqlen=8))
    mask = data.draw(masks(shape=shape, allow_empty_rows=False))
    assert mask.broadcast_to(shape.scores).shape == shape.scores
    visible = mask if mask.dtype == torch.bool else mask > -torch.inf
    assert visible.any(-1).all()
    assert not (mask.isnan() | (mask == torch.inf)).any()


def test_masks_reach_what_matters() -> None:
    shape = AttentionShape(2, 2, 1, 3, 4, 16)

    def empty_rows(mask: torch.Tensor) -> torch.Tensor:
        return ~(mask if mask.dtype == torch.bool else mask > -torch.inf).any(-1)

    reachable(
        masks(shape=shape),
        lambda m: m.dtype == torch.bool and bool(m.all()),
        lambda m: m.dtype == torch.float32 and bool(m.isfinite().any()) and bool(m.isinf().any()),
        lambda m: bool(empty_rows(m).all()),
        lambda m: bool(empty_rows(m).any()) and not bool(empty_rows(m).all()),
        lambda m: m.ndim == 2,
        lambda m: m.shape == (2, 1, 3, 4),
        lambda m: m.shape == (2, 2, 3, 4),
    )
    assert find(masks(shape=shape, kinds=["additive"]), lambda m: True, settings=FIND).dtype == torch.float32
    with pytest.raises(ValueError, match=r"kinds must be of 'bool', 'additive', got \('boolean',\)"):
        masks(shape=shape, kinds=["boolean"])


@given(recipes(), recipes(v_format=st.sampled_from(["bf16"]), rotate="dct"), st.from_type(Recipe))
@EXAMPLES
def test_recipes_are_valid(drawn: Recipe, fixed: Recipe, registered: Recipe) -> None:
    assert fixed.rotate == "dct" and fixed.v_format == fixed.p_format == "bf16"
    for recipe in (drawn, registered):
        assert Recipe.from_json(recipe.to_json()) == recipe


def test_recipes_refuse_unknown_fields() -> None:
    with pytest.raises(ValueError, match=r"no fields \['rotation'\]"):
        recipes(rotation="dct")
    reachable(recipes(), lambda r: r.p_format == "fp16" and r.v_format == "e4m3", lambda r: r.v_scale == "channel")


class _Scaled(RandomHadamard):
    def _matrix64(self) -> torch.Tensor:
        return super()._matrix64() * (1 + 1e-12)


class _Untransposed(RandomHadamard):
    def inverse(self, y: torch.Tensor) -> torch.Tensor:
        return self.apply(y)


class _Bfloat16(RandomHadamard):
    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return super().apply(x).bfloat16()


class _TooLong(RandomHadamard):
    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return super().apply(x) * (1 + 1e-6)


class _ForgetsOneChannel(RandomHadamard):
    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return super().apply(x)[..., : self.dim - 1]


def test_assert_orthogonal_fails() -> None:
    assert_orthogonal(RandomHadamard(48))
    with pytest.raises(AssertionError, match=r"_Scaled\(dim=48, seed=0\): \|R R\^T - I\| is 2e-12, more than 1.07e-14"):
        assert_orthogonal(_Scaled(48))
    with pytest.raises(AssertionError, match=r"inverse\(I\) - R\^T"):
        assert_orthogonal(_Untransposed(48))


@given(qkv(shapes=shapes(max_group=1, min_seqlen=16, head_dims=[48, 64, 80])))
@EXAMPLES
def test_assert_qk_invariant_catches_bfloat16_and_truncation(data: QKV) -> None:
    q, k, _ = data
    dim = data.shape.head_dim
    assert_qk_invariant(q, k, RandomHadamard(dim))
    for broken in (_Bfloat16(dim), _ForgetsOneChannel(dim)):
        with pytest.raises(AssertionError, match=r"logit error over \|q\|\|k\| is"):
            assert_qk_invariant(q, k, broken)


def test_assert_qk_invariant_has_a_tight_limit() -> None:
    """Both sides a millionth too long: 2e-6 |q||q| on the diagonal, over twice the limit of sqrt(64) 2^-23 = 9.5e-7."""
    q = make_qkv(SHAPE, seed=1).q
    with pytest.raises(AssertionError, match=r"is 2\.\d+e-06, more than 9\.54e-07"):
        assert_qk_invariant(q, q, _TooLong(64))


def test_assert_close_to_reference() -> None:
    expected = torch.tensor([[3.0, 4.0], [0.0, -torch.inf]])
    actual = torch.tensor([[3.0, 4.5], [0.0, -torch.inf]])
    assert_close_to_reference(actual, expected, relative_error=0.1)  # exactly 0.5 / 5
    message = r"relative error is 0.1, more than 0.099; worst at \(0, 1\): actual 4.5, expected 4"
    with pytest.raises(AssertionError, match=message):
        assert_close_to_reference(actual, expected, relative_error=0.099)
    for bad in (torch.nan, torch.inf, 1.0):
        with pytest.raises(AssertionError, match=r"relative error is inf, .* worst at \(1, 1\)"):
            assert_close_to_reference(torch.tensor([[3.0, 4.0], [0.0, bad]]), expected, relative_error=0.1)
    nan = torch.tensor([torch.nan, 1.0])
    assert_close_to_reference(nan, nan.clone(), relative_error=0.0)
    with pytest.raises(AssertionError, match="relative error is inf"):
        assert_close_to_reference(torch.tensor([0.0, 1.0]), nan, relative_error=0.1)
    with pytest.raises(AssertionError, match=r"where the reference is 0, is 0\.001, more than 0\.0001"):
        assert_close_to_reference(torch.tensor([1e-3]), torch.zeros(1), relative_error=1e-4)
    with pytest.raises(AssertionError, match=r"shapes differ: actual \(2,\), expected \(1,\)"):
        assert_close_to_reference(torch.zeros(2), torch.zeros(1), relative_error=1.0)
    assert_close_to_reference(torch.zeros(0), torch.zeros(0), relative_error=0.0)
    half = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    assert_close_to_reference(half, half.double(), relative_error=0.0)


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_missing_hypothesis_is_named() -> None:
    result = run("import sys; sys.modules['hypothesis'] = None; import fp8attn.testing")
    assert "ImportError: fp8attn.testing needs hypothesis: pip install 'fp8attn[test]'" in result.stderr


@pytest.mark.parametrize(
    "order",
    [
        "import fp8attn.transforms, hypothesis",
        "import hypothesis, fp8attn.testing",
        "import fp8attn.testing, hypothesis",
    ],
)
def test_hook_registers_in_any_order(order: str) -> None:
    result = run(
        f"{order}\n"
        "from hypothesis import strategies as st, find\n"
        "from fp8attn.transforms import Transform\n"
        "print(find(st.from_type(Transform), lambda t: True))"
    )
    assert result.stdout == "Identity(dim=16)\n", result.stderr


def test_hook_is_cheap() -> None:
    """Whoever imports hypothesis for other reasons must not pay for torch."""
    result = run(
        "import sys; from fp8attn._hypothesis import _hypothesis_setup_hook as hook; hook()\n"
        "print(sorted({'torch', 'hypothesis', 'fp8attn.testing'} & set(sys.modules)))"
    )
    assert result.stdout == "[]\n", result.stderr
