"""From queries, keys and values to codes in one kernel: rotate the positions, smooth, balance, rotate, quantize.

The contract's steps 1 and 2, as ``kernels/reference/quantize.py`` defines them, without a tensor in between: a program
reads a tile of tokens, does everything to it in registers and writes codes. Scales of a token or of a block of up to
about 256 tokens need no other tile, so the input is read once. A scale of a larger block, a head, a channel or the
tensor needs the largest magnitude of many tiles first: then the same kernel runs twice, the first time only to find it
(an atomic maximum over the bits of non-negative floats, exact and the same in any order).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton

from fp8attn.formats import Format, get_format
from fp8attn.kernels.portable.device import architecture, aside, made_apart, multiprocessors
from fp8attn.kernels.portable.folded import folds, launch_folded
from fp8attn.kernels.portable.numerics import TRITON_DTYPES
from fp8attn.kernels.portable.packed import ALIGNMENT, PackedQKV, PackedTensor, rotary_by_token
from fp8attn.kernels.portable.packed import in_use as packed_in_use
from fp8attn.kernels.portable.packed_quantize_kernel import packed_quantize_kernel
from fp8attn.kernels.portable.quantize_kernel import quantize_kernel, redo_kernel
from fp8attn.kernels.portable.quantize_tile import Plan
from fp8attn.kernels.portable.values import launch_values
from fp8attn.kernels.problem import Masking, Packing, QuantizedQKV, Rotary, Sequences
from fp8attn.recipe import Recipe
from fp8attn.scaling import Granularity, QuantizedTensor
from fp8attn.transforms import Identity, Permutation, SignFlip, Smoothing, Transform, make_transform

__all__ = ["Config", "default_config", "quantize_heads", "quantize_qkv"]

_BOUND = 2.0**90  # finite inputs are brought under it, as in the reference
_LARGEST_MATRIX = 65536  # bytes; beside it the tile must fit the 99 KiB that the smallest multiprocessors share
_LARGEST_TILE = 32768  # elements that one program holds; half of that with a rotation
_SHARE = 64  # tiles whose scales a program of redo_kernel looks at, at once
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
    packing: Packing | None = None,
) -> QuantizedQKV:
    """Quantize (B, Hq, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Sk, Dv) tensors of float32, bfloat16 or float16, any strides.

    ``rotary`` turns queries and keys before anything else. ``smoothing`` is fitted to the tokens in use, or given
    (frozen statistics). ``scale``, the softmax scale, serves the decision of ``smooth_k="auto"`` alone.

    Nothing waits for the device, and shapes follow from shapes: CUDA graphs capture it once it has run. Rows of codes
    lie at multiples of 16 elements. Values are written in ``permuted_columns`` if V and P are both 8 bits wide.

    A NaN in a row that is rotated makes the whole row NaN, and an infinity makes it infinities (which saturate) and
    NaN, as a product with the matrix in FP32 would.

    PyTorch rotates, between two kernels, where the kernel cannot: more than 256 channels, more than 128 if the matrix
    is not Hadamard's in two halves, and the controls ``sign_flip`` and ``permutation``, which mix no channels. It also
    applies ``rotary`` once more where statistics are to be fitted.

    ``packing``: a batch of one that holds many sequences; the result is a ``PackedQKV``.
    """
    rotary_q, rotary_k, first_position, queries, keys = rotary, rotary, masking.diagonal, None, None
    if packing is None:
        queries_in_use, keys_in_use = masking.in_use
    else:
        queries_in_use, keys_in_use = packed_in_use(packing, masking)
        queries, keys, first_position = packing.queries, packing.keys, 0
        if rotary is not None:
            ends_meet = masking.causal_alignment == "bottom_right"
            rotary_q = rotary_by_token(rotary, queries, keys if ends_meet else None)
            rotary_k = rotary_by_token(rotary, keys, None)
    columns = all(get_format(f).dtype.itemsize == 1 for f in (recipe.v_format, recipe.p_format))
    quantized: list[QuantizedTensor] = []
    with ExitStack() as pending:

        def quantize_values(mean: torch.Tensor | None = None) -> None:
            v, _ = quantize_heads(
                value, recipe.v_format, recipe.v_scale, recipe.scale_mode, in_use=keys_in_use, mean=mean,
                columns=columns, sequences=keys, stream=pending.enter_context(aside(value)),
            )  # fmt: skip
            quantized.append(v)

        if smoothing is None:
            meanwhile = None if recipe.smooth_v else quantize_values
            smoothing = _fitted(query, key, value, recipe, masking, scale, rotary_q, rotary_k, packing, meanwhile)
        if not quantized:
            quantize_values(smoothing.v_mean)
        rotate = recipe.rotate if recipe.rotate != "none" else None
        transform = None if rotate is None else make_transform(rotate, query.shape[-1], seed=recipe.seed)
        k, _ = quantize_heads(
            key, recipe.k_format, recipe.k_scale, recipe.scale_mode, in_use=keys_in_use, rotary=rotary_k,
            mean=smoothing.k_mean, divisor=smoothing.balance, transform=transform, sequences=keys,
            stream=pending.enter_context(aside(key)),
        )  # fmt: skip
        q, logit_shift = quantize_heads(
            query, recipe.q_format, recipe.q_scale, recipe.scale_mode, in_use=queries_in_use, rotary=rotary_q,
            first_position=first_position, shift_mean=smoothing.k_mean, multiplier=smoothing.balance,
            transform=transform, sequences=queries,
        )  # fmt: skip
    made, count = (QuantizedQKV, value.shape[0]) if keys is None else (PackedQKV, keys.count)
    v_mean = None if smoothing.v_mean is None else smoothing.v_mean.expand(count, -1, -1, -1)
    return made(q, k, quantized[0], recipe, query.dtype, logit_shift, v_mean, keys_in_use)


def _fitted(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    recipe: Recipe,
    masking: Masking,
    scale: float,
    rotary_q: Rotary | None,
    rotary_k: Rotary | None,
    packing: Packing | None,
    meanwhile: Callable[[], None] | None,
) -> Smoothing:
    if recipe.smooth_k is False and recipe.smooth_v is False and recipe.balance == "none":
        return Smoothing()
    from fp8attn.kernels.portable.statistics import fit_smoothing

    of_packed: dict[str, Any] = {} if packing is None else {"packing": packing, "rotary_q": rotary_q}
    return fit_smoothing(
        query, key, value, recipe, masking, scale=scale, rotary=rotary_k, meanwhile=meanwhile, **of_packed
    )


class Config(NamedTuple):
    """How a kernel is laid out on the device: tokens a tile, warps, and programs a multiprocessor runs at a time."""

    tile: int
    warps: int
    programs: int

    @property
    def registers(self) -> int:
        """A thread's share of a multiprocessor's 65,536, in the units that they are given out in."""
        return min(255, 65536 // (32 * self.warps * self.programs) // 8 * 8)


def default_config(channels: int, tokens: int, *, heavy: bool) -> Config:
    """For tiles of ``channels`` (padding included) in which at least ``tokens`` must lie together.

    64 elements a thread leave room for the tile that is being loaded beside the one in work; ``heavy`` kernels, and
    those of many channels, have room for 32. A tile of fewer than 64 tokens does not fill sm_90's tensor core.
    """
    channels = triton.next_power_of_2(channels)
    tile = max(tokens, min(128, max(64 if channels <= 128 else 16, 8192 // channels)))
    warps = max(8 if heavy else 4, min(16, tile * channels // 2048))
    return Config(tile, warps, programs=max(1, (8 if heavy else 12) // warps))


# ---- The rotation's matrix -------------------------------------------------------------------------------------------


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


def _segments(
    transform: Transform | None, x: torch.Tensor, rotary: Rotary | None, untouched: bool
) -> tuple[tuple[int, ...], tuple[int, ...], _Rotation | None]:
    """(Widths of the segments, their spans, the rotation); no rotation where PyTorch must apply the transform.

    ``untouched``: nothing is done to x before the transform.
    """
    head_dim, pairs = x.shape[-1], 0 if rotary is None else rotary.channels // 2
    half = (head_dim // 2, head_dim // 2)
    widths: tuple[int, ...] = (head_dim,)
    if rotary is not None and not rotary.interleaved:
        widths = tuple(width for width in (pairs, pairs, head_dim - 2 * pairs) if width)
    rotation = None
    # SignFlip and Permutation keep a NaN in its channel; a dot would spread it over the row.
    if transform is not None and not isinstance(transform, (Identity, SignFlip, Permutation)):
        # Halves must be whole, and tear no interleaved pair apart.
        even = head_dim % (4 if rotary is not None and rotary.interleaved else 2) == 0
        exact_dtype = x.dtype if untouched and x.dtype != torch.float32 and _span(head_dim) <= 128 else None
        rotation = _rotation(transform, x.device, exact_dtype, even and widths in ((head_dim,), half))
        widths = half if rotation.folded else widths
    spans = tuple(map(_span, widths))
    if rotation is not None:
        size = 2 * (1 if rotation.low is None else 2) * (spans[0] if rotation.folded else sum(spans)) ** 2
        if size > _LARGEST_MATRIX:
            return _segments(None, x, rotary, untouched)
    return widths, spans, rotation


def _span(width: int) -> int:
    return max(16, triton.next_power_of_2(width))  # a tensor core's operands start at 16


@lru_cache(maxsize=32)  # 2 MB of head dim 256
def _rotation(transform: Transform, device: torch.device, exact_dtype: torch.dtype | None, halves: bool) -> _Rotation:
    """``exact_dtype``: of an input that is multiplied as it is; ``halves``: whether the tile can come in two halves."""

    def on_device(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return x.to(dtype).contiguous().to(device)

    def make() -> _Rotation:
        matrix = transform.matrix(dtype=torch.float64, device="cpu").contiguous()  # kernels read it in row order
        factor = float(matrix.abs().max())
        units = (matrix / factor).round()
        # Entries of one magnitude, which all Hadamard matrices have: to float64's rounding, 2^-52 of the magnitude.
        if bool(((matrix / factor - units).abs() < 2.0**-40).all()):
            if exact_dtype is not None:
                return _Rotation(on_device(units, exact_dtype), None, factor, None, 1)
            half = len(units) // 2
            block, signs = units[:half, :half], units[half : 2 * half, :1] * units[:half, :1]
            upper, lower = torch.cat([block, block], dim=1), signs * torch.cat([block, -block], dim=1)
            if halves and torch.equal(units, torch.cat([upper, lower])):
                high = on_device(block, torch.float16)
                return _Rotation(high, None, factor, on_device(signs[:, 0], torch.float32), 2)
            return _Rotation(on_device(units, torch.float16), None, factor, None, 2)
        # Entries up to 2^13, so that small ones keep their bits; with rows up to 2^15, sums of 256 terms are far from
        # FP32's largest.
        power = 2.0 ** (13 - math.frexp(factor)[1])
        high = (matrix * power).to(torch.float16)
        low = (matrix * power - high.double()).to(torch.float16)
        return _Rotation(high.to(device), low.to(device), 1 / power, None, 3)

    return made_apart(make)


# ---- One tensor ------------------------------------------------------------------------------------------------------


def quantize_heads(
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
    sequences: Sequences | None = None,
    stream: torch.cuda.Stream | None = None,
) -> tuple[QuantizedTensor, torch.Tensor | None]:
    """One tensor (B, H, S, D) to codes and scales, and x . shift_mean (B, H, S) in FP32 if that mean is given.

    In this order: ``rotary`` (token i at position ``first_position`` + i), the shift, minus ``mean``, times
    ``multiplier``, over ``divisor``, ``transform``. Statistics are (B or 1, H or a divisor of it, 1, D). ``columns``
    stores permuted columns; ``config`` replaces the choice of ``default_config``; ``stream``: ``aside``'s.

    With ``sequences`` x is a packed batch, and the result a ``PackedTensor``: statistics have one entry a sequence, and
    rotary tables a row a token.
    """
    fmt, grouping = get_format(format), Granularity.parse(granularity)
    batch, heads, seqlen, head_dim = x.shape
    made, rows = torch.empty if fmt.scaled and x.numel() else torch.ones, seqlen
    scale_shape = grouping.scale_shape(x.shape)
    if sequences is not None:
        rows = sequences.units(ALIGNMENT) * ALIGNMENT
        scale_shape = _packed_scale_shape(grouping, sequences, heads, head_dim)
    scale = made(scale_shape, dtype=torch.float32, device=x.device)
    shift = None if shift_mean is None else torch.empty(x.shape[:3], dtype=torch.float32, device=x.device)
    if columns:
        codes = torch.empty(batch, heads, head_dim, -(-rows // 16) * 16, dtype=fmt.dtype, device=x.device)
    else:  # rows at multiples of 16 bytes, as the tensor memory accelerator wants them
        row = -(-head_dim // 16) * 16
        codes = torch.empty(batch, heads, rows, row, dtype=fmt.dtype, device=x.device)[..., :head_dim]
    steps: dict[str, Any] = {
        "in_use": in_use, "rotary": rotary, "first_position": first_position, "shift_mean": shift_mean, "shift": shift,
        "mean": mean, "multiplier": multiplier, "divisor": divisor,
    }  # fmt: skip
    of_values = grouping.kind == "channel" and all(
        step is None for step in (rotary, shift_mean, multiplier, divisor, transform, config)
    )
    with torch.cuda.stream(stream):
        if sequences is not None:  # between them, too, values are finite: a weight of 0 hides no NaN
            codes.zero_()
        if x.numel() and fmt.scaled and of_values and sequences is None:
            launch_values(x, codes, scale, fmt, scale_mode == "pow2", _BOUND, columns=columns, in_use=in_use, mean=mean)
        elif x.numel():
            untouched = rotary is None and mean is None and multiplier is None and divisor is None
            segments, bound = _segments(transform, x, rotary, untouched), _BOUND
            if transform is not None and segments[2] is None:
                values = torch.empty(x.shape, dtype=torch.float32, device=x.device)
                _launch(
                    x, values, None, Granularity("token"), None, False, segments, config=config, sequences=sequences,
                    **steps,
                )  # fmt: skip
                x, bound, steps = transform.apply(values), _FLOAT32_MAX, {}
                segments = _segments(None, x, None, True)
            fast = None
            if sequences is None:
                fast = _folded(transform, x, fmt, grouping, columns=columns, config=config, **steps)
            if fast is not None and fast.signs is not None:
                launch_folded(
                    x, codes, scale, shift, grouping, fmt, scale_mode == "pow2", fast.high, fast.signs, fast.factor,
                    rotary=rotary, first_position=first_position, mean=mean if shift_mean is None else shift_mean,
                    multiplier=multiplier, divisor=divisor,
                )  # fmt: skip
            _launch(
                x, codes, scale, grouping, fmt, scale_mode == "pow2", segments, columns=columns, bound=bound,
                config=config, redo=fast is not None, sequences=sequences, **steps,
            )  # fmt: skip
    if sequences is not None:
        layout = "permuted_columns" if columns else "rows"
        return PackedTensor(codes, scale, fmt, grouping, layout=layout, total=seqlen), shift
    if columns:
        return QuantizedTensor(codes, scale, fmt, grouping, layout="permuted_columns", seqlen=seqlen), shift
    return QuantizedTensor(codes, scale, fmt, grouping), shift


def _packed_scale_shape(granularity: Granularity, sequences: Sequences, heads: int, channels: int) -> torch.Size:
    """Of a ``PackedTensor``'s scale."""
    if granularity.kind in ("token", "block"):
        return torch.Size([heads, sequences.units(granularity.size)])
    of_one = granularity.scale_shape(torch.Size([1, heads, 0, channels]))
    return torch.Size([sequences.count, *of_one[1:]])


def _folded(
    transform: Transform | None,
    x: torch.Tensor,
    fmt: Format,
    granularity: Granularity,
    *,
    rotary: Rotary | None = None,
    in_use: torch.Tensor | None = None,
    shift_mean: torch.Tensor | None = None,
    mean: torch.Tensor | None = None,
    multiplier: torch.Tensor | None = None,
    divisor: torch.Tensor | None = None,
    columns: bool = False,
    config: Config | None = None,
    **_: Any,
) -> _Rotation | None:
    """The rotation for ``launch_folded``, if that is to quantize x; None for the general kernel."""
    smoothed = multiplier is not None or divisor is not None
    if transform is None or in_use is not None or columns or config is not None:
        return None
    if (multiplier is not None and mean is not None) or (divisor is not None and shift_mean is not None):
        return None
    if not folds(x, fmt, granularity, rotary, smoothed=smoothed):
        return None
    rotation = _rotation(transform, x.device, None, True)
    return rotation if rotation.folded else None


def _launch(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor | None,
    granularity: Granularity,
    fmt: Format | None,
    pow2: bool,
    segments: tuple[tuple[int, ...], tuple[int, ...], _Rotation | None],
    *,
    in_use: torch.Tensor | None = None,
    rotary: Rotary | None = None,
    first_position: int = 0,
    shift_mean: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    mean: torch.Tensor | None = None,
    multiplier: torch.Tensor | None = None,
    divisor: torch.Tensor | None = None,
    columns: bool = False,
    bound: float = _BOUND,
    config: Config | None = None,
    redo: bool = False,
    sequences: Sequences | None = None,
) -> None:
    """Run the kernel, once or twice, into ``codes``, ``scale`` and ``shift``. ``fmt`` None writes FP32 values.

    ``redo`` quantizes only the tiles that are marked by a scale of 0. ``sequences``: those of a packed batch.
    """
    batch, heads, seqlen, head_dim = x.shape
    widths, spans, rotation = segments
    if (
        rotation is not None and divisor is not None and not redo
    ):  # beside the rotation's own roundings, a reciprocal's is small
        multiplier, divisor = divisor.reciprocal(), None
    scaled = fmt is not None and fmt.scaled
    extent = -(-seqlen // 16) * 16 if columns else seqlen  # columns' padding is written too
    if sequences is not None:  # tiles suit sequences of any length
        extent = max(_LARGEST_TILE, granularity.size)
    block = {"token": 1, "block": min(granularity.size, extent)}.get(granularity.kind, extent) if scaled else 1
    together = triton.next_power_of_2(block)
    largest_tile = _LARGEST_TILE // (1 if rotation is None else 2)
    two_passes = scaled and (granularity.kind in ("head", "tensor", "channel") or together * sum(spans) > largest_tile)
    if config is None:
        smoothed = shift is not None or mean is not None or multiplier is not None
        heavy = (rotation is not None and (smoothed or rotation.terms == 3)) or x.dtype == torch.float32 or columns
        config = default_config(sum(spans), 1 if two_passes else together, heavy=heavy)
    if two_passes:
        together = config.tile
        if sequences is not None and granularity.kind != "block":
            block = config.tile
    chunks = triton.cdiv(block, config.tile) if two_passes else 1
    tiles = triton.cdiv(triton.cdiv(extent, block), config.tile // together) * chunks
    programs = min(tiles * batch * heads, config.programs * multiprocessors(x.device))
    plan = Plan(
        head_dim=head_dim, widths=widths, spans=spans, tile=config.tile, together=together, bound=bound,
        rotary="" if rotary is None else "interleaved" if rotary.interleaved else "halves",
        pairs=0 if rotary is None else rotary.channels // 2, shifts=shift is not None, divides=divisor is not None,
        terms=0 if rotation is None else rotation.terms, folded=rotation is not None and rotation.folded,
        dtype=TRITON_DTYPES[codes.dtype], largest=_FLOAT32_MAX if fmt is None else fmt.max, scaled=scaled, pow2=pow2,
        groups=granularity.kind if two_passes else "tile", only_amax=False,
        layout="rows" if not columns else "ordered" if block % 16 == 0 or block == 1 else "columns",
        # Both ways of computing a tile, or two tiles, take registers that these have not got.
        hopes=sum(spans) <= 128 or rotation is None, ahead=shift is None or rotation is None,
        blackwell=architecture() >= 100,
    )  # fmt: skip
    tables: tuple[torch.Tensor | None, ...] = (None, None)
    table_strides: tuple[int, ...] = (0, 0, 0, 0, 0, 0)
    if rotary is not None:
        tables = (rotary.cos, rotary.sin)
        table_strides = tuple(
            stride
            for table in (rotary.cos, rotary.sin)
            for stride in (table.stride(0) if table.ndim == 3 and len(table) > 1 else 0, *table.stride()[-2:])
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
    )  # fmt: skip
    sizes = (batch, heads, seqlen, extent, block, granularity.scale_shape(x.shape)[2], chunks, tiles)
    with torch.cuda.device_of(x):
        if sequences is not None:
            slots = sequences.units(config.tile // together * block) * chunks
            # A program of several heads loads the matrix once for them, if others still fill the GPU.
            share = max(1, min(heads, slots * heads // (4 * config.programs * multiprocessors(x.device))))
            for only_amax in (True, False) if two_passes else (False,):
                packed_quantize_kernel[(slots, triton.cdiv(heads, share))](
                    *arguments, sequences.cu_seqlens, sequences.count, seqlen, heads, share, block, chunks,
                    PLAN=plan._replace(only_amax=only_amax), ALIGNED=fmt is not None,
                    num_warps=config.warps, num_stages=1, maxnreg=config.registers, enable_fp_fusion=False,
                )  # fmt: skip
            return
        if redo:
            redo_kernel[(triton.cdiv(batch * heads * tiles, _SHARE),)](
                *arguments,
                *sizes,
                PLAN=plan,
                SHARE=_SHARE,
                num_warps=config.warps,
                num_stages=1,
                enable_fp_fusion=False,
            )
            return
        for only_amax in (True, False) if two_passes else (False,):
            quantize_kernel[(programs,)](
                *arguments, *sizes, PLAN=plan._replace(only_amax=only_amax),
                num_warps=config.warps, num_stages=1, maxnreg=config.registers, enable_fp_fusion=False,
            )  # fmt: skip
