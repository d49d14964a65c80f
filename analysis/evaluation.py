"""A capture's errors, layer by layer: the result behind ``fp8attn run``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

import fp8attn

from .errors import DEFAULT_RECIPES, Recipes, recipe_errors, resolve_recipes
from .exact import exact_attention
from .inputs import CaptureFile
from .metrics import METRICS

__all__ = ["describe", "evaluate", "explain_errors", "json_safe", "table_rows", "to_json", "to_markdown"]


def evaluate(
    capture: CaptureFile,
    recipes: Recipes = DEFAULT_RECIPES,
    *,
    is_causal: bool | None = None,
    source: str | None = None,
    backend: str = "auto",
    progress: Callable[[int, int, str], None] | None = None,
) -> dict[str, Any]:
    """Error of every recipe on every layer of a capture, against exact float64 attention, and the mean over the layers.

    Args:
        capture: from :func:`~fp8attn.analysis.load_qkv` or ``load_sample``; its metadata's softmax scale is used.
        recipes: as in :func:`~fp8attn.analysis.recipe_errors`.
        is_causal: None is what the capture's metadata says.
        source: what the result calls the capture; its file name if None.
        backend: which implementation to measure.
        progress: called as ``progress(steps done, all steps, what is being done now)``.

    Returns:
        ``{"fp8attn", "torch", "source": {"file", "metadata"}, "causal", "recipes": {name: settings},
        "layers": [{"layer", "shape", "recipes": {name: figures}}], "mean": {name: figures}}``; the figures are those of
        :func:`~fp8attn.analysis.measure`, and ``layers`` keeps the capture's order. They may be infinite or NaN:
        write the result with :func:`to_json`.
    """
    chosen = resolve_recipes(recipes)
    is_causal = capture.causal if is_causal is None else is_causal
    options: dict[str, Any] = {"is_causal": is_causal, "scale": capture.scale}
    steps, done = len(capture.layers) * (1 + len(chosen)), 0

    def advance(what: str, by: int) -> None:
        nonlocal done
        if progress is not None:
            progress(done, steps, what)
        done += by

    layers: list[dict[str, Any]] = []
    for layer in capture.layers:
        advance(f"{layer.name}: exact", 1)
        exact = exact_attention(layer.q, layer.k, layer.v, **options)
        errors: dict[str, dict[str, float]] = {}
        for name, recipe in chosen.items():
            advance(f"{layer.name}: {name}", 1)
            errors |= recipe_errors(layer.q, layer.k, layer.v, {name: recipe}, **options, backend=backend, exact=exact)
        batch, num_q_heads, seqlen_q, head_dim = layer.q.shape
        shape = {
            "batch": batch,
            "num_q_heads": num_q_heads,
            "num_kv_heads": layer.k.shape[1],
            "seqlen_q": seqlen_q,
            "seqlen_k": layer.k.shape[2],
            "head_dim": head_dim,
            "head_dim_v": layer.v.shape[3],
        }
        layers.append({"layer": layer.name, "shape": shape, "recipes": errors})
    advance("done", 0)
    return {
        "fp8attn": fp8attn.__version__,
        "torch": torch.__version__,
        "source": {
            "file": capture.path.name if source is None else source,
            "metadata": dict(sorted(capture.metadata.items())),
        },
        "causal": is_causal,
        "recipes": {name: recipe.to_dict() for name, recipe in chosen.items()},
        "layers": layers,
        "mean": {name: _mean([layer["recipes"][name] for layer in layers]) for name in chosen},
    }


def to_json(result: dict[str, Any]) -> str:
    """The result as strictly valid JSON: a figure that is infinite or NaN is null."""
    return json.dumps(json_safe(result), indent=2, allow_nan=False) + "\n"


def json_safe(value: Any) -> Any:
    """A copy of nested dicts and lists in which every infinite or NaN float is None.

    >>> json_safe({"sqnr_db": math.inf, "cosine": 1.0})
    {'sqnr_db': None, 'cosine': 1.0}
    """
    if isinstance(value, dict):
        return {key: json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def describe(result: dict[str, Any]) -> str:
    """One line: where the tensors come from, their shape, and whether attention was causal."""
    shapes = [layer["shape"] for layer in result["layers"]]
    first = shapes[0]
    if any(shape != first for shape in shapes):
        size = "shapes differ between layers"
    else:
        tokens = f"{first['seqlen_q']} tokens"
        if first["seqlen_k"] != first["seqlen_q"]:
            tokens = f"{first['seqlen_q']} queries on {first['seqlen_k']} keys"
        dims = f"head dim {first['head_dim']}"
        if first["head_dim_v"] != first["head_dim"]:
            dims += f" (values {first['head_dim_v']})"
        heads = f"{first['num_q_heads']} query on {first['num_kv_heads']} kv heads"
        size = f"batch {first['batch']}, {heads}, {dims}, {tokens}"
    count = "1 layer" if len(shapes) == 1 else f"{len(shapes)} layers"
    metadata = result["source"]["metadata"]
    # The file's name tells more (the quantization, say) than the name that the model gives itself.
    model = metadata.get("model_file", "").removesuffix(".gguf") or metadata.get("model")
    source = result["source"]["file"] + (f" ({model})" if model else "")
    return f"{source}: {count}, {size}, {'causal' if result['causal'] else 'not causal'}"


def explain_errors(result: dict[str, Any]) -> str:
    """How to read the figures, in plain words, with the most telling ratio of this very result."""
    text = (
        "Errors of attention's output against exact float64 attention on the same inputs "
        "(relative error: |out - exact| / |exact|; lower is better, SQNR the other way round)."
    )
    mean = {name: figures["relative_error"] for name, figures in result["mean"].items()}
    ours = "default" if "default" in mean else min(mean, key=lambda name: mean[name])
    theirs = "per_tensor" if "per_tensor" in mean else max(mean, key=lambda name: mean[name])
    if ours != theirs and 0 < mean[theirs] < math.inf and math.isfinite(mean[ours]):
        text += f" On average {ours}'s relative error is {mean[ours] / mean[theirs]:.2f} times {theirs}'s."
    return text


def table_rows(result: dict[str, Any]) -> list[tuple[str, str, dict[str, float]]]:
    """``(layer, recipe, figures)`` in the order of the table, the mean over the layers last (if there are several)."""
    rows = [(layer["layer"], name, figures) for layer in result["layers"] for name, figures in layer["recipes"].items()]
    if len(result["layers"]) > 1:
        rows += [("mean", name, figures) for name, figures in result["mean"].items()]
    return rows


COLUMNS: tuple[tuple[str, Callable[[dict[str, float]], str]], ...] = (
    ("relative error", lambda figures: f"{figures['relative_error']:.4f}"),
    ("SQNR dB", lambda figures: f"{figures['sqnr_db']:.1f}"),
    ("cosine", lambda figures: f"{figures['cosine']:.5f}"),
    ("largest error", lambda figures: f"{figures['max_abs_error']:.3g}"),
    ("LSE error", lambda figures: f"{figures['lse_error']:.2g}"),
)
"""Headings of the table's columns after layer and recipe, and how each is written."""


def to_markdown(result: dict[str, Any]) -> str:
    """The table as Markdown, between its heading and the words on how to read it."""
    lines = [
        describe(result),
        "",
        "| " + " | ".join(("layer", "recipe", *(title for title, _ in COLUMNS))) + " |",
        "|" + "---|" * 2 + "---:|" * len(COLUMNS),
    ]
    for layer, name, figures in table_rows(result):
        lines.append("| " + " | ".join((layer, name, *(write(figures) for _, write in COLUMNS))) + " |")
    versions = f"fp8attn {result['fp8attn']}, torch {result['torch']}."
    return "\n".join([*lines, "", explain_errors(result), "", versions]) + "\n"


def _mean(figures: Sequence[dict[str, float]]) -> dict[str, float]:
    return {metric: sum(each[metric] for each in figures) / len(figures) for metric in METRICS}
