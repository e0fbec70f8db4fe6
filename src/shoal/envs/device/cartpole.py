"""Cart-pole as tensors: gymnasium's CartPole-v1 (Barto, Sutton and Anderson 1983), with the same float64 state."""

from __future__ import annotations

from typing import Any

import torch

from shoal.envs.builtin.catalog import plan
from shoal.envs.device.rules import Ruled

__all__ = ["CartPole", "CartPoleRules"]

FALL = 12 * 2 * torch.pi / 360


class CartPoleRules:
    """State: x, x', theta, theta'."""

    dtype, draws = torch.float64, 4

    def __init__(self, sutton_barto_reward: bool = False) -> None:
        design = plan("CartPole-v1", {"sutton_barto_reward": sutton_barto_reward})
        self.observation_space, self.action_space = design.observation_space, design.action_space
        self.limit, self._sutton_barto = design.max_episode_steps, sutton_barto_reward

    def start(self, uniform: torch.Tensor) -> torch.Tensor:
        return 0.1 * uniform.to(self.dtype) - 0.05

    def move(self, state: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, speed, angle, spin = state.unbind(0)
        force = 20.0 * action.to(self.dtype) - 10.0
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

    def look(self, state: torch.Tensor) -> torch.Tensor:
        return state.t().to(torch.float32, memory_format=torch.contiguous_format)


def CartPole(num_envs: int, device: torch.device | str, max_episode_steps: int | None = None, **kwargs: Any) -> Ruled:
    """CartPole-v1 on a device."""
    return Ruled(CartPoleRules(**kwargs), num_envs, device, max_episode_steps)
