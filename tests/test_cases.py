"""Inputs that broke other attention libraries, against every backend.

Each test stands for a kind of fault that was seen elsewhere, and its inputs are a small family around the one reported.
What is right comes from attention in float64, written here from the definition: on the values that the codes stand for,
with the softmax's weights rounded once as the contract says (``on_codes``), which a kernel must meet closely; and where
the fault is one of quantization, on the original values (``attention64``), from which FP8 may be as far as FP8 is.

Interpreted kernels get small sizes, a GPU the reported ones.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import fp8attn
from fp8attn import QuantizedQKV, Recipe
from fp8attn.formats import get_format
from fp8attn.scaling import quantize_tensor

INF, NAN = math.inf, math.nan
PLAIN = Recipe(rotate="none", balance="none", smooth_k=False)
ROTATED = Recipe(balance="none", smooth_k=False)  # without statistics, which take the interpreter a second a time


@dataclass(frozen=True)
class Where:
    """A backend and a device.

    ``limit`` is the relative Frobenius error against exact sums that the contract allows: 3e-4 whatever the tiles,
    which is P's subnormal tail, and 8e-3 where a tensor core truncates within a tile.
    """

    backend: str
    device: str

    @property
    def limit(self) -> float:
        return 8e-3 if self.device == "cuda" and self.backend != "reference" else 3e-4

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


@pytest.fixture(
    params=[
        pytest.param(Where("reference", "cpu"), id="reference"),
        pytest.param(
            Where("triton", "cpu"),
            id="triton",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles where there is a GPU"),
        ),
        pytest.param(Where("reference", "cuda"), id="reference-gpu", marks=pytest.mark.gpu),
        pytest.param(Where("triton", "cuda"), id="triton-gpu", marks=pytest.mark.gpu),
    ]
)
def where(request: pytest.FixtureRequest) -> Where:
    found: Where = request.param
    return found


# ---- what is right


def visible_by_position(
    seqlen_q: int, seqlen_k: int, is_causal: bool, causal_alignment: str, window: tuple[int, int] | None
) -> torch.Tensor:
    diagonal = seqlen_k - seqlen_q if causal_alignment == "bottom_right" else 0
    offset = torch.arange(seqlen_k) - (torch.arange(seqlen_q) + diagonal)[:, None]
    visible = torch.ones_like(offset, dtype=torch.bool)
    if is_causal:
        visible &= offset <= 0
    left, right = window or (-1, -1)
    if left >= 0:
        visible &= offset >= -left
    if right >= 0:
        visible &= offset <= right
    return visible


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float64 from its definition, on the CPU: (out, lse).

    ``shift`` (B, Hq, Sq, 1) is added to a row's logits. With ``p_format`` the weights 2^(S - m + 8) are rounded to
    it, m being the row's largest logit rounded up, and the sum is that of the rounded weights: the contract's step 4
    (m does not know the shift, unless a softcap has to).
    Keys and values of a key that no row sees do not matter.
    """
    q, k, v = (x.detach().cpu().double() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh((s + shift) / softcap)
        shift = 0.0
    visible = visible_by_position(q.shape[2], k.shape[2], is_causal, causal_alignment, window).expand(s.shape)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        visible = visible & attn_mask.cpu()
    elif attn_mask is not None:
        visible = visible & (attn_mask.cpu() > -INF)
        s = s + attn_mask.cpu().double()
    s = s.masked_fill(~visible, -INF) * math.log2(math.e)
    m = s.amax(dim=-1, keepdim=True).clamp(min=-1e300).ceil() if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -1e300)
    p = torch.exp2(s - m + 8)
    if p_format is not None:
        narrow = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "fp16": np.float16}
        as_numpy = p.numpy().astype(np.float32).astype(narrow.get(p_format, ml_dtypes.bfloat16))
        p = torch.from_numpy(as_numpy.astype(np.float64))
    v = torch.where(visible.any(dim=-2)[..., None], v, 0.0)  # 0 * NaN
    keys = p.sum(dim=-1, keepdim=True)
    lse = ((m + keys.log2() - 8) * math.log(2) + shift)[..., 0]
    out = p @ v / torch.where(keys == 0, 1.0, keys)
    if v_mean is not None:
        out = out + torch.where(keys == 0, 0.0, v_mean.cpu().double().repeat_interleave(group, dim=1))
    if sinks is not None:
        with_sink = torch.logaddexp(lse, sinks.cpu().double()[:, None])
        out = out * (lse - with_sink).exp().nan_to_num()[..., None]
        lse = with_sink
    return out, lse


def on_codes(qkv: QuantizedQKV, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What a kernel must return for the codes, if values do not have a scale each: those are rounded otherwise."""
    scale = options.get("scale")
    scale = qkv.q.shape[-1] ** -0.5 if scale is None else scale
    shift = 0.0 if qkv.logit_shift is None else scale * qkv.logit_shift.cpu().double()[..., None]
    if qkv.keys_in_use is not None:
        hidden = torch.where(qkv.keys_in_use, 0.0, -INF)[:, None, None, :]
        mask = options.get("attn_mask")
        if mask is not None:
            hidden = hidden + (torch.where(mask, 0.0, -INF) if mask.dtype == torch.bool else mask)
        options["attn_mask"] = hidden
    values = (x.dequantize() for x in (qkv.q, qkv.k, qkv.v))
    return attention64(*values, **options, shift=shift, v_mean=qkv.v_mean, p_format=qkv.recipe.p_format)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = actual.cpu().double(), expected.cpu().double()
    return ((actual - expected).norm() / expected.norm().clamp(min=1e-300)).item()


def assert_right(
    where: Where, qkv: QuantizedQKV, out: torch.Tensor, lse: torch.Tensor, *, largest_logit: float = 0.0, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """``out`` and ``lse`` are those of the codes; returns what they should be.

    Above the contract's limit, FP32 logits of ``largest_logit`` are off by an ulp or two of it, 2^-22, and an output
    in 16 bits by its own rounding.
    """
    expected, expected_lse = on_codes(qkv, **options)
    limit = where.limit + 2.0**-22 * largest_logit
    narrow = {torch.float32: 0.0, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}[out.dtype]
    assert out.isfinite().all()
    assert relative_error(out, expected) <= limit + narrow
    lse, finite = lse.cpu().double(), expected_lse.isfinite()
    assert torch.equal(lse[~finite], expected_lse[~finite])
    errors = (lse - expected_lse)[finite].abs()
    tipped = errors > limit + 1e-6 * expected_lse[finite].abs()
    # FP32's last bit may tip a weight over a rounding boundary, by a whole step: hardly ever
    assert tipped.sum() <= 1 + tipped.numel() // 100
    assert (errors[tipped] <= get_format(qkv.recipe.p_format).eps).all()
    assert (out.cpu()[expected_lse == -INF] == 0).all()
    return expected, expected_lse


# ---- masks and limits


@pytest.mark.parametrize("depth", [6e4, 2.2e6])
@pytest.mark.parametrize("recipe", ["per_tensor", "fa3_paper", "causal_safe"])
def test_logits_far_below_any_mask_constant(where: Where, recipe: str, depth: float) -> None:
    """A kernel that hides keys with a finite constant (-5e4) hides every key whose logit is lower: rows of zeros.

    Seen in flashinfer. Queries and keys point in opposite directions and are long.
    """
    direction = where.randn(128, seed=1) / 128**0.5
    along = torch.linspace(0, 4, where.pick(3, 300), device=where.device)[:, None]
    length = math.sqrt(depth * 128**0.5)
    q = (-length * direction).expand(1, 4, 1, 128)
    k = (length + along * 128**0.5 / length) * direction
    v = where.randn(1, 1, len(along), 16)
    exact = Recipe.from_name(recipe).replace(p_format="fp16", v_scale="channel")
    qkv, out, lse = where.run(q, k[None, None], v, exact)
    # on a GPU the tensor core drops what is below 2^-13 of a product's largest term: a lse is off by as much
    largest = depth * (2.0**9 if where.limit > 1e-3 else 1.0)
    _, expected_lse = assert_right(where, qkv, out, lse, largest_logit=largest)
    assert (expected_lse < -5e4).all() and (lse < -5e4).all()


LEAST = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("kind", ["bool", "-inf", *LEAST], ids=str)
@pytest.mark.parametrize("rows", ["the last", "all"])
def test_rows_that_a_mask_hides_whole(where: Where, kind: str | torch.dtype, rows: str) -> None:
    """A row without a key is 0/0. -inf and False hide: 0 and -inf. The least finite number does not: the mean of V.

    Seen in PyTorch, whose backends disagreed.
    """
    seqlen_q, seqlen_k = where.pick((6, 10), (200, 300))
    hidden = torch.zeros(seqlen_q, dtype=torch.bool, device=where.device)
    hidden[slice(-1, None) if rows == "the last" else slice(None)] = True
    visible = ~hidden[:, None].expand(seqlen_q, seqlen_k)
    if kind == "bool":
        mask = visible
    else:
        dtype = kind if isinstance(kind, torch.dtype) else torch.float32
        mask = torch.zeros(visible.shape, dtype=dtype, device=where.device)
        mask = mask.masked_fill(~visible, -INF if kind == "-inf" else torch.finfo(dtype).min)
    qkv, out, lse = where.run(*where.qkv(1, 2, 1, seqlen_q, seqlen_k, 64), attn_mask=mask)
    if isinstance(kind, torch.dtype):
        mean = qkv.v.dequantize().mean(dim=2, keepdim=True).expand(out.shape)
        flat = kind != torch.float16  # -65504 leaves FP32 some bits for the logits
        if flat:
            assert relative_error(out[:, :, hidden], mean[:, :, hidden]) <= where.limit
        assert out.isfinite().all() and lse.isfinite().all()
        assert (lse[:, :, hidden] < -6e4).all()
    else:
        assert_right(where, qkv, out, lse, attn_mask=mask)
        sinks = torch.tensor([-1.0, 2.0], device=where.device)
        _, out, lse = where.run(*where.qkv(1, 2, 1, seqlen_q, seqlen_k, 64), attn_mask=mask, sinks=sinks)
        assert_right(where, qkv, out, lse, attn_mask=mask, sinks=sinks)
        assert (lse[:, :, hidden] == sinks[:, None]).all()


@pytest.mark.parametrize("hide", ["mask", "causal", "window"])
def test_what_no_query_sees_may_hold_anything(where: Where, hide: str) -> None:
    """0 * NaN: an unused slot of a cache, or padding, that reaches a product. Seen in flash-attention, flashinfer."""
    seqlen, rows = where.pick(40, 700), 9
    q, k, v = where.qkv(2, 2, 1, rows, seqlen, 16)
    index = torch.arange(seqlen, device=where.device)
    options: dict[str, Any] = {"is_causal": True}
    if hide == "mask":
        mask = index < torch.tensor(where.pick((30, 13), (500, 13)), device=where.device)[:, None]
        unused, options = ~mask, {"attn_mask": mask[:, None, None]}
    elif hide == "causal":
        unused = (index >= rows).expand(2, -1)
    else:  # the last queries look back a little
        unused, options = (index < seqlen - 12).expand(2, -1), {"causal_alignment": "bottom_right", "window": (3, 0)}
    dirty = [torch.where(unused[:, None, :, None], filler, x) for filler, x in ((NAN, k), (INF, v))]
    run: dict[str, Any] = {**options, "enable_gqa": True, "backend": where.backend, "return_lse": True}
    for recipe in where.pick(["default" if hide == "mask" else "causal_safe"], ["default", "causal_safe"]):
        clean, dirtied = (fp8attn.attention(q, *kv, recipe=recipe, **run) for kv in ((k, v), dirty))
        assert clean[0].isfinite().all()
        assert torch.equal(clean[0], dirtied[0]) and torch.equal(clean[1], dirtied[1])
    # a value quantized with the mask keeps those keys hidden without it
    qkv = fp8attn.quantize(q, *dirty, PLAIN, backend=where.backend, **options)
    assert fp8attn.attention_quantized(qkv, backend=where.backend).isfinite().all()


@pytest.mark.parametrize("k_scale", ["token", "block:16"])
def test_codes_and_scales_of_hidden_keys_may_be_nan(where: Where, k_scale: str) -> None:
    """Slots that were never written, after quantization: whole tiles, and the end of the last one.

    Their logits are hidden, not multiplied. (A NaN value is 0 * NaN under an explicit mask, as in PyTorch.)
    """
    seqlen, used = where.pick((150, 64), (1000, 320))
    mask = (torch.arange(seqlen, device=where.device) < used).view(1, 1, 1, -1)
    qkv, *expected = where.run(*where.qkv(1, 2, 1, 5, seqlen, 16), PLAIN.replace(k_scale=k_scale), attn_mask=mask)
    qkv.k.codes.view(torch.uint8)[:, :, used:] = 0x7F
    qkv.k.scale[:, :, used // qkv.k.granularity.size :] = NAN
    dirty = fp8attn.attention_quantized(qkv, mask, return_lse=True, backend=where.backend)
    assert expected[0].isfinite().all()
    assert torch.equal(dirty[0], expected[0]) and torch.equal(dirty[1], expected[1])


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(2, 5), (5, 2), (3, 128), (1, 129), (65, 33), (33, 65)])
def test_causal_where_lengths_differ(where: Where, seqlen_q: int, seqlen_k: int, alignment: str) -> None:
    """Two meanings of causal, taken for each other. Seen in flash-attention, cutlass."""
    seqlen_q, seqlen_k = where.pick((seqlen_q, seqlen_k), (seqlen_q * 7, seqlen_k * 7))
    options: dict[str, Any] = {"is_causal": True, "causal_alignment": alignment}
    qkv, out, lse = where.run(*where.qkv(1, 2, 1, seqlen_q, seqlen_k, 32), **options)
    assert_right(where, qkv, out, lse, **options)
    empty = max(0, seqlen_q - seqlen_k) if alignment == "bottom_right" else 0
    assert (lse[:, :, :empty] == -INF).all() and lse[:, :, empty:].isfinite().all()


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "window"),
    [
        *((10, 10, (width - 1, 0)) for width in (1, 2, 4)),
        *((66, 66, (width - 1, 0)) for width in (65, 66, 67)),
        (10, 10, (0, 3)), (40, 130, (63, 64)), (40, 130, (64, 63)), (97, 20, (8, 16)), (20, 97, (0, 0)),
    ],
)  # fmt: skip
def test_windows_are_inclusive(
    where: Where, seqlen_q: int, seqlen_k: int, window: tuple[int, int], alignment: str
) -> None:
    """Off by one at the left, and rows whose window holds no key. Seen in transformers, flash-attention."""
    factor = where.pick(1, 8)
    seqlen_q, seqlen_k = seqlen_q * factor, seqlen_k * factor
    left, right = window
    options: dict[str, Any] = {"window": (left * factor, right * factor), "causal_alignment": alignment}
    data = where.qkv(1, 1, 1, seqlen_q, seqlen_k, 32)
    qkv, out, lse = where.run(*data, **options)
    assert_right(where, qkv, out, lse, **options)
    if right == 0 and alignment == "top_left":  # a window of W tokens that ends at the query is causal's last W
        both = where.run(*data, **{**options, "window": (left * factor, -1), "is_causal": True})
        assert torch.equal(both[1], out) and torch.equal(both[2], lse)


# ---- packed sequences, and states


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "heads", "kv_heads", "head_dim"),
    [
        ([0, 0, 1, 1, 2], [0, 0, 3, 3, 8], 9, 3, 64),
        ([0, 0, 0, 0, 1], [0, 0, 0, 0, 1], 21, 7, 120),
        ([0, 0, 2, 2, 3], [0, 2, 2, 4, 7], 2, 1, 32),  # the second has queries and no keys, the third keys alone
        pytest.param([0, 0, 1208, 2048, 2048], [0, 5, 1300, 2200, 2210], 4, 4, 256, marks=pytest.mark.gpu),
    ],
)
def test_empty_sequences_of_a_packed_batch(
    where: Where, cu_q: list[int], cu_k: list[int], heads: int, kv_heads: int, head_dim: int
) -> None:
    """Fewer tokens than sequences, sequences without queries, keys, or both. Seen in flash-attention."""
    if max(cu_q) > 1000 and where.device == "cpu":
        pytest.skip("large: for a GPU")
    q, k, v = (x[0].transpose(0, 1) for x in where.qkv(1, heads, kv_heads, cu_q[-1], cu_k[-1], head_dim))
    cu = [torch.tensor(c, dtype=torch.int32, device=where.device) for c in (cu_q, cu_k)]
    run: dict[str, Any] = {"recipe": where.pick(ROTATED, "default"), "backend": where.backend}
    out, lse = fp8attn.attention_varlen(q, k, v, *cu, is_causal=True, return_lse=True, **run)
    assert out.shape == (cu_q[-1], heads, head_dim) and lse.shape == (heads, cu_q[-1])
    options: dict[str, Any] = {"is_causal": True, "causal_alignment": "bottom_right"}
    for n in range(len(cu_q) - 1):
        rows, keys = slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n + 1])
        if rows.start == rows.stop:
            continue
        if keys.start == keys.stop:
            assert (out[rows] == 0).all() and (lse[:, rows] == -INF).all()
            continue
        alone = (q[None, rows].transpose(1, 2), k[None, keys].transpose(1, 2), v[None, keys].transpose(1, 2))
        qkv = fp8attn.quantize(*alone, **run, **options)
        assert_right(where, qkv, out[None, rows].transpose(1, 2), lse[None, :, rows], **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_merging_states_of_which_some_are_empty(where: Where, dtype: torch.dtype) -> None:
    """-inf - -inf: parts of the keys of which some rows, or all, see nothing. Seen in vllm, flashinfer.

    Merged in an order that starts with an empty part, and with no other.
    """
    seqlen, cuts = where.pick((48, [0, 16, 16, 32, 48]), (700, [0, 256, 256, 512, 700]))
    q, k, v = where.qkv(1, 2, 1, seqlen, seqlen, 64, dtype=dtype)
    whole, whole_lse = attention64(q, k, v, is_causal=True)
    mixed, parts = ROTATED.replace(q_format="fp16", p_format="fp16"), []
    for start, stop in itertools.pairwise(cuts):
        visible = torch.ones(seqlen, stop - start, dtype=torch.bool, device=where.device).tril(-start)
        parts.append(
            fp8attn.attention(
                q, k[:, :, start:stop], v[:, :, start:stop], visible,
                enable_gqa=True, return_lse=True, backend=where.backend, recipe=mixed,
            )
        )  # fmt: skip
    assert (parts[2][1][:, :, 0] == -INF).all()
    out, lse = fp8attn.merge_states(*zip(*parts[::-1], strict=True))
    assert out.isfinite().all() and lse.isfinite().all()
    # K and V in FP8 with weights in FP16: half of FP8's relative step, 2^-4 / sqrt(3) a value, in K and in V
    assert relative_error(out, whole) < 2 * 2**-4 / 3**0.5
    # a logit is a sum of 64 products, each off by that: q.k / 8 by 2^-4 / sqrt(3) of its size, 5 times that at most
    assert ((lse.cpu() - whole_lse).abs() < 5 * 2**-4 / 3**0.5).all()
    none, none_lse = fp8attn.merge_states([parts[1][0]] * 2, [parts[1][1]] * 2)
    assert (none == 0).all() and (none_lse == -INF).all()


# ---- numbers


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("seqlen_q", [1, 128])
def test_a_needle_in_a_long_context(depth: float, seqlen_q: int) -> None:
    """An accumulator of less than FP32 loses small addends to a large sum, and a needle among 131,072 keys with it.

    Seen on Hopper in vllm, where it also depended on how many heads a GPU had: here one head alone is one of eight.
    """
    where, errors = Where("triton", "cuda"), []
    for seqlen_k in (8192, 131_072):
        q, k, v = where.qkv(1, 8, 1, seqlen_q, seqlen_k, 128)
        v = 1 + 0.1 * v
        needle = int(depth * seqlen_k)
        q = q * 0.1 + 1.0
        k = k * 0.1
        k[:, :, needle] = 0.5 * math.log(seqlen_k) / 128**0.5 / 0.5  # a logit of ln(Sk): half of the weight
        v[:, :, needle] = -3.0
        qkv, out, lse = where.run(q, k, v, PLAIN)
        expected, _ = assert_right(where, qkv, out, lse)
        errors.append(relative_error(out, expected))
        alone = where.run(q[:, :1], k, v, PLAIN)[1]
        assert relative_error(alone, out[:, :1]) <= where.limit
    assert errors[1] <= 2 * errors[0] + 1e-3  # flat in the number of keys


@pytest.mark.parametrize("recipe", ["per_tensor", "fa3"])
def test_e4m3_is_twice_as_good_as_e5m2(where: Where, recipe: str) -> None:
    """A path that rounds twice, or in the wrong format, loses E4M3's one more bit. Seen in flash-attention."""
    shape = where.pick((1, 4, 2, 64, 96, 64), (2, 32, 2, 512, 2048, 128))
    data = where.qkv(*shape)
    exact, _ = attention64(*data)
    errors = {}
    for fmt in ("e4m3", "e5m2"):
        formats = {f"{x}_format": fmt for x in "qkvp"}
        qkv, out, _ = where.run(*data, Recipe.from_name(recipe).replace(**formats))
        errors[fmt] = relative_error(out, exact)
        # the same pipeline in float64 is as far off: errors add up in squares, so the limit hardly shows
        assert errors[fmt] == pytest.approx(relative_error(on_codes(qkv)[0], exact), rel=0.05)
    # a step of E5M2 is twice as long; the 10% are for the sample
    assert errors["e4m3"] == pytest.approx(errors["e5m2"] / 2, rel=0.1)


def test_zeros_stay_zeros_and_touch_no_neighbour(where: Where) -> None:
    """A block of zeros has no largest value to scale by: 0/0. Seen in aiter, torchao."""
    size, block = where.pick((64, 32), (256, 128))
    q, k, v = where.qkv(1, 1, 1, size, size, size)
    k[:, :, block:] = 0
    k[..., block:] = 0  # one non-zero tile
    v[..., 0] = 0
    recipe = PLAIN.replace(k_scale=f"block:{block}", q_scale=f"block:{block}")
    qkv, out, lse = where.run(q, k, v, recipe)
    assert_right(where, qkv, out, lse)
    for part, x in ((qkv.k, k), (qkv.v, v)):
        assert part.scale.isfinite().all() and (part.scale > 0).all()
        values = part.dequantize()
        assert (values[x == 0] == 0).all()
        # half a step of E4M3: 2^-4 of a value, or of its smallest normal under the scale
        assert ((values - x).abs() <= x.abs() / 16 + part.expanded_scale() * 2**-10).all()
    assert (out[..., 0] == 0).all()


@pytest.mark.parametrize("recipe", ["default", "per_tensor", "causal_safe"])
def test_keys_that_are_all_zero_weigh_alike(where: Where, recipe: str) -> None:
    """A scale of 0 and its 0/0 again: every score is 0, so the answer is the mean value and the log of the length."""
    seqlen = where.pick(50, 1000)
    q, k, v = where.qkv(1, 2, 2, 3, seqlen, 64)
    qkv, out, lse = where.run(q, torch.zeros_like(k), v, recipe)
    assert (qkv.k.dequantize() == 0).all() and (qkv.k.scale > 0).all()
    # weights of 2^8 have no rounding error, but for values with a scale each, whose products with them have FP8's
    mean, own_scales = qkv.v.dequantize().mean(dim=2, keepdim=True), recipe in ("causal_safe", "fa3_paper")
    assert relative_error(out, mean.expand(out.shape)) <= (2**-4 if own_scales else where.limit)
    assert ((lse - math.log(seqlen)).abs() <= (2**-4 if own_scales else where.limit)).all()


@pytest.mark.parametrize(("seqlen", "head_dim"), [(13, 13), (1, 13), (33, 24)])
@pytest.mark.parametrize("granularity", ["token", "block:16", "head", "tensor"])
def test_padding_is_no_part_of_a_largest_value(where: Where, seqlen: int, head_dim: int, granularity: str) -> None:
    """Lanes beyond a row's or a sequence's end, read for a scale. Seen in aiter.

    Around the tensors, in the same memory, lies what would be far the largest.
    """

    def framed(x: torch.Tensor) -> torch.Tensor:
        frame = torch.full((*x.shape[:2], x.shape[2] + 64, x.shape[3] + 64), 1e30, device=x.device)
        inside = frame[:, :, 32 : 32 + x.shape[2], 32 : 32 + x.shape[3]]
        return inside.copy_(x)

    recipe = PLAIN.replace(q_scale=granularity, k_scale=granularity)
    data = where.qkv(1, 2, 1, seqlen, seqlen, head_dim)
    qkv, out, lse = where.run(*(framed(x) for x in data), recipe)
    for part, x in ((qkv.q, data[0]), (qkv.k, data[1]), (qkv.v, data[2])):
        amax = part.granularity.amax(x.abs())
        torch.testing.assert_close(part.scale, amax / 448, rtol=2**-23, atol=0)  # one division
    assert_right(where, qkv, out, lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_the_cast_saturates_and_rounds_to_even(where: Where, fmt: str, dtype: torch.dtype) -> None:
    """Overflow to NaN or to the largest value, by version and device; carries and denormals. Seen in torchao.

    A tensor whose largest value is the format's has the scale 1, so its codes are the cast alone: of every code, of the
    middle between any two, of what lies just beside it, of infinities and of NaN.
    """
    largest = get_format(fmt).max
    numpy_fmt = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[fmt]
    every = np.arange(256, dtype=np.uint8).view(numpy_fmt).astype(np.float32)
    every = np.sort(every[np.isfinite(every)])
    middles = (every[1:] + every[:-1]) / 2
    x = np.concatenate([every, middles, middles * (1 + 2.0**-20), middles * (1 - 2.0**-20), [-0.0, 2.0**-10, 1e-30]])
    x = torch.tensor(x, dtype=torch.float32).to(dtype).clamp(-largest, largest).float().numpy()
    expected = torch.from_numpy(x.astype(numpy_fmt).view(np.uint8).copy())
    special = torch.tensor([INF, -INF, NAN])
    x = torch.cat([torch.from_numpy(x), special])
    x = torch.cat([x, x.new_zeros(-len(x) % 64)]).to(where.device, dtype)
    rows = x.view(1, 1, -1, 64)
    recipe = PLAIN.replace(q_format=fmt, k_format=fmt, v_format=fmt, q_scale="tensor", k_scale="tensor")
    recipe = recipe.replace(v_scale="tensor")
    qkv = fp8attn.quantize(rows, rows, rows, recipe, backend=where.backend)
    for part in (qkv.q, qkv.k, qkv.v):
        assert (part.scale == 1).all()
        codes = part.rows().reshape(-1)
        as_bytes = codes.view(torch.uint8).cpu()[: len(expected)]
        zero = (as_bytes & 0x7F) == 0  # the sign of what rounds to zero is nobody's concern
        assert torch.equal(as_bytes[~zero], expected[~zero]) and ((expected & 0x7F)[zero] == 0).all()
        plus, minus, nan = codes.float()[len(expected) : len(expected) + 3].tolist()
        assert (plus, minus) == (largest, -largest) and math.isnan(nan)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.filterwarnings("ignore::fp8attn.scaling.QuantizationWarning")
def test_a_static_scale_clips_alike_everywhere(device: str, dtype: torch.dtype, scale: float) -> None:
    """464 is halfway to a code that E4M3 does not have, 465 beyond; torch and hardware made NaN or 448 of them."""
    x = torch.tensor([[448.0, 464.0, 465.0, 480.0, 1e3, 6.5e4, INF, 2**-9 * scale, 2**-10 * scale, 0.0]], dtype=dtype)
    x = torch.cat([x, -x, torch.full_like(x, NAN)]).to(device)
    values = quantize_tensor(x, "e4m3", "tensor", scale=scale).dequantize().cpu()
    top = [448.0 * scale] * 7
    expected = torch.tensor([*top, 2**-9 * scale, 0.0, 0.0])
    assert torch.equal(values[0], expected) and torch.equal(values[1], -expected)
    assert values[2].isnan().all()


# ---- outliers


@pytest.mark.parametrize(("channels", "offset"), [(3, 300.0), (8, 100.0)])
def test_a_bias_in_a_few_key_channels(where: Where, channels: int, offset: float) -> None:
    """Keys with a constant of 100 to 300 in a few channels, as Qwen2's biases make them: what differs between keys
    falls under FP8's step. Seen in llama.cpp, vllm. Judged by the logits, as a cosine of K would hide it.
    """
    seqlen = where.pick(64, 1024)
    q, k, v = where.qkv(1, 2, 1, seqlen, seqlen, 128)
    bias = torch.zeros(128, device=where.device)
    bias[7 : 7 + channels] = offset
    qkv, out, lse = where.run(q, k + bias, v, "default")
    assert_right(where, qkv, out, lse)

    def logit_error(made: QuantizedQKV) -> float:
        exact = q.double() @ (k + bias).double().mT
        coded = made.q.dequantize().double() @ made.k.dequantize().double().mT
        # a constant added to a row changes no weight
        error = (coded - exact) / 128**0.5
        return (error - error.mean(dim=-1, keepdim=True)).pow(2).mean().sqrt().item()

    # q and k are off by 2^-4 / sqrt(3) of a value at most, in independent directions; logits are N(0, 1)
    assert logit_error(qkv) < 2**0.5 * 2**-4 / 3**0.5
    plain = fp8attn.quantize(q, k + bias, v, "fa3", backend=where.backend)
    assert logit_error(plain) > 3 * logit_error(qkv)  # 4.5 to 20 times, by the sample
    exact, _ = attention64(q, k + bias, v)
    assert relative_error(out, exact) < 3 * 2**-4 / 3**0.5  # q, k and v


@pytest.mark.parametrize("recipe", ["default", "mixed", "causal_safe", "bf16"])
@pytest.mark.parametrize("largest", [3e4, 1e5])
def test_values_beyond_fp16(where: Where, recipe: str, largest: float) -> None:
    """BF16 values above 65504, in a kernel that keeps sums in FP16: infinity, NaN, black images. Seen in ComfyUI."""
    seqlen, head_dim = where.pick((96, 64), (4096, 128))
    q, k, v = where.qkv(1, 2, 2, seqlen, seqlen, head_dim, dtype=torch.bfloat16)
    v = v / v.abs().amax() * largest
    k[..., 5] *= 100
    chosen = Recipe.from_name(recipe).replace(**where.pick({"balance": "none", "smooth_k": False}, {}))
    qkv, out, lse = where.run(q, k, v, chosen)
    assert out.dtype == torch.bfloat16 and out.isfinite().all()
    if chosen.v_scale != "token":
        assert_right(where, qkv, out, lse, largest_logit=2e3)
    exact, _ = attention64(q, k, v)
    # logits reach hundreds, where FP8 is off by whole units: held to q, k and v that FP8 rounded, not to the originals
    coded, _ = on_codes(qkv)
    assert relative_error(out, coded) < 2**-4
    if recipe == "bf16":
        assert relative_error(out, exact) < 2**-6


# ---- memory


def restrided(x: torch.Tensor, how: str) -> torch.Tensor:
    """The same values with other strides, among others that are wrong."""
    batch, heads, seqlen, head_dim = x.shape
    if how == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "a slice of a fused projection":
        fused = torch.full((batch, seqlen, 3, heads, head_dim), NAN, dtype=x.dtype, device=x.device)
        fused[:, :, 1] = x.transpose(1, 2)
        return fused[:, :, 1].transpose(1, 2)
    if how == "every other channel":
        wide = torch.full((batch, heads, seqlen, 2 * head_dim), NAN, dtype=x.dtype, device=x.device)
        wide[..., 1::2] = x
        return wide[..., 1::2]
    if how == "channels first":
        return x.mT.contiguous().mT
    flat = torch.full((x.numel() + 3,), NAN, dtype=x.dtype, device=x.device)  # "not aligned"
    return flat[3:].view(x.shape).copy_(x)


@pytest.mark.parametrize(
    "how", ["transposed", "a slice of a fused projection", "every other channel", "channels first", "not aligned"]
)
def test_strides_of_inputs_and_output(where: Where, how: str) -> None:
    """Strided tensors read as if they were contiguous. Seen in FlagGems, flash-attention. The same bits."""
    for head_dim in where.pick([40], [64, 128, 256]):
        data = where.qkv(2, *where.pick((2, 1, 9, 20), (4, 2, 300, 500)), head_dim, dtype=torch.bfloat16)
        options: dict[str, Any] = {"is_causal": True, "enable_gqa": True, "backend": where.backend}
        for recipe in where.pick([ROTATED], ["default", "causal_safe"]):
            expected = fp8attn.attention(*data, recipe=recipe, **options)
            strided = [restrided(x, how) for x in data]
            assert all(torch.equal(a, b) for a, b in zip(data, strided, strict=True))
            out = restrided(torch.zeros_like(expected), how)
            assert fp8attn.attention(*strided, recipe=recipe, out=out, **options) is out
            assert torch.equal(out, expected)


@pytest.mark.parametrize(("ratio", "seqlen_q"), [(3, 1), (3, 5), (5, 1), (6, 5), (7, 1), (9, 5), (12, 1)])
def test_head_ratios(where: Where, ratio: int, seqlen_q: int) -> None:
    """Query heads that read another group's keys, at ratios that are no power of two. Seen in fla, sglang."""
    qkv, out, lse = where.run(*where.qkv(1, 2 * ratio, 2, seqlen_q, where.pick(19, 300), 32))
    assert_right(where, qkv, out, lse)


@pytest.mark.parametrize(("heads", "kv_heads"), [(33, 2), (3, 2), (6, 4)])
def test_heads_that_do_not_divide(where: Where, heads: int, kv_heads: int) -> None:
    """The last heads dropped, or read beyond the end."""
    q, k, v = where.qkv(1, heads, kv_heads, 3, 4, 16)
    cu = [torch.tensor([0, n], device=where.device) for n in (3, 4)]
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    calls: list[Callable[[], Any]] = [
        lambda: fp8attn.attention(q, k, v, enable_gqa=True, backend=where.backend),
        lambda: fp8attn.quantize(q, k, v, backend=where.backend),
        lambda: fp8attn.attention_varlen(*packed, *cu, backend=where.backend),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"num_q_heads must be a multiple of num_kv_heads, got {heads} and"):
            call()


# ---- what surrounds a kernel


@pytest.mark.gpu
def test_a_captured_graph_reads_what_is_in_memory_when_it_is_replayed() -> None:
    """Lengths, scales or codes kept from the capture: right until a graph is replayed. Seen in vllm.

    Decoding with a mask for the length: everything that a step changes is changed in place, and replayed.
    """
    where = Where("triton", "cuda")
    longest = torch.arange(1000, device="cuda")
    length = torch.tensor([700, 30], device="cuda")
    sinks = torch.zeros(8, device="cuda")
    state = [fp8attn.quantize(*where.qkv(2, 8, 2, 1, 1000, 128, seed=seed), "fa3") for seed in (0, 1)]

    def step() -> Any:
        mask = (longest < length[:, None])[:, None, None]
        return fp8attn.attention_quantized(state[0], mask, sinks=sinks, return_lse=True, backend="triton")

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    before = captured[0].clone()
    for name in "qkv":
        ours, theirs = getattr(state[0], name), getattr(state[1], name)
        ours.codes.view(torch.uint8).copy_(theirs.codes.view(torch.uint8))
        ours.scale.copy_(theirs.scale * 2)
    length.copy_(torch.tensor([3, 999]))
    sinks.fill_(1.0)
    graph.replay()
    now = step()
    assert torch.equal(captured[0], now[0]) and torch.equal(captured[1], now[1])
    assert relative_error(now[0], before) > 0.5


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_softcap_acts_on_true_logits_before_the_mask(where: Where, is_causal: bool) -> None:
    """Applied to codes without their scales, or after the mask, which then leaks. Seen in flash-attention, Megatron-LM.

    Values of the keys that nobody should see are large, and so would be their trace.
    """
    seqlen = where.pick(40, 400)
    q, k, v = where.qkv(1, 2, 1, seqlen, seqlen, 32)
    q, k = q * 4, k * 3 + 1
    v[:, :, seqlen // 2 :] *= 1e4
    outs = {}
    for softcap in (0, 1.0, 5.0, 50.0, 1e4, 1e30):
        qkv, out, lse = where.run(q, k, v, PLAIN.replace(smooth_k=True), is_causal=is_causal, softcap=softcap)
        assert (qkv.k.scale != 1).all() and qkv.logit_shift is not None
        # tanh comes with FP32's error of its largest value, which is the softcap up to 100 and the logit above
        largest = 2.0**2 * min(max(softcap, 150), 1e4)
        assert_right(where, qkv, out, lse, is_causal=is_causal, softcap=softcap, largest_logit=largest)
        outs[softcap] = out
    small = (0, 5.0, 50.0)
    assert all(relative_error(outs[a], outs[b]) > 0.05 for a in small for b in small if a < b)
    # as good as none, but with the mean key's share within the logits, so weights are rounded elsewhere: E4M3's step
    assert relative_error(outs[1e30], outs[0]) <= 2**-4 / 3**0.5


MIXES = [("bf16", "e4m3"), ("fp16", "e4m3"), ("fp16", "e5m2"), ("e4m3", "e5m2"), ("e5m2", "e4m3"), ("fp16", "fp16")]


@pytest.mark.parametrize(
    ("q_format", "k_format", "p_format", "v_format"),
    [
        *((*mix, "e4m3", "e4m3") for mix in [*MIXES, ("int8", "int8")]),
        *(("e4m3", "e4m3", *mix) for mix in MIXES),
        ("int8", "int8", "fp16", "e5m2"),
        ("e5m2", "e4m3", "bf16", "e5m2"),
    ],
)
def test_formats_that_differ(where: Where, q_format: str, k_format: str, p_format: str, v_format: str) -> None:
    """16-bit queries beside an FP8 cache, two FP8 formats at once: converted, never reinterpreted. Seen in vllm."""
    formats = {"q_format": q_format, "k_format": k_format, "p_format": p_format, "v_format": v_format}
    seqlen_q, seqlen_k = where.pick((3, 40), (200, 300))
    qkv, out, lse = where.run(*where.qkv(1, 2, 1, seqlen_q, seqlen_k, 32), PLAIN.replace(**formats))
    assert_right(where, qkv, out, lse)


def test_bytes_are_not_codes(where: Where) -> None:
    """E4M3 data handed over as uint8, and formats taken for each other, as in a cache of another dtype."""
    q, k, v = where.qkv(1, 2, 1, 3, 4, 16)
    qkv = fp8attn.quantize(q, k, v, backend=where.backend)
    for wrong in (torch.uint8, torch.float8_e5m2, torch.int8):
        with pytest.raises(ValueError, match=f"codes have dtype {wrong}, format e4m3 has torch.float8_e4m3fn"):
            dataclasses.replace(qkv.k, codes=qkv.k.codes.view(wrong))
    for mixed in ((q.bfloat16(), k.half(), v.half()), (q, k.bfloat16(), v)):
        with pytest.raises(TypeError, match="must have one dtype"):
            fp8attn.attention(*mixed, enable_gqa=True, backend=where.backend)


@pytest.mark.parametrize("head_dim", [80, 96, 112, 192, pytest.param(576, marks=pytest.mark.gpu)])
def test_rotations_of_other_sizes_than_powers_of_two(where: Where, head_dim: int) -> None:
    """Padded to a power of two, rotated and cut off again, or scaled by the wrong norm. Seen in ik_llama.cpp, vllm."""
    if head_dim > 256 and where.device == "cpu":
        pytest.skip("large: for a GPU")
    q, k, v = where.qkv(1, 2, 1, 5, where.pick(20, 300), head_dim, head_dim_v=64)
    recipe = Recipe(balance="none", smooth_k=False)
    qkv, out, lse = where.run(q, k, v, recipe)
    assert_right(where, qkv, out, lse)
    fine = fp8attn.quantize(q, k, v, recipe.replace(q_format="fp16", k_format="fp16"), backend=where.backend)
    rotated, rotated_k = fine.q.dequantize().double(), fine.k.dequantize().double()
    assert rotated.shape == q.shape
    # FP16 rounds a value by 2^-11: norms by as much, products of two such vectors by 2^-10 of both norms
    norms, k_norms = q.double().norm(dim=-1), k.double().norm(dim=-1)
    assert ((rotated.norm(dim=-1) / norms - 1).abs() < 2**-11).all()
    error = (rotated @ rotated_k.mT - q.double() @ k.double().mT).abs()
    assert (error <= 2**-10 * norms[..., None] * k_norms[..., None, :]).all()
    assert relative_error(rotated, q) > 0.5  # it did rotate
