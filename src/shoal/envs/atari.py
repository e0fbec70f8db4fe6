"""Atari, by the protocol of envs/protocol.py: ale_py's own vector environment (C++ threads, preprocessing included) or envpool.

`num_threads` is 1 because shoal's unit of parallelism is the actor; give more to a single actor with many environments.
"""

from __future__ import annotations

import difflib
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from shoal.envs.pool import Pool
from shoal.envs.protocol import AtariProtocol
from shoal.envs.stream import Step
from shoal.envs.vector import VectorStream
from shoal.errors import ConfigError

__all__ = ["AtariPoolStream", "AtariStream", "atari_spec", "has_ale", "load_ale"]


def has_ale() -> bool:
    try:
        load_ale()
    except ConfigError:
        return False
    return True


def load_ale() -> None:
    """Import ale_py, which registers its ids with gymnasium."""
    try:
        import ale_py  # noqa: F401
    except ImportError as error:
        raise ConfigError("Atari needs ale-py: pip install 'shoal[atari]'") from error


def atari_spec(name: str) -> Any:
    """gymnasium's registration of an ALE/ id."""
    load_ale()
    spec = gym.registry.get(name)
    if spec is None:
        near = difflib.get_close_matches(name, [one for one in gym.registry if one.startswith("ALE/")], 3)
        raise ConfigError(f"unknown environment {name!r}" + (f"; did you mean {', '.join(near)}?" if near else ""))
    return spec


class _Game(VectorStream):
    """What the protocol asks for and no back-end does: lost lives, and rewards clipped beside a score that is not."""

    def __init__(self, name: str, env: VectorEnv, protocol: AtariProtocol, check: bool, seed: int | None) -> None:
        super().__init__(name, env, check=check, seed=seed, reward_clip=protocol.reward_clip)
        self.protocol, self.frame_skip, self.max_episode_steps = protocol, protocol.frameskip, protocol.max_episode_steps
        self._lives = np.zeros(self.num_seats, np.int64)

    def reset(self, seed: int | None = None) -> Step:
        self._lives.fill(0)
        return super().reset(seed)

    def _informed(self, info: dict[str, Any]) -> None:
        if self.protocol.life_loss == "discount":
            lives = np.asarray(info["lives"])
            self._discount[(lives < self._lives) & ~self._last] = 0
            self._lives[:] = lives


class AtariStream(_Game):
    """The stream over ale_py.AtariVectorEnv in SAME_STEP mode."""

    backend = "ale"

    def __init__(self, name: str, num_envs: int, *, check: bool = True, seed: int | None = None, **kwargs: Any) -> None:
        spec = atari_spec(name)
        from ale_py.vector_env import AtariVectorEnv

        protocol, others = AtariProtocol.of(name, spec.kwargs, kwargs)
        options = {"num_threads": 1, **others, **protocol.ale()}
        env = AtariVectorEnv(spec.kwargs["game"], num_envs, autoreset_mode=AutoresetMode.SAME_STEP, **options)
        super().__init__(name, env, protocol, check, seed)


class AtariPoolStream(_Game):
    """The stream over envpool's Atari. ALE/Pong-v5 is envpool's Pong-v5."""

    backend = "envpool"

    def __init__(self, name: str, num_envs: int, *, check: bool = True, seed: int | None = None, **kwargs: Any) -> None:
        protocol, others = AtariProtocol.of(name, atari_spec(name).kwargs, kwargs)
        options = {"num_threads": 1, **others, **protocol.envpool()}
        super().__init__(name, _BlackBefore(name.removeprefix("ALE/"), num_envs, options), protocol, check, seed)


class _BlackBefore(Pool):
    """Before a game's first frame there is nothing: ALE shows black, envpool the first frame again. Here it is black."""

    def __init__(self, task: str, num_envs: int, options: dict[str, Any]) -> None:
        super().__init__(task, num_envs, options)
        self._stack = options["stack_num"]
        self._age, self._over = np.zeros(num_envs, np.int64), np.zeros(num_envs, bool)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = super().reset(seed=seed, options=options)
        self._age.fill(0)
        self._over.fill(False)
        return self._blackened(observation), info

    def step(self, actions: np.ndarray) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(actions)
        self._age = np.where(self._over, 0, self._age + 1)  # a row that was over has just begun anew
        self._over = np.logical_or(terminated, truncated)
        return self._blackened(observation), reward, terminated, truncated, info

    def _blackened(self, observation: np.ndarray) -> np.ndarray:
        young = np.flatnonzero(self._age < self._stack - 1)
        if young.size:
            observation = np.array(observation)  # it may be envpool's own memory
            for row in young:
                observation[row, : self._stack - 1 - self._age[row]] = 0
        return observation
