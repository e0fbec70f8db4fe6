"""The learning side of evolution strategies: everybody's returns in, the same update at every worker out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from shoal.acting import Progress
from shoal.algorithms.common.normaliser import LearnerNormalisers
from shoal.algorithms.common.phases import Phase, PhasedParameters
from shoal.algorithms.evolution.model import EvolutionModel
from shoal.algorithms.evolution.noise import NoiseTable, draw_indices
from shoal.core import Tree, Vector
from shoal.ops.evolution import noise_weights

if TYPE_CHECKING:
    from shoal.algorithms.es import Config

__all__ = ["EvolutionLearn"]

PHASE = "all"


class Generation(NamedTuple):
    """What the members of an iteration did; with mirrored sampling each is followed by its opposite."""

    iteration: int
    draws: np.ndarray
    """Which perturbations of the iteration they played."""
    scores: np.ndarray
    decisions: np.ndarray
    """Of a member's episodes together."""


class EvolutionLearn:
    """A learning.PopulationLearn. `state` is changed in place only."""

    phases: tuple[str, ...] = (PHASE,)

    def __init__(self, config: Config, model: EvolutionModel, table: NoiseTable, seed: int, longest: int,
                 reference: Mapping[str, np.ndarray]) -> None:
        """Episodes are cut off at `longest` decisions at first. `reference` is room for the reference batch, where there is one."""
        self.config, self.model, self.table, self.seed = config, model, table, seed
        phase = Phase(PHASE, config.optimiser, lambda: config.lr, lambda: config.lr_final, config.optimiser_epsilon)
        self.parameters = PhasedParameters((phase,), {PHASE: slice(0, model.params.numel())}, model.params)
        self.statistics = LearnerNormalisers(model.norm_size)
        self._limit = torch.tensor([float(longest)], dtype=torch.float64)
        self.state: dict[str, torch.Tensor] = {**self.parameters.state, **self.statistics.state, "longest_episode": self._limit}
        self._velocity = torch.zeros_like(model.params) if config.momentum else None
        if self._velocity is not None:
            self.state["velocity"] = self._velocity
        self._reference = {name: torch.from_numpy(batch) for name, batch in reference.items()}
        self.state |= self._reference
        self._watch()

    @property
    def longest_episode(self) -> int:
        return int(self._limit)

    @property
    def reference_wanted(self) -> int:
        return sum(len(batch) for batch in self._reference.values() if not batch.any())

    def refer_to(self, observations: np.ndarray) -> None:
        self._reference["reference"].copy_(torch.from_numpy(observations))

    @property
    def fingerprint(self) -> int:
        return self.table.fingerprint

    # -------------------------------------------------------------------------------- updates
    def sums(self, batch: Tree, index: int = 0, learners: int = 1) -> np.ndarray:
        return np.concatenate([batch["score"], batch["decisions"]])

    def minibatches(self, batch: Tree, sums: np.ndarray, progress: Progress, rng: np.random.Generator) -> Iterator[Generation]:
        """The batch has the numbers of the members where they are not simply the first ones (a master's)."""
        self.anneal(progress)
        scores, decisions = np.split(sums, 2)
        self._lengthen(decisions)
        numbers = batch.get("number", np.arange(len(scores)))
        draws = numbers[::2] // 2 if self.config.mirrored else numbers
        yield Generation(progress.learner_steps, draws, scores, decisions)

    def _lengthen(self, decisions: np.ndarray) -> None:
        """Let episodes of the next iteration be longer if enough of this one's were cut off."""
        config = self.config
        cut_off = np.mean(decisions >= self.longest_episode * config.episodes)
        if config.episode_limit is not None and cut_off >= config.limit_share:
            self._limit.copy_((self._limit * config.limit_growth).floor())

    def gradients(self, minibatch: Generation, phase: str) -> tuple[Vector, Mapping[str, float]]:
        """The direction of descent: the estimate with its sign turned, and weight decay, which pulls towards 0."""
        config, scores = self.config, minibatch.scores
        weights = noise_weights(scores, config.mirrored, config.sigma, config.shaping)
        ascent = self.table.weighted_sum(weights, draw_indices(self.seed, minibatch.iteration, minibatch.draws, self.table))
        gradient = self.model.params.mul(config.weight_decay).sub_(ascent)
        metrics = {"population_mean": float(scores.mean()), "population_best": float(scores.max()),
                   "population_std": float(scores.std()), "grad_norm": float(gradient.norm()),
                   "param_norm": float(self.model.params.norm()), "longest_episode": float(self.longest_episode),
                   "learning_rate": float(self.parameters.optimiser(phase).lr)}
        return gradient.numpy(), metrics

    def apply(self, gradient: Vector, phase: str) -> bool | torch.Tensor:
        """Step; with momentum along v = m v + (1 - m) g. False, and nothing changed, where the gradient is not finite."""
        if self._velocity is None or not np.isfinite(gradient).all():
            return self.parameters.apply(gradient, phase)
        self._velocity.mul_(self.config.momentum).add_(torch.from_numpy(gradient), alpha=1 - self.config.momentum)
        return self.parameters.apply(self._velocity.numpy(), phase)

    def anneal(self, progress: Progress) -> None:
        self.parameters.anneal(progress)

    def span(self, phase: str) -> slice:
        return self.parameters.span(phase)

    def moments(self, batch: Tree) -> np.ndarray:
        return np.asarray(self.statistics.moments(batch))

    def absorb(self, moments: np.ndarray) -> None:
        self.statistics.absorb(moments)

    # -------------------------------------------------------------------------------- the outside
    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        return {name: self.state[name] for name in ("params", *self.statistics.state, *self._reference)}

    def layers(self, params: np.ndarray) -> Mapping[str, np.ndarray]:
        return self.model.layers(params)

    def published(self, progress: Progress) -> Tree:
        norm = {name: tensor.numpy() for name, tensor in self.statistics.published.items()}
        reference = {name: batch.numpy() for name, batch in self._reference.items()}
        return {"params": self.model.params.numpy(), "norm": norm, "progress": progress.numbers, **reference}

    def bind(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Keep the whole state in these arrays from now on."""
        for name, tensor in self.state.items():
            if name != "params":
                tensor.data = torch.from_numpy(arrays[name])  # still the same object for all who hold it
        self.model.move(torch.from_numpy(arrays["params"]))
        self.parameters.move(self.model.params, None)
        self.state["params"] = self.model.params
        self._watch()

    def _watch(self) -> None:
        if self.statistics.observations is not None:
            self.model.watch(self.statistics.observations.mean, self.statistics.observations.scale)
