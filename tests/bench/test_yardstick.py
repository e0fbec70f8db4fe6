"""The limit beside the runs of a suite: whose e is whose, and what is written down."""

from __future__ import annotations

import pytest

from shoal.bench import limits, probe
from shoal.bench.ledger import Ledger
from shoal.bench.suite import Job, SuiteCase
from shoal.bench.yardstick import Yardstick

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
    with Yardstick(Ledger(folder), lambda text: None) as yardstick:
        return yardstick.beside(Job(case, 1))


def stepped(asked):
    """How often an environment was measured since the last time."""
    count = sum(cell.what == "env" for cell in asked)
    asked.clear()
    return count


def test_e_is_that_of_the_same_environment_with_the_same_arguments(tmp_path, asked):
    beside(tmp_path, "plain", {})
    assert stepped(asked) > 1
    beside(tmp_path, "another network", {"net.hidden": [8]})
    assert stepped(asked) == 1  # after the run, at the best cell
    beside(tmp_path, "another environment", REWARD)
    assert stepped(asked) > 1
    beside(tmp_path, "both", {**REWARD, "net.hidden": [8]})
    assert stepped(asked) == 1
    records = Ledger(tmp_path).limits().values()
    assert [record["env_kwargs"] for record in records] == [[], [], *[REWARD["envs.kwargs"]] * 2]


def test_a_limit_of_a_file_that_did_not_know_the_arguments_is_measured_again(tmp_path, asked):
    beside(tmp_path, "own", REWARD)
    (record,) = Ledger(tmp_path).limits().values()
    old = Ledger(tmp_path / "old")
    old.append("limit", {name: value for name, value in record.items() if name not in ("kind", "env_kwargs")})
    stepped(asked)
    beside(tmp_path / "old", "own", REWARD)
    assert stepped(asked) > 1


@pytest.mark.parametrize("gpu", [False, True])
def test_a_row_tells_whether_its_limit_is_that_of_a_gpu(tmp_path, asked, monkeypatch, gpu):
    monkeypatch.setattr("torch.cuda.device_count", lambda: int(gpu))
    assert beside(tmp_path, "images", {"device": "auto"}, "ALE/Pong-v5")["gpu"] is gpu
