"""Every code block of README.md and docs/*.md runs as written; tests/docs_blocks.py says how."""

import ast
import shutil

import pytest
import torch

from tests.docs_blocks import LANGUAGES, PAGES, blocks, lone_blocks, run_blocks, unresolved
from tests.docs_commands import COMMANDS
from tests.docs_pages import WITH_CODE, models, run_alone, run_page
from tests.processes import start_processes

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_blocks_run(page, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # tests/gpu/test_docs.py runs them on a GPU
    run_page(page, tmp_path, has_gpu=False)


@pytest.mark.parametrize(
    "block", [block for page in PAGES for block in lone_blocks(page)], ids=lambda block: block.place
)
def test_a_block_runs_alone(block, tmp_path):
    """Pasted into a new interpreter: a process forked from one that has imported torch, transformers and fp8moe."""
    pytest.importorskip("transformers")
    shutil.copytree(models().name, tmp_path, dirs_exist_ok=True)
    start_processes(run_alone, (block, tmp_path), 1)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_block_is_missed(page):
    text = page.read_text(encoding="utf-8")
    assert 2 * len(blocks(page)) == sum(line.startswith("```") for line in text.splitlines())
    assert {block.language for block in blocks(page)} <= set(LANGUAGES)
    outside = "".join(part for part in text.split("```")[::2])
    assert [line for line in outside.splitlines() if line.startswith("    ")] == []  # an indented block


def test_names_of_a_block_that_is_not_run():
    text = "import torch\ngraph = torch.cuda.CUDAGraph()\nwith torch.cuda.graph(graph):\n    y = layer(x).float()\n"
    assert unresolved(ast.parse(text), {"layer": None, "x": None}) == []
    assert unresolved(ast.parse(text), {"x": None}) == ["layer"]
    assert unresolved(ast.parse(text.replace("CUDAG", "G")), {"layer": None, "x": None}) == ["torch.cuda.Graph"]
    with pytest.raises(ImportError):
        unresolved(ast.parse("from fp8moe import no_such_name"), {})


def test_a_failing_block_fails_its_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    for text, error in {
        "```python\nassert False\n```": AssertionError,
        "```sh\nfp8moe inspect nowhere\n```": AssertionError,
        "```sh\nfalse\ntrue\n```": AssertionError,
        "<!-- save as x.py -->\n```python\n1 +\n```": SyntaxError,
        "<!-- needs a GPU -->\n```python\n1 +\n```": SyntaxError,
    }.items():
        page.write_text(text + "\n")
        with pytest.raises(error):
            run_blocks(blocks(page), tmp_path, has_gpu=False)


@pytest.mark.parametrize(
    "command", ["make no_such_target", "make", "pip install .[no_such_extra]", "pip download .", "pip install"]
)
def test_stand_ins_refuse_what_is_not_there(command):
    name, *arguments = command.split()
    assert COMMANDS[name](arguments) != 0
