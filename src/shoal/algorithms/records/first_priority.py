"""How an actor judges its own items: the first priority is the size of the error that its policy's estimates show.

                           the policy's extras             first priority
    QEstimates             q [B, A], -inf where illegal    |return + discount max q - q of the action|       dqn, r2d2
    DistributionEstimates  q, and logits [B, A, Z]         the same as a divergence of distributions         dqn with atoms
    ValueEstimates         value_taken [B], value [B]      |return + discount value - value_taken|           critics of floats
    None                   -                               1 for every item                                  uniform tables

An actor's own net selects and evaluates (Ape-X, section 3). It does not know the values of a truncated episode's last observation:
the value of the one before stands in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from shoal.core import Tree
from shoal.ops import c51, value

__all__ = ["DistributionEstimates", "Estimates", "QEstimates", "ValueEstimates"]


class Estimates(Protocol):
    """Reads a policy's estimates out of its extras."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one estimate: () for a number, (Z,) for a distribution."""
        ...

    def of(self, extras: Tree, action: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The value of the executed action [B], as the net gives it, and of the observation [B], on the scale of rewards."""
        ...

    def target(self, reward: np.ndarray, discount: np.ndarray, value: np.ndarray) -> np.ndarray:
        """The return of transitions, with `value` [K] for what they led to."""
        ...

    def errors(self, target: np.ndarray, taken: np.ndarray) -> np.ndarray:
        """How far returns, on the scale of rewards, are from the values of the actions."""
        ...


class NumberEstimates:
    """Estimates that are numbers."""

    shape = ()

    def target(self, reward: np.ndarray, discount: np.ndarray, value: np.ndarray) -> np.ndarray:
        total: np.ndarray = reward + discount * value
        return total


@dataclass(frozen=True)
class QEstimates(NumberEstimates):
    """From the q-values of discrete actions."""

    rescale: bool = False
    """Whether they are in the space of ops.value.rescale."""

    def of(self, extras: Tree, action: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        q = extras["q"]
        best = q.max(-1)
        taken = q[np.arange(len(q)), action]
        # An environment may execute an action that the mask forbids. It has no value then: the best legal one stands in.
        taken = np.where(taken == -np.inf, best, taken)
        return taken, value.unrescale(best) if self.rescale else best

    def errors(self, target: np.ndarray, taken: np.ndarray) -> np.ndarray:
        error: np.ndarray = np.abs((value.rescale(target) if self.rescale else target) - taken)
        return error


@dataclass(frozen=True)
class ValueEstimates(NumberEstimates):
    """From the values that a policy gives by itself: `value_taken` of its action and `value` of the observation."""

    def of(self, extras: Tree, action: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return extras["value_taken"], extras["value"]

    def errors(self, target: np.ndarray, taken: np.ndarray) -> np.ndarray:
        error: np.ndarray = np.abs(target - taken)
        return error


@dataclass(frozen=True)
class DistributionEstimates:
    """From distributions of returns over atoms (C51): log-probabilities of the executed action, probabilities of the best one."""

    atoms: int
    value_min: float
    value_max: float

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.atoms,)

    def of(self, extras: Tree, action: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        q, logits = extras["q"], torch.from_numpy(np.asarray(extras["logits"]))
        rows, best = np.arange(len(q)), q.argmax(-1)
        taken = np.where(q[rows, action] == -np.inf, best, action)  # as QEstimates does
        return logits[rows, taken].log_softmax(-1).numpy(), logits[rows, best].softmax(-1).numpy()

    def target(self, reward: np.ndarray, discount: np.ndarray, value: np.ndarray) -> np.ndarray:
        """[K, Z]"""
        support = torch.linspace(self.value_min, self.value_max, self.atoms)
        places = c51.moved(support, torch.from_numpy(reward), torch.from_numpy(discount))
        spread: np.ndarray = c51.project(support, places, torch.from_numpy(value)).numpy()
        return spread

    def errors(self, target: np.ndarray, taken: np.ndarray) -> np.ndarray:
        size: np.ndarray = c51.divergence(torch.from_numpy(target), torch.from_numpy(taken)).clamp(min=0).numpy()
        return size
