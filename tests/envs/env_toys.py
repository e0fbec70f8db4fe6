"""Small environments with known streams, and a recorder that turns a stream back into transitions."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

# How successive episodes end: (length, terminated, truncated).
ENDS = [(3, True, False), (4, False, True), (1, True, False), (2, True, True), (1, False, True), (5, False, True)]


class Counting(gym.Env):
    """Observation (episode, t); reward 100 * episode + t; episodes end as ENDS says, over and over."""

    def __init__(self, shift: int = 0) -> None:
        self.observation_space = spaces.Box(-1, 1e6, (2,), np.float64)
        self.action_space = spaces.Discrete(3)
        self.episode, self.t, self.shift = -1, 0, shift
        self.actions: list[Any] = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self._look(), {}

    def step(self, action):
        self.t += 1
        self.actions.append(action)
        length, terminated, truncated = ENDS[(self.episode + self.shift) % len(ENDS)]
        over = self.t == length
        return self._look(), 100.0 * self.episode + self.t, over and terminated, over and truncated, {}

    def _look(self):
        return np.array([self.episode, self.t], np.float64)


class CountingDict(Counting):
    """The same, as a Dict with a Tuple inside."""

    def __init__(self, shift: int = 0) -> None:
        super().__init__(shift)
        self.observation_space = spaces.Dict(
            {"pair": spaces.Tuple((spaces.Discrete(1000), spaces.Box(0, 1000, (1,), np.float64)))}
        )

    def _look(self):
        return {"pair": (self.episode, np.array([self.t], np.float64))}


def expected(shift: int, count: int) -> list[tuple]:
    """The first `count` transitions of a Counting row, worked out without any environment."""
    out: list[tuple] = []
    episode = 0
    while len(out) < count:
        length, terminated, truncated = ENDS[(episode + shift) % len(ENDS)]
        for t in range(1, length + 1):
            over = t == length
            out.append(
                (
                    (episode, t - 1),
                    100.0 * episode + t,
                    0.0 if over and terminated else 1.0,
                    over,
                    over and truncated and not terminated,
                    None if over and terminated else (episode, t),  # what a learner may bootstrap from
                )
            )
        episode += 1
    return out[:count]


def pair(observation: Any, row: int) -> tuple[int, int]:
    if isinstance(observation, dict):
        inner = observation["pair"]
        return int(inner["0"][row]), int(inner["1"][row, 0])
    return int(observation[row, 0]), int(observation[row, 1])


def record(env: Any, steps: int, action: int = 1, *, trust_valid: bool = True) -> tuple[list[list[tuple]], list[tuple]]:
    """The valid transitions of each row, as a recorder would store them, and the (return, length) of each episode."""
    step = env.reset(seed=0)
    rows: list[list[tuple]] = [[] for _ in range(env.num_seats)]
    episodes: list[tuple] = []
    fresh = np.ones(env.num_seats, bool)
    before = [pair(step.observation, i) for i in range(env.num_seats)]
    for _ in range(steps):
        step = env.step(np.full(env.num_seats, action))
        finals = {int(r): pair(step.final_observation, k) for k, r in enumerate(step.final_rows)}
        assert set(finals) == set(np.flatnonzero(step.truncated))
        assert not (step.last & ~step.valid).any()
        for i in range(env.num_seats):
            now = pair(step.observation, i)
            if step.valid[i] or not trust_valid:
                assert fresh[i] or not trust_valid  # a transition starts from an episode that has begun
                after = finals[i] if step.truncated[i] else None if step.discount[i] == 0 else now
                rows[i].append(
                    (before[i], float(step.reward[i]), float(step.discount[i]), bool(step.last[i]), i in finals, after)
                )
            fresh[i] = (fresh[i] and not step.last[i]) or step.first[i]
            before[i] = now
        episodes += list(zip(step.episode_return.tolist(), step.episode_length.tolist(), strict=True))
    return rows, episodes


def uniform(agent: int, seen: np.ndarray, masks: np.ndarray) -> np.ndarray:
    """An exploitability.Probabilities: the policy that chooses among legal actions at random."""
    return np.asarray(masks / masks.sum(1, keepdims=True))
