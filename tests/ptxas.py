"""What ptxas says of a compiled kernel: registers, spills, stack and shared memory.

Its reports are kept in validation/ptxas.json by the hash of all that decides them: compiler, options, tokens of the
source. A kernel that is not there is compiled, and so is every sixteenth that is. As a plugin of pytest this module
compiles all kernels and writes the file anew (`make variants`).
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from fp8moe.runtime import compilers, config, jit
from tools.digest import options, source_hash

RECORD = Path(__file__).parents[1] / "validation" / "ptxas.json"

COMPLAINTS = re.compile(r"C75\d\d|serialized|setmaxnreg")
"""C7510 and C7514: wgmma that ptxas serialised. setmaxnreg: a register count that it did not accept."""


@dataclass(frozen=True)
class CompileReport:
    """Sizes in bytes; registers, spills and stack are per thread.

    `spill_stores` and `spill_loads` include those of functions that were not inlined. `complaints` are the matches of
    COMPLAINTS in the compiler's log.
    """

    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    static_smem: int
    complaints: tuple[str, ...]


_PROPERTIES = re.compile(
    r"Function properties for (\S+)\s*(?:ptxas\s*\.)?\s*"
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
_USED = re.compile(r"Used (\d+) registers(?:.*?, (\d+) bytes smem)?")


recorded: dict[str, list] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
made: dict[str, list] | None = None
"""The reports of this run, where they are recorded."""


def compile_report(spec: jit.KernelSpec) -> CompileReport:
    """Return the report of a kernel. Errors are those of `jit.compile_spec`."""
    parts = (compilers.identity(config.settings.compiler), *options(), spec.name, source_hash(spec))
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    known = recorded.get(key)
    if known is not None and made is None and not key.startswith("0"):
        return CompileReport(*known[:-1], complaints=tuple(known[-1]))
    report = read_report(spec.name, jit.compile_spec(spec).log)
    values = [*list(vars(report).values())[:-1], list(report.complaints)]
    if made is not None:
        made[key] = values
    elif known is not None:
        assert values == known, f"{RECORD.name} has another report of {spec.name}: make variants"
    return report


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
        complaints=tuple(COMPLAINTS.findall(log)),
    )


def pytest_configure() -> None:
    global made
    made = {}


def pytest_testnodedown(node, error) -> None:
    """Take what a process of pytest-xdist has made."""
    made.update(node.workeroutput["ptxas"])


def pytest_sessionfinish(session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["ptxas"] = made
    else:
        lines = (f"{json.dumps(key)}: {json.dumps(made[key])}" for key in sorted(made))
        RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
