"""Unrolls whose columns are filled one by one: for seats that take turns, come and go, or play for different policies.

    recorder.begin(slot.data)                                    # columns that were finished earlier go in at once
    while not recorder.full:
        recorder.act(rows, view, state, action, extras, version) # what these seats saw and did
        step = env.step(actions)
        recorder.settle(step, actions)                           # what came of decisions that are closed now
    slot.send()

A column holds T decisions that follow each other: the rows of one seat by its own decisions (shoal.envs.multi_agent). The rows of
other seats neither break its traces nor stand in it, so GAE, V-trace and n-step returns need no other rule for games with turns. A
seat that has filled its column begins another. Where all seats act at every step, columns are finished together and a slot is, bit
for bit, the one that SlotRecorder writes.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shoal.acting import StepView
from shoal.algorithms.records.step_view import executed, rows_of_view
from shoal.algorithms.records.unroll import Unroll, too_many_finals, write_unroll_moments
from shoal.core import Tree
from shoal.slots import assign, map_tree

if TYPE_CHECKING:
    from shoal.envs import Step

__all__ = ["ColumnRecorder"]

SETTLED = ("reward", "discount", "last", "truncated", "valid")
STEPS = (*SETTLED, "first", "action", "extras", "weights_version", "observation", "action_mask", "prev_action", "prev_reward")


class Final(NamedTuple):
    """The true last observation of an episode that was truncated at step t of a column."""

    t: int
    observation: Tree
    action: Any


class Columns(NamedTuple):
    """Finished columns, side by side."""

    state: Tree  # [K, ...]
    steps: dict[str, Any]  # [T, K, ...] or [T + 1, K, ...]
    time: np.ndarray  # [T, K]
    returns: np.ndarray  # [T, K]
    finals: list[list[Final]]

    def part(self, which: slice) -> Columns:
        return Columns(map_tree(lambda x: x[which], self.state), map_tree(lambda x: x[:, which], self.steps), self.time[:, which],
                       self.returns[:, which], self.finals[which])


class ColumnRecorder:
    """A learning.SeatRecorder: the column under way of each seat, and the slot that finished ones go to."""

    def __init__(self, record: Unroll, seats: int) -> None:
        self.record, self._viewer = record, record.viewer(seats)
        memory = replace(record, seats=seats).layout.empty()
        self._state, self._steps = memory["state"], {name: memory[name] for name in STEPS if name in memory}
        self._seats, self._at = np.arange(seats), np.zeros(seats, np.int64)  # number of the decision under way in its column
        self._time, self._returns = np.zeros((record.length, seats)), np.zeros((record.length, seats))
        self._running_return = np.zeros(seats)
        self._finals: list[list[Final]] = [[] for _ in range(seats)]
        self._waiting: list[Columns] = []  # finished, and no room for them in the last slot
        self._open, self._dropped = np.zeros(seats, bool), np.zeros(seats, bool)  # decided and not settled; not to be settled
        self._data: Any = None
        self._filled = self._final_rows = 0  # of the slot
        self._slot_returns = np.zeros((record.length, record.seats))
        self._shift: np.ndarray | None = None

    @property
    def full(self) -> bool:
        """Whether all columns of the slot are there."""
        return self._filled == self.record.seats

    def view(self, step: Step) -> StepView:
        """What the policy sees of this step. The same object every time."""
        return self._viewer.of(step)

    def begin(self, data: Tree) -> None:
        """Fill this slot from now on."""
        self._data, self._filled, self._final_rows = data, 0, 0
        data["final_index"].fill(-1)
        data["time"].fill(np.inf)
        waiting, self._waiting = self._waiting, []
        for columns in waiting:
            self._deliver(columns)

    def forget(self) -> None:
        """Drop all columns under way, decisions that are not settled included: they were made with older weights."""
        self._at[:] = 0
        self._dropped |= self._open
        self._finals = [[] for _ in self._seats]
        self._waiting.clear()

    def act(self, rows: np.ndarray, view: StepView, state: Tree, action: Tree, extras: Tree, version: int) -> None:
        """Seats `rows` [K] saw `view` with `state` and chose `action`: the rows [K, ...] of all three are theirs."""
        steps, at = self._steps, self._at[rows]
        self._see(at, rows, view)
        steps["action"][at, rows] = action
        for name, column in steps["extras"].items():
            column[at, rows] = extras[name]
        steps["weights_version"][at, rows] = version
        self._open[rows] = True
        begins = np.flatnonzero(at == 0)
        for name, column in self._state.items():
            column[rows[begins]] = np.asarray(state[name])[begins]

    def settle(self, step: Step, action: Tree) -> None:
        """`step` closes the decisions of its valid rows; `action` [B, ...] is the last one of every seat. Rows of seats that others
        decide for are left alone."""
        mine = step.valid & self._open
        closed = self._seats if mine.all() else np.flatnonzero(mine)
        rows = closed[~self._dropped[closed]] if self._dropped.any() else closed
        self._open[closed] = self._dropped[closed] = False
        record, steps, at = self.record, self._steps, self._at[rows]
        for name in SETTLED:
            steps[name][at, rows] = getattr(step, name)[rows]
        self._time[at, rows] = time.time()
        if record.return_moments:
            self._running_return[closed] = record.gamma * self._running_return[closed] + step.reward[closed]
            self._returns[at, rows] = self._running_return[rows]
            self._running_return[closed[step.last[closed]]] = 0
        for i, row in enumerate(step.final_rows):
            if row in rows:
                seen = map_tree(lambda x, i=i: np.array(x[i]), step.final_observation)
                done = np.array(executed(action, step)[row]) if record.previous else None
                self._finals[row].append(Final(int(self._at[row]), seen, done))
        if record.previous:
            self._viewer.of(step, action)
        self._at[rows] += 1
        finished = rows[self._at[rows] == record.length]
        if len(finished):
            self._finish(finished, step)

    def _see(self, at: np.ndarray, rows: np.ndarray, view: StepView) -> None:
        steps = self._steps
        assign(steps["observation"], (at, rows), view.observation)
        steps["first"][at, rows] = view.first
        if self.record.mask_size:
            steps["action_mask"][at, rows] = view.action_mask
        if self.record.previous:
            steps["prev_action"][at, rows] = view.prev_action
            steps["prev_reward"][at, rows] = view.prev_reward

    def _finish(self, rows: np.ndarray, step: Step) -> None:
        """The columns of these seats are complete but for the observation that follows. They begin new ones.

        After the end of an episode nothing depends on that observation, and a seat may not have seen the next game yet.
        """
        following = rows_of_view(self._viewer.of(step), rows)
        following.first = following.first | step.last[rows]
        self._see(self._at[rows], rows, following)
        finals = [self._finals[row] for row in rows]
        for row in rows:
            self._finals[row] = []
        self._at[rows] = 0
        self._deliver(Columns(map_tree(lambda x: x[rows], self._state), map_tree(lambda x: x[:, rows], self._steps),
                              self._time[:, rows], self._returns[:, rows], finals))

    def _deliver(self, columns: Columns) -> None:
        """Move columns into the slot; those for which there is no room wait for the next."""
        count = min(self.record.seats - self._filled, len(columns.finals))
        if count < len(columns.finals):
            self._waiting.append(columns.part(slice(count, None)))
            columns = columns.part(slice(count))
        if not count:
            return
        data, there = self._data, slice(self._filled, self._filled + count)
        assign(data["state"], there, columns.state)
        assign({name: data[name] for name in columns.steps}, (slice(None), there), columns.steps)
        np.minimum(data["time"], columns.time.min(1, keepdims=True), out=data["time"])  # the oldest
        self._slot_returns[:, there] = columns.returns
        for column, finals in enumerate(columns.finals):
            for final in finals:
                self._keep_final(final, self._filled + column)
        self._filled += count
        if self.full:
            self._shift = write_unroll_moments(self.record, data, self._shift, self._slot_returns)

    def _keep_final(self, final: Final, column: int) -> None:
        data, index = self._data, self._final_rows
        if index == self.record.final_capacity:
            raise too_many_finals(self.record, index + 1)
        data["final_index"][final.t, column] = index
        assign(data["final_observation"], index, final.observation)
        if self.record.previous:
            data["final_action"][index] = final.action
        self._final_rows += 1
