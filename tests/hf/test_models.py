"""docs/models.md: it lists every mixture-of-experts model, nothing in it is wrong, and it is what the tool finds."""

import json
import re
import sys
from contextlib import redirect_stdout
from importlib import metadata
from io import StringIO

import pytest

transformers = pytest.importorskip("transformers")
from tests.tiny_moe_models import LEFT_OUT, MODELS, moe_classes  # noqa: E402
from tests.warmup_processes import in_processes  # noqa: E402
from tools import model_matrix  # noqa: E402
from tools.model_matrix import COLUMNS, MARK, PAGE, page, read_page  # noqa: E402

SAMPLE = ("MixtralForCausalLM", "GptOssForCausalLM", "Llama4ForCausalLM", "DeepseekV4ForCausalLM")
"""Rows that are tried anew here: `python -m tools.model_matrix` does all."""


@pytest.fixture(scope="module")
def written():
    return PAGE.read_text().partition(MARK)[2].lstrip("\n")


@pytest.fixture(scope="module")
def table(written):
    version, table = read_page(written)
    if version != metadata.version("transformers"):
        pytest.skip(f"the page is of transformers {version}")
    return table


def test_every_class_of_the_installed_transformers_is_known():
    found = moe_classes()
    assert found - set(LEFT_OUT) == set(MODELS)
    assert all(reason for reason in LEFT_OUT.values())


def test_every_class_is_in_the_table(table, written):
    assert set(table) == set(MODELS)
    for name in moe_classes() - set(table):
        assert f"- {name}: {LEFT_OUT[name]}" in written


def test_no_cell_is_wrong(written):
    _, table = read_page(written)
    for name, row in table.items():
        for column in COLUMNS:
            assert row[column].partition(": ")[0] in ("yes", "refused"), f"{name}, {column}: {row[column]}"


def test_the_page_is_as_the_tool_writes_it(table, written):
    assert page(table, metadata.version("transformers")) == written


def test_models_by_name_are_of_classes_in_the_table(table):
    names = PAGE.read_text().partition(MARK)[0]
    lines = re.findall(r"^\| .* \| (\w+For\w+(?:, \w+)*) \| (.*)\|$", names, flags=re.MULTILINE)
    assert len(lines) > 20
    for classes, but in lines:
        for name in classes.split(", "):
            works = [table[name][column] for column in COLUMNS[:5]]
            limited = works[0] != "yes" or not all(cell.startswith("yes") for cell in works)
            assert limited == bool(but.strip()), name


def printed(*arguments):
    """What the command prints, in a process that has imported transformers."""
    sys.argv = ["model_matrix", *arguments]
    with redirect_stdout(StringIO()) as output:
        model_matrix.main()
    return output.getvalue()


def test_a_sample_of_the_rows(table):
    (output,) = in_processes((printed, *SAMPLE))
    rows = [json.loads(line) for line in output.splitlines()]
    assert rows == [{name: table[name]} for name in SAMPLE]


@pytest.mark.parametrize("name", MODELS)
def test_the_tiny_model_is_of_its_class(name):
    model = MODELS[name]
    assert model.auto_class._model_mapping[type(model.config())].__name__ == name
