"""Conservative Q-learning: CQL(H) (Kumar et al. 2020, 2006.04779). Unseen actions are not worth more than recorded ones.

    Discrete    dqn (double)   + alpha [ log sum_a exp Q(x, a) - Q(x, a_data) ]
    Box         sac's critics  + alpha [ lse_i - Q_i(x, a_data) ],   lse_i over K actions each of three sources, at x:
                                 uniform: Q_i - log(1/2)^D     pi(x): Q_i - log pi     pi(x'): Q_i - log pi
                multiplier       with lagrange, the penalty is alpha' (alpha [ ... ] - lagrange), and alpha' ascends it

Everything else about dqn and sac is an option of theirs, --algorithm.dqn.* and --algorithm.sac.*. With alpha 0 (and for sac
entropy_backup) it is one of them, bit for bit. log pi carries no gradient, and what follows x' is judged at x.

Deliberate differences:

                    paper and its source                        here
    discrete        QR-DQN                                      double DQN
    log-sum         over all 3 K terms, not divided by 3 K      the same: thresholds mean the same
    illegal moves   not there                                   count in the sum over actions
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from shoal.acting import Policy, Progress
from shoal.algorithms import dqn, sac
from shoal.algorithms.common.item_learn import ItemLearn
from shoal.algorithms.common.metrics import phase_metrics
from shoal.algorithms.common.phases import Phase
from shoal.algorithms.off_policy.learn import ActorObjective, OffPolicyLearn, Penalty
from shoal.algorithms.off_policy.nets import SoftNet, Temperature
from shoal.algorithms.q_learning.learn import Errors, Judged, QLearn
from shoal.algorithms.q_learning.model import QModel
from shoal.algorithms.records.transitions import Transitions
from shoal.core import Tree
from shoal.errors import ConfigError
from shoal.learning import Algorithm, Tolerance
from shoal.ops.off_policy import clipped_double_q
from shoal.ops.offline import action_gap, sampled_logsumexp
from shoal.options import Options, number
from shoal.slots import Layout, map_tree
from shoal.telemetry.metrics import Metric

if TYPE_CHECKING:
    from shoal.envs import EnvSpec
    from shoal.nets import NetConfig

__all__ = ["CQL", "Config"]

GAP = Metric("conservative_gap", "gauge", "reward", "Mean of log sum exp Q over actions, less Q of the recorded one.")
MULTIPLIER = Metric("multiplier", "gauge", "", "What the conservative loss is multiplied by; with --algorithm.lagrange.")
LARGEST_MULTIPLIER = 1e6


@dataclass(frozen=True)
class CQLDiscreteOptions(dqn.Config):
    """dqn, without exploration to begin with."""

    section = "algorithm.dqn"

    loss: Literal["huber", "squared"] = "squared"
    """huber clips the gradient of an error to huber_delta; squared does not."""


@dataclass(frozen=True)
class CQLBoxOptions(sac.Config):
    """sac, with the values of the released program."""

    section = "algorithm.sac"

    actor_lr: float = number(1e-4, above=0)
    """Learning rate of the actor."""
    random_steps: int = number(0, at_least=0)
    """Environment steps at the beginning whose actions are uniformly random; online only."""


@dataclass(frozen=True)
class Config(Options):
    """Conservative Q-learning."""

    section = "algorithm"

    alpha: float = number(1.0, at_least=0)
    """Weight of the conservative loss; Box actions: 5 or 10."""
    lagrange: float | None = number(None)
    """Box actions: the gap that a learned multiplier keeps to; none has none."""
    lagrange_lr: float = number(3e-4, above=0)
    """Learning rate of that multiplier's logarithm."""
    samples: int = number(10, at_least=1, at_most=10_000)
    """Box actions: K, actions of each of the three sources."""
    entropy_backup: bool = False
    """Box actions: bootstrap from the next action's entropy too, as sac does."""
    dqn: CQLDiscreteOptions = field(default_factory=CQLDiscreteOptions)
    """The algorithm where actions are Discrete."""
    sac: CQLBoxOptions = field(default_factory=CQLBoxOptions)
    """The algorithm where actions are a Box."""

    def validate(self) -> None:
        super().validate()
        self.dqn.validate()
        self.sac.validate()
        if self.dqn.atoms:
            raise ConfigError(f"--algorithm.dqn.atoms {self.dqn.atoms} does not fit cql, whose loss is one of plain values; give 0")
        if self.sac.actor_priorities:
            raise ConfigError("--algorithm.sac.actor-priorities does not fit cql, whose policies act without critics; leave it out")


class CQL(Algorithm):
    """See the module."""

    name, config_class, tolerates = "cql", Config, Tolerance.REPLAY
    from_replay = runs_on_gpu = True

    def __init__(self, config: Config, spec: EnvSpec, net: NetConfig, seats: int) -> None:
        config.validate()
        self.config = config
        self.inner: dqn.DQN | sac.SAC
        if isinstance(spec.action_space, gym.spaces.Discrete):
            self.inner = dqn.DQN(config.dqn, spec, net, seats)
            if config.lagrange is not None:
                raise ConfigError(f"--algorithm.lagrange {config.lagrange:g} does not fit {spec.name}: only with Box actions is a "
                                  "multiplier learned; leave it out, and choose --algorithm.alpha")
        else:
            self.inner = sac.SAC(config.sac, spec, net, seats)
        self.plan = self.inner.plan
        self.metrics = (GAP, *self.inner.metrics, *(MULTIPLIERS if config.lagrange is not None else ()))

    @cached_property
    def record(self) -> Transitions:
        """Drawn alike: nobody judges items before they are learned from."""
        return replace(self.inner.record, estimates=None)

    def policy(self) -> Policy:
        return self.inner.policy()

    def learn(self, seed: int) -> ItemLearn[Any]:
        config, inner = self.config, self.inner
        if isinstance(inner, dqn.DQN):
            model, target = inner.model(seed, learns=True), inner.model(seed, learns=True)
            return QLearn(config.dqn, model, target, ConservativeErrors(inner.errors(), config.alpha), seed)
        if not config.alpha and config.entropy_backup:
            return inner.learn(seed)
        return self._soft_learn(inner, seed)

    def _soft_learn(self, inner: sac.SAC, seed: int) -> OffPolicyLearn:
        config, phases = self.config, list(inner.phases())
        models = [inner.model_of(inner.net(seed), seed) for _ in range(2)] if config.lagrange is None else \
            [inner.model_of(_with_multiplier(inner.net(seed)), seed) for _ in range(2)]
        if config.lagrange is not None:
            phases.append(Phase("multiplier", "adam", lambda: config.lagrange_lr, epsilon=config.sac.optimiser_epsilon))
        model, target = models
        soft = sac.SoftObjective(config.sac, model.net, target.net)
        return OffPolicyLearn(config.sac, model, target, phases, ConservativeObjective(config, soft, model.net),
                                inner.target_entropy, threshold=config.lagrange or 0.0)

    def explore(self, index: int, count: int, seats: int, progress: Progress) -> np.ndarray:
        return self.inner.explore(index, count, seats, progress)

    def published_layout(self) -> Layout:
        return self.inner.published_layout()


MULTIPLIERS = (MULTIPLIER, *(one for one in phase_metrics(("critic", "multiplier")) if one.name.startswith("multiplier")))
CQL.metrics = tuple(dict.fromkeys((GAP, *dqn.DQN.metrics, *sac.SAC.metrics, *MULTIPLIERS)))


def _with_multiplier(net: Any) -> Any:
    net.multiplier = Temperature(1.0)
    return net


class ConservativeErrors:
    """q_learning.learn.Errors: those of dqn, and how much all actions are worth more than the recorded one."""

    def __init__(self, errors: Errors, alpha: float) -> None:
        self.errors, self.alpha, self.captures = errors, alpha, errors.captures

    def __call__(self, model: QModel, target: QModel, items: Tree, noise: torch.Tensor | None = None) -> Judged:
        judged = self.errors(model, target, items, noise)
        assert judged.values is not None
        gap = action_gap(judged.values, items["action"])
        return judged._replace(loss=judged.loss + self.alpha * gap, more={**judged.more, "conservative_gap": gap.detach().mean()})


class ConservativeObjective:
    """An off_policy.learn.OffPolicyObjective with a penalty of the critics: sac's otherwise."""

    def __init__(self, config: Config, soft: sac.SoftObjective, net: SoftNet) -> None:
        self.config, self.soft, self.multiplier = config, soft, net.multiplier
        self.size = soft.noises // 2  # dimensions of an action
        self.noises = soft.noises + 3 * config.samples * self.size

    def taken(self, seen: Tree, items: Tree) -> Tensor:
        return self.soft.taken(seen, items)

    def actor(self, seen: Tree, items: Tree, noise: Tensor | None) -> ActorObjective:
        return self.soft.actor(seen, items, self._soft(noise))

    def bootstrap(self, following: Tree, lagging: Tree, items: Tree, noise: Tensor | None) -> Tensor:
        if self.config.entropy_backup:
            return self.soft.bootstrap(following, lagging, items, self._soft(noise))
        action, _ = self.soft.policy.sample(following, self._soft(noise).chunk(2, 1)[0])
        return clipped_double_q(self.soft.target_critic.of_unit(lagging, action))

    def penalty(self, seen: Tree, following: Tree, q: Tensor, noise: Tensor | None) -> Penalty:
        """Of every critic and item [2, B]; q is that of the recorded actions."""
        assert noise is not None
        count, rows = self.config.samples, q.shape[1]
        with torch.no_grad():
            uniform, here, there = noise[:, self.soft.noises :].reshape(rows, 3, count, self.size).unbind(1)
            wild = 2 * torch.special.ndtr(uniform) - 1
            own, own_log = self.soft.policy.samples(seen, here)
            next_, next_log = self.soft.policy.samples(following, there)
            log_probs = torch.cat([own_log.new_full((rows, count), -self.size * math.log(2)), own_log, next_log], 1)  # [B, 3 K]
            actions = torch.cat([wild, own, next_], 1).flatten(0, 1)
        again = map_tree(lambda x: x.repeat_interleave(3 * count, 0), seen)
        judged = self.soft.critic.of_unit(again, actions).reshape(len(q), rows, 3 * count)
        gap = sampled_logsumexp(judged, log_probs) - q
        weighted = self.config.alpha * gap
        metrics = {"conservative_gap": gap.detach().mean()}
        if self.multiplier is None:
            return Penalty(weighted, metrics=metrics)
        alpha = self.multiplier().detach().clamp(max=LARGEST_MULTIPLIER)
        return Penalty(alpha * (weighted - float(self.config.lagrange or 0.0)), weighted.detach().mean(0),
                       {**metrics, "multiplier": alpha})

    def _soft(self, noise: Tensor | None) -> Tensor:
        assert noise is not None
        return noise[:, : self.soft.noises]
