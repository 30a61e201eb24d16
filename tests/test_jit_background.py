"""FP8MOE_JIT=background: a variant that is compiled serves until the best one is, and splits K as that does."""

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue

import pytest
import torch

from fp8moe.integrations.decode import compile_ahead, short_prompts
from fp8moe.kernels.gemm import choice, plan, variant
from fp8moe.kernels.gemm.epilogue import PlainStore
from fp8moe.kernels.gemm.source import kernel_spec
from fp8moe.kernels.gemm.tiles import choose_dense, choose_grouped, dense_candidates, grouped_candidates
from fp8moe.quant.formats import ceil_div, empty_mn_major
from fp8moe.runtime import background, config, jit

M, N, K, SMS = 512, 2112, 1024, 132
STORE = PlainStore(torch.bfloat16)
GROUPED = {"expected_m": 64.0, "max_m": None, "whole": None}


@pytest.fixture
def in_background(monkeypatch):
    monkeypatch.setenv("FP8MOE_JIT", "background")
    config.reload()
    yield
    monkeypatch.undo()
    config.reload()


@pytest.fixture
def compiled(monkeypatch):
    """The configurations that need no compiler; none at first."""
    found = []
    ready = lambda spec: spec in {kernel_spec(one, N, K, STORE) for one in found}  # noqa: E731
    monkeypatch.setattr(choice, "is_ready", ready)
    return found


def dense(m=M):
    return choice.choose(m, 0, N, K, STORE, SMS, expected_m=None, max_m=None, whole=None)


def test_the_fastest_that_splits_k_alike_serves(in_background, compiled):
    best = choose_dense(M, N, K, SMS)
    others = [one for one in dense_candidates(M, N, K, SMS) if one != best]
    alike = [one for one in others if one.split_k == best.split_k]
    assert dense() == (best, None)
    compiled += [one for one in others if one.split_k != best.split_k]
    assert compiled and dense() == (best, None)
    compiled += alike
    first = dense()[1]
    assert first in alike
    compiled.remove(first)
    assert dense()[1] not in (None, first)
    compiled.append(best)
    assert dense() == (best, None)


def test_groups_too(in_background, compiled):
    def choose():
        return choice.choose(512, 8, N, K, STORE, SMS, **GROUPED)

    best = choose_grouped(512, 8, 64.0, N, K, SMS, max_m=None, swiglu=False)
    assert choose() == (best, None)
    found = grouped_candidates(512, 8, 64.0, N, K, SMS, max_m=None, swiglu=False)
    compiled += [one for one in found if one != best]
    assert choose()[1].split_k == best.split_k


def test_by_default_the_call_waits(compiled):
    assert config.reload().jit == "wait"
    compiled += [one for one in dense_candidates(M, N, K, SMS) if one != choose_dense(M, N, K, SMS)]
    assert dense() == (choose_dense(M, N, K, SMS), None)


class Launcher:
    def __init__(self, spec, **options):
        self.spec, self.lock = spec, threading.Lock()

    def launch(self, stream):
        Launcher.launched.append(self.spec)


class TensorMap:
    def replace_address(self, pointer):
        pass


@pytest.fixture
def launches(monkeypatch, in_background, compiled):
    """A plan whose best variant is to come, the specs that it launches, its best one, and what brings it."""
    best = choose_dense(M, N, K, SMS)
    compiled += [one for one in dense_candidates(M, N, K, SMS) if one != best]
    Launcher.launched, coming = [], Future()
    monkeypatch.setattr(variant, "tensor_map", lambda tensor, **layout: TensorMap())
    monkeypatch.setattr(variant, "load", lambda spec: spec)
    monkeypatch.setattr(variant, "Launcher", Launcher)
    monkeypatch.setattr(plan, "num_sms", lambda index: SMS)
    monkeypatch.setattr(plan, "compile_later", lambda spec: coming)
    monkeypatch.setattr(jit, "_kernels", {})
    monkeypatch.setattr(jit, "_load_cubin", lambda code, name: code)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    a, b = (torch.empty(rows, K, dtype=torch.float8_e4m3fn) for rows in (M, N))
    out = torch.empty(M, N, dtype=torch.bfloat16)
    made = plan.Plan(a, empty_mn_major(M, ceil_div(K, 128), device="cpu"), b, out, STORE)

    def launch():
        made.launch(0, 0, 0, 0, 0, 0, (0, N, 0))
        return Launcher.launched[-1]

    return launch, kernel_spec(best, N, K, STORE), coming


def test_a_plan_goes_over_to_the_better_kernel_once_it_is_there(launches):
    launch, best, coming = launches
    served = launch()
    assert served != best and launch() == served
    coming.set_result(b"code")
    assert launch() == best and launch() == best
    assert jit._kernels == {best: b"code"}


def test_a_part_counts_with_the_rows_of_the_whole(launches, monkeypatch):
    noted = []
    monkeypatch.setattr(plan, "note", lambda family, rows: noted.append((family.groups, rows)))
    a, b = (torch.empty(*shape, K, dtype=torch.float8_e4m3fn) for shape in ((97,), (4, N)))
    scale, out = empty_mn_major(97, ceil_div(K, 128), device="cpu"), torch.empty(97, N, dtype=torch.bfloat16)
    for whole in (None, (7 * 24, 8)):
        plan.Plan(a, scale, b, out, STORE, whole=whole)
    assert noted == [(4, 97), (4, 7 * 24)]


def test_not_while_a_graph_is_captured(launches, monkeypatch):
    launch, best, coming = launches
    coming.set_result(b"code")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert launch() != best
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert launch() == best


def test_one_thread_goes_over(launches, monkeypatch):
    launch, best, coming = launches
    coming.set_result(b"code")
    both, made = threading.Barrier(2), []
    create = Launcher.__init__

    def meet():
        both.wait(30)
        return False

    def count(self, spec, **options):
        made.append(spec)
        create(self, spec, **options)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", meet)
    monkeypatch.setattr(Launcher, "__init__", count)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: launch(), range(2)))
    assert made == [best] and launch() == best


def test_a_kernel_that_cannot_be_compiled_is_told_once(launches, recwarn):
    launch, best, coming = launches
    coming.set_exception(RuntimeError("no NVRTC"))
    told = rf"a slower kernel goes on, .* cannot be compiled \(GemmConfig\(.*\) n={N} k={K} groups=0\): no NVRTC"
    with pytest.warns(RuntimeWarning, match=told):
        assert launch() != best
    recwarn.clear()
    assert launch() != best and not recwarn


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
    monkeypatch.setattr(compile_ahead, "families", {plan.Family(N, K, 0, STORE): 1})
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
