"""The backends and devices that every case is held against."""

from __future__ import annotations

import pytest
import torch

from oracle import Where


@pytest.fixture(
    params=[
        pytest.param(Where("reference", "cpu"), id="reference"),
        pytest.param(
            Where("triton", "cpu"),
            id="triton",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles where there is a GPU"),
        ),
        pytest.param(Where("reference", "cuda"), id="reference-gpu", marks=pytest.mark.gpu),
        pytest.param(Where("triton", "cuda"), id="triton-gpu", marks=pytest.mark.gpu),
    ]
)
def where(request: pytest.FixtureRequest) -> Where:
    found: Where = request.param
    return found
