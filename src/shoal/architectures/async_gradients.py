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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from shoal.architectures.books import Books, SharedModel, model_layout
from shoal.architectures.parts import Parts
from shoal.architectures.roles import Evaluator
from shoal.architectures.worker import Origin, Worker
from shoal.core import Call, Delivery, Learn, Me, Progress, Publisher, Reader, Request, Server, Shared, Tolerance, Tree
from shoal.errors import ConfigError
from shoal.runtime import Program
from shoal.slots import Field, Layout, map_tree

__all__ = ["Config", "ParameterServer", "delivers", "draw", "hogwild_worker", "master_worker"]


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
    gradients = program.call("gradients", *push_layouts(parts), depth=1)
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
def push_layouts(parts: Parts) -> tuple[Layout, Layout]:
    """A gradient with what goes along, and the parameters that answer it."""
    learn, record = parts.algorithm.learn(parts.seed), parts.algorithm.record
    weights = {name: tensor.numpy() for name, tensor in learn.weights.items()}
    numbers = {"version": Field((1,), "i8"), "counts": Field((2,), "i8")}
    moments = {name: fields for name, fields in record.layout.fields.items() if name.endswith("moments")}
    request = {"gradient": Field(weights["params"].shape, "f4"), "phase": Field((1,), "i8"), "empty": Field((1,), "bool"),
               "last": Field((1,), "bool"), "decisions": Field((1,), "i8"), "version": Field((1,), "i8"), "moments": moments}
    return Layout(request), Layout({"weights": Layout.of(weights).fields, **numbers})


def master_worker(me: Me, parts: Parts, server: Call) -> Worker:
    """Acts, sends its gradients to the parameter server and gets the new parameters back."""
    return Worker(me, parts, Master(me, parts, server))


class Master:
    """One round trip: the gradient there, the newest parameters back."""

    def __init__(self, me: Me, parts: Parts, server: Call) -> None:
        self.me, self.server = me, server
        self.books = Books(me, parts)
        self.learn = self.books.learn
        self.version, self.fresh = 0, False

    @property
    def progress(self) -> Progress:
        return self.books.progress

    async def begin(self) -> None:
        if not self.fresh:
            await self._exchange(None, self.learn.phases[0], None)
            self.fresh = True

    async def push(self, gradient: np.ndarray, phase: str, origin: Origin) -> None:
        await self._exchange(gradient, phase, origin)

    async def _exchange(self, gradient: np.ndarray | None, phase: str, origin: Origin | None) -> None:
        """Without a gradient it only asks for the parameters."""
        draft = await self.server.slot()  # type: ignore[attr-defined]
        with self.me.stats.phase("write"):
            data = draft.data
            data["version"][0], data["empty"][0], data["last"][0] = self.version, origin is None, origin is not None and origin.last
            if origin is not None:
                data["gradient"][:], data["phase"][0] = gradient, self.learn.phases.index(phase)
                data["decisions"][0] = origin.decisions
                for name, moments in data["moments"].items():
                    map_tree(np.copyto, moments, origin.batch[name])
        reply = await draft.send().result()
        with self.me.stats.phase("pull"), torch.no_grad():
            mine = self.learn.weights
            for name, array in reply["weights"].items():
                mine[name].copy_(torch.from_numpy(array))
            self.version = int(reply["version"][0])
            self.books.counts[0] = reply["counts"]

    def show(self, metrics: dict[str, float]) -> None:
        self.books.show(metrics)

    def state(self) -> dict[str, np.ndarray] | None:
        return None  # the server has it

    def load(self, state: dict[str, np.ndarray]) -> None:
        """Nothing of its own."""


class ParameterServer:
    """Owns parameters and optimiser; applies gradients in the order of their arrival, answers with the new parameters."""

    def __init__(self, me: Me, parts: Parts, gradients: Server, max_staleness: int | None, aggregate: int,
                 weights: Publisher | None = None) -> None:
        self.me, self.gradients, self.weights = me, gradients, weights
        self.max_staleness, self.aggregate = max_staleness, aggregate
        self.books = Books(me, parts)
        self.learn = self.books.learn
        self.held: list[Any] = []
        self.greeted = False
        self.settled = True  # whatever it awaits, its parameters are whole; what it held is asked again of a successor

    @property
    def version(self) -> int:
        return int(self.books.counts[0, 1])

    async def step(self) -> None:
        if not self.greeted:
            self._publish()
            self.greeted = True
        for request in await self.gradients.take(most=64):
            if request.data["empty"][0]:
                self._reply(request)
            elif self._young(request):
                self.held.append(request)
                self._collect()
            else:
                self._refuse(request)

    def _young(self, request: Request) -> bool:
        """Not too old; and not of a version that this server has never had (its predecessor had, before it died)."""
        staleness = self.version - int(request.data["version"][0])
        if staleness >= 0:
            self.me.stats.observe("policy_lag", float(staleness))
        return staleness >= 0 and (self.max_staleness is None or staleness <= self.max_staleness)

    def _refuse(self, request: Request) -> None:
        if request.data["last"][0]:  # of several gradients of one unroll the last one counts
            self.me.stats.add("samples_masked", int(request.data["decisions"][0]))
            self.books.count(int(request.data["decisions"][0]), 0)
        self._reply(request)

    def _collect(self) -> None:
        """When enough gradients are here, one step with their mean."""
        self.held = [request for request in self.held if not getattr(request, "void", False)]
        if len(self.held) < self.aggregate:
            return
        held, self.held = self.held, []
        whole = [request for request in held if request.data["last"][0]]  # unrolls that are learned from entirely now
        with self.me.stats.phase("learn"):
            self.learn.anneal(self.books.progress)
            self.books.apply(mean_gradient(held), self.learn.phases[int(held[0].data["phase"][0])])
            for request in whole:
                self.learn.absorb(self.learn.moments(request.data["moments"]))
        self.books.count(sum(int(request.data["decisions"][0]) for request in whole), 1)
        self.me.stats.add("learner_steps")
        for request in held:
            self._reply(request)
        if whole:
            self._publish()

    def _reply(self, request: Any) -> None:
        weights: Tree = {name: tensor.numpy() for name, tensor in self.learn.weights.items()}
        request.reply({"weights": weights, "version": np.array([self.version]), "counts": self.books.counts[0]})

    def _publish(self) -> None:
        if self.weights is not None:
            with self.me.stats.phase("publish"):
                self.weights.publish(self.learn.published(self.books.progress))
        self.me.stats.set("weights_version", self.version)

    def state(self) -> dict[str, np.ndarray]:
        return self.books.bundle()

    def load(self, state: dict[str, np.ndarray]) -> None:
        self.books.unbundle(state)


def mean_gradient(held: Sequence[Any]) -> np.ndarray:
    """The mean over all decisions: each gradient counts by the decisions that it is the mean of."""
    if len(held) == 1:
        only: np.ndarray = held[0].data["gradient"]
        return only
    decisions = np.array([float(request.data["decisions"][0]) for request in held])
    mean: np.ndarray = np.tensordot(decisions / max(decisions.sum(), 1.0), [request.data["gradient"] for request in held], 1)
    return mean.astype(np.float32)
