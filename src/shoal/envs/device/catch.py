"""Catch as tensors: shoal/Catch-v0 and shoal/PixelCatch-v0 (bsuite; Osband et al. 2020), with the catalogue's parameters."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import torch

from shoal.envs.builtin.catalog import BuiltinSpec, builtin_spec
from shoal.envs.device.dynamics import DynamicsEnv

__all__ = ["Catch", "CatchDynamics", "PixelCatch"]


class CatchDynamics:
    """State: ball row, ball column, paddle column."""

    state_dtype, num_uniform = torch.int64, 1

    def __init__(self, spec: BuiltinSpec) -> None:
        self.observation_space: gym.Space[Any] = spec.observation_space
        self.action_space = spec.action_space
        self._shape = spec.observation_space.shape
        self.max_episode_steps = spec.max_episode_steps
        rows, columns, ball, scale, lit, *place = map(float, spec.params)
        self._rows, self._columns, self._ball, self._scale, self._lit = int(rows), int(columns), int(ball), scale, int(lit)
        self._cell, self._top, self._left, self._width = (int(n) for n in place)

    def initial_state(self, uniform: torch.Tensor) -> torch.Tensor:
        column = (uniform[0] * self._columns).long().clamp(max=self._columns - 1)  # rounding may reach the number of columns
        if self._ball >= 0:
            column = torch.full_like(column, self._ball)
        return torch.stack([torch.zeros_like(column), column, torch.full_like(column, self._columns // 2)])

    def transition(self, state: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        row, column, paddle = state.unbind(0)
        row, paddle = row + 1, (paddle + action - 1).clamp(0, self._columns - 1)
        over = row == self._rows - 1
        caught = torch.where(column == paddle, self._scale, -self._scale)
        return torch.stack([row, column, paddle]), torch.where(over, caught, 0.0).float(), over

    def observe(self, state: torch.Tensor) -> torch.Tensor:
        row, column, paddle = (x.view(-1, 1, 1) for x in state.unbind(0))
        height = math.prod(self._shape) // self._width
        y, x = torch.arange(height, device=state.device), torch.arange(self._width, device=state.device)
        y = ((y - self._top) // self._cell).view(1, -1, 1)
        x = ((x - self._left) // self._cell).view(1, 1, -1)
        lit = ((y == row) & (x == column)) | ((y == self._rows - 1) & (x == paddle))
        dtype = torch.uint8 if self._lit == 255 else torch.float32
        return (lit.to(dtype) * self._lit).view(-1, *self._shape)


def Catch(num_envs: int, device: torch.device | str, max_episode_steps: int | None = None, **kwargs: Any) -> DynamicsEnv:
    """shoal/Catch-v0 on a device."""
    return DynamicsEnv(CatchDynamics(builtin_spec("shoal/Catch-v0", kwargs)), num_envs, device, max_episode_steps)


def PixelCatch(num_envs: int, device: torch.device | str, max_episode_steps: int | None = None, **kwargs: Any) -> DynamicsEnv:
    """shoal/PixelCatch-v0 on a device."""
    return DynamicsEnv(CatchDynamics(builtin_spec("shoal/PixelCatch-v0", kwargs)), num_envs, device, max_episode_steps)
