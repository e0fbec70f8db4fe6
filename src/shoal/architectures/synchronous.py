"""Rollout workers and a trainer, in step: A2C and PPO as RLlib runs them.

      worker 0 ─┐
      worker 1 ─┼── unrolls (stream) ──▶ trainer: waits for one from every living worker, learns
      ...      ─┘                           │
         ▲                                  │
         └───── weights (broadcast) ◀───────┴──▶ evaluator       workers wait for the new weights

The barrier makes the policy lag exactly 0 at the first minibatch. A worker that dies is left out until it is back: the
batch is smaller by its share, nothing else changes. With an algorithm that learns from replay the data path is a table
(`roles/data_path.py`), and an actor waits for the updates that are due after each of its inserts: plain DQN.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.architectures.several_policies import draw_policies
from shoal.errors import ConfigError
from shoal.learning import Architecture, ArchitectureOptions, Delivery, Tolerance
from shoal.options import number
from shoal.roles.actor import Actor
from shoal.roles.batches import Intake
from shoal.roles.data_path import data_path
from shoal.roles.evaluator import add_evaluator
from shoal.roles.learner import Learner
from shoal.roles.learner_group import learner_group
from shoal.roles.parts import Parts, learner_places
from shoal.runtime import Program

__all__ = ["Config", "Synchronous"]


@dataclass(frozen=True)
class Config(ArchitectureOptions):
    """Workers and a trainer."""

    envs_per_actor: int = number(8, at_least=1)
    """Environments that one worker steps together, E."""
    one_place: bool = False
    """Put the workers into their trainer's process: on few cores, with cheap environments, nothing is faster."""


class Synchronous(Architecture):
    """See the module."""

    name = "synchronous"
    config_class = Config
    takes_replay = takes_demos = takes_turns = takes_policies = runs_on_gpu = one_place = True
    spreads = "rows"

    def delivers(self, config: Config) -> Delivery:
        return Delivery(Tolerance.NOTHING, "workers wait for every update, so data are never old")

    def draw(self, program: Program, parts: Parts, config: Config) -> None:
        if parts.algorithm.from_replay and parts.replay.samples_per_insert is None:
            raise ConfigError("--replay.samples-per-insert none with --architecture synchronous does not fit: actors and learner "
                              "take turns by it; give a number, or use --architecture actor_learner")
        if parts.policies is not None:
            draw_policies(program, parts, depth=1, intake=Intake(), per_version=1 if config.one_place else parts.learners,
                          one_place=config.one_place, actor="worker", learner="trainer")
            return
        place = learner_places(parts) if config.one_place else None
        path = data_path(program, parts, depth=1, paired=config.one_place, turns=True)
        weights = program.broadcast("weights", parts.algorithm.published_layout())
        actor, learner = ("actor", "learner") if path.replayed else ("worker", "trainer")
        unrolls_per_version = 1 if config.one_place else parts.learners  # one for each trainer that a worker serves
        program.add(actor, Actor, parts=parts, experience=path.producer, weights=weights.reader,
                    per_version=0 if path.replayed else unrolls_per_version,  # a table that takes turns makes actors wait itself
                    replicas=(1, parts.actors, parts.actors), place=place)
        path.add_tables(place)
        program.add(learner, Learner, parts=parts, batches=path.consumer, weights=weights.publisher,
                    group=learner_group(program, parts), replicas=parts.learners, place=place,
                    compute_threads=parts.learner_threads)
        if parts.core_each and path.replayed:
            program.pin(actor)
        add_evaluator(program, parts, weights)
