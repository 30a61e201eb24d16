"""The module deep_gemm: in one process by install(), and by the distribution."""

import importlib
import logging
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest

from fp8moe.integrations import deep_gemm

ROOT = Path(__file__).parents[2]
DISTRIBUTION = ROOT / "integrations/deep_gemm"


def modules_named(name):
    return {key: module for key, module in sys.modules.items() if key == name or key.startswith(f"{name}.")}


@pytest.fixture(autouse=True)
def not_installed():
    before = modules_named("deep_gemm")
    for name in before:
        del sys.modules[name]
    yield
    for name in modules_named("deep_gemm"):
        del sys.modules[name]
    sys.modules.update(before)


def python(script, *path):
    """The output of a process of its own that finds modules in these directories first."""
    code = f"import sys; sys.path[:0] = {[str(entry) for entry in (*path, ROOT)]}\n{textwrap.dedent(script)}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def real_one(directory):
    """A deep_gemm that is not ours."""
    (directory / "deep_gemm").mkdir()
    (directory / "deep_gemm/__init__.py").write_text("name = 'real'\n")


def test_install(caplog):
    with caplog.at_level(logging.INFO, "fp8moe"):
        deep_gemm.install()
        deep_gemm.install()
    (record,) = caplog.records
    assert deep_gemm.__version__ in record.getMessage() and "fp8moe" in record.getMessage()
    assert importlib.import_module("deep_gemm") is deep_gemm
    for name in ("utils", "utils.layout", "utils.math", "testing"):
        module = importlib.import_module(f"deep_gemm.{name}")
        assert module is importlib.import_module(f"fp8moe.integrations.deep_gemm.{name}")
    from deep_gemm.testing import bench_kineto
    from deep_gemm.utils.layout import get_mn_major_tma_aligned_tensor

    assert bench_kineto is deep_gemm.bench_kineto
    assert get_mn_major_tma_aligned_tensor is deep_gemm.get_mn_major_tma_aligned_tensor


def test_an_imported_deep_gemm_is_not_hidden_unasked():
    sys.modules["deep_gemm"] = real = types.ModuleType("deep_gemm")
    sys.modules["deep_gemm.jit"] = types.ModuleType("deep_gemm.jit")
    with pytest.raises(RuntimeError, match="deep_gemm: .* is there already"):
        deep_gemm.install()
    assert sys.modules["deep_gemm"] is real
    deep_gemm.install(replace=True)
    assert importlib.import_module("deep_gemm") is deep_gemm
    assert "deep_gemm.jit" not in sys.modules  # not a mixture of both


def test_an_installed_deep_gemm_is_not_hidden_unasked(tmp_path):
    real_one(tmp_path)
    script = """
        from fp8moe.integrations import deep_gemm
        print("deep_gemm" in sys.modules, "transformers" in sys.modules)
        try:
            deep_gemm.install()
        except RuntimeError as error:
            print(error)
        import deep_gemm as imported
        print(imported.name)
    """
    imported, refusal, name = python(script, tmp_path).splitlines()
    assert imported == "False False"  # what is imported installs nothing
    assert "deep_gemm/__init__.py is there already" in refusal and name == "real"


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
        import importlib.metadata, importlib.util, logging
        logging.basicConfig(level=logging.INFO)
        assert importlib.util.find_spec("deep_gemm").origin.startswith(sys.path[0])
        import deep_gemm.utils.layout
        from deep_gemm import fp8_gemm_nt
        import deep_gemm, fp8moe.integrations.deep_gemm as ours
        assert deep_gemm is ours and deep_gemm.utils.layout is ours.utils.layout and fp8_gemm_nt is ours.fp8_gemm_nt
        assert importlib.util.find_spec("deep_gemm") is not None
        ours.install()
        print(deep_gemm.__version__, importlib.metadata.version("deep_gemm"))
    """
    assert python(script, site) == f"{deep_gemm.__version__} 2.5.0+fp8moe"


def test_install_beside_the_distribution(site):
    script = "import fp8moe.integrations.deep_gemm as ours; ours.install(); import deep_gemm; print(deep_gemm is ours)"
    assert python(script, site) == "True"
