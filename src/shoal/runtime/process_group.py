"""A process group of torch.distributed that a member can leave; the groups of a cluster (gloo) and of GPUs (nccl) use it.

A process group lives for one epoch of its group and is driven by a thread of its own, so that roles wait for it as for
anything else and notice a change of members in the middle of an operation.

gloo notices a dead process within milliseconds (its sockets close) but cannot be interrupted: neither abort() nor deleting
the process group returns while an operation waits for a member that does not come. So a member does not interrupt the group but
leaves it: its thread drops the group, the sockets close, and the operations that other members still wait for fail there. nccl
does not notice a death, but can be aborted: that is how its groups are left.
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

__all__ = ["SUPERVISOR_SECONDS", "Operation", "ProcessGroup", "connect_store", "create_process_group", "create_store"]

OPERATION_SECONDS = 1800.0  # how long to wait for members that live but do not come; the supervisor reports deaths
SUPERVISOR_SECONDS = 60.0   # how long the supervisor may take to name the new members after an operation failed
POLL_SECONDS = 0.0003
PATIENCE = timedelta(seconds=OPERATION_SECONDS)
NCCL = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}  # its watchdogs would end the process


def distributed() -> Any:
    """torch.distributed, imported when it is needed; most of what is used here has no types."""
    import torch.distributed

    return torch.distributed


def create_store(address: str) -> Any:
    """Open the store through which the members find each other; the first member does this."""
    return distributed().TCPStore(address, 0, None, True, PATIENCE, wait_for_workers=False)


def connect_store(address: str, port: int) -> Any:
    return distributed().TCPStore(address, port, None, False, PATIENCE, wait_for_workers=False)


def create_process_group(store: Any, rank: int, size: int, address: str, device: torch.device | None = None) -> Any:
    """Join as a member: through nccl with a GPU, through gloo without one."""
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


class ProcessGroup:
    """The process group of one epoch. `form(left)` creates it in the thread of the group, and gives up when `left` is set."""

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
        while operation.tensor.is_cuda and not work.is_completed():  # wait() would make the GPU wait, for ever
            if self._left.wait(POLL_SECONDS):
                raise RuntimeError("the group changed")
        work.wait()
