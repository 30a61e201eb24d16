"""The distribution of the module deep_gemm, and its name of 0.2 inside fp8moe."""

import importlib
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import deep_gemm

ROOT = Path(__file__).parents[2]
DISTRIBUTION = ROOT / "integrations/deep_gemm"
OLD = "fp8moe.integrations.deep_gemm"


def python(script, *path):
    """The output of a process of its own that finds modules in these directories first."""
    code = f"import sys; sys.path[:0] = {[str(entry) for entry in (*path, ROOT)]}\n{textwrap.dedent(script)}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("part", ["", ".utils", ".testing"])
def test_the_name_inside_fp8moe_warns_and_hands_on(part):
    old, new = importlib.import_module(f"{OLD}{part}"), importlib.import_module(f"deep_gemm{part}")
    for name in getattr(new, "__all__", ["calc_diff"]):
        with pytest.warns(DeprecationWarning, match=f"{OLD}{part} is deep_gemm{part} now"):
            assert getattr(old, name) is getattr(new, name)
    with pytest.raises(ImportError, match="none_such"):
        exec(f"from {OLD}{part} import none_such")


def test_programs_of_0_2_that_install_it():
    script = """
        from fp8moe.integrations import deep_gemm as ours
        print({"deep_gemm", "transformers"} & set(sys.modules))  # what is imported imports nothing
        ours.install(replace=True)
        import deep_gemm.utils.layout
        print(deep_gemm.fp8_gemm_nt is ours.fp8_gemm_nt and deep_gemm.utils is ours.utils)
    """
    assert python(script, DISTRIBUTION).splitlines() == ["set()", "True"]


REFUSED = f"""
    try:
        from {OLD} import fp8_gemm_nt
    except ImportError as error:
        print(error)
"""


def test_what_to_install_is_said():
    message = python(REFUSED)
    assert message.startswith(f"{OLD} is deep_gemm now, which `pip install ./integrations/deep_gemm` in a clone")


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("def fp8_gemm_nt(): ...", "deep_gemm/__init__.py'> is not fp8moe's"),
        ("assert 0, 'no CUDA_HOME'", "no CUDA_HOME"),
    ],
)
def test_another_deep_gemm_is_not_handed_on(tmp_path, source, what):
    (tmp_path / "deep_gemm").mkdir()
    (tmp_path / "deep_gemm/__init__.py").write_text(f"{source}\n")
    message = python(REFUSED, tmp_path)
    assert what in message and "`pip install ./integrations/deep_gemm` in a clone of fp8moe" in message


def test_the_version_says_what_it_is():
    api, ours = deep_gemm.__version__.split("+")
    assert ours == f"fp8moe.{importlib.import_module('fp8moe').__version__.replace('+', '.')}"
    assert f'version = "{api}+fp8moe"' in (DISTRIBUTION / "pyproject.toml").read_text()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A directory with the distribution installed, by pip."""
    pytest.importorskip("setuptools")
    source, target = (tmp_path_factory.mktemp(name) for name in ("source", "site"))
    for path in DISTRIBUTION.rglob("*"):
        if path.suffix in (".py", ".toml", ".md") and "build" not in path.relative_to(DISTRIBUTION).parts:
            copy = source / path.relative_to(DISTRIBUTION)
            copy.parent.mkdir(exist_ok=True)
            copy.write_text(path.read_text())
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--target", target)
    command = [sys.executable, "-m", "pip", "install", *map(str, options), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return target


def test_distribution(site):
    script = """
        import importlib.metadata, logging
        logging.basicConfig(level=logging.INFO)
        import deep_gemm.utils.layout
        from deep_gemm import fp8_gemm_nt
        assert deep_gemm.__file__.startswith(sys.path[0]) and fp8_gemm_nt is deep_gemm.fp8_gemm_nt
        print(deep_gemm.__version__, importlib.metadata.version("deep_gemm"))
    """
    assert python(script, site) == f"{deep_gemm.__version__} 2.5.0+fp8moe"
