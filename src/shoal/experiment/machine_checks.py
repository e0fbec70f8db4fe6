"""Refuses what is too large for this machine before anything starts, and names a number that fits.

A cluster that a run joins checks its own capacity; one that is started here has this machine's.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from shoal.acting import ItemRecord
from shoal.errors import ConfigError
from shoal.experiment.config import Experiment, Plan
from shoal.experiment.prepare import Prepared, remade
from shoal.experiment.values import with_values
from shoal.options import flag
from shoal.runtime import Program, start_checks
from shoal.runtime.start_checks import PLACE_BYTES, SPARE_PROCESSES, Need, least, needs, shortage

__all__ = ["SURE", "drawn"]

SURE = 400
"""No larger number of processes is recommended: memory for more does not mean that they can be started."""
LEARNERS_PER_CORE = 64
ENV_BYTES = 500
"""An environment takes at least this much, in the process that steps it: its own object and its rows of all arrays."""
RAY_PLACE_BYTES = 200_000_000
"""Forked processes share what was imported; a process of Ray's does not: 210 MB with a small environment and network."""


@runtime_checkable
class _Unrolled(Protocol):
    """The options of an algorithm that learns from unrolls."""

    unroll: int


def drawn(prepared: Prepared, resumed: int = 0) -> Program:
    """The program of a run, if it fits this machine. Numbers that would take minutes to draw are refused before."""
    _refuse_learners(prepared.plan.experiment)
    _refuse(prepared, _at_least(prepared.plan))
    program = prepared.program(resumed)
    need = _need(program, prepared.plan.experiment)
    _refuse(prepared, shortage(need))
    _refuse_tables(prepared, program, need.nbytes)
    return program


def _refuse_learners(experiment: Experiment[Any, Any]) -> None:
    """Learners compute all the time and wait for each other: many on one core only stand in each other's way."""
    cores = len(os.sched_getaffinity(0))
    if experiment.learners > LEARNERS_PER_CORE * cores and not (experiment.runtime == "ray" and experiment.ray.joined):
        raise ConfigError(f"--learners {experiment.learners} is too much for this machine: learners compute all the time, and "
                          f"there are {cores} cores; give --learners {cores} or fewer")


def _need(program: Program, experiment: Experiment[Any, Any]) -> Need:
    """What a program takes of this machine, replay tables aside; nothing where it runs on a cluster that it joins."""
    if experiment.runtime != "ray":
        return needs(program, experiment.runtime)
    if experiment.ray.joined:
        return Need(0, 0, 0)
    places, nbytes = len(program.places), needs(program, "local").nbytes
    return Need(0, places + SPARE_PROCESSES, nbytes + (RAY_PLACE_BYTES - PLACE_BYTES) * places)


def _refuse_tables(prepared: Prepared, program: Program, others: int) -> None:
    """Replay tables fill slowly: without this check the memory would run out after hours."""
    experiment = prepared.plan.experiment
    if not prepared.algorithm.from_replay or (experiment.runtime == "ray" and experiment.ray.joined):
        return
    from shoal.roles.replay import Replay
    from shoal.roles.replay_frames import kept_columns
    from shoal.roles.replay_memory import capacity_for, codecs, table_bytes
    from shoal.roles.replay_wires import stored_columns

    config, record = experiment.replay, prepared.algorithm.record
    assert isinstance(record, ItemRecord)
    columns = kept_columns(record, stored_columns(record.layout), config.insert_batch)
    tables = sum(node.most for node in program.nodes.values() if node.role is Replay)
    nbytes, memory = tables * table_bytes(columns, config, experiment.max_env_steps), start_checks.most_memory()
    if others + nbytes <= memory:
        return
    fits = capacity_for(columns, config, (memory - others) // tables)
    instead = " or --replay.compression auto" if config.compression == "none" and codecs(columns, "auto") else ""
    raise ConfigError(f"--replay.capacity {config.capacity} is too much for this machine: a full table, with all else, needs at "
                      f"least {(others + nbytes) / 1e9:,.1f} GB of memory, and there are {memory / 1e9:,.1f} GB; give "
                      f"--replay.capacity {fits} or fewer{instead}")


def _at_least(plan: Plan) -> str:
    """What there is not enough of, judged by the numbers of processes and environments alone."""
    experiment = plan.experiment
    actors = max(plan.actor_count, experiment.autoscale.most or 0)
    more = sum(getattr(experiment.architecture, name) for name in plan.architecture.process_options)
    need = least(actors + experiment.learners + more, experiment.runtime)
    if plan.architecture.has_actors and not (experiment.runtime == "ray" and experiment.ray.joined):
        need = dataclasses.replace(need, nbytes=need.nbytes + ENV_BYTES * actors * experiment.architecture.envs_per_actor)
    return shortage(need)


def _refuse(prepared: Prepared, why: str) -> None:
    if not why:
        return
    for name, fewest, value, changes in _knobs(prepared):
        if most := _largest(prepared, name, fewest, value, changes):
            raise ConfigError(f"{flag(name)} {value} is too much for this machine: it {why}; give {flag(name)} {most} or fewer")
    raise ConfigError(f"this is too much for this machine: it {why}")


def _knobs(prepared: Prepared) -> Iterator[tuple[str, int, int, Mapping[str, Any]]]:
    """What can be lowered: its name, the least that makes sense, its value, and what has to change with it."""
    plan, experiment = prepared.plan, prepared.plan.experiment
    if experiment.autoscale.most is not None:
        yield "autoscale.most", plan.actor_count, experiment.autoscale.most, {}
    fewest = experiment.learners if plan.one_place else 1  # each learner has an actor in its process
    yield "actors", fewest, plan.actor_count, {"autoscale.start": None, "autoscale.most": None}
    yield "learners", 1, experiment.learners, {}
    for name in (*plan.architecture.process_options, *plan.architecture.size_options):
        if value := getattr(experiment.architecture, name):
            yield f"architecture.{name}", 1, value, {}
    if prepared.algorithm.from_replay:
        replay = experiment.replay
        yield "replay.batch_size", replay.shards, replay.batch_size, {}
        yield "replay.prefetch", 1, replay.prefetch, {}
        yield "replay.insert_batch", 1, replay.insert_batch, {}
    if isinstance(experiment.algorithm, _Unrolled):
        yield "algorithm.unroll", 1, experiment.algorithm.unroll, {}


def _largest(prepared: Prepared, name: str, fewest: int, value: int, changes: Mapping[str, Any]) -> int:
    """The largest number below `value` (of processes: up to SURE) that fits; 0 where none does."""
    if fewest >= value or not _fits(prepared, {name: fewest, **changes}):
        return 0
    low, high = fewest, value  # `low` fits and `high` does not
    section, _, field = name.rpartition(".")
    if section not in ("replay", "algorithm") and field not in prepared.plan.architecture.size_options and low < SURE < high:
        if _fits(prepared, {name: SURE, **changes}):
            return SURE
        high = SURE
    while high - low > 1:
        middle = (low + high) // 2
        if _fits(prepared, {name: middle, **changes}):
            low = middle
        else:
            high = middle
    return low


def _fits(prepared: Prepared, changes: Mapping[str, Any]) -> bool:
    plan = dataclasses.replace(prepared.plan, experiment=with_values(prepared.plan.experiment, changes, ""))
    if _at_least(plan):
        return False
    other = remade(prepared, plan)
    try:
        return not shortage(_need(other.program(), plan.experiment))
    except ConfigError:  # the architecture wants this number together with another one
        return False
