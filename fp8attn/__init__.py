"""FP8 attention: rotate, smooth and quantize queries, keys and values, run attention, and measure what it cost.

>>> import torch, fp8attn
>>> q, k, v = (torch.randn(1, 4, 256, 64) for _ in range(3))
>>> out = fp8attn.attention(q, k, v, is_causal=True)
>>> out.shape
torch.Size([1, 4, 256, 64])

Every public name is imported on first use, so that ``import fp8attn`` itself costs nothing.
"""

from __future__ import annotations

import importlib
import os as _os
from typing import TYPE_CHECKING, Any

# In a checkout the subpackages stand beside this folder, not inside it. Python started in the checkout's root finds
# this folder before an installed copy; let it find the subpackages too. An installed copy has them inside.
_here = _os.path.dirname(_os.path.abspath(__file__))
if not _os.path.isdir(_os.path.join(_here, "kernels")):
    _root = _os.path.dirname(_here)
    if _os.path.isfile(_os.path.join(_root, "kernels", "__init__.py")) and _root not in __path__:
        __path__.append(_root)

if TYPE_CHECKING:
    from fp8attn import analysis, formats, kernels, recipe, scaling, testing, transforms
    from fp8attn.kernels.problem import QuantizedQKV
    from fp8attn.ops import (
        Explanation,
        attention,
        attention_quantized,
        attention_varlen,
        explain,
        merge_states,
        quantize,
    )
    from fp8attn.recipe import Recipe
    from fp8attn.scaling import QuantizedTensor

_SUBMODULES = frozenset({"analysis", "cli", "formats", "kernels", "ops", "recipe", "scaling", "testing", "transforms"})
_NAMES = {
    "Explanation": "fp8attn.ops",
    "attention": "fp8attn.ops",
    "attention_quantized": "fp8attn.ops",
    "attention_varlen": "fp8attn.ops",
    "explain": "fp8attn.ops",
    "merge_states": "fp8attn.ops",
    "quantize": "fp8attn.ops",
    "QuantizedQKV": "fp8attn.kernels.problem",
    "QuantizedTensor": "fp8attn.scaling",
    "Recipe": "fp8attn.recipe",
}

__all__ = [
    "Explanation",
    "QuantizedQKV",
    "QuantizedTensor",
    "Recipe",
    "analysis",
    "attention",
    "attention_quantized",
    "attention_varlen",
    "explain",
    "formats",
    "kernels",
    "merge_states",
    "quantize",
    "recipe",
    "scaling",
    "testing",
    "transforms",
]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"fp8attn.{name}")
    if name in _NAMES:
        value = getattr(importlib.import_module(_NAMES[name]), name)
        globals()[name] = value
        return value
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("fp8attn")
        except PackageNotFoundError:  # a checkout that was never installed
            return "0+unknown"
    raise AttributeError(f"module 'fp8attn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
