"""From the rules of an environment to a TensorEnv: time limits, the next episode, everything in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import gymnasium as gym
import torch

from shoal.envs.device.base import TensorStep
from shoal.errors import ConfigError

__all__ = ["Ruled", "Rules"]


class Rules(Protocol):
    """What differs between environments: pure functions of a state [S, B]."""

    observation_space: gym.Space
    action_space: gym.Space
    limit: int | None  # of decisions in an episode
    dtype: torch.dtype  # of the state
    draws: int  # random numbers that the start of an episode needs

    def start(self, uniform: torch.Tensor) -> torch.Tensor:
        """States from random numbers [draws, B] in [0, 1)."""

    def move(self, state: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The next state [S, B], reward [B], terminated [B]."""

    def look(self, state: torch.Tensor) -> Any:
        """Observations [B, ...]."""


class Ruled:
    """A TensorEnv of some Rules."""

    def __init__(self, rules: Rules, num_envs: int, device: torch.device | str, max_episode_steps: int | None = None) -> None:
        limit = rules.limit if max_episode_steps is None else max_episode_steps
        if limit is not None and limit < 1:
            raise ConfigError(f"max_episode_steps={limit}: use at least 1")
        self.rules, self.num_envs, self.max_episode_steps = rules, num_envs, limit
        self.observation_space, self.action_space = rules.observation_space, rules.action_space
        self.device = torch.device(device)
        blank = torch.zeros((rules.draws, num_envs), device=self.device)
        self.state = rules.start(blank).clone()
        self.lengths = torch.zeros(num_envs, dtype=torch.int32, device=self.device)
        self._advance: Callable[..., Any] = self._plain

    def compile(self) -> None:
        """Fuse the rules into a few kernels."""
        self._advance = torch.compile(self._plain, dynamic=False)

    def _draw(self, generator: torch.Generator) -> torch.Tensor:
        return torch.rand((self.rules.draws, self.num_envs), generator=generator, device=self.device)

    def reset(self, generator: torch.Generator) -> Any:
        self.state.copy_(self.rules.start(self._draw(generator)))
        self.lengths.zero_()
        return self.rules.look(self.state)

    def step(self, action: torch.Tensor, generator: torch.Generator) -> TensorStep:
        state, lengths, *step = self._advance(self.state, self.lengths, action, self._draw(generator))
        self.state.copy_(state)
        self.lengths.copy_(lengths)
        return TensorStep(*step)

    def _plain(self, state: torch.Tensor, lengths: torch.Tensor, action: torch.Tensor, uniform: torch.Tensor) -> tuple[Any, ...]:
        rules = self.rules
        moved, reward, terminated = rules.move(state, action)
        lengths = lengths + 1
        if self.max_episode_steps is None:
            truncated, last = torch.zeros_like(terminated), terminated
        else:
            truncated = (lengths >= self.max_episode_steps) & ~terminated
            last = terminated | truncated
        begun = torch.where(last, rules.start(uniform), moved)
        seen = rules.look(begun)
        final = seen if self.max_episode_steps is None else rules.look(moved)
        return begun, lengths * ~last, seen, reward, terminated, truncated, final
