"""An environment whose observations tell where they come from, and a collector that reads it off the unrolls."""

from __future__ import annotations

import gymnasium as gym
import numpy as np

from shoal.acting import Progress

ACTIONS = 64  # many, so that an action meant for somebody else is noticed


class Echo(gym.Env):
    """Observation: who I am, how many steps I have made, the action before. Reward: that action."""

    def __init__(self, length: int = 7) -> None:
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = gym.spaces.Discrete(ACTIONS)
        self.length, self.name, self.steps, self.action = length, None, 0, -1.0

    def observe(self):
        return np.array([self.name, self.steps, self.action], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if self.name is None or seed is not None:
            self.name, self.steps = float(self.np_random.random(dtype=np.float32)), 0
        self.action = -1.0
        self.age = 0
        return self.observe(), {}

    def step(self, action):
        self.steps += 1
        self.age += 1
        self.action = float(action)
        return self.observe(), self.action, self.age >= self.length, False, {}


def faults_of(unroll) -> list[str]:
    """What is wrong with an unroll of Echo environments; nothing, if every row is one environment's own story."""
    seen, action, reward, first, valid = (unroll[name] for name in ("observation", "action", "reward", "first", "valid"))
    found = []
    if (seen[..., 0] != seen[:1, :, 0]).any():
        found.append("an unroll mixes two environments, or two lives of one")
    moved = valid & ~first[1:]
    if (np.diff(seen[..., 1], axis=0)[moved] != 1).any():
        found.append("a step is missing or double")
    if (seen[1:, :, 2][moved] != action[moved]).any():
        found.append("what was executed is not what was recorded: replies were crossed")
    if (reward[valid] != action[valid]).any():
        found.append("a reward belongs to another action")
    return found


class Collector:
    """In the learner's place: publishes once, keeps unrolls (inline), and fails the run for one that is wrong."""

    kept: list | None = None

    def __init__(self, me, parts, batches, weights, enough: int = 40, gaps: bool = False, **_):
        self.me, self.unrolls, self.weights, self.enough, self.gaps = me, batches, weights, enough, gaps
        self.layout = parts.algorithm.record.layout
        self.learn = parts.algorithm.learn(parts.seed)
        self.taken = 0
        self.ends: dict[float, float] = {}  # per environment the step at which its last unroll ended

    async def step(self):
        if self.weights.version == 0:
            self.weights.publish(self.learn.published(Progress()))
        unroll = await self.unrolls.take(1)
        for fault in faults_of(unroll) + ([] if self.gaps else self.overlap(unroll)):
            self.me.fail(fault)
        if Collector.kept is not None:
            copy = self.layout.empty()
            self.layout.copy(copy, unroll)
            Collector.kept.append(copy)
        self.taken += 1
        self.me.stats.add("samples_consumed", int(unroll["valid"].sum()))
        if self.taken == self.enough:
            self.me.finish("enough")

    def overlap(self, unroll) -> list[str]:
        """Each unroll begins with the observation that the one before it ended with."""
        found = []
        for begin, end in zip(unroll["observation"][0], unroll["observation"][-1], strict=True):
            name = float(begin[0])
            if self.ends.get(name, float(begin[1])) != float(begin[1]):
                found.append("consecutive unrolls do not overlap by one observation")
            self.ends[name] = float(end[1])
        return found
