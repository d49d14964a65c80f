"""The attention problem that every backend solves: quantized inputs, who sees whom, and the softmax's parameters."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property

import torch

from fp8attn.recipe import Recipe
from fp8attn.scaling import QuantizedTensor, load_tensors, save_tensors

__all__ = ["AttentionProblem", "Masking", "QuantizedQKV"]


@dataclass(frozen=True)
class Masking:
    """Which keys a query sees. All parts combine: a key is visible when every one of them lets it be.

    With ``d`` the query's diagonal key (its own index for ``top_left``; its index + seqlen_k - seqlen_q for
    ``bottom_right``, so that the last query meets the last key), key j is visible when

    * ``is_causal``: j <= d,
    * ``window`` (left, right): d - left <= j <= d + right, where -1 is no limit,
    * ``mask`` (B or 1, Hq or 1, Sq or 1, Sk or 1): boolean and True; or additive and not -inf, then added to the logit.
    """

    seqlen_q: int
    seqlen_k: int
    is_causal: bool = False
    causal_alignment: str = "top_left"
    window: tuple[int, int] = (-1, -1)
    mask: torch.Tensor | None = None

    @property
    def diagonal(self) -> int:
        return self.seqlen_k - self.seqlen_q if self.causal_alignment == "bottom_right" else 0

    @property
    def left(self) -> int | None:
        """Keys visible before the diagonal, None for all."""
        return None if self.window[0] < 0 else self.window[0]

    @property
    def right(self) -> int | None:
        """Keys visible after the diagonal, None for all."""
        limits = [limit for limit in (0 if self.is_causal else -1, self.window[1]) if limit >= 0]
        return min(limits, default=None)

    def key_range(self, rows: slice) -> tuple[int, int]:
        """First and one past the last key that any of the query rows sees by position alone; empty when equal."""
        first = 0 if self.left is None else max(0, rows.start + self.diagonal - self.left)
        end = self.seqlen_k if self.right is None else min(self.seqlen_k, rows.stop + self.diagonal + self.right)
        return first, max(first, end)

    def banded(self, rows: slice, keys: slice) -> bool:
        """Whether position hides some key of the tile from some row of it."""
        hides_right = self.right is not None and keys.stop - 1 > rows.start + self.diagonal + self.right
        hides_left = self.left is not None and keys.start < rows.stop - 1 + self.diagonal - self.left
        return hides_right or hides_left

    def band(self, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Visibility by position of ``keys`` (n,) to query ``rows`` (m,): boolean (m, n)."""
        offset = keys[None, :] - (rows[:, None] + self.diagonal)
        visible = torch.ones_like(offset, dtype=torch.bool)
        if self.right is not None:
            visible &= offset <= self.right
        if self.left is not None:
            visible &= offset >= -self.left
        return visible

    def mask_tile(self, batch: int, rows: slice | torch.Tensor, keys: slice) -> torch.Tensor | None:
        """The explicit mask for one batch entry: (Hq or 1, m or 1, n or 1), or None."""
        if self.mask is None:
            return None
        tile = self.mask[batch if self.mask.shape[0] > 1 else 0]
        if tile.shape[1] > 1:
            tile = tile[:, rows]
        return tile[:, :, keys] if tile.shape[2] > 1 else tile

    @cached_property
    def in_use(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Queries that see a key (B or 1, Sq) and keys that some query sees (B or 1, Sk); None when all are.

        Padding is what this finds: a token that is not in use takes no part in statistics and scales, whatever it
        holds. An additive mask hides a key from a row when its value is below half the dtype's most negative one, as
        padding is commonly written, unless the whole row is like that: softmax then sees them all alike.
        """
        queries = keys = None
        if self.left is not None or self.right is not None:
            device = self.mask.device if self.mask is not None else None
            d = torch.arange(self.seqlen_q, device=device) + self.diagonal
            first = d.new_zeros(()) if self.left is None else (d - self.left).clamp(min=0)
            last_key = d.new_tensor(self.seqlen_k - 1)
            last = last_key if self.right is None else torch.minimum(d + self.right, last_key)
            queries = (last >= first).expand(1, self.seqlen_q)
            key = torch.arange(self.seqlen_k, device=device)
            start, end = self.key_range(slice(0, self.seqlen_q))
            keys = ((key >= start) & (key < end))[None]
        if self.mask is not None:
            seen = self.mask
            if seen.dtype != torch.bool:
                likely = seen > torch.finfo(seen.dtype).min / 2
                seen = likely | (~likely.any(dim=-1, keepdim=True) & (seen > -torch.inf))
            by_query = seen.any(dim=3).any(dim=1).expand(-1, self.seqlen_q)
            by_key = seen.any(dim=2).any(dim=1).expand(-1, self.seqlen_k)
            queries = by_query if queries is None else by_query & queries
            keys = by_key if keys is None else by_key & keys
        return queries, keys


@dataclass(frozen=True)
class QuantizedQKV:
    """Queries, keys and values, transformed and quantized once, to run attention on many times.

    Attributes:
        q, k, v: (B, Hq, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Sk, Dv); q and k are smoothed, balanced and rotated.
        recipe: how they were made.
        dtype: of the tensors they were made from, and of the output.
        logit_shift: q . (mean key), from the unquantized q, FP32 (B, Hq, Sq): what taking the mean key out took from
            each row's logits (times the softmax scale); None when no mean was taken out.
        v_mean: the mean value, FP32 (B, Hkv, 1, Dv), to be added back to the output; None when it was not taken out.
    """

    q: QuantizedTensor
    k: QuantizedTensor
    v: QuantizedTensor
    recipe: Recipe
    dtype: torch.dtype
    logit_shift: torch.Tensor | None = None
    v_mean: torch.Tensor | None = None

    def to(self, device: torch.device | str) -> QuantizedQKV:
        def move(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else x.to(device)

        q, k, v = (x.to(device) for x in (self.q, self.k, self.v))
        return QuantizedQKV(q, k, v, self.recipe, self.dtype, move(self.logit_shift), move(self.v_mean))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file, whole or not at all."""
        tensors: dict[str, torch.Tensor] = {}
        metadata = {"recipe": self.recipe.to_json(), "dtype": str(self.dtype).removeprefix("torch.")}
        for name in ("q", "k", "v"):
            part, described = getattr(self, name).to_tensors(f"{name}.")
            tensors |= part
            metadata |= described
        for name in ("logit_shift", "v_mean"):
            if getattr(self, name) is not None:
                tensors[name] = getattr(self, name).contiguous()
        save_tensors(path, tensors, metadata, kind="quantized-qkv")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> QuantizedQKV:
        """Read what ``save`` wrote; ``ValueError`` for anything else."""
        tensors, metadata = load_tensors(path, kind="quantized-qkv")
        try:
            q, k, v = (QuantizedTensor.from_tensors(tensors, metadata, f"{name}.") for name in ("q", "k", "v"))
            recipe = Recipe.from_json(metadata.get("recipe", ""))
            dtype = getattr(torch, metadata.get("dtype", ""), None)
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"unknown dtype {metadata.get('dtype')!r}")
            shift, v_mean = tensors.get("logit_shift"), tensors.get("v_mean")
            for name, tensor, shape in (
                ("k.codes", k.codes, (q.shape[0], k.shape[1], k.shape[2], q.shape[3])),
                ("v.codes", v.codes, (q.shape[0], k.shape[1], k.shape[2], v.shape[3])),
                ("logit_shift", shift, q.shape[:3]),
                ("v_mean", v_mean, (q.shape[0], k.shape[1], 1, v.shape[3])),
            ):
                if tensor is not None and tensor.shape != torch.Size(shape):
                    raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from None
        return cls(q, k, v, recipe, dtype, shift, v_mean)


@dataclass(frozen=True)
class AttentionProblem:
    """Everything a backend needs, validated.

    Attributes:
        qkv: the quantized inputs.
        masking: who sees whom.
        scale: softmax scale.
        softcap: c in c * tanh(logit / c); None is off.
        sinks: (Hq,) FP32, one logit a head that takes weight and has no value; None is off.
    """

    qkv: QuantizedQKV
    masking: Masking
    scale: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def group(self) -> int:
        """Query heads a kv head."""
        return self.qkv.q.shape[1] // self.qkv.k.shape[1] if self.qkv.k.shape[1] else 1
