"""What peers are asked for, and what they tell: the same work for all of them, and a page that names what stays empty."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks.peers.cases import peer_columns
from benchmarks.peers.install import DRIVERS
from benchmarks.peers.process_monitor import ProcessMonitor
from shoal.bench.child_processes import ChildProcesses
from shoal.bench.jobs import run_job
from shoal.bench.result_columns import COLUMNS
from shoal.bench.suite import Job, SuiteCase, load_suite

PAGE = Path(__file__).parents[2] / "docs" / "benchmark.md"


@pytest.fixture
def script(monkeypatch):
    """CleanRL's script needs nothing that shoal has not."""
    monkeypatch.syspath_prepend(str(DRIVERS))
    before = set(sys.modules)
    import drive_cleanrl

    yield drive_cleanrl
    for name in {"drive_cleanrl", "goal_evaluator", "same_env"} - before:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(("order", "epochs"), [({}, 4), ({"epochs": 1}, 1), ({"epochs": 2, "settings": {"epochs": 3}}, 3)])
def test_epochs_of_the_script(script, capsys, order, epochs):
    """The script makes the epochs that are ordered."""
    small = {"envs": 2, "steps": 4, "minibatches": 2, **order.get("settings", {})}
    script.main({"scene": "cartpole", "seconds": 0, **order, "settings": small})
    report = json.loads(capsys.readouterr().out)
    assert report["samples_per_insert"] == report["settings"]["epochs"] == epochs


def test_one_epoch_for_throughput():
    """SB3 has to be told; the script's own number is four."""
    told = {case.name: case.order.get("epochs") for case in load_suite("throughput").cases
            if case.peer in ("sb3", "cleanrl") and "epochs" not in case.name}
    assert len(told) == 4 and set(told.values()) == {1}


def test_columns_that_peers_leave_empty():
    """The page names the columns that peers leave empty."""
    case = SuiteCase("p", peer="sb3", env="CartPole-v1", until_return=475.0)
    report = {"marks": [[0.0, 0], [9.0, 900], [99.0, 9000]], "began_at": 1.0, "samples_per_insert": 1, "seconds": 50.0,
              "eval_return": 480.0, "train_return": 450.0}
    told = peer_columns(report, Job(case, 1), ProcessMonitor(), 0.0)
    empty = {column.name for column in COLUMNS if column.name.partition(".")[0] not in told}
    words = {"limit.env_steps_per_second": "limit", "efficiency": "efficiency", "learner_idle": "learner idle",
             "policy_lag_mean": "policy lag", "policy_lag_p95": "policy lag", "data_age_mean": "data age",
             "data_age_p95": "data age", "bytes_per_env_step": "bytes/step", "restarts": "restarts"}
    assert empty == set(words)
    said = " ".join(re.search(r"Peers have no limit.*?stay empty\.", PAGE.read_text(), re.S)[0].split())
    assert all(word in said for word in words.values())


def test_failed_install_is_a_row(monkeypatch):
    """A peer that cannot be installed becomes a row that says why."""
    from benchmarks.peers import cases, install

    monkeypatch.setattr(install, "install", lambda peer, say: (False, f"{peer.name} could not be installed: no wheel"))
    cases.installed.cache_clear()
    row = run_job(Job(SuiteCase("c", peer="torchrl", env="CartPole-v1", max_seconds=1.0), 1), ChildProcesses())
    cases.installed.cache_clear()
    assert row["error"] == "torchrl could not be installed: no wheel" and row["skipped"]


def test_columns_of_a_peer():
    watch = ProcessMonitor()
    watch.cpu_seconds, watch.peak_mb = 10.0, 100.0
    marks = [[0.0, 0], [1.0, 1000], [2.0, 3000], [3.0, 5000]]
    told = {"marks": marks, "samples_per_insert": 4, "train_return": 20.0, "began_at": 1002.0}
    row = peer_columns(told, Job(SuiteCase("c", peer="sb3", env="E", warm_seconds=1.0), 1), watch, began=1000.0)
    assert row["env_steps_per_second"] == 2000.0 and row["startup_seconds"] == 2.0 and row["cpu_seconds_per_million"] == 2000.0
    assert row["samples_per_insert"] == 4 and row["final_return"] == 20.0
    race = Job(SuiteCase("c", peer="sb3", env="E", until_return=475.0), 1)
    row = peer_columns({**told, "seconds": 2.5, "eval_return": 480.0}, race, watch, began=1000.0)
    assert (row["seconds_to_threshold"], row["env_steps_to_threshold"], row["final_return"]) == (2.5, 3000, 480.0)
    row = peer_columns({**told, "seconds": None}, race, watch, began=1000.0)
    assert row["seconds_to_threshold"] is None and row["final_return"] == 20.0


def test_a_watch_sees_what_a_process_costs():
    burn = "import sys, time\nx = bytearray(60_000_000)\nwhile time.process_time() < 0.5: pass\n"
    burn += "print(1, flush=True); sys.stdin.read()"
    watch, over = ProcessMonitor(), threading.Event()
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        thread = threading.Thread(target=watch.follow, args=(child.pid, over))
        thread.start()
        while not watch.peak_mb:
            time.sleep(0.01)
        over.set()
        thread.join()
    assert watch.cpu_seconds >= 0.4 and watch.peak_mb > 50
