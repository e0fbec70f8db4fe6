"""What is done to the learner's flat parameter vector: optimiser, clipping, schedules, refusal of bad gradients."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from shoal.core import Progress
from shoal.ops import optimise, schedules

__all__ = ["Optimiser", "OptimiserName", "annealed"]

OptimiserName = Literal["adam", "rmsprop", "sgd"]


class Optimiser:
    """One of three optimisers over one flat vector. Its moments are named tensors in the learner's state."""

    def __init__(
        self,
        kind: OptimiserName,
        params: torch.Tensor,
        state: dict[str, torch.Tensor],
        *,
        epsilon: float,
        grad_norm: float,
    ) -> None:
        self.kind, self.params, self.epsilon, self.grad_norm = kind, params, epsilon, grad_norm
        self.lr = 0.0
        state["params"] = params
        if kind == "adam":
            self.m, self.v = torch.zeros_like(params), torch.zeros_like(params)
            self.count = torch.zeros(())
            state.update({"adam.m": self.m, "adam.v": self.v, "adam.count": self.count})
        elif kind == "rmsprop":
            self.square = torch.zeros_like(params)
            state["rmsprop.square"] = self.square

    def step(self, gradient: np.ndarray) -> bool:
        """Clip and apply. False, and nothing changed, where the gradient is not finite."""
        grad = torch.from_numpy(gradient)
        if self.grad_norm > 0:
            norm = float(torch.linalg.vector_norm(grad))
            if norm > self.grad_norm:
                grad = grad * (self.grad_norm / norm)
        else:
            norm = float(grad.abs().max())
        if not np.isfinite(norm):
            return False
        if self.kind == "adam":
            optimise.adam_(self.params, grad, self.m, self.v, self.count, self.lr, eps=self.epsilon)
        elif self.kind == "rmsprop":
            optimise.rmsprop_(self.params, grad, self.square, self.lr, eps=self.epsilon)
        else:
            optimise.sgd_(self.params, grad, self.lr)
        return True


def annealed(progress: Progress, start: float, end: float | None) -> float:
    """From `start` to `end` over the budget of env_steps. Without an end, or without a budget, it stays at `start`."""
    return start if end is None else schedules.linear(progress.fraction, start, end)
