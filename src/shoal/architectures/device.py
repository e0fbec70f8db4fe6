"""Acting and learning on one device, environments included: Podracer's Anakin (Hessel et al. 2021, 2104.06272, section 3).

      ┌─ device ─────────────────────────────────────────────────────┐
      │  T times: net -> actions -> E environments, all at once      │
      │  the algorithm's gradients and steps on these T x E decisions│   captured as one CUDA graph, replayed
      └──────────────────────────────┬───────────────────────────────┘
                                     └── weights (broadcast) ──▶ evaluator (CPU, ordinary environments)

For environments that are tensor code (shoal.envs.device): nothing is copied between two updates, and no number is read back.
The algorithm is the same as everywhere: its Learn and its Policy are called as by any other learner and actor, with tensors in
place of arrays. On a CPU the same code runs without the graph.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import ConfigError
from shoal.learning import Architecture, ArchitectureOptions, Delivery, Tolerance
from shoal.options import number
from shoal.roles.device_learner import DeviceLearner
from shoal.roles.evaluator import add_evaluator
from shoal.roles.parts import Parts
from shoal.runtime import Program

__all__ = ["Config", "Device"]


@dataclass(frozen=True)
class Config(ArchitectureOptions):
    """Everything on one device."""

    envs_per_actor: int = number(1024, at_least=1)
    """Environments that step together, E."""
    updates_per_step: int = number(8, at_least=1)
    """Updates between two looks at what happened: then numbers are read and weights are published."""


class Device(Architecture):
    """See the module."""

    name = "device"
    config_class = Config
    runs_on_gpu = prefers_gpu = True
    has_actors = False  # the learner acts
    reports_steps = False

    def delivers(self, config: Config) -> Delivery:
        return Delivery(Tolerance.NOTHING, "acting and learning take turns, so data are never old")

    def draw(self, program: Program, parts: Parts, config: Config) -> None:
        if parts.learners > 1:
            raise ConfigError(f"--learners {parts.learners}: the device architecture has one device and one learner; raise "
                              "--architecture.envs-per-actor instead")
        if not parts.algorithm.runs_on_gpu:
            raise ConfigError(f"{type(parts.algorithm).__name__} works on arrays only: the device architecture needs an "
                              "algorithm whose parts take tensors (runs_on_gpu); any other architecture runs it")
        if parts.env.varied:
            raise ConfigError(f"environments that vary from actor to actor ({', '.join(parts.env.varied)}): the device "
                              "architecture has no actors; any other architecture takes them")
        parts.env.tensors(1, "cpu")  # says what is wrong before anything starts
        weights = program.broadcast("weights", parts.algorithm.published_layout()) if parts.eval.enabled else None
        program.add("device", DeviceLearner, parts=parts, weights=weights and weights.publisher, updates=config.updates_per_step,
                    compute_threads=parts.learner_threads,
                    private_bytes=0 if parts.hardware.on_gpu else parts.algorithm.record.layout.nbytes)
        add_evaluator(program, parts, weights)
