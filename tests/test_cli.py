"""The command line, as a user types it."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import fp8attn
from fp8attn import Recipe, cli
from fp8attn.analysis import errors, load_sample, recipe_errors
from fp8attn.analysis.metrics import METRICS
from fp8attn.cli import app

DEFAULT_RECIPES = ["bf16", "per_tensor", "fa3", "default"]


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "120", "NO_COLOR": "1"})


def strict(text: str) -> Any:
    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Two layers of 32 tokens; the metadata says causal."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in (3, 7):
        tensors[f"layers.{layer}.q"] = torch.randn(1, 4, 32, 64, generator=generator)
        tensors[f"layers.{layer}.k"] = torch.randn(1, 2, 32, 64, generator=generator)
        tensors[f"layers.{layer}.v"] = torch.randn(1, 2, 32, 64, generator=generator)
    path = tmp_path / "small.safetensors"
    save_file(tensors, path, metadata={"causal": "true", "layout": "bhsd", "model": "Noise-1"})
    return path


def test_sample_as_json_from_a_real_process() -> None:
    command = [sys.executable, "-m", "fp8attn", "run", "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == "", "no progress bar where stderr is no terminal"
    result = strict(done.stdout)
    assert result["fp8attn"] == fp8attn.__version__ and result["torch"] == torch.__version__
    assert result["causal"] is True and "smollm2" in result["source"]["metadata"]["model"].lower()
    sample = load_sample()
    assert [layer["layer"] for layer in result["layers"]] == [layer.name for layer in sample.layers]
    for layer in result["layers"]:
        assert list(layer["recipes"]) == DEFAULT_RECIPES
        for figures in layer["recipes"].values():
            assert tuple(figures) == METRICS and all(isinstance(value, float) for value in figures.values())
    mean = {recipe: figures["relative_error"] for recipe, figures in result["mean"].items()}
    # 0.60 over the whole model was measured, 0.65 is the promise; bf16 has 16 times finer steps than E4M3.
    assert mean["default"] <= 0.65 * mean["per_tensor"]
    assert mean["bf16"] < mean["default"] / 4


def test_table(small: Path) -> None:
    done = invoke("run", small)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == (
        "small.safetensors (Noise-1): 2 layers, batch 1, 4 query on 2 kv heads, head dim 64, 32 tokens, causal"
    )
    headings = ["layer", "recipe", "relative error", "SQNR dB", "cosine", "largest error", "LSE error"]
    assert any(all(heading in line for heading in headings) for line in lines)
    cells = [line.split() for line in lines]
    for name in ("layers.3", "layers.7", "mean"):
        assert [name, "bf16"] in [row[:2] for row in cells]
    assert sum(row[:1] == ["default"] for row in cells) == 3
    errors = recipe_errors(*_qkv(small), "fa3", is_causal=True)["fa3"]
    row = next(row for row in cells if row[:1] == ["fa3"])
    assert row[1] == f"{errors['relative_error']:.4f}" and row[2] == f"{errors['sqnr_db']:.1f}"
    assert "default's relative error is" in " ".join(done.stdout.split())


def _qkv(path: Path) -> list[torch.Tensor]:
    layer = fp8attn.analysis.load_qkv(path).layers[0]
    return [layer.q, layer.k, layer.v]


def test_options_reach_the_computation(small: Path, tmp_path: Path) -> None:
    mine = Recipe.from_name("default").replace(rotate="none")
    (tmp_path / "mine.json").write_text(mine.to_json())
    done = invoke(
        "run", small, "-r", "fa3", "-r", tmp_path / "mine.json", "--no-causal", "--layers", "7", "--json", "-"
    )
    assert done.exit_code == 0, done.output
    result = strict(done.stdout)
    assert result["causal"] is False and [layer["layer"] for layer in result["layers"]] == ["layers.7"]
    layer = fp8attn.analysis.load_qkv(small, layers=[7]).layers[0]
    assert result["layers"][0]["recipes"] == recipe_errors(layer.q, layer.k, layer.v, {"fa3": "fa3", "mine": mine})
    assert Recipe.from_dict(result["recipes"]["mine"]) == mine


@pytest.mark.parametrize("layers", [["layers.7,3"], ["layers.3, layers.7"], ["3,7"], ["7", "3"], ["layers.7", "3"]])
def test_layers_by_name_or_number(small: Path, layers: list[str]) -> None:
    options = [word for part in layers for word in ("--layers", part)]
    result = strict(invoke("run", small, "-r", "fa3", *options, "--json", "-").stdout)
    assert [layer["layer"] for layer in result["layers"]] == ["layers.3", "layers.7"]


def test_layout(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    names = ("q", "k", "v")
    tensors = {name: torch.randn(1, 16, 16, 64, generator=generator) for name in names}  # either axis may be the heads
    path = tmp_path / "qkv.safetensors"
    save_file(tensors, path)
    assert "layout" in invoke("run", path).stderr
    result = strict(invoke("run", path, "--layout", "bshd", "-r", "fa3", "--json", "-").stdout)
    assert result["layers"][0]["recipes"] == recipe_errors(*(tensors[name].transpose(1, 2) for name in names), "fa3")
    assert result["causal"] is False


def test_files_are_written(small: Path, tmp_path: Path) -> None:
    as_json, table, twice = tmp_path / "a.json", tmp_path / "b.md", tmp_path / "c.txt"
    assert invoke("run", small, "-r", "fa3", "--out", table, "--json", as_json).exit_code == 0
    printed = invoke("run", small, "-r", "fa3", "--out", twice.with_suffix(".json"), "--json", "-")
    assert strict(as_json.read_text()) == strict(printed.stdout) == strict(twice.with_suffix(".json").read_text())
    assert "| layers.3 | fa3 |" in table.read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"small.safetensors", "a.json", "b.md", "c.json"}


def test_nothing_is_written_when_the_run_fails(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "result.json"
    target.write_text("older")

    def fail(*_: object, **__: object) -> None:
        raise ValueError("half way")

    monkeypatch.setattr(errors, "attention", fail)
    done = invoke("run", small, "--json", target)
    assert (done.exit_code, done.stderr) == (2, "fp8attn: error: half way\n")
    assert target.read_text() == "older" and {path.name for path in tmp_path.iterdir()} == {small.name, target.name}


def test_interrupt(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(errors, "attention", interrupt)
    done = invoke("run", small)
    assert (done.exit_code, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_interrupt_of_a_real_process(small: Path) -> None:
    program = (
        "import os, signal, sys, time, fp8attn.analysis.errors as c\n"
        # Another thread may receive the signal; wait until this one is told.
        "c.attention = lambda *a, **k: (os.kill(os.getpid(), signal.SIGINT), time.sleep(60))\n"
        "from fp8attn.cli import app\n"
        f"sys.argv = ['fp8attn', 'run', {str(small)!r}]\n"
        "app()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) in {(130, "interrupted\n"), (-signal.SIGINT, "interrupted\n")}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{tmp}/absent.safetensors"], "absent.safetensors"),
        (["{tmp}/text.pt"], "text.pt"),
        (["{small}", "--recipe", "nope"], "unknown recipe 'nope'; accepted: default, per_tensor"),
        (["{small}", "--recipe", "{tmp}/absent.json"], "absent.json"),
        (["{small}", "--recipe", "{tmp}/bad.json"], "bad.json: unknown recipe fields ['nonsense']"),
        (["{small}", "--recipe", "fa3", "--recipe", "fa3"], "recipes must have different names"),
        (["{small}", "--layers", "9"], "no layers [9]"),
        (["{small}", "--layers", "layers.9,3"], "no layers layers.9 in small.safetensors; it holds layers.3, layers.7"),
        (["{small}", "--layers", "3,,7"], "--layers must be indices or names separated by commas, got '3,,7'"),
        (["{small}", "--layout", "sdhb"], "layout is 'sdhb'"),
        (["--layout", "bhsd"], "--layout"),
        (["{small}", "--out", "{tmp}/result.txt"], "--out must end in .json or .md"),
        (["{small}", "--out", "{tmp}/no/result.md"], "no does not exist"),
        (["{small}", "--json", "{tmp}/no/result.json"], "no does not exist"),
        (["{small}", "--json", "{tmp}"], "it is a folder"),
        (["{small}", "--json", "{small}"], "small.safetensors: cannot write it, it is the input"),
        (["{small}", "--json", "{tmp}/link.json"], "link.json: cannot write it, it is the input"),
        (["{small}", "-r", "{tmp}/good.json", "--json", "{tmp}/good.json"], "--json {tmp}/good.json: cannot write it"),
        (["{small}", "-r", "{tmp}/good.json", "--out", "{tmp}/./good.json"], "--out {tmp}/good.json: cannot write it"),
        (["{small}", "--out", "{tmp}/new.json", "--json", "{tmp}/new.json"], "or the other output {tmp}/new.json"),
        (["{small}", "--out", ""], "--out must name a file, got ''"),
        (["{small}", "--json", ""], "--json must name a file, got ''"),
        (["{small}", "--json", os.devnull], "it is a device or pipe"),
        (["{small}", "--layers", "3", "--layers", "9"], "no layers [9]"),
        (["{small}", "-r", "{tmp}/deep.json"], "deep.json"),
        (["{tmp}/scale.safetensors"], "scale.safetensors: scale in the metadata is 'inf'"),
        (["{tmp}/\x1b[31m[bold].safetensors"], "{tmp}/\\x1b[31m[bold].safetensors"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("work was begun before the options were checked")

    monkeypatch.setattr(errors, "attention", fail)
    (tmp_path / "text.pt").write_text("these are not tensors")
    (tmp_path / "bad.json").write_text('{"nonsense": 1}')
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "good.json").write_text(good := Recipe().to_json())
    (tmp_path / "link.json").symlink_to(small)
    save_file(load_file(small), tmp_path / "scale.safetensors", metadata={"scale": "inf"})
    before = {path.name for path in tmp_path.iterdir()}
    filled = [argument.format(small=small, tmp=tmp_path) for argument in arguments]
    done = invoke("run", *filled)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert done.stderr.startswith("fp8attn: error: ") and done.stderr.count("\n") == 1
    assert message.format(tmp=tmp_path) in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == before and (tmp_path / "good.json").read_text() == good


def real(*arguments: object, shell: str = 'exec "$@"', **options: Any) -> subprocess.CompletedProcess[str]:
    command = ["sh", "-c", shell, "sh", sys.executable, "-m", "fp8attn", *map(str, arguments)]
    return subprocess.run(command, **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options})


posix = pytest.mark.skipif(os.name != "posix", reason="needs sh")


@posix
@pytest.mark.parametrize("arguments", [["--json", "-"], []])
def test_nobody_reads_stdout(small: Path, arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = real("run", small, "-r", "fa3", *arguments, stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


@posix
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_behind_stdout(small: Path) -> None:
    with open("/dev/full", "w") as full:
        done = real("run", small, "-r", "fa3", "--json", "-", stdout=full)
    assert done.returncode == 2 and done.stderr.startswith("fp8attn: error: ") and done.stderr.count("\n") == 1


@posix
def test_closed_streams(small: Path, tmp_path: Path) -> None:
    done = real("run", small, "-r", "fa3", "--json", "-", shell='exec "$@" >&-')
    assert (done.returncode, done.stderr) == (2, "fp8attn: error: --json - writes to stdout, which is closed\n")
    assert (lambda d: (d.returncode, d.stderr))(real("run", small, "-r", "fa3", shell='exec "$@" >&-')) == (0, "")
    done = real("run", small, "-r", "fa3", "--json", "-", shell='exec "$@" 2>&-')
    assert done.returncode == 0 and strict(done.stdout)["layers"]
    assert real("run", tmp_path / "absent", shell='exec "$@" 2>&-').returncode == 2


def test_values_that_are_not_finite_are_announced(small: Path) -> None:
    tensors = load_file(small)
    tensors["layers.3.k"][0, 0, 0, :2] = torch.tensor([torch.nan, torch.inf])
    tensors["layers.7.v"][0, 0, 0, 0] = -torch.inf
    assert invoke("run", small, "-r", "fa3").stderr == ""
    save_file(tensors, small)
    done = invoke("run", small, "-r", "fa3", "--json", "-")
    assert done.exit_code == 0 and strict(done.stdout)["layers"]
    assert done.stderr.startswith("fp8attn: warning: ") and done.stderr.count("\n") == 1
    assert "layers.3 k (2 of 4096), layers.7 v (1 of 4096)" in done.stderr
    assert "layers.3" not in invoke("run", small, "-r", "fa3", "--layers", "7").stderr


def test_names_from_files_are_printed_not_obeyed(small: Path, tmp_path: Path) -> None:
    tensors = {
        f"\x1b[31m[red]evil.{name[-1]}": t for name, t in load_file(small).items() if name.startswith("layers.3")
    }
    path, table = tmp_path / "[bold]\x1b]0;title\x07.safetensors", tmp_path / "table.md"
    save_file(tensors, path, metadata={"model": "a\r\nb\x9b1m\u202e[link=x]c"})
    recipe = tmp_path / "\x1b[1m.json"
    recipe.write_text(Recipe().to_json())
    done = invoke("run", path, "-r", recipe, "--out", table)
    assert done.exit_code == 0, done.output
    for text in (done.stdout, table.read_text()):
        assert all(c.isprintable() or c == "\n" for c in text)
        assert text.startswith("[bold]\\x1b]0;title\\x07.safetensors (a\\r\\nb\\x9b1m\\u202e[link=x]c): 1 layer")
        assert "\\x1b[31m[red]evil" in text and "\\x1b[1m" in text
    raw = strict(invoke("run", path, "-r", recipe, "--json", "-").stdout)
    assert raw["layers"][0]["layer"] == "\x1b[31m[red]evil", "JSON says what is there, escaped by its own rules"


def test_progress_bar_takes_names_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with cli._progress_bar("comparing") as progress:
        assert progress is not None
        progress(1, 2, "[bold]\x07layer")
    assert "[bold]\\x07layer" in terminal.getvalue()


def test_heading_names_the_model_file(small: Path) -> None:
    tensors = load_file(small)
    save_file(tensors, small, metadata={"model": "Long Name Ep2", "model_file": "Model-1.5B.Q4_1.gguf"})
    assert invoke("run", small, "-r", "fa3").stdout.startswith("small.safetensors (Model-1.5B.Q4_1): 2 layers")


def test_capture_passes_its_options_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fp8attn.analysis.capturing as module

    seen: dict[str, Any] = {}

    def record(text: Path, out: Path, **options: Any) -> Path:
        seen.update(options, text=text, out=out)
        return out

    monkeypatch.setattr(module, "capture", record)
    text, out = tmp_path / "text.txt", tmp_path / "qkv.safetensors"
    done = invoke("capture", text, "--out", out, "--layers", "0", "--layers", "15", "--tokens", 99, "--model", "m.gguf")
    assert done.exit_code == 0 and done.stdout == f"wrote {out}\n"
    expected = {"text": text, "out": out, "layers": [0, 15], "max_tokens": 99, "model_path": Path("m.gguf")}
    assert seen == {**expected, "progress": None}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{tmp}/absent.txt", "--out", "{tmp}/a.safetensors"], "absent.txt"),
        (["{tmp}/t.txt", "--out", "{tmp}/no/a.safetensors"], "no does not exist"),
        (["{tmp}/t.txt", "--out", "{tmp}/t.txt"], "it is the input"),
        (["{tmp}/t.txt", "--out", "{tmp}/m.gguf", "--model", "{tmp}/m.gguf"], "--out {tmp}/m.gguf: cannot write it"),
        (["{tmp}/t.txt", "--out", ""], "--out must name a file, got ''"),
        (["{tmp}/t.txt", "--out", "{tmp}/a.safetensors", "--layers", "x"], "--layers must be layer indices"),
    ],
)
def test_capture_refusals(arguments: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("a text")
    done = invoke("capture", *(argument.format(tmp=tmp_path) for argument in arguments))
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("fp8attn: error: ") and message.format(tmp=tmp_path) in done.stderr


def test_help_is_short_and_loads_nothing_heavy() -> None:
    program = (
        "import sys; from fp8attn.cli import app\n"
        "sys.argv = ['fp8attn', '--help']\n"
        "try: app()\n"
        "finally: print(sorted({'torch', 'numpy', 'triton', 'matplotlib'} & set(sys.modules)), file=sys.stderr)\n"
    )
    environment = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert done.stderr == "[]\n"
    for word in ("run", "capture", "--version", "fp8attn run qkv.safetensors --causal"):
        assert word in done.stdout
    assert len(done.stdout.splitlines()) <= 24, "one screen"


def test_option_help_and_version() -> None:
    text = invoke("run", "--help").stdout
    for option in ("--recipe", "--causal", "--no-causal", "--layers", "--layout", "--out", "--json"):
        assert option in text
    assert "fp8attn[gguf]" in invoke("capture", "--help").stdout
    assert invoke("--version").stdout == f"fp8attn {fp8attn.__version__}\n"
    assert invoke("run", "--nonsense").exit_code == 2


STUDY = """
question = "Which is better?"
measure = "attention"
[grid]
length = [64]
recipe = ["fa3", "default"]
seed = [0, 1]
[[claims]]
says = "The error is small."
figure = "relative_error"
at_most = 0.2
[[claims]]
says = "The error is nothing."
figure = "relative_error"
at_most = 0.0
"""


def test_study_lists_what_there_is() -> None:
    done = invoke("study")
    assert done.exit_code == 0
    for name in fp8attn.analysis.STUDIES:
        assert f"{name} " in done.stdout


def test_study_runs_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(STUDY)
    done = invoke("study", "mine.toml", "--jobs", "1", "--set", "head_dim=32,64", "--seeds", "3")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"yes  The error is small\. \[0\.0\d+ to 0\.0\d+\]", lines[0])
    assert lines[1].startswith("NO   The error is nothing.")
    assert lines[2] == f"12 rows; report: {Path('mine') / 'report.html'}"
    table = (tmp_path / "mine" / "table.csv").read_text().splitlines()
    assert len(table) == 13 and table[0].startswith("length,recipe,seed,head_dim,kind,")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "unknown study 'nope'; accepted: accumulation"),
        (["absent.toml"], "absent.toml"),
        (
            ["transforms", "--set", "length"],
            "must be an axis and its values, as in length=512,1024, got 'length'",
        ),
        (["transforms", "--set", "lenght=3"], "has no axis 'lenght'"),
        (["transforms", "--set", "length=a"], "axis 'length' must be positive integers, got 'a'"),
        (["transforms", "--set", "causal=yes"], "axis 'causal' must be true or false, got 'yes'"),
        (["transforms", "--device", "abacus"], "abacus"),
        (["real-model", "--set", "capture=absent.safetensors"], "absent.safetensors"),
    ],
)
def test_study_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = invoke("study", *arguments, "--jobs", "1")
    assert done.exit_code == 2 and message in done.stderr, done.output
    assert done.stderr.count("\n") == 1


def test_compare_prints_and_writes_a_page(small: Path, tmp_path: Path) -> None:
    done = invoke("compare", small, "-r", "fa3", "-r", "default", "--causal", "--out", tmp_path / "page.html")
    assert done.exit_code == 0, done.output
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    for layer in fp8attn.analysis.load_qkv(small).layers:
        report = fp8attn.analysis.compare(layer.q, layer.k, layer.v, ["fa3", "default"], is_causal=True)
        assert f"{layer.name}\n{report}\n" in done.stdout
        assert report.advice in page and f"{layer.name}: errors of attention" in page
    assert done.stdout.endswith(f"wrote {tmp_path / 'page.html'}\n")


def test_compare_says_what_is_wrong(small: Path, tmp_path: Path) -> None:
    for arguments, message in (
        ([small, "--out", tmp_path / "absent" / "page.html"], "does not exist"),
        ([small, "--out", small], "it is the input"),
        ([tmp_path / "absent.npz", "--out", tmp_path / "page.html"], "absent.npz"),
    ):
        done = invoke("compare", *arguments)
        assert done.exit_code == 2 and message in done.stderr
    assert not (tmp_path / "page.html").exists()
