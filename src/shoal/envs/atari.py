"""Atari as envs/atari_protocol.py defines it: on ale_py's own vector environment (C++ threads, preprocessing included) or envpool.

`num_threads` is 1 because shoal parallelises over actors; give more to a single actor with many environments.
"""

from __future__ import annotations

import difflib
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from shoal.envs.atari_protocol import AtariProtocol
from shoal.envs.builtin.games import GAMES
from shoal.envs.envpool_env import EnvPoolVectorEnv
from shoal.envs.interface import Step
from shoal.envs.vector_env import VectorEnvAdapter
from shoal.errors import ConfigError

__all__ = ["AleAdapter", "AtariAdapter", "AtariEnvPoolAdapter", "atari_spec", "load_ale", "registered"]


def load_ale() -> None:
    """Import ale_py, which registers its ids with gymnasium."""
    try:
        import ale_py  # noqa: F401
    except ImportError as error:
        raise ConfigError("Atari needs ale-py: pip install 'shoal[atari]'") from error


def atari_spec(name: str) -> Any:
    """gymnasium's registration of an ALE/ id."""
    load_ale()
    return registered(name)


def registered(name: str) -> Any:
    """gymnasium's registration of an id; imports ale_py for Atari's plain names (Pong-v4)."""
    if name not in gym.registry and ":" not in name:
        try:
            load_ale()
        except ConfigError:
            if name.startswith("ALE/"):
                raise
    try:
        module, _, rest = name.rpartition(":")
        if module:
            __import__(module)
        return gym.spec(rest)
    except (gym.error.Error, ImportError) as error:
        known = [*gym.registry, *GAMES]
        near = difflib.get_close_matches(name, known, 3, 0.7)
        near += [one for one in (f"ALE/{name}", f"shoal/{name}") if one in known and one not in near]
        other = "give a registered id, module:Env-v0 (shoal imports the module, which registers the id) or module:callable"
        hint = f"did you mean {', '.join(near)}?" if near else other
        raise ConfigError(f"unknown environment {name!r} ({str(error).strip()}); {hint}") from error


class AtariAdapter(VectorEnvAdapter):
    """Adds what the protocol asks for and no back-end does: discount 0 at a lost life, clipped rewards beside the true score."""

    def __init__(self, name: str, env: VectorEnv, protocol: AtariProtocol, check: bool, seed: int | None) -> None:
        super().__init__(name, env, check=check, seed=seed, reward_clip=protocol.reward_clip)
        self.protocol, self.frame_skip, self.max_episode_steps = protocol, protocol.frameskip, protocol.max_episode_steps
        self._lives = np.zeros(self.num_seats, np.int64)

    def reset(self, seed: int | None = None) -> Step:
        self._lives.fill(0)
        return super().reset(seed)

    def _read_extra(self, info: dict[str, Any]) -> None:
        if self.protocol.life_loss == "discount":
            lives = np.asarray(info["lives"])
            self._discount[(lives < self._lives) & ~self._last] = 0
            self._lives[:] = lives


class AleAdapter(AtariAdapter):
    """ale_py.AtariVectorEnv, in SAME_STEP mode, as a BatchedEnv."""

    backend = "ale"

    def __init__(self, name: str, num_envs: int, *, check: bool = True, seed: int | None = None, **kwargs: Any) -> None:
        spec = atari_spec(name)
        from ale_py.vector_env import AtariVectorEnv

        protocol, others = AtariProtocol.of(name, spec.kwargs, kwargs)
        options = {"num_threads": 1, **others, **protocol.ale()}
        env = AtariVectorEnv(spec.kwargs["game"], num_envs, autoreset_mode=AutoresetMode.SAME_STEP, **options)
        super().__init__(name, env, protocol, check, seed)


class AtariEnvPoolAdapter(AtariAdapter):
    """envpool's Atari as a BatchedEnv. ALE/Pong-v5 is envpool's Pong-v5."""

    backend = "envpool"

    def __init__(self, name: str, num_envs: int, *, check: bool = True, seed: int | None = None, **kwargs: Any) -> None:
        protocol, others = AtariProtocol.of(name, atari_spec(name).kwargs, kwargs)
        options = {"num_threads": 1, **others, **protocol.envpool()}
        super().__init__(name, _BlackPaddedEnvPool(name.removeprefix("ALE/"), num_envs, options), protocol, check, seed)


class _BlackPaddedEnvPool(EnvPoolVectorEnv):
    """Pads the frames before a game's first one with black, as ALE does; envpool repeats the first frame there."""

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
        self._age = np.where(self._over, 0, self._age + 1)  # a row that was over has just been reset
        self._over = np.logical_or(terminated, truncated)
        return self._blackened(observation), reward, terminated, truncated, info

    def _blackened(self, observation: np.ndarray) -> np.ndarray:
        young = np.flatnonzero(self._age < self._stack - 1)
        if young.size:
            observation = np.array(observation)  # it may be envpool's own memory
            for row in young:
                observation[row, : self._stack - 1 - self._age[row]] = 0
        return observation
