"""Per-step Python environments, the same for all libraries: gymnasium's CartPole, and Pong through ALE, one environment each.

It imports nothing of shoal and runs with gymnasium 0.29 (Sample Factory) as well as 1.x. Pong's preprocessing (84 x 84
grey, maximum of two frames, 4 stacked, 4 frames an action, sticky actions) is done in C++ by ale_py's own vector
interface with a single environment, so that no wrappers slow it down.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

__all__ = ["Pong", "cartpole", "make", "pong"]


class Pong(gym.Env):
    """ALE's Pong as one ordinary gymnasium environment; `image` says how observations are laid out."""

    metadata = {"render_modes": []}  # noqa: RUF012  gymnasium's own form
    render_mode = None

    def __init__(self, image: str = "CHW uint8") -> None:
        from ale_py import roms
        from ale_py._ale_py import ALEVectorInterface

        self._ale = ALEVectorInterface(rom_path=roms.get_rom_path("pong"), num_envs=1, num_threads=1, reward_clipping=False,
                                       repeat_action_probability=0.25)
        self._image = image
        shape = (4, 84, 84) if image.startswith("CHW") else (84, 84, 4)
        floats = image.endswith("float32")
        self.observation_space = gym.spaces.Box(0, 1.0 if floats else 255, shape, np.float32 if floats else np.uint8)
        self.action_space = gym.spaces.Discrete(len(self._ale.get_action_set()))
        self._index, self._strength = np.zeros(1, np.int64), np.ones(1, np.float32)

    def _seen(self, observation: np.ndarray) -> np.ndarray:
        one = observation[0]
        if self._image.startswith("HWC"):
            one = one.transpose(1, 2, 0)
        return one.astype(np.float32) / 255 if self._image.endswith("float32") else np.array(one)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        whole = -1 if seed is None else seed % (2**31 - 1)  # ALE takes 31 bits
        observation, _ = self._ale.reset(self._index, np.array([whole]))
        return self._seen(observation), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._ale.send(np.array([action], np.int64), self._strength)
        observation, reward, terminated, truncated, _ = self._ale.recv()
        return self._seen(observation), float(reward[0]), bool(terminated[0]), bool(truncated[0]), {}


def cartpole() -> gym.Env:
    return gym.make("CartPole-v1", disable_env_checker=True)


def pong() -> gym.Env:
    return Pong()


def make(scene: str, image: str = "CHW uint8") -> gym.Env:
    return cartpole() if scene == "cartpole" else Pong(image)
