"""What the server has of a remote writer's chunks, and what a message must bring it.

    group opened ──▶ rows sent with the first item that needs them ──▶ closed by the writer ──▶ forgotten when all is confirmed

The rows of an ipc writer lie in memory shared with the server (slots/): only their places travel. A block is offered to the server
while its rows still go through the socket, and used once the server has it, so no writer waits. A server that cannot map it
(another user, another container) is sent the rows.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.replay.table.chunks import ChunkGroup
from shoal.replay.table.columns import Spec
from shoal.replay.table.compression import choose_codec, encode
from shoal.replay.table.descriptions import write_spec
from shoal.slots.memory import LocalMemory

__all__ = ["ChunkUpdate", "Upload", "Uploads"]

ALIGN = 64
SPARE_BLOCKS = 32
SURE_ROWS = 4
"""A codec chosen on fewer rows is chosen again."""


class OfferedBlock:
    """A block of memory for one group at a time, offered to the server."""

    def __init__(self, nbytes: int) -> None:

        memory = LocalMemory(nbytes)
        self.array, self.fd, self.nbytes = memory.array(), memory.fd, nbytes
        self.number = secrets.randbits(62)
        self.offered = False
        self.taken = False

    def forget(self) -> None:
        """The server that it was offered to has gone."""
        self.offered = self.taken = False

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.fd)
        self.fd = -1


class Upload:
    """One group: its rows here, and what of it the server has."""

    def __init__(self, group: ChunkGroup, block: OfferedBlock | None) -> None:
        self.group, self.block = group, block
        self.opened = False
        self.rows = [0] * len(group.specs)
        self.filled: int | None = None  # set when the writer has closed it
        self.close_sent = False
        self.users = 0  # runs of unconfirmed items

    def forget(self) -> None:
        """The server knows nothing of it."""
        self.opened = self.close_sent = False
        self.rows = [0] * len(self.rows)


class ChunkUpdate:
    """The parts of a write message that concern chunks."""

    def __init__(self) -> None:
        self.opens: list[Any] = []
        self.rows: list[Any] = []
        self.closes: list[Any] = []
        self.buffers: list[Any] = []
        self.offers: list[OfferedBlock] = []


class Uploads:
    """The groups of one writer."""

    def __init__(self, shared: bool, compression: str) -> None:
        self.shared, self._compression = shared, compression
        self.groups: dict[int, Upload] = {}
        self.owner: dict[int, int] = {}  # chunk id -> first id of its group
        self._next_chunk = 0
        self._codecs: dict[str, str] = {}
        self._spare: dict[int, list[OfferedBlock]] = {}
        self._spares = 0
        self._closing: list[int] = []  # groups that the writer has closed and the server has not
        self.offers: dict[int, OfferedBlock] = {}  # message number -> the block that it offers
        self.retired: list[int] = []  # blocks that the server should let go

    def open(self, specs: Sequence[Spec], rows: int) -> ChunkGroup:
        first = self._next_chunk
        self._next_chunk += len(specs)
        block, arrays = None, []
        if self.shared:
            sizes = [-(-spec.cell_bytes * rows // ALIGN) * ALIGN for spec in specs]
            block = self._block(sum(sizes))
            at = 0
            for spec, size in zip(specs, sizes, strict=True):
                arrays.append(np.ndarray((rows, *spec.shape), spec.dtype, block.array, at))
                at += size
        else:
            arrays = [np.empty((rows, *spec.shape), spec.dtype) for spec in specs]
        group = ChunkGroup(first, tuple(specs), rows, tuple(arrays))
        self.groups[first] = Upload(group, block)
        for chunk in range(first, first + len(specs)):
            self.owner[chunk] = first
        return group

    def _block(self, nbytes: int) -> OfferedBlock:
        nbytes = max(nbytes, ALIGN)
        spare = self._spare.get(nbytes)
        if spare:
            self._spares -= 1
            return spare.pop()
        return OfferedBlock(nbytes)

    def close(self, first: int, filled: int) -> None:
        self.groups[first].filled = filled
        self._closing.append(first)

    def use(self, first: int, change: int) -> None:
        """Unconfirmed items begin (1) or cease (-1) to need a group."""
        self.groups[first].users += change

    def forget(self) -> None:
        """A server that knows nothing of this writer."""
        for upload in self.groups.values():
            upload.forget()
            if upload.block is not None:
                upload.block.forget()
        for spare in self._spare.values():
            for block in spare:
                block.forget()
        self.offers.clear()
        for first in list(self.groups):
            self.tidy(first)
        self._closing = [first for first, upload in self.groups.items() if upload.filled is not None]

    # -- messages

    def parcel(self, needed: Iterable[tuple[int, int]], groups: Iterable[int], waiting: set[int]) -> ChunkUpdate:
        """Everything the server lacks: chunks and the rows up to an end, and groups that nothing queued needs any more."""
        parcel = ChunkUpdate()
        for first in groups:
            upload = self.groups[first]
            if not upload.opened:
                upload.opened = True
                parcel.opens.append([first, [write_spec(spec) for spec in upload.group.specs], upload.group.rows])
                if upload.block is not None and not upload.block.offered and self.shared:
                    upload.block.offered = True
                    parcel.offers.append(upload.block)
        for chunk, end in needed:
            self._add_rows(parcel, chunk, end)
        self._add_closes(parcel, waiting)
        return parcel

    def _add_closes(self, parcel: ChunkUpdate, waiting: set[int]) -> None:
        later = []
        for first in self._closing:
            upload = self.groups.get(first)
            if upload is None:
                continue
            if first in waiting or not upload.opened:
                later.append(first)
            elif not upload.close_sent:
                upload.close_sent = True
                parcel.closes.append([first, upload.filled])
                self.tidy(first)
        self._closing = later

    def _add_rows(self, parcel: ChunkUpdate, chunk: int, end: int) -> None:
        upload = self.groups[self.owner[chunk]]
        at = chunk - upload.group.first
        start = upload.rows[at]
        if end <= start:
            return
        upload.rows[at] = end
        array, spec, block = upload.group.arrays[at][start:end], upload.group.specs[at], upload.block
        if block is not None and block.taken:
            parcel.rows.append([chunk, start, end - start, "none", block.number, _offset(block.array, array)])
            return
        codec = self._codec(spec, array)
        # A message is sent by zmq's own thread while the writer continues, but rows are never written twice.
        parcel.buffers.append(array.reshape(-1).view(np.uint8) if codec == "none" else encode(array, codec))
        parcel.rows.append([chunk, start, end - start, codec])

    def _codec(self, spec: Spec, array: npt.NDArray[Any]) -> str:
        if self._compression != "auto":
            return "none"
        codec = self._codecs.get(spec.path)
        if codec is None:
            codec = choose_codec(array)
            if len(array) >= SURE_ROWS:
                self._codecs[spec.path] = codec
        return codec

    def answered(self, number: int, refused: bool) -> bool:
        """The server took or refused a block; False if the message was about something else."""
        block = self.offers.pop(number, None)
        if block is None:
            return False
        block.taken = not refused
        self.shared = self.shared and not refused
        return True

    def tidy(self, first: int) -> bool:
        """Forget a closed group that no unconfirmed item needs; False while the server must still be told about its end."""
        upload = self.groups.get(first)
        if upload is None or upload.filled is None or upload.users:
            return True
        if upload.opened and not upload.close_sent:
            return False
        del self.groups[first]
        for chunk in range(first, first + len(upload.group.specs)):
            del self.owner[chunk]
        if upload.block is not None:
            self._keep(upload.block)
        return True

    def _keep(self, block: OfferedBlock) -> None:
        if self._spares < SPARE_BLOCKS and self.shared:
            self._spare.setdefault(block.nbytes, []).append(block)
            self._spares += 1
        else:
            if block.offered:
                self.retired.append(block.number)
            block.close()

    def blocks(self) -> list[OfferedBlock]:
        """All blocks, of groups and spare ones."""
        held = [upload.block for upload in self.groups.values() if upload.block is not None]
        return held + [block for spare in self._spare.values() for block in spare]


def _offset(block: npt.NDArray[np.uint8], array: npt.NDArray[Any]) -> int:
    return int(array.ctypes.data) - int(block.ctypes.data)
