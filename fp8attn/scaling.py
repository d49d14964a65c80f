"""Block-scaling quantizers.

A quantized value is ``code * scale``: the scale is a *de*scale, as in FlashAttention's ``descale`` arguments. How many
values share one scale is the granularity:

=============  ==================  ====================================================================
granularity    scale's shape       values that share one scale, for a tensor (..., S, D)
=============  ==================  ====================================================================
``tensor``     (1, ..., 1, 1)      all of them
``head``       (..., 1, 1)         the last two axes
``block:n``    (..., ceil(S/n), 1) n consecutive tokens; ``block`` is ``block:128``; the last may be short
``token``      (..., S, 1)         one token
``channel``    (..., 1, D)         one channel
=============  ==================  ====================================================================

FP8 is a floating format: within its range a finer granularity buys no accuracy by itself (power-of-two scales change
nothing but underflow). What it buys is range, and with FP32 scales the exactness of every group's largest value.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fp8attn.files import whole_file
from fp8attn.formats import Format, get_format

__all__ = ["ClipCounts", "Granularity", "QuantizationWarning", "QuantizedTensor", "quantize_tensor"]

_TINY = torch.finfo(torch.float32).tiny
_SCALE_MODES = ("fp32", "pow2")

#: How codes lie in memory. ``"rows"``: (..., S, D), a token's channels together. ``"permuted_columns"``: (..., D, S'),
#: a channel's tokens together, S' being S rounded up to a multiple of 16 with codes of zero, and the tokens of every
#: group of 16 in the order ``TOKEN_ORDER``. FP8 tensor cores need values so: they take both operands with the summed
#: axis together, and in this order the registers that a softmax weight is computed in are those it is multiplied from.
LAYOUTS = ("rows", "permuted_columns")
TOKEN_ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)


class QuantizationWarning(UserWarning):
    """A static scale does not fit the values it was used on."""


@dataclass(frozen=True)
class Granularity:
    """Which values share a scale; see the module's table.

    >>> Granularity.parse("block:64")
    Granularity(kind='block', size=64)
    >>> str(Granularity.parse("block"))
    'block:128'
    """

    kind: str
    size: int = 1

    KINDS = ("tensor", "head", "block", "token", "channel")

    @classmethod
    def parse(cls, text: str | Granularity) -> Granularity:
        if isinstance(text, Granularity):
            return text
        if text in cls.KINDS:
            return cls(text, 128 if text == "block" else 1)
        found = re.fullmatch(r"block:([1-9]\d*)", text) if isinstance(text, str) else None
        if found is None:
            raise ValueError(f"unknown granularity {text!r}; accepted: {', '.join(cls.KINDS)}, block:<tokens>")
        return cls("block", int(found[1]))

    def __str__(self) -> str:
        return f"block:{self.size}" if self.kind == "block" else self.kind

    def scale_shape(self, shape: torch.Size) -> torch.Size:
        """Shape of the scale of a tensor of ``shape`` (..., S, D)."""
        *lead, tokens, channels = shape
        tail = {
            "tensor": (1, 1),
            "head": (1, 1),
            "block": (-(-tokens // self.size), 1),
            "token": (tokens, 1),
            "channel": (1, channels),
        }[self.kind]
        return torch.Size([*([1] * len(lead) if self.kind == "tensor" else lead), *tail])

    def amax(self, magnitudes: torch.Tensor) -> torch.Tensor:
        """Largest value of each group of ``magnitudes`` (..., S, D), in the scale's shape; 0 for an empty group."""
        shape = self.scale_shape(magnitudes.shape)
        if magnitudes.numel() == 0:
            return magnitudes.new_zeros(shape)
        if self.kind == "channel":
            return magnitudes.amax(dim=-2, keepdim=True)
        per_token = magnitudes.amax(dim=-1, keepdim=True)
        if self.kind == "token":
            return per_token
        if self.kind == "block":
            size = min(self.size, per_token.shape[-2])  # a block may be longer than the sequence
            padded = torch.nn.functional.pad(per_token, (0, 0, 0, -per_token.shape[-2] % size))
            return padded.unflatten(-2, (-1, size)).amax(dim=-2)
        return per_token.amax(dim=-2, keepdim=True) if self.kind == "head" else per_token.amax().reshape(shape)

    def expand(self, scale: torch.Tensor, tokens: int) -> torch.Tensor:
        """The scale with one row a token where rows differ, so that it broadcasts against (..., S, D)."""
        if self.kind == "block":
            return scale.repeat_interleave(min(self.size, max(1, tokens)), dim=-2)[..., :tokens, :]
        return scale


@dataclass(frozen=True)
class ClipCounts:
    """What a static scale did to ``total`` values: how many it clipped to the format's largest, how many became 0."""

    saturated: int
    underflowed: int
    total: int


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """Codes with their scales; the value is ``code * scale``.

    Attributes:
        codes: (..., S, D) in the format's dtype, or as ``layout`` says.
        scale: FP32, finite and positive, in the shape of the module's table.
        format: what the codes mean.
        granularity: which codes share a scale.
        clipped: (saturated, underflowed) counts, int64 of shape (2,), when the scale was static; else None.
        layout: one of ``LAYOUTS``; everything but ``codes`` itself is the same in either.
        seqlen: S, where the layout pads it; else None.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    format: Format
    granularity: Granularity
    clipped: torch.Tensor | None = None
    layout: str = "rows"
    seqlen: int | None = None

    def __post_init__(self) -> None:
        if self.codes.dtype != self.format.dtype:
            raise ValueError(f"codes have dtype {self.codes.dtype}, format {self.format.name} has {self.format.dtype}")
        if self.codes.dim() < 2:
            raise ValueError(f"codes must have at least 2 dimensions (..., S, D), got {tuple(self.codes.shape)}")
        if self.layout not in LAYOUTS or (self.seqlen is None) != (self.layout == "rows"):
            raise ValueError(f"layout must be one of {LAYOUTS}, the second with a seqlen, got {self.layout!r}")
        if self.seqlen is not None and self.codes.shape[-1] != _padded(self.seqlen):
            raise ValueError(f"codes of {self.seqlen} tokens must be padded to 16, got shape {tuple(self.codes.shape)}")
        shape = self.granularity.scale_shape(self.shape)
        if self.scale.dtype != torch.float32 or self.scale.shape != shape:
            got = f"{self.scale.dtype} {tuple(self.scale.shape)}"
            raise ValueError(f"scale must be float32 of shape {tuple(shape)} ({self.granularity}), got {got}")
        if self.clipped is not None and (self.clipped.dtype != torch.int64 or self.clipped.shape != (2,)):
            got = f"{self.clipped.dtype} {tuple(self.clipped.shape)}"
            raise ValueError(f"clipped must be int64 of shape (2,), got {got}")

    @property
    def shape(self) -> torch.Size:
        """(..., S, D) in any layout."""
        if self.seqlen is None:
            return self.codes.shape
        return torch.Size([*self.codes.shape[:-2], self.seqlen, self.codes.shape[-2]])

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def expanded_scale(self) -> torch.Tensor:
        """The scale, broadcastable against the codes."""
        return self.granularity.expand(self.scale, self.shape[-2])

    def rows(self) -> torch.Tensor:
        """The codes as (..., S, D) in any layout."""
        if self.seqlen is None:
            return self.codes
        *lead, channels, padded = self.codes.shape
        groups = _as_bytes(self.codes).reshape(*lead, channels, padded // 16, 4, 2, 2)
        columns = groups.transpose(-3, -2).reshape(*lead, channels, padded)[..., : self.seqlen]
        return columns.mT.contiguous().view(self.codes.dtype)

    def to_layout(self, layout: str) -> QuantizedTensor:
        """The same value with its codes in another of ``LAYOUTS``; itself if they are in it.

        >>> quantized = quantize_tensor(torch.randn(20, 8), "e4m3", "token")
        >>> permuted = quantized.to_layout("permuted_columns")
        >>> permuted.codes.shape, bool((permuted.dequantize() == quantized.dequantize()).all())
        (torch.Size([8, 32]), True)
        """
        if layout == self.layout:
            return self
        codes, seqlen = self.rows(), None
        if layout == "permuted_columns":
            seqlen = codes.shape[-2]
            columns = torch.nn.functional.pad(_as_bytes(codes).mT, (0, _padded(seqlen) - seqlen))
            groups = columns.reshape(*columns.shape[:-1], _padded(seqlen) // 16, 2, 4, 2)
            codes = groups.transpose(-3, -2).reshape(columns.shape).view(codes.dtype)
        return dataclasses.replace(self, codes=codes, layout=layout, seqlen=seqlen)

    def dequantize(self) -> torch.Tensor:
        """FP32 values, shape (..., S, D).

        >>> x = torch.randn(2, 300, 64)
        >>> quantized = quantize_tensor(x, "e4m3", "block")
        >>> bool(((quantized.dequantize() - x).abs() <= x.abs() / 16 + quantized.expanded_scale() * 2**-10).all())
        True
        """
        return self.format.decode(self.rows()) * self.expanded_scale()

    def clip_counts(self) -> ClipCounts | None:
        """What a static scale did (waits for a GPU); None for a dynamic scale, which clips nothing finite."""
        if self.clipped is None:
            return None
        saturated, underflowed = self.clipped.tolist()
        return ClipCounts(saturated, underflowed, self.shape.numel())

    def to(self, device: torch.device | str) -> QuantizedTensor:
        clipped = None if self.clipped is None else self.clipped.to(device)
        return dataclasses.replace(self, codes=self.codes.to(device), scale=self.scale.to(device), clipped=clipped)

    def to_tensors(self, prefix: str = "") -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Tensors and metadata for a safetensors file, in rows; ``from_tensors`` is the way back."""
        tensors = {f"{prefix}codes": self.rows().contiguous(), f"{prefix}scale": self.scale.contiguous()}
        if self.clipped is not None:
            tensors[f"{prefix}clipped"] = self.clipped
        return tensors, {f"{prefix}format": self.format.name, f"{prefix}granularity": str(self.granularity)}

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], prefix: str = ""
    ) -> QuantizedTensor:
        """Checks dtypes, shapes and that every scale is finite and positive; ``ValueError`` says what is wrong."""
        for name, where in (("codes", tensors), ("scale", tensors), ("format", metadata), ("granularity", metadata)):
            if prefix + name not in where:
                raise ValueError(f"no {prefix + name!r} in {sorted(where)}")
        fmt = get_format(metadata[f"{prefix}format"])
        granularity = Granularity.parse(metadata[f"{prefix}granularity"])
        codes, scale = tensors[f"{prefix}codes"], tensors[f"{prefix}scale"]
        try:
            made = cls(codes, scale, fmt, granularity, tensors.get(f"{prefix}clipped"))
        except ValueError as error:
            raise ValueError(f"{prefix}{error}") from None
        _check_scale_values(scale, f"{prefix}scale")
        return made

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file, whole or not at all."""
        save_tensors(path, *self.to_tensors(), kind="quantized-tensor")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> QuantizedTensor:
        """Read what ``save`` wrote; ``ValueError`` for anything else."""
        return cls.from_tensors(*load_tensors(path, kind="quantized-tensor"))


def quantize_tensor(
    x: torch.Tensor,
    format: str | Format = "e4m3",
    granularity: str | Granularity = "tensor",
    *,
    scale: torch.Tensor | float | None = None,
    scale_mode: str = "fp32",
) -> QuantizedTensor:
    """Quantize a floating tensor of shape (..., S, D): ``codes = saturate(round(x / scale))``.

    The dynamic scale (``scale=None``) is the group's largest finite magnitude over the format's largest value, at least
    the smallest normal FP32, and 1 for a group without a finite non-zero value: it is finite and positive whatever the
    input. ``scale_mode="pow2"`` rounds it up to a power of two. NaN stays NaN; infinity saturates and does not count
    for the scale. BF16 is not scaled.

    A static ``scale`` (a number, or a tensor of the granularity's scale shape) clips what does not fit: the counts
    stay with the result (``clip_counts``), and on a CPU a ``QuantizationWarning`` tells when a value was clipped or
    more than 1% of the non-zero ones became 0.

    >>> quantize_tensor(torch.tensor([[1.0, -3.5]]), "e4m3", "tensor").scale
    tensor([[0.0078]])

    Raises:
        TypeError: ``x`` is not a floating tensor.
        ValueError: fewer than 2 dimensions, an unknown format, granularity or scale mode, a static scale that is not
            finite and positive (checked where it is on the host) or has the wrong shape.
    """
    fmt, granularity = get_format(format), Granularity.parse(granularity)
    if not isinstance(x, torch.Tensor) or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"x must be a float32, bfloat16 or float16 tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    if x.dim() < 2:
        raise ValueError(f"x must have at least 2 dimensions (..., S, D), got shape {tuple(x.shape)}")
    if scale_mode not in _SCALE_MODES:
        raise ValueError(f"unknown scale_mode {scale_mode!r}; accepted: {', '.join(_SCALE_MODES)}")
    x = x.to(torch.float32)
    shape = granularity.scale_shape(x.shape)
    if scale is not None:
        return _quantize_static(x, fmt, granularity, _static_scale(scale, shape, x.device))
    if fmt.scaled:
        magnitudes = x.abs()
        amax = granularity.amax(torch.where(magnitudes.isfinite(), magnitudes, 0.0))
        # By a tensor: on a GPU torch multiplies by a number's reciprocal, which is another scale in the last bit.
        computed = (amax / torch.full_like(amax, fmt.max)).clamp_(min=_TINY)
        if scale_mode == "pow2":
            computed = ceil_pow2(computed)
        computed = torch.where(amax > 0, computed, 1.0)
    else:
        computed = x.new_ones(shape)
    return QuantizedTensor(fmt.cast(x / granularity.expand(computed, x.shape[-2])), computed, fmt, granularity)


def _padded(seqlen: int) -> int:
    return -(-seqlen // 16) * 16


def _as_bytes(codes: torch.Tensor) -> torch.Tensor:
    """FP8 codes as bytes, because torch copies and pads those on every device."""
    return codes.view(torch.uint8) if codes.dtype.itemsize == 1 else codes


def ceil_pow2(x: torch.Tensor) -> torch.Tensor:
    """Smallest power of two >= x, for positive normal FP32 values; exact, by the exponent bits.

    >>> ceil_pow2(torch.tensor([0.75, 4.0, 4.1]))
    tensor([1., 4., 8.])
    """
    return ((x.view(torch.int32) + 0x007FFFFF) & 0x7F800000).view(torch.float32)


def _static_scale(scale: torch.Tensor | float, shape: torch.Size, device: torch.device) -> torch.Tensor:
    if not isinstance(scale, torch.Tensor):
        if not isinstance(scale, (int, float)) or isinstance(scale, bool):
            raise TypeError(f"scale must be a number or a tensor, got {type(scale).__name__}")
        if not _TINY <= scale <= torch.finfo(torch.float32).max:
            raise ValueError(f"scale must be finite and positive (a normal float32), got {scale:g}")
        return torch.full(shape, float(scale), dtype=torch.float32, device=device)
    if scale.dtype != torch.float32 or scale.shape != shape:
        raise ValueError(f"scale must be float32 of shape {tuple(shape)}, got {scale.dtype} {tuple(scale.shape)}")
    _check_scale_values(scale, "scale")
    return scale.to(device)


def _check_scale_values(scale: torch.Tensor, name: str) -> None:
    if scale.device.type == "cpu" and not bool(((scale > 0) & scale.isfinite()).all()):
        bad = scale[~((scale > 0) & scale.isfinite())][0].item()
        raise ValueError(f"every {name} must be finite and positive, got {bad:g}")


def _quantize_static(x: torch.Tensor, fmt: Format, granularity: Granularity, scale: torch.Tensor) -> QuantizedTensor:
    scaled = x / granularity.expand(scale, x.shape[-2])
    codes = fmt.cast(scaled)
    saturated = (scaled.abs() > fmt.clip_limit) & x.isfinite()  # infinity is clipped under any scale
    underflowed = (fmt.decode(codes) == 0) & (x != 0)
    clipped = torch.stack([saturated.sum(), underflowed.sum()])
    quantized = QuantizedTensor(codes, scale, fmt, granularity, clipped)
    if x.device.type == "cpu":
        n_saturated, n_underflowed = clipped.tolist()
        nonzero = int((x != 0).sum())
        if n_saturated or n_underflowed > 0.01 * nonzero:
            warnings.warn(
                f"the static scale clipped {n_saturated} and flushed to zero {n_underflowed} of {nonzero} non-zero "
                "values; scale=None fits the scale to the values",
                QuantizationWarning,
                stacklevel=3,
            )
    return quantized


def save_tensors(
    path: str | os.PathLike[str], tensors: dict[str, torch.Tensor], metadata: dict[str, str], *, kind: str
) -> None:
    """Write a safetensors file of ours, whole or not at all; ``kind`` and a version stand in its metadata."""
    from safetensors.torch import save_file

    import fp8attn

    with whole_file(path) as temporary:
        save_file(tensors, temporary, {"fp8attn": f"{kind}-1", "fp8attn_version": fp8attn.__version__, **metadata})


def load_tensors(path: str | os.PathLike[str], *, kind: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Read what ``save_tensors`` wrote; ``ValueError`` when the file is something else or damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except SafetensorError as error:
        raise ValueError(f"{os.fspath(path)}: not a whole safetensors file ({error})") from error
    if metadata.get("fp8attn") != f"{kind}-1":
        found = json.dumps(metadata.get("fp8attn"))
        raise ValueError(f'{os.fspath(path)}: metadata "fp8attn" must be "{kind}-1", got {found}')
    return tensors, metadata
