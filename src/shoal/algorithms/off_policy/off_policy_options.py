"""The options that all actor-critics of replay have; each adds its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shoal.options import Options, number

__all__ = ["NoiseOptions", "OffPolicyOptions"]


@dataclass(frozen=True)
class OffPolicyOptions(Options):
    """An actor and its critics, learned from replay."""

    section = "algorithm"

    gamma: float = number(0.99, at_least=0, at_most=1)
    """Discount."""
    n_step: int = number(1, at_least=1, at_most=100_000)
    """Rewards in a return before it bootstraps."""
    reward_scale: float = number(1.0, above=0)
    """What rewards are multiplied by before anything is learned from them; evaluations see them as they are."""
    reward_shift: float = number(0.0)
    """Added to rewards after that (-1 for AntMaze)."""
    random_steps: int = number(1_000, at_least=0)
    """Environment steps at the beginning whose actions are uniformly random."""
    actor_lr: float = number(3e-4, above=0, live=True)
    """Learning rate of the actor."""
    critic_lr: float = number(3e-4, above=0, live=True)
    """Learning rate of the critics."""
    optimiser_epsilon: float = number(1e-8, above=0)
    """Epsilon of Adam."""
    grad_norm: float = number(0.0, at_least=0)
    """Largest norm of the gradient of the actor, and of the critics; larger ones are scaled down. 0 does not clip."""
    target_tau: float = number(0.005, above=0, at_most=1)
    """Share of the way that the target nets move; 1 copies."""
    target_period_updates: int = number(1, at_least=1)
    """Updates between two moves of the target nets (of td3: of its actor)."""
    importance: float = number(0.4, at_least=0, at_most=1)
    """Exponent beta of the critics' importance weights; without effect on a table that is drawn from uniformly."""
    importance_final: float | None = number(None, at_least=0, at_most=1)
    """Beta at the end of the env_steps budget; none keeps it constant."""
    actor_priorities: bool = False
    """Let actors give items their first priority (Ape-X): critics are published too. Otherwise it is 1."""
    normalise_observations: bool = False
    """Scale floating-point observations by their running mean and deviation; pixels are scaled anyway."""


@dataclass(frozen=True)
class NoiseOptions(OffPolicyOptions):
    """An actor that explores by noise."""

    noise: Literal["gaussian", "ou"] = "gaussian"
    """Noise that explores: gaussian, or ou (Ornstein-Uhlenbeck), which continues from step to step of an episode."""
    noise_std: float = number(0.1, at_least=0, live=True)
    """Deviation of the noise, where actions lie in [-1, 1]; of ou that of each of its steps."""
    noise_theta: float = number(0.15, at_least=0, at_most=1)
    """How fast ou noise returns to 0."""
