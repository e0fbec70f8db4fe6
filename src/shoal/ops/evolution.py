"""Evolution strategies: from the returns of perturbed parameters to a direction of ascent (Salimans et al. 2017, 1703.03864).

Members lie side by side in the order in which they are drawn; with mirrored sampling each perturbation is followed by its opposite:
theta + sigma eps_0, theta - sigma eps_0, theta + sigma eps_1, ...
"""

from __future__ import annotations

from typing import Literal

import numpy as np

__all__ = ["Shaping", "centred_ranks", "noise_weights", "shaped"]

Shaping = Literal["ranks", "normalised", "raw"]


def centred_ranks(returns: np.ndarray) -> np.ndarray:
    """rank / (N - 1) - 1/2 over all members, the worst at -1/2 and the best at 1/2. Ties are broken by order."""
    ranks = np.empty(len(returns))
    ranks[np.argsort(returns, kind="stable")] = np.arange(len(returns))
    return ranks / max(1, len(returns) - 1) - 0.5


def shaped(returns: np.ndarray, shaping: Shaping) -> np.ndarray:
    """What counts in place of the returns: their ranks, their distance from the mean in deviations, or themselves."""
    if shaping == "ranks":
        return centred_ranks(returns)
    if shaping == "raw":
        return returns
    normalised: np.ndarray = (returns - returns.mean()) / max(float(returns.std()), 1e-8)
    return normalised


def noise_weights(returns: np.ndarray, mirrored: bool, sigma: float, shaping: Shaping) -> np.ndarray:
    """The weights w of the estimate sum_j w_j eps_j of the direction of ascent, one for each perturbation drawn.

    Raw returns give the gradient of the smoothed return, 1/(N sigma) sum F_i eps_i; mirrored pairs share an eps, so that
    1/(2n sigma) sum (F+ - F-) eps. Ranks and normalised returns have no scale of their own: the published code leaves 1/sigma
    out there, and so does this.
    """
    scores = shaped(returns, shaping) / (len(returns) * (sigma if shaping == "raw" else 1.0))
    return scores[0::2] - scores[1::2] if mirrored else scores
