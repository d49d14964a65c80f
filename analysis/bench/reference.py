"""What the reference backend costs on a CPU: time against PyTorch's FP32 attention, and memory at a long sequence.

Run ``python -m fp8attn.analysis.bench.reference [--out FILE]``. It times both sides interleaved on the same random
inputs, quantization included and apart, and prints medians; the memory is measured in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fp8attn
from fp8attn.analysis.provenance import provenance
from fp8attn.files import whole_file

SHAPE = (1, 8, 4096, 128)
LONG = 32_768
REPEATS = 5


def median_ms(functions: dict[str, Callable[[], object]]) -> dict[str, tuple[float, float, float]]:
    """(p10, median, p90) in ms of each function, run in turn after one warm-up."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for _ in range(REPEATS):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            times[name].append((time.perf_counter() - start) * 1e3)
    deciles = {name: statistics.quantiles(values, n=10, method="inclusive") for name, values in times.items()}
    return {name: (d[0], d[4], d[8]) for name, d in deciles.items()}


def time_rows(is_causal: bool) -> list[dict[str, Any]]:
    q, k, v = (torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    qkv = fp8attn.quantize(q, k, v, is_causal=is_causal)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    times = median_ms(
        {
            "sdpa-fp32": lambda: sdpa(q, k, v, is_causal=is_causal),
            "fp8attn-reference": lambda: fp8attn.attention(q, k, v, is_causal=is_causal, backend="reference"),
            "fp8attn-reference, quantized before": lambda: fp8attn.attention_quantized(
                qkv, is_causal=is_causal, backend="reference"
            ),
        }
    )
    batch, heads, seqlen, head_dim = SHAPE
    exact = sdpa(q, k, v, is_causal=is_causal)
    error = float((fp8attn.attention(q, k, v, is_causal=is_causal) - exact).norm() / exact.norm())
    flops = 4 * batch * heads * seqlen**2 * head_dim / (2 if is_causal else 1)
    shape = {"batch": batch, "num_q_heads": heads, "num_kv_heads": heads, "seqlen_q": seqlen, "seqlen_k": seqlen}
    return [
        {
            "op": "prefill",
            "impl": name,
            **shape,
            "head_dim": head_dim,
            "head_dim_v": head_dim,
            "causal": is_causal,
            "includes_quantization": name == "fp8attn-reference",
            "median_ms": round(median, 1),
            "p10_ms": round(p10, 1),
            "p90_ms": round(p90, 1),
            "tflops": round(flops / median / 1e9, 4),
            "relative_error": 0.0 if name == "sdpa-fp32" else round(error, 5),
            "times_sdpa": round(median / times["sdpa-fp32"][1], 2),
        }
        for name, (p10, median, p90) in times.items()
    ]


def peak_bytes_of_long_attention() -> int:
    """How far attention at one head and 32,768 tokens raises this process's peak memory above its inputs."""
    q, k, v = (torch.randn(1, 1, LONG, 128) for _ in range(3))
    few = slice(0, 256)
    fp8attn.attention(
        q[:, :, few], k[:, :, few], v[:, :, few], is_causal=True
    )  # what libraries keep is not attention's
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak back to what is in use now (Linux)
    before = _status_kib("VmRSS")
    fp8attn.attention(q, k, v, is_causal=True)
    return (_status_kib("VmHWM") - before) * 1024


def _status_kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", help="write the result as JSON, whole or not at all")
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        print(peak_bytes_of_long_attention())
        return
    rows = time_rows(False) + time_rows(True)
    for row in rows:
        print(
            f"{'causal' if row['causal'] else 'full':7} {row['impl']:36} {row['median_ms']:8.1f} ms   "
            f"{row['times_sdpa']:.2f} x SDPA"
        )
    command = [sys.executable, "-m", "fp8attn.analysis.bench.reference", "--memory"]
    peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(f"peak memory beyond the inputs, one head, {LONG} tokens: {peak / 2**20:.0f} MiB")
    if options.out:
        origin = provenance("python -m fp8attn.analysis.bench.reference", "cpu", threads=torch.get_num_threads())
        result = {"schema": 1, "provenance": origin, "rows": rows, "peak_bytes_one_head_32768_tokens": peak}
        with whole_file(options.out) as temporary:
            temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
