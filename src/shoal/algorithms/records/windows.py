"""Windows: what recurrent methods (r2d2) send to a replay table, overlapping pieces of episodes with the state before them.

    episode   0 ........ stride ........ 2 stride ....
    loss      [0, m)
                     [stride, stride + m)
                                  [2 stride, ...)           until one reaches the end of the episode; a short one is padded
    burn-in   none   up to l steps before               the first steps of an episode are in a loss as well

A window has l + m steps and one observation more, to bootstrap from. Loss steps always are rows l .. l + m - 1: where an
episode has fewer than l steps before them, the front is padded, and `first` puts the state to zero where it begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from shoal.algorithms.records.first_priority import Estimates
from shoal.algorithms.records.items import EpisodeItems, EpisodeMemory, Rows
from shoal.core import Tree
from shoal.ops import priorities
from shoal.slots import Field, Layout, map_tree

__all__ = ["Windows"]


@dataclass(frozen=True, kw_only=True)
class Windows(EpisodeItems):
    """A learning.ItemRecord of windows."""

    observed = ("observation",)

    burn_in: int
    """l."""
    length: int
    """m, loss steps of a window."""
    stride: int
    """Steps between the beginnings of two windows."""
    eta: float
    """Weight of the largest error in a priority; the rest is the mean's."""
    state: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shape of one seat's recurrent state, by name."""
    previous: bool = False
    """Whether the net sees the previous action and reward."""
    keep_states: bool = False
    """Also keep the recurrent state of every step, to measure how stale stored states are."""

    @property
    def decisions(self) -> int:
        """Decisions that one item stands for."""
        return self.length

    @property
    def apart(self) -> int:
        return self.stride

    @cached_property
    def layout(self) -> Layout:
        """Of one item."""
        L = self.burn_in + self.length
        fields: dict[str, Any] = {
            "observation": self.observation_rows(1, L + 1),
            "first": Field((1, L + 1), "bool"),
            "action": self.action_rows(1, L),
            "reward": Field((1, L), "float32"),
            "discount": Field((1, L), "float32"),
            "valid": Field((1, L), "bool"),
            "state": {name: Field((1, *shape), "float32") for name, shape in self.state.items()},
            "weights_version": Field((1,), "int32"),
            "time": Field((1,), "float64"),
            **self.extra_rows(1, L + 1),
        }
        if self.mask_size:
            fields["action_mask"] = Field((1, L + 1, self.mask_size), "bool")
        if self.previous:
            fields["prev_action"] = self.action_rows(1, L + 1)
            fields["prev_reward"] = Field((1, L + 1), "float32")
        if self.keep_states:
            fields["states"] = {name: Field((1, L + 1, *shape), "float32") for name, shape in self.state.items()}
        return Layout(fields)

    # -------------------------------------------------------------------------------- as EpisodeItems
    @property
    def reach(self) -> int:
        return self.burn_in + self.length + 1

    def columns(self) -> dict[str, Tree]:
        return {"state": {name: (shape, "float32") for name, shape in self.state.items()}}

    def due(self, count: np.ndarray) -> np.ndarray:
        due: np.ndarray = (count >= self.length) & ((count - self.length) % self.stride == 0)
        return due

    def first_due(self, count: np.ndarray) -> np.ndarray:
        return count - self.length

    def endings(self, count: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The first window that reaches the end; all before it were due."""
        windows_before = np.maximum(count - self.length + self.stride - 1, 0) // self.stride
        yield np.arange(len(count)), windows_before * self.stride

    def cut(self, memory: EpisodeMemory, seats: np.ndarray, begin: np.ndarray, end: np.ndarray) -> Rows:
        L = self.burn_in + self.length
        step = begin[:, None] + np.arange(-self.burn_in, self.length + 1)  # [K, L + 1]
        seen, made = (step >= 0) & (step <= end[:, None]), (step >= 0) & (step < end[:, None])
        who = seats[:, None]

        def rows(name: str, real: np.ndarray) -> Any:
            """[K, L or L + 1, ...], zero where there is no step."""
            values = memory.get(name, step[:, : real.shape[1]], who)
            return map_tree(lambda x: np.where(real.reshape(*real.shape, *(1,) * (x.ndim - 2)), x, x.dtype.type(0)), values)

        made = made[:, :L]
        starting = (step[:, 0] <= 0)[:, None]  # an episode's own first state is zero
        items: Rows = {
            "observation": rows("observation", seen),
            "first": step == 0,
            "action": rows("action", made),
            "reward": rows("reward", made),
            "discount": rows("discount", made),
            "valid": made,
            "state": map_tree(lambda x: np.where(starting, np.float32(0), x), memory.get("state", step[:, 0], seats)),
            "weights_version": memory.get("version", begin, seats),
            **{name: rows(name, seen) for name in self.extras},
        }
        if self.mask_size:
            items["action_mask"] = rows("mask", seen) | ~seen[:, :, None]
        if self.previous:
            items.update(prev_action=rows("prev_action", seen), prev_reward=rows("prev_reward", seen))
        if self.keep_states:
            items["states"] = rows("state", seen)
        return items

    def errors(self, estimates: Estimates, memory: EpisodeMemory, items: Rows, seats: np.ndarray, begin: np.ndarray,
               end: np.ndarray) -> np.ndarray:
        """eta max + (1 - eta) mean of |td| over the loss steps, with n-step targets as the learner's."""
        n, m, K = self.n_step, self.length, len(seats)
        step = begin[:, None] + np.arange(m + 1)
        reward, discount = items["reward"][:, self.burn_in :], items["discount"][:, self.burn_in :]
        valid = step[:, :m] < end[:, None]
        # Past the end a step costs nothing (reward 0, discount 1, the last value again): late targets are shorter.
        pad = np.zeros((K, n - 1), np.float32)
        r = np.concatenate([reward, pad], 1)
        d = np.concatenate([np.where(valid, np.float32(self.gamma) * discount, np.float32(1)), pad + 1], 1)
        value = memory.get("value", np.minimum(step[:, 1:], end[:, None]), seats[:, None])
        value = np.concatenate([value, np.repeat(value[:, -1:], n - 1, 1)], 1)
        target = value[:, n - 1 :]
        for i in range(n - 1, -1, -1):
            target = r[:, i : i + m] + d[:, i : i + m] * target
        error = estimates.errors(target, memory.get("taken", step[:, :m], seats[:, None]))
        return priorities.sequence_priority(error.T, valid.T, self.eta)
