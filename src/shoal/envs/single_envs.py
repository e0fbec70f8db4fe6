"""Back-end "loop": several single gymnasium environments in one process, stepped one after the other.

gymnasium.vector.SyncVectorEnv merges info dictionaries and copies observations every step; this loop writes observations straight
into one array, resets at once (so there is never a dead row), and reads info only for an action mask and an executed action.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from shoal.envs.adapter import EnvAdapter
from shoal.envs.handling import Restarts
from shoal.envs.interface import NO_LENGTHS, NO_RETURNS, NO_ROWS, Step, Tree
from shoal.envs.space_codecs import BadValue
from shoal.errors import ConfigError, ShoalError

__all__ = ["SingleEnvsAdapter", "as_flag", "as_number"]

_NUMBERS = frozenset({float, int, bool, np.float64, np.float32, np.int64, np.int32})
_FLAGS = frozenset({bool, np.bool_})


def as_number(reward: Any) -> float:
    """A reward of any scalar type as a float."""
    if type(reward) in _NUMBERS or (np.ndim(reward) == 0 and np.asarray(reward).dtype.kind in "fiub"):
        return float(reward)
    raise BadValue(f"reward is {reward!r} ({type(reward).__name__}), not a number")


def as_flag(value: Any, name: str) -> bool:
    if type(value) not in _FLAGS:
        raise BadValue(f"{name} is {value!r} ({type(value).__name__}), not a bool")
    return bool(value)


class SingleEnvsAdapter(EnvAdapter):
    """A list of gymnasium.Env as a BatchedEnv."""

    backend = "loop"

    def __init__(self, name: str, envs: Sequence[gym.Env[Any, Any]], *, check: bool = True, seed: int | None = None) -> None:
        first = envs[0]
        super().__init__(name, first.observation_space, first.action_space, len(envs), check=check, seed=seed)
        for i, env in enumerate(envs):
            if env.observation_space != first.observation_space or env.action_space != first.action_space:
                raise ConfigError(f"{name}: environment {i} has other spaces than environment 0; pad them to be equal")
        self._envs = list(envs)
        self._buffers = self.observation_codec.buffers(len(envs))
        self._tree = self.observation_codec.tree(self._buffers)
        self._final: list[np.ndarray] | None = None
        self._final_masks: list[np.ndarray | None] = []  # of the rows truncated in this step
        self._dirty = False
        leaf = self.observation_codec.single
        plain_box = leaf is not None and leaf.count is None  # written without the codec's generality
        self._box_shape = leaf.shape if leaf is not None and plain_box else None
        self._box_dtype = first.observation_space.dtype if plain_box else None
        self.restarts = Restarts(lambda: None, len(envs), 0)

    def reset(self, seed: int | None = None) -> Step:
        for i, one in enumerate(self._begin_each(seed)):
            self._reset_row(i, one)
        if self.check:
            self._verify(self._buffers, self._reward)
        self._first.fill(True)
        self._dirty = True
        return self._step(NO_ROWS, None, None, NO_RETURNS, NO_LENGTHS)

    def step(self, action: Tree) -> Step:
        self._steps += 1
        if self._dirty:
            self._clear_flags()
            self._final_masks.clear()
            self._dirty = False
        ended: list[int] = []
        truncated_rows: list[int] = []
        try:
            actions = self.action_codec.rows(action, self.num_envs)
        except BadValue as error:
            raise self._error(0, error) from error
        self._begin_executed(action)
        start = 0
        while start < self.num_envs:
            start = self._step_rows(start, actions, ended, truncated_rows)
        self._totals.add(self._reward)
        if self.check:
            self._verify(self._buffers, self._reward)
        if not ended:
            return self._step(NO_ROWS, None, None, NO_RETURNS, NO_LENGTHS)
        return self._finish(ended, truncated_rows)

    def _step_rows(self, start: int, actions: Any, ended: list[int], truncated_rows: list[int]) -> int:
        """Step the environments from `start` on; returns where to go on: after one that raised and was restarted."""
        i, reward, envs = start, self._reward, self._envs
        shape, dtype, array = self._box_shape, self._box_dtype, np.ndarray
        buffer, watches = self._buffers[0], self._info is not None
        try:
            for i in range(start, self.num_envs):
                observation, r, terminated, truncated, info = envs[i].step(actions[i])
                reward[i] = r if type(r) in _NUMBERS else as_number(r)
                if info and "executed_action" in info:
                    self._put_executed(i, info["executed_action"])
                if watches:
                    self._read_info(i, info)
                are_flags = terminated.__class__ in _FLAGS and truncated.__class__ in _FLAGS
                if are_flags and not (terminated or truncated):
                    if type(observation) is array and observation.shape == shape and observation.dtype is dtype:
                        buffer[i] = observation
                    else:
                        self.observation_codec.write(self._buffers, i, observation)
                    if info or self._mask is not None or self.observation_codec.masked:
                        self._read_mask(i, observation, info)
                else:
                    terminated, truncated = as_flag(terminated, "terminated"), as_flag(truncated, "truncated")
                    if not terminated:
                        self._keep_final(i, observation, info, truncated_rows)
                    self.restarts.ended(i)
                    self._end_row(i, terminated)
                    ended.append(i)
            return self.num_envs
        except ShoalError:
            raise
        except BadValue as error:
            raise self._error(i, error) from error
        except Exception as error:
            self._restart(i, _in_words(error), error)
        self._cut_row(i, truncated_rows)
        ended.append(i)
        return i + 1

    def _restart(self, i: int, what: str, error: Exception) -> None:
        """Make an environment that raised anew, or raise."""
        env = self.restarts.again(i, self._envs[i], what)
        if env is None:
            raise self._error(i, what + self.restarts.hint()) from error
        self._envs[i] = env

    def _cut_row(self, i: int, truncated_rows: list[int]) -> None:
        """Truncate the episode of a row whose environment raised: its last observation is the one before."""
        if self._final is None:
            self._final = self.observation_codec.buffers(self.num_envs)
        for final, buffer in zip(self._final, self._buffers, strict=True):
            final[len(truncated_rows)] = buffer[i]
        self._final_masks.append(None if self._mask is None else self._mask[i].copy())
        truncated_rows.append(i)
        self._reward[i] = 0.0
        self._read_info(i, None)
        self._end_row(i, False)

    def _keep_final(self, i: int, observation: Any, info: Any, truncated_rows: list[int]) -> None:
        """A row was truncated: keep its last observation and the mask that belongs to it."""
        if self._final is None:
            self._final = self.observation_codec.buffers(self.num_envs)
        self.observation_codec.write(self._final, len(truncated_rows), observation)
        self._final_masks.append(self._final_mask(observation, info))
        truncated_rows.append(i)

    def _end_row(self, i: int, terminated: bool) -> None:
        """The episode of a row ended: set its flags and begin the next."""
        self._last[i] = self._first[i] = True
        self._discount[i] = not terminated
        self._truncated[i] = not terminated
        self._reset_row(i, None)

    def _finish(self, ended: list[int], truncated_rows: list[int]) -> Step:
        self._dirty = True
        returns, lengths = self._totals.close(ended)
        if not truncated_rows:
            return self._step(NO_ROWS, None, None, returns, lengths)
        final = [buffer[: len(truncated_rows)] for buffer in self._final or ()]
        if self.check:
            self._verify_final(final, truncated_rows)
        masks = self._stack_final_masks(self._final_masks)
        return self._step(np.array(truncated_rows, np.int64), self.observation_codec.tree(final), masks, returns, lengths)

    def _step(
        self, rows: np.ndarray, final: Tree | None, final_mask: np.ndarray | None, returns: np.ndarray, lengths: np.ndarray
    ) -> Step:
        step = Step(
            self._tree,
            self._reward,
            self._discount,
            self._first,
            self._last,
            self._truncated,
            self._all,
            rows,
            final,
            self._mask,
            self._executed,
            returns,
            lengths,
            final_mask,
            info=self._info,
            info_keys=self._info_keys,
            info_unfit=self._info_unfit,
        )
        if self._dirty:  # an episode has ended or begun: only then something may have been restarted
            step.restarts = self.restarts.told()
        return step

    def _reset_row(self, i: int, seed: int | None) -> None:
        while True:
            try:
                answer = self._envs[i].reset(seed=seed)
                break
            except Exception as error:
                self._restart(i, "reset() " + _in_words(error), error)
        try:
            if not (isinstance(answer, tuple) and len(answer) == 2):
                raise BadValue(f"reset() must return (observation, info), got {type(answer).__name__}")
            self.observation_codec.write(self._buffers, i, answer[0])
            self._read_mask(i, *answer)
        except BadValue as error:
            raise self._error(i, error) from error

    def close(self) -> None:
        for env in self._envs:
            env.close()


def _in_words(error: Exception) -> str:
    if isinstance(error, ValueError | TypeError) and "unpack" in str(error):
        return f"step() must return (observation, reward, terminated, truncated, info): {error}"
    return f"raised {type(error).__name__}: {error}"
