"""The metrics of learning. An algorithm lists those that its gradients report; a name that it does not list is refused.

    class MyAlgorithm(Algorithm):
        metrics = (*phase_metrics(("critic", "actor")), TD_ERROR, Metric("my_number", "gauge", "unit", "What it means."))
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.telemetry.metrics import Metric

__all__ = ["ALPHA", "APPROX_KL", "CLIP_FRACTION", "CONTRAST_ACCURACY", "CONTRAST_LOSS", "DELTA_Q_FIRST", "DELTA_Q_LAST",
           "ENTROPY", "EXPLAINED_VARIANCE", "GRAD_NORM", "IMPORTANCE_MIN", "LEARNING_RATE", "LOSS", "MEAN_RHO", "POLICY_LOSS",
           "POLICY_METRICS", "Q_MAX", "Q_MEAN", "RETURNS_CLIPPED", "TARGET_MEAN", "TD_ERROR", "VALUE_LOSS", "phase_metrics"]

# of every algorithm
LOSS = Metric("loss", "gauge", "", "The whole loss of the last update.")
GRAD_NORM = Metric("grad_norm", "gauge", "", "Norm of the last gradient, before clipping.")
LEARNING_RATE = Metric("learning_rate", "gauge", "", "Step size of the last update.")
# of a policy and its value function
POLICY_LOSS = Metric("policy_loss", "gauge", "", "The policy-gradient term of the last update.")
VALUE_LOSS = Metric("value_loss", "gauge", "", "The value term of the last update, before its weight.")
ENTROPY = Metric("entropy", "gauge", "nats", "Mean entropy of the policy in the last update.")
APPROX_KL = Metric("approx_kl", "gauge", "nats", "Divergence from the policy that acted: mean(rho - 1 - log rho).")
CLIP_FRACTION = Metric("clip_fraction", "gauge", "share", "Share of decisions whose ratio was clipped in the last update.")
EXPLAINED_VARIANCE = Metric("explained_variance", "gauge", "share", "1 - Var(target - value) / Var(target) in the last update.")
MEAN_RHO = Metric("mean_rho", "gauge", "ratio", "Mean ratio of the learner's policy to the one that acted; 1 on-policy.")
POLICY_METRICS = (APPROX_KL, ENTROPY, EXPLAINED_VARIANCE, MEAN_RHO, POLICY_LOSS, VALUE_LOSS)
"""What every actor-critic reports."""
# of action values
TD_ERROR = Metric("td_error", "gauge", "", "Mean size of the temporal-difference errors of the last update; with --algorithm.atoms "
                  "these are divergences, in nats.")
Q_MEAN = Metric("q_mean", "gauge", "reward", "Mean q-value of the actions in the last batch.")
Q_MAX = Metric("q_max", "gauge", "reward", "Largest of them.")
TARGET_MEAN = Metric("target_mean", "gauge", "reward", "Mean of what they were moved towards.")
IMPORTANCE_MIN = Metric("importance_min", "gauge", "share", "Smallest importance weight in the last batch; the largest is 1.")
ALPHA = Metric("alpha", "gauge", "reward", "Temperature of SAC: what a nat of the policy's entropy is worth.")
RETURNS_CLIPPED = Metric("returns_clipped", "gauge", "share", "Probability, in the last update's targets, of returns outside "
                         "--algorithm.value-min and value-max; with --algorithm.atoms.")
CONTRAST_ACCURACY = Metric("contrast_accuracy", "gauge", "share", "Share of the last batch's crops whose own key was the likeliest "
                           "of all; images that are alike count as wrong.")
CONTRAST_LOSS = Metric("contrast_loss", "gauge", "nats", "Mean contrastive loss (InfoNCE) of the last batch; at first about the "
                       "logarithm of its size.")
DELTA_Q_FIRST = Metric("delta_q_first", "gauge", "share", "How far q-values at a window's first loss step are from those with the "
                       "actor's own state, over the window's largest; with --algorithm.diagnose.")
DELTA_Q_LAST = Metric("delta_q_last", "gauge", "share", "The same at a window's last loss step.")


def phase_metrics(phases: Sequence[str]) -> tuple[Metric, ...]:
    """What every gradient reports by itself: loss, norm and learning rate, of each phase where there are several."""
    own = (LOSS, GRAD_NORM, LEARNING_RATE)
    if len(phases) == 1:
        return own
    return tuple(Metric(f"{phase}_{metric.name}", metric.kind, metric.unit, f"{metric.text} Of the {phase}'s part of it.")
                 for phase in phases for metric in own)
