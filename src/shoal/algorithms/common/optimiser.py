"""Optimisers over flat vectors: clipping, schedules, refusal of gradients that are not finite."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch

from shoal.acting import Progress
from shoal.ops import optimise, schedules

__all__ = ["Optimiser", "OptimiserName", "ValueOptimiserName", "annealed"]

OptimiserName = Literal["adam", "rmsprop", "sgd"]
ValueOptimiserName = Literal["adam", "rmsprop", "rmsprop_centred", "adagrad", "sgd"]


class Optimiser:
    """One of several optimisers over one flat vector. Its moments are named tensors, `moments`."""

    def __init__(self, kind: OptimiserName | ValueOptimiserName, params: torch.Tensor, *, epsilon: float, grad_norm: float,
                 decay: float = 0.99, start: float = 0.0, grad_limit: float = 0.0) -> None:
        """`decay` is rmsprop's; `start` is what adagrad's sums of squares begin with. Gradients are clipped to `grad_norm` as a
        whole and to `grad_limit` element by element; 0 does not."""
        self.grad_limit = grad_limit
        self.kind, self.params, self.epsilon, self.grad_norm, self.decay = kind, params, epsilon, grad_norm, decay
        self.lr: float | torch.Tensor = 0.0
        self.fused = True
        self.moments: dict[str, torch.Tensor] = {}
        if kind == "adam":
            self.moments = {"adam.m": torch.zeros_like(params), "adam.v": torch.zeros_like(params), "adam.count": torch.zeros(())}
        elif kind == "rmsprop":
            self.moments = {"rmsprop.square": torch.zeros_like(params)}
        elif kind == "rmsprop_centred":
            self.moments = {"rmsprop.square": torch.zeros_like(params), "rmsprop.mean": torch.zeros_like(params)}
        elif kind == "adagrad":
            self.moments = {"adagrad.square": torch.full_like(params, start)}

    def step(self, gradient: np.ndarray | torch.Tensor) -> bool | torch.Tensor:
        """Clip and apply. False, and nothing changed, where the gradient is not finite."""
        if isinstance(gradient, torch.Tensor):
            return self._step_unseen(gradient)
        if self.params.is_cuda:  # a mean over several learners
            return self._step_unseen(torch.from_numpy(gradient).to(self.params.device))
        grad, norm = self.clipped(torch.from_numpy(gradient))
        if not math.isfinite(norm):
            return False
        self._apply(grad)
        return True

    def clipped(self, grad: torch.Tensor) -> tuple[torch.Tensor, float]:
        """The gradient, made smaller where it is too large, and its size, which is not finite where the gradient is not."""
        norm = float(torch.linalg.vector_norm(grad))
        if self.grad_norm > 0 and norm > self.grad_norm:
            grad = grad * (self.grad_norm / norm)
        return (grad.clamp(-self.grad_limit, self.grad_limit) if self.grad_limit > 0 else grad), norm

    def _apply(self, grad: torch.Tensor, finite: torch.Tensor | None = None) -> None:
        """`finite` is for a fused Adam: see optimise.adam_."""
        moments = self.moments
        if self.kind == "adam":
            optimise.adam_(self.params, grad, moments["adam.m"], moments["adam.v"], moments["adam.count"], self.lr,
                           eps=self.epsilon, fused=self.fused, finite=finite)
        elif self.kind in ("rmsprop", "rmsprop_centred"):
            optimise.rmsprop_(self.params, grad, moments["rmsprop.square"], self.lr, self.decay, self.epsilon,
                              moments.get("rmsprop.mean"))
        elif self.kind == "adagrad":
            optimise.adagrad_(self.params, grad, moments["adagrad.square"], self.lr, eps=self.epsilon)
        else:
            optimise.sgd_(self.params, grad, self.lr)

    @torch.no_grad()
    def _step_unseen(self, grad: torch.Tensor) -> torch.Tensor:
        """The same without reading a number back, so that nothing waits for a device; answers with a tensor."""
        norm = optimise.clip_by_global_norm_(grad, self.grad_norm) if self.grad_norm > 0 else grad.abs().max()
        finite = torch.isfinite(norm)
        if self.grad_limit > 0:
            grad.clamp_(-self.grad_limit, self.grad_limit)
        if self.kind == "adam" and self.fused and optimise.fuses_adam(self.params):
            self._apply(grad, finite)
            return finite
        changed = (self.params, *self.moments.values())
        before = [tensor.clone() for tensor in changed]
        self._apply(grad)
        for tensor, old in zip(changed, before, strict=True):
            tensor.copy_(torch.where(finite, tensor, old))
        return finite


def annealed(progress: Progress, start: float, end: float | None) -> float:
    """From `start` to `end` over the budget of env_steps. Without an end, or without a budget, it stays at `start`.

    Where the progress lies on a device (the device architecture), so does the result.
    """
    return start if end is None else schedules.linear(progress.fraction, start, end)
