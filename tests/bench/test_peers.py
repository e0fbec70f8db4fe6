"""What peers are asked for, and what they tell: the same work for all of them, and a page that names what stays empty."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from shoal.bench.columns import COLUMNS
from shoal.bench.jobs import peer_columns
from shoal.bench.peers.lineup import DRIVERS
from shoal.bench.suite import Job, SuiteCase, load_suite
from shoal.bench.watch import Watch

PAGE = Path(__file__).parents[2] / "docs" / "benchmark.md"


@pytest.fixture
def script(monkeypatch):
    """CleanRL's script needs nothing that shoal has not."""
    monkeypatch.syspath_prepend(str(DRIVERS))
    before = set(sys.modules)
    import drive_cleanrl

    yield drive_cleanrl
    for name in {"drive_cleanrl", "judge", "same_env"} - before:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(("order", "epochs"), [({}, 4), ({"epochs": 1}, 1), ({"epochs": 2, "settings": {"epochs": 3}}, 3)])
def test_the_script_makes_the_epochs_that_are_ordered(script, capsys, order, epochs):
    small = {"envs": 2, "steps": 4, "minibatches": 2, **order.get("settings", {})}
    script.main({"scene": "cartpole", "seconds": 0, **order, "settings": small})
    report = json.loads(capsys.readouterr().out)
    assert report["samples_per_insert"] == report["settings"]["epochs"] == epochs


def test_who_learns_in_epochs_makes_one_in_the_throughput_suite():
    """SB3 has to be told; the script's own number is four."""
    told = {(case.peer, case.env): case.order.get("epochs") for case in load_suite("throughput").cases
            if case.peer in ("sb3", "cleanrl")}
    assert len(told) == 4 and set(told.values()) == {1}


def test_the_page_names_the_columns_that_peers_leave_empty():
    case = SuiteCase("p", peer="sb3", env="CartPole-v1", until_return=475.0)
    report = {"marks": [[0.0, 0], [9.0, 900], [99.0, 9000]], "began_at": 1.0, "samples_per_insert": 1, "seconds": 50.0,
              "eval_return": 480.0, "train_return": 450.0}
    told = peer_columns(report, Job(case, 1), Watch(), 0.0)
    empty = {column.name for column in COLUMNS if column.name.partition(".")[0] not in told}
    words = {"limit.env_steps_per_second": "limit", "efficiency": "efficiency", "learner_idle": "learner idle",
             "policy_lag_mean": "policy lag", "policy_lag_p95": "policy lag", "data_age_mean": "data age",
             "data_age_p95": "data age", "bytes_per_env_step": "bytes/step", "restarts": "restarts"}
    assert empty == set(words)
    said = " ".join(re.search(r"They have no limit.*?stay empty\.", PAGE.read_text(), re.S)[0].split())
    assert all(word in said for word in words.values())
