"""The cross-entropy method over actions in [-1, 1]^D, for many states at once (Rubinstein 1999; QT-Opt, Kalashnikov et al. 2018).

    mean 0, deviation 1 ──▶ N draws per state, clipped ──▶ scores ──▶ the M best ──▶ their mean and deviation ──▶ again, J times

A binary number of an action (open or closed) is -1 or 1: it is 1 with the probability (1 + mean) / 2, so the mean over the best
draws gives the next probability by itself. All arrays have a row for each state, and every state has random numbers of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

__all__ = ["cem", "cem_draw", "cem_refit"]


@torch.no_grad()
def cem(score: Callable[[Tensor], Tensor], rows: int, size: int, *, samples: int = 64, elites: int = 6, iterations: int = 2,
        generator: Generator | None = None, binary: Tensor | None = None,
        device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """The best action [rows, size] of the last iteration's draws, and its score [rows].

    `score` gives actions [rows, N, size] their values [rows, N]. `binary` [size] says which numbers of an action are -1 or 1.
    """
    mean, std = torch.zeros(rows, size, device=device), torch.ones(rows, size, device=device)
    shape = (rows, samples, size)
    for turn in range(iterations):
        noise = torch.randn(shape, generator=generator, device=device)
        chance = None if binary is None else torch.rand(shape, generator=generator, device=device)
        draws = cem_draw(mean, std, noise, binary, chance)
        values = score(draws)
        if turn + 1 < iterations:
            mean, std = cem_refit(draws, values, elites)
    best, at = values.max(1)
    return draws[torch.arange(rows, device=device), at], best


def cem_draw(mean: Tensor, std: Tensor, noise: Tensor, binary: Tensor | None = None, chance: Tensor | None = None) -> Tensor:
    """Actions [rows, N, size] in [-1, 1], of standard normal `noise` and, for `binary` numbers, of `chance` in [0, 1)."""
    draws = torch.addcmul(mean.unsqueeze(1), std.unsqueeze(1), noise).clamp_(-1, 1)
    if binary is None or chance is None:
        return draws
    closed = chance < (1 + mean.unsqueeze(1)) / 2
    return torch.where(binary, torch.where(closed, 1.0, -1.0), draws)


def cem_refit(draws: Tensor, values: Tensor, elites: int) -> tuple[Tensor, Tensor]:
    """Mean and deviation [rows, size] of each state's best draws; the deviation has the divisor M - 1."""
    best = values.topk(elites, 1).indices
    chosen = draws.gather(1, best.unsqueeze(2).expand(-1, -1, draws.shape[2]))
    return chosen.mean(1), chosen.std(1, correction=1)
