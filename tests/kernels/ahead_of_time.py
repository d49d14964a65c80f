"""Compiles what calls launch, for GPUs that are not here, and prints what each kernel takes of the GPU.

    python tests/kernels/ahead_of_time.py < cases.json

Cases are a JSON list of {"call": a name in CALLS, "arch": 90 for sm_90, ...} with that function's arguments. The last
line printed is a JSON list with, for each case, what every kernel that the call launches takes, in its order: see
``Kernel``; or {"error": ...}. The process must not have Triton's interpreter on.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, TypedDict

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from fp8attn.formats import get_format
from fp8attn.kernels.portable.forward import attend
from fp8attn.kernels.portable.packed import PackedProblem
from fp8attn.kernels.portable.product import tensor_core_product
from fp8attn.kernels.portable.quantize import quantize_qkv
from fp8attn.kernels.portable.statistics import fit_smoothing
from fp8attn.kernels.portable.support import v_layout
from fp8attn.kernels.portable.tuning import Config, choose_config
from fp8attn.kernels.problem import AttentionProblem, Masking, Packing, QuantizedQKV, Rotary, Sequences
from fp8attn.recipe import Recipe
from fp8attn.scaling import Granularity, QuantizedTensor
from fp8attn.transforms import Smoothing

#: Bytes of shared memory that a block may have (CUDA C++ Programming Guide, "Compute Capabilities").
SHARED_MEMORY = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
BATCH, NUM_Q_HEADS, NUM_KV_HEADS = 2, 32, 8


class Kernel(TypedDict):
    """What a kernel takes: bytes of local memory (spilled registers) a thread, of shared memory a block, and how it
    multiplies FP8.
    """

    name: str
    triton: str
    warps: int
    stages: int
    registers: int
    local_memory: int
    shared_memory: int
    shared_memory_limit: int
    fp8_products: list[str]


# ---- What is compiled ------------------------------------------------------------------------------------------------


def forward(
    arch: int,
    recipe: str,
    head_dim: int,
    head_dim_v: int,
    is_causal: bool,
    seqlen: int,
    splits: int = 1,
    config: dict[str, Any] | None = None,
) -> None:
    """Attention over what a bf16 batch is quantized to; ``config`` None is what is chosen on such a GPU."""
    settings = Recipe.from_name(recipe)
    qkv = QuantizedQKV(
        _quantized(NUM_Q_HEADS, seqlen, head_dim, settings.q_format, settings.q_scale),
        _quantized(NUM_KV_HEADS, seqlen, head_dim, settings.k_format, settings.k_scale),
        _quantized(NUM_KV_HEADS, seqlen, head_dim_v, settings.v_format, settings.v_scale, v_layout(settings)),
        settings,
        torch.bfloat16,
        logit_shift=torch.empty(BATCH, NUM_Q_HEADS, seqlen) if settings.smooth_k else None,
        v_mean=torch.empty(BATCH, NUM_KV_HEADS, 1, head_dim_v) if settings.smooth_v else None,
    )
    problem = AttentionProblem(qkv, Masking(seqlen, seqlen, torch.device("cpu"), is_causal), head_dim**-0.5)
    chosen = Config(**config) if config else choose_config(problem, shared_memory=SHARED_MEMORY[arch])
    attend(problem, config=chosen, splits=splits)


def _quantized(
    heads: int, seqlen: int, dim: int, format: str, granularity: str, layout: str = "rows"
) -> QuantizedTensor:
    """Codes and scales without values, as the quantizers lay them out."""
    fmt, grouping, columns = get_format(format), Granularity.parse(granularity), layout != "rows"
    shape = (BATCH, heads, dim, -(-seqlen // 16) * 16) if columns else (BATCH, heads, seqlen, dim)
    scale = torch.empty(grouping.scale_shape(torch.Size([BATCH, heads, seqlen, dim])))
    codes = torch.empty(shape, dtype=fmt.dtype)
    return QuantizedTensor(codes, scale, fmt, grouping, layout=layout, seqlen=seqlen if columns else None)


def statistics(arch: int, recipe: str, head_dim: int, seqlen: int, is_causal: bool) -> None:
    """Smoothing statistics of a bf16 batch."""
    q, k, v = _batch(head_dim, seqlen)
    masking = Masking(seqlen, seqlen, q.device, is_causal)
    with contextlib.suppress(ValueError):  # after the last launch it may refuse values that no kernel wrote
        fit_smoothing(q, k, v, Recipe.from_name(recipe), masking, scale=head_dim**-0.5)


def quantize(arch: int, recipe: str, head_dim: int, seqlen: int, is_causal: bool, rotary: bool = False) -> None:
    """Codes and scales of a bf16 batch, smoothed by statistics that are known."""
    q, k, v = _batch(head_dim, seqlen)
    masking = Masking(seqlen, seqlen, q.device, is_causal)
    shape = (BATCH, NUM_KV_HEADS, 1, head_dim)
    smoothing = Smoothing(k_mean=torch.zeros(shape), balance=torch.ones(shape))
    table = torch.empty(seqlen, head_dim // 2, dtype=q.dtype)
    quantize_qkv(
        q, k, v, Recipe.from_name(recipe), masking, scale=head_dim**-0.5, smoothing=smoothing,
        rotary=Rotary(table, table) if rotary else None,
    )  # fmt: skip


def packed(arch: int, recipe: str, head_dim: int, seqlen: int, is_causal: bool) -> None:
    """Everything that a packed bf16 batch takes, of 99 sequences with ``seqlen`` tokens in all."""
    q, k, v = (x[:1] for x in _batch(head_dim, seqlen))
    settings, masking = Recipe.from_name(recipe), Masking(seqlen, seqlen, q.device, is_causal, "bottom_right")
    sequences = Sequences(torch.empty(100, dtype=torch.int32), seqlen, seqlen)
    packing, scale = Packing(sequences, sequences), head_dim**-0.5
    with contextlib.suppress(ValueError):
        fit_smoothing(q, k, v, settings, masking, scale=scale, packing=packing)
    shape = (1, NUM_KV_HEADS, 1, head_dim)
    smoothing = Smoothing(k_mean=torch.zeros(shape), balance=torch.ones(shape))
    qkv = quantize_qkv(q, k, v, settings, masking, scale=scale, smoothing=smoothing, packing=packing)
    attend(PackedProblem(qkv, masking, scale, packing=packing))


def _batch(head_dim: int, seqlen: int) -> list[torch.Tensor]:
    heads = (NUM_Q_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    return [torch.empty(BATCH, n, seqlen, head_dim, dtype=torch.bfloat16) for n in heads]


def product(arch: int, instruction: str, depth: int = 128) -> None:
    """One product that stays in the tensor core."""
    a, b = (torch.empty(shape, dtype=torch.float8_e4m3fn) for shape in ((16, depth), (depth, 8)))
    tensor_core_product(a, b, torch.empty(16, 8), instruction)


#: To have more kernels compiled: a function that calls what launches them, on CPU tensors.
CALLS = {"forward": forward, "statistics": statistics, "quantize": quantize, "packed": packed, "product": product}


# ---- How -------------------------------------------------------------------------------------------------------------


class AbsentGPU:
    """The part of a Triton driver that compiling asks."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # Triton asks for the target once a device: let each architecture be one

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def compile_case(case: dict[str, Any]) -> list[Kernel]:
    """What each kernel takes that the case's call launches; nothing runs."""
    arguments = dict(case)
    call = CALLS[arguments.pop("call")]
    compiled: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> Any:
        compiled.append(run(self, *args, **{**kwargs, "warmup": True}))
        return compiled[-1]

    triton.runtime.driver.set_active(AbsentGPU(case["arch"]))
    JITFunction.run = compile_only
    try:
        call(**arguments)
    finally:
        JITFunction.run = run
    return [_resources(kernel, case["arch"]) for kernel in compiled]


def _resources(kernel: Any, arch: int) -> Kernel:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(kernel.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # Spilled registers lie on the stack.
    ((registers, stack, local),) = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    return {
        "name": kernel.metadata.name,
        "triton": triton.__version__,
        "warps": kernel.metadata.num_warps,
        "stages": kernel.metadata.num_stages,
        "registers": int(registers),
        "local_memory": int(stack) + int(local),
        "shared_memory": kernel.metadata.shared,
        "shared_memory_limit": SHARED_MEMORY[arch],
        "fp8_products": sorted(set(re.findall(r"w?g?mma[\w.:]*\.e[45]m[23]\b[\w.]*", kernel.asm["ptx"]))),
    }


def main() -> None:
    answers: list[Any] = []
    for case in json.load(sys.stdin):
        try:
            answers.append(compile_case(case))
        except Exception:  # the compiler's are of any kind; the other cases go on
            answers.append({"error": traceback.format_exc()})
    print("\n" + json.dumps(answers))


if __name__ == "__main__":
    main()
