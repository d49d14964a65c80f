"""Times the forward kernel's configurations on this GPU and writes the table that ``tuning`` reads.

    python -m fp8attn.kernels.portable.search [--head-dims 64 128] [--widths 8 16] [--output FILE]

Configurations that spill registers or do not fit are left out. A call of a few minutes; run it on an idle GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import os
import platform
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import triton
from rich.progress import track

from fp8attn.files import whole_file
from fp8attn.kernels.portable import forward
from fp8attn.kernels.portable.tuning import Config, table_path
from fp8attn.kernels.problem import AttentionProblem, Masking, QuantizedQKV
from fp8attn.recipe import Recipe
from fp8attn.scaling import QuantizedTensor, quantize_tensor

#: (head_dim, head_dim_v) of the table's rows.
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
_TOKENS = 16384
_CHANNELS = 2048  # head_dim times heads: the work is the same for all


def candidates(head_dim: int, head_dim_v: int, wide: bool) -> Iterator[Config]:
    """Configurations worth a measurement."""
    power, power_v = triton.next_power_of_2(head_dim), triton.next_power_of_2(head_dim_v)
    blocks_n = (128, 256) if power <= 64 and not wide else (64, 128) if power <= 128 else (64,)
    for (block_m, warps), block_n, stages in itertools.product(
        ((64, 4), (128, 8), (64, 8)) if power > 128 else ((64, 4), (128, 8)), blocks_n, (2, 3)
    ):
        for chunk in {power, 32 if head_dim % 64 else 64} if power != head_dim else {power}:
            for edge_n in (32, 64) if power > 128 else (64,):
                slice_v = min(power_v, 64 if power_v > 128 and (block_m, warps) != (64, 8) else 256)
                limits: tuple[int | None, ...] = (None,)
                if warps == 4 and power_v <= 128 and not wide:
                    limits = (None, 168)
                for limit in limits:
                    slices = -(-head_dim_v // slice_v)
                    yield Config(block_m, block_n, edge_n, chunk, slice_v, slices, warps, stages, limit)


def problem(head_dim: int, head_dim_v: int, *, wide: bool, banded: bool, tokens: int = _TOKENS) -> AttentionProblem:
    """A random problem with the default recipe's granularities."""
    heads = max(1, _CHANNELS // head_dim)
    generator = torch.Generator("cuda").manual_seed(0)
    recipe = Recipe.from_name("mixed" if wide else "default")
    parts: list[QuantizedTensor] = []
    for dim, granularity, fmt in (
        (head_dim, recipe.q_scale, recipe.q_format),
        (head_dim, recipe.k_scale, recipe.k_format),
        (head_dim_v, recipe.v_scale, recipe.v_format),
    ):
        x = torch.randn(1, heads, tokens, dim, device="cuda", generator=generator)
        parts.append(quantize_tensor(x, fmt, granularity))
    if not wide:
        parts[2] = parts[2].to_layout("permuted_columns")
    masking = Masking(tokens, tokens, torch.device("cuda"), is_causal=banded)
    q, k, v = parts
    return AttentionProblem(QuantizedQKV(q, k, v, recipe, torch.bfloat16), masking, head_dim**-0.5)


def measure(to_solve: AttentionProblem, config: Config) -> float | None:
    """TFLOPS (causal counted at half), or None where the configuration does not fit or spills."""
    compiled: list[Any] = []
    try:
        forward.attend(to_solve, config=config, splits=1, compiled=compiled)
        if any(kernel.n_spills for kernel in compiled):
            return None
        milliseconds = triton.testing.do_bench(
            lambda: forward.attend(to_solve, config=config, splits=1), warmup=20, rep=60, return_mode="median"
        )
    except triton.runtime.errors.OutOfResources:
        return None
    q, v = to_solve.qkv.q, to_solve.qkv.v
    pairs = q.shape[1] * q.shape[2] * q.shape[2] * (0.5 if to_solve.masking.is_causal else 1.0)
    return float(2 * pairs * (q.shape[3] + v.shape[3]) / milliseconds / 1e9)


def _compile(arguments: tuple[int, int, bool, bool, Config]) -> None:
    """Fills Triton's cache: a shorter sequence gives the same kernel."""
    head_dim, head_dim_v, wide, banded, config = arguments
    with contextlib.suppress(triton.runtime.errors.OutOfResources):
        forward.attend(problem(head_dim, head_dim_v, wide=wide, banded=banded, tokens=4096), config=config, splits=1)


def compile_all(kinds: list[tuple[int, int, bool]]) -> None:
    """Compiles every candidate, on all cores."""
    todo = [
        (head_dim, head_dim_v, wide, banded, config)
        for (head_dim, head_dim_v, wide), banded in itertools.product(kinds, (False, True))
        for config in dict.fromkeys(candidates(head_dim, head_dim_v, wide))
    ]
    workers = max(1, min(16, (os.cpu_count() or 2) - 1))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for _ in track(pool.map(_compile, todo), total=len(todo), description="compiling"):
            pass


def search(kinds: list[tuple[int, int, bool]], *, rounds: int = 2) -> list[dict[str, Any]]:
    """The table's rows: for each head dim and mode the fastest configuration, and the runners-up for the record."""
    rows = []
    for (head_dim, head_dim_v, wide), banded in itertools.product(kinds, (False, True)):
        to_solve = problem(head_dim, head_dim_v, wide=wide, banded=banded)
        measured = []
        for config in dict.fromkeys(candidates(head_dim, head_dim_v, wide)):
            tflops = measure(to_solve, config)
            if tflops is not None:
                measured.append((tflops, config))
        if not measured:
            raise RuntimeError(f"every configuration for {(head_dim, head_dim_v, wide, banded)} spills or does not fit")
        measured.sort(key=lambda pair: -pair[0])
        best = [
            (sorted([tflops, *(measure(to_solve, config) or 0.0 for _ in range(rounds))])[rounds // 2], config)
            for tflops, config in measured[:4]
        ]  # the first pass favours what ran on a cool chip
        best.sort(key=lambda pair: -pair[0])
        rows.append(
            {
                "head_dim": head_dim,
                "head_dim_v": head_dim_v,
                "wide": wide,
                "banded": banded,
                "config": dataclasses.asdict(best[0][1]),
                "tflops": round(best[0][0], 1),
                "tried": len(measured),
                "runners_up": [[round(tflops, 1), *dataclasses.astuple(config)] for tflops, config in best[1:]],
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", type=int, nargs="*", help="only rows of these query head dims")
    parser.add_argument("--widths", type=int, nargs="*", default=[8, 16], help="bits of the operands of products")
    parser.add_argument("--output", type=Path, help="where to write; the package's own table by default")
    arguments = parser.parse_args()
    kinds = [
        (*dims, width == 16)
        for dims in HEAD_DIMS
        for width in arguments.widths
        if not arguments.head_dims or dims[0] in arguments.head_dims
    ]
    compile_all(kinds)
    table = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "problem": f"batch 1, {_CHANNELS} // head_dim heads, {_TOKENS} tokens, default recipe's granularities",
        "rows": search(kinds),
    }
    output = arguments.output or table_path(torch.cuda.get_device_name())
    with whole_file(output) as temporary:
        temporary.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
