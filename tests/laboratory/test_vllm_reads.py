"""What `tools.vllm_reads` compares, with a vLLM that is `load_model`."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from benchmarks import vllm_engine
from tools import vllm_reads
from tools.vllm_serving import log_probabilities

pytest.importorskip("transformers")

SMALL = {"vocab_size": 64, "hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 128}
SMALL |= {"num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 1, "head_dim": 64}


def test_every_checkpoint_is_read_by_both(tmp_path, monkeypatch):
    from fp8moe.hf import load_model

    monkeypatch.setattr(vllm_reads, "SIZES", vllm_reads.SIZES | SMALL)
    monkeypatch.setattr(vllm_reads, "TOKENS", 16)

    def ask(directory, prompts, python):
        if directory.name == "save-int4":
            raise RuntimeError("exit code 1: KeyError")
        found = log_probabilities(load_model(directory), prompts)
        wrong = 5.0 if directory.name == "quantize-mxfp4" else 0.0
        return {"log_probabilities": [[value + wrong for value in row] for row in found], "methods": ["M"]}

    monkeypatch.setattr(vllm_reads, "ask_vllm", ask)
    rows = vllm_reads.measure(tmp_path, "python", device="cpu")
    assert [(row["written_by"], row["experts"]) for row in rows if not row["read"]] == [
        ("quantize", "mxfp4"),
        ("save", "int4"),
    ]
    assert rows[-2]["error"] == "exit code 1: KeyError"
    by_form = {row["experts"]: row["rounding"]["median"] for row in rows if row["written_by"] == "save"}
    assert len(rows) == 9 and 0 < by_form["fp8"] < by_form["mxfp4"]
    layouts = {name: json.loads((tmp_path / name / "config.json").read_text()) for name in ("save-fp8", "save-nvfp4")}
    methods = [content["quantization_config"]["quant_method"] for content in layouts.values()]
    assert methods == ["fp8", "compressed-tensors"]


def test_vllm_answers_in_a_file(tmp_path, monkeypatch):
    places = SimpleNamespace(logprob=-2.0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    model[0].quant_method = vllm_reads

    class LLM:
        def __init__(self, directory, **how):
            assert directory == str(tmp_path) and how["enforce_eager"]

        def generate(self, prompts, sampling, use_tqdm):
            tokens = [one["prompt_token_ids"] for one in prompts]
            return [SimpleNamespace(prompt_logprobs=[None, *({token: places} for token in one[1:])]) for one in tokens]

        def apply_model(self, function):
            return [function(model)]

    fake = ModuleType("vllm")
    fake.LLM, fake.SamplingParams = LLM, dict
    monkeypatch.setitem(sys.modules, "vllm", fake)
    for name in vllm_engine.ENVIRONMENT:
        monkeypatch.setenv(name, "0")
    (tmp_path / "prompts.json").write_text("[[1, 2, 3]]")
    vllm_reads.answer(str(tmp_path))
    assert json.loads((tmp_path / "answer.json").read_text()) == {
        "log_probabilities": [[-2.0, -2.0]],
        "methods": ["module"],
    }


def test_what_vllm_says_is_in_the_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "vllm.py").write_text("raise ImportError('no such kernel')\n")
    with pytest.raises(RuntimeError, match="(?s)exit code 1: .*ImportError: no such kernel"):
        vllm_reads.ask_vllm(tmp_path, [[1, 2]], sys.executable)
