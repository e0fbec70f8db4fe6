"""The chunk store: consecutive cells of one column, stored once, counted by tables and writers, freed with the last.

A writer opens a *group*, one chunk for each of its columns with the same number of rows and consecutive ids, and fills the
rows in place. Tables refer to rows as soon as they are written. `close` drops the writer's hold and may encode the rows.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.replay.codec import decode, encode
from shoal.replay.columns import Spec
from shoal.replay.items import Chunks
from shoal.replay.pool import Block, Pool, block_bytes

__all__ = ["ChunkStore", "Group"]

FIRST_CHUNKS = 1024
DECODED_CHUNKS = 256


class Group(NamedTuple):
    """An open group: its first chunk id, the columns, and their rows as arrays to write into."""

    first: int
    specs: tuple[Spec, ...]
    rows: int
    arrays: tuple[npt.NDArray[Any], ...]


class Encoded(NamedTuple):
    codec: str
    data: bytes
    rows: int


class ChunkStore:
    """Chunks of all tables of one server. Not safe for threads: its owner holds a lock."""

    def __init__(self, pool: Pool | None = None, compression: dict[str, str] | None = None) -> None:
        self.pool = pool or Pool()
        self.compression = dict(compression or {})
        self.arrays = Chunks(
            address=np.zeros(FIRST_CHUNKS, np.int64),
            nbytes=np.zeros(FIRST_CHUNKS, np.int64),
            holders=np.zeros(FIRST_CHUNKS, np.int32),
            freed=np.zeros(FIRST_CHUNKS, np.int64),
            freed_count=np.zeros(1, np.int64),
        )
        self.specs: list[Spec | None] = []
        self.rows: list[int] = []
        self._blocks: list[Block | None] = []
        self._first: list[int] = []  # of every id: the first id of its group
        self._left: dict[int, tuple[int, int]] = {}  # first id -> (ids in use, ids)
        self._free: dict[int, list[int]] = {}  # ids -> first ids of groups of that many
        self._encoded: dict[int, Encoded] = {}
        self._decoded: OrderedDict[int, Block] = OrderedDict()
        self._tables: list[Any] = []
        self._limbo: deque[tuple[int, Block]] = deque()
        self._readers: dict[int, int] = {}
        self._clock = 0
        self.live = 0

    @property
    def capacity(self) -> int:
        return int(self.arrays.address.shape[0])

    @property
    def stored_bytes(self) -> int:
        """Bytes of all live chunks, as stored."""
        used = self.arrays.holders[: len(self.specs)] > 0
        return int(self.arrays.nbytes[: len(self.specs)][used].sum())

    def watch(self, table: Any) -> None:
        """Tables are told when the number of chunk ids grows."""
        self._tables.append(table)

    def open(self, specs: Sequence[Spec], rows: int) -> Group:
        """New chunks with room for `rows` cells each; the caller holds them until `close`."""
        count = len(specs)
        free = self._free.get(count)
        first = free.pop() if free else self._extend(count)
        self._left[first] = (count, count)
        self.live += count
        arrays = []
        for at, spec in enumerate(specs):
            block = self._place(first + at, spec, rows, first)
            arrays.append(block.array((rows, *spec.shape), spec.dtype))
        return Group(first, tuple(specs), rows, tuple(arrays))

    def _place(self, chunk: int, spec: Spec, rows: int, first: int) -> Block:
        """Memory for one chunk, held once."""
        block = self.pool.take(spec.cell_bytes * rows)
        self._blocks[chunk], self.specs[chunk], self.rows[chunk] = block, spec, rows
        self._first[chunk] = first
        arrays = self.arrays
        arrays.address[chunk], arrays.holders[chunk] = block.address, 1
        arrays.nbytes[chunk] = spec.cell_bytes * rows
        return block

    def _extend(self, count: int) -> int:
        first = len(self.specs)
        if first + count > self.capacity:
            grown = max(2 * self.capacity, first + count)
            self.arrays = Chunks(*(np.resize(a, grown) if a.shape[0] > 1 else a for a in self.arrays))
            for array in self.arrays[:3]:
                array[first:] = 0
            for table in self._tables:
                table.grow_refs(grown)
        self.specs += [None] * count
        self.rows += [0] * count
        self._blocks += [None] * count
        self._first += [0] * count
        return first

    def close(self, group: Group, filled: int) -> None:
        """The writer has filled so many rows and is done: unused chunks are freed, others shrunk or compressed."""
        holders = self.arrays.holders
        for chunk in range(group.first, group.first + len(group.specs)):
            holders[chunk] -= 1
            if holders[chunk] == 0:
                self._free_chunk(chunk)
                continue
            if filled < group.rows:
                self._shrink(chunk, filled)
            if self.compression and (codec := self.compression.get(group.specs[chunk - group.first].path)):
                self._compress(chunk, codec)

    def _shrink(self, chunk: int, filled: int) -> None:
        """Move the filled rows of a half-empty chunk to a smaller block."""
        spec, block = self.specs[chunk], self._blocks[chunk]
        assert spec is not None and block is not None
        if block_bytes(filled * spec.cell_bytes) > 0.75 * block.slab.size:
            return
        smaller = self.pool.take(filled * spec.cell_bytes)
        smaller.array((filled, *spec.shape), spec.dtype)[...] = self.array(chunk)[:filled]
        self._blocks[chunk], self.rows[chunk] = smaller, filled
        self.arrays.address[chunk] = smaller.address
        self._resize(chunk, filled * spec.cell_bytes)
        self._retire(block)

    def drop(self, chunks: Iterable[int]) -> None:
        """Let go of chunks held one by one."""
        for chunk in chunks:
            self.arrays.holders[chunk] -= 1
            if self.arrays.holders[chunk] == 0:
                self._free_chunk(chunk)

    def collect(self) -> None:
        """Free what compiled code listed as freed."""
        count = int(self.arrays.freed_count[0])
        if count:
            self.arrays.freed_count[0] = 0
            for chunk in self.arrays.freed[:count].tolist():
                self._free_chunk(chunk)

    def _free_chunk(self, chunk: int) -> None:
        block = self._blocks[chunk]
        if block is not None:
            self._retire(block)
            self._blocks[chunk] = None
        else:
            self._encoded.pop(chunk, None)
            decoded = self._decoded.pop(chunk, None)
            if decoded is not None:
                self._retire(decoded)
        self.specs[chunk] = None
        self.live -= 1
        first = self._first[chunk]
        used, count = self._left[first]
        if used == 1:
            del self._left[first]
            self._free.setdefault(count, []).append(first)
        else:
            self._left[first] = (used - 1, count)

    # Readers copy without the lock: blocks freed meanwhile wait until every reader that may see them has finished.

    def begin_read(self) -> int:
        self._readers[self._clock] = self._readers.get(self._clock, 0) + 1
        return self._clock

    def end_read(self, ticket: int) -> None:
        self._readers[ticket] -= 1
        if not self._readers[ticket]:
            del self._readers[ticket]
        oldest = min(self._readers, default=None)
        while self._limbo and (oldest is None or self._limbo[0][0] < oldest):
            self.pool.give(self._limbo.popleft()[1])

    def _retire(self, block: Block) -> None:
        if self._readers:
            self._limbo.append((self._clock, block))
            self._clock += 1
        else:
            self.pool.give(block)

    def array(self, chunk: int) -> npt.NDArray[Any]:
        """The rows of a chunk, decompressed where needed."""
        spec = self.specs[chunk]
        assert spec is not None, f"chunk {chunk} was freed"
        block = self._blocks[chunk] or self._decoded.get(chunk) or self._decompress(chunk)
        return block.array((self.rows[chunk], *spec.shape), spec.dtype)

    def _compress(self, chunk: int, codec: str) -> None:
        array = self.array(chunk)
        data = encode(array, codec)
        block = self._blocks[chunk]
        if block is None or len(data) >= array.nbytes:
            return
        self._encoded[chunk] = Encoded(codec, data, self.rows[chunk])
        self._resize(chunk, len(data))
        self.arrays.address[chunk] = 0
        self._blocks[chunk] = None
        self._retire(block)

    def _resize(self, chunk: int, nbytes: int) -> None:
        """Correct the bytes that tables count for a chunk."""
        change = nbytes - int(self.arrays.nbytes[chunk])
        self.arrays.nbytes[chunk] = nbytes
        for table in self._tables:
            table.chunk_resized(chunk, change)

    def _decompress(self, chunk: int) -> Block:
        spec, encoded = self.specs[chunk], self._encoded[chunk]
        assert spec is not None
        block = self.pool.take(spec.cell_bytes * encoded.rows)
        decode(encoded.data, encoded.codec, block.array((encoded.rows, *spec.shape), spec.dtype))
        self._decoded[chunk] = block
        self.arrays.address[chunk] = block.address
        return block

    # Checkpoints see groups of chunks, some of whose members may be gone.

    def groups(self) -> Iterator[tuple[int, list[int | None]]]:
        """The first id of every live group and its members, None for those that were freed."""
        for first, (_, count) in self._left.items():
            yield first, [c if self.specs[c] is not None else None for c in range(first, first + count)]

    def stored(self, chunk: int) -> tuple[Spec, int, str, Any]:
        """A chunk's cell, rows, codec and bytes; the bytes stay valid while a reader is registered."""
        spec = self.specs[chunk]
        assert spec is not None
        encoded = self._encoded.get(chunk)
        if encoded is not None:
            return spec, encoded.rows, encoded.codec, encoded.data
        raw: Any = self.array(chunk).reshape(-1).view(np.uint8)
        return spec, self.rows[chunk], "none", memoryview(raw)

    def restore(self, specs: Sequence[Spec | None], rows: Sequence[int]) -> int:
        """A group as `groups` described it, its live members held by the caller; returns its first id."""
        first = self._extend(len(specs))
        live = [at for at, spec in enumerate(specs) if spec is not None]
        self._left[first] = (len(live), len(specs))
        self.live += len(live)
        for at in live:
            spec = specs[at]
            assert spec is not None
            self._place(first + at, spec, rows[at], first)
        return first

    def fill(self, chunk: int, codec: str, data: bytes) -> None:
        """Write the rows of a restored chunk."""
        array = self.array(chunk)
        if codec == "none":
            array.reshape(-1).view(np.uint8)[:] = np.frombuffer(data, np.uint8)
            return
        decode(data, codec, array)
        if self.compression.get(self.specs[chunk].path) == codec:  # type: ignore[union-attr]
            self._compress(chunk, codec)

    def materialize(self, chunks: Iterable[int]) -> None:
        """Make encoded chunks readable by compiled code."""
        for chunk in chunks:
            if chunk in self._decoded:
                self._decoded.move_to_end(chunk)
            elif chunk in self._encoded:
                self._decompress(chunk)

    def trim(self) -> None:
        """Forget the longest unused decompressed copies."""
        while len(self._decoded) > DECODED_CHUNKS:
            chunk, block = self._decoded.popitem(last=False)
            self.arrays.address[chunk] = 0
            self._retire(block)
