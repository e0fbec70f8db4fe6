"""A role that learns the encoder of images, beside a learner that does the rest: CURL's representation learner.

    replay ── uncounted samples (call) ──▶ RepresentationLearner ──▶ encoder (broadcast) ──▶ EncodedLearner   detached
                                                 ▲                                               │
                                                 └── encoder_gradients (call) ◀──────────────────┘           shared

Detached, it draws batches of its own, and the learner takes its codes as they are. Shared, the learner sends what its own loss has
for the encoder and the crops it came from; one step is made with the sum of both gradients. In lock step the learner waits for that
step and continues with its result: then the two are one learner, bit for bit.

The newest encoder lies on the wire. A RepresentationLearner that was killed continues from there, with the optimiser's moments of
the newest checkpoint, and the learner continues meanwhile with the encoder that it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np
import torch

from shoal.acting import Progress
from shoal.core import Call, Me, Pending, Publisher, Reader, Request, Server, Tree
from shoal.learning import EncodedLearn, Represents, phases_due
from shoal.roles import random_state
from shoal.roles.learner import Learner
from shoal.roles.learner_state import LearnerState
from shoal.roles.parts import Parts
from shoal.slots import Field, Layout, map_tree

__all__ = ["EncodedLearner", "RepresentationLearner", "encoder_layout", "gradient_layouts"]


def encoder_layout(parts: Parts) -> Layout:
    """What is published: the encoder and what compares its codes, the key encoder, how many updates were made and of which of the
    learner's updates the last gradient came."""
    assert isinstance(parts.algorithm, Represents)
    size = parts.algorithm.representation(parts.seed).state["params"].numel()
    one = Field((size,), "f4")
    return Layout({"params": one, "target": one, "updates": Field((1,), "i8"), "applied": Field((1,), "i8")})


def gradient_layouts(parts: Parts) -> tuple[Layout, Layout]:
    """A learner's gradient for the encoder with the crops it came from, and the version that answers it."""
    assert isinstance(parts.algorithm, Represents)
    crops = parts.algorithm.contrasted_layout(parts.replay.batch_size)
    request = {"gradient": encoder_layout(parts).fields["params"], **crops.fields, "progress": Field((3,), "f8")}
    return Layout(request), Layout({"version": Field((1,), "i8")})


class RepresentationLearner:
    """Learns the encoder by contrast and publishes it; takes the learner's gradients for it too, where they are shared."""

    def __init__(self, me: Me, parts: Parts, encoder: Publisher, newest: Reader, gradients: Server | None = None,
                 samples: Call | None = None, weights: Reader | None = None, updates_per_step: float = 1.0) -> None:
        """With `gradients` it makes an update for each that it is sent; with `samples` it draws batches and makes
        `updates_per_step` updates for each of the learner's, whose progress comes with the `weights`."""
        from shoal.roles.replay_endpoints import ReplaySampler

        assert isinstance(parts.algorithm, Represents)
        self.me, self.encoder, self.newest, self.weights, self.gradients = me, encoder, newest, weights, gradients
        self.samples = None if samples is None else ReplaySampler(parts, samples)
        self.updates_per_step = updates_per_step
        self.learner_state = LearnerState(me, parts, parts.algorithm.representation(parts.seed))
        self.learn = self.learner_state.learn
        (self.phase,) = self.learn.phases
        self.published = parts.algorithm.published_layout().empty()
        self.rng = me.rng("crops")
        self.counts = np.zeros(2, np.int64)  # updates, and the learner's update of which the last gradient came
        self.version, self.progress = 0, Progress()
        self.greeted, self.settled = False, True

    async def step(self) -> None:
        if not self.greeted:
            self._greet()
        self.settled = True  # nothing changes before a batch or a gradient is here
        if self.gradients is not None:
            for request in await self.gradients.take(most=1):
                self.settled = False
                self._shared(request)
            return
        assert self.samples is not None and self.weights is not None
        await self._pace(self.weights)
        _, batch = await self.samples.take()
        self.settled = False
        self._update(batch, self.progress)
        self._publish()

    def _greet(self) -> None:
        """Continue from what a predecessor has published, if that is newer than what was saved."""
        stored: Tree = {"params": np.zeros_like(self.learn.state["params"]), "target": np.zeros_like(self.learn.state["target"]),
                        "updates": np.zeros(1, np.int64), "applied": np.zeros(1, np.int64)}
        if self.newest.pull(stored) and stored["updates"][0] >= self.counts[0]:
            self.counts[:] = stored["updates"][0], stored["applied"][0]
            with torch.no_grad():
                for name in ("params", "target"):
                    self.learn.state[name].copy_(torch.from_numpy(stored[name]))
        self._publish()
        self.greeted = True

    async def _pace(self, weights: Reader) -> None:
        """Wait until the learner is far enough for another update."""
        while self.counts[0] >= self.updates_per_step * (self.progress.learner_steps + 1):
            await weights.newer_than(self.version)
            self.version = weights.pull(self.published)
            self.progress = Progress.of(self.published["progress"])

    def _shared(self, request: Request) -> None:
        """A predecessor may have applied it, and died before it answered."""
        progress = Progress.of(request.data["progress"])
        if self.counts[1] != progress.learner_steps + 1:
            self._update(request.data, progress, request.data["gradient"])
            self.counts[1] = progress.learner_steps + 1
            self._publish()
        request.reply({"version": np.array([self.encoder.version])})

    def _update(self, batch: Tree, progress: Progress, more: np.ndarray | None = None) -> None:
        with self.me.stats.phase("learn"):
            (minibatch,) = self.learn.minibatches(batch, np.zeros(0), progress, self.rng)
            gradient, metrics = self.learn.gradients(minibatch, self.phase)
            self.learner_state.apply(gradient if more is None else more + gradient, self.phase)
        self.counts[0] += 1
        self.me.stats.add("encoder_updates")
        self.learner_state.show([metrics])

    def _publish(self) -> None:
        with self.me.stats.phase("publish"):
            state = self.learn.state
            version = self.encoder.publish({"params": state["params"].numpy(), "target": state["target"].numpy(),
                                            "updates": self.counts[:1], "applied": self.counts[1:]})
        self.me.stats.set("encoder_version", version)

    def state(self) -> dict[str, np.ndarray]:
        learned = {f"encoder/{name}": tensor.numpy() for name, tensor in self.learn.state.items()}
        return {**learned, "updates": self.counts, "rng": random_state.pack(self.rng)}

    def load(self, state: dict[str, np.ndarray]) -> None:
        with torch.no_grad():
            for name, tensor in self.learn.state.items():
                tensor.copy_(torch.from_numpy(state[f"encoder/{name}"]))
        self.counts[:] = state["updates"]
        random_state.unpack(self.rng, state["rng"])


class EncodedLearner(Learner):
    """Takes batches, makes updates, publishes weights. A representation learner gives it the encoder."""

    def __init__(self, me: Me, parts: Parts, batches: Call, weights: Publisher, encoder: Reader, gradients: Call | None = None,
                 lockstep: bool = False) -> None:
        """With `gradients` it sends what its loss has for the encoder; in lock step it waits for the update that is made of it."""
        super().__init__(me, parts, batches, weights)
        assert isinstance(parts.algorithm, Represents)
        self.encoder, self.encoder_gradients, self.lockstep = encoder, gradients, lockstep
        self.encoded = cast(EncodedLearn, self.learn)
        self.newest, self.used = encoder_layout(parts).empty(), 0
        self.sent: Pending | None = None

    async def _update(self, batch: Tree) -> bool:
        self._take_encoder()
        return await super()._update(batch)

    async def _phase(self, minibatch: object, phase: str) -> Mapping[str, float]:
        metrics, progress = await super()._phase(minibatch, phase), self.learner_state.progress
        if phase == phases_due(self.learn, progress)[-1]:
            self.me.stats.observe("encoder_lag", self.encoder.version - self.used)
            if self.encoder_gradients is not None:
                await self._send(self.encoder_gradients, minibatch, progress)
        return metrics

    async def _send(self, gradients: Call, minibatch: object, progress: Progress) -> None:
        """The gradient of a minibatch; at most one is on its way."""
        if self.sent is not None:
            await self.sent.result()
        draft = await gradients.slot()
        with self.me.stats.phase("write"):
            map_tree(np.copyto, draft.data, {**map_tree(np.asarray, self.encoded.contrasted(minibatch)),
                                             "gradient": self.encoded.encoder_gradient, "progress": progress.numbers})
        self.sent = draft.send()
        if self.lockstep:
            await self.sent.result()
            self.sent = None
            self._take_encoder()

    def _take_encoder(self) -> None:
        """The newest there is."""
        if self.encoder.version != self.used:
            with self.me.stats.phase("pull"):
                self.used = self.encoder.pull(self.newest)
                self.encoded.take_encoder(self.newest["params"], self.newest["target"])
