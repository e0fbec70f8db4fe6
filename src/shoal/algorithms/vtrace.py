"""V-trace actor-critic: the learner of IMPALA (Espeholt et al. 2018, 1802.01561) and of SEED RL.

    actors    mu, the policy of some older version  ->  unrolls of T steps with log mu(a|x)
    learner   V and pi with the current weights on the stored observations  ->  rho = pi / mu
              -> targets v_s and advantages, corrected for the lag  ->  one gradient

Deliberate differences:

                 paper and its source          here
    reduction    sum over T x B                mean; reduction="sum" for the paper's
    optimiser    RMSProp eps .1                Adam; RMSProp with epsilon inside the root, as in the paper, by choice
    gradient     clipped at 40 (of sums)       clipped at 0.5 (of means)
    rewards      clipped or squashed           as they are, or scaled by the deviation of the return
    time limits  treated as the end            bootstrapped from the true last observation, trace cut
    lambda       1                             a choice, with SEED's bootstrap of the advantage
    mu           pi of an older version        may be mixed with uniform actions (behaviour_mix), log mu of the mixture
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from shoal.acting import Progress
from shoal.algorithms.actor_critic.algorithm import ActorCritic, ActorCriticConfig
from shoal.algorithms.actor_critic.learn import ActorCriticLearn
from shoal.algorithms.common.learn import Loss
from shoal.algorithms.common.metrics import CLIP_FRACTION, POLICY_METRICS, phase_metrics
from shoal.algorithms.common.optimiser import annealed
from shoal.core import Tree
from shoal.errors import ConfigError
from shoal.learning import Tolerance
from shoal.ops import losses, returns
from shoal.options import number

if TYPE_CHECKING:
    from shoal.algorithms.actor_critic.model import ActorCriticModel
    from shoal.algorithms.actor_critic.unroll_batch import UnrollBatch
    from shoal.envs import EnvSpec
    from shoal.nets import ActorCriticOutput, NetConfig

__all__ = ["Config", "VTrace"]

ROUNDING = 1e-4  # a ratio that is 1 but for rounding was not clipped


@dataclass(frozen=True)
class Config(ActorCriticConfig):
    """V-trace actor-critic."""

    unroll: int = number(20, at_least=1)
    lambda_: float = number(1.0, at_least=0, at_most=1)
    """Decay of the traces; 1 gives the paper's n-step targets."""
    correction: Literal["vtrace", "none"] = "vtrace"
    """Correct for the difference between the policy that acted and the one that learns, or ignore it."""
    rho_bar: float = number(1.0, above=0)
    """Largest importance weight in a target: sets what is learned."""
    pg_rho_bar: float = number(1.0, above=0)
    """Largest importance weight of the policy gradient; the paper has rho_bar here too."""
    c_bar: float = number(1.0, above=0)
    """Largest importance weight in a trace: sets how fast it is learned."""
    upgo: float = number(0.0, at_least=0)
    """Weight of a second policy gradient, by upgoing returns (AlphaStar): what went better than expected is followed to its end."""
    td_lambda: float | None = number(None, at_least=0, at_most=1)
    """Values learn TD(lambda) returns with this decay, as AlphaStar's do, without importance weights; none: V-trace's targets."""
    initial_kl: float = number(0.0, at_least=0)
    """Weight of KL(initial policy || policy), with the weights that learning began with (AlphaStar: 0.002, to a policy that has
    imitated humans)."""
    behaviour_mix: float = number(0.0, at_least=0, at_most=1)
    """Share of uniformly random actions that actors mix into their policy (discrete actions)."""
    reduction: Literal["mean", "sum"] = "mean"
    """How losses are reduced over T x B. The paper sums, which makes the learning rate T x B times larger."""

    def validate(self) -> None:
        super().validate()
        if self.rho_bar < self.c_bar:
            raise ConfigError(
                f"--algorithm.rho-bar {self.rho_bar} is below --algorithm.c-bar {self.c_bar}, but V-trace needs rho_bar >= c_bar "
                f"(paper, section 4.1); set --algorithm.c-bar {self.rho_bar} or raise --algorithm.rho-bar"
            )
        if self.reduction == "sum" and 0 < self.grad_norm < 1:
            raise ConfigError(
                f"--algorithm.reduction sum with --algorithm.grad-norm {self.grad_norm} would clip every gradient of T x B summed "
                "losses; set --algorithm.grad-norm 40 (the paper's) or --algorithm.reduction mean"
            )


class VTrace(ActorCritic[Config]):
    """See the module."""

    name, config_class, tolerates = "vtrace", Config, Tolerance.REPLAY
    metrics = (*phase_metrics(("all",)), *POLICY_METRICS, CLIP_FRACTION)

    def __init__(self, config: Config, spec: EnvSpec, net: NetConfig, seats: int) -> None:
        super().__init__(config, spec, net, seats, config.behaviour_mix)

    def objective(self, learn: ActorCriticLearn) -> VTraceObjective:
        return VTraceObjective(self.config, learn)


@dataclass
class VTraceMinibatch:
    """A batch and what is true while it is learned from."""

    batch: UnrollBatch
    weight: float
    entropy: float


class VTraceObjective:
    """One gradient per batch."""

    captures = True

    def __init__(self, config: Config, learn: ActorCriticLearn) -> None:
        self.config, self.learn = config, learn
        self.initial = copy.deepcopy(learn.model) if config.initial_kl else None

    def sums(self, batch: Tree) -> Any:
        return self.learn.shared(batch)

    def minibatches(
        self, batch: Tree, sums: Any, progress: Progress, rng: np.random.Generator
    ) -> Iterator[VTraceMinibatch]:
        entropy = annealed(progress, self.config.entropy, self.config.entropy_final)
        weight = self.learn.totals(sums).weight(reduction=self.config.reduction)
        yield VTraceMinibatch(self.learn.batch(batch), weight, entropy)

    def loss(self, minibatch: VTraceMinibatch) -> Loss:
        config, batch, model = self.config, minibatch.batch, self.learn.model
        output = model.unroll(batch)  # T + 1 rows
        log_prob, entropy = model.judge(output, batch)
        log_rho = log_prob.detach() - batch.log_prob
        values = output.value.detach()
        v_tm1, v_t = values[:-1], model.next_values(batch, output)
        target = returns.vtrace(
            log_rho if config.correction == "vtrace" else torch.zeros_like(log_rho),
            batch.reward,
            config.gamma * batch.discount,
            v_tm1,
            v_t,
            lambda_=config.lambda_,
            rho_bar=config.rho_bar,
            c_bar=config.c_bar,
            pg_rho_bar=config.pg_rho_bar,
            keep_t=batch.keep,
        )
        valid, weight, discount = batch.valid, minibatch.weight, config.gamma * batch.discount
        policy_loss = losses.masked_sum(losses.policy_gradient_loss(log_prob, target.pg_advantage), valid) * weight
        if config.upgo:
            upgoing = returns.upgo_returns(batch.reward, discount, v_tm1, v_t, batch.keep)
            upgo_advantage = log_rho.exp().clamp(max=1.0) * (upgoing - v_tm1)
            policy_loss = policy_loss + config.upgo * weight * losses.masked_sum(
                losses.policy_gradient_loss(log_prob, upgo_advantage), valid)
        value_target = target.vs
        if config.td_lambda is not None:
            value_target = returns.lambda_returns(batch.reward, discount, v_t, config.td_lambda, batch.keep)
        value_loss = losses.masked_sum(losses.value_loss(output.value[:-1], value_target), valid) * weight
        bonus = losses.masked_sum(entropy, valid) * weight
        loss = policy_loss + config.value_weight * value_loss - minibatch.entropy * bonus
        if self.initial is not None:
            drift = losses.masked_sum(_initial_kl(self.initial, model, output, batch), valid) * weight
            loss = loss + config.initial_kl * drift
        return Loss(
            loss,
            {
                "policy_loss": policy_loss,
                "value_loss": value_loss,
                "entropy": losses.masked_mean(entropy.detach(), valid),
                "approx_kl": losses.masked_mean(losses.approx_kl(log_prob.detach(), batch.log_prob), valid),
                "mean_rho": losses.masked_mean(log_rho.exp(), valid),
                "clip_fraction": losses.masked_mean((log_rho.exp() > config.rho_bar + ROUNDING).float(), valid),
                "explained_variance": losses.explained_variance(v_tm1, value_target, valid),
            },
        )


def _initial_kl(initial: ActorCriticModel, model: ActorCriticModel, output: ActorCriticOutput, batch: UnrollBatch) -> torch.Tensor:
    """KL(initial policy || policy) [T, B]. Both see observations through the statistics of now."""
    if initial.params.device != model.params.device:
        initial.move(initial.params.to(model.params.device))
    initial.watch(model.mean, model.scale)
    T = batch.length
    with torch.no_grad():
        before = initial.unroll(batch).params[:T]
    return model.net.head.kl(before, output.params[:T], None if batch.action_mask is None else batch.action_mask[:T])
