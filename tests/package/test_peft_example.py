"""examples/finetune_lora.py on a small model: its loss falls, its adapters are saved, merging is reported."""

import re

import pytest
import torch

from examples.demo import smollm2
from tests.docs_blocks import ROOT, blocks, unresolved
from tests.tiny_tokenizer import write_tiny_tokenizer

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
from examples import finetune_lora  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def dense(tmp_path, monkeypatch):
    torch.manual_seed(0)
    shape = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 3}
    config = transformers.LlamaConfig(vocab_size=128, num_key_value_heads=1, initializer_range=0.3, **shape)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "dense")
    write_tiny_tokenizer(tmp_path / "dense")
    monkeypatch.setattr(smollm2, "find_gguf", lambda path: None)
    monkeypatch.setattr(smollm2, "prepare", lambda gguf, cache: tmp_path / "dense")
    monkeypatch.setattr(smollm2, "KEPT_LAYERS", (0, 0))
    monkeypatch.setattr(finetune_lora.measure, "passage", lambda: "The rabbit looked at its watch. " * 60)
    return tmp_path / "dense"


def test_the_loss_falls(dense, tmp_path, monkeypatch, capsys):
    results = []
    finetune = finetune_lora.finetune
    monkeypatch.setattr(finetune_lora, "finetune", lambda *a, **kw: results.append(finetune(*a, **kw)) or results[0])
    arguments = ["--device", "cpu", "--steps", "12", "--rank", "4", "--learning-rate", "0.02"]
    assert finetune_lora.main([*arguments, "--out", str(tmp_path / "lora")]) == 0
    (result,) = results
    assert len(result.losses) == 12 and result.losses[-1] < 0.7 * result.losses[0]
    assert result.adapted < 0.7 * result.before
    assert result.merged < 0.7 * result.before
    assert 2e-2 < result.weight_error < 3e-2 and result.adapter_error > 0
    saved = peft.PeftConfig.from_pretrained(tmp_path / "lora")
    assert saved.r == 4 and set(saved.target_parameters) == {"experts.gate_up_proj", "experts.down_proj"}
    printed = capsys.readouterr().out
    assert re.search(r"trained \d+\.\d% of the parameters: loss .* in the first step, \d+\.\d+ in the last", printed)
    assert f"adapters: {tmp_path / 'lora'}" in printed


def test_each_block_of_the_page_stands_alone():
    """But for the files that another has written."""
    page = [block for block in blocks(ROOT / "docs/finetuning.md") if block.language == "python"]
    assert len(page) == 4 and [unresolved(block.tree(), {}) for block in page] == [[]] * 4


def test_bad_arguments_are_refused(dense, capsys):
    for option in ("--steps", "--rank"):
        with pytest.raises(SystemExit):
            finetune_lora.main([option, "0"])
        assert f"{option} is 0; it must be at least 1" in capsys.readouterr().err
