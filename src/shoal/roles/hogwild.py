"""Gradients applied to parameters in shared memory, without a lock (A3C): the link of a Worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from shoal.acting import Progress
from shoal.core import Me, Publisher, Reader, Shared
from shoal.learning import Learn
from shoal.roles.learner_state import SharedModel
from shoal.roles.parts import Parts
from shoal.roles.worker import Origin, Worker

__all__ = ["HogwildLink", "hogwild_worker"]


def hogwild_worker(me: Me, parts: Parts, model: Shared, weights: Publisher, begun: Reader) -> Worker:
    """Acts, and applies its gradients to parameters in shared memory, without a lock."""
    parts = parts.on(me.index)
    parts.hardware.enter()
    return Worker(me, parts, HogwildLink(me, parts, model, weights, begun))


class HogwildLink:
    """Gradients are computed with a private copy, which may lie on a GPU, and applied to the shared model in host memory; then the
    copy is refreshed."""

    def __init__(self, me: Me, parts: Parts, model: Shared, weights: Publisher, begun: Reader) -> None:
        self.me, self.weights, self.begun = me, weights, begun
        self.model = SharedModel(me, parts, model)
        self.learn: Learn = parts.learn()
        self.version, self.fresh = 0, False

    @property
    def progress(self) -> Progress:
        return self.model.progress

    @property
    def leader(self) -> bool:
        return self.me.index == 0

    async def begin(self) -> None:
        await self.me.permit("learner_steps", 1)
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
            model.count(origin.decisions if origin.last else 0, int(origin.completes))
        stats.add("learner_steps", int(origin.completes))
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

    def show(self, metrics: Sequence[Mapping[str, float]]) -> None:
        self.model.show(metrics)

    def state(self) -> dict[str, np.ndarray] | None:
        return {name: array.copy() for name, array in self.model.arrays().items()} if self.leader else None

    def load(self, state: dict[str, np.ndarray]) -> None:
        self.model.fill(state)  # a restarted worker finds newer parameters in memory than any checkpoint holds
