"""What every operator promises, as functions of an operator and its row in tests/operators.py.

Each raises where the promise is broken. They hold on the CPU and on a GPU; those of graphs and streams on a GPU alone.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._pytree import tree_map

from tests.operators import Case, Draw, on_device
from tests.waiting import no_waiting

ROWS = 7
MARK = 0xAB
GUARD = 512  # bytes in front of what is written, and behind it
NOT_FINITE = (float("nan"), float("inf"))
REPEATS = {"cpu": 3, "cuda": 20}
SAME_DISPATCH = ("test_autograd_registration", "test_faketensor")


class Call:
    """An operator with operands of its row."""

    def __init__(self, op, case: Case, device: str, *, rows: int = ROWS, seed: int = 0, large: bool = False):
        self.op, self.case, self.device = op, case, device
        self.schema = op._schema.arguments
        self.names = [argument.name for argument in self.schema]
        with torch.no_grad():
            self.arguments = [on_device(device, value) for value in case.make(Draw(rows, seed, large))]

    @property
    def written(self) -> list[int]:
        """Places of the tensors that the schema marks as written."""
        return [i for i, _, _ in self.tensors if (info := self.schema[i].alias_info) and info.is_write]

    @property
    def tensors(self) -> list[tuple[int, str, Tensor]]:
        some = enumerate(zip(self.names, self.arguments, strict=False))
        return [(i, name, value) for i, (name, value) in some if isinstance(value, Tensor)]

    def name(self, i: int) -> str:
        """A pattern of what messages call the argument; those of a pair (data, scale) by the pair's name."""
        name = self.names[i]
        own = rf"{name}(\.data)?|" + re.sub("_scale$", ".scale", name)
        return self.case.names.get(name, own)

    def copied(self) -> list[Any]:
        return [on_device(self.device, value) for value in self.arguments]

    def run(self, arguments: list[Any] | None = None) -> list[Tensor]:
        """The results, and behind them what has been written, without what is uninitialized."""
        arguments = self.copied() if arguments is None else arguments
        return self.defined(arguments, listed(self.op(*arguments)))

    def everything(self, arguments: list[Any], results: list[Tensor]) -> list[Tensor]:
        return [*results, *(arguments[i] for i in self.written)]

    def defined(self, arguments: list[Any], results: list[Tensor]) -> list[Tensor]:
        named = SimpleNamespace(**dict(zip(self.names, arguments, strict=False)))
        return self.case.defined(named, self.everything(arguments, results))


def listed(results: Any) -> list[Tensor]:
    if results is None:
        return []
    return [results] if isinstance(results, Tensor) else list(results)


def bits(value: Tensor) -> Tensor:
    values = value.clone(memory_format=torch.contiguous_format)  # of one element too, whose strides may be any
    return values.view(-1).view(torch.uint8) if value.numel() else value.new_empty(0, dtype=torch.uint8)


def assert_same(got: list[Tensor], expected: list[Tensor]) -> None:
    """Equal bits, but for those of NaN."""
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        if one.is_floating_point() and one.itemsize > 1:
            assert torch.equal(one.isnan(), other.isnan())
            one, other = (value.masked_fill(value.isnan(), 0) for value in (one, other))
        assert torch.equal(bits(one), bits(other))


def layout(value: Tensor) -> tuple:
    """Strides of dimensions of size 1, or of nothing, mean nothing."""
    strides = [stride for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1]
    return value.shape, strides if value.numel() else [], value.dtype


@contextmanager
def memory_of_nan() -> Iterator[None]:
    """What torch.empty returns is full of NaN, or of the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(1).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def touches_what_the_schema_says(op, case: Case, device: str) -> None:
    """Operands that it does not mark stay as they are, and results have memory of their own."""
    call = Call(op, case, device)
    arguments = call.copied()
    results = listed(op(*arguments))
    memory = [value.untyped_storage().data_ptr() for value in results if value.numel()]
    assert len(set(memory)) == len(memory)
    for i, name, before in call.tensors:
        assert arguments[i].untyped_storage().data_ptr() not in memory, name
        if i not in call.written:
            assert torch.equal(bits(arguments[i]), bits(before)), name
    assert not any(value.requires_grad for value in results)


def opcheck(op, case: Case, device: str) -> None:
    """torch.library's own checks, which know the schema, autograd's registration and fake tensors."""
    torch.library.opcheck(op, tuple(Call(op, case, device).copied()), test_utils=SAME_DISPATCH)


def fakes_have_the_layout_of_results(op, case: Case, device: str) -> None:
    """Without data there are results of the same shape, strides and dtype."""
    for rows in (ROWS, 1, 0):
        call = Call(op, case, device, rows=rows)
        real = listed(op(*call.copied()))
        fake = listed(op(*(value.to("meta") if isinstance(value, Tensor) else value for value in call.arguments)))
        assert [layout(value) for value in real] == [layout(value) for value in fake], rows
        assert all(value.is_meta for value in fake)


class _Module(nn.Module):
    """An operator of tensors; what else it takes is part of the program."""

    def __init__(self, call: Call):
        super().__init__()
        self.op, self.others = call.op, [(isinstance(v, Tensor), v) for v in call.arguments]

    def forward(self, *tensors):
        tensors = iter(tensors)
        return self.op(*(next(tensors) if tensor else value for tensor, value in self.others))


def compiles_into_one_graph(op, case: Case, device: str) -> None:
    """For any number of rows, unless this is an argument too."""
    torch._dynamo.reset()
    calls = [Call(op, case, device, rows=rows) for rows in (ROWS, ROWS + 2)]
    backend = CompileCounterWithBackend("aot_eager" if calls[0].written else "eager")  # the first makes them functional
    compiled = torch.compile(lambda *arguments: op(*arguments), backend=backend, fullgraph=True)
    for call in calls:
        arguments, alike = call.copied(), True
        for value, *both in zip(arguments, *(call.arguments for call in calls), strict=True):
            if isinstance(value, Tensor):
                for dim, sizes in enumerate(zip(*(one.shape for one in both), strict=True)):
                    if sizes[0] != sizes[1]:
                        torch._dynamo.maybe_mark_dynamic(value, dim)
            else:
                alike &= both[0] == both[1]
        assert_same(call.defined(arguments, listed(compiled(*arguments))), call.run())
    assert backend.frame_count <= (1 if alike else 2)


def exports(op, case: Case, device: str) -> None:
    call = Call(op, case, device)
    program = torch.export.export(_Module(call), tuple(value for _, _, value in call.tensors), strict=False)
    other = Call(op, case, device, seed=1)
    arguments = other.copied()
    results = program.module()(*(arguments[i] for i, _, _ in other.tensors))
    assert_same(other.defined(arguments, listed(results)), other.run())


def writes_its_arguments_only(op, case: Case, device: str) -> None:
    """Nothing in front of an argument that is written, behind it, and between its rows, where these may be apart."""
    call = Call(op, case, device)
    expected = call.run()
    for i in call.written:
        value = call.arguments[i]
        for gap in (0, 64 // value.itemsize)[: value.dim()]:
            size = value[..., :1].numel() * (value.shape[-1] + gap)
            memory = torch.full((size * value.itemsize + 2 * GUARD,), MARK, dtype=torch.uint8, device=device)
            wide = memory[GUARD:].view(value.dtype)[:size]
            arguments = call.copied()
            arguments[i] = wide.view(*value.shape[:-1], -1)[..., : value.shape[-1]].copy_(value)
            try:
                assert_same(call.run(arguments), expected)
            except ValueError as error:
                assert gap and re.match(f"({call.name(i)}): expected", str(error)), error
            arguments[i].view(torch.uint8).fill_(MARK)
            assert (memory == MARK).all()


def _other_layouts(value: Tensor) -> Iterator[Tensor]:
    """Other layouts of the values: not aligned, with gaps in a row, between rows (aligned or not), and transposed."""
    memory = value.new_empty(value.numel() + 1)
    yield memory[1:].view(value.shape).copy_(value)
    if value.dim() and value.shape[-1] > 1:
        yield value.new_empty(*value.shape, 2)[..., 1].copy_(value)
    if value.dim() > 1:
        yield value.new_empty(*value.shape[:-1], value.shape[-1] + 5)[..., 3:-2].copy_(value)
        pitch = (value.shape[-1] * value.itemsize // 64 + 2) * 64 // value.itemsize
        yield value.new_empty(*value.shape[:-1], pitch)[..., : value.shape[-1]].copy_(value)
        yield value.new_empty(*value.shape[:-2], value.shape[-1], value.shape[-2]).mT.copy_(value)


def layouts_do_not_matter(op, case: Case, device: str) -> None:
    """Operands in any layout give the bits of contiguous ones, or are refused by name."""
    call = Call(op, case, device)
    expected, refused = call.run(), set()
    for i, name, value in call.tensors:
        for other in _other_layouts(value):
            arguments = call.copied()
            arguments[i] = other
            try:
                results = call.run(arguments)
            except ValueError as error:
                assert name in case.fixed and re.match(f"({call.name(i)}): expected", str(error)), error
                refused.add(name)
                assert torch.equal(bits(other), bits(value)), name
            else:
                for j in case.sums if device == "cpu" else ():
                    torch.testing.assert_close(results[j], expected[j], rtol=1e-5, atol=1e-5)
                    results[j] = expected[j]
                assert_same(results, expected)
    assert refused == set(case.fixed)


def nothing_to_do(op, case: Case, device: str) -> None:
    """No rows: results without elements, or zeros, or what was there."""
    call = Call(op, case, device, rows=0)
    with memory_of_nan():
        results = listed(op(*call.copied()))
    for value in call.defined(call.arguments, results)[: len(results)]:
        assert not value.float().any()
        assert value.device.type == device


def bad_values_stay_where_they_belong(op, case: Case, device: str, rows: int = ROWS, large: bool = False) -> None:
    """NaN and infinity show in the results that depend on them, and in no others."""
    assert case.bad
    call = Call(op, case, device, rows=rows, large=large)
    clean = call.everything(arguments := call.copied(), listed(op(*arguments)))
    for name, (index, touched) in case.bad.items():
        i = call.names.index(name)
        for value in NOT_FINITE:
            arguments = call.copied()
            if arguments[i].itemsize == 1:
                arguments[i].view(torch.uint8)[index] = 0x7F  # the NaN of E4M3, which has no infinity
            else:
                arguments[i][index] = value
            named = SimpleNamespace(**dict(zip(call.names, arguments, strict=False)))
            results = call.everything(arguments, listed(op(*arguments)))
            places, shows = touched(named), False
            assert len(places) == len(results)
            for got, before, place in zip(results, clean, places, strict=True):
                if place is not None:
                    shows |= not got.float()[place].isfinite().all()
                    _integers(got)[place] = _integers(before)[place]
            assert shows or value > 0, name  # a limit or a sigmoid may take infinity
            assert_same(case.defined(named, results), case.defined(named, list(clean)))


def _integers(value: Tensor) -> Tensor:
    """PyTorch indexes no float8."""
    return value.view(torch.uint8) if value.itemsize == 1 else value


def repeats_have_equal_bits(op, case: Case, device: str, rows: int = ROWS, large: bool = False) -> None:
    """Whatever was in the memory that results get."""
    call = Call(op, case, device, rows=rows, large=large)
    with memory_of_nan():
        first = call.run()
        for _ in range(REPEATS[device]):
            assert_same(call.run(), first)
    assert_same(call.run(), first)


def _refused(call: Call, i: int, wrong: Tensor, error: type[Exception], expected: str) -> None:
    arguments = call.copied()
    arguments[i] = wrong
    with pytest.raises(error) as raised:
        call.op(*arguments)
    message, name = str(raised.value), call.name(i)
    assert re.match(rf"({name}): .*{expected}", message) or re.search(rf" like ({name}), got ", message), message
    for j in call.written:
        if j != i:
            assert torch.equal(bits(arguments[j]), bits(call.arguments[j]))


def wrong_operands_are_refused(op, case: Case, device: str) -> None:
    """A dtype or a device that does not fit, by the name of the argument, before anything is written."""
    call = Call(op, case, device)
    other_device = "cpu" if device == "cuda" else "meta"
    for i, name, value in call.tensors:
        if name not in case.unchecked:
            wrong = torch.zeros(value.shape, dtype=torch.complex64, device=device)
            _refused(call, i, wrong, TypeError, "expected .*, got torch.complex64$")
            if i:
                message = rf"expected on {device}\S* like .*, got {other_device}$"
                _refused(call, i, value.to(other_device), ValueError, message)


def wrong_ranks_are_refused(op, case: Case, device: str) -> None:
    call = Call(op, case, device)
    for i, _, value in call.tensors:
        _refused(call, i, value.new_zeros(()), ValueError, "expected .*got ")


def graph_replays_with_other_operands(op, case: Case, rows: int, large: bool) -> None:
    """A captured call gives, of operands that have changed since, the bits of a call; it does not wait for the GPU."""
    calls = [Call(op, case, "cuda", rows=rows, seed=seed, large=large) for seed in range(4)]
    arguments = calls[0].copied()
    op(*arguments)  # compiles, which a capture must not
    with no_waiting():
        op(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = listed(op(*arguments))
    for call in calls:
        tree_map(_overwrite, arguments, call.arguments)
        for value in results:
            _integers(value).fill_(MARK)
        graph.replay()
        assert_same(call.defined(arguments, results), call.run())


def streams_do_not_meet(op, case: Case, rows: int, large: bool) -> None:
    """Calls of two streams at a time, each behind what writes its operands, give the bits of one alone."""
    calls = [Call(op, case, "cuda", rows=rows, seed=seed, large=large) for seed in range(2)]
    expected = [call.run() for call in calls]
    streams, found = [torch.cuda.Stream() for _ in calls], []
    torch.cuda.synchronize()
    for repeat in range(5):
        for stream, call, wanted in zip(streams, calls, expected, strict=True):
            with torch.cuda.stream(stream):
                if not repeat:
                    torch.cuda._sleep(10_000_000)  # milliseconds, in which nothing is in the stream's memory yet
                arguments = call.copied()
                found.append((call, arguments, listed(op(*arguments)), wanted))
    torch.cuda.synchronize()
    for call, arguments, results, wanted in found:
        assert_same(call.defined(arguments, results), wanted)


def _overwrite(old: Any, new: Any) -> None:
    if isinstance(old, Tensor):
        old.copy_(new)
    else:
        assert old == new


CONTRACTS = {
    "what the schema says": touches_what_the_schema_says,
    "opcheck": opcheck,
    "fakes": fakes_have_the_layout_of_results,
    "compile": compiles_into_one_graph,
    "export": exports,
    "written memory": writes_its_arguments_only,
    "layouts": layouts_do_not_matter,
    "nothing to do": nothing_to_do,
    "bad values": bad_values_stay_where_they_belong,
    "repeats": repeats_have_equal_bits,
    "wrong operands": wrong_operands_are_refused,
    "ranks are refused": wrong_ranks_are_refused,
}
