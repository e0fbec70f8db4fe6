"""QT-Opt (Kalashnikov et al. 2018, 1806.10293): off-policy Q-learning with continuous actions and no actor network.

    collectors   the best of the cross-entropy method (CEM) over Q_1(s, .)   ->  transitions (s, a, r, c, s')
    updaters     a' = CEM over Q_1(s', .);  V = min(Q_1(s', a'), Q_2(s', a'));  y = r + gamma c V, within [0, 1]
    learner      cross-entropy between Q(s, a), a sigmoid, and y

    Q_1  follows Q at every update (Polyak);     Q_2  is Q_1 as it was `lag_updates` updates ago: one argmax, two judges

--architecture qtopt has updaters between two tables, as in the paper; with any other architecture of replay tables the learner
computes y itself, when it draws a transition. Deliberate differences:

                    paper                           here
    y               not bounded                     clipped to [0, 1]: the step penalty can make it negative
    optimiser       SGD with momentum               adam, or another one by --algorithm.optimiser
    Q_2             about 6,000 updates old         a ring of snapshots: lag_updates to lag_updates + lag_snapshot_updates
    binary actions  drawn like the others           drawn as 0 or 1 by the elites' frequencies, as --algorithm.binary says
    exploration     scripted, then CEM              CEM; a share of actions (epsilon) is uniformly random
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F

from shoal.acting import Progress, StepView
from shoal.algorithms.common.item_batch import ItemMinibatch, item_minibatch
from shoal.algorithms.common.item_learn import ItemLearn
from shoal.algorithms.common.lagged_copy import Lag
from shoal.algorithms.common.learn import Loss
from shoal.algorithms.common.metrics import Q_MAX, Q_MEAN, TARGET_MEAN, TD_ERROR, phase_metrics
from shoal.algorithms.common.model import Model
from shoal.algorithms.common.optimiser import ValueOptimiserName
from shoal.algorithms.common.phases import Phase, TargetSchedule
from shoal.algorithms.common.plan import AlgorithmPlan, weights_layout
from shoal.algorithms.common.policy import ModelPolicy
from shoal.algorithms.records.items import RelabelledItems
from shoal.algorithms.records.transitions import Transitions
from shoal.core import Tree
from shoal.errors import ConfigError
from shoal.learning import Algorithm, Tolerance
from shoal.nets.action_value import ActionValue, build_action_value
from shoal.ops.cem import cem
from shoal.options import Options, number
from shoal.slots import Field, Layout, map_tree
from shoal.telemetry.metrics import Metric

if TYPE_CHECKING:
    from shoal.envs import EnvSpec
    from shoal.nets import NetConfig

__all__ = ["Config", "QTOpt"]

EXCESS_LOSS = Metric("excess_loss", "gauge", "nats", "Cross-entropy of the last update above the entropy of its targets, the least "
                     "that it can be; with the squared loss, the loss.")


@dataclass(frozen=True)
class Config(Options):
    """QT-Opt."""

    section = "algorithm"

    gamma: float = number(0.9, at_least=0, at_most=1)
    """Discount."""
    cem_samples: int = number(64, at_least=1, at_most=100_000)
    """Actions that are drawn for a state in each iteration, N."""
    cem_elites: int = number(6, at_least=2)
    """The best of them, which the next iteration is drawn around, M."""
    cem_iterations: int = number(2, at_least=1, at_most=1_000)
    """Iterations of the cross-entropy method; 1 is the best of N random actions."""
    binary: tuple[int, ...] = ()
    """Numbers of an action that are on or off, by position: --algorithm.binary 2 for the third."""
    loss: Literal["cross_entropy", "squared"] = "cross_entropy"
    """cross_entropy is for returns within 0 and 1, which targets are clipped to; squared takes any."""
    clipped_double: bool = True
    """Let the lagged copy judge the chosen action too, and take the smaller value."""
    target_tau: float = number(0.01, above=0, at_most=1)
    """Share of the way that the target net moves at every update (paper: 0.0001)."""
    lag_updates: int = number(200, at_least=1)
    """How many updates the second target net is behind the first one (paper: about 6,000)."""
    lag_snapshot_updates: int = number(20, at_least=1)
    """Updates between two snapshots of the target net."""
    epsilon: float = number(0.1, at_least=0, at_most=1, live=True)
    """Share of uniformly random actions in training."""
    lr: float = number(1e-3, above=0, live=True)
    """Learning rate."""
    lr_final: float | None = number(None, at_least=0, live=True)
    """Learning rate at the end of the env_steps budget (offline: of the updates); none keeps it constant."""
    optimiser: ValueOptimiserName = "adam"
    """adam, rmsprop, rmsprop_centred (epsilon inside the root), adagrad or sgd."""
    optimiser_epsilon: float = number(1e-8, above=0)
    """Epsilon of the optimiser."""
    grad_norm: float = number(0.0, at_least=0)
    """Largest norm of a gradient; larger ones are scaled down. 0 does not clip."""
    normalise_observations: bool = False
    """Scale floating-point observations by their running mean and deviation; pixels are scaled anyway."""

    def validate(self) -> None:
        super().validate()
        if self.cem_elites > self.cem_samples:
            raise ConfigError(f"--algorithm.cem-elites {self.cem_elites} is more than --algorithm.cem-samples {self.cem_samples}; "
                              "lower the one or raise the other")
        if self.lag_snapshot_updates > self.lag_updates:
            raise ConfigError(f"--algorithm.lag-snapshot-updates {self.lag_snapshot_updates} is more than --algorithm.lag-updates "
                              f"{self.lag_updates}, so the lag would not be kept; lower it")


class QTModel(Model[ActionValue]):
    """The net, and the search for its best action."""

    def __init__(self, config: Config, plan: AlgorithmPlan, seed: int = 0) -> None:
        spec = plan.spec
        net = build_action_value(spec.observation_space, spec.action_space, plan.net, seed)
        super().__init__(net, spec.observation_space, plan.norm_size)
        self.config, self.action_shape = config, tuple(spec.action_space.shape or ())
        self.binary = torch.zeros(net.size, dtype=torch.bool)
        self.binary[list(config.binary)] = True

    def logits(self, encoded: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
        """The net's numbers [N, K] for actions in [-1, 1]: values with the squared loss, else what a sigmoid makes values of."""
        found: torch.Tensor = self.net(encoded, unit)
        return found

    def values(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self.config.loss == "squared" else torch.sigmoid(logits)

    def encode(self, observation: Tree) -> torch.Tensor:
        return self.net.encode(self.see(observation))

    def unit(self, action: torch.Tensor) -> torch.Tensor:
        """Actions of the environment, in [-1, 1] and flat [N, 1, D]; binary ones become -1 or 1."""
        unit = self.net.range.unit(action.flatten(1)).unsqueeze(1)
        return torch.where(self.binary, torch.where(unit > 0, 1.0, -1.0), unit) if self.config.binary else unit

    def best(self, encoded: torch.Tensor, rng: torch.Generator | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The best action that the search finds for each state, [N, D] in [-1, 1], and the net's number for it [N]."""
        config = self.config
        return cem(lambda unit: self.logits(encoded, unit), len(encoded), self.net.size, samples=config.cem_samples,
                   elites=config.cem_elites, iterations=config.cem_iterations, generator=rng,
                   binary=self.binary if config.binary else None, device=encoded.device)


class QTPolicy(ModelPolicy[QTModel]):
    """Acts with the first target net: the best action that the search finds."""

    def load(self, published: Tree) -> None:
        super().load({**published, "params": published["params"][: self.model.params.numel()]})

    def bind(self, published: Tree) -> None:
        super().bind({**published, "params": published["params"][: self.model.params.numel()]})

    def act(self, view: StepView, state: Tree, explore: np.ndarray | None, rng: torch.Generator) -> tuple[Tree, Tree, Tree]:
        """`explore` is the share of uniformly random actions per seat."""
        model = self.model
        with torch.inference_mode():
            unit, _ = model.best(model.encode(map_tree(model.tensor, view.observation)), rng)
            if explore is not None:
                wild = torch.rand(len(unit), 1, generator=rng) < torch.from_numpy(explore).unsqueeze(1)
                anything = torch.rand(unit.shape, generator=rng) * 2 - 1
                unit = torch.where(wild, torch.where(model.binary, torch.where(anything > 0, 1.0, -1.0), anything), unit)
            action = model.net.range.scaled(unit).view(len(unit), *model.action_shape)
            return action.numpy(), state, {}

    def outputs(self, seen: Tree, state: Tree, mask: torch.Tensor | None) -> dict[str, torch.Tensor]:
        raise ConfigError("qtopt finds actions by a search, not by one pass of a network; use run.policy.act(observations)")


class BellmanTargets:
    """A learning.Relabeller: y of transitions, by the two target nets."""

    def __init__(self, config: Config, first: QTModel, second: QTModel) -> None:
        self.config, self.first, self.second = config, first, second

    def load(self, published: Tree) -> None:
        size = self.first.params.numel()
        for model, part in ((self.first, slice(0, size)), (self.second, slice(size, 2 * size))):
            QTPolicy(model).load({**published, "params": published["params"][part]})

    def relabel(self, items: Tree, rng: torch.Generator) -> tuple[Tree, np.ndarray]:
        needed = {name: items[name] for name in ("next_observation", "reward", "discount")}
        target = self.targets(map_tree(torch.as_tensor, needed), rng)
        kept = {name: items[name] for name in ("observation", "action")}
        return {**kept, "target": target.numpy()}, np.ones(len(target))

    @torch.no_grad()
    def targets(self, items: Tree, rng: torch.Generator) -> torch.Tensor:
        """y [B] of transitions [B, ...]."""
        following, config = items["next_observation"], self.config
        unit, logit = self.first.best(self.first.encode(following), rng)
        value = self.first.values(logit)
        if config.clipped_double:
            judged = self.second.values(self.second.logits(self.second.encode(following), unit.unsqueeze(1)))
            value = torch.minimum(value, judged.squeeze(1))
        target: torch.Tensor = items["reward"] + items["discount"] * value
        return target if config.loss == "squared" else target.clamp(0.0, 1.0)


class QTLearn(ItemLearn[QTModel]):
    """A learning.Learn and ReplayLearn. Items have their `target`, or it is computed here."""

    def __init__(self, config: Config, plan: AlgorithmPlan, seed: int) -> None:
        follow = TargetSchedule(tau=config.target_tau, lag=Lag(config.lag_updates, config.lag_snapshot_updates))
        phase = Phase("all", config.optimiser, lambda: config.lr, lambda: config.lr_final,
                      config.optimiser_epsilon, config.grad_norm,
                      target=follow)
        first, self._second = QTModel(config, plan, seed), QTModel(config, plan, seed)
        super().__init__(QTModel(config, plan, seed), (phase,), target=first)
        self.config = config
        self._targets = BellmanTargets(config, first, self._second)
        self._moved()

    def _moved(self) -> None:
        super()._moved()
        self._second.move(self.state["lagged"])
        if self.statistics.observations is not None:
            self._second.watch(self.model.mean, self.model.scale)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {**super().weights, "lagged": self.state["lagged"]}

    def _weights_of(self, progress: Progress) -> Tree:
        both = torch.cat([self.state["target"], self.state["lagged"]])  # what the policy acts with, then what only updaters need
        return {**super()._weights_of(progress), "params": both}

    def split(self, batch: Tree, sums: np.ndarray, progress: Progress, rng: np.random.Generator) -> Iterator[ItemMinibatch]:
        minibatch = item_minibatch(batch, sums, 1.0, self.tensor, self.small)
        if "target" not in minibatch.items:
            search = torch.Generator().manual_seed(int(rng.integers(2**62)))
            minibatch.items["target"] = self._targets.targets(minibatch.items, search)
        yield minibatch

    def loss(self, minibatch: ItemMinibatch, phase: str) -> Loss:
        items, model, target = minibatch.items, self.model, minibatch.items["target"]
        logits = model.logits(model.encode(items["observation"]), model.unit(items["action"])).squeeze(1)
        q = model.values(logits)
        error = (q - target).detach().abs()
        if self.config.loss == "squared":
            loss, floor = 0.5 * (q - target).square(), torch.zeros_like(target)
        else:
            loss = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
            floor = -(torch.special.xlogy(target, target) + torch.special.xlogy(1 - target, 1 - target))
        metrics = {"td_error": error.mean(), "q_mean": q.detach().mean(), "q_max": q.detach().max(), "target_mean": target.mean(),
                   "excess_loss": (loss.detach() - floor).mean()}
        return Loss((minibatch.weight * loss).sum() * minibatch.scale, metrics, error)


class QTOpt(Algorithm):
    """See the module."""

    name, config_class, tolerates = "qtopt", Config, Tolerance.REPLAY
    from_replay = relabels = True
    metrics = (*phase_metrics(("all",)), TD_ERROR, Q_MEAN, Q_MAX, TARGET_MEAN, EXCESS_LOSS)

    def __init__(self, config: Config, spec: EnvSpec, net: NetConfig, seats: int) -> None:
        config.validate()
        if not isinstance(spec.action_space, gym.spaces.Box):
            raise ConfigError(f"qtopt cannot act in {spec.name}: it searches among continuous actions, but the action space is "
                              f"{spec.action_space}; use an environment with Box actions, or dqn")
        size = int(np.prod(spec.action_space.shape))
        if outside := [at for at in config.binary if not 0 <= at < size]:
            raise ConfigError(f"--algorithm.binary {outside[0]} is not in an action of {size} numbers; give 0 to {size - 1}")
        self.config, self.plan = config, AlgorithmPlan.of(spec, net, seats, config.normalise_observations)

    @cached_property
    def record(self) -> Transitions:
        plan = self.plan
        return Transitions(plan.seats, plan.spec.observation_space, plan.spec.action_space, gamma=self.config.gamma,
                           observation_moments=plan.norm_size)

    @cached_property
    def relabelled(self) -> RelabelledItems:
        fields = self.record.layout.fields
        kept = {name: fields[name] for name in ("observation", "action")}
        return RelabelledItems({**kept, "target": Field((1,), "float32")}, self.record.decisions, self.plan.norm_size)

    def relabeller(self) -> BellmanTargets:
        return BellmanTargets(self.config, QTModel(self.config, self.plan), QTModel(self.config, self.plan))

    def policy(self) -> QTPolicy:
        return QTPolicy(QTModel(self.config, self.plan))

    def learn(self, seed: int) -> QTLearn:
        return QTLearn(self.config, self.plan, seed)

    def explore(self, index: int, count: int, seats: int, progress: Progress) -> np.ndarray:
        return np.full(seats, self.config.epsilon, np.float32)

    def published_layout(self) -> Layout:
        return weights_layout(2 * self.policy().model.params.numel(), self.plan.norm_size)
