"""Environments whose steps cost what a test says."""

from __future__ import annotations

import os
import time

import gymnasium as gym
import numpy as np

MADE = "MADE"  # names a file that has a byte for every environment that was made


class Slow(gym.Env):
    """Waits for `ms` milliseconds in a step, as for a simulator; episodes have 20 steps."""

    def __init__(self, ms: float = 2.0, images: bool = False) -> None:
        shape = (4, 16, 16) if images else (3,)
        self.observation_space = gym.spaces.Box(0, 255, shape, np.uint8 if images else np.float32)
        self.action_space, self.ms, self.at = gym.spaces.Discrete(2), ms, 0
        if MADE in os.environ:
            with open(os.environ[MADE], "ab") as file:
                file.write(b".")

    def seen(self):
        return np.zeros(self.observation_space.shape, self.observation_space.dtype)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = 0
        return self.seen(), {}

    def step(self, action):
        time.sleep(self.ms / 1e3)
        self.at += 1
        return self.seen(), 0.0, False, self.at >= 20, {}


class Quick(Slow):
    def step(self, action):
        self.at += 1
        return self.seen(), 0.0, False, self.at >= 20, {}


class Broken(Slow):
    def __init__(self) -> None:
        raise OSError("no simulator at this port")


class Hanging(Slow):
    def reset(self, *, seed=None, options=None):
        time.sleep(60)
