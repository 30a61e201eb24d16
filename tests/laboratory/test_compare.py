"""Two revisions side by side: what is timed, in which order, and what is made of it."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from benchmarks import calls, compare, compare_worker
from benchmarks.calls import Case

ROOT = Path(__file__).resolve().parents[2]
EXPERTS = {"hidden": 32, "intermediate": 16, "experts": 4, "top_k": 2, "tokens": 3}
ROUTING = {"experts": 4, "top_k": 2, "tokens": 3}
# One of each op, small enough for the reference.
TINY = [
    Case("gemm", {"m": 3, "n": 8, "k": 32, "bias": "float32", "out_dtype": "float32"}),
    Case("gemm", {"m": 3, "n": 8, "k": 32, "c": "apart"}),
    Case("grouped_gemm", {"groups": 3, "mean_rows": 4, "n": 8, "k": 32}),
    Case("grouped_gemm_masked", {"groups": 3, "mean_rows": 4, "max_m": 8, "n": 8, "k": 32}),
    Case("grouped_gemm_k", {"groups": 2, "m": 8, "n": 16, "total_k": 512, "add": True}),
    *(Case(op, {"m": 128, "k": 130}) for op in calls.QUANTIZERS),
    Case("mqa_logits", {"queries": 3, "tokens": 70, "heads": 32, "head_dim": 32}),
    Case("paged_mqa_logits", {"batch": 2, "context": 70, "next_n": 2, "heads": 32, "head_dim": 32}),
    Case("linear", {"m": 3, "n": 16, "k": 32, "bias": True}),
    Case("linear_training", {"m": 3, "n": 16, "k": 32}),
    Case("experts", EXPERTS),
    Case("experts_training", EXPERTS),
    Case("append_kv", {"tokens": 70, "head_dim": 32}),
    *(Case(op, {"experts": 2, "n": 130, "k": 70}) for op in ("quantize_both_ways", "transpose_fp8")),
    *(Case(op, ROUTING) for op in ("sort_by_expert", "assigned_rows")),
    *(Case(op, {"hidden": 32, **ROUTING}) for op in ("permute_quantize", "combine")),
    Case("quantize_with_transpose", {"m": 130, "k": 70}),
    Case("gather_with_transpose", {"hidden": 32, **ROUTING}),
    *(
        Case(op, {"groups": 3, "mean_rows": 4, "intermediate": 128})
        for op in ("swiglu_quantize", "swiglu_backward_quantize")
    ),
]
# What an older revision may be like: other results of one function, another that it has not.
OLDER = """
_new_gemm = gemm

def gemm(*args, **options):
    return _new_gemm(*args, **options).mul_(2)

del mqa_logits

def __getattr__(name):  # the package's own would hand it out again
    raise AttributeError(name)

print("this is no reply")
"""


def tree(path, more=""):
    shutil.copytree(ROOT / "fp8moe", path / "fp8moe")  # with its bytecode
    with (path / "fp8moe/__init__.py").open("a") as file:
        file.write(more)
    return path.resolve()


def test_two_trees_are_compared_case_by_case(tmp_path):
    trees = tree(tmp_path / "old", OLDER), tree(tmp_path / "new")
    caches = tmp_path / "old_kernels", tmp_path / "new_kernels"
    shown = []
    bad = Case("gemm", {"m": 3, "n": 7, "k": 32})  # N must be a multiple of 8
    once = compare.Clock(1, 1, 0, 0)
    rows = compare.compare([*TINY, bad], trees, caches, how=once, device="cpu", show=shown.append)
    assert rows == shown
    assert [row["case"] for row in rows] == [case.name for case in [*TINY, bad]]
    rows = {row["case"]: row for row in rows}
    (skipped,) = (rows.pop(case.name) for case in TINY if case.op == "mqa_logits")
    assert "mqa_logits" in skipped["skipped"]
    assert "ValueError" in rows.pop(bad.name)["error"]
    for row in rows.values():
        assert row["old_us"] > 0 and row["new_us"] > 0
        assert row["ratio"] == row["old_us"] / row["new_us"]
        assert row["equal"] == (row["op"] != "gemm")
        assert row["difference"] == (0 if row["equal"] else 0.5)
    assert json.dumps(rows)


class FakeWorker:
    def __init__(self, name, log, times, sums=(1,), error=None):
        self.name, self.log, self.times, self.sums, self.error = name, log, iter(times), list(sums), error

    def send(self, do, **arguments):
        self.log.append((self.name, do))

    def receive(self):
        if self.error:
            raise compare.WorkerError(self.error)
        return self.sums

    def ask(self, do, **arguments):
        self.log.append((self.name, do))
        return next(self.times) if do == "measure" else 0.25


def test_revisions_are_timed_in_turn_and_medians_compared(tmp_path):
    log = []
    old = FakeWorker("old", log, [[9, 30, 10], [11, 12, 90]])
    new = FakeWorker("new", log, [[4, 4, 50], [5, 6, 70]])
    row = compare.compare_case(Case("gemm", {"m": 1}), old, new, compare.Clock(2, 3, 0, 0), tmp_path)
    assert log == [("old", "prepare"), ("new", "prepare"), *[("old", "measure"), ("new", "measure")] * 2]
    assert (row["old_us"], row["new_us"]) == (11.5, 5.5)
    assert row["equal"] and row["difference"] == 0


@pytest.mark.parametrize("errors", [{"old": "a"}, {"new": "b"}, {"old": "a", "new": "b"}])
def test_a_failure_is_told_from_what_the_older_cannot_do(errors, tmp_path):
    workers = [FakeWorker(name, [], [], error=errors.get(name)) for name in ("old", "new")]
    row = compare.compare_case(Case("gemm", {"m": 1}), *workers, compare.Clock(1, 1, 0, 0), tmp_path)
    assert ("skipped" in row, "error" in row) == ("old" in errors, "new" in errors)
    assert "ratio" not in row


def made(op, old_us, new_us, equal=True, difference=0.0):
    times = {"old_us": old_us, "new_us": new_us, "ratio": old_us / new_us}
    return {"case": f"{op} m=1", "op": op, "sizes": {"m": 1}, **times, "equal": equal, "difference": difference}


@pytest.mark.parametrize(
    ("rows", "missed"),
    [
        ([made("gemm", 1.0, 1.0), made("cublas", 1.0, 9.0)], []),
        ([made("gemm", 1.0, 1.0), made("gemm", 1.0, 1.02)], ["old time / new, geomean"]),
        ([made("gemm", 2.0, 1.0), made("gemm", 0.96, 1.0)], ["old time / new, least"]),
        ([made("gemm", 1.0, 1.0), {"case": "a", "op": "gemm", "error": "b"}], ["cases that failed"]),
        ([made("cublas", 1.0, 1.0), {"case": "a", "op": "gemm", "skipped": "b"}], ["cases compared"]),
    ],
)
def test_the_verdict(rows, missed):
    found = compare.thresholds(rows, compare.CLOCKS["kernels"])
    assert [threshold.name for threshold in found if not threshold.passed] == missed


@pytest.mark.parametrize("ratio", [1.0, 0.9])
def test_the_command(monkeypatch, tmp_path, ratio):
    def compared(cases, trees, caches, *, clock, show):
        assert trees == (tmp_path, ROOT) and clock == "kernels"
        assert {case.op for case in cases} == {"grouped_gemm_k"}
        show(made("gemm", ratio, 1.0))
        return [made("gemm", ratio, 1.0)]

    (tmp_path / "fp8moe").mkdir()
    (tmp_path / "fp8moe/__init__.py").touch()
    monkeypatch.setattr(compare, "compare", compared)
    monkeypatch.setattr(compare.report, "start", lambda: "a GPU")
    monkeypatch.setattr(compare.report, "digest", lambda root: "d")
    arguments = [str(tmp_path), "--only", "^grouped_gemm_k ", "--out", str(tmp_path / "out")]
    assert compare.main(arguments) == (ratio < 1)
    stored = json.loads((tmp_path / "out/compare.json").read_text())
    assert (
        (stored["digest"], stored["gpu"]) == ("d", "a GPU")
        and stored["old"] == str(tmp_path)
        and len(stored["rows"]) == 1
    )
    with pytest.raises(SystemExit):
        compare.main([str(tmp_path), "--only", "no such case"])


def test_timed_cases_are_of_every_op_and_have_names_of_their_own():
    cases = calls.timed() + calls.more_timed()
    assert {case.op for case in cases} == calls.CALLS.keys() == {"cublas", *(case.op for case in TINY)}
    assert len({case.name for case in cases}) == len(cases)
    assert [Case(*json.loads(json.dumps(case))) for case in cases] == cases


@pytest.mark.parametrize("size", [0, 1, 8, 1000])
def test_checksums_tell_values_and_places(size):
    x = torch.randn(size)
    assert compare_worker.checksum(x) == compare_worker.checksum(x.clone())
    transposed = torch.stack([x, x.flip(0)]).t()
    assert compare_worker.checksum(transposed) == compare_worker.checksum(transposed.contiguous())
    for i in range(0, size, 7):
        y = x.clone()
        y[i] = -y[i]
        assert compare_worker.checksum(y) != compare_worker.checksum(x)
    if size > 1:
        assert compare_worker.checksum(x.flip(0)) != compare_worker.checksum(x)


def test_differences():
    old = torch.tensor([1.0, -4.0, -math.inf, math.nan, 0.0])
    assert compare_worker.difference(old, old.clone()) == 0
    assert compare_worker.difference(old, old + torch.tensor([1.0, 0, 0, 0, 0])) == 0.25
    assert compare_worker.difference(old, torch.tensor([1.0, -4.0, 0.0, math.nan, 0.0])) == math.inf
    assert compare_worker.difference(old, torch.tensor([1.0, math.nan, -math.inf, 0.0, 0.0])) == math.inf
    assert compare_worker.difference(old, old[:2]) == math.inf
    assert compare_worker.difference(old[:0], old[:0]) == 0
