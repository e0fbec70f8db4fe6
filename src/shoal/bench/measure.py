"""Runs, each in processes of its own: alternating, so that a slow minute of the machine hits everybody; medians and spread.

Whatever is run reports marks, (seconds since its first environment step, env steps so far); a rate is taken between the
first and the last change of the count after the warm-up. Marks of shoal are snapshots, which see a change up to a second late: what
that may cost is known, and a window that is too short for it has no rate. A run that fails is an Outcome with an error, never a
missing row.
"""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from shoal.bench.bound import bound
from shoal.bench.cases import Case, Scene
from shoal.bench.scratch import scratch

__all__ = ["Outcome", "Spread", "alternate", "last_json", "rate", "run_reference", "run_shoal", "snapshots", "start", "tail"]

Marks = Sequence[Sequence[float]]
REFERENCE = (sys.executable, "-m", "shoal.bench.reference_loop")
LEAST_SECONDS = 3.0  # of a window: a run is looked at once a second
LUMPY = 1.9  # one look saw so many times as much as another
COARSEST = 0.15  # how far a rate may be off because somebody only looks at the count now and then
SLACK_SECONDS = 120.0  # beyond a run's own time: start, stop, a busy machine


@dataclass(frozen=True)
class Spread:
    """Several measurements of one thing."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        whole = [value for value in values if math.isfinite(value)]
        if not whole:
            return cls(math.nan, math.nan, math.nan, 0)
        return cls(statistics.median(whole), min(whole), max(whole), len(whole))


@dataclass(frozen=True)
class Outcome:
    """One run."""

    env_steps_per_second: float = math.nan
    error: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """For the JSON file, where a number that is none is null."""
        speed = self.env_steps_per_second if math.isfinite(self.env_steps_per_second) else None
        return {**asdict(self), "env_steps_per_second": speed}


def rate(marks: Marks, warm_seconds: float, looked: bool = False) -> float:
    """Env steps/s between the first and the last change of the count after the warm-up; none where it changes less than twice.

    Who counts a whole unroll at once would otherwise gain or lose one of them by where the window happens to end. Marks are made at
    the changes themselves, or (`looked`) by somebody who looks now and then: then there is no rate where it could be off by more
    than COARSEST.
    """
    seen = [(before, mark) for before, mark in pairwise(marks) if mark[0] >= warm_seconds]
    changed = [both for both in seen if both[1][1] > both[0][1]]
    if len(changed) < 2:
        return math.nan
    (early, first), (late, last) = changed[0], changed[-1]
    seconds, steps = last[0] - first[0], last[1] - first[1]
    look = max(first[0] - early[0], last[0] - late[0])
    if seconds <= 0 or (looked and min(_jump(seen) / steps, look / seconds) > COARSEST):
        return math.nan
    return steps / seconds


def _jump(seen: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float:
    """How much is counted at once, as far as looks can tell: whatever divides all differences, or what one look saw more than
    another, for its time, where that is about twice as much (less is the unevenness of any run). A window may hold one of them too
    many or too few; but neither is it longer or shorter than by one look."""
    usual = (seen[-1][1][0] - seen[0][0][0]) / len(seen)
    found = [(mark[1] - before[1]) * usual / max(mark[0] - before[0], usual / 10) for before, mark in seen]
    uneven = max(found) - min(found) if max(found) > LUMPY * min(found) else 0.0
    return max(math.gcd(*(int(mark[1] - before[1]) for before, mark in seen)), uneven)


def start(command: Sequence[str], seconds: float, cwd: str | Path | None = None,
          env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command; one that takes far longer than it should is ended with all it started, as exit code 124. So is it with us."""
    words = list(command)
    process = subprocess.Popen(bound(words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd,
                               env=None if env is None else dict(env), start_new_session=True)
    try:
        out, err = process.communicate(timeout=seconds + SLACK_SECONDS)
    except subprocess.TimeoutExpired as late:
        os.killpg(process.pid, signal.SIGKILL)  # a group of our own making
        out, err = process.communicate()
        return subprocess.CompletedProcess(words, 124, out, f"{err}\nnot done after {late.timeout:.0f} s")
    except BaseException:  # Ctrl-C, which a group of its own does not hear
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def last_json(text: str) -> dict[str, Any] | None:
    """The last line that is a JSON object: what a driver reports, whatever else was printed."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                return dict(json.loads(line))
            except json.JSONDecodeError:
                continue
    return None


def tail(text: str, lines: int = 3) -> str:
    return " | ".join([line.strip() for line in text.splitlines() if line.strip()][-lines:])


def reported(done: subprocess.CompletedProcess[str], warm_seconds: float) -> Outcome:
    """The outcome of a process whose last line is JSON with marks."""
    report = last_json(done.stdout)
    if done.returncode or report is None:
        return Outcome(error=f"exit code {done.returncode}: {tail(done.stderr)}")
    marks = report.pop("marks")
    speed = rate(marks, warm_seconds)
    late = "the run was too short to have a rate" if math.isnan(speed) else None
    return Outcome(speed, late, {key: value for key, value in report.items() if key != "returns"})


@cache
def reference_threads(reference: str, seconds: float) -> int:
    """One thread or one per core, whichever makes the hand-written loop faster here and now."""
    speeds = {}
    for threads in sorted({1, len(os.sched_getaffinity(0))}):
        command = [*REFERENCE, reference, "--seconds", str(seconds), "--threads", str(threads), "--json"]
        speeds[threads] = reported(start(command, seconds), seconds / 3).env_steps_per_second
    return max(speeds, key=lambda threads: -1.0 if math.isnan(speeds[threads]) else speeds[threads])


def run_reference(scene: Scene, scale: float = 1.0) -> Outcome:
    """The hand-written loop, with the number of threads that suits it best."""
    threads = reference_threads(scene.reference, scene.seconds * scale)
    warm, seconds = scene.warm_seconds * scale, (scene.warm_seconds + scene.seconds) * scale
    command = [*REFERENCE, scene.reference, "--seconds", str(seconds), "--threads", str(threads), "--json"]
    return reported(start(command, seconds), warm)


def run_shoal(case: Case, scale: float = 1.0, **more: Any) -> Outcome:
    """shoal.train with the case's preset, in a fresh process and a run directory of its own."""
    warm = case.scene.warm_seconds * scale
    seconds = warm + max(case.scene.seconds * scale, LEAST_SECONDS)
    with scratch() as folder:
        directory = folder / "run"
        arguments = case.arguments(**{"max_seconds": seconds, **more, "run_dir": str(directory)})
        done = start([sys.executable, "-m", "shoal.bench.training", json.dumps(arguments)], arguments["max_seconds"])
        if done.returncode:
            return Outcome(error=f"exit code {done.returncode}: {tail(done.stderr)}")
        summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
        shots = snapshots(directory / "metrics.jsonl")
    marks = [(shot["seconds"], shot["env_steps"]) for shot in shots if shot["seconds"] and not shot.get("last")]
    speed = rate(marks, warm, looked=True)
    kept = ("learner_idle", "policy_lag", "samples_per_insert", "startup_seconds", "seconds", "verdict", "peak_memory_mb",
            "stopped_by", "eval_return", "env_steps", "restarts", "layout")
    details = {**{name: summary.get(name) for name in kept}, "phases": phases(summary.get("roles") or {})}
    return Outcome(speed, "too short to have a rate" if math.isnan(speed) else None, details)


def snapshots(path: Path) -> list[dict[str, Any]]:
    """Those of a run's metrics.jsonl; none where it is not there yet."""
    from shoal.telemetry.sinks import read_lines

    return [row for row in read_lines(path) if row.get("kind") == "snapshot"] if path.exists() else []


def phases(roles: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Per role: shares of wall time by phase, with the waits."""
    shown = {}
    for role, times in roles.items():
        waits = {f"wait {wire}": share for wire, share in times.get("waits", {}).items()}
        shown[role] = {name: round(share, 3) for name, share in {**times.get("phases", {}), **waits}.items() if share > 0.005}
    return shown


def alternate(runners: Mapping[str, Callable[[], Outcome]], rounds: int,
              say: Callable[[str], None] = lambda text: None) -> dict[str, list[Outcome]]:
    """Every runner once per round, in turn; a failed one is tried again in the next round and said so."""
    found: dict[str, list[Outcome]] = {name: [] for name in runners}
    for number in range(rounds):
        for name, run in runners.items():
            outcome = run()
            found[name].append(outcome)
            words = f"FAILED: {outcome.error}" if outcome.error else f"{outcome.env_steps_per_second:,.0f} env steps/s"
            say(f"  round {number + 1}/{rounds}  {name}: {words}")
    return found
