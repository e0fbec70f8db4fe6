"""Deep Q-learning, from DQN (Mnih et al. 2013, 2015) to the learner of Ape-X (Horgan et al. 2018, 1803.00933): one algorithm.

    actors    epsilon-greedy on Q  ->  n-step transitions with an initial priority from the q-values they have anyway
    learner   drawn from a table   ->  y = R + D Q'(s', argmax_a Q(s', a))  ->  error  ->  one gradient, new priorities

                 double  dueling  n_step  loss     target          optimiser          exploration
    DQN 2013     no      no       1       squared  every update    rmsprop            schedule
    DQN 2015     no      no       1       huber    every 2500      rmsprop_centred    schedule
    Double DQN   yes     no       1       huber    every 2500      rmsprop_centred    schedule
    Ape-X        yes     yes      3       squared  every 2500      rmsprop_centred    ladder

Deliberate differences:

                  papers                          here
    batch         gradients summed (DQN)          mean: with rmsprop, epsilon and the learning rate mean something else
    time limits   treated as the end              bootstrapped from the true last observation
    weights       Ape-X: beta constant            may be annealed to importance_final
    table         part of the algorithm           exponent, size and rates are --replay's business
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from shoal.algorithms.blueprint import check_numbers
from shoal.algorithms.q_learner import Judged, QLearn
from shoal.algorithms.q_model import QModel, QPolicy
from shoal.algorithms.q_plan import QPlan, explored
from shoal.algorithms.training import ValueOptimiserName
from shoal.algorithms.transitions import Transitions
from shoal.core import Progress, Tolerance, Tree
from shoal.errors import ConfigError
from shoal.ops import value
from shoal.slots import Layout

if TYPE_CHECKING:
    from shoal.envs import EnvSpec
    from shoal.nets import NetConfig

__all__ = ["DQN", "Config"]


@dataclass(frozen=True)
class Config:
    """Deep Q-learning."""

    gamma: float = 0.99
    """Discount."""
    n_step: int = 1
    """Rewards in a return before it bootstraps."""
    double: bool = True
    """Let the net select the action that the target net evaluates (Double DQN)."""
    dueling: bool = False
    """Give the net one stream for the state's value and one for the advantages."""
    dueling_hidden: int = 64
    """Units in the hidden layer of each of the two streams."""
    zero_head: bool = False
    """Let all q-values begin at 0."""
    loss: Literal["huber", "squared"] = "huber"
    """huber clips the gradient of an error to huber_delta; squared does not."""
    huber_delta: float = 1.0
    """Largest error that huber squares."""
    rescale: bool = False
    """Learn values on a squashed scale (h of R2D2), for rewards of very different sizes."""
    reward_clip: float = 0.0
    """Clip rewards to this size; 0 keeps them."""
    importance: float = 0.4
    """Exponent beta of the importance weights; without effect on a table that is drawn from uniformly."""
    importance_final: float | None = None
    """Beta at the end of the env_steps budget; none keeps it constant."""
    exploration: Literal["schedule", "ladder"] = "schedule"
    """schedule: one epsilon for all, falling; ladder: every environment its own for the whole run (Ape-X)."""
    epsilon: float = 1.0
    """Share of random actions at the beginning, or on the first rung of the ladder (Ape-X: 0.4)."""
    epsilon_final: float = 0.05
    """Share of random actions in the end."""
    epsilon_steps: int = 10_000
    """Environment steps over which epsilon falls."""
    ladder_alpha: float = 7.0
    """How far the ladder reaches: its last rung is epsilon^(1 + alpha)."""
    target_period_updates: int = 200
    """Updates between two copies of the net to the target net; 0 never copies, 1 goes without a target net."""
    target_tau: float = 0.0
    """More than 0 moves the target net by this share of the way at every update, instead of copying."""
    lr: float = 5e-4
    """Learning rate."""
    lr_final: float | None = None
    """Learning rate at the end of the env_steps budget; none keeps it constant."""
    optimiser: ValueOptimiserName = "adam"
    """adam, rmsprop, rmsprop_centred (epsilon inside the root), adagrad or sgd."""
    optimiser_epsilon: float = 1e-5
    """Epsilon of the optimiser."""
    rmsprop_decay: float = 0.95
    """Decay of rmsprop's moments."""
    adagrad_start: float = 0.1
    """What adagrad's sums of squares begin with."""
    grad_norm: float = 40.0
    """Longest gradient; longer ones are scaled down. 0 does not clip."""

    def validate(self) -> None:
        check_numbers(
            self,
            positive=("n_step", "lr", "optimiser_epsilon", "huber_delta", "dueling_hidden"),
            shares=("gamma", "importance", "importance_final", "epsilon", "epsilon_final", "target_tau", "rmsprop_decay"),
            not_negative=("reward_clip", "epsilon_steps", "ladder_alpha", "target_period_updates", "lr_final",
                          "adagrad_start", "grad_norm"),
        )  # fmt: skip


class DQN:
    """See the module."""

    name = "dqn"
    tolerates = Tolerance.REPLAY
    from_replay = runs_on_gpu = True

    def __init__(self, config: Config, spec: EnvSpec, net: NetConfig, seats: int) -> None:
        config.validate()
        if net.recurrent != "none" or net.prev_action_reward:
            raise ConfigError(
                f"net.recurrent = {net.recurrent!r}, net.prev_action_reward = {net.prev_action_reward}: dqn learns from "
                "transitions, which have no past; use r2d2, or turn both off"
            )
        self.config = config
        self.plan = QPlan.of(self.name, config, spec, net, seats)

    @cached_property
    def record(self) -> Transitions:
        return Transitions(self.plan.scene)

    def policy(self) -> QPolicy:
        return QPolicy(self.plan.model())

    def learn(self, seed: int) -> QLearn:
        return QLearn(self.config, self.plan, seed, TransitionErrors(self.config))

    def explore(self, index: int, count: int, seats: int, progress: Progress) -> np.ndarray:
        return explored(self.config, index, count, seats, progress)

    def published_layout(self) -> Layout:
        return self.plan.published_layout()


class TransitionErrors:
    """Errors of transitions [B]."""

    captures = True

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, model: QModel, target: QModel, items: Tree) -> Judged:
        config = self.config
        bootstrap = self._bootstrap(model, target, items)
        if config.rescale:
            bootstrap = value.unrescale(bootstrap)
        goal = items["reward"] + items["discount"] * bootstrap
        if config.rescale:
            goal = value.rescale(goal)
        q = value.chosen(model.values(items["observation"]), items["action"])
        error = goal - q
        loss = value.huber(error, config.huber_delta) if config.loss == "huber" else value.squared(error)
        return Judged(loss, error.abs(), q, goal)

    @torch.no_grad()
    def _bootstrap(self, model: QModel, target: QModel, items: Tree) -> torch.Tensor:
        """The value [B] of what each transition led to."""
        following, mask = items["next_observation"], items.get("next_action_mask")
        target_q = target.values(following)
        if not self.config.double:
            return value.q_values(value.legal(target_q, mask))
        return value.double_q_values(value.legal(model.values(following), mask), target_q)
