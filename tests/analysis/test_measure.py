"""The files that benchmarks write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fp8attn.analysis.bench.measure import write

ORIGIN = {"gpu": "a GPU", "command": "python -m this", "commit": "abc"}
ROWS = [{"impl": "ours", "median_ms": 1.5, "hidden": 0}, {"impl": "theirs"}]


def test_a_result_is_json_and_a_table(tmp_path: Path) -> None:
    write(str(tmp_path / "result.json"), "A title", ORIGIN, ROWS, ["impl", "median_ms"])
    assert json.loads((tmp_path / "result.json").read_text()) == {"schema": 1, "provenance": ORIGIN, "rows": ROWS}
    assert (tmp_path / "result.md").read_text().splitlines() == [
        "# A title",
        "",
        "`python -m this`: gpu a GPU, commit abc.",
        "",
        "| impl | median_ms |",
        "|---|---|",
        "| ours | 1.5 |",
        "| theirs |  |",
    ]


def test_what_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    write(str(tmp_path / "result.json"), "A title", ORIGIN, ROWS, ["impl"])
    before = (tmp_path / "result.json").read_bytes()
    with pytest.raises(TypeError):
        write(str(tmp_path / "result.json"), "A title", ORIGIN, [{"impl": object()}], ["impl"])
    assert (tmp_path / "result.json").read_bytes() == before and len(list(tmp_path.iterdir())) == 2
