"""Refuses what cannot be started on this machine, before anything is, with a number that can."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from shoal import algorithms
from shoal.errors import ConfigError
from shoal.experiment.config import flag
from shoal.experiment.prepare import Prepared
from shoal.experiment.values import apply
from shoal.runtime import Program
from shoal.runtime.room import needs, shortage

__all__ = ["check_room"]


def check_room(prepared: Prepared, program: Program) -> None:
    """Ray looks at its cluster by itself."""
    runtime = prepared.plan.experiment.runtime
    if runtime == "ray":
        return
    why = shortage(needs(program, runtime))
    if not why:
        return
    for name, least, value, changes in _knobs(prepared):
        if most := _largest(prepared, name, least, value, changes):
            raise ConfigError(f"{flag(name)} {value} is too much for this machine: it {why}; give {flag(name)} {most} or fewer")
    raise ConfigError(f"this is too much for this machine: it {why}")


def _knobs(prepared: Prepared) -> Iterator[tuple[str, int, int, Mapping[str, Any]]]:
    """What can be lowered: its name, the least that makes sense, its value, and what has to change with it."""
    experiment, architecture = prepared.plan.experiment, prepared.plan.experiment.architecture
    if experiment.moving:
        yield "autoscale.most", experiment.actor_count, int(experiment.autoscale.most or 0), {}
    fewest = experiment.learners if getattr(architecture, "one_place", False) else 1  # each learner has an actor in its process
    yield "actors", fewest, experiment.actor_count, {"autoscale.start": None, "autoscale.most": None}
    yield "learners", 1, experiment.learners, {}
    yield "architecture.envs_per_actor", 1, architecture.envs_per_actor, {}


def _largest(prepared: Prepared, name: str, least: int, value: int, changes: Mapping[str, Any]) -> int:
    """The largest number below `value` with which there is room; 0 where there is none."""
    if least >= value or not _fits(prepared, {name: least, **changes}):
        return 0
    low, high = least, value  # there is room with `low`, and none with `high`
    while high - low > 1:
        middle = (low + high) // 2
        if _fits(prepared, {name: middle, **changes}):
            low = middle
        else:
            high = middle
    return low


def _fits(prepared: Prepared, changes: Mapping[str, Any]) -> bool:
    plan = prepared.plan
    experiment = apply(plan.experiment, changes, "")
    seats = experiment.architecture.envs_per_actor * prepared.spec.seats_per_env
    made = algorithms.make(experiment.algorithm, prepared.spec, experiment.net, seats)
    other = dataclasses.replace(prepared, plan=dataclasses.replace(plan, experiment=experiment), algorithm=made)
    return not shortage(needs(other.program(), experiment.runtime))
