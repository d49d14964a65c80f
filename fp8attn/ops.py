"""Attention in FP8: the functions users call.

Each of them checks types and plain values, calls one ``torch.library`` op (``fp8attn.library``), which checks the rest
and does the work, and puts the result into the form that was asked for. ``torch.compile`` traces through them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from fp8attn.arguments import (
    check_choices,
    check_cu_seqlens,
    check_max_seqlens,
    check_no_dropout,
    check_out,
    check_tensors,
    recipe_text,
    rotary_parts,
    smoothing_parts,
    softcap_or_none,
    softmax_scale,
    window_sides,
)
from fp8attn.kernels.dispatch import check_name, reasons
from fp8attn.kernels.problem import QuantizedQKV, Rotary
from fp8attn.kernels.states import merge_states
from fp8attn.library import (
    Call,
    Placement,
    Quantization,
    Softmax,
    Visibility,
    assembled,
    backend_for,
    quantized_problem,
    received,
    taken_apart,
)
from fp8attn.recipe import Recipe
from fp8attn.transforms import Smoothing

__all__ = ["Explanation", "attention", "attention_quantized", "attention_varlen", "explain", "merge_states", "quantize"]

# out, or (out, lse) with return_lse=True. The Any spares callers a cast: a type checker cannot tell which it will be.
Result: TypeAlias = torch.Tensor | Any


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
    rotary: Rotary | None = None,
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
        rotary: position embedding (``fp8attn.Rotary``) to turn queries and keys by, in the same pass that quantizes
            them. Key j is at position j, and query i where ``causal_alignment`` puts it.
        layout: ``"bhsd"``, or ``"bshd"`` for (B, S, H, D) inputs and output.
        return_lse: also return the natural-log sum of exponentials, FP32 (B, Hq, Sq) in either layout.
        backend: ``"auto"``, or one of ``fp8attn.kernels.dispatch.BACKENDS``; ``fp8attn.explain`` says which one runs.
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
    check_no_dropout(dropout_p)
    check_tensors(query=query, key=key, value=value, attn_mask=attn_mask, sinks=sinks)
    check_choices(is_causal=is_causal, causal_alignment=causal_alignment, layout=layout)
    check_name(backend)
    result, lse = torch.ops.fp8attn.attention.default(
        query, key, value,
        attn_mask, is_causal, causal_alignment, window_sides(window),
        softmax_scale(scale), softcap_or_none(softcap), sinks,
        recipe_text(recipe), smoothing is not None, *smoothing_parts(smoothing), *rotary_parts(rotary),
        bool(enable_gqa), layout, backend,
    )  # fmt: skip
    return _returned(result, lse, out, return_lse)


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
    rotary: Rotary | None = None,
    layout: str = "bhsd",
    backend: str = "auto",
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
    check_tensors(query=query, key=key, value=value, attn_mask=attn_mask)
    check_choices(is_causal=is_causal, causal_alignment=causal_alignment, layout=layout)
    check_name(backend)
    recipe = Recipe.resolve(recipe)
    parts = torch.ops.fp8attn.quantize.default(
        query, key, value, softmax_scale(scale),
        attn_mask, is_causal, causal_alignment, window_sides(window),
        recipe_text(recipe), smoothing is not None, *smoothing_parts(smoothing), *rotary_parts(rotary),
        bool(enable_gqa), layout, backend,
    )  # fmt: skip
    return assembled(received(parts), recipe, query.dtype)


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
    check_tensors(attn_mask=attn_mask, sinks=sinks)
    check_choices(is_causal=is_causal, causal_alignment=causal_alignment)
    check_name(backend)
    result, lse = torch.ops.fp8attn.attention_quantized.default(
        recipe_text(qkv.recipe), qkv.dtype, backend, *taken_apart(qkv),
        attn_mask, is_causal, causal_alignment, window_sides(window),
        softmax_scale(scale), softcap_or_none(softcap), sinks,
    )  # fmt: skip
    return _returned(result, lse, out, return_lse)


def attention_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    causal_alignment: str = "bottom_right",
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    recipe: str | Recipe = "default",
    smoothing: Smoothing | None = None,
    rotary: Rotary | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    out: torch.Tensor | None = None,
) -> Result:
    """Attention within each sequence of a packed batch, as FlashAttention's ``flash_attn_varlen_func``.

    Every sequence has scales and statistics of its own, as if it were alone. Empty sequences are allowed; a query whose
    sequence has no keys gets 0 and lse -inf (or its sink).

    On the Triton backend the batch is one, and nothing waits for the device: ``cu_seqlens`` on a GPU are read there,
    and may change between replays of a CUDA graph. So nobody checks their values; if they end before the last token,
    those after it get 0 and -inf. On the host they are checked.

    Args:
        query: (Tq, Hq, D), the tokens of all sequences one after another.
        key: (Tk, Hkv, D).
        value: (Tk, Hkv, Dv).
        cu_seqlens_q: (N + 1,) int32 or int64: sequence n owns query tokens cu_seqlens_q[n] to cu_seqlens_q[n + 1].
            Starts at 0, never falls, ends at Tq.
        cu_seqlens_k: the same for keys.
        max_seqlen_q, max_seqlen_k: tokens that no sequence has more of. They change nothing but how much work is laid
            out for sequences that might be long, where ``cu_seqlens`` are on a GPU.
        causal_alignment: ``"bottom_right"`` by default, as in FlashAttention.
        smoothing: frozen statistics that serve every sequence (a batch axis of 1).
        rotary: positions count from each sequence's first key. Where ``cu_seqlens`` are on a GPU, a position that the
            tables do not have makes NaN.

    Other arguments and errors are those of ``attention``.

    Returns:
        out (Tq, Hq, Dv), or (out, lse) with lse FP32 (Hq, Tq).

    >>> import torch, fp8attn
    >>> q, k, v = (torch.randn(7, 2, 64) for _ in range(3))
    >>> cu_seqlens = torch.tensor([0, 3, 3, 7])
    >>> fp8attn.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, is_causal=True).shape
    torch.Size([7, 2, 64])
    """
    check_tensors(query=query, key=key, value=value, sinks=sinks)
    check_cu_seqlens(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    check_max_seqlens(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    check_choices(is_causal=is_causal, causal_alignment=causal_alignment)
    check_name(backend)
    result, lse = torch.ops.fp8attn.attention_varlen.default(
        query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        is_causal, causal_alignment, window_sides(window), backend,
        softmax_scale(scale), softcap_or_none(softcap), sinks,
        recipe_text(recipe), smoothing is not None, *smoothing_parts(smoothing), *rotary_parts(rotary),
    )  # fmt: skip
    return _returned(result, lse, out, return_lse)


def _returned(result: torch.Tensor, lse: torch.Tensor, out: torch.Tensor | None, return_lse: bool) -> Result:
    if out is not None:
        check_out(out, result)
        result = out.copy_(result)
    return (result, lse) if return_lse else result


@dataclass(frozen=True)
class Explanation:
    """Which backend runs a problem, and why.

    Attributes:
        backend: its name.
        runs: what it is there for: quantization and attention, or attention alone for what is quantized already.
        reasons: for every backend, why it was chosen or skipped.
        details: how the chosen one would go about it, such as its tile sizes, as far as it tells.
    """

    backend: str
    runs: tuple[str, ...]
    reasons: dict[str, str]
    details: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{' and '.join(self.runs)} on backend {self.backend!r}"]
        lines += [f"  {name}: {reason}" for name, reason in self.reasons.items()]
        return "\n".join([*lines, *(f"  {name} = {value}" for name, value in self.details.items())])


def explain(
    query: torch.Tensor | QuantizedQKV,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
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
    rotary: Rotary | None = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    backend: str = "auto",
    out: torch.Tensor | None = None,
) -> Explanation:
    """Which backend ``attention`` would run with these arguments, and why the others do not.

    Takes the arguments of ``attention``, checks them as it does and computes nothing. A ``QuantizedQKV`` in place of
    query, key and value asks about ``attention_quantized``.

    >>> import torch, fp8attn
    >>> q, k, v = (torch.randn(1, 4, 128, 64) for _ in range(3))
    >>> print(fp8attn.explain(q, k, v, is_causal=True, backend="reference"))
    quantization and attention on backend 'reference'
      triton: skipped: backend='reference' was asked for
      reference: chosen: asked for
    """
    check_no_dropout(dropout_p)
    check_tensors(attn_mask=attn_mask, sinks=sinks)
    check_choices(is_causal=is_causal, causal_alignment=causal_alignment, layout=layout)
    check_name(backend)
    visibility = Visibility(attn_mask, is_causal, causal_alignment, window_sides(window))
    softmax = Softmax(softmax_scale(scale), softcap_or_none(softcap), sinks)
    if isinstance(query, QuantizedQKV):
        if key is not None or value is not None:
            raise ValueError("a QuantizedQKV brings its keys and values: key and value must be None beside it")
        problem, chosen = quantized_problem(query, visibility, softmax), backend_for(query, backend)
        out_shape: tuple[int, ...] = (*query.q.shape[:3], query.v.shape[3])
    else:
        check_tensors(query=query, key=key, value=value)
        quantization = Quantization(
            recipe_text(recipe), smoothing is not None, *smoothing_parts(smoothing), *rotary_parts(rotary)
        )
        placement = Placement(bool(enable_gqa), layout, backend)
        call = Call.check(query, key, value, visibility, quantization, placement)  # type: ignore[arg-type]  # not None
        problem, chosen, out_shape = call.problem_without_values(softmax), call.backend, call.inputs.output_shape()
    qkv = problem.qkv
    check_out(out, qkv.q.scale.new_empty(1, dtype=qkv.dtype).expand(out_shape))
    return Explanation(
        backend=chosen.name,
        runs=("attention",) if qkv is query else ("quantization", "attention"),
        reasons=reasons(backend, qkv.q.device, qkv.recipe, qkv.q.shape[-1], qkv.v.shape[-1]),
        details={} if chosen.describe is None else chosen.describe(problem),
    )
