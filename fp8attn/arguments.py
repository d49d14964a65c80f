"""What the public functions accept: every refusal and its words.

Arguments are checked in two steps, because between the public functions and the kernels lies a ``torch.library`` op.
Types and plain values come first (``check_tensors`` and what returns a plain value): they make sure that the op's
schema takes the arguments, and ``torch.compile`` traces through them. What needs shapes comes inside the op
(``Inputs``, ``check_transform`` and ``starts``), for real tensors and for fake ones alike.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import torch

from fp8attn.kernels.problem import Masking, QuantizedQKV, Rotary, Sequences
from fp8attn.recipe import Recipe
from fp8attn.transforms import Smoothing, make_transform

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("bhsd", "bshd")
ALIGNMENTS = ("top_left", "bottom_right")
LARGEST_SCALE = 1e30  # times the largest logits of codes it is still an FP32 number


def check_no_dropout(dropout_p: float) -> None:
    if dropout_p != 0.0:
        raise ValueError(f"dropout_p must be 0, got {dropout_p}: FP8 attention is for inference; train with SDPA")


def check_tensors(**tensors: torch.Tensor | None) -> None:
    """Every argument is a tensor, or None where that is accepted, and none asks for a gradient."""
    for name, x in tensors.items():
        if x is None and name not in ("query", "key", "value"):
            continue
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} requires a gradient and FP8 attention has no backward; "
                "call it under torch.no_grad() or on detached tensors"
            )


def check_choices(*, is_causal: bool, causal_alignment: str, layout: str = "bhsd") -> None:
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal must be a bool, got {is_causal!r}")
    if causal_alignment not in ALIGNMENTS:
        raise ValueError(f"causal_alignment must be one of {ALIGNMENTS}, got {causal_alignment!r}")
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")


def window_sides(window: tuple[int, int] | None) -> tuple[int, int]:
    if window is None:
        return (-1, -1)
    if (
        not isinstance(window, (tuple, list))
        or len(window) != 2
        or not all(isinstance(w, int) and not isinstance(w, bool) and w >= -1 for w in window)
    ):
        raise ValueError(
            "window must be (left, right), the keys visible on either side of the diagonal, -1 for no limit; "
            f"a window of W tokens ending at the query is (W - 1, 0); got {window!r}"
        )
    return (window[0], window[1])


def softmax_scale(scale: float | None) -> float | None:
    if scale is None:
        return None
    if isinstance(scale, torch.Tensor) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale must be a number, got {type(scale).__name__}")
    if not abs(scale) <= LARGEST_SCALE:
        raise ValueError(f"scale must be finite and at most {LARGEST_SCALE:g}, got {scale}")
    return float(scale)


def scale_or_default(scale: float | None, head_dim: int) -> float:
    return 1.0 / math.sqrt(head_dim) if scale is None else scale


def softcap_or_none(softcap: float | None) -> float | None:
    if softcap is None:
        return None
    if isinstance(softcap, torch.Tensor) or not isinstance(softcap, (int, float)):
        raise TypeError(f"softcap must be a number, got {type(softcap).__name__}")
    if softcap == 0:
        return None
    if not 0 < softcap < math.inf:
        raise ValueError(f"softcap must be finite and positive, or None or 0 for none, got {softcap}")
    return float(softcap)


def smoothing_parts(
    smoothing: Smoothing | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """``k_mean``, ``v_mean`` and ``balance``."""
    if smoothing is None:
        return None, None, None
    if not isinstance(smoothing, Smoothing):
        raise TypeError(f"smoothing must be a fp8attn.transforms.Smoothing, got {type(smoothing).__name__}")
    parts = {f"smoothing.{name}": getattr(smoothing, name) for name in ("k_mean", "v_mean", "balance")}
    check_tensors(**parts)
    return smoothing.k_mean, smoothing.v_mean, smoothing.balance


def rotary_parts(rotary: Rotary | None) -> tuple[torch.Tensor | None, torch.Tensor | None, bool]:
    """``cos``, ``sin`` and ``interleaved``."""
    if rotary is None:
        return None, None, False
    if not isinstance(rotary, Rotary):
        raise TypeError(f"rotary must be a fp8attn.Rotary, got {type(rotary).__name__}")
    parts = {"rotary.cos": rotary.cos, "rotary.sin": rotary.sin}
    check_tensors(**parts)
    return rotary.cos, rotary.sin, rotary.interleaved


def recipe_text(recipe: str | Recipe) -> str:
    """The recipe as JSON, put together so that ``torch.compile`` can trace it; ``recipe_of`` is the way back."""
    recipe = Recipe.resolve(recipe)
    parts = []
    for name in _RECIPE_FIELDS:
        value = getattr(recipe, name)
        if isinstance(value, str):
            parts.append(f'"{name}": "{value}"')
        elif isinstance(value, bool):
            parts.append(f'"{name}": true' if value else f'"{name}": false')
        else:  # a seed; index, because compiled code may have made a symbol of it
            parts.append(f'"{name}": {operator.index(value)}')
    return "{" + ", ".join(parts) + "}"


_RECIPE_FIELDS = tuple(field.name for field in fields(Recipe))


@lru_cache(maxsize=256)
def recipe_of(text: str) -> Recipe:
    return Recipe.from_json(text)


def check_out(out: torch.Tensor | None, result: torch.Tensor) -> None:
    if out is None:
        return
    if (
        not isinstance(out, torch.Tensor)
        or out.shape != result.shape
        or out.dtype != result.dtype
        or out.device != result.device
    ):
        got = f"{tuple(out.shape)} {out.dtype} on {out.device}" if isinstance(out, torch.Tensor) else type(out).__name__
        raise ValueError(f"out must be {tuple(result.shape)} {result.dtype} on {result.device}, got {got}")
    check_tensors(out=out)


@dataclass(frozen=True)
class Inputs:
    """Checked query, key and value in BHSD, and the way back to the caller's layout."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    layout: str
    headless: bool  # the caller's tensors have no head axis

    @classmethod
    def check(
        cls, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, layout: str, enable_gqa: bool
    ) -> Inputs:
        named = {"query": query, "key": key, "value": value}
        for name, x in named.items():
            if x.dtype not in DTYPES:
                hint = "; quantized inputs go to fp8attn.attention_quantized" if x.dtype.itemsize == 1 else ""
                raise TypeError(f"{name} must be float32, bfloat16 or float16, got {x.dtype}{hint}")
            if x.dim() not in (3, 4) or x.dim() != query.dim():
                raise ValueError(
                    f"query, key and value must all have 4 dimensions ({', '.join(layout.upper())}), "
                    f"or all 3 (B, S, D), got {name} {tuple(x.shape)} and query {tuple(query.shape)}"
                )
            if x.dtype != query.dtype:
                raise TypeError(f"query, key and value must have one dtype, got {query.dtype} and {name} {x.dtype}")
            if x.device != query.device:
                raise ValueError(f"query, key and value must be on one device, got {query.device}, {name} {x.device}")
        headless = query.dim() == 3
        if headless:
            query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        elif layout == "bshd":
            query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        batch = max(x.shape[0] for x in (query, key, value))
        if 0 in (query.shape[0], key.shape[0], value.shape[0]):
            batch = 0
        if any(x.shape[0] not in (1, batch) for x in (query, key, value)):
            got = ", ".join(f"{name} {x.shape[0]}" for name, x in named.items())
            raise ValueError(f"batch sizes must agree or be 1, got {got}")
        query, key, value = (x.expand(batch, -1, -1, -1) for x in (query, key, value))
        if key.shape[:3] != value.shape[:3]:
            raise ValueError(
                "key and value must agree in heads and length, "
                f"got {key.shape[1]} heads of {key.shape[2]} tokens and {value.shape[1]} of {value.shape[2]}"
            )
        if query.shape[-1] != key.shape[-1]:
            raise ValueError(f"query and key must have one head_dim, got {query.shape[-1]} and {key.shape[-1]}")
        if query.shape[-1] == 0 or value.shape[-1] == 0:
            raise ValueError(f"head_dim must be at least 1, got query {query.shape[-1]} and value {value.shape[-1]}")
        heads, kv_heads = query.shape[1], key.shape[1]
        if heads != kv_heads:
            if kv_heads == 0 or heads % kv_heads:
                raise ValueError(f"num_q_heads must be a multiple of num_kv_heads, got {heads} and {kv_heads}")
            if not enable_gqa:
                raise ValueError(f"query has {heads} heads and key {kv_heads}; pass enable_gqa=True to let them share")
        return cls(query, key, value, layout, headless)

    @classmethod
    def of_quantized(cls, qkv: QuantizedQKV) -> Inputs:
        """Tensors of its shapes, to check the other arguments against; they hold nothing."""
        one = qkv.q.codes.new_empty(1)
        return cls(one.expand(qkv.q.shape), one.expand(qkv.k.shape), one.expand(qkv.v.shape), "bhsd", False)

    def cut(self, seqlen_q: int, seqlen_k: int) -> Inputs:
        """The first tokens, or of a packed batch a sequence's shapes."""
        query, key, value = self.query[:, :, :seqlen_q], self.key[:, :, :seqlen_k], self.value[:, :, :seqlen_k]
        return replace(self, query=query, key=key, value=value)

    def output_shape(self) -> tuple[int, ...]:
        batch, heads, seqlen, _ = self.query.shape
        dim = self.value.shape[-1]
        if self.headless:
            return batch, seqlen, dim
        return (batch, seqlen, heads, dim) if self.layout == "bshd" else (batch, heads, seqlen, dim)

    def restore(self, out: torch.Tensor) -> torch.Tensor:
        if self.headless:
            return out.select(1, 0)
        return out.transpose(1, 2) if self.layout == "bshd" else out

    def restore_lse(self, lse: torch.Tensor) -> torch.Tensor:
        return lse.select(1, 0) if self.headless else lse

    def masking(
        self, attn_mask: torch.Tensor | None, is_causal: bool, causal_alignment: str, window: Sequence[int]
    ) -> Masking:
        seqlen_q, seqlen_k = self.query.shape[2], self.key.shape[2]
        mask = self.mask(attn_mask)
        if mask is not None:
            for dim in range(4):  # an axis along which the mask was expanded need not be walked
                if mask.shape[dim] > 1 and mask.stride(dim) == 0:
                    mask = mask.narrow(dim, 0, 1)
        left, right = (min(side, seqlen_q + seqlen_k) for side in window)
        return Masking(seqlen_q, seqlen_k, self.query.device, is_causal, causal_alignment, (left, right), mask)

    def mask(self, attn_mask: torch.Tensor | None) -> torch.Tensor | None:
        """The explicit mask with four dimensions, each the problem's or 1."""
        if attn_mask is None:
            return None
        if attn_mask.dtype != torch.bool and attn_mask.dtype not in (*DTYPES, torch.float64):
            raise TypeError(f"attn_mask must be boolean or floating, got {attn_mask.dtype}")
        if attn_mask.device != self.query.device:
            raise ValueError(f"attn_mask must be on {self.query.device}, got {attn_mask.device}")
        if self.headless and attn_mask.dim() == 3:
            attn_mask = attn_mask.unsqueeze(1)
        full = (*self.query.shape[:3], self.key.shape[2])
        padded = (1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape)
        if len(padded) != 4 or any(m not in (1, f) for m, f in zip(padded, full, strict=True)):
            got = tuple(attn_mask.shape)
            raise ValueError(f"attn_mask must be broadcastable to (B, Hq, Sq, Sk) = {full}, got {got}")
        return attn_mask.reshape(padded)

    def sinks(self, sinks: torch.Tensor | None) -> torch.Tensor | None:
        if sinks is None:
            return None
        heads = self.query.shape[1]
        if sinks.shape != (heads,) or not sinks.is_floating_point():
            got = (tuple(sinks.shape), sinks.dtype)
            raise ValueError(f"sinks must be a floating tensor of shape (num_q_heads,) = ({heads},), got {got}")
        if sinks.device != self.query.device:
            raise ValueError(f"sinks must be on {self.query.device}, got {sinks.device}")
        return sinks.detach().to(torch.float32)

    def check_smoothing(
        self, k_mean: torch.Tensor | None, v_mean: torch.Tensor | None, balance: torch.Tensor | None
    ) -> None:
        batch, kv_heads, _, head_dim = self.key.shape
        head_dim_v = self.value.shape[-1]
        for name, part, dim in (
            ("k_mean", k_mean, head_dim),
            ("v_mean", v_mean, head_dim_v),
            ("balance", balance, head_dim),
        ):
            if part is None:
                continue
            if tuple(part.shape) not in ((batch, kv_heads, 1, dim), (1, kv_heads, 1, dim)):
                raise ValueError(
                    f"smoothing.{name} must have shape {(batch, kv_heads, 1, dim)} or {(1, kv_heads, 1, dim)}, "
                    f"got {tuple(part.shape)}"
                )
            if part.device != self.query.device:
                raise ValueError(f"smoothing.{name} must be on {self.query.device}, got {part.device}")

    def check_rotary(self, rotary: Rotary | None, causal_alignment: str) -> None:
        """Whether the tables reach every position; query 0 stands where ``causal_alignment`` puts it."""
        if rotary is None:
            return
        (batch, _, seqlen_q, head_dim), seqlen_k = self.query.shape, self.key.shape[2]
        if rotary.cos.device != self.query.device:
            raise ValueError(f"rotary must be on {self.query.device}, got {rotary.cos.device}")
        diagonal = seqlen_k - seqlen_q if causal_alignment == "bottom_right" else 0
        try:
            rotary.check(batch, seqlen_q, seqlen_k, diagonal, head_dim)
        except ValueError as error:
            raise ValueError(f"rotary: {error}") from None


def check_transform(recipe: Recipe, head_dim: int) -> None:
    """Whether the recipe's rotation has a matrix of that size; the others take any."""
    if recipe.rotate in ("hadamard", "random_hadamard"):
        make_transform(recipe.rotate, head_dim, seed=recipe.seed)


def check_cu_seqlens(**cu_seqlens: torch.Tensor) -> None:
    """What can be said without their values; ``starts`` says the rest."""
    for name, x in cu_seqlens.items():
        if not isinstance(x, torch.Tensor) or x.dtype not in (torch.int32, torch.int64):
            got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
            raise TypeError(f"{name} must be an int32 or int64 tensor, got {got}")
        if x.dim() != 1 or x.shape[0] < 1:
            raise ValueError(f"{name} must have shape (sequences + 1,), got {tuple(x.shape)}")


def check_max_seqlens(**max_seqlens: int | None) -> None:
    for name, x in max_seqlens.items():
        if x is None:
            continue
        if not isinstance(x, int) or isinstance(x, bool):
            raise TypeError(f"{name} must be an int or None, got {type(x).__name__}")
        if x < 0:
            raise ValueError(f"{name} must be at least 0, got {x}")


def check_as_many_sequences(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor) -> None:
    num_q, num_k = cu_seqlens_q.shape[0] - 1, cu_seqlens_k.shape[0] - 1  # not len(), which no symbol survives
    if num_q != num_k:
        raise ValueError(f"cu_seqlens_q and cu_seqlens_k must list as many sequences, got {num_q} and {num_k}")


def starts(name: str, cu_seqlens: torch.Tensor, total: int) -> list[int]:
    """The values of ``cu_seqlens``, for which this waits."""
    values: list[int] = cu_seqlens.tolist()
    if values[0] != 0 or values[-1] != total or any(a > b for a, b in itertools.pairwise(values)):
        raise ValueError(f"{name} must start at 0, never fall and end at the number of tokens ({total}), got {values}")
    return values


def sequences(side: str, cu_seqlens: torch.Tensor, total: int, longest: int | None, device: torch.device) -> Sequences:
    """Of queries (side ``"q"``) or keys (``"k"``). Values are checked where they lie on the host; nothing waits."""
    if cu_seqlens.device.type == "cpu":
        values = starts(f"cu_seqlens_{side}", cu_seqlens, total)
        actual = max((b - a for a, b in itertools.pairwise(values)), default=0)
        if longest is not None and longest < actual:
            raise ValueError(
                f"max_seqlen_{side} must be at least the longest sequence's {actual} tokens, got {longest}"
            )
        longest = actual
    longest = total if longest is None else min(longest, total)
    return Sequences(cu_seqlens.to(device).contiguous(), total, longest)
