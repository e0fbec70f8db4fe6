"""Cart-pole as tensors: gymnasium's CartPole-v1 (Barto, Sutton and Anderson 1983), with the same float64 state."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import torch

from shoal.envs.builtin.catalog import builtin_spec
from shoal.envs.device.dynamics import DynamicsEnv

__all__ = ["CartPole", "CartPoleDynamics"]

FALL = 12 * 2 * torch.pi / 360


class CartPoleDynamics:
    """State: x, x', theta, theta'."""

    state_dtype, num_uniform = torch.float64, 4

    def __init__(self, sutton_barto_reward: bool = False) -> None:
        spec = builtin_spec("CartPole-v1", {"sutton_barto_reward": sutton_barto_reward})
        self.observation_space: gym.Space[Any] = spec.observation_space
        self.action_space = spec.action_space
        self.max_episode_steps, self._sutton_barto = spec.max_episode_steps, sutton_barto_reward

    def initial_state(self, uniform: torch.Tensor) -> torch.Tensor:
        return 0.1 * uniform.to(self.state_dtype) - 0.05

    def transition(self, state: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, speed, angle, spin = state.unbind(0)
        force = 20.0 * action.to(self.state_dtype) - 10.0
        sin, cos = torch.sin(angle), torch.cos(angle)
        push = (force + 0.05 * spin * spin * sin) / 1.1
        bend = (9.8 * sin - cos * push) / (0.5 * (4.0 / 3.0 - 0.1 * cos * cos / 1.1))
        moved = torch.stack([
            x + 0.02 * speed,
            speed + 0.02 * (push - 0.05 * bend * cos / 1.1),
            angle + 0.02 * spin,
            spin + 0.02 * bend,
        ])
        over = (moved[0].abs() > 2.4) | (moved[2].abs() > FALL)
        reward = -over.float() if self._sutton_barto else torch.ones_like(over, dtype=torch.float32)
        return moved, reward, over

    def observe(self, state: torch.Tensor) -> torch.Tensor:
        return state.t().to(torch.float32, memory_format=torch.contiguous_format)


def CartPole(num_envs: int, device: torch.device | str, max_episode_steps: int | None = None, **kwargs: Any) -> DynamicsEnv:
    """CartPole-v1 on a device."""
    return DynamicsEnv(CartPoleDynamics(**kwargs), num_envs, device, max_episode_steps)
