"""Transitions: what dqn sends to a replay table, one item for each decision.

    (x_t, a_t, R, D, x_{t+n})     R = r_t + gamma r_{t+1} + ...,   D = gamma^n, 0 where the episode terminated

The end of an episode gives items of n, n - 1, ..., 1 steps that all end in its last observation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from shoal.algorithms.items import ItemRecord, Items, Memory
from shoal.algorithms.sight import Sight
from shoal.core import Tree
from shoal.slots import Field, Layout

__all__ = ["Transitions"]


@dataclass(frozen=True)
class Transitions(ItemRecord):
    """A core.Record of n-step transitions."""

    previous = False
    decisions = 1
    """Decisions that one item stands for."""

    @cached_property
    def layout(self) -> Layout:
        """Of one item."""
        fields: dict[str, Any] = {
            "observation": self.scene.rows(1),
            "action": Field((1,), "int64"),
            "reward": Field((1,), "float32"),
            "discount": Field((1,), "float32"),
            "next_observation": self.scene.rows(1),
            "weights_version": Field((1,), "int32"),
            "time": Field((1,), "float64"),
        }
        if self.mask_size:
            fields["next_action_mask"] = Field((1, self.mask_size), "bool")
        return Layout(fields)

    def sight(self, seats: int) -> Sight:
        return Sight(None)

    # -------------------------------------------------------------------------------- as a Cutter
    @property
    def reach(self) -> int:
        return self.scene.n_step + 1

    def columns(self) -> dict[str, Tree]:
        return {}

    def due(self, count: np.ndarray) -> np.ndarray:
        return count >= self.scene.n_step

    def first_due(self, count: np.ndarray) -> np.ndarray:
        return count - self.scene.n_step

    def endings(self, count: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for steps in range(self.scene.n_step, 0, -1):
            which = np.flatnonzero(count >= steps)
            yield which, count[which] - steps

    def cut(self, memory: Memory, seats: np.ndarray, begin: np.ndarray, end: np.ndarray) -> Items:
        gamma = np.float32(self.scene.gamma)
        reward, product = np.zeros(len(seats), np.float32), np.ones(len(seats), np.float32)
        for k in range(int(end[0] - begin[0])):  # the same span for all
            reward += product * memory.get("reward", begin + k, seats)
            product *= gamma * memory.get("discount", begin + k, seats)
        items = {
            "observation": memory.get("observation", begin, seats),
            "action": memory.get("action", begin, seats),
            "reward": reward,
            "discount": product,
            "next_observation": memory.get("observation", end, seats),
            "weights_version": memory.get("version", begin, seats),
        }
        if self.mask_size:
            items["next_action_mask"] = memory.get("mask", end, seats)
        target = reward + product * memory.get("best", end, seats)
        return items, self.scene.errors(target, memory.get("taken", begin, seats))
