"""A parameter server, and the link of those who send it gradients: async_gradients' master, GORILA's first shard.

    worker ── gradient, version it was computed from, decisions, moments ──▶ server   applies it, or refuses it
           ◀── accepted or not, the newest parameters, their version ─────           (too old, or of a version it never had)

A server may be in pieces (`shards.py`): then the first one has the first slice of the parameters, all the counts, and the say
over what is applied. A worker sends the others their slices only after the first has accepted, never half a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from shoal.architectures.books import Books
from shoal.architectures.parts import Parts
from shoal.architectures.worker import Origin
from shoal.core import Call, Learn, Me, Progress, Publisher, Request, Server, Tree
from shoal.ops.gates import LossGate, judge, too_old
from shoal.slots import Field, Layout, map_tree

__all__ = ["Master", "ParameterServer", "push_layouts"]


def push_layouts(parts: Parts, learn: Learn) -> tuple[Layout, Layout]:
    """A gradient with what goes along, and what answers it, of a server that has `learn`: the whole, or a slice."""
    weights = {name: tensor.numpy() for name, tensor in learn.weights.items()}
    fields = parts.algorithm.record.layout.fields
    request = {"gradient": Field(weights["params"].shape, "f4"), "phase": Field((1,), "i8"), "empty": Field((1,), "bool"),
               "last": Field((1,), "bool"), "decisions": Field((1,), "i8"), "version": Field((1,), "i8"),
               "moments": {name: moments for name, moments in fields.items() if name.endswith("moments")}}
    reply = {"weights": Layout.of(weights).fields, "version": Field((1,), "i8"), "counts": Field((2,), "i8"),
             "before": Field((2,), "i8"), "accepted": Field((1,), "bool")}
    return Layout(request), Layout(reply)


class Master:
    """One round trip: the gradient there, the newest parameters back.

    Where `shards` have the slices `cuts[1:]` of the parameters, they are sent theirs once the first server has accepted.
    With `outlier_width` a gradient whose loss is above the mean of this worker's losses by so many standard deviations is not sent.
    """

    def __init__(self, me: Me, parts: Parts, server: Call, shards: Sequence[Call] = (), cuts: Sequence[slice] = (),
                 outlier_width: float | None = None) -> None:
        self.me, self.server, self.shards, self.cuts, self.width = me, server, shards, cuts, outlier_width
        self.books = Books(me, parts)
        self.learn = self.books.learn
        self.gate = LossGate()
        self.owed = 0  # decisions that the server has not been told of
        self.version, self.fresh = 0, False

    @property
    def progress(self) -> Progress:
        return self.books.progress

    async def begin(self) -> None:
        if not self.fresh:
            await self._exchange(None, self.learn.phases[0], None)
            self.fresh = True

    async def push(self, gradient: np.ndarray, phase: str, origin: Origin) -> None:
        if self.width is not None and not self._usual(origin.loss):
            self.me.stats.add("gradients_outlying")
            self.owed += origin.decisions if origin.last else 0
            await self._exchange(None, phase, None)
            return
        if self.cuts:
            gradient = self.learn.clipped(gradient)  # type: ignore[attr-defined]  # by the norm of the whole
        await self._exchange(gradient, phase, origin)

    def _usual(self, loss: float) -> bool:
        """Whether this loss is no outlier among those of this worker (GORILA)."""
        assert self.width is not None
        if not math.isfinite(loss):
            return True  # the server leaves it out, and gives up when there are many
        usual, self.gate = judge(self.gate, loss, self.width)
        return usual

    async def _exchange(self, gradient: np.ndarray | None, phase: str, origin: Origin | None) -> None:
        """Without a gradient it only asks for the parameters."""
        draft = await self.server.slot()
        with self.me.stats.phase("write"):
            data = draft.data
            data["version"][0], data["empty"][0], data["last"][0] = self.version, origin is None, origin is not None and origin.last
            if origin is not None:
                assert gradient is not None
                data["gradient"][:] = gradient[self.cuts[0]] if self.cuts else gradient
                data["phase"][0] = self.learn.phases.index(phase)
                data["decisions"][0], self.owed = origin.decisions + self.owed, 0
                for name, moments in data["moments"].items():
                    map_tree(np.copyto, moments, origin.batch[name])
        reply = await draft.send().result()
        self._take(reply["weights"], self.cuts[0] if self.cuts else ...)
        self.version, self.books.counts[0] = int(reply["version"][0]), reply["counts"]
        if self.shards:
            await self._follow(gradient if reply["accepted"][0] else None, reply["before"])

    async def _follow(self, gradient: np.ndarray | None, counts: np.ndarray) -> None:
        """The other shards' slices: of the gradient if it was accepted, and of the newest parameters."""
        asked = []
        for shard, cut in zip(self.shards, self.cuts[1:], strict=True):
            draft = await shard.slot()
            with self.me.stats.phase("write"):
                draft.data["empty"][0], draft.data["counts"][:] = gradient is None, counts
                if gradient is not None:
                    draft.data["gradient"][:] = gradient[cut]
            asked.append((draft.send(), cut))
        for pending, cut in asked:
            self._take((await pending.result())["weights"], cut)

    def _take(self, weights: Tree, where: Any) -> None:
        with self.me.stats.phase("pull"), torch.no_grad():
            mine = self.learn.weights
            for name, array in weights.items():
                mine[name][where].copy_(torch.from_numpy(array))

    def show(self, metrics: dict[str, float]) -> None:
        self.books.show(metrics)

    def state(self) -> dict[str, np.ndarray] | None:
        """What the server has not got."""
        return None if self.width is None else {"gate": np.array(self.gate, np.float64)}

    def load(self, state: dict[str, np.ndarray]) -> None:
        mean, square, losses = state["gate"].tolist()
        self.gate = LossGate(mean, square, int(losses))


class ParameterServer:
    """Owns parameters and optimiser; applies gradients in the order of their arrival, answers with the new parameters."""

    def __init__(self, me: Me, parts: Parts, gradients: Server, max_staleness: int | None, aggregate: int = 1,
                 weights: Publisher | None = None, learn: Learn | None = None, age: str = "policy_lag") -> None:
        """`learn`: a slice, where the server is in pieces; the whole otherwise. `age`: what a gradient's age is called, which is
        the lag of its data too where they are not replayed."""
        self.me, self.gradients, self.weights, self.age = me, gradients, weights, age
        self.max_staleness, self.aggregate = max_staleness, aggregate
        self.books = Books(me, parts, learn)
        self.learn = self.books.learn
        self.held: list[Request] = []
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
        used = int(request.data["version"][0])
        if used <= self.version:
            self.me.stats.observe(self.age, float(self.version - used))
        return used <= self.version and (self.max_staleness is None or not too_old(self.version, used, self.max_staleness))

    def _refuse(self, request: Request) -> None:
        self.me.stats.add("gradients_stale")
        if request.data["last"][0]:  # of several gradients of one unroll the last one counts
            self.me.stats.add("samples_masked", int(request.data["decisions"][0]))
            self.books.count(int(request.data["decisions"][0]), 0)
        self._reply(request)

    def _collect(self) -> None:
        """When enough gradients are here, one step with their mean."""
        self.held = [request for request in self.held if not request.void]
        if len(self.held) < self.aggregate:
            return
        held, self.held = self.held, []
        whole = [request for request in held if request.data["last"][0]]  # unrolls that are learned from entirely now
        before = self.books.counts[0].copy()
        with self.me.stats.phase("learn"):
            self.learn.anneal(self.books.progress)
            self.books.apply(mean_gradient(held), self.learn.phases[int(held[0].data["phase"][0])])
            for request in whole:
                self.learn.absorb(self.learn.moments(request.data["moments"]))
        self.books.count(sum(int(request.data["decisions"][0]) for request in whole), 1)
        self.me.stats.add("learner_steps")
        if whole:
            self._publish()
        for request in held:
            self._reply(request, before)

    def _reply(self, request: Request, before: np.ndarray | None = None) -> None:
        """`before`: the counts before the step that was made of this gradient; None where none was made."""
        weights: Tree = {name: tensor.numpy() for name, tensor in self.learn.weights.items()}
        counts = self.books.counts[0]
        request.reply({"weights": weights, "version": np.array([self.version]), "counts": counts,
                       "before": counts if before is None else before, "accepted": np.array([before is not None])})

    def _publish(self) -> None:
        if self.weights is not None:
            with self.me.stats.phase("publish"):
                self.weights.publish(self.learn.published(self.books.progress))
        self.me.stats.set("weights_version", self.version)

    def state(self) -> dict[str, np.ndarray]:
        return self.books.bundle()

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        self.books.unbundle(dict(state))


def mean_gradient(held: Sequence[Request]) -> np.ndarray:
    """The mean over all decisions: each gradient counts by the decisions that it is the mean of."""
    if len(held) == 1:
        only: np.ndarray = held[0].data["gradient"]
        return only
    decisions = np.array([float(request.data["decisions"][0]) for request in held])
    mean: np.ndarray = np.tensordot(decisions / max(decisions.sum(), 1.0), [request.data["gradient"] for request in held], 1)
    return mean.astype(np.float32)
