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

from shoal.algorithms.actor_critic import ActorCritic
from shoal.algorithms.advantages import Advantages, estimate
from shoal.algorithms.blueprint import check_numbers
from shoal.algorithms.learner import Learner
from shoal.algorithms.proximal import Bounds, Proximal
from shoal.algorithms.training import OptimiserName
from shoal.core import Tolerance
from shoal.errors import ConfigError
from shoal.ops import returns

if TYPE_CHECKING:
    from shoal.algorithms.batch import Batch
    from shoal.envs import EnvSpec
    from shoal.nets import NetConfig

__all__ = ["APPO", "Config"]


@dataclass(frozen=True)
class Config:
    """Asynchronous proximal policy optimisation."""

    unroll: int = 32
    """Steps in an unroll, T."""
    gamma: float = 0.99
    """Discount."""
    vtrace: bool = True
    """Correct targets and advantages for lag with V-trace; otherwise GAE."""
    lambda_: float = 0.95
    """Decay of the traces in the advantages (GAE; V-trace has 1)."""
    max_lag: int | None = 1000
    """Mask steps whose weights are more than this many versions old; none masks nothing."""
    epochs: int = 1
    """How often each batch is gone through."""
    minibatches: int = 1
    """Parts a batch is split into in each epoch."""
    clip: float = 0.1
    """The ratio may leave 1 by this factor: 1 / (1 + clip) to 1 + clip."""
    clip_final: float | None = None
    """Clip at the end of the env_steps budget; none keeps it constant."""
    ratio_least: float = 0.05
    """The ratio is held above this."""
    ratio_most: float = 20.0
    """The ratio is held below this."""
    lr: float = 1e-3
    """Learning rate."""
    lr_final: float | None = None
    """Learning rate at the end of the env_steps budget; none keeps it constant."""
    optimiser: OptimiserName = "adam"
    """adam, rmsprop (epsilon inside the root) or sgd."""
    optimiser_epsilon: float = 1e-6
    """Epsilon of adam and rmsprop."""
    grad_norm: float = 4.0
    """Longest gradient; longer ones are scaled down. 0 does not clip."""
    value_weight: float = 0.5
    """Weight of the value loss."""
    value_clip: float | None = 1.0
    """A new value may leave the old one by this much; none does not clip."""
    entropy: float = 0.003
    """Weight of the entropy bonus."""
    entropy_final: float | None = None
    """Entropy weight at the end of the env_steps budget; none keeps it constant."""
    normalise_advantage: bool = True
    """Give the advantages of a batch (of all learners together) mean 0 and deviation 1."""
    normalise_observations: bool = False
    """Scale floating-point observations by their running mean and deviation; pixels are scaled anyway."""
    normalise_returns: bool = False
    """Scale rewards by the running deviation of the discounted return."""
    final_rows: int = 0
    """Final observations of truncated episodes that one slot can hold; 0 works it out."""

    def validate(self) -> None:
        check_numbers(
            self,
            positive=("unroll", "lr", "epochs", "minibatches", "clip", "value_clip", "optimiser_epsilon", "ratio_least"),
            shares=("gamma", "lambda_"),
            not_negative=("value_weight", "entropy", "grad_norm", "final_rows", "lr_final", "entropy_final", "clip_final",
                          "max_lag"),
        )
        if not self.ratio_least <= 1 / (1 + self.clip) or not self.ratio_most >= 1 + self.clip:
            raise ConfigError(
                f"ratio_least={self.ratio_least} and ratio_most={self.ratio_most} must lie outside the clip range of "
                f"clip={self.clip}, {1 / (1 + self.clip):.3f} to {1 + self.clip:.3f}; widen them (0.05 and 20) or lower clip"
            )


class APPO(ActorCritic):
    """See the module."""

    name = "appo"
    tolerates = Tolerance.BOUNDED_REUSE

    def __init__(self, config: Config, spec: EnvSpec, net: NetConfig, seats: int) -> None:
        super().__init__(config, spec, net, seats)
        self.max_lag = config.max_lag

    def objective(self, learner: Learner) -> APPOObjective:
        return APPOObjective(self.config, learner)


class APPOObjective(Proximal):
    """One gradient per minibatch of a batch."""

    def advantages(self, batch: Batch) -> Advantages:
        """With V and pi as they are now: values that came with the data would be as old as the data."""
        model, config = self.learner.model, self.config
        output = model.unroll(batch)
        if not config.vtrace:
            return estimate(model, batch, output, config)
        log_prob, _ = model.judge(output, batch)
        v_tm1, v_t = output.value[:-1], model.next_values(batch, output)
        target = returns.vtrace(
            log_prob - batch.log_prob, batch.reward, config.gamma * batch.discount, v_tm1, v_t, keep_t=batch.keep
        )
        return Advantages(target.pg_advantage, v_tm1, target.vs)

    def bounds(self, clip: float) -> Bounds:
        return Bounds(1 / (1 + clip), 1 + clip, self.config.ratio_least, self.config.ratio_most)
