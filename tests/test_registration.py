"""The ops as torch sees them: opcheck, torch.compile with changing lengths, export, fake tensors, CUDA graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import fp8attn
from fp8attn import QuantizedQKV, Recipe
from fp8attn.kernels.dispatch import BACKENDS, Backend
from fp8attn.transforms import Smoothing

LENGTHS = (20, 33, 300)
# Of what is as long as the number of blocks, torch compiles one block and several apart, as it does any size of 1.
SEVERAL_BLOCKS = (140, 290, 300)


def inputs(seqlen: int, seqlen_k: int | None = None, device: str = "cpu") -> list[torch.Tensor]:
    """(2, 4, S, 16), (2, 2, Sk, 16), (2, 2, Sk, 24)."""
    g = torch.Generator().manual_seed(seqlen)
    shapes = ((4, seqlen, 16), (2, seqlen_k or seqlen, 16), (2, seqlen_k or seqlen, 24))
    return [torch.randn(2, *shape, generator=g).to(device) for shape in shapes]


def same(a: Any, b: Any) -> bool:
    """Bitwise, and in layout: of tensors, tuples of them and quantized values."""
    if isinstance(a, torch.Tensor):
        as_bytes = (x.contiguous().view(torch.uint8) if x.dtype.itemsize == 1 else x for x in (a, b))
        return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(*as_bytes)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and all(
            same(getattr(a, field.name), getattr(b, field.name)) for field in dataclasses.fields(a)
        )
    return bool(a == b)


FROZEN = Smoothing(
    k_mean=torch.full((1, 2, 1, 16), 0.1), v_mean=torch.full((1, 2, 1, 24), 0.2), balance=torch.full((1, 2, 1, 16), 2.0)
)
FROZEN_EACH = Smoothing(FROZEN.k_mean.repeat(2, 1, 1, 1), FROZEN.v_mean.repeat(2, 1, 1, 1))  # a batch axis of their own
ROUND_TRIP = Recipe(k_scale="block:64", v_scale="token", smooth_k=True, smooth_v=True, seed=3)
SINKS = torch.arange(4.0)


def bshd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return fp8attn.attention(*(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True, layout="bshd", return_lse=True)


def into_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[3], q.shape[2]).mT
    assert fp8attn.attention(q, k, v, enable_gqa=True, out=out) is out
    return out


def padded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    mask = torch.arange(k.shape[2], device=k.device) < k.shape[2] - 5
    quantized = fp8attn.quantize(q, k, v, attn_mask=mask)
    return fp8attn.attention_quantized(quantized, return_lse=True)


CASES: dict[str, Callable[..., Any]] = {
    "plain": lambda q, k, v: fp8attn.attention(q, k, v, enable_gqa=True),
    "causal, window, softcap, sinks": lambda q, k, v: fp8attn.attention(
        q, k, v, None, 0.0, True, 0.3, True, causal_alignment="bottom_right", window=(7, 2), softcap=10, sinks=SINKS,
        return_lse=True,
    ),
    "boolean mask": lambda q, k, v: fp8attn.attention(
        q, k, v, torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(), enable_gqa=True
    ),
    "additive mask": lambda q, k, v: fp8attn.attention(
        q, k, v, (torch.arange(k.shape[2]) * -0.1).expand(q.shape[2], -1), enable_gqa=True
    ),
    "recipe by name": lambda q, k, v: fp8attn.attention(q, k, v, enable_gqa=True, recipe="causal_safe"),
    "recipe": lambda q, k, v: fp8attn.attention(q, k, v, enable_gqa=True, recipe=ROUND_TRIP, backend="reference"),
    "recipe made inside": lambda q, k, v: fp8attn.attention(q, k, v, enable_gqa=True, recipe=Recipe(k_scale="token")),
    "frozen smoothing": lambda q, k, v: fp8attn.attention(q, k, v, enable_gqa=True, smoothing=FROZEN, return_lse=True),
    "bshd": bshd,
    "one head": lambda q, k, v: fp8attn.attention(q[:, 0], k[:, 0], v[:, 0], is_causal=True, return_lse=True),
    "out": into_out,
    "quantize": lambda q, k, v: fp8attn.quantize(q, k, v),
    "quantize, all parts": lambda q, k, v: fp8attn.quantize(q, k, v, ROUND_TRIP, window=(3, 0), smoothing=FROZEN_EACH),
    "quantize, odd head_dim": lambda q, k, v: fp8attn.quantize(q[..., :13], k[..., :13], v[..., :7], "fa3"),
    "quantize, then attention": lambda q, k, v: fp8attn.attention_quantized(
        fp8attn.quantize(q, k, v, ROUND_TRIP, is_causal=True), is_causal=True, softcap=3.0, sinks=SINKS, return_lse=True
    ),
    "padding": padded,
}  # fmt: skip


@pytest.fixture(autouse=True)
def forget_compiled_code() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def columns(monkeypatch: pytest.MonkeyPatch) -> str:
    """A backend that computes as the reference does and stores values as kernels want them."""
    reference = BACKENDS["reference"]

    def quantize(*args: Any, **options: Any) -> QuantizedQKV:
        made = reference.quantize(*args, **options)
        return dataclasses.replace(made, v=made.v.to_layout("permuted_columns"))

    backend = Backend("columns", reference.attend, quantize, lambda *_: None, lambda _: "permuted_columns")
    monkeypatch.setitem(BACKENDS, "columns", backend)
    return "columns"


# ---- torch.compile


@pytest.mark.parametrize("name", CASES)
def test_compiles_whole_and_gives_the_same_bits(name: str) -> None:
    function, counter = CASES[name], CompileCounter()
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for seqlen in LENGTHS:
        data = inputs(seqlen)
        assert same(compiled(*data), function(*data)), seqlen
    assert counter.frame_count <= 2  # for the first length, and for any


@pytest.mark.parametrize("name", ["causal, window, softcap, sinks", "quantize, then attention"])
def test_dynamic_shapes_compile_once(name: str) -> None:
    function, counter = CASES[name], CompileCounter()
    compiled = torch.compile(function, fullgraph=True, backend=counter, dynamic=True)
    for seqlen in LENGTHS:
        data = inputs(seqlen)
        assert same(compiled(*data), function(*data)), seqlen
    assert counter.frame_count == 1


def test_a_growing_cache_compiles_at_most_twice() -> None:
    def decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return fp8attn.attention(q, k, v, is_causal=True, causal_alignment="bottom_right", enable_gqa=True)

    counter = CompileCounter()
    compiled = torch.compile(decode, fullgraph=True, backend=counter)
    for seqlen_k in (20, 21, 127, 128, 129):
        data = inputs(1, seqlen_k)
        assert same(compiled(*data), decode(*data))
    assert counter.frame_count <= 2


def test_marked_dimensions_stay_dynamic() -> None:
    counter = CompileCounter()
    compiled = torch.compile(CASES["plain"], fullgraph=True, backend=counter)
    for seqlen in LENGTHS:
        data = inputs(seqlen)
        for x in data:  # mark_dynamic makes it an error to specialize the axis
            torch._dynamo.mark_dynamic(x, 2)
        assert same(compiled(*data), CASES["plain"](*data))
    assert counter.frame_count == 1


def test_a_quantized_value_goes_in_and_comes_out(columns: str) -> None:
    counter = CompileCounter()
    attend = torch.compile(
        lambda x: fp8attn.attention_quantized(x, is_causal=True, return_lse=True), fullgraph=True, backend=counter
    )
    quantize = torch.compile(
        lambda q, k, v: fp8attn.quantize(q, k, v, ROUND_TRIP, is_causal=True, backend="columns"),
        fullgraph=True, backend=counter,
    )  # fmt: skip
    for seqlen in SEVERAL_BLOCKS:
        expected = fp8attn.quantize(*inputs(seqlen), ROUND_TRIP, is_causal=True, backend="columns")
        assert expected.v.layout == "permuted_columns" and expected.v.seqlen == seqlen
        made = quantize(*inputs(seqlen))
        assert same(made, expected)
        assert same(attend(made), fp8attn.attention_quantized(expected, is_causal=True, return_lse=True))
    assert counter.frame_count <= 4


def test_packed_sequences_compile_at_most_twice() -> None:
    def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor) -> Any:
        return fp8attn.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, is_causal=True, sinks=SINKS, return_lse=True)

    counter = CompileCounter()
    compiled = torch.compile(packed, fullgraph=True, backend=counter)
    for ends in ([3, 7], [2, 5, 9], [12], [1, 2, 3, 13]):
        data = [x[0].transpose(0, 1).contiguous() for x in inputs(ends[-1])]
        cu_seqlens = torch.tensor([0, *ends])
        assert same(compiled(*data, cu_seqlens), packed(*data, cu_seqlens))
    assert counter.frame_count <= 2


def test_another_recipe_is_another_program() -> None:
    counter = CompileCounter()
    compiled = torch.compile(
        lambda q, k, v, recipe: fp8attn.attention(q, k, v, enable_gqa=True, recipe=recipe),
        fullgraph=True, backend=counter,
    )  # fmt: skip
    data = inputs(20)
    for recipe in (Recipe(), Recipe(seed=1), Recipe(k_scale="token"), Recipe(smooth_k=True), Recipe(), Recipe(seed=2)):
        assert same(compiled(*data, recipe), fp8attn.attention(*data, enable_gqa=True, recipe=recipe)), recipe
    assert counter.frame_count == 5  # an equal recipe is no new one


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compilers_leave_the_op_alone(backend: str) -> None:
    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        out, lse = fp8attn.attention(q * 2, k + 1, v, is_causal=True, enable_gqa=True, return_lse=True)
        again = fp8attn.attention_quantized(fp8attn.quantize(q, k, v, ROUND_TRIP))
        return out.relu(), lse, again

    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=True)
    for seqlen in SEVERAL_BLOCKS:
        data = inputs(seqlen)
        assert same(compiled(*data), layer(*data))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


ERRORS: dict[str, Callable[..., Any]] = {
    "heads": lambda q, k, v: fp8attn.attention(q, k, v),
    "dtype": lambda q, k, v: fp8attn.attention(q.double(), k, v, enable_gqa=True),
    "dropout": lambda q, k, v: fp8attn.attention(q, k, v, enable_gqa=True, dropout_p=0.5),
    "window": lambda q, k, v: fp8attn.attention(q, k, v, enable_gqa=True, window=4),  # type: ignore[arg-type]
    "scale": lambda q, k, v: fp8attn.attention(q, k, v, enable_gqa=True, scale="1"),  # type: ignore[arg-type]
    "softcap": lambda q, k, v: fp8attn.attention(q, k, v, enable_gqa=True, softcap=-1.0),
    "is_causal": lambda q, k, v: fp8attn.attention(q, k, v, enable_gqa=True, is_causal="no"),  # type: ignore[arg-type]
    "recipe": lambda q, k, v: fp8attn.attention(q, k, v, enable_gqa=True, recipe="best"),
    "backend": lambda q, k, v: fp8attn.attention(q, k, v, enable_gqa=True, backend="cuda"),
    "no backend's name": lambda q, k, v: fp8attn.attention(q, k, v, enable_gqa=True, backend=3),  # type: ignore[arg-type]
    "mask": lambda q, k, v: fp8attn.attention(q, k, v, torch.ones(3, 3), enable_gqa=True),
    "out": lambda q, k, v: fp8attn.attention(q, k, v, enable_gqa=True, out=torch.zeros(2, 4, q.shape[2], 13)),
    "rotation": lambda q, k, v: fp8attn.attention(q[..., :13], k[..., :13], v, enable_gqa=True),
    "varlen": lambda q, k, v: fp8attn.attention_varlen(q[0], k[0], v[0], torch.ones(2).int(), torch.ones(3).int()),
    "smoothing": lambda q, k, v: fp8attn.quantize(q[..., :8], k[..., :8], v, smoothing=FROZEN),
}


@pytest.mark.parametrize("name", ERRORS)
def test_refusals_reach_the_user_of_compiled_code(name: str) -> None:
    data = inputs(20)
    with pytest.raises((TypeError, ValueError)) as eager:
        ERRORS[name](*data)
    with pytest.raises(Exception) as compiled:  # torch wraps it
        torch.compile(ERRORS[name], fullgraph=True, backend="eager")(*data)
    # Without values, since a compiler that saw no tensor cannot tell what cu_seqlens holds.
    assert (str(eager.value) if name != "varlen" else "must list as many sequences") in str(compiled.value)


@pytest.mark.parametrize("name", ERRORS)
def test_fake_tensors_get_the_same_refusals(name: str) -> None:
    """Before anything has run, and so when compiling."""
    with pytest.raises((TypeError, ValueError)) as real:
        ERRORS[name](*inputs(20))
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(real.type) as fake:
        ERRORS[name](*(torch.empty(x.shape) for x in inputs(20)))
    assert (str(real.value) if name != "varlen" else "must list as many sequences") in str(fake.value)


def test_a_gradient_is_refused_in_compiled_code_too() -> None:
    q, k, v = inputs(20)
    compiled = torch.compile(CASES["plain"], fullgraph=True, backend="aot_eager")
    q.requires_grad_()
    with pytest.raises(Exception, match="query requires a gradient and FP8 attention has no backward"):
        compiled(q, k, v)
    with torch.no_grad():
        assert not compiled(q, k, v).requires_grad


def test_what_dynamo_gives_up_on_is_not_traced_into() -> None:
    """Without fullgraph a refusal runs again eagerly. The reference's frames are no business of the compiler's."""
    counter = CompileCounter()
    with pytest.raises(ValueError, match=r"out must be \(2, 4, 20, 24\)"):
        torch.compile(ERRORS["out"], backend=counter)(*inputs(20))
    assert counter.frame_count == 0


# ---- opcheck


class Recorded(TorchDispatchMode):
    """Keeps the calls of our ops."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace == "fp8attn":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def recorded(function: Callable[..., Any], *args: Any) -> list[tuple[Any, tuple[Any, ...]]]:
    with Recorded() as mode:
        function(*args)
    assert mode.calls
    return mode.calls


def check_op(op: Any, args: tuple[Any, ...]) -> None:
    # The schema check compares inputs before and after by arithmetic, which torch has none of for FP8 on a CPU:
    # there compare the bytes.
    narrow = [x for x in args if isinstance(x, torch.Tensor) and x.dtype.itemsize == 1 and x.dtype != torch.bool]
    utils = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    before = [x.contiguous().view(torch.uint8).clone() for x in narrow]
    torch.library.opcheck(op, args, test_utils=utils if narrow else ["test_schema", *utils])
    assert all(torch.equal(a, b.contiguous().view(torch.uint8)) for a, b in zip(before, narrow, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_ops_are_what_they_say(name: str) -> None:
    for op, args in recorded(CASES[name], *inputs(20)):
        check_op(op, args)


def test_the_varlen_op_is_what_it_says() -> None:
    q, k, v = (x[0].transpose(0, 1) for x in inputs(9))
    cu_seqlens = torch.tensor([0, 2, 2, 9])
    for op, args in recorded(lambda: fp8attn.attention_varlen(q, k, v, cu_seqlens, cu_seqlens.int(), sinks=SINKS)):
        check_op(op, args)


def test_ops_of_a_backend_with_values_in_columns_are_what_they_say(columns: str) -> None:
    def both(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        fp8attn.attention_quantized(fp8attn.quantize(q, k, v, backend="columns"))

    for op, args in recorded(both, *inputs(20)):
        check_op(op, args)


def test_the_schema_check_of_attention_quantized_where_torch_can_make_it() -> None:
    sixteen_bits = Recipe.from_name("bf16").replace(smooth_k=True, smooth_v=True)
    quantized = fp8attn.quantize(*inputs(20), sixteen_bits, window=(0, 0))
    for op, args in recorded(lambda: fp8attn.attention_quantized(quantized, torch.zeros(20, 20), sinks=SINKS)):
        torch.library.opcheck(op, args)


@pytest.mark.parametrize("sizes", [(0, 9, 9), (2, 0, 9), (2, 9, 0), (2, 0, 0)])
def test_ops_of_empty_problems_are_what_they_say(sizes: tuple[int, int, int]) -> None:
    batch, seqlen_q, seqlen_k = sizes
    q, k, v = (x[:batch] for x in inputs(9))

    def both() -> None:
        quantized = fp8attn.quantize(q[:, :, :seqlen_q], k[:, :, :seqlen_k], v[:, :, :seqlen_k], is_causal=True)
        fp8attn.attention_quantized(quantized, is_causal=True)

    for op, args in recorded(both):
        # Not the dynamic one: torch takes a length of 0 for a constant.
        torch.library.opcheck(op, args, test_utils=["test_faketensor"])


# ---- export, fake tensors, vmap


class Whole(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return fp8attn.attention(q, k, v, is_causal=True, enable_gqa=True, return_lse=True)


class Halves(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return fp8attn.attention_quantized(fp8attn.quantize(q, k, v), return_lse=True)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("module", "least", "ops"),
    [(Whole(), 2, ["attention"]), (Halves(), 129, ["quantize", "attention_quantized"])],
    ids=["whole", "halves"],
)
def test_exports_with_a_dynamic_length(module: torch.nn.Module, least: int, ops: list[str], strict: bool) -> None:
    seqlen, shortest = torch.export.Dim("seqlen", min=least, max=4096), max(least, 20)
    shapes = ({2: seqlen}, {2: seqlen}, {2: seqlen})
    program = torch.export.export(module, tuple(inputs(shortest)), dynamic_shapes=shapes, strict=strict)
    targets = [str(node.target) for node in program.graph.nodes if "fp8attn" in str(node.target)]
    assert targets == [f"fp8attn.{op}.default" for op in ops]
    for length in (shortest, 300):
        data = inputs(length)
        assert same(tuple(program.module()(*data)), module(*data))


def test_fake_tensors_get_what_real_ones_do() -> None:
    real = [CASES[name](*inputs(20)) for name in ("frozen smoothing", "quantize, then attention")]
    with FakeTensorMode():
        data = [torch.empty(x.shape) for x in inputs(20)]
        smoothing = object.__new__(Smoothing)
        for name in ("k_mean", "v_mean", "balance"):
            object.__setattr__(smoothing, name, torch.empty(getattr(FROZEN, name).shape))
        fake = [
            fp8attn.attention(*data, enable_gqa=True, smoothing=smoothing, return_lse=True),
            fp8attn.attention_quantized(
                fp8attn.quantize(*data, ROUND_TRIP, is_causal=True), softcap=3.0, sinks=torch.empty(4), return_lse=True
            ),
        ]
        with pytest.raises(ValueError, match="query has 4 heads and key 2; pass enable_gqa=True"):
            fp8attn.attention(*data)
    for a, b in zip(real, fake, strict=True):
        for x, y in zip(a, b, strict=True):
            assert (x.shape, x.stride(), x.dtype, x.device) == (y.shape, y.stride(), y.dtype, y.device)


def test_meta_tensors_stay_meta() -> None:
    quantized = fp8attn.quantize(*(x.to("meta") for x in inputs(20)))
    assert {x.device.type for x in (quantized.q, quantized.k, quantized.v)} == {"meta"}
    assert fp8attn.attention_quantized(quantized).shape == (2, 4, 20, 24)


def test_vmap_goes_over_the_op() -> None:
    data = inputs(20)
    mapped = torch.vmap(CASES["plain"])(*(x[:, None] for x in data))
    expected = [CASES["plain"](*(x[i : i + 1] for x in data)) for i in range(2)]
    assert torch.equal(mapped, torch.stack(expected))


# ---- on a GPU


def gpu_inputs(seqlen: int, seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator("cuda").manual_seed(seed)
    shapes = ((2, 8, seqlen, 128), (2, 2, seqlen, 128), (2, 2, seqlen, 128))
    return [torch.randn(*shape, generator=g, device="cuda", dtype=torch.bfloat16) for shape in shapes]


GPU_CASES: dict[str, Callable[..., Any]] = {
    "attention": lambda q, k, v: fp8attn.attention(q, k, v, is_causal=True, enable_gqa=True, return_lse=True),
    "every feature": lambda q, k, v: fp8attn.attention(
        q, k, v, torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool, device="cuda").tril(3), enable_gqa=True,
        window=(300, 2), softcap=20.0, sinks=torch.arange(8.0, device="cuda"), recipe=ROUND_TRIP, return_lse=True,
    ),
    "quantize, then attention": lambda q, k, v: fp8attn.attention_quantized(
        fp8attn.quantize(q, k, v, is_causal=True), is_causal=True, return_lse=True
    ),
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CASES)
def test_a_cuda_graph_replays_on_new_inputs(name: str) -> None:
    function, static = GPU_CASES[name], gpu_inputs(700)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles the kernels and fills the caches
        for _ in range(3):
            function(*static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = function(*static)
    for seed in (1, 2):
        new = gpu_inputs(700, seed)
        for x, y in zip(static, new, strict=True):
            x.copy_(y)
        graph.replay()
        assert same(captured, function(*new))


@pytest.mark.gpu
def test_a_cuda_graph_of_attention_on_a_quantized_value() -> None:
    first, second = (fp8attn.quantize(*gpu_inputs(700, seed)) for seed in (0, 1))
    for _ in range(3):
        fp8attn.attention_quantized(first, is_causal=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fp8attn.attention_quantized(first, is_causal=True, return_lse=True)
    for name in ("q", "k", "v"):
        a, b = getattr(first, name), getattr(second, name)
        a.codes.view(torch.uint8).copy_(b.codes.view(torch.uint8))
        a.scale.copy_(b.scale)
    if first.logit_shift is not None and second.logit_shift is not None:
        first.logit_shift.copy_(second.logit_shift)
    graph.replay()
    assert same(captured, fp8attn.attention_quantized(second, is_causal=True, return_lse=True))


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CASES)
def test_nothing_waits_for_the_gpu(name: str) -> None:
    data = gpu_inputs(700)
    expected = GPU_CASES[name](*data)  # compiles the kernels and fills the caches, for which it may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = GPU_CASES[name](*data)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert same(again, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CASES)
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiles_whole_on_a_gpu(name: str, mode: str) -> None:
    function = GPU_CASES[name]
    compiled = torch.compile(function, fullgraph=True, mode=mode, dynamic=mode == "default")
    for seqlen in (256, 700, 1024):
        data = gpu_inputs(seqlen)
        for _ in range(3):  # reduce-overhead captures a graph at the second call
            torch.compiler.cudagraph_mark_step_begin()
            assert same(compiled(*data), function(*data)), seqlen


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CASES)
def test_ops_are_what_they_say_on_a_gpu(name: str) -> None:
    for op, args in recorded(GPU_CASES[name], *gpu_inputs(300)):
        check_op(op, args)
