"""Hypothesis strategies and assertions for tests of code that runs attention in FP8.

Strategies draw shapes, seeds and outlier specifications and build tensors from seeded generators: drawing the elements
themselves would be slow, and a seed is enough to reproduce them. All arguments are keyword-only. A complete test:

>>> import torch
>>> from hypothesis import given, settings
>>> from fp8attn.testing import assert_close_to_reference, assert_qk_invariant, orthogonal_transforms, qkv, shapes
>>> @settings(max_examples=10, deadline=None)
... @given(data=qkv(shapes=shapes(head_dims=[64])), transform=orthogonal_transforms(dim=64))
... def test_rotation_does_not_change_attention(data, transform):
...     sdpa = torch.nn.functional.scaled_dot_product_attention
...     exact = sdpa(data.q.double(), data.k.double(), data.v.double(), enable_gqa=True)
...     q, k = transform.apply(data.q.double()), transform.apply(data.k.double())
...     assert_qk_invariant(data.q, data.k[:, :1], transform)
...     assert_close_to_reference(sdpa(q, k, data.v.double(), enable_gqa=True), exact, relative_error=1e-9)
>>> test_rotation_does_not_change_attention()

Importing this module also makes ``hypothesis.strategies.from_type`` resolve ``Transform`` and ``Recipe``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from fp8attn.analysis.outliers import OUTLIER_KINDS, QKV, AttentionShape, OutlierSpec, make_qkv
from fp8attn.formats import Format, get_format
from fp8attn.recipe import Recipe
from fp8attn.transforms import TRANSFORM_NAMES, Transform, has_hadamard, make_transform

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError("fp8attn.testing needs hypothesis: pip install 'fp8attn[test]'") from error

__all__ = [
    "HEAD_DIMS",
    "OUTLIER_KINDS",
    "QKV",
    "AttentionShape",
    "OutlierSpec",
    "assert_close_to_reference",
    "assert_orthogonal",
    "assert_qk_invariant",
    "fp8_codes",
    "head_dims",
    "make_qkv",
    "masks",
    "orthogonal_transforms",
    "outlier_specs",
    "qkv",
    "recipes",
    "scales",
    "shapes",
]

#: Head dims of published models, all of which have a Hadamard matrix.
HEAD_DIMS = (16, 32, 40, 48, 64, 72, 80, 88, 96, 112, 120, 128, 144, 160, 176, 192, 224, 240, 256)

_SEEDS = st.integers(0, 2**32 - 1)


def head_dims(*, max_value: int = 256) -> st.SearchStrategy[int]:
    """Head dims that models use, up to ``max_value``, powers of two and others: see :data:`HEAD_DIMS`."""
    return st.sampled_from([d for d in HEAD_DIMS if d <= max_value])


@st.composite
def _shapes(draw: st.DrawFn, kwargs: dict[str, Any]) -> AttentionShape:
    num_kv_heads = draw(st.integers(1, kwargs["max_kv_heads"]))
    seqlens = st.integers(kwargs["min_seqlen"], kwargs["max_seqlen"])
    seqlen_k = draw(seqlens)
    return AttentionShape(
        batch=draw(st.integers(1, kwargs["max_batch"])),
        num_q_heads=num_kv_heads * draw(st.integers(1, kwargs["max_group"])),
        num_kv_heads=num_kv_heads,
        seqlen_q=seqlen_k if kwargs["self_attention"] else draw(seqlens),
        seqlen_k=seqlen_k,
        head_dim=draw(st.sampled_from(kwargs["head_dims"])),
        head_dim_v=None if kwargs["head_dims_v"] is None else draw(st.sampled_from(kwargs["head_dims_v"])),
    )


def shapes(
    *,
    max_batch: int = 2,
    max_kv_heads: int = 2,
    max_group: int = 4,
    min_seqlen: int = 1,
    max_seqlen: int = 64,
    self_attention: bool = False,
    head_dims: Sequence[int] = (16, 32, 48, 64, 80),
    head_dims_v: Sequence[int] | None = None,
) -> st.SearchStrategy[AttentionShape]:
    """Shapes of attention problems, with up to ``max_group`` query heads a kv head.

    ``self_attention`` makes both sequences equally long. Values have the queries' head dim unless ``head_dims_v`` is
    given. Sizes shrink to 1, head dims to the first in the list.

    >>> from hypothesis import find
    >>> find(shapes(), lambda shape: shape.num_q_heads > shape.num_kv_heads).scores
    (1, 2, 1, 1)
    """
    return _shapes(dict(locals()))


@st.composite
def _outlier_specs(draw: st.DrawFn, kinds: Sequence[str], magnitudes: Sequence[float]) -> OutlierSpec:
    return OutlierSpec(
        kind=draw(st.sampled_from(kinds)),
        magnitude=draw(st.sampled_from(magnitudes)),
        rate=draw(st.sampled_from((0.001, 0.02, 0.1))),
    )


def outlier_specs(
    *, kinds: Sequence[str] = OUTLIER_KINDS, magnitudes: Sequence[float] = (1.0, 3.0, 10.0, 30.0, 100.0)
) -> st.SearchStrategy[OutlierSpec]:
    """Outlier specifications of the given kinds, shrinking to the first kind and magnitude.

    >>> from hypothesis import find
    >>> find(outlier_specs(), lambda spec: spec.magnitude > 5)
    OutlierSpec(kind='none', magnitude=10.0, rate=0.001)
    """
    return _outlier_specs(tuple(kinds), tuple(magnitudes))


def qkv(
    *,
    shapes: st.SearchStrategy[AttentionShape] | None = None,
    outliers: st.SearchStrategy[OutlierSpec] | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
) -> st.SearchStrategy[QKV]:
    """Queries, keys and values: :class:`QKV` values of :func:`shapes` with :func:`outlier_specs`.

    >>> from hypothesis import find
    >>> data = find(qkv(dtypes=[torch.bfloat16]), lambda data: data.k.shape[2] == 2)
    >>> data.q.dtype, data.k.shape
    (torch.bfloat16, torch.Size([1, 1, 2, 16]))
    """
    return st.builds(
        make_qkv,
        _default_shapes() if shapes is None else shapes,
        outliers=outlier_specs() if outliers is None else outliers,
        seed=_SEEDS,
        dtype=st.sampled_from(dtypes),
    )


_default_shapes = shapes


@st.composite
def _orthogonal_transforms(draw: st.DrawFn, dim: int | None, names: Sequence[str]) -> Transform:
    size = draw(head_dims(max_value=128)) if dim is None else dim
    possible = [name for name in names if has_hadamard(size) or name not in ("hadamard", "random_hadamard")]
    return make_transform(draw(st.sampled_from(possible)), size, seed=draw(_SEEDS))


def orthogonal_transforms(
    *, dim: int | None = None, names: Sequence[str] = TRANSFORM_NAMES
) -> st.SearchStrategy[Transform]:
    """Transforms of ``dim`` channels, or of a drawn head dim; for a dim without a Hadamard matrix the other kinds.

    >>> from hypothesis import find
    >>> find(orthogonal_transforms(dim=52), lambda transform: True)
    Identity(dim=52)
    """
    return _orthogonal_transforms(dim, tuple(names))


def fp8_codes(
    *, format: str | Format = "e4m3", allow_nan: bool = True, max_size: int = 64
) -> st.SearchStrategy[torch.Tensor]:
    """Vectors of 1 to ``max_size`` codes of an 8-bit format, as tensors of its dtype.

    Every code can be drawn, infinities and both zeros included, and NaN unless ``allow_nan`` is off.

    >>> from hypothesis import find
    >>> find(fp8_codes(), lambda codes: (codes.float() == 448).any())
    tensor([448.], dtype=torch.float8_e4m3fn)
    """
    fmt = get_format(format)
    codes = fmt.codes()
    keep = fmt.decode(codes).isnan().logical_not() | allow_nan
    usable = codes.view(torch.uint8)[keep].tolist()
    vectors = st.lists(st.sampled_from(usable), min_size=1, max_size=max_size)
    return vectors.map(lambda values: torch.tensor(values, dtype=torch.uint8).view(fmt.dtype))


def scales(
    *, min_exponent: int = -126, max_exponent: int = 127, powers_of_two: bool = False
) -> st.SearchStrategy[float]:
    """Quantizer scales: positive normal float32 numbers from 2^min_exponent to below 2^(max_exponent + 1), as floats.

    Every power of two is as likely as the next; they shrink to the smallest magnitude of the exponent, and to 1.

    >>> from hypothesis import find
    >>> find(scales(), lambda scale: scale > 1000)
    1024.0
    """
    exponents = st.integers(min_exponent, max_exponent).map(lambda exponent: 2.0**exponent)
    if powers_of_two:
        return exponents
    return st.builds(lambda power, fraction: power * (1 + fraction * 2.0**-23), exponents, st.integers(0, 2**23 - 1))


@st.composite
def _masks(draw: st.DrawFn, shape: AttentionShape, kinds: Sequence[str], allow_empty_rows: bool) -> torch.Tensor:
    batch, heads, rows, keys = shape.scores
    size = draw(st.sampled_from([(rows, keys), (batch, 1, rows, keys), (batch, heads, rows, keys)]))
    kind = draw(st.sampled_from(kinds))
    visible_rate = draw(st.sampled_from((1.0, 0.9, 0.5, 0.1)))
    empty_rate = draw(st.sampled_from((0.0, 0.2, 1.0))) if allow_empty_rows else 0.0
    generator = torch.Generator().manual_seed(draw(_SEEDS))
    visible = torch.rand(size, generator=generator) < visible_rate
    if keys:
        # Every row keeps one key, so that only rows emptied on purpose are empty.
        kept = torch.randint(keys, (*size[:-1], 1), generator=generator)
        visible.scatter_(-1, kept, torch.ones_like(kept, dtype=torch.bool))
    visible &= torch.rand((*size[:-1], 1), generator=generator) >= empty_rate
    if kind == "bool":
        return visible
    return torch.randn(size, generator=generator).masked_fill(~visible, float("-inf"))


def masks(
    *, shape: AttentionShape, kinds: Sequence[str] = ("bool", "additive"), allow_empty_rows: bool = True
) -> st.SearchStrategy[torch.Tensor]:
    """Attention masks that broadcast to ``shape.scores``: boolean (True is visible) or additive (float32, with -inf).

    Some, all or no rows are empty unless ``allow_empty_rows`` is off.

    >>> from hypothesis import find
    >>> find(masks(shape=AttentionShape(1, 1, 1, 1, 2, 16)), lambda mask: not mask.any())
    tensor([[False, False]])
    """
    unknown = set(kinds) - {"bool", "additive"}
    if unknown or not kinds:
        raise ValueError(f"kinds must be of 'bool', 'additive', got {tuple(kinds)}")
    return _masks(shape, tuple(kinds), allow_empty_rows)


_RECIPE_FIELDS: dict[str, tuple[Any, ...]] = {
    "rotate": TRANSFORM_NAMES,
    "balance": ("none", "rms"),
    "smooth_k": (False, True, "auto"),
    "smooth_v": (False, True),
    "q_scale": ("tensor", "head", "block", "block:64", "token"),
    "k_scale": ("tensor", "head", "block", "block:64", "token"),
    "v_scale": ("tensor", "head", "block", "block:64", "token", "channel"),
    "k_format": ("e4m3", "e5m2", "int8", "fp16", "bf16"),
    "v_format": ("e4m3", "e5m2", "fp16", "bf16"),
    "scale_mode": ("fp32", "pow2"),
}


@st.composite
def _recipes(draw: st.DrawFn, fixed: dict[str, Any]) -> Recipe:
    choices = {name: st.sampled_from(values) for name, values in _RECIPE_FIELDS.items()} | {"seed": _SEEDS}
    values = {name: draw(strategy) for name, strategy in (choices | fixed).items()}
    for left, right in (("q_format", "k_format"), ("p_format", "v_format")):
        if left not in values:
            # Beside an FP8 operand the other may have any float format; INT8 and 16 bits need their like.
            narrow = values[right] in ("e4m3", "e5m2")
            values[left] = draw(st.sampled_from(("e4m3", "e5m2", "fp16", "bf16"))) if narrow else values[right]
    return Recipe(**values)


def recipes(**fixed: Any) -> st.SearchStrategy[Recipe]:
    """Valid recipes. A field can be fixed to a value, or to a strategy for it; accumulation stays FP32 unless fixed.

    >>> from hypothesis import find
    >>> find(recipes(rotate="haar"), lambda recipe: recipe.scale_mode == "pow2").rotate
    'haar'
    """
    fields = [f.name for f in dataclasses.fields(Recipe)]
    unknown = sorted(set(fixed) - set(fields))
    if unknown:
        raise ValueError(f"recipes have no fields {unknown}; accepted: {', '.join(fields)}")
    return _recipes({k: v if isinstance(v, st.SearchStrategy) else st.just(v) for k, v in fixed.items()})


def assert_orthogonal(transform: Transform) -> None:
    """R R^T = I in float64, and ``apply`` and ``inverse`` multiply by R and R^T.

    >>> assert_orthogonal(make_transform("dct", 80))
    """
    dim = transform.dim
    matrix = transform.matrix(dtype=torch.float64, device="cpu")
    eye = torch.eye(dim, dtype=torch.float64)
    # Entries rounded to within eps of themselves and dot products of dim terms: dim * eps, with unit rows.
    _require_small((matrix @ matrix.T - eye).abs().max().item(), dim * 2.0**-52, f"{transform!r}: |R R^T - I|")
    # A product with the unit matrix adds only zeros, so it is exact.
    for name, result, expected in (
        ("apply(I) - R", transform.apply(eye), matrix),
        ("inverse(I) - R^T", transform.inverse(eye), matrix.T),
    ):
        _require_small((result - expected).abs().max().item(), 0.0, f"{transform!r}: |{name}|")


def assert_qk_invariant(q: torch.Tensor, k: torch.Tensor, transform: Transform) -> None:
    """(q R)(k R)^T = q k^T within float32 rounding, for q (..., rows, dim) and k (..., keys, dim) that broadcast.

    The limit is sqrt(dim) 2^-23 |q| |k| a logit: a rotated element is a float32 sum of dim products, with partial sums
    of at most |q|, whose roundings of 2^-24 |q| add up like a random walk to 2^-24 sqrt(dim) |q|; k has as much again.
    A rotation rounded to bfloat16 is hundreds of times beyond it.

    >>> q, k = torch.randn(2, 10, 64)
    >>> assert_qk_invariant(q, k, make_transform("random_hadamard", 64))
    """
    exact_q, exact_k = q.double(), k.double()
    logits = exact_q @ exact_k.mT
    rotated = transform.apply(q).double() @ transform.apply(k).double().mT
    size = exact_q.norm(dim=-1).unsqueeze(-1) * exact_k.norm(dim=-1).unsqueeze(-2)
    if logits.numel():
        error = torch.where(size == 0, (rotated - logits).abs(), (rotated - logits).abs() / size)
        _require_small(error.max().item(), transform.dim**0.5 * 2.0**-23, f"{transform!r}: logit error over |q||k|")


def assert_close_to_reference(actual: torch.Tensor, expected: torch.Tensor, *, relative_error: float) -> None:
    """|actual - expected| <= relative_error * |expected| in the Frobenius norm, computed in float64.

    Infinities and NaN must stand in the same places. The message of a failure gives the figure and the worst element.

    >>> assert_close_to_reference(torch.tensor([1.0, 2.02]), torch.tensor([1.0, 2.0]), relative_error=0.01)
    """
    if actual.shape != expected.shape:
        raise AssertionError(f"shapes differ: actual {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    if actual.numel() == 0:
        return
    a, e = (t.detach().to("cpu", torch.float64) for t in (actual, expected))
    same = (a == e) | (a.isnan() & e.isnan())
    difference = torch.where(same, 0.0, (a - e).abs()).nan_to_num(torch.inf, torch.inf)
    norm = torch.where(e.isfinite(), e, 0.0).norm().item()
    figure = difference.norm().item() / norm if norm else difference.norm().item()
    worst = tuple(int(i) for i in torch.unravel_index(difference.argmax(), difference.shape))
    _require_small(
        figure,
        relative_error,
        "relative error" if norm else "error, where the reference is 0,",
        f"; worst at {worst}: actual {a[worst].item():.6g}, expected {e[worst].item():.6g}",
    )


def _require_small(figure: float, limit: float, what: str, detail: str = "") -> None:
    if not figure <= limit:  # NaN fails
        raise AssertionError(f"{what} is {figure:.3g}, more than {limit:.3g}{detail}")


st.register_type_strategy(Transform, lambda _: orthogonal_transforms())
st.register_type_strategy(Recipe, lambda _: recipes())
