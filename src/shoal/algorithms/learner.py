"""What the learners of a2c, ppo and vtrace hold: model, optimiser and normalisers, as named tensors in one dictionary.

Several learners make the same update as one learner on the joined batch. For this each puts three kinds of things into
one vector of float64 that an all-reduce adds: how many learners there are (1 each), how many valid decisions they have,
and whatever statistics the algorithm normalises by. A loss is then `sum over my decisions x learners / decisions of
all`, and the mean of the learners' gradients is exactly the gradient of the mean over all decisions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from shoal.algorithms.batch import Batch
from shoal.algorithms.blueprint import Blueprint
from shoal.algorithms.normaliser import Normaliser
from shoal.algorithms.training import Optimiser, annealed
from shoal.core import Progress, Tree

__all__ = ["Descent", "Learner", "Objective", "Totals"]

REWARD_CLIP = 10.0  # of scaled rewards, in standard deviations of the return


@dataclass(frozen=True)
class Totals:
    """What all learners' `sums` say together."""

    learners: float
    decisions: float
    extra: np.ndarray
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

    @classmethod
    def of(cls, config: Any, plan: Blueprint, seed: int) -> Learner:
        """With the optimiser that a Config names."""
        return cls(plan, seed, optimiser=config.optimiser, epsilon=config.optimiser_epsilon, grad_norm=config.grad_norm)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The state without the optimiser's moments: all that gradients and policies depend on."""
        return {name: self.state[name] for name in self._weights}

    def batch(self, tree: Tree) -> Batch:
        """The staging buffer as tensors, without a copy; rewards scaled if returns are normalised."""
        batch = Batch.of(tree, self._seats, self._final_rows)
        if self.returns is not None:
            batch.reward = (batch.reward * self.returns.scale).clamp_(-REWARD_CLIP, REWARD_CLIP)
        return batch

    # -------------------------------------------------------------------------------- statistics that learners share
    def sums(self, tree: Tree, extra: np.ndarray | tuple[float, ...] = ()) -> np.ndarray:
        return np.concatenate([[1.0, np.count_nonzero(tree["valid"])], np.asarray(extra, np.float64)])

    def totals(self, sums: np.ndarray, extra: int = 0) -> Totals:
        return Totals(float(sums[0]), float(sums[1]), sums[2 : 2 + extra])

    def moments(self, tree: Tree) -> np.ndarray:
        """Sums of the batch's observations and returns, around the running means: what all learners add up and absorb."""
        parts = [np.zeros(0)]
        if self.observations is not None:
            parts.append(self.observations.sums(tree["observation_moments"]))
        if self.returns is not None:
            parts.append(self.returns.sums(tree["return_moments"]))
        return np.concatenate(parts)

    def absorb(self, moments: np.ndarray) -> None:
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
    def descend(self, loss: torch.Tensor, metrics: dict[str, torch.Tensor]) -> tuple[np.ndarray, dict[str, float]]:
        """The flat gradient (a view, valid until the next call) and the metrics as numbers, read in one go."""
        grad = self.model.grad
        grad.zero_()
        loss.backward()
        metrics = {"loss": loss, **metrics, "grad_norm": torch.linalg.vector_norm(grad)}
        values = torch.stack([value.detach() for value in metrics.values()]).tolist()
        numbers = dict(zip(metrics, values, strict=True))
        numbers["learning_rate"] = self.optimiser.lr
        finite = math.isfinite(numbers["loss"]) and math.isfinite(numbers["grad_norm"])
        numbers["skipped"] = 0.0 if finite else 1.0
        if not finite:
            grad.fill_(math.nan)  # so that every learner of a group leaves this update out
        return grad.numpy(), numbers

    def published(self, progress: Progress) -> Tree:
        norm = {}
        if self.observations is not None:
            norm = {"mean": self.observations.mean.numpy(), "scale": self.observations.scale.numpy()}
        numbers = np.array([progress.env_steps, progress.learner_steps, progress.fraction])
        return {"params": self.model.params.detach().numpy(), "norm": norm, "progress": numbers}


class Objective(Protocol):
    """Where a2c, ppo, appo and vtrace differ: what is shared, in which parts a batch is learned from, and the loss."""

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

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        return self.learner.weights

    def anneal(self, progress: Progress) -> None:
        self.learner.optimiser.lr = annealed(progress, self.config.lr, self.config.lr_final)

    def minibatches(self, batch: Tree, sums: np.ndarray, progress: Progress, rng: np.random.Generator) -> Iterator[Any]:
        self.anneal(progress)
        return self.objective.minibatches(batch, sums, progress, rng)

    def apply(self, gradient: np.ndarray, phase: str) -> bool:
        return self.learner.optimiser.step(gradient)
