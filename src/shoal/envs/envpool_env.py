"""Back-end "envpool", on request: its batch as a gymnasium VectorEnv in NEXT_STEP mode.

envpool steps all environments in C++ threads. It resets a row that ended in the row's next step and drops that step's action: the
dead row that VectorEnvAdapter marks invalid. envpool fixes seeds at construction, so reset(seed) builds a new pool.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from shoal.envs.vector_env import VectorEnvAdapter
from shoal.errors import ConfigError

__all__ = ["EnvPoolAdapter", "EnvPoolVectorEnv"]


class EnvPoolVectorEnv(VectorEnv):
    """envpool.make(..., env_type="gymnasium") with the few attributes VectorEnvAdapter reads."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, task: str, num_envs: int, options: dict[str, Any]) -> None:
        try:
            import envpool
        except ImportError as error:
            raise ConfigError("backend='envpool' needs envpool: pip install 'shoal[envpool]'") from error
        self._make: Callable[..., Any] = partial(envpool.make, task, env_type="gymnasium", num_envs=num_envs, **options)
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


class EnvPoolAdapter(VectorEnvAdapter):
    """envpool's environments as a BatchedEnv, except Atari, which has its own adapter in envs/atari.py."""

    backend = "envpool"

    def __init__(self, name: str, num_envs: int, *, check: bool = True, seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(name, EnvPoolVectorEnv(name, num_envs, kwargs), check=check, seed=seed)
        limit = kwargs.get("max_episode_steps")
        self.max_episode_steps = None if limit is None else int(limit)
