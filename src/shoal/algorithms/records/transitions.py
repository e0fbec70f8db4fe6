"""Transitions: what one-step and n-step methods (dqn) send to a replay table, one item for each decision.

    (x_t, a_t, R, D, x_{t+n})     R = r_t + gamma r_{t+1} + ...,   D = gamma^n, 0 where the episode terminated

The end of an episode gives items of n, n - 1, ..., 1 steps that all end in its last observation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from shoal.algorithms.records.first_priority import Estimates
from shoal.algorithms.records.items import EpisodeItems, EpisodeMemory, Rows
from shoal.core import Tree
from shoal.ops import value
from shoal.slots import Field, Layout

__all__ = ["Transitions"]


@dataclass(frozen=True)
class Transitions(EpisodeItems):
    """A learning.ItemRecord of n-step transitions."""

    previous = False
    decisions = 1
    observed = "observation", "next_observation"

    @cached_property
    def layout(self) -> Layout:
        """Of one item."""
        fields: dict[str, Any] = {
            "observation": self.observation_rows(1),
            "action": self.action_rows(1),
            "reward": Field((1,), "float32"),
            "discount": Field((1,), "float32"),
            "next_observation": self.observation_rows(1),
            "weights_version": Field((1,), "int32"),
            "time": Field((1,), "float64"),
            **self.extra_rows(1),
        }
        if self.mask_size:
            fields["next_action_mask"] = Field((1, self.mask_size), "bool")
        return Layout(fields)

    # -------------------------------------------------------------------------------- as EpisodeItems
    @property
    def reach(self) -> int:
        return self.n_step + 1

    def columns(self) -> dict[str, Tree]:
        return {}

    def due(self, count: np.ndarray) -> np.ndarray:
        return count >= self.n_step

    def first_due(self, count: np.ndarray) -> np.ndarray:
        return count - self.n_step

    def endings(self, count: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for steps in range(min(self.n_step, int(count.max())), 0, -1):
            which = np.flatnonzero(count >= steps)
            yield which, count[which] - steps

    def cut(self, memory: EpisodeMemory, seats: np.ndarray, begin: np.ndarray, end: np.ndarray) -> Rows:
        steps = begin + np.arange(int(end[0] - begin[0]))[:, None]  # [n, K]: the same span for all
        reward, discount = value.n_step_transition(memory.get("reward", steps, seats),
                                                   np.float32(self.gamma) * memory.get("discount", steps, seats))
        items = {
            "observation": memory.get("observation", begin, seats),
            "action": memory.get("action", begin, seats),
            "reward": reward,
            "discount": discount,
            "next_observation": memory.get("observation", end, seats),
            "weights_version": memory.get("version", begin, seats),
            **{name: memory.get(name, begin, seats) for name in self.extras},
        }
        if self.mask_size:
            items["next_action_mask"] = memory.get("mask", end, seats)
        return items

    def errors(self, estimates: Estimates, memory: EpisodeMemory, items: Rows, seats: np.ndarray, begin: np.ndarray,
               end: np.ndarray) -> np.ndarray:
        target = estimates.target(items["reward"], items["discount"], memory.get("value", end, seats))
        return estimates.errors(target, memory.get("taken", begin, seats))
