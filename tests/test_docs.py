"""Every Python block of the README and of docs/ runs, and so does every example in a docstring."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import fp8attn

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
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert blocks, f"{page.name} has no Python block to hold it to the code"
    names: dict[str, object] = {}
    for block in blocks:  # later blocks go on from earlier ones
        exec(compile(block, str(page), "exec"), names)


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
