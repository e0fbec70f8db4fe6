"""Atari through ale_py's own vector environment (C++ threads, preprocessing included).

Defaults are the usual ones: 84 x 84 grey, 4 frames stacked (uint8[4, 84, 84]), each action held for 4 frames with a
maximum over the last two, up to 30 no-ops and FIRE at the start, whole games as episodes, rewards as they are. Sticky
actions are as the id is registered (0.25 for ALE/*-v5; `repeat_action_probability=0.0` switches them off).
`num_threads` is 1 because shoal's unit of parallelism is the actor; give more to a single actor with many environments.
"""

from __future__ import annotations

import difflib
from typing import Any

import gymnasium as gym
from gymnasium.vector import AutoresetMode

from shoal.envs.vector import VectorStream
from shoal.errors import ConfigError

__all__ = ["AtariStream", "atari_spec", "has_ale", "load_ale"]


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


class AtariStream(VectorStream):
    """The stream over ale_py.AtariVectorEnv in SAME_STEP mode."""

    backend = "ale"

    def __init__(self, name: str, num_envs: int, *, check: bool = True, seed: int | None = None, **kwargs: Any) -> None:
        spec = atari_spec(name)
        from ale_py.vector_env import AtariVectorEnv

        options = {"num_threads": 1, **spec.kwargs, **kwargs}
        # Clipped here and not in ALE, so that episode_return stays the game's score.
        clip = 1.0 if options.pop("reward_clipping", False) else None
        if options.get("batch_size", 0) not in (0, num_envs):
            raise ConfigError(f"{name}: batch_size={options['batch_size']} (ALE's asynchronous mode) is not supported")
        try:
            env = AtariVectorEnv(
                num_envs=num_envs, autoreset_mode=AutoresetMode.SAME_STEP, reward_clipping=False, **options
            )
        except TypeError as error:
            raise ConfigError(f"{name}: {error}; options are those of ale_py.AtariVectorEnv") from error
        super().__init__(name, env, check=check, seed=seed, reward_clip=clip)
        self.frame_skip = int(options.get("frameskip", 4))
        self.max_episode_steps = int(options.get("max_num_frames_per_episode", 108_000)) // self.frame_skip
