"""What is done to the learner's flat parameter vector: optimiser, clipping, schedules, refusal of bad gradients."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from shoal.core import Progress
from shoal.ops import optimise, schedules

__all__ = ["Optimiser", "OptimiserName", "ValueOptimiserName", "annealed"]

OptimiserName = Literal["adam", "rmsprop", "sgd"]
ValueOptimiserName = Literal["adam", "rmsprop", "rmsprop_centred", "adagrad", "sgd"]


class Optimiser:
    """One of some optimisers over one flat vector. Its moments are named tensors in the learner's state."""

    def __init__(
        self,
        kind: OptimiserName | ValueOptimiserName,
        params: torch.Tensor,
        state: dict[str, torch.Tensor],
        *,
        epsilon: float,
        grad_norm: float,
        decay: float = 0.99,
        start: float = 0.0,
    ) -> None:
        """`decay` is rmsprop's; `start` is what adagrad's sums of squares begin with."""
        self.decay = decay
        self.kind, self.params, self.epsilon, self.grad_norm = kind, params, epsilon, grad_norm
        self.lr: float | torch.Tensor = 0.0
        self.fused = True
        state["params"] = params
        if kind == "adam":
            self.m, self.v = torch.zeros_like(params), torch.zeros_like(params)
            self.count = torch.zeros(())
            state.update({"adam.m": self.m, "adam.v": self.v, "adam.count": self.count})
        elif kind in ("rmsprop", "rmsprop_centred"):
            self.square = torch.zeros_like(params)
            self.mean = torch.zeros_like(params) if kind == "rmsprop_centred" else None
            state["rmsprop.square"] = self.square
            if self.mean is not None:
                state["rmsprop.mean"] = self.mean
        elif kind == "adagrad":
            self.square = torch.full_like(params, start)
            state["adagrad.square"] = self.square

    def step(self, gradient: np.ndarray | torch.Tensor) -> bool | torch.Tensor:
        """Clip and apply. False, and nothing changed, where the gradient is not finite."""
        if isinstance(gradient, torch.Tensor):
            return self._step_unseen(gradient)
        if self.params.is_cuda:  # a mean over several learners
            return self._step_unseen(torch.from_numpy(gradient).to(self.params.device))
        grad, norm = self.clipped(torch.from_numpy(gradient))
        if not np.isfinite(norm):
            return False
        self._apply(grad)
        return True

    def clipped(self, grad: torch.Tensor) -> tuple[torch.Tensor, float]:
        """The gradient, scaled down where it is too long, and its size, which is not finite where the gradient is not."""
        if self.grad_norm <= 0:
            return grad, float(grad.abs().max())
        norm = float(torch.linalg.vector_norm(grad))
        return (grad * (self.grad_norm / norm) if norm > self.grad_norm else grad), norm

    def _apply(self, grad: torch.Tensor) -> None:
        if self.kind == "adam":
            optimise.adam_(self.params, grad, self.m, self.v, self.count, self.lr, eps=self.epsilon, fused=self.fused)
        elif self.kind in ("rmsprop", "rmsprop_centred"):
            optimise.rmsprop_(self.params, grad, self.square, self.lr, self.decay, self.epsilon, self.mean)
        elif self.kind == "adagrad":
            optimise.adagrad_(self.params, grad, self.square, self.lr, eps=self.epsilon)
        else:
            optimise.sgd_(self.params, grad, self.lr)

    @property
    def _tensors(self) -> list[torch.Tensor]:
        """All that a step changes."""
        names = {"adam": ("m", "v", "count"), "rmsprop": ("square",), "rmsprop_centred": ("square", "mean"), "adagrad": ("square",)}
        moments = names.get(self.kind, ())
        return [self.params, *(getattr(self, name) for name in moments)]

    @torch.no_grad()
    def _step_unseen(self, grad: torch.Tensor) -> torch.Tensor:
        """The same without reading a number back, so that a device need not be waited for; answers with a tensor."""
        norm = optimise.clip_by_global_norm_(grad, self.grad_norm) if self.grad_norm > 0 else grad.abs().max()
        finite = torch.isfinite(norm)
        before = [tensor.clone() for tensor in self._tensors]
        self._apply(grad)
        for tensor, old in zip(self._tensors, before, strict=True):
            tensor.copy_(torch.where(finite, tensor, old))
        return finite


def annealed(progress: Progress, start: float, end: float | None) -> float | torch.Tensor:
    """From `start` to `end` over the budget of env_steps. Without an end, or without a budget, it stays at `start`."""
    return start if end is None else schedules.linear(progress.fraction, start, end)
