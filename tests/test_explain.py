"""The table of backends: which one a problem goes to, what is said about it, and that it does all of the work."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
import torch

import fp8attn
from fp8attn import Recipe
from fp8attn.kernels import dispatch
from fp8attn.kernels.dispatch import BACKENDS, Backend, choose, reasons
from fp8attn.kernels.portable import support
from fp8attn.kernels.problem import AttentionProblem, QuantizedQKV
from fp8attn.testing import AttentionShape, make_qkv
from fp8attn.transforms import Smoothing

DATA = make_qkv(AttentionShape(2, 6, 2, 20, 33, 16, 24), seed=1)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DEFAULT = Recipe()


def columns(v_codes: fp8attn.QuantizedTensor) -> fp8attn.QuantizedTensor:
    return v_codes.to_layout("permuted_columns")


class Recorder:
    """The reference as another backend would be: values in columns, output in the inputs' dtype, and a record."""

    def __init__(self, name: str = "recorder", refuses: str | None = None) -> None:
        self.did: list[str] = []
        self.backend = Backend(
            name, self.attend, self.quantize, lambda *_: refuses, lambda _: "permuted_columns", self.describe
        )

    def attend(self, problem: AttentionProblem) -> tuple[torch.Tensor, torch.Tensor]:
        self.did.append(f"attend {problem.qkv.v.layout}")
        out, lse = BACKENDS["reference"].attend(problem)
        return out.to(problem.qkv.dtype), lse

    def quantize(self, *args: Any, **options: Any) -> QuantizedQKV:
        self.did.append("quantize")
        made = BACKENDS["reference"].quantize(*args, **options)
        return dataclasses.replace(made, v=columns(made.v))

    def describe(self, problem: AttentionProblem) -> dict[str, str]:
        q, v = problem.qkv.q, problem.qkv.v
        return {
            "q": f"{tuple(q.shape)} {q.codes.dtype} {q.device}",
            "v": f"{tuple(v.shape)} {v.layout} in {v.codes.untyped_storage().nbytes()} bytes",
            "right": str(problem.masking.right),
        }


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setitem(BACKENDS, "recorder", made.backend)
    return made


# ---- the choice


def test_auto_takes_the_first_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {b.name: b for b in (Recorder("fast", "it is too small").backend, Recorder("middle").backend)}
    monkeypatch.setattr(dispatch, "BACKENDS", {**table, "slow": Recorder("slow").backend, **BACKENDS})
    assert choose("auto", CUDA, DEFAULT, 64, 64).name == "middle"
    said = reasons("auto", CUDA, DEFAULT, 64, 64)
    assert said["fast"] == "skipped: it is too small"
    assert said["middle"] == "chosen: the fastest that runs this"
    assert said["slow"] == said["reference"] == "skipped: middle is faster"
    with pytest.raises(ValueError, match="backend='fast' cannot run this: it is too small; backend='auto' takes one"):
        choose("fast", CUDA, DEFAULT, 64, 64)
    # On a CPU kernels are interpreted: only for those who ask.
    assert choose("auto", CPU, DEFAULT, 64, 64).name == "reference"
    assert choose("middle", CPU, DEFAULT, 64, 64).name == "middle"
    said = reasons("auto", CPU, DEFAULT, 64, 64)
    assert said["middle"] == "skipped: interpreted on cpu, and slow; backend='middle' takes it"
    assert said["fast"] == "skipped: it is too small"
    assert said["reference"] == "chosen: the fastest that runs this"


def test_the_reference_comes_last_and_runs_everything() -> None:
    assert list(BACKENDS)[-1] == "reference"
    odd = Recipe(accumulation="tensor_core", rotate="haar")
    assert BACKENDS["reference"].unsupported(torch.device("meta"), odd, 10_000, 10_000) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_backend_quantizes_and_attends(recorder: Recorder, dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in DATA)
    expected = fp8attn.attention(q, k, v, enable_gqa=True, return_lse=True)
    assert recorder.did == []
    out, lse = fp8attn.attention(q, k, v, enable_gqa=True, return_lse=True, backend="recorder")
    assert recorder.did == ["quantize", "attend permuted_columns"]
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    quantized = fp8attn.quantize(q, k, v, backend="recorder")
    assert recorder.did[2:] == ["quantize"]
    assert quantized.v.layout == "permuted_columns"
    # Any backend takes what another one quantized.
    assert torch.equal(fp8attn.attention_quantized(quantized), expected[0])
    rows = fp8attn.quantize(q, k, v)
    assert rows.v.layout == "rows"
    assert torch.equal(fp8attn.attention_quantized(rows, backend="recorder"), expected[0])
    assert recorder.did[3:] == ["attend rows"]


def test_packed_sequences_go_to_the_backend_too(recorder: Recorder) -> None:
    q, k, v = (torch.randn(5, 2, 16) for _ in range(3))
    cu_seqlens = torch.tensor([0, 2, 5])
    expected = fp8attn.attention_varlen(q, k, v, cu_seqlens, cu_seqlens)
    assert torch.equal(fp8attn.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, backend="recorder"), expected)
    assert recorder.did == ["quantize", "attend permuted_columns"] * 2


# ---- what Triton's kernels can run


@pytest.mark.parametrize(
    ("capability", "recipe", "says"),
    [
        ((9, 0), "default", None),
        ((8, 9), "default", None),
        ((12, 0), "per_tensor", None),
        ((8, 6), "default", "compute capability 8.6 and FP8 products need 8.9 .*recipe='mixed'.* runs on 8.0"),
        ((8, 0), "default", "FP8 products need 8.9"),
        ((8, 0), "mixed", None),
        ((8, 0), "bf16", None),
        ((8, 0), Recipe(q_format="fp16"), "FP8 products need 8.9"),  # p and v are FP8 both
        ((8, 0), Recipe(p_format="bf16"), "FP8 products need 8.9"),  # q and k are
        ((8, 0), Recipe(q_format="int8", k_format="int8", p_format="fp16"), None),
        ((7, 5), "bf16", "compute capability 7.5 and the kernels need 8.0"),
    ],
)
def test_a_recipe_asks_for_a_compute_capability(
    capability: tuple[int, int], recipe: str | Recipe, says: str | None
) -> None:
    lacks = support.gpu_lacks(capability, Recipe.resolve(recipe))
    if says is None:
        assert lacks is None
    else:
        assert lacks is not None
        with pytest.raises(ValueError, match=says):
            raise ValueError(lacks)


def in_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def test_triton_on_a_cpu_needs_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "TRITON_INTERPRET=1" in (support.unsupported(CPU, DEFAULT, 64, 64) or "")
    in_interpreter(monkeypatch)
    assert support.unsupported(CPU, DEFAULT, 64, 64) is None
    assert "unset TRITON_INTERPRET" in (support.unsupported(CUDA, DEFAULT, 64, 64) or "")
    assert "not on meta" in (support.unsupported(torch.device("meta"), DEFAULT, 64, 64) or "")


def test_triton_leaves_studies_and_large_heads_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    in_interpreter(monkeypatch)
    for accumulation in ("tensor_core", "tensor_core_two_level"):
        said = support.unsupported(CPU, Recipe(accumulation=accumulation), 64, 64)
        assert said == f"accumulation={accumulation!r} is a model for studies, which the reference alone has"
    assert support.unsupported(CPU, DEFAULT, 576, 512) is None
    assert support.unsupported(CPU, DEFAULT, 577, 512) == "its query head_dim is at most 576, got 577"
    assert support.unsupported(CPU, DEFAULT, 576, 513) == "its value head_dim is at most 512, got 513"


def test_without_triton_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "_installed", lambda name: name != "triton")
    assert support.unsupported(CUDA, DEFAULT, 64, 64) == "Triton is not installed (pip install triton)"
    assert choose("auto", CUDA, DEFAULT, 64, 64).name == "reference"
    with pytest.raises(ValueError, match=r"backend='triton' cannot run this: .*pip install triton"):
        fp8attn.attention(*DATA, enable_gqa=True, backend="triton")


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what is said where there is no GPU")
def test_a_cuda_tensor_that_is_only_described_needs_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(pytest.importorskip("triton").knobs.runtime, "interpret", False)
    with FakeTensorMode():
        q = torch.empty(1, 2, 8, 16, device="cuda")
        assert fp8attn.attention(q, q, q).device.type == "cuda"
        assert "no CUDA device" in fp8attn.explain(q, q, q).reasons["triton"]


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        ("default", "permuted_columns"),
        (Recipe(v_format="e5m2", p_format="e5m2"), "permuted_columns"),
        ("mixed", "rows"),
        ("bf16", "rows"),
        (Recipe(p_format="fp16"), "rows"),
    ],
)
def test_values_lie_as_the_product_wants_them(recipe: str | Recipe, layout: str) -> None:
    assert support.v_layout(Recipe.resolve(recipe)) == layout


def test_nothing_imports_triton_until_it_is_needed() -> None:
    code = (
        "import sys, torch, fp8attn\n"
        "x = torch.randn(1, 1, 4, 16)\n"
        "fp8attn.attention(x, x, x)\n"
        "assert 'triton' not in sys.modules and 'torch._dynamo' not in sys.modules\n"
        "fp8attn.explain(x, x, x)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# ---- explain


def test_explain_names_the_backend_and_its_reasons() -> None:
    said = fp8attn.explain(*DATA, enable_gqa=True, is_causal=True)
    assert said.backend == "reference"
    assert said.runs == ("quantization", "attention")
    assert list(said.reasons) == list(BACKENDS)
    assert str(said).splitlines() == [
        "quantization and attention on backend 'reference'",
        *(f"  {name}: {reason}" for name, reason in said.reasons.items()),
    ]
    quantized = fp8attn.explain(fp8attn.quantize(*DATA), is_causal=True, backend="reference")
    assert (quantized.backend, quantized.runs) == ("reference", ("attention",))
    assert str(quantized).startswith("attention on backend 'reference'\n")
    with pytest.raises(dataclasses.FrozenInstanceError):
        said.backend = "triton"  # type: ignore[misc]


def test_explain_asks_the_backend_what_it_would_do(recorder: Recorder) -> None:
    def asked(*args: Any, **options: Any) -> fp8attn.Explanation:
        return fp8attn.explain(*args, backend="recorder", **options)

    big = torch.empty(1, 1, 1, 16).expand(1, 4, 100_000, 16)
    said = asked(big, big, big, is_causal=True)
    assert recorder.did == []  # nothing was run
    assert said.details == {
        "q": "(1, 4, 100000, 16) torch.float8_e4m3fn cpu",
        "v": "(1, 4, 100000, 16) permuted_columns in 1 bytes",  # and nothing of that size allocated
        "right": "0",
    }
    assert str(said).splitlines()[-1] == "  right = 0"
    quantized = fp8attn.quantize(*DATA, "mixed")
    assert asked(quantized).details["q"] == "(2, 6, 20, 16) torch.float16 cpu"
    assert fp8attn.explain(*DATA, enable_gqa=True).details == {}  # the reference has nothing to tell


Q, K, V = DATA


@pytest.mark.parametrize(
    ("args", "options"),
    [
        ((Q, K, V), {}),
        ((Q, K, None), {}),
        ((Q, K, V[:, :, :5]), {"enable_gqa": True}),
        ((Q.double(), K, V), {"enable_gqa": True}),
        ((Q.clone().requires_grad_(), K, V), {"enable_gqa": True}),
        ((Q, K, V, torch.zeros(3, 3)), {"enable_gqa": True}),
        ((Q, K, V), {"enable_gqa": True, "dropout_p": 0.5}),
        ((Q, K, V), {"enable_gqa": True, "is_causal": "no"}),
        ((Q, K, V), {"enable_gqa": True, "causal_alignment": "middle"}),
        ((Q, K, V), {"enable_gqa": True, "window": 4}),
        ((Q, K, V), {"enable_gqa": True, "scale": float("nan")}),
        ((Q, K, V), {"enable_gqa": True, "softcap": -1.0}),
        ((Q, K, V), {"enable_gqa": True, "sinks": torch.zeros(5)}),
        ((Q, K, V), {"enable_gqa": True, "recipe": "best"}),
        ((Q, K, V), {"enable_gqa": True, "smoothing": Smoothing(k_mean=torch.zeros(2, 3, 1, 16))}),
        ((Q, K, V), {"enable_gqa": True, "layout": "sbhd"}),
        ((Q, K, V), {"enable_gqa": True, "backend": "cuda"}),
        ((Q, K, V), {"enable_gqa": True, "out": torch.zeros(2, 6, 20, 16)}),
        ((Q[..., :13], K[..., :13], V), {"enable_gqa": True}),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, dict) else "",
)
def test_explain_refuses_what_attention_refuses(args: tuple[Any, ...], options: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)) as expected:
        fp8attn.attention(*args, **options)
    with pytest.raises(expected.type) as found:
        fp8attn.explain(*args, **options)
    assert str(found.value) == str(expected.value)


def test_explain_of_a_quantized_value_refuses_what_attention_quantized_refuses() -> None:
    quantized = fp8attn.quantize(*DATA)
    for options in ({"attn_mask": torch.zeros(3, 3)}, {"sinks": torch.zeros(5)}, {"out": torch.zeros(2, 6, 20, 23)}):
        with pytest.raises(ValueError) as expected:
            fp8attn.attention_quantized(quantized, **options)  # type: ignore[arg-type]
        with pytest.raises(ValueError) as found:
            fp8attn.explain(quantized, **options)  # type: ignore[arg-type]
        assert str(found.value) == str(expected.value)
    with pytest.raises(ValueError, match="a QuantizedQKV brings its keys and values"):
        fp8attn.explain(quantized, K, V)


@pytest.mark.gpu
def test_on_a_gpu_the_kernels_are_chosen() -> None:
    q = torch.randn(1, 8, 256, 128, device="cuda", dtype=torch.bfloat16)
    said = fp8attn.explain(q, q, q)
    assert said.backend != "reference" and said.reasons["reference"] == f"skipped: {said.backend} is faster"
    study = fp8attn.explain(q, q, q, recipe=Recipe(accumulation="tensor_core"))
    assert study.backend == "reference" and "for studies" in study.reasons["triton"]
