"""What a2c, ppo, appo and vtrace are to the rest of shoal; each adds its Config and its objective."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Generic, TypeVar

import gymnasium as gym
import numpy as np

from shoal.acting import Progress
from shoal.algorithms.actor_critic.learn import ActorCriticLearn, ActorCriticObjective
from shoal.algorithms.actor_critic.model import ActorCriticModel, ActorCriticPolicy
from shoal.algorithms.common.optimiser import OptimiserName
from shoal.algorithms.common.plan import AlgorithmPlan, weights_layout
from shoal.algorithms.records.spaces import Leaf
from shoal.algorithms.records.unroll import Unroll
from shoal.errors import ConfigError
from shoal.learning import Algorithm
from shoal.options import Options, number
from shoal.slots import Layout

if TYPE_CHECKING:
    from shoal.envs import EnvSpec
    from shoal.nets import NetConfig

__all__ = ["ActorCritic", "ActorCriticConfig"]


@dataclass(frozen=True)
class ActorCriticConfig(Options):
    """The options of every actor-critic; each adds its own, and its own defaults."""

    section = "algorithm"

    unroll: int = number(16, at_least=1)
    """Steps in an unroll, T."""
    gamma: float = number(0.99, at_least=0, at_most=1)
    """Discount."""
    lambda_: float = number(0.95, at_least=0, at_most=1)
    """Decay of the traces in the advantages (GAE)."""
    lr: float = number(1e-3, above=0, live=True)
    """Learning rate."""
    lr_final: float | None = number(None, at_least=0, live=True)
    """Learning rate at the end of the env_steps budget; none keeps it constant."""
    optimiser: OptimiserName = "adam"
    """adam, rmsprop (epsilon inside the root) or sgd."""
    optimiser_epsilon: float = number(1e-5, above=0)
    """Epsilon of adam and rmsprop."""
    grad_norm: float = number(0.5, at_least=0)
    """Largest norm of a gradient; larger ones are scaled down. 0 does not clip."""
    value_weight: float = number(0.5, at_least=0)
    """Weight of the value loss."""
    entropy: float = number(0.01, at_least=0, live=True)
    """Weight of the entropy bonus."""
    entropy_final: float | None = number(None, at_least=0, live=True)
    """Entropy weight at the end of the env_steps budget; none keeps it constant."""
    normalise_observations: bool = False
    """Scale floating-point observations by their running mean and deviation; pixels are scaled anyway."""
    normalise_returns: bool = False
    """Scale rewards by the running deviation of the discounted return."""
    final_rows: int = number(0, at_least=0)
    """Final observations of truncated episodes that one slot can hold; 0 works it out."""


C = TypeVar("C", bound=ActorCriticConfig)


class ActorCritic(Algorithm, Generic[C]):
    """Unrolls in, a policy and values out."""

    runs_on_gpu = True

    def __init__(self, config: C, spec: EnvSpec, net: NetConfig, seats: int, mix: float = 0.0) -> None:
        """`mix` is the share of uniformly random actions."""
        config.validate()
        self.config, self.mix = config, mix
        self.plan = AlgorithmPlan.of(spec, net, seats, config.normalise_observations)
        action = spec.action_space
        fits = isinstance(action, gym.spaces.Discrete | gym.spaces.MultiDiscrete) or (
            isinstance(action, gym.spaces.Box) and action.dtype is not None and action.dtype.kind == "f")
        if not fits:
            raise ConfigError(
                f"{self.name} cannot act in {spec.name}: its action space is {action}; use an environment with Discrete, "
                "MultiDiscrete or floating-point Box actions, or wrap it (gymnasium.wrappers.TransformAction)"
            )
        if mix and isinstance(action, gym.spaces.Box):
            raise ConfigError(
                f"behaviour_mix={mix} mixes uniform actions in, but the actions of {spec.name} are {action}; "
                "set behaviour_mix=0 or use an environment with discrete actions"
            )

    @abstractmethod
    def objective(self, learn: ActorCriticLearn) -> ActorCriticObjective:
        """What to descend."""

    @cached_property
    def record(self) -> Unroll:
        config, plan, model = self.config, self.plan, self.model()
        extras: dict[str, Leaf] = {"log_prob": ((), "float32")}
        if model.latent_head is not None:
            extras["latent"] = (model.latent_head.latent_size,), "float32"
        return Unroll(
            config.unroll,
            plan.seats,
            plan.spec.observation_space,
            plan.spec.action_space,
            mask_size=plan.mask_size,
            state={name: tuple(x.shape[1:]) for name, x in model.net.initial_state(1).items()},
            previous=plan.net.prev_action_reward,
            max_episode_steps=plan.spec.max_episode_steps,
            final_rows=config.final_rows,
            extras=extras,
            observation_moments=plan.norm_size,
            return_moments=config.normalise_returns,
            gamma=config.gamma,
        )

    def model(self, seed: int = 0) -> ActorCriticModel:
        return ActorCriticModel(self.plan, seed)

    def policy(self) -> ActorCriticPolicy:
        return ActorCriticPolicy(self.model())

    def learn(self, seed: int) -> ActorCriticLearn:
        return ActorCriticLearn(self.config, self.model(seed), self.record, self.objective)

    def explore(self, index: int, count: int, seats: int, progress: Progress) -> np.ndarray:
        return np.full(seats, self.mix, np.float32)

    def published_layout(self) -> Layout:
        return weights_layout(self.model().params.numel(), self.plan.norm_size)
