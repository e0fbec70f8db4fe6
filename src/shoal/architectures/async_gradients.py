"""Workers compute gradients and do not wait for each other: A3C (Mnih et al. 2016, 1602.01783, algorithm S3).

    mode = "hogwild": parameters and optimiser statistics in shared memory, no lock

      worker 0: environments, copy of the model ─┐  gradient, applied in place   ┌───────────────────────────────┐
      worker 1: environments, copy of the model ─┼─────────────────────────────▶ │ model (shared): parameters,   │
      ...                                       ─┘ ◀──────────────────────────── │ RMSProp's g, statistics       │
         │ worker 0 publishes                       copy, after each gradient    └───────────────────────────────┘
         └──────────▶ weights (broadcast) ──▶ evaluator

    mode = "master": a parameter server

      worker 0 ─┐                                                   ┌──────────────────┐
      worker 1 ─┼── gradients (call): gradient, version, counts ──▶ │ parameter server │ ── weights (broadcast) ──▶ evaluator
      ...      ─┘ ◀── new parameters, in the same round trip ────── └──────────────────┘

    On a GPU each worker's copy of the model lies there: parameters travel to it and gradients come back, whole vectors both. The
    shared model, or the parameter server, stays in host memory and computes on the CPU; so do policies, unless --gpu.actors.

                        paper                                 here
    environments        one per worker                        `envs_per_actor`, stepped together
    a segment           ends with its episode                 T steps, across episode ends
    t_max, bootstrap    V of the worker's own copy            the same
    optimiser           RMSProp shared by all, no lock        the same (optimiser = "rmsprop"), or shared Adam or SGD
    master              not in the paper                      gradients older than `max_staleness` are refused and counted; the
                                                              mean of `aggregate` of them is one step (all of them: A2C)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from shoal.errors import ConfigError
from shoal.learning import Architecture, ArchitectureOptions, Delivery, Tolerance
from shoal.options import number
from shoal.roles.evaluator import add_evaluator
from shoal.roles.hogwild import hogwild_worker
from shoal.roles.learner_state import model_layout
from shoal.roles.parameter_server import ParameterServer, master_worker, push_layouts
from shoal.roles.parts import Parts
from shoal.runtime import Program

__all__ = ["AsyncGradients", "Config"]


@dataclass(frozen=True)
class Config(ArchitectureOptions):
    """Workers that compute gradients."""

    envs_per_actor: int = number(8, at_least=1)
    """Environments that one worker steps together, E."""
    mode: Literal["hogwild", "master"] = "hogwild"
    """Where parameters live: in shared memory that workers write without a lock, or at a parameter server."""
    max_staleness: int | None = number(None, at_least=0)
    """Master: refuse gradients of parameters more than this many steps old; none takes all."""
    aggregate: int = number(1, at_least=1)
    """Master: apply the mean of this many gradients as one step; as many as workers makes it synchronous."""

    def validate(self) -> None:
        super().validate()
        if self.mode == "hogwild" and (self.max_staleness is not None or self.aggregate != 1):
            raise ConfigError("--architecture.mode hogwild has no server that could refuse or collect gradients, but max-staleness "
                              f"is {self.max_staleness} and aggregate is {self.aggregate}; add --architecture.mode master")


class AsyncGradients(Architecture):
    """See the module."""

    name = "async_gradients"
    config_class = Config
    runs_on_gpu, prefers_gpu = True, False  # every worker would need a CUDA context: `auto` has none

    def delivers(self, config: Config) -> Delivery:
        return Delivery(Tolerance.LAG, "others change the parameters while a worker computes its gradient, so it is some versions "
                        "old")

    def draw(self, program: Program, parts: Parts, config: Config) -> None:
        if parts.learners != 1:
            raise ConfigError(f"--learners {parts.learners}: the workers of async_gradients learn themselves; use --actors")
        parts = replace(parts, learners=parts.actors)  # each worker is one: they take the GPUs in turns
        if config.mode == "hogwild":
            draw_hogwild(program, parts)
        else:
            draw_master(program, parts, config)


def draw_hogwild(program: Program, parts: Parts) -> None:
    model = program.shared("model", model_layout(parts, parts.actors), instead="--architecture.mode master")
    weights = program.broadcast("weights", parts.algorithm.published_layout())
    program.add("worker", hogwild_worker, parts=parts, model=model.view, weights=weights.publisher, begun=weights.reader,
                replicas=(1, parts.actors, parts.actors), compute_threads=parts.learner_threads,
                private_bytes=parts.algorithm.record.layout.nbytes)
    add_evaluator(program, parts, weights)


def draw_master(program: Program, parts: Parts, config: Config) -> None:
    least, learn = config.aggregate, parts.new_learn()  # fewer workers could never make a step
    if least > parts.actors:
        raise ConfigError(f"--architecture.aggregate {least} waits for more gradients than --actors {parts.actors} can have under "
                          "way; lower it")
    if least > 1 and len(learn.phases) > 1:
        raise ConfigError(f"--architecture.aggregate {least} with --algorithm {parts.algorithm.name} does not fit: workers in "
                          f"different ones of its phases ({', '.join(learn.phases)}) would wait for each other; leave it out")
    gradients = program.call("gradients", *push_layouts(parts, learn), depth=1)
    program.add("worker", master_worker, parts=parts, server=gradients.client, aggregate=config.aggregate,
                replicas=(least, parts.actors, parts.actors), private_bytes=parts.algorithm.record.layout.nbytes, on_gpu=True)
    weights = program.broadcast("weights", parts.algorithm.published_layout()) if parts.eval.enabled else None
    add_evaluator(program, parts, weights)
    program.add("server", ParameterServer, parts=parts, max_staleness=config.max_staleness, aggregate=config.aggregate,
                gradients=gradients.server, weights=weights and weights.publisher, compute_threads=parts.learner_threads,
                on_gpu=False)
