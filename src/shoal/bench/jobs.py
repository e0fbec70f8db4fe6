"""Running one job of a suite: the same columns for shoal, for peers and for replay buffers.

shoal is run as a user would run it, in a process of its own, and its numbers are those of summary.json and metrics.jsonl. A peer
reports marks (seconds, env steps); its processor time and memory are watched from outside. What somebody does not tell stays
empty, and a job that cannot be run is a row with the reason: "skipped" where the machine lacks something, and else a failure, whose
logs are kept in the results' folder.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess
from typing import TYPE_CHECKING, Any

from shoal.bench.children import TOO_LONG, Children
from shoal.bench.measure import last_json, rate, snapshots, tail
from shoal.bench.scratch import keep, name_of, scratch
from shoal.bench.suite import Job
from shoal.bench.watch import Watch, kill_on_the_way

if TYPE_CHECKING:
    from shoal.bench.peers.install import Peer

__all__ = ["run_job"]

RECORD_SECONDS = 300.0
HOUR = 3600.0
SLACK_SECONDS = 300.0  # beyond a run's own time


def run_job(job: Job, children: Children, results: Path | None = None) -> dict[str, Any]:
    """One row: columns, or an error. What a failed run has written is kept in the folder of the `results`, where there is one."""
    load, began = os.getloadavg()[0], time.monotonic()
    kept = None if results is None else results / "failed" / name_of(job.key)
    row: dict[str, Any]
    if job.case.gpu and not _has_gpu():
        row = {"error": "needs a GPU, and there is none here", "skipped": True}
    elif job.case.workload:
        row = _replay(job, children)
    elif job.case.peer:
        row = _peer(job, children, kept)
    else:
        row = _shoal(job, children, kept)
    return {"error": None, **row, "load": round(load, 2), "wall_seconds": round(time.monotonic() - began, 1)}


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


# ---------------------------------------------------------------------------------------------- shoal
def _shoal(job: Job, children: Children, kept: Path | None) -> dict[str, Any]:
    with scratch() as folder:
        arguments = {**job.arguments(), "run_dir": str(folder / "run")}
        if job.case.expert:
            arguments["demos"] = str(folder / "demos")
            record = [sys.executable, "-m", "shoal.cli", "data", "record", job.case.expert, job.case.env, "--episodes", "20",
                      "--seed", str(job.seed), "--out", arguments["demos"]]
            done = children.run(record, RECORD_SECONDS)
            if done.returncode:
                return _failure({"error": f"no demonstrations: {tail(done.stderr)}"}, done, kept)
        words = [sys.executable, "-m", "shoal.bench.training", json.dumps(arguments)]
        kills: list[dict[str, Any]] = []
        began = time.time()
        done = children.run(words, _patience(job), lambda pid, over: kill_on_the_way(
            pid, job.case.kill, folder / "run" / "metrics.jsonl", job.case.kill_every, kills, over))
        row = _trained(job, folder / "run", done, began, kills)
        return _failure(row, done, kept, folder / "run") if row["error"] else row


def _failure(row: dict[str, Any], done: CompletedProcess[str], kept: Path | None, run: Path | None = None) -> dict[str, Any]:
    """The row of a failed run, with where its logs are."""
    if kept is None:
        return row
    keep(kept, done, run)
    return {**row, "error": f"{row['error']}; what it wrote is in {kept.relative_to(kept.parents[1])}"}


def _ended(done: CompletedProcess[str], seconds: float) -> str:
    """Why a process that has failed did."""
    if done.returncode == TOO_LONG:
        return f"it had not ended after {seconds:.0f} s, and was killed: give max_seconds, or more of them; {tail(done.stderr)}"
    return f"exit code {done.returncode}: {tail(done.stderr)}"


def _trained(job: Job, directory: Path, done: CompletedProcess[str], began: float, kills: list[dict[str, Any]]) -> dict[str, Any]:
    """The columns of a run that has ended, or why there are none."""
    if done.returncode or not (directory / "summary.json").exists():
        return {"error": _ended(done, _patience(job))}
    summary, config = (json.loads((directory / f"{name}.json").read_text(encoding="utf-8")) for name in ("summary", "config"))
    shots = snapshots(directory / "metrics.jsonl")
    row = {**summary_columns(summary), "startup_seconds": startup(shots, began), "curve": curve(shots), "kills": kills}
    if job.case.warm_seconds:
        marks = [(shot["seconds"], shot["env_steps"]) for shot in shots if shot["seconds"] and not shot.get("last")]
        row["env_steps_per_second"] = _finite(rate(marks, job.case.warm_seconds, looked=True))
    if len(job.case.actors) > 1:
        row["observed"] = _observed(summary, config["architecture"])
    row["error"] = unrated(job, row)
    if summary["stopped_by"] == "interrupt":
        row["error"] = "it was stopped from outside"
    elif len(kills) < len(job.case.kill):
        row["error"] = f"the run ended before {job.case.kill[len(kills)]} could be killed"
    return row


def unrated(job: Job, row: Mapping[str, Any]) -> str | None:
    """What is wrong with a run that was to be timed and has no rate."""
    timed = job.case.warm_seconds and row["env_steps_per_second"] is None
    why = "the count must change often enough, as it is looked at once a second; give more max_seconds, or smaller unrolls"
    return f"it was too short to have a rate after {job.case.warm_seconds:g} s of warm-up: {why}" if timed else None


def summary_columns(summary: Mapping[str, Any]) -> dict[str, Any]:
    """A run's summary.json as columns; None where there is nothing to say."""
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


def _observed(summary: Mapping[str, Any], architecture: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the model of scaling is calibrated with; None where it does not know the architecture."""
    from shoal.planning.measure import summarised

    seen = summarised(summary) if architecture["name"] == "actor_learner" and not architecture["one_place"] else None
    return seen and {**asdict(seen), "batch": architecture["batch_slots"], "depth": architecture["slots_per_actor"]}


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


def _patience(job: Job) -> float:
    """Longer than any run takes: to start, to find its layout (--actors auto) and to end it has SLACK_SECONDS; to train an hour,
    where the case does not say how long."""
    return (job.case.max_seconds or HOUR) + SLACK_SECONDS


# ---------------------------------------------------------------------------------------------- peers
@cache
def _installed(peer: Peer) -> tuple[bool, str]:
    from shoal.bench.peers.install import install

    return install(peer, lambda text: None)


def _peer(job: Job, children: Children, kept: Path | None) -> dict[str, Any]:
    from shoal.bench.peers.lineup import DRIVERS
    from shoal.bench.peers.more import peer_named
    from shoal.bench.peers.orders import SCENES

    peer = peer_named(str(job.case.peer))
    able, words = _installed(peer)
    if not able:
        return {"error": words, "skipped": True}
    seconds = job.case.max_seconds or 600.0
    order: dict[str, Any] = {"scene": SCENES[job.case.env], "seconds": seconds, "seed": job.seed, **job.case.order}
    if job.case.until_return is not None:
        order["goal"] = job.case.until_return
    watch, began, patience = Watch(), time.time(), 3 * seconds + 240.0
    done = children.run([str(peer.python), str(DRIVERS / f"drive_{peer.name}.py"), json.dumps(order)], patience,
                        watch.follow, cwd=DRIVERS, env={**os.environ, "PYTHONPATH": str(DRIVERS)})
    report = last_json(done.stdout)
    if done.returncode or report is None or not report.get("marks"):
        return _failure({"error": _ended(done, patience)}, done, kept)
    told: dict[str, Any] = {name: report[name] for name in ("settings", "threads") if name in report}
    used: dict[str, Any] = {"order": order, "packages": words, **told}
    row = {"version": report.get("version"), "used": used, **peer_columns(report, job, watch, began)}
    row["error"] = unrated(job, row)
    return _failure(row, done, kept) if row["error"] else row


def peer_columns(report: Mapping[str, Any], job: Job, watch: Watch, began: float) -> dict[str, Any]:
    """What a driver told, and what could be seen from outside. It was started at `began`, and its own clock at `began_at`."""
    marks = report["marks"]
    steps = marks[-1][1]
    millions = steps / 1e6
    row = {"env_steps": steps, "env_steps_per_second": _finite(rate(marks, job.case.warm_seconds)),
           "cpu_seconds_per_million": watch.cpu_seconds / millions if millions else None,
           "peak_memory_mb": watch.peak_mb, "peak_memory_mb_per_million": watch.peak_mb / millions if millions else None,
           "samples_per_insert": report.get("samples_per_insert"), "final_return": report.get("train_return"),
           "startup_seconds": report["began_at"] - began}
    if job.case.until_return is None:
        return row
    reached = report.get("seconds")
    at = [mark[1] for mark in marks if reached is not None and mark[0] <= reached]
    final = row["final_return"] if reached is None else report.get("eval_return")
    return {**row, "stopped_by": "seconds" if reached is None else "return", "seconds_to_threshold": reached,
            "env_steps_to_threshold": at[-1] if at else None, "final_return": final}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# ---------------------------------------------------------------------------------------------- replay
def _replay(job: Job, children: Children) -> dict[str, Any]:
    from shoal.bench import replay

    case, who = job.case, str(job.who)
    seconds = case.max_seconds or 1.0
    peers = [peer for peer in replay.PEERS if peer.name == who]
    for able, words in map(_installed, peers):
        if not able:
            return {"error": words, "skipped": True}
    with scratch() as folder:
        recording: Path | None = folder / "pong.npy"
        if case.workload == "small" or not replay.record_pong(folder / "pong.npy"):
            recording = None
        command = replay.runners(str(case.workload), case.size, peers, seconds, recording).get(who)
        if command is None:
            return {"error": f"{who} has no driver for {case.workload} with capacity {case.size}"}
        rates = replay.measure(command, seconds, children)
    error = rates.pop("error", None)
    return {"error": error, "rates": rates}
