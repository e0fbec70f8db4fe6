"""What a line is, and how its result is written."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "Line", "apart", "machine", "shoal", "side_by_side", "train"]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
TRIALS = ROOT / ".trials"  # of lines that are not written yet
CHANGED = "+changes"
JOBS = "SHOAL_EVIDENCE_JOBS"  # how many runs `side_by_side` may start at once


def side_by_side(work: Callable[[Any], Any], cases: Iterable[Any]) -> list[Any]:
    """`work` on every case, as many at a time as --jobs says: for processes whose results do not depend on time."""
    with ThreadPoolExecutor(int(os.environ.get(JOBS, "1"))) as pool:
        return list(pool.map(work, cases))


def apart(module: str, **values: Any) -> dict[str, Any]:
    """What `python -m module` prints last of these values: a trial in a process of its own, with one thread. It is kept until its
    line is written, so that a line which was cut short goes on where it was, at the same commit."""
    kept = TRIALS / commit() / f"{module}-{zlib.crc32(json.dumps(values, sort_keys=True).encode()):08x}.json"
    if kept.exists():
        known: dict[str, Any] = json.loads(kept.read_text())
        return known
    done = subprocess.run([sys.executable, "-m", module, json.dumps(values)], cwd=ROOT, text=True, capture_output=True, check=False,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if not commit().endswith(CHANGED):
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(found))
    return found


@dataclass(frozen=True)
class Line:
    """One statement of an issue. `run(seed)` gives a dictionary with at least `met`."""

    name: str
    issue: int
    statement: str
    run: Callable[[int], dict[str, Any]]
    seeds: tuple[int, ...] = (0, 1, 2)
    least: int | None = None
    """Seeds that must meet it; none: each of them."""
    together: bool = False
    """Whether seeds may run side by side (--jobs): their results do not depend on time."""

    @property
    def path(self) -> Path:
        return RESULTS / f"{self.name}.json"

    def fresh(self) -> bool:
        """Whether this very commit is known to meet the line."""
        return (known := self.known()).get("met", False) and known["commit"] == commit()

    def known(self) -> dict[str, Any]:
        return json.loads(self.path.read_text()) if self.path.exists() else {}

    def record(self) -> bool:
        """Run every seed and write everything down; true when enough of them met the statement."""
        runs = side_by_side(self._one, self.seeds) if self.together else [self._one(seed) for seed in self.seeds]
        shutil.rmtree(TRIALS, ignore_errors=True)
        met = sum(run["met"] for run in runs) >= (len(runs) if self.least is None else self.least)
        before = self.known()
        earlier = [*before.pop("earlier", []), {key: before[key] for key in ("commit", "date", "met", "runs")}] if before else []
        RESULTS.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({"line": self.name, "issue": self.issue, "statement": self.statement, "met": met,
                                         "commit": commit(), "date": time.strftime("%Y-%m-%d %H:%M"), "machine": machine(),
                                         "runs": runs, "earlier": earlier}, indent=1) + "\n")
        return met

    def _one(self, seed: int) -> dict[str, Any]:
        started = time.time()
        try:
            run = self.run(seed)
        except Exception as error:  # a run that breaks is a result too: it is written down and not met
            run = {"met": False, "error": f"{type(error).__name__}: {error}".replace(f"{ROOT}/", "")}
        told = json.dumps(run) if self.together else _short(run)  # a line that is cut short has told what it knew
        print(f"    seed {seed}: {'met' if run['met'] else 'NOT MET'}  {told}", flush=True)
        return {"seed": seed, "took_seconds": round(time.time() - started, 1), **run}


def _short(run: dict[str, Any]) -> str:
    keys = ("eval_return", "env_steps", "seconds", "error")
    shown = {key: run[key] for key in keys if run.get(key) is not None}
    return "  ".join(f"{key}={value:.6g}" if isinstance(value, float) else f"{key}={value}" for key, value in shown.items())


def commit() -> str:
    """Of this tree; a copy without its history is told by SHOAL_COMMIT."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    changed = subprocess.run(["git", "status", "--porcelain", "--", "src"], cwd=ROOT, capture_output=True, text=True, check=False)
    return (found.stdout.strip() or os.environ.get("SHOAL_COMMIT", "unknown")) + (CHANGED if changed.stdout.strip() else "")


def machine() -> dict[str, Any]:
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {"cores": len(os.sched_getaffinity(0)), "cpu": names[0] if names else platform.machine(),
            "python": platform.python_version(), "torch": torch.__version__, "load": round(os.getloadavg()[0], 2)}


def shoal(*arguments: str, timeout: float = 900, more: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The command as a user types it; where only the tree was copied, its module."""
    script = Path(sys.executable).parent / "shoal"
    words = [str(script)] if script.exists() else [sys.executable, "-m", "shoal.cli"]
    return subprocess.run([*words, *arguments], capture_output=True, text=True, timeout=timeout, check=False,
                          env={**os.environ, **(more or {})})


KEPT = ("stopped_by", "eval_return", "eval_episodes", "train_return", "env_steps", "learner_steps", "seconds", "startup_seconds",
        "env_steps_per_second", "learner_idle", "policy_lag", "restarts", "peak_memory_mb", "slots")


def train(*arguments: str, seed: int, timeout: float = 900) -> dict[str, Any]:
    """Train in a folder of its own; what the summary says, and the command that gave it."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = ["train", *arguments, "--seed", str(seed), "--run-dir", str(run)]
        done = shoal(*command, timeout=timeout)
        if not (run / "summary.json").exists():
            raise RuntimeError(done.stderr[-2000:] or done.stdout[-2000:])
        summary = json.loads((run / "summary.json").read_text())
    return {"command": "shoal " + " ".join(command[:-2]), "exit_code": done.returncode, **{key: summary.get(key) for key in KEPT}}
