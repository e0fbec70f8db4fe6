"""What `--actors auto` chooses on CartPole with the throughput presets, beside all that it could have chosen (issue 3).

The command is run as a user types it, three times; then every candidate is run by itself, for longer than a trial and with the
layout written out. The choice is met where the chosen layout's own rate is the best one's, or within a tenth of it: on a machine
that others use, two layouts that close change places from minute to minute.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evidence.lines import Line, shoal
from shoal.bench.child_processes import ChildProcesses
from shoal.bench.jobs import run_job
from shoal.bench.suite import Job, SuiteCase
from shoal.coordination.calibration import ActorLayout, candidates
from shoal.experiment.run import plan_of

__all__ = ["LINES", "chosen", "rates"]

CLOSE = 0.9
SECONDS = 4.0
PRESETS, ENV = ("impala_throughput", "ppo_throughput"), "CartPole-v1"


def chosen(preset: str, seed: int, seconds: float = SECONDS) -> dict[str, Any]:
    """What the command says that it chose, and how fast it then was."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = ["train", preset, ENV, "--actors", "auto", "--eval.no-enabled", "--max-seconds", f"{seconds:g}",
                   "--seed", str(seed)]
        done = shoal(*command, "--run-dir", str(run), timeout=300)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    return {"command": f"shoal {' '.join(command)}", **summary["layout"], "env_steps_per_second": summary["env_steps_per_second"]}


def rates(preset: str) -> dict[str, Any]:
    """Env steps/s of every candidate, each run by itself."""
    experiment = plan_of(preset, ENV, None, None, {"actors": "auto"}).experiment
    architecture, found = experiment.architecture, {}
    rows = architecture.envs_per_actor * getattr(architecture, "batch_slots", experiment.actor_count)
    for layout in candidates(rows, len(os.sched_getaffinity(0))):
        overrides = {"eval.enabled": False, **written_out(layout, hasattr(architecture, "batch_slots"))}
        case = SuiteCase(str(layout), preset=preset, env=ENV, max_seconds=2 + SECONDS, warm_seconds=2.0, overrides=overrides)
        row = run_job(Job(case, 1), ChildProcesses())
        found[str(layout)] = row["error"] or round(row["env_steps_per_second"])
    return found


def written_out(layout: ActorLayout, slots: bool) -> dict[str, Any]:
    """A layout as the values that a user would give."""
    values = {"actors": layout.actors, "learners": layout.learners, "learner_threads": layout.learner_threads,
              "architecture.envs_per_actor": layout.envs_per_actor, "architecture.one_place": layout.one_place}
    return {**values, "architecture.batch_slots": layout.actors // layout.learners} if slots else values


def share_of_best(words: str, speeds: Mapping[str, float]) -> dict[str, Any]:
    """The chosen layout's part of the best rate; none of it where it failed when it was run by itself."""
    best = max(speeds, key=lambda layout: speeds[layout], default=None)
    return {"best": best, "share_of_best": round(speeds.get(words, 0.0) / speeds[best], 3) if best else 0.0}


def best_is_found(seed: int) -> dict[str, Any]:
    """Both presets; the rates of the alternatives are taken right after the choice."""
    found: dict[str, Any] = {}
    for preset in PRESETS:
        choice = chosen(preset, seed)
        alone = rates(preset)
        speeds = {words: rate for words, rate in alone.items() if not isinstance(rate, str)}
        found[preset] = {**choice, "alone": alone, **share_of_best(choice["chosen"], speeds)}
    return {"met": all(one["share_of_best"] >= CLOSE for one in found.values()), **found}


LINES = [
    Line("layout-cartpole", 3, "--actors auto finds the best layout for impala_throughput and ppo_throughput on CartPole-v1: run "
         f"by itself, what it chose has at least {CLOSE:.0%} of the env steps/s of the best candidate", best_is_found,
         seeds=(1, 2, 3)),
]
