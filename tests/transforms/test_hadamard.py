"""Hadamard matrices: exact integer identities, an independent construction, and the orders that exist."""

from __future__ import annotations

import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8attn.transforms import hadamard, has_hadamard
from fp8attn.transforms.hadamard import _factors

HEAD_DIMS = [16, 32, 64, 128, 256, 512, 576, 48, 72, 80, 88, 96, 112, 120, 144, 160, 176, 192, 224, 240]


@pytest.mark.parametrize("n", [1, 2, 4, 8, 12, 20, 24, 28, 36, 40, 44, 56, 60, *HEAD_DIMS])
def test_entries_are_signs_and_rows_orthogonal(n: int) -> None:
    matrix = hadamard(n)
    assert matrix.dtype == torch.float64
    assert set(matrix.unique().tolist()) <= {-1.0, 1.0}
    assert torch.equal(matrix @ matrix.T, n * torch.eye(n, dtype=torch.float64))  # integers: exact


@pytest.mark.parametrize("n", [2**i for i in range(11)])
def test_powers_of_two_are_sylvesters(n: int) -> None:
    assert torch.equal(hadamard(n), torch.from_numpy(scipy.linalg.hadamard(n)).double())


def test_orders_up_to_256() -> None:
    """Without prime powers and Williamson matrices these multiples of 4 have no construction; all others do."""
    missing = {52, 92, 100, 116, 156, 172, 184, 188, 232, 236, 244}
    expected = {1, 2} | set(range(4, 257, 4)) - missing
    assert {n for n in range(1, 257) if has_hadamard(n)} == expected
    for n in expected:
        matrix = hadamard(n)
        assert torch.equal(matrix @ matrix.T, n * torch.eye(n, dtype=torch.float64)), n


def test_paley_factors_stay_small() -> None:
    """144 = 12 x 12 too, but twos come out first: the powers of two must stay Sylvester's."""
    assert _factors(80) == (2, 2, 20)
    assert _factors(144) == (2, 2, 36)
    assert _factors(64) == (2,) * 6


@given(st.integers(1, 4096))
@settings(max_examples=200, deadline=None)
def test_order_exists_or_message_names_neighbours(n: int) -> None:
    if has_hadamard(n):
        return
    with pytest.raises(ValueError, match=f"order {n} ") as error:
        hadamard(n)
    below, above = (int(word) for word in str(error.value).split() if word.isdigit() and int(word) != n)
    assert below < n < above and has_hadamard(below) and has_hadamard(above)
    assert not any(has_hadamard(m) for m in range(below + 1, above))


@pytest.mark.parametrize(("n", "error"), [(0, ValueError), (-4, ValueError), (4.0, TypeError), ("4", TypeError)])
def test_bad_order(n: object, error: type[Exception]) -> None:
    for function in (hadamard, has_hadamard):
        with pytest.raises(error, match="n must be"):
            function(n)  # type: ignore[arg-type]


def test_result_belongs_to_the_caller() -> None:
    hadamard(16).zero_()
    assert hadamard(16).abs().sum() == 256
