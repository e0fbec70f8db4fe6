"""The InferenceServer: acts for all actors in batches, keeps their recurrent states and records what happened (SEED RL).

    steps (call) ──▶ read ──▶ one forward pass for all that are pending ──▶ actions, in the reply
                        └──▶ a writer for each group of environments ──▶ unrolls to a stream, or items to replay tables
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Protocol

import numpy as np
import torch

from shoal.acting import DevicePolicy, ItemRecord, Progress, StepView, UnrollRecord
from shoal.core import Call, Me, Reader, Request, Server, Sink, Slot, Tree
from shoal.device.batched_inference import BatchedInference
from shoal.device.weight_handoff import DeviceWeights, WeightHandoff
from shoal.envs import Step
from shoal.roles.data_path import producer_end
from shoal.roles.env_actor import read_step
from shoal.roles.parts import Parts
from shoal.roles.player import take_items
from shoal.roles.rows import join_rows, join_views, rows_of
from shoal.slots import map_tree
from shoal.telemetry import Stats

__all__ = ["InferenceServer"]


class EnvGroup:
    """What the server keeps of one group of environments: its recurrent state, the last decision, and who writes it down."""

    def __init__(self, client: int, run_id: int, hidden: Tree, writer: GroupWriter) -> None:
        self.client, self.run_id, self.writer = client, run_id, writer
        self.hidden: Tree = hidden
        self.before: Tree = hidden  # the state before the last decision
        self.action: Tree = None
        self.extras: Tree = None
        self.version = 0


class GroupWriter(Protocol):
    """Writes down the steps of one group of environments and sends what is finished."""

    def view(self, now: Step) -> StepView: ...
    async def write(self, group: EnvGroup, now: Step, version: int) -> None: ...
    def restarted(self) -> GroupWriter: ...  # the group's actor was restarted: discard what is half-written


class UnrollWriter:
    """Writes unrolls into slots of a stream."""

    def __init__(self, record: UnrollRecord, sink: Sink, stats: Stats, slot: Slot | None = None) -> None:
        self.record, self.sink, self.stats, self.slot = record, sink, stats, slot
        self.recorder = record.recorder()
        self.t = -1  # -1: nothing was decided yet

    def view(self, now: Step) -> StepView:
        return self.recorder.view(now)

    async def write(self, group: EnvGroup, now: Step, version: int) -> None:
        """Write what the last decision led to; begin an unroll where one is due, with the state before this step is seen."""
        length = self.record.length
        with self.stats.phase("write"):
            if self.t >= 0:
                self.recorder.write(self.t, group.action, group.extras, now, group.version)
                self.t += 1
        if self.t == length and self.slot is not None:
            self.slot.send()
            self.slot = None
        if self.t in (-1, length):
            if self.slot is None:
                self.slot = await self.sink.slot()
            with self.stats.phase("write"):
                self.recorder.begin(self.slot.data, now, group.hidden, version)
            self.t = 0

    def restarted(self) -> UnrollWriter:
        return UnrollWriter(self.record, self.sink, self.stats, self.slot)


class ItemWriter:
    """Sends items to replay tables whenever there are enough of them."""

    def __init__(self, record: ItemRecord, sink: Sink, stats: Stats, insert_batch: int) -> None:
        self.record, self.sink, self.stats, self.insert_batch = record, sink, stats, insert_batch
        self.recorder = record.recorder()
        self.begun = False
        self.decisions = 0  # since items were sent

    def view(self, now: Step) -> StepView:
        return self.recorder.view(now)

    async def write(self, group: EnvGroup, now: Step, version: int) -> None:
        """Write what the last decision led to, and send items when an insert is full."""
        recorder = self.recorder
        with self.stats.phase("write"):
            if not self.begun:
                recorder.begin(now)
                self.begun = True
            else:
                recorder.write(group.action, group.before, group.extras, now, group.version)
                self.decisions += int(np.count_nonzero(now.valid))
        while recorder.ready >= self.insert_batch:
            slot = await self.sink.slot()
            with self.stats.phase("write"):
                take_items(recorder, slot.data, self.decisions)
                self.decisions = 0
            slot.send()

    def restarted(self) -> ItemWriter:
        return ItemWriter(self.record, self.sink, self.stats, self.insert_batch)


class InferenceServer:
    """Acts for all actors in batches, keeps their recurrent states and records what happened."""

    def __init__(self, me: Me, parts: Parts, steps: Server, experience: Sink | Call, weights: Reader, most_rows: int,
                 handoff: WeightHandoff | None = None) -> None:
        """Through a `handoff` a learner of this process gives it the weights on the device."""
        parts = parts.on(me.index)
        self.me, self.parts, self.steps, self.weights, self.handoff = me, parts, steps, weights, handoff
        self.sink = producer_end(me, parts, experience)
        self.algorithm, self.record = parts.algorithm, parts.record
        self.policy = self.algorithm.policy()
        self.published = self.algorithm.published_layout().empty()
        self.rng = torch.Generator(parts.hardware.device).manual_seed(int(me.rng("actions").integers(2**31)))
        self.device_weights: DeviceWeights | None = None
        self.inference: BatchedInference | None = None  # answers many rows on a GPU
        if parts.hardware.on_gpu and isinstance(self.policy, DevicePolicy):
            self.policy.to(parts.hardware)
            self.inference = BatchedInference(self.policy, parts.hardware, self.rng)
        # A GPU computes while steps are written down, unless what the policy sees depends on that.
        self.ahead = self.inference is not None and not self.record.previous
        self.actors, self.most = parts.actors, max(1, most_rows // self.record.seats)
        self.groups: dict[tuple[int, int], EnvGroup] = {}
        self.version = 0
        self.settled = True

    async def step(self) -> None:
        if self.version == 0:
            await self.weights.newer_than(0)
        requests = await self.steps.take(self.most)
        self._refresh()
        steps = [read_step(request.data) for request in requests]
        groups = [self._group(request) for request in requests]
        if self.ahead:
            with self.me.stats.phase("inference"):
                answer = self._ask(groups, steps)
        for group, now in zip(groups, steps, strict=True):
            await group.writer.write(group, now, self.version)
        with self.me.stats.phase("inference"):
            action, hidden, extras = (answer if self.ahead else self._ask(groups, steps))()
        rows = self.record.seats
        for k, (group, request) in enumerate(zip(groups, requests, strict=True)):
            group.before = group.hidden
            group.hidden, group.action, group.extras = (rows_of(tree, k, rows) for tree in (hidden, action, extras))
            group.version = self.version
            request.reply({"action": group.action})
        self.me.stats.observe("inference_batch", float(rows * len(requests)))

    def _refresh(self) -> None:
        handed = self.handoff.newest if self.handoff is not None else None  # None: an earlier learner has published
        source = handed or self.weights
        if source.version == self.version:
            return
        with self.me.stats.phase("pull"), self.inference.on_stream() if self.inference is not None else nullcontext():
            if handed is not None:
                handed.load(self.policy)
                self.device_weights = handed  # its memory is in use until an answer has come
                self.published["progress"][...], self.version = handed.tree["progress"], handed.version
            else:
                self.version = self.weights.pull(self.published)
                self.policy.load(self.published)
        self.me.stats.observe("publish_to_use_seconds", source.age_seconds)

    def _group(self, request: Request) -> EnvGroup:
        """The group that a request is of; a new run_id means that its actor was restarted."""
        key, run_id = (request.client, int(request.data["group"][0])), int(request.data["run_id"][0])
        group = self.groups.get(key)
        if group is None or group.run_id != run_id:
            hidden = map_tree(lambda x: x.cpu(), self.policy.initial_state(self.record.seats))
            writer = self._writer() if group is None else group.writer.restarted()
            group = self.groups[key] = EnvGroup(request.client, run_id, hidden, writer)
        return group

    def _writer(self) -> GroupWriter:
        if isinstance(self.record, ItemRecord):
            return ItemWriter(self.record, self.sink, self.me.stats, self.parts.replay.insert_batch)
        return UnrollWriter(self.record, self.sink, self.me.stats)

    def _ask(self, groups: list[EnvGroup], steps: list[Step]) -> Callable[[], tuple[Tree, Tree, Tree]]:
        """Start one forward pass for all requests; what it returns waits for the answer."""
        views = [group.writer.view(now) for group, now in zip(groups, steps, strict=True)]
        hidden = [group.hidden for group in groups]
        progress = Progress.of(self.published["progress"])
        explore = np.concatenate([self.algorithm.explore(group.client, self.actors, self.record.seats, progress)
                                  for group in groups])
        if self.inference is not None:
            return self.inference.start(views, hidden, explore)
        return lambda: self.policy.act(join_views(views), join_rows(hidden), explore, self.rng)
