"""The forward pass in Triton: the contract's steps 3 to 5, tile by tile.

A program owns ``block_m`` query rows of one head and walks the keys that they see in tiles of ``block_n``. Per tile:
FP8 scores; a new integer reference m, the running maximum rounded up; weights 2^(S - m + 8), rounded; their sum; and
their product with the values, which starts from zero in the tensor core and is folded into FP32 registers by the
multiply-add that rescales the old sum (so two-level accumulation costs no instruction).

Where query tiles do not fill the GPU, several programs share the keys of a tile (``splits``) and ``combine_kernel``
merges their states, exactly, as every rescale is by a power of two.

A packed batch (``packed.py``) is one launch too: a program finds its sequence, and goes on as if that were the batch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from fp8attn.formats import get_format
from fp8attn.kernels.portable.device import architecture
from fp8attn.kernels.portable.forward_kernel import ONE_SCALE, combine_kernel, forward_kernel
from fp8attn.kernels.portable.forward_tile import LOG2E
from fp8attn.kernels.portable.numerics import FP8_DTYPES, TRITON_DTYPES, fragments_hold
from fp8attn.kernels.portable.packed import PackedProblem, PackedTensor
from fp8attn.kernels.portable.tuning import Config, choose_config, choose_splits, programs
from fp8attn.kernels.problem import AttentionProblem
from fp8attn.scaling import QuantizedTensor

__all__ = ["attend"]

_FRAGMENTS_HOLD: dict[str, bool] = {}  # of compiled kernels by their hash


def attend(
    problem: AttentionProblem,
    *,
    config: Config | None = None,
    splits: int | None = None,
    compiled: list[Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every query over all its keys.

    ``config`` and ``splits`` (programs that share a query tile's keys) are chosen by shape and GPU unless given. The
    kernels that were launched are appended to ``compiled``, for those who want to look at them.

    Returns:
        out (B, Hq, Sq, Dv) in ``problem.qkv.dtype`` and lse (B, Hq, Sq) in FP32; of a ``PackedProblem`` (T, Hq, Dv) and
        (Hq, T), 0 and -inf for tokens of no sequence.
    """
    qkv, masking = problem.qkv, problem.masking
    packing = problem.packing if isinstance(problem, PackedProblem) else None
    batch, num_q_heads, seqlen_q, head_dim = qkv.q.shape
    seqlen_k, head_dim_v, device = qkv.k.shape[2], qkv.v.shape[3], qkv.q.device
    out = torch.empty(batch, num_q_heads, seqlen_q, head_dim_v, dtype=qkv.dtype, device=device)
    lse = torch.empty(batch, num_q_heads, seqlen_q, dtype=torch.float32, device=device)
    if packing is not None:
        out = torch.zeros(seqlen_q, num_q_heads, head_dim_v, dtype=qkv.dtype, device=device)
        lse = torch.full((num_q_heads, seqlen_q), -torch.inf, dtype=torch.float32, device=device)
        splits = 1
    if lse.numel() == 0:
        return out, lse
    q_format, p_format = qkv.q.format, get_format(qkv.recipe.p_format)
    if config is None:
        config = choose_config(problem)
    slices = -(-head_dim_v // config.slice_v)
    slice_groups = -(-slices // config.slices_v)
    if splits is None:
        splits = choose_splits(problem, config)
    key_tiles = -(-seqlen_k // config.block_n)
    splits = max(1, min(splits, key_tiles))
    split = splits > 1

    # FP8 weights need values with their keys together; anything wider takes them as rows.
    v_rows = p_format.dtype.itemsize > 1
    q, k, v = _planes(qkv.q), _planes(qkv.k), _planes(_in_layout(qkv.v, "rows" if v_rows else "permuted_columns"))
    arch = architecture()
    if 0 < arch < 89:  # the compiler knows no FP8 there: 16-bit products of what is read as bytes
        k, v = (x.view(torch.uint8) if x.dtype in FP8_DTYPES else x for x in (k, v))
    q_desc = TensorDescriptor.from_tensor(q, [1, config.block_m, config.chunk])
    k_desc, v_desc = _key_value_descriptors(k, v, config.block_n, config, v_rows)
    k_edge_desc, v_edge_desc = _key_value_descriptors(k, v, config.edge_n, config, v_rows)

    softcap = problem.softcap
    # tanh comes with FP32's error of 1, a logit with that of the softcap: from here on it would show
    softcap_kind = "none" if softcap is None else "large" if softcap > 100 else "small"
    if softcap is not None:
        softcap = min(max(softcap, 1e-36), 1e36)  # so that its reciprocal is a normal number too
    q_scale, k_scale, v_scale = (_broadcast_scale(x) for x in (qkv.q, qkv.k, qkv.v))
    k_size = _tokens_a_scale(qkv.k)
    v_per_key = qkv.v.granularity.kind in ("token", "block")
    mask, mask_kind = masking.mask, "none"
    mask_strides = [0, 0, 0, 0]
    if mask is not None:
        mask_kind = "bool" if mask.dtype == torch.bool else "additive"
        mask_strides = [0 if mask.shape[i] == 1 else mask.stride(i) for i in range(4)]
        mask = mask.view(torch.uint8) if mask_kind == "bool" else mask
    # Logits in log2 units, natural ones under a softcap. No factor above this one lets a logit reach 1e38.
    units = 1.0 if softcap is not None else LOG2E.value
    largest_factor = 1e38 / (q_format.max * qkv.k.format.max * head_dim)
    target, parts_m, parts_l = out, lse, lse
    if split:
        target = torch.empty(batch, num_q_heads, splits, seqlen_q, head_dim_v, dtype=torch.float32, device=device)
        parts_m, parts_l = torch.empty(2, batch, num_q_heads, splits, seqlen_q, dtype=torch.float32, device=device)
    shift = qkv.logit_shift if qkv.logit_shift is None else qkv.logit_shift.contiguous()
    v_mean = qkv.v_mean if qkv.v_mean is None else qkv.v_mean.contiguous()
    sinks = problem.sinks if problem.sinks is None else problem.sinks.contiguous()
    # Fused multiply-adds: the exponent and the rescaled sums rely on them, and Triton 3.10 turns them off by default.
    options: dict[str, Any] = {"num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": True}
    if config.max_registers is not None:
        options["maxnreg"] = config.max_registers
    grid, query_tiles = programs(problem, config) * splits, 0
    cu_seqlens: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if packing is not None:
        query_tiles = packing.queries.units(config.block_m)
        grid = query_tiles * num_q_heads * slice_groups
        cu_seqlens = packing.queries.cu_seqlens, packing.keys.cu_seqlens
    launch = partial(
        forward_kernel[(grid,)],
        q_desc, k_desc, v_desc, k_edge_desc, v_edge_desc, q_scale, k_scale, v_scale, shift, v_mean, sinks, mask,
        target, lse, parts_m, parts_l,
        abs(problem.scale) * units, softcap or 0.0, min(largest_factor, 1e30),
        seqlen_q, seqlen_k, head_dim_v, num_q_heads, problem.group,
        masking.diagonal, masking.left or 0, masking.right or 0, splits, -(-key_tiles // splits),
        *q_scale.stride()[:3], *k_scale.stride()[:3], *v_scale.stride(),
        *mask_strides, *cu_seqlens, 0 if packing is None else packing.queries.count, query_tiles,
        BOTTOM_RIGHT=packing is not None and masking.causal_alignment == "bottom_right",
        HAS_LEFT=masking.left is not None, HAS_RIGHT=masking.right is not None,
        EVEN=packing is None and seqlen_k % config.block_n == 0, MASK=mask_kind, SOFTCAP=softcap_kind,
        NEGATE=problem.scale < 0,
        SINKS=sinks is not None, SHIFT=shift is not None, V_MEAN=v_mean is not None, SPLIT=split,
        UNBOUNDED=not (q_format.scaled and qkv.k.format.scaled),
        K_PER_KEY=k_size % config.block_n != 0, V_PER_KEY=v_per_key, V_ROWS=v_rows,
        Q_SIZE=_tokens_a_scale(qkv.q), K_SIZE=k_size, V_SIZE=_tokens_a_scale(qkv.v),
        K_DTYPE=TRITON_DTYPES[qkv.k.format.dtype], V_DTYPE=TRITON_DTYPES[qkv.v.format.dtype],
        P_DTYPE=TRITON_DTYPES[p_format.dtype], P_SMALLEST_NORMAL=p_format.smallest_normal,
        CHUNKS=-(-head_dim // config.chunk), CHUNK=config.chunk,
        SLICES=min(config.slices_v, slices), SLICE=config.slice_v, SLICE_GROUPS=slice_groups,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, EDGE_N=config.edge_n,
        EDGE_STAGES=1 if config.slices_v > 1 else config.stages,  # no registers for more beside many accumulators
        **options,
    )  # fmt: skip
    # A mask is read in a layout of its own, which the compiler may then prefer for the weights.
    fragments = arch == 90 and mask_kind == "none"
    kernel = launch(FRAGMENTS=fragments)
    if fragments and not _in_fragments(kernel):
        kernel = launch(FRAGMENTS=False)
    kernels = [kernel]
    if split:
        block_m = min(16, triton.next_power_of_2(seqlen_q))
        slice_v = min(128, triton.next_power_of_2(head_dim_v))
        kernel = combine_kernel[(-(-seqlen_q // block_m) * batch * num_q_heads * -(-head_dim_v // slice_v),)](
            target, parts_m, parts_l, v_scale, shift, v_mean, sinks, out, lse, problem.scale,
            seqlen_q, head_dim_v, num_q_heads, problem.group, splits, *v_scale.stride()[:2], v_scale.stride(3),
            SINKS=sinks is not None, SHIFT=shift is not None and softcap is None, V_MEAN=v_mean is not None,
            V_PER_KEY=v_per_key, SLICE=slice_v, BLOCK_M=block_m,
        )  # fmt: skip
        kernels.append(kernel)
    if compiled is not None:
        compiled += kernels
    return out, lse


def _in_fragments(kernel: Any) -> bool:
    """Whether a compiled kernel holds its weights as ``FRAGMENTS`` takes for granted; else it computes nonsense."""
    known: bool | None = _FRAGMENTS_HOLD.get(kernel.hash)
    if known is None:
        known = _FRAGMENTS_HOLD[kernel.hash] = fragments_hold(kernel.asm["ttgir"])
    return known


def _key_value_descriptors(
    k: torch.Tensor, v: torch.Tensor, block_n: int, config: Config, v_rows: bool
) -> tuple[TensorDescriptor, TensorDescriptor]:
    v_box = [1, block_n, config.slice_v] if v_rows else [1, config.slice_v, block_n]
    return TensorDescriptor.from_tensor(k, [1, block_n, config.chunk]), TensorDescriptor.from_tensor(v, v_box)


def _planes(x: QuantizedTensor) -> torch.Tensor:
    """Codes as (B * H, rows, columns), as a tensor descriptor wants them: strides of 16 bytes, aligned, not empty."""
    codes = x.codes.flatten(0, 1)
    if codes.numel() == 0:  # nothing will be read, but a descriptor must have something to describe
        return codes.new_zeros(max(1, codes.shape[0]), max(1, codes.shape[1]), 16)
    unit = 16 // codes.element_size()
    aligned = codes.stride(2) == 1 and codes.data_ptr() % 16 == 0
    if aligned and all(codes.stride(i) % unit == 0 and codes.stride(i) > 0 for i in (0, 1)):
        return codes
    planes, rows, columns = codes.shape
    storage = torch.empty(planes, rows, -(-columns // unit) * unit, dtype=codes.dtype, device=codes.device)
    storage[..., :columns].copy_(codes)
    return storage[..., :columns]


def _in_layout(x: QuantizedTensor, layout: str) -> QuantizedTensor:
    return x if isinstance(x, PackedTensor) else x.to_layout(layout)  # made in the one that is wanted


def _broadcast_scale(x: QuantizedTensor) -> torch.Tensor:
    """The scale (B, H, tokens or blocks or 1, channels or 1), with a stride of 0 where it has one value for an axis.

    Of a packed batch the first axis is sequences, or a scale that has many values a sequence lies flat in the third.
    """
    batch, heads = x.shape[:2]
    if isinstance(x, PackedTensor):
        if x.scale.ndim == 2:
            return x.scale.flatten()[None, None, :, None]
        batch = x.scale.shape[0]
    scale = x.scale if x.scale.numel() else x.scale.new_ones(batch, heads, 1, 1)  # without tokens, one to point at
    strides = [0 if scale.shape[i] == 1 else scale.stride(i) for i in range(4)]
    return scale.as_strided((batch, heads, *scale.shape[2:]), strides)


def _tokens_a_scale(x: QuantizedTensor) -> int:
    """How many consecutive tokens share a scale: ``ONE_SCALE`` stands for all."""
    return {"token": 1, "block": x.granularity.size}.get(x.granularity.kind, ONE_SCALE.value)
