"""What a study measures in one cell of its grid: a function from a cell's values and a recipe to rows of figures.

===============  ===================================================================================================
measure          what is measured
===============  ===================================================================================================
``attention``    attention's output and logits under a recipe, and what ``predict`` foretold, on data with outliers
``rounding``     what rounding to a format costs, with a scale that is a factor away from largest / format's largest
``accumulation`` how far attention's output is off for its accumulator's sake alone, on codes
``causality``    how much a last token that becomes ``magnitude`` times larger changes the rows before it
``capture``      one layer of a capture, head by head, as in ``attention``
===============  ===================================================================================================
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8attn.formats import get_format
from fp8attn.ops import attention, attention_quantized, quantize
from fp8attn.recipe import Recipe

from . import metrics
from .errors import logit_error
from .exact import dequantized, exact_attention, exact_attention_quantized, exact_logits, exact_probabilities
from .inputs import CaptureFile, load_qkv, load_sample
from .outliers import AttentionShape, OutlierSpec, make_qkv
from .predictor import predict

__all__ = ["MEASURES", "Measure"]

Row = dict[str, Any]
Cell = Mapping[str, Any]

_ROWS = 256  # queries a head whose logits and probabilities are compared


class Measure(NamedTuple):
    """Its function, the axes that a grid may give with the values they have otherwise, and what else tells rows apart.

    An axis without a default (``...``) must be given.
    """

    run: Callable[[Cell, Recipe, torch.device], list[Row]]
    axes: dict[str, Any]
    row_axes: tuple[str, ...] = ()


def measure_attention(cell: Cell, recipe: Recipe, device: torch.device) -> list[Row]:
    q, k, v, out, lse = _problem(*(cell[axis] for axis in _DATA), str(device))
    if cell["format"]:
        recipe = recipe.replace(q_format=cell["format"], k_format=cell["format"])
    options = {"is_causal": cell["causal"]}
    actual, actual_lse = attention(q, k, v, recipe=recipe, return_lse=True, **options)
    quantiles = metrics.row_quantiles(actual, out, (0.5, 0.9))
    return [
        {
            "rmse": metrics.rmse(actual, out),
            **metrics.measure(actual, out, actual_lse, lse),
            "relative_l1": metrics.relative_l1(actual, out),
            "row_error_p50": quantiles[0.5],
            "row_error_p90": quantiles[0.9],
            **_logits(q, k, v, recipe, options),
        }
    ]


def measure_rounding(cell: Cell, recipe: Recipe, device: torch.device) -> list[Row]:
    outliers = OutlierSpec(cell["kind"], cell["magnitude"], cell["rate"])
    length = cell["length"]
    shape = AttentionShape(1, 1, 1, length, length, cell["head_dim"])
    x = make_qkv(shape, outliers=outliers, seed=cell["seed"]).k.to(device)
    fmt = get_format(cell["format"])
    scale = float(x.abs().amax()) / fmt.max * 2.0 ** cell["log2_factor"]
    codes = fmt.round((x / scale).clamp(-fmt.max, fmt.max))
    return [
        {
            "sqnr_db": metrics.sqnr_db(codes.double() * scale, x),
            "relative_error": metrics.relative_error(codes.double() * scale, x),
            "saturated": float((codes.abs() == fmt.max).double().mean()),
            "zero": float(((codes == 0) & (x != 0)).double().mean()),
        }
    ]


def measure_accumulation(cell: Cell, recipe: Recipe, device: torch.device) -> list[Row]:
    generator = torch.Generator().manual_seed(cell["seed"])
    heads, rows, length, dim = cell["heads"], cell["queries"], cell["length"], cell["head_dim"]
    q = torch.randn(1, heads, rows, dim, generator=generator) * 0.5
    k = torch.randn(1, heads, length, dim, generator=generator)
    v = torch.randn(1, heads, length, dim, generator=generator) + cell["v_mean"]
    qkv = quantize(q.to(device), k.to(device), v.to(device), recipe=recipe)
    exact, _ = exact_attention_quantized(qkv)
    actual = attention_quantized(qkv).double()
    bias = float((actual - exact).mean() / exact.mean())
    return [{"bias": bias, "abs_bias": abs(bias), "relative_error": metrics.relative_error(actual, exact)}]


def measure_causality(cell: Cell, recipe: Recipe, device: torch.device) -> list[Row]:
    shape = AttentionShape(1, cell["heads"], cell["heads"], cell["length"], cell["length"], cell["head_dim"])
    before = [x.to(device) for x in make_qkv(shape, seed=cell["seed"])]
    after = [x.clone() for x in before]
    for x in after:
        x[:, :, -1] *= cell["magnitude"]
    one, two = (attention(q, k, v, recipe=recipe, is_causal=True)[:, :, :-1].double() for q, k, v in (before, after))
    exact = exact_attention(before[0], before[1], before[2], is_causal=True)[0][:, :, :-1]
    changed = (one != two).any(-1).double()
    return [
        {
            "changed_rows": float(changed.mean()),
            "change": metrics.relative_error(two, one),
            "relative_error": metrics.relative_error(two, exact),
        }
    ]


def measure_capture(cell: Cell, recipe: Recipe, device: torch.device) -> list[Row]:
    name, number = cell["capture"], int(cell["layer"])
    q, k, v, causal, scale, layer, out, lse = _layer(name, _written(name), number, str(device))
    options: dict[str, Any] = {"is_causal": causal, "scale": scale}
    actual, actual_lse = attention(q, k, v, recipe=recipe, return_lse=True, enable_gqa=True, **options)
    qkv = quantize(q, k, v, recipe=recipe, **options)
    measured, foretold = logit_error(qkv, q, k, max_rows=_ROWS, **options), predict(q, k, v, recipe, **options)
    errors = metrics.by_head(metrics.relative_error, actual, out)
    return [
        {
            "layer_name": layer,
            "batch": b,
            "head": h,
            "relative_error": float(errors[b, h]),
            "sqnr_db": metrics.sqnr_db(actual[b, h], out[b, h]),
            "lse_error": metrics.lse_error(actual_lse[b, h], lse[b, h]),
            "logit_error": float(measured[b, h]),
            "predicted_logit_error": float(foretold.logit_error[b, h]),
            "effective_keys": float(foretold.effective_keys[b, h]),
            "assumptions": "do not hold" if foretold.notes else "hold",
            "notes": "; ".join(foretold.notes),
        }
        for b in range(q.shape[0])
        for h in range(q.shape[1])
    ]


def layers_of(capture: str) -> list[str]:
    """The numbers of a capture's layers; ``sample`` is the packaged one."""
    return [str(layer.index) for layer in _capture(capture, None).layers]


_DATA = ("kind", "magnitude", "rate", "heads", "length", "head_dim", "causal", "seed")
_SYNTHETIC = {"kind": "none", "magnitude": 1.0, "rate": 0.02, "heads": 2, "length": 1024, "head_dim": 128}

MEASURES = {
    "attention": Measure(measure_attention, {"recipe": ..., **_SYNTHETIC, "causal": False, "format": None, "seed": 0}),
    "rounding": Measure(
        measure_rounding,
        {"format": "e4m3", "log2_factor": 0.0, **{a: x for a, x in _SYNTHETIC.items() if a != "heads"}, "seed": 0},
    ),
    "accumulation": Measure(
        measure_accumulation,
        {"recipe": ..., "length": 4096, "queries": 4, "heads": 1, "head_dim": 128, "v_mean": 1.0, "seed": 0},
    ),
    "causality": Measure(
        measure_causality,
        {"recipe": ..., "magnitude": 10.0, "heads": 2, "length": 512, "head_dim": 128, "seed": 0},
    ),
    "capture": Measure(measure_capture, {"recipe": ..., "capture": "sample", "layer": None}, ("batch", "head")),
}
"""By the names that a study's ``measure`` takes."""


# ---- What cells share ------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)  # cells that differ in their recipe alone follow each other
def _problem(
    kind: str,
    magnitude: float,
    rate: float,
    heads: int,
    length: int,
    head_dim: int,
    causal: bool,
    seed: int,
    device: str,
) -> tuple[Tensor, ...]:
    shape = AttentionShape(1, heads, heads, length, length, head_dim)
    q, k, v = (x.to(device) for x in make_qkv(shape, outliers=OutlierSpec(kind, magnitude, rate), seed=seed))
    return q, k, v, *exact_attention(q, k, v, is_causal=causal)


def _capture(name: str, layers: Sequence[int] | None) -> CaptureFile:
    return load_sample(layers=layers) if name == "sample" else load_qkv(name, layers=layers)


def _written(name: str) -> int:
    """When a file was: what was read of it before is not what is in it now."""
    return 0 if name == "sample" else os.stat(name).st_mtime_ns


@lru_cache(maxsize=1)
def _layer(name: str, written: int, number: int, device: str) -> tuple[Any, ...]:
    capture = _capture(name, [number])
    (layer,) = capture.layers
    q, k, v = (x.to(device, torch.float32) for x in (layer.q, layer.k, layer.v))
    options: dict[str, Any] = {"is_causal": capture.causal, "scale": capture.scale}
    return q, k, v, capture.causal, capture.scale, layer.name, *exact_attention(q, k, v, **options)


def _logits(q: Tensor, k: Tensor, v: Tensor, recipe: Recipe, options: dict[str, Any]) -> Row:
    """Errors of logits and of probabilities, measured and foretold."""
    qkv = quantize(q, k, v, recipe=recipe, **options)
    rows = slice(0, q.shape[2], max(1, q.shape[2] // 64))
    logits = exact_logits(q, k, rows=rows, **options)
    visible = logits[logits > -torch.inf]
    probabilities = exact_probabilities(q, k, rows=rows, **options)
    query, key, _ = dequantized(qkv)
    rounded = exact_probabilities(query, key, rows=rows, scale=q.shape[-1] ** -0.5, **options)
    measured = float(logit_error(qkv, q, k, max_rows=_ROWS, **options).square().mean().sqrt())
    foretold = predict(q, k, v, recipe, max_rows=_ROWS, **options)
    return {
        "kl_divergence": metrics.kl_divergence(rounded, probabilities),
        "top1_agreement": metrics.top1_agreement(rounded, probabilities),
        "logit_error": measured,
        "relative_logit_error": measured / max(1e-300, float(visible.square().mean().sqrt())),
        "predicted_logit_error": float(foretold.logit_error.square().mean().sqrt()),
        "predicted_error": foretold.output_error,
        "effective_keys": float(foretold.effective_keys.mean()),
        "assumptions": "do not hold" if foretold.notes else "hold",
        "notes": "; ".join(foretold.notes),
    }
