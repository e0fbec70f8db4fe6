"""Copies between host memory and a GPU, in the background and from page-locked memory: at the full speed of the bus.

    PinnedUploader   staging buffer --> GPU, all fields of a batch
    StagedBlock      small arrays of fixed shapes --> GPU, as one copy
    DirectSlotCopy   slots of a stream --> GPU, the large fields: they are never gathered on the host
    HostCopy         parameters --> host, to be published while the next update runs
    to_host          small tensors --> host; a DeviceEvent says when they have arrived
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from shoal.core import DirectCopy, Tree
from shoal.slots import Layout, leaves, map_tree

__all__ = ["DeviceEvent", "DirectSlotCopy", "HostCopy", "PinnedUploader", "StagedBlock", "one_block", "to_device", "to_host",
           "views_of"]

MAX_LOCKED = 16  # buffers of one locker; a stream has three for each size of batch
MIN_LOCKED_BYTES = 1 << 16
STAGES = 3
ALIGN = 64              # bytes, of tensors in a block
MOST_WASTE = 1.5  # of a block that travels whole: its size against that of what is needed of it


class PageLocker:
    """Locks the large buffers behind arrays, once each, and keeps them alive: so no address is ever another buffer's."""

    _locked: ClassVar[dict[int, np.ndarray]] = {}  # by all of this process: what is locked twice is an error to CUDA

    def __init__(self) -> None:
        self._count = 0

    def lock(self, array: np.ndarray) -> None:
        root = _root(array)
        address = root.ctypes.data
        if address in self._locked or self._count >= MAX_LOCKED or root.nbytes < MIN_LOCKED_BYTES:
            return
        self._locked[address] = root
        self._count += 1
        refused = int(torch.cuda.cudart().cudaHostRegister(address, root.nbytes, 0))
        if refused:  # copies are slower, and still right
            sys.stderr.write(f"{root.nbytes:,} bytes could not be page-locked (CUDA error {refused}): copies will be slower\n")


class PinnedUploader:
    """Copies arrays to a GPU on a CUDA stream of its own. The main stream waits for the copies; the host does not."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._locker = device, PageLocker()
        self._side = torch.cuda.Stream(device)
        self._copied, self._unread = torch.cuda.Event(blocking=True), False

    def tensor(self, array: np.ndarray | torch.Tensor) -> torch.Tensor:
        if isinstance(array, torch.Tensor):
            return array.to(self._device)
        self._unread = True
        self._locker.lock(array)
        main = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._side):
            moved = torch.from_numpy(array).to(self._device, non_blocking=True)
        main.wait_stream(self._side)
        moved.record_stream(main)
        return moved

    def tree(self, arrays: Tree) -> Tree:
        """All arrays of a tree. Those of a batch from a table lie in one block of memory: they travel as one copy."""
        block = one_block([array for _, array in leaves(arrays)])
        return map_tree(self.tensor, arrays) if block is None else views_of(self.tensor(block), block, arrays)

    def wait(self) -> None:
        """Wait until the arrays have been read and may be overwritten."""
        if self._unread:
            self._copied.record(self._side)
            self._copied.synchronize()
            self._unread = False


class StagedBlock:
    """Small tensors of fixed shapes that lie side by side on a device: one copy brings new values for all of them.

    The host writes them to one of three page-locked buffers, so it need not wait for the copies before. On a CPU it writes them
    where they belong.
    """

    def __init__(self, like: Sequence[torch.Tensor], device: torch.device) -> None:
        sizes = [-(-tensor.nbytes // ALIGN) * ALIGN for tensor in like]
        starts, total = np.cumsum([0, *sizes]).tolist(), sum(sizes)

        def views(block: torch.Tensor) -> list[torch.Tensor]:
            return [block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                    for start, tensor in zip(starts, like, strict=False)]

        self._block = torch.zeros(total, dtype=torch.uint8, device=device)
        self.tensors = views(self._block)
        self._stages: deque[tuple[torch.Tensor, list[torch.Tensor], torch.cuda.Event]] = deque()
        if device.type == "cuda":
            for _ in range(STAGES):
                host = torch.zeros(total, dtype=torch.uint8, pin_memory=True)
                self._stages.append((host, views(host), torch.cuda.Event(blocking=True)))

    def put(self, values: Sequence[torch.Tensor | float]) -> None:
        """Kernels that are launched from now on read these values."""
        if not self._stages:
            _write(self.tensors, values)
            return
        host, views, copied = self._stages[0]
        self._stages.rotate(-1)
        copied.synchronize()  # the copy of three calls ago
        _write(views, values)
        self._block.copy_(host, non_blocking=True)
        copied.record()


def _write(into: Sequence[torch.Tensor], values: Sequence[torch.Tensor | float]) -> None:
    for view, value in zip(into, values, strict=True):
        view.copy_(value) if isinstance(value, torch.Tensor) else view.fill_(value)


def one_block(arrays: Sequence[Any]) -> np.ndarray | None:
    """The bytes of the memory that these arrays lie in, if that is one block without much else in it."""
    if len(arrays) < 2 or not all(isinstance(array, np.ndarray) and array.flags.c_contiguous for array in arrays):
        return None
    root = _root(arrays[0])
    if not root.flags.c_contiguous or any(_root(array) is not root for array in arrays):
        return None
    starts = [array.ctypes.data for array in arrays]
    low, high = min(starts), max(start + array.nbytes for start, array in zip(starts, arrays, strict=True))
    if high - low > MOST_WASTE * sum(array.nbytes for array in arrays):
        return None
    if any((start - low) % array.itemsize for start, array in zip(starts, arrays, strict=True)):
        return None
    first = low - root.ctypes.data
    block: np.ndarray = root.reshape(-1).view(np.uint8)[first : first + high - low]
    return block


def views_of(moved: torch.Tensor, block: np.ndarray, arrays: Tree) -> Tree:
    """The same tree over a copy of the block that its arrays lie in."""
    start = block.ctypes.data

    def view(array: np.ndarray) -> torch.Tensor:
        first = array.ctypes.data - start
        like = torch.from_numpy(np.empty(0, array.dtype)).dtype
        return moved[first : first + array.nbytes].view(like).view(array.shape)

    return map_tree(view, arrays)


def _root(array: Any) -> Any:
    """The array whose memory this one is a part of."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


class DirectSlotCopy(DirectCopy):
    """Copies the large fields of a batch to a GPU straight from the slots of a stream."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.fields = tuple(name for name in ("observation", "final_observation") if name in layout.fields)
        self._layout, self._device, self._locker = layout, device, PageLocker()
        self._side = torch.cuda.Stream(device)
        self._stages: dict[int, deque[Tree]] = {}
        self._stage: Tree = None
        self._copied = torch.cuda.Event(blocking=True)

    def begin(self, count: int) -> None:
        """Take the next of three sets of buffers: the two batches before stay intact."""
        stages = self._stages.setdefault(count, deque())
        if len(stages) < STAGES:
            joined = self._layout.joined(count).fields
            stages.append({name: map_tree(self._blank, joined[name]) for name in self.fields})
        else:
            stages.rotate(-1)
        self._stage = stages[-1]

    def _blank(self, field: Any) -> torch.Tensor:
        return torch.from_numpy(np.empty(0, field.dtype)).new_empty(field.shape, device=self._device)

    def copy(self, position: int, slot: Tree) -> None:
        def put(target: torch.Tensor, source: np.ndarray) -> None:
            self._locker.lock(source)
            width = source.shape[1]  # of a sequence [T + 1, B, ...], joined along B
            target[:, position * width : (position + 1) * width].copy_(torch.from_numpy(source), non_blocking=True)

        def put_rows(target: torch.Tensor, source: np.ndarray) -> None:
            start = position * len(source)
            target[start : start + finals].copy_(torch.from_numpy(source[:finals]), non_blocking=True)

        finals = int(slot["final_index"].max()) + 1 if "final_observation" in self.fields else 0  # rarely any
        with torch.cuda.stream(self._side):
            map_tree(put, self._stage["observation"], slot["observation"])
            if finals:
                map_tree(put_rows, self._stage["final_observation"], slot["final_observation"])

    def finish(self) -> Tree:
        """The batch's fields. The current stream waits for the copies; the host does not."""
        self._copied.record(self._side)
        torch.cuda.current_stream(self._device).wait_event(self._copied)
        return self._stage

    def wait(self) -> None:
        """Wait until the slots have been read and may be overwritten."""
        self._copied.record(self._side)
        self._copied.synchronize()


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A small tensor on the device, without waiting. From pageable memory the host would wait for all work queued on the GPU."""
    if tensor.is_cuda or device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)  # PyTorch keeps that memory until it has been read


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Start a copy to the host. Read it once a DeviceEvent recorded later has passed: `tensor.cpu()` would wait for all work
    queued on the GPU."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return host


class DeviceEvent:
    """A point in a device's queue of work: `wait` until the device has reached it. On a CPU there is nothing to wait for."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(blocking=True) if device.type == "cuda" else None
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class HostCopy:
    """Copies a tensor to the host in the background. There are two host buffers, so two copies may be under way.

    On a CPU the same code runs without events.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self._host = [torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda) for _ in range(2)]
        self._events = [torch.cuda.Event(blocking=True) for _ in range(2)] if like.is_cuda else []
        self._side = torch.cuda.Stream(like.device) if like.is_cuda else None
        self._turn = 0

    def start(self, tensor: torch.Tensor) -> int:
        """Start the copy; `result` takes the number it returns. Do not write to `tensor` afterwards."""
        self._turn = 1 - self._turn
        if self._side is None:
            self._host[self._turn].copy_(tensor)
            return self._turn
        self._side.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._side):
            self._host[self._turn].copy_(tensor, non_blocking=True)
            self._events[self._turn].record()
        tensor.record_stream(self._side)
        return self._turn

    def result(self, turn: int) -> np.ndarray:
        """Wait for the copy. The array is overwritten two copies later."""
        if self._events:
            self._events[turn].synchronize()
        return self._host[turn].numpy()
