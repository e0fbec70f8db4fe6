"""What a peer is asked besides its speed: the mean return of its last episodes, and when its weights reach a goal on CartPole.

The rule stands in benchmarks.race: weights are judged about every 0.1 s of training, with the clock stopped; they pass when the
mean of 100 fresh greedy episodes is at least the goal, and that of another 100 is too. It imports nothing of shoal.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import gymnasium as gym
import numpy as np

__all__ = ["GoalEvaluator", "RecentReturns"]

EPISODES = 100
JUDGE_SECONDS = 0.1  # of training, between two evaluations


class RecentReturns:
    """The mean return of the last episodes of several environments, from their rewards and ends."""

    def __init__(self, envs: int) -> None:
        self._running, self._last = np.zeros(envs), deque[float](maxlen=EPISODES)

    def add(self, reward: np.ndarray, done: np.ndarray) -> None:
        self._running += reward
        self._last.extend(self._running[done].tolist())
        self._running[done] = 0.0

    @property
    def mean(self) -> float | None:
        return float(np.mean(self._last)) if self._last else None


class GoalEvaluator:
    """Plays greedy episodes with `act` ([100, 4] -> [100] actions); `stopped` is how long it has taken so far."""

    def __init__(self, goal: float, seed: int, act: Callable[[np.ndarray], np.ndarray]) -> None:
        self.goal, self.seed, self.act = goal, seed, act
        self.envs = gym.make_vec("CartPole-v1", EPISODES, vectorization_mode="vector_entry_point")
        self.stopped, self._due = 0.0, JUDGE_SECONDS
        self.reached: tuple[float | None, float | None] = (None, None)
        """Seconds of training until the weights that passed, and their second mean."""

    def passes(self, clock: float) -> bool:
        """Whether the weights after `clock` seconds of training pass; False between two evaluations."""
        if clock < self._due:
            return False
        began = time.perf_counter()
        if self._mean() >= self.goal and (again := self._mean()) >= self.goal:
            self.reached = (clock, again)
        self.stopped += time.perf_counter() - began
        self._due = clock + JUDGE_SECONDS
        return self.reached[0] is not None

    def _mean(self) -> float:
        """Of the first episode of each environment."""
        self.seed += 1
        observation, _ = self.envs.reset(seed=10_000 * self.seed)
        running, total = np.ones(EPISODES, bool), np.zeros(EPISODES)
        while running.any():
            observation, reward, terminated, truncated, _ = self.envs.step(self.act(observation))
            total += reward * running
            running &= ~(terminated | truncated)
        return float(total.mean())
