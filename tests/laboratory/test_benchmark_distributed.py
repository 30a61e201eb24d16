"""benchmarks.distributed: everything but the timing; and what benchmarks.roofline and benchmarks.tables make of it."""

import json

import pytest
import torch
import torch.distributed as dist

from benchmarks import distributed, roofline, tables
from benchmarks.shapes import MODELS, Model
from tests.processes import in_processes


@pytest.fixture
def of_two(monkeypatch):
    """This process is rank 1 of two; rank 0 has the same values."""
    monkeypatch.setattr(dist, "get_rank", lambda *_: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda value, *_: value.mul_(2))


def test_agreement_counts_equal_and_farther_values(of_two):
    expected = torch.ones(2, 8, dtype=torch.bfloat16)
    expected[:, 0] = 2.0**-20  # sums that cancel: their steps are those of the token
    ours = expected.clone()
    assert distributed.agreement(ours, expected) == {"equal": 1.0, "farther": 0.0}
    ours[0, 0] += 2.0**-9
    ours[0, 1] += 2.0**-7  # a step of 1.0
    assert distributed.agreement(ours, expected) == {"equal": 14 / 16, "farther": 0.0}
    ours[1, 1] += 2.0**-6
    assert distributed.agreement(ours, expected) == {"equal": 13 / 16, "farther": 1 / 16}


def run_on_cpus(path):
    """The parts layer and training, tiny and without clocks, on a rank of two: its rows."""
    distributed.MODEL, distributed.MANY = Model(256, 128, 8, 2), 16
    distributed.captured = lambda call: call
    distributed.microseconds = lambda call, repeats=0: (call(), 1.0)[1]
    distributed.measure_scratch = lambda layer, given: {"what": "scratch", "tokens": len(layer(*given))}
    rows = [*distributed.measure_layers((1, 24)), *distributed.measure_training(24, 3)]
    (path / f"{dist.get_rank()}.json").write_text(json.dumps(rows))


@pytest.fixture(scope="module")
def rows_of_two(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows")
    in_processes(run_on_cpus, path)
    first, second = (json.loads((path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    return first


def test_all_methods_give_what_one_layer_gives(rows_of_two):
    layers = {(row["method"], row["tokens"]): row for row in rows_of_two if row["what"] == "layer"}
    assert layers.keys() == {(name, n) for name in ("one_gpu", "local", *distributed.METHODS) for n in (1, 24)}
    assert all(row.get("equal", 1.0) > 0.999 and row.get("farther", 0.0) == 0.0 for row in layers.values())
    assert layers["all_to_all, exact, eager", 24]["equal"] == 1.0
    assert [row["tokens"] for row in rows_of_two if row["what"] == "scratch"] == [16]
    chosen = [row for row in rows_of_two if row["what"] == "auto"]
    assert [(row["tokens"], row["method"]) for row in chosen] == [(1, "gather"), (24, "gather")]
    assert all("eager" in row["fastest"] for row in chosen)


def test_a_process_without_a_gpu_reads_its_arguments_and_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(SystemExit, match="^2$"):
        distributed.main(["--only", "layer", "nothing"])
    options = ["--ranks", "2", "--tokens", "1", "--layers", "2", "--model", "deepseek-v3", "--out", "b"]
    with pytest.raises(SystemExit, match="needs a Hopper GPU"):
        distributed.main(options)


DSV3 = MODELS["dsv3"]
ROUTING = 8 * 8
FP8_ROW = 7168 + 4 * 56 + ROUTING


def test_bytes_of_each_method():
    assert all(roofline.sent_bytes(DSV3, "gather, NCCL", ranks) == FP8_ROW + 4 * 7168 for ranks in (2, 8, 64))
    # Over all ranks as many bfloat16 rows as a token has experts; as many tokens go out as a rank has an expert of.
    for ranks in (2, 8, 64):
        needed = (roofline.sent_bytes(DSV3, "all_to_all, eager", ranks)) / (FP8_ROW + 4 * 7168)
        found = torch.rand(20000, 256, generator=torch.Generator().manual_seed(ranks)).topk(8).indices
        assert needed == pytest.approx(float((found < 256 // ranks).any(1).double().mean()), rel=0.05)
        stored = roofline.sent_bytes(DSV3, "gather", ranks)
        assert stored == pytest.approx(needed * (FP8_ROW - ROUTING + 4 * 7168) + ROUTING)
        exact = roofline.sent_bytes(DSV3, "all_to_all, exact, eager", ranks)
        assert ranks * (exact - needed * FP8_ROW) == pytest.approx(8 * 2 * 7168)


def layers(**us):
    """Rows of two GPUs with one token and 4096 a rank."""
    return [
        {"what": "layer", "method": method, "tokens": tokens, "us": float(value)}
        for method, values in us.items()
        for tokens, value in zip((1, 4096), values, strict=True)
    ]


MADE_UP = {
    "one_gpu": (190, 7900),
    "local": (100, 3600),
    "gather": (110, 4300),
    "gather, NCCL": (140, 4600),
    "replicated": (110, 4500),
    "all_to_all, eager": (2700, 5100),
    "all_to_all, exact, eager": (3600, 6000),
}


def by_key(rows):
    return {(row["ranks"], row["tokens"], row["method"]): row["us"] for row in rows}


def test_predictions_for_two_gpus_are_what_they_are_made_from(monkeypatch):
    monkeypatch.setattr(roofline, "RANKS", (2,))
    found = by_key(roofline.predicted(layers(**MADE_UP), DSV3))
    assert found == {
        (2, tokens, method): pytest.approx(us, rel=1e-3)
        for method in ("local", *roofline.METHODS)
        for tokens, us in zip((1, 4096), MADE_UP[method], strict=True)
    }


def test_predictions_add_up_experts_latency_and_bytes():
    found = by_key(roofline.predicted(layers(**MADE_UP), DSV3))
    local = {key[:2]: us for key, us in found.items() if key[2] == "local"}
    assert local[8, 4096] == pytest.approx(3600, rel=0.2) and local[64, 1] < local[8, 1] < 100
    a_token = (700 - 10) / 4095  # us, of its bytes to one rank: what 4096 tokens take longer than one
    fewer = roofline.sent_bytes(DSV3, "gather", 8) / roofline.sent_bytes(DSV3, "gather", 2)
    assert 0.6 < fewer < 0.7
    for tokens in (1, 4096):
        beyond = 10 - a_token + 7 * tokens * a_token * fewer
        assert found[8, tokens, "gather"] - local[8, tokens] == pytest.approx(beyond)
    over_network = 56 * 4096 * (FP8_ROW + 4 * 7168) / 45e3
    assert found[64, 4096, "gather"] - local[64, 4096] == pytest.approx(40 + 2 * 20 + over_network, rel=1e-3)
    assert found[8, 1, "all_to_all, eager"] == 2700 and found[8, 1, "all_to_all, exact, eager"] == 3600
    # Where a rank has few of a token's experts, bfloat16 rows for each are fewer bytes than float32 sums for each rank.
    assert found[64, 4096, "all_to_all, exact, eager"] < found[64, 4096, "all_to_all, eager"]
    assert found[64, 4096, "all_to_all, eager"] < found[64, 4096, "gather"]


def a_result():
    rows = layers(**MADE_UP)
    for row in rows:
        if row["method"] not in ("one_gpu", "local"):
            row["equal"] = 1.0 if "exact" in row["method"] else 0.99993
    rows.append({"what": "scratch", "tokens": 4096, "over_share": 1.176})
    rows.append({"what": "training", "tokens": 4096, "method": "local", "us": 1.0})
    rows.append({"what": "training", "tokens": 4096, "method": "gather", "over_local": 1.2})
    rows.append(
        {"what": "decode", "model": "a-model", "batch": 64, "ms": 8.0, "one_gpu_ms": 10.7, "over_one_gpu": 0.75}
    )
    return {"gpu": "NVIDIA H200", "rows": rows}


def test_tables_of_a_result():
    lines = tables.distributed({"distributed": a_result()}).splitlines()
    assert "| 1 | 190 | 100 | 110 (1.10) | 140 (1.40) | 110 (1.10) | 2700 (27.00) | 3600 (36.00) |" in lines
    for last in ("99.9930%", "100.0000%", "1.18", "1.20"):
        assert any(line.endswith(f"| {last} |") for line in lines)
    assert "| a step of a-model, batch 64 in all: two GPUs, one GPU | 8.0 ms, 10.7 ms (0.75) |" in lines
    assert sum("predicted" in line for line in lines) == 2
