"""Faults of issue 5: real SIGKILLs from outside, in runs as a user starts them; each must still reach its threshold."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from evidence.lines import KEPT, Line

__all__ = ["LINES", "kill_when"]

FIRST, EVERY = 8_000, 8_000  # env steps before the first death and between two


def survives(name: str, preset: tuple[str, ...], victims: tuple[str, ...], env: str = "CartPole-v1", goal: float = 450) -> Line:
    """`victims` are processes as `ps` shows them ("actor 1" for "shoal: actor 1"), killed one after the other."""

    def run(seed: int) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            done = Path(folder) / "run"
            command = ["train", *preset, env, "--until-return", f"{goal:g}", "--max-env-steps", "1000000", "--seed", str(seed),
                       "--checkpoint.every-seconds", "1", "--eval.every-env-steps", str(FIRST + EVERY * len(victims)),
                       "--console.mode", "none"]
            process = subprocess.Popen([str(Path(sys.executable).parent / "shoal"), *command, "--run-dir", str(done)],
                                       stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            kills = [kill for kill in (kill_when(process, victim, done / "metrics.jsonl", FIRST + EVERY * k)
                                       for k, victim in enumerate(victims)) if kill]
            try:
                _, errors = process.communicate(timeout=240)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
                errors = "not done after 240 s"
            if not (done / "summary.json").exists():
                raise RuntimeError(errors[-2000:])
            summary = json.loads((done / "summary.json").read_text())
        met = len(kills) == len(victims) and summary["stopped_by"] == "return" and summary["restarts"] >= len(victims) \
            and summary["slots"]["conserved"]
        return {"met": met, "command": "shoal " + " ".join(command), "kills": kills, "exit_code": process.returncode,
                **{key: summary.get(key) for key in KEPT}}

    return Line(f"stress-kill-{name}", 5, f"{' '.join(preset)} on {env} reaches {goal:g} although {', '.join(victims)} are killed "
                "(SIGKILL) on the way", run, seeds=(0,))


def kill_when(process: subprocess.Popen[str], victim: str, metrics: Path, at: int) -> dict[str, Any] | None:
    """Kill it once the run is so far; None if the run ended before."""
    while process.poll() is None:
        steps = _env_steps(metrics)
        pid = _pid(process.pid, victim) if steps >= at else None
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            return {"victim": victim, "pid": pid, "env_steps": steps}
        time.sleep(0.02)
    return None


def _pid(parent: int, victim: str) -> int | None:
    for child in psutil.Process(parent).children(recursive=True):
        try:
            if " ".join(child.cmdline()).strip() == f"shoal: {victim}" and child.status() != psutil.STATUS_ZOMBIE:
                return child.pid
        except psutil.Error:
            continue
    return None


def _env_steps(metrics: Path) -> int:
    if not metrics.exists():
        return 0
    rows = [json.loads(line) for line in metrics.read_text().splitlines() if line.endswith("}")]
    return max((int(row["env_steps"]) for row in rows if "env_steps" in row), default=0)


LINES = [
    survives("ppo", ("ppo",), ("worker 1", "trainer 0")),
    survives("a2c", ("a2c",), ("worker 1", "trainer 0")),
    survives("impala", ("impala",), ("actor 1", "learner 0")),
    survives("a3c", ("a3c",), ("worker 1", "worker 0")),
    survives("a3c-master", ("a3c", "--architecture.mode", "master"), ("worker 1", "server 0")),
    survives("ga3c", ("ga3c",), ("agent 1", "predictor 0 + trainer 0")),
    survives("seed", ("seed",), ("actor 1", "inference 0", "learner 0")),
    survives("appo", ("appo",), ("actor 1", "inference 0", "learner 0")),
    survives("rapid_ppo", ("rapid_ppo",), ("actor 1", "learner 0")),
    survives("gala", ("gala",), ("learner_2 0", "learner_0 0")),
]
