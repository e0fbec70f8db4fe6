"""Off-policy evaluation: what a policy is worth, from a recording of others, with intervals by resampling episodes.

    fitted Q             a regression (fitted_q.py); each resample has a net of its own
    importance           weighted per-decision importance sampling; needs the logged probabilities of the actions. Few episodes
                         have most of the weight, so it is biased and skewed, and its interval is corrected for both
    doubly robust        both: importance sampling of what the nets get wrong
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shoal.offline.fitted_q import FittedQ, FittedQPlan
from shoal.offline.logged_steps import LoggedSteps, PolicyChoices
from shoal.ops.bootstrap import corrected_interval, without_each
from shoal.ops.policy_value import doubly_robust, effective_size, importance
from shoal.ops.student import student_quantile

__all__ = ["Estimate", "PolicyValue", "evaluate_policy", "resamples"]

RESAMPLES = 200                       # for the intervals of importance sampling
FEW, FEW_SHARE = 20.0, 0.05           # effective episodes below which, or share of all below which, there is a warning
TELL = 500                            # updates between two words of progress


@dataclass(frozen=True)
class Estimate:
    """A value and its interval."""

    name: str
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class PolicyValue:
    """What a recording says about a policy."""

    estimates: tuple[Estimate, ...]
    recorded: float
    """The recorded episodes' own discounted return."""
    episodes: int
    effective: float | None
    """Episodes of the policy itself that would tell as much as the weighted ones; None without logged probabilities."""
    warnings: tuple[str, ...]


def resamples(episodes: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """How often each episode counts in each of `count` resamples [count, E]."""
    return rng.multinomial(episodes, np.full(episodes, 1 / episodes), count)


def evaluate_policy(steps: LoggedSteps, choices: PolicyChoices, plan: FittedQPlan, bootstraps: int = 20, confidence: float = 0.95,
                    tell: Callable[[str], None] = lambda words: None) -> PolicyValue:
    """All estimates that the recording allows."""
    episodes, rng = len(steps.lengths), np.random.default_rng((plan.seed, 0xB007))
    every = np.ones((1, episodes))
    fitted = FittedQ(steps, choices, plan, np.concatenate([every, resamples(episodes, bootstraps, rng)]))
    for update in range(plan.updates):
        fitted.update()
        if (update + 1) % TELL == 0:
            tell(f"  {update + 1:,} of {plan.updates:,} updates, fitted Q {fitted.start_value()[0]:.4g}")
    each = fitted.start_value()
    half = student_quantile(confidence, bootstraps - 1) * float(each[1:].std(ddof=1))  # of few nets it is not well known
    found = [Estimate("fitted Q", float(each[0]), float(each[0]) - half, float(each[0]) + half)]
    ratio, warnings = _log_ratio(steps, choices)
    effective = None
    if ratio is not None:
        found += _weighted(steps, ratio, fitted, plan.gamma, confidence, rng)
        effective = effective_size(ratio)
        if effective < max(FEW, FEW_SHARE * episodes):
            why = "these are few" if effective > episodes / 2 else "the recorded actions are too different from the policy's"
            warnings.append(f"the effective sample size is {effective:.1f} of {episodes:,} episodes: {why}, so importance sampling "
                            "and doubly robust say little; record more episodes, with more of the policy's own actions")
    own = float(steps.returns(plan.gamma)[np.cumsum(steps.lengths) - steps.lengths].mean())
    return PolicyValue(tuple(found), own, episodes, effective, tuple(warnings))


def _log_ratio(steps: LoggedSteps, choices: PolicyChoices) -> tuple[np.ndarray | None, list[str]]:
    """[E, longest], or why there is none."""
    if np.isnan(steps.log_prob).any():
        return None, ["the recording does not say how likely its actions were, so there is no importance sampling; `shoal data "
                      "record` writes it down"]
    if choices.log_prob is None:
        return None, ["the policy has no probabilities of its actions, so there is no importance sampling; with --explore it may "
                      "have some"]
    return steps.padded(choices.log_prob - steps.log_prob), []


def _weighted(steps: LoggedSteps, ratio: np.ndarray, fitted: FittedQ, gamma: float, confidence: float,
              rng: np.random.Generator) -> list[Estimate]:
    """Importance sampling and doubly robust; the resamples of the latter take the nets in turns."""
    reward, (q, v) = steps.padded(steps.reward), fitted.values()
    v, every = v[:, steps.here], np.ones((1, len(steps.lengths)))
    counts = np.concatenate([every, resamples(len(steps.lengths), RESAMPLES, rng)])
    plain = importance(ratio, reward, gamma, counts)
    robust = [doubly_robust(ratio, reward, steps.padded(q[0]), steps.padded(v[0]), gamma, every)]
    nets = len(q) - 1
    for net in range(nets):
        some = counts[1:][net::nets]
        robust.append(doubly_robust(ratio, reward, steps.padded(q[1 + net]), steps.padded(v[1 + net]), gamma, some))
    without = importance(ratio, reward, gamma, without_each(len(steps.lengths), rng))
    low, high = np.quantile(np.concatenate(robust)[1:], [0.5 - confidence / 2, 0.5 + confidence / 2])
    return [Estimate("importance sampling", float(plain[0]), *corrected_interval(float(plain[0]), plain[1:], without, confidence)),
            Estimate("doubly robust", float(robust[0][0]), float(low), float(high))]
