"""How fast the Triton quantizer moves data, against a copy on the device measured in the same rounds.

Run ``python -m fp8attn.analysis.bench.quantizer [OUT.json]`` on an idle GPU. Bytes are those of the input, of the
codes and the scales (and of the rotary tables), once. ``--search`` times other configurations than the default ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fp8attn.analysis.bench.measure import command_line, medians, write
from fp8attn.analysis.provenance import provenance
from fp8attn.recipe import Recipe
from fp8attn.transforms import make_transform

HEADS = 16
MEGABYTES = (256, 1024)  # of BF16 input
COLUMNS = [
    "impl", "input", "granularity", "batch", "num_q_heads", "seqlen_q", "head_dim", "median_ms", "gbps",
    "fraction_of_copy", "fraction_of_attention",
]  # fmt: skip
DEFAULT_RECIPE = ((1, 16384), (4, 4096))  # (batch, tokens) at which q, k and v are quantized together


def row(
    impl: str, shape: tuple[int, ...], times: tuple[float, float, float], moved: int, **more: Any
) -> dict[str, Any]:
    batch, heads, seqlen, head_dim = shape
    return {
        "op": "quantize", "impl": impl, "batch": batch, "num_q_heads": heads, "num_kv_heads": heads,
        "seqlen_q": seqlen, "seqlen_k": seqlen, "head_dim": head_dim, "head_dim_v": head_dim,
        "median_ms": round(times[1], 4), "p10_ms": round(times[0], 4), "p90_ms": round(times[2], 4),
        "gbps": round(moved / times[1] / 1e6, 1), **more,
    }  # fmt: skip


def one_tensor(head_dim: int, megabytes: int, granularity: str, search: bool) -> list[dict[str, Any]]:
    """Plain, rotated, and rotary + rotated queries, each with a copy of as many bytes."""
    from triton.runtime.errors import OutOfResources

    from fp8attn.kernels.portable.quantize import Config, quantize_heads
    from fp8attn.kernels.problem import Rotary

    seqlen = megabytes * 2**20 // (2 * HEADS * head_dim)
    shape = (1, HEADS, seqlen, head_dim)
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    angles = torch.arange(seqlen, device="cuda")[:, None] * 1e-4 ** torch.linspace(0, 1, head_dim // 2, device="cuda")
    rotary = Rotary(angles.cos().to(x.dtype), angles.sin().to(x.dtype))
    transform = make_transform("random_hadamard", head_dim)
    inputs: dict[str, dict[str, Any]] = {
        "plain": {},
        "rotated": {"transform": transform},
        "rotary + rotated": {"transform": transform, "rotary": rotary},
    }
    configs: list[Config | None] = [None]
    if search:
        tiles = (32, 64, 128) if granularity == "token" else (128,)
        configs += [
            Config(tile, warps, programs)
            for tile in tiles
            for warps in (4, 8, 16)
            for programs in (1, 2, 3, 4)
            if 2048 <= tile * head_dim * 4 // warps <= 16384 and warps * programs <= 24
        ]
    quantized, _ = quantize_heads(x, "e4m3", granularity, "fp32")
    moved = x.nbytes + quantized.codes.nbytes + quantized.scale.nbytes
    source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    functions: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(source)}
    described = {}
    for name, options in inputs.items():
        for config in configs:
            function = partial(quantize_heads, x, "e4m3", granularity, "fp32", config=config, **options)
            try:
                function()
            except OutOfResources:  # a configuration of the search that does not fit
                continue
            key = name if config is None else f"{name} {tuple(config)}"
            functions[key], described[key] = function, (name, config)
    times = medians(functions)
    copy = row("copy", shape, times["copy"], moved, input="bytes of the plain input", megabytes=megabytes)
    rows = [copy]
    for key, (name, config) in described.items():
        extra = 2 * rotary.cos.nbytes if "rotary" in name else 0
        made = row("fp8attn-triton", shape, times[key], moved + extra, input=name, granularity=granularity)
        made["megabytes"] = megabytes
        made["fraction_of_copy"] = round(made["gbps"] / copy["gbps"], 3)
        if config is not None:
            made["config"] = tuple(config)
        rows.append(made)
    return rows


def all_three(batch: int, seqlen: int) -> list[dict[str, Any]]:
    """q, k and v by the default recipe: with the statistics, and with frozen ones; and beside it the attention."""
    from fp8attn.kernels.portable.forward import attend
    from fp8attn.kernels.portable.quantize import quantize_qkv
    from fp8attn.kernels.portable.statistics import fit_smoothing
    from fp8attn.kernels.problem import AttentionProblem, Masking

    shape = (batch, HEADS, seqlen, 128)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    masking, recipe, scale = Masking(seqlen, seqlen, q.device), Recipe(), 128**-0.5
    frozen = fit_smoothing(q, k, v, recipe, masking, scale=scale)
    problem = AttentionProblem(quantize_qkv(q, k, v, recipe, masking, scale=scale), masking, scale)
    times = medians(
        {
            "attention": lambda: attend(problem),
            "statistics included": lambda: quantize_qkv(q, k, v, recipe, masking, scale=scale),
            "statistics frozen": lambda: quantize_qkv(q, k, v, recipe, masking, scale=scale, smoothing=frozen),
        },
        rounds=15,
        settle_ms=25,
    )
    moved, attention = 3 * (q.nbytes + q.numel()), times.pop("attention")
    return [
        row(
            "fp8attn-triton", shape, t, moved, input=f"q, k and v, {name}", attention_ms=round(attention[1], 4),
            fraction_of_attention=round(t[1] / attention[1], 3),
        )
        for name, t in times.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", nargs="?", help="write the result as JSON, whole or not at all")
    parser.add_argument("--search", action="store_true", help="time many configurations at the smaller size")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    rows: list[dict[str, Any]] = []
    for head_dim in (128, 64):
        for megabytes in MEGABYTES[:1] if options.search else MEGABYTES:
            for granularity in ("token", "block"):
                rows += one_tensor(head_dim, megabytes, granularity, options.search)
    for batch, seqlen in DEFAULT_RECIPE:
        rows += all_three(batch, seqlen)
    for made in rows:
        size = f"{made['batch']} x {made['num_q_heads']} x {made['seqlen_q']:>6} x {made['head_dim']:<3}"
        share = f"{made['fraction_of_copy']:6.1%} of the copy" if "fraction_of_copy" in made else ""
        if "fraction_of_attention" in made:
            share = f"{made['fraction_of_attention']:6.1%} of the attention's time"
        print(
            f"{made['impl']:14} {made['input']:32} {made.get('granularity', ''):6} {size} {made['median_ms']:8.4f} ms "
            f"{made['gbps']:7.1f} GB/s {share} {made.get('config', '')}"
        )
    if options.out:
        write(
            options.out,
            "The quantizer on one GPU",
            provenance(command_line("fp8attn.analysis.bench.quantizer")),
            rows,
            COLUMNS,
        )


if __name__ == "__main__":
    main()
