"""What the kernels' callers ask of a device and of memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

import torch
import triton

from fp8attn.kernels.portable.numerics import INTERPRETED

__all__ = ["architecture", "aside", "made_apart", "multiprocessors", "row_alignment", "vectorizable"]

T = TypeVar("T")

_WORTH_A_STREAM = 2**21  # elements: a few microseconds of reading, as much as two events cost


def architecture() -> int:
    """90 for sm_90; 0 in the interpreter."""
    return 0 if INTERPRETED.value else triton.runtime.driver.active.get_current_target().arch


@lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    """How many the device has. On a CPU, the interpreter's programs run one after another: few, with several tiles."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@lru_cache(maxsize=64)
def _side_stream(current: torch.cuda.Stream) -> torch.cuda.Stream:
    """One for each of the callers' streams: a graph that one of them captures captures nothing of another's."""
    return torch.cuda.Stream(current.device)


@contextlib.contextmanager
def aside(x: torch.Tensor) -> Iterator[torch.cuda.Stream | None]:
    """A stream for work on x beside the current one, which waits for it in the end; None where x is too small for that.

    The stream begins where the current one is now. What it writes for others must be allocated on the current stream,
    before more work goes there: memory is free for whatever comes later on that stream, not for what runs beside it.
    """
    if not x.is_cuda or x.numel() < _WORTH_A_STREAM:
        yield None
        return
    current = torch.cuda.current_stream(x.device)
    stream = _side_stream(current)
    stream.wait_stream(current)
    try:
        yield stream
    finally:
        current.wait_stream(stream)


def row_alignment(head_dim: int) -> int:
    """Elements that the rows of a contiguous tensor are aligned to: 16 at most, a power of two."""
    return math.gcd(head_dim, 16)


def vectorizable(x: torch.Tensor) -> torch.Tensor:
    """``x``, or a copy whose rows (the last axis) lie at aligned addresses, with their elements side by side."""
    *outer, inner = (0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True))
    aligned = x.data_ptr() % 16 == 0 and not any(stride % row_alignment(x.shape[-1]) for stride in outer)
    if aligned and (inner == 1 or x.shape[-1] == 1):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def made_apart(make: Callable[[], T]) -> T:
    """What ``make`` returns: tensors to be kept longer than the call that needs them first.

    It runs in a thread of its own, which none of the caller's contexts reaches: a tensor made under inference_mode
    could never take part in autograd, one made under FakeTensorMode would be a fake ever after, and one made while
    torch.compile records a CUDA graph would lie in the graph's memory. Copies to a device are complete on return.
    """
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(torch.no_grad()(make)).result()
