"""The README: its examples run, its commands exist, its figures are those of the validation, and its table lists every
environment variable. Examples and figures of docs/mqa.md, too.
"""

import json
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from benchmarks import tables
from fp8moe.cli import main
from fp8moe.runtime.config import Settings
from tests.tiny_tokenizer import write_tiny_tokenizer

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def models(tmp_path, monkeypatch):
    """A tiny model where the README's commands look for a large one."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **{"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 97},
        **{"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "initializer_range": 0.1},
        **{"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 1},
    )
    monkeypatch.chdir(tmp_path)
    Qwen3MoeForCausalLM(config).bfloat16().save_pretrained("Qwen3-30B-A3B")
    write_tiny_tokenizer("Qwen3-30B-A3B")


def blocks(language, text=README):
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def test_examples_run(models):
    commands = [
        shlex.split(line, comments=True)[1:] for line in "".join(blocks("sh")).splitlines() if "fp8moe " in line
    ]
    assert [command[0] for command in commands] == ["quantize", "inspect"]
    for command in commands:
        assert main(command) == 0

    names = {}
    exec("\n".join(blocks("python")), names)
    assert names["y"].shape == (10, 576)
    assert names["fp8_experts"].num_experts == 8
    assert names["model"].config._experts_implementation == "fp8moe"
    prompts, tokens = names["prompts"]["input_ids"], names["tokens"]
    assert torch.equal(tokens[:, : prompts.shape[1]], prompts)
    assert 1 <= tokens.shape[1] - prompts.shape[1] <= 32
    exact, grouped = names["exact"], names["grouped"][70:].float()
    assert torch.linalg.norm(grouped - exact) / torch.linalg.norm(exact) < 2e-3


def test_examples_of_index_scores_run():
    names = {}
    exec("\n".join(blocks("python", (ROOT / "docs/mqa.md").read_text(encoding="utf-8"))), names)
    seen = [(names[result] != -torch.inf).sum(-1).tolist() for result in ("logits", "step")]
    assert seen == [[*range(1, 101), *range(1, 201)], [59, 60, 63, 64]]
    assert names["kept"].data.shape == (124, 128)
    assert (names["chosen"] >= 0).sum(-1).tolist() == [min(count, 32) for count in seen[0]]


def test_every_environment_variable_is_listed():
    assert set(re.findall(r"FP8MOE_[A-Z_]+", README)) == {f"FP8MOE_{field.name.upper()}" for field in fields(Settings)}


@pytest.mark.parametrize(
    "path", [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")], ids=lambda path: path.name
)
def test_links_lead_somewhere(path):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8"))
    for link in (link for link in links if not link.startswith("http")):
        assert (path.parent / link).is_file(), link


@pytest.mark.parametrize("name", tables.FILES)
def test_figures_are_those_of_the_validation(name):
    benchmarks = json.loads(tables.VALIDATION.read_text())["benchmarks"]
    text = (ROOT / name).read_text(encoding="utf-8")
    assert tables.with_tables(text, tables.FILES[name](benchmarks)) == text, "run python -m benchmarks.tables"


def test_tables_need_their_place():
    text = f"a\n{tables.BEGIN}old\n{tables.END}b\n"
    assert tables.with_tables(text, "new\n") == text.replace("old", "new")
    for wrong in ("a\n", tables.BEGIN, tables.END + tables.BEGIN, text + text):
        with pytest.raises(ValueError, match="once each"):
            tables.with_tables(wrong, "new\n")
