"""The learning side of dqn and r2d2: what surrounds their errors.

    batch (items, probabilities) ──> errors: per item a loss and a priority ──> x importance weight, mean ──> gradient
                                                            └──> learn.priorities, back to the table
    apply: clip, optimiser, target net

A batch is a tree of items [B, ...] with `probability` [B], with which each was drawn, and `table_size` [1] or [B], of the
table it came from. Several learners make the update of their joined batch. On a GPU gradient and step are a graph each, and
nothing of them is read: priorities and metrics stay there until somebody sends for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from shoal.algorithms.capture import Graphs
from shoal.algorithms.handoff import Outlet
from shoal.algorithms.hardware import Hardware
from shoal.algorithms.pinning import Pinned, to_device
from shoal.algorithms.q_model import QModel
from shoal.algorithms.q_plan import QPlan
from shoal.algorithms.q_slice import QSlice, advance, optimiser_of
from shoal.algorithms.readings import descend
from shoal.algorithms.training import annealed
from shoal.core import Progress, Tree
from shoal.ops import priorities
from shoal.slots import map_tree

__all__ = ["Errors", "Judged", "QLearn"]

ABSENT = ("probability", "table_size", "weights_version", "time")  # of no use to an error


class Judged(NamedTuple):
    """What an algorithm makes of a batch."""

    loss: torch.Tensor
    """Of each item [B]."""
    priority: torch.Tensor
    """Of each item [B]: the size of its error."""
    q: torch.Tensor
    """Values of the actions taken, in any shape; for the eye."""
    target: torch.Tensor
    valid: torch.Tensor | None = None
    """Where these two count; None everywhere."""
    more: Mapping[str, torch.Tensor] = {}
    """Further numbers for the eye."""


Errors = Callable[[QModel, QModel, Tree], Judged]
"""(online, target, items as tensors) -> Judged. With `captures` it reads no number, so that it can be captured as a graph."""


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
        self.priorities: Any = np.zeros(0)
        """Of the batch that the last gradient was made of, [B], raw; by the parameters before the step. On a GPU a tensor."""
        self._waits = True  # for a gradient's numbers, before it returns them
        self._tensor: Callable[[np.ndarray], torch.Tensor] = torch.from_numpy
        self._pinned: Pinned | None = None
        self._graphs: Graphs | None = None
        outlet = Outlet(self._weights_of)
        self.published, self.parcel, self.snapshot = outlet.published, outlet.parcel, outlet.snapshot

    def to(self, hardware: Hardware) -> None:
        """Learn there from now on, in tensors: gradients, priorities and metrics stay there until somebody asks for a number."""
        self._waits = False
        if hardware.on_gpu:
            self._pinned = Pinned(hardware.device) if hardware.gpu.pinned else None
            self._tensor = self.model.tensor if self._pinned is None else self._pinned.tensor
        for name, tensor in self.state.items():
            if name not in ("params", "target"):
                tensor.data = tensor.data.to(hardware.device)  # the same object: whoever holds it holds the moved one
        for name, model in (("params", self.model), ("target", self.target)):
            model.to(hardware)
            self.state[name] = model.params
        self.optimiser.params, self.optimiser.fused = self.model.params, hardware.gpu.fused

    def capture(self) -> None:
        """Learn by replaying graphs from now on, where errors can be captured (see capture.py)."""
        if getattr(self._errors, "captures", False):
            self._graphs = Graphs(self.optimiser, self._descend, self._advance)

    def release(self) -> None:
        """Wait until the memory of the last batch is not read any more: others may then write there."""
        if self._pinned is not None:
            self._pinned.wait()

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
        rate = annealed(progress, self.config.lr, self.config.lr_final)
        if self._graphs is None:
            self.optimiser.lr = rate
        else:
            self._graphs.anneal(rate)

    # -------------------------------------------------------------------------------- gradients
    def minibatches(
        self, batch: Tree, sums: np.ndarray, progress: Progress, rng: np.random.Generator
    ) -> Iterator[Update]:
        """One: the batch as it was drawn."""
        self.anneal(progress)
        beta = annealed(progress, self.config.importance, self.config.importance_final)
        weight = priorities.importance_weights(batch["probability"], batch["table_size"], beta)
        items = map_tree(self._tensor, {name: part for name, part in batch.items() if name not in ABSENT})
        yield Update(items, to_device(torch.from_numpy(weight).float(), self.model.params.device), float(sums[0] / sums[1]))

    def gradients(self, minibatch: Update, phase: str) -> tuple[Any, Mapping[str, float]]:
        """The flat gradient (a view, valid until the next call) and numbers for the eye; see also `priorities`."""
        if self._graphs is None:
            gradient, metrics, self.priorities = self._descend(minibatch)
        else:
            gradient, metrics, judged = self._graphs.descend(minibatch)
            metrics, self.priorities = metrics.copy(), judged.clone()  # the next one is computed in the same memory
        return gradient, metrics

    def _descend(self, minibatch: Update) -> tuple[Any, Any, Any]:
        judged = self._errors(self.model, self.target, minibatch.items)
        loss = (minibatch.weight * judged.loss).sum() * minibatch.scale
        q, valid = judged.q.detach(), judged.valid
        metrics = {
            "td_error": judged.priority.mean(),
            "q_mean": _mean(q, valid),
            "q_max": (q if valid is None else q.masked_fill(~valid, -torch.inf)).max(),
            "target_mean": _mean(judged.target, valid),
            "importance_min": minibatch.weight.min(),
            **judged.more,
        }
        gradient, numbers = descend(loss, metrics, self.model.grad, self.optimiser.lr, self._waits)
        priority = judged.priority.detach().double()
        return gradient, numbers, (priority.numpy() if self._waits else priority) + priorities.FLOOR

    def apply(self, gradient: np.ndarray | torch.Tensor, phase: str) -> bool | torch.Tensor:
        """Clip, step, and refresh the target where that is due. False, and nothing changed, where it is not finite."""
        return self._advance(gradient) if self._graphs is None else self._graphs.step(gradient)

    def _advance(self, gradient: np.ndarray | torch.Tensor) -> bool | torch.Tensor:
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

    def _weights_of(self, progress: Progress) -> Tree:
        numbers = np.array([progress.env_steps, progress.learner_steps, progress.fraction])
        return {"params": self.model.params, "norm": {}, "progress": numbers}


def _mean(x: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """Over what is valid, without asking how much that is."""
    return x.mean() if valid is None else torch.where(valid, x, 0).sum() / valid.sum()
