"""benchmarks.expected_m: which factor a time belongs to, and what its threshold takes."""

import pytest

from benchmarks import expected_m, grouped_gemm, tables, timing
from benchmarks.grouped_gemm import Case


def test_the_stored_shapes_of_both_kinds_of_groups():
    cases = expected_m.stored_cases()
    assert {(case.groups, case.mean_m) for case in cases} == set(expected_m.GROUPS) and len(cases) == 8


def test_every_factor_is_timed_in_turn_and_compared_with_the_mean(monkeypatch):
    given = []

    def measure(calls):
        given.extend(call.keywords["expected_m"] for call in calls)
        for call in calls:
            call()
        return [timing.Timing((float(call.keywords["expected_m"]),), ("gemm",)) for call in calls]

    monkeypatch.setattr(grouped_gemm, "places", lambda mean_m: 24)
    monkeypatch.setattr(timing, "measure", measure)
    rows = expected_m.measure(Case(expected_m.OP, 3, 10, 136, 272, 12), device="cpu")
    assert given == 2 * [10, 7, 8, 9, 11, 12, 14, 15]
    assert [row["factor"] for row in rows] == [*expected_m.FACTORS]
    assert [row["over_mean"] for row in rows] == pytest.approx([1.0, 0.7, 0.8, 0.9, 1.1, 1.2, 1.4, 1.5])
    (worst,) = expected_m.thresholds(rows)
    assert (worst.value, worst.passed) == (1.5, False)


def test_the_table_has_the_worst_of_all_factors():
    benchmarks = tables.stored() | {"expected_m": {"rows": [{"over_mean": 1.0}, {"over_mean": 1.043}]}}
    (line,) = [line for line in tables.readme(benchmarks).splitlines() if "0.7 to 1.5 times" in line]
    assert line.split(" | ")[1] == "1.04"
