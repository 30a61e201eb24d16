"""Checkpoints that `benchmarks.load` writes are loaded as the models whose sizes they have."""

import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks import load, report, whole_models
from fp8moe import GroupedExperts
from fp8moe.weights import find_format

pytest.importorskip("transformers")

SIZES = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 64}
SIZES |= {"num_experts_per_tok": 2, "num_hidden_layers": 3}
SMALL = {
    "gpt-oss-120b": ("gpt_oss", SIZES | {"intermediate_size": 96, "num_local_experts": 4, "sliding_window": 4}),
    "qwen3-30b-a3b": ("qwen3_moe", SIZES | {"moe_intermediate_size": 128, "num_experts": 4}),
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    for name, config in SMALL.items():
        monkeypatch.setitem(whole_models.CONFIGS, name, config)
    calls = ("empty_cache", "reset_peak_memory_stats", "synchronize")
    cuda = {name: lambda: None for name in calls} | {"memory_allocated": lambda: 1000}
    cuda |= dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), lambda: 201_000)
    monkeypatch.setattr(load, "torch", SimpleNamespace(**vars(torch) | {"cuda": SimpleNamespace(**cuda)}))


@pytest.mark.parametrize(
    ("name", "experts"),
    [("gpt-oss-120b", "mxfp4"), *(("qwen3-30b-a3b", form) for form in ("fp8", "mxfp4", "nvfp4"))],
)
def test_a_checkpoint_is_the_models_whose_layers_repeat(name, experts, tmp_path):
    load.write_checkpoint(name, experts, tmp_path / "it", device="cpu")
    assert find_format(tmp_path / "it").loads
    model, row = load.measure_load(tmp_path / "it", device="cpu")
    expected = whole_models.build(name, experts=experts, device="cpu")
    assert model.config.num_hidden_layers == 3 and isinstance(model.model.layers[2].mlp.experts, GroupedExperts)
    assert getattr(model.config, "layer_types", None) == getattr(expected.config, "layer_types", None)
    found, wanted = dict(model.named_parameters()), dict(expected.named_parameters())
    assert found.keys() == wanted.keys()
    for key, value in found.items():
        first = wanted[key.replace(".layers.1.", ".layers.0.").replace(".layers.2.", ".layers.0.")]
        same = (part.view(torch.uint8) if part.element_size() == 1 else part for part in (value, first))
        assert torch.equal(*same), key
    size = sum(file.stat().st_size for file in (tmp_path / "it").glob("*.safetensors"))
    assert row["peak_over_stored"] == pytest.approx(200_000 / size) and row["stored_gb"] == size / 1e9


def test_rows_are_of_the_checkpoint_in_the_directory(tmp_path, monkeypatch):
    written, kept = [], load.write_checkpoint
    monkeypatch.setattr(report, "start", lambda: "a GPU")
    monkeypatch.setattr(report, "digest", lambda root: "d")
    monkeypatch.setattr(load, "measure_load", lambda place, of=load.measure_load: of(place, "cpu"))
    monkeypatch.setattr(load, "measure_decode", lambda model, batch, prompt: {"what": "decode", "batch": batch})
    monkeypatch.setattr(load, "write_checkpoint", lambda *which: written.append(which) or kept(*which, device="cpu"))
    options = ["--model", "qwen3-30b-a3b", "--experts", "nvfp4", "--directory", str(tmp_path), "--out", str(tmp_path)]
    for _ in range(2):  # the second time, the checkpoint is there
        assert load.LOAD.main([*options, "--batch", "8"]) == 0
    assert written == [("qwen3-30b-a3b", "nvfp4", tmp_path / "qwen3-30b-a3b-nvfp4")]
    made = json.loads((tmp_path / "load.json").read_text())
    assert [row.get("batch") for row in made["rows"]] == [None, 8] and len(made["thresholds"]) == 1


def test_a_directory_that_is_too_small_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(load.shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(SystemExit, match="0.0 GB are needed for gpt-oss-120b"):
        load.write_checkpoint("gpt-oss-120b", "mxfp4", tmp_path, device="cpu")
    assert not any(tmp_path.iterdir())
