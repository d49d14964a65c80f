"""Comparing recipes: the figures are those of the public functions, and the default recipe earns its place."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fp8attn
from fp8attn import Recipe, analysis
from fp8attn.analysis import evaluate, evaluation, exact_attention, measure, recipe_errors, resolve_recipes
from fp8attn.analysis.inputs import CaptureFile, load_sample
from fp8attn.analysis.metrics import METRICS


def qkv(seed: int = 0, seqlen: int = 160, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(1, 4, seqlen, 64, generator=generator)
    k, v = (torch.randn(1, 2, seqlen, 64, generator=generator) for _ in range(2))
    return q.to(dtype), k.to(dtype), v.to(dtype)


@pytest.fixture(scope="module")
def sample() -> CaptureFile:
    return load_sample()


def test_figures_are_those_of_the_public_functions() -> None:
    q, k, v = qkv()
    options = {"is_causal": True, "softcap": 5.0, "sinks": torch.ones(4), "window": (40, -1), "scale": 0.2}
    figures = recipe_errors(q, k, v, ["default"], **options)["default"]
    out, lse = fp8attn.attention(q, k, v, enable_gqa=True, recipe="default", return_lse=True, **options)
    exact_out, exact_lse = exact_attention(q, k, v, **options)
    assert figures == measure(out, exact_out, lse, exact_lse)


def test_output_rounding_is_not_measured() -> None:
    q, k, v = qkv(dtype=torch.float16)
    assert recipe_errors(q, k, v, "default", is_causal=True) == recipe_errors(
        q.float(), k.float(), v.float(), "default", is_causal=True
    )


def test_a_given_exact_result_is_used() -> None:
    q, k, v = qkv()
    out, lse = exact_attention(q, k, v)
    figures = recipe_errors(q, k, v, "bf16", exact=(2 * out, lse + 1))["bf16"]
    # The output is half of what is claimed to be exact: |x - 2x| / |2x| = 0.5, off by bf16's own error (2^-8 at most).
    assert figures["relative_error"] == pytest.approx(0.5, abs=2**-8)
    # Likewise the lse, whose own error is that of logits of a few units in bf16: a few times 2^-8.
    assert figures["lse_error"] == pytest.approx(1.0, abs=2**-5)


def test_recipe_names(tmp_path: Path) -> None:
    mine = Recipe.from_name("default").replace(rotate="none")
    (tmp_path / "mine.json").write_text(mine.to_json())
    assert resolve_recipes(["fa3", str(tmp_path / "mine.json")]) == {"fa3": Recipe.from_name("fa3"), "mine": mine}
    assert resolve_recipes(Recipe.from_name("bf16")) == {"bf16": Recipe.from_name("bf16")}
    assert resolve_recipes(mine) == {"recipe": mine}
    assert resolve_recipes({"a": mine, "b": "fa3"}) == {"a": mine, "b": Recipe.from_name("fa3")}
    with pytest.raises(ValueError, match=r"unknown recipe 'nope'; accepted: default, per_tensor, .* \.json"):
        resolve_recipes("nope")
    with pytest.raises(ValueError, match=r"different names, got .*'fa3', 'fa3'"):
        resolve_recipes(["fa3", "fa3"])
    with pytest.raises(ValueError, match="got none"):
        resolve_recipes([])
    with pytest.raises(TypeError, match="got int"):
        resolve_recipes([3])
    with pytest.raises(FileNotFoundError, match="absent"):
        resolve_recipes(str(tmp_path / "absent.json"))


def test_default_recipe_on_the_sample(sample: CaptureFile) -> None:
    """0.60 was measured over all layers of the model; the sample's few layers may differ by one part in twelve."""
    result = evaluate(sample, ["per_tensor", "default"], is_causal=True)
    assert result["mean"]["default"]["relative_error"] <= 0.65 * result["mean"]["per_tensor"]["relative_error"]


def test_constant_offset_of_keys(sample: CaptureFile) -> None:
    """A constant added to keys changes no softmax; it may not cost the default recipe more than the promised 1.5."""
    for layer in sample.layers:
        shifted = layer.k.float().clone()
        shifted[..., 5:60:13] += 100.0
        before = recipe_errors(layer.q, layer.k, layer.v, "default", is_causal=True)["default"]["relative_error"]
        after = recipe_errors(layer.q, shifted, layer.v, ["default", "per_tensor"], is_causal=True)
        assert after["default"]["relative_error"] <= 1.5 * before
        assert after["per_tensor"]["relative_error"] > 3 * before, "an offset that hurts nobody proves nothing"


def test_evaluate(sample: CaptureFile) -> None:
    seen = []
    result = evaluate(sample, ["fa3"], is_causal=True, source="here", progress=lambda *step: seen.append(step))
    assert [layer["layer"] for layer in result["layers"]] == [layer.name for layer in sample.layers]
    for layer, entry in zip(sample.layers, result["layers"], strict=True):
        assert entry["recipes"] == recipe_errors(layer.q, layer.k, layer.v, "fa3", is_causal=True)
        assert list(entry["shape"].values()) == [1, 9, 3, 512, 512, 64, 64]
    for metric in METRICS:
        values = [entry["recipes"]["fa3"][metric] for entry in result["layers"]]
        assert result["mean"]["fa3"][metric] == pytest.approx(
            sum(values) / len(values), rel=1e-12
        )  # a few float64 sums
    assert result["source"] == {"file": "here", "metadata": sample.metadata}
    assert result["causal"] is True and result["fp8attn"] == fp8attn.__version__
    assert Recipe.from_dict(result["recipes"]["fa3"]) == Recipe.from_name("fa3")
    total = 2 * len(sample.layers)
    assert [step[:2] for step in seen] == [(done, total) for done in range(total + 1)]
    assert "fa3" in seen[1][2] and sample.layers[0].name in seen[1][2]


def test_evaluate_obeys_the_metadata(sample: CaptureFile) -> None:
    layer = sample.layers[0]
    capture = CaptureFile(Path("folder/x.npz"), [layer], {"causal": "true", "scale": "0.5"})
    result = evaluate(capture, "fa3")
    expected = recipe_errors(layer.q, layer.k, layer.v, "fa3", is_causal=True, scale=0.5)
    assert result["layers"][0]["recipes"] == expected and result["source"]["file"] == "x.npz"
    assert evaluate(capture, "fa3", is_causal=False)["causal"] is False


def fake_result(default: float = 0.048, per_tensor: float = 0.08) -> dict:
    def figures(error: float) -> dict[str, float]:
        return {
            "relative_error": error,
            "sqnr_db": math.inf if error == 0 else -20 * math.log10(error),
            "cosine": math.nan,
            "max_abs_error": 0.5,
            "lse_error": 0.01,
        }

    shape = dict(batch=1, num_q_heads=9, num_kv_heads=3, seqlen_q=512, seqlen_k=512, head_dim=64, head_dim_v=64)
    recipes = {"per_tensor": figures(per_tensor), "default": figures(default)}
    layers = [{"layer": name, "shape": shape, "recipes": recipes} for name in ("layer 0", "layer 15")]
    source = {"file": "x.safetensors", "metadata": {}}
    versions = {"fp8attn": "0.1", "torch": "2.13"}
    return {**versions, "source": source, "causal": True, "recipes": {}, "layers": layers, "mean": recipes}


def test_json_has_no_nan_or_infinity() -> None:
    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is not JSON")

    parsed = json.loads(evaluation.to_json(fake_result(default=0.0)), parse_constant=refuse)
    assert parsed["mean"]["default"] == {
        "relative_error": 0.0,
        "sqnr_db": None,
        "cosine": None,
        "max_abs_error": 0.5,
        "lse_error": 0.01,
    }


def test_words_and_markdown() -> None:
    result = fake_result()
    assert evaluation.describe(result) == (
        "x.safetensors: 2 layers, batch 1, 9 query on 3 kv heads, head dim 64, 512 tokens, causal"
    )
    assert "default's relative error is 0.60 times per_tensor's" in evaluation.explain_errors(result)
    assert "times" not in evaluation.explain_errors(fake_result(default=math.nan))
    lines = evaluation.to_markdown(result).splitlines()
    rows = [line for line in lines if line.startswith("| ")]
    assert rows[0] == "| layer | recipe | relative error | SQNR dB | cosine | largest error | LSE error |"
    assert rows[1] == "| layer 0 | per_tensor | 0.0800 | 21.9 | nan | 0.5 | 0.01 |"
    assert rows[-1] == "| mean | default | 0.0480 | 26.4 | nan | 0.5 | 0.01 |"
    assert len(rows) == 1 + 2 * 2 + 2


def test_package_is_lazy_and_its_names_are_no_modules() -> None:
    """In a fresh process, because importing a submodule puts the module itself into the package under its name."""
    program = (
        "import sys, types, fp8attn.analysis as analysis\n"
        "assert 'torch' not in sys.modules, 'importing fp8attn.analysis must cost nothing'\n"
        "names = ['evaluate', *analysis.__all__]  # evaluate imports most of the others' modules\n"
        "print([name for name in names if isinstance(getattr(analysis, name), types.ModuleType)])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        analysis.nothing  # noqa: B018
