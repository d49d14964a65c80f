"""One self-contained HTML page: the question, the figures with the tables that they draw, and with what it was made.

Nothing on it is loaded from elsewhere, and nothing runs.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from .extras import require
from .plots import Plot, draw, to_svg

if TYPE_CHECKING:
    from pandas import DataFrame

    from .study import Claim, StudyResult

__all__ = ["Section", "Table", "study_report", "to_html"]


@dataclass(frozen=True)
class Table:
    """A table as a page shows it.

    Attributes:
        names: of its columns.
        text: which of them hold words rather than numbers.
        rows: with ``cells`` and, in a table that a figure draws, ``number``, ``x`` and ``y``.
        prefix: of that figure's ids.
    """

    names: Sequence[str]
    text: Sequence[bool]
    rows: Sequence[Mapping[str, Any]]
    prefix: str = ""


@dataclass(frozen=True)
class Section:
    """A heading with words, a figure and a table, as far as there are any."""

    title: str
    text: str = ""
    svg: str = ""
    table: Table | None = None


@dataclass(frozen=True)
class _Shown:
    says: str
    seen: str
    bound: str
    holds: str


_HOLDS = {True: "yes", False: "no", None: "not in this grid"}


def to_html(
    title: str,
    sections: Sequence[Section],
    *,
    origin: Mapping[str, Any],
    question: str = "",
    method: str = "",
    advice: str = "",
    claims: Sequence[_Shown] = (),
    csv: DataFrame | None = None,
) -> str:
    """The page.

    Args:
        origin: from ``provenance``.
        csv: a table that can be saved from the page.

    >>> "<h2>One</h2>" in to_html("A page", [Section("One")], origin={"command": "fp8attn"})
    True
    """
    template = (resources.files("fp8attn.analysis") / "templates" / "report.html").read_text(encoding="utf-8")
    environment = require("jinja2").Environment(autoescape=True)
    text = None if csv is None else base64.b64encode(csv.to_csv(index=False).encode("utf-8")).decode("ascii")
    page: str = environment.from_string(template).render(
        title=title,
        question=question,
        method=method,
        advice=advice,
        claims=claims,
        sections=sections,
        command=origin.get("command"),
        made_with=[(k, v) for k, v in origin.items() if k not in ("command", "recipes") and v is not None],
        csv=text,
        csv_rows=0 if csv is None else f"{len(csv):,}",
    )
    return page + "\n"


def study_report(result: StudyResult) -> str:
    """The page of a study's result."""
    study = result.study
    sections = [plot_section(plot, result.summary(plot), f"s{number}") for number, plot in enumerate(study.plots)]
    if "assumptions" in result.table.columns:
        sections.append(_assumptions_section(result))
    return to_html(
        f"fp8attn study: {study.name}",
        sections,
        origin=result.origin,
        question=study.question,
        method=study.method,
        claims=[_Shown(c.says, _range(low, high), _bound(c), _HOLDS[holds]) for c, holds, low, high in result.claims()],
        csv=result.table,
    )


def plot_section(plot: Plot, summary: DataFrame, prefix: str) -> Section:
    """A plot with the table that it draws; row i is the marker ``point-i``."""
    columns = {
        "panel": plot.panels,
        "line": plot.lines,
        "x": plot.x,
        "y": plot.y,
        "low": "95% from",
        "high": "to",
        "count": "values",
        "predicted": plot.predicted,
    }
    kept = {column: name for column, name in columns.items() if name}
    rows = [
        {
            "number": row.Index,
            "x": row.x,
            "y": row.y,
            "cells": [_number(getattr(row, column)) for column in kept],
        }
        for row in summary.itertuples()
    ]
    text = [bool(len(summary)) and isinstance(summary[column].iloc[0], str) for column in kept]
    names = [name.replace("_", " ") for name in kept.values()]
    title = plot.title or plot.name
    return Section(title, "", to_svg(draw(summary, plot), prefix, title), Table(names, text, rows, prefix))


def _assumptions_section(result: StudyResult) -> Section:
    """Where the closed form is not to be trusted, why, and how far off it was."""
    table, title = result.table, "Where the prediction's assumptions do not hold"
    broken = table[table["assumptions"] != "hold"]
    if not len(broken):
        return Section(title, "Nowhere in this study.")
    varied = [axis for axis in result.study.grid if axis != "seed" and table[axis].nunique(dropna=False) > 1]
    groups = broken.groupby(varied or ["assumptions"], sort=False, dropna=False)
    rows = require("pandas").DataFrame(
        {
            **{axis: group[axis].iloc[0] for axis in varied},
            "of rows": len(group),
            "measured / predicted": float(group["logit_error"].mean() / group["predicted_logit_error"].mean()),
            "why": group["notes"].iloc[0],
        }
        for _, group in groups
    )
    text = f"In {len(broken):,} of {len(table):,} rows; in the others logits' errors are as figures and claims show."
    return Section(title, text, "", table_of(rows))


def table_of(frame: DataFrame) -> Table:
    """Any data frame as a table."""
    text = [bool(len(frame)) and isinstance(frame[column].iloc[0], str) for column in frame.columns]
    rows = [{"cells": [_number(value) for value in row]} for row in frame.itertuples(index=False)]
    return Table([str(column) for column in frame.columns], text, rows)


def _number(value: Any) -> str:
    """As it is read: four digits.

    >>> _number(0.00012345), _number(12345), _number("fa3"), _number(float("nan"))
    ('0.0001234', '12,345', 'fa3', '')
    """
    if isinstance(value, str) or value is None:
        return value or ""
    if float(value) == int(value) if math.isfinite(value) else False:
        return f"{int(value):,}" if abs(value) < 1e9 else f"{value:.4g}"
    return "" if math.isnan(value) else f"{value:.4g}"


def _range(low: float, high: float) -> str:
    return "" if math.isnan(low) else _number(low) if low == high else f"{low:.4g} to {high:.4g}"


def _bound(claim: Claim) -> str:
    parts = []
    if claim.at_least > -math.inf:
        parts.append(f"at least {_number(claim.at_least)}")
    if claim.at_most < math.inf:
        parts.append(f"at most {_number(claim.at_most)}")
    return ", ".join(parts)
