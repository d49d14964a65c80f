"""What each recipe costs in accuracy on given queries, keys and values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8attn.ops import attention
from fp8attn.recipe import PRESETS, Recipe

from .exact import dequantized, exact_attention, exact_logits
from .metrics import measure

if TYPE_CHECKING:
    from fp8attn import QuantizedQKV

__all__ = ["DEFAULT_RECIPES", "logit_error", "recipe_errors", "resolve_recipes"]

DEFAULT_RECIPES = ("bf16", "per_tensor", "fa3", "default")
"""The floor that BF16 inputs set, the two plain FP8 baselines, and the recipe of this project."""

Recipes = str | Recipe | Iterable[str | Recipe] | Mapping[str, str | Recipe]


def recipe_errors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    recipes: Recipes = DEFAULT_RECIPES,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    causal_alignment: str = "top_left",
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
    exact: tuple[Tensor, Tensor] | None = None,
) -> dict[str, dict[str, float]]:
    """Error of attention under each recipe against exact float64 attention on the same inputs.

    ``attention`` gets float32 copies of the inputs, so that its output is not rounded to the inputs' dtype: what is
    measured is the recipe, not the output's rounding. float16 and bfloat16 inputs widen exactly.

    Args:
        q: ``(B, Hq, Sq, D)``.
        k, v: ``(B, Hkv, Sk, D)`` and ``(B, Hkv, Sk, Dv)``.
        recipes: preset names, recipe JSON files or :class:`~fp8attn.Recipe` values, one or several; a mapping names
            them itself.
        attn_mask, is_causal, causal_alignment, window, softcap, sinks, scale: as in :func:`fp8attn.attention`.
        backend: which implementation to measure.
        exact: ``(out, lse)`` of :func:`~fp8attn.analysis.exact_attention` if you have it already.

    Returns:
        recipe name -> the figures of :func:`~fp8attn.analysis.measure`, in the order of ``recipes``.

    >>> import torch
    >>> from fp8attn.analysis import recipe_errors
    >>> q, k, v = (torch.randn(1, 2, 64, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    >>> errors = recipe_errors(q, k, v, ["bf16", "default"], is_causal=True)
    >>> errors["bf16"]["relative_error"] < errors["default"]["relative_error"] < 0.1
    True
    """
    options: dict[str, Any] = {
        "is_causal": is_causal,
        "causal_alignment": causal_alignment,
        "window": window,
        "softcap": softcap,
        "sinks": sinks,
        "scale": scale,
        "enable_gqa": True,
    }
    chosen = resolve_recipes(recipes)
    expected, expected_lse = exact_attention(q, k, v, attn_mask, **options) if exact is None else exact
    q, k, v = q.float(), k.float(), v.float()
    errors = {}
    for name, recipe in chosen.items():
        out, lse = attention(q, k, v, attn_mask, **options, recipe=recipe, backend=backend, return_lse=True)
        errors[name] = measure(out, expected, lse, expected_lse)
    return errors


def logit_error(
    qkv: QuantizedQKV, q: Tensor, k: Tensor, *, max_rows: int = 512, scale: float | None = None, **options: Any
) -> Tensor:
    """(B, Hq): rms error of the visible logits that the codes of q and k stand for; what ``predict`` foretells.

    Args:
        qkv: from ``fp8attn.quantize(q, k, v)``.
        q, k: what was quantized.
        max_rows: how many queries a head, evenly spaced.
        scale, options: those of :func:`~fp8attn.analysis.exact_logits`.

    >>> import torch, fp8attn
    >>> q, k, v = (torch.randn(1, 2, 64, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    >>> logit_error(fp8attn.quantize(q, k, v), q, k).amax() < 0.1
    tensor(True)
    """
    rows = slice(0, q.shape[2], max(1, -(-q.shape[2] // max_rows)))
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    exact = exact_logits(q, k, rows=rows, scale=scale, **options)
    query, key, _ = dequantized(qkv)
    visible = exact > -torch.inf
    error = torch.where(visible, exact_logits(query, key, rows=rows, scale=scale, **options) - exact, 0.0)
    return (error.square().sum((2, 3)) / visible.sum((2, 3)).clamp(min=1)).sqrt()


def resolve_recipes(recipes: Recipes) -> dict[str, Recipe]:
    """Names and recipes, from preset names, JSON files (named after the file), values, or a mapping that names them.

    Raises:
        ValueError: an unknown preset, no recipe at all, or two of one name.
        FileNotFoundError: a name that ends in ``.json`` and is no file.

    >>> list(resolve_recipes(["bf16", Recipe.from_name("default")]))
    ['bf16', 'default']
    """
    if isinstance(recipes, Mapping):
        pairs = [(name, _resolve(recipe)[1]) for name, recipe in recipes.items()]
    else:
        pairs = [_resolve(recipe) for recipe in ([recipes] if isinstance(recipes, str | Recipe) else recipes)]
    if not pairs:
        raise ValueError("recipes must name at least one recipe, got none")
    chosen = dict(pairs)
    if len(chosen) != len(pairs):
        raise ValueError(f"recipes must have different names, got {[name for name, _ in pairs]}")
    return chosen


def _resolve(recipe: str | Recipe) -> tuple[str, Recipe]:
    if isinstance(recipe, Recipe):
        return next((name for name, preset in PRESETS.items() if preset == recipe), "recipe"), recipe
    if not isinstance(recipe, str):
        raise TypeError(f"a recipe must be a preset's name, a JSON file or a Recipe, got {type(recipe).__name__}")
    path = Path(recipe)
    if path.suffix == ".json":
        return path.stem, Recipe.load(path)
    if recipe not in PRESETS:
        raise ValueError(f"unknown recipe {recipe!r}; accepted: {', '.join(PRESETS)}, or a file that ends in .json")
    return recipe, PRESETS[recipe]
