"""The package's structure: imports go down and in no circle, files are short, CUDA functions take few parameters.

Each check is a function of the package's directory that returns what is wrong. It is tried on a tree with one fault.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "fp8moe"
ORDER = (  # from the bottom: nothing imports what is above it; __init__ is fp8moe/__init__.py
    *("runtime", "quant", "kernels", "layers", "__init__", "distributed", "checkpoints", "integrations"),
    *("commands", "cli"),
)
CUDA_FOLDERS = ("common", "ops", "sm90")
PROGRAMS = ("benchmarks", "tools", "examples")  # folders beside the package that import it
MAX_LINES = 700
MAX_PARAMETERS = 8


def upward_imports(package: Path) -> list[str]:
    """Imports of a higher folder, also those inside functions, and modules in a folder that has no place in ORDER."""
    ranks = {name: rank for rank, name in enumerate(ORDER)}
    graph = import_graph(package)
    found = [f"{module}: not in a folder of ORDER" for module in graph if module.split(".")[1] not in ranks]
    if found:
        return found
    rank = {module: ranks[module.split(".")[1]] for module in graph}
    return [
        f"{module} imports {other}"
        for module, others in graph.items()
        for other in sorted(others)
        if rank[other] > rank[module]
    ]


def circular_imports(package: Path) -> list[str]:
    """One circle of files, if there is any, of the package or of PROGRAMS beside it."""
    try:
        TopologicalSorter(import_graph(package, *(package.parent / name for name in PROGRAMS))).prepare()
    except CycleError as error:
        return [" is imported by ".join(error.args[1])]
    return []


def long_files(package: Path) -> list[str]:
    counts = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources(package)}
    return [f"{path.relative_to(package)}: {count} lines" for path, count in counts.items() if count > MAX_LINES]


def long_parameter_lists(package: Path) -> list[str]:
    return [
        f"{path.relative_to(package)}: {name} takes {count} parameters"
        for path in sources(package)
        if path.suffix in (".cu", ".cuh")
        for name, count in cuda_functions(path.read_text(encoding="utf-8"))
        if count > MAX_PARAMETERS
    ]


def strangers_among_the_kernels(package: Path) -> list[str]:
    paths = (path.relative_to(package / "cuda") for path in (package / "cuda").rglob("*") if path.is_file())
    known = {(folder, suffix) for folder in CUDA_FOLDERS for suffix in (".cu", ".cuh")}
    return [str(path) for path in paths if (str(path.parent), path.suffix) not in known]


def names_of_several_kernels(package: Path) -> list[str]:
    """Files of cuda/ that bear the name of another: they are found by their names."""
    names = Counter(path.name for path in (package / "cuda").rglob("*.cu*"))
    return [name for name, count in names.items() if count > 1]


CHECKS = (
    *(upward_imports, circular_imports, long_files, long_parameter_lists),
    *(strangers_among_the_kernels, names_of_several_kernels),
)


def sources(package: Path) -> list[Path]:
    return sorted(path for path in package.rglob("*") if path.suffix in (".py", ".cu", ".cuh"))


def import_graph(*packages: Path) -> dict[str, set[str]]:
    """The modules of packages, and which of them each one imports. That of a folder is called folder.__init__."""
    paths = {
        ".".join((package.name, *path.relative_to(package).with_suffix("").parts)): path
        for package in packages
        for path in sources(package)
        if path.suffix == ".py"
    }
    graph = {}
    for module, path in paths.items():
        graph[module] = set()
        for name in imported_names(ast.parse(path.read_text(encoding="utf-8")), module):
            graph[module] |= loaded_by(name, module, paths.keys())
    return graph


def imported_names(tree: ast.Module, module: str) -> Iterator[str]:
    """Qualified names that a module imports: modules, and what it takes from modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            base += node.module.split(".") if node.module else []
            yield from (".".join((*base, alias.name)) for alias in node.names)


def loaded_by(name: str, importer: str, modules: set[str]) -> set[str]:
    """The modules that importing a name loads: the innermost that there is, and the folders around it.

    Folders that are around the importer too do not count, unless the name is one that such a folder's __init__ defines.
    """
    parts = name.split(".")
    found = set()
    for length in range(len(parts), 0, -1):
        candidates = {".".join(parts[:length]), ".".join((*parts[:length], "__init__"))}
        around = importer.startswith(".".join((*parts[:length], "")))
        if not (found and around):
            found |= candidates & modules
    return found


def cuda_functions(text: str) -> Iterator[tuple[str, int]]:
    """Name and number of parameters of each function, method, constructor and lambda that is defined in CUDA source."""
    text = re.sub(
        r"//[^\n]*|/\*.*?\*/|\"(\\.|[^\"\\\n])*\"|^[ \t]*#(\\\n|[^\n])*", " ", text, flags=re.DOTALL | re.MULTILINE
    )
    text = text.replace("operator()", "call_operator")
    for match in re.finditer(r"(\w+|\])\s*\(", text):
        name, start = match.group(1), match.end()
        end = closing(text, start)
        body = re.match(r"\s*(const\b|mutable\b|noexcept\b|->[^;{}()]+|:(?!:)[^;?]*?|\s)*\{", text[end + 1 :])
        if body and name not in ("if", "constexpr", "for", "while", "switch", "catch"):
            yield "a lambda" if name == "]" else name, count_parameters(text[start:end])


def closing(text: str, start: int) -> int:
    """Where the parenthesis is closed that was opened before `start`."""
    depth = 1
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return match.start()
    raise ValueError(f"a parenthesis is never closed: {text[start : start + 40]!r}")


def count_parameters(text: str) -> int:
    depth, commas = 0, 0
    for character in text:
        depth += (character in "([{<") - (character in ")]}>")
        commas += character == "," and depth == 0
    return commas + 1 if text.strip() else 0


@pytest.mark.parametrize("check", CHECKS)
def test_the_package_is_in_order(check):
    faults = check(PACKAGE)
    assert not faults, "\n".join(faults)


CLEAN = {
    "__init__.py": "from fp8moe.layers import Linear\n",
    "runtime/__init__.py": "",
    "runtime/launch.py": "",
    "kernels/__init__.py": "",
    "kernels/gemm/__init__.py": "from fp8moe.kernels.gemm.dense import gemm\n",
    "kernels/gemm/dense.py": "import torch\nfrom fp8moe.kernels.gemm import plan\nfrom fp8moe.runtime import launch\n",
    "kernels/gemm/plan.py": "import fp8moe.runtime.launch as launch\n",
    "layers/__init__.py": "from fp8moe.layers.linear import Linear\n",
    "layers/linear.py": "from ..kernels.gemm import gemm\nfrom . import experts\nclass Linear: ...\n",
    "layers/experts.py": "def run():\n    from fp8moe.kernels.gemm.dense import gemm\n",
    "../tools/launches.py": "from benchmarks import calls\n",
    "../benchmarks/calls.py": "from fp8moe import Linear\n",
    "checkpoints/__init__.py": "",
    "checkpoints/load.py": "from fp8moe import Linear\n",
    "cli.py": "from fp8moe.checkpoints import load\n" + "\n" * (MAX_LINES - 1),
    "cuda/sm90/gemm.cu": """// f(int a, int b, int c, int d, int e, int f, int g, int h, int i) {
        #define NINE(a, b, c, d, e, f, g, h, i) \\
          f(a, b, c, d, e, f, g, h, i) { }
        constexpr int TWO = 2; /* g(int a, int b, int c, int d, int e, int f, int g, int h, int i) { */
        template <int A, int B>
        __device__ void eight(const Pair<int, int>& a, int, float (&c)[2], int d, int e = max(1, 2), int, int, int) {
          if (nine(a, b, c, d, e, f, g, h, d)) { asm volatile("{ f(a, b, c, d, e, f, g, h, i) {" ::"r"(a), "r"(b)); }
          for (int i = sum(a, b, c, d, e, f, g, h, d); i < 2; ++i) { while (nine(a, b, c, d, e, f, g, h, d)) { } }
          if constexpr (A == B) { b = c ? nine(a, b, c, d, e, f, g, h, d) : 0; }
        }
        extern "C" __global__ void __launch_bounds__(THREADS, 1) kernel(const __grid_constant__ Arguments arguments) { }
        """,
}


def write(root: Path, files: dict[str, str]) -> Path:
    package = root / "fp8moe"
    for name, text in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    return package


@pytest.mark.parametrize("check", CHECKS)
def test_a_clean_tree_passes(tmp_path, check):
    assert check(write(tmp_path, CLEAN)) == []


NINE = "int a, int b, int c, int d, int e, int f, int g, int h, Pair<int, int> i"


@pytest.mark.parametrize(
    ("check", "name", "text"),
    [
        (upward_imports, "runtime/launch.py", "import fp8moe.kernels.gemm.plan\n"),
        (upward_imports, "runtime/launch.py", "from fp8moe.kernels.gemm import plan\n"),
        (upward_imports, "runtime/launch.py", "from ..kernels import gemm\n"),
        (upward_imports, "runtime/launch.py", "from fp8moe import cli\n"),
        (upward_imports, "runtime/launch.py", "from fp8moe import *\n"),
        (upward_imports, "kernels/gemm/plan.py", "from fp8moe import Linear\n"),
        (upward_imports, "kernels/gemm/plan.py", "def run():\n    from fp8moe.layers.linear import Linear\n"),
        (upward_imports, "layers/experts.py", "if TYPE_CHECKING:\n    from fp8moe.checkpoints.load import Linear\n"),
        (upward_imports, "tools/validate.py", ""),
        (circular_imports, "kernels/gemm/plan.py", "from fp8moe.kernels.gemm.dense import gemm\n"),
        (circular_imports, "kernels/gemm/plan.py", "def run():\n    from . import dense\n"),
        (circular_imports, "kernels/gemm/plan.py", "from fp8moe.kernels.gemm import gemm\n"),
        (circular_imports, "layers/experts.py", "from fp8moe import Linear\n"),
        (circular_imports, "layers/experts.py", "import fp8moe.layers.experts\n"),
        (circular_imports, "kernels/gemm/plan.py", "from fp8moe.kernels.rows import permute\n"),
        (circular_imports, "../benchmarks/calls.py", "def run():\n    from tools.launches import record\n"),
        (circular_imports, "../benchmarks/calls.py", "from benchmarks import calls\n"),
        (long_files, "cli.py", "\n" * (MAX_LINES + 1)),
        (long_files, "cuda/sm90/gemm.cu", "\n" * (MAX_LINES + 1)),
        (long_parameter_lists, "cuda/sm90/ptx.cuh", f"__device__ inline int nine({NINE}) {{"),
        (long_parameter_lists, "cuda/sm90/ptx.cuh", f"struct Nine {{ __device__ int nine({NINE}) const {{"),
        (long_parameter_lists, "cuda/sm90/ptx.cuh", f"struct Nine {{ __device__ int operator()({NINE}) {{"),
        (long_parameter_lists, "cuda/sm90/ptx.cuh", f"struct Nine {{ __device__ Nine({NINE}) : a(a), b{{b}} {{"),
        (long_parameter_lists, "cuda/sm90/ptx.cuh", f"auto nine = [&]({NINE}) {{"),
        (long_parameter_lists, "cuda/sm90/ptx.cuh", f"auto nine = [=]({NINE}) mutable -> int {{"),
        (
            long_parameter_lists,
            "cuda/sm90/gemm.cu",
            f'extern "C" __global__ void __launch_bounds__(128) nine({NINE}) {{',
        ),
        (
            long_parameter_lists,
            "cuda/sm90/gemm.cu",
            "void nine(\n  int a,  // one, two\n  int, int, int,\n int, int, int, int, int)\n{",
        ),
        (strangers_among_the_kernels, "cuda/__init__.py", ""),
        (strangers_among_the_kernels, "cuda/sm90/gemm.h", ""),
        (strangers_among_the_kernels, "cuda/combine.cu", ""),
        (strangers_among_the_kernels, "cuda/ops/experts/combine.cu", ""),
        (names_of_several_kernels, "cuda/ops/gemm.cu", ""),
    ],
)
def test_one_fault_is_found(tmp_path, check, name, text):
    package = write(tmp_path, CLEAN | {"kernels/rows/__init__.py": "from fp8moe.kernels.gemm.dense import gemm"})
    assert check(package) == []
    write(tmp_path, {name: text})
    assert check(package)
