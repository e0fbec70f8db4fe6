"""Fresh episodes with one policy: what the Evaluator and `shoal eval` count."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from shoal.acting import Policy, Record
from shoal.envs import BatchedEnv, Step
from shoal.envs.rollout import Rollout
from shoal.roles.asked_seats import AskedSeats

__all__ = ["EpisodePlay"]


class EpisodePlay:
    """Plays fresh episodes, one step of all environments at a time, so that it can be stopped between two steps.

        play = EpisodePlay(policy, record, env, episodes=100, seed=1, rng=rng)
        while not play.over:
            decisions = play.step()
        play.returns, play.lengths

    `explore` None acts greedily. Once `env_steps` decisions are made no other episode begins, and those that have begun are
    played to their end: leaving them out would favour short episodes. An episode of `max_episode_steps` decisions is cut off
    there and counted as it is (`unfinished`), because it may never end; its row plays no other one.
    """

    def __init__(self, policy: Policy, record: Record, env: BatchedEnv, episodes: int, seed: int, rng: torch.Generator,
                 explore: np.ndarray | None = None, *, env_steps: int | None = None, max_episode_steps: int | None = None) -> None:
        self._policy, self._explore, self._rng = policy, explore, rng
        self._state, self._viewer = policy.initial_state(env.num_seats), record.viewer(env.num_seats)
        self._seats = AskedSeats(policy.act, self._state) if env.takes_turns else None
        self._rollout = Rollout(env, env.reset(seed), self._act, episodes)
        self._steps = iter(self._rollout)
        self._budget, self._longest = env_steps, max_episode_steps
        self._return, self._length = np.zeros(env.num_seats), np.zeros(env.num_seats, np.int64)  # of the episodes under way
        self._returns: list[float] = []
        self._lengths: list[int] = []
        self._acted = self._taken = 0.0  # seconds in the policy, and in all
        self._vector_steps = 0           # of all environments together
        self.decisions = 0
        self.unfinished = 0

    def _act(self, now: Step, previous: np.ndarray | None) -> np.ndarray:
        began = time.perf_counter()
        view = self._viewer.of(now, previous)
        if self._seats is not None:
            assert now.acts is not None
            action: Any = self._seats.act(view, now.acts, self._explore, self._rng).copy()
        else:
            action, self._state, _ = self._policy.act(view, self._state, self._explore, self._rng)
        self._acted += time.perf_counter() - began
        return np.asarray(action)

    @property
    def over(self) -> bool:
        return not self._rollout.remaining.any()

    @property
    def episodes(self) -> int:
        """Episodes that count so far."""
        return len(self._returns)

    @property
    def returns(self) -> np.ndarray:
        """From unclipped rewards; of an episode that was cut off, from rewards as a policy sees them."""
        return np.array(self._returns)

    @property
    def lengths(self) -> np.ndarray:
        return np.array(self._lengths)

    @property
    def env_seconds(self) -> float:
        """What a step of one environment takes."""
        return (self._taken - self._acted) / max(1, self._vector_steps * len(self._length))

    def step(self) -> int:
        """Play one step of all environments; returns how many decisions that were."""
        began = time.perf_counter()
        played = next(self._steps)
        self._taken += time.perf_counter() - began
        self._vector_steps += 1
        self._returns.extend(played.returns.tolist())
        self._lengths.extend(played.lengths.tolist())
        step, decisions = played.step, int(np.count_nonzero(played.step.valid))
        self.decisions += decisions
        self._return += step.reward
        self._length += step.valid
        self._return[step.last] = self._length[step.last] = 0
        self._cut_off()
        if self._budget is not None and self.decisions >= self._budget:
            remaining = self._rollout.remaining
            np.minimum(remaining, self._length > 0, out=remaining)
        return decisions

    def to_the_end(self) -> EpisodePlay:
        """Play all of them at once."""
        while not self.over:
            self.step()
        return self

    def _cut_off(self) -> None:
        """Count the episodes that are too long as they are."""
        if self._longest is None:
            return
        rows = np.flatnonzero((self._length >= self._longest) & (self._rollout.remaining > 0))
        self._returns.extend(self._return[rows].tolist())
        self._lengths.extend(self._length[rows].tolist())
        self._rollout.remaining[rows] = 0
        self.unfinished += len(rows)
