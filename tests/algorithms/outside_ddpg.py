"""An algorithm from outside of shoal: DDPG (Lillicrap et al. 2016, 1509.02971), off policy, with continuous actions.

    actors    mu(x) + Gaussian noise  ->  transitions with float actions, to a table that is drawn from uniformly
    learner   critic   (R + D Q'(x', mu'(x')) - Q(x, a))^2 / 2          two phases: each has its own slice of the parameters,
              actor    -Q(x, mu(x))                                     its own optimiser and its own target
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from shoal.acting import Progress, StepView
from shoal.algorithms.common.item_batch import ItemMinibatch, item_minibatch, item_sums
from shoal.algorithms.common.learn import Loss, PhasedLearn
from shoal.algorithms.common.metrics import Q_MEAN, TD_ERROR, phase_metrics
from shoal.algorithms.common.model import Model
from shoal.algorithms.common.phases import Phase, TargetSchedule
from shoal.algorithms.common.plan import AlgorithmPlan, weights_layout
from shoal.algorithms.common.policy import ModelPolicy
from shoal.algorithms.records.transitions import Transitions
from shoal.core import Tree, Vector
from shoal.envs import EnvSpec
from shoal.learning import Algorithm, Tolerance
from shoal.nets import Critic, DeterministicActor, NetConfig, build_actor, build_critic
from shoal.options import Options, number
from shoal.slots import Layout, map_tree

PHASES = ("critic", "actor")


@dataclass(frozen=True)
class Config(Options):
    """Deep deterministic policy gradient."""

    section = "algorithm"

    gamma: float = number(0.99, at_least=0, at_most=1)
    """Discount."""
    critic_lr: float = number(1e-3, above=0)
    """Learning rate of the critic."""
    actor_lr: float = number(1e-3, above=0)
    """Learning rate of the actor."""
    tau: float = number(0.005, above=0, at_most=1)
    """Share of the way that the target nets move at every update."""
    noise: float = number(0.2, at_least=0)
    """Deviation of the noise that explores, as a share of half the action's range."""
    normalise_observations: bool = False
    """Scale floating-point observations by their running mean and deviation."""


class ActorAndCritic(nn.Module):
    """What is learned. The parts are named as the phases are."""

    def __init__(self, plan: AlgorithmPlan, seed: int) -> None:
        super().__init__()
        spaces = plan.spec.observation_space, plan.spec.action_space
        self.actor: DeterministicActor = build_actor(*spaces, plan.net, seed)
        self.critic: Critic = build_critic(*spaces, plan.net, seed + 1)


class DDPGPolicy(ModelPolicy[Model[DeterministicActor]]):
    """Acts with the actor alone: it is all that is published."""

    def __init__(self, plan: AlgorithmPlan) -> None:
        space = plan.spec.action_space
        assert isinstance(space, gym.spaces.Box)
        net = build_actor(plan.spec.observation_space, space, plan.net, 0)
        super().__init__(Model(net, plan.spec.observation_space, plan.norm_size))
        self.low, self.high = (torch.from_numpy(np.asarray(bound, np.float32)) for bound in (space.low, space.high))

    def act(self, view: StepView, state: Tree, explore: np.ndarray | None, rng: torch.Generator) -> tuple[Tree, Tree, Tree]:
        with torch.inference_mode():
            action = self.model.net(self.model.see(map_tree(self.model.tensor, view.observation)))
            if explore is not None:
                share = torch.from_numpy(explore).view(-1, *(1,) * self.low.dim())
                noise = torch.randn(action.shape, generator=rng) * share * (self.high - self.low) / 2
                action = torch.clamp(action + noise, self.low, self.high)
            return action.numpy(), state, {}


class DDPGLearn(PhasedLearn[Model[ActorAndCritic]]):
    """One update of the critic, then one of the actor, per batch."""

    def __init__(self, config: Config, plan: AlgorithmPlan, seed: int) -> None:
        model, target = (Model(ActorAndCritic(plan, seed), plan.spec.observation_space, plan.norm_size) for _ in range(2))
        follow = TargetSchedule(tau=config.tau)
        phases = (Phase("critic", "adam", config.critic_lr, target=follow), Phase("actor", "adam", config.actor_lr, target=follow))
        super().__init__(model, phases, target=target, publishes="actor")
        self.nets = model.net, target.net

    @property
    def priorities(self) -> Vector:
        return self._priorities

    def sums(self, batch: Tree, index: int = 0, learners: int = 1) -> np.ndarray:
        return item_sums(batch, index, learners)

    def split(self, batch: Tree, sums: np.ndarray, progress: Progress, rng: np.random.Generator) -> Iterator[ItemMinibatch]:
        yield item_minibatch(batch, sums, 0.0, self.tensor, self.small)

    def loss(self, minibatch: ItemMinibatch, phase: str) -> Loss:
        items, (net, target) = minibatch.items, self.nets
        seen = self.model.see(items["observation"])
        if phase == "actor":
            return Loss(-net.critic(seen, net.actor(seen))[0].sum() * minibatch.scale)
        with torch.no_grad():
            following = self.model.see(items["next_observation"])
            goal = items["reward"] + items["discount"] * target.critic(following, target.actor(following))[0]
        q = net.critic(seen, items["action"])[0]
        error = goal - q
        metrics = {"td_error": error.detach().abs().mean(), "q_mean": q.detach().mean()}
        return Loss(0.5 * error.square().sum() * minibatch.scale, metrics, error.abs())


class DDPG(Algorithm):
    """See the module."""

    name, config_class, tolerates, from_replay = "ddpg", Config, Tolerance.REPLAY, True
    metrics = (*phase_metrics(PHASES), TD_ERROR, Q_MEAN)

    def __init__(self, config: Any, spec: EnvSpec, net: NetConfig, seats: int) -> None:
        config.validate()
        self.config, self.plan = config, AlgorithmPlan.of(spec, net, seats, config.normalise_observations)

    @cached_property
    def record(self) -> Transitions:
        spec = self.plan.spec
        return Transitions(self.plan.seats, spec.observation_space, spec.action_space, gamma=self.config.gamma,
                           observation_moments=self.plan.norm_size)

    def policy(self) -> DDPGPolicy:
        return DDPGPolicy(self.plan)

    def learn(self, seed: int) -> DDPGLearn:
        return DDPGLearn(self.config, self.plan, seed)

    def explore(self, index: int, count: int, seats: int, progress: Progress) -> np.ndarray:
        return np.full(seats, self.config.noise, np.float32)

    def published_layout(self) -> Layout:
        return weights_layout(self.policy().model.params.numel(), self.plan.norm_size)
