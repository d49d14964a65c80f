"""Run a study: every cell once, on all cores or a GPU, each noted as it ends, and the results in files.

The folder that a study is run in holds

- ``journal.jsonl``, a line for every cell that is done, which is what makes a run resumable,
- ``table.csv`` and ``table.parquet``, one tidy table in the grid's order,
- every plot as PNG and SVG, ``report.html``, and ``study.json``, which says with what all of it was made.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any

import torch

import fp8attn
from fp8attn.files import whole_file
from fp8attn.recipe import Recipe

from .extras import require
from .measures import MEASURES
from .plots import draw, save
from .provenance import provenance
from .report import study_report
from .study import Cell, Study, StudyResult

__all__ = ["run_study", "write_result"]

Progress = Callable[[int, int, str], None]

_JOURNAL = "journal.jsonl"
_SHARED = ("recipe", "format")  # cells that differ in these alone share their data, and go to one process
_stop: Any = None  # in a worker: the event that asks it to stop after its cell


def run_study(
    study: Study,
    out: str | os.PathLike[str],
    *,
    jobs: int = 1,
    device: str = "cpu",
    progress: Progress | None = None,
    command: str | None = None,
) -> StudyResult:
    """Run every cell that ``out``'s journal does not hold yet, and write table, figures and report into ``out``.

    Args:
        out: a folder, made if it does not exist. What it holds of other grids of the same study is left in the journal.
        jobs: processes. More than one start Python anew: a script that asks for them needs
            ``if __name__ == "__main__":``.
        device: ``"cpu"`` or ``"cuda"``, which takes one process.
        progress: called as ``progress(cells done, all cells, what is being done)``.
        command: what the report says that it was made with.

    Raises:
        ValueError: a journal of another version or device, or ``jobs`` or ``device`` that cannot be.
        BlockingIOError: another run is at work in ``out``.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    kind = device.split(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {device!r}")
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device is {device!r}, but this machine has no CUDA GPU; accepted: cpu")
        jobs = 1
    require("pandas")
    require("pyarrow")
    require("matplotlib")
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    cells = list(study.cells())
    with _journal(folder, device) as done:
        keys = [_key(study, cell) for cell in cells]
        groups: dict[str, list[tuple[str, Cell]]] = {}
        for key, cell in zip(keys, cells, strict=True):
            if key not in done:
                data = json.dumps([value for axis, value in cell.items() if axis not in _SHARED])
                groups.setdefault(data, []).append((key, cell))
        finished = len(cells) - sum(map(len, groups.values()))
        if progress is not None:
            progress(finished, len(cells), study.name)
        work = [(study.measure, study.recipes, group, device, str(folder / _JOURNAL)) for group in groups.values()]
        for count in _run_groups(work, jobs):
            finished += count
            if progress is not None:
                progress(finished, len(cells), study.name)
        done = _read(folder / _JOURNAL)[1]
    rows = [cell | row for key, cell in zip(keys, cells, strict=True) for row in done[key]]
    result = StudyResult(
        study,
        require("pandas").DataFrame(rows),
        provenance(command or f"run_study(load_study({study.name!r}), ...)", device, recipes=_recipes(study)),
    )
    write_result(result, folder)
    return result


def write_result(result: StudyResult, folder: Path) -> None:
    """Table, figures, report and provenance, each whole or not at all."""
    with whole_file(folder / "table.csv") as temporary:
        result.table.to_csv(temporary, index=False, lineterminator="\n")
    with whole_file(folder / "table.parquet") as temporary:
        result.table.to_parquet(temporary, engine="pyarrow", index=False)
    for plot in result.study.plots:
        save(draw(result.summary(plot), plot), folder / plot.name)
    with whole_file(folder / "report.html") as temporary:
        temporary.write_text(study_report(result), encoding="utf-8")
    about = {
        "study": result.study.name,
        "question": result.study.question,
        "measure": result.study.measure,
        "grid": {axis: list(values) for axis, values in result.study.grid.items()},
        "claims": [
            {"says": claim.says, "holds": holds, "smallest": _finite(low), "largest": _finite(high)}
            for claim, holds, low, high in result.claims()
        ],
        "provenance": dict(result.origin),
    }
    with whole_file(folder / "study.json") as temporary:
        temporary.write_text(json.dumps(about, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None


def _recipes(study: Study) -> dict[str, Any]:
    return {name: study.recipes[name].to_dict() for name in study.grid.get("recipe", ())}


# ---- Cells -----------------------------------------------------------------------------------------------------------


def _key(study: Study, cell: Cell) -> str:
    """What decides a cell's figures, as text: a recipe's fields rather than its name, a file's contents as well."""
    parts: dict[str, Any] = {"measure": study.measure, **cell}
    if "recipe" in cell:
        parts["recipe"] = asdict(study.recipes[cell["recipe"]])
    capture = cell.get("capture", "sample")
    if capture != "sample":
        parts["sha256"] = hashlib.sha256(Path(capture).read_bytes()).hexdigest()
    return json.dumps(parts, sort_keys=True)


def _run_groups(work: Sequence[tuple[Any, ...]], jobs: int) -> Iterator[int]:
    """Run groups of cells, and say how many have been added to the journal whenever one ends."""
    if jobs == 1 or len(work) < 2:
        for arguments in work:
            yield _run_group(*arguments)
        return
    context = multiprocessing.get_context("spawn")  # a fork of a process with torch's threads may hang
    stop = context.Event()
    with ProcessPoolExecutor(min(jobs, len(work)), context, _prepare_worker, (stop,)) as pool:
        try:
            waiting: set[Future[int]] = {pool.submit(_run_group, *arguments) for arguments in work}
            while waiting:
                ended, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in ended:
                    yield future.result()
        except BaseException:  # also an interrupt: what runs may end its cell, what waits is not begun
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


def _prepare_worker(stop: Any) -> None:
    global _stop
    _stop = stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told as well, and asks to stop between cells
    parent = multiprocessing.parent_process()
    if parent is not None:  # killed, it can ask for nothing

        def watch(sentinel: int = parent.sentinel) -> None:
            wait_for([sentinel])
            os._exit(1)

        threading.Thread(target=watch, daemon=True).start()


def _run_group(
    measure: str, recipes: Mapping[str, Recipe], group: Iterable[tuple[str, Cell]], device: str, journal: str
) -> int:
    """Measure cells that share their data, one after the other, and note each in the journal."""
    threads, count = torch.get_num_threads(), 0
    torch.set_num_threads(1)  # sums in one order, whoever runs them; processes are what is parallel
    try:
        for key, cell in group:
            if _stop is not None and _stop.is_set():
                break
            recipe = recipes[cell["recipe"]] if "recipe" in cell else Recipe()
            _append(journal, {"cell": key, "rows": MEASURES[measure].run(cell, recipe, torch.device(device))})
            count += 1
    finally:
        torch.set_num_threads(threads)
    return count


# ---- The journal -----------------------------------------------------------------------------------------------------


@contextmanager
def _journal(folder: Path, device: str) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """The cells that are done, while this process alone may add to them."""
    path = folder / _JOURNAL
    made_with = {
        "fp8attn": fp8attn.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "cpu",
    }
    with path.open("a+b") as file:
        _lock(file, folder)
        header, done, length = _read_lines(path)
        os.truncate(path, length)  # a line that was being written when the run was killed
        if header is None:
            _append(str(path), made_with)
        elif header != made_with:
            other = ", ".join(f"{key} {value}" for key, value in header.items())
            raise ValueError(
                f"{path} was made with {other}, which may give other figures; take another folder, or delete it to "
                "begin anew"
            )
        yield done


def _lock(file: Any, folder: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows has no such lock: there, take care yourself
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BlockingIOError(f"another run is at work in {folder}; wait for it or take another folder") from None


def _append(path: str, entry: Mapping[str, Any]) -> None:
    """One line in one write, so that those of several processes do not mix."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(handle, (json.dumps(entry) + "\n").encode("utf-8"))
    finally:
        os.close(handle)


def _read(path: Path) -> tuple[Any, dict[str, list[dict[str, Any]]]]:
    return _read_lines(path)[:2]


def _read_lines(path: Path) -> tuple[Any, dict[str, list[dict[str, Any]]], int]:
    """Header, cells, and how many bytes of whole lines there are."""
    header, done, length = None, {}, 0
    with path.open("rb") as file:
        for number, line in enumerate(file):
            if not line.endswith(b"\n"):
                break
            try:
                entry = json.loads(line)
                if number == 0:
                    header = dict(entry)
                else:
                    done[entry["cell"]] = entry["rows"]
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{path}, line {number + 1}: not a study's journal ({error})") from None
            length += len(line)
    return header, done, length
