"""An environment of which there are only recordings: its spaces are known, and it cannot be made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium as gym

from shoal.envs.interface import EnvSpec
from shoal.errors import ConfigError

__all__ = ["RecordedEnv"]


@dataclass(frozen=True)
class RecordedEnv:
    """Stands where an environment would: learners need only its spaces, and nobody acts in it."""

    name: str
    observation_space: gym.Space[Any]
    """In canonical form, as everything here."""
    action_space: gym.Space[Any]
    mask_size: int = 0

    def describe(self) -> EnvSpec:
        return EnvSpec(self.name, self.observation_space, self.action_space, None, 1, 1, self.mask_size > 0, "none",
                       f"{self.name} is known from recordings alone: nothing is simulated", self.mask_size)

    def refuse(self) -> ConfigError:
        """The error where somebody wants to act in it."""
        return ConfigError(f"{self.name} is known from recordings alone; give the simulator with --env ENV (in Python: env=...)")
