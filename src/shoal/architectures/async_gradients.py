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

                        paper                                 here
    environments        one per worker                        `envs_per_actor`, stepped together
    a segment           ends with its episode                 T steps, across episode ends
    t_max, bootstrap    V of the worker's own copy            the same
    optimiser           RMSProp shared by all, no lock        the same (optimiser = "rmsprop"), or shared Adam or SGD
    master              not in the paper                      gradients older than `max_staleness` are refused and counted; the
                                                              mean of `aggregate` of them is one step (all of them: A2C)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from shoal.architectures.books import SharedModel, model_layout
from shoal.architectures.master import Master, ParameterServer, push_layouts
from shoal.architectures.parts import Parts
from shoal.architectures.roles import Evaluator
from shoal.architectures.worker import Origin, Worker
from shoal.core import Call, Delivery, Learn, Me, Progress, Publisher, Reader, Shared, Tolerance
from shoal.errors import ConfigError
from shoal.runtime import Program

__all__ = ["Config", "delivers", "draw", "hogwild_worker", "master_worker"]


@dataclass(frozen=True)
class Config:
    """Workers that compute gradients."""

    envs_per_actor: int = 8
    """Environments that one worker steps together, E."""
    mode: Literal["hogwild", "master"] = "hogwild"
    """Where parameters live: in shared memory that workers write without a lock, or at a parameter server."""
    max_staleness: int | None = None
    """Master: refuse gradients of parameters more than this many steps old; none takes all."""
    aggregate: int = 1
    """Master: apply the mean of this many gradients as one step; as many as workers makes it synchronous."""

    def validate(self) -> None:
        for name in ("envs_per_actor", "aggregate"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--architecture.{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1")
        if self.max_staleness is not None and self.max_staleness < 0:
            raise ConfigError(f"--architecture.max-staleness is {self.max_staleness}; it must not be negative")
        if self.mode == "hogwild" and (self.max_staleness is not None or self.aggregate != 1):
            raise ConfigError("--architecture.mode hogwild has nobody who could refuse or collect gradients, but max-staleness is "
                              f"{self.max_staleness} and aggregate is {self.aggregate}; add --architecture.mode master")


def delivers(config: Config) -> Delivery:
    return Delivery(Tolerance.LAG, "others change the parameters while a worker computes its gradient, so it is some versions old")


def draw(program: Program, parts: Parts, config: Config) -> None:
    if parts.learners != 1:
        raise ConfigError(f"--learners {parts.learners}: the workers of async_gradients learn themselves; use --actors")
    if config.mode == "hogwild":
        draw_hogwild(program, parts)
    else:
        draw_master(program, parts, config)


def draw_hogwild(program: Program, parts: Parts) -> None:
    model = program.shared("model", model_layout(parts, parts.actors))
    weights = program.broadcast("weights", parts.algorithm.published_layout())
    program.add("worker", hogwild_worker, parts=parts, model=model.view, weights=weights.publisher, begun=weights.reader,
                replicas=(1, parts.actors, parts.actors), compute_threads=parts.learner_threads)
    if parts.eval.enabled:
        program.add("evaluator", Evaluator, parts=parts, weights=weights.reader)


def draw_master(program: Program, parts: Parts, config: Config) -> None:
    least = config.aggregate  # fewer workers could never make a step
    if least > parts.actors:
        raise ConfigError(f"--architecture.aggregate {least} waits for more gradients than --actors {parts.actors} can have under "
                          "way; lower it")
    gradients = program.call("gradients", *push_layouts(parts, parts.algorithm.learn(parts.seed)), depth=1)
    ports: dict[str, Any] = {"gradients": gradients.server}
    program.add("worker", master_worker, parts=parts, server=gradients.client, replicas=(least, parts.actors, parts.actors))
    if parts.eval.enabled:
        weights = program.broadcast("weights", parts.algorithm.published_layout())
        program.add("evaluator", Evaluator, parts=parts, weights=weights.reader)
        ports["weights"] = weights.publisher
    program.add("server", ParameterServer, parts=parts, max_staleness=config.max_staleness, aggregate=config.aggregate,
                compute_threads=parts.learner_threads, **ports)


# ---------------------------------------------------------------------------------------------- Hogwild
def hogwild_worker(me: Me, parts: Parts, model: Shared, weights: Publisher, begun: Reader) -> Worker:
    """Acts, and applies its gradients to parameters in shared memory, without a lock."""
    return Worker(me, parts, Hogwild(me, parts, model, weights, begun))


class Hogwild:
    """Gradients are computed with a private copy and applied to the shared model; then the copy is refreshed."""

    def __init__(self, me: Me, parts: Parts, model: Shared, weights: Publisher, begun: Reader) -> None:
        self.me, self.weights, self.begun = me, weights, begun
        self.model = SharedModel(me, parts, model)
        self.learn: Learn = parts.algorithm.learn(parts.seed)
        self.version, self.fresh = 0, False

    @property
    def progress(self) -> Progress:
        return self.model.progress

    @property
    def leader(self) -> bool:
        return self.me.index == 0

    async def begin(self) -> None:
        if self.fresh:
            return
        if self.leader:
            self.model.fill()
            self._publish()
        else:
            await self.begun.newer_than(0)
        self._copy()
        self.fresh = True

    async def push(self, gradient: np.ndarray, phase: str, origin: Origin) -> None:
        model, stats = self.model, self.me.stats
        with stats.phase("learn"):
            stats.observe("policy_lag", float(model.version - self.version))
            model.learn.anneal(model.progress)
            model.apply(gradient, phase)
            if origin.last:
                model.learn.absorb(model.learn.moments(origin.batch))
            model.count(origin.decisions if origin.last else 0, 1)
        stats.add("learner_steps")
        if origin.last and self.leader:
            self._publish()
        self._copy()

    def _copy(self) -> None:
        """The snapshot that the next unroll, or the next minibatch, is computed with."""
        with self.me.stats.phase("pull"), torch.no_grad():
            self.version = self.model.version
            mine = self.learn.weights
            for name, tensor in self.model.learn.weights.items():
                mine[name].copy_(tensor)

    def _publish(self) -> None:
        with self.me.stats.phase("publish"):
            self.weights.publish(self.model.learn.published(self.progress))
        self.me.stats.set("weights_version", self.model.version)

    def show(self, metrics: dict[str, float]) -> None:
        self.model.show(metrics)

    def state(self) -> dict[str, np.ndarray] | None:
        return {name: array.copy() for name, array in self.model.bundle().items()} if self.leader and self.model.filled else None

    def load(self, state: dict[str, np.ndarray]) -> None:
        self.model.fill(state)  # a restarted worker finds newer parameters in memory than any checkpoint holds


# ---------------------------------------------------------------------------------------------- a parameter server
def master_worker(me: Me, parts: Parts, server: Call) -> Worker:
    """Acts, sends its gradients to the parameter server and gets the new parameters back."""
    return Worker(me, parts, Master(me, parts, server))
