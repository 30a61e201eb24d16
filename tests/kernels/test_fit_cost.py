"""tools.fit_cost, and the choice of tiles on the times that are stored."""

import json
from pathlib import Path

import pytest

from benchmarks.routines.tiles import MOST_BYTES, Problem, every_candidate, expected_us, fitted, make_row, problems
from benchmarks.routines.tiles import of_models as models
from fp8moe.kernels.gemm import cost
from tools import fit_cost
from tools.fit_cost import CONSTANTS, Timed

FITTED_TO = Path(__file__).parents[2] / "benchmarks/fit"
STORED = FITTED_TO / "tiles_h200.json"  # random shapes
MODELS = FITTED_TO / "measured_h200.json"  # weights of models


@pytest.fixture
def constants(monkeypatch):
    """What a test makes of the constants ends with it."""
    for name in {constant.split(".")[0] for every in CONSTANTS.values() for constant in every}:
        monkeypatch.setattr(cost, name, getattr(cost, name))


def timed(problem):
    """As long as expected."""
    known = {config: expected_us(problem, config, skewed=problem.skewed) for config in every_candidate(problem)}
    return Timed(problem, known)


@pytest.mark.parametrize(
    "file,kind,problems,mean,largest",
    [
        (STORED, "dense", 174, 0.0105, 0.13),
        (STORED, "swapped", 96, 0.0025, 0.07),
        (STORED, "grouped", 270, 0.0095, 0.16),
        (MODELS, "dense", 90, 0.0055, 0.12),
        (MODELS, "swapped", 54, 0.002, 0.04),
        (MODELS, "grouped", 212, 0.0095, 0.12),
    ],
)
def test_choice_on_stored_times(file, kind, problems, mean, largest):
    regrets = [fit_cost.regret(one) for one in fit_cost.of_kind(fit_cost.load(file), kind)]
    assert len(regrets) == problems
    assert sum(regrets) / len(regrets) < mean and max(regrets) < largest


@pytest.mark.parametrize(
    "constant,problem",
    [
        ("_STRAIGHT.mma", (0, 4096, 4096, 7168)),
        ("_GROUPED_LOAD", (8, 4096, 4096, 7168)),
        ("_GROUPED_TILES.128x128*1", (8, 4096, 4096, 7168)),
    ],
)
def test_a_constant_is_found_again(constants, constant, problem):
    true = fit_cost.get(constant)
    one = timed(Problem(*problem))
    fit_cost.put(constant, 0.8 * true)
    fitted = fit_cost.fit([constant], lambda: fit_cost.loss([one]), proposals=150, hold=0)
    assert fitted[constant] == fit_cost.get(constant) == pytest.approx(true, rel=0.01)


def test_what_is_held_does_not_move(constants):
    one = timed(Problem(0, 4096, 4096, 7168))
    fit_cost.put("_STRAIGHT.mma", before := 0.9 * fit_cost.get("_STRAIGHT.mma"))
    fitted = fit_cost.fit(["_STRAIGHT.mma"], lambda: fit_cost.loss([one]), proposals=50, hold=1e3)
    assert fitted["_STRAIGHT.mma"] == pytest.approx(before, rel=0.01)


def test_regret():
    problem = Problem(0, 4096, 4096, 7168)
    fast, slow, *_ = sorted(every_candidate(problem), key=lambda config: expected_us(problem, config))
    assert fit_cost.regret(Timed(problem, {fast: 110.25, slow: 100.0})) == pytest.approx(0.1)
    assert fit_cost.regret(Timed(problem, {fast: 100.2, slow: 100.0})) == 0
    assert fit_cost.regret(Timed(problem, {fast: 90.0, slow: 100.0})) == 0


def test_rows_of_the_benchmark_are_read(tmp_path):
    problem = next(one for one in problems() if one.groups)
    one = timed(problem)
    (tmp_path / "choice.json").write_text(json.dumps({"rows": [make_row(*one)]}))
    assert fit_cost.load(tmp_path / "choice.json") == [one]


def test_stored_times_are_of_what_is_fitted_and_not_of_what_judges_the_choice():
    rows = json.loads(STORED.read_text())["rows"]
    assert [Problem(*(row[field] for field in Problem._fields)) for row in rows] == fitted()
    assert len(set(fitted())) == len(fitted()) and not {*fitted(), *models()} & set(problems())


def test_stored_times_of_models():
    rows = json.loads(MODELS.read_text())["rows"]
    keys = [tuple(row[field] for field in Problem._fields) for row in rows]
    assert len(set(keys)) == len(keys) > 100
    assert set(keys) <= {(*one[:4], one.groups > 0 and one.skewed) for one in models()}
    for row in rows:
        named = {config.name for config in every_candidate(Problem(*(row[field] for field in Problem._fields)))}
        assert row["times"].keys() <= named and all(us == float(f"{us:.4g}") > 0 for us in row["times"].values())


def test_models_problems():
    found = models()
    for problem in found:
        candidates = every_candidate(problem)
        assert len({config.name for config in candidates}) == len(candidates)
    assert len(set(found)) == len(found) and 300 < len(found) < 400
    assert [one.groups > 0 for one in found] == sorted(one.groups > 0 for one in found)
    assert all(one.groups * one.n * one.k <= MOST_BYTES for one in found)
    even = {one._replace(skewed=False) for one in found if one.groups and one.skewed}
    assert even == {one for one in found if one.groups and not one.skewed}


def test_command_line(constants, capsys, tmp_path):
    rows = [row for row in json.loads(STORED.read_text())["rows"] if not row["groups"] and row["m"] > 32][:3]
    (tmp_path / "few.json").write_text(json.dumps({"rows": rows}))
    fit_cost.main(["dense", str(tmp_path / "few.json"), "--proposals", "3"])
    printed = capsys.readouterr().out
    assert "before: 3 problems" in printed and "_STRAIGHT.mma = " in printed
    with pytest.raises(SystemExit, match="no grouped problems in .*few.json"):
        fit_cost.main(["grouped", str(tmp_path / "few.json")])
