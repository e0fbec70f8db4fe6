"""Worker: acts and computes gradients (A3C, GALA). What becomes of a gradient is its link's business.

    await link.begin()                          the newest parameters are in link.learn
    unroll                                      with a copy of them
    for minibatch: gradient -> await link.push  applied somewhere; the newest parameters are in link.learn again
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from shoal.architectures.parts import Parts
from shoal.architectures.player import Player
from shoal.core import Learn, Me, Progress, Tree

__all__ = ["Link", "Origin", "Worker", "push_gradients"]

T = TypeVar("T")


@dataclass(frozen=True)
class Origin:
    """What a gradient comes from: an unroll or a drawn batch, how many new decisions it holds, whether this is its last gradient,
    and its loss."""

    batch: Tree
    decisions: int
    last: bool = False
    loss: float = 0.0


class Link(Protocol):
    """Where a worker's parameters come from and its gradients go to."""

    learn: Learn

    @property
    def version(self) -> int: ...
    @property
    def progress(self) -> Progress: ...
    async def begin(self) -> None: ...
    async def push(self, gradient: np.ndarray, phase: str, origin: Origin) -> None: ...
    def show(self, metrics: dict[str, float]) -> None: ...
    def state(self) -> dict[str, np.ndarray] | None: ...
    def load(self, state: dict[str, np.ndarray]) -> None: ...


class Worker:
    """Acts in its environments, computes gradients of what happened with its own copy of the parameters."""

    def __init__(self, me: Me, parts: Parts, link: Link, index: int | None = None, count: int | None = None) -> None:
        """It explores like the `index`-th of `count` actors."""
        self.me, self.link = me, link
        self.place = (me.index if index is None else index, count or me.replicas)
        self.player = Player(me, parts)
        self.data = parts.algorithm.record.layout.empty()
        self.rng = me.rng("minibatches")
        self.settled = False

    async def step(self) -> None:
        self.settled = True  # nothing is changed before the first parameters are here
        await self.link.begin()
        self.settled = False
        link, stats = self.link, self.me.stats
        with stats.phase("pull"):
            self.player.load(link.learn.published(link.progress), link.version, *self.place)
        decisions = self.player.unroll(self.data)
        stats.add("samples_consumed", decisions)
        stats.observe("data_age_seconds", time.time() - self.data["time"])
        await push_gradients(self.me, self.link, self.data, decisions, self.rng)

    def state(self) -> dict[str, np.ndarray] | None:
        kept = self.link.state()
        if kept is None:
            return None
        words = np.frombuffer(json.dumps(self.rng.bit_generator.state).encode(), np.uint8)
        return {**kept, "rng": words}

    def load(self, state: dict[str, np.ndarray]) -> None:
        self.link.load(state)
        self.rng.bit_generator.state = json.loads(bytes(state["rng"]))

    def close(self) -> None:
        self.player.close()


async def push_gradients(me: Me, link: Link, data: Tree, decisions: int, rng: np.random.Generator) -> None:
    """Compute the gradients of an unroll, or of a drawn batch, and send them off one by one."""
    learn = link.learn
    with me.stats.phase("prepare"):
        sums = learn.sums(data)
    for minibatch, last in marked(learn.minibatches(data, sums, link.progress, rng)):
        for phase in learn.phases:
            with me.stats.phase("learn"):
                gradient, metrics = learn.gradients(minibatch, phase)
            await link.push(gradient, phase, Origin(data, decisions, last and phase == learn.phases[-1], metrics["loss"]))
    link.show(metrics)


def marked(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Each item, and whether it is the last one."""
    source = iter(items)
    held: Any = next(source, None)
    while held is not None:
        following = next(source, None)
        yield held, following is None
        held = following
