"""What tests check on a GPU in one way: graphs, the memory of a call, what a kernel writes, the same bits again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fp8moe.quant.formats import FP8Tensor, align, ceil_div
from tests.contracts import bits

MARK = 0xAB
GUARD = 256  # bytes behind what is written


def captured(run: Callable[[], Any], warmups: int = 1) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of `run`, and its results.

    It runs before, as a capture must not compile: on another stream, so that autograd remembers none for the leaves.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmups):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results


def memory_of(call: Callable[[], Any], warm: bool = True) -> tuple[Any, int, int]:
    """The result of a call, by default of a second one, the bytes that it has at most, and those that it keeps."""
    if warm:
        call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = call()
    return out, torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before


def takes_its_result_alone(call: Callable[[], Tensor]) -> None:
    """A second call has no memory beside the result's, and leaves none behind."""
    out, peak, kept = memory_of(call)
    before = torch.cuda.memory_allocated() - kept
    assert peak <= out.nbytes + 512
    del out
    assert torch.cuda.memory_allocated() == before


@contextmanager
def marked(*sizes: int) -> Iterator[list[Tensor]]:
    """Memory of so many bytes each, full of marks; nothing behind it may be written."""
    memory = [torch.full((size + GUARD,), MARK, dtype=torch.uint8, device="cuda") for size in sizes]
    yield [part[:size] for part, size in zip(memory, sizes, strict=True)]
    assert all((part[size:] == MARK).all() for part, size in zip(memory, sizes, strict=True))


def sizes_of_rows(rows: int, columns: int) -> tuple[int, int]:
    """Bytes of the data and of the scales of quantized rows."""
    return rows * columns, 4 * ceil_div(columns, 128) * align(rows, 4)


def quantized_rows(data: Tensor, scale: Tensor, rows: int, columns: int) -> FP8Tensor:
    """What these bytes are; between the columns of the scales the marks are still there."""
    pitch = align(rows, 4)
    assert (scale.view(-1, 4 * pitch)[:, 4 * rows :] == MARK).all()
    by_column = scale.view(torch.float32).view(-1, pitch)[:, :rows]
    return FP8Tensor(data.view(torch.float8_e4m3fn).view(rows, columns), by_column.t())


def same_bits(one: Any, other: Any) -> bool:
    """Of all tensors."""
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
    return all(a is b if a is None or b is None else torch.equal(bits(a), bits(b)) for a, b in pairs)


def same_every_time(run: Callable[[], Any]) -> Any:
    """What 21 calls return with the same bits."""
    first = run()
    assert all(same_bits(run(), first) for _ in range(20))
    return first
