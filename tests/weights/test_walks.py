"""How far a checkpoint walks: files and functions of fp8moe that load_model, quantize and refit pass, and how often a
name is taken apart. A limit that is exceeded asks for a shorter way, not for a higher limit."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

pytest.importorskip("transformers")

import fp8moe  # noqa: E402
from fp8moe.hf import load_model, register  # noqa: E402
from fp8moe.weights import names, quantize_checkpoint  # noqa: E402
from tests.tiny_moe_models import MODELS  # noqa: E402
from tests.transformers_models import newer_than_5_17  # noqa: E402

PACKAGE = str(Path(fp8moe.__file__).parent)
LIMITS = {"quantize": (27, 137), "load_model": (28, 181), "refit": (18, 132)}  # files, functions
PARSES = 3  # for each tensor


def walk(call):
    """The functions of fp8moe that run during a call, with how often each does; classes and comprehensions are none."""
    calls = Counter()

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls[frame.f_code] += 1

    sys.setprofile(note)
    try:
        result = call()
    finally:
        sys.setprofile(None)
    is_function = {code for code in calls if code.co_flags & 0x2 and not code.co_name.startswith("<")}  # CO_NEWLOCALS
    return result, {code: count for code, count in calls.items() if code in is_function}


@newer_than_5_17("takes code of its own")
def test_walks(tmp_path):
    register()  # or the count depends on whether a test did so before
    MODELS["Qwen3MoeForCausalLM"].build(torch.bfloat16).save_pretrained(tmp_path / "bf16")
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "first")  # imports what is imported once
    fp8moe.refit(load_model(tmp_path / "first"), tmp_path / "first")
    walks = {}
    _, walks["quantize"] = walk(lambda: quantize_checkpoint(tmp_path / "bf16", tmp_path / "fp8"))
    model, walks["load_model"] = walk(lambda: load_model(tmp_path / "fp8"))
    _, walks["refit"] = walk(lambda: fp8moe.refit(model, tmp_path / "fp8"))
    with safe_open(tmp_path / "fp8/model.safetensors", "pt") as stored:
        tensors = len(list(stored.keys()))
    for name, calls in walks.items():
        passed = len({code.co_filename for code in calls}), len(calls)
        assert all(count <= limit for count, limit in zip(passed, LIMITS[name], strict=True)), (name, passed)
        assert calls[names.parse.__code__] <= PARSES * tensors, name
