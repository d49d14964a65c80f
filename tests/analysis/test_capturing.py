from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from fp8attn.analysis.capturing import capture
from fp8attn.analysis.inputs import load_qkv, load_sample
from fp8attn.analysis.llama import LlamaModel, Tokenizer

pytest.importorskip("gguf")
pytest.importorskip("tokenizers")

LICENSE = Path(__file__).parents[2] / "LICENSE"
TEXT = "the quick brown fox jumps over the lazy dog 12 times"


@pytest.fixture
def tiny(tmp_path, write_tiny_gguf):
    write_tiny_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def run(folder, out="out.safetensors", **kwargs):
    return capture(folder / "text.txt", folder / out, model_path=folder / "tiny.gguf", **kwargs)


def seen_by_attention(folder):
    model, tokens = LlamaModel.from_gguf(folder / "tiny.gguf"), Tokenizer.from_gguf(folder / "tiny.gguf").encode(TEXT)
    layers = []
    model.forward(tokens, on_attention=lambda layer, q, k, v: layers.append({"q": q, "k": k, "v": v}))
    return tokens, layers


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_holds_what_attention_saw(tiny, dtype):
    assert run(tiny, layers=[2, 0, 2], dtype=dtype) == tiny / "out.safetensors"
    _, layers = seen_by_attention(tiny)
    with safe_open(tiny / "out.safetensors", "pt") as file:
        assert sorted(file.keys()) == [f"layers.{i}.{x}" for i in (0, 2) for x in "kqv"]
        for i in (0, 2):
            for x in "qkv":
                assert torch.equal(file.get_tensor(f"layers.{i}.{x}"), layers[i][x].to(dtype))


def test_starts_at_the_first_token_and_takes_all_layers_by_default(tiny):
    run(tiny, max_tokens=7, dtype=torch.float32)
    _, layers = seen_by_attention(tiny)
    read = load_qkv(tiny / "out.safetensors")
    assert [layer.index for layer in read.layers] == [0, 1, 2]
    for layer, want in zip(read.layers, layers, strict=True):
        # Causal: the first 7 rows know nothing of the rest; FP32 noise as in test_llama.
        torch.testing.assert_close(layer.k, want["k"][:, :, :7], rtol=2e-5, atol=2e-5)


def test_metadata(tiny):
    run(tiny, layers=[1])
    tokens, _ = seen_by_attention(tiny)
    with safe_open(tiny / "out.safetensors", "pt") as file:
        metadata = file.metadata()
    expected = {
        "format": "fp8attn-capture-1",
        "model": "tiny",
        "model_file": "tiny.gguf",
        "model_sha256": hashlib.sha256((tiny / "tiny.gguf").read_bytes()).hexdigest(),
        "text_file": "text.txt",
        "text_sha256": hashlib.sha256(TEXT.encode()).hexdigest(),
        "tokens": str(len(tokens)),
        "layers": "1",
        "layout": "bhsd",
        "causal": "true",
        "scale": "0.25",
        "license": "apache-2.0",
        "torch_version": torch.__version__,
    }
    assert {key: metadata[key] for key in expected} == expected
    assert set(metadata) - set(expected) == {"fp8attn_version", "gguf_version", "date"}
    assert str(tiny) not in json.dumps(metadata)


def test_progress(tiny):
    calls = []
    run(tiny, layers=[1], progress=lambda done, total: calls.append((done, total)))
    assert calls == [(1, 2), (2, 2)]  # layer 2 is not run: nobody asked for it


def test_replaces_an_older_file_with_the_usual_permissions(tiny):
    (tiny / "out.safetensors").write_text("old")
    (tiny / "plain").touch()
    run(tiny, layers=[0])
    assert len(load_qkv(tiny / "out.safetensors").layers) == 1
    (tiny / "out.safetensors").unlink()
    run(tiny, layers=[0])
    assert (tiny / "out.safetensors").stat().st_mode == (tiny / "plain").stat().st_mode


@pytest.mark.parametrize("where", ["replace", "write", "progress"])
def test_failure_leaves_nothing_behind(tiny, monkeypatch, where):
    def fail(*args, **kwargs):
        raise RuntimeError("no space left")

    (tiny / "out.safetensors").write_text("old")
    before = sorted(p.name for p in tiny.iterdir())
    progress = None
    if where == "replace":
        monkeypatch.setattr(os, "replace", fail)
    elif where == "write":
        monkeypatch.setattr(
            "safetensors.torch.save_file", lambda tensors, path, _: fail(Path(path).write_bytes(b"part"))
        )
    else:
        progress = fail
    with pytest.raises(RuntimeError, match="no space left"):
        run(tiny, layers=[0], progress=progress)
    assert sorted(p.name for p in tiny.iterdir()) == before
    assert (tiny / "out.safetensors").read_text() == "old"


def test_values_beyond_the_dtype_are_refused(tmp_path, write_tiny_gguf):
    write_tiny_gguf(tmp_path / "tiny.gguf", tensors={"blk.1.attn_v.weight": torch.full((32, 48), 3e4)})
    (tmp_path / "text.txt").write_text(TEXT)
    with pytest.raises(ValueError, match=r"v of layer 1 reaches .*, beyond torch.float16's 65504; ask for dtype"):
        run(tmp_path)
    run(tmp_path, dtype=torch.bfloat16)
    assert float(load_qkv(tmp_path / "out.safetensors", layers=[1]).layers[0].v.abs().max()) > 65504


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"max_tokens": 1}, "max_tokens is 1"),
        ({"layers": []}, "layers is empty"),
        ({"layers": [0, 3, 9]}, r"layers \[3, 9\] do not exist; tiny has layers 0 to 2"),
        ({"layers": [-1]}, r"layers \[-1\] do not exist"),
        ({"dtype": torch.float64}, "dtype is torch.float64; a capture is kept in torch.float16"),
        ({"out": "text.txt"}, r"would overwrite the input .*text\.txt"),
        ({"out": "tiny.gguf"}, r"would overwrite the input .*tiny\.gguf"),
    ],
)
def test_bad_arguments(tiny, kwargs, message):
    with pytest.raises(ValueError, match=message):
        run(tiny, **kwargs)
    assert (tiny / "text.txt").read_text() == TEXT


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"text\.txt has 0 tokens; at least 2 are needed"),
        (b"a", r"text\.txt has 1 tokens"),
        (b"caf\xe9 latin", r"text\.txt is not UTF-8 text"),
    ],
)
def test_bad_texts(tiny, content, message):
    (tiny / "text.txt").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        run(tiny)


def test_bad_places(tiny, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"the folder .*nowhere does not exist"):
        run(tiny, out="nowhere/out.safetensors")
    with pytest.raises(IsADirectoryError, match="is a folder; name a file"):
        run(tiny, out=".")
    with pytest.raises(FileNotFoundError, match=r"absent\.txt"):
        capture(tiny / "absent.txt", tiny / "out.safetensors", model_path=tiny / "tiny.gguf")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(PermissionError, match="is not writable"):
        run(tiny)


def test_sample_is_reproduced(tmp_path, smollm2_path, smollm2, monkeypatch):
    # Read once for all tests; that the files are read rightly is tested beside the model.
    monkeypatch.setattr(LlamaModel, "from_gguf", lambda path: smollm2[0])
    monkeypatch.setattr(Tokenizer, "from_gguf", lambda path: smollm2[1])
    packaged = load_sample()
    layers = [layer.index for layer in packaged.layers]
    capture(LICENSE, tmp_path / "sample.safetensors", layers=layers, model_path=smollm2_path)
    again = load_qkv(tmp_path / "sample.safetensors")
    changing = {"date", "fp8attn_version", "torch_version", "gguf_version"}
    assert {k: v for k, v in again.metadata.items() if k not in changing} == {
        k: v for k, v in packaged.metadata.items() if k not in changing
    }
    assert layers == [5, 15, 25] and packaged.layers[0].q.shape == (1, 9, 512, 64)
    for a, b in zip(again.layers, packaged.layers, strict=True):
        for x, y in ((a.q, b.q), (a.k, b.k), (a.v, b.v)):
            # Two roundings to float16, each 2^-11, plus FP32 noise: 26 layers x 10 steps x sqrt(576) * 2^-24 = 4e-4 of
            # the tensor's typical size.
            noise = 4e-4 * float(y.float().square().mean().sqrt())
            torch.testing.assert_close(x.float(), y.float(), rtol=2**-10, atol=noise)


def test_sample_is_small_and_says_where_it_comes_from():
    packaged = load_sample()
    assert packaged.path.stat().st_size < 3_000_000
    assert packaged.causal and packaged.scale == 0.125
    assert packaged.metadata["license"] == "apache-2.0"
    assert "/" not in "".join(packaged.metadata.values())
    assert (packaged.path.parent / "README.md").read_text(encoding="utf-8").count("Apache")
