"""The digest of the kernels' sources, and the stored validation that must carry it."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.digest import DIRECTORIES, digest, normalize_cuda, normalize_python
from tools.validate import problems

ROOT = Path(__file__).resolve().parent.parent

PYTHON = '''\
"""Module docstring."""

import os  # a comment


def f(x, *, y=1):
    """Docstring
    of two lines."""
    # comment
    text = "# not a comment"
    if x:
        return f"{x!r:>{y}} {os.sep}" + text

    return """a string
that is not a docstring"""
'''

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
    ("old", "new"),
    [
        ('"""Module docstring."""', '"""Another."""'),
        ('"""Module docstring."""\n', ""),
        ("  # a comment", ""),
        ("    # comment\n", "    # é another\n    # more\n"),
        ('    """Docstring\n    of two lines."""\n', ""),
        ("Docstring\n", "Docstring, longer\n\n"),
        ("\n\n\n", "\n"),
        ("    if x:\n        return", "    if x:\n     return"),
        ("(x, *, y=1)", "(\n    x,  # note\n    *, y = 1)"),
    ],
)
def test_python_text_that_does_not_count(old, new):
    assert old in PYTHON
    assert normalize_python(PYTHON.replace(old, new, 1)) == normalize_python(PYTHON)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("y=1", "y=2"),
        ("# not a comment", "# not a note"),
        ("{x!r:>{y}} ", "{x!r:>{y}}"),
        ("a string\n", "a  string\n"),
        ("\n    return", "\n        return"),
        ("import os", "import os, sys"),
        ("text\n\n", "text * 2\n\n"),
    ],
)
def test_python_text_that_counts(old, new):
    assert old in PYTHON
    assert normalize_python(PYTHON.replace(old, new, 1)) != normalize_python(PYTHON)


def test_only_the_first_string_of_a_body_is_a_docstring():
    assert normalize_python('x = 1\n"one"\n') != normalize_python('x = 1\n"two"\n')
    assert normalize_python('def f(): "one"; return 1\n') == normalize_python('def f(): "two"; return 1\n')


def test_nested_format_strings_are_taken_whole():
    text = "x = f'{a:{b}} # {c}'  # note\n"
    assert "f'{a:{b}} # {c}'" in normalize_python(text).split("\n")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("// comment", "/* another\n comment */"),
        ("  // trailing", ""),
        (" /* result */", ""),
        ("out[n] = SUM", "out [ n ]=\n    SUM"),
        (" \\\n  ((a)", "  ((a)"),
        ("\n#include", "\n\n\n#include"),
        ("int n) {\n", "int n)\n{\n"),
    ],
)
def test_cuda_text_that_does_not_count(old, new):
    assert old in CUDA
    assert normalize_cuda(CUDA.replace(old, new, 1)) == normalize_cuda(CUDA)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("2.5e-3f", "2.5e-4f"),
        ("// kept", "// lost"),
        ("{ // kept", "{  // kept"),
        ("float* out", "floatout"),
        ("(b))\n// comment\n", "(b)) "),
        ("out[n] =", "// out[n] ="),
    ],
)
def test_cuda_text_that_counts(old, new):
    assert old in CUDA
    assert normalize_cuda(CUDA.replace(old, new, 1)) != normalize_cuda(CUDA)


@given(st.lists(st.sampled_from(["a", "b1", "+", ";", "{", "}", '"s // s"', "'\\''", "0x1f", 'R"(" //)"'])))
def test_cuda_white_space_and_comments_between_tokens_never_count(tokens):
    expected = normalize_cuda(" ".join(tokens))
    assert normalize_cuda("\n".join(tokens)) == expected
    assert normalize_cuda(" /* x */ ".join(tokens)) == expected
    assert normalize_cuda(" // x\n".join(tokens)) == expected


@pytest.fixture
def tree(tmp_path):
    for directory in DIRECTORIES:
        (tmp_path / directory).mkdir(parents=True)
    (tmp_path / "fp8moe/cuda/a.cu").write_text(CUDA)
    (tmp_path / "fp8moe/kernels/b.py").write_text(PYTHON)
    (tmp_path / "fp8moe/quant/c.py").write_text("x = 1\n")
    return tmp_path


def test_digest_ignores_other_files_and_sees_names_and_contents(tree):
    first = digest(tree)
    (tree / "fp8moe/quant/__pycache__").mkdir()
    (tree / "fp8moe/quant/__pycache__/c.pyc").write_bytes(b"\0")
    (tree / "fp8moe/other.py").write_text("y = 2\n")
    (tree / "fp8moe/quant/c.py").write_text("x  =  1  # one\n")
    assert digest(tree) == first
    (tree / "fp8moe/quant/c.py").write_text("x = 2\n")
    second = digest(tree)
    (tree / "fp8moe/quant/c.py").rename(tree / "fp8moe/quant/d.py")
    assert len({first, second, digest(tree)}) == 3


def test_digest_without_sources_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="source checkout"):
        digest(tmp_path)


def test_stored_validation_is_of_these_sources_and_without_problems():
    path = ROOT / "validation/h200.json"
    assert path.exists(), "run `fp8moe validate` on an H200 and commit validation/h200.json"
    content = json.loads(path.read_text())
    assert problems(content, digest(ROOT)) == []
    for part in ("tests", "sanitizer", "benchmarks"):
        assert "H200" in content[part]["versions"]["gpu"]
