"""The limit beside the runs of a suite: whose e is whose, and what is written down."""

from __future__ import annotations

import pytest

from benchmarks.composed_limit import limits, probe
from benchmarks.composed_limit.suite_limits import SuiteLimits
from shoal.bench.results_folder import ResultsFolder
from shoal.bench.suite import Job, SuiteCase

REWARD = {"envs.kwargs": ["sutton_barto_reward=True"]}


@pytest.fixture
def asked(monkeypatch):
    """Everything that is measured; a rate of 1000 for each."""
    found = []

    class Stub(limits.Probes):
        def rate(self, workload, cell, seconds=0.0):
            found.append(cell)
            return 1000.0

    monkeypatch.setattr(limits, "Probes", Stub)
    probe.prepared.cache_clear()
    yield found
    probe.prepared.cache_clear()


def beside(folder, name, overrides, env="CartPole-v1"):
    case = SuiteCase(name, preset="ppo", env=env, limit=True, overrides={"device": "cpu", **overrides})
    with SuiteLimits(ResultsFolder(folder), lambda text: None) as beside:
        return beside.measure(Job(case, 1))


def stepped(asked):
    """How often an environment was measured since the last time."""
    count = sum(cell.what == "env" for cell in asked)
    asked.clear()
    return count


def test_e_is_kept_for_equal_environments(tmp_path, asked):
    """The e of a limit is kept for the same environment with the same arguments."""
    beside(tmp_path, "plain", {})
    assert stepped(asked) > 1
    beside(tmp_path, "another network", {"net.hidden": [8]})
    assert stepped(asked) == 1  # after the run, at the best cell
    beside(tmp_path, "another environment", REWARD)
    assert stepped(asked) > 1
    beside(tmp_path, "both", {**REWARD, "net.hidden": [8]})
    assert stepped(asked) == 1
    records = ResultsFolder(tmp_path).limits().values()
    assert [record["env_kwargs"] for record in records] == [[], [], *[REWARD["envs.kwargs"]] * 2]


def test_limit_of_an_older_file(tmp_path, asked):
    """A limit of a file that did not know the arguments is measured again."""
    beside(tmp_path, "own", REWARD)
    (record,) = ResultsFolder(tmp_path).limits().values()
    old = ResultsFolder(tmp_path / "old")
    old.append("limit", {name: value for name, value in record.items() if name not in ("kind", "env_kwargs")})
    stepped(asked)
    beside(tmp_path / "old", "own", REWARD)
    assert stepped(asked) > 1


@pytest.mark.parametrize("gpu", [False, True])
def test_row_names_a_limit_of_a_gpu(tmp_path, asked, monkeypatch, gpu):
    """A row tells whether its limit is that of a GPU."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: int(gpu))
    assert beside(tmp_path, "images", {"device": "auto"}, "ALE/Pong-v5")["gpu"] is gpu


def test_limit_that_cannot_be_measured(tmp_path, monkeypatch):
    """A real probe that dies: there is no such environment back-end."""
    cell = limits.Cell("env", 4, limits.CoreLayout(1, 1), "no such back-end")
    monkeypatch.setattr(limits, "cells", lambda case, cores, gpu: [cell])
    said: list[str] = []
    with SuiteLimits(ResultsFolder(tmp_path), said.append) as beside:
        job = Job(SuiteCase("c", preset="impala", env="CartPole-v1", max_seconds=1.0, limit=True), 1)
        assert beside.measure(job) is None and "could not be measured" in said[-1]
        assert beside.measure(Job(SuiteCase("c", preset="impala", env="Unknown-v0", max_seconds=1.0, limit=True), 1)) is None


def test_limit_is_read_back_from_the_results(tmp_path, monkeypatch):
    cell = limits.Cell("env", 4, limits.CoreLayout(2, 1), "compiled", 100.0)
    known = limits.ComposedLimit(cell, cell, cell, 2, [cell])
    given: list[limits.ComposedLimit | None] = []

    def measure(workload, probes, *, same_env=None, seconds=0.0):
        given.append(None)
        return limits.ComposedLimit(cell, cell, cell, 2, [cell])

    def measure_again(workload, probes, known, seconds):
        given.append(known)
        return known

    monkeypatch.setattr(limits, "measure", measure)
    monkeypatch.setattr(limits, "measure_again", measure_again)
    job = Job(SuiteCase("c", preset="impala", env="CartPole-v1", max_seconds=1.0, limit=True), 1)
    for _ in range(2):  # the grid once, its best cells after each run
        with SuiteLimits(ResultsFolder(tmp_path), lambda text: None) as beside:
            found = beside.measure(job)
    assert given == [None, known, known] and found is not None and found["env_steps_per_second"] == pytest.approx(25.0)
