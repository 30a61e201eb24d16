"""examples/rl: each step's log probabilities show that the weights came, and recorded runs learn their task."""

import json
from pathlib import Path
from statistics import fmean

import pytest
import torch

pytest.importorskip("transformers")
from examples.rl import loop  # noqa: E402
from examples.rl.__main__ import main  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

RECORDED = Path(__file__).parents[2] / "validation/rl.json"
ROUNDING = 0.03  # mean difference of log probabilities that FP8 makes


def test_a_run_is_printed_and_saved(tmp_path, capsys):
    file = tmp_path / "rl.json"
    file.write_text('{"a GPU": {}}')
    assert main(["--device", "cpu", "--steps", "5", "--seed", "3", "4", "--out", str(file)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [printed[0], printed[7]] == ["seed 3 on the CPU", "seed 4 on the CPU"]
    found = json.loads(file.read_text())
    assert found.keys() == {"a GPU", "the CPU"} and found["the CPU"]["seeds"].keys() == {"3", "4"}
    steps = found["the CPU"]["seeds"]["3"]
    for step, row in enumerate(printed[2:7]):
        first, _, last, *values = row.split()
        assert int(first) == int(last) == step + 1
        for name, value in zip(("reward", "apart", "most_apart"), values, strict=True):
            assert float(value) == pytest.approx(steps[name][step], abs=0.006)
    assert all(0.3 < reward < 0.7 for reward in steps["reward"])
    assert all(0 < apart < ROUNDING for apart in steps["apart"])


def test_without_refit_the_two_models_part(monkeypatch):
    monkeypatch.setattr(loop.fp8moe, "refit", lambda model, tensors: None)
    steps = loop.train(6, 3, torch.device("cpu"))
    assert steps[0].apart < ROUNDING and steps[-1].apart > 5 * ROUNDING


@pytest.mark.parametrize("level", loop.LEVELS)
def test_levels(level, tmp_path, capsys):
    file = tmp_path / "rl.json"
    assert main(["--device", "cpu", "--steps", "5", f"--{level}", "--out", str(file)]) == 0
    assert capsys.readouterr().out.startswith(f"seed 0 on the CPU, --{level}\n")
    (found,) = json.loads(file.read_text()).items()
    steps = found[1]["seeds"]["0"]
    assert found[0] == f"the CPU, --{level}" and all(0.3 < reward < 0.7 for reward in steps["reward"])
    if level == "on-policy":
        assert set(steps["most_apart"]) == {0}
    else:
        assert all(0 < apart < ROUNDING for apart in steps["apart"]) and max(steps["most_apart"]) < 0.2


def test_rewards_and_advantages():
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 2, 2, 2, 2, 2, 3]])
    assert loop.rewards_of(tokens).tolist() == pytest.approx([1, 1 / 6])
    rewards = torch.rand(loop.PROMPTS * loop.GROUP)
    rewards[: loop.GROUP] = 0.5
    groups = loop.advantages_of(rewards).view(loop.PROMPTS, loop.GROUP)
    assert not groups[0].any() and groups[1:].mean(1).abs().max() < 1e-5
    assert groups[1:].std(1) == pytest.approx(torch.ones(loop.PROMPTS - 1), abs=0.01)


def test_recorded_runs_learn():
    """python -m examples.rl --seed 0 1 2 --out validation/rl.json, on any device."""
    found = json.loads(RECORDED.read_text())
    page = (RECORDED.parent.parent / "docs/rl.md").read_text(encoding="utf-8")
    assert "the CPU" in found
    for device, run in found.items():
        assert len(run["seeds"]) >= 3
        for seed, steps in run["seeds"].items():
            first, last = fmean(steps["reward"][:10]), fmean(steps["reward"][-10:])
            assert len(steps["reward"]) >= 50 and last > first
            assert max(steps["apart"]) < ROUNDING
            apart, most = fmean(steps["apart"]), max(steps["most_apart"])
            assert most == 0 or not device.endswith("--on-policy")
            assert f"| {device} | {seed} | {first:.3f} | {last:.3f} | {apart:.4f} | {most:.2f} |\n" in page


def test_bad_arguments_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--steps", "4"])
    assert "--steps is 4; it must be at least 5" in capsys.readouterr().err
