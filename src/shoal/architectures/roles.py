"""The roles that architectures put together: Actor, Learner, Evaluator. None of them knows where it runs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from shoal.algorithms.handoff import Handoff, Parcel
from shoal.algorithms.pinning import Direct
from shoal.architectures.books import Books, SharedModel, bundle
from shoal.architectures.episodes import play_episodes
from shoal.architectures.parts import Parts
from shoal.architectures.player import Player
from shoal.architectures.reuse import Reuse
from shoal.core import Group, Me, Progress, Publisher, Reader, Shared, Sink, Source, Tree, any_of
from shoal.errors import ConfigError, GroupChanged
from shoal.runtime import Program
from shoal.runtime.across import Across
from shoal.slots import Layout, leaves, map_tree

__all__ = ["Actor", "Evaluator", "Learner", "agree", "bundles", "group_on", "learner_group"]


def learner_group(program: Program, parts: Parts) -> Any:
    """The port through which several learners share gradients, and their whole state when one has died; None for one."""
    if parts.learners == 1:
        return None
    learn = parts.algorithm.learn(parts.seed)
    nbytes = Layout.of(bundle(learn, np.zeros(2, np.int64))).nbytes
    return program.group("gradients", nbytes).port("member")


def group_on(me: Me, parts: Parts, group: Group | None) -> Any:
    """A learner's group, of learners on GPUs where they are."""
    return group if group is None or not parts.hardware.on_gpu else Across(group, parts.hardware.device, me.note)


async def agree(books: Books, group: Group) -> None:
    """Enter a group of learners, with the state of its senior member."""
    mine = books.bundle()
    layout = Layout.of(mine)
    flat = np.zeros(layout.nbytes, np.uint8)
    layout.copy(layout.views(flat), mine)
    await group.sync(flat)
    books.unbundle(layout.views(flat))


def bundles(parts: Parts) -> Callable[[int], str]:
    """A place for every learner and the actors that serve it (a paired stream): data never leave their process."""
    if parts.actors < parts.learners:
        raise ConfigError(f"--architecture.one-place with {parts.learners} learners and {parts.actors} actors: every learner needs "
                          f"an actor in its process; give --actors {parts.learners}")
    return lambda index: "main" if parts.learners == 1 else f"main-{index % parts.learners}"


class Actor:
    """Acts in its environments with the newest weights and sends what happened."""

    def __init__(self, me: Me, parts: Parts, unrolls: Sink, weights: Reader, per_version: int = 0) -> None:
        """`per_version` unrolls are made with each version of the weights, then it waits for the next (0: never waits)."""
        self.me, self.unrolls, self.weights, self.per_version = me, unrolls, weights, per_version
        self.player = Player(me, parts)
        self.play = self.player.collect if getattr(parts.algorithm, "from_replay", False) else self.player.unroll
        self.published = parts.algorithm.published_layout().empty()
        self.sent = 0

    async def step(self) -> None:
        version = self.player.version
        if version == 0 or (self.per_version and self.sent >= self.per_version):
            await self.weights.newer_than(version)
        slot = await self.unrolls.slot()
        self._refresh()  # only now: what is published while it waits for a slot is younger
        self.play(slot.data)
        slot.send()
        self.sent += 1

    def _refresh(self) -> None:
        """Newer weights, if there are any, at the start of an unroll (IMPALA, section 3)."""
        if self.weights.version == self.player.version:
            return
        with self.me.stats.phase("pull"):
            version, self.sent = self.weights.pull(self.published), 0
            self.player.load(self.published, version, self.me.index, self.me.replicas)
        self.me.stats.observe("publish_to_use_seconds", self.weights.age_seconds)

    def close(self) -> None:
        self.player.close()


class Learner:
    """Takes batches, makes updates, publishes weights. With others in a group it makes the update of the joined batch."""

    shares_state = True  # a restarted learner may begin from any learner's checkpoint

    def __init__(self, me: Me, parts: Parts, unrolls: Source, weights: Publisher, group: Group | None = None,
                 batch_slots: int | None = None, reuse: dict[str, Any] | None = None, max_staleness: int | None = None,
                 model: Shared | None = None, handoff: Handoff | None = None) -> None:
        """`batch_slots` slots make a batch; None takes one from every living producer. `reuse` puts a buffer in between.

        Steps more than `max_staleness` versions old are masked. On a shared `model` learners work without knowing of each other.
        Through a `handoff` an inference server of this process gets the weights on the device.
        """
        parts = parts.on(me.index)
        parts.hardware.enter()
        self.me, self.weights, self.batch_slots, self.handoff = me, weights, batch_slots, handoff
        self.group: Any = group_on(me, parts, group)
        self.reuse = Reuse(me, unrolls, parts.algorithm.record.layout, **reuse) if reuse else None
        self.unrolls = self.reuse or unrolls
        limits = [n for n in (max_staleness, getattr(parts.algorithm, "max_lag", None)) if n is not None]
        self.max_lag = min(limits) if limits else None
        self.model = SharedModel(me, parts, model) if model is not None else None
        self.books = self.model or Books(me, parts)
        self.learn = self.books.learn
        # On a GPU the next batch is gathered while the last update still runs, and only then is that one published.
        self.gpu = parts.hardware.on_gpu and self.reuse is None
        self.running: Any = None
        if self.gpu and parts.hardware.gpu.pinned:
            unrolls.direct = Direct(parts.algorithm.record.layout, parts.hardware.device)  # type: ignore[attr-defined]
        self.metrics: Any = None
        self.rng = me.rng("minibatches")
        self.settled = self.greeted = False
        self.taken = 0  # the version of the last batch

    @property
    def leader(self) -> bool:
        """Whose weights are published and kept."""
        if self.model is not None:
            return self.me.index == 0
        return self.group is None or self.group.leader

    @property
    def version(self) -> int:
        return self.weights.version + (self.running is not None) if self.model is None else self.model.version

    @property
    def counts(self) -> np.ndarray:
        """env_steps learned from and learner_steps, by all learners together."""
        return self.books.totals

    async def step(self) -> None:
        self.settled = True  # nothing is changed before a batch is here
        if not self.greeted:
            await self._greet()
        with self.me.stats.phase("gather"):  # without the time it waits
            batch = await (self.unrolls.take(self.batch_slots) if self.batch_slots else self.unrolls.take_each(self._outlived))
        self.settled, self.taken = False, int(batch["weights_version"].max())
        try:
            updated = await self._update(batch)
        except GroupChanged:
            self.me.stats.add("group_discarded")
            self.greeted, self.running, self.books.unheard = False, None, []
            return
        if updated and self.gpu:
            self._follow()
        elif updated:
            self._publish()

    def _outlived(self, unroll: Tree) -> bool:
        """In step there is one unroll of each worker for a version; a worker that died may have sent it already."""
        old = bool((unroll["weights_version"] <= self.taken).all())
        if old:
            self.me.stats.add("samples_masked", int(np.count_nonzero(unroll["valid"])))
        return old

    def _follow(self) -> None:
        """Leave this update to the GPU if there is more to do, and publish the one before it."""
        look = self.books.send(self.metrics)
        snapshot = self.learn.snapshot(self.books.progress)  # type: ignore[attr-defined]  # last: it says when all have come
        before, self.running = self.running, (snapshot, look)
        if before is not None:
            self._deliver(*before)
        if not self.unrolls.waiting(self.batch_slots or 0):  # type: ignore[attr-defined]
            self._deliver(*self.running)
            self.running = None

    def _deliver(self, snapshot: Any, look: Callable[[], None]) -> None:
        """Wait for an update and publish it."""
        with self.me.stats.phase("learn"):
            published = snapshot()
        look()
        self._publish(published, snapshot.parcel)

    async def _greet(self) -> None:
        """Agree with the others on one state, then publish it."""
        if self.group is not None:
            await agree(self.books, self.group)
        if self.model is not None and self.leader:
            self.model.fill()
        self.greeted = True
        self._publish()

    async def _update(self, batch: Tree) -> bool:
        """Learn from a batch; false where nothing in it was young enough."""
        stats, learn = self.me.stats, self.learn
        fresh, decisions = self._measure(batch)
        with stats.phase("prepare"):
            sums, moments = learn.sums(batch), learn.moments(batch)
            if self.group is not None:
                joined = await self.group.sum(np.concatenate([[fresh, decisions], sums, moments]))
                (fresh, decisions), sums, moments = joined[:2], joined[2 : 2 + len(sums)], joined[2 + len(sums) :]
        steps = 0
        if decisions:
            for minibatch in learn.minibatches(batch, sums, self.books.progress, self.rng):
                for phase in learn.phases:
                    with stats.phase("learn"):
                        gradient, metrics = learn.gradients(minibatch, phase)
                        if self.group is not None:
                            gradient = await self.group.mean(gradient)
                        self.books.apply(gradient, phase)
                    self.me.beat()  # a long update is not one that hangs
                    steps += 1
            self.metrics = metrics
            if not self.gpu:
                if self.books.unheard:
                    self.books.hear(torch.stack(self.books.unheard).tolist())
                    self.books.unheard = []
                self.books.show(metrics)
        learn.absorb(moments)
        self.books.count(int(fresh), steps)
        if self.leader or self.model is not None:
            stats.add("learner_steps", steps)
        return bool(decisions)

    def _measure(self, batch: Tree) -> tuple[int, int]:
        """Mask what is too old; returns how many decisions are new in this batch, and how many there are to learn from."""
        stats, valid = self.me.stats, batch["valid"]
        fresh = int(np.count_nonzero(valid)) if self.reuse is None else self.reuse.fresh
        lag = self.version - batch["weights_version"]
        if self.max_lag is not None and lag.max() > self.max_lag:
            old = lag > self.max_lag
            stats.add("samples_masked", int(np.count_nonzero(old & valid)))
            valid &= ~old
        decisions = int(np.count_nonzero(valid))
        stats.add("samples_consumed", decisions)
        stats.observe("policy_lag", lag if decisions == lag.size else lag[valid])
        stats.observe("data_age_seconds", time.time() - batch["time"])
        return fresh, decisions

    def _publish(self, published: Tree | None = None, parcel: Parcel | None = None) -> None:
        if not self.leader:
            return
        with self.me.stats.phase("publish"):
            if self.handoff is not None:
                parcel = parcel or self.learn.parcel(self.books.progress)  # type: ignore[attr-defined]
                self.handoff.put(self.weights.version + 1, parcel)
            version = self.weights.publish(published or self.learn.published(self.books.progress))
        self.me.stats.set("weights_version", version)

    # ------------------------------------------------------------------ what a checkpoint holds
    def state(self) -> dict[str, np.ndarray] | None:
        if not self.leader:
            return None
        words = np.frombuffer(json.dumps(self.rng.bit_generator.state).encode(), np.uint8)
        return {**self.books.bundle(), "rng": words}

    def load(self, state: dict[str, np.ndarray]) -> None:
        if self.model is not None:
            self.model.fill(state)  # what is there already is newer than any checkpoint
        else:
            self.books.unbundle(state)
        self.rng.bit_generator.state = json.loads(bytes(state["rng"]))


class Evaluator:
    """Plays fresh episodes with one published version; ends the run when the return is reached twice."""

    def __init__(self, me: Me, parts: Parts, weights: Reader) -> None:
        self.me, self.weights, self.plan = me, weights, parts.eval
        self.policy, self.record = parts.algorithm.policy(), parts.algorithm.record
        self.published = parts.algorithm.published_layout().empty()
        self.best = map_tree(np.copy, self.published)
        self.best_return = np.full(1, -np.inf)
        self.seeds = me.rng("evaluation")
        self.rng = torch.Generator().manual_seed(int(self.seeds.integers(2**31)))
        self.explore = None if self.plan.greedy else parts.algorithm.explore
        self.env = parts.env.make(min(self.plan.episodes, 100))
        self.version, self.due = 0, 0
        self.done = self.settled = False

    async def step(self) -> None:
        if self.done:  # what was confirmed stays the result
            await any_of(timeout=1.0)
            return
        self.settled = True  # nothing is changed before there is something new
        await self.weights.newer_than(self.version)
        self.settled = False
        self.version = self.weights.pull(self.published)
        progress = Progress(*(int(n) for n in self.published["progress"][:2]), float(self.published["progress"][2]))
        period = self.plan.every_learner_steps
        done = progress.env_steps if period is None else progress.learner_steps
        if done < self.due:
            return
        self.due = done + (period or self.plan.every_env_steps)
        self.policy.load(self.published)
        result, goal = self._evaluate(progress), self.plan.until_return
        if goal is not None and result >= goal:
            confirmed = self._evaluate(progress)
            if confirmed >= goal:
                self._keep(confirmed)
                self.done = True
                self.me.finish("return")
                return
            result = min(result, confirmed)
        self._keep(result)

    def _evaluate(self, progress: Progress) -> float:
        """The mean return of fresh episodes."""
        stats, env = self.me.stats, self.env
        explore = None if self.explore is None else self.explore(0, 1, env.num_seats, progress)

        def alive(decisions: int) -> None:
            stats.add("eval_env_steps", decisions)
            self.me.beat()

        with stats.phase("evaluate"):
            returns, _ = play_episodes(self.policy, self.record, env, self.plan.episodes, int(self.seeds.integers(2**31)), self.rng,
                                       explore, alive)
        for name, value in (("eval_return", returns.mean()), ("eval_std", returns.std()), ("eval_episodes", len(returns)),
                            ("eval_version", self.version)):
            stats.set(name, float(value))
        stats.add("evaluations")
        return float(returns.mean())

    def _keep(self, result: float) -> None:
        """Remember the best version: what `shoal play` and `run.policy` use."""
        if result >= self.best_return[0]:
            self.best_return[0] = result
            for (_, target), (_, source) in zip(leaves(self.best), leaves(self.published), strict=True):
                target[...] = source

    def state(self) -> dict[str, np.ndarray]:
        return {"best_return": self.best_return, **{f"best/{'/'.join(path)}": leaf for path, leaf in leaves(self.best)}}

    def load(self, state: dict[str, np.ndarray]) -> None:
        self.best_return[:] = state["best_return"]
        for path, leaf in leaves(self.best):
            leaf[...] = state[f"best/{'/'.join(path)}"]

    def close(self) -> None:
        self.env.close()
