"""Actors send trajectories, learners send weights: IMPALA (Espeholt et al. 2018, 1802.01561, figure 1).

      actor 0 ─┐                                    ┌─ learner 0 ─┐
      actor 1 ─┼── unrolls (stream, blocks) ────────┤             ├ gradients (group, all-reduce)
      ...     ─┘                                    └─ learner 1 ─┘
         ▲                                                │ the first one publishes
         └─────────────── weights (broadcast) ────────────┴──────▶ evaluator

Actors never wait for an update: they take the newest weights at the start of each unroll. The queue is short on purpose
(`slots_per_actor`), so that a learner that is too slow blocks the actors instead of letting data age. With an algorithm that
learns from replay the data path is a table (`roles/data_path.py`): Ape-X (Horgan et al. 2018, 1803.00933, figure 1).
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.architectures.league import draw_league
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
from shoal.roles.reuse_buffer import ReuseOptions
from shoal.runtime import Program

__all__ = ["ActorLearner", "Config"]


@dataclass(frozen=True)
class Config(ArchitectureOptions):
    """Actors and learners."""

    envs_per_actor: int = number(8, at_least=1)
    """Environments that one actor steps together, E."""
    batch_slots: int = number(2, at_least=1)
    """Unrolls (of E environments each) that one learner joins into a batch."""
    slots_per_actor: int = number(2, at_least=1)
    """Unrolls that an actor may have on the way to each learner; more of them means older data."""
    lockstep: bool = False
    """Make every actor wait for new weights after each unroll: slower, but an inline and a local run are equal bit for bit."""
    reuse: float = number(1.0, above=0)
    """How often an unroll is learned from, on average."""
    buffer_slots: int = number(0, at_least=0)
    """Unrolls that a learner keeps to draw batches from at random; 0 learns from each as it comes."""
    max_staleness: int | None = number(None, at_least=0)
    """Mask steps whose weights are more than this many versions old."""
    delay_slots: int = number(0, at_least=0)
    """Keep unrolls back in a queue of this length before they may be drawn: an artificial lag, for experiments."""
    one_place: bool = False
    """Put the actors into their learner's process: on few cores, with cheap environments, nothing is faster."""

    def validate(self) -> None:
        super().validate()
        if not self.buffer_slots and (self.reuse != 1.0 or self.delay_slots or self.max_staleness is not None):
            raise ConfigError(f"--architecture.reuse {self.reuse:g}, max-staleness and delay-slots need a buffer; give "
                              f"--architecture.buffer-slots {4 * self.batch_slots}")
        if 0 < self.buffer_slots < self.batch_slots:
            raise ConfigError(f"--architecture.buffer-slots {self.buffer_slots} holds less than one batch of "
                              f"--architecture.batch-slots {self.batch_slots}; make it at least as large")
        if self.lockstep and self.buffer_slots:
            raise ConfigError("--architecture.lockstep learns from each unroll once; it does not go with "
                              "--architecture.buffer-slots")

    @property
    def intake(self) -> Intake:
        """How a learner takes unrolls."""
        buffer = ReuseOptions(self.buffer_slots, self.reuse, self.delay_slots) if self.buffer_slots else None
        return Intake(self.batch_slots, buffer, self.max_staleness)


class ActorLearner(Architecture):
    """See the module."""

    name = "actor_learner"
    config_class = Config
    takes_replay = takes_demos = takes_turns = takes_policies = runs_on_gpu = one_place = batch_slots = True
    spreads = "actors"
    size_options = ("batch_slots", "buffer_slots", "envs_per_actor")

    def delivers(self, config: Config) -> Delivery:
        if config.buffer_slots and config.max_staleness is None:
            return Delivery(Tolerance.REPLAY, f"--architecture.buffer-slots {config.buffer_slots} replays data of any age (a "
                            "--architecture.max-staleness would bound it)")
        if config.buffer_slots:
            return Delivery(Tolerance.BOUNDED_REUSE, f"data are learned from {config.reuse:g} times, at most "
                            f"{config.max_staleness} versions old")
        return Delivery(Tolerance.LAG, "actors continue while the learner learns, so data are some versions old")

    def fixed_actors(self, config: Config) -> str:
        if config.one_place:
            return "all actors live in their learner's process"
        return "with --architecture.lockstep every update takes one unroll of each actor" if config.lockstep else ""

    def draw(self, program: Program, parts: Parts, config: Config) -> None:
        self._check(parts, config)
        if parts.league is not None:
            draw_league(program, parts, depth=config.slots_per_actor, intake=config.intake)
            return
        if parts.policies is not None:
            draw_policies(program, parts, depth=config.slots_per_actor, intake=config.intake, per_version=int(config.lockstep),
                          one_place=config.one_place)
            return
        place = learner_places(parts) if config.one_place else None
        path = data_path(program, parts, depth=config.slots_per_actor, paired=config.one_place)
        weights = program.broadcast("weights", parts.algorithm.published_layout())
        program.add("actor", Actor, parts=parts, experience=path.producer, weights=weights.reader,
                    per_version=int(config.lockstep), replicas=parts.actor_replicas, place=place)
        path.add_tables(place)
        program.add("learner", Learner, parts=parts, batches=path.consumer, weights=weights.publisher,
                    group=learner_group(program, parts), intake=config.intake, replicas=parts.learners, place=place,
                    compute_threads=parts.learner_threads, private_bytes=path.private_bytes(config.intake))
        if parts.core_each:
            program.pin("actor")
        add_evaluator(program, parts, weights)

    def _check(self, parts: Parts, config: Config) -> None:
        """What only fits together with the algorithm and the numbers of roles."""
        if parts.algorithm.from_replay and (config.buffer_slots or config.lockstep):
            raise ConfigError(f"--architecture.{'buffer-slots' if config.buffer_slots else 'lockstep'} with --algorithm "
                              f"{parts.algorithm.name} does not fit: it learns from a replay table; leave it out (lock step with "
                              "replay is --architecture synchronous)")
        if parts.league is not None and (config.lockstep or config.one_place):
            raise ConfigError(f"--architecture.{'lockstep' if config.lockstep else 'one-place'} with --policies league does not "
                              "fit: players learn at their own pace, in processes of their own; leave it out")
        if config.lockstep and config.batch_slots * parts.learners != parts.actors:
            raise ConfigError(f"--architecture.lockstep needs one unroll of each actor per update, but {parts.learners} learners x "
                              f"--architecture.batch-slots {config.batch_slots} is not --actors {parts.actors}; make them equal")
