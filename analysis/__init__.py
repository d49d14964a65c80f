"""Understand what FP8 costs: exact attention, error metrics, comparisons of recipes, and real tensors to run them on.

Every name is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .capturing import capture
    from .causes import CauseSplit, ablations, split_by_cause
    from .comparison import Comparison, compare
    from .errors import logit_error, recipe_errors, resolve_recipes
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
    from .outliers import AttentionShape, OutlierSpec, make_qkv
    from .plots import Plot, draw, summarize
    from .predictor import Prediction, incoherence_bound, predict, rank
    from .probe import AccumulatorProbe, probe_accumulator
    from .running import run_study
    from .study import STUDIES, Claim, Study, StudyResult, load_study

_NAMES = {
    "AccumulatorProbe": "probe",
    "AttentionShape": "outliers",
    "CaptureFile": "inputs",
    "CauseSplit": "causes",
    "Claim": "study",
    "Comparison": "comparison",
    "LayerQKV": "inputs",
    "LlamaModel": "llama",
    "OutlierSpec": "outliers",
    "Plot": "plots",
    "Prediction": "predictor",
    "STUDIES": "study",
    "Study": "study",
    "StudyResult": "study",
    "ablations": "causes",
    "by_head": "metrics",
    "calc_diff": "metrics",
    "capture": "capturing",
    "compare": "comparison",
    "confidence_interval": "metrics",
    "cosine": "metrics",
    "draw": "plots",
    "evaluate": "evaluation",
    "exact_attention": "exact",
    "exact_attention_quantized": "exact",
    "exact_logits": "exact",
    "exact_probabilities": "exact",
    "incoherence_bound": "predictor",
    "kl_divergence": "metrics",
    "load_qkv": "inputs",
    "load_sample": "inputs",
    "load_study": "study",
    "logit_error": "errors",
    "lse_error": "metrics",
    "make_qkv": "outliers",
    "max_abs_error": "metrics",
    "max_relative_error": "metrics",
    "measure": "metrics",
    "predict": "predictor",
    "probe_accumulator": "probe",
    "rank": "predictor",
    "recipe_errors": "errors",
    "relative_error": "metrics",
    "relative_l1": "metrics",
    "resolve_recipes": "errors",
    "rmse": "metrics",
    "row_quantiles": "metrics",
    "run_study": "running",
    "split_by_cause": "causes",
    "sqnr_db": "metrics",
    "summarize": "plots",
    "to_json": "evaluation",
    "to_markdown": "evaluation",
    "top1_agreement": "metrics",
    "worst_head": "metrics",
}

__all__ = [
    "STUDIES",
    "AccumulatorProbe",
    "AttentionShape",
    "CaptureFile",
    "CauseSplit",
    "Claim",
    "Comparison",
    "LayerQKV",
    "LlamaModel",
    "OutlierSpec",
    "Plot",
    "Prediction",
    "Study",
    "StudyResult",
    "ablations",
    "by_head",
    "calc_diff",
    "capture",
    "compare",
    "confidence_interval",
    "cosine",
    "draw",
    "evaluate",
    "exact_attention",
    "exact_attention_quantized",
    "exact_logits",
    "exact_probabilities",
    "incoherence_bound",
    "kl_divergence",
    "load_qkv",
    "load_sample",
    "load_study",
    "logit_error",
    "lse_error",
    "make_qkv",
    "max_abs_error",
    "max_relative_error",
    "measure",
    "predict",
    "probe_accumulator",
    "rank",
    "recipe_errors",
    "relative_error",
    "relative_l1",
    "resolve_recipes",
    "rmse",
    "row_quantiles",
    "run_study",
    "split_by_cause",
    "sqnr_db",
    "summarize",
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
