"""benchmarks.warmup: what it asks the command for, and what it makes of the answers."""

import json
from pathlib import Path

import pytest

from benchmarks import command, tables, warmup

transformers = pytest.importorskip("transformers")


def test_configurations_are_those_of_whole_models_in_fp8():
    made = transformers.AutoConfig.for_model(**warmup.configuration("deepseek-v3"))
    assert (made.num_hidden_layers, made.first_k_dense_replace, made.n_routed_experts) == (61, 3, 256)
    assert made.quantization_config["quant_method"] == "fp8"


def test_lengths_are_those_around_powers_of_two():
    assert warmup.LENGTHS[:39] == [*range(1, 40)] and warmup.LENGTHS[-1] == warmup.LONGEST
    assert {4096, 4097, 8192} < set(warmup.LENGTHS)


def test_kernels_are_counted_and_what_is_missing_misses_the_threshold(monkeypatch, tmp_path):
    def run_python(program, *arguments, **environment):
        if arguments[0] != "warmup":
            assert Path(environment["FP8MOE_CACHE_DIR"]).is_dir() and arguments == ("qwen3-30b-a3b",)
            return 'a warning\n["gemm", "gemm"]\n'
        assert json.loads(Path(arguments[1]).read_text())["model_type"] == "qwen3_moe"
        cache = Path(arguments[arguments.index("--output") + 1], "kernels")
        cache.mkdir(parents=True)
        for name, size in {"a": 1_500_000, "b": 500_000, "lock": 0}.items():
            (cache / name).write_bytes(bytes(size))
        return ""

    monkeypatch.setattr(warmup, "run_python", run_python)
    monkeypatch.setattr(command, "start", lambda: "no GPU")
    result = warmup.run(["qwen3-30b-a3b"])
    (row,), (threshold,) = result["rows"], result["thresholds"]
    assert (row["kernels"], row["mb"], row["compiled"], row["missing"]) == (2, 2.0, 2, ["gemm", "gemm"])
    assert not threshold["passed"]
    last = tables.warmup({"warmup": result}).splitlines()[-1]
    assert last.startswith("| qwen3-30b-a3b | ") and last.endswith(" | 2 MB | 2 |")
