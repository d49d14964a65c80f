"""Understand what FP8 costs: exact attention, error metrics, comparisons of recipes, and real tensors to run them on.

Every name is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .capturing import capture
    from .causes import CauseSplit, ablations, split_by_cause
    from .comparison import compare, logit_error, resolve_recipes
    from .evaluation import evaluate, to_json, to_markdown
    from .exact import exact_attention, exact_attention_quantized, exact_logits, exact_probabilities
    from .inputs import CaptureFile, LayerQKV, load_qkv, load_sample
    from .llama import LlamaModel
    from .metrics import (
        by_head,
        calc_diff,
        confidence_interval,
        cosine,
        kl_divergence,
        lse_error,
        max_abs_error,
        max_relative_error,
        measure,
        relative_error,
        relative_l1,
        rmse,
        row_quantiles,
        sqnr_db,
        top1_agreement,
        worst_head,
    )
    from .predictor import Prediction, incoherence_bound, predict, rank

_NAMES = {
    "CaptureFile": "inputs",
    "CauseSplit": "causes",
    "LayerQKV": "inputs",
    "LlamaModel": "llama",
    "Prediction": "predictor",
    "ablations": "causes",
    "by_head": "metrics",
    "calc_diff": "metrics",
    "capture": "capturing",
    "compare": "comparison",
    "confidence_interval": "metrics",
    "cosine": "metrics",
    "evaluate": "evaluation",
    "exact_attention": "exact",
    "exact_attention_quantized": "exact",
    "exact_logits": "exact",
    "exact_probabilities": "exact",
    "incoherence_bound": "predictor",
    "kl_divergence": "metrics",
    "load_qkv": "inputs",
    "load_sample": "inputs",
    "logit_error": "comparison",
    "lse_error": "metrics",
    "max_abs_error": "metrics",
    "max_relative_error": "metrics",
    "measure": "metrics",
    "predict": "predictor",
    "rank": "predictor",
    "relative_error": "metrics",
    "relative_l1": "metrics",
    "resolve_recipes": "comparison",
    "rmse": "metrics",
    "row_quantiles": "metrics",
    "split_by_cause": "causes",
    "sqnr_db": "metrics",
    "to_json": "evaluation",
    "to_markdown": "evaluation",
    "top1_agreement": "metrics",
    "worst_head": "metrics",
}

__all__ = [
    "CaptureFile",
    "CauseSplit",
    "LayerQKV",
    "LlamaModel",
    "Prediction",
    "ablations",
    "by_head",
    "calc_diff",
    "capture",
    "compare",
    "confidence_interval",
    "cosine",
    "evaluate",
    "exact_attention",
    "exact_attention_quantized",
    "exact_logits",
    "exact_probabilities",
    "incoherence_bound",
    "kl_divergence",
    "load_qkv",
    "load_sample",
    "logit_error",
    "lse_error",
    "max_abs_error",
    "max_relative_error",
    "measure",
    "predict",
    "rank",
    "relative_error",
    "relative_l1",
    "resolve_recipes",
    "rmse",
    "row_quantiles",
    "split_by_cause",
    "sqnr_db",
    "to_json",
    "to_markdown",
    "top1_agreement",
    "worst_head",
]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'fp8attn.analysis' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
