"""Attention in FP8: the functions users call, and the one place where their arguments are checked."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from fp8attn.kernels.dispatch import run
from fp8attn.kernels.problem import AttentionProblem, Masking, QuantizedQKV
from fp8attn.kernels.reference import quantize_qkv
from fp8attn.kernels.states import merge_states
from fp8attn.recipe import Recipe
from fp8attn.transforms import Smoothing

__all__ = ["attention", "attention_quantized", "attention_varlen", "merge_states", "quantize"]

# out, or (out, lse) with return_lse=True. The Any spares callers a cast: a type checker cannot tell which it will be.
Result: TypeAlias = torch.Tensor | Any

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LAYOUTS = ("bhsd", "bshd")
_LARGEST_SCALE = 1e30  # times the largest logits of codes it is still an FP32 number
_ALIGNMENTS = ("top_left", "bottom_right")


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    causal_alignment: str = "top_left",
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    recipe: str | Recipe = "default",
    smoothing: Smoothing | None = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    backend: str = "auto",
    out: torch.Tensor | None = None,
) -> Result:
    """Quantize and run attention: ``torch.nn.functional.scaled_dot_product_attention`` in FP8.

    Arguments up to ``enable_gqa`` are SDPA's own, in its order and with its meaning. Inputs are never modified, and
    strided or expanded ones give the contiguous answer.

    Args:
        query: (B, Hq, Sq, D) in float32, bfloat16 or float16. Three dimensions (B, S, D) are one head. A batch of 1
            broadcasts.
        key: (B, Hkv, Sk, D).
        value: (B, Hkv, Sk, Dv); Dv may differ from D.
        attn_mask: broadcastable to (B, Hq, Sq, Sk); boolean, True where a query may look, or floating, added to the
            logits. A key that no query may look at takes no part in scales and statistics.
        dropout_p: must be 0; FP8 attention is for inference.
        is_causal: query i sees keys up to its diagonal; combines with ``attn_mask``.
        scale: softmax scale, 1/sqrt(D) by default.
        enable_gqa: let Hq be a multiple of Hkv.
        causal_alignment: where the diagonal lies when Sq != Sk: ``"top_left"`` (SDPA: query i at key i) or
            ``"bottom_right"`` (FlashAttention, decoding: the last query at the last key).
        window: (left, right) keys visible around the diagonal, both inclusive, -1 for no limit, as FlashAttention's
            ``window_size``.
        softcap: logits become softcap * tanh(logit / softcap) before the mask; None or 0 is off.
        sinks: (Hq,) one logit a head that takes weight and has no value.
        recipe: how to quantize: a preset's name or a ``Recipe``.
        smoothing: frozen statistics (``fp8attn.transforms.Smoothing``) to use instead of fitting the recipe's own.
        layout: ``"bhsd"``, or ``"bshd"`` for (B, S, H, D) inputs and output.
        return_lse: also return the natural-log sum of exponentials, FP32 (B, Hq, Sq) in either layout.
        backend: ``"auto"``, or one of ``fp8attn.kernels.dispatch.BACKENDS``.
        out: write the output here: the output's shape, dtype and device, any strides.

    Returns:
        out (B, Hq, Sq, Dv) in the query's dtype, or (out, lse). A query that sees no key gets 0 and lse -inf (or its
        sink).

    Raises:
        TypeError: a dtype that is not accepted.
        ValueError: anything else that does not fit, with what it was and what is accepted; dropout; inputs that ask
            for gradients.

    >>> import torch, fp8attn
    >>> q, k, v = torch.randn(1, 8, 100, 64), torch.randn(1, 2, 100, 64), torch.randn(1, 2, 100, 64)
    >>> exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    >>> out = fp8attn.attention(q, k, v, is_causal=True, enable_gqa=True)
    >>> bool((out - exact).norm() / exact.norm() < 0.05)
    True
    """
    if dropout_p != 0.0:
        raise ValueError(f"dropout_p must be 0, got {dropout_p}: FP8 attention is for inference; train with SDPA")
    inputs = _Inputs.check(query, key, value, layout=layout, enable_gqa=enable_gqa)
    masking = _masking(inputs, attn_mask, is_causal, causal_alignment, window)
    softmax_scale = _scale(scale, inputs.query.shape[-1])
    sinks = _sinks(sinks, inputs.query)
    softcap = _softcap(softcap)
    result_shape = inputs.output_shape()
    _check_out(out, result_shape, query)
    qkv = quantize_qkv(
        inputs.query, inputs.key, inputs.value, Recipe.resolve(recipe), masking,
        scale=softmax_scale, smoothing=_smoothing(smoothing, inputs),
    )  # fmt: skip
    result, lse = run(AttentionProblem(qkv, masking, softmax_scale, softcap, sinks), backend)
    return _returned(inputs.restore(result), inputs.restore_lse(lse), query.dtype, out, return_lse)


def quantize(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    recipe: str | Recipe = "default",
    *,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    causal_alignment: str = "top_left",
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    enable_gqa: bool = True,
    smoothing: Smoothing | None = None,
    layout: str = "bhsd",
) -> QuantizedQKV:
    """Transform and quantize once, to run ``attention_quantized`` many times.

    Tensors and arguments are those of ``attention``. Who sees whom decides which tokens count: a key that no query may
    look at is left out: it is stored as zero and stays hidden, whatever mask ``attention_quantized`` is given. With
    ``smooth_k="auto"`` it also decides, together with ``scale``, whether the mean key is taken out.

    >>> import torch, fp8attn
    >>> q, k, v = (torch.randn(1, 4, 128, 64) for _ in range(3))
    >>> qkv = fp8attn.quantize(q, k, v)
    >>> torch.equal(fp8attn.attention_quantized(qkv), fp8attn.attention(q, k, v))
    True
    """
    inputs = _Inputs.check(query, key, value, layout=layout, enable_gqa=enable_gqa)
    masking = _masking(inputs, attn_mask, is_causal, causal_alignment, window)
    return quantize_qkv(
        inputs.query, inputs.key, inputs.value, Recipe.resolve(recipe), masking,
        scale=_scale(scale, query.shape[-1]), smoothing=_smoothing(smoothing, inputs),
    )  # fmt: skip


def attention_quantized(
    qkv: QuantizedQKV,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    causal_alignment: str = "top_left",
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    out: torch.Tensor | None = None,
) -> Result:
    """Attention on what ``quantize`` made: the second half of ``attention``, whose arguments these are.

    Say again who sees whom: the quantized value remembers only keys that no query could see, which stay hidden.

    Returns:
        out (B, Hq, Sq, Dv) in the dtype that was quantized, or (out, lse).

    >>> import torch, fp8attn
    >>> qkv = fp8attn.quantize(*(torch.randn(1, 2, 64, 32) for _ in range(3)))
    >>> fp8attn.attention_quantized(qkv, is_causal=True).shape
    torch.Size([1, 2, 64, 32])
    """
    if not isinstance(qkv, QuantizedQKV):
        raise TypeError(f"qkv must be a QuantizedQKV as fp8attn.quantize makes it, got {type(qkv).__name__}")
    q, k, v = qkv.q, qkv.k, qkv.v
    inputs = _Inputs(*(x.codes.new_empty(1).expand(x.shape) for x in (q, k, v)), "bhsd", False)  # for their shapes
    masking = _masking(inputs, attn_mask, is_causal, causal_alignment, window)
    if qkv.keys_in_use is not None:
        masking = masking.without_keys(qkv.keys_in_use)
    like = q.codes.new_empty(0, dtype=qkv.dtype)
    _check_out(out, inputs.output_shape(), like)
    problem = AttentionProblem(qkv, masking, _scale(scale, q.shape[-1]), _softcap(softcap), _sinks(sinks, q.codes))
    result, lse = run(problem, backend)
    return _returned(result, lse, qkv.dtype, out, return_lse)


def attention_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    causal_alignment: str = "bottom_right",
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    recipe: str | Recipe = "default",
    smoothing: Smoothing | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    out: torch.Tensor | None = None,
) -> Result:
    """Attention within each sequence of a packed batch, as FlashAttention's ``flash_attn_varlen_func``.

    Every sequence has scales and statistics of its own, so it gets the same bits alone as in a batch. Empty sequences
    are allowed; a query whose sequence has no keys gets 0 and lse -inf.

    Args:
        query: (Tq, Hq, D), the tokens of all sequences one after another.
        key: (Tk, Hkv, D).
        value: (Tk, Hkv, Dv).
        cu_seqlens_q: (N + 1,) int32 or int64: sequence n owns query tokens cu_seqlens_q[n] to cu_seqlens_q[n + 1].
            Starts at 0, never falls, ends at Tq.
        cu_seqlens_k: the same for keys.
        causal_alignment: ``"bottom_right"`` by default, as in FlashAttention.
        smoothing: frozen statistics that serve every sequence (a batch axis of 1).

    Other arguments and errors are those of ``attention``.

    Returns:
        out (Tq, Hq, Dv), or (out, lse) with lse FP32 (Hq, Tq).

    >>> import torch, fp8attn
    >>> q, k, v = (torch.randn(7, 2, 64) for _ in range(3))
    >>> cu_seqlens = torch.tensor([0, 3, 3, 7])
    >>> fp8attn.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, is_causal=True).shape
    torch.Size([7, 2, 64])
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if isinstance(x, torch.Tensor) and x.dim() != 3:
            raise ValueError(f"{name} must have 3 dimensions (tokens, heads, head_dim), got shape {tuple(x.shape)}")
    inputs = _Inputs.check(*(x[None] for x in (query, key, value)), layout="bshd", enable_gqa=True)
    starts_q = _cu_seqlens(cu_seqlens_q, query.shape[0], "cu_seqlens_q")
    starts_k = _cu_seqlens(cu_seqlens_k, key.shape[0], "cu_seqlens_k")
    if len(starts_q) != len(starts_k):
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must list as many sequences, "
            f"got {len(starts_q) - 1} and {len(starts_k) - 1}"
        )
    _, num_q_heads, total_q, _ = inputs.query.shape
    shape = (total_q, num_q_heads, value.shape[-1])
    _check_out(out, shape, query)
    result = torch.zeros(shape, dtype=query.dtype, device=query.device)
    lse = torch.full((num_q_heads, total_q), -torch.inf, dtype=torch.float32, device=query.device)
    # Without any sequence the other arguments are still checked, on an empty one.
    for n in range(len(starts_q) - 1) or [-1]:
        rows, keys = slice(starts_q[n], starts_q[n + 1]), slice(starts_k[n], starts_k[n + 1])
        part, part_lse = attention(
            query[None, rows], key[None, keys], value[None, keys], is_causal=is_causal, scale=scale, enable_gqa=True,
            causal_alignment=causal_alignment, window=window, softcap=softcap, sinks=sinks, recipe=recipe,
            smoothing=smoothing, layout="bshd", return_lse=True, backend=backend,
        )  # fmt: skip
        result[rows], lse[:, rows] = part[0], part_lse[0]
    return _returned(result, lse, query.dtype, out, return_lse)


@dataclass(frozen=True)
class _Inputs:
    """Checked query, key and value in BHSD, and the way back to the caller's layout."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    layout: str
    headless: bool  # the caller's tensors have no head axis

    @classmethod
    def check(
        cls, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, layout: str, enable_gqa: bool
    ) -> _Inputs:
        if layout not in _LAYOUTS:
            raise ValueError(f"layout must be one of {_LAYOUTS}, got {layout!r}")
        named = {"query": query, "key": key, "value": value}
        for name, x in named.items():
            if not isinstance(x, torch.Tensor):
                raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
            if x.dtype not in _DTYPES:
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
            _no_gradient(name, x)
        headless = query.dim() == 3
        if headless:
            query, key, value = query[:, None], key[:, None], value[:, None]
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

    def output_shape(self) -> tuple[int, ...]:
        batch, heads, seqlen, _ = self.query.shape
        dim = self.value.shape[-1]
        if self.headless:
            return batch, seqlen, dim
        return (batch, seqlen, heads, dim) if self.layout == "bshd" else (batch, heads, seqlen, dim)

    def restore(self, out: torch.Tensor) -> torch.Tensor:
        if self.headless:
            return out[:, 0]
        return out.transpose(1, 2) if self.layout == "bshd" else out

    def restore_lse(self, lse: torch.Tensor) -> torch.Tensor:
        return lse[:, 0] if self.headless else lse


def _no_gradient(name: str, x: torch.Tensor | None) -> None:
    if x is not None and x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} requires a gradient and FP8 attention has no backward; "
            "call it under torch.no_grad() or on detached tensors"
        )


def _masking(
    inputs: _Inputs,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    causal_alignment: str,
    window: tuple[int, int] | None,
) -> Masking:
    batch, heads, seqlen_q, _ = inputs.query.shape
    seqlen_k = inputs.key.shape[2]
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal must be a bool, got {is_causal!r}")
    if causal_alignment not in _ALIGNMENTS:
        raise ValueError(f"causal_alignment must be one of {_ALIGNMENTS}, got {causal_alignment!r}")
    if window is None:
        window = (-1, -1)
    if (
        not isinstance(window, (tuple, list))
        or len(window) != 2
        or not all(isinstance(w, int) and not isinstance(w, bool) and w >= -1 for w in window)
    ):
        raise ValueError(
            "window must be (left, right), the keys visible on either side of the diagonal, -1 for no limit; "
            f"a window of W tokens ending at the query is (W - 1, 0); got {window!r}"
        )
    if attn_mask is not None:
        if not isinstance(attn_mask, torch.Tensor):
            raise TypeError(f"attn_mask must be a torch.Tensor, got {type(attn_mask).__name__}")
        if attn_mask.dtype != torch.bool and attn_mask.dtype not in (*_DTYPES, torch.float64):
            raise TypeError(f"attn_mask must be boolean or floating, got {attn_mask.dtype}")
        if attn_mask.device != inputs.query.device:
            raise ValueError(f"attn_mask must be on {inputs.query.device}, got {attn_mask.device}")
        _no_gradient("attn_mask", attn_mask)
        if inputs.headless and attn_mask.dim() == 3:
            attn_mask = attn_mask[:, None]
        full = (batch, heads, seqlen_q, seqlen_k)
        padded = (1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape)
        if len(padded) != 4 or any(m not in (1, f) for m, f in zip(padded, full, strict=True)):
            got = tuple(attn_mask.shape)
            raise ValueError(f"attn_mask must be broadcastable to (B, Hq, Sq, Sk) = {full}, got {got}")
        attn_mask = attn_mask.reshape(padded)
        for dim in range(4):  # an axis along which the mask was expanded need not be walked
            if attn_mask.shape[dim] > 1 and attn_mask.stride(dim) == 0:
                attn_mask = attn_mask.narrow(dim, 0, 1)
    left, right = (min(side, seqlen_q + seqlen_k) for side in window)
    return Masking(seqlen_q, seqlen_k, inputs.query.device, is_causal, causal_alignment, (left, right), attn_mask)


def _scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if isinstance(scale, torch.Tensor) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale must be a number, got {type(scale).__name__}")
    if not abs(scale) <= _LARGEST_SCALE:
        raise ValueError(f"scale must be finite and at most {_LARGEST_SCALE:g}, got {scale}")
    return float(scale)


def _softcap(softcap: float | None) -> float | None:
    if softcap is None:
        return None
    if isinstance(softcap, torch.Tensor) or not isinstance(softcap, (int, float)):
        raise TypeError(f"softcap must be a number, got {type(softcap).__name__}")
    if softcap == 0:
        return None
    if not math.isfinite(softcap) or softcap < 0:
        raise ValueError(f"softcap must be finite and positive, or None or 0 for none, got {softcap}")
    return float(softcap)


def _sinks(sinks: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    if sinks is None:
        return None
    if not isinstance(sinks, torch.Tensor) or sinks.shape != (query.shape[1],) or not sinks.is_floating_point():
        shape = (tuple(sinks.shape), sinks.dtype) if isinstance(sinks, torch.Tensor) else type(sinks).__name__
        raise ValueError(f"sinks must be a floating tensor of shape (num_q_heads,) = ({query.shape[1]},), got {shape}")
    if sinks.device != query.device:
        raise ValueError(f"sinks must be on {query.device}, got {sinks.device}")
    _no_gradient("sinks", sinks)
    return sinks.detach().to(torch.float32)


def _smoothing(smoothing: Smoothing | None, inputs: _Inputs) -> Smoothing | None:
    if smoothing is None:
        return None
    if not isinstance(smoothing, Smoothing):
        raise TypeError(f"smoothing must be a fp8attn.transforms.Smoothing, got {type(smoothing).__name__}")
    batch, kv_heads, _, head_dim = inputs.key.shape
    for name, dim in (("k_mean", head_dim), ("v_mean", inputs.value.shape[-1]), ("balance", head_dim)):
        part = getattr(smoothing, name)
        if part is not None and part.shape not in {(batch, kv_heads, 1, dim), (1, kv_heads, 1, dim)}:
            raise ValueError(
                f"smoothing.{name} must have shape {(batch, kv_heads, 1, dim)} or {(1, kv_heads, 1, dim)}, "
                f"got {tuple(part.shape)}"
            )
        if part is not None and part.device != inputs.query.device:
            raise ValueError(f"smoothing.{name} must be on {inputs.query.device}, got {part.device}")
        _no_gradient(f"smoothing.{name}", part)
    return smoothing


def _check_out(out: torch.Tensor | None, shape: tuple[int, ...], like: torch.Tensor) -> None:
    if out is None:
        return
    if not isinstance(out, torch.Tensor) or out.shape != shape or out.dtype != like.dtype or out.device != like.device:
        got = f"{tuple(out.shape)} {out.dtype} on {out.device}" if isinstance(out, torch.Tensor) else type(out).__name__
        raise ValueError(f"out must be {tuple(shape)} {like.dtype} on {like.device}, got {got}")
    _no_gradient("out", out)


def _cu_seqlens(cu_seqlens: torch.Tensor, total: int, name: str) -> list[int]:
    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = cu_seqlens.dtype if isinstance(cu_seqlens, torch.Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"{name} must be an int32 or int64 tensor, got {got}")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 1:
        raise ValueError(f"{name} must have shape (sequences + 1,), got {tuple(cu_seqlens.shape)}")
    starts: list[int] = cu_seqlens.tolist()
    if starts[0] != 0 or starts[-1] != total or any(a > b for a, b in itertools.pairwise(starts)):
        raise ValueError(f"{name} must start at 0, never fall and end at the number of tokens ({total}), got {starts}")
    return starts


def _returned(
    result: torch.Tensor, lse: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None, return_lse: bool
) -> Result:
    out = result.to(dtype) if out is None else out.copy_(result)
    return (out, lse) if return_lse else out
