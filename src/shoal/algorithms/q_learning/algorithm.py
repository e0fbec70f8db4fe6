"""What dqn and r2d2 are to the rest of shoal; each adds its Config, its record and its errors."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import gymnasium as gym
import numpy as np

from shoal.acting import Progress
from shoal.algorithms.common.contrast import Contrast
from shoal.algorithms.common.optimiser import ValueOptimiserName
from shoal.algorithms.common.plan import AlgorithmPlan, weights_layout
from shoal.algorithms.q_learning.learn import Errors, QLearn
from shoal.algorithms.q_learning.model import QModel, QPolicy
from shoal.algorithms.records.first_priority import Estimates, QEstimates
from shoal.errors import ConfigError
from shoal.learning import Algorithm
from shoal.nets.q_network import HeadConfig
from shoal.ops import schedules
from shoal.options import Options, number
from shoal.slots import Layout

if TYPE_CHECKING:
    from shoal.envs import EnvSpec
    from shoal.nets import NetConfig

__all__ = ["QLearning", "QLearningConfig"]


@dataclass(frozen=True)
class QLearningConfig(Options):
    """The options of dqn and r2d2; each adds its own, and its own defaults."""

    section = "algorithm"

    gamma: float = number(0.99, at_least=0, at_most=1)
    """Discount."""
    n_step: int = number(1, at_least=1, at_most=100_000)
    """Rewards in a return before it bootstraps."""
    double: bool = True
    """Let the net select the action that the target net evaluates (Double DQN)."""
    dueling: bool = False
    """Give the net one stream for the state's value and one for the advantages."""
    dueling_hidden: int = number(64, at_least=1, at_most=1_000_000)
    """Units in the hidden layer of each of the two streams."""
    zero_head: bool = False
    """Let all q-values begin at 0."""
    rescale: bool = False
    """Learn values on a squashed scale (h of R2D2), for rewards of very different sizes."""
    reward_clip: float = number(0.0, at_least=0)
    """Clip rewards to this size; 0 keeps them."""
    importance: float = number(0.4, at_least=0, at_most=1)
    """Exponent beta of the importance weights; without effect on a table that is drawn from uniformly."""
    importance_final: float | None = number(None, at_least=0, at_most=1)
    """Beta at the end of the env_steps budget; none keeps it constant."""
    exploration: Literal["schedule", "ladder"] = "schedule"
    """schedule: one epsilon for all, falling; ladder: every environment its own for the whole run (Ape-X)."""
    epsilon: float = number(1.0, at_least=0, at_most=1, live=True)
    """Share of random actions at the beginning, or on the first rung of the ladder (Ape-X: 0.4)."""
    epsilon_final: float = number(0.05, at_least=0, at_most=1, live=True)
    """Share of random actions in the end (schedule)."""
    epsilon_steps: int = number(10_000, at_least=0, live=True)
    """Environment steps over which epsilon falls (schedule)."""
    ladder_alpha: float = number(7.0, at_least=0)
    """How far the ladder reaches: its last rung is epsilon^(1 + alpha)."""
    target_period_updates: int = number(200, at_least=0)
    """Updates between two copies of the net to the target net; 0 never copies, 1 uses no target net."""
    target_tau: float = number(0.0, at_least=0, at_most=1)
    """More than 0 moves the target net by this share of the way at every update, instead of copying."""
    lr: float = number(5e-4, above=0, live=True)
    """Learning rate."""
    lr_final: float | None = number(None, at_least=0, live=True)
    """Learning rate at the end of the env_steps budget; none keeps it constant."""
    optimiser: ValueOptimiserName = "adam"
    """adam, rmsprop, rmsprop_centred (epsilon inside the root), adagrad or sgd."""
    optimiser_epsilon: float = number(1e-5, above=0)
    """Epsilon of the optimiser."""
    rmsprop_decay: float = number(0.95, at_least=0, at_most=1)
    """Decay of rmsprop's moments."""
    adagrad_start: float = number(0.1, at_least=0)
    """What adagrad's sums of squares begin with."""
    grad_norm: float = number(40.0, at_least=0)
    """Largest norm of a gradient; larger ones are scaled down. 0 does not clip."""
    normalise_observations: bool = False
    """Scale floating-point observations by their running mean and deviation; pixels are scaled anyway."""


C = TypeVar("C", bound=QLearningConfig)


class QLearning(Algorithm, Generic[C]):
    """Items of a replay table in, one value for each discrete action out."""

    from_replay = runs_on_gpu = True

    def __init__(self, config: C, spec: EnvSpec, net: NetConfig, seats: int, contrast: Contrast | None = None) -> None:
        """`contrast`: how an encoder of images is learned beside it (CURL)."""
        config.validate()
        self.config = config
        self.plan = AlgorithmPlan.of(spec, net, seats, config.normalise_observations, contrast)
        if not isinstance(spec.action_space, gym.spaces.Discrete):
            raise ConfigError(
                f"{self.name} cannot act in {spec.name}: it needs one value for each action, but the action space is "
                f"{spec.action_space}; use an environment with Discrete actions, or sac, td3, ddpg, ppo or vtrace"
            )
        if net.separate_value or net.central_value or net.state_value:
            which = "separate" if net.separate_value else "central" if net.central_value else "state"
            raise ConfigError(f"net.{which}_value = True: {self.name} has no value function apart from its q-values; drop it")
        self.actions = int(spec.action_space.n)

    @abstractmethod
    def errors(self) -> Errors:
        """What to make of a batch of items."""

    def item_options(self) -> dict[str, Any]:
        """What transitions and windows are both made with."""
        config, plan = self.config, self.plan
        return {
            "seats": plan.seats,
            "observation_space": plan.spec.observation_space,
            "action_space": plan.spec.action_space,
            "mask_size": plan.mask_size,
            "gamma": config.gamma,
            "n_step": config.n_step,
            "reward_clip": config.reward_clip,
            "estimates": self.estimates(),
            "observation_moments": plan.norm_size,
            "frame_stack": plan.spec.frame_stack,
        }

    def estimates(self) -> Estimates:
        """How actors judge their own items."""
        return QEstimates(self.config.rescale)

    def head(self) -> HeadConfig:
        """The head of the net."""
        return HeadConfig(self.config.dueling, self.config.dueling_hidden, self.config.zero_head)

    def model(self, seed: int = 0, learns: bool = False) -> QModel:
        return QModel(self.plan, self.head(), seed, learns)

    def policy(self) -> QPolicy:
        return QPolicy(self.model())

    def learn(self, seed: int) -> QLearn:
        model, target = self.model(seed, learns=True), self.model(seed, learns=True)
        return QLearn(self.config, model, target, self.errors(), seed, self.plan.contrast)

    def explore(self, index: int, count: int, seats: int, progress: Progress) -> np.ndarray:
        """Epsilon of every seat."""
        config = self.config
        if config.exploration == "ladder":
            epsilons = schedules.actor_epsilons(count * seats, config.epsilon, config.ladder_alpha)
            return epsilons[index * seats : (index + 1) * seats].astype(np.float32)
        done = progress.env_steps / config.epsilon_steps if config.epsilon_steps else 1.0
        return np.full(seats, schedules.linear(done, config.epsilon, config.epsilon_final), np.float32)

    def published_layout(self) -> Layout:
        return weights_layout(self.model().params.numel(), self.plan.norm_size)
