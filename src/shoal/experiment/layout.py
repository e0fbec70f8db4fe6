"""`--actors auto`: from a plan with an open layout to one with a fixed one."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

from shoal import algorithms
from shoal.coordination.autoscale import ACTORS_PER_CORE, AutoscaleConfig
from shoal.errors import ConfigError
from shoal.experiment.config import Plan, architecture_of, replayed
from shoal.experiment.prepare import prepare
from shoal.runtime import Program

__all__ = ["laid_out"]


def laid_out(plan: Plan, say: Callable[[str], None]) -> Plan:
    """The plan with actors, environments per actor and places decided, and whether the number of actors moves from there.

    On the local runtime they are found by calibration, if the architecture can put everything into one place; inline, for
    other architectures, and with replay (whose rate is chosen, not found), `actor_count` decides. So does --autoscale.start.
    """
    experiment = plan.experiment
    if experiment.actors != "auto":
        return plan
    wishes = [name for name in ("start", "most") if getattr(experiment.autoscale, name) is not None]
    if wishes and (why := _unmoved(plan)):
        raise ConfigError(f"--autoscale.{wishes[0]} does not fit: {why}, so their number does not move; leave it out, or give "
                          "--actors a number")
    replay = replayed(algorithms.named(plan.names.algorithm)[1])
    open_ = experiment.runtime != "inline" and hasattr(experiment.architecture, "one_place") and not replay
    if open_ and experiment.runtime == "local" and experiment.autoscale.start is None:
        plan = _calibrated(plan, say)
    return _following(plan, say if open_ else lambda line: None)


def _unmoved(plan: Plan) -> str:
    """Why the number of actors cannot follow the learner; empty where it can."""
    names, experiment = plan.names, plan.experiment
    if experiment.runtime == "inline":
        return "--runtime inline runs all roles in one thread"
    if replayed(algorithms.named(names.algorithm)[1]):
        return f"--algorithm {names.algorithm} learns from a replay table, whose rate is chosen"
    unmoved = getattr(architecture_of(names.architecture), "unmoved", None)
    return unmoved(experiment.architecture) if unmoved else f"--architecture {names.architecture} has a fixed number of actors"


def _following(plan: Plan, say: Callable[[str], None]) -> Plan:
    """Let the number of actors follow the learner from here on, where it can."""
    experiment, why = plan.experiment, _unmoved(plan)
    start, most = experiment.actor_count, experiment.autoscale.most
    if why:
        say(f"the number of actors stays {start}: {why}")
        scale = dataclasses.replace(experiment.autoscale, start=None, most=None)
    else:
        most = most or max(start, ACTORS_PER_CORE * len(os.sched_getaffinity(0)))
        say(f"the number of actors follows the learner: {start} at first, 1 to {most}")
        scale = dataclasses.replace(experiment.autoscale, start=start, most=most)
    return dataclasses.replace(plan, experiment=dataclasses.replace(experiment, actors=start, autoscale=scale))


def _calibrated(plan: Plan, say: Callable[[str], None]) -> Plan:
    """The plan with the fastest of the layouts that were tried."""
    experiment, architecture = plan.experiment, plan.experiment.architecture
    prepare(plan)  # whatever is wrong is found before anything is tried
    from shoal.coordination import Layout, calibrate, candidates

    rows = architecture.envs_per_actor * getattr(architecture, "batch_slots", experiment.actor_count)
    cores = len(os.sched_getaffinity(0))

    layouts = [layout for layout in candidates(rows, cores)
               if (layout.one_place or not architecture.one_place)  # what was asked for stays
               and not (layout.one_place and layout.actors < experiment.learners)
               and (layout.one_place or layout.actors <= (experiment.autoscale.most or layout.actors))]
    if not layouts:
        raise ConfigError(f"--architecture.one-place with {experiment.learners} learners on {cores} cores: there is nothing to "
                          f"choose from; give --actors {experiment.learners} in place of auto")

    def draw(layout: Layout) -> Program:
        trial = _with(plan, layout)
        quiet = dataclasses.replace(trial.experiment.eval, enabled=False)
        silent = dataclasses.replace(trial.experiment, autoscale=AutoscaleConfig(), eval=quiet, until_return=None)
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
