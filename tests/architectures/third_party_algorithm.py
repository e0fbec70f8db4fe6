"""Somebody's own algorithm, outside of shoal: REINFORCE with a baseline, its advantages cut off at zero ("learn from luck")."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from shoal.algorithms.blueprint import Blueprint, check_numbers
from shoal.algorithms.learner import Learner
from shoal.core import Tolerance
from shoal.ops import losses, returns


@dataclass(frozen=True)
class Config:
    """Learning from luck."""

    unroll: int = 8
    """Steps in an unroll, T."""
    gamma: float = 0.99
    """Discount."""
    lr: float = 3e-3
    """Learning rate."""
    normalise_observations: bool = False
    """Scale observations by their running mean and deviation."""
    normalise_returns: bool = False
    """Scale rewards by the running deviation of the discounted return."""
    final_rows: int = 0
    """Final observations of truncated episodes that one slot can hold; 0 works it out."""

    def validate(self):
        check_numbers(self, positive=("unroll", "lr"), shares=("gamma",))


class Luck:
    """See the module."""

    name = "luck"
    tolerates = Tolerance.LAG

    def __init__(self, config, spec, net, seats):
        config.validate()
        self.config, self.plan = config, Blueprint.of(self.name, config, spec, net, seats)
        self.record, self.policy, self.published_layout = self.plan.record, self.plan.policy, self.plan.published_layout

    def learn(self, seed):
        return LuckLearn(self.config, self.plan, seed)

    def explore(self, index, count, seats, progress):
        return np.zeros(seats, np.float32)


class LuckLearn:
    """One gradient per batch."""

    phases = ("all",)

    def __init__(self, config, plan, seed):
        self.config, self.learner = config, Learner(plan, seed, optimiser="adam", epsilon=1e-5, grad_norm=0.5)
        self.state, self.sums, self.moments = self.learner.state, self.learner.sums, self.learner.moments
        self.absorb, self.bind, self.published = self.learner.absorb, self.learner.bind, self.learner.published

    @property
    def weights(self):
        return self.learner.weights

    def anneal(self, progress):
        self.learner.optimiser.lr = self.config.lr

    def minibatches(self, batch, sums, progress, rng):
        self.anneal(progress)
        yield self.learner.batch(batch), self.learner.totals(sums).weight()

    def gradients(self, minibatch, phase):
        (batch, weight), model = minibatch, self.learner.model
        output = model.unroll(batch)
        log_prob, entropy = model.judge(output, batch)
        target = returns.lambda_returns(batch.reward, self.config.gamma * batch.discount, model.next_values(batch, output),
                                        keep_t=batch.keep)
        luck = torch.relu(target - output.value.detach()[:-1])
        loss = losses.policy_gradient_loss(log_prob, luck) + 0.5 * losses.value_loss(output.value[:-1], target) - 0.01 * entropy
        return self.learner.descend(losses.masked_sum(loss, batch.valid) * weight, {})

    def apply(self, gradient, phase):
        return self.learner.optimiser.step(gradient)
