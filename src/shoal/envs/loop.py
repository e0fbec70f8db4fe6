"""Several single environments in one process, stepped by a plain loop.

gymnasium.vector.SyncVectorEnv merges info dictionaries and copies observations every step; this loop writes them
straight into one array, resets at once (so there is never a dead row), and looks at info only for an action mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from shoal.envs.base import Stream
from shoal.envs.spaces import BadValue
from shoal.envs.stream import NO_LENGTHS, NO_RETURNS, NO_ROWS, Step, Tree, split_seed
from shoal.errors import ConfigError, ShoalError

__all__ = ["LoopEnv", "as_flag", "as_number"]

_NUMBERS = frozenset({float, int, bool, np.float64, np.float32, np.int64, np.int32})
_FLAGS = frozenset({bool, np.bool_})


def as_number(reward: Any) -> float:
    if type(reward) in _NUMBERS:
        return reward
    if np.ndim(reward) == 0 and np.asarray(reward).dtype.kind in "fiub":
        return float(reward)
    raise BadValue(f"reward is {reward!r} ({type(reward).__name__}), not a number")


def as_flag(value: Any, name: str) -> bool:
    if type(value) not in _FLAGS:
        raise BadValue(f"{name} is {value!r} ({type(value).__name__}), not a bool")
    return bool(value)


class LoopEnv(Stream):
    """The stream over a list of gymnasium.Env."""

    backend = "loop"

    def __init__(self, name: str, envs: Sequence[gym.Env], *, check: bool = True, seed: int | None = None) -> None:
        first = envs[0]
        super().__init__(name, first.observation_space, first.action_space, len(envs), check=check, seed=seed)
        for i, env in enumerate(envs):
            if env.observation_space != first.observation_space or env.action_space != first.action_space:
                raise ConfigError(f"{name}: environment {i} has other spaces than environment 0; pad them to be equal")
        self._envs = list(envs)
        self._buffers = self.layout.buffers(len(envs))
        self._tree = self.layout.tree(self._buffers)
        self._final: list[np.ndarray] | None = None
        self._dirty = False
        leaf = self.layout.single
        fast = leaf is not None and leaf.count is None
        self._fast_shape = leaf.shape if fast else None  # a plain Box is written without Layout's generality
        self._fast_kind = first.observation_space.dtype if fast else None

    def reset(self, seed: int | None = None) -> Step:
        seed = self._begin(seed)
        seeds = [None] * self.num_envs if seed is None else split_seed(seed, self.num_envs).tolist()
        for i, one in enumerate(seeds):
            self._reset_row(i, one)
        if self.check:
            self._verify(self._buffers, self._reward)
        self._first.fill(True)
        self._dirty = True
        return self._step(NO_ROWS, None, NO_RETURNS, NO_LENGTHS)

    def step(self, action: Tree) -> Step:
        self._steps += 1
        if self._dirty:
            self._clear_flags()
            self._dirty = False
        ended: list[int] = []
        cut: list[int] = []
        reward, i = self._reward, 0
        shape, kind, array = self._fast_shape, self._fast_kind, np.ndarray
        buffer = self._buffers[0]
        try:
            actions = self.codec.rows(action, self.num_envs)
            self._chosen(action)
            for i, env in enumerate(self._envs):
                observation, r, terminated, truncated, info = env.step(actions[i])
                reward[i] = r if type(r) in _NUMBERS else as_number(r)
                if info and "executed_action" in info:
                    self._put_executed(i, self.codec.executed(info["executed_action"]))
                plain = terminated.__class__ in _FLAGS and truncated.__class__ in _FLAGS
                if plain and not (terminated or truncated):
                    if type(observation) is array and observation.shape == shape and observation.dtype is kind:
                        buffer[i] = observation
                    else:
                        self.layout.write(self._buffers, i, observation)
                    if info or self._mask is not None or self.layout.masked:
                        self._read_mask(i, observation, info)
                else:
                    terminated, truncated = as_flag(terminated, "terminated"), as_flag(truncated, "truncated")
                    self._end_row(i, terminated, observation, cut)
                    ended.append(i)
        except ShoalError:
            raise
        except BadValue as error:
            raise self._wrong(i, error) from error
        except Exception as error:
            raise self._wrong(i, _told(error)) from error
        self._ledger.add(reward)
        if self.check:
            self._verify(self._buffers, reward)
        if not ended:
            return self._step(NO_ROWS, None, NO_RETURNS, NO_LENGTHS)
        return self._finish(ended, cut)

    def _end_row(self, i: int, terminated: bool, observation: Any, cut: list[int]) -> None:
        """The episode of a row ended: keep its last observation if it was truncated, and begin the next."""
        self._last[i] = self._first[i] = True
        if terminated:
            self._discount[i] = 0
        else:
            self._truncated[i] = True
            if self._final is None:
                self._final = self.layout.buffers(self.num_envs)
            self.layout.write(self._final, len(cut), observation)
            cut.append(i)
        self._reset_row(i, None)

    def _finish(self, ended: list[int], cut: list[int]) -> Step:
        self._dirty = True
        returns, lengths = self._ledger.close(ended)
        if not cut:
            return self._step(NO_ROWS, None, returns, lengths)
        final = [buffer[: len(cut)] for buffer in self._final or ()]
        if self.check:
            self._verify_final(final, cut)
        return self._step(np.array(cut, np.int64), self.layout.tree(final), returns, lengths)

    def _step(self, rows: np.ndarray, final: Tree | None, returns: np.ndarray, lengths: np.ndarray) -> Step:
        return Step(
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
        )

    def _reset_row(self, i: int, seed: int | None) -> None:
        try:
            answer = self._envs[i].reset(seed=seed)
            if not (isinstance(answer, tuple) and len(answer) == 2):
                raise BadValue(f"reset() must return (observation, info), got {type(answer).__name__}")
            self.layout.write(self._buffers, i, answer[0])
            self._read_mask(i, *answer)
        except BadValue as error:
            raise self._wrong(i, error) from error
        except Exception as error:
            raise self._wrong(i, "reset() " + _told(error)) from error

    def close(self) -> None:
        for env in self._envs:
            env.close()


def _told(error: Exception) -> str:
    if isinstance(error, ValueError | TypeError) and "unpack" in str(error):
        return f"step() must return (observation, reward, terminated, truncated, info): {error}"
    return f"raised {type(error).__name__}: {error}"
