"""A recipe: one value that says how attention is quantized.

>>> from fp8attn import Recipe
>>> recipe = Recipe.from_name("default").replace(k_scale="token")
>>> Recipe.from_json(recipe.to_json()) == recipe
True
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8attn.files import whole_file
from fp8attn.formats import get_format
from fp8attn.scaling import Granularity
from fp8attn.transforms import TRANSFORM_NAMES

__all__ = ["PRESETS", "Recipe"]

_CHOICES: dict[str, tuple[Any, ...]] = {
    "rotate": TRANSFORM_NAMES,
    "balance": ("rms", "none"),
    "smooth_k": ("auto", True, False),
    "smooth_v": (True, False),
    "q_format": ("e4m3", "e5m2", "int8", "fp16", "bf16"),
    "k_format": ("e4m3", "e5m2", "int8", "fp16", "bf16"),
    "v_format": ("e4m3", "e5m2", "fp16", "bf16"),
    "p_format": ("e4m3", "e5m2", "fp16", "bf16"),
    "scale_mode": ("fp32", "pow2"),
}
# What Q may be beside K, and P beside V. A tensor core multiplies operands of one width; FP8 codes of K and V widen to
# 16 bits without loss, the other way is a loss.
_BESIDE = {
    "e4m3": ("e4m3", "e5m2", "fp16", "bf16"),
    "e5m2": ("e4m3", "e5m2", "fp16", "bf16"),
    "int8": ("int8",),
    "fp16": ("fp16",),
    "bf16": ("bf16",),
}


_FRACTION_BITS = 13  # an H200's


@dataclass(frozen=True)
class Recipe:
    """How queries, keys, values and softmax weights are transformed and quantized. Immutable, hashable, JSON both ways.

    Attributes:
        rotate: orthogonal transform of q and k over the head dim, by name (``fp8attn.transforms.TRANSFORM_NAMES``).
        seed: of the random transforms.
        balance: ``"rms"`` multiplies q and divides k by sqrt(rms k_i / rms q_i) per channel and kv head before the
            rotation, ``"none"`` does not.
        smooth_k: take the mean key out (softmax does not see it): ``True``, ``False``, or ``"auto"``, which decides per
            kv head by the expected error.
        smooth_v: take the mean value out and add it back to the output.
        q_scale, k_scale: granularity of the scales: token, block, block:n, head or tensor (a scale per channel cannot
            leave the dot product).
        v_scale: granularity: channel, head, tensor, block, block:n or token.
        q_format, k_format, v_format, p_format: e4m3, e5m2, fp16 or bf16, and int8 for q and k together. Q may be 16
            bits wide beside an FP8 K, and P beside an FP8 V: the mixed mode, in which K and V are expanded.
        scale_mode: ``"fp32"``, or ``"pow2"`` for powers of two.
        accumulation: ``"fp32"`` (two-level: every tile is summed in FP32). For studies, two models of a tensor core
            that keeps 13 fraction bits of FP8 products (of others it keeps all): ``"tensor_core"`` keeps one
            accumulator in it for all keys, ``"tensor_core_two_level"`` sums each tile in it from zero and adds the
            tiles in FP32. ``"tensor_core:14"`` keeps 14 bits, or what ``fp8attn probe`` says of a GPU.

    Raises:
        ValueError: an unknown value or an impossible combination, with what is accepted.
    """

    rotate: str = "random_hadamard"
    seed: int = 0
    balance: str = "rms"
    smooth_k: bool | str = "auto"
    smooth_v: bool = False
    q_scale: str = "token"
    k_scale: str = "block"
    v_scale: str = "channel"
    q_format: str = "e4m3"
    k_format: str = "e4m3"
    v_format: str = "e4m3"
    p_format: str = "e4m3"
    scale_mode: str = "fp32"
    accumulation: str = "fp32"

    def __post_init__(self) -> None:
        for name, accepted in _CHOICES.items():
            value = getattr(self, name)
            if not any(value is choice or (isinstance(value, str) and value == choice) for choice in accepted):
                raise ValueError(f"{name} must be one of {_listed(accepted)}, got {value!r}")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be an integer from 0 to 2**32 - 1, got {self.seed!r}")
        for name in ("q_scale", "k_scale", "v_scale"):
            try:
                granularity = Granularity.parse(getattr(self, name))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            object.__setattr__(self, name, "block" if str(granularity) == "block:128" else str(granularity))
            if name != "v_scale" and granularity.kind == "channel":
                raise ValueError(
                    f"{name}='channel' is impossible: a scale per channel cannot be taken out of the dot product q.k; "
                    "accepted: token, block, block:<tokens>, head, tensor (balance='rms' evens channels out)"
                )
        accumulation, bits = _accumulation(self.accumulation)
        if accumulation != "fp32":
            object.__setattr__(self, "accumulation", accumulation + (f":{bits}" if bits != _FRACTION_BITS else ""))
        for left, right in (("q_format", "k_format"), ("p_format", "v_format")):
            accepted = _BESIDE[getattr(self, right)]
            if getattr(self, left) not in accepted:
                raise ValueError(
                    f"{left}={getattr(self, left)!r} is impossible with {right}={getattr(self, right)!r}; "
                    f"accepted: {_listed(accepted)}"
                )
        if accumulation == "tensor_core" and self.v_scale.startswith(("token", "block")):
            raise ValueError(
                f"accumulation='tensor_core' is impossible with v_scale={self.v_scale!r}: one accumulator for all keys "
                "has no place for a scale per key; accepted: channel, head, tensor"
            )

    @property
    def quantizes(self) -> bool:
        """Whether anything is narrower than 16 bits."""
        return any(get_format(f).dtype.itemsize == 1 for f in (self.q_format, self.k_format, self.v_format))

    @property
    def accumulator(self) -> tuple[str, int]:
        """The way to accumulate, without its fraction bits, and these: of FP32, or of a tensor core.

        >>> Recipe(accumulation="tensor_core:14").accumulator, Recipe().accumulator
        (('tensor_core', 14), ('fp32', 23))
        """
        return _accumulation(self.accumulation)

    def replace(self, **changes: Any) -> Recipe:
        """A copy with some fields changed."""
        return Recipe.from_dict({**dataclasses.asdict(self), **changes})

    @classmethod
    def from_name(cls, name: str) -> Recipe:
        """A preset; ``ValueError`` lists them."""
        if name not in PRESETS:
            raise ValueError(f"unknown recipe {name!r}; accepted: {', '.join(PRESETS)}")
        return PRESETS[name]

    @classmethod
    def resolve(cls, recipe: str | Recipe) -> Recipe:
        """A recipe as functions take it: a ``Recipe`` or a preset's name."""
        if isinstance(recipe, Recipe):
            return recipe
        if isinstance(recipe, str):
            return cls.from_name(recipe)
        kind = type(recipe).__name__
        raise TypeError(f"recipe must be a Recipe or a preset's name ({', '.join(PRESETS)}), got {kind}")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Recipe:
        """Missing fields take the default recipe's value; unknown ones are refused."""
        if not isinstance(values, dict):
            raise ValueError(f"a recipe must be a JSON object, got {type(values).__name__}")
        fields = [field.name for field in dataclasses.fields(cls)]
        unknown = [key for key in values if key not in fields]
        if unknown:
            raise ValueError(f"unknown recipe fields {unknown}; accepted: {', '.join(fields)}")
        return cls(**values)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        try:
            values = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"not a recipe: {error}") from None
        return cls.from_dict(values)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON, whole or not at all."""
        with whole_file(path) as temporary:
            temporary.write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recipe:
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:  # UnicodeDecodeError is one
            raise ValueError(f"{os.fspath(path)}: {error}") from None


def _accumulation(text: Any) -> tuple[str, int]:
    if text == "fp32":
        return text, 23
    match = re.fullmatch(r"(tensor_core|tensor_core_two_level)(?::(\d{1,2}))?", text) if isinstance(text, str) else None
    bits = int(match[2] or _FRACTION_BITS) if match else 0
    if match is None or not 1 <= bits <= 23:
        accepted = _listed(("fp32", "tensor_core", "tensor_core_two_level"))
        raise ValueError(
            f"accumulation must be one of {accepted}, the last two also with fraction bits from 1 to 23 as in "
            f"'tensor_core:14', got {text!r}"
        )
    return match[1], bits


def _listed(values: tuple[Any, ...]) -> str:
    return ", ".join(map(repr, values))


_PLAIN = Recipe(rotate="none", balance="none", smooth_k=False, q_scale="head", k_scale="head", v_scale="head")

#: ``default``: balanced, rotated, fine scales. ``per_tensor``: the plain baseline. ``fa3``: one scale a head and
#: nothing else, as FlashAttention-3's released kernels (which share q's scale over the query heads of a kv head).
#: ``fa3_paper``: block scales and a rotation, as its paper. ``causal_safe``: nothing is fitted to or scaled by later
#: tokens. ``mixed``: FP8 keys and values, queries and weights in 16 bits. ``bf16``: no quantization.
PRESETS: dict[str, Recipe] = {
    "default": Recipe(),
    "per_tensor": dataclasses.replace(_PLAIN, q_scale="tensor", k_scale="tensor", v_scale="tensor"),
    "fa3": _PLAIN,
    "fa3_paper": Recipe(balance="none", smooth_k=False, q_scale="block", k_scale="block", v_scale="block"),
    "causal_safe": Recipe(balance="none", smooth_k=False, q_scale="token", k_scale="token", v_scale="token"),
    "mixed": Recipe(q_format="fp16", p_format="fp16"),
    "bf16": dataclasses.replace(
        _PLAIN,
        q_scale="tensor",
        k_scale="tensor",
        v_scale="tensor",
        q_format="bf16",
        k_format="bf16",
        v_format="bf16",
        p_format="bf16",
    ),
}
