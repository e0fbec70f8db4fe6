"""From the dynamics of an environment to a TensorEnv: time limits, the next episode, everything in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import gymnasium as gym
import torch

from shoal.envs.device.tensor_env import TensorStep
from shoal.errors import ConfigError

__all__ = ["Dynamics", "DynamicsEnv"]


class Dynamics(Protocol):
    """What differs between environments: pure functions of a state [S, B]."""

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    max_episode_steps: int | None
    state_dtype: torch.dtype
    num_uniform: int  # random numbers that the start of an episode needs

    def initial_state(self, uniform: torch.Tensor) -> torch.Tensor:
        """States [S, B] from random numbers [num_uniform, B] in [0, 1)."""
        ...

    def transition(self, state: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The next state [S, B], reward [B], terminated [B]."""
        ...

    def observe(self, state: torch.Tensor) -> Any:
        """Observations [B, ...]."""
        ...


class DynamicsEnv:
    """A TensorEnv with these Dynamics."""

    def __init__(
        self, dynamics: Dynamics, num_envs: int, device: torch.device | str, max_episode_steps: int | None = None
    ) -> None:
        limit = dynamics.max_episode_steps if max_episode_steps is None else max_episode_steps
        if limit is not None and limit < 1:
            raise ConfigError(f"max_episode_steps={limit}: use at least 1")
        self.dynamics, self.num_envs, self.max_episode_steps = dynamics, num_envs, limit
        self.observation_space, self.action_space = dynamics.observation_space, dynamics.action_space
        self.device = torch.device(device)
        blank = torch.zeros((dynamics.num_uniform, num_envs), device=self.device)
        self.state = dynamics.initial_state(blank).clone()
        self.lengths = torch.zeros(num_envs, dtype=torch.int32, device=self.device)
        self._advance: Callable[..., Any] = self._eager_advance

    def compile(self) -> None:
        """Fuse the dynamics into a few kernels."""
        self._advance = torch.compile(self._eager_advance, dynamic=False)

    def _draw(self, generator: torch.Generator) -> torch.Tensor:
        return torch.rand((self.dynamics.num_uniform, self.num_envs), generator=generator, device=self.device)

    def reset(self, generator: torch.Generator) -> Any:
        self.state.copy_(self.dynamics.initial_state(self._draw(generator)))
        self.lengths.zero_()
        return self.dynamics.observe(self.state)

    def step(self, action: torch.Tensor, generator: torch.Generator) -> TensorStep:
        state, lengths, *step = self._advance(self.state, self.lengths, action, self._draw(generator))
        self.state.copy_(state)
        self.lengths.copy_(lengths)
        return TensorStep(*step)

    def _eager_advance(
        self, state: torch.Tensor, lengths: torch.Tensor, action: torch.Tensor, uniform: torch.Tensor
    ) -> tuple[Any, ...]:
        """(state, lengths) after the step and its resets, then the fields of a TensorStep."""
        dynamics = self.dynamics
        moved, reward, terminated = dynamics.transition(state, action)
        lengths = lengths + 1
        if self.max_episode_steps is None:
            truncated, last = torch.zeros_like(terminated), terminated
        else:
            truncated = (lengths >= self.max_episode_steps) & ~terminated
            last = terminated | truncated
        begun = torch.where(last, dynamics.initial_state(uniform), moved)
        seen = dynamics.observe(begun)
        final = seen if self.max_episode_steps is None else dynamics.observe(moved)
        return begun, lengths * ~last, seen, reward, terminated, truncated, final
