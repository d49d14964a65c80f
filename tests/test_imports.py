"""Who may import whom (the design's section 2), read from the source of every module."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "fp8attn": "fp8attn",
    "kernels": "fp8attn.kernels",
    "transforms": "fp8attn.transforms",
    "analysis": "fp8attn.analysis",
}

# What each part may import of ours, besides itself. A module belongs to the longest name here that begins its own.
NUMERICS = {"transforms", "formats", "scaling", "recipe"}
KERNELS = {"kernels", "kernels.reference", "kernels.portable", "kernels.hopper"}
FACE = {"fp8attn"}  # `import fp8attn` and its lazy names
MAY_IMPORT = {
    "files": set(),  # a leaf: writes files whole
    "transforms": set(),
    "formats": set(),
    "scaling": {"formats", "files"} | FACE,  # the face for __version__, which goes into files
    "recipe": {"transforms", "formats", "scaling", "files"},
    "kernels": NUMERICS | KERNELS,
    "kernels.reference": NUMERICS | {"kernels"},
    "kernels.portable": NUMERICS | {"kernels", "files"},
    "kernels.hopper": NUMERICS | {"kernels"},
    "arguments": NUMERICS | {"kernels"},
    "library": NUMERICS | {"kernels", "arguments"},
    "ops": NUMERICS | {"kernels", "arguments", "library"},
    "cache": NUMERICS | KERNELS | {"ops", "files"},
    "distributed": NUMERICS | KERNELS | {"ops"},
    "analysis": NUMERICS | {"ops", "files"} | FACE,
    "analysis.bench": NUMERICS | KERNELS | {"ops", "files", "analysis"} | FACE,  # which also times single kernels
    "integrations": NUMERICS | {"ops", "cache"} | FACE,
    "testing": NUMERICS | {"ops", "analysis", "_hypothesis"} | FACE,
    "_hypothesis": {"testing"} | FACE,
    "cli": NUMERICS | {"ops", "files", "analysis", "analysis.bench"} | FACE,
    "__main__": {"cli"},
    "fp8attn": NUMERICS | KERNELS | {"ops", "cache", "distributed", "testing", "analysis", "integrations", "cli"},
}

# Imported where they are used, never when one of our modules is; except by those whose whole purpose they are.
OPTIONAL = {
    "triton",
    "matplotlib",
    "pandas",
    "pyarrow",
    "jinja2",
    "tomli",
    "transformers",
    "diffusers",
    "gguf",
    "tokenizers",
    "regex",
    "hypothesis",
}
MAY_NEED = {"kernels.portable": {"triton"}, "kernels.hopper": {"triton"}, "testing": {"hypothesis"}}


def modules() -> dict[str, tuple[Path, ast.Module]]:
    """Every module of ours by its installed name."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = [package, *path.relative_to(ROOT / folder).with_suffix("").parts]
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = (path, ast.parse(path.read_text(encoding="utf-8"), str(path)))
    return found


def imports(tree: ast.Module, name: str, is_package: bool, known: set[str]) -> Iterator[tuple[str, bool, int]]:
    """(imported module, whether importing ``name`` imports it, line), relative imports resolved."""

    def visit(node: ast.AST, now: bool) -> Iterator[tuple[str, bool, int]]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, now, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = name.split(".")[: len(name.split(".")) - node.level + is_package]
                base = ".".join([*package, base] if base else package)
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                yield (submodule if submodule in known else base), now, node.lineno
        elif isinstance(node, ast.Attribute):  # fp8attn.kernels.problem, after `import fp8attn`
            dotted = ast.unparse(node)
            if dotted.startswith("fp8attn.") and dotted in known:
                yield dotted, now, node.lineno
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            now = False
        later = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            yield from visit(child, now and not later)

    yield from visit(tree, True)


def part_of(module: str) -> str:
    name = module.removeprefix("fp8attn.")
    owners = [part for part in MAY_IMPORT if name == part or name.startswith(part + ".")]
    assert owners, f"{module} belongs to no part in MAY_IMPORT: say there what it may import"
    return max(owners, key=len)


def faults(tree: ast.Module, name: str, is_package: bool, known: set[str]) -> list[str]:
    part, out = part_of(name), []
    for target, now, line in imports(tree, name, is_package, known):
        top = target.split(".")[0]
        if top in FOLDERS and top != "fp8attn":
            out.append(f"{name}:{line} imports {target} by the name of its folder; it is fp8attn.{target}")
        elif top == "fp8attn" and part_of(target) not in MAY_IMPORT[part] | {part}:
            out.append(
                f"{name}:{line} imports {target}; {part} may import {sorted(MAY_IMPORT[part]) or 'nothing of ours'}"
            )
        elif top in OPTIONAL - MAY_NEED.get(part, set()) and now:
            out.append(f"{name}:{line} imports {target} on import; it is optional: import it where it is used")
    return out


def test_every_module_keeps_the_rules():
    found = modules()
    assert len(found) > 20
    problems = [
        fault
        for name, (path, tree) in found.items()
        for fault in faults(tree, name, path.name == "__init__.py", set(found))
    ]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("name", "source", "fault"),
    [
        ("fp8attn.transforms.new", "from fp8attn.formats import E4M3", "transforms may import nothing of ours"),
        ("fp8attn.transforms.new", "def f():\n    from fp8attn import formats", "imports fp8attn.formats"),
        ("fp8attn.transforms.new", "from .. import formats", "imports fp8attn.formats"),
        ("fp8attn.transforms.new", "from .hadamard import hadamard", None),
        ("fp8attn.formats", "import fp8attn.scaling", "imports fp8attn.scaling"),
        ("fp8attn.kernels.portable.new", "from ..reference import forward", "imports fp8attn.kernels.reference"),
        ("fp8attn.kernels.portable.new", "from ..problem import AttentionProblem", None),
        ("fp8attn.kernels.portable.new", "import triton.language as tl", None),
        ("fp8attn.kernels.dispatch", "import triton", "imports triton on import"),
        ("fp8attn.kernels.dispatch", "from fp8attn.ops import attention", "imports fp8attn.ops"),
        ("fp8attn.analysis.new", "import fp8attn\nfp8attn.kernels.problem", "imports fp8attn.kernels.problem"),
        ("fp8attn.analysis.new", "import fp8attn\nfp8attn.attention", None),
        ("fp8attn.analysis.new", "try:\n    import pandas\nexcept ImportError:\n    pandas = None", "imports pandas"),
        ("fp8attn.analysis.new", "class A:\n    import gguf", "imports gguf"),
        ("fp8attn.analysis.new", "def f():\n    import matplotlib.pyplot", None),
        ("fp8attn.analysis.new", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import gguf", None),
        ("fp8attn.ops", "from kernels.problem import X", "by the name of its folder"),
    ],
)
def test_the_check_itself(name, source, fault):
    known = {"fp8attn", "fp8attn.formats", "fp8attn.kernels.problem", "fp8attn.kernels.reference.forward"} | set(
        modules()
    )
    problems = "\n".join(faults(ast.parse(source), name, False, known))
    assert (fault in problems) if fault else not problems
