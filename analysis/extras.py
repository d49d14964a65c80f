"""Libraries that only tables and figures need, imported where they are used."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["require"]


def require(module: str) -> Any:
    """An optional module.

    >>> require("json").dumps([1])
    '[1]'

    Raises:
        ImportError: it is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{module.split('.')[0]} is needed for tables and figures: pip install 'fp8attn[plots]' ({error})"
        ) from None
