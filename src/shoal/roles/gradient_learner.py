"""GORILA's learner, which computes gradients of replayed batches and lets a parameter server apply them; and its actors."""

from __future__ import annotations

from typing import cast

import numpy as np

from shoal.core import Call, Me, Reader
from shoal.learning import ReplayLearn
from shoal.roles import random_state
from shoal.roles.actor import Actor
from shoal.roles.batches import measure_items
from shoal.roles.evaluator import Evaluator
from shoal.roles.parameter_server import ServerLink
from shoal.roles.parameter_shards import JoinedWeights
from shoal.roles.parts import Parts
from shoal.roles.replay_endpoints import ReplaySampler
from shoal.roles.worker import push_gradients

__all__ = ["GradientLearner", "sharded_actor", "sharded_evaluator"]


def sharded_actor(me: Me, parts: Parts, cuts: list[slice], experience: Call, **weights: Reader) -> Actor:
    """Acts in its environments with the server's newest weights and sends finished items to the replay."""
    return Actor(me, parts, experience, JoinedWeights(list(weights.values()), cuts))


def sharded_evaluator(me: Me, parts: Parts, cuts: list[slice], **weights: Reader) -> Evaluator:
    """Plays fresh episodes with the newest slices of all shards; ends the run when the return is reached twice."""
    return Evaluator(me, parts, JoinedWeights(list(weights.values()), cuts))


class GradientLearner:
    """Draws batches, computes gradients and sends them to the parameter server; new priorities go back to the replay."""

    def __init__(self, me: Me, parts: Parts, cuts: list[slice], samples: Call, weights: Reader, outlier_width: float | None,
                 **servers: Call) -> None:
        first, *others = servers.values()
        self.me, self.weights = me, weights
        self.link = ServerLink(me, parts, first, others, cuts, outlier_width)
        self.samples = ReplaySampler(parts, samples, me.rng("shards"))
        self.decisions = parts.item_record.decisions
        self.rng = me.rng("minibatches")
        self.settled = False

    async def step(self) -> None:
        self.settled = True  # nothing changes before parameters and a batch are here
        await self.link.begin()
        keys, batch = await self.samples.take()
        self.settled = False
        measure_items(self.me, batch, self.weights.version, self.decisions)
        await push_gradients(self.me, self.link, batch, self.samples.fresh, self.rng)
        self.samples.update(keys, cast(ReplayLearn, self.link.learn).priorities)

    def state(self) -> dict[str, np.ndarray]:
        return {**(self.link.state() or {}), "rng": random_state.pack(self.rng)}

    def load(self, state: dict[str, np.ndarray]) -> None:
        if "gate" in state:
            self.link.load(state)
        random_state.unpack(self.rng, state["rng"])
