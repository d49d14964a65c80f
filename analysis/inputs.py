"""Read queries, keys and values from a file, whatever its kind and layout, without executing anything in it.

>>> from fp8attn.analysis.inputs import load_sample
>>> sample = load_sample()
>>> [layer.name for layer in sample.layers], tuple(sample.layers[0].q.shape)
(['layers.5', 'layers.15', 'layers.25'], (1, 9, 512, 64))
"""

from __future__ import annotations

import importlib.resources
import math
import os
import pickle
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["CaptureFile", "LayerQKV", "load_qkv", "load_sample"]

ACCEPTED = "accepted are safetensors, .npz (numpy.savez) and .pt (torch.save), holding q, k and v as tensors"

_ROLES = {"q": "q", "query": "q", "k": "k", "key": "k", "v": "v", "value": "v"}
_NAME = re.compile(r"(?:(?P<prefix>.*)[._/-])?(?P<role>q|k|v|query|key|value)", re.IGNORECASE)
_LAYER_NUMBER = re.compile(r"(?:layers?|blocks?|blk|h)[._/-]?(\d+)", re.IGNORECASE)
_LAYOUTS = {"bhsd": "bhsd", "hsd": "bhsd", "bshd": "bshd", "shd": "bshd"}


@dataclass(frozen=True)
class LayerQKV:
    """One layer's input to attention, after RoPE.

    q: (B, num_q_heads, seqlen_q, head_dim); k: (B, num_kv_heads, seqlen_k, head_dim); v: (B, num_kv_heads, seqlen_k,
    head_dim_v); one dtype, float16, bfloat16 or float32. ``index`` is the layer's number in its name, or else its place
    in the file.
    """

    name: str
    index: int
    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class CaptureFile:
    """The layers of a file, in the order of their numbers, and what the file says about them."""

    path: Path
    layers: list[LayerQKV]
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def causal(self) -> bool:
        """Whether the metadata says that attention was causal; False where it is silent, as in SDPA."""
        return self.metadata.get("causal", "").lower() in ("true", "1", "yes")

    @property
    def scale(self) -> float | None:
        """The softmax scale in the metadata, or None: 1 / sqrt(head_dim)."""
        text = self.metadata.get("scale")
        if text is None:
            return None
        try:
            scale = float(text)
        except ValueError:
            scale = math.nan
        if not math.isfinite(scale):
            raise ValueError(f"{self.path}: scale in the metadata is {text!r}, which is not a finite number")
        return scale


def load_sample(*, layers: Sequence[int] | None = None) -> CaptureFile:
    """The sample that ships with the package: three layers of SmolLM2-135M over 512 tokens."""
    resource = importlib.resources.files("fp8attn.analysis") / "data" / "sample.safetensors"
    with importlib.resources.as_file(resource) as path:
        return load_qkv(path, layers=layers)


def load_qkv(
    path: str | os.PathLike[str], *, layout: str | None = None, layers: Sequence[int] | None = None
) -> CaptureFile:
    """Read q, k and v of one or more layers from a safetensors, ``.npz`` or ``.pt`` file, told apart by their contents.

    Names end in ``q``, ``k``, ``v`` or ``query``, ``key``, ``value`` in either case; what comes before the last ``.``,
    ``/``, ``_`` or ``-`` names the layer (``q``, ``layers.3.q``, ``model.layers.3.self_attn.query``, ``layer3_Q``). In
    a ``.pt`` file, dicts and lists may be nested; their keys are joined with dots. Other tensors are ignored. Strings
    and single numbers become metadata.

    Arrays are (B, H, S, D) or (B, S, H, D), without B for one sequence, without B and H for one head. What tells the
    two apart is, in this order: ``layout``; ``layout`` in the metadata; the shapes. By shape, k and v must agree and
    q's heads be a multiple of k's; if both readings allow that, the head axis is the one on which q and k differ (GQA)
    or, if they do not, the smaller. What is still open, or would have more kv heads than keys, is refused.

    Args:
        layout: ``"bhsd"`` or ``"bshd"`` (also ``"hsd"``, ``"shd"``).
        layers: numbers of the layers to read; all by default.

    Returns:
        The layers in the order of their numbers, tensors in (B, H, S, D). float64 becomes float32; otherwise values
        are kept, NaN and infinity included. Where q, k and v have several dtypes, all get the one that holds them all.

    Raises:
        ValueError: another or a damaged kind of file, pickled code, no or incomplete q, k, v, shapes that do not fit
            together, a layout that cannot be told, a layer that is not there.
        OSError: no such file, or not readable.
    """
    path = Path(path)
    if layout is not None and layout.lower() not in _LAYOUTS:
        raise ValueError(f"layout is {layout!r}; accepted are {', '.join(map(repr, _LAYOUTS))}")
    entries, metadata = _read(path)
    groups = _group(entries, path)
    if layers is not None:
        known = {index for index, _ in groups}
        if unknown := sorted(set(layers) - known):
            raise ValueError(f"{path}: no layers {unknown}; it holds {sorted(known)}")
        groups = {key: roles for key, roles in groups.items() if key[0] in set(layers)}
    layout = layout or metadata.get("layout")
    if layout is not None and layout.lower() not in _LAYOUTS:
        raise ValueError(f"{path}: layout in the metadata is {layout!r}; accepted are {', '.join(map(repr, _LAYOUTS))}")
    loaded = []
    for (index, name), roles in sorted(groups.items()):
        try:
            q, k, v = _to_bhsd([_checked(roles[r]()) for r in "qkv"], layout)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}, {name}: {error}") from error
        loaded.append(LayerQKV(name, index, q, k, v))
    return CaptureFile(path, loaded, metadata)


# A tensor that is read when called: a file of many layers is only read where asked.
_Lazy = Callable[[], Any]


def _read(path: Path) -> tuple[dict[str, _Lazy], dict[str, str]]:
    with path.open("rb") as file:
        head = file.read(9)
    if head[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        try:
            with zipfile.ZipFile(path) as archive:
                names = archive.namelist()
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
            raise ValueError(f"{path}: a damaged or cut-off zip archive ({error}); {ACCEPTED}") from error
        # TorchScript archives have a data.pkl too, beside their code.
        if any(name.endswith("/data.pkl") for name in names) and not any(
            name.endswith("/constants.pkl") for name in names
        ):
            return _read_torch(path)
        if names and all(name.endswith(".npy") for name in names):
            return _read_npz(path)
    elif head[8:9] == b"{":
        return _read_safetensors(path)
    elif head[:1] == b"\x80":  # a pickle, as torch.save wrote before it used zip archives
        return _read_torch(path)
    raise ValueError(f"{path}: not a kind of file that is read here; {ACCEPTED}")


def _read_safetensors(path: Path) -> tuple[dict[str, _Lazy], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            names, metadata = list(file.keys()), dict(file.metadata() or {})
    except SafetensorError as error:
        raise ValueError(f"{path}: a damaged or cut-off safetensors file ({error}); {ACCEPTED}") from error

    def read(name: str) -> Tensor:
        try:
            with safe_open(path, framework="pt") as file:
                return file.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"cannot read {name} ({error})") from error

    return {name: partial(read, name) for name in names}, metadata


_NPZ_ERRORS = (
    *(ValueError, TypeError, EOFError, KeyError, SyntaxError, zipfile.BadZipFile, zlib.error),
    *(RecursionError, MemoryError, OverflowError),  # of headers that no writer wrote
)


def _read_npz(path: Path) -> tuple[dict[str, _Lazy], dict[str, str]]:
    import numpy as np

    def read(name: str) -> Any:
        try:
            with np.load(path, allow_pickle=False) as arrays:
                return arrays[name]
        except _NPZ_ERRORS as error:
            raise ValueError(f"cannot read {name} ({error})") from error

    metadata = {}
    try:
        with np.load(path, allow_pickle=False) as arrays:
            names = list(arrays.files)
            for name in names:
                # Small enough for a string or a number; other arrays are not read before they are asked for.
                if not _NAME.fullmatch(name) and arrays.zip.getinfo(f"{name}.npy").file_size < 4096:
                    with suppress(ValueError):  # pickled objects: not needed, not loaded
                        if arrays[name].ndim == 0:
                            metadata[name] = str(arrays[name])
    except _NPZ_ERRORS as error:
        raise ValueError(f"{path}: a damaged or cut-off .npz file ({error}); {ACCEPTED}") from error
    return {name: partial(read, name) for name in names}, metadata


def _read_torch(path: Path) -> tuple[dict[str, _Lazy], dict[str, str]]:
    try:
        # weights_only: nothing but tensors and plain containers is built, and no code is run.
        # An open file, because torch.load goes by the name of one it is to open.
        with path.open("rb") as file:
            content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # torch's own text advises to load without the check, which is what no one should do with a file they got.
        culprit = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise ValueError(
            f"{path}: a pickle that holds more than tensors, numbers, strings, lists and dicts"
            f"{f' ({culprit[1]})' if culprit else ''}, or a damaged one; code in a file is never executed, "
            f"so this one is not read; {ACCEPTED}"
        ) from None
    except Exception as error:  # torch.load documents no set of errors for a damaged file
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{path}: a damaged .pt file, or not what torch.save writes ({reason}); {ACCEPTED}") from error
    entries: dict[str, _Lazy] = {}
    metadata: dict[str, str] = {}
    for name, value in _leaves(content, path):
        if isinstance(value, Tensor):
            entries[name] = value.detach
        elif isinstance(value, (str, bool, int, float)):
            metadata[name.removeprefix("metadata.")] = str(value)
    return entries, metadata


_MAX_DEPTH = 64
_MAX_NAMES = 10_000_000  # characters; 10000 layers take about a million


def _leaves(content: Any, path: Path) -> Iterator[tuple[str, Any]]:
    """What nested dicts and lists hold, by name, in their order.

    A few bytes of pickle can make containers that hold themselves, or each other over and over, so depth and number are
    limited. Containers met twice are not left out: two layers may share one.
    """
    budget = _MAX_NAMES
    levels = [iter([("", content)])]
    while levels:
        item = next(levels[-1], None)
        if item is None:
            levels.pop()
            continue
        name, value = item
        budget -= 1 + len(name)
        if budget < 0 or len(levels) > _MAX_DEPTH:
            raise ValueError(
                f"{path}: dicts or lists nested more than {_MAX_DEPTH} deep, in themselves, or over and over"
            )
        if isinstance(value, (Mapping, list, tuple)):
            levels.append(_children(name, value))
        else:
            yield name, value


def _children(name: str, value: Mapping[Any, Any] | Sequence[Any]) -> Iterator[tuple[str, Any]]:
    for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
        if isinstance(key, (str, int, float)):  # others make no name
            yield f"{name}.{key}" if name else str(key), inner


def _group(entries: dict[str, _Lazy], path: Path) -> dict[tuple[int, str], dict[str, _Lazy]]:
    """Tensors by layer: {(index, name): {"q": ..., "k": ..., "v": ...}}."""
    by_prefix: dict[str, dict[str, _Lazy]] = {}
    for name, tensor in entries.items():
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        role, roles = _ROLES[match["role"].lower()], by_prefix.setdefault(match["prefix"] or "", {})
        if role in roles:
            raise ValueError(f"{path}: {name} is a second {role} of the same layer")
        roles[role] = tensor
    for prefix, roles in by_prefix.items():
        has, missing = (", ".join(r for r in "qkv" if (r in roles) is there) for there in (True, False))
        if missing:
            raise ValueError(f"{path}: {prefix or 'the file'} has {has} but no {missing}")
    if not by_prefix:
        found = ", ".join(list(entries)[:5]) or "nothing"
        raise ValueError(
            f"{path}: no tensors named q, k and v (or query, key and value, or layers.0.q ...); found {found}"
        )
    groups = {}
    for place, (prefix, roles) in enumerate(by_prefix.items()):
        number = _LAYER_NUMBER.search(prefix) or re.search(r"(\d+)", prefix)
        groups[int(number[1]) if number else place, prefix or "qkv"] = roles
    return groups


def _checked(value: Any) -> Tensor:
    """As a plain CPU tensor of a dtype that attention takes."""
    if not isinstance(value, Tensor):  # a numpy array
        if value.dtype.kind != "f":
            raise ValueError(f"dtype {value.dtype}; q, k and v must be float16, float32 or float64 in .npz ({_CODES})")
        value = torch.from_numpy(value.astype(value.dtype.newbyteorder("="), copy=False))
    if value.layout != torch.strided or value.is_quantized or value.device.type != "cpu":
        raise ValueError("q, k and v must be plain dense tensors")
    if value.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"dtype {value.dtype}; q, k and v must be float16, bfloat16, float32 or float64 ({_CODES})")
    if not 2 <= value.ndim <= 4 or value.numel() == 0:
        raise ValueError(f"shape {tuple(value.shape)}; q, k and v must have 2 to 4 dimensions, none of them empty")
    return value.float() if value.dtype == torch.float64 else value


_CODES = "FP8 codes mean nothing without their scales: dequantize them first"


def _to_bhsd(tensors: list[Tensor], layout: str | None) -> list[Tensor]:
    shapes = "q {}, k {}, v {}".format(*(tuple(t.shape) for t in tensors))
    ndim = tensors[0].ndim
    if any(t.ndim != ndim for t in tensors):
        raise ValueError(f"q, k and v have different numbers of dimensions: {shapes}")
    if ndim == 2:
        tensors, layout = [t[None, None] for t in tensors], "bhsd"
    elif ndim == 3:
        tensors = [t[None] for t in tensors]
    possible = [name for name, head_axis in (("bhsd", 1), ("bshd", 2)) if _fits(tensors, head_axis)]
    if layout is not None:
        layout = _LAYOUTS[layout.lower()]
        if layout not in possible:
            raise ValueError(f"{shapes} do not fit layout {layout}: {_RULE}")
    elif not possible:
        raise ValueError(f"{shapes} do not fit together: {_RULE}")
    else:
        layout = possible[0] if len(possible) == 1 else _guess(tensors)
        num_heads, seqlen = (tensors[1].shape[i] for i in ((1, 2) if layout == "bhsd" else (2, 1)))
        # More heads than keys: a reading that fits by chance, of a file that is wrong under the other, or of MHA with
        # lengths that differ, which look like a GQA ratio.
        if layout is None or num_heads > seqlen:
            raise ValueError(f"{shapes} may be (B, H, S, D) or (B, S, H, D); say which: layout 'bhsd' or 'bshd'")
    dtype = torch.promote_types(torch.promote_types(tensors[0].dtype, tensors[1].dtype), tensors[2].dtype)
    return [(t if layout == "bhsd" else t.transpose(1, 2)).to(dtype) for t in tensors]


_RULE = "k and v share batch, heads and length; q shares k's batch and head dim; q's heads are a multiple of k's"


def _fits(tensors: list[Tensor], head_axis: int) -> bool:
    q, k, v = (t.shape for t in tensors)
    return k[:3] == v[:3] and q[0] == k[0] and q[3] == k[3] and q[head_axis] % k[head_axis] == 0


def _guess(tensors: list[Tensor]) -> str | None:
    """The layout, both being possible; None where it would be a coin toss."""
    (q1, q2), (k1, k2) = (t.shape[1:3] for t in tensors[:2])
    if k1 == k2:
        return None
    if (q1 == k1) != (q2 == k2):
        return "bhsd" if q1 != k1 else "bshd"
    smaller = "bhsd" if k1 < k2 else "bshd"
    return smaller if (q1 < q2) == (k1 < k2) and q1 != q2 else None
