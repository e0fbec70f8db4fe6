"""Weights from a learner to an inference server in the same process, without leaving the device.

    learner ──copy, on its stream──▶ DeviceWeights ──WeightHandoff: the newest──▶ the server copies them into its own tensors

DeviceWeights are written once and never changed, so the server always copies one complete version; an event tells its stream when
they have been written. The server's tensors keep their addresses: captured graphs read them. The learner also publishes the same
version on its broadcast, for evaluators and other processes. On a CPU the same code runs without events.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from shoal.acting import Policy, Progress
from shoal.core import Tree
from shoal.device.transfer import HostCopy, to_host
from shoal.slots import map_tree

__all__ = ["DeviceWeights", "WeightExporter", "WeightHandoff", "WeightSnapshot"]


class DeviceWeights:
    """A copy of what a learner publishes (`params`, `norm`, `progress`), on the learner's device."""

    def __init__(self, tree: Tree) -> None:
        self.tree: Tree = map_tree(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, tree)
        self.version, self.since = 0, 0.0  # set by WeightHandoff.put
        params = self.tree["params"]
        self._written: torch.cuda.Event | None = None
        if params.is_cuda:
            self._written = torch.cuda.Event()
            self._written.record(torch.cuda.current_stream(params.device))

    def load(self, policy: Policy) -> None:
        """Load them into a policy, on the current stream. Keep this object until that stream has been waited for: afterwards its
        memory goes back to the learner's stream."""
        if self._written is not None:
            torch.cuda.current_stream(self.tree["params"].device).wait_event(self._written)
        policy.load(self.tree)

    @property
    def age_seconds(self) -> float:
        return time.monotonic() - self.since


class WeightHandoff:
    """The newest DeviceWeights. An architecture gives the same object to a learner, which puts, and to a server, which reads."""

    def __init__(self) -> None:
        self.newest: DeviceWeights | None = None

    def put(self, version: int, device_weights: DeviceWeights) -> None:
        device_weights.version, device_weights.since = version, time.monotonic()
        self.newest = device_weights  # from here on the server sees them


class WeightExporter:
    """Gives a learner's weights to others: as arrays, on the device, or on their way to the host.

    `weights(progress)` returns what is published, as tensors that the next update changes in place.
    """

    def __init__(self, weights: Callable[[Progress], Tree]) -> None:
        self._weights = weights
        self._host_copy: HostCopy | None = None

    def published(self, progress: Progress) -> Tree:
        """As arrays; on a CPU they share the tensors' memory."""
        return map_tree(lambda x: x.detach().cpu().numpy() if isinstance(x, torch.Tensor) else x, self._weights(progress))

    def device_weights(self, progress: Progress) -> DeviceWeights:
        """A copy on the device."""
        return DeviceWeights(self._weights(progress))

    def snapshot(self, progress: Progress) -> WeightSnapshot:
        """A copy on the device that is also on its way to the host: the next update may start at once."""
        device_weights = self.device_weights(progress)
        if self._host_copy is None:
            self._host_copy = HostCopy(device_weights.tree["params"])
        return WeightSnapshot(device_weights, self._host_copy)


class WeightSnapshot:
    """Weights of one moment: `device_weights`, and the same as arrays on the host when you call it, which waits for the copy."""

    def __init__(self, device_weights: DeviceWeights, host_copy: HostCopy) -> None:
        self.device_weights, self._host_copy = device_weights, host_copy
        self._norm = {name: to_host(x) for name, x in device_weights.tree["norm"].items()}
        self._turn = host_copy.start(device_weights.tree["params"])  # last: once it has arrived, all have

    def __call__(self) -> Tree:
        params = self._host_copy.result(self._turn)
        norm = {name: x.numpy() for name, x in self._norm.items()}
        return {"params": params, "norm": norm, "progress": self.device_weights.tree["progress"]}
