"""The portable statistics against the reference's, and against float64 where the two may differ."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8attn import Recipe
from fp8attn.kernels.portable import statistics
from fp8attn.kernels.portable.statistics import fit_smoothing
from fp8attn.kernels.portable.weigh_kernel import sampled_row
from fp8attn.kernels.problem import Masking
from fp8attn.kernels.reference import quantize as reference
from fp8attn.testing import QKV, AttentionShape, OutlierSpec, make_qkv, masks, outlier_specs, qkv, shapes
from fp8attn.transforms import Smoothing

NAMES = ("k_mean", "v_mean", "balance")


def reference_smoothing(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, recipe: Recipe, masking: Masking, scale: float
) -> Smoothing:
    """What the reference's quantizer fits: in FP32, bounded, with 0 in tokens that are not in use."""
    queries, keys = masking.in_use
    inputs = []
    for x, in_use in ((q, queries), (k, keys), (v, keys)):
        x = x.to(torch.float32).contiguous()
        x = torch.where(x.isinf(), x, x.clamp(-(2.0**90), 2.0**90))
        inputs.append(x if in_use is None else torch.where(in_use[:, None, :, None], x, 0.0))
    return reference.fit_smoothing(*inputs, recipe, masking, scale=scale)


def valid_tokens(x: torch.Tensor, in_use: torch.Tensor | None) -> torch.Tensor:
    finite = x.isfinite().all(dim=3)
    return finite if in_use is None else finite & in_use[:, None]


def sampled_queries(valid: torch.Tensor) -> torch.Tensor:
    """Of valid ones (B, H, S), those whose rms is taken."""
    kept = torch.zeros_like(valid)
    kept[:, :, :: max(1, valid.shape[2] // reference._SAMPLED_QUERIES)] = True
    return valid & kept


def moments(x: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Count (B, H, 1, 1), mean, mean magnitude, rms and rms about the mean (B, H, 1, D) in float64."""
    keep = valid[..., None]
    x = torch.where(keep, x.double().clamp(-(2.0**90), 2.0**90), 0.0)
    n = keep.sum(2, keepdim=True).clamp(min=1)
    mean = x.sum(2, keepdim=True) / n
    off = torch.where(keep, x - mean, 0.0)
    return n, mean, x.abs().sum(2, keepdim=True) / n, *((y.square().sum(2, keepdim=True) / n).sqrt() for y in (x, off))


def rounding(n: torch.Tensor) -> torch.Tensor:
    """Of a mean of n terms relative to their mean magnitude: sqrt(n) roundings of 2^-24 at random, and about 16 more in
    relative values, merges and quotients, for each of two implementations."""
    return 2 * (16 + n.double().sqrt()) * 2.0**-24


def errors(q: torch.Tensor, k: torch.Tensor, recipe: Recipe, masking: Masking, scale: float) -> torch.Tensor:
    """(B, Hkv, 2): expected squared logit errors without and with the mean taken out, written from the definition in
    float64."""
    queries, keys = masking.in_use
    q_valid, k_valid = valid_tokens(q, queries), valid_tokens(k, keys)
    q, k = (torch.where(v[..., None], x.double(), 0.0) for x, v in ((q, q_valid), (k, k_valid)))
    q_sampled = sampled_queries(q_valid)
    batch, num_q_heads, seqlen_q, _ = q.shape
    group = num_q_heads // k.shape[1]
    rows = torch.linspace(0, seqlen_q - 1, min(seqlen_q, 64), device=q.device).round().long()
    band = masking.band(rows, torch.arange(k.shape[2], device=q.device))
    out = torch.zeros(batch, k.shape[1], 2, dtype=torch.float64)
    for b in range(batch):
        mask = masking.mask_tile(b, rows, slice(0, k.shape[2]))
        for h in range(num_q_heads):
            g = h // group
            logits = q[b, h, rows] @ k[b, g].T * scale
            visible = band & q_valid[b, h, rows, None] & k_valid[b, g]
            if mask is not None:
                of_head = mask[h if mask.shape[0] > 1 else 0]
                visible = visible & (of_head if of_head.dtype == torch.bool else of_head > -torch.inf)
                logits = logits if of_head.dtype == torch.bool else logits + of_head
            weights = logits.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0)
            if not weights.any():
                continue
            for c in (0, 1):
                mean = k[b, g].sum(0) / k_valid[b, g].sum() * c
                keys64 = torch.where(k_valid[b, g, :, None], k[b, g] - mean, 0.0)
                rows64 = q[b, h, rows]
                if recipe.rotate == "none":
                    pairs = rows64.square() @ keys64.square().T
                else:
                    factor = torch.ones_like(mean)
                    if recipe.balance == "rms":
                        heads = slice(g * group, (g + 1) * group)
                        pooled = q[b, heads].flatten(0, 1)[None, None], q_sampled[b, heads].flatten()[None, None]
                        q_rms = moments(*pooled)[3]
                        k_rms = (keys64.square().sum(0) / k_valid[b, g].sum()).sqrt()
                        usable = (q_rms[0, 0, 0] > 0) & (k_rms > 0)
                        factor = torch.where(usable, (k_rms / q_rms[0, 0, 0]).sqrt(), 1.0)
                    pairs = (rows64 * factor).square().sum(-1)[:, None] * (keys64 / factor).square().sum(-1)
                out[b, g, c] += (weights * pairs).sum() / weights.sum()
    return out


def assert_same_statistics(
    data: tuple[torch.Tensor, torch.Tensor, torch.Tensor], recipe: Recipe, masking: Masking, scale: float
) -> tuple[Smoothing, int]:
    """Compare with the reference; returns how many heads' decisions differ, each of which must be a tie."""
    q, k, v = data
    actual = fit_smoothing(q, k, v, recipe, masking, scale=scale)
    expected = reference_smoothing(q, k, v, recipe, masking, scale)
    queries, keys = masking.in_use
    group = q.shape[1] // k.shape[1]
    n, _, magnitude, rms, spread = moments(k, valid_tokens(k, keys))
    pooled = q.unflatten(1, (k.shape[1], group)).flatten(2, 3)
    q_counted = sampled_queries(valid_tokens(q, queries))
    q_n = moments(pooled, q_counted.unflatten(1, (k.shape[1], group)).flatten(2, 3))[0]
    agree = torch.ones(k.shape[:2], dtype=torch.bool)
    smoothed = torch.zeros_like(agree)
    for name in NAMES:
        a, e = getattr(actual, name), getattr(expected, name)
        assert (a is None) == (e is None), name
        assert a is None or (a.shape == e.shape and a.dtype == torch.float32), name
    if expected.k_mean is not None:
        assert actual.k_mean is not None
        smoothed, ours = ((x != 0).any(3).any(2).cpu() for x in (expected.k_mean, actual.k_mean))
        agree = smoothed == ours
        off = (actual.k_mean - expected.k_mean).abs().double()
        assert ((off <= rounding(n) * magnitude) | ~agree[..., None, None].to(k.device)).all(), "k_mean"
    if not agree.all():
        before, after = errors(q, k, recipe, masking, scale).unbind(-1)
        # An error's own: logits of magnitude s are off by 2^-22 s, and with them weights and errors, relatively.
        largest = max(1.0, float((q.double().abs().amax() * k.double().nan_to_num().abs().amax() * abs(scale)).cpu()))
        tie = 1e-4 + 2.0**-21 * largest * q.shape[3] ** 0.5
        assert ((after / before - 1).abs()[~agree] < tie).all(), f"decided otherwise: {(after / before)[~agree]}"
    if expected.v_mean is not None:
        assert actual.v_mean is not None
        n_v, _, v_magnitude, _, _ = moments(v, valid_tokens(v, keys))
        assert ((actual.v_mean - expected.v_mean).abs().double() <= rounding(n_v) * v_magnitude).all(), "v_mean"
    if expected.balance is not None:
        assert actual.balance is not None
        # Half the relative error of either rms. That of keys without their mean is off by the mean's error, too.
        centered = smoothed[..., None, None].to(k.device)
        k_rms = torch.where(centered, spread, rms)
        from_mean = torch.where(centered & (spread > 0), magnitude / spread, 0.0)
        tolerance = (rounding(n) * (1 + from_mean) + rounding(q_n)) / 2
        off = (actual.balance / expected.balance - 1).abs().double()
        # Rounding noise about a mean has no rms to compare: of tokens equal to within 2^-20 of it.
        noise = centered & (k_rms > 0) & (k_rms < 2.0**-20 * magnitude)
        assert ((off <= tolerance) | noise | ~agree[..., None, None].to(k.device)).all(), f"balance: {off.max():.2e}"
    return actual, int((~agree).sum())


@st.composite
def cases(draw: st.DrawFn) -> tuple[QKV, Recipe, Masking, float]:
    shape = draw(shapes(max_batch=2, max_seqlen=1, head_dims=(4, 16, 24, 40, 5), head_dims_v=(16, 20), max_group=2))
    lengths = {name: draw(st.sampled_from([1, 7, 33, 64, 100, 144])) for name in ("seqlen_q", "seqlen_k")}
    shape = dataclasses.replace(shape, **lengths)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    data = draw(qkv(shapes=st.just(shape), outliers=outlier_specs(), dtypes=dtypes))
    for x in data:
        for _ in range(draw(st.integers(0, 2))):
            at = tuple(draw(st.integers(0, n - 1)) for n in x.shape)
            x[at] = draw(st.sampled_from([torch.nan, torch.inf, -torch.inf]))
    sides = st.sampled_from([-1, -1, 0, 3, 50])
    masking = Masking(
        shape.seqlen_q, shape.seqlen_k, data.q.device, draw(st.booleans()),
        draw(st.sampled_from(["top_left", "bottom_right"])), (draw(sides), draw(sides)),
        draw(st.none() | masks(shape=shape).map(lambda m: m.reshape((1,) * (4 - m.ndim) + m.shape))),
    )  # fmt: skip
    recipe = Recipe(
        rotate=draw(st.sampled_from(["random_hadamard", "random_hadamard", "none"])),
        balance=draw(st.sampled_from(["rms", "rms", "none"])),
        smooth_k=draw(st.sampled_from(["auto", "auto", True, False])),
        smooth_v=draw(st.booleans()),
    )
    return data, recipe, masking, draw(st.sampled_from([0.25, 0.25, -0.1, 0.0]))


@contextlib.contextmanager
def small_tiles(**changes: int) -> Iterator[None]:
    """Several tiles a chunk, and chunks a head, of short sequences; and a sample of their queries."""
    changes = {
        "_TILE_ELEMENTS": 512, "_MOST_CHUNKS": 3, "_MOST_KEY_CHUNKS": 2, "_SAMPLED_QUERIES": 20, **changes
    }  # fmt: skip
    with (
        mock.patch.multiple(statistics, **changes),
        mock.patch.object(reference, "_SAMPLED_QUERIES", changes["_SAMPLED_QUERIES"]),
    ):
        yield


def test_they_are_the_references() -> None:
    decided = differ = 0

    @settings(max_examples=18, database=None, derandomize=True)
    @given(cases(), st.booleans())
    def sweep(case: tuple[QKV, Recipe, Masking, float], small: bool) -> None:
        nonlocal decided, differ
        data, recipe, masking, scale = case
        with small_tiles() if small else small_tiles(_TILE_ELEMENTS=statistics._TILE_ELEMENTS, _MOST_CHUNKS=64):
            differ += assert_same_statistics((data.q, data.k, data.v), recipe, masking, scale)[1]
        decided += data.k.shape[0] * data.k.shape[1] if recipe.smooth_k == "auto" else 0

    sweep()
    assert decided > 8
    # A tie is two errors within about 1e-4 of each other by chance, or equal in exact arithmetic (one visible key).
    assert differ <= decided // 10, f"{differ} of {decided} decisions differ"


def sinks_of_all_strengths(heads: int, group: int, seqlen: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries (1, group heads, ...) and keys with an offset, all but key 0, at which later heads look more: from not at
    all, where taking the mean key out helps, to almost only, where it makes the error."""
    data = make_qkv(AttentionShape(1, group * heads, heads, seqlen, seqlen, head_dim), seed=3)
    direction = torch.zeros(head_dim)
    direction[::2] = 1.0
    data.k.add_(direction)
    data.k[:, :, 0] *= 0.2
    data.q.sub_(torch.linspace(0, 5, heads).repeat_interleave(group)[:, None, None] * direction)
    return data.q, data.k


@pytest.mark.parametrize(
    ("rotate", "balance", "masked"),
    [
        ("random_hadamard", "rms", "no"),
        ("random_hadamard", "none", "causal"),
        ("none", "rms", "window"),
        ("none", "none", "boolean"),
        ("random_hadamard", "rms", "additive"),
    ],
)
def test_it_decides_both_ways(rotate: str, balance: str, masked: str) -> None:
    group = 2 if masked == "boolean" else 1
    q, k = sinks_of_all_strengths(6, group, 70, 16)
    mask = None
    if masked in ("boolean", "additive"):
        mask = torch.rand(1, 6 * group, 70, 70, generator=torch.Generator().manual_seed(0)) < 0.8
        mask[..., 0] = True
    if masked == "additive":
        mask = torch.where(mask, torch.where(torch.arange(70) == 0, 2.0, 0.0), -torch.inf)
    window = (60, 3) if masked == "window" else (-1, -1)
    masking = Masking(70, 70, q.device, masked == "causal", "top_left", window, mask)
    recipe = Recipe(rotate=rotate, balance=balance)
    before, after = errors(q, k, recipe, masking, 0.2)[0].unbind(-1)
    assert ((after / before - 1).abs() > 1e-3).all() and 2 <= (after < before).sum() <= 4, after / before
    with small_tiles():
        k_mean = fit_smoothing(q, k, k, recipe, masking, scale=0.2).k_mean
    assert torch.equal((k_mean[0, :, 0] != 0).any(-1), after < before)  # type: ignore[index]


@triton.jit
def _rows_kernel(out, seqlens, ROWS: tl.constexpr):
    seqlen = tl.load(seqlens + tl.program_id(0))
    i = tl.arange(0, ROWS)
    row = sampled_row(i, tl.minimum(seqlen, ROWS), seqlen)
    tl.store(out + tl.program_id(0) * ROWS + i, row, mask=i < seqlen)


def test_sampled_rows_are_the_references() -> None:
    # Beyond 2^15 rows linspace's own rounding, 2^-24 of the row, comes near 1 / 126, the least distance to a half.
    lengths = [*range(1, 200), *range(200, 2**15, 97), 2**15]
    out = torch.zeros(len(lengths), 64, dtype=torch.int64)
    _rows_kernel[(len(lengths),)](out, torch.tensor(lengths, dtype=torch.int32), ROWS=64)
    for rows, n in zip(out, lengths, strict=True):
        assert torch.equal(rows[: min(n, 64)], torch.linspace(0, n - 1, min(n, 64)).round().long()), n


@pytest.mark.parametrize("tile_elements", [512, 8192])
def test_an_offset_does_not_hide_the_spread(tile_elements: int) -> None:
    """One sum of squares, less the squared mean, would be off by 1e6 2^-24 = 6% of the variance and worse."""
    data = make_qkv(AttentionShape(1, 1, 1, 128, 384, 16), seed=1)
    k = data.k.clone()
    for offset in (1e3, 1e5):
        shifted = k + offset
        shifted[..., 0] = k[..., 0]
        recipe, masking = Recipe(smooth_k=True), Masking(128, 384, k.device)
        with small_tiles(_TILE_ELEMENTS=tile_elements, _MOST_CHUNKS=2, _SAMPLED_QUERIES=128):
            fitted = fit_smoothing(data.q, shifted, data.v, recipe, masking, scale=0.25)
        _, mean, magnitude, _, spread = moments(shifted, torch.ones(1, 1, 384, dtype=torch.bool))
        q_rms = data.q.double().square().mean(2, keepdim=True).sqrt()
        assert ((fitted.k_mean - mean).abs() <= 2.0**-22 * magnitude).all()  # a mean of two magnitudes' rounding
        exact = (spread / q_rms).sqrt()
        # The balance has half a root mean square's error, and that half the squares'. They have sqrt(n) roundings; and
        # chunks' means, d of about spread / sqrt(rows) apart, are rounded to 2^-24 of the offset, which d^2 has twice.
        tolerance = (20 + 384**0.5) * 2.0**-24 + offset * 2.0**-24 / 32**0.5 / 2 + (2.0**-22 * offset) ** 2
        assert ((fitted.balance / exact - 1).abs() <= tolerance).all()


def test_huge_and_tiny_values_neither_overflow_nor_vanish() -> None:
    data = make_qkv(AttentionShape(1, 1, 1, 20, 60, 16), seed=2)
    q, k = data.q.clone(), data.k.clone()
    sizes = torch.tensor([1e-30, 1e-18, 1.0, 1e18, 2.0**88]).repeat(4)[:16]
    recipe, masking = Recipe(smooth_k=True), Masking(20, 60, q.device)
    plain = fit_smoothing(q, k, data.v, recipe, masking, scale=0.25)
    fitted = fit_smoothing(q, k * sizes, data.v, recipe, masking, scale=0.25)
    # Powers of two would change nothing; these change roundings.
    assert torch.allclose(fitted.k_mean / sizes, plain.k_mean, rtol=0, atol=1e-6)
    assert torch.allclose(fitted.balance / sizes.sqrt(), plain.balance, rtol=1e-5, atol=0)
    for recipe in (Recipe(), Recipe(rotate="none")):
        assert_same_statistics((q, k * sizes, data.v), recipe, masking, 0.25)
        assert_same_statistics((q * 1e-25, k * 1e-25, data.v), recipe, masking, 0.25)
    # finite values over the bound count as it
    over, at = k.clone(), k.clone()
    over[0, 0, 5, 3], at[0, 0, 5, 3] = 1e38, 2.0**90
    for a, b in zip(
        *(values(fit_smoothing(q, x, data.v, Recipe(), masking, scale=0.25)) for x in (over, at)), strict=True
    ):
        assert torch.equal(a, b)


def values(fitted: Smoothing) -> list[torch.Tensor]:
    return [getattr(fitted, name) for name in NAMES if getattr(fitted, name) is not None]


def test_a_constant_channel_has_no_spread() -> None:
    """Rounding a mean must not make a spread of nothing, which would become a balance of 1e-4 where 1 is right."""
    data = make_qkv(AttentionShape(1, 1, 1, 33, 333, 16), seed=4)
    k = data.k.clone()
    k[..., 3], k[..., 7], k[..., 9] = 0.1, -1234.567, 0.0
    with small_tiles():
        fitted = fit_smoothing(data.q, k, data.v, Recipe(smooth_k=True), Masking(33, 333, k.device), scale=0.25)
    assert torch.equal(fitted.k_mean[..., [3, 7, 9]], k[:, :, :1, [3, 7, 9]])
    assert (fitted.balance[..., [3, 7, 9]] == 1).all() and (fitted.balance != 1).sum() == 13


def test_tokens_that_do_not_count_may_hold_anything() -> None:
    data = make_qkv(AttentionShape(2, 1, 1, 20, 150, 16), outliers=OutlierSpec("k_offset", 3.0), seed=5)
    mask = torch.ones(2, 1, 1, 150, dtype=torch.bool)
    mask[0, ..., :131], mask[1, ..., 140:] = False, False
    masking = Masking(20, 150, data.q.device, mask=mask)
    recipe = Recipe(smooth_v=True)
    clean = values(fit_smoothing(*data, recipe, masking, scale=0.25))
    assert clean[0].any()
    for filler in (torch.nan, torch.inf, 1e38):
        k, v = data.k.clone(), data.v.clone()
        for x in (k, v):
            x[0, :, :131], x[1, :, 140:] = filler, filler
        for a, b in zip(values(fit_smoothing(data.q, k, v, recipe, masking, scale=0.25)), clean, strict=True):
            assert torch.equal(a, b)


def layouts(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """``x`` (B, H, S, D) with other strides."""
    batch, heads, seqlen, dim = x.shape

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=x.dtype, device=x.device)

    found = {
        "heads inside": zeros(batch, seqlen, heads, dim).transpose(1, 2),
        "padded rows": zeros(batch, heads, seqlen, dim + 16)[..., :dim],
        "odd offset": zeros(x.numel() + 1)[1:].view(x.shape),
        "odd columns": zeros(batch, heads, seqlen, dim + 3)[..., 1 : dim + 1],
        "every other": zeros(batch, heads, seqlen, 2 * dim)[..., ::2],
        "transposed": zeros(batch, heads, dim, seqlen).mT,
    }
    for view in found.values():
        view.copy_(x)
    return found


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, 16), (torch.bfloat16, 20)])
def test_strides_do_not_matter(dtype: torch.dtype, head_dim: int) -> None:
    check_strides(torch.device("cpu"), dtype, AttentionShape(2, 1, 1, 9, 31, head_dim))


def check_strides(device: torch.device, dtype: torch.dtype, shape: AttentionShape) -> None:
    data = make_qkv(shape, dtype=dtype, outliers=OutlierSpec("k_offset", 2.0))
    q, k, v = (x.to(device) for x in data)
    masking, recipe = Masking(shape.seqlen_q, shape.seqlen_k, device, is_causal=True), Recipe(smooth_v=True)
    plain = values(fit_smoothing(q, k, v, recipe, masking, scale=0.25))
    others = [(q, k, v), *zip(*(layouts(x).values() for x in (q, k, v)), strict=True)]
    for other in others:
        again = values(fit_smoothing(*other, recipe, masking, scale=0.25))
        assert all(torch.equal(a, b) for a, b in zip(again, plain, strict=True)), other[0].stride()
    # an expanded batch, and a sequence alone
    one = [x[:1] for x in (q, k, v)]
    many = values(fit_smoothing(*(x.expand(2, -1, -1, -1) for x in one), recipe, masking, scale=0.25))
    alone = values(fit_smoothing(*one, recipe, masking, scale=0.25))
    for many_, alone_, in_batch in zip(many, alone, plain, strict=True):
        assert torch.equal(many_, alone_.expand_as(many_)) and torch.equal(alone_[0], in_batch[0])


def test_a_mask_may_be_expanded() -> None:
    data = make_qkv(AttentionShape(2, 2, 1, 33, 31, 16), outliers=OutlierSpec("massive_token", 30.0))
    for mask in (
        torch.rand(2, 1, 1, 31) < 0.7,
        torch.randn(1, 2, 33, 1).masked_fill_(torch.rand(1, 2, 33, 1) < 0.2, -torch.inf),
    ):
        maskings = (Masking(33, 31, data.q.device, mask=m) for m in (mask, mask.expand(2, 2, 33, 31).contiguous()))
        a, b = (values(fit_smoothing(*data, Recipe(), masking, scale=0.25)) for masking in maskings)
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        assert_same_statistics((data.q, data.k, data.v), Recipe(), Masking(33, 31, data.q.device, mask=mask), 0.25)


@pytest.mark.parametrize("seqlens", [(0, 5), (5, 0), (0, 0), (1, 1), (1, 3)])
@pytest.mark.parametrize("smooth_k", ["auto", True, False])
def test_short_and_empty_sequences(seqlens: tuple[int, int], smooth_k: bool | str) -> None:
    data = make_qkv(AttentionShape(2, 2, 1, *seqlens, 16))
    recipe = Recipe(smooth_k=smooth_k, smooth_v=True)
    masking = Masking(*seqlens, data.q.device)
    assert assert_same_statistics((data.q, data.k, data.v), recipe, masking, 0.25)[1] == 0


def test_no_heads_and_no_sequences() -> None:
    for shape in (AttentionShape(2, 0, 0, 5, 5, 16), AttentionShape(0, 2, 1, 5, 5, 16)):
        data = make_qkv(shape)
        masking = Masking(5, 5, data.q.device)
        for recipe in (Recipe(smooth_v=True), Recipe(smooth_k=False, balance="none")):
            ours, theirs = (fit(*data, recipe, masking, scale=0.25) for fit in (fit_smoothing, reference.fit_smoothing))
            for name in NAMES:
                a, b = getattr(ours, name), getattr(theirs, name)
                assert (a is None and b is None) or a.shape == b.shape


@pytest.mark.parametrize("head_dim", [128, 320])
def test_large_heads(head_dim: int) -> None:
    data = make_qkv(
        AttentionShape(1, 1, 1, 8, 70, head_dim), outliers=OutlierSpec("k_offset", 2.0), dtype=torch.bfloat16
    )
    # A token is left out for any of its channels, whatever the others hold.
    data.k[0, 0, 3, 0], data.k[0, 0, 3, head_dim - 1] = 1e30, torch.nan
    masking = Masking(8, 70, data.q.device)
    for recipe in (Recipe(), Recipe(rotate="none")):
        with small_tiles():
            assert assert_same_statistics((data.q, data.k, data.v), recipe, masking, head_dim**-0.5)[1] == 0


class Turn:
    """Stands for ``kernels.problem.Rotary``: turns channels 0 and 1 by an angle of 0.1 a position."""

    def rotate(self, x: torch.Tensor, first: int = 0) -> torch.Tensor:
        angle = 0.1 * (first + torch.arange(x.shape[2]))
        turned = torch.view_as_complex(x[..., :2].contiguous()) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([torch.view_as_real(turned), x[..., 2:]], dim=-1)


def test_statistics_are_of_turned_queries_and_keys() -> None:
    data = make_qkv(AttentionShape(1, 2, 1, 20, 30, 16), outliers=OutlierSpec("k_offset", 3.0))
    masking = Masking(20, 30, data.q.device, is_causal=True, causal_alignment="bottom_right")
    fitted = fit_smoothing(*data, Recipe(), masking, scale=0.25, rotary=Turn())  # type: ignore[arg-type]
    angle = np.exp(0.1j * np.arange(30))
    k, q = (x.double().numpy() for x in (data.k, data.q))
    turned_k = (k[..., 0] + 1j * k[..., 1]) * angle
    turned_q = (q[..., 0] + 1j * q[..., 1]) * angle[10:]
    mean = turned_k.mean()
    np.testing.assert_allclose(fitted.k_mean[0, 0, 0, :2], [mean.real, mean.imag], rtol=1e-5)
    spread = (turned_k - mean).real.std() / np.sqrt((turned_q.real**2).mean())
    np.testing.assert_allclose(fitted.balance[0, 0, 0, 0], np.sqrt(spread), rtol=1e-5)


# ---- On a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("sizes", "kind"),
    [
        ((1, 16, 16, 16384, 16384, 128), "k_offset"),
        ((2, 8, 2, 4096, 4096, 64), "massive_token"),
        ((2, 8, 1, 1000, 3001, 80), "heavy_tails"),
        ((1, 4, 2, 130, 5000, 256), "same_channels"),
        ((1, 4, 1, 300, 2000, 576), "k_offset"),
        ((3, 4, 4, 1, 777, 40), "iid"),
    ],
)
def test_on_a_gpu_they_are_the_references(sizes: tuple[int, ...], kind: str, dtype: torch.dtype) -> None:
    data = make_qkv(AttentionShape(*sizes), outliers=OutlierSpec(kind), dtype=dtype)
    q, k, v = (x.cuda() for x in data)
    for causal in (False, True):
        masking = Masking(sizes[3], sizes[4], q.device, is_causal=causal, causal_alignment="bottom_right")
        recipes = (Recipe(smooth_v=True), Recipe(rotate="none"), Recipe(smooth_k=True), Recipe(smooth_k=False))
        for recipe in recipes:
            assert_same_statistics((q, k, v), recipe, masking, sizes[5] ** -0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_masks_and_padding_on_a_gpu(kind: str) -> None:
    data = make_qkv(AttentionShape(2, 4, 2, 700, 900, 128), outliers=OutlierSpec("k_offset"), dtype=torch.bfloat16)
    q, k, v = (x.cuda() for x in data)
    mask = torch.rand(2, 1, 700, 900, device="cuda") < 0.7
    mask[0, ..., :333], mask[1, ..., 800:] = False, False
    if kind == "additive":
        mask = torch.randn(2, 1, 700, 900, device="cuda").masked_fill(~mask, -torch.inf)
    masking = Masking(700, 900, q.device, mask=mask)
    k[0, :, :333], v[0, :, :333] = torch.nan, torch.inf
    k[1, 0, 5, 3] = torch.inf
    for recipe in (Recipe(smooth_v=True), Recipe(rotate="none", balance="none")):
        assert_same_statistics((q, k, v), recipe, masking, 128**-0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [128, 80, 40, 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_strides_do_not_matter_on_a_gpu(dtype: torch.dtype, head_dim: int) -> None:
    check_strides(torch.device("cuda"), dtype, AttentionShape(2, 4, 2, 1000, 1500, head_dim))


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu_and_graphs_capture_it() -> None:
    shape = AttentionShape(1, 8, 2, 2048, 2048, 128)
    first, second = (
        [x.cuda() for x in make_qkv(shape, seed=seed, outliers=OutlierSpec("k_offset"), dtype=torch.bfloat16)]
        for seed in (0, 1)
    )
    masking, recipe = Masking(2048, 2048, first[0].device, is_causal=True), Recipe(smooth_v=True)
    expected = values(fit_smoothing(*second, recipe, masking, scale=0.1))
    torch.cuda.set_sync_debug_mode("error")
    try:
        fit_smoothing(*first, recipe, masking, scale=0.1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = values(fit_smoothing(*first, recipe, masking, scale=0.1))
    for into, x in zip(first, second, strict=True):
        into.copy_(x)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))
