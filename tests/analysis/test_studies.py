"""Every ready-made study, at its quick setting, in the time it may take, shows what it says."""

from __future__ import annotations

import time
from pathlib import Path

import pandas
import pytest

from fp8attn.analysis import STUDIES, load_study, run_study

EXPECTED = {
    "accumulation",
    "causality",
    "fa3-table3",
    "formats",
    "granularity",
    "head-dim",
    "outlier-magnitude",
    "outlier-rate",
    "real-model",
    "scale-plateau",
    "transforms",
}


def test_all_are_there() -> None:
    assert set(STUDIES) == EXPECTED


@pytest.mark.parametrize("name", STUDIES)
def test_quick(name: str, tmp_path: Path) -> None:
    study = load_study(name).at_quick()
    assert study.question and study.method and study.plots and study.claims
    start = time.monotonic()
    result = run_study(study, tmp_path)
    assert time.monotonic() - start < 180, "on one core; two are what it is promised on"
    broken = [(claim.says, low, high) for claim, holds, low, high in result.claims() if not holds]
    assert not broken
    assert len(pandas.read_csv(tmp_path / "table.csv")) == len(result.table) > 0
    for plot in study.plots:
        assert (tmp_path / f"{plot.name}.png").stat().st_size > 10_000
        assert result.summary(plot)["y"].notna().all()
