"""A llama model of a few thousand weights, written to GGUF files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

# GPT-2's alphabet, byte by byte, from its definition: printable Latin-1 stays, the rest is numbered from U+0100.
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
ALPHABET = [chr(b) if b in _PRINTABLE else chr(256 + sum(c not in _PRINTABLE for c in range(b))) for b in range(256)]
MERGES = ["t h", "th e", "Ġ the", "1 2"]
TOKENS = [*ALPHABET, "th", "the", "Ġthe", "12", "<|end|>"]

TINY = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": len(TOKENS),
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,  # large enough to be seen
    "rope_theta": 1000.0,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> tuple[Any, Any]:
    """SmolLM2's (LlamaModel, Tokenizer), read once."""
    pytest.importorskip("tokenizers")
    from fp8attn.analysis.llama import LlamaModel, Tokenizer

    return LlamaModel.from_gguf(smollm2_path), Tokenizer.from_gguf(smollm2_path)


@pytest.fixture
def write_tiny_gguf() -> Callable[..., Any]:
    """``write(path, keys={...}, tensors={...}, **config) -> transformers model``: the same random weights in both.

    ``keys`` and ``tensors`` replace header keys and tensors; None leaves one out.
    """
    return _write_tiny_gguf


def _write_tiny_gguf(
    path: Path, *, keys: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None, **config: Any
) -> Any:
    gguf = pytest.importorskip("gguf")
    transformers = pytest.importorskip("transformers")
    cfg = TINY | config
    theta = cfg.pop("rope_theta")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        # Weights so large that attention is far from uniform and every part of a layer matters.
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                **cfg,
                rope_parameters={"rope_type": "default", "rope_theta": theta},
                initializer_range=0.25,
                attn_implementation="eager",
            )
        ).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "norm" in name:
                    weight.uniform_(0.5, 1.5)

    header: dict[str, Any] = {
        "general.architecture": "llama",
        "general.name": "tiny",
        "general.license": "apache-2.0",
        "llama.block_count": cfg["num_hidden_layers"],
        "llama.context_length": cfg["max_position_embeddings"],
        "llama.embedding_length": cfg["hidden_size"],
        "llama.attention.head_count": cfg["num_attention_heads"],
        "llama.attention.head_count_kv": cfg["num_key_value_heads"],
        "llama.attention.key_length": cfg["head_dim"],
        "llama.attention.layer_norm_rms_epsilon": cfg["rms_norm_eps"],
        "llama.rope.freq_base": theta,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [1] * (len(TOKENS) - 1) + [3],
        "tokenizer.ggml.merges": MERGES,
    } | (keys or {})
    writer = gguf.GGUFWriter(path, header.pop("general.architecture"))
    for key, value in header.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, value in (_gguf_tensors(model, cfg) | (tensors or {})).items():
        if value is not None:
            writer.add_tensor(name, value.detach().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _gguf_tensors(model: Any, cfg: dict[str, Any]) -> dict[str, torch.Tensor]:
    names = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    names |= {f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"} | {"self_attn.o_proj": "attn_output"}
    names |= {f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")}
    state = model.state_dict()
    out = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"],
    }
    if not cfg["tie_word_embeddings"]:
        out["output.weight"] = state["lm_head.weight"]
    for layer in range(cfg["num_hidden_layers"]):
        for theirs, ours in names.items():
            weight = state[f"model.layers.{layer}.{theirs}.weight"]
            if ours in ("attn_q", "attn_k"):
                # transformers rotates dimension i with i + D/2; llama.cpp's files have the rows in order 0, D/2, 1, ...
                weight = weight.unflatten(0, (-1, 2, cfg["head_dim"] // 2)).transpose(1, 2).reshape(weight.shape)
            out[f"blk.{layer}.{ours}.weight"] = weight
    return out
