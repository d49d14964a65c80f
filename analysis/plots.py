"""Figures in one style: a table's means over seeds with their bands, labelled where lines end, for any eye and printer.

A :class:`Plot` says which columns of a tidy table become what; :func:`summarize` computes exactly what will be drawn,
and :func:`draw` draws it, so that a figure and the table beside it cannot differ.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8attn.files import whole_file

from .extras import require
from .metrics import confidence_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame, Series
    from torch import Tensor

__all__ = ["Plot", "draw", "draw_codes", "draw_key_maps", "save", "summarize", "to_svg"]

# Okabe and Ito's colours (jfly.uni-koeln.de/color), which colour-blind readers tell apart; black last, yellow left out.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # and so do readers of a copy without colours
_WIDTH = 7.0  # inches, a page's
_SCALES = ("linear", "log", "log2", "category")
_STYLE: dict[str, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "grid.linewidth": 0.4,
    "grid.color": "#dddddd",
    "axes.axisbelow": True,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "svg.hashsalt": "fp8attn",  # the same file every time
}


@dataclass(frozen=True)
class Plot:
    """Which columns of a table are drawn, and how.

    Attributes:
        name: of the files it is saved in.
        x, y: columns.
        lines, panels: columns whose values get a line, and a panel, each.
        predicted: a column that is drawn as a dashed line.
        title, x_label, y_label: what a reader sees; columns' names if empty.
        x_scale: linear, log, log2, or category, whose values are in the table's order and not joined.
        y_scale: linear or log.
        where: column -> value; only these rows are drawn.
        diagonal: draw points, not lines, and the diagonal on which x is y.

    Raises:
        ValueError: an unknown scale.
    """

    name: str
    x: str
    y: str
    lines: str | None = None
    panels: str | None = None
    predicted: str | None = None
    title: str = ""
    x_label: str = ""
    y_label: str = ""
    x_scale: str = "linear"
    y_scale: str = "linear"
    where: Mapping[str, Any] = field(default_factory=dict)
    diagonal: bool = False

    def __post_init__(self) -> None:
        for axis, accepted in (("x_scale", _SCALES), ("y_scale", _SCALES[:2])):
            if getattr(self, axis) not in accepted:
                raise ValueError(f"{axis} must be one of {', '.join(accepted)}, got {getattr(self, axis)!r}")
        if not re.fullmatch(r"[\w.-]+", self.name):
            raise ValueError(f"a plot's name becomes a file's: letters, digits, '-', '_' and '.', got {self.name!r}")


def summarize(table: DataFrame, plot: Plot, axes: Sequence[str], over: Sequence[str] = ("seed",)) -> DataFrame:
    """What ``plot`` draws of a table: means over ``over``, each with its 95% interval (NaN bounds for a single value).

    Along a logarithmic axis means are geometric, and intervals those of the logarithms, unless a value is 0 or less.

    Args:
        axes: the columns that tell rows apart; the others are figures.
        over: the axes that are averaged over. Any other must have one value in a mean: nothing is mixed unsaid.

    Returns:
        columns ``panel``, ``line``, ``x``, ``y``, ``low``, ``high``, ``count`` and ``predicted``, in the table's order.

    Raises:
        ValueError: a column that is not there, or a mean that would mix.

    >>> import pandas
    >>> table = pandas.DataFrame({"m": [1, 1, 2, 2], "seed": [0, 1, 0, 1], "error": [1.0, 3.0, 4.0, 6.0]})
    >>> summarize(table, Plot("errors", x="m", y="error"), axes=["m", "seed"])[["x", "y", "count"]].values.tolist()
    [[1.0, 2.0, 2.0], [2.0, 5.0, 2.0]]
    """
    pandas = require("pandas")
    wanted = [plot.x, plot.y, *filter(None, (plot.lines, plot.panels, plot.predicted)), *plot.where]
    if missing := [column for column in wanted if column not in table.columns]:
        raise ValueError(f"plot {plot.name!r}: no column {', '.join(missing)}; there are {', '.join(table.columns)}")
    for column, value in plot.where.items():
        table = table[table[column].isin(value if isinstance(value, list) else [value])]
    keys = [column for column in dict.fromkeys((plot.panels, plot.lines, plot.x)) if column]
    if plot.diagonal:
        keys = [*dict.fromkeys([*filter(None, (plot.panels, plot.lines)), *(a for a in axes if a not in over)])]
    rows = []
    for _, group in table.groupby(keys, sort=False, dropna=False):
        for axis in set(axes) - {*keys, *over}:
            if group[axis].nunique(dropna=False) > 1:
                raise ValueError(
                    f"plot {plot.name!r} would average over {axis}; say which value to draw under 'where', or make it "
                    "lines or panels"
                )
        mean, low, high, count = _mean(group[plot.y], plot.y_scale)
        rows.append(
            {
                "panel": group[plot.panels].iloc[0] if plot.panels else "",
                "line": group[plot.lines].iloc[0] if plot.lines else "",
                "x": _mean(group[plot.x], plot.x_scale)[0] if plot.diagonal else group[plot.x].iloc[0],
                "y": mean,
                "low": low,
                "high": high,
                "count": count,
                "predicted": _mean(group[plot.predicted], plot.y_scale)[0] if plot.predicted else math.nan,
            }
        )
    return pandas.DataFrame(rows, columns=["panel", "line", "x", "y", "low", "high", "count", "predicted"])


def _mean(values: Series, scale: str) -> tuple[float, float, float, int]:
    """Mean, bounds of its 95% interval and number of the values that there are."""
    numbers = values.dropna().tolist()
    if not numbers:
        return math.nan, math.nan, math.nan, 0
    if scale.startswith("log") and min(numbers) > 0 and max(numbers) < math.inf:
        logs = confidence_interval([math.log(value) for value in numbers])
        mean, low, high = (math.exp(min(x, 700.0)) for x in logs)
        return mean, low, high, len(numbers)
    return *confidence_interval(numbers), len(numbers)


def draw(summary: DataFrame, plot: Plot) -> Figure:
    """The figure of what :func:`summarize` returned; row i of it is the marker with the SVG id ``point-i``."""
    with _style() as new_figure:
        panels, lines = (list(dict.fromkeys(summary[column])) for column in ("panel", "line"))
        columns = 2 if len(panels) == 4 else min(3, max(1, len(panels)))
        height = math.ceil(max(1, len(panels)) / columns)
        figure = new_figure(figsize=(_WIDTH if columns > 1 else _WIDTH * 0.7, 0.4 + 2.3 * height))
        grid = figure.subplots(height, columns, sharex=True, sharey=True, squeeze=False)
        for number, axes in enumerate(grid.flat):
            if number >= max(1, len(panels)):
                axes.set_visible(False)
        if not (summary["y"] > 0).any():  # nothing to put on a logarithmic axis
            plot = (
                replace(plot, x_scale="linear", y_scale="linear") if plot.diagonal else replace(plot, y_scale="linear")
            )
        order = {value: place for place, value in enumerate(dict.fromkeys(summary["x"]))}
        for number, panel in enumerate(panels):
            axes = grid.flat[number]
            part = summary[summary["panel"] == panel]
            _draw_panel(axes, part, plot, lines, order)
            if len(panels) > 1:
                axes.set_title(f"{plot.panels}: {panel}")
            below = number + columns >= len(panels)
            axes.tick_params(labelbottom=below)
            axes.set_xlabel((plot.x_label or plot.x.replace("_", " ")) if below else "")
            axes.set_ylabel((plot.y_label or plot.y.replace("_", " ")) if number % columns == 0 else "")
        title = plot.title + (" (dashed: predicted)" if plot.predicted else "")
        if title:
            figure.suptitle(title.strip(), fontsize=9)
        for axis, scale in ((grid.flat[0].xaxis, plot.x_scale), (grid.flat[0].yaxis, plot.y_scale)):
            if scale == "log":
                _tick_plainly(axis)
        figure.canvas.draw()  # places everything, labels' room apart
        if plot.diagonal or plot.x_scale == "category":
            _add_legend(figure, grid.flat[0], lines)
        elif any(lines):
            for number in range(len(panels)):
                if number % columns == columns - 1:
                    _label_ends(grid.flat[number], summary[summary["panel"] == panels[number]], lines)
        return figure


def draw_key_maps(before: Tensor, after: Tensor, *, title: str = "") -> Figure:
    """Heat maps of |K| (tokens, channels) before and after smoothing, balance and rotation, in units of their medians.

    >>> import torch
    >>> len(draw_key_maps(torch.ones(8, 4), torch.ones(8, 4)).axes)
    3
    """
    with _style() as new_figure:
        figure = new_figure(figsize=(_WIDTH, 2.6))
        maps = [_coarse(x.abs().double() / x.abs().double().median().clamp(min=1e-300)) for x in (before, after)]
        highest = max(2.0, *(float(x.max()) for x in maps))
        axes = figure.subplots(1, 2, sharey=True)
        norm = require("matplotlib.colors").LogNorm(vmin=0.1, vmax=highest, clip=True)
        for at, values, name in zip(axes, maps, ("as they came", "as they are quantized"), strict=True):
            picture = at.imshow(
                values.T.numpy(),
                aspect="auto",
                origin="lower",
                norm=norm,
                cmap="cividis",
                extent=(0, before.shape[0], 0, before.shape[1]),
                interpolation="nearest",
            )
            at.grid(False)
            at.set_title(f"{name}: largest / median = {float(values.max()):.3g}")
            at.set_xlabel("token")
        axes[0].set_ylabel("channel")
        figure.colorbar(picture, ax=axes, label="|k| / median")
        if title:
            figure.suptitle(title, fontsize=9)
        return figure


def draw_codes(table: DataFrame, *, title: str = "") -> Figure:
    """Histogram of codes, from columns ``tensor``, ``recipe``, ``magnitude`` (the code's, 0 apart) and ``share``."""
    with _style() as new_figure:
        tensors, recipes = (list(dict.fromkeys(table[column])) for column in ("tensor", "recipe"))
        figure = new_figure(figsize=(_WIDTH, 2.4))
        grid = figure.subplots(1, len(tensors), sharey=True, squeeze=False)
        labels = list(dict.fromkeys(table.sort_values("order")["magnitude"]))
        for at, tensor in zip(grid.flat, tensors, strict=True):
            for number, recipe in enumerate(recipes):
                part = table[(table["tensor"] == tensor) & (table["recipe"] == recipe)].sort_values("order")
                places = [labels.index(x) for x in part["magnitude"]]
                at.step(places, part["share"] * 100, where="mid", color=_look(number)[0], label=recipe)
            at.set_xticks(range(0, len(labels), 3), labels[::3], rotation=60, ha="right")
            at.set_title(tensor)
            at.set_xlabel("|code|, by power of two")
        grid.flat[0].set_ylabel("share of codes in %")
        grid.flat[0].legend(frameon=False, fontsize=7)
        if title:
            figure.suptitle(title, fontsize=9)
        return figure


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write ``stem``.png (200 dots an inch) and ``stem``.svg, each whole or not at all and the same every time."""
    paths = []
    for suffix, options in ((".png", {"dpi": 200}), (".svg", {"metadata": {"Date": None}})):
        path = stem.with_name(stem.name + suffix)
        with whole_file(path) as temporary, _style():
            figure.savefig(temporary, format=suffix[1:], **options)
        paths.append(path)
    return paths


def to_svg(figure: Figure, prefix: str, description: str = "") -> str:
    """The figure as an SVG element for a page, its ids prefixed so that several can stand on one."""
    with _style():
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'(\bid="|xlink:href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    # As wide as the page at most: the view box keeps the shape.
    svg = re.sub(r'<svg ([^>]*?)width="([\d.]+)pt" height="[\d.]+pt"', r'<svg \1style="width: \2pt"', svg, count=1)
    label = description.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


# ---- Parts of a figure -----------------------------------------------------------------------------------------------


def _look(number: int) -> tuple[str, str]:
    """Colour and marker of a line; 49 differ."""
    return _COLORS[number % 7], _MARKERS[(number + number // 7) % 7]


def _draw_panel(axes: Axes, part: DataFrame, plot: Plot, lines: Sequence[Any], order: Mapping[Any, int]) -> None:
    category = plot.x_scale == "category"
    if plot.x_scale.startswith("log"):
        axes.set_xscale("log", base=2 if plot.x_scale == "log2" else 10)
    if plot.y_scale == "log":
        axes.set_yscale("log", nonpositive="mask")
    for number, line in enumerate(lines):
        points = part[part["line"] == line]
        color, marker = _look(number)
        xs = [float(order[x]) if category else float(x) for x in points["x"]]
        if category:  # side by side
            xs = [x + (number - (len(lines) - 1) / 2) * 0.6 / len(lines) for x in xs]
        rows = list(points.itertuples())
        for x, row in zip(xs, rows, strict=True):
            axes.plot([x], [row.y], marker=marker, color=color, linestyle="none", gid=f"point-{row.Index}", zorder=3)
        if plot.diagonal:
            continue
        if category:
            for x, row in zip(xs, rows, strict=True):
                if row.low < row.high:
                    axes.plot([x, x], [row.low, row.high], color=color, linewidth=1)
            continue
        axes.plot(xs, [row.y for row in rows], color=color)
        axes.fill_between(
            xs, [row.low for row in rows], [row.high for row in rows], color=color, alpha=0.18, linewidth=0
        )
        if plot.predicted:
            axes.plot(xs, [row.predicted for row in rows], color=color, linestyle=(0, (4, 2)), linewidth=0.9)
    if category:
        long = max((len(str(value)) for value in order), default=0) * len(order) > 40
        axes.set_xticks(range(len(order)), [str(value) for value in order])
        if long:
            axes.set_xticks(axes.get_xticks(), [str(value) for value in order], rotation=30, ha="right")
    elif plot.x_scale == "log2" or (plot.x_scale == "linear" and len(order) <= 8 and not plot.diagonal):
        axes.set_xticks(list(order), [f"{value:,g}" if isinstance(value, float) else f"{value:,}" for value in order])
        axes.xaxis.minorticks_off()
    if plot.diagonal:
        values = [v for column in ("x", "y") for v in part[column] if math.isfinite(v) and v > 0]
        if values:
            ends = [min(values) / 1.2, max(values) * 1.2]
            axes.plot(ends, ends, color="#888888", linewidth=0.8, zorder=1)


def _tick_plainly(axis: Any) -> None:
    """Ticks of a logarithmic axis at 1, 2, 5, or at powers of ten alone where there are many, as plain numbers."""
    ticker = require("matplotlib.ticker")
    low, high = sorted(axis.get_view_interval())
    decades = math.log10(high / low) if low > 0 else 0.0
    axis.set_major_locator(ticker.LogLocator(10, subs=(1.0, 2.0, 5.0) if decades < 2.5 else (1.0,)))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


def _label_ends(axes: Axes, part: DataFrame, lines: Sequence[Any]) -> None:
    """Each line's name to the right of its last point, moved apart where they would overlap."""
    ends = []
    for number, line in enumerate(lines):
        points = [row for row in part[part["line"] == line].itertuples() if _drawn(row.y, axes)]
        if points:
            at = axes.transData.transform((float(points[-1].x), points[-1].y))
            ends.append((float(at[1]), float(at[0]), str(line), _look(number)[0]))
    ends.sort()
    apart = 9.5 * axes.figure.dpi / 72
    box = axes.get_window_extent()
    heights = _apart([end[0] for end in ends], apart, box.y0, box.y1)
    for (y, x, name, color), height in zip(ends, heights, strict=True):
        (right, to), (_, start) = (axes.transAxes.inverted().transform(p) for p in ((x, height), (x, y)))
        axes.annotate(
            name,
            xy=(right, start),
            xycoords="axes fraction",
            xytext=(max(right, 1.0) + 0.04, to),
            textcoords="axes fraction",
            color=color,
            fontsize=7.5,
            va="center",
            arrowprops={
                "arrowstyle": "-",
                "color": color,
                "linewidth": 0.5,
                "shrinkA": 1,
                "shrinkB": 2,
                "relpos": (0, 0.5),
            },
        )


def _drawn(y: float, axes: Axes) -> bool:
    return math.isfinite(y) and (y > 0 or axes.get_yscale() == "linear")


def _apart(places: Sequence[float], distance: float, low: float, high: float) -> list[float]:
    """Sorted places, moved as little as it takes to lie at least ``distance`` apart and, if they fit, in [low, high].

    >>> _apart([0.0, 1.0, 10.0], 4.0, 0.0, 20.0)
    [0.0, 4.0, 10.0]
    """
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + distance) if moved else max(place, low))
    if moved and moved[-1] > high:
        moved[-1] = max(high, low)
        for i in range(len(moved) - 2, -1, -1):
            moved[i] = min(moved[i], moved[i + 1] - distance)
    return moved


def _add_legend(figure: Figure, axes: Axes, lines: Sequence[Any]) -> None:
    if not any(lines):
        return
    handles = [
        axes.plot([], [], color=color, marker=marker, linestyle="none")[0]
        for color, marker in map(_look, range(len(lines)))
    ]
    figure.legend(
        handles, [str(line) for line in lines], loc="outside lower center", ncols=min(4, len(lines)), frameon=False
    )


def _coarse(x: Tensor, most: int = 256) -> Tensor:
    """(tokens, channels) with at most ``most`` rows, each the largest of several: what stands out stays."""
    import torch

    size = -(-x.shape[0] // most)
    padded = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % max(1, size)))
    return padded.unflatten(0, (-1, max(1, size))).amax(1)


@contextmanager
def _style() -> Iterator[Any]:
    """Our style, and a figure's constructor; neither touches what a caller has set in matplotlib, nor its windows."""
    matplotlib = require("matplotlib")
    figure = require("matplotlib.figure").Figure
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **_STYLE}):
        yield lambda **options: figure(layout="constrained", **options)
