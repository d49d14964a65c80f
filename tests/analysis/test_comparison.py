"""The report on one input says what the functions it is made of say, and nothing that they do not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fp8attn
from fp8attn import Recipe
from fp8attn.analysis import (
    Comparison,
    ablations,
    compare,
    logit_error,
    make_qkv,
    predict,
    recipe_errors,
    split_by_cause,
)
from fp8attn.analysis.comparison import _advice
from fp8attn.analysis.outliers import AttentionShape, OutlierSpec

SHAPE = AttentionShape(1, 4, 2, 96, 96, 64)


def inputs(kind: str = "same_channels", seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    made = make_qkv(SHAPE, outliers=OutlierSpec(kind, 5.0), seed=seed)
    return made.q, made.k, made.v


@pytest.fixture(scope="module")
def report() -> Comparison:
    return compare(*inputs(), ["bf16", "fa3", "default"], is_causal=True, softcap=20.0)


def test_figures_are_those_of_the_parts(report: Comparison) -> None:
    q, k, v = inputs()
    options = {"is_causal": True, "softcap": 20.0}
    errors = recipe_errors(q, k, v, ["bf16", "fa3", "default"], **options)
    assert report.errors == errors and list(report.errors) == sorted(errors, key=lambda n: errors[n]["relative_error"])
    assert list(report.causes) == ["default", "fa3"] and report.best == "default"
    assert report.causes["fa3"] == split_by_cause(q, k, v, "fa3", **options)
    assert report.predictions["default"].output_error == predict(q, k, v, **options).output_error
    codes = fp8attn.quantize(q, k, v, is_causal=True)
    assert torch.equal(report.logit_errors["default"], logit_error(codes, q, k, **options))
    changed = ablations("default")
    assert set(report.ablations) == set(changed)
    for change, error in list(report.ablations.items())[:2]:
        assert error == recipe_errors(q, k, v, {"it": changed[change]}, **options)["it"]["relative_error"]


def test_codes_are_counted(report: Comparison) -> None:
    assert list(report.codes) == ["default", "fa3"], "16 bits have no codes to speak of"
    q, k, v = inputs()
    codes = fp8attn.quantize(q, k, v, recipe="fa3", is_causal=True)
    for name in "qkv":
        shares = report.codes["fa3"][name]
        values = getattr(codes, name).codes.float().abs()
        assert sum(shares.values()) == pytest.approx(1.0)
        assert shares[None] == float((values == 0).double().mean())
        assert shares[7] == float(((values >= 128) & (values < 256)).double().mean())


def test_key_maps_are_of_the_head_that_stands_out_before_and_after() -> None:
    q, k, v = inputs("none")
    k[0, 1, 5, 7] = 40.0
    batch, head, before, after = compare(q, k, v, "default").keys or (None,) * 4
    assert (batch, head) == (0, 1) and torch.equal(before, k[0, 1].double())
    recipe = Recipe()
    codes = fp8attn.quantize(q, k, v, recipe=recipe)
    assert (after - codes.k.dequantize()[0, 1].double()).norm() < 0.05 * after.norm()


def test_advice_is_made_of_the_figures(report: Comparison) -> None:
    error, other = report.errors["default"]["relative_error"], report.errors["fa3"]["relative_error"]
    shares = report.causes["default"].share
    assert report.advice.startswith(
        f"Take default: its output is off by {error:.2%}, {error / other:.2f} times what fa3"
    )
    assert f"({max(shares.values()):.0%} of its square)" in report.advice
    assert report.advice.endswith(".") and report.advice.count(". ") == 0, "one sentence"


def test_advice_names_a_change_that_helps() -> None:
    q, k, v = inputs("k_offset")
    report = compare(q, k, v, ["fa3", "per_tensor"])
    change = next(iter(report.ablations))
    assert change == "keys smoothed"
    assert f"with one change ({change}) it would be {report.ablations[change]:.2%}" in report.advice
    assert report.ablations[change] < 0.9 * report.errors["fa3"]["relative_error"]


def test_advice_where_there_is_none() -> None:
    assert _advice({"bf16": {"relative_error": 0.01}}, {}, None, {}).startswith("No recipe here quantizes")
    q, k, v = inputs()
    q[0, 0, 3, 4] = torch.nan
    report = compare(q, k, v, ["fa3", "default"])
    assert report.advice == "No recipe gives a finite error on this input: look for NaN and infinities in it."
    assert "Take" not in str(report)


def test_only_16_bits(tmp_path: Path) -> None:
    report = compare(*inputs(), "bf16")
    assert report.best is None and not report.causes and not report.ablations and report.keys is None
    report.save(tmp_path / "page.html")
    assert report.advice in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("seqlens", [(1, 1), (1, 40), (40, 0), (0, 40)])
def test_few_tokens_and_none(seqlens: tuple[int, int], tmp_path: Path) -> None:
    q, k, v = torch.randn(2, 4, seqlens[0], 64), torch.randn(2, 2, seqlens[1], 64), torch.randn(2, 2, seqlens[1], 32)
    report = compare(q, k, v, ["fa3", "default"])
    report.save(tmp_path / "page.html")
    assert all(figures["relative_error"] < 0.5 for figures in report.errors.values()), str(report)


def test_masks_and_sinks_reach_every_part() -> None:
    q, k, v = inputs()
    mask = torch.rand(96, 96) < 0.5
    mask[:, 0] = True
    options = {"attn_mask": mask, "sinks": torch.ones(4), "scale": 0.2}
    report = compare(q, k, v, ["fa3"], **options)
    assert report.errors == recipe_errors(q, k, v, ["fa3"], **options)
    assert report.causes["fa3"].total == pytest.approx(report.errors["fa3"]["relative_error"], rel=1e-3)


def test_it_prints_as_tables_and_the_advice(report: Comparison) -> None:
    lines = str(report).splitlines()
    assert lines[0].split()[:3] == ["recipe", "relative", "error"] and lines[-1] == report.advice
    assert re.search(rf"^ *default +{report.errors['default']['relative_error']:.4g} ", str(report), re.MULTILINE)


def test_progress_ends_at_the_end() -> None:
    seen: list[tuple[int, int, str]] = []
    compare(*inputs(), ["bf16", "fa3"], progress=lambda *said: seen.append(said))
    assert [done for done, _, _ in seen] == list(range(len(seen))) and seen[-1][0] == seen[-1][1]


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="recipes must name at least one recipe"):
        compare(*inputs(), [])
    with pytest.raises(TypeError, match="nonsense"):
        compare(*inputs(), "fa3", nonsense=1)
