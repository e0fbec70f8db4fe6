"""Actors send trajectories, learners send weights: IMPALA (Espeholt et al. 2018, 1802.01561, figure 1).

      actor 0 ─┐                                    ┌─ learner 0 ─┐
      actor 1 ─┼── unrolls (stream, blocks) ────────┤             ├ gradients (group, all-reduce)
      ...     ─┘                                    └─ learner 1 ─┘
         ▲                                                │ the first one publishes
         └─────────────── weights (broadcast) ────────────┴──────▶ evaluator

Actors never wait for an update: they take the newest weights at the start of each unroll. The queue is short on purpose
(`slots_per_actor`), so that a learner that is too slow blocks the actors instead of letting data age. An algorithm that
learns from replay has a table in the place of the queue (`replaying.py`): Ape-X (Horgan et al. 2018, 1803.00933, figure 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from shoal.architectures.parts import Parts
from shoal.architectures.roles import Actor, Evaluator, Learner, bundles, learner_group
from shoal.core import Delivery, Tolerance
from shoal.errors import ConfigError
from shoal.runtime import Program

__all__ = ["Config", "delivers", "draw", "has_replay", "takes_demos", "unmoved"]

runs_on_gpu = True

has_replay = takes_demos = True


@dataclass(frozen=True)
class Config:
    """Actors and learners."""

    envs_per_actor: int = 8
    """Environments that one actor steps together, E."""
    batch_slots: int = 2
    """Unrolls (of E environments each) that one learner joins into a batch."""
    slots_per_actor: int = 2
    """Unrolls that an actor may have on the way to each learner; more of them means older data."""
    lockstep: bool = False
    """Make every actor wait for new weights after each unroll: slower, but an inline and a local run are equal bit for bit."""

    reuse: float = 1.0
    """How often an unroll is learned from, on average."""
    buffer_slots: int = 0
    """Unrolls that a learner keeps to draw batches from at random; 0 learns from each as it comes."""
    max_staleness: int | None = None
    """Mask steps whose weights are more than this many versions old."""
    delay_slots: int = 0
    """Keep unrolls back in a queue of this length before they may be drawn: an artificial lag, for experiments."""
    one_place: bool = False
    """Put the actors into their learner's process: on few cores, with cheap environments, nothing is faster."""

    def validate(self) -> None:
        for name in ("envs_per_actor", "batch_slots", "slots_per_actor"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--architecture.{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1")
        for name in ("buffer_slots", "delay_slots"):
            if getattr(self, name) < 0:
                raise ConfigError(f"--architecture.{name.replace('_', '-')} is {getattr(self, name)}; it must not be negative")
        if self.max_staleness is not None and self.max_staleness < 0:
            raise ConfigError(f"--architecture.max-staleness is {self.max_staleness}; it must not be negative")
        if not 0 < self.reuse < math.inf:
            raise ConfigError(f"--architecture.reuse is {self.reuse}; it must be above 0 and finite")
        if not self.buffer_slots and (self.reuse != 1.0 or self.delay_slots or self.max_staleness is not None):
            raise ConfigError(f"--architecture.reuse {self.reuse:g}, max-staleness and delay-slots need a buffer; give "
                              f"--architecture.buffer-slots {4 * self.batch_slots}")
        if 0 < self.buffer_slots < self.batch_slots:
            raise ConfigError(f"--architecture.buffer-slots {self.buffer_slots} holds less than one batch of "
                              f"--architecture.batch-slots {self.batch_slots}; make it at least as large")
        if self.lockstep and self.buffer_slots:
            raise ConfigError("--architecture.lockstep learns from each unroll once; it does not go with "
                              "--architecture.buffer-slots")


def delivers(config: Config) -> Delivery:
    if config.buffer_slots and config.max_staleness is None:
        return Delivery(Tolerance.REPLAY, f"--architecture.buffer-slots {config.buffer_slots} replays data of any age (a "
                        "--architecture.max-staleness would bound it)")
    if config.buffer_slots:
        return Delivery(Tolerance.BOUNDED_REUSE, f"data are learned from {config.reuse:g} times, at most {config.max_staleness} "
                        "versions old")
    return Delivery(Tolerance.LAG, "actors go on while the learner learns, so data are some versions old")


def unmoved(config: Config) -> str:
    """Why the number of actors cannot follow the learner; empty where it can."""
    if config.one_place:
        return "all actors live in their learner's process"
    return "with --architecture.lockstep every update takes one unroll of each actor" if config.lockstep else ""


def draw(program: Program, parts: Parts, config: Config) -> None:
    if getattr(parts.algorithm, "from_replay", False):
        if config.buffer_slots or config.lockstep:
            raise ConfigError(f"--architecture.{'buffer-slots' if config.buffer_slots else 'lockstep'} with --algorithm "
                              f"{parts.algorithm.name} does not fit: it learns from a replay table; leave it out (lock step with "
                              "replay is --architecture synchronous)")
        from shoal.architectures.replaying import draw_replay  # only now: it brings Numba

        draw_replay(program, parts, turns=False, one_place=config.one_place)
        return
    if config.lockstep and config.batch_slots * parts.learners != parts.actors:
        raise ConfigError(f"--architecture.lockstep needs one unroll of each actor per update, but {parts.learners} learners x "
                          f"--architecture.batch-slots {config.batch_slots} is not --actors {parts.actors}; make them equal")
    algorithm = parts.algorithm
    unrolls = program.stream("unrolls", algorithm.record.layout, depth=config.slots_per_actor, paired=config.one_place)
    weights = program.broadcast("weights", algorithm.published_layout())
    group = learner_group(program, parts)
    place = bundles(parts) if config.one_place else None
    program.add("actor", Actor, parts=parts, unrolls=unrolls.sink, weights=weights.reader, per_version=int(config.lockstep),
                replicas=parts.actor_replicas, place=place)
    program.add("learner", Learner, parts=parts, unrolls=unrolls.source, weights=weights.publisher, group=group,
                batch_slots=config.batch_slots, reuse=_reuse(config), max_staleness=config.max_staleness, replicas=parts.learners,
                place=place, compute_threads=parts.learner_threads)
    if parts.core_each:
        program.pin("actor")
    if parts.eval.enabled:
        program.add("evaluator", Evaluator, parts=parts, weights=weights.reader)


def _reuse(config: Config) -> dict[str, Any] | None:
    """What a learner's buffer is made with; None without one."""
    if not config.buffer_slots:
        return None
    return {"capacity": config.buffer_slots, "reuse": config.reuse, "delay": config.delay_slots}
