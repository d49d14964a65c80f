"""Understand what FP8 costs: exact attention, error metrics, comparisons of recipes, and real tensors to run them on.

Every name is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .capturing import capture
    from .comparison import compare, resolve_recipes
    from .evaluation import evaluate, to_json, to_markdown
    from .exact import exact_attention, exact_attention_quantized
    from .inputs import CaptureFile, LayerQKV, load_qkv, load_sample
    from .llama import LlamaModel
    from .metrics import calc_diff, cosine, lse_error, max_abs_error, measure, relative_error, rmse, sqnr_db

_NAMES = {
    "CaptureFile": "inputs",
    "LayerQKV": "inputs",
    "LlamaModel": "llama",
    "calc_diff": "metrics",
    "capture": "capturing",
    "compare": "comparison",
    "cosine": "metrics",
    "evaluate": "evaluation",
    "exact_attention": "exact",
    "exact_attention_quantized": "exact",
    "load_qkv": "inputs",
    "load_sample": "inputs",
    "lse_error": "metrics",
    "max_abs_error": "metrics",
    "measure": "metrics",
    "relative_error": "metrics",
    "resolve_recipes": "comparison",
    "rmse": "metrics",
    "sqnr_db": "metrics",
    "to_json": "evaluation",
    "to_markdown": "evaluation",
}

__all__ = [
    "CaptureFile",
    "LayerQKV",
    "LlamaModel",
    "calc_diff",
    "capture",
    "compare",
    "cosine",
    "evaluate",
    "exact_attention",
    "exact_attention_quantized",
    "load_qkv",
    "load_sample",
    "lse_error",
    "max_abs_error",
    "measure",
    "relative_error",
    "resolve_recipes",
    "rmse",
    "sqnr_db",
    "to_json",
    "to_markdown",
]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'fp8attn.analysis' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
