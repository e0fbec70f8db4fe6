"""The learning side of actor-critics that learn from items: what surrounds their objectives.

    batch ──> items, importance weights, noise
      critic         (R + D bootstrap - Q_i(x, a))^2 of every critic, weighted ──> gradient, new priorities
      actor          what the objective says of the actor's own actions        ──> gradient (not weighted)
      temperature    alpha (H - target), where alpha is learned (sac)           ──> gradient
      any other      what the objective says (V of iql)                         ──> gradient

Random numbers of an update come with its minibatch, so that they do not depend on where it is computed. Several learners make the
update of their joined batch, phase by phase.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from shoal.acting import Progress
from shoal.algorithms.common.contrast import Contrast
from shoal.algorithms.common.item_batch import ItemMinibatch, item_minibatch
from shoal.algorithms.common.item_learn import ItemLearn
from shoal.algorithms.common.learn import Loss
from shoal.algorithms.common.model import Model
from shoal.algorithms.common.optimiser import annealed
from shoal.algorithms.common.phases import Phase, TargetSchedule
from shoal.algorithms.off_policy.off_policy_options import OffPolicyOptions
from shoal.core import Tree
from shoal.device.placement import Hardware
from shoal.ops.off_policy import temperature_loss

__all__ = [
    "ActorObjective",
    "Cloning",
    "MorePhases",
    "NoisyMinibatch",
    "OffPolicyLearn",
    "OffPolicyObjective",
    "Penalised",
    "Penalty",
    "actor_phase",
    "critic_phase",
]


@dataclass
class NoisyMinibatch(ItemMinibatch):
    """A batch and the random numbers of its update."""

    noise: Tensor | None
    """Standard normal [B, objective.noises]; None where it needs none."""


class ActorObjective(NamedTuple):
    """What an actor descends, or a phase that only one algorithm has."""

    loss: Tensor
    """Of each item [B]."""
    metrics: Mapping[str, Tensor] = {}
    entropy: Tensor | None = None
    """Of the policy for each item [B]: what the temperature is learned from."""
    weighted: bool = False
    """Whether importance weights count, as for critics; not for an actor."""


class OffPolicyObjective(Protocol):
    """Where the algorithms differ. Observations come as the nets see them; nothing reads a number of a tensor."""

    noises: int

    def taken(self, seen: Tree, items: Tree) -> Tensor: ...  # Q [count, B] of the recorded actions
    def bootstrap(self, following: Tree, lagging: Tree, items: Tree, noise: Tensor | None) -> Tensor: ...
    # [B] of next observations, no gradient: `following` is how the nets see them, `lagging` how the target nets do
    def actor(self, seen: Tree, items: Tree, noise: Tensor | None) -> ActorObjective: ...


class Cloning(Protocol):
    """What is left of an objective without critics (bc, marwil)."""

    noises: int

    def actor(self, seen: Tree, items: Tree, noise: Tensor | None) -> ActorObjective: ...


@runtime_checkable
class MorePhases(Protocol):
    """An objective with phases of its own."""

    def more(self, phase: str, seen: Tree, items: Tree) -> ActorObjective: ...


class Penalty(NamedTuple):
    """What critics descend beside their errors."""

    loss: Tensor
    """Of every critic and item [count, B]."""
    gap: Tensor | None = None
    """Of each item [B]: what a learned multiplier keeps at its threshold."""
    metrics: Mapping[str, Tensor] = {}


@runtime_checkable
class Penalised(Protocol):
    """An objective whose critics have a penalty (cql)."""

    def penalty(self, seen: Tree, following: Tree, q: Tensor, noise: Tensor | None) -> Penalty: ...


class LearnOptions(Protocol):
    """What the learning side reads of the options."""

    @property
    def importance(self) -> float: ...
    @property
    def importance_final(self) -> float | None: ...
    @property
    def actor_priorities(self) -> bool: ...


class ActorOptions(Protocol):
    """What an actor's optimiser reads of them."""

    @property
    def actor_lr(self) -> float: ...
    @property
    def optimiser_epsilon(self) -> float: ...
    @property
    def grad_norm(self) -> float: ...


def critic_phase(config: OffPolicyOptions, target: TargetSchedule) -> Phase:
    return Phase("critic", "adam", lambda: config.critic_lr, epsilon=config.optimiser_epsilon, grad_norm=config.grad_norm,
                 target=target)


def actor_phase(config: ActorOptions, **more: Any) -> Phase:
    return Phase("actor", "adam", lambda: config.actor_lr, epsilon=config.optimiser_epsilon, grad_norm=config.grad_norm, **more)


class OffPolicyLearn(ItemLearn[Model[Any]]):
    """A learning.Learn and ReplayLearn. The parts of the net are named as the phases are."""

    def __init__(self, config: LearnOptions, model: Model[Any], target: Model[Any] | None, phases: Sequence[Phase],
                 objective: OffPolicyObjective | Cloning, target_entropy: float = 0.0, contrast: Contrast | None = None,
                 threshold: float = 0.0) -> None:
        """Without critics there is no target, and items have no errors: all priorities are 1. `threshold` is that of the gap."""
        super().__init__(model, phases, target=target, publishes=None if config.actor_priorities else "actor", contrast=contrast)
        self.config, self._objective, self._target_entropy = config, objective, target_entropy
        self._penalised, self._threshold = objective if isinstance(objective, Penalised) else None, threshold
        self._entropy = torch.zeros(())  # of the last actor phase, as its share of the joined batch's mean
        self._gap = torch.zeros(())      # the same of the last critic phase

    def to(self, hardware: Hardware) -> None:
        super().to(hardware)
        self._entropy, self._gap = self._entropy.to(hardware.device), self._gap.to(hardware.device)

    def split(self, batch: Tree, sums: np.ndarray, progress: Progress, rng: np.random.Generator) -> Iterator[NoisyMinibatch]:
        """One: the batch as it was drawn."""
        beta = annealed(progress, self.config.importance, self.config.importance_final)
        drawn = item_minibatch(batch, sums, beta, self.tensor, self.small)
        noises = self._objective.noises
        noise = self.small(rng.standard_normal((len(drawn.weight), noises), np.float32)) if noises else None
        yield NoisyMinibatch(drawn.items, drawn.weight, drawn.scale, noise)

    def loss(self, minibatch: NoisyMinibatch, phase: str) -> Loss:
        with self.model.precision():
            if phase == "critic":
                return self._critic_loss(minibatch)
            if phase == "actor":
                return self._actor_loss(minibatch)
            if phase in ("temperature", "multiplier"):
                return self._multiplier_loss(minibatch, phase)
            return self._other_loss(minibatch, phase)

    def _critic_loss(self, minibatch: NoisyMinibatch) -> Loss:
        items, see, target, objective = minibatch.items, self.model.see, self.target, cast(OffPolicyObjective, self._objective)
        assert target is not None
        with torch.no_grad():
            following = see(items["next_observation"])
            lagging = following if target.representation is None else target.see(items["next_observation"])
            bootstrap = objective.bootstrap(following, lagging, items, minibatch.noise)
            goal = items["reward"] + items["discount"] * bootstrap
        seen = see(items["observation"])
        q = objective.taken(seen, items)
        error = goal - q
        size = error.detach().abs().mean(0)
        metrics = {"td_error": size.mean(), "q_mean": q.detach().mean(), "target_mean": goal.mean(),
                   "importance_min": minibatch.weight.amin()}
        loss = minibatch.weight * error.square()
        if self._penalised is not None:
            penalty = self._penalised.penalty(seen, following, q, minibatch.noise)
            loss, metrics = loss + penalty.loss, {**metrics, **penalty.metrics}
            if penalty.gap is not None:
                self._gap.copy_(penalty.gap.sum() * minibatch.scale)
        return Loss(loss.sum() * minibatch.scale, metrics, size)

    def _actor_loss(self, minibatch: NoisyMinibatch) -> Loss:
        with torch.no_grad():  # what the actor sees is the critics' business
            seen = self.model.see(minibatch.items["observation"])
        found = self._objective.actor(seen, minibatch.items, minibatch.noise)
        if found.entropy is not None:
            self._entropy.copy_(found.entropy.detach().sum() * minibatch.scale)
        alike = torch.ones_like(minibatch.weight) if self.target is None else None
        return Loss(found.loss.sum() * minibatch.scale, found.metrics, alike)

    def _other_loss(self, minibatch: NoisyMinibatch, phase: str) -> Loss:
        with torch.no_grad():  # an encoder is the critics' business
            seen = self.model.see(minibatch.items["observation"])
        found = cast(MorePhases, self._objective).more(phase, seen, minibatch.items)
        loss = minibatch.weight * found.loss if found.weighted else found.loss
        return Loss(loss.sum() * minibatch.scale, found.metrics)

    def _multiplier_loss(self, minibatch: NoisyMinibatch, phase: str) -> Loss:
        """From what an earlier phase has found for the same minibatch: an entropy, which is to stay above its target, or a gap,
        which is to stay below its threshold."""
        share, net = len(minibatch.weight) * minibatch.scale, self.model.net
        if phase == "temperature":
            return Loss(temperature_loss(net.temperature(), self._entropy, self._target_entropy * share).sum())
        return Loss(temperature_loss(net.multiplier(), -self._gap, -self._threshold * share).sum())
