"""CUDA graphs of a learner's update: batches of one shape launch the same kernels every time, so they are launched as one.

    minibatch ──copied──▶ fixed tensors ──▶ gradients and optimisers of all phases, of one update or of several: one graph
    with several learners, for each phase   gradient: one graph ──▶ all-reduce ──▶ optimiser: one graph

Launching the kernels of a small network one by one takes the CPU as long as the GPU takes to compute them. The first calls run
kernel by kernel (libraries choose their kernels then), the next call is captured, later calls replay the capture. Numbers that
change from call to call (the learning rate, a weight of the loss) are tensors too. They travel to the device as one copy, with all
tensors that still lie on the host. On a CPU the same code runs without graphs.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from shoal.device.graph_inputs import rebuilt, shape_of
from shoal.device.transfer import StagedBlock, to_device

if TYPE_CHECKING:
    import numpy as np

__all__ = ["CAPTURE_LOCK", "CapturedFunction", "LearnerGraphs", "capturing"]

KINDS = (torch.Tensor, float)  # what may change between calls
WARM_UPS = 3
MAX_SHAPES = 4  # of a function's arguments that get a graph each; further shapes run kernel by kernel
CAPTURE_LOCK = threading.RLock()
"""Hold it while capturing and while computing kernel by kernel. Libraries then search for kernels, wait for the device and free
memory, and no thread may do that while another one captures. Replaying a graph does not need it."""


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """Capture what is launched inside; other threads may replay graphs meanwhile. Garbage collection is off: it might destroy an
    old graph, which would spoil the capture."""
    with CAPTURE_LOCK:
        collecting = gc.isenabled()
        gc.collect()
        gc.disable()
        try:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                yield
        finally:
            if collecting:
                gc.enable()


class CapturedFunction:
    """Calls `function(given, *constants)` and captures it once per shape of `given`, a tree of dataclasses, dictionaries, tuples,
    tensors and numbers. Tensors on the host are moved to the `device`, the one where the others lie unless it is given. The next
    call overwrites the memory of what it returns."""

    def __init__(self, function: Callable[..., Any], device: torch.device | None = None) -> None:
        self._function, self._device = function, device
        self._shapes: dict[Any, CapturedShape] = {}

    def __call__(self, given: Any, *constants: Any) -> Any:
        values: list[torch.Tensor | float] = []
        key = shape_of(given, values, KINDS), constants
        captured = self._shapes.get(key)
        if captured is None:
            if len(self._shapes) == MAX_SHAPES:
                return self.eagerly(given, *constants)
            captured = self._shapes[key] = CapturedShape(self._function, given, values, constants, self._device)
        return captured.run(values)

    def eagerly(self, given: Any, *constants: Any) -> Any:
        """Kernel by kernel."""
        values: list[torch.Tensor | float] = []
        shape_of(given, values, KINDS)
        device = _device_of(values, self._device)
        moved = [to_device(value, device) if isinstance(value, torch.Tensor) else value for value in values]
        with CAPTURE_LOCK:
            return self._function(rebuilt(given, iter(moved), KINDS), *constants)


class HasLearningRate(Protocol):
    """An optimiser of flat parameters, as far as graphs need it."""

    params: torch.Tensor
    lr: float | torch.Tensor


class LearnerGraphs:
    """A learner's gradient and its optimiser step, each captured. The learning rate moves to the device: graphs read it there."""

    def __init__(self, optimiser: HasLearningRate, descend: Callable[..., Any], step: Callable[..., Any]) -> None:
        self._rate = optimiser.lr = torch.zeros((), device=optimiser.params.device)
        self._given: float | None = None
        self.descend, self._step = (CapturedFunction(work, self._rate.device) for work in (descend, step))

    def anneal(self, rate: float | torch.Tensor) -> None:
        if isinstance(rate, torch.Tensor):
            self._rate.copy_(rate)
        elif rate != self._given:
            self._rate.fill_(rate)
            self._given = rate

    def step(self, gradient: np.ndarray | torch.Tensor) -> torch.Tensor:
        """Whether the gradient was finite, so that the step was made."""
        finite: torch.Tensor = self._step(torch.as_tensor(gradient).to(self._rate.device))
        return finite.clone()


class CapturedShape:
    """The fixed tensors for arguments of one shape, and the graph that computes on them."""

    def __init__(self, function: Callable[..., Any], given: Any, values: list[torch.Tensor | float], constants: Any,
                 device: torch.device | None) -> None:
        device = _device_of(values, device)
        self._moves = [not isinstance(value, torch.Tensor) or value.device != device for value in values]  # from the host
        moving = [torch.as_tensor(value) for value, moves in zip(values, self._moves, strict=True) if moves]
        self._staged = StagedBlock(moving, device)
        self._there = [value.clone() for value in values if isinstance(value, torch.Tensor) and value.device == device]
        staged, there = iter(self._staged.tensors), iter(self._there)
        given = rebuilt(given, iter([next(staged if moves else there) for moves in self._moves]), KINDS)
        self._work: Callable[[], Any] = partial(function, given, *constants)
        self._on_gpu = device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Any = None
        self._runs = 0

    def run(self, values: list[torch.Tensor | float]) -> Any:
        moving, there = [], iter(self._there)
        for value, moves in zip(values, self._moves, strict=True):
            if moves:
                moving.append(value)
            else:
                next(there).copy_(torch.as_tensor(value))
        if moving:
            self._staged.put(moving)
        if not self._on_gpu:
            return self._work()
        if self._graph is None and self._runs < WARM_UPS:
            return self._warm_up()
        if self._graph is None:
            self._graph = self._capture()
        self._graph.replay()  # also after the capture, which computes nothing
        return self._result

    def _warm_up(self) -> Any:
        self._runs += 1
        side = torch.cuda.Stream()  # the default stream cannot be captured, and libraries remember the stream they were set up on
        side.wait_stream(torch.cuda.current_stream())
        with CAPTURE_LOCK, torch.cuda.stream(side):
            result = self._work()
        torch.cuda.current_stream().wait_stream(side)
        return result

    def _capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            self._result = self._work()
        return graph


def _device_of(values: list[torch.Tensor | float], device: torch.device | None) -> torch.device:
    """The given one, else that of the tensors."""
    return device or next(value.device for value in values if isinstance(value, torch.Tensor))
