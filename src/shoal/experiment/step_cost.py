"""What a step of an environment costs on this machine: measured once in well under a second, and kept.

Kept in step_costs.json of the cache folder (cache_folder.py), by environment, its arguments and this processor, so that the same
command chooses the same number of actors every time. An environment without a name that others could use (a lambda, a class of a
notebook) is measured at every start.
"""

from __future__ import annotations

import functools
import hashlib
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shoal import envs
from shoal.algorithms.records.spaces import leaf_tree
from shoal.cache_folder import cache_folder
from shoal.envs.random_policy import RandomPolicy
from shoal.errors import CheckpointError
from shoal.experiment.checkpoints import read_json, write_json
from shoal.experiment.patience import patience
from shoal.runtime.start_checks import cpu_name
from shoal.slots import leaves

if TYPE_CHECKING:
    from shoal.envs import BatchedEnv
    from shoal.experiment.config import EnvsConfig
    from shoal.experiment.references import EnvRef

__all__ = ["StepCost", "costs_file", "step_cost"]

WARM_STEPS, MOST_STEPS, MOST_SECONDS = 5, 100, 0.3


@dataclass(frozen=True)
class StepCost:
    """Of one environment, acting at random."""

    seconds: float
    """The median step, so that resets and what else the machine does count little."""
    images: bool
    """Whether observations have images, from which a learner on a GPU gains."""


def costs_file() -> Path:
    return cache_folder() / "step_costs.json"


def step_cost(env: EnvRef, options: EnvsConfig, most_seconds: float) -> StepCost | None:
    """None where it cannot be made or stepped: `prepare` tries again and says why. It may take `most_seconds`."""
    named = env.record()
    if not (named.get("id") or named.get("import")):
        return _measured(env, options, most_seconds)
    words = json.dumps([named, options.backend, sorted(options.kwargs), cpu_name()])
    return _kept(hashlib.sha256(words.encode()).hexdigest()[:16], env, options, most_seconds)


@functools.lru_cache
def _kept(key: str, env: EnvRef, options: EnvsConfig, most_seconds: float) -> StepCost | None:
    path = costs_file()
    try:
        known = read_json(path)
    except CheckpointError:  # not there yet, or damaged: then it is measured again
        known = {}
    try:
        entry = known[key]
        return StepCost(float(entry["seconds"]), bool(entry["images"]))
    except (KeyError, TypeError, ValueError):
        found = _measured(env, options, most_seconds)
    if found is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {**known, key: {"env": env.name, "date": time.strftime("%Y-%m-%d"), **asdict(found)}})
    return found


def _measured(env: EnvRef, options: EnvsConfig, most_seconds: float) -> StepCost | None:
    with patience(most_seconds, env.name):
        try:
            made = envs.make(env.target, 1, backend=options.backend, **options.arguments())
            try:
                images = any(len(shape) == 3 for _, (shape, _) in leaves(leaf_tree(made.observation_space)))
                return StepCost(_median_step(made), images)
            finally:
                made.close()
        except Exception:  # the environment's own code, which may raise anything
            return None


def _median_step(env: BatchedEnv) -> float:
    act, seconds = RandomPolicy(env.action_space, np.random.default_rng(0)), list[float]()
    step, end = env.reset(seed=0), time.monotonic() + MOST_SECONDS
    while len(seconds) < WARM_STEPS + MOST_STEPS and (len(seconds) <= WARM_STEPS or time.monotonic() < end):
        action = act(step)
        before = time.perf_counter()
        step = env.step(action)
        seconds.append(time.perf_counter() - before)
    return statistics.median(seconds[WARM_STEPS:])
