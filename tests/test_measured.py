"""Measured times that correct the choice of tiles: the package's file, what its rows say of problems near them, and how
the benchmark writes it."""

import json
from itertools import groupby

import pytest

from benchmarks import choice_models
from benchmarks.choice import MOST_BYTES, Problem, every_candidate
from fp8moe.kernels.gemm import cost, measured
from fp8moe.kernels.gemm.measured import Row, dense_ends, dense_weights, grouped_weights, named
from fp8moe.kernels.gemm.tiles import (
    choose_dense,
    choose_grouped,
    dense_candidates,
    grouped_candidates,
    invariant_parts,
)

SMS = 132
ROWS = json.loads(measured.FILE.read_text())["rows"]
FIELDS = [*Problem._fields, "times"]
CACHES = (measured._dense_factors, measured._grouped_factors, choose_dense, choose_grouped)


@pytest.fixture
def known(monkeypatch):
    """Makes these rows all that was measured."""

    def replace(rows):
        found = {}
        for row in sorted(rows, key=lambda row: row.m):
            found.setdefault((row.n, row.k, row.groups > 0, row.skewed), []).append(row)
        monkeypatch.setattr(measured, "_rows", lambda: found)
        for cache in CACHES:
            cache.cache_clear()

    yield replace
    for cache in CACHES:
        cache.cache_clear()


def expected_us(problem, config):
    """Corrected, by one who does not know the routing."""
    groups, m, n, k, _ = problem
    if groups:
        return measured.grouped_time(config, groups, m / groups, n, k, SMS, swiglu=False)
    return measured.dense_time(config, m, n, k, SMS)


def regret(row, time=expected_us):
    """How much slower the choice among timed tiles is than the fastest, but for 0.25 us."""
    times = row["times"]
    problem = Problem(*(row[field] for field in Problem._fields))
    chosen = min(times, key=lambda tile: time(problem, named(tile, problem.k, problem.groups)))
    best = min(times.values())
    return max(times[chosen] - 0.25, best) / best - 1


def mean(values):
    values = list(values)
    return sum(values) / len(values)


# ---- the file ----


def test_the_file_is_in_order():
    keys = [tuple(row[field] for field in Problem._fields) for row in ROWS]
    assert len(set(keys)) == len(keys) > 100
    for row in ROWS:
        times = row["times"]
        assert list(row) == FIELDS and len(times) > 0 and not (row["skewed"] and not row["groups"])
        assert max(times.values()) <= choice_models.SLOWEST * min(times.values())
        for tile, us in times.items():
            assert named(tile, row["k"], row["groups"]).name == tile and us == float(f"{us:.4g}") > 0
    assert set(keys) <= {(*one[:4], one.groups > 0 and one.skewed) for one in choice_models.models()}


def test_every_candidate_is_found_by_its_name():
    for problem in choice_models.models():
        for config in every_candidate(problem):
            assert named(config.name, problem.k, problem.groups) == config


@pytest.mark.parametrize("grouped,bound", [(False, 0.005), (True, 0.008)])
def test_what_was_measured_is_chosen_well(grouped, bound):
    assert mean(regret(row) for row in ROWS if (row["groups"] > 0) == grouped) < bound


@pytest.mark.parametrize("grouped,bound", [(False, 0.01), (True, 0.015)])
def test_so_is_what_is_left_out(known, grouped, bound):
    """Each problem by the rows of the others."""
    regrets = []
    for _, rows in groupby(
        sorted((row for row in ROWS if (row["groups"] > 0) == grouped), key=lambda row: [row[f] for f in FIELDS[:4]]),
        lambda row: [row[field] for field in FIELDS[:4]],
    ):
        rows = list(rows)
        known([Row(**row) for row in ROWS if row not in rows])
        regrets += map(regret, rows)
    assert mean(regrets) < bound


# ---- problems near rows, and far from them ----


def slower(row_of, config, factor):
    """A row whose tiles take what is expected, but for this one."""
    times = {one.name: row_of._expected_us(one.name) for one in every_candidate(problem_of(row_of))}
    row_of.times = times | {config.name: factor * times[config.name]}
    return row_of


def problem_of(row):
    return Problem(row.groups, row.m, row.n, row.k, row.skewed)


def dense_row(m, config, factor, n=2112, k=7168):
    return slower(Row(0, m, n, k, False, {}), config, factor)


def factor(config, m, n=2112, k=7168):
    """By how much one tile is corrected more than the others."""
    others = [one for one in dense_candidates(m, n, k, SMS) if one.name != config.name]
    ratio = [measured.dense_time(one, m, n, k, SMS) / cost.dense_time(one, m, n, k, SMS) for one in (config, others[0])]
    return ratio[0] / ratio[1]


def test_dense_times_between_two_rows(known):
    config = choose_dense(1000, 2112, 7168, SMS)
    known([dense_row(1000, config, 1.2), dense_row(4000, config, 1 / 1.2)])
    assert factor(config, 1000) == pytest.approx(factor(config, 700)) == pytest.approx(1.2)
    assert factor(config, 4000) == pytest.approx(factor(config, 6000)) == pytest.approx(1 / 1.2)
    assert factor(config, 2000) == pytest.approx(1)
    assert 1 < factor(config, 1500) < 1.2 < 1.2 / factor(config, 2500)
    assert 1 < factor(config, 400) < 1.2
    assert factor(config, 300) == factor(config, 12001) == 1
    assert factor(config, 2000, n=2120) == 1
    assert dense_ends(2112, 7168) == [1000, 4000, 6000, 12000] and dense_ends(2120, 7168) == []


def test_another_tile_is_chosen_where_the_expected_one_was_slow(known):
    m, n, k = 1000, 2112, 7168
    config, others = choose_dense(m, n, k, SMS), (114, 78)
    chosen = {sms: choose_dense(m, n, k, sms) for sms in others}
    known([dense_row(m, config, 2)])
    assert choose_dense(m, n, k, SMS) != config
    assert chosen == {sms: choose_dense(m, n, k, sms) for sms in others}
    assert measured.dense_time(config, m, n, k, 114) == cost.dense_time(config, m, n, k, 114)
    assert measured.dense_time(config, m, n, k, SMS, 1) == cost.dense_time(config, m, n, k, SMS)


def test_bits_in_batch_invariant_mode_do_not_depend_on_times(known):
    weights = {(row["n"], row["k"]) for row in ROWS if not row["groups"]}
    invariant_parts.cache_clear()
    parts = {one: invariant_parts(*one) for one in weights}
    known([])
    invariant_parts.cache_clear()
    assert parts == {one: invariant_parts(*one) for one in weights}


def grouped_row(config, factor, skewed, groups=8, mean=256):
    return slower(Row(groups, groups * mean, 4096, 7168, skewed, {}), config, factor)


def test_groups_are_corrected_for_both_routings(known):
    problem, options = (2048, 8, 256.0, 4096, 7168, SMS), {"max_m": None, "swiglu": False}
    config = choose_grouped(*problem, **options)
    of_swiglu = choose_grouped(*problem, max_m=None, swiglu=True)
    known([grouped_row(config, 1.5, skewed=True)])
    assert choose_grouped(*problem, **options) != config
    assert choose_grouped(*problem, max_m=None, swiglu=True) == of_swiglu

    def time(config, groups=8, mean=256.0, **more):
        return measured.grouped_time(config, groups, mean, 4096, 7168, **{"num_sms": SMS, "swiglu": False, **more})

    def expected(config, groups=8, mean=256.0, sms=SMS, skewed=cost.SKEWED):
        return cost.grouped_time(config, groups, mean, 4096, 7168, sms, skewed)

    other = next(one for one in grouped_candidates(*problem, **options) if one != config)
    level = (time(other) / expected(other) - 1) * expected(other)  # all tiles are compared with their mean
    assert level < 0
    more = time(config) - expected(config)
    assert 0.4 * cost.SKEWED * expected(config, skewed=1.0) < more < 0.5 * cost.SKEWED * expected(config, skewed=1.0)
    assert time(config, swiglu=True) == expected(config)
    assert time(config, num_sms=114) == expected(config, sms=114)
    assert time(config, mean=2048.0) == expected(config, mean=2048.0)
    assert time(config, groups=256) == pytest.approx(expected(config, groups=256))
    assert expected(config, mean=400.0) < time(config, mean=400.0) < 1.2 * expected(config, mean=400.0)


def test_weights_of_rows():
    near, far = (Row(groups, groups * 64, 4096, 7168, False, {}) for groups in (8, 16))
    weights = dict(grouped_weights([near, far], 8, 64.0))
    assert weights[near] > 0.8 > 0.2 > weights[far] > 0 and sum(weights.values()) < 1
    assert sum(weight for _, weight in grouped_weights([near], 8, 150.0)) < 0.5
    assert grouped_weights([near], 8, 200.0) == [] == dense_weights([], 8)


def test_what_is_read_is_read_alike():
    problem = Problem(8, 2048, 4096, 7168)
    config = every_candidate(problem)[0]
    found = []
    for _ in range(2):
        measured._rows.cache_clear()
        measured._grouped_factors.cache_clear()
        found.append(expected_us(problem, config))
    assert found[0] == found[1]


# ---- how it is written ----


def test_models_problems():
    found = choice_models.models()
    assert len(set(found)) == len(found) and 300 < len(found) < 400
    assert [one.groups > 0 for one in found] == sorted(one.groups > 0 for one in found)
    assert all(one.groups * one.n * one.k <= MOST_BYTES for one in found)
    even = {one._replace(skewed=False) for one in found if one.groups and one.skewed}
    assert even == {one for one in found if one.groups and not one.skewed}


def test_shares_take_about_as_long():
    problems = choice_models.models()[::7]
    shares = choice_models.deal(problems, 2)
    assert sorted(shares[0] + shares[1]) == sorted(problems) and abs(len(shares[0]) - len(shares[1])) <= 1
    first, second = (sum(map(choice_models._fastest_us, share)) for share in shares)
    assert second <= first < 1.3 * second
    assert choice_models.deal(problems, 1)[0] == sorted(problems, key=choice_models._fastest_us, reverse=True)


def test_gpus_of_a_process(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-5f")
    assert choice_models.visible_gpus() == ["2", "GPU-5f"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(choice_models.torch.cuda, "device_count", lambda: 2)
    assert choice_models.visible_gpus() == ["0", "1"]


def test_text_of_the_file(known):
    rows = [
        {**Problem(0, 64, 2112, 7168)._asdict(), "chosen": "64x64*1", "times": {"64x64*1": 9.87654, "64x96*1": 20.0}},
        {**Problem(8, 512, 4096, 7168)._asdict(), "times": {"256x128s*1": 123.456, "128x256h*1": 150}},
    ]
    text = choice_models.packaged(rows, {"gpu": "H200"})
    assert len(text.splitlines()) == 2 + len(rows) + 1
    written = json.loads(text)
    assert written["meta"] == {"gpu": "H200"} and all(list(row) == FIELDS for row in written["rows"])
    dense, grouped = written["rows"]
    assert dense["times"] == {"64x64*1": 9.877} and not dense["skewed"]
    assert grouped["times"] == {"256x128s*1": 123.5, "128x256h*1": 150} and grouped["skewed"]
    known([Row(**row) for row in written["rows"]])
    assert expected_us(Problem(0, 64, 2112, 7168), named("64x64*1", 7168, 0)) > 0
