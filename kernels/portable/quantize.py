"""From queries, keys and values to codes in one kernel: rotate the positions, smooth, balance, rotate, quantize.

The contract's steps 1 and 2, as ``kernels/reference/quantize.py`` defines them, without a tensor in between: a program
reads a tile of tokens, does everything to it in registers and writes codes. Scales of a token or of a block of up to
about 256 tokens need no other tile, so the input is read once. A scale of a larger block, a head, a channel or the
tensor needs the largest magnitude of many tiles first: then the same kernel runs twice, the first time only to find it
(an atomic maximum over the bits of non-negative floats, exact and the same in any order).

Three things shape the code:

- **Segments.** Half-split rotary embedding pairs channel i with i + R/2. A tile is loaded as one tensor a segment of
  channels, so that both halves of a pair lie in the same register position of one thread, and no data moves between
  threads. Hadamard matrices gain from the same split: H_D = [[H, H], [H, -H]] with H = H_{D/2}, so one addition an
  element halves the work of the tensor core ("fold").
- **Rotation by 16-bit dots, to FP32's accuracy.** Every row is scaled by a power of two and split into the sum of two
  FP16 values, which holds 22 bits and a sign; times a matrix of +-1 all products are exact, and the tensor core sums
  them in FP32. Other matrices are split too (three dots). 16-bit inputs that nothing was done to need no split at all.
- **The usual tile is finite.** NaN, infinity and magnitudes beyond 2^90 need care at every step. Whether a tile holds
  any is one comparison, so a tile without them runs code without guards; the rare other tile runs the same code again
  with them (``FINITE``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import _disable_current_modes

from fp8attn.formats import Format, get_format
from fp8attn.kernels.portable.numerics import INTERPRETED, TRITON_DTYPES, cast
from fp8attn.kernels.problem import Masking, QuantizedQKV, Rotary
from fp8attn.recipe import Recipe
from fp8attn.scaling import TOKEN_ORDER, Granularity, QuantizedTensor
from fp8attn.transforms import Smoothing, Transform, make_transform

__all__ = ["quantize_qkv"]

_BOUND = 2.0**90  # finite inputs are brought under it, as in the reference
_LARGEST_ROTATED = 256  # head dim up to which the kernel rotates; its matrix must fit a multiprocessor's memory
_LARGEST_TILE = 32768  # elements that one program can hold
_FLOAT32_MAX = torch.finfo(torch.float32).max


def quantize_qkv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    recipe: Recipe,
    masking: Masking,
    *,
    scale: float,
    smoothing: Smoothing | None = None,
    rotary: Rotary | None = None,
) -> QuantizedQKV:
    """Quantize (B, Hq, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Sk, Dv) tensors of float32, bfloat16 or float16, any strides.

    ``rotary`` turns queries and keys before anything else. ``smoothing`` is fitted to the tokens in use, or given
    (frozen statistics). ``scale``, the softmax scale, serves the decision of ``smooth_k="auto"`` alone.

    Nothing waits for the device, and shapes follow from shapes: CUDA graphs capture it once it has run. Rows of codes
    lie at multiples of 16 elements. Values are written in ``permuted_columns`` if V and P are both 8 bits wide.

    A NaN in a row that is rotated makes the whole row NaN, and an infinity makes it infinities (which saturate) and
    NaN, as a product with the matrix in FP32 would.

    A rotation of more than 256 channels, and the controls ``sign_flip`` and ``permutation``, which only move elements,
    run in PyTorch between two kernels. So does ``rotary`` before statistics are fitted.
    """
    queries_in_use, keys_in_use = masking.in_use
    with torch.cuda.device_of(query):
        if smoothing is None:
            smoothing = _fitted(query, key, value, recipe, masking, scale, rotary)
        rotate = recipe.rotate if recipe.rotate != "none" else None
        transform = None if rotate is None else make_transform(rotate, query.shape[-1], seed=recipe.seed)
        columns = all(get_format(f).dtype.itemsize == 1 for f in (recipe.v_format, recipe.p_format))
        q, logit_shift = _quantize(
            query, recipe.q_format, recipe.q_scale, recipe.scale_mode, in_use=queries_in_use, rotary=rotary,
            first_position=masking.diagonal, shift_mean=smoothing.k_mean, multiplier=smoothing.balance,
            transform=transform,
        )  # fmt: skip
        k, _ = _quantize(
            key, recipe.k_format, recipe.k_scale, recipe.scale_mode, in_use=keys_in_use, rotary=rotary,
            mean=smoothing.k_mean, divisor=smoothing.balance, transform=transform,
        )  # fmt: skip
        v, _ = _quantize(
            value, recipe.v_format, recipe.v_scale, recipe.scale_mode, in_use=keys_in_use, mean=smoothing.v_mean,
            columns=columns,
        )  # fmt: skip
    v_mean = None if smoothing.v_mean is None else smoothing.v_mean.expand(value.shape[0], -1, -1, -1)
    return QuantizedQKV(q, k, v, recipe, query.dtype, logit_shift, v_mean, keys_in_use)


def _fitted(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    recipe: Recipe,
    masking: Masking,
    scale: float,
    rotary: Rotary | None,
) -> Smoothing:
    if recipe.smooth_k is False and recipe.smooth_v is False and recipe.balance == "none":
        return Smoothing()
    from fp8attn.kernels.portable.statistics import fit_smoothing

    if rotary is not None:
        query, key = rotary.rotate(query, masking.diagonal), rotary.rotate(key)
    return fit_smoothing(query, key, value, recipe, masking, scale=scale)


class Config(NamedTuple):
    """How a kernel is laid out on the device: tokens a tile, warps, and programs to start a multiprocessor."""

    tile: int
    warps: int
    programs: int


def default_config(channels: int, tokens: int = 1) -> Config:
    """For tiles of ``channels`` (padded) in which at least ``tokens`` must lie together.

    64 elements a thread leave room for the prefetched tile beside the one in work, without spills. A tile of fewer
    than 64 tokens would not fill a warp group's tensor core instruction.
    """
    tile = max(tokens, min(128, max(64 if channels <= _LARGEST_ROTATED else 16, 8192 // channels)))
    warps = max(4, min(16, tile * channels // 2048))
    return Config(tile, warps, programs=16 // warps)


# ---- The rotation's matrix --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Rotation:
    """A transform's matrix as the kernel multiplies by it.

    It is ``factor * (high + low)``, or when folded ``factor * [[high, high], [signs * high, -signs * high]]``.

    Attributes:
        high, low: (D, D), or (D/2, D/2) when folded; 16 bits wide. low is None where high is exact.
        factor: what was taken out of them.
        signs: FP32 (D/2,) of +-1 if folded, one for each row of the lower half.
        terms: how many dots.
    """

    high: torch.Tensor
    low: torch.Tensor | None
    factor: float
    signs: torch.Tensor | None
    terms: int

    @property
    def folded(self) -> bool:
        return self.signs is not None


# Bounded: 32 rotations of head dim 256 are 8 MB. As in transforms.orthogonal._matrix, the cache outlives its caller's
# modes.
@lru_cache(maxsize=32)
def _rotation(transform: Transform, device: torch.device, exact_dtype: torch.dtype | None, halves: bool) -> _Rotation:
    """``exact_dtype``: of an input that is multiplied as it is; ``halves``: the tile comes in two halves, or may."""
    with torch.inference_mode(False), torch.no_grad(), _disable_current_modes():
        matrix = transform.matrix(dtype=torch.float64, device="cpu").contiguous()  # kernels read it in row order
        factor = float(matrix.abs().max())
        units = (matrix / factor).round()
        # Entries of one magnitude, which all Hadamard matrices have: to float64's rounding, 2^-52 of the magnitude.
        if bool(((matrix / factor - units).abs() < 2.0**-40).all()):
            if exact_dtype is not None:
                return _Rotation(units.to(device, exact_dtype), None, factor, None, 1)
            half = len(units) // 2
            block, signs = units[:half, :half], units[half : 2 * half, :1] * units[:half, :1]
            upper, lower = torch.cat([block, block], dim=1), signs * torch.cat([block, -block], dim=1)
            if halves and torch.equal(units, torch.cat([upper, lower])):
                high = block.to(device, torch.float16).contiguous()
                return _Rotation(high, None, factor, signs[:, 0].to(device, torch.float32).contiguous(), 2)
            return _Rotation(units.to(device, torch.float16), None, factor, None, 2)
        # Entries up to 2^13, so that small ones keep their bits; with rows up to 2^15, sums of 256 terms are far from
        # FP32's largest.
        power = 2.0 ** (13 - math.frexp(factor)[1])
        high = (matrix * power).to(torch.float16)
        low = (matrix * power - high.double()).to(torch.float16)
        return _Rotation(high.to(device), low.to(device), 1 / power, None, 3)


# ---- One tensor -------------------------------------------------------------------------------------------------------


def _quantize(
    x: torch.Tensor,
    format: str,
    granularity: str,
    scale_mode: str,
    *,
    in_use: torch.Tensor | None = None,
    rotary: Rotary | None = None,
    first_position: int = 0,
    shift_mean: torch.Tensor | None = None,
    mean: torch.Tensor | None = None,
    multiplier: torch.Tensor | None = None,
    divisor: torch.Tensor | None = None,
    transform: Transform | None = None,
    columns: bool = False,
    config: Config | None = None,
) -> tuple[QuantizedTensor, torch.Tensor | None]:
    """(B, H, S, D) to codes and scales, and x . shift_mean (B, H, S) if that mean is given.

    In this order: rotary, shift, minus ``mean``, times ``multiplier``, over ``divisor``, ``transform``. Statistics are
    (B or 1, H or a divisor of it, 1, D).
    """
    fmt, grouping = get_format(format), Granularity.parse(granularity)
    steps = {
        "in_use": in_use, "rotary": rotary, "first_position": first_position, "shift_mean": shift_mean, "mean": mean,
        "multiplier": multiplier, "divisor": divisor,
    }  # fmt: skip
    batch, heads, seqlen, head_dim = x.shape
    shift = None if shift_mean is None else torch.empty(x.shape[:3], dtype=torch.float32, device=x.device)
    if transform is not None and _by_torch(transform):
        values = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        if x.numel():
            _launch(x, values, None, Granularity("token"), None, False, shift=shift, config=config, **steps)
        x, bound = transform.apply(values), _FLOAT32_MAX
        steps, transform = {}, None
        shift_out = None
    else:
        shift_out, bound = shift, _BOUND
    padded = -(-seqlen // 16) * 16
    if columns:
        codes = torch.empty(batch, heads, head_dim, padded, dtype=fmt.dtype, device=x.device)
    else:
        # Rows at multiples of 16 bytes, as the tensor memory accelerator wants them.
        row = -(-head_dim // 16) * 16
        codes = torch.empty(batch, heads, seqlen, row, dtype=fmt.dtype, device=x.device)[..., :head_dim]
    shape = grouping.scale_shape(x.shape)
    if x.numel() == 0 or not fmt.scaled:
        scale = torch.ones(shape, dtype=torch.float32, device=x.device)
    else:
        scale = torch.empty(shape, dtype=torch.float32, device=x.device)
    if x.numel():
        _launch(
            x, codes, scale, grouping, fmt, scale_mode == "pow2", shift=shift_out, transform=transform, columns=columns,
            bound=bound, config=config, **steps,
        )  # fmt: skip
    layout = {"layout": "permuted_columns", "seqlen": seqlen} if columns else {}
    return QuantizedTensor(codes, scale, fmt, grouping, **layout), shift


def _by_torch(transform: Transform) -> bool:
    # Where a transform does not mix channels, a NaN must stay in its own; the dot would spread it over the row.
    return transform.dim > _LARGEST_ROTATED or type(transform).__name__ in ("SignFlip", "Permutation")


class _Plan(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        head_dim, widths, spans: channels, those of each segment, and its padded size (a power of two).
        tile, together: rows of a tile, and how many of them belong to one block (``_rows``).
        bound: what finite inputs are clamped to.
        rotary: "", "halves" or "interleaved"; pairs: how many of them turn.
        shifts: ``mean`` is for the shift alone; divides: ``factor`` is a divisor.
        terms, folded: the rotation's (``_Rotation``); no terms, no rotation.
        dtype, largest: of the codes; scaled, pow2: how scales are chosen.
        groups: "tile" if a tile holds whole groups, else the granularity's kind, whose scales take two passes; only_amax:
            whether this is the first of them.
        layout: "rows"; "columns" for permuted columns, and "ordered" if tiles are whole groups of 16 of them.
    """

    head_dim: int
    widths: tuple[int, ...]
    spans: tuple[int, ...]
    tile: int
    together: int
    bound: float
    rotary: str
    pairs: int
    shifts: bool
    divides: bool
    terms: int
    folded: bool
    dtype: tl.dtype
    largest: float
    scaled: bool
    pow2: bool
    groups: str
    only_amax: bool
    layout: str


def _launch(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor | None,
    granularity: Granularity,
    fmt: Format | None,
    pow2: bool,
    *,
    in_use: torch.Tensor | None = None,
    rotary: Rotary | None = None,
    first_position: int = 0,
    shift_mean: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    mean: torch.Tensor | None = None,
    multiplier: torch.Tensor | None = None,
    divisor: torch.Tensor | None = None,
    transform: Transform | None = None,
    columns: bool = False,
    bound: float = _BOUND,
    config: Config | None = None,
) -> None:
    """Run the kernel, once or twice, into ``codes``, ``scale`` and ``shift``. ``fmt`` None writes FP32 values."""
    batch, heads, seqlen, head_dim = x.shape
    widths, rotation = _segments(head_dim, rotary), None
    if transform is not None:
        untouched = rotary is None and mean is None and multiplier is None and divisor is None
        exact_dtype = x.dtype if untouched and x.dtype != torch.float32 else None
        # Interleaved pairs must not be torn apart.
        splits = head_dim % (2 if rotary is None or not rotary.interleaved else 4) == 0
        halves = (head_dim // 2, head_dim // 2)
        rotation = _rotation(transform, x.device, exact_dtype, (splits and len(widths) == 1) or widths == halves)
        widths = halves if rotation.folded else widths
    spans = tuple(max(16, triton.next_power_of_2(width)) for width in widths)  # a tensor core's operands start at 16
    scaled = fmt is not None and fmt.scaled
    extent = -(-seqlen // 16) * 16 if columns else seqlen  # columns' padding is written too
    block = {"token": 1, "block": min(granularity.size, extent)}.get(granularity.kind, extent) if scaled else 1
    together = triton.next_power_of_2(block)
    two_passes = scaled and (granularity.kind in ("head", "tensor", "channel") or together * sum(spans) > _LARGEST_TILE)
    config = config or default_config(sum(spans), 1 if two_passes else together)
    if two_passes:
        together = config.tile
    chunks = -(-block // config.tile) if two_passes else 1
    tiles = -(-(-(-extent // block)) // (config.tile // together)) * chunks
    programs = min(tiles * batch * heads, config.programs * _multiprocessors(x.device))
    plan = _Plan(
        head_dim=head_dim, widths=widths, spans=spans, tile=config.tile, together=together, bound=bound,
        rotary="" if rotary is None else "interleaved" if rotary.interleaved else "halves",
        pairs=0 if rotary is None else rotary.channels // 2, shifts=shift is not None, divides=divisor is not None,
        terms=0 if rotation is None else rotation.terms, folded=rotation is not None and rotation.folded,
        dtype=TRITON_DTYPES[codes.dtype], largest=_FLOAT32_MAX if fmt is None else fmt.max, scaled=scaled, pow2=pow2,
        groups=granularity.kind if two_passes else "tile", only_amax=False,
        layout="rows" if not columns else "ordered" if block % 16 == 0 or block == 1 else "columns",
    )  # fmt: skip
    tables, table_strides = (None, None), (0, 0, 0, 0, 0, 0)
    if rotary is not None:
        tables = (rotary.cos, rotary.sin)
        table_strides = tuple(
            stride for t in tables for stride in (t.stride(0) if t.ndim == 3 and len(t) > 1 else 0, *t.stride()[-2:])
        )
    flags = None if in_use is None else in_use.to(x.device).contiguous().view(torch.uint8)

    def statistic(value: torch.Tensor | None) -> tuple[torch.Tensor | None, int, int]:
        """The tensor, how many of x's heads share a row of it, and its stride between sequences."""
        if value is None:
            return None, 1, 0
        value = value.to(x.device).contiguous()
        return value, heads // value.shape[1], value.stride(0) if len(value) > 1 else 0

    arguments = (
        x, *x.stride(), codes, codes.stride(1), codes.stride(2), scale,
        # A word of zero bits is also 0.0.
        torch.zeros(scale.shape, dtype=torch.int32, device=x.device) if two_passes and scale is not None else None,
        flags, 0 if flags is None or len(flags) == 1 else seqlen, *tables, *table_strides, first_position,
        *statistic(shift_mean if shift_mean is not None else mean),
        *statistic(multiplier if multiplier is not None else divisor), shift,
        *((None,) * 3 if rotation is None else (rotation.high, rotation.low, rotation.signs)),
        1.0 if rotation is None else rotation.factor,
        batch, heads, seqlen, extent, block, granularity.scale_shape(x.shape)[2], chunks, tiles,
    )  # fmt: skip
    for only_amax in (True, False) if two_passes else (False,):
        _quantize_kernel[(programs,)](
            *arguments, PLAN=plan._replace(only_amax=only_amax),
            num_warps=config.warps, num_stages=1, enable_fp_fusion=False,
        )  # fmt: skip


def _segments(head_dim: int, rotary: Rotary | None) -> tuple[int, ...]:
    if rotary is None or rotary.interleaved:
        return (head_dim,)
    pairs = rotary.channels // 2
    return tuple(width for width in (pairs, pairs, head_dim - 2 * pairs) if width)


@lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    # On a CPU, the interpreter's programs run one after another: a few, so that each has several tiles.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


# ---- Kernels ----------------------------------------------------------------------------------------------------------
#
# A tile travels as a tuple of segments, each (tile, span). A row's magnitudes and scales are (tile,).


@triton.constexpr_function
def _start(plan: _Plan, i: int) -> int:
    """First channel of a segment."""
    return sum(plan.widths[:i])


@triton.constexpr_function
def _block(plan: _Plan, i: int, j: int) -> int:
    """Where ``_load_matrix`` put the block from segment i to segment j."""
    return 0 if plan.folded else i * len(plan.spans) + j


@triton.jit
def _rows(block, PLAN: tl.constexpr):
    """A tile's rows, alike in every tile: (token counted from the tile's first, place in its block, block) of each.

    A tile holds ``tile // together`` whole blocks, each in ``together`` rows of which the first ``block`` are used; or
    if a block has several chunks, one of these.
    """
    row = tl.arange(0, PLAN.tile)
    if PLAN.layout == "ordered":  # as columns store tokens, TOKEN_ORDER: what is stored together is loaded together
        slot = row % 16
        row += slot // 4 * 2 + slot // 2 % 2 * 8 + slot % 2 - slot
    return row // PLAN.together * block + row % PLAN.together, row % PLAN.together, row // PLAN.together


@triton.jit
def _place(b, h, tile, heads, block, chunks, PLAN: tl.constexpr):
    """Where a tile lies: (number of the sequence, its first token, its first block, how far into that it begins)."""
    index, skipped = tile // chunks * (PLAN.tile // PLAN.together), tile % chunks * PLAN.tile
    return (b * heads + h).to(tl.int64), index * block + skipped, index, skipped


@triton.jit
def _kept(place, rows, in_use_ptr, block, seqlen):
    """Which rows hold tokens that are in use."""
    _, first, _, skipped = place
    after, inside, _ = rows
    kept = (skipped + inside < block) & (first + after < seqlen)
    if in_use_ptr is not None:
        kept &= tl.load(in_use_ptr + first + after, mask=kept, other=0) != 0
    return kept


@triton.jit
def _load(ptr, rows, kept, stride_s, stride_d, PLAN: tl.constexpr):
    """The rows that are ``kept`` of the tile that begins at ``ptr``; 0 elsewhere."""
    parts = ()
    for i in tl.static_range(len(PLAN.spans)):
        channel = tl.arange(0, PLAN.spans[i])
        offset = (_start(PLAN, i) + channel).to(tl.int64)[None, :] * stride_d
        at = ptr + rows[0].to(tl.int64)[:, None] * stride_s + offset
        parts = parts + (tl.load(at, mask=kept[:, None] & (channel < PLAN.widths[i])[None, :], other=0.0),)
    return parts


@triton.jit
def _load_channels(ptr, PLAN: tl.constexpr):
    """A statistic: segments (span,), 1 in the padding."""
    parts = ()
    for i in tl.static_range(len(PLAN.spans)):
        channel = tl.arange(0, PLAN.spans[i])
        parts = parts + (tl.load(ptr + _start(PLAN, i) + channel, mask=channel < PLAN.widths[i], other=1.0),)
    return parts


@triton.jit
def _load_matrix(ptr, PLAN: tl.constexpr):
    """The matrix in blocks, from segment to segment (``_block``); the one block of a folded matrix."""
    blocks = ()
    count: tl.constexpr = 1 if PLAN.folded else len(PLAN.spans)
    size: tl.constexpr = PLAN.widths[0] if PLAN.folded else PLAN.head_dim
    for i in tl.static_range(count):
        for j in tl.static_range(count):
            row, column = tl.arange(0, PLAN.spans[i]), tl.arange(0, PLAN.spans[j])
            at = ptr + (_start(PLAN, i) + row)[:, None] * size + (_start(PLAN, j) + column)[None, :]
            inside = (row < PLAN.widths[i])[:, None] & (column < PLAN.widths[j])[None, :]
            blocks = blocks + (tl.load(at, mask=inside, other=0.0),)
    return blocks


@triton.jit
def _max_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _finite_magnitude(x, FINITE: tl.constexpr):
    x = tl.abs(x)
    return x if FINITE else tl.where(x < float("inf"), x, 0.0)  # NaN compares false


@triton.jit
def _row_largest(x, FINITE: tl.constexpr):
    """Each row's largest magnitude: of the finite values, or on the assumption that all are, NaN if one is NaN."""
    for i in tl.static_range(len(x)):
        magnitude = _finite_magnitude(x[i].to(tl.float32), FINITE)
        if INTERPRETED:  # reduces by a user's function one element at a time; as bits, NaN is above infinity
            row = tl.max(magnitude.to(tl.int32, bitcast=True), axis=1).to(tl.float32, bitcast=True)
        else:
            row = tl.reduce(magnitude, 1, _max_or_nan)
        largest = row if i == 0 else _max_or_nan(row, largest)
    return largest


@triton.jit
def _bounded(x, PLAN: tl.constexpr, FINITE: tl.constexpr):
    """FP32, with finite values brought within the bound; NaN and infinity stay."""
    parts = ()
    for i in tl.static_range(len(x)):
        value = x[i].to(tl.float32)
        if not FINITE:
            value = tl.where(tl.abs(value) < float("inf"), tl.clamp(value, -PLAN.bound, PLAN.bound), value)
        parts = parts + (value,)
    return parts


@triton.jit
def _turned(x, tables, kept, PLAN: tl.constexpr):
    """Rotary embedding. ``tables``: pointers to cos and sin at each row's position, (tile,), and between their pairs."""
    cos_ptr, cos_c, sin_ptr, sin_c = tables
    turned = ()
    if PLAN.rotary == "halves":
        pair = tl.arange(0, PLAN.spans[0])
        inside = kept[:, None] & (pair < PLAN.pairs)[None, :]
        cos = tl.load(cos_ptr[:, None] + pair[None, :] * cos_c, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr[:, None] + pair[None, :] * sin_c, mask=inside, other=0.0).to(tl.float32)
        turned = (tl.fma(x[1], sin * -1.0, x[0] * cos), tl.fma(x[0], sin, x[1] * cos)) + x[2:]
    else:
        for i in tl.static_range(len(x)):
            within = tl.arange(0, PLAN.spans[i] // 2)
            pair = _start(PLAN, i) // 2 + within
            turns = ((within * 2 < PLAN.widths[i]) & (pair < PLAN.pairs))[None, :]
            inside = kept[:, None] & turns
            cos = tl.load(cos_ptr[:, None] + pair[None, :] * cos_c, mask=inside, other=0.0).to(tl.float32)
            sin = tl.load(sin_ptr[:, None] + pair[None, :] * sin_c, mask=inside, other=0.0).to(tl.float32)
            left, right = tl.split(tl.reshape(x[i], (PLAN.tile, PLAN.spans[i] // 2, 2)))
            new_left = tl.where(turns, tl.fma(right, sin * -1.0, left * cos), left)
            new_right = tl.where(turns, tl.fma(left, sin, right * cos), right)
            turned = turned + (tl.reshape(tl.join(new_left, new_right), (PLAN.tile, PLAN.spans[i])),)
    return turned


@triton.jit
def _shift(x, mean):
    """x . mean of each row, clamped to +-1e38: the mean is brought to magnitude 1, so that no sum overflows."""
    largest = tl.max(tl.abs(mean[0]), axis=0)
    for i in tl.static_range(1, len(mean)):
        largest = tl.maximum(largest, tl.max(tl.abs(mean[i]), axis=0))
    # The biased exponent; up to 253, so that its inverse is a normal number too.
    exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 1), 253)
    up, down = (exponent << 23).to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    total = tl.sum(x[0] * (mean[0] * down)[None, :], axis=1)
    for i in tl.static_range(1, len(mean)):
        total += tl.sum(x[i] * (mean[i] * down)[None, :], axis=1)
    total *= up
    return tl.where(total > 1e38, 1e38, tl.where(total < -1e38, -1e38, total))  # NaN stays


@triton.jit
def _smoothed(x, kept, mean, factor, signs, PLAN: tl.constexpr):
    """Minus ``mean``, times or over ``factor``, and if the rotation is folded to x0 + signs x1 and x0 - signs x1."""
    parts, factors = (), ()
    for i in tl.static_range(len(x)):
        y = x[i]
        if mean is not None and not PLAN.shifts:
            y = tl.where(kept[:, None], y - mean[i][None, :], 0.0)
        if factor is not None and PLAN.divides and PLAN.terms == 0:
            y = tl.div_rn(y, tl.broadcast_to(factor[i][None, :], y.shape))
        elif factor is not None:
            by = factor[i]
            if PLAN.divides:  # beside the rotation's own roundings, that of a reciprocal is small
                by = 1.0 / by
            factors = factors + (by,)
            if not PLAN.folded or i == 0:
                y *= by[None, :]
        parts = parts + (y,)
    if PLAN.folded:
        by = signs * factors[1] if factor is not None else signs
        by = tl.broadcast_to(by[None, :], parts[1].shape)
        parts = (tl.fma(parts[1], by, parts[0]), tl.fma(parts[1], by * -1.0, parts[0]))
    return parts


@triton.jit
def _dot(a, b, sums):
    if INTERPRETED:  # its dot takes BF16's bits for numbers
        return tl.dot(a.to(tl.float32), b.to(tl.float32), sums, input_precision="ieee")
    return tl.dot(a, b, sums)


@triton.jit
def _without_infinity(x):
    return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0).to(x.dtype)


@triton.jit
def _rotated(x, high, low, PLAN: tl.constexpr, FINITE: tl.constexpr):
    """(x times the matrix, over ``inverse``; ``inverse``: (tile,), a power of two).

    The dots take 16-bit operands: x as it is (one term); or rows that are brought to magnitude 2^14 and split into the
    sum of two FP16 values, which loses 2^-23 of an element or 2^-39 of the row's largest.
    """
    inverse = tl.full((PLAN.tile,), 1.0, tl.float32)
    first, second = x, x
    if PLAN.terms > 1:
        exponent = _row_largest(x, FINITE).to(tl.int32, bitcast=True) >> 23
        up = tl.minimum(127 + 14 - exponent + 127, 127 + 120)  # biased; with its inverse far from subnormal numbers
        inverse = ((254 - up) << 23).to(tl.float32, bitcast=True)
        first, second = (), ()
        for i in tl.static_range(len(x)):
            y = x[i] * (up << 23).to(tl.float32, bitcast=True)[:, None]
            near = y.to(tl.float16)
            rest = y - near.to(tl.float32)
            if not FINITE:  # infinity is in the first term alone
                rest = tl.where(tl.abs(y) < float("inf"), rest, 0.0)
            first, second = first + (near,), second + (rest.to(tl.float16),)
    parts = ()
    for j in tl.static_range(len(x)):
        sums = tl.zeros((PLAN.tile, PLAN.spans[j]), tl.float32)
        for i in tl.static_range(len(x)):
            if i == j or not PLAN.folded:
                if PLAN.terms > 1:
                    sums = _dot(second[i], high[_block(PLAN, i, j)], sums)
                if PLAN.terms == 3:  # where both terms of the matrix differ in sign, infinity twice would make NaN
                    sums = _dot(first[i] if FINITE else _without_infinity(first[i]), low[_block(PLAN, i, j)], sums)
                sums = _dot(first[i], high[_block(PLAN, i, j)], sums)
        parts = parts + (sums,)
    return parts, inverse


@triton.jit
def _corrected(x, divisor, reciprocal):
    """x / divisor as IEEE rounds it, from an approximate reciprocal: the residual of the product with it is exact.

    Unless it is a subnormal number: the caller's to exclude.
    """
    about = x * reciprocal
    return tl.fma(tl.fma(about, divisor * -1.0, x), reciprocal, about)


@triton.jit
def _quotient(x, divisor, FINITE: tl.constexpr):
    """x / divisor as IEEE rounds it; divisor is positive, normal and below 2^127, and below 2^-90 only if not FINITE.

    What compiled code computes for ``/`` is approximate, and the correctly rounded division is slow; here the
    reciprocal is made once for all that share it.
    """
    if INTERPRETED:  # NumPy divides as IEEE does, and has no fused multiply-add
        return x / divisor
    if not FINITE:  # both over the divisor's power of two: no residual that matters to a code is a subnormal number
        down = (0x7F000000 - (divisor.to(tl.int32, bitcast=True) & 0x7F800000)).to(tl.float32, bitcast=True)
        divisor *= down
        x *= down
    reciprocal = 1.0 / divisor
    return _corrected(x, tl.broadcast_to(divisor, x.shape), tl.broadcast_to(reciprocal, x.shape))


@triton.jit
def _scale_of(amax, PLAN: tl.constexpr):
    """``quantize_tensor``'s scale of groups whose largest finite magnitude is ``amax``."""
    tiny: tl.constexpr = 1.1754943508222875e-38
    if INTERPRETED:
        scale = amax / PLAN.largest
    else:  # right for every significand over each format's largest value (checked exhaustively)
        scale = _corrected(amax, PLAN.largest, 1.0 / PLAN.largest)
    scale = tl.maximum(scale, tiny)
    if PLAN.pow2:
        scale = ((scale.to(tl.int32, bitcast=True) + 0x007FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(amax > 0, scale, 1.0)


@triton.jit
def _prepared(raw, kept, tables, mean, factor, signs, high, low, matrix_factor, PLAN: tl.constexpr,
              FINITE: tl.constexpr):  # fmt: skip
    """(What is to be quantized, over ``inverse``; ``inverse``; each row's largest magnitude; x . mean).

    ``FINITE`` assumes that all is finite and within the bound. If it is not, some row's largest magnitude is NaN or
    beyond 2^80, as far as smoothing lets it through.
    """
    x, shift = _bounded(raw, PLAN, FINITE), None
    if PLAN.rotary != "":
        x = _turned(x, tables, kept, PLAN)
    if PLAN.shifts:
        shift = _shift(x, mean)
    x = _smoothed(x, kept, mean, factor, signs, PLAN)
    inverse = None
    if PLAN.terms == 1:  # nothing was done to it, and the bound is a value of its dtype
        operand = ()
        for i in tl.static_range(len(raw)):
            operand = operand + (raw[i] if FINITE else cast(x[i], raw[i].dtype),)
        x = operand
    if PLAN.terms > 0:
        x, inverse = _rotated(x, high, low, PLAN, FINITE)
        inverse *= matrix_factor
    largest = _row_largest(x, FINITE)
    if PLAN.terms > 0:
        largest *= inverse
    return x, inverse, largest, shift


@triton.jit
def _raise_amax(amax_ptr, x, largest, place, blocks, PLAN: tl.constexpr, FINITE: tl.constexpr):
    """Raise the largest magnitudes of the tile's group, or of its channels, to the tile's."""
    sequence, _, index, _ = place
    if PLAN.groups == "channel":
        tl.static_assert(PLAN.terms == 0, "a scale per channel is for values, which are not rotated")
        for i in tl.static_range(len(x)):
            channel = tl.arange(0, PLAN.spans[i])
            bits = tl.max(_finite_magnitude(x[i], FINITE), axis=0).to(tl.int32, bitcast=True)
            at = amax_ptr + sequence * PLAN.head_dim + _start(PLAN, i) + channel
            tl.atomic_max(at, bits, mask=channel < PLAN.widths[i], sem="relaxed")
    else:
        bits = tl.max(largest, axis=0).to(tl.int32, bitcast=True)
        group, exists, _ = _group(place, blocks, PLAN)
        tl.atomic_max(amax_ptr + group, bits, mask=exists, sem="relaxed")


@triton.jit
def _group(place, blocks, PLAN: tl.constexpr):
    """Of the group that the tile is a part of: (number, whether it exists, whether the tile is its first)."""
    sequence, first, index, skipped = place
    if PLAN.groups == "tensor":
        return sequence * 0, index >= 0, (first == 0) & (sequence == 0)
    elif PLAN.groups == "block":  # padding may lie beyond the last
        return sequence * blocks + index, index < blocks, skipped == 0
    else:
        return sequence, index >= 0, first == 0


@triton.jit
def _quantized(
    x, inverse, largest, rows, place, codes_ptr, head_stride, row_stride, scale_ptr, amax_ptr, extent, block, blocks,
    PLAN: tl.constexpr, FINITE: tl.constexpr,
):  # fmt: skip
    """Scale, cast and store a tile."""
    after, inside, block_after = rows
    sequence, first, index, skipped = place
    if PLAN.scaled and PLAN.groups == "tile":
        if PLAN.together > 1:
            shape: tl.constexpr = (PLAN.tile // PLAN.together, PLAN.together)
            scale = _scale_of(tl.max(tl.reshape(largest, shape), axis=1), PLAN)
            scale = tl.reshape(tl.broadcast_to(scale[:, None], shape), (PLAN.tile,))
        else:
            scale = _scale_of(largest, PLAN)
        at = index + block_after
        tl.store(scale_ptr + sequence * blocks + at, scale, mask=(inside == 0) & (at < blocks))
        scale = scale[:, None]
    elif PLAN.scaled and PLAN.groups != "channel":
        group, exists, leads = _group(place, blocks, PLAN)
        amax = tl.load(amax_ptr + group, mask=exists, other=0)
        scale = _scale_of(amax.to(tl.float32, bitcast=True), PLAN)
        tl.store(scale_ptr + group, scale, mask=leads & exists)
    if PLAN.terms > 0:
        by = inverse[:, None]
        if PLAN.scaled:
            by = by / scale
    for i in tl.static_range(len(x)):
        channel = tl.arange(0, PLAN.spans[i])
        at = _start(PLAN, i) + channel
        if PLAN.groups == "channel":
            amax_at = amax_ptr + sequence * PLAN.head_dim + at
            amax = tl.load(amax_at, mask=channel < PLAN.widths[i], other=0)
            scale = _scale_of(amax.to(tl.float32, bitcast=True), PLAN)
            here = tl.where(first == 0, PLAN.widths[i], 0)
            tl.store(scale_ptr + sequence * PLAN.head_dim + at, scale, mask=channel < here)
            scale = scale[None, :]
        values = x[i]
        if PLAN.terms > 0:
            values *= by
        elif PLAN.scaled and FINITE:
            values = _quotient(values, scale, True)
        elif PLAN.scaled:
            values = tl.where(tl.abs(values) == float("inf"), values, _quotient(_without_infinity(values), scale, False))
        if not FINITE and PLAN.dtype != tl.float32:  # saturate; NaN compares false and stays
            values = tl.where(values > PLAN.largest, PLAN.largest, values)
            values = tl.where(values < -PLAN.largest, -PLAN.largest, values)
        codes = cast(values, PLAN.dtype)
        to = codes_ptr + sequence * head_stride
        if PLAN.layout == "rows":
            to = to + first.to(tl.int64) * row_stride
            used = (skipped + inside < block) & (first + after < extent)
            mask = used[:, None] & (channel < PLAN.widths[i])[None, :]
            tl.store(to + after[:, None] * row_stride + at[None, :], codes, mask=mask)
        else:
            column = tl.arange(0, PLAN.tile)
            if PLAN.layout == "ordered":
                used = (skipped + column % PLAN.together < block) & (first + column < extent)
                column += first
            else:
                used = (skipped + inside < block) & (first + after < extent)
                slot = (first + after) % 16
                column = first + after - slot + slot % 8 // 2 * 4 + slot // 8 * 2 + slot % 2
            mask = (channel < PLAN.widths[i])[:, None] & used[None, :]
            tl.store(to + at.to(tl.int64)[:, None] * row_stride + column[None, :], tl.trans(codes), mask=mask)


@triton.jit
def _quantize_kernel(
    x_ptr, x_b, x_h, x_s, x_d, codes_ptr, head_stride, row_stride, scale_ptr, amax_ptr, in_use_ptr, in_use_b,
    cos_ptr, sin_ptr, cos_b, cos_p, cos_c, sin_b, sin_p, sin_c, first_position,
    mean_ptr, mean_group, mean_b, factor_ptr, factor_group, factor_b, shift_ptr,
    high_ptr, low_ptr, signs_ptr, matrix_factor,
    batch, heads, seqlen, extent, block, blocks, chunks, tiles, PLAN: tl.constexpr,
):  # fmt: skip
    """Quantize this program's share of the tiles. A pointer is None where ``_launch`` had no tensor.

    Tiles are numbered with heads running fastest, so that a program which works through heads finds the rotary tables
    of its tokens in the cache. Each tile is loaded while the one before it is worked on.
    """
    count, programs, program = tiles * heads * batch, tl.num_programs(0), tl.program_id(0)
    begin = program * (count // programs) + tl.minimum(program, count % programs)
    end = begin + count // programs + (program < count % programs).to(tl.int32)
    h, b, tile = begin % heads, begin // heads % batch, begin // heads // batch
    rows = _rows(block, PLAN)
    high, low, signs = None, None, None
    if high_ptr is not None:
        high = _load_matrix(high_ptr, PLAN)
    if low_ptr is not None:
        low = _load_matrix(low_ptr, PLAN)

    place = _place(b, h, tile, heads, block, chunks, PLAN)
    in_use = None if in_use_ptr is None else in_use_ptr + b.to(tl.int64) * in_use_b
    kept = _kept(place, rows, in_use, block, tl.where(begin < end, seqlen, 0))
    start = x_ptr + b.to(tl.int64) * x_b + h.to(tl.int64) * x_h + place[1].to(tl.int64) * x_s
    ahead = _load(start, rows, kept, x_s, x_d, PLAN)
    for item in range(begin, end):
        raw, place_now, kept_now, b_now, h_now = ahead, place, kept, b.to(tl.int64), h
        h += 1
        b += (h == heads).to(tl.int32)
        h = tl.where(h == heads, 0, h)
        tile += (b == batch).to(tl.int32)
        b = tl.where(b == batch, 0, b)
        place = _place(b, h, tile, heads, block, chunks, PLAN)
        in_use = None if in_use_ptr is None else in_use_ptr + b.to(tl.int64) * in_use_b
        kept = _kept(place, rows, in_use, block, tl.where(item + 1 < end, seqlen, 0))
        start = x_ptr + b.to(tl.int64) * x_b + h.to(tl.int64) * x_h + place[1].to(tl.int64) * x_s
        ahead = _load(start, rows, kept, x_s, x_d, PLAN)

        token = place_now[1] + rows[0]
        mean, factor, signs, tables = None, None, None, None
        if mean_ptr is not None:
            mean = _load_channels(mean_ptr + b_now * mean_b + h_now // mean_group * PLAN.head_dim, PLAN)
        if factor_ptr is not None:
            factor = _load_channels(factor_ptr + b_now * factor_b + h_now // factor_group * PLAN.head_dim, PLAN)
        if signs_ptr is not None:
            channel = tl.arange(0, PLAN.spans[1])
            signs = tl.load(signs_ptr + channel, mask=channel < PLAN.widths[1], other=1.0)
        if cos_ptr is not None:
            position = (token + first_position).to(tl.int64)
            cos, sin = cos_ptr + b_now * cos_b + position * cos_p, sin_ptr + b_now * sin_b + position * sin_p
            tables = (cos, cos_c, sin, sin_c)

        x, inverse, largest, shift = _prepared(
            raw, kept_now, tables, mean, factor, signs, high, low, matrix_factor, PLAN, True
        )
        # Smoothing can bring anything under the bound, and a quotient of small values needs care.
        usual = largest <= 2.0**80
        if mean_ptr is not None or factor_ptr is not None:
            usual &= _row_largest(raw, True) <= PLAN.bound
        if PLAN.terms == 0:
            usual &= (largest >= 2.0**-80) | (largest == 0)
        if tl.min(usual.to(tl.int32), axis=0) == 1:
            if PLAN.only_amax:
                _raise_amax(amax_ptr, x, largest, place_now, blocks, PLAN, True)
            else:
                _quantized(
                    x, inverse, largest, rows, place_now, codes_ptr, head_stride, row_stride, scale_ptr, amax_ptr,
                    extent, block, blocks, PLAN, True,
                )  # fmt: skip
        else:
            x, inverse, largest, shift = _prepared(
                raw, kept_now, tables, mean, factor, signs, high, low, matrix_factor, PLAN, False
            )
            if PLAN.only_amax:
                _raise_amax(amax_ptr, x, largest, place_now, blocks, PLAN, False)
            else:
                _quantized(
                    x, inverse, largest, rows, place_now, codes_ptr, head_stride, row_stride, scale_ptr, amax_ptr,
                    extent, block, blocks, PLAN, False,
                )  # fmt: skip
        if PLAN.shifts and not PLAN.only_amax:
            mask = (place_now[3] + rows[1] < block) & (token < seqlen)
            tl.store(shift_ptr + place_now[0] * seqlen + token, shift, mask=mask)
