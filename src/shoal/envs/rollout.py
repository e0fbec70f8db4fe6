"""Playing whole episodes: the one loop behind recordings and evaluations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from shoal.envs.interface import BatchedEnv, Step

__all__ = ["ActFunction", "Played", "Rollout"]

ActFunction = Callable[[Step, Any], np.ndarray]
"""(the Step to act on, the action that led to it or None) -> canonical actions [B, ...]."""


class Played(NamedTuple):
    """One step of a Rollout."""

    action: np.ndarray
    """[B, ...] what the policy chose."""
    step: Step
    """What came of it."""
    finished: np.ndarray
    """[N] rows whose episode just ended, if it is one that was asked for."""
    returns: np.ndarray
    """[N] their returns, from unclipped rewards."""
    lengths: np.ndarray
    """[N] their lengths, in decisions."""


class Rollout:
    """Plays a number of whole episodes, one Played at a time.

        for played in Rollout(env, env.reset(seed), act, episodes=100):
            returns.extend(played.returns)

    Each row contributes equally many episodes, its first ones, so that short episodes count no more than long ones. `remaining` [B]
    is how many each row still owes; a row that owes none is stepped until all others are done.
    """

    def __init__(self, env: BatchedEnv, first: Step, act: ActFunction, episodes: int) -> None:
        self._env, self._step, self._act = env, first, act
        self._previous: np.ndarray | None = None
        self.remaining = np.full(env.num_seats, episodes // env.num_seats)
        self.remaining[: episodes % env.num_seats] += 1

    def __iter__(self) -> Iterator[Played]:
        while self.remaining.any():
            action = np.asarray(self._act(self._step, self._previous))
            self._step, self._previous = self._env.step(action), action
            ended = np.flatnonzero(self._step.last & self._step.valid)  # the rows that episode_return and episode_length list
            wanted = self.remaining[ended] > 0
            finished = ended[wanted]
            self.remaining[finished] -= 1
            yield Played(action, self._step, finished, self._step.episode_return[wanted], self._step.episode_length[wanted])
