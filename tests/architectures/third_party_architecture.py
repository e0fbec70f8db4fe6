"""Somebody's own architecture, outside of shoal: actors that never wait; what the learner has no time for is dropped.

      actor 0 ─┐
      actor 1 ─┼── unrolls (stream, drops the oldest) ──▶ learner ── weights (broadcast) ──▶ actors, evaluator
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.architectures.roles import Actor, Evaluator, Learner
from shoal.core import Delivery, Tolerance


@dataclass(frozen=True)
class Config:
    """Actors that never wait."""

    envs_per_actor: int = 4
    """Environments that one actor steps together, E."""

    def validate(self):
        """Anything goes."""


def delivers(config):
    return Delivery(Tolerance.LAG, "actors go on while the learner learns")


def draw(program, parts, config):
    unrolls = program.stream("unrolls", parts.algorithm.record.layout, depth=2, full="drop_oldest")
    weights = program.broadcast("weights", parts.algorithm.published_layout())
    program.add("actor", Actor, parts=parts, unrolls=unrolls.sink, weights=weights.reader, replicas=(1, parts.actors, parts.actors))
    program.add("learner", Learner, parts=parts, unrolls=unrolls.source, weights=weights.publisher, batch_slots=1)
    if parts.eval.enabled:
        program.add("evaluator", Evaluator, parts=parts, weights=weights.reader)
