"""Folders of runs: those of a killed benchmark are removed by the next one, and what a failed run has written is kept."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from shoal.bench import command, jobs, run_folders
from shoal.bench.child_processes import TOO_LONG, ChildProcesses
from shoal.bench.jobs import run_job
from shoal.bench.results_folder import ResultsFolder
from shoal.bench.suite import Job, SuiteCase, parse_suite
from shoal.experiment.lock import NAME

CASE = {"preset": "a2c", "env": "shoal/Catch-v0", "runtime": "inline", "max_env_steps": 200,
        "overrides": {"eval.enabled": False, "net.hidden": [8], "actors": 1}}
HOLDER = """
import signal
from shoal.bench.run_folders import temporary_run_folder
with temporary_run_folder() as folder:
    (folder / "run").mkdir()
    print(folder, flush=True)
    signal.pause()
"""


def old(folder: Path) -> None:
    """As if it had been made long ago."""
    os.utime(folder / NAME, (time.time() - 3600,) * 2)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Where temporary folders are made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_killed_benchmark_leaves_nothing(place):
    """Two real ones: the folder of the one that still runs is not touched, nor one that nobody locks, nor one that is just made."""
    (place / "shoal-bench-unlocked").mkdir()
    holders = [subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        dead, alive = (Path(holder.stdout.readline().strip()) for holder in holders if holder.stdout is not None)
        holders[0].kill()
        holders[0].wait()
        run_folders.remove_stale_folders()
        assert dead.exists() and dead.parent == place  # a minute old at least: who has just been made is not locked yet
        old(dead)
        old(alive)
        run_folders.remove_stale_folders()
        assert not dead.exists() and (alive / "run").exists() and (place / "shoal-bench-unlocked").exists()
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()


def test_the_next_benchmark_sweeps(place, monkeypatch):
    left = place / "shoal-bench-left"
    left.mkdir()
    (left / NAME).touch()
    old(left)
    monkeypatch.setattr(jobs, "run_job", lambda job, children, results: {"error": None, "load": 0.1})
    suite = parse_suite("t", {"case": [{**CASE, "name": "a", "seeds": [1]}]})
    assert command.run_suite(suite, ResultsFolder(place / "out")) == 0 and not left.exists()


def test_output_of_a_failed_run(place):
    """A real one: it has no environment."""
    job = Job(SuiteCase("c|1", **{**CASE, "env": "shoal/None-v0"}), 1)
    words, _, kept = run_job(job, ChildProcesses(), place / "out")["error"].rpartition("; what it wrote is in ")
    assert "exit code" in words and kept.startswith("failed/c-1-seed-1-")
    assert "None-v0" in (place / "out" / kept / "stderr.txt").read_text()
    assert [folder.name for folder in place.iterdir()] == ["out"]


def test_run_directory_of_a_failed_run(place):
    """The run directory of a failed run is kept without its checkpoints."""

    class Ran:
        def run(self, words, seconds, beside=None, cwd=None, env=None):
            (run,) = place.glob("shoal-bench-*")
            for name in ("run/logs/learner-0.log", "run/checkpoints/1/learner-0", "run/.lock"):
                (run / name).parent.mkdir(parents=True, exist_ok=True)
                (run / name).write_text("words")
            return subprocess.CompletedProcess(words, 1, "out", "err")

    for _ in range(2):  # the second time in the place of the first
        row = run_job(Job(SuiteCase("c", **CASE), 1), Ran(), place / "out")
    kept = place / "out" / row["error"].rpartition(" in ")[2]
    assert sorted(str(file.relative_to(kept)) for file in kept.rglob("*") if file.is_file()) == ["logs/learner-0.log", "stderr.txt",
                                                                                                "stdout.txt"]
    assert not list(place.glob("shoal-bench-*"))


@pytest.mark.parametrize(("given", "seconds"), [({"max_env_steps": 5}, 3900), ({"max_seconds": 60.0}, 360)])
def test_run_that_does_not_end(given, seconds):
    """A case without max_seconds has an hour, and five minutes to begin and to end."""
    class Ran:
        def run(self, words, seconds, beside=None, cwd=None, env=None):
            self.seconds = seconds
            return subprocess.CompletedProcess(words, TOO_LONG, "", "the last words\n")

    ran = Ran()
    row = run_job(Job(SuiteCase("c", preset="a2c", env="CartPole-v1", **given), 1), ran)
    assert ran.seconds == seconds
    assert row["error"].startswith(f"it was still running after {seconds} s and was killed: give max_seconds")
    assert row["error"].endswith("the last words")
