"""The digest of what the GPU runs, and the stored validation that must carry it."""

import ast
import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.report import digest
from fp8moe.runtime import jit
from tools.digest import fingerprint, normalize_cuda, normalize_unit
from tools.validate import KERNELS, LATENT, problems
from tools.variants import GROUPS

ROOT = Path(__file__).resolve().parents[2]

CUDA = r"""
#include "ptx.cuh"
#define SUM(a, b) \
  ((a) + (b))
// comment
__global__ void f(float* out /* result */, int n) {
  out[n] = SUM(1'000, 2.5e-3f);  // trailing
  asm volatile("{ // kept\n add.f32 %0, %1; }" ::: "memory");
}
"""


@pytest.mark.parametrize(
    ("old", "new", "counts"),
    [
        ("// comment", "/* another\n comment */", False),
        ("  // trailing", "", False),
        (" /* result */", "", False),
        ("out[n] = SUM", "out [ n ]=\n    SUM", False),
        (" \\\n  ((a)", "  ((a)", False),
        ("\n#include", "\n\n\n#include", False),
        ("int n) {\n", "int n)\n{\n", False),
        ("2.5e-3f", "2.5e-4f", True),
        ("// kept", "// lost", True),
        ("{ // kept", "{  // kept", True),
        ("float* out", "floatout", True),
        ("(b))\n// comment\n", "(b)) ", True),
        ("out[n] =", "// out[n] =", True),
    ],
)
def test_cuda_text_that_counts_and_that_does_not(old, new, counts):
    assert old in CUDA
    assert (normalize_cuda(CUDA.replace(old, new, 1)) != normalize_cuda(CUDA)) == counts


@given(st.lists(st.sampled_from(["a", "b1", "+", ";", "{", "}", '"s // s"', "'\\''", "0x1f", 'R"(" //)"'])))
def test_cuda_white_space_and_comments_between_tokens_never_count(tokens):
    expected = normalize_cuda(" ".join(tokens))
    assert normalize_cuda("\n".join(tokens)) == expected
    assert normalize_cuda(" /* x */ ".join(tokens)) == expected
    assert normalize_cuda(" // x\n".join(tokens)) == expected


def test_where_lines_come_from_does_not_count():
    unit = f'#define N 1\nint a;\n#line 1 "x.cu"\n{CUDA}\n#line 3 "y.cuh"\nint z;\n'
    assert normalize_unit(unit) == normalize_cuda(f"#define N 1\nint a;\n{CUDA}\nint z;\n")
    assert normalize_unit(unit) == normalize_unit(unit.replace("y.cuh", "other.cuh").replace("#line 3", " # line 30"))
    assert normalize_unit(unit) != normalize_unit(unit.replace("N 1", "N 2"))


FEW = 100  # a call of so many is enough to see whether anything changes

# Each tree in a process of its own that has PyTorch already, and so each group: the digest of every STEP-th call, with
# STEP 1 the calls themselves.
RECORD = """
import json, os, sys
import torch
step = int(sys.argv[1])
def forked(name):
    child = os.fork()
    if child and os.waitpid(child, 0)[1]:
        sys.exit(f"no digest of {name}")
    return not child
for tree in filter(forked, sys.argv[2:]):
    sys.path.insert(0, tree)
    import fp8moe
    from fp8moe.runtime.record import Recorder
    from tools import digest, variants
    assert fp8moe.__file__.startswith(tree) and digest.__file__.startswith(tree)
    for group in filter(forked, variants.GROUPS):
        recorder, calls = Recorder(digest.NUM_SMS), []
        with torch.autograd.profiler.profile(enabled=step == 1) as profile:
            for i, call in enumerate(variants.GROUPS[group](variants.Untouched())):
                if i % step == 0:
                    calls.append(recorder.record(call))
        if step == 1:
            kernels = [[spec.source, spec.name, spec.defines, spec.prelude] for spec in recorder.kernels]
            operators = sorted({event.name() for event in profile.kineto_results.events()})
            found = {"calls": calls, "kernels": kernels, "operators": operators}
        else:
            found = digest.fingerprint(calls, recorder.kernels)
        with open(os.path.join(tree, f"{group}.json"), "w") as file:
            json.dump(found, file)
        os._exit(0)
    os._exit(0)
"""


def record(step, *trees):
    """What is recorded of each tree, by group."""
    command = [sys.executable, "-c", RECORD, str(step), *map(str, trees)]
    done = subprocess.run(command, cwd=trees[0], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [{group: json.loads((tree / f"{group}.json").read_text()) for group in GROUPS} for tree in trees]


def copy_tree(path):
    for name in ("fp8moe", "tools", "benchmarks"):
        shutil.copytree(ROOT / name, path / name, ignore=shutil.ignore_patterns("results"))  # with its bytecode
    return path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return record(1, copy_tree(tmp_path_factory.mktemp("tree")))[0]


@pytest.fixture(scope="module")
def kernels(recorded):
    """Those of each group."""
    return {
        group: [
            jit.KernelSpec(source, name, tuple(map(tuple, defines)), prelude)
            for source, name, defines, prelude in found["kernels"]
        ]
        for group, found in recorded.items()
    }


@pytest.fixture(scope="module")
def one_of_each(kernels):
    """A kernel for each set of files that kernels are made of."""
    return list({files_of(spec): spec for specs in kernels.values() for spec in specs}.values())


def files_of(spec):
    return frozenset(re.findall(r'^#line 1 "(.*)"', jit.full_source(spec), re.MULTILINE))


def test_the_command_prints_the_digest_of_a_tree(tmp_path):
    """Of some calls: the stored validation shows that all of them are equal in every process."""
    tree = copy_tree(tmp_path / "tree")
    (expected,) = record(FEW, tree)
    with (tree / "tools/variants.py").open("a") as file:
        # still built one at a time: a call whose operands are arranged launches kernels when it is built
        file.write("\nfrom itertools import islice\n")
        few = f"lambda untouched, calls=calls: islice(calls(untouched), 0, None, {FEW})"
        file.write(f"GROUPS = {{group: {few} for group, calls in GROUPS.items()}}\n")
    assert {group: digest(tree, group) for group in GROUPS} == expected
    assert digest(tree) == expected["kernels"]


def test_every_source_is_covered(kernels, one_of_each):
    names = {path.name for path in (ROOT / "fp8moe/cuda").rglob("*.cu*")}
    sources = {spec.source for specs in kernels.values() for spec in specs}
    assert sources == {name for name in names if name.endswith(".cu")}
    assert frozenset.union(*map(files_of, one_of_each)) == names


def test_every_operator_is_covered(recorded):
    defined = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("fp8moe::")}
    # One raises, two are those of compiled graphs and quantize as eager code does, others are PyTorch's operations.
    others = {
        "fp8moe::no_backward",
        "fp8moe::quantized_master",
        "fp8moe::quantized_gate_up",
        "fp8moe::packed_in_blocks",
    }
    of_pytorch = {
        *("fp8moe::adapter_product", "fp8moe::quantize_mxfp4", "fp8moe::quantize_int4"),
        "fp8moe::prompt_attention_backward",
    }
    reached = {name for found in recorded.values() for name in found["operators"]}
    assert defined - reached - of_pytorch == others


@pytest.mark.parametrize("group", GROUPS)
def test_calls_launch_what_they_are_made_for(recorded, group):
    calls, kernels = recorded[group]["calls"], recorded[group]["kernels"]
    assert all(calls)
    launched = [launch for launches in calls for launch in launches]
    assert len(launched) > len(calls)
    assert {launch["kernel"] for launch in launched} == set(range(len(kernels)))
    # Clusters, programmatic dependent launch and tensor maps are among it.
    assert any(launch["attributes"] for launch in launched)
    assert any(argument[0] == "tensor map" for launch in launched for argument in launch["arguments"])
    text = json.dumps(calls)
    assert "0x" not in text and "torch" not in text


@pytest.mark.parametrize("field", ["grid", "block", "shared", "attributes", "arguments"])
def test_what_is_launched_counts(recorded, one_of_each, field):
    before = fingerprint(recorded["kernels"]["calls"], one_of_each)
    calls = json.loads(json.dumps(recorded["kernels"]["calls"]))
    calls[-1][-1][field] = 7
    assert fingerprint(calls, one_of_each) != before


def test_defines_prelude_name_and_options_count(one_of_each, monkeypatch):
    spec = one_of_each[0]
    changes = ({"defines": (*spec.defines, ("MORE", 1))}, {"prelude": f"{spec.prelude}int more;"}, {"name": "other"})
    changed = [dataclasses.replace(spec, **change) for change in changes]
    before = {fingerprint([], [one]) for one in (spec, *changed)}
    assert len(before) == 4
    assert fingerprint([], [dataclasses.replace(spec, prelude=f"// more\n{spec.prelude}")]) == fingerprint([], [spec])
    monkeypatch.setattr("fp8moe.runtime.compilers.PTXAS_OPTIONS", ("-v", "-O1"))
    assert fingerprint([], [spec]) not in before


def copy_cuda(folder, monkeypatch):
    """All files of fp8moe/cuda, copied for a test to change."""
    copies = tuple(shutil.copytree(source, folder / source.name) for source in jit.SOURCE_DIRS["sm90"])
    monkeypatch.setitem(jit.SOURCE_DIRS, "sm90", copies)
    return [path for copy in copies for path in sorted(copy.iterdir())]


def test_every_file_of_cuda_counts_but_not_its_comments(one_of_each, tmp_path, monkeypatch):
    files = {spec: files_of(spec) for spec in one_of_each}
    for path in copy_cuda(tmp_path, monkeypatch):
        spec = next(spec for spec in one_of_each if path.name in files[spec])
        before, text = fingerprint([], [spec]), path.read_text()
        path.write_text(f"// Another comment.\n\n{text}\n /* and\none more */\n")
        assert fingerprint([], [spec]) == before, path.name
        path.write_text(f"{text}\n__device__ int mutation;\n")
        assert fingerprint([], [spec]) != before, path.name
        path.write_text(text)


def test_names_of_headers_do_not_count(one_of_each, tmp_path, monkeypatch):
    before = fingerprint([], one_of_each)

    def renamed(text):
        return re.sub(r'(#include ")(.*\.cuh")', r"\1renamed_\2", text)

    for path in copy_cuda(tmp_path, monkeypatch):
        path.write_text(renamed(path.read_text()))
        if path.suffix == ".cuh":
            path.rename(path.with_name(f"renamed_{path.name}"))
    assert fingerprint([], [dataclasses.replace(one, prelude=renamed(one.prelude)) for one in one_of_each]) == before


class Renamed(ast.NodeTransformer):
    """Python with other names for what functions assign."""

    def visit_FunctionDef(self, node):
        inner = [child for child in ast.walk(node) if child is not node]
        kinds = ast.FunctionDef | ast.Lambda | ast.ClassDef | ast.Nonlocal | ast.Global | ast.comprehension
        if any(isinstance(child, kinds) for child in inner):
            return self.generic_visit(node)
        names = [child for child in inner if isinstance(child, ast.Name)]
        parameters = {child.arg for child in inner if isinstance(child, ast.arg)}
        local = {name.id for name in names if isinstance(name.ctx, ast.Store)} - parameters
        for name in names:
            if name.id in local:
                name.id = f"renamed_{name.id}"
        return node


def rewrite(tree):
    """All Python of the package anew: no comments, other line breaks, other names of locals."""
    count = 0
    for path in sorted(tree.glob("fp8moe/**/*.py")):
        text = ast.unparse(Renamed().visit(ast.parse(path.read_text())))
        count += text.count("renamed_")
        path.write_text(text)
    assert count > 100


def replace(pattern, replacement, files="fp8moe/**/*.py"):
    def change(tree):
        count = 0
        for path in sorted(tree.glob(files)):
            text, found = re.subn(pattern, replacement, path.read_text(), flags=re.MULTILINE)
            path.write_text(text)
            count += found
        assert count

    return change


CHANGES = {
    "the choice of tiles": replace(r"\bmin\((?=found, key)", "max("),
    "the depth of rings": replace(r"^MAX_STAGES = \d+$", "MAX_STAGES = 3"),
    "a launch attribute": replace(r"\bpdl=True", "pdl=False"),
    "shared memory": replace(r"\bsmem=(?=\w+[.(])", "smem=16 + "),
    "a box": replace(r"\bbox=\(1, ", "box=(2, "),
    "how much goes to L2": replace(r"l2_promotion=0\b", "l2_promotion=128"),
    "the launcher": replace(r"config\.sharedMemBytes = smem", "config.sharedMemBytes = smem + 1"),
}


def test_python_counts_where_it_changes_what_is_launched(tmp_path):
    trees = [copy_tree(tmp_path / str(i)) for i in range(len(CHANGES) + 2)]
    rewrite(trees[1])
    for change, tree in zip(CHANGES.values(), trees[2:], strict=True):
        change(tree)
    first, same, *others = (found["kernels"] for found in record(FEW, *trees))
    assert first == same
    assert len({first, *others}) == 1 + len(CHANGES), dict(zip(CHANGES, others, strict=True))


def test_a_tree_that_cannot_be_recorded_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="(?s)no digest of .*tools"):
        digest(tmp_path)


@pytest.mark.parametrize("file", [KERNELS, LATENT], ids=lambda file: file.group)
def test_stored_validation_is_of_these_sources_and_without_problems(recorded, kernels, file):
    path = ROOT / "validation" / file.name
    assert path.exists(), f"run `python -m tools.validate --group {file.group}` and commit validation/{file.name}"
    content = json.loads(path.read_text())
    assert problems(content, fingerprint(recorded[file.group]["calls"], kernels[file.group]), file) == []
    assert len({content[part]["versions"]["gpu"] for part in file.parts}) == 1
