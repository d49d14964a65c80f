"""Orthogonal transforms of the head dim.

Rotating queries and keys with the same orthogonal R leaves every logit as it was, (q R)(k R)^T = q k^T, and spreads a
channel that holds outliers over all channels. The rotation acts on whole heads, so it must come after rotary position
embedding, which it does not commute with.

>>> t = RandomHadamard(64, seed=1)
>>> q, k = torch.randn(2, 10, 64)
>>> torch.allclose(t.apply(q) @ t.apply(k).T, q @ k.T, atol=1e-4)
True
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fp8attn.transforms.hadamard import hadamard, has_hadamard

__all__ = [
    "DCT",
    "TRANSFORM_NAMES",
    "BlockDiagonal",
    "Compose",
    "HaarRandom",
    "Hadamard",
    "Identity",
    "Permutation",
    "RandomHadamard",
    "SignFlip",
    "Transform",
    "fold_value_rotation",
    "incoherence",
    "make_transform",
]

TRANSFORM_NAMES = (
    "none",
    "hadamard",
    "random_hadamard",
    "haar",
    "dct",
    "block_hadamard",
    "sign_flip",
    "permutation",
)


class Transform:
    """An orthogonal matrix R of shape (dim, dim), as an immutable value: equal parameters make equal transforms.

    Random transforms draw from a generator on the CPU, so a seed gives the same matrix on every device.
    Subclasses implement ``_matrix64``, the matrix in float64 on the CPU.
    """

    dim: int

    def matrix(self, *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None) -> torch.Tensor:
        """R, shape (dim, dim), rounded once from float64 to ``dtype``. The tensor is the caller's own."""
        if not dtype.is_floating_point:
            raise TypeError(f"dtype must be a real floating-point dtype, got {dtype}")
        # An index-less device ("cuda") means another device once the current one changes: resolve it before caching.
        return _matrix(self, dtype, torch.empty(0, device=device).device).clone()

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """x R over the last axis: (..., dim) -> (..., dim), for any leading shape, stride and floating dtype.

        The result is a new tensor in float32 (float64 for float64 input), not in x's dtype: rounding rotated values
        to bfloat16 moves each logit by about 2^-9 |q||k| / sqrt(dim), which is the invariance of QK^T gone.
        Autocast does not apply here; ``torch.set_float32_matmul_precision`` does.

        Raises:
            ValueError: the last axis of ``x`` is not ``dim`` long.
            TypeError: ``x`` is not a floating-point tensor.
        """
        return self._multiply(self._checked(x), transpose=False)

    def inverse(self, y: torch.Tensor) -> torch.Tensor:
        """y R^T over the last axis, which undoes :meth:`apply`; shapes, dtypes and errors as there."""
        return self._multiply(self._checked(y), transpose=True)

    def _multiply(self, x: torch.Tensor, *, transpose: bool) -> torch.Tensor:
        matrix = _matrix(self, x.dtype, x.device)
        with torch.autocast(device_type=x.device.type, enabled=False):
            return x @ (matrix.T if transpose else matrix)

    def _checked(self, x: torch.Tensor) -> torch.Tensor:
        if not x.dtype.is_floating_point:
            raise TypeError(f"x must have a real floating-point dtype, got {x.dtype}")
        if x.ndim == 0 or x.shape[-1] != self.dim:
            raise ValueError(f"x must have a last axis of {self.dim}, the dim of {self!r}, got shape {tuple(x.shape)}")
        return x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)

    def _matrix64(self) -> torch.Tensor:
        raise NotImplementedError


# Bounded: 64 matrices of head dim 576 in float64 are 170 MB, of head dim 128 in float32 4 MB.
@lru_cache(maxsize=64)
def _matrix(transform: Transform, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # The cache outlives its caller's context: a tensor made under inference_mode could never take part in autograd,
    # and one made under FakeTensorMode would be a fake ever after.
    with torch.inference_mode(False), torch.no_grad(), _disable_current_modes():
        return transform._matrix64().to(dtype=dtype, device=device)


@dataclass(frozen=True)
class Identity(Transform):
    """R = I; :meth:`apply` still returns a new tensor in float32 or float64."""

    dim: int

    def __post_init__(self) -> None:
        _set_dim(self, self.dim)

    def _multiply(self, x: torch.Tensor, *, transpose: bool) -> torch.Tensor:
        return x.clone()

    def _matrix64(self) -> torch.Tensor:
        return torch.eye(self.dim, dtype=torch.float64, device="cpu")


@dataclass(frozen=True)
class Hadamard(Transform):
    """R = H / sqrt(dim) without random signs.

    A vector that is constant, or any other row of H, comes out as a single spike: where data have structure use
    :class:`RandomHadamard`.
    """

    dim: int

    def __post_init__(self) -> None:
        _set_dim(self, self.dim)
        _check_hadamard_order(self.dim)

    def _matrix64(self) -> torch.Tensor:
        return hadamard(self.dim) / math.sqrt(self.dim)


@dataclass(frozen=True)
class RandomHadamard(Transform):
    """R = diag(s) H / sqrt(dim) with random signs s, the incoherence processing of QuIP# (arXiv 2402.04396).

    It is the Hadamard matrix that spreads; the signs only keep structured input, such as a constant vector, from lining
    up with one of its rows. Alone they spread nothing (:class:`SignFlip`).
    """

    dim: int
    seed: int = 0

    def __post_init__(self) -> None:
        _set_dim(self, self.dim)
        _check_hadamard_order(self.dim)
        _set_seed(self, self.seed)

    def _matrix64(self) -> torch.Tensor:
        return _random_signs(self.dim, self.seed)[:, None] * hadamard(self.dim) / math.sqrt(self.dim)


@dataclass(frozen=True)
class HaarRandom(Transform):
    """R uniform over the orthogonal group (Haar measure), for any dim.

    QR of a Gaussian matrix with R's diagonal made positive; without that the distribution is not uniform
    (F. Mezzadri, arXiv math-ph/0609050).
    """

    dim: int
    seed: int = 0

    def __post_init__(self) -> None:
        _set_dim(self, self.dim)
        _set_seed(self, self.seed)

    def _matrix64(self) -> torch.Tensor:
        gaussian = torch.randn(self.dim, self.dim, dtype=torch.float64, device="cpu", generator=_generator(self.seed))
        q, r = torch.linalg.qr(gaussian)
        return q * r.diagonal().sign()


@dataclass(frozen=True)
class DCT(Transform):
    """The orthonormal DCT-II, for any dim: ``apply(x)`` is ``scipy.fft.dct(x, norm="ortho")``.

    Not random: a constant vector comes out as a single spike.
    """

    dim: int

    def __post_init__(self) -> None:
        _set_dim(self, self.dim)

    def _matrix64(self) -> torch.Tensor:
        n = torch.arange(self.dim, device="cpu")
        # The angle is pi (2 n + 1) k / (2 dim); reduced as an integer it keeps all its bits.
        turns = (2 * n[:, None] + 1) * n[None, :] % (4 * self.dim)
        matrix = torch.cos(turns.double() * (math.pi / (2 * self.dim))) * math.sqrt(2 / self.dim)
        matrix[:, 0] = 1 / math.sqrt(self.dim)
        return matrix


@dataclass(frozen=True)
class SignFlip(Transform):
    """R = diag(s) with random signs: the negative control, which changes no magnitude and so spreads nothing."""

    dim: int
    seed: int = 0

    def __post_init__(self) -> None:
        _set_dim(self, self.dim)
        _set_seed(self, self.seed)

    def _multiply(self, x: torch.Tensor, *, transpose: bool) -> torch.Tensor:
        return x * _matrix(self, x.dtype, x.device).diagonal()

    def _matrix64(self) -> torch.Tensor:
        return torch.diag(_random_signs(self.dim, self.seed))


@dataclass(frozen=True)
class Permutation(Transform):
    """Reorders channels: ``apply(x)`` is ``x[..., indices]``; dim is ``len(indices)``."""

    indices: tuple[int, ...]
    dim: int = field(init=False, repr=False, compare=False)

    def __init__(self, indices: Sequence[int] | torch.Tensor) -> None:
        values = tuple(int(i) for i in indices)
        if not values or sorted(values) != list(range(len(values))):
            raise ValueError(
                f"indices must hold each of 0 .. n-1 exactly once, got {_shortened(values)} ({len(values)} values)"
            )
        object.__setattr__(self, "indices", values)
        object.__setattr__(self, "dim", len(values))

    def _multiply(self, x: torch.Tensor, *, transpose: bool) -> torch.Tensor:
        index = torch.tensor(self.indices, device=x.device)
        return x[..., index.argsort() if transpose else index]

    def _matrix64(self) -> torch.Tensor:
        return torch.eye(self.dim, dtype=torch.float64, device="cpu")[:, list(self.indices)]


@dataclass(frozen=True)
class BlockDiagonal(Transform):
    """Consecutive groups of channels, each with its own transform; dim is the sum of the blocks' dims."""

    blocks: tuple[Transform, ...]
    dim: int = field(init=False, repr=False, compare=False)

    def __init__(self, blocks: Sequence[Transform]) -> None:
        object.__setattr__(self, "blocks", _transforms(blocks, "blocks"))
        object.__setattr__(self, "dim", sum(block.dim for block in self.blocks))

    def _matrix64(self) -> torch.Tensor:
        return torch.block_diag(*(block._matrix64() for block in self.blocks))


@dataclass(frozen=True)
class Compose(Transform):
    """One transform after another, the first in the sequence first: ``t[1].apply(t[0].apply(x))``, in one product."""

    transforms: tuple[Transform, ...]
    dim: int = field(init=False, repr=False, compare=False)

    def __init__(self, transforms: Sequence[Transform]) -> None:
        object.__setattr__(self, "transforms", _transforms(transforms, "transforms"))
        dims = [t.dim for t in self.transforms]
        if len(set(dims)) > 1:
            raise ValueError(f"transforms must all have the same dim, got dims {dims}")
        object.__setattr__(self, "dim", dims[0])

    def _matrix64(self) -> torch.Tensor:
        product = self.transforms[0]._matrix64()
        for transform in self.transforms[1:]:
            product = product @ transform._matrix64()
        return product


def make_transform(name: str, dim: int, *, seed: int = 0) -> Transform:
    """The transform of ``dim`` channels that goes by ``name``, one of :data:`TRANSFORM_NAMES`.

    ``"none"`` is the identity. ``"block_hadamard"`` rotates blocks of the largest size among 64, 32, 16, 8, 4, 2, 1
    that divides ``dim``, each with signs of its own. ``seed`` is used by the random ones and ignored by the rest.

    Raises:
        ValueError: an unknown name, or a dim that has no Hadamard matrix (``"haar"`` and ``"dct"`` take any).

    >>> make_transform("random_hadamard", 128, seed=3)
    RandomHadamard(dim=128, seed=3)
    """
    if name == "none":
        return Identity(dim)
    if name == "hadamard":
        return Hadamard(dim)
    if name == "random_hadamard":
        return RandomHadamard(dim, seed=seed)
    if name == "haar":
        return HaarRandom(dim, seed=seed)
    if name == "dct":
        return DCT(dim)
    if name == "sign_flip":
        return SignFlip(dim, seed=seed)
    if name == "permutation":
        return Permutation(torch.randperm(_positive(dim, "dim"), device="cpu", generator=_generator(_seed(seed))))
    if name == "block_hadamard":
        size = next(s for s in (64, 32, 16, 8, 4, 2, 1) if _positive(dim, "dim") % s == 0)
        # An odd step mod 2^32 repeats no seed.
        seeds = [(_seed(seed) + block * 0x9E3779B9) % _SEEDS for block in range(dim // size)]
        return BlockDiagonal([RandomHadamard(size, seed=s) for s in seeds])
    raise ValueError(f"name must be one of {', '.join(map(repr, TRANSFORM_NAMES))}, got {name!r}")


def incoherence(x: torch.Tensor) -> torch.Tensor:
    """mu = sqrt(dim) max_i |x_i| / |x| over the last axis: (..., dim) -> (...), float32 (float64 for float64).

    From 1, all magnitudes equal, to sqrt(dim), a single spike (QuIP#, arXiv 2402.04396, section 3). A zero vector
    has nothing to spread and gives 1.

    >>> incoherence(torch.tensor([[1.0, -1.0, 1.0, 1.0], [0.0, 3.0, 0.0, 0.0]])).tolist()
    [1.0, 2.0]
    """
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"x must have a last axis of at least 1, got shape {tuple(x.shape)}")
    magnitude = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32).abs()
    amax = magnitude.amax(-1, keepdim=True)
    # Relative to the largest entry the squares neither overflow nor vanish.
    relative = torch.where(amax == 0, 1, magnitude / amax)
    return math.sqrt(x.shape[-1]) / torch.linalg.vector_norm(relative, dim=-1)


def fold_value_rotation(
    w_v: torch.Tensor, w_o: torch.Tensor, transform: Transform
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fold a rotation of every value head into the projections before and after attention, at no cost when running.

    Attention mixes values with weights, so with v' = v R its output is o' = o R for each head, and an output projection
    that starts with R^T gives the same layer.

    Args:
        w_v: value projection, torch's Linear layout (num_kv_heads * head_dim, hidden).
        w_o: output projection, (hidden, num_q_heads * head_dim).
        transform: of dim head_dim, the size of one value head.

    Returns:
        ``(w_v', w_o')``, new tensors in the dtypes of the inputs, computed in float64. A bias of the value projection
        is rotated the same way: ``transform.apply(bias.view(-1, head_dim)).flatten()``.

    Raises:
        ValueError: the shapes are not whole heads, or the query heads are no multiple of the kv heads.
    """
    dim = transform.dim
    for name, weight, axis in (("w_v", w_v, 0), ("w_o", w_o, 1)):
        if weight.ndim != 2 or weight.shape[axis] == 0 or weight.shape[axis] % dim:
            raise ValueError(
                f"{name} must be a matrix with axis {axis} a multiple of the transform's dim {dim}, "
                f"got shape {tuple(weight.shape)}"
            )
    num_kv_heads, num_q_heads = w_v.shape[0] // dim, w_o.shape[1] // dim
    if num_q_heads % num_kv_heads:
        raise ValueError(
            f"w_o has {num_q_heads} heads of {dim}, which must be a multiple of the {num_kv_heads} heads of w_v"
        )
    # Linear computes x W^T: rotating v's channels means multiplying W_v's rows, those of W_o's columns, head by head.
    folded_v = transform.apply(w_v.double().T.unflatten(1, (num_kv_heads, dim))).flatten(1).T
    folded_o = transform.apply(w_o.double().unflatten(1, (num_q_heads, dim))).flatten(1)
    return folded_v.to(w_v.dtype).contiguous(), folded_o.to(w_o.dtype)


# torch's CPU generator keeps the low 32 bits of its seed: a larger one would silently repeat a smaller.
_SEEDS = 2**32


def _generator(seed: int) -> torch.Generator:
    return torch.Generator(device="cpu").manual_seed(seed)


def _random_signs(dim: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 2, (dim,), device="cpu", generator=_generator(seed)).double() * 2 - 1


def _positive(value: int, name: str) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return number


def _seed(value: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"seed must be an integer, got {value!r}") from None
    if not 0 <= number < _SEEDS:
        raise ValueError(f"seed must be in 0 .. 2**32 - 1, got {value}")
    return number


def _set_dim(transform: Transform, dim: int) -> None:
    object.__setattr__(transform, "dim", _positive(dim, "dim"))


def _set_seed(transform: Transform, seed: int) -> None:
    object.__setattr__(transform, "seed", _seed(seed))


def _check_hadamard_order(dim: int) -> None:
    if not has_hadamard(dim):
        try:
            hadamard(dim)
        except ValueError as error:
            raise ValueError(f'dim {dim}: {error}; "haar" and "dct" work for any size') from None


def _transforms(values: Sequence[Transform], name: str) -> tuple[Transform, ...]:
    transforms = tuple(values)
    if not transforms:
        raise ValueError(f"{name} must hold at least one transform, got none")
    for transform in transforms:
        if not isinstance(transform, Transform):
            raise TypeError(f"{name} must hold transforms, got {transform!r}")
    return transforms


def _shortened(values: tuple[int, ...]) -> str:
    return repr(values) if len(values) <= 8 else f"({', '.join(map(str, values[:8]))}, ...)"
