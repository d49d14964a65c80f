"""Hypothesis' entry point, apart from ``fp8attn.testing`` so that importing hypothesis does not import torch."""

from __future__ import annotations

import sys


def _hypothesis_setup_hook() -> None:
    """Called when hypothesis is imported. ``fp8attn.testing``, once imported, registers its strategies by itself."""
    if "fp8attn.transforms" in sys.modules:
        import fp8attn.testing  # noqa: F401
