"""Mechanisms: the experiments that tell right from wrong, and runs that are broken on purpose."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from evidence.lines import KEPT, Line, shoal, train

__all__ = ["LINES"]

RISKY = ("impala", "shoal/RiskyChain-v0", "--algorithm.behaviour-mix", "0.3", "--max-env-steps", "100000")


def corrected(seed: int) -> dict[str, Any]:
    result = train(*RISKY, "--algorithm.correction", "vtrace", seed=seed)
    return {"met": result["eval_return"] >= 0.95, **result}


def uncorrected(seed: int) -> dict[str, Any]:
    result = train(*RISKY, "--algorithm.correction", "none", seed=seed)
    return {"met": result["eval_return"] <= 0.6, **result}


def resumes(seed: int) -> dict[str, Any]:
    """Kill the supervisor with -9 half-way, resume, reach the threshold; env_steps never runs backwards."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        program = str(Path(sys.executable).parent / "shoal")
        process = subprocess.Popen([program, "train", "impala", "CartPole-v1", "--seed", str(seed), "--run-dir", str(run),
                                    "--until-return", "475", "--checkpoint.every-seconds", "0.5"], stdout=subprocess.DEVNULL)
        metrics, deadline = run / "metrics.jsonl", time.monotonic() + 120
        while _env_steps(metrics)[-1] < 20_000 and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.05)
        half_way = process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
        before = _env_steps(metrics)
        done = shoal("resume", str(run), "--until-return", "475", "--max-env-steps", "1000000")
        after = _env_steps(metrics)
        summary = json.loads((run / "summary.json").read_text())
    monotone = all(a <= b for a, b in itertools.pairwise(after))
    return {"met": half_way and summary["stopped_by"] == "return" and monotone and after[-1] > before[-1] and done.returncode == 0,
            "env_steps_at_kill": before[-1], "monotone": monotone, **{key: summary.get(key) for key in KEPT}}


def _env_steps(metrics: Path) -> list[int]:
    if not metrics.exists():
        return [0]
    rows = [json.loads(line) for line in metrics.read_text().splitlines() if line.endswith("}")]
    return [0, *(row["env_steps"] for row in rows if "env_steps" in row)]


LINES = [
    Line("mechanism-riskychain-vtrace", 2, "RiskyChain, 30 % uniform behaviour, V-trace: >= 0.95", corrected),
    Line("mechanism-riskychain-none", 2, "RiskyChain, 30 % uniform behaviour, uncorrected: <= 0.6", uncorrected),
    Line("mechanism-resume", 2, "kill -9 half-way, resume, reach 475 on CartPole-v1; env_steps never runs backwards", resumes),
]
