"""The learning side of a2c, ppo, appo and vtrace: what surrounds their objectives.

Several learners make the same update as one learner on the joined batch. For this each puts three kinds of things into
one vector of float64 that an all-reduce adds: how many learners there are (1 each), how many valid decisions they have,
and the statistics that the algorithm normalises by. A loss is then `sum over my decisions x learners / decisions of
all`, and the mean of the learners' gradients is exactly the gradient of the mean over all decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from shoal.acting import Progress
from shoal.algorithms.actor_critic.model import ActorCriticModel
from shoal.algorithms.actor_critic.unroll_batch import UnrollBatch
from shoal.algorithms.common.learn import Loss, PhasedLearn
from shoal.algorithms.common.phases import Phase
from shoal.algorithms.records.unroll import Unroll
from shoal.core import Tree, Vector

if TYPE_CHECKING:
    from shoal.algorithms.actor_critic.algorithm import ActorCriticConfig

__all__ = ["ActorCriticLearn", "ActorCriticObjective", "Totals"]

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


class ActorCriticObjective(Protocol):
    """Where a2c, ppo, appo and vtrace differ: what learners share, in which parts a batch is learned from, and the loss.

    With `captures` its minibatches have a `batch` and consist of tensors and numbers only, and its loss reads none of them:
    gradients can be captured as a CUDA graph.
    """

    captures: bool

    def sums(self, batch: Tree) -> Any: ...  # a vector, made by ActorCriticLearn.shared
    def minibatches(self, batch: Tree, sums: Any, progress: Progress, rng: np.random.Generator) -> Iterator[Any]: ...
    def loss(self, minibatch: Any) -> Loss: ...


class ActorCriticLearn(PhasedLearn[ActorCriticModel]):
    """A learning.Learn of one objective."""

    def __init__(self, config: ActorCriticConfig, model: ActorCriticModel, record: Unroll,
                 objective: Callable[[ActorCriticLearn], ActorCriticObjective]) -> None:
        phase = Phase("all", config.optimiser, lambda: config.lr, lambda: config.lr_final,
                      config.optimiser_epsilon, config.grad_norm)
        super().__init__(model, (phase,), normalise_returns=config.normalise_returns)
        self._seats, self._final_rows = record.seats, record.final_capacity
        self.objective = objective(self)
        self.captures = self.objective.captures

    def batch(self, tree: Tree) -> UnrollBatch:
        """The staging buffer as tensors, without a copy where it is; rewards scaled if returns are normalised.

        The device architecture has UnrollBatches from the beginning.
        """
        made = isinstance(tree, UnrollBatch)
        batch = replace(tree) if made else UnrollBatch.of(tree, self._seats, self._final_rows, self.tensor)
        if self.statistics.returns is not None:
            batch.reward = (batch.reward * self.statistics.returns.scale).clamp_(-REWARD_CLIP, REWARD_CLIP)
        return batch.joined(self.model.agents) if self.model.central else batch

    # -------------------------------------------------------------------------------- what learners share
    def shared(self, tree: Tree, extra: torch.Tensor | tuple[float, ...] = ()) -> Any:
        """One vector that learners add up; of an UnrollBatch on a device, which has no other learners, the totals themselves."""
        if isinstance(tree, UnrollBatch):
            return Totals(1.0, float(tree.reward.numel()), torch.as_tensor(extra))
        return np.concatenate([[1.0, np.count_nonzero(tree["valid"])], np.asarray(torch.as_tensor(extra).cpu(), np.float64)])

    def totals(self, sums: Any, extra: int = 0) -> Totals:
        if isinstance(sums, Totals):
            return sums
        return Totals(float(sums[0]), float(sums[1]), sums[2 : 2 + extra])

    def sums(self, batch: Tree, index: int = 0, learners: int = 1) -> Any:
        return self.objective.sums(batch)

    def moments(self, batch: Tree) -> Vector:
        return super().moments(batch.moments if isinstance(batch, UnrollBatch) else batch)

    # -------------------------------------------------------------------------------- gradients
    def split(self, batch: Tree, sums: Any, progress: Progress, rng: np.random.Generator) -> Iterator[Any]:
        return self.objective.minibatches(batch, sums, progress, rng)

    def loss(self, minibatch: Any, phase: str) -> Loss:
        return self.objective.loss(minibatch)

    def capturable(self, minibatch: Any) -> bool:
        return bool(minibatch.batch.regular)
