"""Unrolls: what actors send to learners on a stream, T steps of B seats, written in place into a slot.

    recorder.begin(slot.data, step, state, version)          # x_0, and the recurrent state it is seen with
    for t in range(T):
        action, state, extras = policy.act(recorder.view(step), state, explore, rng)
        step = env.step(action)
        recorder.write(t, action, extras, step, version)     # a_t, r_t, ..., x_{t+1}
    slot.send()

Index t holds what was seen (x_t), what was done (a_t) and what followed (r_t, discount_t); x_T is x_0 of the next
unroll. Environments reset by themselves, so the observation after a truncation belongs to the next episode: the true
last one goes to `final_observation`, and `final_index[t, b]` says to which row (-1: not truncated).

`action` is the one that the policy chose: its log-probability is that of this action. What the environment executed, where it
reports another one, is what the net sees next as its previous action: `prev_action`, and `final_action` before a true last
observation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np

from shoal.acting import StepView, UnrollRecord
from shoal.algorithms.records.moments import moment_fields, write_moments
from shoal.algorithms.records.spaces import Leaf, action_leaf, float_paths, leaf_tree, observation_fields
from shoal.algorithms.records.step_view import StepViewer, executed
from shoal.core import Tree
from shoal.errors import ConfigError
from shoal.slots import Field, Layout, leaf_at, leaves

if TYPE_CHECKING:
    from shoal.algorithms.records.seat_columns import ColumnRecorder
    from shoal.envs import Step

__all__ = ["SlotRecorder", "Unroll", "too_many_finals", "write_unroll_moments"]

SMALL_ROW_BYTES = 1024  # final observations up to this size are kept for every step, whatever the environment does


@dataclass(frozen=True)
class Unroll(UnrollRecord):
    """T steps of B seats, the layout of one slot."""

    length: int
    seats: int
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    mask_size: int = 0
    """Length of a row of the action mask; 0 where there is none."""
    state: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shape of one seat's recurrent state, by name."""
    previous: bool = False
    """Whether the net sees the previous action and reward."""
    max_episode_steps: int | None = None
    final_rows: int = 0
    """Final observations of truncated episodes that a slot holds; 0 works it out."""
    extras: Mapping[str, Leaf] = field(default_factory=lambda: {"log_prob": ((), "float32")})
    """What is kept of the policy's extras, by name: shape and dtype of one seat's."""
    observation_moments: int = 0
    """How many numbers of an observation are normalised; 0 for none."""
    return_moments: bool = False
    """Whether to send moments of the discounted return."""
    gamma: float = 0.99
    """Discount of the returns whose moments are taken."""

    def recorder(self, seats: int | None = None) -> SlotRecorder:
        if seats not in (None, self.seats):
            raise ConfigError(f"this record was laid out for {self.seats} seats per slot, not {seats}; create "
                              "the algorithm for that many")
        return SlotRecorder(self)

    def columns(self, seats: int) -> ColumnRecorder:
        """A recorder for this many seats that are not all asked at every step: it fills the slot's columns one by one."""
        from shoal.algorithms.records.seat_columns import ColumnRecorder

        return ColumnRecorder(self, seats)

    def viewer(self, seats: int) -> StepViewer:
        """What a policy sees of this many seats (an evaluator has more than an actor)."""
        shape, dtype = action_leaf(self.action_space)
        return StepViewer(np.zeros((seats, *shape), dtype) if self.previous else None)

    @cached_property
    def layout(self) -> Layout:
        T, B = self.length, self.seats
        action, dtype = action_leaf(self.action_space)
        fields: dict[str, Any] = {
            "observation": observation_fields(self.observation_space, T + 1, B, join=1),
            "first": Field((T + 1, B), "bool", 1),
            "action": Field((T, B, *action), dtype, 1),
            "reward": Field((T, B), "float32", 1),
            "discount": Field((T, B), "float32", 1),
            "last": Field((T, B), "bool", 1),
            "truncated": Field((T, B), "bool", 1),
            "valid": Field((T, B), "bool", 1),
            "extras": {name: Field((T, B, *shape), kind, 1) for name, (shape, kind) in self.extras.items()},
            "weights_version": Field((T, B), "int32", 1),
            "time": Field((T, 1), "float64", 1),
            "final_index": Field((T, B), "int32", 1),
            "final_observation": observation_fields(self.observation_space, self.final_capacity),
            "state": {name: Field((B, *shape), "float32", 0) for name, shape in self.state.items()},
        }
        if self.mask_size:
            fields["action_mask"] = Field((T + 1, B, self.mask_size), "bool", 1)
        if self.previous:
            fields["prev_action"] = Field((T + 1, B, *action), dtype, 1)
            fields["prev_reward"] = Field((T + 1, B), "float32", 1)
            fields["final_action"] = Field((self.final_capacity, *action), dtype, 0)
        if self.observation_moments:
            fields["observation_moments"] = moment_fields(self.observation_moments)
        if self.return_moments:
            fields["return_moments"] = moment_fields(1)
        return Layout(fields)

    @cached_property
    def final_capacity(self) -> int:
        """K, the rows of final_observation."""
        if self.final_rows:
            return self.final_rows
        if self.max_episode_steps:
            return self.seats * math.ceil(self.length / self.max_episode_steps)
        row = sum(
            np.dtype(dtype).itemsize * math.prod(shape)
            for _, (shape, dtype) in leaves(leaf_tree(self.observation_space))
        )
        return self.seats * (self.length if row <= SMALL_ROW_BYTES else math.ceil(self.length / 8))


class SlotRecorder:
    """A learning.UnrollRecorder. The hot loop of every actor: row assignments and nothing else."""

    def __init__(self, record: Unroll) -> None:
        self.record = record
        self._paths = [path for path, _ in leaves(leaf_tree(record.observation_space))]
        self._state = tuple(record.state)
        self._viewer = record.viewer(record.seats)
        self._view = self._viewer.view
        self._observation_shift: np.ndarray | None = None
        self._running_return = np.zeros(record.seats)
        self._finals = 0
        self._data: Any = None

    def view(self, step: Step) -> StepView:
        """What the policy sees of this step. The same object every time."""
        return self._viewer.of(step)

    def begin(self, data: Tree, step: Step, state: Tree, version: int) -> None:
        """Start an unroll in a slot: the observation, and the recurrent state before it is seen."""
        del version  # per step, see write
        self._data, self._finals = data, 0
        self._observation = [leaf_at(data["observation"], path) for path in self._paths]
        data["final_index"].fill(-1)
        self._see(0, step)
        for name in self._state:
            data["state"][name][...] = state[name]

    def write(self, t: int, action: Tree, extras: Tree, step: Step, version: int) -> None:
        """Store that `action` (and the policy's `extras`) at index t led to `step`."""
        data = self._data
        data["action"][t] = action
        data["reward"][t] = step.reward
        data["discount"][t] = step.discount
        data["last"][t] = step.last
        data["truncated"][t] = step.truncated
        data["valid"][t] = step.valid
        for name, rows in data["extras"].items():
            rows[t] = extras[name]
        data["weights_version"][t] = version
        data["time"][t] = time.time()
        if len(step.final_rows):
            self._keep_final(t, action, step)
        if self.record.previous:
            self._viewer.of(step, action)
        self._see(t + 1, step)
        if t == self.record.length - 1:
            self._finish()

    def _see(self, t: int, step: Step) -> None:
        data = self._data
        for array, path in zip(self._observation, self._paths, strict=True):
            array[t] = leaf_at(step.observation, path)
        data["first"][t] = step.first
        if self.record.mask_size:
            data["action_mask"][t] = step.action_mask
        if self.record.previous:
            data["prev_action"][t] = self._view.prev_action
            data["prev_reward"][t] = self._view.prev_reward

    def _keep_final(self, t: int, action: Tree, step: Step) -> None:
        data, start = self._data, self._finals
        end = start + len(step.final_rows)
        if end > self.record.final_capacity:
            raise too_many_finals(self.record, end)
        data["final_index"][t, step.final_rows] = np.arange(start, end)
        for path in self._paths:
            leaf_at(data["final_observation"], path)[start:end] = leaf_at(step.final_observation, path)
        if self.record.previous:
            data["final_action"][start:end] = executed(action, step)[step.final_rows]
        self._finals = end

    def _finish(self) -> None:
        """Moments of the unroll that is complete."""
        data, record = self._data, self.record
        returns = np.empty((record.length, record.seats))
        if record.return_moments:
            for t in range(record.length):
                self._running_return = record.gamma * self._running_return + data["reward"][t]
                returns[t] = self._running_return
                self._running_return[data["last"][t]] = 0
        self._observation_shift = write_unroll_moments(record, data, self._observation_shift, returns)


def write_unroll_moments(record: Unroll, data: Tree, shift: np.ndarray | None, returns: np.ndarray) -> np.ndarray | None:
    """Write the moments of a complete unroll; `returns` [T, B] are discounted sums of past rewards. Sums are relative to `shift`,
    the mean of the first observations that there are: it is returned for the unrolls that follow."""
    if record.observation_moments:
        T = record.length
        paths = float_paths(record.observation_space)
        rows = [leaf_at(data["observation"], path)[:T].reshape(T * record.seats, -1) for path in paths]
        values = np.concatenate(rows, 1, dtype=np.float64)[data["valid"].ravel()]
        if shift is None and len(values):
            shift = values.mean(0)
        write_moments(data["observation_moments"], values, shift)
    if record.return_moments:
        write_moments(data["return_moments"], returns[data["valid"]][:, None], np.zeros(1))
    return shift


def too_many_finals(record: Unroll, count: int) -> ConfigError:
    return ConfigError(
        f"{count} episodes were truncated within one unroll of {record.length} steps x {record.seats} "
        f"seats, but a slot holds {record.final_capacity} final observations; set "
        f"final_rows={record.length * record.seats} (--algorithm.final-rows)"
    )
