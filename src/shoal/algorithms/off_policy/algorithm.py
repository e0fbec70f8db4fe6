"""What actor-critics of replay are to the rest of shoal; each adds its Config, its nets, its policy and its objective."""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from torch import nn

from shoal.acting import Policy, Progress
from shoal.algorithms.common.model import Model
from shoal.algorithms.common.plan import AlgorithmPlan, weights_layout
from shoal.algorithms.off_policy.policy import UNIFORM
from shoal.algorithms.records.first_priority import ValueEstimates
from shoal.algorithms.records.transitions import Transitions
from shoal.errors import ConfigError
from shoal.learning import Algorithm, Tolerance
from shoal.slots import Layout

if TYPE_CHECKING:
    from shoal.algorithms.common.contrast import Contrast
    from shoal.envs import EnvSpec
    from shoal.nets import NetConfig

__all__ = ["OffPolicyActorCritic", "bounded_box"]


class OffPolicyActorCritic(Algorithm):
    """An actor and critics of its actions, learned from items of a replay table."""

    from_replay = runs_on_gpu = True
    tolerates = Tolerance.REPLAY

    def __init__(self, config: Any, spec: EnvSpec, net: NetConfig, seats: int, contrast: Contrast | None = None) -> None:
        """`contrast`: how an encoder of images is learned beside it (CURL)."""
        config.validate()
        if net.recurrent != "none" or net.prev_action_reward:
            raise ConfigError(f"net.recurrent = {net.recurrent!r}, net.prev_action_reward = {net.prev_action_reward}: {self.name} "
                              "learns from transitions, which have no past; turn both off, or use r2d2 for discrete actions")
        if net.separate_value:
            raise ConfigError(f"net.separate_value = True: the critics of {self.name} are nets of their own anyway; drop it")
        if net.central_value or net.state_value:
            which = "central" if net.central_value else "state"
            raise ConfigError(f"net.{which}_value = True: the critics of {self.name} see what its policy sees; use an algorithm "
                              "that learns from unrolls (ppo, a2c, appo, vtrace)")
        self.config = config
        self.plan = AlgorithmPlan.of(spec, net, seats, config.normalise_observations, contrast)

    @abstractmethod
    def net(self, seed: int) -> nn.Module:
        """What is learned. Its parts are named as the phases are; those that policies need come first."""

    @abstractmethod
    def policy(self) -> Policy: ...

    @property
    @abstractmethod
    def exploration(self) -> float:
        """What `explore` is after the random steps; see policy.py."""

    def model(self, seed: int) -> Model[Any]:
        """To learn with."""
        return self.model_of(self.net(seed), seed)

    def model_of(self, net: nn.Module, seed: int) -> Model[Any]:
        """The same with this net, which may have more parts than its own."""
        return self._model(net, seed, learns=True)

    def _model(self, net: nn.Module, seed: int = 0, learns: bool = False) -> Model[Any]:
        plan = self.plan
        representation = None if plan.contrast is None else plan.contrast.representation(seed, learns)
        return Model(net, plan.spec.observation_space, plan.norm_size, representation)

    def acting_model(self) -> tuple[Model[Any], Any, Any]:
        """What a policy acts with, as it is published: the model, its actor and, where actors judge items, its critic."""
        net: Any = self.net(0)
        if self.config.actor_priorities:
            return self._model(net), net.actor, net.critic
        return self._model(net.actor), net.actor, None

    @cached_property
    def record(self) -> Transitions:
        config, plan = self.config, self.plan
        return Transitions(plan.seats, plan.spec.observation_space, plan.spec.action_space, mask_size=plan.mask_size,
                           gamma=config.gamma, n_step=config.n_step, observation_moments=plan.norm_size,
                           frame_stack=plan.spec.frame_stack,
                           reward_scale=config.reward_scale, reward_shift=config.reward_shift,
                           estimates=ValueEstimates() if config.actor_priorities else None,
                           extras={"action_mask": ((plan.mask_size,), "bool")} if plan.mask_size else {})

    def explore(self, index: int, count: int, seats: int, progress: Progress) -> np.ndarray:
        amount = UNIFORM if progress.env_steps < self.config.random_steps else self.exploration
        return np.full(seats, amount, np.float32)

    def published_layout(self) -> Layout:
        return weights_layout(self.acting_model()[0].params.numel(), self.plan.norm_size)


def bounded_box(name: str, spec: EnvSpec) -> gym.spaces.Box:
    """The action space of an algorithm with continuous actions."""
    space = spec.action_space
    if not isinstance(space, gym.spaces.Box):
        raise ConfigError(f"{name} cannot act in {spec.name}: its actions are continuous, but the action space is {space}; use an "
                          "environment with Box actions, or sac, dqn or ppo")
    if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
        raise ConfigError(f"{name} cannot act in {spec.name}: it needs finite bounds, but the action space is {space}; "
                          "wrap the environment with bounds of your own (gymnasium.wrappers.TransformAction), or use ppo")
    return space
