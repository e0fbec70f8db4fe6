"""Worker: acts and computes gradients (A3C, GALA). Its link decides what becomes of a gradient.

    await link.begin()                          the newest parameters are in link.learn
    unroll                                      with a copy of them
    for minibatch, phase: gradient -> await link.push     applied somewhere; the newest parameters are in link.learn again

A link.learn may lie on a GPU: parameters travel there, gradients come back, and what is shared stays in host memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from shoal.acting import Progress
from shoal.algorithms.common.gradients import fetched
from shoal.core import Me, Tree
from shoal.learning import Learn, phases_due
from shoal.roles import random_state
from shoal.roles.parts import Parts
from shoal.roles.player import Player

__all__ = ["GradientLink", "Origin", "Worker", "push_gradients"]

T = TypeVar("T")


@dataclass(frozen=True)
class Origin:
    """What a gradient comes from: an unroll or a drawn batch, and how many new decisions it holds."""

    batch: Tree
    decisions: int
    completes: bool = True
    """Whether this is the gradient of the last phase of its minibatch: then a learner step is complete."""
    last: bool = False
    """Whether this is the last gradient of its batch."""
    loss: float = 0.0


class GradientLink(Protocol):
    """Where a worker's parameters come from and its gradients go to."""

    learn: Learn

    @property
    def version(self) -> int: ...
    @property
    def progress(self) -> Progress: ...
    async def begin(self) -> None: ...
    async def push(self, gradient: np.ndarray, phase: str, origin: Origin) -> None: ...
    def show(self, metrics: Sequence[Mapping[str, float]]) -> None: ...
    def state(self) -> dict[str, np.ndarray] | None: ...
    def load(self, state: dict[str, np.ndarray]) -> None: ...


class Worker:
    """Acts and computes gradients; its link says what becomes of them."""

    def __init__(self, me: Me, parts: Parts, link: GradientLink, index: int | None = None, count: int | None = None,
                 joint: bool = False) -> None:
        """It explores like the `index`-th of `count` actors. `joint`: after an unroll it may wait for
        others, when what it has to save is whole."""
        self.me, self.link, self.joint = me, link, joint
        self.place = (me.index if index is None else index, count or me.replicas)
        self.player = Player(me, parts)
        self.data = parts.algorithm.record.layout.empty()
        self.rng = me.rng("minibatches")
        self.settled = False

    async def step(self) -> None:
        self.settled = True  # nothing changes before the first parameters are here
        await self.link.begin()
        await self.me.permit("env_steps", self.player.expected)
        self.settled = False
        link, stats = self.link, self.me.stats
        with stats.phase("pull"):
            self.player.load(link.learn.published(link.progress), link.version, *self.place)
        decisions = self.player.play(self.data)
        stats.add("samples_consumed", decisions)
        stats.observe("data_age_seconds", time.time() - self.data["time"])
        self.settled = self.joint  # the others may send nothing any more: the budget may be spent
        await push_gradients(self.me, self.link, self.data, decisions, self.rng)

    def state(self) -> dict[str, np.ndarray] | None:
        kept = self.link.state()
        return None if kept is None else {**kept, "rng": random_state.pack(self.rng)}

    def load(self, state: dict[str, np.ndarray]) -> None:
        self.link.load(state)
        random_state.unpack(self.rng, state["rng"])

    def close(self) -> None:
        self.player.close()


async def push_gradients(me: Me, link: GradientLink, data: Tree, decisions: int, rng: np.random.Generator) -> None:
    """Compute the gradients of an unroll, or of a drawn batch, and send them off one by one. After that nothing reads `data`:
    its copies to a GPU are older than the gradients that have come back."""
    learn = link.learn
    with me.stats.phase("prepare"):
        sums = learn.sums(data)
    metrics: list[Mapping[str, float]] = []
    for minibatch, last in marked(learn.minibatches(data, sums, link.progress, rng)):
        metrics = []
        for phase, completes in marked(phases_due(learn, link.progress)):
            with me.stats.phase("learn"):
                computed, numbers = learn.gradients(minibatch, phase)
                gradient = fetched(computed, numbers)
            metrics.append(numbers)
            await link.push(gradient, phase, Origin(data, decisions, completes, last and completes, loss_of(numbers, phase)))
    link.show(metrics)


def loss_of(metrics: Mapping[str, float], phase: str) -> float:
    """The loss among the metrics of a phase; of several phases each names its own."""
    return metrics["loss"] if "loss" in metrics else metrics[f"{phase}_loss"]


def marked(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Each item, and whether it is the last one."""
    source = iter(items)
    held = next(source, None)
    while held is not None:
        following = next(source, None)
        yield held, following is None
        held = following
