"""PhasedLearn: a learning.Learn that lacks only minibatches and a loss.

    class MyLearn(PhasedLearn[MyModel]):
        def split(self, batch, sums, progress, rng):         # one update for each part of the batch
            yield MyMinibatch(...)                           # a dataclass of tensors and numbers

        def loss(self, minibatch, phase):
            return Loss(loss, {"td_error": error.abs().mean()})   # metrics as tensors without axes

All the rest is here: the parameters in phases (phases.py), running statistics, CUDA graphs, publication, shared memory. `state` is
everything that a checkpoint must hold, changed in place only.

On a GPU nothing that it computes is read: gradients, metrics and priorities stay there until a number is read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from shoal.acting import Progress
from shoal.algorithms.common.gradients import Readings, descend, measured
from shoal.algorithms.common.model import Model
from shoal.algorithms.common.normaliser import LearnerNormalisers
from shoal.algorithms.common.phases import ParameterSlice, Phase, PhasedParameters
from shoal.core import Tree, Vector
from shoal.device.cpu_graph import RecordedFunction
from shoal.device.cuda_graph import CapturedFunction, LearnerGraphs
from shoal.device.placement import Hardware
from shoal.device.transfer import PinnedUploader, to_device
from shoal.device.weight_handoff import DeviceWeights, WeightExporter, WeightSnapshot
from shoal.ops import priorities
from shoal.slots import leaves, map_tree

__all__ = ["Loss", "PhasedLearn"]

M = TypeVar("M", bound=Model[Any])
MAX_STAGED_BYTES = 1 << 20  # of a batch that travels with the launch: a larger one is copied from where it lies


class Loss(NamedTuple):
    """What a loss function finds."""

    loss: torch.Tensor
    metrics: Mapping[str, torch.Tensor] = {}
    """By names that the algorithm declares."""
    priorities: torch.Tensor | None = None
    """Of the items [B] that it was computed from: the sizes of their errors."""


class GradientPlace(NamedTuple):
    """Where the gradient of a phase lies."""

    grad: torch.Tensor
    feeds: torch.Tensor | None
    """What it has for another phase's parameters."""
    prefix: str
    """Of the names of its metrics."""


class PhasedLearn(ABC, Generic[M]):
    """A learning.Learn, DeviceLearn, SlicedLearn and DelayedLearn."""

    captures = True
    """Whether `loss` reads no number of a tensor, so that it can be captured as a CUDA graph."""
    records = False
    """Whether kernels are recorded and replayed on a CPU too: worth it where batches are small and of one shape."""
    stages = False
    """Whether minibatches are as large as their batch, and nothing is computed of one before its loss. Small ones then stay on the
    host until their update is launched, which brings them to a GPU as one copy."""

    def __init__(self, model: M, phases: Sequence[Phase], *, target: M | None = None, publishes: str | None = None,
                 normalise_returns: bool = False) -> None:
        """With several phases each is named after a part of the model (see Model.span). `publishes` is the one part of the network
        that policies need, with the encoder in front of it; None publishes all of it. Observations are normalised if the model says
        so."""
        self.model, self.target = model, target
        self.phases = tuple(phase.name for phase in phases)
        whole = slice(0, model.params.numel())
        cut = len(phases) > 1 or model.representation is not None
        spans = {name: model.span(name) if cut else whole for name in self.phases}
        self._publishes = model.published(publishes)
        self._feeds = {phase.name: model.span(phase.feeds) for phase in phases if phase.feeds}
        self._fed = {phase.feeds for phase in phases}
        parts = {phase.name: [phase.name, *([phase.feeds] if phase.feeds else [])] for phase in phases} if cut else {}
        self._leaves = {name: [leaf for one in names for leaf in model.part(one).parameters()]  # listed once: it takes long
                        for name, names in parts.items()}
        self.parameters = PhasedParameters(phases, spans, model.params, None if target is None else target.params)
        self.statistics = LearnerNormalisers(model.norm_size, normalise_returns)
        self.state: dict[str, torch.Tensor] = self.parameters.state
        self.state.update(self.statistics.state)
        self._watch()
        self._waits = True  # for a gradient's numbers, before it returns them
        self._priorities: Any = np.zeros(0)
        self._tensor: Callable[[Any], torch.Tensor] = torch.from_numpy
        self._uploader: PinnedUploader | None = None
        self._graphs: dict[str, LearnerGraphs] = {}
        self._whole: CapturedFunction | None = None
        self._recorded = RecordedFunction(self._measure)
        self._measured: Callable[..., Any] = self._recorded if self.captures and self.records else self._measure
        self._exporter = WeightExporter(self._weights_of)
        self._places: dict[str, GradientPlace] = {}

    # -------------------------------------------------------------------------------- what an algorithm says
    @abstractmethod
    def split(self, batch: Tree, sums: np.ndarray, progress: Progress, rng: np.random.Generator) -> Iterator[Any]:
        """The minibatches of a batch."""

    @abstractmethod
    def loss(self, minibatch: Any, phase: str) -> Loss:
        """Of the parameters of this phase."""

    def loss_of(self, minibatch: Any, phase: str) -> Loss:
        """Of any phase, those included that an algorithm knows nothing of."""
        return self.loss(minibatch, phase)

    def sums(self, batch: Tree, index: int = 0, learners: int = 1) -> np.ndarray:
        """What learners have to know of each other's batches."""
        return np.zeros(0)

    def capturable(self, minibatch: Any) -> bool:
        """Whether the shapes in a minibatch say all about what is computed from it."""
        return True

    def tensor(self, arrays: Tree) -> Any:
        """An array of a batch, or a tree of them, where the model computes: one copy for all that lie together."""
        if self._uploader is None:
            return map_tree(self._tensor, arrays)
        if self._stays and sum(array.nbytes for _, array in leaves(arrays)) <= MAX_STAGED_BYTES:
            return map_tree(torch.from_numpy, arrays)
        return self._uploader.tree(arrays)

    def small(self, array: np.ndarray) -> torch.Tensor:
        """A small array that was made for one update, where the model computes, or where it waits for the launch."""
        tensor = torch.from_numpy(array)
        return tensor if self._stays else to_device(tensor, self.model.params.device)

    @property
    def _stays(self) -> bool:
        return self.stages and self._whole is not None

    # -------------------------------------------------------------------------------- updates
    def minibatches(self, batch: Tree, sums: np.ndarray, progress: Progress, rng: np.random.Generator) -> Iterator[Any]:
        self.anneal(progress)
        return self.split(batch, sums, progress, rng)

    def due(self, progress: Progress) -> tuple[str, ...]:
        return self.parameters.due(progress)

    def anneal(self, progress: Progress) -> None:
        if not self._graphs:
            self.parameters.anneal(progress)
            return
        for phase, rate in self.parameters.rates(progress).items():
            self._graphs[phase].anneal(rate)

    def gradients(self, minibatch: Any, phase: str) -> tuple[Vector, Mapping[str, float]]:
        """The flat gradient of this phase (a view, valid until the next call) and the metrics."""
        if not self._graphs:
            gradient, metrics, judged = self._descend(minibatch, phase)
        elif not self.capturable(minibatch):
            gradient, metrics, judged = self._graphs[phase].descend.eagerly(minibatch, phase)
        else:
            gradient, metrics, judged = self._graphs[phase].descend(minibatch, phase)
            metrics, judged = metrics.copy(), None if judged is None else judged.clone()  # the next call uses the same memory
        if judged is not None:
            self._priorities = judged
        return gradient, metrics

    def _descend(self, minibatch: Any, phase: str) -> tuple[Vector, Any, Any]:
        found, judged = (self._measured if self.capturable(minibatch) else self._measure)(minibatch, phase)
        place = self._place(phase)
        gradient, metrics = descend(found, place.grad, self.parameters.optimiser(phase).lr, self._waits, prefix=place.prefix,
                                    feeds=place.feeds)
        if judged is None:
            return gradient, metrics, None
        return gradient, metrics, (judged.numpy() if self._waits else judged) + priorities.FLOOR

    def _measure(self, minibatch: Any, phase: str) -> tuple[Readings, torch.Tensor | None]:
        """Loss and gradient, without reading a number: on a CPU the part of an update that is recorded."""
        found = self.loss_of(minibatch, phase)
        place = self._place(phase)
        readings = measured(found.loss, found.metrics, place.grad, parameters=self._leaves.get(phase), prefix=place.prefix,
                            adds=phase in self._fed, feeds=place.feeds)
        return readings, None if found.priorities is None else found.priorities.detach().double()

    def _place(self, phase: str) -> GradientPlace:
        """Made once: a slice takes microseconds."""
        place = self._places.get(phase)
        if place is None:
            grad, feeds = self.model.grad, self._feeds.get(phase)
            place = GradientPlace(grad, None, "") if not self._leaves else GradientPlace(
                grad[self.span(phase)], None if feeds is None else grad[feeds], f"{phase}_")
            self._places[phase] = place
        return place

    def update(self, minibatches: tuple[Any, ...], phases: tuple[tuple[str, ...], ...]) -> tuple[Mapping[str, float], torch.Tensor]:
        """These phases of every minibatch, one after the other; on a GPU as one graph: a launch for each would take longer."""
        if self._whole is None:
            metrics, judged, finite = self._update(minibatches, phases)
        elif not all(self.capturable(minibatch) for minibatch in minibatches):
            metrics, judged, finite = self._whole.eagerly(minibatches, phases)
        else:
            metrics, judged, finite = self._whole(minibatches, phases)
            metrics, judged, finite = metrics.copy(), None if judged is None else judged.clone(), finite.clone()
        if judged is not None:
            self._priorities = judged
        return metrics, finite

    def _update(self, minibatches: tuple[Any, ...], phases: tuple[tuple[str, ...], ...]) -> tuple[Readings, Any, torch.Tensor]:
        """Metrics are those of the last minibatch, priorities those of all."""
        readings: list[Readings] = []
        verdicts, judged = [], []
        for minibatch, due in zip(minibatches, phases, strict=True):
            readings, errors = [], None
            for phase in due:
                gradient, metrics, found = self._descend(minibatch, phase)
                readings.append(metrics)
                verdicts.append(torch.as_tensor(self.parameters.apply(gradient, phase)))
                errors = errors if found is None else found
            if errors is not None:
                judged.append(errors)
        return Readings.joined(readings), torch.cat(judged) if judged else None, torch.stack(verdicts)

    def apply(self, gradient: Vector, phase: str) -> bool | torch.Tensor:
        """Clip, step, and refresh the target where that is due. False, and nothing changed, where the gradient is not finite."""
        return self._graphs[phase].step(gradient) if self._graphs else self.parameters.apply(gradient, phase)

    def span(self, phase: str) -> slice:
        return self.parameters.span(phase)

    # -------------------------------------------------------------------------------- running statistics
    def moments(self, batch: Tree) -> Vector:
        return self.statistics.moments(batch)

    def absorb(self, moments: Vector) -> None:
        self.statistics.absorb(moments)

    # -------------------------------------------------------------------------------- a device
    def to(self, hardware: Hardware) -> None:
        """Learn there from now on, in tensors."""
        self._waits, self._measured = False, self._measure
        if hardware.on_gpu:
            self._uploader = PinnedUploader(hardware.device) if hardware.gpu.pinned else None
            self._tensor = self.model.tensor if self._uploader is None else self._uploader.tensor
        stay = self.statistics.seen
        for name, tensor in self.state.items():
            if name not in ("params", "target") and not any(tensor is moment for moment in stay):
                tensor.data = tensor.data.to(hardware.device)  # still the same object for all who hold it
        for model in self._models:
            model.to(hardware)
        self.parameters.fuse(hardware.gpu.fused)
        self._moved()

    def capture(self) -> None:
        """Learn by replaying CUDA graphs from now on, where the loss can be captured (see cuda_graph.py)."""
        if self.captures:
            self._graphs = {phase: self._graphs_of(phase) for phase in self.phases}
            self._whole = CapturedFunction(self._update, self.model.params.device)

    def _graphs_of(self, phase: str) -> LearnerGraphs:
        def step(gradient: torch.Tensor) -> Any:
            return self.parameters.apply(gradient, phase)

        return LearnerGraphs(self.parameters.optimiser(phase), self._descend, step)

    def release(self) -> None:
        """Wait until the memory of the last batch is not read any more: others may then write there."""
        if self._uploader is not None:
            self._uploader.wait()

    # -------------------------------------------------------------------------------- the outside
    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        names = ("params", "target", *self.statistics.state)
        return {name: self.state[name] for name in names if name in self.state}

    def layers(self, params: np.ndarray) -> Mapping[str, np.ndarray]:
        return self.model.layers(params)

    def published(self, progress: Progress) -> Tree:
        return self._exporter.published(progress)

    def device_weights(self, progress: Progress) -> DeviceWeights:
        return self._exporter.device_weights(progress)

    def snapshot(self, progress: Progress) -> WeightSnapshot:
        return self._exporter.snapshot(progress)

    def policy_tensors(self) -> Tree:
        return {"params": self.model.params[self._publishes], "norm": self.statistics.published}

    def _weights_of(self, progress: Progress) -> Tree:
        return {**self.policy_tensors(), "progress": progress.numbers}

    def bind(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Keep the whole state in these arrays from now on (shared memory, another learner's): its values are theirs."""
        for name, tensor in self.state.items():
            if name not in ("params", "target"):
                tensor.data = torch.from_numpy(arrays[name])  # still the same object for all who hold it
        for name, model in zip(("params", "target"), self._models, strict=False):
            model.move(torch.from_numpy(arrays[name]))
        self._moved()

    def cut(self, where: slice) -> ParameterSlice:
        """What a server needs that owns this slice of the parameters. The one that begins at 0 keeps the running statistics."""
        first = where.start == 0
        with_returns = first and self.statistics.returns is not None
        statistics = LearnerNormalisers(self.model.norm_size if first else 0, with_returns)
        return ParameterSlice(self.parameters, where, self._publishes, statistics)

    def clipped(self, gradient: np.ndarray, phase: str) -> np.ndarray:
        """As `apply` clips it."""
        return self.parameters.clipped(gradient, phase)

    @property
    def _models(self) -> list[M]:
        return [self.model] if self.target is None else [self.model, self.target]

    def _moved(self) -> None:
        """The parameters, or the statistics, lie elsewhere."""
        self._recorded.forget()
        self._places.clear()
        self.parameters.move(self.model.params, None if self.target is None else self.target.params)
        self._watch()

    def _watch(self) -> None:
        observations = self.statistics.observations
        if observations is not None:
            for model in self._models:
                model.watch(observations.mean, observations.scale)
