"""The learning side of dqn and r2d2: what surrounds their errors.

    batch (items, probabilities) ──> errors: per item a loss and a priority ──> x importance weight, mean ──> gradient
                                                            └──> learn.priorities, back to the table
    apply: clip, optimiser, target net

A batch is a tree of items [B, ...] with `probability` [B], with which each was drawn, and `table_size` [1] or [B], of the
table it came from. Several learners make the update of their joined batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from shoal.algorithms.q_model import QModel
from shoal.algorithms.q_plan import QPlan
from shoal.algorithms.q_slice import QSlice, advance, optimiser_of
from shoal.algorithms.training import annealed
from shoal.core import Progress, Tree
from shoal.ops import priorities
from shoal.slots import map_tree

__all__ = ["Errors", "Judged", "QLearn"]


class Judged(NamedTuple):
    """What an algorithm makes of a batch."""

    loss: torch.Tensor
    """Of each item [B]."""
    priority: torch.Tensor
    """Of each item [B]: the size of its error."""
    q: torch.Tensor
    """Values of the actions taken, in any shape; for the eye."""
    target: torch.Tensor
    more: Mapping[str, torch.Tensor] = {}
    """Further numbers for the eye."""


Errors = Callable[[QModel, QModel, Tree], Judged]
"""(online, target, items as tensors) -> Judged."""


@dataclass
class Update:
    """A batch and what is true while it is learned from."""

    items: Tree
    weight: torch.Tensor
    scale: float
    """What the sum of this learner's losses is multiplied with, so that the learners' mean is that of the joined batch."""


class QLearn:
    """A core.Learn. `state` is everything that a checkpoint must hold, changed in place only."""

    phases = ("all",)

    def __init__(self, config: Any, plan: QPlan, seed: int, errors: Errors) -> None:
        self.config, self._errors = config, errors
        self.model, self.target = plan.model(seed), plan.model(seed)
        self.updates = torch.zeros(1, dtype=torch.float64)  # float32 would stop at 2^24
        self.state: dict[str, torch.Tensor] = {"target": self.target.params, "updates": self.updates}
        self.optimiser = optimiser_of(config, self.model.params, self.state)
        self.priorities = np.zeros(0)
        """Of the batch that the last gradient was made of, [B], raw; by the parameters before the step."""

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """What gradients depend on."""
        return {name: self.state[name] for name in ("params", "target")}

    # -------------------------------------------------------------------------------- what learners share
    def sums(self, batch: Tree) -> np.ndarray:
        """How many learners there are, and items."""
        return np.array([1.0, len(batch["probability"])])

    def moments(self, batch: Tree) -> np.ndarray:
        return np.zeros(0)

    def absorb(self, moments: np.ndarray) -> None:
        """There are no running statistics."""

    def anneal(self, progress: Progress) -> None:
        self.optimiser.lr = annealed(progress, self.config.lr, self.config.lr_final)

    # -------------------------------------------------------------------------------- gradients
    def minibatches(
        self, batch: Tree, sums: np.ndarray, progress: Progress, rng: np.random.Generator
    ) -> Iterator[Update]:
        """One: the batch as it was drawn."""
        self.anneal(progress)
        beta = annealed(progress, self.config.importance, self.config.importance_final)
        weight = priorities.importance_weights(batch["probability"], batch["table_size"], beta)
        items = {name: part for name, part in batch.items() if name not in ("probability", "table_size")}
        yield Update(map_tree(torch.from_numpy, items), torch.from_numpy(weight).float(), float(sums[0] / sums[1]))

    def gradients(self, minibatch: Update, phase: str) -> tuple[np.ndarray, dict[str, float]]:
        """The flat gradient (a view, valid until the next call) and numbers for the eye; see also `priorities`."""
        judged = self._errors(self.model, self.target, minibatch.items)
        loss = (minibatch.weight * judged.loss).sum() * minibatch.scale
        grad = self.model.grad
        grad.zero_()
        loss.backward()
        metrics = {
            "loss": loss,
            "td_error": judged.priority.mean(),
            "q_mean": judged.q.mean(),
            "q_max": judged.q.max(),
            "target_mean": judged.target.mean(),
            "importance_min": minibatch.weight.min(),
            "grad_norm": torch.linalg.vector_norm(grad),
            **judged.more,
        }
        values = torch.stack([value.detach() for value in metrics.values()]).tolist()
        numbers = dict(zip(metrics, values, strict=True))
        finite = math.isfinite(numbers["loss"]) and math.isfinite(numbers["grad_norm"])
        numbers.update(learning_rate=self.optimiser.lr, skipped=0.0 if finite else 1.0)
        if not finite:
            grad.fill_(math.nan)  # so that every learner of a group leaves this update out
        self.priorities = judged.priority.detach().double().numpy() + priorities.FLOOR
        return grad.numpy(), numbers

    def apply(self, gradient: np.ndarray, phase: str) -> bool:
        """Clip, step, and refresh the target where that is due. False, and nothing changed, where it is not finite."""
        return advance(self.config, self.optimiser, self.updates, self.target.params, gradient)

    # -------------------------------------------------------------------------------- a parameter server in pieces
    def cut(self, where: slice) -> QSlice:
        """What a server needs that has only this slice of the parameters; gradients that are sent to it are `clipped` before."""
        params, target = (model.params[where].detach().clone() for model in (self.model, self.target))
        return QSlice(self.config, params, target, where.start)

    def clipped(self, gradient: np.ndarray) -> np.ndarray:
        """As `apply` clips it."""
        return self.optimiser.clipped(torch.from_numpy(gradient))[0].numpy()

    # -------------------------------------------------------------------------------- the outside
    def bind(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Keep the whole state in these arrays from now on (shared memory, another learner's): its values are theirs."""
        for name, tensor in self.state.items():
            array = torch.from_numpy(arrays[name])
            if name == "params":
                self.model.move(array)
                self.state[name] = self.optimiser.params = self.model.params
            elif name == "target":
                self.target.move(array)
                self.state[name] = self.target.params
            else:
                tensor.set_(array)

    def published(self, progress: Progress) -> Tree:
        numbers = np.array([progress.env_steps, progress.learner_steps, progress.fraction])
        return {"params": self.model.params.detach().numpy(), "norm": {}, "progress": numbers}
