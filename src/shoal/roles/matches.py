"""What an evaluation finds out about a policy besides its return: win rates, and exploitability in small games."""

from __future__ import annotations

import math

import numpy as np

from shoal.acting import ActionProbabilities, Policy, StepView
from shoal.envs.builtin.game_trees import GameTree, tree_of
from shoal.envs.exploitability import Probabilities, exploitability
from shoal.errors import ConfigError
from shoal.roles.parts import EnvSource

__all__ = ["exploitability_of", "match_rates", "probabilities_of", "quick_tree", "rate_interval"]

QUICK = ("matrix", "kuhn")  # kernels of games whose best responses take milliseconds


def match_rates(returns: np.ndarray) -> dict[str, float]:
    """Of matches with these returns. A draw, which returns 0, counts half as a win."""
    wins, losses = np.mean(returns > 0), np.mean(returns < 0)
    return {"win_rate": float(wins + (1 - wins - losses) / 2), "loss_rate": float(losses)}


def rate_interval(rate: float, games: int, deviations: float = 1.96) -> tuple[float, float]:
    """Where the true rate lies, with 95 % confidence (Wilson's interval)."""
    square = deviations**2 / games
    middle, width = rate + square / 2, deviations * math.sqrt(rate * (1 - rate) / games + square / (4 * games))
    return (middle - width) / (1 + square), (middle + width) / (1 + square)


def quick_tree(policy: Policy, source: EnvSource) -> GameTree | None:
    """The tree of an environment, where the exploitability of this policy can be computed at every evaluation."""
    if not isinstance(source.env, str) or not isinstance(policy, ActionProbabilities) or policy.initial_state(1):
        return None
    try:
        tree = tree_of(source.env, source.kwargs)
    except ConfigError:
        return None
    return tree if tree.spec.kernel in QUICK else None


def exploitability_of(policy: Policy, tree: GameTree) -> float:
    """How much a best response wins against this policy, played with its own probabilities on both sides."""
    return float(exploitability(tree, probabilities_of(policy, tree)).exploitability)


def probabilities_of(policy: Policy, tree: GameTree) -> Probabilities:
    """What a policy plays, as a function of what its agent sees."""
    assert isinstance(policy, ActionProbabilities)
    asked = policy.probabilities

    def probabilities(agent: int, seen: np.ndarray, masks: np.ndarray) -> np.ndarray:
        return asked(StepView(seen, np.ones(len(seen), bool), masks if tree.spec.masked else None))

    return probabilities
