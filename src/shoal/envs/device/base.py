"""What an environment of tensors is, and which ids have one."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple, Protocol, runtime_checkable

import gymnasium as gym
import torch

from shoal.errors import ConfigError

__all__ = ["TensorEnv", "TensorStep", "has_tensor_env", "make_tensors"]

IDS = {
    "CartPole-v1": "shoal.envs.device.cartpole:CartPole",
    "shoal/Catch-v0": "shoal.envs.device.catch:Catch",
    "shoal/PixelCatch-v0": "shoal.envs.device.catch:PixelCatch",
}


class TensorStep(NamedTuple):
    """One step of B environments, all tensors on one device."""

    observation: Any
    """[B, ...] (or a dictionary): what is acted on next; where an episode ended, the first one of the next episode."""
    reward: torch.Tensor
    """[B] float32."""
    terminated: torch.Tensor
    """[B] bool: the episode ended, and nothing more was to be had."""
    truncated: torch.Tensor
    """[B] bool: the episode was cut off. Never together with terminated."""
    final_observation: Any
    """[B, ...]: the observation before the next episode began; looked at only where truncated."""


@runtime_checkable
class TensorEnv(Protocol):
    """B environments that step together; see the package for what a CUDA graph asks of them."""

    num_envs: int
    observation_space: gym.Space  # of one environment
    action_space: gym.Space
    max_episode_steps: int | None  # None: no episode is ever truncated

    def reset(self, generator: torch.Generator) -> Any:
        """Begin an episode everywhere; the first observations."""

    def step(self, action: torch.Tensor, generator: torch.Generator) -> TensorStep:
        """One decision everywhere."""


def has_tensor_env(env: Any) -> bool:
    return env in IDS if isinstance(env, str) else callable(env)


def make_tensors(env: Any, num_envs: int, device: torch.device | str, **kwargs: Any) -> TensorEnv:
    """`num_envs` environments on a device: of an id that has such a version, or of a callable that gives a TensorEnv."""
    make: Any = env
    if isinstance(env, str):
        if env not in IDS:
            raise ConfigError(f"{env} does not run on a device: it is not tensor code; there are {', '.join(IDS)}, or pass a class "
                              "like shoal.envs.device.TensorEnv, or use another --architecture")
        module, _, name = IDS[env].partition(":")
        make = getattr(import_module(module), name)
    try:
        made = make(num_envs=num_envs, device=torch.device(device), **kwargs)
    except TypeError as error:
        raise ConfigError(f"{getattr(env, '__name__', env)} could not be made with num_envs, device and "
                          f"{kwargs or 'no options'}: {error}") from error
    if not isinstance(made, TensorEnv):
        raise ConfigError(f"{getattr(env, '__name__', env)} makes a {type(made).__name__}, which is no TensorEnv: it needs "
                          "num_envs, spaces, max_episode_steps, reset(generator) and step(action, generator)")
    return made
