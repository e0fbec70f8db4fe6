"""Deep Q-learning, from DQN (Mnih et al. 2013, 2015) to Rainbow and the learner of Ape-X: one algorithm.

    actors    epsilon-greedy on Q  ->  n-step transitions with an initial priority from the q-values they have anyway
    learner   drawn from a table   ->  y = R + D Q'(s', argmax_a Q(s', a))  ->  error  ->  one gradient, new priorities

                 double  dueling  n_step  loss     target          optimiser          exploration
    DQN 2013     no      no       1       squared  every update    rmsprop            schedule
    DQN 2015     no      no       1       huber    every 2500      rmsprop_centred    schedule
    Double DQN   yes     no       1       huber    every 2500      rmsprop_centred    schedule
    Ape-X        yes     yes      3       squared  every 2500      rmsprop_centred    ladder
    Rainbow      yes     yes      3       C51      every 2000      adam               noisy layers

Papers: Ape-X (Horgan et al. 2018, 1803.00933), C51 (Bellemare et al. 2017, 1707.06887), noisy layers (Fortunato et al. 2018,
1706.10295), Rainbow (Hessel et al. 2018, 1710.02298). With `atoms` the return of an action is a distribution, the error of a
transition is the divergence KL(projected target || prediction), and so are its priorities; actions are compared by means.

Deliberate differences:

                  papers                          here
    batch         gradients summed (DQN)          mean: with rmsprop, epsilon and the learning rate mean something else
    time limits   treated as the end              bootstrapped from the true last observation
    weights       Ape-X: beta constant            may be annealed to importance_final
    table         part of the algorithm           exponent, size and rates are --replay's business
    noise         the same between two updates    new at every step, each environment its own; evaluation acts without
    noisy layers  all dense ones                  those of the head: what follows the torso
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch

from shoal.algorithms.common.metrics import IMPORTANCE_MIN, Q_MAX, Q_MEAN, RETURNS_CLIPPED, TARGET_MEAN, TD_ERROR, phase_metrics
from shoal.algorithms.q_learning.algorithm import QLearning, QLearningConfig
from shoal.algorithms.q_learning.learn import Errors, Judged
from shoal.algorithms.q_learning.model import QModel
from shoal.algorithms.records.first_priority import DistributionEstimates, Estimates
from shoal.algorithms.records.transitions import Transitions
from shoal.core import Tree
from shoal.errors import ConfigError
from shoal.learning import Tolerance
from shoal.nets.q_network import HeadConfig
from shoal.ops import c51, value
from shoal.options import flag, number

if TYPE_CHECKING:
    from shoal.algorithms.common.contrast import Contrast
    from shoal.envs import EnvSpec
    from shoal.nets import NetConfig

__all__ = ["DQN", "Config"]


@dataclass(frozen=True)
class Config(QLearningConfig):
    """Deep Q-learning."""

    atoms: int = number(0, at_least=0, at_most=10_000)
    """Learn a distribution of returns over this many atoms for each action (C51: 51); 0 learns its mean only."""
    value_min: float = number(-10.0)
    """Smallest return that atoms can tell apart: what the first one stands for."""
    value_max: float = number(10.0)
    """Largest return that atoms can tell apart: what the last one stands for."""
    noisy_sigma: float = number(0.0, at_least=0)
    """Deviation that the learned noise of the head's layers begins with (Rainbow: 0.5, with epsilon 0); 0 goes without noise."""
    loss: Literal["huber", "squared"] = "huber"
    """huber clips the gradient of an error to huber_delta; squared does not. Without effect on atoms."""
    huber_delta: float = number(1.0, above=0)
    """Largest error that huber squares."""

    def validate(self) -> None:
        super().validate()
        atoms, low, high, rescale = (flag(name, self.section) for name in ("atoms", "value_min", "value_max", "rescale"))
        if self.atoms == 1:
            raise ConfigError(f"{atoms} is 1: one atom is the same return for every action; give 2 or more (C51 has 51), "
                              "or 0 to learn without")
        if self.atoms and self.value_min >= self.value_max:
            raise ConfigError(f"{low} {self.value_min:g} is not below {high} {self.value_max:g}: "
                              "atoms lie between the two; give the smallest and the largest return that an episode can have")
        if self.atoms and self.rescale:
            raise ConfigError(f"{rescale} with {atoms} {self.atoms}: atoms lie on the scale of rewards, from "
                              "value-min to value-max; turn one of the two off")


class DQN(QLearning[Config]):
    """See the module."""

    name, config_class, tolerates = "dqn", Config, Tolerance.REPLAY
    metrics = (*phase_metrics(("all",)), TD_ERROR, Q_MEAN, Q_MAX, TARGET_MEAN, IMPORTANCE_MIN, RETURNS_CLIPPED)

    def __init__(self, config: Config, spec: EnvSpec, net: NetConfig, seats: int, contrast: Contrast | None = None) -> None:
        if net.recurrent != "none" or net.prev_action_reward:
            raise ConfigError(
                f"net.recurrent = {net.recurrent!r}, net.prev_action_reward = {net.prev_action_reward}: dqn learns from "
                "transitions, which have no past; use r2d2, or turn both off"
            )
        super().__init__(config, spec, net, seats, contrast)

    @cached_property
    def record(self) -> Transitions:
        return Transitions(**self.item_options())

    def head(self) -> HeadConfig:
        config = self.config
        return replace(super().head(), atoms=config.atoms, value_min=config.value_min, value_max=config.value_max,
                       noisy_sigma=config.noisy_sigma)

    def estimates(self) -> Estimates:
        config = self.config
        return DistributionEstimates(config.atoms, config.value_min, config.value_max) if config.atoms else super().estimates()

    def errors(self) -> Errors:
        return DistributionErrors(self.config) if self.config.atoms else TransitionErrors(self.config)


class TransitionErrors:
    """Errors of transitions [B]."""

    captures = True

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, model: QModel, target: QModel, items: Tree, noise: torch.Tensor | None = None) -> Judged:
        config = self.config
        of_values, of_selection, of_target = _noises(noise)
        bootstrap = self._bootstrap(model, target, items, of_selection, of_target)
        if config.rescale:
            bootstrap = value.unrescale(bootstrap)
        goal = items["reward"] + items["discount"] * bootstrap
        if config.rescale:
            goal = value.rescale(goal)
        values = model.values(items["observation"], of_values)
        q = value.chosen(values, items["action"])
        error = goal - q
        loss = value.huber(error, config.huber_delta) if config.loss == "huber" else value.squared(error)
        return Judged(loss, error.abs(), q, goal, values=values)

    @torch.no_grad()
    def _bootstrap(self, model: QModel, target: QModel, items: Tree, of_selection: torch.Tensor | None,
                   of_target: torch.Tensor | None) -> torch.Tensor:
        """The value [B] of what each transition led to."""
        following, mask = items["next_observation"], items.get("next_action_mask")
        target_q = target.values(following, of_target)
        if not self.config.double:
            return value.q_values(value.legal(target_q, mask))
        return value.double_q_values(value.legal(model.values(following, of_selection), mask), target_q)


class DistributionErrors:
    """Errors of transitions [B] whose returns are distributions over atoms."""

    captures = True

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, model: QModel, target: QModel, items: Tree, noise: torch.Tensor | None = None) -> Judged:
        of_values, of_selection, of_target = _noises(noise)
        support, bootstrap = model.net.support, self._bootstrap(model, target, items, of_selection, of_target)
        places = c51.moved(support, items["reward"], items["discount"])  # gamma^n of each item, 0 where its episode terminated
        goal = c51.project(support, places, bootstrap)
        logits = _of_actions(model.logits(items["observation"], of_values), items["action"])
        error = c51.divergence(goal, logits)
        outside = (bootstrap * ((places < support[0]) | (places > support[-1]))).sum(-1).mean()
        return Judged(error, error.detach().clamp(min=0), c51.expected(logits, support), (goal * support).sum(-1),
                      more={"returns_clipped": outside})

    @torch.no_grad()
    def _bootstrap(self, model: QModel, target: QModel, items: Tree, of_selection: torch.Tensor | None,
                   of_target: torch.Tensor | None) -> torch.Tensor:
        """The probabilities [B, Z] of the best action, by its mean, of what each transition led to."""
        following, mask = items["next_observation"], items.get("next_action_mask")
        logits = target.logits(following, of_target)
        q = model.values(following, of_selection) if self.config.double else c51.expected(logits, target.net.support)
        return _of_actions(logits, value.legal(q, mask).argmax(-1)).softmax(-1)


def _of_actions(logits: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    """[B, A, Z] and [B] -> [B, Z]"""
    return logits.gather(1, action[:, None, None].expand(-1, 1, logits.shape[-1])).squeeze(1)


def _noises(noise: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
    """Of the values to be changed, of the net when it selects an action, of the target net: the paper draws each on its own."""
    return (None, None, None) if noise is None else noise.unbind()
