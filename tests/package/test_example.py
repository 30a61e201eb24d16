"""examples/train_moe.py: both runs end to end on the CPU, interrupted and resumed; its model, text and report."""

import json
import math
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch

from fp8moe import FP8Linear, GroupedExperts
from tests.processes import HOST, meeting_place, start_processes

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import loss_report  # noqa: E402
import moe_model  # noqa: E402
import python_text  # noqa: E402
import train_moe  # noqa: E402
from processes import exit_with  # noqa: E402
from train_moe import PRESETS  # noqa: E402

from tests.errors import refused  # noqa: E402

TINY = PRESETS["tiny"]
STEPS = 8

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def usual_algorithms():
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture
def short_text(monkeypatch):
    shorten(monkeypatch)


def shorten(patch):
    """Less text to train on and to validate with."""
    text = python_text.load()
    text = text._replace(train=text.train[: 1 << 20], validation=text.validation[: 1 << 16])
    patch.setattr(python_text, "load", lambda: text)
    patch.setattr(train_moe, "VALIDATION_BATCHES", 2)


def run(directory, *options):
    return train_moe.main(["--device", "cpu", "--steps", str(STEPS), "--out", str(directory), *options])


def interrupt_at(monkeypatch, call):
    """An interrupt arrives when the batch of that number is made; all of them are as before."""
    original, calls = python_text.windows, 0

    def windows(*arguments):
        nonlocal calls
        calls += 1
        if calls == call:
            signal.raise_signal(signal.SIGINT)
        return original(*arguments)

    monkeypatch.setattr(python_text, "windows", windows)


def test_an_interrupted_run_resumes_to_the_same_losses(tmp_path, monkeypatch, capsys, short_text):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(whole) == 0
    to_fp8 = STEPS - 3 + train_moe.VALIDATION_BATCHES
    for call in (3, to_fp8 + 4):  # in the third step of bf16, then in the fourth of FP8
        with monkeypatch.context() as patched:
            interrupt_at(patched, call)
            assert run(parts, "--resume") == 1
        assert not (parts / "losses.json").exists()
    assert "bf16 stopped after 3 of 8 steps" in (out := capsys.readouterr().out)
    assert "fp8 stopped after 4 of 8 steps" in out
    assert run(parts, "--resume") == 0

    expected, found = (json.loads((directory / "losses.json").read_text()) for directory in (whole, parts))
    for label in ("bf16", "fp8"):
        assert len(expected["runs"][label]["losses"]) == STEPS
        assert found["runs"][label]["losses"] == expected["runs"][label]["losses"]
        assert found["runs"][label]["validation"] == expected["runs"][label]["validation"]
    bf16, fp8 = (expected["runs"][label]["losses"] for label in ("bf16", "fp8"))
    assert bf16[0] == pytest.approx(math.log(256), abs=0.1)
    assert bf16[-1] < bf16[0] - 0.5  # it learns
    assert fp8 != bf16 and fp8 == pytest.approx(bf16, rel=5e-3)
    assert expected["ratio"] == pytest.approx(1, abs=5e-3)
    assert (whole / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in parts.iterdir()} == {"bf16", "fp8", "losses.json", "losses.png"}
    assert [path.name for path in (parts / "fp8").iterdir()] == [f"step-{STEPS:08}"]
    assert "FP8 against bf16" in capsys.readouterr().out

    refused(SystemExit, "another seed", run, parts, "--resume", "--seed", "1")


def go_on(rank, port, directory):
    """One of two processes, as torchrun starts them."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": HOST, "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    shorten(pytest.MonkeyPatch())
    exit_with(run(directory, "--ep", "2", "--resume"))


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_two_processes_that_share_the_experts_train_as_one_does(tmp_path, monkeypatch, short_text):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(whole) == 0
    with monkeypatch.context() as patched:  # one process begins with bf16, two go on, and make FP8 from the start
        interrupt_at(patched, 3)
        assert run(parts, "--resume") == 1
    store = meeting_place()
    start_processes(go_on, (store.port, parts), count=2)
    expected, found = (json.loads((directory / "losses.json").read_text()) for directory in (whole, parts))
    assert (expected["processes"], found["processes"]) == (1, 2)
    bf16, fp8 = (found["runs"][label]["losses"] for label in ("bf16", "fp8"))
    assert bf16[:3] == expected["runs"]["bf16"]["losses"][:3] and bf16[3:] != expected["runs"]["bf16"]["losses"][3:]
    assert bf16[-1] != fp8[-1]
    for label in ("bf16", "fp8"):
        ours, theirs = found["runs"][label], expected["runs"][label]
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-3)
        assert ours["validation"] == pytest.approx(theirs["validation"], rel=1e-3)
    assert run(parts, "--resume") == 0  # one process has what two have saved
    again = json.loads((parts / "losses.json").read_text())
    for label in ("bf16", "fp8"):
        assert again["runs"][label]["losses"] == found["runs"][label]["losses"]
        assert again["runs"][label]["validation"] == pytest.approx(found["runs"][label]["validation"], rel=1e-4)


def test_fp8_has_the_parameters_of_bf16():
    bf16, fp8 = (train_moe.make_model(label, TINY, 0, torch.device("cpu")) for label in ("bf16", "fp8"))
    expected, found = bf16.state_dict(), fp8.state_dict()
    assert found.keys() == expected.keys()
    assert all(value.dtype == torch.float32 and torch.equal(found[name], value) for name, value in expected.items())
    kinds = {name: type(module) for name, module in fp8.named_modules()}
    assert kinds["blocks.1.mlp.experts"] is GroupedExperts
    assert sum(kind is FP8Linear for kind in kinds.values()) == 2 * TINY.model.layers + 2 * TINY.model.layers
    assert [name for name, kind in kinds.items() if kind is torch.nn.Linear] == ["lm_head"]
    assert all(parameter.requires_grad for parameter in fp8.parameters())


def test_bf16_experts_are_a_weighted_sum_over_each_tokens_experts():
    torch.manual_seed(0)
    experts = moe_model.Experts(TINY.model)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    x = torch.randn(9, TINY.model.hidden)
    index = torch.tensor([[0, 3], [3, 1]] * 4 + [[0, 1]])  # none for expert 2
    weights = torch.rand(9, 2)
    expected = torch.zeros_like(x)
    for token, chosen in enumerate(index.tolist()):
        for k, e in enumerate(chosen):
            gate, up = (experts.gate_up_proj[e] @ x[token]).chunk(2)
            expected[token] += weights[token, k] * (experts.down_proj[e] @ (torch.nn.functional.silu(gate) * up))
    assert torch.allclose(experts(x, index, weights), expected, rtol=1e-4, atol=1e-5)


def test_attention_sees_no_later_token_and_depends_on_distance():
    torch.manual_seed(0)
    attention = moe_model.Attention(TINY.model)
    x = torch.randn(1, 16, TINY.model.hidden)
    changed = x.clone()
    changed[:, 10] += 1
    with torch.autocast("cpu", moe_model.DTYPE):
        before, after = attention(x), attention(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])
    q, k = (attention.rotate(torch.randn(1, TINY.model.hidden // 2).expand(16, -1)) for _ in range(2))
    scores = q @ k.T
    for distance in (0, 3):
        along = scores.diagonal(distance)
        assert torch.allclose(along, along[:1].expand_as(along), atol=1e-3)
    assert not torch.allclose(scores[0, 0], scores[0, 3], atol=1e-2)


def test_the_router_moves_its_bias_towards_equal_loads():
    torch.manual_seed(0)
    router = moe_model.Router(TINY.model)
    torch.nn.init.normal_(router.weight)
    x = torch.randn(200, TINY.model.hidden) + router.weight[0]  # everybody's favourite
    index, weights = router(x)
    assert index.shape == weights.shape == (200, TINY.model.top_k)
    assert torch.allclose(weights.sum(-1), torch.ones(200))
    assert router.load.tolist() == index.flatten().bincount(minlength=4).tolist()
    first = router.load[0].item()
    assert first > 150
    for _ in range(200):
        router(x)
        router.balance(5e-3)
    assert router.bias[0] < 0 and router.load[0] < 0.8 * first


def test_the_text_is_the_standard_librarys(tmp_path, monkeypatch):
    text = python_text.load()
    assert text.digest == python_text.load().digest
    assert text.files > 500 and len(text.train) > 10 * len(text.validation) > 10_000
    source = Path(re.__file__).read_bytes()
    assert any(source in part.numpy().tobytes() for part in (text.train, text.validation))

    for name in ("b.py", "site-packages/c.py", "a/d.py", "e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode() * (1 << 18))
    monkeypatch.setattr(python_text.sysconfig, "get_path", lambda name: str(tmp_path))
    small = python_text.load()  # a/d.py, the first, is for validation
    assert (bytes(small.train[:4]), bytes(small.validation[:6]), small.files) == (b"b.py", b"a/d.py", 2)
    (tmp_path / "b.py").unlink()
    refused(SystemExit, "no source", python_text.load)


def test_batches_are_the_same_for_every_run():
    text = torch.arange(200, dtype=torch.uint8)
    starts = train_moe.draw_starts(text, 500, TINY, seed=3)
    assert torch.equal(starts, train_moe.draw_starts(text, 500, TINY, seed=3))
    assert starts.shape == (500, 4)
    # Of 200 bytes there are three sequences of 64 with a byte behind; none comes again before the others have come.
    for three in starts.flatten()[:-2].view(-1, 3):
        assert sorted(three.tolist()) == [0, 64, 128]
    batch = python_text.windows(text, starts[0], 65)
    assert torch.equal(batch, starts[0][:, None] + torch.arange(65))


def test_rates_warm_up_and_decay():
    factors = [train_moe.schedule(step, 100) for step in range(100)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[5:] == sorted(factors[5:], reverse=True)
    assert 0 < factors[-1] < 1e-3
    assert train_moe.schedule(0, 1) == 1


def test_losses_are_compared_by_the_mean_of_the_last_tenth():
    results = {
        "bf16": loss_report.Result([9.0] * 18 + [1.0, 3.0], 2.5, 1e4),
        "fp8": loss_report.Result([5.0] * 18 + [2.0, 2.01], 2.5, None),
    }
    content = loss_report.summarize(results)
    assert content["runs"]["bf16"]["tail_mean"] == 2.0
    assert content["ratio"] == pytest.approx(1.0025)


@pytest.mark.parametrize("options", [["--steps", "0"], ["--device", "cuda"], ["--ep", "3"], ["--ep", "2"]])
def test_bad_options_end_with_a_sentence(tmp_path, monkeypatch, options):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        train_moe.main([*options, "--out", str(tmp_path / "none")])
    assert not (tmp_path / "none").exists()
