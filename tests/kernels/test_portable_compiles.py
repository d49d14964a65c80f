"""Kernels compiled ahead of time, for GPUs that are not here: they compile, fit, and spill no registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

import fp8attn
from fp8attn.kernels.portable.tuning import Config, choose_config, table_path
from fp8attn.kernels.problem import AttentionProblem, Masking, QuantizedQKV
from fp8attn.recipe import Recipe
from fp8attn.scaling import quantize_tensor

HELPER = Path(__file__).with_name("ahead_of_time.py")
#: Installed Triton, and the oldest one supported in a folder of its own (pip install --no-deps --target).
TRITONS = {"installed": "", "3.6": os.environ.get("FP8ATTN_TRITON_3_6")}
WORKERS = 2

ROWS: list[dict[str, Any]] = json.loads(table_path("NVIDIA H200").read_text(encoding="utf-8"))["rows"]
EVEN, UNEVEN = 4096, 4001  # tokens: whole tiles only; the last tile is cut, and a row of V is padded


def forward(
    arch: int, recipe: str, head_dim: int, head_dim_v: int, causal: bool, seqlen: int = EVEN, **more: Any
) -> dict[str, Any]:
    return {
        "call": "forward", "arch": arch, "recipe": recipe, "head_dim": head_dim, "head_dim_v": head_dim_v,
        "is_causal": causal, "seqlen": seqlen, **more,
    }  # fmt: skip


def forward_cases() -> list[dict[str, Any]]:
    cases = []
    for row in ROWS:  # the GPU they were measured on
        dims = row["head_dim"], row["head_dim_v"]
        recipe = "mixed" if row["wide"] else "default"
        cases.append(forward(90, recipe, *dims, row["banded"]))
        if not row["banded"]:
            cases.append(forward(90, recipe, *dims, False, UNEVEN))
        elif not row["wide"]:
            cases.append(forward(90, "fa3", *dims, True))
    cases += [forward(90, "default", 128, 128, False, splits=2), forward(90, "bf16", 128, 128, False)]
    for arch in (89, 100):
        cases += [
            forward(arch, "default", 128, 128, True),
            forward(arch, "mixed", 128, 128, False, UNEVEN),
            forward(arch, "default", 256, 256, False),
            forward(arch, "bf16", 128, 128, False),
        ]
    # sm_90's instructions for copies and sm_89's shared memory: what is tuned on sm_90 must be made smaller.
    cases += [forward(120, "bf16", 128, 128, False), forward(120, "bf16", 256, 256, True)]
    # No FP8 in hardware: FP8 keys and values are read as bytes.
    cases += [forward(80, "mixed", 64, 64, True), forward(80, "mixed", 128, 128, False)]
    return cases


def quantization_cases() -> list[dict[str, Any]]:
    common = {"recipe": "default", "seqlen": EVEN, "is_causal": True}
    plain = [
        {"call": call, "arch": arch, "head_dim": dim, **common}
        for call in ("statistics", "quantize")
        for arch, dim in ((89, 128), (90, 64), (90, 128), (90, 256), (100, 128))
    ]
    turned = [{"call": "quantize", "arch": 90, "head_dim": dim, **common, "rotary": True} for dim in (64, 128, 256)]
    return plain + turned


#: The quantizer's kernel for packed queries keeps both ways of computing a tile and their logit shift in registers.
PACKED = {"call": "packed", "arch": 90, "recipe": "default", "head_dim": 128, "seqlen": EVEN, "is_causal": True}
#: What the probe looks at must be what it says.
PRODUCTS = [
    {"call": "product", "arch": arch, "instruction": instruction}
    for arch, instruction in ((89, "mma"), (90, "mma"), (90, "wgmma"), (100, "mma"), (120, "mma"))
]
CASES = {
    "-".join(str(value) for value in case.values()): case
    for case in [*forward_cases(), *quantization_cases(), PACKED, *PRODUCTS]
}
#: What spills or does not compile yet, by Triton's version. Strict: a case that has been mended must leave the list.
UNMENDED: dict[str, set[str]] = {
    "installed": {
        "forward-90-default-256-256-False-4096",
        "forward-90-default-256-256-False-4001",
        "forward-90-default-256-256-True-4096",
        "forward-90-fa3-256-256-True-4096",
        "packed-90-default-128-4096-True",
    },
    "3.6": {"packed-90-default-128-4096-True", "quantize-90-128-default-4096-True-True"},
}
#: Far too many tiles in flight and too few registers.
FAULTY = forward(
    90, "default", 128, 128, False,
    config={
        "block_m": 64, "block_n": 128, "edge_n": 64, "chunk": 128, "slice_v": 128, "slices_v": 1,
        "warps": 4, "stages": 8, "max_registers": 128,
    },
)  # fmt: skip


@cache
def compiled(version: str) -> dict[str, Any]:
    """Every case by its name, compiled by that Triton, in processes without its interpreter."""
    folder = TRITONS[version]
    if folder is None:
        pytest.skip("FP8ATTN_TRITON_3_6 names no folder with Triton 3.6 (pip install --no-deps --target)")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    # The same copy of ours as in this process.
    paths = [folder, str(Path(fp8attn.__file__).parents[1])]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    cases = [*CASES.items(), ("faulty", FAULTY)]
    parts = [dict(cases[i::WORKERS]) for i in range(WORKERS)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(HELPER)], env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in parts
    ]
    for process, part in zip(processes, parts, strict=True):
        assert process.stdin is not None
        json.dump(list(part.values()), process.stdin)
        process.stdin.close()
        process.stdin = None  # so that communicate() leaves it alone
    answers: dict[str, Any] = {}
    for process, part in zip(processes, parts, strict=True):
        output, _ = process.communicate()
        if process.returncode:  # the compiler took the process with it; said of every case, as it is not known which
            error = f"the process ended with {process.returncode}: {output[-2000:]}"
            answers |= {name: {"error": error} for name in part}
        else:
            answers |= zip(part, json.loads(output.splitlines()[-1]), strict=True)
    return answers


def launches(case: dict[str, Any]) -> int:
    """How many kernels the case's call launches."""
    if case["call"] == "forward":
        return case.get("splits", 1)
    if case["call"] == "statistics":
        return 4  # partial ones, merged, weighed, decided
    if case["call"] == "product":
        return 1
    if case["call"] == "packed":
        return 4 + 4 + 4 + 1  # tokens in use of q and k, twice; statistics; q, k, v in two passes; attention
    if case["arch"] == 90 and case["head_dim"] <= 128:
        return 8  # q and k folded: the matrix, codes, and what is to be done again; v: largest magnitudes, codes
    return 4 if case["head_dim"] <= 128 else 5  # a block of keys is more than a program holds: they take two passes


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("version", TRITONS)
def test_compiles_fits_and_does_not_spill(version, name, request):
    if name in UNMENDED[version]:
        request.applymarker(pytest.mark.xfail(strict=True, reason="spills registers or does not compile yet"))
    kernels = compiled(version)[name]
    assert isinstance(kernels, list), kernels["error"]
    case = CASES[name]
    assert len(kernels) == launches(case)
    for kernel in kernels:
        assert kernel["shared_memory"] <= kernel["shared_memory_limit"], kernel
        if case["arch"] in (90, 100):  # elsewhere nothing has been tuned
            assert kernel["local_memory"] == 0, kernel


@pytest.mark.parametrize("case", PRODUCTS, ids=lambda case: f"{case['arch']}-{case['instruction']}")
@pytest.mark.parametrize("version", TRITONS)
def test_a_product_is_the_instruction_that_it_is_called_by(version, case):
    (kernel,) = compiled(version)["-".join(str(value) for value in case.values())]
    expected = {
        "mma": "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32",
        "wgmma": "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3",
    }
    assert kernel["fp8_products"] == [expected[case["instruction"]]]


@pytest.mark.parametrize("version", TRITONS)
def test_too_much_is_seen(version):
    (kernel,) = compiled(version)["faulty"]
    assert kernel["local_memory"] > 0 and kernel["shared_memory"] > kernel["shared_memory_limit"]


@pytest.mark.parametrize("version", TRITONS)
def test_the_version_is_the_one_asked_for(version):
    (kernel,) = compiled(version)["faulty"]
    assert kernel["triton"].startswith(triton.__version__ if version == "installed" else "3.6.")


def problem(recipe: str, head_dim: int, head_dim_v: int, *, causal: bool) -> AttentionProblem:
    settings = Recipe.from_name(recipe)
    q, k, v = (
        quantize_tensor(torch.ones(1, 1, 32, dim), fmt, scale)
        for dim, fmt, scale in (
            (head_dim, settings.q_format, settings.q_scale),
            (head_dim, settings.k_format, settings.k_scale),
            (head_dim_v, settings.v_format, settings.v_scale),
        )
    )
    qkv = QuantizedQKV(q, k, v, settings, torch.bfloat16)
    return AttentionProblem(qkv, Masking(32, 32, torch.device("cpu"), causal), 1.0)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['head_dim']}-{row['wide']}-{row['banded']}")
def test_the_measured_gpu_gets_what_was_measured(row):
    recipe = "mixed" if row["wide"] else "default"
    chosen = choose_config(problem(recipe, row["head_dim"], row["head_dim_v"], causal=row["banded"]))
    assert chosen == Config(**row["config"])


@pytest.mark.parametrize("recipe", ["default", "mixed", "bf16"])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 64), (128, 128), (256, 256), (576, 512)])
def test_less_shared_memory_takes_fewer_keys_and_stages(recipe, head_dim, head_dim_v):
    """A program holds its queries, and the keys and values of every stage."""
    to_solve = problem(recipe, head_dim, head_dim_v, causal=False)
    full, small = (choose_config(to_solve, shared_memory=size << 10) for size in (227, 99))
    assert 32 <= small.block_n <= full.block_n and 1 <= small.stages <= full.stages and small.edge_n <= small.block_n
    size = {"default": 1, "mixed": 1, "bf16": 2}[recipe]
    channels = head_dim + full.slice_v * full.slices_v

    def tiles(config: Config) -> int:
        queries = config.block_m * head_dim * (1 if recipe == "default" else 2)
        return queries + config.stages * config.block_n * channels * size

    assert tiles(full) < 227 << 10
    if small != full:
        assert tiles(full) > 98 << 10
    if (recipe, head_dim) not in (("mixed", 576), ("bf16", 576)):  # beside whose queries one tile is too much
        assert tiles(small) < 99 << 10
