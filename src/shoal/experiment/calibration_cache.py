"""What `shoal calibrate` found on this machine, so that --actors auto need not try it again.

The file is calibration.json in the cache folder (cache_folder.py). An entry holds for one machine, one environment and one preset
with all values that a step or an update depends on; other values are another entry.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shoal.cache_folder import cache_folder
from shoal.coordination.calibration import ActorLayout, Trial
from shoal.errors import CheckpointError
from shoal.experiment.checkpoints import read_json, write_json
from shoal.experiment.config import Plan
from shoal.experiment.prepare import plan_to_json
from shoal.runtime.start_checks import cpu_name, gpu_names

__all__ = ["cache_file", "recall", "remember"]

MATTERS = ("shoal", "preset", "env", "algorithm", "architecture", "net", "envs", "gpu", "device", "learners", "learner_threads",
           "cores")
"""What of a configuration the fastest layout depends on."""


def cache_file() -> Path:
    return cache_folder() / "calibration.json"


def remember(plan: Plan, cores: int, trials: list[Trial]) -> Path:
    """Keep the trials of a plan, fastest first."""
    path, known = cache_file(), _read()
    tried = [{**asdict(trial.layout), "env_steps_per_second": trial.env_steps_per_second} for trial in trials]
    known[_key(plan, cores)] = {"preset": plan.title, "env": plan.env.name, "cores": cores, "cpu": cpu_name(),
                                "date": time.strftime("%Y-%m-%d"), "tried": tried}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, known)
    return path


def recall(plan: Plan, cores: int) -> tuple[str, list[Trial]]:
    """The date and the trials of an earlier calibration of the same plan on this machine; no trials where there was none."""
    entry = _read().get(_key(plan, cores))
    try:
        return entry["date"], [_trial(row) for row in entry["tried"]]  # type: ignore[index]  # whatever is in the file
    except (TypeError, KeyError, ValueError):
        return "", []


def _trial(row: Mapping[str, Any]) -> Trial:
    values = dict(row)
    rate = float(values.pop("env_steps_per_second"))
    return Trial(ActorLayout(**values), rate)


def _read() -> dict[str, Any]:
    try:
        return read_json(cache_file())
    except CheckpointError:  # not there yet, or damaged: then it is measured again
        return {}


def _key(plan: Plan, cores: int) -> str:
    config = plan_to_json(plan)
    words = {**{name: config[name] for name in MATTERS}, "on": [cores, cpu_name(), gpu_names()]}
    return hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()[:16]
