"""Weights from a learner to an inference server of the same process: they never leave the device.

    learner ──copy, on its stream──▶ Parcel ──Handoff: the newest──▶ the server copies it into its own tensors, on its stream

A parcel is written once and never changed, so whoever copies it gets one whole version; an event tells the other stream when it has
been written. The server's tensors stay where they are: captured graphs go on reading them. The broadcast beside it still tells
everybody else, evaluators among them, and its version is the parcel's. On a CPU the same code runs without events (the tests do).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from shoal.algorithms.pinning import Outbox, to_host
from shoal.core import Policy, Progress, Tree
from shoal.slots import map_tree

__all__ = ["Handoff", "Outlet", "Parcel", "Snapshot"]


class Parcel:
    """What a learner publishes (`params`, `norm`, `progress`) at one moment, copied where it is."""

    def __init__(self, tree: Tree) -> None:
        self.tree: Tree = map_tree(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, tree)
        self.version, self.since = 0, 0.0  # set when it is handed over
        params = self.tree["params"]
        self._written: Any = None
        if params.is_cuda:
            self._written = torch.cuda.Event()
            self._written.record(torch.cuda.current_stream(params.device))

    def load(self, policy: Policy) -> None:
        """Into a policy, on the current stream. Whoever calls this keeps the parcel until that stream has been waited for: its
        memory goes back to the learner's."""
        if self._written is not None:
            torch.cuda.current_stream(self.tree["params"].device).wait_event(self._written)
        policy.load(self.tree)

    @property
    def age_seconds(self) -> float:
        return time.monotonic() - self.since


class Handoff:
    """The newest parcel. One role puts, another one of the same process takes; an architecture gives both the same object."""

    def __init__(self) -> None:
        self.newest: Parcel | None = None

    def put(self, version: int, parcel: Parcel) -> None:
        parcel.version, parcel.since = version, time.monotonic()
        self.newest = parcel  # the moment at which it becomes current


class Outlet:
    """How weights leave a learner. `weights` gives what is published at some progress, as tensors that go on changing."""

    def __init__(self, weights: Callable[[Progress], Tree]) -> None:
        self._weights = weights
        self._outbox: Outbox | None = None

    def published(self, progress: Progress) -> Tree:
        """As arrays; on a CPU they are the tensors' own memory."""
        return map_tree(lambda x: x.detach().cpu().numpy() if isinstance(x, torch.Tensor) else x, self._weights(progress))

    def parcel(self, progress: Progress) -> Parcel:
        """What `published` gives at this moment, left on the device."""
        return Parcel(self._weights(progress))

    def snapshot(self, progress: Progress) -> Snapshot:
        """The same on its way to the host too: the next update may already run."""
        parcel = self.parcel(progress)
        if self._outbox is None:
            self._outbox = Outbox(parcel.tree["params"])
        return Snapshot(parcel, self._outbox)


class Snapshot:
    """Weights of one moment: `parcel` on the device, and called for, on the host."""

    def __init__(self, parcel: Parcel, outbox: Outbox) -> None:
        self.parcel, self._outbox = parcel, outbox
        self._norm = {name: to_host(x) for name, x in parcel.tree["norm"].items()}
        self._turn = outbox.put(parcel.tree["params"])  # last: it says when all have come

    def __call__(self) -> Tree:
        params = self._outbox.get(self._turn)
        norm = {name: x.numpy() for name, x in self._norm.items()}
        return {"params": params, "norm": norm, "progress": self.parcel.tree["progress"]}
