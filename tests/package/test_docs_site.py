"""`make docs`: the site has every public name, no link leads nowhere, and the search finds what the pages say."""

import json
import os
import re
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.public_names import PUBLIC

pytest.importorskip("mkdocs")
yaml = pytest.importorskip("yaml")
from tools.docs_docstrings import to_markdown  # noqa: E402
from tools.docs_site import PAGES, with_links  # noqa: E402

ROOT = Path(__file__).parents[2]
METHODS = tuple(f"GraphDecoder.{name}" for name in ("generate", "prefix", "stream", "run", "stats"))
LAYER_METHODS = ("FP8Linear.from_linear", "GroupedExperts.from_experts", "GroupedExperts.forward_rows")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", directory]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stderr
    return directory


@pytest.fixture(scope="module")
def entries(site):
    """Names of the reference, and the page and anchor of each."""
    *_, compressed = (site / "objects.inv").read_bytes().split(b"\n", 4)
    found = {}
    for line in zlib.decompress(compressed).decode().splitlines():
        name, _, _, place, _ = line.split(" ", 4)
        found[name] = place.replace("$", name)
    return found


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_has_an_entry(module, entries):
    names = [name for name in import_module(module).__all__ if not name.startswith("__")]
    assert [name for name in names if f"{module}.{name}" not in entries] == []


def test_methods_have_entries(entries):
    assert [name for name in METHODS if f"fp8moe.decode.{name}" not in entries] == []
    assert [name for name in LAYER_METHODS if f"fp8moe.{name}" not in entries] == []


def test_entries_have_docstrings(site, entries):
    page, _, anchor = entries["fp8moe.gemm"].partition("#")
    text = (site / page).read_text(encoding="utf-8").partition(f'id="{anchor}"')[2]
    assert "<li><code>bias</code>: (N,) bfloat16" in text


class Targets(HTMLParser):
    """The links of a page, and what they can point to in it."""

    def __init__(self, text):
        super().__init__()
        self.links, self.ids = [], {""}
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.ids |= {attributes.get("id"), attributes.get("name")}
        self.links += [attributes[name] for name in ("href", "src") if attributes.get(name)]


def test_links_hold(site, entries):
    pages = {path: Targets(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    wrong, count = [], 0
    for path, page in pages.items():
        links = page.links if path.name != "404.html" else []  # its links are absolute: it is served everywhere
        for link in [*links, *(entries.values() if path.name == "index.html" else ())]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = Path(os.path.normpath(path.parent / unquote(parts.path))) if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchors = pages[target].ids if target in pages else {""}
            count += 1
            if not target.is_file() or unquote(parts.fragment) not in anchors:
                wrong.append(f"{path.relative_to(site)}: {link}")
    assert count > 1000
    assert wrong == []


def test_every_page_is_in_the_menu():
    def pages(entry):
        if isinstance(entry, str):
            return {entry}
        return set().union(*map(pages, entry.values() if isinstance(entry, dict) else entry))

    listed = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    docs = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert listed == docs | set(PAGES.values())


def test_nothing_is_fetched_from_elsewhere(site):
    for path in site.rglob("*.html"):
        for link in Targets(path.read_text(encoding="utf-8")).links:
            assert not link.endswith((".js", ".css")) or not urlsplit(link).netloc, f"{path.name}: {link}"


def test_the_search_works_from_the_disk(site):
    """Nothing may be fetched there, and no worker may start: the index is a script, and another replaces the worker."""
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    script = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    assert script.startswith("var __index = ") and json.loads(script.removeprefix("var __index = ")) == index
    for page, folder in {"index.html": "assets", "reference/layers.html": "../assets"}.items():
        shim = f"{folder}/iframe-worker.js"
        assert shim in Targets((site / page).read_text(encoding="utf-8")).links
        assert (site / page).parent.joinpath(shim).is_file()


def test_the_search_finds_functions(site):
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    titles = {entry["title"] for entry in index["docs"]}
    assert any("grouped_gemm_masked" in title for title in titles)
    assert any("Environment variables" in title for title in titles)


FOUND = {
    **dict.fromkeys(("per-channel FP8", "compressed-tensors", "ModelOpt", "MXFP4"), "formats.html"),
    **dict.fromkeys(("vLLM", "SGLang", "torchtitan"), "engines.html"),
    **dict.fromkeys(("TRL", "verl"), "rl.html"),
    **dict.fromkeys(("chat template", "Trainer", "lm_eval"), "recipes.html"),
    **dict.fromkeys(("Mixtral", "DeepSeek-V3", "GPT-OSS", "Qwen3-30B-A3B"), "readme.html"),
}
"""What people look for, and the page that has it."""


@pytest.mark.parametrize(("query", "page"), FOUND.items())
def test_the_search_finds_what_people_look_for(query, page, site):
    """In one section of the page, as the search asks for: all words, which end at spaces and hyphens."""
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    assert index["config"]["separator"] == r"[\s\-]+"

    def words(text):
        return {word.strip(".,:;()`") for word in re.split(r"[\s\-]+", re.sub(r"<[^>]*>", " ", text).lower())}

    sections = [entry for entry in index["docs"] if words(query) <= words(f"{entry['title']} {entry['text']}")]
    assert page in {entry["location"].partition("#")[0] for entry in sections}


def test_links_between_pages_and_the_repository():
    text = "[a](docs/gemm.md#b) ![p](docs/images/x.png) [c](CHANGELOG.md) [d](fp8moe/cli.py) [e](https://f) [g](#h)"
    expected = "[a](gemm.md#b) ![p](images/x.png) [c](changelog.md) d [e](https://f) [g](#h)"
    assert with_links(text, "", "") == expected
    text = "[a](../../README.md#use) [b](../gemm.md) [c](layers.md)"
    assert with_links(text, "docs/reference", "reference") == "[a](../readme.md#use) [b](../gemm.md) [c](layers.md)"


def test_docstrings_become_markdown():
    docstring = """Sums.

a, b: operands
    of any size.
c: another.
Returns it.
Args:
    d: one.
        more.

Else: text."""
    markdown = """Sums.
- `a`, `b`: operands
    of any size.
- `c`: another.
Returns it.
**Args:**
- `d`: one.
    more.
Else: text."""
    assert re.sub(r"\n+", "\n", to_markdown(docstring)) == markdown
