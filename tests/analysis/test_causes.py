"""The split by cause: its sums, causes that are known beforehand, and a float64 model that is the contract's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import fp8attn
from fp8attn.analysis import ablations, exact_attention, relative_error, split_by_cause
from fp8attn.analysis.causes import CAUSES
from fp8attn.analysis.outliers import AttentionShape, OutlierSpec, make_qkv
from fp8attn.recipe import PRESETS, Recipe

SHAPE = AttentionShape(2, 4, 2, 40, 300, 32, 16)
DEFAULT, EXACT = PRESETS["default"], PRESETS["bf16"]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"is_causal": True, "causal_alignment": "bottom_right", "scale": 0.4},
    {"window": (60, 10), "sinks": torch.tensor([1.0, -2.0, 5.0, 0.0])},
    {"softcap": 2.0, "is_causal": True},
    {"attn_mask": torch.rand(40, 300, generator=torch.Generator().manual_seed(0)) < 0.3},
]
RECIPES = {
    "default": DEFAULT,
    "smoothed": DEFAULT.replace(smooth_k=True, smooth_v=True),
    "value by token": DEFAULT.replace(v_scale="token"),
    "e5m2 weights": DEFAULT.replace(p_format="e5m2", v_scale="block"),
    "plain": PRESETS["fa3"],
}


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "no options")
@pytest.mark.parametrize("name", RECIPES)
def test_the_model_is_the_contract(name: str, options: dict[str, Any]) -> None:
    """With all four roundings the float64 model leaves the reference nothing but FP32's rounding.

    That moves a weight across a rounding boundary now and then: of the relative error of FP8's weights, 2^-5, one in
    thousands, which is 1e-3 of everything at most.
    """
    q, k, v = make_qkv(SHAPE, outliers=OutlierSpec("k_offset", 2.0), seed=3)
    split = split_by_cause(q, k, v, RECIPES[name], backend="reference", **options)
    assert split.alone["accumulator"] < 5e-4 < split.alone["p"]
    assert sum(split.share.values()) == pytest.approx(1.0, abs=1e-9)
    out = fp8attn.attention(q, k, v, recipe=RECIPES[name], backend="reference", enable_gqa=True, **options)
    exact, _ = exact_attention(q, k, v, **options)
    # "auto" decides on other rows and statistics are of other tokens: the same kind of error, not the same error
    assert split.total == pytest.approx(relative_error(out, exact), rel=0.25)


def test_squares_add_up() -> None:
    """Errors of q, k, v and p are independent: without order, squares sum to the total's."""
    q, k, v = make_qkv(AttentionShape(1, 4, 4, 128, 256, 64), seed=1)
    split = split_by_cause(q, k, v, "default", dtype=torch.bfloat16)
    assert abs(split.interaction) < 0.1
    for cause in CAUSES:
        assert split.without[cause] ** 2 + split.alone[cause] ** 2 == pytest.approx(split.total**2, rel=0.1)
        assert split.share[cause] == pytest.approx((split.alone[cause] / split.total) ** 2, abs=0.06)


@pytest.mark.parametrize(
    ("recipe", "cause"),
    [
        (EXACT.replace(v_format="e4m3", p_format="bf16", v_scale="head"), "v"),
        (EXACT.replace(v_format="bf16", p_format="bf16"), None),
        (EXACT.replace(q_format="e4m3", k_format="e4m3", q_scale="head", k_scale="head"), "q"),
    ],
)
def test_a_cause_that_is_known(recipe: Recipe, cause: str | None) -> None:
    q, k, v = (x.bfloat16() for x in make_qkv(SHAPE, seed=2))
    split = split_by_cause(q, k, v, recipe, dtype=torch.float32)
    loud = {name for name in CAUSES if split.alone[name] > 5e-3}
    assert loud == ({"q", "k"} if cause == "q" else {cause} - {None})


def test_the_tensor_cores_accumulator_is_found() -> None:
    """Values of one sign over many keys, the case of arXiv:2411.10958: the tensor core's sum falls short."""
    q, k, v = make_qkv(AttentionShape(1, 1, 1, 16, 4096, 64), seed=0)
    v = v.abs()
    for accumulation, low, high in (("fp32", 0.0, 1e-4), ("tensor_core", 5e-3, 0.5)):
        split = split_by_cause(q, k, v, DEFAULT.replace(accumulation=accumulation), backend="reference")
        assert low <= split.alone["accumulator"] <= high
    assert split.without["accumulator"] < split.total


def test_the_cast() -> None:
    q, k, v = make_qkv(SHAPE, seed=4)
    split = split_by_cause(q, k, v, "default", dtype=torch.bfloat16)
    exact, _ = exact_attention(q, k, v)
    assert split.alone["cast"] == pytest.approx(relative_error(exact.bfloat16(), exact), rel=1e-9)
    assert split_by_cause(q, k, v, "default").alone["cast"] < 1e-7


def test_nothing_and_no_keys() -> None:
    split = split_by_cause(*(torch.zeros(1, 1, n, 8) for n in (0, 4, 4)))
    assert split.total == 0.0 and set(split.alone) == set(CAUSES)
    ones = torch.ones(1, 1, 4, 8)
    hidden = split_by_cause(ones, ones, ones, attn_mask=torch.zeros(4, 4, dtype=torch.bool))
    assert hidden.total == 0.0 and not any(math.isnan(x) for x in hidden.share.values())


def test_ablations_change_one_thing() -> None:
    changed = ablations("default")
    assert "not rotated" in changed and "rotated" not in changed and "balanced" not in changed
    for name, recipe in changed.items():
        fields = {f for f, value in recipe.to_dict().items() if value != DEFAULT.to_dict()[f]}
        assert len({f.removeprefix("q_").removeprefix("k_").removeprefix("v_") for f in fields}) == 1, name
