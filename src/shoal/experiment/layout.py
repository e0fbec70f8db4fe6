"""`--actors auto`: from a plan with an open layout to one with a fixed one."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

from shoal import algorithms
from shoal.errors import ConfigError
from shoal.experiment.config import Plan, replayed
from shoal.experiment.prepare import prepare
from shoal.runtime import Program

__all__ = ["laid_out"]


def laid_out(plan: Plan, say: Callable[[str], None]) -> Plan:
    """The plan with actors, environments per actor and places decided.

    On the local runtime they are found by calibration, if the architecture can put everything into one place; inline, for
    other architectures, and with replay (whose rate is chosen, not found), `actor_count` decides.
    """
    experiment = plan.experiment
    architecture = experiment.architecture
    fixed = replayed(algorithms.named(plan.names.algorithm)[1]) or not hasattr(architecture, "one_place")
    if experiment.actors != "auto" or experiment.runtime != "local" or fixed:
        return plan
    prepare(plan)  # whatever is wrong is found before anything is tried
    from shoal.coordination import Layout, calibrate, candidates

    rows = architecture.envs_per_actor * getattr(architecture, "batch_slots", experiment.actor_count)
    cores = len(os.sched_getaffinity(0))

    layouts = [layout for layout in candidates(rows, cores)
               if (layout.one_place or not architecture.one_place)  # what was asked for stays
               and not (layout.one_place and layout.actors < experiment.learners)]
    if not layouts:
        raise ConfigError(f"--architecture.one-place with {experiment.learners} learners on {cores} cores: there is nothing to "
                          f"choose from; give --actors {experiment.learners} in place of auto")

    def draw(layout: Layout) -> Program:
        trial = _with(plan, layout)
        silent = dataclasses.replace(trial.experiment, eval=dataclasses.replace(trial.experiment.eval, enabled=False),
                                     until_return=None)
        return prepare(dataclasses.replace(trial, experiment=silent)).program()

    say(f"calibrating: {rows} environments per batch on {cores} cores")
    best = calibrate(layouts, draw, say)[0]
    say(f"chosen: {best.layout}")
    return _with(plan, best.layout)


def _with(plan: Plan, layout: Any) -> Plan:
    """A batch of all learners together holds the same rows as before: one unroll of every actor."""
    experiment = plan.experiment
    learners = max(layout.learners, experiment.learners)
    changes: dict[str, Any] = {"envs_per_actor": layout.envs_per_actor, "one_place": layout.one_place}
    if hasattr(experiment.architecture, "batch_slots"):
        changes["batch_slots"] = max(1, layout.actors // learners)
    architecture = dataclasses.replace(experiment.architecture, **changes)
    return dataclasses.replace(plan, experiment=dataclasses.replace(
        experiment, architecture=architecture, actors=layout.actors, learners=learners,
        learner_threads=layout.learner_threads))
