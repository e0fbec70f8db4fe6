"""A process group of torch.distributed that can be left: what the groups of a cluster (gloo) and of several GPUs (nccl) consist of.

A ring lives for one epoch of its group and is driven by a thread of its own, so that a role's wait stays like any other and a
change of members is heard in the middle of an operation.

gloo notices a dead process within milliseconds (its sockets close) but cannot be interrupted: neither abort() nor deleting
the process group returns while an operation waits for a member that does not come. So a ring is never interrupted, it is left:
whoever hears of a new epoch lets go of the old ring in the ring's own thread, its sockets close, and what others still wait for
in that ring fails there. nccl notices nothing, but can be aborted: that is how its rings are left.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["JUDGE_SECONDS", "Operation", "Ring", "join", "open_store", "reach_store"]

OPERATION_SECONDS = 1800.0  # how long members that live and do not come are waited for; of deaths the supervisor tells
JUDGE_SECONDS = 60.0        # how long the supervisor may take to say what a failed operation meant
POLL_SECONDS = 0.0003
PATIENCE = timedelta(seconds=OPERATION_SECONDS)
NCCL = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}  # its watchdogs would end the process


def distributed() -> Any:
    """torch.distributed, when it is needed; most of what is used of it has no types."""
    import torch.distributed

    return torch.distributed


def open_store(address: str) -> Any:
    """The store through which the members of a ring find each other; its first member has it."""
    return distributed().TCPStore(address, 0, None, True, PATIENCE, wait_for_workers=False)


def reach_store(address: str, port: int) -> Any:
    return distributed().TCPStore(address, port, None, False, PATIENCE, wait_for_workers=False)


def join(store: Any, rank: int, size: int, address: str, device: torch.device | None = None) -> Any:
    """Become a member: through nccl with a GPU, through gloo without one."""
    dist = distributed()
    if device is not None and device.type == "cuda":
        import torch

        for name, value in NCCL.items():
            os.environ.setdefault(name, value)
        torch.cuda.set_device(device)  # of this thread
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = PATIENCE
        return dist.ProcessGroupNCCL(store, rank, size, nccl)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = PATIENCE
    return dist.ProcessGroupGloo(store, rank, size, options)


class Operation:
    """One collective operation, in place on a tensor: a sum, or a broadcast of the first member's."""

    def __init__(self, kind: str, tensor: torch.Tensor) -> None:
        self.kind, self.tensor = kind, tensor
        self.done, self.error = False, ""


class Ring:
    """The process group of one epoch. `form(left)` makes it in the ring's thread, and gives up when `left` is set."""

    def __init__(self, name: str, form: Callable[[threading.Event], Any], wake: Callable[[], None]) -> None:
        self._form, self._wake = form, wake
        self._work: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._left = threading.Event()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def start(self, operation: Operation) -> None:
        self._work.put(operation)

    def leave(self) -> None:
        self._left.set()
        self._work.put(None)

    def _run(self) -> None:
        group, failed = None, ""
        while (operation := self._work.get()) is not None:
            try:
                if failed:
                    raise RuntimeError(failed)
                if group is None:
                    group = self._form(self._left)
                self._do(group, operation)
            except Exception as error:  # gloo raises RuntimeError for everything, the store other things
                operation.error = failed = str(error) or type(error).__name__
            operation.done = True
            self._wake()
        if group is not None and group.name() == "nccl":
            group.abort()

    def _do(self, group: Any, operation: Operation) -> None:
        dist = distributed()
        if operation.kind == "sum":
            how = dist.AllreduceOptions()
            how.reduceOp = dist.ReduceOp.SUM
            work = group.allreduce([operation.tensor], how)
        else:
            whose = dist.BroadcastOptions()
            whose.rootRank = 0
            work = group.broadcast([operation.tensor], whose)
        while operation.tensor.is_cuda and not work.is_completed():  # wait() would hand the waiting to the GPU, for ever
            if self._left.wait(POLL_SECONDS):
                raise RuntimeError("the group has changed")
        work.wait()
