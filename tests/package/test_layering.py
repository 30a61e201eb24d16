"""The package's structure: imports go down and in no circle, files are short, functions take few parameters, and what
launches a kernel or knows the GPU has one place.

Each check is a function of the package's directory that returns what is wrong. FAULTS has one that it must find.
"""

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
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
BESIDE = ("integrations", "benchmarks", "tools", "examples")  # the package, from the bottom
LOWER_FOLDERS = ("runtime", "quant", "kernels")
MAX_LINES = 700
MAX_PARAMETERS = 8
MAKERS = dict.fromkeys(
    ("empty", "empty_strided", "zeros", "ones", "full", "tensor", "eye", "rand", "randn", "linspace"),
    ("dtype", "device"),
)
MAKERS["arange"] = ("device",)
MAX_MESSAGES_THAT_NAME_THE_GPU = 6  # files with such messages
GPU_WORDS = re.compile("sm_90|hopper|wgmma|setmaxnreg", re.IGNORECASE)
GPU_LIMITS = {227 * 1024: "shared memory of a block", 228 * 1024: "shared memory of an SM", 65536: "registers of an SM"}
NO_PLANS = ("families",)  # what kernels/gemm/warmup.py is to compile for
CHANGES = ("add", "append", "clear", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update")


def upward_imports(package: Path) -> list[str]:
    """Imports of a higher folder, also those inside functions and for type checkers, and modules without a place."""
    graph = import_graph(package)
    places = {f"{package.name}.{name}": rank for rank, name in enumerate(ORDER)}
    places |= {tree.name: len(ORDER) + BESIDE.index(folder) for folder, tree in trees_beside(package)}
    rank = {module: places.get(module if module in places else folder_of(module, package)) for module in graph}
    found = [f"{module}: not in a folder of ORDER" for module in graph if rank[module] is None]
    if found:
        return found
    return [
        f"{module} imports {other}"
        for module, others in graph.items()
        for other in sorted(others)
        if rank[other] > rank[module] and module != f"{package.name}.__init__"  # which hands out names when asked
    ]


def circular_imports(package: Path) -> list[str]:
    """One circle of files, if there is any, of the package or beside it."""
    try:
        TopologicalSorter(import_graph(package)).prepare()
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
    folders = {folder for own in architectures(package).values() for folder in own}
    return [str(path) for path in paths if str(path.parent) not in folders or path.suffix not in (".cu", ".cuh")]


def names_of_several_kernels(package: Path) -> list[str]:
    """Files of cuda/ that bear the name of another of the same architecture: they are found by their names."""
    return [
        f"{name} of {architecture}"
        for architecture, folders in architectures(package).items()
        for name, count in Counter(path.name for own in folders for path in (package / "cuda" / own).glob("*")).items()
        if count > 1
    ]


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


def tensors_of_default_settings(package: Path) -> list[str]:
    """Calls that make a tensor without naming its device and, but for arange, which takes integers, its dtype."""
    return [
        f"{place(package, path, node)}: torch.{node.func.attr} without {name}"
        for path, tree in modules(package)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_name(node.func.value, "torch")
        for name in MAKERS.get(node.func.attr, ())
        if not {name, None} & {keyword.arg for keyword in node.keywords}
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
    """Files that name the GPU or its instructions, but for its own, and messages to the user in a few files."""
    own, found, messages = files_of_the_gpu(package), [], []
    for path, tree in modules(package, *LOWER_FOLDERS):
        count = len(GPU_WORDS.findall(path.read_text(encoding="utf-8")))
        told = sum(len(GPU_WORDS.findall(text)) for text in strings(tree))
        if path.name not in own and count:
            (messages if count == told else found).append(str(path.relative_to(package)))
    return found + (messages if len(messages) > MAX_MESSAGES_THAT_NAME_THE_GPU else [])


def limits_of_the_gpu(package: Path) -> list[str]:
    """Numbers that only the GPU's own files are to know."""
    own = files_of_the_gpu(package)
    return [
        f"{place(package, path, node)}: {ast.unparse(node)}, {GPU_LIMITS[value]}"
        for path, tree in modules(package, *LOWER_FOLDERS)
        for node in ast.walk(tree)
        if path.name not in own and (value := number(node)) in GPU_LIMITS
    ]


def architectures(package: Path) -> dict[str, tuple[str, ...]]:
    """By the folder of each architecture of the package's table: the folders of cuda/ that have its sources."""
    table = runpy.run_path(str(package / "runtime/architectures.py"))
    return {folder: (*table["SHARED_FOLDERS"], folder) for folder, *_ in table["ARCHITECTURES"]}


def files_of_the_gpu(package: Path) -> set[str]:
    return {"architectures.py", *(f"{folder}.py" for folder in architectures(package))}


def trees_beside(package: Path) -> Iterator[tuple[str, Path]]:
    """The folder of BESIDE and the directory of each tree of modules that imports the package."""
    for folder in BESIDE:
        path = package.parent / folder
        for tree in (init.parent for init in path.glob("*/*/__init__.py")) if folder == "integrations" else (path,):
            yield folder, tree


def folder_of(module: str, package: Path) -> str:
    """Of a module of the package its folder there, of another its tree."""
    parts = module.split(".")
    return ".".join(parts[: 2 if parts[0] == package.name else 1])


def sources(package: Path) -> list[Path]:
    return sorted(path for path in package.rglob("*") if path.suffix in (".py", ".cu", ".cuh"))


def import_graph(package: Path) -> dict[str, set[str]]:
    """The modules of the package and beside it, and what each one imports. That of a folder is folder.__init__."""
    paths = {
        ".".join((tree.name, *path.relative_to(tree).with_suffix("").parts)): path
        for tree in (package, *(tree for _, tree in trees_beside(package)))
        for path in sources(tree)
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


CLEAN = {  # what the faults below need around them; the package itself shows that what is right is not found
    "runtime/architectures.py": (PACKAGE / "runtime/architectures.py").read_text(encoding="utf-8"),
    "kernels/gemm/__init__.py": "from fp8moe.kernels.gemm.plan import run\n",
    "kernels/gemm/plan.py": "",
    "cuda/sm90/gemm.cu": "",
    "../integrations/engine/fp8moe_engine/__init__.py": "",
}
FAULTS = {
    upward_imports: ("layers/experts.py", "if TYPE_CHECKING:\n    from fp8moe_engine import Engine\n"),
    circular_imports: ("kernels/gemm/plan.py", "def run():\n    from fp8moe.kernels.gemm import gemm\n"),
    long_files: ("cuda/sm90/gemm.cu", "\n" * (MAX_LINES + 1)),
    long_parameter_lists: ("cuda/sm90/gemm.cu", f"auto nine = [&]({'int, ' * 8}Pair<int, int> i) mutable -> int {{"),
    strangers_among_the_kernels: ("cuda/sm100/gemm.cu", ""),
    names_of_several_kernels: ("cuda/ops/gemm.cu", ""),
    long_parameter_lists_in_python: ("kernels/gemm/plan.py", "run = lambda a, b, c, d, e, f, g, *h, **i: 0\n"),
    arguments_by_position: ("kernels/gemm/plan.py", "def run(*arguments):\n    *first, last = arguments\n"),
    tensors_of_default_settings: ("kernels/gemm/plan.py", "import torch\nzero = torch.zeros(1, device='cpu')\n"),
    caches_of_plans: ("kernels/gemm/plan.py", "plans = {}\ndef get(key): plans[key] = key\n"),
    classes_of_plans: ("runtime/launch.py", "class PlanCache: ...\n"),
    names_of_the_gpu: ("kernels/gemm/plan.py", "def columns(tile):\n    'Of one wgmma.'\n"),
    limits_of_the_gpu: ("runtime/launch.py", "SHARED = 228 << 10\n"),
}
CHECKS = pytest.mark.parametrize("check", FAULTS)


@CHECKS
def test_the_package_is_in_order(check):
    faults = check(PACKAGE)
    assert not faults, "\n".join(faults)


def write(root: Path, files: dict[str, str]) -> Path:
    package = root / "fp8moe"
    package.mkdir(exist_ok=True)
    for name, text in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    return package


@CHECKS
def test_a_check_finds_its_fault_and_nothing_in_a_clean_tree(tmp_path, check):
    package = write(tmp_path, CLEAN)
    assert check(package) == []
    write(tmp_path, dict([FAULTS[check]]))
    assert check(package)


def test_another_architecture_is_a_folder_and_a_row_of_the_table(tmp_path):
    """With headers of its own, by the names that Hopper's have."""
    package = tmp_path / "fp8moe"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    table = package / "runtime/architectures.py"
    row = 'SM100 = Architecture("sm100", "sm_100a", (10, 0))\nARCHITECTURES = (SM90, SM100)'
    table.write_text(table.read_text().replace("ARCHITECTURES = (SM90,)", row))
    stub = (
        '#include "ptx.cuh"\n#include "ordered.cuh"\nextern "C" __global__ void stub(int* out) { *out = number(); }\n'
    )
    header = "#pragma once\ntypedef unsigned int u32;\n__device__ int number() { return 100; }\n"
    write(tmp_path, {"cuda/sm100/stub.cu": stub, "cuda/sm100/ptx.cuh": header})
    for check in (strangers_among_the_kernels, names_of_several_kernels, names_of_the_gpu, limits_of_the_gpu):
        assert check(package) == []
    code = """if True:
        from fp8moe.runtime import architectures, jit
        spec = jit.KernelSpec("stub.cu", "stub", architecture=architectures.SM100)
        jit.compile_spec(spec)
        print(jit.full_source(spec))
    """
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    files = re.findall('^#line 1 "(.*)"', done.stdout, re.MULTILINE)
    assert files[:2] == ["stub.cu", "ptx.cuh"] and "ordered.cuh" in files and header.splitlines()[2] in done.stdout
