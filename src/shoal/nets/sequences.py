"""Sequences [T, B, ...]: what all nets with a torso, a core and heads do alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ConfigError

__all__ = ["fold", "lead", "previous_step"]


def lead(observation: Any) -> tuple[int, int]:
    """T and B."""
    while isinstance(observation, dict):
        observation = next(iter(observation.values()))
    return observation.shape[0], observation.shape[1]


def fold(observation: Any) -> Any:
    """[T, B, ...] -> [T B, ...]"""
    if isinstance(observation, dict):
        return {key: fold(part) for key, part in observation.items()}
    return observation.flatten(0, 1)


def previous_step(
    encode: Callable[[Tensor], Tensor], first: Tensor | None, prev_action: Tensor | None, prev_reward: Tensor | None
) -> Tensor:
    """[..., encoded + 1]: encoded action and clipped reward; zero where an episode starts."""
    if prev_action is None or prev_reward is None:
        raise ConfigError("net.prev_action_reward = True: the net needs prev_action and prev_reward at every step")
    reward = prev_reward.float().clamp(-1, 1).unsqueeze(-1)
    x = torch.cat([encode(prev_action), reward], -1)
    return x if first is None else x.masked_fill(first.unsqueeze(-1), 0.0)
