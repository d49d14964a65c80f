"""Studies run every cell once, whatever stops them, and refuse what they cannot run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas
import pytest
import torch
from safetensors.torch import save_file

from fp8attn import Recipe
from fp8attn.analysis import Claim, Study, StudyResult, load_sample, load_study, recipe_errors, rmse, run_study
from fp8attn.analysis.exact import exact_attention
from fp8attn.analysis.outliers import AttentionShape, OutlierSpec, make_qkv
from fp8attn.ops import attention

GRID = {
    "kind": ["iid", "k_offset"],
    "magnitude": [3.0, 10.0],
    "length": [64],
    "recipe": ["fa3", "default"],
    "seed": [0, 1],
}
SMALL = Study("small", "Does it work?", "By trying.", "attention", GRID)
TOML = """
question = "Does it work?"
measure = "attention"
seeds = 2
[grid]
length = [64]
recipe = ["fa3", "mine"]
[recipes.mine]
base = "fa3"
k_scale = "token"
[quick]
seeds = 1
"""


def cells_done(folder: Path) -> list[str]:
    lines = (folder / "journal.jsonl").read_bytes().split(b"\n")[1:]
    return [json.loads(line)["cell"] for line in lines[:-1]]  # what follows the last end of a line is no line yet


def test_the_table_holds_what_was_measured(tmp_path: Path) -> None:
    table = run_study(SMALL, tmp_path).table
    assert len(table) == 16
    assert table[list(GRID)].values.tolist() == [
        [kind, magnitude, 64, recipe, seed]
        for kind in GRID["kind"]
        for magnitude in GRID["magnitude"]
        for recipe in GRID["recipe"]
        for seed in GRID["seed"]
    ]
    row = table[(table.kind == "k_offset") & (table.magnitude == 10) & (table.recipe == "default") & (table.seed == 1)]
    q, k, v = make_qkv(AttentionShape(1, 2, 2, 64, 64, 128), outliers=OutlierSpec("k_offset", 10.0), seed=1)
    assert row["rmse"].item() == pytest.approx(rmse(attention(q, k, v), exact_attention(q, k, v)[0]), rel=1e-6)
    expected = recipe_errors(q, k, v, "default")["default"]
    assert row["lse_error"].item() == pytest.approx(expected["lse_error"], rel=1e-6)


def test_files_agree_and_say_with_what_they_were_made(tmp_path: Path) -> None:
    study = load_study_text(tmp_path, TOML + '[[plots]]\nname="e"\nx="recipe"\ny="rmse"\nx_scale="category"\n')
    result = run_study(study, tmp_path / "out", command="fp8attn study it.toml")
    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir()) == sorted(
        ["journal.jsonl", "table.csv", "table.parquet", "e.png", "e.svg", "report.html", "study.json"]
    )
    csv, parquet = pandas.read_csv(out / "table.csv"), pandas.read_parquet(out / "table.parquet")
    assert parquet.equals(result.table)
    assert csv["rmse"].tolist() == result.table["rmse"].tolist()
    about = json.loads((out / "study.json").read_text())
    assert about["provenance"]["command"] == "fp8attn study it.toml"
    assert about["provenance"]["recipes"]["mine"] == Recipe.from_name("fa3").replace(k_scale="token").to_dict()
    page = (out / "report.html").read_text()
    for words in ("Does it work?", "fp8attn study it.toml", torch.__version__, "e-point".replace("e-", "s0-")):
        assert words in page


def test_a_second_run_does_nothing_anew_and_a_wider_grid_only_what_is_new(tmp_path: Path) -> None:
    run_study(SMALL, tmp_path)
    before = (tmp_path / "table.csv").read_bytes()
    run_study(SMALL, tmp_path)
    assert (tmp_path / "table.csv").read_bytes() == before and len(cells_done(tmp_path)) == 16
    wider = run_study(SMALL.with_grid({"seed": [0, 1, 2]}), tmp_path)
    assert len(wider.table) == 24 and len(cells_done(tmp_path)) == len(set(cells_done(tmp_path))) == 24


def test_processes_give_what_one_gives(tmp_path: Path) -> None:
    run_study(SMALL, tmp_path / "one")
    run_study(SMALL, tmp_path / "two", jobs=2)
    assert (tmp_path / "one" / "table.csv").read_bytes() == (tmp_path / "two" / "table.csv").read_bytes()


def test_another_recipe_of_the_same_name_is_another_cell(tmp_path: Path) -> None:
    first = run_study(load_study_text(tmp_path, TOML), tmp_path / "out").table
    second = run_study(load_study_text(tmp_path, TOML.replace('"token"', '"tensor"')), tmp_path / "out").table
    same = first["recipe"] == "fa3"
    assert first[same].equals(second[same]) and (first[~same]["rmse"] != second[~same]["rmse"]).all()
    assert len(cells_done(tmp_path / "out")) == 6


@pytest.mark.skipif(os.name != "posix", reason="sends signals")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_is_stopped_goes_on_where_it_stopped(tmp_path: Path, how: signal.Signals) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    command = [sys.executable, "-m", "fp8attn", "study", "transforms", "--quick", "--set", "length=512", "--jobs", "2"]
    process = subprocess.Popen([*command, "--out", stopped], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not (stopped / "journal.jsonl").exists() or len(cells_done(stopped)) < 10:
        assert process.poll() is None and time.monotonic() < deadline, "ended before it could be stopped"
        time.sleep(0.02)
    process.send_signal(how)
    _, said = process.communicate(timeout=120)
    assert process.returncode == (130 if how == signal.SIGINT else -how), said.decode()
    if how == signal.SIGINT:
        assert said.decode() == "interrupted\n"
    time.sleep(0.5)  # workers of a process that was killed end as soon as they see it
    done = cells_done(stopped)
    assert 10 <= len(done) < 168 and not (stopped / "table.csv").exists()
    subprocess.run([*command, "--out", stopped], check=True, capture_output=True)
    again = cells_done(stopped)
    assert again[: len(done)] == done and len(again) == len(set(again)) == 168
    run_study(load_study("transforms").at_quick(), whole, jobs=2)
    for name in ("table.csv", "table.parquet", "transforms.svg"):
        assert (stopped / name).read_bytes() == (whole / name).read_bytes()


def test_a_line_that_was_being_written_is_measured_again(tmp_path: Path) -> None:
    run_study(SMALL, tmp_path)
    before, journal = (tmp_path / "table.csv").read_bytes(), tmp_path / "journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-20])
    run_study(SMALL, tmp_path)
    assert (tmp_path / "table.csv").read_bytes() == before and len(cells_done(tmp_path)) == 16


def test_a_journal_of_another_version_is_left_alone(tmp_path: Path) -> None:
    run_study(SMALL, tmp_path)
    journal = tmp_path / "journal.jsonl"
    other = journal.read_bytes().replace(torch.__version__.encode(), b"1.0", 1)
    journal.write_bytes(other)
    with pytest.raises(ValueError, match=r"journal.jsonl was made with fp8attn .*, torch 1.0, device cpu"):
        run_study(SMALL, tmp_path)
    journal.write_bytes(b"not json\n")
    with pytest.raises(ValueError, match=r"journal.jsonl, line 1: not a study's journal"):
        run_study(SMALL, tmp_path)
    assert journal.read_bytes() == b"not json\n"


@pytest.mark.skipif(os.name != "posix", reason="locks are POSIX's")
def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    import fcntl

    (tmp_path / "journal.jsonl").touch()
    with (tmp_path / "journal.jsonl").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError, match="another run is at work in"):
            run_study(SMALL, tmp_path)


def test_a_cell_that_fails_leaves_the_others_in_the_journal(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="kind must be one of"):
        run_study(SMALL.with_grid({"kind": ["iid", "nonsense"]}), tmp_path)
    assert len(cells_done(tmp_path)) == 8 and not (tmp_path / "table.csv").exists()


def load_study_text(folder: Path, text: str) -> Study:
    (folder / "it.toml").write_text(text)
    return load_study(folder / "it.toml")


def test_a_file_is_what_it_says(tmp_path: Path) -> None:
    study = load_study_text(tmp_path, TOML)
    assert study.name == "it" and study.question == "Does it work?"
    assert study.grid == {"length": [64], "recipe": ["fa3", "mine"], "seed": [0, 1]}
    assert study.at_quick().grid["seed"] == [0]
    assert study.recipes["mine"] == Recipe.from_name("fa3").replace(k_scale="token")
    cell = next(study.cells())
    assert list(cell)[:3] == ["length", "recipe", "seed"] and cell["head_dim"] == 128 and cell["kind"] == "none"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('measure = "attention"', 'measure = "speed"', "measure must be one of attention, rounding"),
        ('question = "Does it work?"', "", "a study needs a question"),
        ("seeds = 2", "seeds = 0", "seeds must be a positive number of seeds, got 0"),
        ("seeds = 2", "color = 2", "unknown 'color'; accepted: question, method"),
        ("length = [64]", "lenght = [64]", "measure 'attention' has no axis 'lenght'; accepted: recipe, kind"),
        ("length = [64]", "length = 64", "axis 'length' must be a list of values, got 64"),
        ("length = [64]", "length = []", "axis 'length' must be a list of values, got []"),
        ("length = [64]", "length = [0]", "axis 'length' must be positive integers, got 0"),
        ("length = [64]", "length = ['a']", "axis 'length' must be positive integers, got 'a'"),
        ("length = [64]", "length = [64]\nmagnitude = [true]", "axis 'magnitude' must be numbers, got True"),
        ("length = [64]", "length = [64]\ncausal = [1]", "axis 'causal' must be true or false, got 1"),
        ("length = [64]", "length = [64]\nseed = [1]", "seeds and an axis seed say the same: give one of them"),
        ("seeds = 2\n[grid]", "[grid]\nseed = [-1]", "axis 'seed' must be integers of 0 or more, got -1"),
        ("length = [64]", "length = [64, 64]", "axis 'length' lists a value twice"),
        ('recipe = ["fa3", "mine"]', "", "measure 'attention' needs the axis recipe"),
        ('"fa3", "mine"', '"fa4"', "unknown recipe 'fa4'; accepted: default, per_tensor"),
        ('base = "fa3"', 'base = "fa4"', "unknown recipe 'fa4'"),
        ('k_scale = "token"', 'k_size = "token"', "unknown recipe fields ['k_size']"),
        ("[quick]", "[[plots]]\nx='length'\n[quick]", "plots: missing 2 required positional arguments: 'name' and 'y'"),
        (
            "[quick]",
            "[[plots]]\nname='p'\nx='length'\ny='rmse'\n[quick]",
            "plot 'p' would average over recipe; say which",
        ),
        ("[quick]", "[[claims]]\nsay='x'\n[quick]", "claims: unknown 'say'; accepted: says, figure"),
        ("[grid]", "[grid", "it.toml"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in TOML
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load_study_text(tmp_path, TOML.replace(old, new))
    assert str(tmp_path / "it.toml") in str(caught.value)


def test_names_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown study 'fa3'; accepted: accumulation, causality"):
        load_study("fa3")
    with pytest.raises(FileNotFoundError):
        load_study(tmp_path / "absent.toml")
    with pytest.raises(ValueError, match="jobs must be at least 1"):
        run_study(SMALL, tmp_path, jobs=0)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="this machine has no CUDA GPU"):
            run_study(SMALL, tmp_path, device="cuda")
    assert not list(tmp_path.iterdir())


def test_claims_hold_or_not() -> None:
    rows = [("a", 1, 0, 1.0), ("a", 1, 1, 3.0), ("b", 1, 0, 4.0), ("b", 1, 1, 4.0), ("a", 2, 0, 1.0), ("b", 2, 0, 5.0)]
    table = pandas.DataFrame(rows, columns=["recipe", "m", "seed", "error"])
    axes = ["recipe", "m", "seed"]
    ratio = Claim("", "error", {"recipe": "b"}, {"recipe": "a"}, at_least=2.0, at_most=5.0)
    assert ratio.check(table, axes) == (True, 2.0, 5.0)
    assert Claim("", "error", {"recipe": "b"}, {"recipe": "a"}, at_least=2.1).check(table, axes)[0] is False
    assert Claim("", "error", {"recipe": "a"}, at_most=2.0).check(table, axes) == (True, 1.0, 2.0)
    assert Claim("", "error", {"recipe": "c"}, at_most=2.0).check(table, axes)[0] is None, "nothing shows nothing"
    assert Claim("", "error", {"recipe": "c", "m": 1}, {"recipe": "a", "m": 1}).check(table, axes)[0] is None
    table.loc[0, "error"] = float("nan")
    table.loc[1, "error"] = float("nan")
    assert Claim("", "error", {"recipe": "a"}, at_most=2.0).check(table, axes)[0] is False


def test_a_capture_is_run_layer_by_layer_and_its_contents_are_part_of_a_cell(tmp_path: Path) -> None:
    sample, path = load_sample(layers=[5, 15]), tmp_path / "qkv.safetensors"
    tensors = {f"{layer.name}.{role}": getattr(layer, role)[:, :3, :64] for layer in sample.layers for role in "q"}
    tensors |= {f"{layer.name}.{role}": getattr(layer, role)[:, :, :64] for layer in sample.layers for role in "kv"}
    save_file({name: x.contiguous() for name, x in tensors.items()}, path, metadata={"causal": "true"})
    study = Study("it", "?", "", "capture", {"capture": [str(path)], "recipe": ["fa3", "default"]})
    table = run_study(study, tmp_path / "out").table
    assert table["layer"].tolist() == ["5"] * 3 + ["15"] * 3 + ["5"] * 3 + ["15"] * 3
    assert table["head"].tolist() == [0, 1, 2] * 4
    q, k, v = (tensors[f"layers.15.{role}"].float()[:, 1:2] for role in "qkv")
    assert table[table["layer"] == "15"].iloc[1]["sqnr_db"] == pytest.approx(
        recipe_errors(q, k, v, "fa3", is_causal=True)["fa3"]["sqnr_db"], rel=1e-4
    )
    tensors["layers.5.q"] = tensors["layers.5.q"] * 2
    save_file({name: x.contiguous() for name, x in tensors.items()}, path, metadata={"causal": "true"})
    again = run_study(study, tmp_path / "out").table
    assert len(cells_done(tmp_path / "out")) == 8
    assert (again["relative_error"] != table["relative_error"])[table["layer"] == "5"].all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["transforms", "accumulation", "causality", "scale-plateau", "real-model"])
def test_a_gpu_gives_what_cores_give(name: str, tmp_path: Path) -> None:
    study = load_study(name).at_quick()
    if "seed" in study.grid:
        study = study.with_grid({"seed": [0]})
    ours, theirs = (run_study(study, tmp_path / kind, device=kind).table for kind in ("cuda", "cpu"))
    assert ours[list(study.grid)].equals(theirs[list(study.grid)])
    for figure in {"relative_error", "logit_error", "sqnr_db"} & set(ours.columns):
        if name not in ("accumulation", "causality"):  # there it is FP32's order of summation, and whether codes flip
            assert ours[figure].tolist() == pytest.approx(theirs[figure].tolist(), rel=0.02), figure
    broken = [claim.says for claim, holds, _, _ in StudyResult(study, ours, {}).claims() if not holds]
    assert not broken
