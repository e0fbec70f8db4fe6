"""A parameter server, and the link of the workers that send it gradients: async_gradients' master, GORILA's first shard.

    worker ── gradient, version it was computed from, decisions, moments ──▶ server   applies it, or refuses it
           ◀── accepted or not, the newest parameters, their version ─────           (too old, or of a version it never had)

A server may be in pieces (`parameter_shards.py`): then the first one has the first slice of the parameters and all the counts, and
decides what is applied. A worker sends the others their slices only after the first has accepted, never half a gradient. An
algorithm of several phases sends one gradient for each; the last of them completes a learner step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from shoal.acting import Progress
from shoal.algorithms.common.phases import overlap
from shoal.algorithms.records.moments import MomentRelay, observation_moment_fields
from shoal.core import Call, Me, Publisher, Request, Server, Tree
from shoal.learning import SlicedLearn, Updater, UpdaterSlice
from shoal.ops.gates import LossGate, judge, too_old
from shoal.roles.learner_state import LearnerState
from shoal.roles.parts import Parts
from shoal.roles.worker import Origin, Worker
from shoal.slots import Field, Layout, map_tree

__all__ = ["ParameterServer", "ServerLink", "longest_span", "master_worker", "part_of_gradient", "push_layouts"]

SLICED = ("params", "target")  # of a Learn's weights: what several servers own pieces of


def push_layouts(parts: Parts, learn: Updater) -> tuple[Layout, Layout]:
    """A gradient with what goes along, and what answers it, of a server that has `learn`: the whole, or a slice."""
    weights = {name: tensor.numpy() for name, tensor in learn.weights.items()}
    replayed = parts.algorithm.from_replay
    fields = observation_moment_fields(parts.stored.observation_moments) if replayed else parts.algorithm.record.layout.fields
    request = {"gradient": Field((longest_span(learn),), "f4"), "phase": Field((1,), "i8"), "completes": Field((1,), "bool"),
               "empty": Field((1,), "bool"), "last": Field((1,), "bool"), "decisions": Field((1,), "i8"),
               "version": Field((1,), "i8"), "life": Field((1,), "i8"),
               "moments": {name: moments for name, moments in fields.items() if name.endswith("moments")}}
    reply = {"weights": Layout.of(weights).fields, "version": Field((1,), "i8"), "life": Field((1,), "i8"),
             "counts": Field((2,), "i8"), "before": Field((3,), "i8"), "accepted": Field((1,), "bool")}
    return Layout(request), Layout(reply)


def longest_span(learn: Updater) -> int:
    """Room for a gradient of any phase."""
    spans = [learn.span(phase) for phase in learn.phases]
    return max(int(span.stop - span.start) for span in spans)


def part_of_gradient(span: slice, cut: slice) -> slice:
    """Which elements of the gradient of a phase, whose parameters are `span`, belong to the parameters `cut`."""
    common = overlap(span, cut)
    return slice(common.start - span.start, common.stop - span.start)


class ServerLink:
    """One round trip: the gradient there, the newest parameters back.

    Where `shards` have the slices `cuts[1:]` of the parameters, they are sent theirs once the first server has accepted.
    With `outlier_width` a gradient is not sent if its loss is more than that many standard deviations above the mean of this
    worker's losses.
    """

    def __init__(self, me: Me, parts: Parts, server: Call, shards: Sequence[Call] = (), cuts: Sequence[slice] = (),
                 outlier_width: float | None = None) -> None:
        self.me, self.server, self.shards, self.cuts, self.width = me, server, shards, cuts, outlier_width
        self.learner_state = LearnerState(me, parts, parts.learn())
        self.learn = self.learner_state.learn
        self.gate = LossGate()
        self.owed = 0  # decisions that the server has not been told about
        replayed = parts.algorithm.from_replay
        self.sums = MomentRelay(parts.stored.observation_moments) if replayed else None  # of observations, likewise
        self.version, self.life, self.fresh = 0, 0, False

    @property
    def progress(self) -> Progress:
        return self.learner_state.progress

    async def begin(self) -> None:
        if not self.fresh:
            await self._exchange(None, self.learn.phases[0], None)
            self.fresh = True

    async def push(self, gradient: np.ndarray, phase: str, origin: Origin) -> None:
        if self.sums is not None and origin.last:
            self.sums.add(origin.batch)
        if self.width is not None and not self._usual(origin.loss):
            self.me.stats.add("gradients_outlying")
            self.owed += origin.decisions if origin.last else 0
            await self._exchange(None, phase, None)
            return
        if self.cuts:
            assert isinstance(self.learn, SlicedLearn)
            gradient = self.learn.clipped(gradient, phase)  # by the norm of the whole
        await self._exchange(gradient, phase, origin)

    def _usual(self, loss: float) -> bool:
        """Whether this loss is not an outlier among those of this worker (GORILA)."""
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
            data["version"][0], data["life"][0], data["empty"][0] = self.version, self.life, origin is None
            data["last"][0] = origin is not None and origin.last
            if origin is not None:
                assert gradient is not None
                part = gradient[part_of_gradient(self.learn.span(phase), self.cuts[0])] if self.cuts else gradient
                data["gradient"][: len(part)] = part
                data["phase"][0], data["completes"][0] = self.learn.phases.index(phase), origin.completes
                data["decisions"][0] = origin.decisions
                self._tell(data, origin)
        reply = await draft.send().result()
        self._take(reply["weights"], self.cuts[0] if self.cuts else ...)
        self.version, self.life, self.learner_state.counts[0] = int(reply["version"][0]), int(reply["life"][0]), reply["counts"]
        if self.shards:
            await self._follow(gradient if reply["accepted"][0] else None, phase, reply["before"])

    def _tell(self, data: Tree, origin: Origin) -> None:
        """What the server counts once for an unroll or a batch, with the last of its gradients."""
        if self.sums is None:
            for name, moments in data["moments"].items():
                map_tree(np.copyto, moments, origin.batch[name])
        elif origin.last:
            self.sums.take(data["moments"])
        if origin.last:
            data["decisions"][0] += self.owed
            self.owed = 0

    async def _follow(self, gradient: np.ndarray | None, phase: str, before: np.ndarray) -> None:
        """The other shards' slices: of the gradient if it was accepted, and of the newest parameters. `before` is what the first
        one had counted until then."""
        asked = []
        for shard, cut in zip(self.shards, self.cuts[1:], strict=True):
            draft = await shard.slot()
            with self.me.stats.phase("write"):
                data = draft.data
                data["empty"][0], data["before"][:], data["phase"][0] = gradient is None, before, self.learn.phases.index(phase)
                if gradient is not None:
                    part = gradient[part_of_gradient(self.learn.span(phase), cut)]
                    data["gradient"][: len(part)] = part
            asked.append((draft.send(), cut))
        for pending, cut in asked:
            self._take((await pending.result())["weights"], cut)

    def _take(self, weights: Tree, where: Any) -> None:
        with self.me.stats.phase("pull"), torch.no_grad():
            mine = self.learn.weights
            for name, array in weights.items():
                part = mine[name][where] if name in SLICED else mine[name]  # running statistics come whole, from the first shard
                part.copy_(torch.from_numpy(array))

    def show(self, metrics: Sequence[Mapping[str, float]]) -> None:
        self.learner_state.show(metrics)

    def state(self) -> dict[str, np.ndarray] | None:
        """What the server has not got."""
        return None if self.width is None else {"gate": np.array(self.gate, np.float64)}

    def load(self, state: dict[str, np.ndarray]) -> None:
        mean, square, losses = state["gate"].tolist()
        self.gate = LossGate(mean, square, int(losses))


class ParameterServer:
    """Owns parameters and optimiser, in host memory; applies gradients in the order of their arrival, answers with the new
    parameters."""

    def __init__(self, me: Me, parts: Parts, gradients: Server, max_staleness: int | None, aggregate: int = 1,
                 weights: Publisher | None = None, learn: UpdaterSlice | None = None, age: str = "policy_lag") -> None:
        """`learn`: this server's slice of the parameters; None owns them all. `age`: the metric that a gradient's age is
        reported as; without replay it is the lag of the data too."""
        self.me, self.gradients, self.weights, self.age = me, gradients, weights, age
        self.max_staleness, self.aggregate = max_staleness, aggregate
        self.learner_state: LearnerState[Updater] = LearnerState(me, parts, parts.new_learn() if learn is None else learn)
        self.learn, self.slice = self.learner_state.learn, learn
        self.held: list[Request] = []
        self.greeted = False
        self.settled = True  # whatever it awaits, its parameters are whole; what it held is asked again of a successor

    @property
    def version(self) -> int:
        """How many steps its parameters are from the first ones: less than before where they come from a checkpoint."""
        return int(self.learner_state.counts[0, 1])

    async def step(self) -> None:
        if not self.greeted:
            self._publish()
            self.greeted = True
        for request in await self.gradients.take(most=64):
            if request.data["empty"][0]:
                self._reply(request)
            elif self.learner_state.enough():  # a worker that waits for its reply could not be saved
                self.me.finish("learner_steps")
                self._reply(request)
            elif self._young(request):
                self.held.append(request)
                self._collect()
            else:
                self._refuse(request)

    def _young(self, request: Request) -> bool:
        """Not too old; and not of parameters that this server has never had (its predecessor had, before it died)."""
        if int(request.data["life"][0]) != self.me.incarnation:
            return False
        used = int(request.data["version"][0])
        self.me.stats.observe(self.age, float(self.version - used))
        return self.max_staleness is None or not too_old(self.version, used, self.max_staleness)

    def _refuse(self, request: Request) -> None:
        self.me.stats.add("gradients_stale")
        if request.data["last"][0]:  # of several gradients of one unroll the last one counts
            self.me.stats.add("samples_masked", int(request.data["decisions"][0]))
            self.learner_state.count(int(request.data["decisions"][0]), 0)
            if self.slice is not None:  # of a replayed batch: the sums are of newer observations, which nobody sends again
                self.learn.absorb(self.learn.moments(request.data["moments"]))
        self._reply(request)

    def _collect(self) -> None:
        """When enough gradients are here, one step with their mean."""
        self.held = [request for request in self.held if not request.void]
        if len(self.held) < self.aggregate:
            return
        held, self.held = self.held, []
        whole = [request for request in held if request.data["last"][0]]  # unrolls that are learned from entirely now
        phase = self.learn.phases[int(held[0].data["phase"][0])]
        before = np.append(self.learner_state.counts[0], 0 if self.slice is None else self.slice.updates(phase))
        with self.me.stats.phase("learn"):
            self.learn.anneal(self.learner_state.progress)
            span = self.learn.span(phase)
            self.learner_state.apply(mean_gradient(held)[: span.stop - span.start], phase)
            for request in whole:
                self.learn.absorb(self.learn.moments(request.data["moments"]))
        completes = int(held[0].data["completes"][0])
        self.learner_state.count(sum(int(request.data["decisions"][0]) for request in whole), completes)
        self.me.stats.add("learner_steps", completes)
        if whole:
            self._publish()
        for request in held:
            self._reply(request, before)

    def _reply(self, request: Request, before: np.ndarray | None = None) -> None:
        """`before`: the counts, and the updates of the phase, before the step that was made of this gradient; None where none was
        made."""
        weights: Tree = {name: tensor.numpy() for name, tensor in self.learn.weights.items()}
        counts = self.learner_state.counts[0]
        request.reply({"weights": weights, "version": np.array([self.version]), "life": np.array([self.me.incarnation]),
                       "counts": counts, "before": np.zeros(3, np.int64) if before is None else before,
                       "accepted": np.array([before is not None])})

    def _publish(self) -> None:
        stats = self.me.stats
        if self.weights is None:  # nobody reads them: they are counted all the same, on a page that outlives this server
            stats.add("weights_version")
            return
        with stats.phase("publish"):
            version = self.weights.publish(self.learn.published(self.learner_state.progress))
        stats.set("weights_version", version)  # the wire's: it does not go back with the parameters of a checkpoint

    def state(self) -> dict[str, np.ndarray]:
        return self.learner_state.arrays()

    def load(self, state: dict[str, np.ndarray]) -> None:
        self.learner_state.load(state)


def mean_gradient(held: Sequence[Request]) -> np.ndarray:
    """The mean over all decisions: each gradient counts by the decisions that it is the mean of."""
    if len(held) == 1:
        only: np.ndarray = held[0].data["gradient"]
        return only
    decisions = np.array([float(request.data["decisions"][0]) for request in held])
    mean: np.ndarray = np.tensordot(decisions / max(decisions.sum(), 1.0), [request.data["gradient"] for request in held], 1)
    return mean.astype(np.float32)


def master_worker(me: Me, parts: Parts, server: Call, aggregate: int) -> Worker:
    """Acts, sends its gradients to the parameter server and gets the new parameters back, after `aggregate` gradients of all."""
    parts = parts.on(me.index)
    parts.hardware.enter()
    return Worker(me, parts, ServerLink(me, parts, server), joint=aggregate > 1)
