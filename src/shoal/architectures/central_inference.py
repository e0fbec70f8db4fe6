"""Actors hold environments only; one server thinks for all of them: SEED RL (Espeholt et al. 2020, 1910.06591, figure 1).

      actor 0: group A | group B ─┐                           ┌──────────────────┐
      actor 1: group A | group B ─┼── steps (call) ─────────▶ │ inference server │ ── unrolls (stream) ──▶ learner
      ...                        ─┘ ◀────────── actions ───── └──────────────────┘                           │
                                                                       ▲────────── weights (broadcast) ◀─────┘

Observations travel to the server and actions back; nothing recurrent or parametric ever does. The server keeps the
recurrent state of every environment, batches whatever is pending when it is free, writes the unrolls itself and hands
them to the learner. Each actor steps two groups of environments in turn: while one waits for actions the other steps.
Parameters may change inside an unroll; every step carries its own version and log-probability. On a GPU server and learner may
share a process (`--gpu.together`): then the weights go from one to the other on the device. With an algorithm that learns
from replay the data path is a table (`roles/data_path.py`), to which the server sends items: SEED's second agent, R2D2.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.device.weight_handoff import WeightHandoff
from shoal.errors import ConfigError
from shoal.learning import Architecture, ArchitectureOptions, Delivery, Tolerance
from shoal.options import number
from shoal.roles.batches import Intake
from shoal.roles.data_path import data_path
from shoal.roles.env_actor import EnvActor, step_layouts
from shoal.roles.evaluator import add_evaluator
from shoal.roles.inference import InferenceServer
from shoal.roles.learner import Learner
from shoal.roles.learner_group import learner_group
from shoal.roles.parts import Parts, learner_places
from shoal.runtime import Program

__all__ = ["CentralInference", "Config"]

TOGETHER = "mind"  # the place of a server and a learner that share a process


@dataclass(frozen=True)
class Config(ArchitectureOptions):
    """Environments here, inference there."""

    envs_per_actor: int = number(16, at_least=1)
    """Environments of one group: the rows of one request and of one unroll."""
    groups: int = number(2, at_least=1)
    """Groups of environments per actor: while one waits for actions, the others step."""
    batch_slots: int = number(2, at_least=1)
    """Unrolls (of one group each) that one learner joins into a batch."""
    queue_slots: int = number(2, at_least=1)
    """Finished unrolls that may wait for the learner; few of them keep data young."""
    inference_rows: int = number(512, at_least=1)
    """Most environments in one forward pass."""
    one_place: bool = False
    """Put the actors and an inference server into their learner's process: on few cores nothing is faster."""

    @property
    def intake(self) -> Intake:
        """How a learner takes unrolls."""
        return Intake(self.batch_slots)

    def validate(self) -> None:
        super().validate()
        if self.inference_rows < self.envs_per_actor:
            raise ConfigError(f"--architecture.inference-rows {self.inference_rows} is less than one request of "
                              f"--architecture.envs-per-actor {self.envs_per_actor} rows; raise it")


class CentralInference(Architecture):
    """See the module."""

    name = "central_inference"
    config_class = Config
    takes_replay = takes_demos = runs_on_gpu = one_place = batch_slots = True
    spreads = "actors"
    size_options = ("batch_slots", "envs_per_actor")

    def delivers(self, config: Config) -> Delivery:
        return Delivery(Tolerance.LAG, "the server acts on while the learner learns, so data are some versions old")

    def draw(self, program: Program, parts: Parts, config: Config) -> None:
        if config.one_place and parts.algorithm.from_replay:
            raise ConfigError(f"--architecture.one-place with --algorithm {parts.algorithm.name} does not fit here: "
                              "central_inference has its replay table in a process of its own; leave it out, or use "
                              "--architecture actor_learner")
        place = learner_places(parts) if config.one_place else None
        together = TOGETHER if parts.together and place is None else place
        handoff = WeightHandoff() if parts.together else None
        steps = program.call("steps", *step_layouts(parts.step_record), depth=config.groups)
        # A server has one unroll of every group open, and some more on their way.
        path = data_path(program, parts, depth=parts.actors * config.groups + config.queue_slots, paired=config.one_place)
        weights = program.broadcast("weights", parts.algorithm.published_layout())
        program.add("actor", EnvActor, parts=parts, steps=steps.client, groups=config.groups, place=place,
                    replicas=(1, parts.actors, parts.actors) if place is None else parts.actors)  # clients are dealt by number
        program.add("inference", InferenceServer, parts=parts, steps=steps.server, experience=path.producer,
                    weights=weights.reader, most_rows=config.inference_rows, place=together,
                    replicas=parts.learners if place else 1, handoff=handoff)
        path.add_tables()
        program.add("learner", Learner, parts=parts, batches=path.consumer, weights=weights.publisher,
                    group=learner_group(program, parts), intake=config.intake, replicas=parts.learners, place=together,
                    compute_threads=parts.learner_threads, private_bytes=path.private_bytes(config.intake), handoff=handoff)
        if together == TOGETHER:
            program.threaded(TOGETHER)
        if parts.core_each:
            program.pin("actor")
        add_evaluator(program, parts, weights)
