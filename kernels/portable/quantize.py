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
    """A transform's matrix as the kernel multiplies by it: ``factor * diag(signs) * (high + low)``.

    Attributes:
        high, low: (D, D), or (D/2, D/2) when folded; 16 bits wide. low is None when high is exact.
        factor: FP32 number taken out.
        signs: FP32 (D,) of +-1, or None when they are in the matrix.
        terms: how many dots.
        folded: the matrix is [[high, high], [high, -high]].
    """

    high: torch.Tensor
    low: torch.Tensor | None
    factor: float
    signs: torch.Tensor | None
    terms: int
    folded: bool


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
                return _Rotation(units.to(device, exact_dtype), None, factor, None, 1, False)
            half = len(units) // 2
            signs = torch.where(units[:, 0] < 0, -1.0, 1.0)
            straight = signs[:, None] * units
            block = straight[:half, :half].contiguous()
            if halves and torch.equal(straight, torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double(), block)):
                high = block.to(device, torch.float16)
                return _Rotation(high, None, factor, signs.to(device, torch.float32), 2, True)
            return _Rotation(units.to(device, torch.float16), None, factor, None, 2, False)
        # Entries up to 2^13, so that small ones keep their bits; with rows up to 2^15, sums of 256 terms are far from
        # FP32's largest.
        power = 2.0 ** (13 - math.frexp(factor)[1])
        high = (matrix * power).to(torch.float16)
        low = (matrix * power - high.double()).to(torch.float16)
        return _Rotation(high.to(device), low.to(device), 1 / power, None, 3, False)


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
    widths = _segments(head_dim, rotary)
    rotation = None
    if transform is not None:
        untouched = rotary is None and mean is None and multiplier is None and divisor is None
        exact_dtype = x.dtype if untouched and x.dtype != torch.float32 else None
        pairs_in_halves = rotary is None or not rotary.interleaved or head_dim % 4 == 0
        halves = (len(widths) == 1 and head_dim % 2 == 0 and pairs_in_halves) or widths == (head_dim // 2,) * 2
        rotation = _rotation(transform, x.device, exact_dtype, halves)
        if rotation.folded:
            widths = (head_dim // 2,) * 2
    # A tensor core's operands are at least 16 wide.
    spans = tuple(max(16, triton.next_power_of_2(width)) for width in widths)
    scaled = fmt is not None and fmt.scaled
    extent = -(-seqlen // 16) * 16 if columns else seqlen  # padding is written too
    block = {"token": 1, "block": min(granularity.size, extent)}.get(granularity.kind, extent) if scaled else 1
    together = triton.next_power_of_2(block)
    two_passes = scaled and (granularity.kind in ("head", "tensor", "channel") or together * sum(spans) > 32768)
    config = config or default_config(sum(spans), 1 if two_passes else together)
    if two_passes or together > config.tile:
        together = config.tile
    chunks = -(-block // together)
    blocks = -(-extent // block)
    tiles = -(-blocks // (config.tile // together)) * chunks
    programs = min(tiles * batch * heads, config.programs * _multiprocessors(x.device))
    # In the permuted order only if a tile is 16 tokens after 16 tokens
    in_order = columns and config.tile % 16 == 0 and (block % 16 == 0 or block == 1)
    per_head = -(-seqlen // block) if granularity.kind in ("token", "block") else 1
    amax = None
    if two_passes:
        # A word of zero bits is also 0.0.
        amax = torch.zeros(scale.shape, dtype=torch.int32, device=x.device)  # type: ignore[union-attr]
    tables = (None, None) if rotary is None else (rotary.cos, rotary.sin)
    cos_strides = (0, 0, 0) if rotary is None else (0, *rotary.cos.stride())[-3:]
    sin_strides = (0, 0, 0) if rotary is None else (0, *rotary.sin.stride())[-3:]
    if rotary is not None and rotary.cos.ndim == 3 and rotary.cos.shape[0] == 1:
        cos_strides, sin_strides = (0, *cos_strides[1:]), (0, *sin_strides[1:])
    flags = None if in_use is None else in_use.to(x.device).view(torch.uint8)

    def statistic(value: torch.Tensor | None) -> tuple[torch.Tensor | None, int, int]:
        """The tensor, its heads' share of x's, and its stride between sequences."""
        if value is None:
            return None, 1, 0
        value = value.to(device=x.device, dtype=torch.float32).contiguous()
        return value, heads // value.shape[1], value.stride(0) if value.shape[0] > 1 else 0

    mean_of = statistic(shift_mean if shift_mean is not None else mean)
    factor_of = statistic(multiplier if multiplier is not None else divisor)
    for only_amax in (True, False) if two_passes else (False,):
        _quantize_kernel[(programs,)](
            x, *x.stride(), codes, scale, amax, flags, 0 if flags is None or len(flags) == 1 else flags.stride(0),
            *tables, *cos_strides, *sin_strides, first_position,
            *mean_of, *factor_of, shift,
            *((None, None, None, 1.0) if rotation is None else
              (rotation.high, rotation.low, rotation.signs, rotation.factor)),
            batch, heads, seqlen, extent, codes.stride(1), codes.stride(2), block, per_head, chunks, tiles,
            D=head_dim, WIDTHS=widths, SPANS=spans, TILE=config.tile, TOGETHER=together, BOUND=bound,
            ROTARY="" if rotary is None else "interleaved" if rotary.interleaved else "halves",
            PAIRS=0 if rotary is None else rotary.channels // 2,
            DIVIDE=divisor is not None, TERMS=0 if rotation is None else rotation.terms,
            FOLDED=rotation is not None and rotation.folded,
            DTYPE=TRITON_DTYPES[codes.dtype], LARGEST=_FLOAT32_MAX if fmt is None else fmt.max, SCALED=scaled,
            POW2=pow2, GROUPS=granularity.kind if two_passes else "tile", ONLY_AMAX=only_amax,
            LAYOUT="rows" if not columns else "ordered" if in_order else "columns",
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


@triton.constexpr_function
def _start(widths: tuple[int, ...], i: int) -> int:
    return sum(widths[:i])


@triton.jit
def _max_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _row_largest(x):
    """Largest magnitude of each row over all segments, NaN if the row holds one."""
    for i in tl.static_range(len(x)):
        if INTERPRETED:  # a user's function reduces one element after another there; as bits, NaN is above infinity
            bits = x[i].to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
            row = tl.max(bits, axis=1).to(tl.float32, bitcast=True)
            largest = row if i == 0 else tl.where((row > largest) | (row != row), row, largest)
        else:
            row = tl.reduce(tl.abs(x[i].to(tl.float32)), 1, _max_or_nan)
            largest = row if i == 0 else _max_or_nan(row, largest)
    return largest


@triton.jit
def _finite_magnitude(x, FINITE: tl.constexpr):
    x = tl.abs(x)
    return x if FINITE else tl.where(x < float("inf"), x, 0.0)  # NaN compares false


@triton.jit
def _row_finite_largest(x, FINITE: tl.constexpr):
    for i in tl.static_range(len(x)):
        row = tl.max(_finite_magnitude(x[i], FINITE), axis=1)
        largest = row if i == 0 else tl.maximum(largest, row)
    return largest


@triton.jit
def _corrected(x, divisor, reciprocal):
    """x / divisor as IEEE rounds it, from an approximate reciprocal: the residual of the product with it is exact."""
    about = x * reciprocal
    return tl.fma(tl.fma(-about, divisor, x), reciprocal, about)


@triton.jit
def _quotient(x, divisor):
    """x / divisor as IEEE rounds it, where it is no subnormal number; divisor is positive, normal and below 2^127.

    What compiled code computes for ``/`` is approximate, and the correctly rounded division is slow; here the
    reciprocal is made once for all that share it. Both sides are first divided by the divisor's power of two, so that
    no residual that matters is a subnormal number.
    """
    if INTERPRETED:  # NumPy divides as IEEE does, and has no fused multiply-add
        return x / divisor
    down = (0x7F000000 - (divisor.to(tl.int32, bitcast=True) & 0x7F800000)).to(tl.float32, bitcast=True)
    divisor *= down
    reciprocal = 1.0 / divisor
    return _corrected(x * down, tl.broadcast_to(divisor, x.shape), tl.broadcast_to(reciprocal, x.shape))


@triton.jit
def _scale_of(amax, LARGEST: tl.constexpr, POW2: tl.constexpr):
    """``quantize_tensor``'s scale of groups whose largest finite magnitude is ``amax``."""
    tiny: tl.constexpr = 1.1754943508222875e-38
    if INTERPRETED:
        scale = amax / LARGEST
    else:  # right for every float over the four formats' largest values (checked exhaustively)
        scale = _corrected(amax, LARGEST, 1.0 / LARGEST)
    scale = tl.maximum(scale, tiny)
    if POW2:
        scale = ((scale.to(tl.int32, bitcast=True) + 0x007FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(amax > 0, scale, 1.0)


@triton.jit
def _float32(x):
    parts = ()
    for i in tl.static_range(len(x)):
        parts = parts + (x[i].to(tl.float32),)
    return parts


@triton.jit
def _as_raw(x, raw):
    """FP32 values that the input's dtype holds, in it."""
    parts = ()
    for i in tl.static_range(len(x)):
        parts = parts + (cast(x[i], raw[i].dtype),)
    return parts


@triton.jit
def _bounded(x, BOUND: tl.constexpr):
    """FP32, with finite values brought within the bound; NaN and infinity stay."""
    parts = ()
    for i in tl.static_range(len(x)):
        value = x[i].to(tl.float32)
        parts = parts + (tl.where(tl.abs(value) < float("inf"), tl.clamp(value, -BOUND, BOUND), value),)
    return parts


@triton.jit
def _rows(block, TILE: tl.constexpr, TOGETHER: tl.constexpr, LAYOUT: tl.constexpr):
    """A tile's rows, in every tile alike: each row's (token after the tile's first, place in its block, block).

    A tile holds ``TILE // TOGETHER`` whole blocks, each in TOGETHER rows of which the first ``block`` are used; or, if
    a block has several chunks, one of these.
    """
    row = tl.arange(0, TILE)
    if LAYOUT == "ordered":  # as columns store tokens, TOKEN_ORDER: what is stored together is loaded together
        slot = row % 16
        row += slot // 4 * 2 + slot // 2 % 2 * 8 + slot % 2 - slot
    return row // TOGETHER * block + row % TOGETHER, row % TOGETHER, row // TOGETHER


@triton.jit
def _place(b, h, tile, heads, block, chunks, TILE: tl.constexpr, TOGETHER: tl.constexpr):
    """(Number of the sequence, number of the tile, its first token, its first block, where in that block it begins)."""
    index, skipped = tile // chunks * (TILE // TOGETHER), tile % chunks * TILE
    return (b * heads + h).to(tl.int64), tile, index * block + skipped, index, skipped


@triton.jit
def _kept(place, rows, in_use_ptr, in_use_offset, block, seqlen):
    """Which rows hold tokens of the tile that are in use."""
    token = place[2] + rows[0]
    kept = (place[4] + rows[1] < block) & (token < seqlen)
    if in_use_ptr is not None:
        kept &= tl.load(in_use_ptr + in_use_offset + token, mask=kept, other=0) != 0
    return kept


@triton.jit
def _load(ptr, row, kept, stride_s, stride_d, WIDTHS: tl.constexpr, SPANS: tl.constexpr):
    """The segments of ``kept`` rows, (TILE, SPANS[i]); 0 elsewhere."""
    parts = ()
    for i in tl.static_range(len(SPANS)):
        channel = tl.arange(0, SPANS[i])
        inside = kept[:, None] & (channel < WIDTHS[i])[None, :]
        offset = row[:, None].to(tl.int64) * stride_s + (_start(WIDTHS, i) + channel)[None, :].to(tl.int64) * stride_d
        pointers = ptr + offset
        parts = parts + (tl.load(pointers, mask=inside, other=0.0),)
    return parts


@triton.jit
def _load_channels(ptr, WIDTHS: tl.constexpr, SPANS: tl.constexpr, other: tl.constexpr):
    """The segments of a statistic, (SPANS[i],) FP32."""
    parts = ()
    for i in tl.static_range(len(SPANS)):
        channel = tl.arange(0, SPANS[i])
        parts = parts + (tl.load(ptr + _start(WIDTHS, i) + channel, mask=channel < WIDTHS[i], other=other),)
    return parts


@triton.jit
def _load_matrix(ptr, WIDTHS: tl.constexpr, SPANS: tl.constexpr, FOLDED: tl.constexpr):
    """The blocks of the matrix, by segment of x and then of the result; the one block of a folded one."""
    blocks = ()
    count: tl.constexpr = 1 if FOLDED else len(SPANS)
    size: tl.constexpr = WIDTHS[0] if FOLDED else _start(WIDTHS, len(WIDTHS))
    for i in tl.static_range(count):
        for j in tl.static_range(count):
            row, column = tl.arange(0, SPANS[i]), tl.arange(0, SPANS[j])
            inside = (row < WIDTHS[i])[:, None] & (column < WIDTHS[j])[None, :]
            at = ptr + (_start(WIDTHS, i) + row)[:, None] * size + (_start(WIDTHS, j) + column)[None, :]
            blocks = blocks + (tl.load(at, mask=inside, other=0.0),)
    return blocks


@triton.jit
def _turned(x, cos_ptr, sin_ptr, cos_row, sin_row, kept, cos_c, sin_c, WIDTHS: tl.constexpr, SPANS: tl.constexpr,
            PAIRS: tl.constexpr, ROTARY: tl.constexpr):  # fmt: skip
    """Rotary embedding. ``cos_row``, ``sin_row``: (TILE,) offsets of each row's position in the tables."""
    if ROTARY == "":
        turned = x
    elif ROTARY == "halves":
        pair = tl.arange(0, SPANS[0])
        inside = kept[:, None] & (pair < PAIRS)[None, :]
        cos = tl.load(cos_ptr + cos_row[:, None] + pair[None, :] * cos_c, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + sin_row[:, None] + pair[None, :] * sin_c, mask=inside, other=0.0).to(tl.float32)
        turned = (x[0] * cos - x[1] * sin, x[1] * cos + x[0] * sin) + x[2:]
    else:
        turned = ()
        for i in tl.static_range(len(SPANS)):
            within = tl.arange(0, SPANS[i] // 2)
            pair = _start(WIDTHS, i) // 2 + within
            turns = (within * 2 < WIDTHS[i]) & (pair < PAIRS)
            inside = kept[:, None] & turns[None, :]
            cos = tl.load(cos_ptr + cos_row[:, None] + pair[None, :] * cos_c, mask=inside, other=0.0).to(tl.float32)
            sin = tl.load(sin_ptr + sin_row[:, None] + pair[None, :] * sin_c, mask=inside, other=0.0).to(tl.float32)
            left, right = tl.split(tl.reshape(x[i], (x[i].shape[0], SPANS[i] // 2, 2)))
            new_left = tl.where(turns[None, :], left * cos - right * sin, left)
            new_right = tl.where(turns[None, :], right * cos + left * sin, right)
            turned = turned + (tl.reshape(tl.join(new_left, new_right), x[i].shape),)
    return turned


@triton.jit
def _smoothed(x, kept, mean, factor, signs, SHIFT: tl.constexpr, DIVIDE: tl.constexpr, ROTATED: tl.constexpr,
              FOLDED: tl.constexpr):  # fmt: skip
    """Minus ``mean`` (unless it is for the shift), times or over ``factor``, times signs, folded."""
    parts = ()
    for i in tl.static_range(len(x)):
        y = x[i]
        if mean is not None and not SHIFT:
            y = tl.where(kept[:, None], y - mean[i][None, :], 0.0)
        if factor is not None:
            if not DIVIDE:
                by = factor[i]
            elif ROTATED:  # a rounding more is small beside the rotation's own
                by = tl.div_rn(tl.full(factor[i].shape, 1.0, tl.float32), factor[i])
            if DIVIDE and not ROTATED:
                y = tl.div_rn(y, tl.broadcast_to(factor[i][None, :], y.shape))
            else:
                if signs is not None:
                    by *= signs[i]
                y *= by[None, :]
        elif signs is not None:
            y *= signs[i][None, :]
        parts = parts + (y,)
    if FOLDED:
        parts = (parts[0] + parts[1], parts[0] - parts[1])
    return parts


@triton.jit
def _shift(x, mean):
    """x . mean of each row, clamped to +-1e38: the mean is brought to magnitude 1, so that no sum overflows."""
    largest = tl.max(tl.abs(mean[0]), axis=0)
    for i in tl.static_range(1, len(mean)):
        largest = tl.maximum(largest, tl.max(tl.abs(mean[i]), axis=0))
    exponent = tl.clamp(((largest.to(tl.int32, bitcast=True) >> 23) - 127).to(tl.float32), -126.0, 126.0).to(tl.int32)
    down, up = ((127 - exponent) << 23).to(tl.float32, bitcast=True), ((127 + exponent) << 23).to(tl.float32, bitcast=True)
    total = tl.sum(x[0] * (mean[0] * down)[None, :], axis=1)
    for i in tl.static_range(1, len(mean)):
        total += tl.sum(x[i] * (mean[i] * down)[None, :], axis=1)
    total *= up
    return tl.where(total > 1e38, 1e38, tl.where(total < -1e38, -1e38, total))  # NaN stays


@triton.jit
def _dot(a, b, sums):
    if INTERPRETED:  # its dot takes BF16's bits for numbers
        return tl.dot(a.to(tl.float32), b.to(tl.float32), sums, input_precision="ieee")
    return tl.dot(a, b, sums)


@triton.jit
def _rotated(x, row_largest, high, low, TERMS: tl.constexpr, FOLDED: tl.constexpr, FINITE: tl.constexpr):
    """x times the matrix, over ``inverse``: segments of the result in FP32, and ``inverse`` (TILE,), a power of two.

    The dots take 16-bit operands: ``x`` itself (one term); or its rows, brought to magnitude 2^14 and split into the
    sum of two FP16 values, of which what is lost is 2^-23 of an element or 2^-39 of the row's largest.
    """
    count: tl.constexpr = len(x)
    if TERMS == 1:
        first, second = x, x
        inverse = tl.full(row_largest.shape, 1.0, tl.float32)
    else:
        exponent = row_largest.to(tl.int32, bitcast=True) >> 23
        up = tl.minimum(127 + 14 + 127 - exponent, 253)  # its own exponent; 253, so that its inverse is normal too
        scale = (up << 23).to(tl.float32, bitcast=True)[:, None]
        inverse = ((254 - up) << 23).to(tl.float32, bitcast=True)
        first, second = (), ()
        for i in tl.static_range(count):
            y = x[i] * scale
            near = y.to(tl.float16)
            rest = y - near.to(tl.float32)
            if not FINITE:  # infinity is in the first term alone
                rest = tl.where(tl.abs(y) < float("inf"), rest, 0.0)
            first, second = first + (near,), second + (rest.to(tl.float16),)
    parts = ()
    for j in tl.static_range(count):
        product = tl.zeros((x[j].shape[0], x[j].shape[1]), tl.float32)
        for i in tl.static_range(count):
            if not FOLDED or i == j:
                at: tl.constexpr = 0 if FOLDED else i * count + j
                if TERMS > 1:
                    product = _dot(second[i], high[at], product)
                if TERMS == 3:
                    finite = first[i]
                    if not FINITE:  # times an entry of the other sign infinity would make NaN of the first term's
                        finite = tl.where(tl.abs(finite.to(tl.float32)) < float("inf"), finite, 0.0).to(tl.float16)
                    product = _dot(finite, low[at], product)
                product = _dot(first[i], high[at], product)
        parts = parts + (product,)
    return parts, inverse


@triton.jit
def _finish(
    x, row_largest, rows, place, codes_ptr, scale_ptr, amax_ptr, high, low, factor,
    head_stride, row_stride, extent, block, blocks,
    D: tl.constexpr, WIDTHS: tl.constexpr, SPANS: tl.constexpr, TILE: tl.constexpr, TOGETHER: tl.constexpr,
    TERMS: tl.constexpr, FOLDED: tl.constexpr, DTYPE: tl.constexpr, LARGEST: tl.constexpr, SCALED: tl.constexpr,
    POW2: tl.constexpr, GROUPS: tl.constexpr, ONLY_AMAX: tl.constexpr, LAYOUT: tl.constexpr, FINITE: tl.constexpr,
):  # fmt: skip
    """Rotate, scale, cast and store a tile; or only raise ``amax_ptr`` to its largest magnitudes.

    ``x``: segments (TILE, SPANS[i]), and ``row_largest`` the largest finite magnitude of each row; ``rows`` and
    ``place``: what ``_rows`` and ``_place`` returned.
    """
    after, inside, block_after = rows
    sequence, tile, first, index, skipped = place
    if TERMS > 0:
        x, inverse = _rotated(x, row_largest, high, low, TERMS, FOLDED, FINITE)
        if SCALED:
            row_largest = _row_finite_largest(x, FINITE) * factor * inverse
    # The scales of larger groups than a tile: which one, whether it exists (padding may lie beyond the last block), and
    # whether this tile is the one to write it.
    group, exists, leads = sequence, index >= 0, first == 0
    if GROUPS == "block":
        group, exists, leads = sequence * blocks + index, index < blocks, skipped == 0
    if GROUPS == "tensor":
        group, leads = sequence * 0, (first == 0) & (sequence == 0)

    if ONLY_AMAX:
        if GROUPS == "channel":
            tl.static_assert(TERMS == 0, "a scale per channel is for values, which are not rotated")
            for i in tl.static_range(len(x)):
                channel = tl.arange(0, SPANS[i])
                largest = tl.max(_finite_magnitude(x[i], FINITE), axis=0)
                at = amax_ptr + sequence * D + _start(WIDTHS, i) + channel
                tl.atomic_max(at, largest.to(tl.int32, bitcast=True), mask=channel < WIDTHS[i], sem="relaxed")
        else:
            largest = tl.max(row_largest, axis=0)
            tl.atomic_max(amax_ptr + group, largest.to(tl.int32, bitcast=True), mask=exists, sem="relaxed")
    else:
        if SCALED and GROUPS == "tile":
            largest = row_largest
            if TOGETHER > 1:
                largest = tl.max(tl.reshape(row_largest, (TILE // TOGETHER, TOGETHER)), axis=1)
            scale = _scale_of(largest, LARGEST, POW2)
            if TOGETHER > 1:
                scale = tl.reshape(tl.broadcast_to(scale[:, None], (TILE // TOGETHER, TOGETHER)), (TILE,))
            mask = (inside == 0) & (index + block_after < blocks)
            tl.store(scale_ptr + sequence * blocks + index + block_after, scale, mask=mask)
            scale = scale[:, None]
        elif SCALED and GROUPS != "channel":
            amax = tl.load(amax_ptr + group, mask=exists, other=0)
            scale = _scale_of(amax.to(tl.float32, bitcast=True), LARGEST, POW2)
            tl.store(scale_ptr + group, scale, mask=leads & exists)
        if TERMS > 0:
            by = factor * (inverse[:, None] / scale if SCALED else inverse[:, None])
        for i in tl.static_range(len(x)):
            channel = tl.arange(0, SPANS[i])
            at = _start(WIDTHS, i) + channel
            values = x[i]
            if SCALED and GROUPS == "channel":
                amax = tl.load(amax_ptr + sequence * D + at, mask=channel < WIDTHS[i], other=0)
                scale = _scale_of(amax.to(tl.float32, bitcast=True), LARGEST, POW2)
                tl.store(scale_ptr + sequence * D + at, scale, mask=channel < tl.where(leads, WIDTHS[i], 0))
                scale = scale[None, :]
            if TERMS > 0:
                values *= by
            elif SCALED:
                if FINITE:
                    values = _quotient(values, scale)
                else:
                    infinite = tl.abs(values) == float("inf")
                    values = tl.where(infinite, values, _quotient(tl.where(infinite, 0.0, values), scale))
            if not FINITE and DTYPE != tl.float32:  # saturate; NaN compares false and stays
                values = tl.where(values > LARGEST, LARGEST, tl.where(values < -LARGEST, -LARGEST, values))
            codes = cast(values, DTYPE)
            used, real = (skipped + inside < block) & (first + after < extent), channel < WIDTHS[i]
            to = codes_ptr + sequence * head_stride
            if LAYOUT == "rows":
                to = to + first.to(tl.int64) * row_stride
                tl.store(to + after[:, None] * row_stride + at[None, :], codes, mask=used[:, None] & real[None, :])
            else:
                if LAYOUT == "ordered":
                    column = first + tl.arange(0, TILE)
                else:
                    slot = (first + after) % 16
                    column = first + after - slot + slot % 8 // 2 * 4 + slot // 8 * 2 + slot % 2
                pointers = to + at[:, None].to(tl.int64) * row_stride + column[None, :]
                tl.store(pointers, tl.trans(codes), mask=real[:, None] & used[None, :])


@triton.jit
def _quantize_kernel(
    x_ptr, x_b, x_h, x_s, x_d, codes_ptr, scale_ptr, amax_ptr, in_use_ptr, in_use_b,
    cos_ptr, sin_ptr, cos_b, cos_p, cos_c, sin_b, sin_p, sin_c, first_position,
    mean_ptr, mean_group, mean_b, factor_ptr, factor_group, factor_b, shift_ptr,
    high_ptr, low_ptr, signs_ptr, matrix_factor,
    batch, heads, seqlen, extent, head_stride, row_stride, block, blocks, chunks, tiles,
    D: tl.constexpr, WIDTHS: tl.constexpr, SPANS: tl.constexpr, TILE: tl.constexpr, TOGETHER: tl.constexpr,
    BOUND: tl.constexpr, ROTARY: tl.constexpr, PAIRS: tl.constexpr, DIVIDE: tl.constexpr, TERMS: tl.constexpr,
    FOLDED: tl.constexpr, DTYPE: tl.constexpr, LARGEST: tl.constexpr, SCALED: tl.constexpr, POW2: tl.constexpr,
    GROUPS: tl.constexpr, ONLY_AMAX: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """Quantize this program's share of the tiles; see ``_launch`` for the arguments.

    Tiles are numbered with heads running fastest, so that a program which works through heads finds the rotary tables
    of its tokens in the cache. Each tile is loaded while the one before it is worked on.
    """
    count, programs, program = tiles * heads * batch, tl.num_programs(0), tl.program_id(0)
    share, rest = count // programs, count % programs
    begin = program * share + tl.minimum(program, rest)
    end = begin + share + (program < rest).to(tl.int32)
    h, b, tile = begin % heads, begin // heads % batch, begin // heads // batch
    rows = _rows(block, TILE, TOGETHER, LAYOUT)
    high, low = (), ()
    if TERMS > 0:
        high = _load_matrix(high_ptr, WIDTHS, SPANS, FOLDED)
    if TERMS == 3:
        low = _load_matrix(low_ptr, WIDTHS, SPANS, FOLDED)

    place = _place(b, h, tile, heads, block, chunks, TILE, TOGETHER)
    kept = _kept(place, rows, in_use_ptr, b * in_use_b, block, tl.where(begin < end, seqlen, 0))
    start = x_ptr + b.to(tl.int64) * x_b + h.to(tl.int64) * x_h + place[2].to(tl.int64) * x_s
    ahead = _load(start, rows[0], kept, x_s, x_d, WIDTHS, SPANS)
    for item in range(begin, end):
        raw, place_now, kept_now, b_now, h_now = ahead, place, kept, b, h
        h += 1
        b += (h == heads).to(tl.int32)
        h = tl.where(h == heads, 0, h)
        tile += (b == batch).to(tl.int32)
        b = tl.where(b == batch, 0, b)
        place = _place(b, h, tile, heads, block, chunks, TILE, TOGETHER)
        kept = _kept(place, rows, in_use_ptr, b * in_use_b, block, tl.where(item + 1 < end, seqlen, 0))
        start = x_ptr + b.to(tl.int64) * x_b + h.to(tl.int64) * x_h + place[2].to(tl.int64) * x_s
        ahead = _load(start, rows[0], kept, x_s, x_d, WIDTHS, SPANS)

        mean, factor, signs = None, None, None
        if mean_ptr is not None:
            at = mean_ptr + b_now.to(tl.int64) * mean_b + h_now // mean_group * D
            mean = _load_channels(at, WIDTHS, SPANS, 0.0)
        if factor_ptr is not None:
            at = factor_ptr + b_now.to(tl.int64) * factor_b + h_now // factor_group * D
            factor = _load_channels(at, WIDTHS, SPANS, 1.0)
        if signs_ptr is not None:
            signs = _load_channels(signs_ptr, WIDTHS, SPANS, 1.0)
        cos_row, sin_row = None, None
        if ROTARY != "":
            position = (place_now[2] + rows[0] + first_position).to(tl.int64)
            cos_row, sin_row = position * cos_p + b_now * cos_b, position * sin_p + b_now * sin_b
        turned = _turned(
            _float32(raw), cos_ptr, sin_ptr, cos_row, sin_row, kept_now, cos_c, sin_c, WIDTHS, SPANS, PAIRS, ROTARY
        )
        x = _smoothed(turned, kept_now, mean, factor, signs, shift_ptr is not None, DIVIDE, TERMS > 0, FOLDED)
        row_largest = _row_largest(x)
        usual = row_largest <= 2.0**100
        if ROTARY != "" or mean_ptr is not None or factor_ptr is not None or signs_ptr is not None:
            usual &= _row_largest(raw) <= BOUND
        if tl.min(usual.to(tl.int32), axis=0) == 1:
            _finish(
                raw if TERMS == 1 else x, row_largest, rows, place_now, codes_ptr, scale_ptr, amax_ptr, high, low,
                matrix_factor, head_stride, row_stride, extent, block, blocks, D, WIDTHS, SPANS, TILE, TOGETHER, TERMS,
                FOLDED, DTYPE, LARGEST, SCALED, POW2, GROUPS, ONLY_AMAX, LAYOUT, FINITE=True,
            )  # fmt: skip
        else:
            bounded = _bounded(raw, BOUND)
            turned = _turned(
                bounded, cos_ptr, sin_ptr, cos_row, sin_row, kept_now, cos_c, sin_c, WIDTHS, SPANS, PAIRS, ROTARY
            )
            x = _smoothed(turned, kept_now, mean, factor, signs, shift_ptr is not None, DIVIDE, TERMS > 0, FOLDED)
            _finish(
                _as_raw(bounded, raw) if TERMS == 1 else x, _row_finite_largest(x, False), rows, place_now,
                codes_ptr, scale_ptr, amax_ptr, high, low,
                matrix_factor, head_stride, row_stride, extent, block, blocks, D, WIDTHS, SPANS, TILE, TOGETHER, TERMS,
                FOLDED, DTYPE, LARGEST, SCALED, POW2, GROUPS, ONLY_AMAX, LAYOUT, FINITE=False,
            )  # fmt: skip
        if shift_ptr is not None and not ONLY_AMAX:
            token = place_now[2] + rows[0]
            mask = (place_now[4] + rows[1] < block) & (token < seqlen)
            tl.store(shift_ptr + place_now[0] * seqlen + token, _shift(turned, mean), mask=mask)
