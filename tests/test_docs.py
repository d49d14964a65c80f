"""Every Python block of the README and of docs/ runs, and so does every example in a docstring."""

from __future__ import annotations

import doctest
import importlib
import json
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import fp8attn
from fp8attn.analysis import evaluate, load_sample

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md")])
MODULES = sorted(
    module.name
    for package in ("fp8attn", "fp8attn.transforms", "fp8attn.kernels", "fp8attn.kernels.reference", "fp8attn.analysis")
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}.")
    if not module.name.endswith("__main__") and not re.fullmatch(r"fp8attn\.(tests|fp8attn|docs)", module.name)
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    text = page.read_text(encoding="utf-8")
    for block in re.findall(r"^```toml\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        (tmp_path / "mine.toml").write_text(block, encoding="utf-8")  # the study that the page then runs
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert blocks, f"{page.name} has no Python block to hold it to the code"
    names: dict[str, object] = {}
    for block in blocks:  # later blocks go on from earlier ones
        exec(compile(block, str(page), "exec"), names)


def test_the_readmes_figures_are_the_measured_ones() -> None:
    mean = json.loads((ROOT / "docs/results/cpu/sample.json").read_text(encoding="utf-8"))["mean"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("**", "")
    for name, figures in mean.items():
        row = f"| `{name}` | {figures['relative_error']:.4f} | {figures['sqnr_db']:.1f} dB | {figures['cosine']:.5f} |"
        assert row in readme
    ratios = [row["times_sdpa"] for row in json.loads((ROOT / "docs/results/cpu/reference.json").read_text())["rows"]]
    assert f"{sorted(ratios)[-2]:.1f} to {max(ratios):.1f} times" in readme


def test_the_readmes_speeds_are_the_measured_ones() -> None:
    measured = json.loads((ROOT / "docs/results/h200/prefill.json").read_text(encoding="utf-8"))["rows"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("**", "")
    lines = re.findall(r"^\| (\d+) x (\d+) x (\d+) x (\d+)(, causal)? \| (.*) \|$", readme, re.MULTILINE)
    assert len(lines) >= 3
    for *shape, causal, cells in lines:
        keys = ("batch", "num_q_heads", "seqlen_q", "head_dim", "causal")
        problem = dict(zip(keys, (*map(int, shape), bool(causal)), strict=True))
        rows = [row for row in measured if problem.items() <= row.items() and row["impl"] != "fa2-bf16"]
        ours = [f"{row['tflops']:.0f} ({row['times_cudnn']:.2f} times)" for row in rows[1:]]
        assert cells == " | ".join([f"{rows[0]['tflops']:.0f}", *ours])


def test_the_outlier_studys_figures_are_the_measured_ones() -> None:
    seen = {}
    for name in ("fa3-table3", "granularity", "transforms"):
        result = json.loads((ROOT / f"docs/results/cpu/studies/{name}.json").read_text(encoding="utf-8"))
        assert all(claim["holds"] for claim in result["claims"]) and len(result["grid"]["seed"]) == 10
        seen[name] = [(claim["smallest"], claim["largest"]) for claim in result["claims"]]
    page = " ".join((ROOT / "docs/outlier-study.md").read_text(encoding="utf-8").split())
    (tensor, rotation, block, rmse, *_), (_, e4m3, int8) = seen["fa3-table3"], seen["granularity"]
    same, disjoint, *never, _ = seen["transforms"]
    assert f"to {same[1]:.2f} times" in page and f"multiplies it by {disjoint[1]:.0f}." in page
    assert f"at most {max(most for _, most in never):.2f} times either" in page
    assert f"costs {tensor[0]:.2f} to {tensor[1]:.2f} times" in page
    assert f"without it {rotation[0]:.2f} to {rotation[1]:.2f} times, without block scales {block[1]:.2f}." in page
    assert f"{rmse[0] * 1e3:.1f}e-3 to {rmse[1] * 1e3:.1f}e-3" in page
    assert f"is {e4m3[1]:.1f} times as far off" in page and f"enough ({int8[1]:.1f} times)" in page


def test_the_committed_sample_result_is_what_a_run_gives() -> None:
    """Sums in another order move a rare weight across a rounding boundary: 1e-3 of an error is far from any change."""
    committed = json.loads((ROOT / "docs/results/cpu/sample.json").read_text(encoding="utf-8"))["mean"]
    for name, figures in evaluate(load_sample())["mean"].items():
        assert figures["relative_error"] == pytest.approx(committed[name]["relative_error"], rel=1e-3), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("name", ["fp8attn", *MODULES])
def test_docstring_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


def test_every_public_function_has_a_docstring() -> None:
    for name in fp8attn.__all__:
        assert getattr(fp8attn, name).__doc__, name
