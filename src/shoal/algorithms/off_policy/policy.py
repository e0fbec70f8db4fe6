"""How the actors of replay explore: noise on a deterministic action, a sample of a policy, and at first uniformly random actions.

    explore [B]    UNIFORM   a uniformly random action          of each seat
                   0         the greedy action
                   above     the deviation of the noise; of stochastic policies: a sample

    noise          gaussian  x = fresh                                                         TD3; Ape-X DPG
                   ou        x <- x - theta x + fresh, from 0 where an episode begins          DDPG: Ornstein-Uhlenbeck, time step 1

Networks have actions in [-1, 1]; here, on the way out, they are scaled to the bounds of the action space. Arrays are answered with
arrays and tensors with tensors; then no number is read, and `explore` as an array means no exploration.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from shoal.acting import StepView
from shoal.algorithms.common.model import Model
from shoal.algorithms.common.policy import ModelPolicy
from shoal.core import Tree
from shoal.device.cpu_graph import RecordedFunction
from shoal.nets import Critic, DeterministicActor, GaussianActor, PolicyNetwork, SquashedGaussianActor, StackedValues
from shoal.nets.continuous import bounded_range
from shoal.ops import distributions as dist
from shoal.ops.off_policy import clipped_double_q
from shoal.ops.value import chosen
from shoal.slots import map_tree

__all__ = ["UNIFORM", "BoxPolicy", "DiscretePolicy", "GaussianNoise", "Noise", "NoisyPolicy", "OrnsteinUhlenbeck", "SampledPolicy",
           "noise_named"]

UNIFORM = -1.0


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


class UnitActor(Protocol):
    """A net of actions in [-1, 1]."""

    def unit(self, observation: Any) -> Tensor: ...


A = TypeVar("A", bound=UnitActor)


class BoxPolicy(ModelPolicy[Model[Any]], Generic[A]):
    """Acts in a bounded Box."""

    def __init__(self, model: Model[Any], space: gym.spaces.Box, actor: A, critic: Critic | None = None) -> None:
        """`actor` and `critic` are parts of the model. With a critic the extras say what it thinks of the action."""
        super().__init__(model)
        self.actor: A = actor
        self.critic = critic
        self._range, self._shape = bounded_range(space), space.shape
        self.size = torch.Size(space.shape).numel()

    @abstractmethod
    def explored(self, seen: Tree, state: Tree, first: Tensor, amount: Tensor, rng: torch.Generator) -> tuple[Tensor, Tree]:
        """Actions [B, D] in [-1, 1] and the next state; `amount` [B, 1] is `explore`, at least 0."""

    def act(self, view: StepView, state: Tree, explore: np.ndarray | None, rng: torch.Generator) -> tuple[Tree, Tree, Tree]:
        arrays = isinstance(view.first, np.ndarray)
        with torch.inference_mode(), self.model.precision():
            seen = self.model.see(map_tree(self.model.tensor, view.observation))
            if explore is None or not (arrays or isinstance(explore, Tensor)):
                unit = self.actor.unit(seen)
            else:
                amount = torch.as_tensor(explore).unsqueeze(1)
                unit, state = self.explored(seen, state, self.model.tensor(view.first), amount.clamp(min=0), rng)
                if not arrays or bool((explore < 0).any()):
                    wild = torch.rand(unit.shape, generator=rng, device=unit.device) * 2 - 1
                    unit = torch.where(amount < 0, wild, unit)
            extras = {} if self.critic is None else self._judged(self.critic, seen, unit)
            action = self._range.scaled(unit).reshape(len(unit), *self._shape)
            return (action.numpy(), state, map_tree(Tensor.numpy, extras)) if arrays else (action, state, extras)

    def outputs(self, seen: Tree, state: Tree, mask: Tensor | None) -> dict[str, Any]:
        unit = self.actor.unit(seen)
        return {"action": self._range.scaled(unit).reshape(len(unit), *self._shape)}

    def _judged(self, critic: Critic, seen: Tree, unit: Tensor) -> Tree:
        """What records.first_priority.ValueEstimates reads."""
        return {"value_taken": clipped_double_q(critic.of_unit(seen, unit)),
                "value": clipped_double_q(critic.of_unit(seen, self.actor.unit(seen)))}


class NoisyPolicy(BoxPolicy[DeterministicActor]):
    """A deterministic actor with noise."""

    def __init__(self, model: Model[Any], space: gym.spaces.Box, actor: DeterministicActor, critic: Critic | None,
                 noise: Noise) -> None:
        super().__init__(model, space, actor, critic)
        self.noise = noise

    def initial_state(self, seats: int) -> Tree:
        return self.noise.initial_state(seats, self.size)

    def explored(self, seen: Tree, state: Tree, first: Tensor, amount: Tensor, rng: torch.Generator) -> tuple[Tensor, Tree]:
        unit = self.actor.unit(seen)
        fresh = torch.randn(unit.shape, generator=rng, device=unit.device) * amount
        noise, state = self.noise.of(fresh, map_tree(self.model.tensor, state), first)
        return (unit + noise).clamp_(-1.0, 1.0), state


class SampledPolicy(BoxPolicy[SquashedGaussianActor | GaussianActor]):
    """A stochastic actor."""

    def __init__(self, model: Model[Any], space: gym.spaces.Box, actor: SquashedGaussianActor | GaussianActor,
                 critic: Critic | None = None) -> None:
        super().__init__(model, space, actor, critic)
        self._recorded = RecordedFunction(self._action)

    def bind(self, published: Tree) -> None:
        super().bind(published)
        self._recorded.forget()

    def explored(self, seen: Tree, state: Tree, first: Tensor, amount: Tensor, rng: torch.Generator) -> tuple[Tensor, Tree]:
        noise = torch.randn(len(amount), self.size, generator=rng, device=amount.device)
        given = {"observation": seen, "noise": torch.where(amount > 0, noise, 0.0)}  # without noise: the median, or the mean
        unit: Tensor = self._recorded(given) if not noise.is_cuda else self._action(given)
        return unit, state

    def _action(self, given: dict[str, Any]) -> Tensor:
        return self.actor.action(given["observation"], given["noise"])

    def outputs(self, seen: Tree, state: Tree, mask: Tensor | None) -> dict[str, Any]:
        mean, log_std = self.actor.parameters_of(seen)
        return {**super().outputs(seen, state, mask), "mean": mean, "log_std": log_std}

    def log_prob(self, view: StepView, action: np.ndarray, explore: np.ndarray | None) -> np.ndarray | None:
        """Of samples, and of uniform actions at the beginning. What lies at the bounds counts as if nothing had been cut off."""
        if explore is None or (explore == 0).any():
            return None
        with torch.inference_mode(), self.model.precision():
            seen = self.model.see(map_tree(self.model.tensor, view.observation))
            unit = self._range.unit(self.model.tensor(action).flatten(1))
            wild = torch.full((len(unit),), -self.size * math.log(2.0))
            found = torch.where(torch.as_tensor(explore) < 0, wild, self.actor.unit_log_prob(seen, unit).cpu())
            return np.asarray((found - self._range.log_volume).numpy())


class DiscretePolicy(ModelPolicy[Model[Any]]):
    """A stochastic actor with discrete actions."""

    def __init__(self, model: Model[Any], actor: PolicyNetwork, critic: StackedValues | None, masked: bool) -> None:
        """`actor` and `critic` are parts of the model. Where actions can be illegal the extras have the mask."""
        super().__init__(model)
        self.actor, self.critic, self.masked = actor, critic, masked

    def act(self, view: StepView, state: Tree, explore: np.ndarray | None, rng: torch.Generator) -> tuple[Tree, Tree, Tree]:
        arrays = isinstance(view.first, np.ndarray)
        with torch.inference_mode(), self.model.precision():
            seen = self.model.see(map_tree(self.model.tensor, view.observation))
            mask = None if view.action_mask is None else self.model.tensor(view.action_mask)
            logits = dist.mask_logits(self.actor(seen), mask)
            action = dist.categorical_mode(logits)
            if explore is not None and (arrays or isinstance(explore, Tensor)):
                amount = torch.as_tensor(explore).unsqueeze(1)
                wild = torch.where(amount < 0, dist.mask_logits(torch.zeros_like(logits), mask), logits)
                action = torch.where(amount.squeeze(1) == 0, action, dist.categorical_sample(wild, rng))
            extras = {} if self.critic is None else self._judged(self.critic, seen, logits, action)
            if self.masked:
                extras["action_mask"] = mask
            return (action.numpy(), state, map_tree(Tensor.numpy, extras)) if arrays else (action, state, extras)

    def outputs(self, seen: Tree, state: Tree, mask: Tensor | None) -> dict[str, Any]:
        logits = self.actor(seen)
        return {"action": dist.categorical_mode(dist.mask_logits(logits, mask)), "logits": logits}

    def log_prob(self, view: StepView, action: np.ndarray, explore: np.ndarray | None) -> np.ndarray | None:
        """Of samples, of uniform actions at the beginning, and of the likeliest action where it is greedy."""
        with torch.inference_mode(), self.model.precision():
            seen = self.model.see(map_tree(self.model.tensor, view.observation))
            mask = None if view.action_mask is None else self.model.tensor(view.action_mask)
            logits, taken = dist.mask_logits(self.actor(seen), mask), self.model.tensor(action)
            amount = torch.zeros(len(logits)) if explore is None else torch.as_tensor(explore)
            wild = torch.where(amount.unsqueeze(1) < 0, dist.mask_logits(torch.zeros_like(logits), mask), logits)
            greedy = dist.greedy_log_prob(dist.categorical_mode(logits), taken, torch.zeros(len(logits)), 1)
            return np.asarray(torch.where(amount == 0, greedy, dist.categorical_log_prob(wild, taken)).numpy())

    def _judged(self, critic: StackedValues, seen: Tree, logits: Tensor, action: Tensor) -> dict[str, Any]:
        """What records.first_priority.ValueEstimates reads."""
        q = clipped_double_q(critic(seen))
        return {"value_taken": chosen(q, action), "value": (torch.softmax(logits, -1) * q).sum(-1)}
