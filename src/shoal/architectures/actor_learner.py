"""Actors send trajectories, learners send weights: IMPALA (Espeholt et al. 2018, 1802.01561, figure 1).

      actor 0 ─┐                                    ┌─ learner 0 ─┐
      actor 1 ─┼── unrolls (stream, blocks) ────────┤             ├ gradients (group, all-reduce)
      ...     ─┘                                    └─ learner 1 ─┘
         ▲                                                │ the first one publishes
         └─────────────── weights (broadcast) ────────────┴──────▶ evaluator

Actors never wait for an update: they take the newest weights at the start of each unroll. The queue is short on purpose
(`slots_per_actor`), so that a learner that is too slow blocks the actors instead of letting data age.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.architectures.parts import Parts
from shoal.architectures.roles import Actor, Evaluator, Learner, learner_group
from shoal.core import Delivery, Tolerance
from shoal.errors import ConfigError
from shoal.runtime import Program

__all__ = ["Config", "delivers", "draw"]


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

    def validate(self) -> None:
        for name in ("envs_per_actor", "batch_slots", "slots_per_actor"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--architecture.{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1")


def delivers(config: Config) -> Delivery:
    return Delivery(Tolerance.LAG, "actors go on while the learner learns, so data are some versions old")


def draw(program: Program, parts: Parts, config: Config) -> None:
    if config.lockstep and config.batch_slots * parts.learners != parts.actors:
        raise ConfigError(f"--architecture.lockstep needs one unroll of each actor per update, but {parts.learners} learners x "
                          f"--architecture.batch-slots {config.batch_slots} is not --actors {parts.actors}; make them equal")
    algorithm = parts.algorithm
    unrolls = program.stream("unrolls", algorithm.record.layout, depth=config.slots_per_actor)
    weights = program.broadcast("weights", algorithm.published_layout())
    group = learner_group(program, parts)
    program.add("actor", Actor, parts=parts, unrolls=unrolls.sink, weights=weights.reader, per_version=int(config.lockstep),
                replicas=(1, parts.actors, parts.actors))
    program.add("learner", Learner, parts=parts, unrolls=unrolls.source, weights=weights.publisher, group=group,
                batch_slots=config.batch_slots, replicas=parts.learners, compute_threads=parts.learner_threads)
    if parts.eval.enabled:
        program.add("evaluator", Evaluator, parts=parts, weights=weights.reader)
