"""A run of `shoal train` and the return of every evaluation in it, as JSON.

    python -m benchmarks.training_curve --out curve.json es HalfCheetah-v5 --actors 16 --max-seconds 500 [options of shoal train]

The run's own output goes to stderr, so that a long run shows its progress.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.bench import machine
from shoal.bench.rates import snapshots

__all__ = ["evaluations", "main"]

KEPT = ("stopped_by", "env_steps", "learner_steps", "eval_return", "seconds", "startup_seconds", "env_steps_per_second",
        "learner_idle", "restarts", "peak_memory_mb")


def evaluations(shots: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The return of each evaluation, and how far the run was when it was known."""
    rows: list[dict[str, Any]] = []
    for shot in shots:
        if shot.get("evaluations", 0) > len(rows) and shot.get("eval_return") is not None:
            rows.append({name: shot.get(name) for name in ("env_steps", "learner_steps", "seconds", "eval_return")})
    return rows


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    options, training = parser.parse_known_args(words)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = ["train", *training, "--run-dir", str(run)]
        done = subprocess.run([sys.executable, "-m", "shoal.cli", *command], stdout=sys.stderr, check=False)
        if done.returncode:
            return done.returncode
        summary = json.loads((run / "summary.json").read_text())
        found = {**machine.describe(), "command": f"shoal train {shlex.join(training)}",
                 **{name: summary.get(name) for name in KEPT}, "evaluations": evaluations(snapshots(run / "metrics.jsonl"))}
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
