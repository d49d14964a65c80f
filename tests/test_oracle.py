"""The limits that kernels are held to: what truncates as a tensor core does keeps them, what is broken does not.

The reference's model of a tensor core stands in for a kernel on a GPU, with tiles half as long as the model's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

import oracle
from fp8attn import Recipe
from fp8attn.kernels import reference
from fp8attn.kernels.problem import AttentionProblem, Masking
from fp8attn.testing import AttentionShape, make_qkv

SEQLEN_Q, SEQLEN_K, TILE = 24, 1500, slice(704, 768)


def make_problem(kind: str) -> AttentionProblem:
    """``"ordinary"``, N(0, 1); ``"flat"``, weights alike and values of mean 1; ``"one sign"``, queries and keys whose
    products are all positive and of many magnitudes, of which a tensor core loses most."""
    data = make_qkv(AttentionShape(1, 2, 1, SEQLEN_Q, SEQLEN_K, 64, 64), seed=0)
    spread = 2.0 ** -torch.linspace(0, 5, 64)
    q, k, v = {
        "ordinary": (data.q, data.k, data.v),
        "flat": (0.1 * data.q, data.k, 1 + 0.1 * data.v),
        "one sign": (spread * (16 + data.q), spread * (16 + 0.3 * data.k), 1 + data.v),
    }[kind]
    window = (SEQLEN_K - 40, 0)
    masking = Masking(SEQLEN_Q, SEQLEN_K, torch.device("cpu"), window=window, causal_alignment="bottom_right")
    recipe = Recipe(rotate="none", balance="none", smooth_k=False, k_scale="token", v_scale="channel")
    problem = AttentionProblem(reference.quantize_qkv(q, k, v, recipe, masking, scale=0.125), masking, 0.125)
    lse = reference.attend(problem)[1].mean()
    return dataclasses.replace(problem, sinks=lse + torch.tensor([-2.0, 1.0]))


def on_a_tensor_core(
    problem: AttentionProblem, accumulation: str = "tensor_core_two_level", **tiles: int
) -> oracle.Answer:
    return reference.attend(
        dataclasses.replace(problem, qkv=oracle.with_accumulation(problem.qkv, accumulation)), **tiles
    )


def check(problem: AttentionProblem, actual: oracle.Answer) -> None:
    model, sums = on_a_tensor_core(problem), reference.attend(problem)
    oracle.assert_agrees_with_tensor_core(actual, model, sums, sums, p_format=problem.qkv.recipe.p_format)


@pytest.mark.parametrize("kind", ["ordinary", "flat", "one sign"])
def test_a_kernel_on_a_tensor_core_keeps_the_limits(kind: str) -> None:
    problem = make_problem(kind)
    check(problem, on_a_tensor_core(problem, tile_q=16, tile_k=64))


def test_where_a_tensor_core_loses_more_than_usual_the_limit_is_what_it_loses() -> None:
    """And only there: the same answer is too far from exact sums where the model does not explain it."""
    problem = make_problem("one sign")
    model, sums = on_a_tensor_core(problem), reference.attend(problem)
    assert (model[1] - sums[1]).abs().max() > 2 * oracle.EXACT_SUMS
    with pytest.raises(AssertionError):
        oracle.assert_agrees(model, sums, oracle.EXACT_SUMS, p_format="e4m3")


def hide(problem: AttentionProblem, keys: slice) -> AttentionProblem:
    in_use = torch.ones(1, SEQLEN_K, dtype=torch.bool)
    in_use[:, keys] = False
    return dataclasses.replace(problem, masking=problem.masking.without_keys(in_use))


def with_masking(problem: AttentionProblem, **fields: object) -> AttentionProblem:
    return dataclasses.replace(problem, masking=dataclasses.replace(problem.masking, **fields))  # type: ignore[arg-type]


def with_values(problem: AttentionProblem, change: Callable[[torch.Tensor], torch.Tensor]) -> AttentionProblem:
    v = problem.qkv.v.to_layout("rows")
    v = dataclasses.replace(v, codes=v.format.cast(change(v.format.decode(v.codes))))
    return dataclasses.replace(problem, qkv=dataclasses.replace(problem.qkv, v=v))


def scaled(x: torch.Tensor, factor: float, tokens: slice) -> torch.Tensor:
    x = x.clone()
    x[:, :, tokens] *= factor
    return x


def with_k_scale(problem: AttentionProblem, factor: float) -> AttentionProblem:
    k = problem.qkv.k
    k = dataclasses.replace(k, scale=scaled(k.scale, factor, TILE))
    return dataclasses.replace(problem, qkv=dataclasses.replace(problem.qkv, k=k))


def with_p_format(problem: AttentionProblem, p_format: str) -> AttentionProblem:
    recipe = problem.qkv.recipe.replace(p_format=p_format)
    return dataclasses.replace(problem, qkv=dataclasses.replace(problem.qkv, recipe=recipe))


BROKEN: dict[str, Callable[[AttentionProblem], AttentionProblem]] = {
    "a tile of keys is dropped": lambda problem: hide(problem, TILE),
    "the last, cut tile is dropped": lambda problem: hide(problem, slice(SEQLEN_K - 40, None)),
    "a tile has another's scale of keys": lambda problem: with_k_scale(problem, 1.25),
    "a tile has another's scale of values": lambda problem: with_values(problem, lambda v: scaled(v, 0.5, TILE)),
    "values are beside their neighbours' keys": lambda problem: with_values(problem, lambda v: v.roll(1, dims=2)),
    "the window is wider by one": lambda problem: with_masking(problem, window=(SEQLEN_K - 40, 1)),
    "the window ends at another diagonal": lambda problem: with_masking(problem, causal_alignment="top_left"),
    "a sink is forgotten": lambda problem: dataclasses.replace(problem, sinks=None),
    "weights are not rounded": lambda problem: with_p_format(problem, "fp16"),
    "weights are rounded to the wrong format": lambda problem: with_p_format(problem, "e5m2"),
}


# One key more of 1,500 that weigh alike does not show.
INVISIBLE = ("one sign", "the window is wider by one")


@pytest.mark.parametrize(
    ("kind", "fault"),
    [(kind, fault) for kind in ("ordinary", "one sign") for fault in BROKEN if (kind, fault) != INVISIBLE],
)
def test_a_broken_kernel_does_not(kind: str, fault: str) -> None:
    problem = make_problem(kind)
    with pytest.raises(AssertionError):
        check(problem, on_a_tensor_core(BROKEN[fault](problem), tile_q=16, tile_k=64))


def test_nor_does_one_with_a_single_accumulator_for_all_keys() -> None:
    problem = make_problem("flat")
    with pytest.raises(AssertionError):
        check(problem, on_a_tensor_core(problem, "tensor_core"))
