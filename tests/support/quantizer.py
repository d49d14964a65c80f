"""Cases for the portable quantizer, and what is right of them: by float64 mathematics and by the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fp8attn.kernels.portable.quantize import quantize_qkv
from fp8attn.kernels.problem import Masking, QuantizedQKV, Rotary
from fp8attn.kernels.reference.quantize import quantize_qkv as reference_quantize_qkv
from fp8attn.recipe import Recipe
from fp8attn.scaling import QuantizedTensor
from fp8attn.transforms import Smoothing, make_transform

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PLAIN = {"balance": "none", "smooth_k": False}  # a recipe's fields: nothing is fitted
ULP = 2.0**-23  # of FP32, relative


@dataclass(frozen=True, eq=False)
class Case:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    recipe: Recipe
    masking: Masking
    smoothing: Smoothing
    rotary: Rotary | None = None

    def run(self, quantize: Any = quantize_qkv) -> QuantizedQKV:
        return quantize(
            self.q, self.k, self.v, self.recipe, self.masking, scale=1.0, smoothing=self.smoothing, rotary=self.rotary
        )


def randn(*shape: int, seed: int, device: str = "cpu") -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator(device).manual_seed(seed), device=device)


def case(
    recipe: Recipe,
    *,
    batch: int = 2,
    kv_heads: int = 2,
    group: int = 2,
    seqlen_q: int = 40,
    seqlen_k: int = 53,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    layout: str = "bhsd",
    seed: int = 0,
    spread: float = 0.0,
    means: bool = False,
    balance: bool = False,
    rotary: tuple[int, bool, int] | None = None,
    device: str = "cpu",
    **masking: Any,
) -> Case:
    """Normal data whose tokens' magnitudes spread over 2^+-spread; ``rotary``: (R, interleaved, 2 or 3 dimensions)."""

    def tensor(heads: int, seqlen: int, channels: int, seed: int) -> torch.Tensor:
        if layout == "bshd":
            x = randn(batch, seqlen, heads, channels, seed=seed, device=device).transpose(1, 2)
        elif layout == "bhds":
            x = randn(batch, heads, channels, seqlen, seed=seed, device=device).mT
        elif layout == "expanded":
            x = randn(1, 1, seqlen, channels, seed=seed, device=device).expand(batch, heads, -1, -1)
        elif layout == "sliced":
            x = randn(batch, heads, seqlen + 3, channels + 8, seed=seed, device=device)[:, :, 3:, 8:]
        else:
            x = randn(batch, heads, seqlen, channels, seed=seed, device=device)
        magnitude = 2.0 ** (spread * (2 * torch.rand(seqlen, 1, generator=torch.Generator().manual_seed(seed)) - 1))
        if layout == "expanded":  # which a product would undo
            return (x[:1, :1] * magnitude.to(device)).to(dtype).expand(batch, heads, -1, -1)
        return (x * magnitude.to(device)).to(dtype)

    q = tensor(kv_heads * group, seqlen_q, head_dim, 3 * seed)
    k = tensor(kv_heads, seqlen_k, head_dim, 3 * seed + 1)
    v = tensor(kv_heads, seqlen_k, head_dim_v or head_dim, 3 * seed + 2)
    smoothing = Smoothing(
        k_mean=randn(batch, kv_heads, 1, head_dim, seed=seed + 1, device=device) * 3 if means else None,
        v_mean=randn(1, kv_heads, 1, head_dim_v or head_dim, seed=seed + 2, device=device) if means else None,
        balance=randn(batch, kv_heads, 1, head_dim, seed=seed + 3, device=device).exp() if balance else None,
    )
    turn = None
    if rotary is not None:
        channels, interleaved, dimensions = rotary
        angles = randn(*(batch, seqlen_q + seqlen_k, channels // 2)[3 - dimensions :], seed=seed, device=device) * 9
        turn = Rotary(angles.cos().to(dtype), angles.sin().to(dtype), interleaved)
    return Case(q, k, v, recipe, Masking(seqlen_q, seqlen_k, q.device, **masking), smoothing, turn)


# ---- Oracles --------------------------------------------------------------------------------------------------------


def turned(x: torch.Tensor, rotary: Rotary, first: int) -> torch.Tensor:
    """Rotary embedding by multiplying complex numbers, in double precision."""
    pairs = rotary.cos.shape[-1]
    turns = torch.complex(rotary.cos.double(), rotary.sin.double())[..., first : first + x.shape[2], :]
    turns = turns[:, None] if turns.ndim == 3 else turns
    rotated, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if rotary.interleaved:
        numbers = torch.view_as_complex(rotated.unflatten(-1, (pairs, 2)).contiguous()) * turns
        return torch.cat([torch.view_as_real(numbers).flatten(-2), rest], dim=-1)
    numbers = torch.complex(rotated[..., :pairs], rotated[..., pairs:]) * turns
    return torch.cat([numbers.real, numbers.imag, rest], dim=-1)


def exact_operands(c: Case) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    """What q, k and v are to be quantized from, and the logit shift, in double precision."""
    in_use = dict(zip("qk", c.masking.in_use, strict=True))
    in_use["v"] = in_use["k"]

    def keep(x: torch.Tensor, name: str) -> torch.Tensor:
        return x if in_use[name] is None else x.masked_fill(~in_use[name][:, None, :, None], 0.0)

    x = {"q": c.q.double(), "k": c.k.double(), "v": c.v.double()}
    if c.rotary is not None:
        x["q"], x["k"] = turned(x["q"], c.rotary, c.masking.diagonal), turned(x["k"], c.rotary, 0)
    x = {name: keep(value, name) for name, value in x.items()}
    group, shift, s = c.q.shape[1] // c.k.shape[1], None, c.smoothing
    if s.k_mean is not None:
        shift = (x["q"] * s.k_mean.double().repeat_interleave(group, dim=1)).sum(-1)
        x["k"] = keep(x["k"] - s.k_mean.double(), "k")
    if s.v_mean is not None:
        x["v"] = keep(x["v"] - s.v_mean.double(), "v")
    if s.balance is not None:
        x["q"] = x["q"] * s.balance.double().repeat_interleave(group, dim=1)
        x["k"] = x["k"] / s.balance.double()
    if c.recipe.rotate != "none":
        matrix = make_transform(c.recipe.rotate, c.q.shape[3], seed=c.recipe.seed)
        matrix = matrix.matrix(dtype=torch.float64, device=c.q.device)
        x["q"], x["k"] = x["q"] @ matrix, x["k"] @ matrix
    return x, shift


def check(c: Case) -> QuantizedQKV:
    """Hold what the kernels make of a case to float64 and to the reference; return it."""
    made, expected = c.run(), c.run(reference_quantize_qkv)
    operands, shift = exact_operands(c)
    gpu = c.q.is_cuda
    for name in "qkv":
        ours, theirs, x = getattr(made, name), getattr(expected, name), operands[name]
        rotated = name != "v" and c.recipe.rotate != "none"
        head_dim = x.shape[-1]
        # Roundings of 2^-24, each relative to at most the row's norm: a sum of D products (the tensor core truncates:
        # twice that); rotary 3, mean, balance and its reciprocal, the split, the factor: up to 8; the scale and the
        # quotient: 3 of the quotient itself. Rotary values of cos and sin that 16 bits cannot hold exactly are the
        # same for all.
        roundings = 8 + (head_dim * (2 if gpu else 1) if rotated else 0)
        error = roundings * 2.0**-24 * x.norm(dim=-1, keepdim=True)
        # A scale sees their sum, in practice 8 ulp on a CPU; a tensor core also truncates each of 16 partial sums.
        assert_scales(ours, theirs, ((64 if gpu else 16) if rotated or c.rotary is not None else 2) * ULP)
        assert_codes(ours, x, error)
        assert_few_differ(ours, theirs)
    assert (made.logit_shift is None) == (expected.logit_shift is None)
    if made.logit_shift is not None:
        # A sum of D products in FP32, and four roundings before it
        group = c.q.shape[1] // c.k.shape[1]
        mean = c.smoothing.k_mean.double().abs().repeat_interleave(group, dim=1)
        x = c.q.double() if c.rotary is None else turned(c.q.double(), c.rotary, c.masking.diagonal)
        bound = (c.q.shape[3] + 4) * 2.0**-24 * (x.norm(dim=-1) * mean.norm(dim=-1))
        assert ((made.logit_shift - shift).abs() <= bound).all()
    for name in ("v_mean", "keys_in_use"):
        ours, theirs = getattr(made, name), getattr(expected, name)
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)
    return made


def values(x: QuantizedTensor) -> torch.Tensor:
    return x.format.decode(x.rows())


def assert_few_differ(ours: QuantizedTensor, theirs: QuantizedTensor) -> None:
    """Codes are the reference's but for near ties, and NaN where its are.

    Quotients that differ by e round differently with probability e over the format's step. Either quantizer's error
    is about 2^-24 of a row's norm, which is sqrt(D) of a typical element, whose step is at least eps / 2 of it: for
    D = 256 the probability is 2^-22 * 16 / eps, 2^-15 for E4M3 and 1/64 at worst, for FP16.
    """
    a, b = values(ours), values(theirs)
    assert torch.equal(a.isnan(), b.isnan())
    differ = (a.nan_to_num(0) != b.nan_to_num(0)).sum()
    assert differ <= 2 + a.numel() * (2.0**-13 if ours.format.dtype.itemsize == 1 else 2.0**-6)


def assert_scales(ours: QuantizedTensor, theirs: QuantizedTensor, relative: float) -> None:
    assert ours.scale.shape == theirs.scale.shape
    assert ((ours.scale - theirs.scale).abs() <= relative * theirs.scale).all()


def assert_codes(quantized: QuantizedTensor, x: torch.Tensor, error: torch.Tensor) -> None:
    """Every code is a nearest one to the float64 quotient, or so nearly that ``error`` of x makes up the difference."""
    scale = quantized.expanded_scale().double()
    quotient = x / scale
    slack = error / scale + 4 * 2.0**-24 * quotient.abs()
    nearest = quantized.format.round(quotient).double()
    off = (values(quantized).double() - quotient).abs() - (nearest - quotient).abs()
    # At equal distance to two codes, 2 * slack is what moves the quotient from one side of the middle to the other.
    assert (off <= 2 * slack).all(), f"{(off - 2 * slack).max():g} beyond the slack"
