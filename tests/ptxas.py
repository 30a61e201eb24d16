"""What ptxas says of a compiled kernel: registers, spills, stack and shared memory."""

import re
from dataclasses import dataclass

from fp8moe.runtime import jit


@dataclass(frozen=True)
class CompileReport:
    """Sizes in bytes; registers, spills and stack are per thread.

    `spill_stores` and `spill_loads` include those of functions that were not inlined. `log` is the compiler's log.
    """

    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    static_smem: int
    log: str


_PROPERTIES = re.compile(
    r"Function properties for (\S+)\s*(?:ptxas\s*\.)?\s*"
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
_USED = re.compile(r"Used (\d+) registers(?:.*?, (\d+) bytes smem)?")


def compile_report(spec: jit.KernelSpec) -> CompileReport:
    """Compile a kernel, past the cache, and read the report. Errors are those of `jit.compile_spec`."""
    return read_report(spec.name, jit.compile_spec(spec).log)


def without_spills(spec: jit.KernelSpec) -> CompileReport:
    report = compile_report(spec)
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0), spec.prelude
    return report


def read_report(name: str, log: str) -> CompileReport:
    """Read the text of `ptxas -v`: a section for each kernel, and one for each function that was not inlined."""
    section = log[log.index(f"Compiling entry function '{name}'") :]
    used = _USED.search(section)
    # Functions that were not inlined may be called from any kernel of the source, so they count for each.
    entries = jit.kernel_names(log)
    mine = [found for found in _PROPERTIES.findall(log) if found[0] == name or found[0] not in entries]
    stacks = [int(stack) for function, stack, _, _ in mine if function == name]
    if used is None or not stacks:
        raise RuntimeError(f"could not read the ptxas report of {name!r}:\n{log}")
    return CompileReport(
        registers=int(used[1]),
        spill_stores=sum(int(stores) for _, _, stores, _ in mine),
        spill_loads=sum(int(loads) for _, _, _, loads in mine),
        stack=stacks[0],
        static_smem=int(used[2] or 0),
        log=log,
    )
