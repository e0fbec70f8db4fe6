"""A learner's update as CUDA graphs: for batches of one shape the kernels are always the same, so they are launched as one.

    minibatch ──copied──▶ fixed tensors ──▶ gradient: one graph ──▶ [all-reduce] ──▶ optimiser: one graph

Launching the kernels of a small network one by one takes a processor as long as computing them takes a GPU. The first calls run
kernel by kernel (libraries choose their kernels then), the next one is captured, the others replay it. Numbers that change from
call to call (the learning rate, a weight of the loss) lie in tensors too. On a CPU the same code runs without graphs.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import numpy as np

    from shoal.algorithms.training import Optimiser

__all__ = ["CAPTURES", "Captured", "Graphs", "capturing"]

WARM_UPS = 3
MOST = 4  # shapes that are worth a graph each
CAPTURES = threading.RLock()
"""Held by whoever captures, and by whoever computes kernel by kernel: libraries then look for kernels, wait for the device and give
memory back, none of which another thread may do during a capture. Who replays a graph needs it not."""


@contextmanager
def capturing(graph: Any, stream: Any = None) -> Iterator[None]:
    """Capture what is launched inside; other threads may go on replaying. Meanwhile no garbage is collected: among it may be an old
    graph, and taking that down would spoil the new one."""
    with CAPTURES:
        collecting = gc.isenabled()
        gc.collect()
        gc.disable()
        try:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                yield
        finally:
            if collecting:
                gc.enable()


class Captured:
    """`function(given, *constants)`, where `given` is a tree of dataclasses, dictionaries, tensors and numbers. What it returns
    lies in memory that the next call overwrites."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._frames: dict[Any, Frame] = {}

    def __call__(self, given: Any, *constants: Any) -> Any:
        values: list[torch.Tensor | float] = []
        key = _shape(given, values), constants
        frame = self._frames.get(key)
        if frame is None:
            if len(self._frames) == MOST:
                return self.eagerly(given, *constants)
            frame = self._frames[key] = Frame(self._function, given, values, constants)
        return frame.run(values)

    def eagerly(self, given: Any, *constants: Any) -> Any:
        """Kernel by kernel."""
        with CAPTURES:
            return self._function(given, *constants)


class Graphs:
    """A learner's gradient and its step, each captured. The learning rate lies on the device from now on: graphs read it there."""

    def __init__(self, optimiser: Optimiser, descend: Callable[..., Any], step: Callable[..., Any]) -> None:
        self._rate = optimiser.lr = torch.zeros((), device=optimiser.params.device)
        self.descend, self._step = Captured(descend), Captured(step)

    def anneal(self, rate: float | torch.Tensor) -> None:
        self._rate.fill_(rate)

    def step(self, gradient: np.ndarray | torch.Tensor) -> torch.Tensor:
        """Whether it was made."""
        finite: torch.Tensor = self._step(torch.as_tensor(gradient).to(self._rate.device))
        return finite.clone()


class Frame:
    """The fixed tensors of one shape, and the graph over them."""

    def __init__(self, function: Callable[..., Any], given: Any, values: list[torch.Tensor | float], constants: Any) -> None:
        device = next(value.device for value in values if isinstance(value, torch.Tensor))
        self._held = [value.clone() if isinstance(value, torch.Tensor) else torch.tensor(value, device=device) for value in values]
        given = _rebuilt(given, iter(self._held))
        self._work = lambda: function(given, *constants)
        self._on_gpu = device.type == "cuda"
        self._graph: Any = None
        self._result: Any = None
        self._runs = 0

    def run(self, values: list[torch.Tensor | float]) -> Any:
        for held, value in zip(self._held, values, strict=True):
            held.copy_(value) if isinstance(value, torch.Tensor) else held.fill_(value)
        if not self._on_gpu:
            return self._work()
        if self._graph is None and self._runs < WARM_UPS:
            return self._warm_up()
        if self._graph is None:
            self._capture()
        self._graph.replay()  # also after the capture, which computes nothing
        return self._result

    def _warm_up(self) -> Any:
        self._runs += 1
        side = torch.cuda.Stream()  # capture forbids the default stream, and libraries remember the one they were set up on
        side.wait_stream(torch.cuda.current_stream())
        with CAPTURES, torch.cuda.stream(side):
            result = self._work()
        torch.cuda.current_stream().wait_stream(side)
        return result

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            self._result = self._work()
        self._graph = graph


def _shape(tree: Any, values: list[torch.Tensor | float]) -> Any:
    """All of a tree that must be the same for its kernels to be the same; what may change goes to `values`."""
    if isinstance(tree, torch.Tensor):
        values.append(tree)
        return tuple(tree.shape), tree.dtype
    if isinstance(tree, float):
        values.append(tree)
        return float
    if isinstance(tree, Mapping):
        return tuple((name, _shape(part, values)) for name, part in tree.items())
    if is_dataclass(tree):
        return type(tree), *(_shape(getattr(tree, field.name), values) for field in fields(tree))
    return tree


def _rebuilt(tree: Any, held: Iterator[torch.Tensor]) -> Any:
    """The same tree over fixed tensors."""
    if isinstance(tree, torch.Tensor | float):
        return next(held)
    if isinstance(tree, Mapping):
        return {name: _rebuilt(part, held) for name, part in tree.items()}
    if is_dataclass(tree):
        return replace(tree, **{field.name: _rebuilt(getattr(tree, field.name), held) for field in fields(tree)})  # type: ignore[type-var]
    return tree
