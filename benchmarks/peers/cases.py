"""Cases of a suite with a `peer`: checks them, and runs a peer's driver.

A driver reports marks (seconds, env steps); its processor time and memory are watched from outside.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.composed_limit.scenes import SCENES
from benchmarks.peers import install
from benchmarks.peers.driver_options import check_order, takes
from benchmarks.peers.install import DRIVERS, PEERS, PeerLibrary, driver_environment, peer_named
from benchmarks.peers.process_monitor import ProcessMonitor, last_json
from shoal.bench.child_processes import ChildProcesses
from shoal.bench.jobs import ended, failure, finite, unrated
from shoal.bench.rates import rate
from shoal.bench.suite import Job, SuiteCase
from shoal.errors import ConfigError

__all__ = ["check", "fit_order", "installed", "peer_columns", "run"]


def check(case: SuiteCase) -> None:
    peer = peer_named(str(case.peer))
    if case.env not in SCENES:
        raise ConfigError(f"env={case.env!r} is not possible: the drivers of peers know {' and '.join(sorted(SCENES))}")
    if not case.max_seconds:
        raise ConfigError("it would never end; add max_seconds")
    check_order(peer.name, case.env, case.until_return, case.order)


def fit_order(case: SuiteCase, own: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a peer's driver: those of the case itself, and of the defaults those that the driver takes."""
    peer = str(case.peer)
    if peer not in {one.name for one in PEERS}:
        return dict(case.order)
    able = takes(peer, case.until_return is not None, case.order.get("algorithm"))
    return {key: value for key, value in case.order.items() if key in own or key in able}


@cache
def installed(peer: PeerLibrary) -> tuple[bool, str]:
    return install.install(peer, lambda text: None)


def run(job: Job, children: ChildProcesses, kept: Path | None) -> dict[str, Any]:
    peer = peer_named(str(job.case.peer))
    able, words = installed(peer)
    if not able:
        return {"error": words, "skipped": True}
    seconds = job.case.max_seconds or 600.0
    order: dict[str, Any] = {"scene": SCENES[job.case.env].name, "seconds": seconds, "seed": job.seed, **job.case.order}
    if job.case.until_return is not None:
        order["goal"] = job.case.until_return
    monitor, began, patience = ProcessMonitor(), time.time(), 3 * seconds + 240.0
    done = children.run(peer.command(order), patience, monitor.follow, cwd=DRIVERS, env=driver_environment())
    report = last_json(done.stdout)
    if done.returncode or report is None or not report.get("marks"):
        return failure({"error": ended(done, patience)}, done, kept)
    told: dict[str, Any] = {name: report[name] for name in ("settings", "threads") if name in report}
    used: dict[str, Any] = {"order": order, "packages": words, **told}
    row = {"version": report.get("version"), "used": used, **peer_columns(report, job, monitor, began)}
    row["error"] = unrated(job, row)
    return failure(row, done, kept) if row["error"] else row


def peer_columns(report: Mapping[str, Any], job: Job, monitor: ProcessMonitor, began: float) -> dict[str, Any]:
    """What a driver reported, and what was seen from outside. It was started at `began`, and its own clock at `began_at`."""
    marks = report["marks"]
    steps = marks[-1][1]
    millions = steps / 1e6
    row = {"env_steps": steps, "env_steps_per_second": finite(rate(marks, job.case.warm_seconds)),
           "cpu_seconds_per_million": monitor.cpu_seconds / millions if millions else None,
           "peak_memory_mb": monitor.peak_mb, "peak_memory_mb_per_million": monitor.peak_mb / millions if millions else None,
           "samples_per_insert": report.get("samples_per_insert"), "final_return": report.get("train_return"),
           "startup_seconds": report["began_at"] - began}
    if job.case.until_return is None:
        return row
    reached = report.get("seconds")
    at = [mark[1] for mark in marks if reached is not None and mark[0] <= reached]
    final = row["final_return"] if reached is None else report.get("eval_return")
    return {**row, "stopped_by": "seconds" if reached is None else "return", "seconds_to_threshold": reached,
            "env_steps_to_threshold": at[-1] if at else None, "final_return": final}
