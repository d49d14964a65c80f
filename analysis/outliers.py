"""Seeded queries, keys and values with outliers of a known kind: what tests draw from and studies sweep.

Each kind models something that was found in real attention, or that a paper measures on. They rank transforms
differently, so one alone says little.

=====================  =========================================================  ======================================
kind                   what becomes of N(0, 1) data, with magnitude m             what it models
=====================  =========================================================  ======================================
``none``               nothing, whatever the magnitude                            the case without outliers
``iid``                N(0, m^2) is added to a fraction ``rate`` of the elements  FlashAttention-3's test, section 4.3
                       of q, k and v                                              (arXiv:2407.08608)
``same_channels``      a fraction ``rate`` of the channels, at least one, is m    outlier channels, LLM.int8()
                       times larger in both q and k                               (arXiv:2208.07339); in keys KVQuant
                                                                                  (arXiv:2401.18079)
``disjoint_channels``  as many channels of q, and as many others of k             where a rotation alone hurts
``channel_spread``     each channel of q and of k is scaled by a log-normal       smoothly varying channels, SmoothQuant
                       factor that is m at three standard deviations              (arXiv:2211.10438)
``k_offset``           m is added to all of k                                     the bias of Qwen2's keys
                                                                                  (arXiv:2407.10671, section 2.2.1)
``massive_token``      the first token of k and v is m times larger               massive activations
                                                                                  (arXiv:2402.17762), attention sinks
                                                                                  (arXiv:2309.17453)
``heavy_tails``        Student's t: what lies at three standard deviations is     activations as they are distributed,
                       m times larger                                             arXiv:2405.03103
``rotary_pairs``       m is added to one channel of a fraction ``rate`` of the    outlier channels before the rotary
                       rotary pairs of q and k, which are then turned by their    embedding, KVQuant, section 3.2
                       positions
=====================  =========================================================  ======================================
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

__all__ = ["OUTLIER_KINDS", "QKV", "AttentionShape", "OutlierSpec", "make_qkv"]

OUTLIER_KINDS = (
    "none",
    "iid",
    "same_channels",
    "disjoint_channels",
    "channel_spread",
    "k_offset",
    "massive_token",
    "heavy_tails",
    "rotary_pairs",
)
"""What :class:`OutlierSpec` can describe."""

_ROTARY_BASE = 10_000.0


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of one attention problem; ``head_dim_v`` of None means ``head_dim``."""

    batch: int
    num_q_heads: int
    num_kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int | None = None

    @property
    def q(self) -> tuple[int, int, int, int]:
        return self.batch, self.num_q_heads, self.seqlen_q, self.head_dim

    @property
    def k(self) -> tuple[int, int, int, int]:
        return self.batch, self.num_kv_heads, self.seqlen_k, self.head_dim

    @property
    def v(self) -> tuple[int, int, int, int]:
        return self.batch, self.num_kv_heads, self.seqlen_k, self.head_dim_v or self.head_dim

    @property
    def scores(self) -> tuple[int, int, int, int]:
        """Shape of q k^T, and of a mask."""
        return self.batch, self.num_q_heads, self.seqlen_q, self.seqlen_k


@dataclass(frozen=True)
class OutlierSpec:
    """What is added to N(0, 1) data: a kind of the module's table, its ``magnitude`` and, where it has one, ``rate``.

    >>> OutlierSpec("iid", magnitude=10.0, rate=0.001)  # FlashAttention-3's Table 3
    OutlierSpec(kind='iid', magnitude=10.0, rate=0.001)

    Raises:
        ValueError: an unknown kind.
    """

    kind: str = "none"
    magnitude: float = 10.0
    rate: float = 0.02

    def __post_init__(self) -> None:
        if self.kind not in OUTLIER_KINDS:
            raise ValueError(f"kind must be one of {', '.join(map(repr, OUTLIER_KINDS))}, got {self.kind!r}")


@dataclass(frozen=True, eq=False)
class QKV:
    """Query (B, Hq, Sq, D), key (B, Hkv, Sk, D) and value (B, Hkv, Sk, Dv), with what they were made from.

    Its repr, which Hypothesis prints for a failing example, is the :func:`make_qkv` call that makes it again.
    """

    q: torch.Tensor = field(repr=False)
    k: torch.Tensor = field(repr=False)
    v: torch.Tensor = field(repr=False)
    shape: AttentionShape
    outliers: OutlierSpec
    seed: int

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter((self.q, self.k, self.v))

    def __repr__(self) -> str:
        return f"make_qkv({self.shape}, outliers={self.outliers}, seed={self.seed}, dtype={self.q.dtype})"


def make_qkv(
    shape: AttentionShape,
    *,
    outliers: OutlierSpec = OutlierSpec(),
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> QKV:
    """N(0, 1) tensors of ``shape`` with outliers, on the CPU, the same for the same arguments.

    >>> q, k, v = make_qkv(AttentionShape(1, 4, 2, 8, 8, 16), outliers=OutlierSpec("k_offset", magnitude=5))
    >>> k.shape, 4.8 < k.mean().item() < 5.2
    (torch.Size([1, 2, 8, 16]), True)
    """
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(size, generator=generator) for size in (shape.q, shape.k, shape.v))
    kind, magnitude = outliers.kind, outliers.magnitude
    if kind == "iid":
        for x in (q, k, v):
            hit = torch.rand(x.shape, generator=generator) < outliers.rate
            x += hit * magnitude * torch.randn(x.shape, generator=generator)
    elif kind in ("same_channels", "disjoint_channels"):
        channels, count = _chosen(shape.head_dim, outliers.rate, generator)
        q[..., channels[:count]] *= magnitude
        k[..., channels[:count] if kind == "same_channels" else channels[count : 2 * count]] *= magnitude
    elif kind == "channel_spread":
        for x in (q, k):
            x *= magnitude ** (torch.randn(shape.head_dim, generator=generator) / 3)
    elif kind == "k_offset":
        k += magnitude
    elif kind == "massive_token":
        k[:, :, :1] *= magnitude
        v[:, :, :1] *= magnitude
    elif kind == "heavy_tails":
        q, k, v = (_student_t(x, magnitude) for x in (q, k, v))
    elif kind == "rotary_pairs":
        pairs, count = _chosen(shape.head_dim // 2, outliers.rate, generator)
        for x in (q, k):
            x[..., pairs[:count]] += magnitude
        # A query's position is its key's where both end together, as in decoding.
        q, k = _turned(q, shape.seqlen_k - shape.seqlen_q), _turned(k, 0)
    return QKV(q.to(dtype), k.to(dtype), v.to(dtype), shape, outliers, seed)


def _chosen(number: int, rate: float, generator: torch.Generator) -> tuple[torch.Tensor, int]:
    """All of ``number`` channels in random order, and how many of them a rate means: one at least."""
    return torch.randperm(number, generator=generator), max(1, round(rate * number))


def _student_t(x: torch.Tensor, magnitude: float) -> torch.Tensor:
    """Normal numbers, each moved to where Student's t has the same probability beyond it.

    The degrees of freedom are those for which 3 moves to 3 * magnitude.
    """
    from scipy.optimize import brentq
    from scipy.stats import norm, t

    if magnitude <= 1:
        return x
    beyond = norm.sf(3.0)
    # In log2 of the degrees of freedom; t is normal to 1e-4 at 2^14.
    log2_df = brentq(lambda log2: t.isf(beyond, 2.0**log2) - 3.0 * magnitude, -3.0, 40.0)
    values = t.isf(norm.sf(np.abs(x.double().numpy())), 2.0**log2_df)
    return torch.from_numpy(np.copysign(values, x.numpy())).to(torch.float32)


def _turned(x: torch.Tensor, first: int) -> torch.Tensor:
    """Rotary embedding (arXiv:2104.09864) of channels i and i + D/2 as a pair, from position ``first`` on."""
    pairs = x.shape[-1] // 2
    frequencies = _ROTARY_BASE ** (-torch.arange(pairs, dtype=torch.float64) / max(1, pairs))
    angles = torch.outer(torch.arange(first, first + x.shape[2], dtype=torch.float64), frequencies)
    one, two, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    cos, sin = angles.cos().float(), angles.sin().float()
    return torch.cat([one * cos - two * sin, one * sin + two * cos, rest], dim=-1)
