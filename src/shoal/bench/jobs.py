"""Runs one job of a suite.

shoal runs as a user would run it, in a process of its own, and its numbers come from summary.json and metrics.jsonl. Peers and
replay buffers are run from a checkout of the repository (checkout.py). A column that a run does not report stays empty. A job that
cannot be run is a row with the reason: "skipped" where the machine lacks something, otherwise a failure, whose logs are kept in the
results' folder.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from shoal.bench import checkout
from shoal.bench.checkout import Benchmarks
from shoal.bench.child_processes import TOO_LONG, ChildProcesses
from shoal.bench.rates import marks_of, rate, snapshots, tail
from shoal.bench.run_folders import folder_name, keep_failed_run, temporary_run_folder
from shoal.bench.suite import Job

__all__ = ["ended", "failure", "finite", "run_job", "unrated"]

RECORD_SECONDS = 300.0
HOUR = 3600.0
SLACK_SECONDS = 300.0  # beyond a run's own time


def run_job(job: Job, children: ChildProcesses, results: Path | None = None) -> dict[str, Any]:
    """One row: columns, or an error. What a failed run wrote is kept in the folder of the `results`, if there is one."""
    load, began = os.getloadavg()[0], time.monotonic()
    kept = None if results is None else results / "failed" / folder_name(job.key)
    row: dict[str, Any]
    found = checkout.benchmarks()
    if job.case.gpu and not _has_gpu():
        row = {"error": "needs a GPU, and there is none here", "skipped": True}
    elif lacking := checkout.missing_checkout(job.case):
        row = {"error": lacking, "skipped": True}
    elif job.case.preset is None and found is not None:
        row = found.runner_of(job.case).run(job, children, kept)
    else:
        row = _shoal(job, found, children, kept)
    return {"error": None, **row, "load": round(load, 2), "wall_seconds": round(time.monotonic() - began, 1)}


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


# ---------------------------------------------------------------------------------------------- shoal
def _shoal(job: Job, found: Benchmarks | None, children: ChildProcesses, kept: Path | None) -> dict[str, Any]:
    with temporary_run_folder() as folder:
        arguments = {**job.arguments(), "run_dir": str(folder / "run")}
        if job.case.expert:
            arguments["demos"] = str(folder / "demos")
            record = [sys.executable, "-m", "shoal.cli", "data", "record", job.case.expert, job.case.env, "--episodes", "20",
                      "--seed", str(job.seed), "--out", arguments["demos"]]
            done = children.run(record, RECORD_SECONDS)
            if done.returncode:
                return failure({"error": f"no demonstrations: {tail(done.stderr)}"}, done, kept)
        words = [sys.executable, "-m", "shoal.bench.training", json.dumps(arguments)]
        kills: list[dict[str, Any]] = []

        def beside(pid: int, over: threading.Event) -> None:
            if found is not None:
                found.kill_victims(pid, job.case.kill, folder / "run" / "metrics.jsonl", job.case.kill_every, kills, over)

        began = time.time()
        done = children.run(words, _patience(job), beside)
        row = _trained(job, found, folder / "run", done, began, kills)
        return failure(row, done, kept, folder / "run") if row["error"] else row


def failure(row: dict[str, Any], done: CompletedProcess[str], kept: Path | None, run: Path | None = None) -> dict[str, Any]:
    """The row of a failed run, with where its logs are."""
    if kept is None:
        return row
    keep_failed_run(kept, done, run)
    return {**row, "error": f"{row['error']}; what it wrote is in {kept.relative_to(kept.parents[1])}"}


def ended(done: CompletedProcess[str], seconds: float) -> str:
    """Why a process that has failed did."""
    if done.returncode == TOO_LONG:
        return f"it was still running after {seconds:.0f} s and was killed: give max_seconds, or a larger one; {tail(done.stderr)}"
    return f"exit code {done.returncode}: {tail(done.stderr)}"


def _trained(job: Job, found: Benchmarks | None, directory: Path, done: CompletedProcess[str], began: float,
             kills: list[dict[str, Any]]) -> dict[str, Any]:
    """The columns of a run that has ended, or why there are none."""
    if done.returncode or not (directory / "summary.json").exists():
        return {"error": ended(done, _patience(job))}
    summary, config = (json.loads((directory / f"{name}.json").read_text(encoding="utf-8")) for name in ("summary", "config"))
    shots = snapshots(directory / "metrics.jsonl")
    row = {**summary_columns(summary), "startup_seconds": startup(shots, began), "curve": curve(shots), "kills": kills}
    if job.case.warm_seconds:
        row["env_steps_per_second"] = finite(rate(marks_of(shots), job.case.warm_seconds, looked=True))
    if len(job.case.actors) > 1 and found is not None:
        row["observed"] = found.observed(summary, config["architecture"])
    row["error"] = unrated(job, row)
    if summary["stopped_by"] == "interrupt":
        row["error"] = "it was stopped from outside"
    elif len(kills) < len(job.case.kill):
        row["error"] = f"the run ended before {job.case.kill[len(kills)]} could be killed"
    return row


def unrated(job: Job, row: Mapping[str, Any]) -> str | None:
    """What is wrong with a run that should have a rate and has none."""
    timed = job.case.warm_seconds and row["env_steps_per_second"] is None
    why = "the count is read once a second and must change often enough; give more max_seconds, or smaller unrolls"
    return f"it was too short to have a rate after {job.case.warm_seconds:g} s of warm-up: {why}" if timed else None


def summary_columns(summary: Mapping[str, Any]) -> dict[str, Any]:
    """A run's summary.json as columns; None where it has no value."""
    millions = summary["env_steps"] / 1e6
    lag, age = summary.get("policy_lag") or {}, summary.get("data_age_seconds") or {}
    reached = summary.get("stopped_by") == "return"
    final = summary.get("eval_return")
    return {
        **{name: summary.get(name) for name in ("env_steps", "env_steps_per_second", "learner_idle", "samples_per_insert",
                                                "bytes_per_env_step", "peak_memory_mb", "restarts", "actors",
                                                "stopped_by", "verdict", "eval_episodes", "layout")},
        "policy_lag_mean": lag.get("mean"), "policy_lag_p95": lag.get("p95"),
        "data_age_mean": age.get("mean"), "data_age_p95": age.get("p95"),
        "cpu_seconds_per_million": summary["cpu_seconds"] / millions if millions else None,
        "peak_memory_mb_per_million": summary["peak_memory_mb"] / millions if millions else None,
        "env_steps_to_threshold": summary["env_steps"] if reached else None,
        "seconds_to_threshold": summary["seconds"] if reached else None,
        "final_return": summary.get("train_return") if final is None else final,
    }


def startup(shots: list[dict[str, Any]], began: float) -> float | None:
    """From the start of the process to the first environment step: with the imports, for which a user waits too."""
    return next((shot["time"] - shot["seconds"] - began for shot in shots if shot["seconds"]), None)


def curve(shots: list[dict[str, Any]]) -> list[list[float]]:
    """[env steps, seconds, return] of every evaluation."""
    points: list[list[float]] = []
    seen = 0
    for shot in shots:
        if shot.get("evaluations", 0) > seen and shot.get("eval_return") is not None:
            seen = shot["evaluations"]
            points.append([shot["env_steps"], shot["seconds"], shot["eval_return"]])
    return points


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _patience(job: Job) -> float:
    """Longer than any run takes: to start, to find its layout (--actors auto) and to end it has SLACK_SECONDS; to train an hour,
    where the case does not say how long."""
    return (job.case.max_seconds or HOUR) + SLACK_SECONDS
