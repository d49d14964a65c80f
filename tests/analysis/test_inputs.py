from __future__ import annotations

import io
import os
import pickle
import sys
import time
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from fp8attn.analysis.inputs import load_qkv, load_sample


def make(q=(1, 4, 24, 8), k=(1, 2, 24, 8), v=None, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in (q, k, v or k)]


def named(tensors, prefix="", names="qkv"):
    return {prefix + name: t for name, t in zip(names, tensors, strict=True)}


def write_safetensors(path, tensors, metadata=None):
    save_file({name: t.contiguous() for name, t in tensors.items()}, path, metadata)


def write_npz(path, tensors, metadata=None):
    with open(path, "wb") as file:  # a file object: numpy adds no suffix
        np.savez(file, **{name: t.numpy() for name, t in tensors.items()}, **(metadata or {}))


def write_pt(path, tensors, metadata=None):
    torch.save({**tensors, **(metadata or {})}, path)


def write_old_pt(path, tensors, metadata=None):
    torch.save({**tensors, **(metadata or {})}, path, _use_new_zipfile_serialization=False)


WRITERS = [write_safetensors, write_npz, write_pt, write_old_pt]


def equal(layer, q, k, v):
    pairs = zip((layer.q, layer.k, layer.v), (q, k, v), strict=True)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("suffix", [".safetensors", ".bin", ""])
def test_kind_is_told_by_content_not_by_name(tmp_path, write, suffix):
    q, k, v = make()
    write(tmp_path / f"file{suffix}", named((q, k, v)), {"causal": "true", "scale": "0.5"})
    read = load_qkv(tmp_path / f"file{suffix}")
    assert len(read.layers) == 1 and equal(read.layers[0], q, k, v)
    assert read.metadata == {"causal": "true", "scale": "0.5"} and read.causal and read.scale == 0.5


def test_numbers_become_metadata(tmp_path):
    write_pt(tmp_path / "f", named(make()), {"causal": True, "scale": 0.25, "metadata": {"layout": "bhsd"}})
    read = load_qkv(tmp_path / "f")
    assert read.causal and read.scale == 0.25 and read.metadata["layout"] == "bhsd"
    write_npz(tmp_path / "f", named(make()), {"causal": True, "scale": 0.25})
    assert load_qkv(tmp_path / "f").causal and load_qkv(tmp_path / "f").scale == 0.25
    write_npz(tmp_path / "f", named(make()), {"scale": "wide"})
    assert not load_qkv(tmp_path / "f").causal
    for scale in ("wide", "nan", "-inf", "1e400"):
        write_npz(tmp_path / "f", named(make()), {"scale": scale})
        with pytest.raises(ValueError, match=f"f: scale in the metadata is '{scale}', which is not a finite number"):
            _ = load_qkv(tmp_path / "f").scale


@pytest.mark.parametrize(
    ("template", "names", "name", "index"),
    [
        ("{}", "qkv", "qkv", 0),
        ("{}", ("query", "key", "value"), "qkv", 0),
        ("{}", "QKV", "qkv", 0),
        ("layers.3.{}", "qkv", "layers.3", 3),
        ("model2.layers.3.self_attn.{}", ("Query", "Key", "Value"), "model2.layers.3.self_attn", 3),
        ("layer3_{}", "qkv", "layer3", 3),
        ("blk/7/{}", "qkv", "blk/7", 7),
        ("12-{}", "qkv", "12", 12),
        ("first.{}", "qkv", "first", 0),
    ],
)
def test_names(tmp_path, template, names, name, index):
    tensors = make()
    others = {"mask": torch.zeros(3), "freq": torch.zeros(2), "layers.3.out": torch.zeros(1)}
    write_safetensors(tmp_path / "f", {template.format(n): t for n, t in zip(names, tensors, strict=True)} | others)
    (layer,) = load_qkv(tmp_path / "f").layers
    assert (layer.name, layer.index) == (name, index) and equal(layer, *tensors)


def test_nested_pt(tmp_path):
    a, b, c = make(seed=1), make(seed=2), make(seed=3)
    torch.save({"layers": [named(a), named(b)]}, tmp_path / "list")
    assert [layer.name for layer in load_qkv(tmp_path / "list").layers] == ["layers.0", "layers.1"]
    torch.save({10: named(a), 9: named(b, names=("query", "key", "value")), 2: named(c)}, tmp_path / "dict")
    read = load_qkv(tmp_path / "dict")
    assert [layer.index for layer in read.layers] == [2, 9, 10]
    assert all(equal(layer, *t) for layer, t in zip(read.layers, (c, b, a), strict=True))


def test_layers_are_ordered_by_number_and_selected(tmp_path):
    data = {i: make(seed=i) for i in (10, 2, 0)}
    write_safetensors(tmp_path / "f", {k: t for i, ts in data.items() for k, t in named(ts, f"layers.{i}.").items()})
    assert [layer.index for layer in load_qkv(tmp_path / "f").layers] == [0, 2, 10]
    some = load_qkv(tmp_path / "f", layers=[10, 0])
    assert [layer.index for layer in some.layers] == [0, 10] and equal(some.layers[1], *data[10])
    with pytest.raises(ValueError, match=r"f: no layers \[1, 5\]; it holds \[0, 2, 10\]"):
        load_qkv(tmp_path / "f", layers=[0, 5, 1])


def test_two_parts_of_one_layer_both_stay(tmp_path):
    tensors = named(make(seed=1), "layers.0.self_attn.") | named(make(seed=2), "layers.0.cross_attn.")
    write_safetensors(tmp_path / "f", tensors)
    assert {layer.name for layer in load_qkv(tmp_path / "f", layers=[0]).layers} == {
        "layers.0.self_attn",
        "layers.0.cross_attn",
    }


# --- layouts


@settings(deadline=None, max_examples=60)
@given(
    kv_heads=st.integers(1, 5),
    ratio=st.integers(1, 5),
    seqlen=st.integers(1, 40),
    ndim=st.sampled_from([3, 4]),
    swap=st.booleans(),
    seed=st.integers(0, 99),
)
def test_self_attention_layouts(tmp_path_factory, kv_heads, ratio, seqlen, ndim, swap, seed):
    """Equal lengths: right wherever heads are fewer than tokens, and never wrong: what cannot be told is refused."""
    path = tmp_path_factory.mktemp("layouts") / "f"
    batch = 2 if ndim == 4 else 1
    q, k, v = make(
        (batch, kv_heads * ratio, seqlen, 8), (batch, kv_heads, seqlen, 8), (batch, kv_heads, seqlen, 6), seed
    )
    stored = [t.transpose(1, 2) if swap else t for t in (q, k, v)]
    write_safetensors(path, named([t[0] for t in stored] if ndim == 3 else stored))
    assert equal(load_qkv(path, layout="bshd" if swap else "bhsd").layers[0], q, k, v)
    try:
        (layer,) = load_qkv(path).layers
    except ValueError as error:
        assert "say which: layout 'bhsd' or 'bshd'" in str(error)
        assert kv_heads >= seqlen
    else:
        assume(kv_heads < seqlen)  # with as many heads as tokens the shapes speak for the other reading
        assert equal(layer, q, k, v)


@pytest.mark.parametrize(
    ("q", "k", "layout"),
    [
        ((1, 32, 512, 64), (1, 8, 512, 64), "bhsd"),  # GQA: the axis that differs
        ((1, 512, 32, 64), (1, 512, 8, 64), "bshd"),
        ((1, 32, 16, 64), (1, 8, 16, 64), "bhsd"),  # ... even where q has more heads than tokens
        ((1, 8, 512, 64), (1, 8, 512, 64), "bhsd"),  # MHA: the smaller axis
        ((1, 512, 8, 64), (1, 512, 8, 64), "bshd"),
        ((1, 8, 1, 64), (1, 8, 512, 64), "bhsd"),  # decoding
        ((1, 1, 32, 64), (1, 512, 8, 64), "bshd"),
        ((1, 8, 300, 64), (1, 8, 77, 64), "bhsd"),  # cross-attention, whose lengths divide only one way
        ((1, 300, 8, 64), (1, 77, 8, 64), "bshd"),
        ((1, 32, 512, 64), (1, 8, 256, 64), "bhsd"),
        ((1, 64, 64, 64), (1, 64, 64, 64), None),
        ((1, 8, 16, 64), (1, 8, 8, 64), None),
        ((1, 8, 1024, 64), (1, 8, 256, 64), None),  # cross-attention, or 1024 heads over 256 in 8 tokens
        ((1, 32, 4, 64), (1, 8, 4, 64), None),
        ((1, 4, 24, 64), (1, 3, 24, 64), None),  # a wrong ratio, or 24 heads over 3 keys
    ],
)
def test_layout_from_shapes(tmp_path, q, k, layout):
    stored = make(q, k)
    write_safetensors(tmp_path / "f", named(stored))
    if layout is None:
        with pytest.raises(ValueError, match=r"may be \(B, H, S, D\) or \(B, S, H, D\); say which: layout"):
            load_qkv(tmp_path / "f")
    else:
        want = stored if layout == "bhsd" else [t.transpose(1, 2) for t in stored]
        assert equal(load_qkv(tmp_path / "f").layers[0], *want)


def test_metadata_settles_the_layout_and_the_argument_overrules_it(tmp_path):
    stored = make((1, 16, 16, 8), (1, 16, 16, 8))
    write_safetensors(tmp_path / "f", named(stored), {"layout": "BSHD"})
    assert equal(load_qkv(tmp_path / "f").layers[0], *(t.transpose(1, 2) for t in stored))
    assert equal(load_qkv(tmp_path / "f", layout="bhsd").layers[0], *stored)
    with pytest.raises(ValueError, match="layout is 'sbhd'; accepted are 'bhsd', 'hsd', 'bshd', 'shd'"):
        load_qkv(tmp_path / "f", layout="sbhd")
    write_safetensors(tmp_path / "f", named(stored), {"layout": "sbhd"})
    with pytest.raises(ValueError, match="layout in the metadata is 'sbhd'"):
        load_qkv(tmp_path / "f")


def test_one_head(tmp_path):
    stored = make((5, 8), (9, 8), (9, 4))
    write_safetensors(tmp_path / "f", named(stored))
    assert equal(load_qkv(tmp_path / "f").layers[0], *(t[None, None] for t in stored))


# --- values


def test_values_are_kept(tmp_path):
    q, k, v = make(dtype=torch.bfloat16)
    q[0, 0, 0, :3] = torch.tensor([torch.nan, torch.inf, -0.0])
    write_safetensors(tmp_path / "f", named((q, k, v)))
    (layer,) = load_qkv(tmp_path / "f").layers
    assert all(
        torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in ((layer.q, q), (layer.k, k), (layer.v, v))
    )


def test_dtypes_are_brought_together_without_loss(tmp_path):
    q, k, v = make()
    torch.save({"q": q.bfloat16(), "k": k.half(), "v": v.half()}, tmp_path / "f")
    (layer,) = load_qkv(tmp_path / "f").layers
    assert equal(layer, q.bfloat16().float(), k.half().float(), v.half().float())
    write_npz(tmp_path / "f", named([t.double() for t in (q, k, v)]))
    assert equal(load_qkv(tmp_path / "f").layers[0], q, k, v)
    np.savez(tmp_path / "big.npz", **{n: t.numpy().astype(">f4") for n, t in named((q, k, v)).items()})
    assert equal(load_qkv(tmp_path / "big.npz").layers[0], q, k, v)


def test_a_pt_of_parameters_and_views(tmp_path):
    q, k, v = make()
    torch.save(
        {
            "q": torch.nn.Parameter(q),
            "k": k.transpose(2, 3).contiguous().transpose(2, 3),
            "v": v[:, :1].expand(1, 2, 24, 8),
        },
        tmp_path / "f",
    )
    (layer,) = load_qkv(tmp_path / "f").layers
    assert equal(layer, q, k, v[:, :1].expand(1, 2, 24, 8)) and not layer.q.requires_grad


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64])
@pytest.mark.parametrize("write", [write_safetensors, write_pt])
def test_codes_are_refused(tmp_path, write, dtype):
    write(tmp_path / "f", named(make(dtype=dtype)))
    with pytest.raises(ValueError, match=rf"f, qkv: dtype {dtype}; .*dequantize them first"):
        load_qkv(tmp_path / "f")


def test_numpy_types_that_torch_lacks_are_refused(tmp_path):
    for array in (np.zeros((3, 4), np.uint8), np.zeros((3, 4), "V2"), np.zeros((3, 4), complex)):
        np.savez(tmp_path / "f.npz", q=array, k=array, v=array)
        with pytest.raises(ValueError, match=r"f\.npz, qkv: dtype"):
            load_qkv(tmp_path / "f.npz")


@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        ((1, 5, 25, 8), (1, 3, 24, 8), (1, 3, 24, 8), "do not fit together: k and v share"),
        ((1, 4, 24, 8), (1, 2, 24, 16), (1, 2, 24, 16), "do not fit together"),
        ((1, 4, 24, 8), (1, 2, 24, 8), (1, 2, 23, 8), r"q \(1, 4, 24, 8\), k \(1, 2, 24, 8\), v \(1, 2, 23, 8\)"),
        ((2, 4, 24, 8), (1, 2, 24, 8), (1, 2, 24, 8), "do not fit together"),
        ((4, 24, 8), (1, 2, 24, 8), (1, 2, 24, 8), "different numbers of dimensions"),
        ((8,), (8,), (8,), r"shape \(8,\); q, k and v must have 2 to 4 dimensions"),
        ((1, 1, 4, 24, 8), (1, 1, 4, 24, 8), None, "must have 2 to 4 dimensions"),
        ((1, 4, 0, 8), (1, 2, 24, 8), None, "none of them empty"),
    ],
)
def test_shapes_that_do_not_fit(tmp_path, q, k, v, message):
    write_safetensors(tmp_path / "odd", named(make(q, k, v), "layers.4."))
    with pytest.raises(ValueError, match=rf"odd, layers\.4: .*{message}"):
        load_qkv(tmp_path / "odd")


def test_a_layout_that_the_shapes_contradict(tmp_path):
    write_safetensors(tmp_path / "f", named(make((1, 6, 25, 8), (1, 2, 23, 8))))
    with pytest.raises(ValueError, match="do not fit layout bshd"):
        load_qkv(tmp_path / "f", layout="bshd")


# --- files that are not what they should be


@pytest.mark.parametrize("write", WRITERS)
def test_missing_and_doubled_roles(tmp_path, write):
    q, k, v = make()
    write(tmp_path / "f", {"layers.0.q": q, "layers.0.k": k})
    with pytest.raises(ValueError, match=r"f: layers\.0 has q, k but no v"):
        load_qkv(tmp_path / "f")
    write(tmp_path / "f", {"q": q, "k": k, "v": v, "query": q.clone()})
    with pytest.raises(ValueError, match="is a second q of the same layer"):
        load_qkv(tmp_path / "f")
    write(tmp_path / "f", {"a": q, "b": k})
    with pytest.raises(ValueError, match=r"f: no tensors named q, k and v .*; found a, b"):
        load_qkv(tmp_path / "f")


@pytest.mark.parametrize("write", WRITERS)
def test_cut_off_files(tmp_path, write):
    write(tmp_path / "whole", named(make()))
    whole = (tmp_path / "whole").read_bytes()
    for end in range(0, len(whole), len(whole) // 40):
        (tmp_path / "cut").write_bytes(whole[:end])
        with pytest.raises(ValueError, match="cut"):
            load_qkv(tmp_path / "cut")


class _Bomb:
    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def test_pickled_code_is_not_run(tmp_path):
    marker = tmp_path / "was-run"
    q, k, v = make()
    pickles = {
        "new": lambda path: torch.save({"q": q, "k": k, "v": v, "extra": _Bomb(marker)}, path),
        "old": lambda path: write_old_pt(path, {"q": q, "k": k, "v": v}, {"extra": _Bomb(marker)}),
        "bare": lambda path: path.write_bytes(pickle.dumps(_Bomb(marker), protocol=2)),
        "npz": lambda path: np.savez(path.open("wb"), q=np.array([_Bomb(marker)]), k=k.numpy(), v=v.numpy()),
    }
    for name, write in pickles.items():
        write(tmp_path / name)
        with pytest.raises(ValueError, match=name):
            load_qkv(tmp_path / name)
        assert not marker.exists()
    # An object array that is not needed does no harm, and is not loaded.
    np.savez(
        (tmp_path / "aside").open("wb"),
        extra=np.array(_Bomb(marker)),
        **{n: t.numpy() for n, t in named((q, k, v)).items()},
    )
    assert equal(load_qkv(tmp_path / "aside").layers[0], q, k, v) and not marker.exists()


def test_refusal_of_code_gives_no_advice_to_run_it(tmp_path):
    torch.save({**named(make()), "extra": _Bomb(tmp_path / "was-run")}, tmp_path / "f")
    with pytest.raises(ValueError, match="code in a file is never executed") as caught:
        load_qkv(tmp_path / "f")
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'f'}: a pickle") and f"{os.mkdir.__module__}.mkdir" in message
    assert "accepted are safetensors" in message and "weights_only" not in message and "torch.load" not in message
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


def _cycle():
    cyclic = {"name": "x"}
    cyclic["self"] = cyclic
    return cyclic


def _deep(depth):
    deep = []
    for _ in range(depth):
        deep = [deep]
    return deep


def _doubling(depth, content=0):
    for _ in range(depth):
        content = [content, content]
    return content


@pytest.mark.parametrize(
    "content", [_cycle(), _deep(3000), _doubling(26), _doubling(40, []), {"a" * 4_000_000: _doubling(3)}]
)
def test_hostile_nesting(tmp_path, content):
    # The C pickler does not go 3000 deep; Python's does, given the stack.
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(40_000)
    try:
        torch.save({**named(make()), "extra": content}, tmp_path / "f")
    finally:
        sys.setrecursionlimit(limit)
    start = time.monotonic()
    with pytest.raises(ValueError, match="f: dicts or lists nested more than 64 deep, in themselves, or over and over"):
        load_qkv(tmp_path / "f")
    assert time.monotonic() - start < 30  # unlimited, 2**26 leaves take minutes; limited, a second


def test_recursion_and_memory_errors_name_the_file(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RecursionError("too deep")

    torch.save(named(make()), tmp_path / "f")
    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(ValueError, match=r"f: a damaged \.pt file, .*too deep"):
        load_qkv(tmp_path / "f")
    header = "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000000,), }"
    with zipfile.ZipFile(tmp_path / "huge", "w") as archive:
        for name in "qkv":
            head = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()
            archive.writestr(f"{name}.npy", head)
    with pytest.raises(ValueError, match="huge, qkv: cannot read q"):
        load_qkv(tmp_path / "huge")


def test_layers_may_share_their_tensors_and_odd_keys_are_ignored(tmp_path):
    shared = named(make())
    odd = {(0, "q"): torch.zeros(2), None: torch.zeros(2), "empty": [(), ()]}
    torch.save({"layers": [shared, shared], **odd}, tmp_path / "f")
    read = load_qkv(tmp_path / "f")
    assert [layer.index for layer in read.layers] == [0, 1] and equal(read.layers[1], *shared.values())


def test_other_files(tmp_path):
    other = io.BytesIO()
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("readme.txt", "hello")
    array = io.BytesIO()
    np.save(array, np.zeros((4, 4)))
    for content in (b"", b"hello", other.getvalue(), array.getvalue(), b"\x89PNG\r\n\x1a\n" + bytes(40)):
        (tmp_path / "other").write_bytes(content)
        with pytest.raises(
            ValueError, match=r"other: not a kind of file .*accepted are safetensors, \.npz .* and \.pt"
        ):
            load_qkv(tmp_path / "other")
    with zipfile.ZipFile(tmp_path / "script", "w") as archive:  # TorchScript: a model with its code
        for name in ("data.pkl", "constants.pkl", "code/model.py"):
            archive.writestr(f"script/{name}", b"")
    with pytest.raises(ValueError, match="script: not a kind of file"):
        load_qkv(tmp_path / "script")
    with pytest.raises(FileNotFoundError, match="absent"):
        load_qkv(tmp_path / "absent")


def test_sample_by_layer():
    assert [layer.index for layer in load_sample(layers=[15]).layers] == [15]
