"""Chaos and soak of issue 3: real runs, watched and killed from outside; what counts as passed is fixed here, before any result.

    python -m evidence --only stress-chaos                 five minutes each, written to docs/results
    python -m evidence --only stress-soak                  ten minutes
    python -m evidence.chaos --only impala --seconds 40    a short trial: printed, not written

Chaos: every 3 s one process of the run, chosen at random, gets SIGKILL: an actor, a learner, the evaluator or the fork server; not
while no role has come to life since the last one, or the fork server alone would be there to be chosen. The supervisor is spared.

Flat: the Theil-Sen slope (the median of the slopes between all pairs of samples, so that moments in which somebody is dead do not
count) of what is measured after the warm-up, times the time judged, is less than a share of the median.
Memory is the sum of the proportional set sizes of all processes of the run; the part of it that is no mapped file is written down
beside it, because a library's pages count for less while strangers have mapped it too. Latency is the age of data when it is
learned from: it contains the time in queues, and grows when anything between an actor's step and the learner's falls behind.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from evidence.lines import KEPT, Line
from shoal.experiment.process_usage import proportional_mb
from shoal.telemetry.outputs import read_lines
from shoal.telemetry.snapshot import COUNTERS

__all__ = ["LINES"]

FORK_SERVER = "shoal: fork server"
EVERY_SECONDS = 3.0             # between two kills
SAMPLE_SECONDS = 2.0
WARM = 0.2                      # of the duration: not judged
CHAOS_SECONDS, SOAK_SECONDS = 300.0, 600.0
THRESHOLD, EVALUATIONS = 475.0, 2  # reached in this many evaluations, as --until-return asks for a second one
MEMORY_GROWTH, AGE_GROWTH, FILE_GROWTH = 0.03, 0.10, 2.0  # a share of the median, the same, and descriptors


@dataclass
class ProcessWatcher:
    """Looks at a run's processes now and then, and may kill one."""

    process: subprocess.Popen[str]
    killer: random.Random | None
    memory: list[tuple[float, float]] = field(default_factory=list)  # (seconds, MB)
    anonymous: list[tuple[float, float]] = field(default_factory=list)
    files: list[tuple[float, float]] = field(default_factory=list)
    kills: list[tuple[float, str]] = field(default_factory=list)

    def watch(self, metrics: Path, patience: float) -> None:
        """Wait until the run has ended, for at most this many seconds in all."""
        begun = time.monotonic()
        while not metrics.exists() and self.process.poll() is None:
            time.sleep(0.05)
        started = time.monotonic()
        kill_at, sample_at = EVERY_SECONDS, 0.0
        while self.process.poll() is None:
            now = time.monotonic() - started
            if now > patience:
                self.process.kill()
                raise TimeoutError(f"not done after {time.monotonic() - begun:.0f} s")
            if now >= sample_at:
                sample_at = now + SAMPLE_SECONDS
                self._sample(now)
            if self.killer is not None and now >= kill_at and (victims := self._victims()):
                kill_at = now + EVERY_SECONDS
                pid, name = self.killer.choice(victims)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self.kills.append((round(now, 1), name.removeprefix("shoal: ")))
            time.sleep(0.05)

    def _tree(self) -> list[psutil.Process]:
        try:
            parent = psutil.Process(self.process.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _victims(self) -> list[tuple[int, str]]:
        """The fork server and all roles; nobody while there is no role."""
        found = []
        for process in self._tree()[1:]:
            with contextlib.suppress(psutil.Error):
                name = " ".join(process.cmdline()).strip()
                guard = process.parent()  # of the fork server itself; a place that was just forked has its name, and another parent
                just_forked = name == FORK_SERVER and (guard is None or guard.ppid() != self.process.pid)
                if name.startswith("shoal: ") and not just_forked:
                    found.append((process.pid, name))
        return sorted(found) if any(name != FORK_SERVER for _, name in found) else []

    def _sample(self, now: float) -> None:
        sums = [0.0, 0.0, 0.0]
        for process in self._tree():
            with contextlib.suppress(psutil.Error, OSError):
                found = (proportional_mb(process.pid), proportional_mb(process.pid, "Pss_Anon"), process.num_fds())
                sums = [total + value for total, value in zip(sums, found, strict=True)]
        for series, value in zip((self.memory, self.anonymous, self.files), sums, strict=True):
            series.append((now, value))


def slope(samples: Sequence[tuple[float, float]]) -> float:
    """Theil-Sen, per second."""
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(samples, 2) if b[0] > a[0]]
    return statistics.median(slopes) if slopes else float("nan")


def trend(samples: Sequence[tuple[float, float]], seconds: float) -> dict[str, float]:
    """What is judged of a series: its median, and its growth over the time after the warm-up."""
    judged = [(at, value) for at, value in samples if at >= WARM * seconds]
    growth = slope(judged) * (judged[-1][0] - judged[0][0]) if len(judged) > 2 else float("nan")
    return {"samples": len(judged), "median": round(statistics.median([value for _, value in judged] or [float("nan")]), 4),
            "growth": round(growth, 4), "per_minute": round(60 * slope(judged), 5)}


def monotone(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The counters that ran backwards, whenever they did."""
    values: dict[str, list[float]] = {name: [row[name] for row in rows if name in row]  # what the run measures
                                     for name in (*COUNTERS, "weights_version", "seconds")}
    values |= {f"slots {name}": [row["slots"][name] for row in rows] for name in ("written", "consumed", "dropped")}
    return [name for name, series in values.items() if series != sorted(series)]


def evaluations(rows: Sequence[dict[str, Any]]) -> list[float]:
    """The return of each evaluation, as far as snapshots show it."""
    shown = [(row["eval_version"], row["eval_return"]) for row in rows if row["eval_return"] is not None]
    return [value for _, value in dict.fromkeys(shown)]


def watched(command: Sequence[str], seed: int, seconds: float, kill: bool) -> dict[str, Any]:
    """One run of this many seconds, and everything that it is judged by."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        words = ["train", *command, "--max-seconds", f"{seconds:g}", "--seed", str(seed), "--console.mode", "plain"]
        process = subprocess.Popen([str(Path(sys.executable).parent / "shoal"), *words, "--run-dir", str(run)], text=True,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        watcher = ProcessWatcher(process, random.Random(seed) if kill else None)
        try:
            watcher.watch(run / "metrics.jsonl", 60 + 1.5 * seconds)
        finally:
            _, errors = process.communicate()
        if not (run / "summary.json").exists() or process.returncode != 0:
            raise RuntimeError(f"exit code {process.returncode}, kills {watcher.kills[-5:]}: {errors[-2000:]}")
        summary = json.loads((run / "summary.json").read_text())
        lines = read_lines(run / "metrics.jsonl")
    rows = [row for row in lines if row["kind"] == "snapshot"]
    ages = [(row["seconds"], row["data_age_seconds"]["mean"]) for row in rows if row["data_age_seconds"]["mean"] is not None]
    slots = summary["slots"]
    return {"command": "shoal " + " ".join(words), "exit_code": process.returncode, "kills": len(watcher.kills),
            "killed": {name: sum(name == victim for _, victim in watcher.kills) for name in sorted({n for _, n in watcher.kills})},
            "backwards": monotone(rows), "snapshots": len(rows), "evaluations": evaluations(rows),
            "conserved": slots["conserved"], "gap": slots["written"] - slots["consumed"] - slots["dropped"] - slots["held"],
            "unbalanced": [row["text"] for row in lines if row.get("event") == "unbalanced"],
            "memory_mb": trend(watcher.memory, seconds), "anonymous_mb": trend(watcher.anonymous, seconds),
            "open_files": trend(watcher.files, seconds), "data_age_seconds": trend(ages, seconds),
            **{key: summary.get(key) for key in KEPT}}


def verdicts(result: dict[str, Any], seconds: float, kill: bool) -> dict[str, bool]:
    """The judgement. Slots may move while the books are read, so a gap of a few is none; `conserved` waits for it to close."""
    memory, age = result["memory_mb"], result["data_age_seconds"]
    judged = {"ended_well": result["exit_code"] == 0 and result["stopped_by"] == "seconds",
              "counters_monotone": not result["backwards"] and result["snapshots"] >= 0.5 * seconds,
              "nothing_lost": result["conserved"] and not result["unbalanced"] and abs(result["gap"]) <= 32,
              "memory_flat": memory["growth"] <= MEMORY_GROWTH * memory["median"]}
    if kill:
        enough = 0.8 * seconds / EVERY_SECONDS
        judged["killed_all_along"] = result["kills"] >= enough and result["restarts"] >= 0.8 * result["kills"]
        judged["threshold"] = sum(value >= THRESHOLD for value in result["evaluations"]) >= EVALUATIONS
    else:
        judged["latency_flat"] = age["growth"] <= AGE_GROWTH * age["median"]
        judged["open_files_flat"] = result["open_files"]["growth"] <= FILE_GROWTH
        judged["no_restart"] = result["restarts"] == 0
    return judged


@dataclass(frozen=True)
class ChaosCase:
    """A command, for how long, and whether something is killed."""

    name: str
    statement: str
    command: tuple[str, ...]
    seconds: float
    kill: bool

    def run(self, seed: int, seconds: float | None = None) -> dict[str, Any]:
        seconds = seconds or self.seconds
        result = watched(self.command, seed, seconds, self.kill)
        judged = verdicts(result, seconds, self.kill)
        return {"met": all(judged.values()), "judged": judged, **result}

    @property
    def line(self) -> Line:
        return Line(self.name, 3, self.statement, self.run, seeds=(0,))


def chaos(name: str, words: str, *command: str) -> ChaosCase:
    statement = (f"{words} on CartPole-v1, {CHAOS_SECONDS:g} s, a random process killed every {EVERY_SECONDS:g} s: "
                 f"{THRESHOLD:g} in {EVALUATIONS} evaluations of 100 episodes, counters monotone, written = consumed + dropped + "
                 f"held, memory grows by less than {MEMORY_GROWTH:.0%}")
    return ChaosCase(f"stress-chaos-{name}", statement, (*command, "--checkpoint.every-seconds", "2"), CHAOS_SECONDS, True)


CASES = [
    chaos("impala", "impala with 4 actors", "impala", "CartPole-v1", "--actors", "4"),
    chaos("ppo", "ppo with 4 workers", "ppo", "CartPole-v1", "--actors", "4"),
    chaos("two-learners", "impala with 4 actors and 2 learners", "impala", "CartPole-v1", "--actors", "4", "--learners", "2"),
    ChaosCase("stress-soak", f"impala on CartPole-v1 at full rate with 8 actors, {SOAK_SECONDS:g} s: memory grows by less than "
              f"{MEMORY_GROWTH:.0%}, the age of data by less than {AGE_GROWTH:.0%}, open files by at most {FILE_GROWTH:g}; "
              "no restart, counters monotone, written = consumed + dropped + held",
              ("impala", "CartPole-v1", "--actors", "8", "--eval.every-env-steps", "1000000"), SOAK_SECONDS, False),
]
LINES = [case.line for case in CASES]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m evidence.chaos", description="A short trial; nothing is written.")
    parser.add_argument("--only", default="", help="cases whose name contains this word")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each")
    options = parser.parse_args()
    for case in CASES:
        if options.only in case.name:
            print(case.name, json.dumps(case.run(0, options.seconds), indent=1), flush=True)


if __name__ == "__main__":
    main()
