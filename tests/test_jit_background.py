"""FP8MOE_JIT=background: kernels are compiled by threads of their own."""

import os
import threading
from queue import SimpleQueue

import pytest
import torch

from fp8moe.integrations.decode import compile_ahead, short_prompts
from fp8moe.kernels.gemm.epilogue import PlainStore
from fp8moe.kernels.gemm.variants import Family
from fp8moe.runtime import background, config, jit

N, K, SMS = 2112, 1024, 132
STORE = PlainStore(torch.bfloat16)


@pytest.fixture
def in_background(monkeypatch):
    monkeypatch.setenv("FP8MOE_JIT", "background")
    config.reload()
    yield
    monkeypatch.undo()
    config.reload()


@pytest.fixture
def compiler(monkeypatch):
    """jit with a compiler that waits until it may go on; what it was asked for."""
    allowed, asked = threading.Event(), []

    def cubin(spec):
        asked.append(spec.name)
        if spec.name == "slow":
            assert allowed.wait(30)
        if spec.name == "broken":
            raise RuntimeError("does not compile")
        return b""

    monkeypatch.setattr(jit, "cubin", cubin)
    monkeypatch.setattr(background, "cubin", cubin)
    monkeypatch.setattr(jit, "_load_cubin", lambda code, name: name)
    monkeypatch.setattr(jit, "_kernels", {})
    monkeypatch.setattr(background, "_futures", {})
    yield allowed, asked
    allowed.set()
    background.finish()


def test_others_load_while_one_is_compiled(compiler):
    allowed, asked = compiler
    slow, quick = jit.KernelSpec("x.cu", "slow"), jit.KernelSpec("x.cu", "quick")
    future = background.compile_later(slow)
    assert background.compile_later(slow) is future
    assert jit.load(quick) == "quick" and background.busy() and slow not in jit._kernels
    allowed.set()
    background.finish()
    assert not background.busy()
    jit.keep(slow, future.result())
    assert jit.load(slow) == "slow" and asked.count("slow") == 1


def test_a_failure_waits_for_who_asks(compiler):
    future = background.compile_later(jit.KernelSpec("x.cu", "broken"))
    background.finish()
    with pytest.raises(RuntimeError, match="does not compile"):
        future.result()
    quick = background.compile_later(jit.KernelSpec("x.cu", "quick"))
    assert quick.result(30) == b""  # the thread goes on


def test_some_cpus_are_left_to_others(compiler, monkeypatch):
    allowed, asked = compiler
    monkeypatch.setattr(background, "_threads", [])
    monkeypatch.setattr(background, "_queue", SimpleQueue())
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(4)))
    for i in range(6):
        background.compile_later(jit.KernelSpec("x.cu", "slow", (("I", i),)))
    assert len(background._threads) == 2
    allowed.set()
    background.finish()
    assert asked == ["slow"] * 6


def test_a_decoder_does_not_wait_for_the_kernels_of_prompts(monkeypatch, in_background):
    later, at_once, ready = [], [], []
    monkeypatch.setattr(compile_ahead, "is_ready", lambda spec: spec in ready)
    monkeypatch.setattr(compile_ahead, "compile_later", later.append)
    monkeypatch.setattr(compile_ahead, "load_all", at_once.extend)
    monkeypatch.setattr(compile_ahead, "num_sms", lambda index: SMS)
    monkeypatch.setattr(compile_ahead, "families", {Family(N, K, 0, STORE): 1})
    compile_ahead.compile_for_prompts(0, 64)
    assert later and not at_once
    monkeypatch.setenv("FP8MOE_JIT", "wait")
    config.reload()
    compile_ahead.compile_for_prompts(0, 64)
    assert set(at_once) == set(later)
    monkeypatch.setenv("FP8MOE_JIT", "background")
    config.reload()
    ready += later[1:]
    first = later[0]
    later.clear()
    compile_ahead.compile_for_prompts(0, 64)
    assert later == [first]


def test_other_threads_may_make_plans_meanwhile(monkeypatch):
    class Noted:
        """Of which another plan is made while it is read."""

        @property
        def groups(self):
            known[object()] = 1
            return 0

        def variants(self, rows, sms):
            return {jit.KernelSpec("x.cu", "found")}

    known, loaded = {Noted(): 1, Noted(): 1}, []
    monkeypatch.setattr(compile_ahead, "families", known)
    monkeypatch.setattr(compile_ahead, "num_sms", lambda index: SMS)
    monkeypatch.setattr(compile_ahead, "load_all", loaded.extend)
    compile_ahead.compile_for_prompts(0, 64)
    assert [spec.name for spec in loaded] == ["found"]


def test_no_graph_of_prompts_keeps_a_slower_kernel(monkeypatch):
    graphs = short_prompts.ShortPrompts(1, None, None, None)
    captured = []
    monkeypatch.setattr(short_prompts.ShortPrompts, "_capture", lambda self, *_: captured.append(True))
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    for busy, count in ((False, 0), (True, 0), (True, 0), (False, 1)):
        monkeypatch.setattr(background, "busy", lambda busy=busy: busy)
        graphs.read(tokens, lambda piece: piece)
        assert len(captured) == count
