"""With what a result was made."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import fp8attn

__all__ = ["provenance"]


def provenance(command: str, device: torch.device | str = "cuda", **more: Any) -> dict[str, Any]:
    """Versions, device, date and the exact command; the commit from ``GIT_COMMIT`` where the sources are no repository.

    >>> sorted(provenance("fp8attn run", "cpu"))
    ['command', 'commit', 'cpu', 'date', 'fp8attn', 'python', 'torch', 'triton']
    """
    found: dict[str, Any] = {}
    if torch.device(device).type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        found["cudnn"] = torch.backends.cudnn.version()
    else:
        found["cpu"] = _cpu()
        found["python"] = platform.python_version()
    return {
        **found,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "fp8attn": fp8attn.__version__,
        "commit": os.environ.get("GIT_COMMIT") or _commit(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": command,
        **more,
    }


def _cpu() -> str:
    """The processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str | None:
    """Of the repository that this file is tracked in; an installed copy inside some other repository has none."""
    here = Path(__file__).resolve()
    if _output("git", "ls-files", "--error-unmatch", here.name) is None:
        return None
    return _output("git", "rev-parse", "HEAD")


def _version(package: str) -> str | None:
    import importlib.metadata

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).resolve().parent)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.split("\n")[0]
