"""What all adapters of foreign environments share: identity, the buffers of a Step, and the checks."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np

from shoal.envs.interface import EpisodeTotals, contract_error, split_seed
from shoal.envs.space_codecs import ActionCodec, BadValue, ObservationCodec, ignore_overflow
from shoal.errors import EnvironmentError_

__all__ = ["EnvAdapter"]


class EnvAdapter:
    """Base of the adapters. Each subclass turns one kind of environment into a BatchedEnv."""

    backend = "loop"
    backend_reason = ""
    max_episode_steps: int | None = None
    has_executed_action = False
    takes_turns = False

    def __init__(
        self,
        name: str,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        num_envs: int,
        seats_per_env: int = 1,
        *,
        check: bool = True,
        seed: int | None = None,
    ) -> None:
        self.name, self.check, self.frame_skip = name, check, 1
        self.num_envs, self.seats_per_env = num_envs, seats_per_env
        self.num_seats = rows = num_envs * seats_per_env
        self.observation_codec, self.action_codec = ObservationCodec(observation_space), ActionCodec(action_space)
        self.observation_space, self.action_space = self.observation_codec.space, self.action_codec.space
        self.raw_observation_space, self.raw_action_space = observation_space, action_space
        self.mask_size = self.action_codec.mask_size
        self.env_id = np.repeat(np.arange(num_envs), seats_per_env)
        self.agent_id = np.tile(np.arange(seats_per_env), num_envs)
        self._seed, self._steps = seed, 0
        self._totals = EpisodeTotals(rows)
        self._reward, self._discount = np.zeros(rows, np.float32), np.ones(rows, np.float32)
        self._first, self._last, self._truncated = (np.zeros(rows, bool) for _ in range(3))
        self._all = np.ones(rows, bool)
        self._mask: np.ndarray | None = None
        self._action: Any = None
        self._executed: np.ndarray | None = None
        self._info: dict[str, np.ndarray] | None = None
        self._info_keys: set[str] = set()
        self._info_unfit: dict[str, str] = {}

    def watch_info(self, keys: tuple[str, ...]) -> None:
        """Let every Step carry the numbers of these keys of `info`."""
        self._info = {key: np.full(self.num_seats, np.nan) for key in keys} if keys else None

    def _read_info(self, row: int, info: Any) -> None:
        """The watched numbers of one seat."""
        if info:
            self._info_keys.update(info)
        for key, values in (self._info or {}).items():
            values[row] = self._info_number(key, info[key]) if info and key in info else np.nan

    def _info_number(self, key: str, value: Any) -> float:
        """A number or a flag of `info`. Anything else is noted by its type, so that it can be told, and None is no value."""
        try:
            if np.ndim(value) == 0 and np.asarray(value).dtype.kind in "fiub":
                return float(value)
        except (TypeError, ValueError):  # a list of lists of several lengths, and whatever else refuses to be an array
            pass
        if value is not None:
            self._info_unfit.setdefault(key, type(value).__name__)
        return math.nan

    def _begin(self, seed: int | None) -> int | None:
        """Common part of reset(): clears all counters and returns the seed to use, if any."""
        seed, self._seed = (self._seed if seed is None else seed), None
        self._steps = 0
        self._totals.clear()
        self._clear_flags()
        self._reward.fill(0)
        self._mask = None
        return seed

    def _begin_each(self, seed: int | None) -> list[int | None]:
        """Common part of reset() for adapters of a list of environments: the seed of each."""
        seed = self._begin(seed)
        return [None] * self.num_envs if seed is None else split_seed(seed, self.num_envs).tolist()

    def _clear_flags(self) -> None:
        self._discount.fill(1)
        self._first.fill(False)
        self._last.fill(False)
        self._truncated.fill(False)

    def _seat(self, row: int) -> str:
        if self.seats_per_env == 1:
            return f"environment {row}"
        return f"environment {row // self.seats_per_env}, agent {row % self.seats_per_env} (seat {row})"

    def _error(self, row: int | None, what: Any) -> EnvironmentError_:
        """The error for what a row did wrong; None: the batch as a whole."""
        return contract_error(self.name, "all environments" if row is None else self._seat(row), self._steps, str(what))

    def _verify(self, arrays: list[np.ndarray], reward: np.ndarray) -> None:
        """Raise unless observations, rewards and masks are finite and in range. One pass over each array."""
        with ignore_overflow():
            if not math.isfinite(np.add.reduce(reward)):
                for row in np.flatnonzero(~np.isfinite(reward)):
                    raise self._error(int(row), f"reward is {reward[row]}")
            fault = self.observation_codec.fault(arrays)
        if fault is None and self._mask is not None:
            fault = self.action_codec.mask_fault(self._mask)
        if fault is not None:
            raise self._error(*fault)

    def _verify_final(self, arrays: list[np.ndarray], rows: np.ndarray | list[int]) -> None:
        with ignore_overflow():
            fault = self.observation_codec.fault(arrays)
        if fault:
            raise self._error(int(rows[fault[0]]), "last " + fault[1])

    def _begin_executed(self, action: Any) -> None:
        """Before a step: assume that the chosen action is executed, until info["executed_action"] says otherwise."""
        self._action = action
        if self._executed is not None:
            self._executed[:] = action

    def _put_executed(self, rows: Any, value: Any, lead: tuple[int, ...] = ()) -> None:
        """Store what info["executed_action"] says: of one row, or with `lead` (B,) of the batch, of which `rows` count."""
        try:
            executed = self.action_codec.canonical(value, lead)
        except BadValue as error:
            raise BadValue(f"info['executed_action']: {error}") from error
        if self._executed is None:
            self._executed = np.array(self._action)
        self._executed[rows] = executed[rows] if lead else executed

    def _raw_mask(self, observation: Any, info: Any) -> Any:
        """The mask that one seat reports in its observation or its info; None if it reports none."""
        if self.observation_codec.masked:
            return observation["action_mask"]
        return info["action_mask"] if info and "action_mask" in info else None

    def _masks(self) -> np.ndarray:
        """The mask of all seats, made on first use."""
        if self._mask is None:
            if not self.mask_size:
                raise BadValue(f"the environment gives an action_mask, but {self.action_space} cannot be masked")
            self._mask = np.ones((self.num_seats, self.mask_size), bool)
        return self._mask

    def _read_mask(self, row: int, observation: Any, info: Any) -> None:
        """Store the mask of one seat; a seat that reports none may do anything."""
        value = self._raw_mask(observation, info)
        if value is not None:
            self._masks()[row] = self.action_codec.mask(value)
        elif self._mask is not None:
            self._mask[row] = True

    def _final_mask(self, observation: Any, info: Any) -> np.ndarray | None:
        """The mask of one seat's last observation, copied because the environment may reuse it; None if it reports none."""
        value = self._raw_mask(observation, info)
        return None if value is None else np.array(self.action_codec.mask(value))

    def _stack_final_masks(self, masks: list[np.ndarray | None]) -> np.ndarray | None:
        """Step.final_action_mask from the masks of the truncated rows; a row without one allows everything."""
        if self._mask is None and all(mask is None for mask in masks):
            return None
        anything = np.ones(self.mask_size, bool)
        return self.action_codec.open_dead_rows(np.stack([anything if mask is None else mask for mask in masks]))
