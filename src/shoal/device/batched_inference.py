"""Batched inference: one forward pass for the rows of many requests, on fixed buffers and, on a GPU, as a CUDA graph.

    requests --one copy each--> pinned memory --> GPU: network and sampling, one graph --> pinned memory --> replies

Rows are padded to a power of two, so that a few graphs serve every batch. All work runs on a CUDA stream of its own with a high
priority: a learner in the same process does not delay it. On a CPU the same code runs without pinning, streams and graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from shoal.acting import Policy, StepView
from shoal.core import Tree
from shoal.device.cuda_graph import CAPTURE_LOCK, capturing
from shoal.device.placement import Hardware
from shoal.slots import map_tree

__all__ = ["BatchedInference", "padded"]

HIGH_PRIORITY = -1  # of a CUDA stream: lower numbers go first
MIN_ROWS = 32
WARM_UPS = 3


def padded(rows: int) -> int:
    """The next power of two, at least MIN_ROWS."""
    return max(MIN_ROWS, 1 << (rows - 1).bit_length())


class BatchedInference:
    """Acts for several groups of rows with one forward pass of a policy."""

    def __init__(self, policy: Policy, hardware: Hardware, rng: torch.Generator) -> None:
        self.policy, self.hardware, self.rng = policy, hardware, rng
        self._buffers: dict[tuple[int, bool], InferenceBuffers] = {}
        self.stream: torch.cuda.Stream | None = None
        if hardware.on_gpu:
            self.stream = torch.cuda.Stream(hardware.device, priority=HIGH_PRIORITY)
            self.stream.wait_stream(torch.cuda.current_stream(hardware.device))  # which copied the policy to the GPU

    def on_stream(self) -> AbstractContextManager[Any]:
        """Change the policy's weights inside this context, so that no forward pass reads them half-written."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def act_one(self, view: StepView, state: Tree, explore: np.ndarray, rng: torch.Generator) -> tuple[np.ndarray, Tree, Tree]:
        """`Policy.act` for one group, in arrays. `rng` must be the generator this object was created with."""
        return self.act([view], [state], explore)

    def act(self, views: Sequence[StepView], states: Sequence[Tree], explore: np.ndarray) -> tuple[np.ndarray, Tree, Tree]:
        """`Policy.act` for several groups of rows, joined, in arrays."""
        return self.start(views, states, explore)()

    def start(self, views: Sequence[StepView], states: Sequence[Tree],
              explore: np.ndarray) -> Callable[[], tuple[np.ndarray, Tree, Tree]]:
        """Launch the forward pass and return at once; call the result to wait for the actions."""
        with self.on_stream():
            return self._start(views, states, explore)

    def _start(self, views: Sequence[StepView], states: Sequence[Tree],
               explore: np.ndarray) -> Callable[[], tuple[np.ndarray, Tree, Tree]]:
        rows = sum(len(view.first) for view in views)
        mixing = bool(explore.any())
        key = padded(rows), mixing
        if key not in self._buffers:
            self._buffers[key] = InferenceBuffers(self, *key, _inputs(views[0], states[0]))
        buffers = self._buffers[key]
        start = 0
        for view, state in zip(views, states, strict=True):
            end = start + len(view.first)
            map_tree(lambda target, source, a=start, b=end: np.copyto(target[a:b], source), buffers.arrays, _inputs(view, state))
            start = end
        if buffers.mix is not None:
            buffers.mix[:rows] = torch.from_numpy(explore)
        buffers.launch()
        return lambda: buffers.result(rows)


class InferenceBuffers:
    """The input and output buffers of one padded size, and the CUDA graph that computes on them."""

    def __init__(self, inference: BatchedInference, size: int, mixing: bool, example: Tree) -> None:
        self._inference, self._hardware = inference, inference.hardware
        gpu, device = self._hardware.on_gpu, self._hardware.device

        def blank(x: Any) -> torch.Tensor:
            x = torch.as_tensor(x)
            return torch.zeros((size, *x.shape[1:]), dtype=x.dtype, pin_memory=gpu)

        self._host = map_tree(blank, example)
        self.arrays = map_tree(lambda x: x.numpy(), self._host)
        self._inputs = map_tree(lambda x: x.to(device), self._host)
        self.mix = torch.zeros(size, device=device) if mixing else None
        self._no_mix = np.zeros(size, np.float32)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: Tree = None  # on the device
        self._results: Tree = None  # on the host
        self._passes = 0
        self._done = torch.cuda.Event(blocking=True) if gpu else None

    def launch(self) -> None:
        """Start the forward pass over `arrays`. Do not write to them again before `result` has returned."""
        if self._done is not None:
            map_tree(lambda target, source: target.copy_(source, non_blocking=True), self._inputs, self._host)
        self._compute()
        if self._done is None:
            self._results = self._outputs
            return
        if self._results is None:
            self._results = map_tree(lambda x: torch.empty(x.shape, dtype=x.dtype, pin_memory=True), self._outputs)
        map_tree(lambda target, source: target.copy_(source, non_blocking=True), self._results, self._outputs)
        self._done.record()

    def result(self, rows: int) -> tuple[np.ndarray, Tree, Tree]:
        if self._done is not None:
            self._done.synchronize()  # a blocking event sleeps: the environments need the cores
        result = map_tree(lambda x: x[:rows].numpy().copy(), self._results)
        return result["action"], result["state"], result["extras"]

    def _compute(self) -> None:
        if self._graph is not None:
            self._graph.replay()
            return
        with CAPTURE_LOCK:
            self._forward()
        self._passes += 1
        if self._hardware.on_gpu and self._hardware.gpu.graphs and self._passes == WARM_UPS:
            graph = torch.cuda.CUDAGraph()
            graph.register_generator_state(self._inference.rng)
            with capturing(graph, self._inference.stream):  # its kernels keep the stream's priority
                self._forward()
            self._graph = graph
            graph.replay()  # capturing computes nothing

    def _forward(self) -> None:
        given = self._inputs
        view = StepView(given["observation"], given["first"], given.get("action_mask"), given.get("prev_action"),
                        given.get("prev_reward"))
        explore: Any = self._no_mix if self.mix is None else self.mix
        action, state, extras = self._inference.policy.act(view, given["state"], explore, self._inference.rng)
        self._outputs = {"action": action, "state": state, "extras": extras}


def _inputs(view: StepView, state: Tree) -> Tree:
    fields = {"observation": view.observation, "first": view.first, "action_mask": view.action_mask,
              "prev_action": view.prev_action, "prev_reward": view.prev_reward, "state": state}
    return {name: field for name, field in fields.items() if field is not None}
