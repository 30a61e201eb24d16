"""The package's structure: imports go down and in no circle, files are short, functions take few parameters, and what
launches a kernel or knows the GPU has one place.

Each check is a function of the package's directory that returns what is wrong. It is tried on a tree with one fault.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "fp8moe"
ORDER = (  # from the bottom: nothing imports what is above it; __init__ is fp8moe/__init__.py
    *("runtime", "quant", "kernels", "layers", "__init__", "distributed", "weights", "hf", "decode", "peft", "serving"),
    *("integrations", "commands", "cli", "__main__"),
)
CUDA_FOLDERS = ("common", "ops", "sm90")
PROGRAMS = ("benchmarks", "tools", "examples")  # folders beside the package that import it
LOWER_FOLDERS = ("runtime", "quant", "kernels")
MAX_LINES = 700
MAX_PARAMETERS = 8
MAX_MESSAGES_THAT_NAME_THE_GPU = 6  # files with such messages
GPU_WORDS = re.compile("sm_90|hopper|wgmma|setmaxnreg", re.IGNORECASE)
GPU_LIMITS = {227 * 1024: "shared memory of a block", 228 * 1024: "shared memory of an SM", 65536: "registers of an SM"}
NO_PLANS = ("families",)  # what kernels/gemm/warmup.py is to compile for
CHANGES = ("add", "append", "clear", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update")


def upward_imports(package: Path) -> list[str]:
    """Imports of a higher folder, also those inside functions, and modules in a folder that has no place in ORDER."""
    ranks = {name: rank for rank, name in enumerate(ORDER)}
    hands_out = f"{package.name}.__init__"  # names from everywhere, when they are asked for
    graph = import_graph(package)
    found = [f"{module}: not in a folder of ORDER" for module in graph if module.split(".")[1] not in ranks]
    if found:
        return found
    rank = {module: ranks[module.split(".")[1]] for module in graph}
    return [
        f"{module} imports {other}"
        for module, others in graph.items()
        for other in sorted(others)
        if rank[other] > rank[module] and module != hands_out
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


def long_parameter_lists_in_python(package: Path) -> list[str]:
    """Functions of runtime/ and kernels/. Public ones may take more, and so may those that make up an operator."""
    public = {name for path in package.rglob("__init__.py") for name in exported_names(parse(path))}
    return [
        f"{place(package, path, node)}: {name} takes {count} parameters"
        for path, tree in modules(package, "runtime", "kernels")
        for node, name, count in python_functions(tree)
        if count > MAX_PARAMETERS and name not in public | functions_of_operators(tree)
    ]


def arguments_by_position(package: Path) -> list[str]:
    """Functions that take ``*arguments`` and read single ones of them: these are to be parameters."""
    return [
        f"{place(package, path, node)}: *{name}"
        for path, tree in modules(package, *LOWER_FOLDERS)
        for function in functions(tree)
        if function.args.vararg
        for name in [function.args.vararg.arg]
        for node in ast.walk(function)
        if isinstance(node, ast.Subscript)
        and is_name(node.value, name)
        or isinstance(node, ast.Assign)
        and is_name(node.value, name)
        and isinstance(node.targets[0], ast.Tuple | ast.List)
    ]


def caches_of_plans(package: Path) -> list[str]:
    """Names of modules of quant/ and kernels/ whose value functions change: `planned` keeps what launches a kernel."""
    return [
        f"{place(package, path, node)}: {name}"
        for path, tree in modules(package, "quant", "kernels")
        for name in set(variables(tree)) - set(NO_PLANS)
        for function in functions(tree)
        for node in ast.walk(function)
        if changes(node, name)
    ] + [
        f"{place(package, path, node)}: {ast.unparse(node)}"
        for path, tree in modules(package, "quant", "kernels")
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and re.search(r"Cache\b", ast.unparse(node))
    ]


def classes_of_plans(package: Path) -> list[str]:
    return [
        f"{place(package, path, node)}: class {node.name}"
        for path, tree in modules(package, *LOWER_FOLDERS)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name.strip("_") in ("Plan", "PlanCache")
    ]


def names_of_the_gpu(package: Path) -> list[str]:
    """Files that name the GPU or its instructions, but for sm90.py, and messages to the user in a few files."""
    found, messages = [], []
    for path, tree in modules(package, *LOWER_FOLDERS):
        count = len(GPU_WORDS.findall(path.read_text(encoding="utf-8")))
        told = sum(len(GPU_WORDS.findall(text)) for text in strings(tree))
        if path.name != "sm90.py" and count:
            (messages if count == told else found).append(str(path.relative_to(package)))
    return found + (messages if len(messages) > MAX_MESSAGES_THAT_NAME_THE_GPU else [])


def limits_of_the_gpu(package: Path) -> list[str]:
    """Numbers that only sm90.py is to know."""
    return [
        f"{place(package, path, node)}: {ast.unparse(node)}, {GPU_LIMITS[value]}"
        for path, tree in modules(package, *LOWER_FOLDERS)
        for node in ast.walk(tree)
        if path.name != "sm90.py" and (value := number(node)) in GPU_LIMITS
    ]


CHECKS = (
    *(upward_imports, circular_imports, long_files, long_parameter_lists),
    *(strangers_among_the_kernels, names_of_several_kernels),
    *(long_parameter_lists_in_python, arguments_by_position, caches_of_plans, classes_of_plans),
    *(names_of_the_gpu, limits_of_the_gpu),
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


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def modules(package: Path, *folders: str) -> Iterator[tuple[Path, ast.Module]]:
    """Path and syntax tree of the modules in some folders, or in all."""
    for folder in folders or ("",):
        for path in sorted((package / folder).rglob("*.py")):
            yield path, parse(path)


def place(package: Path, path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(package)}:{node.lineno}"


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))


def python_functions(tree: ast.Module) -> Iterator[tuple[ast.AST, str, int]]:
    """Node, name and number of parameters of each function, that of an object itself not counted."""
    for node in functions(tree):
        args = node.args
        names = [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
        count = len(names) + bool(args.vararg) + bool(args.kwarg) - (names[:1] in (["self"], ["cls"]))
        yield node, getattr(node, "name", "a lambda"), count


def exported_names(tree: ast.Module) -> list[str]:
    """What ``__all__`` holds."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and is_name(node.targets[0], "__all__"):
            return ast.literal_eval(node.value)
    return []


def functions_of_operators(tree: ast.Module) -> set[str]:
    """Names of the functions that a module hands to operator() or define(), and of the operators themselves."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and is_name(node.func, "operator", "define")]
    given = [value for call in calls for value in (*call.args, *(keyword.value for keyword in call.keywords))]
    schemas = [value.value for value in given if isinstance(value, ast.Constant) and isinstance(value.value, str)]
    return {value.id for value in given if isinstance(value, ast.Name)} | {re.split(r"\W", text)[0] for text in schemas}


def is_name(node: ast.AST, *names: str) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def variables(tree: ast.Module) -> Iterator[str]:
    """Names that a module itself gives a value."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def changes(node: ast.AST, name: str) -> bool:
    """Whether a node assigns to an entry of a dict or list of this name, deletes one or calls what changes it."""
    if isinstance(node, ast.Subscript):
        return is_name(node.value, name) and not isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.Global):
        return name in node.names
    return isinstance(node, ast.Attribute) and is_name(node.value, name) and node.attr in CHANGES


def strings(tree: ast.Module) -> Iterator[str]:
    """String constants but for docstrings."""
    documented = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
    docstrings = {id(value) for value in documented}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def number(node: ast.AST) -> int | None:
    """The value of a whole number that is written as such, as a product, or as so many KB (n << 10)."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp):
        left, right = number(node.left), number(node.right)
        if left is not None and right is not None:
            if isinstance(node.op, ast.Mult):
                return left * right
            if isinstance(node.op, ast.LShift) and right == 10:
                return left << right
    return None


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
    "kernels/gemm/sm90.py": '"""Of Hopper."""\nSHARED, REGISTERS = 227 * 1024, 65536\n',
    "kernels/gemm/launch.py": """
CONSTANTS = {"rows": 65535, "bytes": 1 << 16}
def eight(a, b, c, d, e, f, *, g, h): return CONSTANTS["rows"]
def entry(a, b, c, d, e, f, g, *, h, i): raise ValueError("needs a Hopper GPU (sm_90)")
def launch(a, b, c, d, e, f, g, h, i): return REST[0]
def call(function, *arguments):
    first, *rest = sorted(arguments)
    return function(*arguments)
class Call:
    def __init__(self, a, b, c, d, e, f, g, h): self.made = {a: b}
op = operator("entry(Tensor a) -> Tensor", check=launch, cuda=launch, reference=launch, fake=launch)
""",
    "layers/__init__.py": "from fp8moe.layers.linear import Linear\n",
    "layers/linear.py": "from ..kernels.gemm import gemm\nfrom . import experts\nclass Linear: ...\n",
    "layers/experts.py": "def run():\n    from fp8moe.kernels.gemm.dense import gemm\n",
    "../tools/digest.py": "from benchmarks import calls\n",
    "../benchmarks/calls.py": "from fp8moe import Linear\n",
    "checkpoints/__init__.py": "",
    "checkpoints/load.py": "from fp8moe import Linear\n",
    "cli.py": "from fp8moe.weights import load\n" + "\n" * (MAX_LINES - 1),
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
        (upward_imports, "layers/experts.py", "if TYPE_CHECKING:\n    from fp8moe.weights.load import Linear\n"),
        (upward_imports, "tools/validate.py", ""),
        (circular_imports, "kernels/gemm/plan.py", "from fp8moe.kernels.gemm.dense import gemm\n"),
        (circular_imports, "kernels/gemm/plan.py", "def run():\n    from . import dense\n"),
        (circular_imports, "kernels/gemm/plan.py", "from fp8moe.kernels.gemm import gemm\n"),
        (circular_imports, "layers/experts.py", "from fp8moe import Linear\n"),
        (circular_imports, "layers/experts.py", "import fp8moe.layers.experts\n"),
        (circular_imports, "kernels/gemm/plan.py", "from fp8moe.kernels.rows import permute\n"),
        (circular_imports, "../benchmarks/calls.py", "def run():\n    from tools.digest import digest\n"),
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
        (long_parameter_lists_in_python, "runtime/launch.py", "def nine(a, b, c, d, e, f, g, *, h, i): ...\n"),
        (
            long_parameter_lists_in_python,
            "runtime/launch.py",
            "class C:\n def f(self, a, b, c, d, e, f, g, h, i): ...\n",
        ),
        (long_parameter_lists_in_python, "kernels/gemm/plan.py", "run = lambda a, b, c, d, e, f, g, *h, **i: 0\n"),
        (long_parameter_lists_in_python, "kernels/gemm/plan.py", "def launch(a, b, c, d, e, f, g, h, i): ...\n"),
        (arguments_by_position, "kernels/gemm/plan.py", "def run(*arguments): return arguments[0]\n"),
        (arguments_by_position, "runtime/launch.py", "def run(*arguments): return arguments[1:]\n"),
        (arguments_by_position, "runtime/launch.py", "run = lambda x, *rest: (x, rest[-1])\n"),
        (arguments_by_position, "quant/formats.py", "def run(*arguments):\n    *first, last = arguments\n"),
        (caches_of_plans, "kernels/gemm/plan.py", "plans = {}\ndef get(key): plans[key] = key\n"),
        (caches_of_plans, "kernels/gemm/plan.py", "_plans: dict = {}\nrun = lambda key: _plans.setdefault(key, key)\n"),
        (caches_of_plans, "kernels/gemm/plan.py", "_plan = None\ndef get():\n    global _plan\n    _plan = 1\n"),
        (caches_of_plans, "quant/formats.py", "plans = PlanCache()\ndef get(key): return plans.get(key, dict)\n"),
        (classes_of_plans, "kernels/gemm/plan.py", "class _Plan: ...\n"),
        (classes_of_plans, "runtime/launch.py", "class PlanCache: ...\n"),
        (names_of_the_gpu, "kernels/gemm/plan.py", "# for sm_90a\n"),
        (names_of_the_gpu, "kernels/gemm/plan.py", "def columns(tile):\n    'Of one wgmma.'\n"),
        (names_of_the_gpu, "runtime/launch.py", "HOPPER = 9\n"),
        (limits_of_the_gpu, "runtime/launch.py", "SHARED = 227 * 1024 - 16\n"),
        (limits_of_the_gpu, "kernels/gemm/plan.py", "SHARED = 228 << 10\n"),
        (limits_of_the_gpu, "kernels/gemm/plan.py", "SHARED = 232448\n"),
        (limits_of_the_gpu, "quant/formats.py", "def registers(threads): return 65536 // threads\n"),
    ],
)
def test_one_fault_is_found(tmp_path, check, name, text):
    package = write(tmp_path, CLEAN | {"kernels/rows/__init__.py": "from fp8moe.kernels.gemm.dense import gemm"})
    assert check(package) == []
    write(tmp_path, {name: text})
    assert check(package)
