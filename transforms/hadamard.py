"""Hadamard matrices of the orders that head dims need, built rather than tabulated.

A Hadamard matrix H of order n has entries +-1 and orthogonal rows: H H^T = n I. Three classical constructions
(J. J. Sylvester 1867; R. E. A. C. Paley 1933), with q prime, and their Kronecker products give every order used here:

- Sylvester: order 2, hence with products every power of two;
- Paley I: order q + 1 for q = 3 mod 4 (12, 20, 24, 32, 44, 48, 60, ...; not symmetric, so the inverse is H^T / n);
- Paley II: order 2 (q + 1) for q = 1 mod 4 (12, 28, 36, 60, 76, ...; symmetric).

>>> hadamard(4).int().tolist()
[[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]
>>> has_hadamard(80), has_hadamard(52)
(True, False)
"""

from __future__ import annotations

import operator
from functools import lru_cache

import torch

__all__ = ["hadamard", "has_hadamard"]


def hadamard(n: int) -> torch.Tensor:
    """A Hadamard matrix of order ``n``: shape (n, n), float64, entries +-1, ``H @ H.T == n * I`` exactly.

    Powers of two give Sylvester's matrix, the same as ``scipy.linalg.hadamard``. The tensor is the caller's own.

    Raises:
        ValueError: ``n`` is not positive, or none of the constructions reaches it; the message names the nearest orders
            that exist here.

    >>> H = hadamard(12)
    >>> bool((H @ H.T == 12 * torch.eye(12)).all())
    True
    """
    n = _order(n)
    if not has_hadamard(n):
        below = next((m for m in range(n - 1, 0, -1) if has_hadamard(m)), None)
        above = next(m for m in range(n + 1, 2 * n + 2) if has_hadamard(m))  # a power of two lies in there
        nearest = f"{above}" if below is None else f"{below} (below) and {above} (above)"
        raise ValueError(f"no Hadamard matrix of order {n} is available; the nearest orders that are: {nearest}")
    return _signs(n).to(torch.float64)


def has_hadamard(n: int) -> bool:
    """Whether :func:`hadamard` can build order ``n``."""
    return _factors(_order(n)) is not None


def _order(n: int) -> int:
    try:
        order = operator.index(n)
    except TypeError:
        raise TypeError(f"n must be an integer, got {n!r}") from None
    if order < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    return order


@lru_cache(maxsize=4096)
def _factors(n: int) -> tuple[int, ...] | None:
    """Orders of the Sylvester or Paley matrices whose Kronecker product has order n, or None.

    Small factors first: 2 before Paley, so that powers of two are Sylvester's, and a Paley factor stays small.
    """
    if n == 1:
        return ()
    if n > 2 and n % 4:
        return None
    for base in (2, *range(12, n + 1, 4)):
        if n % base == 0 and (base == 2 or _paley_prime(base) is not None):
            rest = _factors(n // base)
            if rest is not None:
                return (base, *rest)
    return None


def _paley_prime(n: int) -> int | None:
    """The prime q behind a Paley matrix of order n (I: q = n - 1; II: q = n / 2 - 1), or None."""
    for q, residue in ((n - 1, 3), (n // 2 - 1, 1)):
        if q % 4 == residue and _is_prime(q):
            return q
    return None


def _is_prime(q: int) -> bool:
    return q > 1 and all(q % p for p in range(2, int(q**0.5) + 1))


@lru_cache(maxsize=64)
def _signs(n: int) -> torch.Tensor:
    factors = _factors(n)
    assert factors is not None  # the caller has checked
    matrix = torch.ones(1, 1, dtype=torch.int8, device="cpu")
    for base in factors:
        matrix = torch.kron(matrix, _paley(base) if base > 2 else _tensor([[1, 1], [1, -1]]))
    return matrix


def _paley(n: int) -> torch.Tensor:
    q = _paley_prime(n)
    assert q is not None
    # chi(a) = 1 for a non-zero square mod q, -1 for a non-square, 0 for zero; Jacobsthal's matrix is chi(i - j).
    squares = {a * a % q for a in range(1, q)}
    chi = _tensor([0] + [1 if a in squares else -1 for a in range(1, q)])
    index = torch.arange(q, device="cpu")
    core = torch.zeros(q + 1, q + 1, dtype=torch.int8, device="cpu")
    core[0, 1:] = 1
    core[1:, 0] = -1 if q % 4 == 3 else 1
    core[1:, 1:] = chi[(index[:, None] - index[None, :]) % q]
    eye = torch.eye(q + 1, dtype=torch.int8, device="cpu")
    if q % 4 == 3:  # core is skew, so (I + core)(I + core)^T = I - core^2 = (q + 1) I
        return eye + core
    return torch.kron(core, _tensor([[1, 1], [1, -1]])) + torch.kron(eye, _tensor([[1, -1], [-1, -1]]))


def _tensor(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int8, device="cpu")
