"""How fast attention in Triton is, beside PyTorch's BF16 attention by cuDNN and by FlashAttention-2, in one run.

Run ``python -m fp8attn.analysis.bench.prefill [OUT.json]`` on an idle GPU; it takes about a minute. All read the same
random BF16 tensors and take turns; ours is timed on quantized tensors, and with the quantization. Causal attention
counts at half of the floating-point operations.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import fp8attn
from fp8attn.analysis.bench.measure import command_line, medians, write
from fp8attn.analysis.provenance import provenance

#: (batch, heads, tokens, head dim)
SHAPES = ((1, 16, 16384, 128), (4, 16, 4096, 128), (1, 32, 16384, 64), (1, 8, 16384, 256))
CHECKED = 64  # rows of queries whose error is measured
COLUMNS = [
    "impl", "batch", "num_q_heads", "seqlen_q", "head_dim", "causal", "includes_quantization", "median_ms", "tflops",
    "times_cudnn", "relative_error",
]  # fmt: skip


def rows_of(shape: tuple[int, int, int, int], is_causal: bool) -> list[dict[str, Any]]:
    batch, heads, seqlen, head_dim = shape
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    qkv = fp8attn.quantize(q, k, v, is_causal=is_causal, backend="triton")

    def sdpa(backend: SDPBackend) -> torch.Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    implementations = {
        "cudnn-bf16": lambda: sdpa(SDPBackend.CUDNN_ATTENTION),
        "fa2-bf16": lambda: sdpa(SDPBackend.FLASH_ATTENTION),
        "fp8attn-triton": lambda: fp8attn.attention_quantized(qkv, is_causal=is_causal, backend="triton"),
        "fp8attn-triton, with quantization": lambda: fp8attn.attention(q, k, v, is_causal=is_causal, backend="triton"),
    }
    times = medians(implementations, rounds=7, settle_ms=25)
    flops = 4 * batch * heads * seqlen**2 * head_dim / (2 if is_causal else 1)
    rows = []
    for name, (p10, median, p90) in times.items():
        rows.append(
            {
                "op": "prefill", "impl": name.split(",")[0], "batch": batch, "num_q_heads": heads,
                "num_kv_heads": heads, "seqlen_q": seqlen, "seqlen_k": seqlen, "head_dim": head_dim,
                "head_dim_v": head_dim, "causal": is_causal, "accumulation": "fp32",
                "includes_quantization": "with" in name, "median_ms": round(median, 4), "p10_ms": round(p10, 4),
                "p90_ms": round(p90, 4), "tflops": round(flops / median / 1e9, 1),
                "times_cudnn": round(times["cudnn-bf16"][1] / median, 3),
                "relative_error": round(error(implementations[name](), q, k, v, is_causal), 5),
            }
        )  # fmt: skip
    return rows


def error(out: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> float:
    """Relative Frobenius error of some of the rows against attention in float64."""
    assert isinstance(out, torch.Tensor)
    tokens = torch.linspace(0, q.shape[2] - 1, CHECKED, device=q.device).long()
    wrong = size = 0.0
    for b in range(q.shape[0]):
        logits = q[b, :, tokens].double() @ k[b].double().mT * q.shape[3] ** -0.5
        if is_causal:
            logits.masked_fill_(torch.arange(k.shape[2], device=q.device) > tokens[:, None], -torch.inf)
        exact = logits.softmax(-1) @ v[b].double()
        wrong += float((out[b, :, tokens].double() - exact).square().sum())
        size += float(exact.square().sum())
    return (wrong / size) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", nargs="?", help="write the result as JSON and a table beside it, whole or not at all")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    rows: list[dict[str, Any]] = []
    for shape in SHAPES:
        for is_causal in (False, True):
            for row in rows_of(shape, is_causal):
                rows.append(row)
                print("  ".join(f"{row[column]!s:>14}" for column in COLUMNS), flush=True)
    if options.out:
        origin = provenance(
            command_line("fp8attn.analysis.bench.prefill"),
            competitors={"cudnn-bf16": torch.backends.cudnn.version(), "fa2-bf16": torch.__version__},
        )
        write(options.out, "Attention on one GPU", origin, rows, COLUMNS)


if __name__ == "__main__":
    main()
