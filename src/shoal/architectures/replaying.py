"""Actors, a replay table and a learner: the data path of algorithms that learn from replay (DQN, Ape-X, R2D2).

      actor 0 ─┐
      actor 1 ─┼── inserts (call) ──▶ replay ◀── samples (call) ── learner, or several with shared gradients (group)
      ...     ─┘   items, priorities  or shards  batches, priorities  │
         ▲                                                            │
         └──────────────── weights (broadcast) ◀──────────────────────┴──▶ evaluator

`synchronous` and `actor_learner` draw this when the algorithm is `from_replay`. They differ in one thing: in turns, an actor
waits until the learner has made the updates that its items are due; otherwise actors wait only for the rate limiter. A learner on
a GPU begins the next update before it asks what became of the last one: priorities then go back one batch later.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from shoal.algorithms.pinning import Mark, to_host
from shoal.architectures.books import Books
from shoal.architectures.parts import Parts
from shoal.architectures.replay import Replay, make_limiter, replay_wires
from shoal.architectures.replay_ends import Inserts, Samples
from shoal.architectures.roles import Actor, Evaluator, agree, group_on, learner_group
from shoal.core import Call, Group, Me, Publisher, Reader, Tree
from shoal.errors import ConfigError, GroupChanged
from shoal.runtime import Program
from shoal.runtime.wires import Broadcast
from shoal.runtime.wires import Call as CallWire

__all__ = ["ReplayLearner", "add_replay", "collector", "draw_replay", "measure"]


def draw_replay(program: Program, parts: Parts, *, turns: bool, one_place: bool) -> None:
    """The graph above; offline, what is left of it without actors."""
    if parts.offline:
        from shoal.architectures.demos import draw_offline

        draw_offline(program, parts)
        return
    inserts, samples = replay_wires(program, parts, turns)
    weights = program.broadcast("weights", parts.algorithm.published_layout())
    place = "main" if one_place else None
    program.add("actor", collector, parts=parts, inserts=inserts.client, weights=weights.reader,
                replicas=(1, parts.actors, parts.actors), place=place)
    add_replay(program, parts, inserts, samples, weights, turns, place)
    if parts.eval.enabled:
        program.add("evaluator", Evaluator, parts=parts, weights=weights.reader)


def add_replay(program: Program, parts: Parts, inserts: CallWire, samples: CallWire, weights: Broadcast, turns: bool = False,
               place: str | None = None) -> None:
    """The table and those who learn from it, whoever inserts."""
    if parts.learners > 1 and (turns or place):
        why = "actors and one learner take turns" if turns else "with --architecture.one-place there is one process"
        raise ConfigError(f"--learners {parts.learners} with --algorithm {parts.algorithm.name} does not fit here: {why}; use "
                          "--learners 1, or --architecture actor_learner with a process for each")
    if parts.replay.shards > 1 and place:
        raise ConfigError(f"--replay.shards {parts.replay.shards} does not fit here: with --architecture.one-place there is one "
                          "process; leave either out")
    make_limiter(parts, turns)  # a band that could block both sides is refused here
    program.add("replay", Replay, parts=parts, inserts=inserts.server, samples=samples.server, turns=turns,
                replicas=parts.replay.shards, place=place)
    program.add("learner", ReplayLearner, parts=parts, samples=samples.client, weights=weights.publisher,
                group=learner_group(program, parts), replicas=parts.learners, place=place, compute_threads=parts.learner_threads)
    if parts.core_each:
        program.pin("actor")


def collector(me: Me, parts: Parts, inserts: Call, weights: Reader) -> Actor:
    """Acts in its environments with the newest weights and sends finished items, with first priorities, to the replay."""
    return Actor(me, parts, Inserts(inserts, parts.replay.shards, me.index), weights)


class Running(NamedTuple):
    """An update that a GPU may still be busy with."""

    deliver: Callable[[], None]
    """Wait for it, then tell of it."""
    publishes: bool
    """Whether its weights are among what is told."""


class ReplayLearner:
    """Draws batches, makes updates, sends new priorities back, publishes weights."""

    shares_state = True  # a restarted learner may begin from any learner's checkpoint

    def __init__(self, me: Me, parts: Parts, samples: Call, weights: Publisher, group: Group | None = None) -> None:
        """With others in a group it makes the update of their joined batch."""
        parts = parts.on(me.index)
        parts.hardware.enter()
        self.me, self.weights, self.group, self.config = me, weights, group_on(me, parts, group), parts.replay
        self.gpu = parts.hardware.on_gpu
        self.running: Running | None = None
        self.metrics: Any = None
        self.samples = Samples(parts, samples, me.rng("shards"))
        self.books = Books(me, parts)
        self.learn = self.books.learn
        self.decisions = parts.algorithm.record.decisions  # type: ignore[attr-defined]
        self.rng = me.rng("minibatches")
        self.settled = self.greeted = False

    @property
    def counts(self) -> np.ndarray:
        """env_steps that came into the table, and learner_steps."""
        return self.books.totals

    @property
    def leader(self) -> bool:
        """Whose weights are published and kept."""
        return self.group is None or self.group.leader

    @property
    def version(self) -> int:
        """Of the newest weights, those among them that are yet to be published."""
        return self.weights.version + (self.running is not None and self.running.publishes)

    async def step(self) -> None:
        self.settled = True  # nothing is changed before a batch is here
        if not self.greeted:
            await self._greet()
        if self.gpu:
            self.learn.release()  # type: ignore[attr-defined]  # the last batch, whose memory is used again
        keys, batch = await self.samples.take()
        self.settled = False
        measure(self.me, batch, self.version, self.decisions)
        try:
            steps = await self._update(batch)
        except GroupChanged:
            self.me.stats.add("group_discarded")
            self.greeted, self.running, self.books.unheard = False, None, []
            return
        if self.leader:
            self.me.stats.add("learner_steps", steps)
        publishes = self.leader and self.counts[1] % self.config.publish_updates == 0
        if self.gpu:
            self._follow(keys.copy(), publishes)
            return
        self.books.show(self.metrics)
        self.samples.update(keys, self.learn.priorities)  # type: ignore[attr-defined]
        if publishes:
            self._publish()

    def _follow(self, keys: np.ndarray, publishes: bool) -> None:
        """Leave this update to the GPU if there is a batch to go on with, and tell of the one before it."""
        look, learn = self.books.send(self.metrics), self.learn
        priorities = to_host(learn.priorities)  # type: ignore[attr-defined]
        snapshot = learn.snapshot(self.books.progress) if publishes else None  # type: ignore[attr-defined]
        made = Mark(learn.state["params"].device)

        def deliver() -> None:
            with self.me.stats.phase("learn"):
                made.wait()
            look()
            self.samples.update(keys, priorities.numpy())
            if snapshot is not None:
                self._publish(snapshot())

        before, self.running = self.running, Running(deliver, publishes)
        if before is not None:
            before.deliver()
        if not self.samples.waiting():
            deliver()
            self.running = None

    async def _greet(self) -> None:
        """Agree with the others on one state, then publish it."""
        if self.group is not None:
            await agree(self.books, self.group)
        self.greeted = True
        if self.leader:
            self._publish()

    async def _update(self, batch: Tree) -> int:
        stats, learn, steps = self.me.stats, self.learn, 0
        fresh, sums = self.samples.fresh, learn.sums(batch)
        if self.group is not None:
            joined = await self.group.sum(np.array([fresh, *sums]))
            fresh, sums = int(joined[0]), joined[1:]
        for minibatch in learn.minibatches(batch, sums, self.books.progress, self.rng):
            for phase in learn.phases:
                with stats.phase("learn"):
                    gradient, metrics = learn.gradients(minibatch, phase)
                    if self.group is not None:
                        gradient = await self.group.mean(gradient)
                    self.books.apply(gradient, phase)
                steps += 1
        self.metrics = metrics
        self.books.count(fresh, steps)
        return steps

    def _publish(self, published: Tree | None = None) -> None:
        with self.me.stats.phase("publish"):
            version = self.weights.publish(published or self.learn.published(self.books.progress))
        self.me.stats.set("weights_version", version)

    # ------------------------------------------------------------------ what a checkpoint holds
    def state(self) -> dict[str, np.ndarray] | None:
        if not self.leader:
            return None
        words = np.frombuffer(json.dumps(self.rng.bit_generator.state).encode(), np.uint8)
        return {**self.books.bundle(), "rng": words}

    def load(self, state: dict[str, np.ndarray]) -> None:
        self.books.unbundle(state)
        self.rng.bit_generator.state = json.loads(bytes(state["rng"]))


def measure(me: Me, batch: Tree, version: int, decisions: int) -> None:
    """How old a batch is at this version; an item of it stands for so many decisions."""
    stats, versions = me.stats, batch["weights_version"]
    stats.add("samples_consumed", len(versions) * decisions)
    own = versions >= 0  # demonstrations were made by no version
    stats.observe("policy_lag", version - versions[own])
    stats.observe("data_age_seconds", time.time() - batch["time"][own])
