"""What an update does to the parameters of dqn and r2d2, on the whole vector or on a slice of it.

Nothing here looks from one element to another: optimisers and target nets work element by element, and the one thing that
does not, clipping by the norm, is done before a gradient is cut (QLearn.clipped). So the slices of a parameter server in
pieces (GORILA) compute the bits of the whole, wherever they begin at a multiple of a vector register.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from shoal.algorithms.training import Optimiser, annealed
from shoal.core import Progress, Tree
from shoal.ops.value import polyak_

__all__ = ["QSlice", "advance", "optimiser_of"]


def optimiser_of(config: Any, params: torch.Tensor, state: dict[str, torch.Tensor], clips: bool = True) -> Optimiser:
    """The optimiser that the configuration asks for; its moments are put into `state`."""
    return Optimiser(
        config.optimiser,
        params,
        state,
        epsilon=config.optimiser_epsilon,
        grad_norm=config.grad_norm if clips else 0.0,
        decay=config.rmsprop_decay,
        start=config.adagrad_start,
    )


def advance(
    config: Any, optimiser: Optimiser, updates: torch.Tensor, target: torch.Tensor, gradient: np.ndarray | torch.Tensor
) -> bool | torch.Tensor:
    """Step, and refresh the target where that is due. False, and nothing changed, where the gradient is not finite."""
    finite = optimiser.step(gradient)
    if isinstance(finite, torch.Tensor):
        _refresh_unseen(config, updates, target, optimiser.params, finite)
        return finite
    if not finite:
        return False
    updates += 1
    period = config.target_period_updates
    if config.target_tau > 0:
        polyak_(target, optimiser.params, config.target_tau)
    elif period and int(updates) % period == 0:
        polyak_(target, optimiser.params, 1.0)
    return True


@torch.no_grad()
def _refresh_unseen(
    config: Any, updates: torch.Tensor, target: torch.Tensor, params: torch.Tensor, finite: torch.Tensor
) -> None:
    """What follows a step, without reading a number back: a device need not be waited for, and counts by itself."""
    updates += finite
    if config.target_tau > 0:
        target.copy_(torch.where(finite, torch.lerp(target, params, config.target_tau), target))
    elif config.target_period_updates:
        due = finite & (updates % config.target_period_updates == 0)
        target.copy_(torch.where(due, params, target))


class QSlice:
    """A slice of the parameters with its target and its optimiser's moments: what a core.Learn is to a parameter server."""

    phases = ("all",)

    def __init__(self, config: Any, params: torch.Tensor, target: torch.Tensor, begin: int) -> None:
        """It is the slice of the whole vector that begins at `begin`."""
        self.config, self.params, self.target = config, params, target
        self.updates = torch.zeros(1, dtype=torch.float64)  # float32 would stop at 2^24
        self.state: dict[str, torch.Tensor] = {"target": target, "updates": self.updates, "begin": torch.tensor([begin])}
        self.optimiser = optimiser_of(config, params, self.state, clips=False)

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        return {"params": self.params, "target": self.target}

    def anneal(self, progress: Progress) -> None:
        self.optimiser.lr = annealed(progress, self.config.lr, self.config.lr_final)

    def apply(self, gradient: np.ndarray, phase: str) -> bool | torch.Tensor:
        return advance(self.config, self.optimiser, self.updates, self.target, gradient)

    def moments(self, batch: Tree) -> np.ndarray:
        return np.zeros(0)

    def absorb(self, moments: np.ndarray) -> None:
        """There are no running statistics."""

    def published(self, progress: Progress) -> Tree:
        numbers = np.array([progress.env_steps, progress.learner_steps, progress.fraction])
        return {"params": self.params.numpy(), "norm": {}, "progress": numbers}
