"""Orthogonal transforms and smoothing of attention's operands; needs torch alone and knows no number formats."""

from __future__ import annotations

from fp8attn.transforms.hadamard import hadamard, has_hadamard
from fp8attn.transforms.orthogonal import (
    DCT,
    TRANSFORM_NAMES,
    BlockDiagonal,
    Compose,
    HaarRandom,
    Hadamard,
    Identity,
    Permutation,
    RandomHadamard,
    SignFlip,
    Transform,
    fold_value_rotation,
    incoherence,
    make_transform,
)
from fp8attn.transforms.smoothing import (
    Smoothing,
    balance_factors,
    channel_mean,
    channel_rms,
    logit_error_variance,
    mean_out_helps,
)

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
    "Smoothing",
    "Transform",
    "balance_factors",
    "channel_mean",
    "channel_rms",
    "fold_value_rotation",
    "hadamard",
    "has_hadamard",
    "incoherence",
    "logit_error_variance",
    "make_transform",
    "mean_out_helps",
]
