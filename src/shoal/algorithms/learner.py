"""What the learners of a2c, ppo and vtrace hold: model, optimiser and normalisers, as named tensors in one dictionary.

Several learners make the same update as one learner on the joined batch. For this each puts three kinds of things into
one vector of float64 that an all-reduce adds: how many learners there are (1 each), how many valid decisions they have,
and whatever statistics the algorithm normalises by. A loss is then `sum over my decisions x learners / decisions of
all`, and the mean of the learners' gradients is exactly the gradient of the mean over all decisions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from shoal.algorithms.batch import Batch
from shoal.algorithms.blueprint import Blueprint
from shoal.algorithms.capture import Graphs
from shoal.algorithms.handoff import Outlet
from shoal.algorithms.hardware import Hardware
from shoal.algorithms.normaliser import Normaliser
from shoal.algorithms.pinning import Pinned
from shoal.algorithms.readings import descend
from shoal.algorithms.training import Optimiser, annealed
from shoal.core import Progress, Tree

__all__ = ["Descent", "Learner", "Objective", "Totals"]

REWARD_CLIP = 10.0  # of scaled rewards, in standard deviations of the return


@dataclass(frozen=True)
class Totals:
    """What all learners' `sums` say together."""

    learners: float
    decisions: float
    extra: np.ndarray | torch.Tensor
    """The algorithm's own sums."""

    def weight(self, parts: int = 1, reduction: str = "mean") -> float:
        """What a learner multiplies its sum over one of `parts` minibatches with."""
        return self.learners if reduction == "sum" else self.learners * parts / max(self.decisions, 1.0)


class Learner:
    """Model, optimiser, normalisers. `state` is everything that a checkpoint must hold, changed in place only."""

    def __init__(self, plan: Blueprint, seed: int, *, optimiser: str, epsilon: float, grad_norm: float) -> None:
        self.state: dict[str, torch.Tensor] = {}
        self.observations = Normaliser(self.state, "observations", plan.norm_size) if plan.norm_size else None
        self.returns = Normaliser(self.state, "returns", 1) if plan.normalise_returns else None
        statistics = None if self.observations is None else (self.observations.mean, self.observations.scale)
        self.model = plan.model(seed, statistics)
        self._weights = ("params", *self.state)  # before the optimiser adds its moments
        self.optimiser = Optimiser(optimiser, self.model.params, self.state, epsilon=epsilon, grad_norm=grad_norm)
        self._seats, self._final_rows = plan.seats, plan.record.final_capacity
        self._waits = True  # for a gradient's numbers, before it returns them
        self._tensor: Any = torch.from_numpy
        outlet = Outlet(self._weights_of)
        self.published, self.parcel, self.snapshot = outlet.published, outlet.parcel, outlet.snapshot

    def to(self, hardware: Hardware) -> None:
        """Learn there from now on, in tensors: gradients and metrics stay there until somebody asks for a number."""
        self._waits = False
        self.model.to(hardware)
        if hardware.on_gpu:
            self._tensor = Pinned(hardware.device).tensor if hardware.gpu.pinned else self.model.tensor
        stay = [moment for normaliser in (self.observations, self.returns) if normaliser is not None for moment in normaliser.seen]
        for name, tensor in self.state.items():
            if name != "params" and not any(tensor is moment for moment in stay):
                tensor.data = tensor.data.to(hardware.device)  # the same object: whoever holds it holds the moved one
        self.state["params"] = self.optimiser.params = self.model.params
        self.optimiser.fused = hardware.gpu.fused
        if self.observations is not None:
            self.model.watch(self.observations.mean, self.observations.scale)

    @classmethod
    def of(cls, config: Any, plan: Blueprint, seed: int) -> Learner:
        """With the optimiser that a Config names."""
        return cls(plan, seed, optimiser=config.optimiser, epsilon=config.optimiser_epsilon, grad_norm=config.grad_norm)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The state without the optimiser's moments: all that gradients and policies depend on."""
        return {name: self.state[name] for name in self._weights}

    def batch(self, tree: Tree) -> Batch:
        """The staging buffer as tensors, without a copy where it is; rewards scaled if returns are normalised.

        What is a Batch already (of the device architecture) was never an array.
        """
        batch = replace(tree) if isinstance(tree, Batch) else Batch.of(tree, self._seats, self._final_rows, self._tensor)
        if self.returns is not None:
            batch.reward = (batch.reward * self.returns.scale).clamp_(-REWARD_CLIP, REWARD_CLIP)
        return batch

    # -------------------------------------------------------------------------------- statistics that learners share
    def sums(self, tree: Tree, extra: torch.Tensor | tuple[float, ...] = ()) -> Any:
        """One vector that learners add up; of a Batch on a device, which has no others, the totals themselves."""
        if isinstance(tree, Batch):
            return Totals(1.0, float(tree.reward.numel()), torch.as_tensor(extra))
        return np.concatenate([[1.0, np.count_nonzero(tree["valid"])], np.asarray(torch.as_tensor(extra).cpu(), np.float64)])

    def totals(self, sums: Any, extra: int = 0) -> Totals:
        if isinstance(sums, Totals):
            return sums
        return Totals(float(sums[0]), float(sums[1]), sums[2 : 2 + extra])

    def moments(self, tree: Tree) -> Any:
        """Sums of the batch's observations and returns, around the running means: what all learners add up and absorb."""
        source = tree.moments if isinstance(tree, Batch) else tree
        parts = []
        if self.observations is not None:
            parts.append(self.observations.sums(source["observation_moments"]))
        if self.returns is not None:
            parts.append(self.returns.sums(source["return_moments"]))
        if isinstance(tree, Batch) and parts:
            return torch.cat(parts)
        return np.concatenate([np.zeros(0), *parts])

    def absorb(self, moments: np.ndarray | torch.Tensor) -> None:
        """Merge everybody's moments and use them from now on. Called after the last minibatch, before publication."""
        start = 0
        for normaliser in (self.observations, self.returns):
            if normaliser is not None:
                normaliser.merge(moments[start : start + normaliser.width])
                normaliser.freeze()
                start += normaliser.width

    def bind(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Keep the whole state in these arrays from now on (shared memory, another learner's): its values are theirs."""
        for name, tensor in self.state.items():
            if name == "params":
                self.model.move(torch.from_numpy(arrays[name]))
                self.state[name] = self.optimiser.params = self.model.params
            else:
                tensor.set_(torch.from_numpy(arrays[name]))
        if self.observations is not None:
            self.model.watch(self.observations.mean, self.observations.scale)

    # -------------------------------------------------------------------------------- gradients
    def descend(self, loss: torch.Tensor, metrics: dict[str, torch.Tensor]) -> tuple[Any, Mapping[str, float]]:
        """The flat gradient (a view, valid until the next call) and the metrics as numbers, read in one go."""
        return descend(loss, metrics, self.model.grad, self.optimiser.lr, self._waits)

    def _weights_of(self, progress: Progress) -> Tree:
        norm = {}
        if self.observations is not None:
            norm = {"mean": self.observations.mean, "scale": self.observations.scale}
        numbers = np.array([progress.env_steps, progress.learner_steps, progress.fraction])
        return {"params": self.model.params, "norm": norm, "progress": numbers}


class Objective(Protocol):
    """Where a2c, ppo, appo and vtrace differ: what is shared, in which parts a batch is learned from, and the loss.

    With `captures` its minibatches have a `batch` and consist of tensors and numbers only: gradients can be captured as a graph.
    """

    def sums(self, batch: Tree) -> np.ndarray: ...
    def minibatches(self, batch: Tree, sums: np.ndarray, progress: Progress, rng: np.random.Generator) -> Iterator[Any]: ...
    def gradients(self, minibatch: Any, phase: str) -> tuple[np.ndarray, dict[str, float]]: ...


class Descent:
    """A core.Learn: an objective, and the learner that holds what it changes. `config` has lr and lr_final."""

    phases = ("all",)

    def __init__(self, config: Any, learner: Learner, objective: Objective) -> None:
        self.config, self.learner, self.objective = config, learner, objective
        self.state, self.sums, self.gradients = learner.state, objective.sums, objective.gradients
        self.moments, self.absorb, self.bind, self.published = learner.moments, learner.absorb, learner.bind, learner.published
        self.to, self.snapshot, self.parcel = learner.to, learner.snapshot, learner.parcel
        self._graphs: Graphs | None = None

    def capture(self) -> None:
        """Learn by replaying graphs from now on, where the objective can be captured (see capture.py)."""
        if not getattr(self.objective, "captures", False):
            return
        optimiser = self.learner.optimiser
        self._graphs = Graphs(optimiser, self.objective.gradients, optimiser.step)
        self.gradients = self._replayed

    def _replayed(self, minibatch: Any, phase: str) -> tuple[Any, Any]:
        assert self._graphs is not None
        if not minibatch.batch.regular:
            return self._graphs.descend.eagerly(minibatch, phase)  # type: ignore[no-any-return]
        gradient, readings = self._graphs.descend(minibatch, phase)
        return gradient, readings.copy()

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        return self.learner.weights

    def anneal(self, progress: Progress) -> None:
        rate = annealed(progress, self.config.lr, self.config.lr_final)
        if self._graphs is None:
            self.learner.optimiser.lr = rate
        else:
            self._graphs.anneal(rate)

    def minibatches(self, batch: Tree, sums: np.ndarray, progress: Progress, rng: np.random.Generator) -> Iterator[Any]:
        self.anneal(progress)
        return self.objective.minibatches(batch, sums, progress, rng)

    def apply(self, gradient: np.ndarray | torch.Tensor, phase: str) -> bool | torch.Tensor:
        return self.learner.optimiser.step(gradient) if self._graphs is None else self._graphs.step(gradient)
