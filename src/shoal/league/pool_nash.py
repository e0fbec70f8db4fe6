"""How good a league's pool is: the equilibrium of the game in which each side picks a snapshot.

The current policy of a league may be exploitable while its snapshots together are not. Both are worth knowing.
"""

from __future__ import annotations

import numpy as np

__all__ = ["nash_weights"]

ROUNDS = 20_000


def nash_weights(payoffs: np.ndarray, rounds: int = ROUNDS) -> np.ndarray:
    """Weights [N] of an equilibrium of the symmetric zero-sum game with these payoffs [N, N] of the row: regret matching+ (Tammelin
    2014), whose average, later rounds counting more, comes as close as is asked for."""
    regret, total = np.zeros(len(payoffs)), np.zeros(len(payoffs))
    play = np.full(len(payoffs), 1.0 / len(payoffs))
    for number in range(1, rounds + 1):
        values = payoffs @ play
        regret = np.maximum(regret + values - play @ values, 0.0)
        play = regret / regret.sum() if regret.sum() > 0 else np.full(len(payoffs), 1.0 / len(payoffs))
        total += number * play
    return np.asarray(total / total.sum())
