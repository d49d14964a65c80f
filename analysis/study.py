"""Studies: a question, a grid of cells, what is measured in each, the figures that answer it, and what they must show.

A study is a TOML file (``fp8attn study`` lists the ready-made ones)::

    question = "What do outliers cost?"
    method = "Attention on N(0, 1) data with outliers."
    measure = "attention"                  # a name of fp8attn.analysis.measures.MEASURES
    seeds = 10
    [grid]                                 # axis -> values; the measure has defaults for the others
    magnitude = [1.0, 10.0, 100.0]
    recipe = ["per_tensor", "mine"]
    [recipes.mine]                         # recipes that are no presets: base and what differs
    base = "default"
    k_scale = "token"
    [quick]                                # what --quick changes of the grid
    seeds = 2
    [[plots]]                              # fields of Plot
    name = "magnitude"
    x = "magnitude"
    y = "relative_error"
    lines = "recipe"
    [[claims]]                             # fields of Claim
    says = "mine is better"
    figure = "relative_error"
    of = { recipe = "mine" }
    to = { recipe = "per_tensor" }
    at_most = 1.0

Cells are computed on all cores and noted in ``journal.jsonl`` one by one, so that a run that was interrupted, or
killed, goes on where it stopped.
"""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8attn.recipe import PRESETS, Recipe

from .measures import MEASURES, Measure, layers_of
from .plots import Plot, summarize

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["STUDIES", "Claim", "Study", "StudyResult", "load_study"]

_STUDIES = resources.files("fp8attn.analysis") / "studies"
STUDIES = tuple(sorted(entry.name[:-5] for entry in _STUDIES.iterdir() if entry.name.endswith(".toml")))
"""Names of the ready-made studies."""

Cell = dict[str, Any]


@dataclass(frozen=True)
class Claim:
    """What a study must show: bounds of a figure's mean over seeds, or of the ratio of two.

    Attributes:
        says: the claim in words.
        figure: a column.
        of, to: which rows; without ``to`` the mean itself is bounded.
        to_figure: the column under the ratio, ``figure`` if empty.
        at_least, at_most: the bounds, which hold for every combination of the other axes' values.
    """

    says: str
    figure: str
    of: Mapping[str, Any] = field(default_factory=dict)
    to: Mapping[str, Any] | None = None
    to_figure: str = ""
    at_least: float = -math.inf
    at_most: float = math.inf

    def check(self, table: DataFrame, axes: Sequence[str]) -> tuple[bool | None, float, float]:
        """Whether it holds, and the smallest and the largest value there are; None and NaN if there are no such rows.

        >>> import pandas
        >>> table = pandas.DataFrame({"recipe": ["a", "b"], "seed": [0, 0], "error": [1.0, 4.0]})
        >>> Claim("", "error", {"recipe": "b"}, {"recipe": "a"}, at_least=3.0).check(table, ["recipe", "seed"])
        (True, 4.0, 4.0)
        """
        named = {*self.of, *(self.to or ()), "seed"}
        keys = [
            axis for axis in axes if axis not in named and table[axis].notna().any()
        ]  # None is a recipe's own format
        values = self._means(table, self.of, self.figure, keys)
        if self.to is not None or self.to_figure:
            below = self._means(table, self.to or self.of, self.to_figure or self.figure, keys)
            values = {key: value / below[key] for key, value in values.items() if below.get(key)}
        if not values:
            return None, math.nan, math.nan
        if any(math.isnan(value) for value in values.values()):
            return False, math.nan, math.nan
        low, high = min(values.values()), max(values.values())
        return self.at_least <= low and high <= self.at_most, low, high

    @staticmethod
    def _means(table: DataFrame, where: Mapping[str, Any], figure: str, keys: list[str]) -> dict[Any, float]:
        for column, value in where.items():
            table = table[table[column].isin(value if isinstance(value, list) else [value])]
        if not keys:
            return {(): float(table[figure].mean())} if len(table) else {}
        return {key: float(group[figure].mean()) for key, group in table.groupby(keys, sort=False, dropna=False)}


@dataclass(frozen=True)
class Study:
    """A study, ready to run.

    Attributes:
        name, question, method: what it is called, asks and does.
        measure: a name of ``MEASURES``.
        grid: axis -> its values, seeds and all, in the order in which cells are run and listed.
        recipes: those that the grid may name.
        plots, claims: what is drawn, and what must be seen.
        quick: what :meth:`at_quick` puts into the grid.

    Raises:
        ValueError: an unknown measure, axis or recipe, an axis without values, or one that is missing.
    """

    name: str
    question: str
    method: str
    measure: str
    grid: Mapping[str, Sequence[Any]]
    recipes: Mapping[str, Recipe] = field(default_factory=lambda: dict(PRESETS))
    plots: Sequence[Plot] = ()
    claims: Sequence[Claim] = ()
    quick: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.measure not in MEASURES:
            raise ValueError(f"measure must be one of {', '.join(MEASURES)}, got {self.measure!r}")
        defaults = self.kind.axes
        for axis, values in (*self.grid.items(), *self.quick.items()):
            if axis not in defaults:
                raise ValueError(f"measure {self.measure!r} has no axis {axis!r}; accepted: {', '.join(defaults)}")
            if isinstance(values, str) or not isinstance(values, Sequence) or not values:
                raise ValueError(f"axis {axis!r} must be a list of values, got {values!r}")
            for value in values:
                _check(axis, value, defaults[axis])
            if len({repr(value) for value in values}) != len(values):
                raise ValueError(f"axis {axis!r} lists a value twice: {list(values)!r}")
        if missing := [axis for axis, value in defaults.items() if value is ... and axis not in self.grid]:
            raise ValueError(f"measure {self.measure!r} needs the axis {', '.join(missing)}")
        for name in (*self.grid.get("recipe", ()), *self.quick.get("recipe", ())):
            if name not in self.recipes:
                raise ValueError(f"unknown recipe {name!r}; accepted: {', '.join(self.recipes)}")
        for plot in self.plots:
            _check_plot(plot, self.grid)

    @property
    def kind(self) -> Measure:
        return MEASURES[self.measure]

    def with_grid(self, changes: Mapping[str, Sequence[Any]]) -> Study:
        """The same with other values on some axes."""
        return replace(self, grid={**self.grid, **changes})

    def at_quick(self) -> Study:
        """The same at its quick setting."""
        return self.with_grid(self.quick)

    def cells(self) -> Iterator[Cell]:
        """Every cell in the grid's order, the measure's other axes filled in."""
        others = {axis: value for axis, value in self.kind.axes.items() if axis not in self.grid}
        for values in itertools.product(*self.grid.values()):
            cell = dict(zip(self.grid, values, strict=True)) | others
            if self.measure == "capture" and cell["layer"] is None:
                yield from ({**cell, "layer": layer} for layer in layers_of(cell["capture"]))
            else:
                yield cell


@dataclass(frozen=True)
class StudyResult:
    """What a study gave.

    Attributes:
        table: a pandas ``DataFrame``: one row a cell (and head, where a measure has several), axes first.
        origin: versions, device, date and command.
    """

    study: Study
    table: DataFrame
    origin: Mapping[str, Any]

    @property
    def axes(self) -> list[str]:
        """The columns that tell rows apart; the others are figures."""
        return [column for column in self.table.columns if column in {*self.study.kind.axes, *self.study.kind.row_axes}]

    def summary(self, plot: Plot) -> DataFrame:
        """What a plot of the study draws."""
        over = [axis for axis in ("seed", *self.study.kind.row_axes) if axis in self.axes]
        return summarize(self.table, plot, self.axes, over)

    def claims(self) -> list[tuple[Claim, bool | None, float, float]]:
        """Every claim, whether it holds here (None: it is about cells that are not), and between what values."""
        return [(claim, *claim.check(self.table, self.axes)) for claim in self.study.claims]


def load_study(name: str | Path) -> Study:
    """A ready-made study by its name, or one from a TOML file.

    >>> load_study("fa3-table3").measure
    'attention'

    Raises:
        ValueError: an unknown name, or what the file says is not accepted, with the file's name.
        FileNotFoundError: no such file.
    """
    if str(name) in STUDIES:
        return _parse(str(name), (_STUDIES / f"{name}.toml").read_text(encoding="utf-8"))
    path = Path(name)
    if path.suffix != ".toml":
        raise ValueError(f"unknown study {str(name)!r}; accepted: {', '.join(STUDIES)}, or a file that ends in .toml")
    try:
        return _parse(path.stem, path.read_text(encoding="utf-8"))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None


def _parse(name: str, text: str) -> Study:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    values: dict[str, Any] = tomllib.loads(text)
    grid, quick, own = (_table(values, key) for key in ("grid", "quick", "recipes"))
    for part, seeds in ((grid, values.pop("seeds", None)), (quick, quick.pop("seeds", None))):
        if seeds is not None:
            if "seed" in part:
                raise ValueError("seeds and an axis seed say the same: give one of them")
            part["seed"] = seeds_of(seeds)
    recipes = dict(PRESETS)
    for key, fields_ in own.items():
        changes = dict(fields_)
        recipes[key] = Recipe.resolve(changes.pop("base", "default")).replace(**changes)
    plots = [_made(Plot, "plots", plot) for plot in values.pop("plots", [])]
    claims = [_made(Claim, "claims", claim) for claim in values.pop("claims", [])]
    texts = {key: " ".join(str(values.pop(key, "")).split()) for key in ("question", "method", "measure")}
    if values:
        raise ValueError(
            f"unknown {', '.join(map(repr, values))}; accepted: question, method, measure, seeds, grid, recipes, "
            "quick, plots, claims"
        )
    if not texts["question"]:
        raise ValueError("a study needs a question")
    return Study(name=name, grid=grid, quick=quick, recipes=recipes, plots=tuple(plots), claims=tuple(claims), **texts)


def seeds_of(number: Any) -> list[int]:
    """The seeds 0, 1, ... of a study that wants ``number`` of them."""
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(f"seeds must be a positive number of seeds, got {number!r}")
    return list(range(number))


def _check(axis: str, value: Any, default: Any) -> None:
    """A value must be of its axis' kind, which the default tells."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(default, bool):
        wanted, right = "true or false", isinstance(value, bool)
    elif axis == "seed":
        wanted, right = "integers of 0 or more", number and isinstance(value, int) and value >= 0
    elif isinstance(default, int):
        wanted, right = "positive integers", number and isinstance(value, int) and value >= 1
    elif isinstance(default, float):
        wanted, right = "numbers", number
    else:
        wanted, right = "texts", isinstance(value, str) or value is None
    if not right:
        raise ValueError(f"axis {axis!r} must be {wanted}, got {value!r}")


def _check_plot(plot: Plot, grid: Mapping[str, Sequence[Any]]) -> None:
    """A plot averages over seeds alone; better said before hours of work than after."""
    if plot.diagonal:
        return
    for axis, values in grid.items():
        kept = plot.where.get(axis, values)
        several = isinstance(kept, Sequence) and not isinstance(kept, str) and len(kept) > 1
        if several and axis not in (plot.x, plot.lines, plot.panels, "seed"):
            raise ValueError(
                f"plot {plot.name!r} would average over {axis}; say which value to draw under 'where', make it lines "
                "or panels, or give the grid one value"
            )


def _table(values: dict[str, Any], key: str) -> dict[str, Any]:
    table = values.pop(key, {})
    if not isinstance(table, dict):
        raise ValueError(f"{key} must be a table, got {table!r}")
    return dict(table)


def _made(kind: Callable[..., Any], where: str, values: Mapping[str, Any]) -> Any:
    accepted = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    if unknown := [key for key in values if key not in accepted]:
        raise ValueError(f"{where}: unknown {', '.join(map(repr, unknown))}; accepted: {', '.join(accepted)}")
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"{where}: " + re.sub(r"^.*__init__\(\) ", "", str(error))) from None
