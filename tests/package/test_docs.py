"""The pages: figures are those of the stored files, and what any page names exists: files, modules, commands,
environment variables. Their code blocks run in tests/package/test_docs_examples.py.
"""

import ast
import json
import re
from dataclasses import fields
from importlib import import_module, util
from pathlib import Path

import pytest
from PIL import Image

from benchmarks import plots, tables
from fp8moe.cli import _parser
from fp8moe.runtime.config import Settings

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/findings/*.md"), *ROOT.glob("examples/*.md")]
TOP = ("fp8moe", "benchmarks", "tests", "tools", "docs", "examples", "validation", "integrations")
all_pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def test_every_environment_variable_is_listed():
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert set(re.findall(r"FP8MOE_[A-Z_]+", page)) == {f"FP8MOE_{field.name.upper()}" for field in fields(Settings)}


@all_pages
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    for link in (link for link in links if not link.startswith("http")):
        assert (page.parent / link).is_file(), link


def missing_paths(text, folder):
    """Paths below one of TOP that are not there, and sources that are in no folder that their paragraph names."""
    missing = []
    for paragraph in re.sub(r"https?://\S+", "", text).split("\n\n"):
        paths = re.findall(rf"(?<![\w./-])(?:{'|'.join(TOP)})/[\w./*<>-]*[\w*/>]", paragraph)
        paths = [re.sub(r"[^/]*<.*", "", path) for path in paths]  # what "<op>.py" stands for is not there
        found = {path: list(ROOT.glob(path.rstrip("/"))) for path in paths}
        missing += [path for path, matches in found.items() if not matches]
        places = [place for matches in found.values() for place in matches]
        places += [folder / name for name in re.findall(r"`(\w+)/`", paragraph)]
        folders = [folder, ROOT, *places, *(place.parent for place in places)]
        for name in re.findall(r"`([\w*-]+\.(?:py|cuh?|md|toml))`", paragraph):
            if not any(list(place.glob(name)) for place in folders if place.is_dir()):
                missing.append(name)
    return missing


@all_pages
def test_paths_exist(page):
    text = page.read_text(encoding="utf-8")
    written = re.findall(r"<!-- save as (.*) -->", text)  # when the page's blocks run
    assert [path for path in missing_paths(text, page.parent) if path not in written] == []


def test_missing_paths_are_found():
    right = (
        "`fp8moe/cuda/sm90/gemm.cu`, `ptx.cuh`,\n`tests/gpu/test_<op>.py`, [x](docs/gemm.md), https://a.b/docs/no.md"
    )
    assert missing_paths(right, ROOT) == []
    wrong = "`fp8moe/cuda/no.cu`, `no.cuh` and `tests/no*.py` in docs/no.md\n\n`gemm.cu`"
    assert missing_paths(wrong, ROOT) == ["fp8moe/cuda/no.cu", "tests/no*.py", "docs/no.md", "no.cuh", "gemm.cu"]


@all_pages
def test_scripts_of_several_processes_end_with_a_barrier(page):
    """A process that ends at once may abort (pytorch/pytorch#179291), too seldom for a test that runs it."""
    text = page.read_text(encoding="utf-8")
    ends = re.findall(r"(.*)\ndist\.destroy_process_group\(\)\n", text)
    assert ends == ["dist.barrier()"] * text.count("destroy_process_group()")


def resolves(name):
    """Whether a dotted name is a module of this repository, or a name in one."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def named(text):
    """Dotted names of this package, and what is imported from it."""
    names = re.findall(r"(?<![\w/.-])fp8moe(?:\.[A-Za-z_]\w*)+", text)
    for module, imported in re.findall(r"from (fp8moe[\w.]*) import \(?([\w, ]+)", text):
        names += [f"{module}.{name.strip()}" for name in imported.split(",") if name.strip()]
    return names


@all_pages
def test_names_exist(page):
    text = page.read_text(encoding="utf-8")
    assert [name for name in named(text) if not resolves(name)] == []
    modules = re.findall(r"\b(?:benchmarks|tools|examples)(?:\.[a-z_]\w*)+\b(?!/)", text)
    sources = [name for name in modules if not name.endswith((".py", ".md"))]
    assert [name for name in sources if util.find_spec(name) is None and not resolves(name)] == []


def test_wrong_names_are_found():
    text = "`fp8moe.gemm`, fp8moe.layers.master.no, fp8moe::gemm, fp8moe/cuda\nfrom fp8moe.no import a, b\n"
    assert named(text) == ["fp8moe.gemm", "fp8moe.layers.master.no", "fp8moe.no", "fp8moe.no.a", "fp8moe.no.b"]
    assert [name for name in named(text) if resolves(name)] == ["fp8moe.gemm"]


@all_pages
def test_commands_exist(page):
    text = page.read_text(encoding="utf-8")
    commands = re.findall(r"(?:^|`)fp8moe ([a-z]+)", text, flags=re.MULTILINE)
    assert set(commands) <= {*re.findall(r"^    (\w+) ", _parser().format_help(), flags=re.MULTILINE)}
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)[1].split()
    assert set(re.findall(r"(?:^|`)make ([a-z]+)", text, flags=re.MULTILINE)) <= set(targets)


@pytest.mark.parametrize("name", tables.FILES)
def test_figures_are_those_of_the_stored_files(name):
    benchmarks = tables.stored()
    text = (ROOT / name).read_text(encoding="utf-8")
    assert tables.with_tables(text, tables.FILES[name](benchmarks)) == text, "run python -m benchmarks.tables"


def test_pictures_are_of_the_files_that_the_tables_are_of():
    results = plots.shown(tables.stored())
    drawn = {path.stem: Image.open(path).info.get("Source") for path in (ROOT / "docs/images").glob("*.png")}
    assert drawn == {name: plots.hash_of(result) for name, result in results.items()}, "run python -m benchmarks.plots"


def test_tables_need_their_place():
    text = f"a\n{tables.BEGIN}old\n{tables.END}b\n"
    assert tables.with_tables(text, "new\n") == text.replace("old", "new")
    for wrong in ("a\n", tables.BEGIN, tables.END + tables.BEGIN, text + text):
        with pytest.raises(ValueError, match="once each"):
            tables.with_tables(wrong, "new\n")


def literals():
    """The texts of the package's sources, with ... for what is filled in."""
    for path in (ROOT / "fp8moe").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_messages_of_the_troubleshooting_page_exist():
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r'^\| "(.*)" \|', text, flags=re.MULTILINE)
    assert len(messages) > 10
    sources = list(literals())
    for message in messages:
        pattern = ".*".join(re.escape(part.strip()) for part in message.split("..."))
        assert any(re.search(pattern, source, flags=re.DOTALL) for source in sources), message


def test_readme_is_short():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 180
    benchmarks = text.partition(tables.BEGIN)[2].partition(tables.END)[0]
    assert len(re.findall(r"[\w.%-]+", benchmarks)) <= 350


def test_readme_names_the_versions_of_transformers_that_are_tested():
    """The oldest that may be installed, and that of docs/models.md."""
    readme, models = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/models.md"))
    oldest, newest = re.search(
        r"^\| transformers \(optional\) \|.*\| (\S+), (\S+) \|$", readme, flags=re.MULTILINE
    ).groups()
    assert f"transformers>={oldest},<6" in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f"\ntransformers {newest}." in models


def test_readme_has_what_the_demo_has_measured():
    """`python -m examples.demo --json validation/demo.json` writes it."""
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    demo = json.loads((ROOT / "validation/demo.json").read_text())
    plain, *others = [*demo["perplexity"].values(), *demo["experts_in_four_bits"].values()]
    fp8, mixture, mxfp4, int4, int4_32, nvfp4 = (f"{other / plain - 1:.1%}" for other in others)
    assert f"whose perplexity rises by {fp8} in FP8 and by {mixture} as a mixture of experts" in text
    int4 = f"{int4} in INT4 with a scale for 128 values, {int4_32} for 32, {nvfp4} in NVFP4"
    assert f"with its experts rounded to nearest, {mxfp4} in MXFP4, {int4}" in text
