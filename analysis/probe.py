"""How an FP8 tensor core adds: found out from a few products, whatever computes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["AccumulatorProbe", "probe_accumulator"]

Product = Callable[[Tensor, Tensor, Tensor], Tensor]

_LARGE = 8  # 2^8 is the largest power of two that E4M3 has, 2^-9 the smallest
_SMALLEST = -9
_MOST = _LARGE - 2 * _SMALLEST  # fraction bits that two factors can show


@dataclass(frozen=True)
class AccumulatorProbe:
    """What an accumulator keeps.

    Attributes:
        accumulator_bits: fraction bits of a number that it begins with and to which zeros are added; 23 is FP32.
        product_bits: fraction bits that a product keeps beside a larger one.
        rounds: ``"toward zero"`` or ``"to nearest"``, what is below these bits.
        separately: whether every product loses what is below them, however many there are.
        step: products that are aligned to each other and added at once; None if that cannot be told, because nothing
            that another could hide is lost.
    """

    accumulator_bits: int
    product_bits: int
    rounds: str
    separately: bool
    step: int | None

    @property
    def accumulation(self) -> str:
        """What ``Recipe(accumulation=...)`` models it with; ``"fp32"`` if it keeps what FP32 does."""
        return "fp32" if self.product_bits >= 23 else f"tensor_core:{self.product_bits}"


def probe_accumulator(product: Product, device: torch.device | str = "cpu", depth: int = 128) -> AccumulatorProbe:
    """Look at an accumulator through what it makes of powers of two.

    1. Zeros are added to 1 + 2^-i: the last i that stays is ``accumulator_bits`` (the test behind SageAttention2's
       FP22, arXiv:2411.10958).
    2. 2^8 and 2^(8 - i) are added: the last i that is seen is ``product_bits``.
    3. Three quarters of the last bit that is kept are added: rounding to nearest shows them, truncation does not. Many
       halves of it are: if they do not add up, each is cut off by itself.
    4. 2^8, -2^8 and, at place n, a number that only shows once the two have gone: the first n that shows is
       ``step``.

    Args:
        product: ``product(a, b, c)`` gives c + a b of E4M3 codes a (16, K) and b (K, 8) and float32 c.
        depth: K.

    >>> from fp8attn.analysis import probe_accumulator
    >>> probe_accumulator(lambda a, b, c: c + a.float() @ b.float()).accumulation
    'fp32'
    """

    def run(products: dict[int, tuple[float, float]], start: float = 0.0) -> float:
        """What becomes of products at some places, zeros elsewhere, added to ``start``."""
        a, b = torch.zeros(16, depth), torch.zeros(depth, 8)
        for place, (left, right) in products.items():
            a[:, place], b[place] = left, right
        codes = [x.to(device, torch.float8_e4m3fn) for x in (a, b)]
        out = product(codes[0], codes[1], torch.full((16, 8), start, device=device))
        if not bool((out == out[0, 0]).all()):
            raise ValueError("equal rows and columns gave different sums: this is no product")
        return float(out[0, 0])

    large = (2.0**_LARGE, 1.0)

    def small(exponent: int) -> tuple[float, float]:
        half = max(_SMALLEST, min(_LARGE, exponent // 2))
        return 2.0**half, 2.0 ** (exponent - half)

    kept = [i for i in range(1, 24) if run({}, 1 + 2.0**-i) == 1 + 2.0**-i]
    seen = [
        i for i in range(1, _MOST + 1) if run({0: large, 1: small(_LARGE - i)}) == 2.0**_LARGE + 2.0 ** (_LARGE - i)
    ]
    bits = min(23, max(seen, default=0))
    unit = _LARGE - bits  # of the last bit that is kept
    if bits == 23:
        return AccumulatorProbe(max(kept, default=0), bits, "to nearest", False, None)
    half = small(unit - 1)
    nearest = run({0: large, 1: (1.5 * half[0], half[1])}) != large[0]
    together = run({0: large, **dict.fromkeys(range(1, 31), half)}) != large[0]
    minus = (-large[0], 1.0)
    shows = [n for n in range(2, depth) if run({0: large, 1: minus, n: half}) != 0.0]
    return AccumulatorProbe(
        max(kept, default=0),
        bits,
        "to nearest" if nearest else "toward zero",
        not together,
        shows[0] if shows and shows[0] > 2 else None,
    )
