"""Figures draw what their tables say."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import pandas
import pytest
import torch

from fp8attn.analysis.plots import Plot, draw, draw_codes, draw_key_maps, save, summarize, to_svg

AXES = ("kind", "recipe", "m", "seed")


@pytest.fixture
def table() -> pandas.DataFrame:
    return pandas.DataFrame(
        {"kind": kind, "recipe": recipe, "m": m, "seed": seed, "error": error * m * (1 + seed), "foretold": error * m}
        for kind in ("same", "other")
        for recipe, error in (("a", 0.1), ("b", 0.2))
        for m in (1.0, 10.0)
        for seed in range(3)
    )


def test_a_summary_is_means_over_seeds_in_the_tables_order(table: pandas.DataFrame) -> None:
    plot = Plot("p", x="m", y="error", lines="recipe", panels="kind", predicted="foretold")
    summary = summarize(table, plot, AXES)
    assert summary[["panel", "line", "x"]].values.tolist()[:3] == [
        ["same", "a", 1.0],
        ["same", "a", 10.0],
        ["same", "b", 1.0],
    ]
    row = summary.iloc[1]
    assert (row["y"], row["count"], row["predicted"]) == (pytest.approx(2.0), 3, pytest.approx(1.0))
    half = 4.302653 * 1.0 / math.sqrt(3)  # Student's t of two degrees of freedom
    assert (row["low"], row["high"]) == (pytest.approx(2 - half, 1e-5), pytest.approx(2 + half, 1e-5))


def test_along_a_logarithmic_axis_means_are_geometric(table: pandas.DataFrame) -> None:
    plot = Plot("p", x="m", y="error", lines="recipe", panels="kind", y_scale="log")
    row = summarize(table, plot, AXES).iloc[0]
    assert row["y"] == pytest.approx(0.1 * 6 ** (1 / 3)) and 0 < row["low"] < row["y"] < row["high"]
    table.loc[0, "error"] = 0.0  # has no logarithm
    assert summarize(table, plot, AXES).iloc[0]["y"] == pytest.approx((0.2 + 0.3) / 3)


def test_nothing_is_averaged_unsaid(table: pandas.DataFrame) -> None:
    with pytest.raises(ValueError, match="plot 'p' would average over kind; say which value to draw under 'where'"):
        summarize(table, Plot("p", x="m", y="error", lines="recipe"), AXES)
    chosen = summarize(table, Plot("p", x="m", y="error", lines="recipe", where={"kind": "same"}), AXES)
    assert len(chosen) == 4
    several = Plot("p", x="m", y="error", lines="recipe", panels="kind", where={"kind": ["same", "other"]})
    assert len(summarize(table, several, AXES)) == 8
    with pytest.raises(ValueError, match="plot 'p': no column colour; there are kind, recipe"):
        summarize(table, Plot("p", x="m", y="error", lines="colour"), AXES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_scale": "cubic"}, "x_scale must be one of linear, log, log2, category, got 'cubic'"),
        ({"y_scale": "category"}, "y_scale must be one of linear, log, got 'category'"),
        ({"name": "../up"}, "a plot's name becomes a file's"),
    ],
)
def test_plots_refuse(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Plot(**{"name": "p", "x": "m", "y": "error", **changes})


@pytest.mark.parametrize("x_scale", ["linear", "log", "log2", "category"])
@pytest.mark.parametrize("y_scale", ["linear", "log"])
@pytest.mark.parametrize("diagonal", [False, True])
def test_every_row_is_a_marker_at_its_place(
    table: pandas.DataFrame, x_scale: str, y_scale: str, diagonal: bool
) -> None:
    plot = Plot("p", "m", "error", "recipe", "kind", "foretold", x_scale=x_scale, y_scale=y_scale, diagonal=diagonal)
    summary = summarize(table, plot, AXES)
    markers = {
        line.get_gid(): line.get_xydata()[0]
        for axes in draw(summary, plot).axes
        for line in axes.lines
        if line.get_gid()
    }
    assert len(markers) == len(summary) == 8
    for row in summary.itertuples():
        x, y = markers[f"point-{row.Index}"]
        assert y == row.y and (x == row.x or x_scale == "category")


def test_files_are_whole_and_the_same_every_time(table: pandas.DataFrame, tmp_path: Path) -> None:
    plot = Plot("p", x="m", y="error", lines="recipe", panels="kind", title="A & B <C>")
    summary = summarize(table, plot, AXES)
    first = [path.read_bytes() for path in save(draw(summary, plot), tmp_path / "one.two")]
    second = [path.read_bytes() for path in save(draw(summary, plot), tmp_path / "one.two")]
    assert first == second and sorted(p.name for p in tmp_path.iterdir()) == ["one.two.png", "one.two.svg"]
    assert first[0].startswith(b"\x89PNG") and b"<svg" in first[1]


def test_svgs_on_one_page_do_not_share_ids(table: pandas.DataFrame) -> None:
    plot = Plot("p", x="m", y="error", lines="recipe", panels="kind")
    summary = summarize(table, plot, AXES)
    one, two = (to_svg(draw(summary, plot), prefix, 'a "title" <&>') for prefix in ("s1", "s2"))
    ids = [set(re.findall(r'\bid="([^"]+)"', svg)) for svg in (one, two)]
    assert "s1-point-0" in ids[0] and not ids[0] & ids[1]
    used = set(re.findall(r'(?:xlink:href="#|url\(#)([^")]+)', one))
    assert used and used <= ids[0]
    assert 'aria-label="a &quot;title&quot; &lt;&amp;>"' in one and "<?xml" not in one


def test_a_callers_settings_stay_as_they_are(table: pandas.DataFrame) -> None:
    import matplotlib

    plot = Plot("p", x="m", y="error", lines="recipe", panels="kind")
    with matplotlib.rc_context({"font.size": 31}):
        figure = draw(summarize(table, plot, AXES), plot)
        assert matplotlib.rcParams["font.size"] == 31
    assert figure.axes[0].xaxis.label.get_size() < 12
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


def test_key_maps_keep_what_stands_out() -> None:
    keys = torch.ones(1000, 8)
    keys[777, 3] = 50.0
    image = draw_key_maps(keys, torch.ones(1000, 8)).axes[0].images[0].get_array()
    assert image.shape == (8, 250) and image.max() == 50.0


def test_codes_have_a_panel_a_tensor() -> None:
    rows = [
        {"tensor": t, "recipe": r, "order": i, "magnitude": m, "share": 0.5}
        for t in "qk"
        for r in ("a", "b")
        for i, m in enumerate(("0", "2^1"))
    ]
    figure = draw_codes(pandas.DataFrame(rows))
    assert [axes.get_title() for axes in figure.axes] == ["q", "k"]
    assert all(len(axes.lines) == 2 for axes in figure.axes)


def test_without_matplotlib_the_error_says_what_to_install(
    table: pandas.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    plot = Plot("p", x="m", y="error", lines="recipe", panels="kind")
    summary = summarize(table, plot, AXES)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'fp8attn[plots]'")):
        draw(summary, plot)
