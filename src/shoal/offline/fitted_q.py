"""Fitted Q evaluation: what a policy's actions are worth, learned from a recording (Le, Voloshin and Yue 2019, 1903.08738).

    Q(x, a)  <-  r + gamma sum_a' pi(a'|x') Q'(x', a')      regression, again and again; Q' follows Q

Several nets learn side by side, each from a resample of the episodes (a bootstrap); the first one has each episode once. They begin
with the returns of the recording, so that only what the policy does otherwise has to be learned. Rewards are scaled so that
returns are about 1, and observations by their mean and deviation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from shoal.core import Tree
from shoal.nets import NetConfig
from shoal.nets.continuous import build_critic, build_values
from shoal.nets.flat import flat_grad, flatten
from shoal.offline.logged_steps import LoggedSteps, PolicyChoices
from shoal.ops.optimise import adam_
from shoal.ops.value import chosen
from shoal.slots import map_tree

__all__ = ["FittedQ", "FittedQPlan"]

CHUNK = 8192  # observations that are judged at once
CLIP = 10.0   # of scaled observations
BEGIN = 0.2   # share of the updates that learn returns


@dataclass(frozen=True)
class FittedQPlan:
    """How the nets are fitted."""

    gamma: float = 0.99
    updates: int = 5_000
    batch_size: int = 256
    lr: float = 1e-3
    tau: float = 0.2
    """How far the targets follow at every update."""
    hidden: tuple[int, ...] = (64, 64)
    seed: int = 0


class FittedQ:
    """Nets of the values of one policy. It may go on with another policy: `follow`."""

    def __init__(self, steps: LoggedSteps, choices: PolicyChoices, plan: FittedQPlan, counts: np.ndarray) -> None:
        """`counts` [B, E]: how often each episode counts for each of B nets."""
        self.steps, self.plan = steps, plan
        space: Any = steps.info.action_space
        self.discrete = isinstance(space, gym.spaces.Discrete)
        config = NetConfig(hidden=plan.hidden, activation="relu")
        make: Any = build_values if self.discrete else build_critic
        given = steps.info.observation_space, int(space.n) if self.discrete else space, config, plan.seed, len(counts)
        self.net, self.target = make(*given), make(*given)
        self.params, self.lagging, self.grad = flatten(self.net), flatten(self.target), flat_grad(self.net)
        self.moments = torch.zeros_like(self.params), torch.zeros_like(self.params)
        self.count = torch.zeros(1)
        self.rng, self.done = np.random.default_rng((plan.seed, 0xF0E)), 0
        self.scale = _scale(steps.returns(plan.gamma))
        self._returns = torch.from_numpy((steps.returns(plan.gamma) / self.scale).astype(np.float32))
        self._seen = map_tree(_scaled, steps.observation)
        self._here, self._episode = steps.here, steps.episode
        self._weight = torch.from_numpy(counts.astype(np.float32))
        self._reward = torch.from_numpy(steps.reward / np.float32(self.scale))
        self._discount = torch.from_numpy(np.where(steps.terminated, 0.0, plan.gamma).astype(np.float32))
        self._action = torch.from_numpy(steps.action if self.discrete else steps.action.reshape(len(steps.action), -1))
        self.follow(choices)

    def follow(self, choices: PolicyChoices) -> None:
        """Learn the values of this policy from now on, beginning with what is known."""
        self.done = min(self.done, int(BEGIN * self.plan.updates))
        found = choices.probability if self.discrete else choices.action
        assert found is not None
        self._choices = torch.from_numpy(found.astype(np.float32))

    def update(self) -> None:
        """One step of all nets, each on the same decisions with its own weights."""
        plan = self.plan
        rows = self.rng.integers(len(self._here), size=plan.batch_size) if plan.batch_size < len(self._here) else \
            np.arange(len(self._here))
        with torch.no_grad():
            goal = self._returns[rows].expand(len(self._weight), -1) if self.done < BEGIN * plan.updates else \
                self._reward[rows] + self._discount[rows] * self._value(self.target, self._here[rows] + 1)
        error = self._judged(self.net, rows) - goal
        self.grad.zero_()
        (self._weight[:, self._episode[rows]] * error.square()).mean(1).sum().backward()
        left = 1.0 - self.done / plan.updates
        adam_(self.params, self.grad, *self.moments, self.count, plan.lr * max(0.02, min(1.0, 2 * left)))
        self.lagging.lerp_(self.params, plan.tau)
        self.done += 1

    @torch.no_grad()
    def values(self) -> tuple[np.ndarray, np.ndarray]:
        """Q [B, N] of the recorded actions and V [B, N + E] of the policy at every observation, in rewards."""
        rows, seen = np.arange(len(self._here)), np.arange(len(self._choices))
        q = [self._judged(self.net, rows[k : k + CHUNK]) for k in range(0, len(rows), CHUNK)]
        v = [self._value(self.net, seen[k : k + CHUNK]) for k in range(0, len(seen), CHUNK)]
        return torch.cat(q, 1).numpy() * self.scale, torch.cat(v, 1).numpy() * self.scale

    @torch.no_grad()
    def start_value(self) -> np.ndarray:
        """What the policy is worth where episodes begin, by each net [B]."""
        found = self._value(self.net, self.steps.first)
        return np.asarray(((found * self._weight).sum(1) / self._weight.sum(1)).numpy() * self.scale)

    def _judged(self, net: torch.nn.Module, rows: np.ndarray) -> Tensor:
        """Q [B, rows] of the recorded actions."""
        seen, action = self._observations(self._here[rows]), self._action[rows]
        if not self.discrete:
            judged: Tensor = net(seen, action)
            return judged
        q: Tensor = net(seen)
        return chosen(q, action.expand(len(q), -1))

    def _value(self, net: torch.nn.Module, places: np.ndarray) -> Tensor:
        """V [B, places] of the policy."""
        seen, choices = self._observations(places), self._choices[places]
        if self.discrete:
            q: Tensor = net(seen)
            return (q * choices).sum(2)
        each = [net(seen, choices[:, k]) for k in range(choices.shape[1])]
        return torch.stack(each).mean(0)

    def _observations(self, places: np.ndarray) -> Tree:
        return map_tree(lambda x: x[places], self._seen)


def _scale(returns: np.ndarray) -> float:
    return float(max(np.abs(returns).mean(), 1e-6))


def _scaled(leaf: np.ndarray) -> Tensor:
    """Numbers by their mean and deviation; images as they are."""
    if leaf.dtype.kind != "f":
        return torch.from_numpy(leaf)
    mean, deviation = leaf.mean(0, dtype=np.float64), leaf.std(0, dtype=np.float64)
    scaled = (leaf - mean) / np.where(deviation > 1e-6, deviation, 1.0)
    return torch.from_numpy(np.clip(scaled, -CLIP, CLIP).astype(np.float32))
