"""A representation learner beside the learner: asynchronous CURL (Laskin et al. 2020, 2004.04136, whose own form is one process).

      actor 0 ─┐                            samples
      actor 1 ─┼─ inserts ──▶ replay ◀───────────────── learner ──▶ weights (broadcast) ──▶ actors, evaluator
      ...     ─┘                 ▲                       ▲   │
                                 │     encoder (broadcast)   │ encoder_gradients (call)      features = "shared"
                                 │                       │   ▼
                                 └───────────── representation
                uncounted samples, features = "detached"

The representation learner owns the encoder, what compares its codes, the key encoder and their optimiser. Detached, it draws
batches of its own beside the learner, which takes the encoder as it is. Shared, the learner sends it the gradient that its own loss
has for the encoder, and the crops; one step is made with the sum of both. `encoder_lag` in the metrics says how many versions the
encoder of an update is behind. In lock step everybody waits for everybody, and the run equals --architecture synchronous, bit for
bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from shoal.errors import ConfigError
from shoal.learning import Architecture, ArchitectureOptions, Delivery, Represents, Tolerance
from shoal.options import number
from shoal.roles.actor import Actor
from shoal.roles.data_path import table_path
from shoal.roles.evaluator import add_evaluator
from shoal.roles.parts import Parts
from shoal.runtime import Program

__all__ = ["Config", "RepresentationGraph"]


@dataclass(frozen=True)
class Config(ArchitectureOptions):
    """Actors, a learner and a representation learner."""

    envs_per_actor: int = number(8, at_least=1)
    """Environments that one actor steps together, E."""
    features: Literal["detached", "shared"] = "detached"
    """detached: the encoder learns from contrast alone; shared: from the learner's gradients too."""
    lockstep: bool = False
    """Let the learner wait for every update of the encoder, and actors for the learner (shared only)."""
    encoder_updates: float = number(1.0, above=0)
    """Updates of a detached encoder for each update of the learner, at most."""

    def validate(self) -> None:
        super().validate()
        if self.lockstep and self.features == "detached":
            raise ConfigError("--architecture.lockstep needs gradients to wait for, but --architecture.features is detached; give "
                              "--architecture.features shared, or leave it out")


class RepresentationGraph(Architecture):
    """See the module."""

    name = "representation"
    config_class = Config
    takes_unrolls = False
    takes_replay = needs_encoder = True

    def delivers(self, config: Config) -> Delivery:
        return Delivery(Tolerance.REPLAY, "transitions are drawn from a replay table, and their codes are by an encoder of any age")

    def draw(self, program: Program, parts: Parts, config: Config) -> None:
        from shoal.roles.replay_wires import samples_wire  # only now: it imports Numba
        from shoal.roles.representation import EncodedLearner, RepresentationLearner, encoder_layout, gradient_layouts

        algorithm, shared = parts.algorithm, config.features == "shared"
        assert isinstance(algorithm, Represents)
        self._check(parts, config)
        path = table_path(program, parts, turns=config.lockstep)
        weights = program.broadcast("weights", parts.algorithm.published_layout())
        encoder = program.broadcast("encoder", encoder_layout(parts))
        taught: dict[str, Any] = {}
        beside = None
        if shared:
            gradients = program.call("encoder_gradients", *gradient_layouts(parts), depth=1)
            taught = {"gradients": gradients.client, "lockstep": config.lockstep}
            learns: dict[str, Any] = {"gradients": gradients.server}
        else:
            beside = samples_wire(program, parts, turns=False, counted=False)
            learns = {"samples": beside.client, "weights": weights.reader, "updates_per_step": config.encoder_updates}
        program.add("actor", Actor, parts=parts, experience=path.producer, weights=weights.reader, replicas=parts.actor_replicas)
        path.add_tables(uncounted=None if beside is None else beside.server)
        program.add("learner", EncodedLearner, parts=replace(parts, algorithm=algorithm.apart(shared)), batches=path.consumer,
                    weights=weights.publisher, encoder=encoder.reader, compute_threads=parts.learner_threads, **taught)
        program.add("representation", RepresentationLearner, parts=parts, encoder=encoder.publisher, newest=encoder.reader,
                    **learns)
        add_evaluator(program, parts, weights)

    def _check(self, parts: Parts, config: Config) -> None:
        if parts.learners > 1:
            raise ConfigError(f"--learners {parts.learners} with --architecture representation does not fit: learners would have "
                              "encoders of different versions; use --learners 1, or --architecture actor_learner")
        if parts.replay.shards > 1:
            raise ConfigError(f"--replay.shards {parts.replay.shards} with --architecture representation does not fit: the table "
                              "is one process; leave it out")
        if config.lockstep and parts.replay.samples_per_insert is None:
            raise ConfigError("--replay.samples-per-insert none with --architecture.lockstep does not fit: actors and learner take "
                              "turns by it; give a number, or leave --architecture.lockstep out")
