"""What FP8 costs on one input, why, and what would help: the report behind ``fp8attn compare``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8attn.files import whole_file
from fp8attn.ops import quantize
from fp8attn.recipe import Recipe

from .causes import CAUSES, CauseSplit, ablations, split_by_cause
from .errors import DEFAULT_RECIPES, Recipes, logit_error, recipe_errors, resolve_recipes
from .exact import exact_attention, exact_probabilities
from .extras import require
from .plots import Plot, draw_codes, draw_key_maps, summarize, to_svg
from .predictor import Prediction, predict
from .preparation import fit_smoothing, rotated, smoothed
from .provenance import provenance
from .report import Section, plot_section, table_of, to_html

if TYPE_CHECKING:
    from pandas import DataFrame

    from fp8attn import QuantizedQKV

__all__ = ["Comparison", "compare"]

_GAIN = 0.97  # a change that brings the error below this share of it is worth a word
_FIT_ROWS = 64
_IN_USE = ("attn_mask", "is_causal", "causal_alignment", "window", "scale")  # what the quantizer is told


@dataclass(frozen=True)
class Comparison:
    """What recipes cost on given queries, keys and values. ``print`` shows it, ``save`` writes a page.

    Attributes:
        errors: recipe -> figures of :func:`~fp8attn.analysis.recipe_errors`, the best output first.
        logit_errors: recipe -> (B, Hq) measured rms errors of logits.
        predictions: recipe -> what was foretold.
        causes: recipe -> the error by cause, of recipes with a format of 8 bits.
        best: the best of these; None if there is none.
        ablations: change -> relative error of ``best`` with that one thing changed.
        advice: one sentence, made of the above.
        keys: of the kv head whose largest key stands out most: its batch entry and number, and (Sk, D) before and after
            what ``best`` does ahead of rounding.
        codes: recipe -> tensor -> power of two (None: zero) -> share of the codes in it.
        origin: versions, device, date and command.
    """

    errors: dict[str, dict[str, float]]
    logit_errors: dict[str, Tensor]
    predictions: dict[str, Prediction]
    causes: dict[str, CauseSplit]
    best: str | None
    ablations: dict[str, float]
    advice: str
    keys: tuple[int, int, Tensor, Tensor] | None
    codes: dict[str, dict[str, dict[int | None, float]]]
    origin: dict[str, Any]

    def __str__(self) -> str:
        table = _errors_table(self).to_string(index=False, float_format=lambda x: f"{x:.4g}", na_rep="")
        lines = [table, ""]
        if self.causes:
            lines += [_causes_table(self).to_string(index=False, float_format=lambda x: f"{x:.4g}"), ""]
        return "\n".join([*lines, self.advice])

    def sections(self, prefix: str = "c", title: str = "") -> list[Section]:
        """Its parts of a page, with ids that begin with ``prefix``."""
        before = f"{title}: " if title else ""
        sections = [Section(f"{before}errors of attention's output", self.advice if title else "", "", _shown(self))]
        if notes := {name: p.notes for name, p in self.predictions.items() if p.notes}:
            words = " ".join(f"{name}: {'; '.join(each)}." for name, each in notes.items())
            sections.append(Section(f"{before}where the prediction's assumptions do not hold", words))
        for number, (plot, frame, axes, over) in enumerate(_plots(self)):
            sections.append(plot_section(plot, summarize(frame, plot, axes, over), f"{prefix}{number}"))
        if self.keys is not None:
            batch, head, raw, ready = self.keys
            name = f"{before}keys of kv head {head}" + (f" of batch entry {batch}" if batch else "")
            svg = to_svg(draw_key_maps(raw, ready), f"{prefix}k", "heat maps of |K| before and after")
            sections.append(Section(name, "The head whose largest key stands out most.", svg))
        if self.codes:
            frame = _codes_table(self)
            svg = to_svg(draw_codes(frame), f"{prefix}h", "histogram of codes")
            sections.append(Section(f"{before}codes", "How often each power of two is used.", svg))
        return sections

    def save(self, path: str | Path) -> None:
        """Write a self-contained HTML page, whole or not at all."""
        text = to_html("fp8attn compare", self.sections(), origin=self.origin, advice=self.advice)
        with whole_file(path) as temporary:
            temporary.write_text(text, encoding="utf-8")


def compare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    recipes: Recipes = DEFAULT_RECIPES,
    *,
    attn_mask: Tensor | None = None,
    backend: str = "auto",
    command: str = "fp8attn.analysis.compare(q, k, v)",
    progress: Callable[[int, int, str], None] | None = None,
    **options: Any,
) -> Comparison:
    """Compare recipes on one input: errors, their causes, what was predicted, what one change would bring.

    :func:`~fp8attn.analysis.recipe_errors` gives the errors alone, in a tenth of the time.

    Args:
        q: ``(B, Hq, Sq, D)``.
        k, v: ``(B, Hkv, Sk, D)`` and ``(B, Hkv, Sk, Dv)``.
        recipes: preset names, recipe JSON files or :class:`~fp8attn.Recipe` values; a mapping names them itself.
        attn_mask, options: those of :func:`~fp8attn.analysis.exact_attention`.
        backend: which implementation is meant.
        command: what the page says that it was made with.
        progress: called as ``progress(steps done, all steps, what is being done now)``.

    >>> import torch
    >>> from fp8attn.analysis import compare
    >>> q, k, v = (torch.randn(1, 2, 64, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    >>> report = compare(q, k, v, ["per_tensor", "default"], is_causal=True)
    >>> list(report.errors), report.advice.startswith("Take ")
    (['default', 'per_tensor'], True)
    """
    require("pandas")
    chosen = resolve_recipes(recipes)
    options = {**options, "attn_mask": attn_mask}
    quantizing = [name for name, recipe in chosen.items() if recipe.quantizes]
    steps = 1 + 2 * len(chosen) + len(quantizing) + 1
    done = 0

    def step(doing: str) -> None:
        nonlocal done
        if progress is not None:
            progress(done, steps, doing)
        done += 1

    step("exact attention")
    exact = exact_attention(q, k, v, **options)

    def errors_of(name: str, recipe: Recipe) -> dict[str, float]:
        return recipe_errors(q, k, v, {name: recipe}, **options, backend=backend, exact=exact)[name]

    errors, measured, foretold, codes = {}, {}, {}, {}
    for name, recipe in chosen.items():
        step(f"{name}: errors")
        errors[name] = errors_of(name, recipe)
        qkv = quantize(q.float(), k.float(), v.float(), recipe=recipe, backend=backend, **_only(options, _IN_USE))
        measured[name] = logit_error(qkv, q, k, **{n: x for n, x in options.items() if n != "sinks"})
        codes[name] = _code_shares(qkv)
        step(f"{name}: prediction")
        foretold[name] = predict(q, k, v, recipe, **options)
    errors = dict(sorted(errors.items(), key=lambda item: _order(item[1]["relative_error"])))

    causes = {}
    for name in quantizing:
        step(f"{name}: causes")
        causes[name] = split_by_cause(q, k, v, chosen[name], backend=backend, **options)
    best = next((name for name in errors if name in quantizing), None)
    changed: dict[str, float] = {}
    step("changes")
    if best is not None:
        for change, recipe in ablations(chosen[best]).items():
            changed[change] = errors_of(change, recipe)["relative_error"]
    if progress is not None:
        progress(steps, steps, "done")
    return Comparison(
        errors,
        {name: measured[name] for name in errors},
        {name: foretold[name] for name in errors},
        {name: causes[name] for name in errors if name in causes},
        best,
        dict(sorted(changed.items(), key=lambda item: _order(item[1]))),
        _advice(errors, causes, best, changed),
        _key_maps(q, k, v, chosen[best], options) if best is not None and k.numel() else None,
        {name: codes[name] for name in errors if codes[name]},
        provenance(command, q.device, recipes={name: recipe.to_dict() for name, recipe in chosen.items()}),
    )


# ---- Parts -----------------------------------------------------------------------------------------------------------


def _advice(
    errors: Mapping[str, Mapping[str, float]],
    causes: Mapping[str, CauseSplit],
    best: str | None,
    changed: Mapping[str, float],
) -> str:
    """One sentence on what to take, made of what was measured."""
    if best is None:
        return "No recipe here quantizes, so there is nothing to choose."
    error = errors[best]["relative_error"]
    if not math.isfinite(error):
        return "No recipe gives a finite error on this input: look for NaN and infinities in it."
    sentence = f"Take {best}: its output is off by {error:.2%}"
    others = {name: errors[name]["relative_error"] for name in causes if name != best}
    others = {name: other for name, other in others.items() if math.isfinite(other) and other > 0}
    if others:
        worst = max(others, key=lambda name: others[name])
        sentence += f", {error / others[worst]:.2f} times what {worst} costs"
    shares = causes[best].share
    cause = max(shares, key=lambda name: shares[name])
    if shares[cause] > 0:
        sentence += f"; the largest part comes from {_CAUSE_NAMES[cause]} ({shares[cause]:.0%} of its square)"
    finite = {change: other for change, other in changed.items() if math.isfinite(other)}
    if finite and error > 0:
        change = min(finite, key=lambda name: finite[name])
        if finite[change] < _GAIN * error:
            return f"{sentence}, and with one change ({change}) it would be {finite[change]:.2%}."
        return f"{sentence}, and no single change of transform, smoothing or scales tried here brings 3% or more."
    return sentence + "."


_CAUSE_NAMES = {
    "q": "rounding queries",
    "k": "rounding keys",
    "v": "rounding values",
    "p": "rounding the softmax weights",
    "accumulator": "the accumulator",
    "cast": "the output's own dtype",
}


def _key_maps(
    q: Tensor, k: Tensor, v: Tensor, recipe: Recipe, options: dict[str, Any]
) -> tuple[int, int, Tensor, Tensor]:
    rows = slice(0, None, max(1, q.shape[2] // _FIT_ROWS))
    weights = exact_probabilities(q, k, rows=rows, **options)
    ready = rotated(smoothed(q, k, v, fit_smoothing(q, k, v, recipe, weights, rows))[1], recipe)
    sizes = k.abs().double()
    outstanding = sizes.amax((2, 3)) / sizes.flatten(2).median(-1).values.clamp(min=1e-300)
    batch, head = divmod(int(outstanding.nan_to_num(0.0).argmax()), k.shape[1])
    return batch, head, k[batch, head].detach().double().cpu(), ready[batch, head].detach().cpu()


def _code_shares(qkv: QuantizedQKV) -> dict[str, dict[int | None, float]]:
    shares: dict[str, dict[int | None, float]] = {}
    for name in "qkv":
        tensor = getattr(qkv, name)
        if tensor.format.dtype.itemsize != 1 or not tensor.rows().numel():
            continue
        values = tensor.format.decode(tensor.rows()).abs().flatten()
        exponents = torch.frexp(values[values > 0]).exponent - 1
        found, counts = exponents.unique(return_counts=True)
        shares[name] = {None: float((values == 0).sum()) / values.numel()} | {
            int(e): int(n) / values.numel() for e, n in zip(found, counts, strict=True)
        }
    return shares


def _errors_table(comparison: Comparison) -> DataFrame:
    return require("pandas").DataFrame(
        {
            "recipe": name,
            "relative error": figures["relative_error"],
            "predicted": comparison.predictions[name].output_error,
            "SQNR dB": figures["sqnr_db"],
            "largest error": figures["max_abs_error"],
            "LSE error": figures["lse_error"],
            "logit error": _rms(comparison.logit_errors[name]),
            "logit error predicted": _rms(comparison.predictions[name].logit_error),
        }
        for name, figures in comparison.errors.items()
    )


def _shown(comparison: Comparison) -> Any:
    return table_of(_errors_table(comparison))


def _causes_table(comparison: Comparison) -> DataFrame:
    return require("pandas").DataFrame(
        {
            "recipe": name,
            "cause": cause,
            "alone": split.alone[cause],
            "without": split.without[cause],
            "share": split.share[cause],
        }
        for name, split in comparison.causes.items()
        for cause in CAUSES
    )


def _codes_table(comparison: Comparison) -> DataFrame:
    powers = {p for tensors in comparison.codes.values() for shares in tensors.values() for p in shares}
    order: list[int | None] = [None, *sorted(p for p in powers if p is not None)]
    return require("pandas").DataFrame(
        {
            "tensor": name,
            "recipe": recipe,
            "order": place,
            "magnitude": "0" if power is None else f"2^{power}",
            "share": shares.get(power, 0.0),
        }
        for recipe, tensors in comparison.codes.items()
        for name, shares in tensors.items()
        for place, power in enumerate(order)
    )


def _plots(comparison: Comparison) -> list[tuple[Plot, DataFrame, Sequence[str], Sequence[str]]]:
    pandas = require("pandas")
    heads = pandas.DataFrame(
        {
            "recipe": name,
            "head": head,
            "predicted": float(comparison.predictions[name].logit_error.flatten()[head]),
            "measured": float(errors.flatten()[head]),
        }
        for name, errors in comparison.logit_errors.items()
        for head in range(errors.numel())
    )
    plots: list[tuple[Plot, DataFrame, Sequence[str], Sequence[str]]] = []
    if comparison.causes:
        causes = Plot(
            "causes",
            x="cause",
            y="alone",
            lines="recipe",
            title="Error by cause: what each does alone",
            x_scale="category",
            y_label="relative error",
        )
        plots.append((causes, _causes_table(comparison), ("recipe", "cause"), ()))
    if comparison.ablations:
        changes = Plot(
            "changes",
            x="change",
            y="relative error",
            title=f"{comparison.best}, and with one thing changed",
            x_scale="category",
        )
        assert comparison.best is not None
        own = {f"{comparison.best}": comparison.errors[comparison.best]["relative_error"]}
        table = pandas.DataFrame(
            {"change": change, "relative error": error} for change, error in (own | comparison.ablations).items()
        )
        plots.append((changes, table, ("change",), ()))
    if len(heads):
        predicted = Plot(
            "predicted",
            x="predicted",
            y="measured",
            lines="recipe",
            title="Errors of logits, head by head",
            x_scale="log",
            y_scale="log",
            diagonal=True,
        )
        plots.append((predicted, heads, ("recipe", "head"), ()))
    return plots


def _only(options: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in names}


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


def _order(error: float) -> float:
    return math.inf if math.isnan(error) else error
