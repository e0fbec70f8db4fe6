"""Noise that explores around a deterministic action, where actions lie in [-1, 1].

    gaussian    x = fresh                                                             TD3; Ape-X DPG
    ou          x <- x - theta x + fresh, from 0 where an episode begins              DDPG: Ornstein-Uhlenbeck, time step 1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shoal.core import Tree

__all__ = ["GaussianNoise", "Noise", "OrnsteinUhlenbeck", "noise_named"]


class Noise(Protocol):
    """Made of fresh Gaussian noise [B, D], and of what a policy carries from step to step."""

    def initial_state(self, seats: int, size: int) -> Tree: ...
    def of(self, fresh: Tensor, state: Tree, first: Tensor) -> tuple[Tensor, Tree]: ...  # the noise of this step, the next state


@dataclass(frozen=True)
class GaussianNoise:
    """New at every step."""

    def initial_state(self, seats: int, size: int) -> Tree:
        return {}

    def of(self, fresh: Tensor, state: Tree, first: Tensor) -> tuple[Tensor, Tree]:
        return fresh, state


@dataclass(frozen=True)
class OrnsteinUhlenbeck:
    """Continues from step to step and returns to 0."""

    theta: float

    def initial_state(self, seats: int, size: int) -> Tree:
        return {"noise": torch.zeros(seats, size)}

    def of(self, fresh: Tensor, state: Tree, first: Tensor) -> tuple[Tensor, Tree]:
        before = state["noise"].masked_fill(first.unsqueeze(1), 0.0)
        noise = before * (1 - self.theta) + fresh
        return noise, {"noise": noise}


def noise_named(name: str, theta: float) -> Noise:
    """By the name of the option."""
    return GaussianNoise() if name == "gaussian" else OrnsteinUhlenbeck(theta)
