"""The Learner: takes batches, makes updates, publishes weights; on its own, or with others as one.

    batches (stream or replay tables) ──▶ Learner ──▶ weights (broadcast)
                                            ◀──▶ group: several learners make the update of their joined batch

On a GPU the next batch is gathered while the last update still runs; only then is that one reported and published. Where batches of
items wait, some are taken together: their updates are one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple, cast

import numpy as np

from shoal.core import Call, Group, GroupMember, Me, Publisher, Shared, Source, Tree
from shoal.device.heap import keep_freed_memory
from shoal.device.transfer import DeviceEvent
from shoal.device.weight_handoff import DeviceWeights, WeightHandoff
from shoal.errors import GroupChanged
from shoal.learning import ComparingLearn, DeviceLearn, Learn, phases_due
from shoal.roles import random_state
from shoal.roles.batches import Intake
from shoal.roles.data_path import consumer_end
from shoal.roles.learner_group import agree, group_on
from shoal.roles.learner_state import LearnerState, SharedModel, learner_arrays
from shoal.roles.parts import Parts

__all__ = ["Learner"]

READ_UPDATES = 16  # while a GPU is kept busy, its metrics are read once in this many updates


class UnfinishedUpdate(NamedTuple):
    """An update that a GPU may still be busy with."""

    deliver: Callable[[], None]
    """Wait for it, then report it."""
    publishes: bool
    """Whether its weights will be published."""


class Learner:
    """Takes batches, makes updates, publishes weights. With others in a group it makes the update of the joined batch."""

    shares_state = True  # a restarted learner may begin from any learner's checkpoint

    def __init__(self, me: Me, parts: Parts, batches: Source | Call, weights: Publisher, group: GroupMember | None = None,
                 intake: Intake | None = None, model: Shared | None = None, handoff: WeightHandoff | None = None) -> None:
        """`batches` is the end of a stream or of replay tables; `intake` says how to take unrolls from a stream.

        Learners on a shared `model` work without knowing of each other. Through a `handoff` an inference server of this
        process gets the weights on the device.
        """
        parts = parts.on(me.index)
        parts.hardware.enter()
        keep_freed_memory()
        self.me, self.weights, self.handoff = me, weights, handoff
        self.group: Group | None = group_on(me, parts, group)
        self.batches = consumer_end(me, parts, batches, intake or Intake())
        self.model = SharedModel(me, parts, model) if model is not None else None
        self.learner_state: LearnerState[Learn] = self.model or LearnerState(me, parts, parts.learn())
        self.learn = self.learner_state.learn
        self.compares = self.learn if isinstance(self.learn, ComparingLearn) and self.group is not None else None
        self.device = self.learn if parts.hardware.on_gpu and isinstance(self.learn, DeviceLearn) else None
        self.running: UnfinishedUpdate | None = None
        self.metrics: list[Mapping[str, float]] = []  # of the last minibatch, by phase
        self.rng = me.rng("minibatches")
        self.settled = self.greeted = False
        self.parts, self.resets = parts, 0

    @property
    def leader(self) -> bool:
        """Whether this learner's weights are published and saved."""
        if self.model is not None:
            return self.me.index == 0
        return self.group is None or self.group.leader

    @property
    def launches(self) -> bool:
        """Whether all phases of an update are launched at once: nobody else has a part in it."""
        return self.device is not None and self.group is None and self.model is None

    @property
    def version(self) -> int:
        """The version of the newest weights, including any not yet published."""
        if self.model is not None:
            return self.model.version
        return self.weights.version + (self.running is not None and self.running.publishes)

    @property
    def counts(self) -> np.ndarray:
        """env_steps learned from and learner_steps, by all learners together."""
        return self.learner_state.totals

    async def step(self) -> None:
        self.settled = True  # nothing changes before a batch is here
        if not self.greeted:
            await self._greet()
        if self.leader or self.model is not None:  # the others of a group wait for the leader
            await self.me.permit("learner_steps", 1)
        if self.device is not None and self.batches.lent:
            self.device.release()  # the memory of the last batch is about to be used again
        with self.me.stats.phase("gather"):  # without the time it waits
            batch = await self.batches.take()
            more = await self.batches.more() if self.launches else []
        before = int(self.counts[1])
        try:
            updated = self._launch([batch, *more]) if more else await self._update(batch)
        except GroupChanged:
            self.me.stats.add("group_discarded")
            self.greeted, self.running = False, None
            self.learner_state.forget()
            return
        if updated:
            self._report(before)

    async def _greet(self) -> None:
        """Agree with the others on one state, then publish it."""
        if self.group is not None:
            await agree(self.learner_state, self.group)
        if self.model is not None and self.leader:
            self.model.fill()
        if self.batches.counted is not None:
            self.batches.counted.begin(self.learner_state.windows)
        self.greeted = True
        self._publish()

    async def _update(self, batch: Tree) -> bool:
        """Learn from a batch; False if every step in it was too old."""
        stats, learn = self.me.stats, self.learn
        fresh, decisions = self.batches.measure(batch, self.version)
        with stats.phase("prepare"):
            sums, moments = learn.sums(batch, self.me.index, self.me.replicas), learn.moments(batch)
            windows = self._new_windows()
            if self.group is not None:
                joined = await self.group.sum(np.concatenate([[fresh, decisions], sums, moments, windows.ravel()]))
                fresh, decisions = int(joined[0]), int(joined[1])
                sums, moments, told = np.split(joined[2:], [len(sums), len(sums) + len(moments)])
                windows = told.astype(np.int64).reshape(windows.shape)
        self.settled = False  # until here it waited for the others, who may never get a batch: the budget may be spent
        steps = 0
        if decisions:
            progress = self.learner_state.progress
            for minibatch in learn.minibatches(batch, sums, progress, self.rng):
                due = phases_due(learn, progress)
                if self.launches:
                    self._launch_all((minibatch,), (due,))
                else:
                    self.metrics = [await self._phase(minibatch, phase) for phase in due]
                steps += 1
                if self.learner_state.enough(steps):
                    break
        learn.absorb(moments)
        self.learner_state.count(fresh, steps, windows)
        if self.leader or self.model is not None:
            stats.add("learner_steps", steps)
        return bool(decisions)

    def _new_windows(self) -> np.ndarray:
        """Windows of a recording whose observations are in the batches that were taken last, and are not counted."""
        known = self.learner_state.windows
        return np.zeros_like(known) if self.batches.counted is None else self.batches.counted.news(known)

    def _launch(self, batches: list[Tree]) -> bool:
        """Learn from several batches of items."""
        learn, progress, fresh = self.learn, self.learner_state.progress, 0
        dues, moments = [], []
        minibatches: list[object] = []
        for made, batch in enumerate(batches):
            fresh += self.batches.measure(batch, self.version)[0]
            ahead = replace(progress, learner_steps=progress.learner_steps + made)
            with self.me.stats.phase("prepare"):
                minibatches += learn.minibatches(batch, learn.sums(batch), ahead, self.rng)
                moments.append(learn.moments(batch))
            dues.append(phases_due(learn, ahead))
        self.settled = False
        self._launch_all(tuple(minibatches), tuple(dues))
        for seen in moments:
            learn.absorb(seen)
        self.learner_state.count(fresh, len(batches), self._new_windows())
        self.me.stats.add("learner_steps", len(batches))
        return True

    def _launch_all(self, minibatches: tuple[object, ...], dues: tuple[tuple[str, ...], ...]) -> None:
        with self.me.stats.phase("learn"):
            metrics, finite = cast(DeviceLearn, self.device).update(minibatches, dues)
            self.learner_state.unseen.append(finite)
        self.metrics = [metrics]
        self.me.beat()

    async def _phase(self, minibatch: object, phase: str) -> Mapping[str, float]:
        with self.me.stats.phase("learn"):
            if self.compares is not None:
                minibatch = await self._compared(self.compares, minibatch, phase)
            gradient, metrics = self.learn.gradients(minibatch, phase)
            if self.group is not None:
                gradient = await self.group.mean(gradient)
            self.learner_state.apply(gradient, phase)
        self.me.beat()  # a long update is not one that hangs
        return metrics

    async def _compared(self, learn: ComparingLearn, minibatch: object, phase: str) -> object:
        """With what the others tell of theirs."""
        told = learn.told(minibatch, phase, self.me.index, self.me.replicas)
        if not told.size or self.group is None:
            return minibatch
        return learn.with_told(minibatch, await self.group.sum(told), self.me.index, self.me.replicas)

    # ------------------------------------------------------------------ what follows an update
    def _report(self, before: int) -> None:
        """Tell the metrics, the tables and, where it is due, everyone who reads the weights. There were `before` learner steps."""
        publishes = self._passed(self.batches.publish_updates, before)
        if self.device is not None and self.batches.ahead:
            self._follow(self.device, publishes, before)
            return
        self.learner_state.look()
        self.learner_state.show(self.metrics)
        self.batches.learned(self.learn)
        if publishes:
            self._publish()

    def _passed(self, period: int, before: int) -> bool:
        """Whether a multiple of this number of learner steps was reached since."""
        return bool(self.counts[1] // period > before // period)

    def _follow(self, learn: DeviceLearn, publishes: bool, before: int) -> None:
        """Leave this update to the GPU if the next batch is there, and report the one before it."""
        tell = self.batches.send(self.learn)
        reads = self._passed(READ_UPDATES, before) or not self.batches.waiting()
        look = self.learner_state.send(self.metrics) if reads else None
        snapshot = learn.snapshot(self.learner_state.progress) if publishes and self.leader else None
        made = DeviceEvent(self.learn.state["params"].device)

        def deliver() -> None:
            with self.me.stats.phase("learn"):
                made.wait()
            if look is not None:
                look()
            tell()
            if snapshot is not None:
                self._publish(snapshot(), snapshot.device_weights)

        earlier, self.running = self.running, UnfinishedUpdate(deliver, publishes)
        if earlier is not None:
            earlier.deliver()
        if not self.batches.waiting() or self.learner_state.enough():
            deliver()
            self.running = None

    def _publish(self, published: Tree | None = None, on_device: DeviceWeights | None = None) -> None:
        if not self.leader:
            return
        progress = self.learner_state.progress
        with self.me.stats.phase("publish"):
            if self.handoff is not None:
                learn = cast(DeviceLearn, self.learn)
                self.handoff.put(self.weights.version + 1, on_device or learn.device_weights(progress))
            version = self.weights.publish(self.learn.published(progress) if published is None else published)
        self.me.stats.set("weights_version", version)

    # ------------------------------------------------------------------ beginning anew
    def set(self, *, resets: int) -> None:
        """Begin with the first parameters again, for the `resets`-th time; what it has counted stays. Told again, it changes
        nothing."""
        if resets <= self.resets:
            return
        self.resets = resets
        counts = self.learner_state.counts.sum(0)
        self.learner_state.load(learner_arrays(self.parts.new_learn(), counts))
        if self.greeted:
            self._publish()

    # ------------------------------------------------------------------ what a checkpoint holds
    def state(self) -> dict[str, np.ndarray] | None:
        if not self.leader:
            return None
        reset = {"resets": np.array([self.resets])} if self.resets else {}
        return {**self.learner_state.arrays(), "rng": random_state.pack(self.rng), **reset}

    def load(self, state: dict[str, np.ndarray]) -> None:
        if self.model is not None:
            self.model.fill(state)  # what is there already is newer than any checkpoint
        else:
            self.learner_state.load(state)
        random_state.unpack(self.rng, state["rng"])
        self.resets = int(state["resets"][0]) if "resets" in state else 0
