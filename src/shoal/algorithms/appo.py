"""APPO: PPO's clipped objective on data that are some versions old (Sample Factory, Petrenko et al. 2020, 2006.11751).

    actors    mu, the policy of some older version  ->  unrolls of T steps with log mu(a|x)
    learner   V and pi with the newest weights -> V-trace targets and advantages (or GAE), once per batch
              -> `epochs` times `minibatches` gradients of the clipped objective, its ratio taken to mu

The ratio is that to the policy that acted, so lag shows in it and is clipped; steps that are more than `max_lag` versions
old are masked (by the Learner role, which knows the versions).

                  PPO                           here (Sample Factory's, but where it says otherwise)
    clip          (1 - eps, 1 + eps)            (1 / (1 + eps), 1 + eps)
    ratio         free                          held within 0.05 .. 20
    targets       GAE                           V-trace with rho_bar = c_bar = 1; vtrace = false gives GAE (their version 2)
    bootstrap     V(x_T)                        V(x_T); theirs stores no x_T and lets the last temporal difference be 0
    value clip    off                           1
    recomputing   once per batch                once per batch; theirs once per minibatch (the same for one minibatch)
    mask          -                             masked steps are left out; theirs also scales the learning rate by the valid share
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.algorithms.actor_critic.advantages import Advantages, estimate
from shoal.algorithms.actor_critic.algorithm import ActorCritic
from shoal.algorithms.actor_critic.learn import ActorCriticLearn
from shoal.algorithms.actor_critic.proximal import Proximal, ProximalConfig, RatioBounds
from shoal.algorithms.common.metrics import CLIP_FRACTION, POLICY_METRICS, phase_metrics
from shoal.errors import ConfigError
from shoal.learning import Tolerance
from shoal.ops import returns
from shoal.options import number

if TYPE_CHECKING:
    from shoal.algorithms.actor_critic.unroll_batch import UnrollBatch
    from shoal.envs import EnvSpec
    from shoal.nets import NetConfig

__all__ = ["APPO", "Config"]


@dataclass(frozen=True)
class Config(ProximalConfig):
    """Asynchronous proximal policy optimisation."""

    unroll: int = number(32, at_least=1)
    vtrace: bool = True
    """Correct targets and advantages for lag with V-trace; otherwise GAE."""
    lambda_: float = number(0.95, at_least=0, at_most=1)
    """Decay of the traces in the advantages (GAE; V-trace has 1)."""
    max_lag: int | None = number(1000, at_least=0)
    """Mask steps whose weights are more than this many versions old; none masks nothing."""
    epochs: int = number(1, at_least=1)
    minibatches: int = number(1, at_least=1)
    clip: float = number(0.1, above=0)
    """The ratio may leave 1 by this factor: 1 / (1 + clip) to 1 + clip."""
    ratio_least: float = number(0.05, above=0)
    """The ratio is held above this."""
    ratio_most: float = 20.0
    """The ratio is held below this."""
    optimiser_epsilon: float = number(1e-6, above=0)
    grad_norm: float = number(4.0, at_least=0)
    value_clip: float | None = number(1.0, above=0)
    entropy: float = number(0.003, at_least=0, live=True)

    def validate(self) -> None:
        super().validate()
        if not self.ratio_least <= 1 / (1 + self.clip) or not self.ratio_most >= 1 + self.clip:
            raise ConfigError(
                f"ratio_least={self.ratio_least} and ratio_most={self.ratio_most} must lie outside the clip range of "
                f"clip={self.clip}, {1 / (1 + self.clip):.3f} to {1 + self.clip:.3f}; widen them (0.05 and 20) or lower clip"
            )


class APPO(ActorCritic[Config]):
    """See the module."""

    name, config_class, tolerates = "appo", Config, Tolerance.BOUNDED_REUSE
    metrics = (*phase_metrics(("all",)), *POLICY_METRICS, CLIP_FRACTION)

    def __init__(self, config: Config, spec: EnvSpec, net: NetConfig, seats: int) -> None:
        super().__init__(config, spec, net, seats)
        self.max_lag = config.max_lag

    def objective(self, learn: ActorCriticLearn) -> APPOObjective:
        return APPOObjective(self.config, learn)


class APPOObjective(Proximal[Config]):
    """One gradient per minibatch of a batch."""

    def advantages(self, batch: UnrollBatch) -> Advantages:
        """With V and pi as they are now: values that came with the data would be as old as the data."""
        model, config = self.learn.model, self.config
        output = model.unroll(batch)
        if not config.vtrace:
            return estimate(model, batch, output, config)
        log_prob, _ = model.judge(output, batch)
        v_tm1, v_t = output.value[:-1], model.next_values(batch, output)
        target = returns.vtrace(
            log_prob - batch.log_prob, batch.reward, config.gamma * batch.discount, v_tm1, v_t, keep_t=batch.keep
        )
        return Advantages(target.pg_advantage, v_tm1, target.vs)

    def bounds(self, clip: float) -> RatioBounds:
        return RatioBounds(1 / (1 + clip), 1 + clip, self.config.ratio_least, self.config.ratio_most)
