"""The roles of one bundle of GORILA: an actor and a learner with a replay between them, and the server's slices put together."""

from __future__ import annotations

import json

import numpy as np

from shoal.architectures.master import Master
from shoal.architectures.parts import Parts
from shoal.architectures.replay_ends import Inserts, Samples
from shoal.architectures.replaying import measure
from shoal.architectures.roles import Actor, Evaluator
from shoal.architectures.shards import Pieces
from shoal.architectures.worker import push_gradients
from shoal.core import Call, Me, Reader

__all__ = ["BundleLearner", "bundle_actor", "piecewise_evaluator"]


def bundle_actor(me: Me, parts: Parts, cuts: list[slice], inserts: Call, **weights: Reader) -> Actor:
    """Acts in its environments with the server's newest weights and sends finished items to the replay."""
    return Actor(me, parts, Inserts(inserts, parts.replay.shards, me.index), Pieces(list(weights.values()), cuts))


def piecewise_evaluator(me: Me, parts: Parts, cuts: list[slice], **weights: Reader) -> Evaluator:
    """Plays fresh episodes with the newest slices of all shards; ends the run when the return is reached twice."""
    return Evaluator(me, parts, Pieces(list(weights.values()), cuts))


class BundleLearner:
    """Draws batches, computes gradients and sends them to the parameter server; new priorities go back to the replay."""

    def __init__(self, me: Me, parts: Parts, cuts: list[slice], samples: Call, weights: Reader, outlier_width: float | None,
                 **servers: Call) -> None:
        first, *others = servers.values()
        self.me, self.weights = me, weights
        self.link = Master(me, parts, first, others, cuts, outlier_width)
        self.samples = Samples(parts, samples, me.rng("shards"))
        self.decisions = parts.algorithm.record.decisions  # type: ignore[attr-defined]
        self.rng = me.rng("minibatches")
        self.settled = False

    async def step(self) -> None:
        self.settled = True  # nothing is changed before parameters and a batch are here
        await self.link.begin()
        keys, batch = await self.samples.take()
        self.settled = False
        measure(self.me, batch, self.weights.version, self.decisions)
        await push_gradients(self.me, self.link, batch, self.samples.fresh, self.rng)
        self.samples.update(keys, self.link.learn.priorities)  # type: ignore[attr-defined]

    def state(self) -> dict[str, np.ndarray]:
        words = np.frombuffer(json.dumps(self.rng.bit_generator.state).encode(), np.uint8)
        return {**(self.link.state() or {}), "rng": words}

    def load(self, state: dict[str, np.ndarray]) -> None:
        if "gate" in state:
            self.link.load(state)
        self.rng.bit_generator.state = json.loads(bytes(state["rng"]))
