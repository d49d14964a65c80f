"""The ``torch.library`` ops behind the public functions: what ``torch.compile``, ``torch.export`` and fake tensors see.

An op takes tensors, numbers and strings (a recipe as its JSON). It checks shapes, chooses a backend and runs it; its
fake implementation makes the same checks and returns empty tensors of the same shapes, dtypes and strides. The public
functions call the ops without a compiler too, so that there is one way that everything goes; it costs some ten
microseconds a call. Nothing waits for the device, but ``attention_varlen`` where a backend takes one sequence a time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fp8attn.arguments import (
    Inputs,
    check_as_many_sequences,
    check_transform,
    recipe_of,
    scale_or_default,
    sequences,
    starts,
)
from fp8attn.formats import get_format
from fp8attn.kernels.dispatch import Backend, choose
from fp8attn.kernels.problem import AttentionProblem, Masking, Packing, QuantizedQKV, Rotary
from fp8attn.recipe import Recipe
from fp8attn.scaling import Granularity, QuantizedTensor
from fp8attn.transforms import Smoothing

__all__ = [
    "Call",
    "Parts",
    "Placement",
    "Quantization",
    "Softmax",
    "Visibility",
    "assembled",
    "backend_for",
    "quantized_problem",
    "received",
    "taken_apart",
]

# ---- an op's arguments in groups, each with its piece of the schema


class Visibility(NamedTuple):
    attn_mask: torch.Tensor | None
    is_causal: bool
    causal_alignment: str
    window: tuple[int, int]


class Softmax(NamedTuple):
    scale: float | None
    softcap: float | None
    sinks: torch.Tensor | None


class Quantization(NamedTuple):
    recipe: str
    frozen: bool  # whether the rest is a Smoothing's; else it is to be fitted
    k_mean: torch.Tensor | None
    v_mean: torch.Tensor | None
    balance: torch.Tensor | None
    rotary_cos: torch.Tensor | None
    rotary_sin: torch.Tensor | None
    rotary_interleaved: bool

    def rotary(self) -> Rotary | None:
        if self.rotary_cos is None or self.rotary_sin is None:
            return None
        return Rotary(self.rotary_cos, self.rotary_sin, self.rotary_interleaved)


class Placement(NamedTuple):
    enable_gqa: bool
    layout: str
    backend: str


class Parts(NamedTuple):
    """A ``QuantizedQKV``'s tensors. The values' codes are in one of two, by their layout."""

    q_codes: torch.Tensor
    q_scale: torch.Tensor
    k_codes: torch.Tensor
    k_scale: torch.Tensor
    v_rows: torch.Tensor | None
    v_columns: torch.Tensor | None
    v_scale: torch.Tensor
    logit_shift: torch.Tensor | None
    v_mean: torch.Tensor | None
    keys_in_use: torch.Tensor | None


_QKV = "Tensor query, Tensor key, Tensor value"
_VISIBILITY = "Tensor? attn_mask, bool is_causal, str causal_alignment, SymInt[] window"
_SOFTMAX = "float? scale, float? softcap, Tensor? sinks"
_QUANTIZATION = (
    "str recipe, bool frozen, Tensor? k_mean, Tensor? v_mean, Tensor? balance, "
    "Tensor? rotary_cos, Tensor? rotary_sin, bool rotary_interleaved"
)
_PLACEMENT = "bool enable_gqa, str layout, str backend"
_PARTS = (
    "Tensor q_codes, Tensor q_scale, Tensor k_codes, Tensor k_scale, Tensor? v_rows, Tensor? v_columns, "
    "Tensor v_scale, Tensor? logit_shift, Tensor? v_mean, Tensor? keys_in_use"
)


def _grouped(arguments: tuple[Any, ...], *groups: Any) -> Iterator[Any]:
    for group in groups:
        size = len(group._fields)
        yield group(*arguments[:size])
        arguments = arguments[size:]


# ---- a quantized value as tensors, and back


def taken_apart(qkv: QuantizedQKV) -> Parts:
    v = qkv.v
    columns = v.layout == "permuted_columns"
    return Parts(
        *(qkv.q.to_layout("rows").codes, qkv.q.scale, qkv.k.to_layout("rows").codes, qkv.k.scale),
        *(None if columns else v.codes, v.codes if columns else None, v.scale),
        *(qkv.logit_shift, qkv.v_mean, qkv.keys_in_use),
    )


def assembled(parts: Parts, recipe: Recipe, dtype: torch.dtype) -> QuantizedQKV:
    """The other way; ``ValueError`` if the parts do not fit."""
    if parts.v_rows is not None:
        v_codes, layout, seqlen = parts.v_rows, "rows", None
    elif parts.v_columns is not None:
        v_codes, layout, seqlen = parts.v_columns, "permuted_columns", parts.k_codes.shape[-2]
    else:
        raise ValueError("one of v_rows and v_columns must be given")
    q_by, k_by, v_by = (Granularity.parse(name) for name in (recipe.q_scale, recipe.k_scale, recipe.v_scale))
    return QuantizedQKV(
        q=QuantizedTensor(parts.q_codes, parts.q_scale, get_format(recipe.q_format), q_by),
        k=QuantizedTensor(parts.k_codes, parts.k_scale, get_format(recipe.k_format), k_by),
        v=QuantizedTensor(v_codes, parts.v_scale, get_format(recipe.v_format), v_by, None, layout, seqlen),
        recipe=recipe,
        dtype=dtype,
        logit_shift=parts.logit_shift,
        v_mean=parts.v_mean,
        keys_in_use=parts.keys_in_use,
    )


# ---- what the real and the fake implementations share


@dataclass(frozen=True)
class Call:
    """Queries, keys, values and how to quantize them, checked against each other, and the backend that they go to."""

    inputs: Inputs
    visibility: Visibility
    quantization: Quantization
    recipe: Recipe
    backend: Backend

    @classmethod
    def check(
        cls,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        visibility: Visibility,
        quantization: Quantization,
        placement: Placement,
    ) -> Call:
        inputs = Inputs.check(query, key, value, layout=placement.layout, enable_gqa=placement.enable_gqa)
        inputs.mask(visibility.attn_mask)
        inputs.check_smoothing(quantization.k_mean, quantization.v_mean, quantization.balance)
        inputs.check_rotary(quantization.rotary(), visibility.causal_alignment)
        recipe = recipe_of(quantization.recipe)
        check_transform(recipe, inputs.query.shape[3])
        backend = choose(placement.backend, query.device, recipe, inputs.query.shape[3], inputs.value.shape[3])
        return cls(inputs, visibility, quantization, recipe, backend)

    def masking(self) -> Masking:
        return self.inputs.masking(*self.visibility)

    def smoothing(self) -> Smoothing | None:
        given = self.quantization
        return Smoothing(given.k_mean, given.v_mean, given.balance) if given.frozen else None

    def quantized(self, masking: Masking, scale: float) -> QuantizedQKV:
        inputs = self.inputs
        return self.backend.quantize(
            inputs.query, inputs.key, inputs.value, self.recipe, masking,
            scale=scale, smoothing=self.smoothing(), rotary=self.quantization.rotary(),
        )  # fmt: skip

    def problem_without_values(self, softmax: Softmax) -> AttentionProblem:
        """The attention problem to come, to ask about: its tensors have their shapes and dtypes, and one element."""
        query, masking = self.inputs.query, self.masking()
        qkv = self.quantized_empty(masking, lambda shape, dtype: query.new_empty(1, dtype=dtype).expand(shape))
        scale = scale_or_default(softmax.scale, query.shape[-1])
        return AttentionProblem(qkv, masking, scale, softmax.softcap, self.inputs.sinks(softmax.sinks))

    def quantized_empty(
        self, masking: Masking, empty: Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
    ) -> QuantizedQKV:
        """``quantized`` without its values, of what ``empty`` makes."""
        (batch, num_q_heads, seqlen_q, head_dim), recipe = self.inputs.query.shape, self.recipe
        num_kv_heads, seqlen_k, head_dim_v = self.inputs.value.shape[1:]

        def codes(name: str, *shape: int) -> torch.Tensor:
            return empty(shape, get_format(name).dtype)

        def scale(by: str, *shape: int) -> torch.Tensor:
            return empty(tuple(Granularity.parse(by).scale_shape(torch.Size(shape))), torch.float32)

        any_heads = num_q_heads > 0 and num_kv_heads > 0
        given = self.quantization
        k_mean_out = given.k_mean is not None if given.frozen else any_heads and recipe.smooth_k is not False
        v_mean_out = given.v_mean is not None if given.frozen else any_heads and recipe.smooth_v
        q, k, v = (
            (batch, num_q_heads, seqlen_q, head_dim),
            (batch, num_kv_heads, seqlen_k, head_dim),
            (batch, num_kv_heads, seqlen_k, head_dim_v),
        )
        columns = (*v[:2], head_dim_v, _up_to_16(seqlen_k)) if self.backend.v_layout(recipe) != "rows" else None
        keys_in_use = masking.in_use[1]
        parts = Parts(
            codes(recipe.q_format, *q[:3], _up_to_16(head_dim)).narrow(-1, 0, head_dim),
            scale(recipe.q_scale, *q),
            codes(recipe.k_format, *k[:3], _up_to_16(head_dim)).narrow(-1, 0, head_dim),
            scale(recipe.k_scale, *k),
            codes(recipe.v_format, *v[:3], _up_to_16(head_dim_v)).narrow(-1, 0, head_dim_v)
            if columns is None
            else None,
            None if columns is None else codes(recipe.v_format, *columns),
            scale(recipe.v_scale, *v),
            empty(q[:3], torch.float32) if k_mean_out else None,
            empty((*k[:2], 1, head_dim_v), torch.float32) if v_mean_out else None,
            None if keys_in_use is None else empty(tuple(keys_in_use.shape), torch.bool),
        )
        return assembled(parts, recipe, self.inputs.query.dtype)


def _up_to_16(n: int) -> int:
    return -(-n // 16) * 16


def _attend(backend: Backend, problem: AttentionProblem) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = backend.attend(problem)
    return out.to(problem.qkv.dtype).contiguous(), lse.contiguous()


# ---- attention


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    visibility, softmax, quantization, placement = _grouped(rest, Visibility, Softmax, Quantization, Placement)
    call = Call.check(query, key, value, visibility, quantization, placement)
    inputs, sinks, masking = call.inputs, call.inputs.sinks(softmax.sinks), call.masking()
    scale = scale_or_default(softmax.scale, query.shape[-1])
    with torch.autocast(query.device.type, enabled=False):
        qkv = call.quantized(masking, scale)
        out, lse = _attend(call.backend, AttentionProblem(qkv, masking, scale, softmax.softcap, sinks))
    return inputs.restore(out), inputs.restore_lse(lse)


def _attention_fake(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    visibility, softmax, quantization, placement = _grouped(rest, Visibility, Softmax, Quantization, Placement)
    inputs = Call.check(query, key, value, visibility, quantization, placement).inputs
    inputs.sinks(softmax.sinks)
    out = query.new_empty((*inputs.query.shape[:3], value.shape[-1]))
    lse = query.new_empty(inputs.query.shape[:3], dtype=torch.float32)
    return inputs.restore(out), inputs.restore_lse(lse)


# ---- quantize


def _quantize(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, *rest: Any
) -> tuple[torch.Tensor, ...]:
    visibility, quantization, placement = _grouped(rest, Visibility, Quantization, Placement)
    call = Call.check(query, key, value, visibility, quantization, placement)
    with torch.autocast(query.device.type, enabled=False):
        qkv = call.quantized(call.masking(), scale_or_default(scale, query.shape[-1]))
    stored = {
        name: _rows_stored(x) if name in ("q_codes", "k_codes", "v_rows") else x.contiguous()
        for name, x in taken_apart(qkv)._asdict().items()
        if x is not None
    }
    if quantization.frozen and "v_mean" in stored:  # an op's outputs are no views of its inputs
        stored["v_mean"] = stored["v_mean"].clone()
    return _returned(Parts(*map(stored.get, Parts._fields)))  # type: ignore[arg-type]


def _quantize_fake(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, *rest: Any
) -> tuple[torch.Tensor, ...]:
    visibility, quantization, placement = _grouped(rest, Visibility, Quantization, Placement)
    call = Call.check(query, key, value, visibility, quantization, placement)
    qkv = call.quantized_empty(call.masking(), lambda shape, dtype: query.new_empty(shape, dtype=dtype))
    return _returned(taken_apart(qkv))


def _returned(parts: Parts) -> tuple[torch.Tensor, ...]:
    """An op returns tensors, and always as many: an absent part is one with a single dimension (see ``received``)."""
    return tuple(parts.q_scale.new_empty(0) if x is None else x for x in parts)


def received(tensors: Sequence[torch.Tensor]) -> Parts:
    """What the op ``quantize`` returned."""
    return Parts(*[None if x.dim() == 1 else x for x in tensors])  # type: ignore[arg-type]


def _rows_stored(codes: torch.Tensor) -> torch.Tensor:
    """Codes in rows that begin at multiples of 16 elements, as tensor descriptors want them, whoever wrote them."""
    *lead, head_dim = codes.shape
    if head_dim % 16 == 0 and codes.is_contiguous():
        return codes
    stored = codes.new_empty(*lead, _up_to_16(head_dim)).narrow(-1, 0, head_dim)
    return codes if codes.stride() == stored.stride() else stored.copy_(codes)


# ---- attention_quantized


def _attention_quantized(
    recipe: str, dtype: torch.dtype, backend: str, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    parts, visibility, softmax = _grouped(rest, Parts, Visibility, Softmax)
    problem = quantized_problem(assembled(parts, recipe_of(recipe), dtype), visibility, softmax)
    with torch.autocast(problem.qkv.q.device.type, enabled=False):
        return _attend(backend_for(problem.qkv, backend), problem)


def _attention_quantized_fake(
    recipe: str, dtype: torch.dtype, backend: str, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    parts, visibility, softmax = _grouped(rest, Parts, Visibility, Softmax)
    qkv = assembled(parts, recipe_of(recipe), dtype)
    inputs = Inputs.of_quantized(qkv)
    inputs.mask(visibility.attn_mask)
    inputs.sinks(softmax.sinks)
    backend_for(qkv, backend)
    return qkv.q.codes.new_empty(inputs.output_shape(), dtype=dtype), qkv.q.scale.new_empty(inputs.query.shape[:3])


def quantized_problem(qkv: QuantizedQKV, visibility: Visibility, softmax: Softmax) -> AttentionProblem:
    inputs = Inputs.of_quantized(qkv)
    masking = inputs.masking(*visibility)
    if qkv.keys_in_use is not None:
        masking = masking.without_keys(qkv.keys_in_use)
    scale = scale_or_default(softmax.scale, qkv.q.shape[-1])
    return AttentionProblem(qkv, masking, scale, softmax.softcap, inputs.sinks(softmax.sinks))


def backend_for(qkv: QuantizedQKV, name: str) -> Backend:
    return choose(name, qkv.q.device, qkv.recipe, qkv.q.shape[-1], qkv.v.shape[-1])


# ---- attention_varlen


class Packed(NamedTuple):
    """The op's arguments that ``attention`` has not; then come ``Softmax`` and ``Quantization``."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    is_causal: bool
    causal_alignment: str
    window: tuple[int, int]
    backend: str


def _attention_varlen(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    given, softmax, quantization = _grouped(arguments, Packed, Softmax, Quantization)
    call = _check_varlen(given, softmax, quantization)
    query, cu_seqlens = given.query, (given.cu_seqlens_q, given.cu_seqlens_k)
    packing = Packing(
        sequences("q", cu_seqlens[0], query.shape[0], given.max_seqlen_q, query.device),
        sequences("k", cu_seqlens[1], given.key.shape[0], given.max_seqlen_k, query.device),
    )
    check_as_many_sequences(*cu_seqlens)
    if call.backend.attend_packed is not None and query.numel() and packing.queries.count:
        rotary, inputs = quantization.rotary(), call.inputs
        _check_packed_rotary(inputs, rotary, given)
        with torch.autocast(query.device.type, enabled=False):
            made = call.backend.attend_packed(
                inputs.query, inputs.key, inputs.value, call.recipe, call.masking(), packing,
                scale=scale_or_default(softmax.scale, query.shape[-1]), smoothing=call.smoothing(), rotary=rotary,
                softcap=softmax.softcap, sinks=inputs.sinks(softmax.sinks),
            )  # fmt: skip
        if made is not None:
            return made
    return _attention_one_by_one(given, call, (*softmax, *quantization))


def _attention_one_by_one(
    given: Packed, call: Call, softmax_and_quantization: tuple[Any, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a packed batch, every sequence by itself: this waits for the device to know them."""
    starts_q = starts("cu_seqlens_q", given.cu_seqlens_q, given.query.shape[0])
    starts_k = starts("cu_seqlens_k", given.cu_seqlens_k, given.key.shape[0])
    rest = (*call.visibility, *softmax_and_quantization, True, "bshd", given.backend)
    out = given.query.new_zeros(call.inputs.output_shape()[1:])
    lse = given.query.new_full((out.shape[1], out.shape[0]), -torch.inf, dtype=torch.float32)
    for n in range(len(starts_q) - 1):
        rows, keys = slice(starts_q[n], starts_q[n + 1]), slice(starts_k[n], starts_k[n + 1])
        part, part_lse = _attention(given.query[None, rows], given.key[None, keys], given.value[None, keys], *rest)
        out[rows], lse[:, rows] = part[0], part_lse[0]
    return out, lse


def _attention_varlen_fake(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    given, softmax, quantization = _grouped(arguments, Packed, Softmax, Quantization)
    inputs = _check_varlen(given, softmax, quantization).inputs
    check_as_many_sequences(given.cu_seqlens_q, given.cu_seqlens_k)
    out = given.query.new_empty(inputs.output_shape()[1:])
    return out, given.query.new_empty((out.shape[1], out.shape[0]), dtype=torch.float32)


def _check_varlen(given: Packed, softmax: Softmax, quantization: Quantization) -> Call:
    """Checks all tokens as one sequence."""
    for name, x in (("query", given.query), ("key", given.key), ("value", given.value)):
        if x.dim() != 3:
            raise ValueError(f"{name} must have 3 dimensions (tokens, heads, head_dim), got shape {tuple(x.shape)}")
    visibility = Visibility(None, given.is_causal, given.causal_alignment, given.window)
    # All tokens together have positions that no sequence has: those are checked when it is run.
    unturned = quantization._replace(rotary_cos=None, rotary_sin=None)
    call = Call.check(
        given.query.unsqueeze(0), given.key.unsqueeze(0), given.value.unsqueeze(0), visibility, unturned,
        Placement(True, "bshd", given.backend),
    )  # fmt: skip
    call.inputs.sinks(softmax.sinks)
    return call


def _check_packed_rotary(inputs: Inputs, rotary: Rotary | None, given: Packed) -> None:
    """Whether the tables reach every position, where ``cu_seqlens`` lie on the host; else what shapes can tell."""
    if rotary is None:
        return
    inputs.cut(0, 0).check_rotary(rotary, given.causal_alignment)
    if given.cu_seqlens_q.device.type == given.cu_seqlens_k.device.type == "cpu":
        lengths = (cu_seqlens.diff().tolist() for cu_seqlens in (given.cu_seqlens_q, given.cu_seqlens_k))
        for seqlen_q, seqlen_k in zip(*lengths, strict=True):
            inputs.cut(seqlen_q, seqlen_k).check_rotary(rotary, given.causal_alignment)


# ---- registration

_LIBRARY = torch.library.Library("fp8attn", "FRAGMENT")


def _untraced(run: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compiler.disable`` without its import, which takes seconds, for those who do not compile.

    Where Dynamo gives a frame up it goes on to trace what the frame calls, which would be the kernels' own Python.
    """
    disabled: Callable[..., Any] | None = None

    def call(*arguments: Any) -> Any:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:
            return run(*arguments)
        if disabled is None:
            disabled = torch.compiler.disable(run)
        return disabled(*arguments)

    return call


def _register(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, _untraced(run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"fp8attn::{name}", fake, lib=_LIBRARY)


_register(
    f"attention({_QKV}, {_VISIBILITY}, {_SOFTMAX}, {_QUANTIZATION}, {_PLACEMENT}) -> (Tensor, Tensor)",
    _attention,
    _attention_fake,
)
_register(
    f"quantize({_QKV}, float? scale, {_VISIBILITY}, {_QUANTIZATION}, {_PLACEMENT}) -> "
    f"({', '.join(['Tensor'] * len(Parts._fields))})",
    _quantize,
    _quantize_fake,
)
_register(
    f"attention_quantized(str recipe, ScalarType dtype, str backend, {_PARTS}, {_VISIBILITY}, {_SOFTMAX}) -> "
    "(Tensor, Tensor)",
    _attention_quantized,
    _attention_quantized_fake,
)
_register(
    f"attention_varlen({_QKV}, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt? max_seqlen_q, SymInt? max_seqlen_k, "
    f"bool is_causal, str causal_alignment, SymInt[] window, str backend, {_SOFTMAX}, {_QUANTIZATION}) -> "
    "(Tensor, Tensor)",
    _attention_varlen,
    _attention_varlen_fake,
)
