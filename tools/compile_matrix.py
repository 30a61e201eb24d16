"""`python -m tools.compile_matrix`: which public ops and layers work in PyTorch's graphs: docs/compile.md.

Tries each case of `tests.graph_cases` in every way that the table has a column for, on the CPU, or with --device on a
GPU. With names of cases it prints their rows and writes nothing.

A cell is "yes", followed by a colon and a reason if more than one graph is needed; or "no: " and the first line of the
error; or "-" if there is no backward in eager either. Results, arguments that are written to, and gradients must be
bitwise equal to those of the eager call, also for numbers of tokens other than the traced one.
"""

import argparse
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._pytree import tree_leaves

from fp8moe import FP8Tensor, PackedTensor
from tests.compilers import without_graph_caches
from tests.graph_cases import CASES, Case
from tools import matrices
from tools.matrices import Wrong

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "compile.md"
MARK = "<!-- python -m tools.compile_matrix writes what follows -->"
TRACED, OTHERS = 6, (37, 8, 150)
"""Number of tokens in the traced call; numbers of tokens in other calls that the same graph must serve."""


class Trial:
    """One case of `tests.graph_cases`; for each column of the table a method tries the case."""

    def __init__(self, case: Case, device: str, directory: Path):
        self.case, self.device, self.directory = case, device, directory

    def compile(self) -> str:
        with torch.no_grad():
            return self._compile(self._same)

    def backward(self) -> str:
        try:
            self._gradients(self._module(), TRACED)
        except (RuntimeError, Wrong):
            return "-"
        return self._compile(self._same_gradients)

    def export(self) -> str:
        program = io.BytesIO()
        torch.export.save(self._exported(), program)
        program.seek(0)
        self._check(torch.export.load(program).module(), self._same)
        return "yes"

    def AOTInductor(self) -> str:  # noqa: N802
        path = self.directory / "case.pt2"
        torch._inductor.aoti_compile_and_package(self._exported(), package_path=str(path))
        self._check(torch._inductor.aoti_load_package(str(path)), self._same)
        return "yes"

    def _compile(self, same: Callable) -> str:
        counter = CompileCounterWithBackend("inductor")
        torch._dynamo.reset()
        self._check(torch.compile(self._module(), fullgraph=True, dynamic=True, backend=counter), same)
        count = counter.frame_count
        return "yes" if count == 1 else f"yes: {count} graphs serve {', '.join(map(str, (TRACED, *OTHERS)))} tokens"

    def _exported(self) -> torch.export.ExportedProgram:
        sizes = torch.export.AdditionalInputs()
        for tokens in OTHERS:
            sizes.add(self._arguments(tokens))
        with torch.no_grad():
            return torch.export.export(self._module(), self._arguments(TRACED), dynamic_shapes=sizes)

    def _check(self, graph: Callable, same: Callable) -> None:
        for tokens in (TRACED, *OTHERS):
            same(graph, tokens)

    def _same(self, graph: Callable, tokens: int) -> None:
        arguments, expected = self._arguments(tokens), self._arguments(tokens)
        _check_equal((graph(*arguments), arguments), (self._module()(*expected), expected))

    def _same_gradients(self, graph: Callable, tokens: int) -> None:
        _check_equal(self._gradients(graph, tokens), self._gradients(self._module(), tokens))

    def _gradients(self, graph: Callable, tokens: int) -> list[Tensor | None]:
        arguments = self._arguments(tokens)
        unquantized = [value for value in arguments if not isinstance(value, FP8Tensor | PackedTensor)]
        inputs = [value for value in tree_leaves(unquantized) if value.dtype in (torch.bfloat16, torch.float32)]
        for value in inputs:
            value.requires_grad_()
        weights = list(graph.parameters())
        for weight in weights:
            weight.grad = None
        results = [value for value in tree_leaves(graph(*arguments)) if value.requires_grad]
        if not results:
            raise Wrong("its result requires no gradient")
        torch.autograd.backward(results, [torch.ones_like(value) for value in results])
        return [value.grad for value in (*inputs, *weights)]

    def _module(self) -> torch.nn.Module:
        return self.case.module(self.device)

    def _arguments(self, tokens: int) -> tuple:
        return self.case.arguments(tokens, self.device)


COLUMNS = ("compile", "backward", "export", "AOTInductor")


def rows(names: list[str], device: str = "cpu", columns: tuple[str, ...] = COLUMNS) -> Iterator[tuple[str, dict]]:
    """Yield (name, cells by column) for each case, as soon as its cells are done."""
    warnings.simplefilter("ignore")
    torch._logging.set_logs(all=logging.ERROR)
    for name in names:
        with tempfile.TemporaryDirectory() as directory, without_graph_caches():
            trial = Trial(CASES[name], device, Path(directory))
            yield name, {column: _cell(getattr(trial, column)) for column in columns}


def _cell(attempt: Callable[[], str]) -> str:
    try:
        return attempt()
    except Exception as error:
        return f"no: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _check_equal(values: Any, expected: Any) -> None:
    pairs = list(zip(tree_leaves(values), tree_leaves(expected), strict=True))
    for index, (value, wanted) in enumerate(pairs):
        if not isinstance(wanted, Tensor) and value == wanted:
            continue
        same = value.dtype == wanted.dtype and value.shape == wanted.shape
        # A few bytes of a quantized cache may differ: Inductor fuses the computation before quantization, without
        # rounding to bfloat16 in between.
        allowed = value.numel() // 1000 if value.dtype is torch.uint8 else 0
        if not same or (value.float() != wanted.float()).sum() > allowed:
            raise Wrong(f"tensor {index} of {len(pairs)} is not that of the eager call")


def page(table: matrices.Rows, version: str) -> str:
    """Return the part of the page below the mark, which this tool writes."""
    return "\n".join([f"PyTorch {version}.", "", *matrices.lines(table, COLUMNS)]) + "\n"


def read_page(text: str) -> matrices.Rows:
    """Parse a page's text; return its table."""
    return matrices.read(text, COLUMNS)


def kinds(row: dict[str, str]) -> dict[str, str]:
    """Return a row's cells without the reasons, whose wording differs between versions of PyTorch."""
    return {column: cell.partition(": ")[0] for column, cell in row.items()}


def main() -> None:
    """Print the rows of the named cases, or write the page."""
    parser = argparse.ArgumentParser(prog="python -m tools.compile_matrix", description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], help="print these rows; without any, all to the page")
    parser.add_argument("--device", default="cpu", help="cpu, the default, or cuda")
    options = parser.parse_args()
    table = matrices.collect(rows(options.cases or list(CASES), options.device))
    if not options.cases and options.device == "cpu":
        matrices.write(PAGE, MARK, page(table, torch.__version__.partition("+")[0]))


if __name__ == "__main__":
    main()
