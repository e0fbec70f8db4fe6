"""Generalised advantages of a batch, as a2c and ppo use them (Schulman et al. 2016, 1506.02438)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shoal.ops import losses, returns

if TYPE_CHECKING:
    from shoal.algorithms.actor_critic.algorithm import ActorCriticConfig
    from shoal.algorithms.actor_critic.learn import Totals
    from shoal.algorithms.actor_critic.model import ActorCriticModel
    from shoal.algorithms.actor_critic.unroll_batch import UnrollBatch
    from shoal.nets import ActorCriticOutput

__all__ = ["Advantages", "estimate"]


@dataclass(frozen=True)
class Advantages:
    """All [T, B] and without gradient."""

    advantage: torch.Tensor
    value: torch.Tensor
    """V(x_t) with the weights that the advantages were computed with."""
    target: torch.Tensor
    """What the value function regresses to."""

    def sums(self, valid: torch.Tensor | None) -> torch.Tensor:
        """Sum and sum of squares of the advantages: two numbers that learners add up."""
        x = (self.advantage if valid is None else self.advantage[valid]).double()
        return torch.stack([x.sum(), x.square().sum()])

    def normalised(self, totals: Totals) -> Advantages:
        """With mean 0 and population deviation 1 over the decisions of all learners."""
        mean, square = torch.as_tensor(totals.extra, device=self.advantage.device) / max(totals.decisions, 1.0)
        deviation = (square - mean * mean).clamp(min=0.0).sqrt()
        return Advantages(losses.normalise(self.advantage, mean, deviation), self.value, self.target)

    def flattened(self) -> Advantages:
        return Advantages(*(x.reshape(1, -1) for x in (self.advantage, self.value, self.target)))

    def select(self, columns: torch.Tensor) -> Advantages:
        return Advantages(*(x.index_select(1, columns) for x in (self.advantage, self.value, self.target)))


def estimate(model: ActorCriticModel, batch: UnrollBatch, output: ActorCriticOutput, config: ActorCriticConfig) -> Advantages:
    """GAE from the values of an unroll of all T + 1 observations."""
    value = output.value.detach()[:-1]
    v_t = model.next_values(batch, output)
    advantage = returns.gae(batch.reward, config.gamma * batch.discount, value, v_t, config.lambda_, batch.keep)
    return Advantages(advantage, value, advantage + value)
