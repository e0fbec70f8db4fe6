"""Rollout workers and a trainer, in step: A2C and PPO as RLlib runs them.

      worker 0 ─┐
      worker 1 ─┼── unrolls (stream) ──▶ trainer: waits for one from every living worker, learns
      ...      ─┘                           │
         ▲                                  │
         └───── weights (broadcast) ◀───────┴──▶ evaluator       workers wait for the new weights

The barrier makes the policy lag exactly 0 at the first minibatch. A worker that dies is left out until it is back: the
batch is smaller by its share, nothing else changes. An algorithm that learns from replay has a table between them
(`replaying.py`), and actors wait for the updates that are due after each of their slots: plain DQN.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.architectures.parts import Parts
from shoal.architectures.roles import Actor, Evaluator, Learner, bundles, learner_group
from shoal.core import Delivery, Tolerance
from shoal.errors import ConfigError
from shoal.runtime import Program

__all__ = ["Config", "delivers", "draw", "has_replay", "takes_demos"]

runs_on_gpu = True

has_replay = takes_demos = True


@dataclass(frozen=True)
class Config:
    """Workers and a trainer."""

    envs_per_actor: int = 8
    """Environments that one worker steps together, E."""

    one_place: bool = False
    """Put the workers into their trainer's process: on few cores, with cheap environments, nothing is faster."""

    def validate(self) -> None:
        if self.envs_per_actor < 1:
            raise ConfigError(f"--architecture.envs-per-actor is {self.envs_per_actor}; it must be at least 1")


def delivers(config: Config) -> Delivery:
    return Delivery(Tolerance.NOTHING, "workers wait for every update, so data are never old")


def draw(program: Program, parts: Parts, config: Config) -> None:
    algorithm = parts.algorithm
    if getattr(algorithm, "from_replay", False):
        if parts.replay.samples_per_insert is None:
            raise ConfigError("--replay.samples-per-insert none with --architecture synchronous does not fit: actors and learner "
                              "take turns by it; give a number, or use --architecture actor_learner")
        from shoal.architectures.replaying import draw_replay  # only now: it brings Numba

        draw_replay(program, parts, turns=True, one_place=config.one_place)
        return
    unrolls = program.stream("unrolls", algorithm.record.layout, depth=1, paired=config.one_place)
    weights = program.broadcast("weights", algorithm.published_layout())
    place = bundles(parts) if config.one_place else None
    program.add("worker", Actor, parts=parts, unrolls=unrolls.sink, weights=weights.reader,
                per_version=1 if config.one_place else parts.learners,  # one unroll for each trainer that it serves
                replicas=(1, parts.actors, parts.actors), place=place)
    program.add("trainer", Learner, parts=parts, unrolls=unrolls.source, weights=weights.publisher,
                group=learner_group(program, parts), replicas=parts.learners, place=place, compute_threads=parts.learner_threads)
    if parts.eval.enabled:
        program.add("evaluator", Evaluator, parts=parts, weights=weights.reader)
