"""TensorEnv, the interface of environments that are tensor code, and the ids that have such a version."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple, Protocol, runtime_checkable

import gymnasium as gym
import torch

from shoal.envs.interface import env_name
from shoal.errors import ConfigError

__all__ = ["CompilableTensorEnv", "TensorEnv", "TensorStep", "make_tensor_env"]

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
    """[B] bool: the episode ended by itself; its value ends here."""
    truncated: torch.Tensor
    """[B] bool: the episode was cut off. Never together with terminated."""
    final_observation: Any
    """[B, ...]: the episode's last observation; read only where truncated."""


@runtime_checkable
class TensorEnv(Protocol):
    """B environments that step together; see the package for what a CUDA graph asks of them."""

    num_envs: int
    observation_space: gym.Space[Any]  # of one environment
    action_space: gym.Space[Any]
    max_episode_steps: int | None  # None: no episode is ever truncated

    def reset(self, generator: torch.Generator) -> Any:
        """Begin an episode in all environments; returns the first observations."""
        ...

    def step(self, action: torch.Tensor, generator: torch.Generator) -> TensorStep:
        """One decision in each environment."""
        ...


@runtime_checkable
class CompilableTensorEnv(TensorEnv, Protocol):
    """A TensorEnv whose step can be fused into fewer kernels. Optional: DynamicsEnv has it."""

    def compile(self) -> None:
        """Call once, before the first step."""
        ...


def make_tensor_env(env: Any, num_envs: int, device: torch.device | str, **kwargs: Any) -> TensorEnv:
    """`num_envs` environments on a device: from an id that has such a version, or from a callable that returns a TensorEnv."""
    make: Any = env
    if isinstance(env, str):
        if env not in IDS:
            raise ConfigError(f"{env} has no tensor version, so it cannot run on a device; use {', '.join(IDS)}, a class of your "
                              "own like shoal.envs.device.TensorEnv, or another --architecture")
        module, _, attribute = IDS[env].partition(":")
        make = getattr(import_module(module), attribute)
    name = env_name(env)
    try:
        made = make(num_envs=num_envs, device=torch.device(device), **kwargs)
    except TypeError as error:
        raise ConfigError(f"cannot create {name} with num_envs, device and {kwargs or 'no options'}: {error}") from error
    if not isinstance(made, TensorEnv):
        raise ConfigError(f"{name} returns a {type(made).__name__}, which is not a TensorEnv: it needs num_envs, "
                          "observation_space, action_space, max_episode_steps, reset(generator) and step(action, generator)")
    return made
