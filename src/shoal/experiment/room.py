"""Refuses what cannot be started on this machine, before anything is, with a number that can.

A cluster that is joined has its own room and looks at it by itself; one that is started here has this machine's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from shoal import algorithms
from shoal.errors import ConfigError
from shoal.experiment.config import Experiment, flag, replayed
from shoal.experiment.prepare import Prepared
from shoal.experiment.values import apply
from shoal.runtime import Program, room
from shoal.runtime.room import PLACE_BYTES, SPARE_PROCESSES, Need, least, needs, shortage

__all__ = ["SURE", "drawn"]

SURE = 400
"""No larger number of processes is recommended: that there is room for more does not say that they can be started."""
COUNTS = ("shards", "predictors", "trainers")
"""Of an architecture: each is so many processes."""
RAY_PLACE_BYTES = 200_000_000
"""Forked processes share what was imported; one of Ray's has it for itself: 210 MB with a small environment and network."""
SIZES = ("batch_slots", "buffer_slots", "envs_per_actor")
"""Of an architecture too: they make what there is larger, not more of it."""


def drawn(prepared: Prepared, resumed: int = 0) -> Program:
    """The program of a run, if there is room for it here; numbers that would take minutes to draw are refused before."""
    experiment = prepared.plan.experiment
    _refuse(prepared, _at_least(experiment))
    program = prepared.program(resumed)
    need = _need(program, experiment)
    _refuse(prepared, shortage(need))
    _refuse_tables(prepared, program, need.nbytes)
    return program


def _need(program: Program, experiment: Experiment[Any, Any]) -> Need:
    """What a program takes of this machine, but for replay tables, if it is the one that it would run on."""
    if experiment.runtime != "ray":
        return needs(program, experiment.runtime)
    if experiment.ray.joined:
        return Need(0, 0, 0)
    places, nbytes = len(program.places), needs(program, "local").nbytes
    return Need(0, places + SPARE_PROCESSES, nbytes + (RAY_PLACE_BYTES - PLACE_BYTES) * places)


def _refuse_tables(prepared: Prepared, program: Program, others: int) -> None:
    """Replay tables fill slowly: what they come to shows after hours, when there is no memory left."""
    experiment = prepared.plan.experiment
    if not replayed(prepared.algorithm) or (experiment.runtime == "ray" and experiment.ray.joined):
        return
    from shoal.architectures.replay import Replay, stored_columns
    from shoal.architectures.replay_memory import capacity_for, codecs, table_bytes

    config, columns = experiment.replay, stored_columns(prepared.algorithm.record.layout)  # type: ignore[attr-defined]
    tables = sum(node.most for node in program.nodes.values() if node.role is Replay)
    nbytes, memory = tables * table_bytes(columns, config, experiment.max_env_steps), room.most_memory()
    if others + nbytes <= memory:
        return
    fits = capacity_for(columns, config, (memory - others) // tables)
    instead = " or --replay.compression auto" if config.compression == "none" and codecs(columns, "auto") else ""
    raise ConfigError(f"--replay.capacity {config.capacity} is too much for this machine: full, with all else, it needs at least "
                      f"{(others + nbytes) / 1e9:,.1f} GB of memory, and there are {memory / 1e9:,.1f} GB; give "
                      f"--replay.capacity {fits} or fewer{instead}")


def _at_least(experiment: Experiment[Any, Any]) -> str:
    """What there is not enough of, as far as the numbers alone say."""
    actors = max(experiment.actor_count, experiment.autoscale.most or 0)
    more = sum(getattr(experiment.architecture, name, 0) for name in COUNTS)
    return shortage(least(actors + experiment.learners + more, experiment.runtime))


def _refuse(prepared: Prepared, why: str) -> None:
    if not why:
        return
    for name, fewest, value, changes in _knobs(prepared):
        if most := _largest(prepared, name, fewest, value, changes):
            raise ConfigError(f"{flag(name)} {value} is too much for this machine: it {why}; give {flag(name)} {most} or fewer")
    raise ConfigError(f"this is too much for this machine: it {why}")


def _knobs(prepared: Prepared) -> Iterator[tuple[str, int, int, Mapping[str, Any]]]:
    """What can be lowered: its name, the least that makes sense, its value, and what has to change with it."""
    experiment, architecture = prepared.plan.experiment, prepared.plan.experiment.architecture
    if experiment.autoscale.most is not None:
        yield "autoscale.most", experiment.actor_count, experiment.autoscale.most, {}
    fewest = experiment.learners if getattr(architecture, "one_place", False) else 1  # each learner has an actor in its process
    yield "actors", fewest, experiment.actor_count, {"autoscale.start": None, "autoscale.most": None}
    yield "learners", 1, experiment.learners, {}
    for name in (*COUNTS, *SIZES):
        if value := getattr(architecture, name, 0):
            yield f"architecture.{name}", architecture.batch_slots if name == "buffer_slots" else 1, value, {}


def _largest(prepared: Prepared, name: str, fewest: int, value: int, changes: Mapping[str, Any]) -> int:
    """The largest number below `value` (of processes: up to SURE) with which there is room; 0 where there is none."""
    if fewest >= value or not _fits(prepared, {name: fewest, **changes}):
        return 0
    low, high = fewest, value  # there is room with `low`, and none with `high`
    if name.rpartition(".")[2] not in SIZES and low < SURE < high:
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
    plan = prepared.plan
    experiment = apply(plan.experiment, changes, "")
    if _at_least(experiment):
        return False
    seats = experiment.architecture.envs_per_actor * prepared.spec.seats_per_env
    made = algorithms.make(experiment.algorithm, prepared.spec, experiment.net, seats)
    other = dataclasses.replace(prepared, plan=dataclasses.replace(plan, experiment=experiment), algorithm=made)
    try:
        return not shortage(_need(other.program(), experiment))
    except ConfigError:  # the architecture wants this number together with another one
        return False
