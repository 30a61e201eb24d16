"""The README: its examples run, and its table lists every environment variable."""

import re
from dataclasses import fields
from pathlib import Path

import torch

from fp8moe.config import Settings

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_examples_run():
    examples = "\n".join(re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL))
    names = {}
    exec(examples, names)
    assert names["y"].shape == (2, 10, 576)
    error = torch.linalg.norm(names["c"].float() - names["exact"]) / torch.linalg.norm(names["exact"])
    assert error < 2e-3


def test_every_environment_variable_is_listed():
    assert set(re.findall(r"FP8MOE_[A-Z_]+", README)) == {f"FP8MOE_{field.name.upper()}" for field in fields(Settings)}
