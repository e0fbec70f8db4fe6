"""An inference server's forward pass on a GPU: fixed buffers, rows padded to one of a few sizes, each size a CUDA graph.

    requests --one copy each--> pinned memory --> GPU: network and sampling, one graph --> pinned memory --> replies

All of it runs on a stream of its own that goes first on the GPU: a learner in the same process does not hold it up. On a CPU the
same code runs without pinning, streams and graphs (the tests do).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from shoal.algorithms.capture import CAPTURES, capturing
from shoal.algorithms.hardware import Hardware
from shoal.core import Policy, StepView, Tree
from shoal.slots import map_tree

__all__ = ["Counter", "padded"]

FIRST = -1  # a stream's priority: lower numbers go first
LEAST = 32
WARM_UPS = 3


def padded(rows: int) -> int:
    """The next power of two, so that there are few graphs."""
    return max(LEAST, 1 << (rows - 1).bit_length())


class Counter:
    """Where requests are answered: groups of rows in, actions for all of them out."""

    def __init__(self, policy: Policy, hardware: Hardware, rng: torch.Generator) -> None:
        self.policy, self.hardware, self.rng = policy, hardware, rng
        self._tables: dict[tuple[int, bool], Table] = {}
        self.stream: Any = None
        if hardware.on_gpu:
            self.stream = torch.cuda.Stream(hardware.device, priority=FIRST)
            self.stream.wait_stream(torch.cuda.current_stream(hardware.device))  # on which the policy has come there

    def aside(self) -> AbstractContextManager[Any]:
        """Whatever changes the policy happens here, in step with what it answers."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def answer(self, view: StepView, state: Tree, explore: np.ndarray, rng: torch.Generator) -> tuple[np.ndarray, Tree, Tree]:
        """Policy.act itself, for an actor that infers on a GPU; the generator is the one it was made with."""
        return self.act([view], [state], explore)

    def act(self, views: Sequence[StepView], states: Sequence[Tree], explore: np.ndarray) -> tuple[np.ndarray, Tree, Tree]:
        """Like Policy.act, for several groups of rows at once; answers in arrays."""
        return self.ask(views, states, explore)()

    def ask(self, views: Sequence[StepView], states: Sequence[Tree],
            explore: np.ndarray) -> Callable[[], tuple[np.ndarray, Tree, Tree]]:
        """The same in two steps: what it returns waits for the answer. There is something else to do while a GPU thinks."""
        with self.aside():
            return self._ask(views, states, explore)

    def _ask(self, views: Sequence[StepView], states: Sequence[Tree],
             explore: np.ndarray) -> Callable[[], tuple[np.ndarray, Tree, Tree]]:
        rows = sum(len(view.first) for view in views)
        mixing = bool(explore.any())
        key = padded(rows), mixing
        if key not in self._tables:
            self._tables[key] = Table(self, *key, _inputs(views[0], states[0]))
        table = self._tables[key]
        start = 0
        for view, state in zip(views, states, strict=True):
            end = start + len(view.first)
            map_tree(lambda target, source, a=start, b=end: np.copyto(target[a:b], source), table.arrays, _inputs(view, state))
            start = end
        if table.mix is not None:
            table.mix[:rows] = torch.from_numpy(explore)
        table.think()
        return lambda: table.answer(rows)


class Table:
    """The buffers of one size, and the graph over them."""

    def __init__(self, counter: Counter, size: int, mixing: bool, example: Tree) -> None:
        self.counter, self.hardware = counter, counter.hardware
        gpu, device = self.hardware.on_gpu, self.hardware.device

        def blank(x: Any) -> torch.Tensor:
            x = torch.as_tensor(x)
            return torch.zeros((size, *x.shape[1:]), dtype=x.dtype, pin_memory=gpu)

        self._host = map_tree(blank, example)
        self.arrays = map_tree(lambda x: x.numpy(), self._host)
        self._inputs = map_tree(lambda x: x.to(device), self._host)
        self.mix = torch.zeros(size, device=device) if mixing else None
        self._none = np.zeros(size, np.float32)
        self._graph: Any = None
        self._outputs: Any = None
        self._answers: Any = None
        self._served = 0
        self._done: Any = torch.cuda.Event(blocking=True) if gpu else None

    def think(self) -> None:
        """Start on what lies in `arrays`; before `answer` nobody may write there."""
        if self.hardware.on_gpu:
            map_tree(lambda target, source: target.copy_(source, non_blocking=True), self._inputs, self._host)
        self._compute()
        if self.hardware.on_gpu:
            if self._answers is None:
                self._answers = map_tree(lambda x: torch.empty(x.shape, dtype=x.dtype, pin_memory=True), self._outputs)
            map_tree(lambda target, source: target.copy_(source, non_blocking=True), self._answers, self._outputs)
            self._done.record()
        else:
            self._answers = self._outputs

    def answer(self, rows: int) -> tuple[Any, Tree, Tree]:
        if self._done is not None:
            self._done.synchronize()  # asleep: the environments need the cores
        answer = map_tree(lambda x: x[:rows].numpy().copy(), self._answers)
        return answer["action"], answer["state"], answer["extras"]

    def _compute(self) -> None:
        if self._graph is not None:
            self._graph.replay()
            return
        with CAPTURES:
            self._think()
        self._served += 1
        if self.hardware.on_gpu and self.hardware.gpu.graphs and self._served == WARM_UPS:
            graph = torch.cuda.CUDAGraph()
            graph.register_generator_state(self.counter.rng)
            with capturing(graph, self.counter.stream):  # its kernels keep the stream's priority
                self._think()
            self._graph = graph
            graph.replay()  # a capture computes nothing

    def _think(self) -> None:
        given = self._inputs
        view = StepView(given["observation"], given["first"], given.get("action_mask"), given.get("prev_action"),
                        given.get("prev_reward"))
        explore: Any = self._none if self.mix is None else self.mix
        action, state, extras = self.counter.policy.act(view, given["state"], explore, self.counter.rng)
        self._outputs = {"action": action, "state": state, "extras": extras}


def _inputs(view: StepView, state: Tree) -> Tree:
    fields = {"observation": view.observation, "first": view.first, "action_mask": view.action_mask,
              "prev_action": view.prev_action, "prev_reward": view.prev_reward, "state": state}
    return {name: field for name, field in fields.items() if field is not None}
