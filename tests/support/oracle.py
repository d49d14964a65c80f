"""What attention should be, and how near a kernel must come: shared by the tests that hold backends to the contract.

What is right comes from attention in float64, written here from the definition: on the values that the codes stand for,
with the softmax's weights rounded once as the contract says (``on_codes``), which a kernel must meet closely; and where
the fault is one of quantization, on the original values (``attention64``), from which FP8 may be as far as FP8 is.

A tensor core truncates FP8 products within a tile. What that costs depends on the inputs (long rows of one sign lose
most), so there the yardstick is its model, which the reference has.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch

import fp8attn
from fp8attn import QuantizedQKV, Recipe
from fp8attn.formats import get_format

INF, NAN = math.inf, math.nan
PLAIN = Recipe(rotate="none", balance="none", smooth_k=False)
ROTATED = Recipe(balance="none", smooth_k=False)  # without statistics, which take the interpreter a second a time

# The contract's limits, relative Frobenius errors. SCHEDULE: P's subnormal tail, whatever the tiles. EXACT_SUMS: what a
# tensor core's truncation costs. MODEL: against a model that truncates bit for bit alike, for weights that the last bit
# tips over a rounding boundary, edge tiles (the model walks whole ones) and sums of weights in FP16 (2^-12 each time).
SCHEDULE, EXACT_SUMS, MODEL = 3e-4, 8e-3, 2e-3

Answer = tuple[torch.Tensor, torch.Tensor]  # out, lse


@dataclass(frozen=True)
class Where:
    """A backend and a device: interpreted kernels get small sizes, a GPU the ones that were reported."""

    backend: str
    device: str

    @property
    def truncates(self) -> bool:
        return self.device == "cuda" and self.backend != "reference"

    @property
    def limit(self) -> float:
        """The contract's relative Frobenius error against exact sums, of ordinary inputs."""
        return EXACT_SUMS if self.truncates else SCHEDULE

    def pick(self, small: Any, large: Any) -> Any:
        """``small`` on a CPU, ``large`` on a GPU."""
        return large if self.device == "cuda" else small

    def randn(self, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(self.device, dtype)

    def qkv(self, batch: int, heads: int, kv_heads: int, seqlen_q: int, seqlen_k: int, head_dim: int, **options: Any):  # type: ignore[no-untyped-def]
        """q, k and v from N(0, 1)."""
        seed, head_dim_v = options.pop("seed", 0), options.pop("head_dim_v", head_dim)
        return (
            self.randn(batch, heads, seqlen_q, head_dim, seed=3 * seed, **options),
            self.randn(batch, kv_heads, seqlen_k, head_dim, seed=3 * seed + 1, **options),
            self.randn(batch, kv_heads, seqlen_k, head_dim_v, seed=3 * seed + 2, **options),
        )

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, recipe: str | Recipe | None = None, **options: Any
    ) -> tuple[QuantizedQKV, torch.Tensor, torch.Tensor]:
        """Quantize, attend: (codes, out, lse)."""
        recipe = self.pick(PLAIN, "default") if recipe is None else recipe
        seen = ("attn_mask", "is_causal", "causal_alignment", "window", "scale")
        known = {name: options[name] for name in seen if name in options}
        qkv = fp8attn.quantize(q, k, v, recipe, backend=self.backend, **known)
        return (qkv, *fp8attn.attention_quantized(qkv, return_lse=True, backend=self.backend, **options))


# ---- what is right


def visible_by_position(
    seqlen_q: int,
    seqlen_k: int,
    is_causal: bool,
    causal_alignment: str,
    window: tuple[int, int] | None,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    diagonal = seqlen_k - seqlen_q if causal_alignment == "bottom_right" else 0
    offset = torch.arange(seqlen_k, device=device) - (torch.arange(seqlen_q, device=device) + diagonal)[:, None]
    visible = torch.ones_like(offset, dtype=torch.bool)
    if is_causal:
        visible &= offset <= 0
    left, right = window or (-1, -1)
    if left >= 0:
        visible &= offset >= -left
    if right >= 0:
        visible &= offset <= right
    return visible


# A format's fraction bits, and the exponent of its smallest normal number.
FLOATS = {"e4m3": (3, -6), "e5m2": (2, -14), "fp16": (10, -14), "bf16": (7, -126)}


def rounded(x: torch.Tensor, fmt: str) -> torch.Tensor:
    """FP32 values of at most 256 to the nearest of a format, ties to even; float64, on any device."""
    bits, least = FLOATS[fmt]
    x = x.float().double()
    step = torch.ldexp(torch.ones_like(x), (torch.frexp(x).exponent - 1).clamp(min=least) - bits)
    return (x / step).round() * step


def attention64(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *,
    is_causal: bool = False,
    causal_alignment: str = "top_left",
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    shift: torch.Tensor | float = 0.0,
    v_mean: torch.Tensor | None = None,
    p_format: str | None = None,
) -> Answer:
    """Attention in float64 from its definition, where the inputs are: (out, lse).

    ``shift`` (B, Hq, Sq, 1) is added to a row's logits. With ``p_format`` the weights 2^(S - m + 8) are rounded to
    it, m being the row's largest logit rounded up, and the sum is that of the rounded weights: the contract's step 4
    (m does not know the shift, unless a softcap has to).
    Keys and values of a key that no row sees do not matter.
    """
    q, k, v = (x.detach().double() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh((s + shift) / softcap)
        shift = 0.0
    visible = visible_by_position(q.shape[2], k.shape[2], is_causal, causal_alignment, window, q.device).expand(s.shape)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        visible = visible & attn_mask
    elif attn_mask is not None:
        visible = visible & (attn_mask > -INF)
        s = s + attn_mask.double()
    s = s.masked_fill(~visible, -INF) * math.log2(math.e)
    m = s.amax(dim=-1, keepdim=True).clamp(min=-1e300).ceil() if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -1e300)
    p = torch.exp2(s - m + 8)
    if p_format is not None:
        p = rounded(p, p_format)
    v = torch.where(visible.any(dim=-2)[..., None], v, 0.0)  # 0 * NaN
    keys = p.sum(dim=-1, keepdim=True)
    lse = ((m + keys.log2() - 8) * math.log(2) + shift)[..., 0]
    out = p @ v / torch.where(keys == 0, 1.0, keys)
    if v_mean is not None:
        out = out + torch.where(keys == 0, 0.0, v_mean.double().repeat_interleave(group, dim=1))
    if sinks is not None:
        with_sink = torch.logaddexp(lse, sinks.double()[:, None])
        out = out * (lse - with_sink).exp().nan_to_num()[..., None]
        lse = with_sink
    return out, lse


def on_codes(qkv: QuantizedQKV, **options: Any) -> Answer:
    """What a kernel must return for the codes, if values do not have a scale each: those are rounded otherwise."""
    scale = options.get("scale")
    scale = qkv.q.shape[-1] ** -0.5 if scale is None else scale
    shift = 0.0 if qkv.logit_shift is None else scale * qkv.logit_shift.double()[..., None]
    if qkv.keys_in_use is not None:
        hidden = torch.where(qkv.keys_in_use, 0.0, -INF)[:, None, None, :]
        mask = options.get("attn_mask")
        if mask is not None:
            hidden = hidden + (torch.where(mask, 0.0, -INF) if mask.dtype == torch.bool else mask)
        options["attn_mask"] = hidden
    values = (x.dequantize() for x in (qkv.q, qkv.k, qkv.v))
    return attention64(*values, **options, shift=shift, v_mean=qkv.v_mean, p_format=qkv.recipe.p_format)


# ---- how near


def with_accumulation(qkv: QuantizedQKV, accumulation: str) -> QuantizedQKV:
    """The same codes, to be summed in another way by the reference, in FP32."""
    return dataclasses.replace(qkv, recipe=qkv.recipe.replace(accumulation=accumulation), dtype=torch.float32)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert torch.equal(actual.isnan(), expected.isnan())
    actual, expected = actual.double().nan_to_num(), expected.double().nan_to_num()
    return ((actual - expected).norm() / expected.norm().clamp(min=1e-300)).item()


def assert_agrees(
    actual: Answer,
    expected: Answer,
    limit: float,
    *,
    p_format: str,
    lse_limit: torch.Tensor | None = None,
    narrow: float = 0.0,
    last_bit: float = 1e-6,
    tight: bool = False,
) -> None:
    """Outputs within ``limit`` of each other, and a row's lse, a logarithm of what outputs are divided by, as near.

    A weight that lies on a rounding boundary to within FP32's error of its logit is rounded the other way: that error
    is about 2^-22, a step 2^-3 to 2^-10 of the weight, so it is one weight in ten thousand or fewer. Its row differs by
    at most a step of the weights, and so does the sum of weights in its lse. In an lse it always shows; in the
    Frobenius norm of all outputs only where the limit is ``tight``.

    ``narrow``: what the output's own format rounds by. ``last_bit``: FP32's rounding, of an lse.
    """
    (out, lse), (expected_out, expected_lse) = actual, expected
    assert torch.equal(out.isnan(), expected_out.isnan())
    lse, expected_lse = lse.double(), expected_lse.double()
    finite = expected_lse.isfinite()
    assert torch.equal(lse[~finite].nan_to_num(nan=7.0), expected_lse[~finite].nan_to_num(nan=7.0))
    errors = (out.double() - expected_out.double()).nan_to_num().norm(dim=-1)
    sizes = expected_out.double().nan_to_num().norm(dim=-1)
    lse_errors = torch.where(finite, (lse - expected_lse).abs(), 0.0)
    lse_limits = (limit if lse_limit is None else lse_limit) + last_bit * expected_lse.abs().nan_to_num()
    tipped = lse_errors > lse_limits
    if tight:
        tipped |= errors > limit * sizes
    step = get_format(p_format).eps
    assert tipped.sum() <= 1 + tipped.numel() // 100, f"{int(tipped.sum())} of {tipped.numel()} rows differ"
    assert (lse_errors <= lse_limits + step).all()
    if tight:
        assert (errors <= 4 * step * sizes)[tipped].all()
        errors = errors[~tipped]
    assert errors.norm() <= (limit + narrow) * sizes.norm()


def assert_agrees_with_tensor_core(
    actual: Answer, model: Answer, sums: Answer, exact: Answer, *, noise: float = 0.0, **options: Any
) -> None:
    """Within MODEL of the tensor core's model, or of exact sums (a head dim in several products loses less); and of
    what is right, within EXACT_SUMS or the model's own loss.

    The loss is what tells ``model`` from ``sums``, the same reference with exact sums: no fault of the reference passes
    for one. By the triangle inequality |actual - exact| <= |actual - model| + |model - sums| + |sums - exact|,
    whose last is SCHEDULE: outputs as a whole, and an lse row by row.
    """

    def distance(answer: Answer) -> float:  # an lse may tell them apart where outputs do not
        return relative_error(actual[0], answer[0]) + (actual[1] - answer[1]).double().abs().nan_to_num().mean().item()

    nearest = min(model, sums, key=distance)
    assert_agrees(actual, nearest, MODEL + noise, **options)
    near = MODEL + SCHEDULE
    limit = max(EXACT_SUMS, relative_error(model[0], sums[0]) + near)
    lse_limit = ((model[1] - sums[1]).double().abs().nan_to_num() + near).clamp(min=EXACT_SUMS)
    assert_agrees(actual, exact, limit + noise, lse_limit=lse_limit + noise, **options)


def assert_right(
    where: Where,
    qkv: QuantizedQKV,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    largest_logit: float = 0.0,
    tail: float = 0.0,
    **options: Any,
) -> Answer:
    """``out`` and ``lse`` are those of the codes; returns what they should be.

    Above the contract's limits, FP32 logits of ``largest_logit`` are off by an ulp or two of it, 2^-22, and an output
    in 16 bits by its own rounding. ``tail``: what weights among P's subnormal numbers are off by where keys are split,
    each part with a largest weight of its own.
    """
    expected = on_codes(qkv, **options)
    noise = 2.0**-22 * largest_logit + tail
    tolerances: dict[str, Any] = {
        "p_format": qkv.recipe.p_format,
        "narrow": {torch.float32: 0.0, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}[out.dtype],
    }
    assert out.isfinite().all()
    if where.truncates:
        model, sums = (
            fp8attn.attention_quantized(codes, return_lse=True, backend="reference", **options)
            for codes in (with_accumulation(qkv, name) for name in ("tensor_core_two_level", "fp32"))
        )
        assert_agrees_with_tensor_core((out, lse), model, sums, expected, noise=noise, **tolerances)
    else:
        assert_agrees((out, lse), expected, SCHEDULE + noise, **tolerances)
    assert (out[expected[1] == -INF] == 0).all()
    return expected
