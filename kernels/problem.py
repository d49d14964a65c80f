"""The attention problem that every backend solves: quantized inputs, who sees whom, and the softmax's parameters."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from fp8attn.recipe import Recipe
from fp8attn.scaling import Granularity, QuantizedTensor, load_tensors, save_tensors

__all__ = ["AttentionProblem", "Masking", "Packing", "QuantizedQKV", "Rotary", "Sequences"]

_EXTRAS = ("logit_shift", "v_mean", "keys_in_use")


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
    device: torch.device
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

    def without_keys(self, keys_in_use: torch.Tensor) -> Masking:
        """The same, with the keys hidden that ``keys_in_use`` (B or 1, Sk) marks False."""
        kept = keys_in_use[:, None, None, :]
        if self.mask is None:
            mask = kept
        elif self.mask.dtype == torch.bool:
            mask = self.mask & kept
        else:
            mask = self.mask.masked_fill(~kept, -torch.inf)
        return replace(self, mask=mask)

    @cached_property
    def in_use(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Queries that see a key (B or 1, Sq) and keys that some query sees (B or 1, Sk); None when all are.

        Padding is what this finds: a token that is not in use takes no part in statistics and scales, whatever it
        holds. A mask hides a key by False or -inf; a large negative number only makes it light.
        """
        queries = keys = None
        # What position leaves out is known without looking at a tensor: usually nothing.
        first_row, last_row = self.diagonal, self.seqlen_q - 1 + self.diagonal
        before = self.right is not None and first_row + self.right < 0
        beyond = self.left is not None and last_row - self.left >= self.seqlen_k
        if before or beyond:
            d = torch.arange(self.seqlen_q, device=self.device) + self.diagonal
            sees = torch.ones_like(d, dtype=torch.bool)
            if self.right is not None:
                sees &= d + self.right >= 0
            if self.left is not None:
                sees &= d - self.left < self.seqlen_k
            queries = sees[None]
        start, end = self.key_range(slice(0, self.seqlen_q))
        if (start, end) != (0, self.seqlen_k):
            key = torch.arange(self.seqlen_k, device=self.device)
            keys = ((key >= start) & (key < end))[None]
        if self.mask is not None:
            seen = self.mask if self.mask.dtype == torch.bool else self.mask > -torch.inf
            by_query = seen.any(dim=3).any(dim=1).expand(-1, self.seqlen_q)
            by_key = seen.any(dim=2).any(dim=1).expand(-1, self.seqlen_k)
            queries = by_query if queries is None else by_query & queries
            keys = by_key if keys is None else by_key & keys
        return queries, keys


@dataclass(frozen=True, eq=False)
class Sequences:
    """The queries, or the keys, of a packed batch: N sequences, one after another.

    Attributes:
        cu_seqlens: (N + 1,) int32 or int64, on the device, contiguous: sequence n owns tokens cu_seqlens[n] to
            cu_seqlens[n + 1]. Nobody on the host looks at its values.
        total: tokens there are.
        longest: tokens that no sequence has more of.
    """

    cu_seqlens: torch.Tensor
    total: int
    longest: int

    @property
    def count(self) -> int:
        """N."""
        return self.cu_seqlens.shape[0] - 1

    def units(self, size: int) -> int:
        """Room for every sequence in units of ``size`` tokens, rounded up, whatever the lengths are."""
        return self.total // size + self.count


@dataclass(frozen=True, eq=False)
class Packing:
    """Where the sequences of a packed batch lie. Both sides have as many."""

    queries: Sequences
    keys: Sequences


@dataclass(frozen=True, eq=False)
class Rotary:
    """Rotary position embedding: the first R channels turn in pairs, by angles that grow with the token's position.

    A pair (x, y) at position p becomes (x cos - y sin, y cos + x sin), with pair i's angle in ``cos[..., p, i]`` and
    ``sin[..., p, i]``. Channels from R on pass through. Query i is at position i + ``Masking.diagonal``, key j at j.

    Attributes:
        cos, sin: (P, R / 2), or (B, P, R / 2) when positions differ from sequence to sequence; of any floating dtype.
        interleaved: which channels make pair i: i and i + R / 2 if False (GPT-NeoX, Llama in transformers, whose tables
            hold every angle twice: pass ``cos[..., : R // 2]``), 2 i and 2 i + 1 if True (GPT-J).

    Raises:
        TypeError: cos or sin is not a floating tensor, or their dtypes differ.
        ValueError: their shapes differ or are not as above, or they lie on two devices.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False

    def __post_init__(self) -> None:
        for name, table in (("cos", self.cos), ("sin", self.sin)):
            if not isinstance(table, torch.Tensor) or not table.dtype.is_floating_point:
                got = getattr(table, "dtype", type(table).__name__)
                raise TypeError(f"{name} must be a floating-point tensor, got {got}")
        if self.cos.dtype != self.sin.dtype:
            raise TypeError(f"cos and sin must have one dtype, got {self.cos.dtype} and {self.sin.dtype}")
        if self.cos.shape != self.sin.shape or self.cos.ndim not in (2, 3) or self.cos.shape[-1] == 0:
            raise ValueError(
                "cos and sin must both have shape (positions, pairs) or (batch, positions, pairs), "
                f"got {tuple(self.cos.shape)} and {tuple(self.sin.shape)}"
            )
        if self.cos.device != self.sin.device:
            raise ValueError(f"cos and sin must be on one device, got {self.cos.device} and {self.sin.device}")

    @property
    def channels(self) -> int:
        """R, how many channels turn."""
        return 2 * self.cos.shape[-1]

    def check(self, batch: int, seqlen_q: int, seqlen_k: int, diagonal: int, head_dim: int) -> None:
        """``ValueError`` unless the tables reach every channel pair and position that these sizes need.

        ``diagonal`` is ``Masking.diagonal``: the key position of query 0.
        """
        if self.channels > head_dim:
            raise ValueError(f"cos has {self.channels // 2} pairs of channels, head_dim {head_dim} has {head_dim // 2}")
        if self.cos.ndim == 3 and self.cos.shape[0] not in (1, batch):
            raise ValueError(f"cos must have batch 1 or {batch}, got shape {tuple(self.cos.shape)}")
        if diagonal < 0 and seqlen_q > 0:
            raise ValueError(
                f"query 0 would stand at position {diagonal}: with more queries than keys, bottom-right alignment "
                "leaves the first queries without a position to rotate by"
            )
        needed, positions = max(seqlen_q + diagonal if seqlen_q else 0, seqlen_k), self.cos.shape[-2]
        if needed > positions:
            raise ValueError(
                f"cos has {positions} positions, {needed} are needed for {seqlen_q} queries, the first at position "
                f"{diagonal}, and {seqlen_k} keys"
            )

    def rotate(self, x: torch.Tensor, first: int = 0) -> torch.Tensor:
        """``x`` (B, H, S, D), token i at position ``first`` + i, turned: FP32 of the same shape, in plain PyTorch."""
        x, pairs = x.to(torch.float32), self.channels // 2
        rows = slice(first, first + x.shape[2])
        cos, sin = (table[..., rows, :].to(torch.float32) for table in (self.cos, self.sin))
        if cos.ndim == 3:
            cos, sin = cos[:, None], sin[:, None]
        if self.interleaved:
            left, right = x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
        else:
            left, right = x[..., :pairs], x[..., pairs : 2 * pairs]
        turned = left * cos - right * sin, right * cos + left * sin
        both = torch.stack(turned, dim=-1).flatten(-2) if self.interleaved else torch.cat(turned, dim=-1)
        return torch.cat([both, x[..., 2 * pairs :]], dim=-1)


@dataclass(frozen=True, eq=False)
class QuantizedQKV:
    """Queries, keys and values, transformed and quantized once, to run attention on many times.

    Attributes:
        q, k, v: (B, Hq, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Sk, Dv); q and k are smoothed, balanced and rotated.
        recipe: how they were made.
        dtype: of the tensors they were made from, and of the output.
        logit_shift: q . (mean key), from the unquantized q, FP32 (B, Hq, Sq): what taking the mean key out took from
            each row's logits (times the softmax scale); None when no mean was taken out.
        v_mean: the mean value, FP32 (B, Hkv, 1, Dv), to be added back to the output; None when it was not taken out.
        keys_in_use: boolean (B or 1, Sk), False for keys that no query could see: they are stored as zeros, and hidden
            from every query whatever its mask; None when all are in use.

    Raises:
        ValueError: the parts do not fit each other or the recipe.
    """

    q: QuantizedTensor
    k: QuantizedTensor
    v: QuantizedTensor
    recipe: Recipe
    dtype: torch.dtype
    logit_shift: torch.Tensor | None = None
    v_mean: torch.Tensor | None = None
    keys_in_use: torch.Tensor | None = None

    def __post_init__(self) -> None:
        q, k, v, recipe = self.q, self.k, self.v, self.recipe
        for name, part, fmt, granularity in (
            ("q", q, recipe.q_format, recipe.q_scale),
            ("k", k, recipe.k_format, recipe.k_scale),
            ("v", v, recipe.v_format, recipe.v_scale),
        ):
            if len(part.shape) != 4:
                raise ValueError(f"{name} must have 4 dimensions (B, H, S, D), got {tuple(part.shape)}")
            if (part.format.name, part.granularity) != (fmt, Granularity.parse(granularity)):
                got = f"{part.format.name} by {part.granularity}"
                raise ValueError(f"{name} must be {fmt} by {granularity}, as its recipe says, got {got}")
        batch, num_q_heads, seqlen_q, head_dim = q.shape
        num_kv_heads, seqlen_k, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
        if head_dim == 0 or head_dim_v == 0:
            raise ValueError(f"head_dim must be at least 1, got {head_dim} for q and {head_dim_v} for v")
        if num_q_heads != num_kv_heads and (num_kv_heads == 0 or num_q_heads % num_kv_heads):
            raise ValueError(f"num_q_heads must be a multiple of num_kv_heads, got {num_q_heads} and {num_kv_heads}")
        for name, part, expected in (
            ("k", k, (batch, num_kv_heads, seqlen_k, head_dim)),
            ("v", v, (batch, num_kv_heads, seqlen_k, head_dim_v)),
        ):
            if tuple(part.shape) != expected:
                raise ValueError(f"{name}.codes must be of shape {expected}, got {tuple(part.shape)}")
        for name, tensor, dtype, shapes in (
            ("logit_shift", self.logit_shift, torch.float32, [(batch, num_q_heads, seqlen_q)]),
            ("v_mean", self.v_mean, torch.float32, [(batch, num_kv_heads, 1, head_dim_v)]),
            ("keys_in_use", self.keys_in_use, torch.bool, [(batch, seqlen_k), (1, seqlen_k)]),
        ):
            if tensor is not None and (tensor.dtype != dtype or tuple(tensor.shape) not in shapes):
                got = f"{tensor.dtype} {tuple(tensor.shape)}"
                raise ValueError(f"{name} must be {dtype} of shape {' or '.join(map(str, shapes))}, got {got}")
        if self.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"dtype must be float32, bfloat16 or float16, got {self.dtype}")

    def to(self, device: torch.device | str) -> QuantizedQKV:
        def move(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else x.to(device)

        q, k, v = (x.to(device) for x in (self.q, self.k, self.v))
        rest = (move(x) for x in (self.logit_shift, self.v_mean, self.keys_in_use))
        return QuantizedQKV(q, k, v, self.recipe, self.dtype, *rest)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file, whole or not at all."""
        tensors: dict[str, torch.Tensor] = {}
        extras = [name for name in _EXTRAS if getattr(self, name) is not None]
        metadata = {
            "recipe": self.recipe.to_json(),
            "dtype": str(self.dtype).removeprefix("torch."),
            "extras": " ".join(extras),  # so that a file which lost one is not taken for whole
        }
        for name in ("q", "k", "v"):
            part, described = getattr(self, name).to_tensors(f"{name}.")
            tensors |= part
            metadata |= described
        tensors |= {name: getattr(self, name).contiguous() for name in extras}
        save_tensors(path, tensors, metadata, kind="quantized-qkv")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> QuantizedQKV:
        """Read what ``save`` wrote; ``ValueError`` for anything else."""
        tensors, metadata = load_tensors(path, kind="quantized-qkv")
        try:
            q, k, v = (QuantizedTensor.from_tensors(tensors, metadata, f"{name}.") for name in ("q", "k", "v"))
            recipe = Recipe.from_json(metadata.get("recipe", ""))
            dtype = getattr(torch, metadata.get("dtype", ""), None)
            extras = {name: tensors[name] for name in _EXTRAS if name in tensors}
            if sorted(extras) != sorted(metadata.get("extras", "").split()):
                raise ValueError(f"must hold {metadata.get('extras', '') or 'no extras'}, got {sorted(extras)}")
            return cls(q, k, v, recipe, dtype, **extras)  # type: ignore[arg-type]  # the dtype is checked there
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from None


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
