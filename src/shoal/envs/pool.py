"""envpool as an optional back-end: its batch as a gymnasium VectorEnv in NEXT_STEP mode.

envpool steps all environments in C++ threads. A row that ended is reset by its next step, whose action is dropped: the
dead row that VectorStream marks invalid. Seeds are fixed at construction, so reset(seed) builds a new pool.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from shoal.envs.vector import VectorStream
from shoal.errors import ConfigError

__all__ = ["Pool", "PoolStream"]


class Pool(VectorEnv):
    """envpool.make(..., env_type="gymnasium") with the few attributes VectorStream reads."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, task: str, num_envs: int, options: dict[str, Any]) -> None:
        try:
            import envpool
        except ImportError as error:
            raise ConfigError("backend='envpool' needs envpool: pip install 'shoal[envpool]'") from error
        self._make = lambda **seed: envpool.make(task, env_type="gymnasium", num_envs=num_envs, **options, **seed)
        try:
            self._pool = self._make()
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"envpool cannot make {task!r} with {options}: {error}") from error
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = self._pool.observation_space, self._pool.action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self._pool.close()
            self._pool = self._make(seed=seed)
        observation, _ = self._pool.reset()
        return observation, {}

    def step(self, actions: np.ndarray) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self._pool.step(actions)
        return observation, reward, terminated, truncated, {"lives": info["lives"]} if "lives" in info else {}

    def close(self, **kwargs: Any) -> None:
        self._pool.close()


class PoolStream(VectorStream):
    """The stream over envpool, for what is not Atari: that has a protocol of its own in envs/atari.py."""

    backend = "envpool"

    def __init__(self, name: str, num_envs: int, *, check: bool = True, seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(name, Pool(name, num_envs, kwargs), check=check, seed=seed)
        limit = kwargs.get("max_episode_steps")
        self.max_episode_steps = None if limit is None else int(limit)
