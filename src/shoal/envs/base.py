"""What the streams over foreign environments share: identity, the buffers of a Step, and the checks."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np

from shoal.envs.spaces import QUIET, ActionCodec, BadValue, Layout
from shoal.envs.stream import Ledger, breach
from shoal.errors import EnvironmentError_

__all__ = ["Stream"]


class Stream:
    """The state every stream has. Subclasses turn one kind of environment into Steps."""

    backend = "loop"
    max_episode_steps: int | None = None
    line = ""
    has_executed_action = False

    def __init__(
        self,
        name: str,
        observation_space: gym.Space,
        action_space: gym.Space,
        num_envs: int,
        seats_per_env: int = 1,
        *,
        check: bool = True,
        seed: int | None = None,
    ) -> None:
        self.name, self.check, self.frame_skip = name, check, 1
        self.num_envs, self.seats_per_env = num_envs, seats_per_env
        self.num_seats = rows = num_envs * seats_per_env
        self.layout, self.codec = Layout(observation_space), ActionCodec(action_space)
        self.observation_space, self.action_space = self.layout.space, self.codec.space
        self.env_id = np.repeat(np.arange(num_envs), seats_per_env)
        self.agent_id = np.tile(np.arange(seats_per_env), num_envs)
        self.policy_id = np.zeros(rows, np.int64)
        self._seed, self._steps = seed, 0
        self._ledger = Ledger(rows)
        self._reward, self._discount = np.zeros(rows, np.float32), np.ones(rows, np.float32)
        self._first, self._last, self._truncated = (np.zeros(rows, bool) for _ in range(3))
        self._all = np.ones(rows, bool)
        self._mask: np.ndarray | None = None
        self._action: Any = None
        self._executed: np.ndarray | None = None

    def _begin(self, seed: int | None) -> int | None:
        """Common part of reset(): clears the books and returns the seed to use, if any."""
        seed, self._seed = (self._seed if seed is None else seed), None
        self._steps = 0
        self._ledger.clear()
        self._clear_flags()
        self._reward.fill(0)
        self._mask = None
        return seed

    def _clear_flags(self) -> None:
        self._discount.fill(1)
        self._first.fill(False)
        self._last.fill(False)
        self._truncated.fill(False)

    def _seat(self, row: int) -> str:
        if self.seats_per_env == 1:
            return f"environment {row}"
        return f"environment {row // self.seats_per_env}, agent {row % self.seats_per_env} (seat {row})"

    def _wrong(self, row: int | None, what: Any) -> EnvironmentError_:
        return breach(self.name, "all environments" if row is None else self._seat(row), self._steps, str(what))

    def _verify(self, arrays: list[np.ndarray], reward: np.ndarray) -> None:
        """Observations, rewards and masks are finite and in range. One pass over each array."""
        with np.errstate(**QUIET):
            if not math.isfinite(np.add.reduce(reward)):
                for row in np.flatnonzero(~np.isfinite(reward)):
                    raise self._wrong(int(row), f"reward is {reward[row]}")
            found = self.layout.fault(arrays)
        if found is None and self._mask is not None:
            found = self.codec.mask_fault(self._mask)
        if found is not None:
            raise self._wrong(*found)

    def _verify_final(self, arrays: list[np.ndarray], rows: np.ndarray | list[int]) -> None:
        with np.errstate(**QUIET):
            found = self.layout.fault(arrays)
        if found:
            raise self._wrong(int(rows[found[0]]), "last " + found[1])

    def _chosen(self, action: Any) -> None:
        """Before a step: what is executed is what was chosen, unless info["executed_action"] says otherwise."""
        self._action = action
        if self._executed is not None:
            self._executed[:] = action

    def _put_executed(self, rows: Any, value: np.ndarray) -> None:
        if self._executed is None:
            self._executed = np.array(self._action)
        self._executed[rows] = value

    def _put_mask(self, row: int, value: Any) -> None:
        if self._mask is None:
            if not self.codec.mask_size:
                raise BadValue(f"action_mask given, but {self.action_space} cannot be masked")
            self._mask = np.ones((self.num_seats, self.codec.mask_size), bool)
        self._mask[row] = self.codec.mask(value)

    def _read_mask(self, row: int, observation: Any, info: Any) -> None:
        """The mask of one seat, from its observation or its info; a seat that gives none may do anything."""
        if self.layout.masked:
            self._put_mask(row, observation["action_mask"])
        elif info and "action_mask" in info:
            self._put_mask(row, info["action_mask"])
        elif self._mask is not None:
            self._mask[row] = True
