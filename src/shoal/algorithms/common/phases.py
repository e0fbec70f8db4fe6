"""The flat parameter vector of a learner, in phases: each phase is an optimiser of its own over its own slice of the vector.

    params   [ actor ............ | critic ................... ]       one vector: what wires, checkpoints and policies work on
    phases     Phase("actor", ...)  Phase("critic", ...)              each clips, anneals and refuses bad gradients by itself
    target   [ actor ............ | critic ................... ]       a copy that follows, slice by slice, where a phase has one
    lagged                        [ critic ................... ]       the target of some updates ago, where a phase asks for it

State is named as it is saved: "params", "target", "adam.m", "updates"; with several phases "critic.adam.m", "critic.updates".

Apart from clipping nothing here looks from one element to another. So a parameter server may own a piece of the vector (`cut`) if
gradients are clipped before they are cut: the pieces compute the bits of the whole, wherever they begin at a multiple of a vector
register.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shoal.acting import Progress
from shoal.algorithms.common.lagged_copy import Lag, LaggedCopy
from shoal.algorithms.common.normaliser import LearnerNormalisers
from shoal.algorithms.common.optimiser import Optimiser, OptimiserName, ValueOptimiserName, annealed
from shoal.core import Tree, Vector
from shoal.ops.value import polyak_

__all__ = ["ParameterSlice", "Phase", "PhasedParameters", "TargetSchedule", "overlap"]


@dataclass(frozen=True)
class TargetSchedule:
    """How a copy of a phase's parameters follows them."""

    period_updates: int = 0
    """Updates between two moves. 0 never copies, and moves by `tau` at every update."""
    tau: float = 0.0
    """The share of the way that it moves; 0 copies."""
    lag: Lag | None = None
    """Keeps a second copy, which is the target of some updates ago."""

    @property
    def period(self) -> int:
        """Updates between two moves; 0 where it never moves."""
        return self.period_updates or int(self.tau > 0)


@dataclass(frozen=True)
class Phase:
    """An optimiser: its kind, its schedule, and how the target follows."""

    name: str
    """Of a part of the network, where there are several phases."""
    optimiser: OptimiserName | ValueOptimiserName
    lr: float | Callable[[], float]
    """A number, or what gives it at every update: then it may change during a run."""
    lr_final: float | Callable[[], float | None] | None = None
    """At the end of the env_steps budget; None keeps it constant."""
    epsilon: float = 1e-8
    grad_norm: float = 0.0
    """Longest gradient; 0 does not clip."""
    grad_limit: float = 0.0
    """Largest size of any element of the gradient; 0 does not clip."""
    decay: float = 0.99
    """Of rmsprop's moments."""
    start: float = 0.0
    """What adagrad's sums of squares begin with."""
    target: TargetSchedule | None = None
    period_updates: int = 1
    """Learner steps between two updates of this phase (the delayed policy updates of TD3)."""
    feeds: str = ""
    """A phase whose parameters this loss has a gradient for too: it comes later, and adds that gradient to its own."""

    def rate(self, progress: Progress) -> float:
        first, last = (rate() if callable(rate) else rate for rate in (self.lr, self.lr_final))
        assert first is not None
        return annealed(progress, first, last)


@dataclass
class PhaseState:
    """A phase at work."""

    phase: Phase
    span: slice
    optimiser: Optimiser
    updates: torch.Tensor | None  # since the beginning; None where no target follows
    target: torch.Tensor | None = None  # its slice of the target; made once, for it takes microseconds
    lagged: LaggedCopy | None = None


class PhasedParameters:
    """Parameters, optimisers and targets. `state` is all of it as named tensors, changed in place only."""

    def __init__(self, phases: Sequence[Phase], spans: Mapping[str, slice], params: torch.Tensor,
                 target: torch.Tensor | None = None, clips: bool = True) -> None:
        """Without `clips` gradients are applied as they come: they were clipped before they were cut."""
        self.names = tuple(phase.name for phase in phases)
        self.params, self.target = params, target
        self.state: dict[str, torch.Tensor] = {"params": params}
        if target is not None:
            self.state["target"] = target
        self._phases = tuple(phases)
        self._parts: dict[str, PhaseState] = {}
        for phase in phases:
            optimiser = Optimiser(phase.optimiser, params[spans[phase.name]], epsilon=phase.epsilon, decay=phase.decay,
                                  grad_norm=phase.grad_norm if clips else 0.0, start=phase.start,
                                  grad_limit=phase.grad_limit if clips else 0.0)
            follows = phase.target is not None and target is not None
            updates = torch.zeros(1, dtype=torch.float64) if follows else None  # float32 would stop at 2^24
            self._parts[phase.name] = part = PhaseState(phase, spans[phase.name], optimiser, updates,
                                                         None if target is None else target[spans[phase.name]])
            prefix = f"{phase.name}." if len(phases) > 1 else ""
            self.state.update({prefix + name: moments for name, moments in optimiser.moments.items()})
            if updates is not None:
                self.state[f"{prefix}updates"] = updates
            if phase.target is not None and phase.target.lag is not None and target is not None:
                part.lagged = LaggedCopy(phase.target.lag, target[part.span])
                self.state.update({prefix + name: tensor for name, tensor in part.lagged.state.items()})

    def span(self, phase: str) -> slice:
        return self._parts[phase].span

    def phase(self, name: str) -> Phase:
        """As it was given."""
        return self._parts[name].phase

    def optimiser(self, phase: str) -> Optimiser:
        return self._parts[phase].optimiser

    def rates(self, progress: Progress) -> dict[str, float]:
        """The learning rate of each phase."""
        return {phase.name: phase.rate(progress) for phase in self._phases}

    def due(self, progress: Progress) -> tuple[str, ...]:
        """The phases of the learner step that follows."""
        step = progress.learner_steps + 1
        return tuple(phase.name for phase in self._phases if step % phase.period_updates == 0)

    def anneal(self, progress: Progress) -> None:
        for name, rate in self.rates(progress).items():
            self._parts[name].optimiser.lr = rate

    def clipped(self, gradient: np.ndarray, phase: str) -> np.ndarray:
        """As `apply` clips it."""
        clipped: np.ndarray = self._parts[phase].optimiser.clipped(torch.from_numpy(gradient))[0].numpy()
        return clipped

    def apply(self, gradient: np.ndarray | torch.Tensor, phase: str) -> bool | torch.Tensor:
        """Clip, step, and refresh the target where that is due. False, and nothing changed, where the gradient is not finite."""
        part = self._parts[phase]
        if not len(part.optimiser.params):  # a piece that owns nothing of this phase only counts
            if part.updates is not None:
                part.updates += 1
            return True
        finite = part.optimiser.step(gradient)
        if isinstance(finite, torch.Tensor):
            self._refresh_unseen(part, finite)
        elif finite:
            self._refresh(part)
        return finite

    def _refresh(self, part: PhaseState) -> None:
        schedule, target = part.phase.target, part.target
        if part.updates is None or schedule is None or target is None:
            return
        part.updates.add_(1)
        period = schedule.period
        if period == 1 or (period and int(part.updates) % period == 0):
            polyak_(target, part.optimiser.params, schedule.tau or 1.0)
        if part.lagged is not None:
            part.lagged.follow(target, part.updates)

    @torch.no_grad()
    def _refresh_unseen(self, part: PhaseState, finite: torch.Tensor) -> None:
        """The same without reading a number back: nothing waits for a device, which counts by itself."""
        schedule, target = part.phase.target, part.target
        if part.updates is None or schedule is None or target is None:
            return
        part.updates += finite
        params, period = part.optimiser.params, schedule.period
        if period:
            due = finite if period == 1 else finite & (part.updates % period == 0)
            moved = torch.lerp(target, params, schedule.tau) if schedule.tau > 0 else params
            target.copy_(torch.where(due, moved, target))
        if part.lagged is not None:
            part.lagged.follow(target, part.updates, finite)

    def updates(self, phase: str) -> int:
        """How many updates the target of this phase has followed; 0 where there is none."""
        updates = self._parts[phase].updates
        return 0 if updates is None else int(updates)

    def go_on_from(self, updates: int, phase: str) -> None:
        """Count from there: the target is refreshed when the other pieces refresh theirs."""
        mine = self._parts[phase].updates
        if mine is not None:
            mine.fill_(updates)

    def move(self, params: torch.Tensor, target: torch.Tensor | None) -> None:
        """Work on these vectors from now on: the same parameters in another place."""
        self.params = self.state["params"] = params
        if target is not None:
            self.target = self.state["target"] = target
        for part in self._parts.values():
            part.optimiser.params = params[part.span]
            part.target = None if target is None else target[part.span]

    def fuse(self, fused: bool) -> None:
        """Let Adam be one kernel, or not."""
        for part in self._parts.values():
            part.optimiser.fused = fused

    def cut(self, where: slice) -> PhasedParameters:
        """A copy of this slice of the vector, with what each phase has in it; optimisers start from zero."""
        spans = {}
        for name in self.names:
            inside = overlap(self.span(name), where)
            spans[name] = slice(inside.start - where.start, inside.stop - where.start)
        target = None if self.target is None else self.target[where].detach().clone()
        return PhasedParameters(self._phases, spans, self.params[where].detach().clone(), target, clips=False)


def overlap(one: slice, other: slice) -> slice:
    """What two slices of a vector have in common; empty where they do not meet."""
    start = max(one.start, other.start)
    return slice(start, max(start, min(one.stop, other.stop)))


class ParameterSlice:
    """A learning.UpdaterSlice of the slice `where` of the whole vector. Gradients are clipped before they are cut and sent here."""

    def __init__(self, whole: PhasedParameters, where: slice, publishes: slice, statistics: LearnerNormalisers) -> None:
        """The slice's part of `publishes`, a slice of the whole vector too, is published."""
        self._parameters, self._statistics = whole.cut(where), statistics
        self.phases = whole.names
        self.state: dict[str, torch.Tensor] = {"begin": torch.tensor([where.start]), **statistics.state, **self._parameters.state}
        inside = overlap(publishes, where)
        self._publishes = slice(inside.start - where.start, inside.stop - where.start)

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        names = ("params", "target", *self._statistics.state)
        return {name: self.state[name] for name in names if name in self.state}

    def span(self, phase: str) -> slice:
        """Where the phase lies in this slice; empty where it owns nothing of it."""
        return self._parameters.span(phase)

    def anneal(self, progress: Progress) -> None:
        self._parameters.anneal(progress)

    def apply(self, gradient: Vector, phase: str) -> bool | torch.Tensor:
        return self._parameters.apply(gradient, phase)

    def updates(self, phase: str) -> int:
        return self._parameters.updates(phase)

    def go_on_from(self, updates: int, phase: str) -> None:
        self._parameters.go_on_from(updates, phase)

    def moments(self, batch: Tree) -> np.ndarray:
        moments: np.ndarray = self._statistics.moments(batch)
        return moments

    def absorb(self, moments: np.ndarray) -> None:
        self._statistics.absorb(moments)

    def published(self, progress: Progress) -> Tree:
        norm = {name: tensor.numpy() for name, tensor in self._statistics.published.items()}
        return {"params": self._parameters.params[self._publishes].numpy(), "norm": norm, "progress": progress.numbers}
