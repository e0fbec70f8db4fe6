"""Actors, a replay table and a learner: the data path of algorithms that learn from replay (DQN, Ape-X, R2D2).

      actor 0 ─┐
      actor 1 ─┼── inserts (call) ──▶ replay ◀── samples (call) ── learner
      ...     ─┘   items, priorities         batches, priorities      │
         ▲                                                            │
         └──────────────── weights (broadcast) ◀──────────────────────┴──▶ evaluator

`synchronous` and `actor_learner` draw this when the algorithm is `from_replay`. They differ in one thing: in turns, an actor
waits until the learner has made the updates that its items are due; otherwise actors wait only for the rate limiter.
"""

from __future__ import annotations

import json
import time

import numpy as np

from shoal.architectures.books import Books
from shoal.architectures.parts import Parts
from shoal.architectures.replay import Inserts, Replay, Samples, make_limiter, replay_wires
from shoal.architectures.roles import Actor, Evaluator
from shoal.core import Call, Me, Publisher, Reader, Tree
from shoal.errors import ConfigError
from shoal.runtime import Program
from shoal.runtime.wires import Broadcast
from shoal.runtime.wires import Call as CallWire

__all__ = ["ReplayLearner", "add_replay", "collector", "draw_replay"]

def draw_replay(program: Program, parts: Parts, *, turns: bool, one_place: bool) -> None:
    """The graph above."""
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
    """The table and its learner, whoever inserts."""
    if parts.learners > 1:
        raise ConfigError(f"--learners {parts.learners} with --algorithm {parts.algorithm.name} does not fit: one learner draws "
                          "from the replay table; use --learners 1")
    make_limiter(parts, turns)  # a band that could block both sides is refused here
    program.add("replay", Replay, parts=parts, inserts=inserts.server, samples=samples.server, turns=turns, place=place)
    program.add("learner", ReplayLearner, parts=parts, samples=samples.client, weights=weights.publisher, place=place,
                compute_threads=parts.learner_threads)


def collector(me: Me, parts: Parts, inserts: Call, weights: Reader) -> Actor:
    """Acts in its environments with the newest weights and sends finished items, with first priorities, to the replay."""
    return Actor(me, parts, Inserts(inserts), weights)


class ReplayLearner:
    """Draws batches, makes updates, sends new priorities back, publishes weights."""

    def __init__(self, me: Me, parts: Parts, samples: Call, weights: Publisher) -> None:
        self.me, self.weights, self.config = me, weights, parts.replay
        self.samples = Samples(parts, samples)
        self.books = Books(me, parts)
        self.learn = self.books.learn
        self.decisions = parts.algorithm.record.decisions  # type: ignore[attr-defined]
        self.rng = me.rng("minibatches")
        self.settled = self.greeted = False

    @property
    def counts(self) -> np.ndarray:
        """env_steps that came into the table, and learner_steps."""
        return self.books.totals

    async def step(self) -> None:
        self.settled = True  # nothing is changed before a batch is here
        if not self.greeted:
            self.greeted = True
            self._publish()
        keys, batch = await self.samples.take()
        self.settled = False
        self._measure(batch)
        steps = self._update(batch)
        self.samples.update(keys, self.learn.priorities)  # type: ignore[attr-defined]
        self.books.count(self.samples.fresh, steps)
        self.me.stats.add("learner_steps", steps)
        if self.counts[1] % self.config.publish_updates == 0:
            self._publish()

    def _update(self, batch: Tree) -> int:
        stats, learn, steps = self.me.stats, self.learn, 0
        with stats.phase("learn"):
            for minibatch in learn.minibatches(batch, learn.sums(batch), self.books.progress, self.rng):
                for phase in learn.phases:
                    gradient, metrics = learn.gradients(minibatch, phase)
                    self.books.apply(gradient, phase)
                    steps += 1
        self.books.show(metrics)
        return steps

    def _measure(self, batch: Tree) -> None:
        stats, versions = self.me.stats, batch["weights_version"]
        stats.add("samples_consumed", len(versions) * self.decisions)
        stats.observe("policy_lag", self.weights.version - versions)
        stats.observe("data_age_seconds", time.time() - batch["time"])

    def _publish(self) -> None:
        with self.me.stats.phase("publish"):
            version = self.weights.publish(self.learn.published(self.books.progress))
        self.me.stats.set("weights_version", version)

    # ------------------------------------------------------------------ what a checkpoint holds
    def state(self) -> dict[str, np.ndarray]:
        words = np.frombuffer(json.dumps(self.rng.bit_generator.state).encode(), np.uint8)
        return {**self.books.bundle(), "rng": words}

    def load(self, state: dict[str, np.ndarray]) -> None:
        self.books.unbundle(state)
        self.samples.env_steps = int(self.counts[0])
        self.rng.bit_generator.state = json.loads(bytes(state["rng"]))
