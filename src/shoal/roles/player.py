"""Environments, a policy and a recorder: what an Actor and a Worker act with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import numpy as np
import torch

from shoal.acting import DevicePolicy, ItemRecord, ItemRecorder, Progress, SeatRecord, SeatRecorder, UnrollRecord, UnrollRecorder
from shoal.core import Me, Tree
from shoal.device.batched_inference import BatchedInference
from shoal.envs import BatchedEnv, Step
from shoal.errors import ConfigError
from shoal.roles.asked_seats import AskedSeats
from shoal.roles.parts import Parts
from shoal.roles.step_report import StepReport

__all__ = ["Player", "note_step", "take_items"]


class Player:
    """Plays unrolls, or items for a replay table, into any memory of their layout.

    Environments and recurrent states continue from one to the next.
    """

    def __init__(self, me: Me, parts: Parts, logs: str | None = None) -> None:
        """`logs` is a folder to write episodes to."""
        parts = parts.on(me.index)
        self.me, self.algorithm = me, parts.algorithm
        seeds = me.rng("actor").integers(2**31, size=2)
        source = parts.env.of(me.index)
        self.env = source.make(parts.envs_per_actor)
        if logs is not None:
            from shoal.roles.recording_env import RecordingEnv  # only now: most runs record nothing

            self.env = cast(BatchedEnv, RecordingEnv(self.env, me, logs, source))
        self._steps = StepReport(me, parts, self.env.env_id)
        self.policy = self.algorithm.policy()
        record, turns = parts.record, self.env.takes_turns
        self.recorder: UnrollRecorder | ItemRecorder | SeatRecorder
        self.play: Callable[[Tree], int]
        """Fill memory of the record's layout; returns how many decisions that took."""
        self.expected: int
        """Decisions that the next call of `play` takes: an upper bound for unrolls, an estimate from the last call for items."""
        if isinstance(record, ItemRecord):
            self.recorder = items = record.recorder(self.env.num_seats)
            self.play, self.expected = (TurnItemPlay if turns else ItemPlay)(self, items).fill, self.env.num_seats
        elif turns:
            self.recorder = columns = seat_record(self.algorithm.name, record).columns(self.env.num_seats)
            self.play, self.expected = ColumnPlay(self, columns).fill, record.length * record.seats
        else:
            self.recorder = unrolls = record.recorder(self.env.num_seats)
            self.play, self.expected = UnrollPlay(self, record, unrolls).fill, record.length * self.env.num_seats
        self.rng = torch.Generator().manual_seed(int(seeds[0]))
        self.act: Any = self.policy.act
        self.aside: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.hidden = self.policy.initial_state(self.env.num_seats)  # on the CPU
        if parts.hardware.on_gpu and parts.hardware.gpu.actors and isinstance(self.policy, DevicePolicy) and not turns:
            self.policy.to(parts.hardware)
            self.rng = torch.Generator(parts.hardware.device).manual_seed(int(seeds[0]))
            inference = BatchedInference(self.policy, parts.hardware, self.rng)
            self.act, self.aside = inference.act_one, inference.on_stream
        self.now = self.env.reset(int(seeds[1]))
        self.explore: Any = None
        self.version = 0
        self.lock_step = False
        """Whether all that is sent must be of the newest version."""

    def load(self, published: Tree, version: int, index: int, count: int) -> None:
        """Act with these weights from now on, exploring like the `index`-th of `count` actors."""
        with self.aside():
            self.policy.load(published)
        self.version = version
        self.explore = self.algorithm.explore(index, count, self.env.num_seats, Progress.of(published["progress"]))

    def report(self, now: Step) -> int:
        """Report one step of all environments; returns how many decisions it was."""
        self._steps.note(now)
        self.me.beat()  # a slow environment is not one that hangs
        return int(np.count_nonzero(now.valid))

    def count(self, decisions: int) -> int:
        self.me.stats.add("env_steps", decisions)
        self.me.stats.add("env_frames", decisions * self.env.frame_skip)
        return decisions

    def close(self) -> None:
        self._steps.close()
        self.env.close()


class UnrollPlay:
    """Plays one unroll after the other."""

    def __init__(self, player: Player, record: UnrollRecord, recorder: UnrollRecorder) -> None:
        self.player, self.length, self.recorder = player, record.length, recorder

    def fill(self, data: Tree) -> int:
        """Fill `data` with one unroll."""
        player, recorder, stats = self.player, self.recorder, self.player.me.stats
        act, env, now, state = player.act, player.env, player.now, player.hidden
        inference, world, write = stats.phase("inference"), stats.phase("env"), stats.phase("write")
        with write:
            recorder.begin(data, now, state, player.version)
        decisions = 0
        for t in range(self.length):
            with inference:
                action, state, extras = act(recorder.view(now), state, player.explore, player.rng)
            with world:
                now = env.step(action)
            with write:
                recorder.write(t, action, extras, now, player.version)
            decisions += player.report(now)
        player.now, player.hidden = now, state
        return player.count(decisions)


class ItemPlay:
    """Plays until as many items are finished as an insert holds."""

    def __init__(self, player: Player, recorder: ItemRecorder) -> None:
        self.player, self.recorder, self.begun = player, recorder, False

    def act(self, now: Step) -> tuple[Tree, Tree, Tree]:
        """-> every seat's decision, the state that it was made with, and what the policy said of it."""
        player = self.player
        before = player.hidden
        action, player.hidden, extras = player.act(self.recorder.view(now), before, player.explore, player.rng)
        return action, before, extras

    def fill(self, data: Tree) -> int:
        """Fill `data` with items and their first priorities."""
        player, recorder, stats = self.player, self.recorder, self.player.me.stats
        env, now = player.env, player.now
        inference, world, write = stats.phase("inference"), stats.phase("env"), stats.phase("write")
        if not self.begun:
            self.begun = True
            recorder.begin(now)
        decisions = 0
        while recorder.ready < len(data["priority"]):
            with inference:
                action, before, extras = self.act(now)
            with world:
                now = env.step(action)
            with write:
                recorder.write(action, before, extras, now, player.version)
            decisions += player.report(now)
        player.now = now
        with write:
            recorder.catch_up()
        with stats.phase("gather"):
            take_items(recorder, data, decisions)
        player.expected = max(decisions, player.env.num_seats)
        return player.count(decisions)


class ColumnPlay:
    """Plays until the columns of an unroll are full, in games in which seats take turns."""

    def __init__(self, player: Player, recorder: SeatRecorder) -> None:
        self.player, self.recorder, self.version = player, recorder, 0
        self.seats = AskedSeats(player.policy.act, player.policy.initial_state(player.env.num_seats))

    def fill(self, data: Tree) -> int:
        """Fill `data` with one unroll. In lock step columns that were begun with older weights are dropped."""
        player, recorder, stats, seats, now = self.player, self.recorder, self.player.me.stats, self.seats, self.player.now
        inference, world, write = stats.phase("inference"), stats.phase("env"), stats.phase("write")
        decisions = 0
        with write:
            if player.lock_step and player.version != self.version:
                recorder.forget()
            self.version = player.version
            recorder.begin(data)
        while not recorder.full:
            with inference:
                action = seats.act(recorder.view(now), asked(now), player.explore, player.rng)
            with write:
                recorder.act(seats.rows, seats.view, seats.of_rows(seats.before), action[seats.rows], seats.of_rows(seats.extras),
                             player.version)
            with world:
                now = player.env.step(action)
            with write:
                recorder.settle(now, action)
            decisions += player.report(now)
        player.now = now
        return player.count(decisions)


class TurnItemPlay(ItemPlay):
    """Plays items, in games in which seats take turns."""

    def __init__(self, player: Player, recorder: ItemRecorder) -> None:
        super().__init__(player, recorder)
        self.seats = AskedSeats(player.policy.act, player.policy.initial_state(player.env.num_seats))

    def act(self, now: Step) -> tuple[Tree, Tree, Tree]:
        action = self.seats.act(self.recorder.view(now), asked(now), self.player.explore, self.player.rng)
        return action, self.seats.before, self.seats.extras


def seat_record(algorithm: str, record: UnrollRecord) -> SeatRecord:
    if not isinstance(record, SeatRecord):
        raise ConfigError(f"--algorithm {algorithm} cannot learn from agents that take turns: its {type(record).__name__} has no "
                          "columns() (shoal.acting.SeatRecord)")
    return record


def asked(now: Step) -> np.ndarray:
    """The seats that are to act now, of environments whose seats take turns."""
    assert now.acts is not None
    return now.acts


def take_items(recorder: ItemRecorder, data: Tree, decisions: int) -> None:
    """Fill an insert with the oldest items of a recorder, their first priorities, and what else goes with them."""
    recorder.take(data["items"], data["priority"])
    data["decisions"][0] = decisions
    if "observation_moments" in data:
        recorder.take_moments(data["observation_moments"])


def note_step(report: StepReport, now: Step, frame_skip: int) -> None:
    """Report one step of environments that are acted in from elsewhere."""
    decisions, stats = int(np.count_nonzero(now.valid)), report.me.stats
    stats.add("env_steps", decisions)
    stats.add("env_frames", decisions * frame_skip)
    report.note(now)
