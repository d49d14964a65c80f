"""Recipes: presets, JSON, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given

from fp8attn import Recipe
from fp8attn.recipe import PRESETS
from fp8attn.testing import recipes


@given(recipes())
def test_json_round_trip(recipe: Recipe) -> None:
    assert Recipe.from_json(recipe.to_json()) == recipe
    assert hash(Recipe.from_json(recipe.to_json())) == hash(recipe)


def test_files_round_trip(tmp_path: Path) -> None:
    for name in PRESETS:
        Recipe.from_name(name).save(tmp_path / f"{name}.json")
        assert Recipe.load(tmp_path / f"{name}.json") == Recipe.from_name(name)
    assert len(list(tmp_path.iterdir())) == len(PRESETS)


def test_missing_fields_are_the_defaults() -> None:
    assert Recipe.from_json("{}") == Recipe() == Recipe.from_name("default")
    assert Recipe.from_json('{"k_scale": "block:128"}') == Recipe()


def test_presets_are_what_they_say() -> None:
    fa3 = Recipe.from_name("fa3")
    assert (fa3.rotate, fa3.balance, fa3.smooth_k) == ("none", "none", False)
    assert (fa3.q_scale, fa3.k_scale, fa3.v_scale) == ("head", "head", "head")
    assert not Recipe.from_name("bf16").quantizes and Recipe.from_name("per_tensor").quantizes
    assert Recipe.from_name("fa3_paper").k_scale == "block"
    for preset in PRESETS.values():
        assert preset.accumulation == "fp32"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rotate": "givens"}, r"rotate must be one of 'none', 'hadamard', 'random_hadamard', .*got 'givens'"),
        ({"balance": "max"}, r"balance must be one of 'rms', 'none', got 'max'"),
        ({"smooth_k": 1}, r"smooth_k must be one of 'auto', True, False, got 1"),
        ({"smooth_v": "auto"}, r"smooth_v must be one of True, False, got 'auto'"),
        ({"seed": -1}, r"seed must be an integer from 0 to 2\*\*32 - 1, got -1"),
        ({"seed": 2**32}, "seed must be an integer"),
        ({"seed": True}, "seed must be an integer"),
        ({"q_scale": "channel"}, r"q_scale='channel' is impossible: .*accepted: token, block, block:<tokens>, head"),
        ({"k_scale": "channel"}, r"k_scale='channel' is impossible"),
        ({"v_scale": "row"}, r"v_scale: unknown granularity 'row'; accepted: tensor, head"),
        ({"q_format": "fp4"}, r"q_format must be one of 'e4m3', 'e5m2', 'int8', 'fp16', 'bf16', got 'fp4'"),
        ({"v_format": "int8"}, r"v_format must be one of 'e4m3'"),
        ({"p_format": "int8"}, r"p_format must be one of 'e4m3'"),
        ({"v_format": "bf16"}, r"p_format='e4m3' is impossible with v_format='bf16'; accepted: 'bf16'"),
        ({"scale_mode": "ue8m0"}, r"scale_mode must be one of 'fp32', 'pow2', got 'ue8m0'"),
        ({"accumulation": "fp16"}, r"accumulation must be one of 'fp32', 'tensor_core', 'tensor_core_two_level'"),
        ({"accumulation": "tensor_core:0"}, r"with fraction bits from 1 to 23 as in 'tensor_core:14', got"),
        ({"accumulation": "tensor_core:24"}, r"with fraction bits from 1 to 23"),
        ({"accumulation": "fp32:13"}, r"accumulation must be one of 'fp32'"),
        ({"accumulation": 13}, r"accumulation must be one of 'fp32'"),
        ({"accumulation": "tensor_core", "v_scale": "token"}, r"one accumulator for all keys has no place for a scale"),
        ({"rotation": "haar"}, r"unknown recipe fields \['rotation'\]; accepted: rotate, seed, balance"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_refusals_name_what_is_accepted(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe.from_json(json.dumps(change))
    with pytest.raises(ValueError, match=message):
        Recipe().replace(**change)


def test_a_tensor_cores_fraction_bits() -> None:
    assert Recipe(accumulation="tensor_core:13") == Recipe(accumulation="tensor_core"), "13 are what is meant"
    wider = Recipe(accumulation="tensor_core_two_level:14")
    assert wider.accumulator == ("tensor_core_two_level", 14) and Recipe.from_json(wider.to_json()) == wider
    assert Recipe().accumulator == ("fp32", 23)


def test_what_is_no_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown recipe 'fast'; accepted: default, per_tensor, fa3, fa3_paper"):
        Recipe.from_name("fast")
    with pytest.raises(TypeError, match=r"recipe must be a Recipe or a preset's name .*, got dict"):
        Recipe.resolve({})  # type: ignore[arg-type]
    for text, message in (("[1]", "a recipe must be a JSON object, got list"), ("{", "not a recipe: ")):
        path = tmp_path / "bad.json"
        path.write_text(text)
        with pytest.raises(ValueError, match=f"bad.json: {message}"):
            Recipe.load(path)
