"""What the GPU benchmarks share: fair timing, and the files that results go into."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fp8attn.files import whole_file

__all__ = ["command_line", "medians", "write"]

Function = Callable[[], object]


def medians(
    functions: Mapping[str, Function], *, graphs: bool = True, calls: int = 4, rounds: int = 25, settle_ms: float = 0.0
) -> dict[str, tuple[float, float, float]]:
    """(p10, median, p90) in ms of a call of each function, by events around ``calls`` of them.

    The functions take turns within a round, in both directions, and the first two rounds do not count. With ``graphs``
    CUDA graphs are timed, so that no launch from Python counts; but not of a function named ``"copy"``, which a graph
    would hand to a slower engine.

    With ``settle_ms`` a turn is that long without being timed, and then twice as long: a GPU that draws all its power
    takes as long to find the clock that it keeps, and until then is as fast as its predecessor let it be.
    """
    runs: dict[str, Function] = {}
    turns: dict[str, tuple[int, int]] = {}  # runs that are not timed, and that are
    for name, function in functions.items():

        def repeat(function: Function = function) -> None:
            for _ in range(calls):
                function()

        for _ in range(2):  # compiles, and fills the allocator's cache
            function()
        torch.cuda.synchronize()
        runs[name] = repeat
        if graphs and name != "copy":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                repeat()
            runs[name] = graph.replay
        settling = math.ceil(settle_ms / _elapsed(runs[name], 1))
        turns[name] = settling, max(1, 2 * settling)
    times: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(rounds + 2):
        for name in list(runs)[:: -1 if number % 2 else 1]:
            settling, timed = turns[name]
            for _ in range(settling):
                runs[name]()
            times[name].append(_elapsed(runs[name], timed) / calls)
    deciles = {name: statistics.quantiles(values[2:], n=10, method="inclusive") for name, values in times.items()}
    return {name: (d[0], d[4], d[8]) for name, d in deciles.items()}


def _elapsed(function: Function, times: int) -> float:
    """Of a call, in ms."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(times):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / times


def command_line(module: str) -> str:
    """This run's, without folders."""
    return " ".join([f"python -m {module}", *(Path(argument).name for argument in sys.argv[1:])])


def write(path: str, title: str, origin: Mapping[str, Any], rows: list[dict[str, Any]], columns: list[str]) -> None:
    """The result as JSON at ``path`` and, beside it, ``columns`` as a table in Markdown; each whole or not at all."""
    with whole_file(path) as temporary:
        result = {"schema": 1, "provenance": dict(origin), "rows": rows}
        temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    made_with = ", ".join(f"{key} {value}" for key, value in origin.items() if key not in ("command", "ceilings"))
    lines = [f"# {title}", "", f"`{origin['command']}`: {made_with}.", ""]
    lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(str(row.get(column, "")) for column in columns) + " |" for row in rows]
    with whole_file(Path(path).with_suffix(".md")) as temporary:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
