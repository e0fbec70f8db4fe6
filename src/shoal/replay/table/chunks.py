"""The chunk store: consecutive cells of one column, stored once, counted by tables and writers, freed with the last.

A writer opens a *group*, one chunk for each of its columns with the same number of rows and consecutive ids, and fills the
rows in place. Tables refer to rows as soon as they are written. `close` drops the writer's hold and may encode the rows.
Small columns of a group lie side by side in one block: a step of them is then one cache miss, not one for each.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.errors import ConfigError
from shoal.replay.table.arrays import ChunkArrays
from shoal.replay.table.columns import Spec
from shoal.replay.table.compression import CODECS, ROWS, decode, decode_rows, encode
from shoal.replay.table.memory_pool import MemoryPool, SlabBlock

__all__ = ["ChunkGroup", "ChunkStore"]

CHUNK_BYTES = 1 << 20
"""The bytes of a group of chunks, about; less where a table may hold less than eight of them."""
FIRST_CHUNKS = 1024
DECODED_CHUNKS, DECODED_BYTES = 256, 1 << 26
"""Decompressed copies that are kept for the next batch, and the most that they may take together."""
SMALL_BYTES = 64
"""Cells up to this size lie side by side with the other small ones of their step."""


class ChunkGroup(NamedTuple):
    """An open group: its first chunk id, the columns, and their rows as arrays to write into."""

    first: int
    specs: tuple[Spec, ...]
    rows: int
    arrays: tuple[npt.NDArray[Any], ...]


class RowLocation(NamedTuple):
    """Where the rows of a chunk lie: in a block of their own, or side by side with those of other columns."""

    block: SlabBlock
    offset: int
    stride: int

    @property
    def address(self) -> int:
        return self.block.address + self.offset

    def array(self, rows: int, spec: Spec) -> npt.NDArray[Any]:
        """The rows; the array keeps the block's memory mapped."""
        return self.block.array((rows, *spec.shape), spec.dtype, self.offset, self.stride)


class Encoded(NamedTuple):
    codec: str
    data: bytes
    rows: int


class ChunkStore:
    """The chunks of all tables of one server. Not safe for threads: its owner holds a lock."""

    def __init__(self, pool: MemoryPool | None = None, compression: dict[str, str] | None = None) -> None:
        self.pool = pool or MemoryPool()
        self.compression = dict(compression or {})
        if unknown := set(self.compression.values()) - set(CODECS):
            raise ConfigError(f"unknown compression {sorted(unknown)}; choose from {CODECS}")
        self.arrays = ChunkArrays(
            address=np.zeros(FIRST_CHUNKS, np.int64),
            stride=np.zeros(FIRST_CHUNKS, np.int64),
            nbytes=np.zeros(FIRST_CHUNKS, np.int64),
            holders=np.zeros(FIRST_CHUNKS, np.int32),
            freed=np.zeros(FIRST_CHUNKS, np.int64),
            freed_count=np.zeros(1, np.int64),
        )
        self.specs: list[Spec | None] = []
        self.rows: list[int] = []
        self._places: list[RowLocation | None] = []
        self._first: list[int] = []  # of every id: the first id of its group
        self._left: dict[int, tuple[int, int]] = {}  # first id -> (ids in use, ids)
        self._free: dict[int, list[int]] = {}  # ids -> first ids of groups of that many
        self._encoded: dict[int, Encoded] = {}
        self._decoded: OrderedDict[int, RowLocation] = OrderedDict()
        self._decoded_bytes = 0
        self._tables: list[Any] = []
        self._limbo: deque[tuple[int, SlabBlock]] = deque()
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

    def open(self, specs: Sequence[Spec], rows: int) -> ChunkGroup:
        """New chunks with room for `rows` cells each; the caller holds them until `close`."""
        count, places = len(specs), self._take(specs, rows)
        free = self._free.get(count)
        first = free.pop() if free else self._extend(count)
        self._left[first] = (count, count)
        self.live += count
        arrays = []
        for at, (spec, place) in enumerate(zip(specs, places, strict=True)):
            self._put(first + at, spec, rows, first, place)
            arrays.append(place.array(rows, spec))
        return ChunkGroup(first, tuple(specs), rows, tuple(arrays))

    def _take(self, specs: Sequence[Spec], rows: int) -> list[RowLocation]:
        """Memory for the chunks of one group."""
        small = [at for at, spec in enumerate(specs) if spec.cell_bytes <= SMALL_BYTES and spec.path not in self.compression]
        small.sort(key=lambda at: -specs[at].dtype.alignment)  # the strictest first: every cell is then aligned
        found: dict[int, RowLocation] = {}
        if len(small) > 1:
            width = specs[small[0]].dtype.alignment
            stride = -(-sum(specs[at].cell_bytes for at in small) // width) * width
            block, offset = self.pool.take(stride * rows), 0
            block.users = len(small)
            for at in small:
                found[at] = RowLocation(block, offset, stride)
                offset += specs[at].cell_bytes
        for at, spec in enumerate(specs):
            if at not in found:
                found[at] = RowLocation(self.pool.take(spec.cell_bytes * rows), 0, spec.cell_bytes)
        return [found[at] for at in range(len(specs))]

    def _put(self, chunk: int, spec: Spec, rows: int, first: int, place: RowLocation) -> None:
        """A new chunk, held once."""
        self.specs[chunk], self._first[chunk] = spec, first
        self.arrays.holders[chunk], self.arrays.nbytes[chunk] = 1, spec.cell_bytes * rows
        self._move(chunk, place, rows)

    def _move(self, chunk: int, place: RowLocation, rows: int) -> None:
        self._places[chunk], self.rows[chunk] = place, rows
        self.arrays.address[chunk], self.arrays.stride[chunk] = place.address, place.stride

    def _extend(self, count: int) -> int:
        first = len(self.specs)
        if first + count > self.capacity:
            grown = max(2 * self.capacity, first + count)
            self.arrays = ChunkArrays(*(np.resize(a, grown) if a.shape[0] > 1 else a for a in self.arrays))
            for array in self.arrays[:4]:
                array[first:] = 0
            for table in self._tables:
                table.grow_refs(grown)
        self.specs += [None] * count
        self.rows += [0] * count
        self._places += [None] * count
        self._first += [0] * count
        return first

    def close(self, group: ChunkGroup, filled: int) -> None:
        """The writer has filled `filled` rows and is done: unused chunks are freed, others shrunk or compressed."""
        holders = self.arrays.holders
        kept = []
        for chunk in range(group.first, group.first + len(group.specs)):
            holders[chunk] -= 1
            if holders[chunk] == 0:
                self._free_chunk(chunk)
            else:
                kept.append(chunk)
        if kept and filled <= 0.75 * group.rows:
            self._shrink(kept, [group.specs[chunk - group.first] for chunk in kept], filled)
        if self.compression:
            for chunk in kept:
                codec = self.compression.get(group.specs[chunk - group.first].path, "none")
                if codec != "none":
                    self._compress(chunk, codec)

    def _shrink(self, chunks: Sequence[int], specs: Sequence[Spec], filled: int) -> None:
        """Move the filled rows of chunks with much room to smaller blocks."""
        for chunk, spec, place in zip(chunks, specs, self._take(specs, filled), strict=True):
            place.array(filled, spec)[...] = self.array(chunk)[:filled]
            old = self._places[chunk]
            assert old is not None
            self._move(chunk, place, filled)
            self._resize(chunk, filled * spec.cell_bytes)
            self._retire(old)

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
        place = self._places[chunk]
        if place is not None:
            self._retire(place)
            self._places[chunk] = None
        else:
            self._encoded.pop(chunk, None)
            if chunk in self._decoded:
                self._forget(chunk)
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

    def _retire(self, place: RowLocation) -> None:
        block = place.block
        block.users -= 1
        if block.users:
            return
        if self._readers:
            self._limbo.append((self._clock, block))
            self._clock += 1
        else:
            self.pool.give(block)

    def array(self, chunk: int) -> npt.NDArray[Any]:
        """The rows of a chunk, decompressed where needed."""
        spec = self.specs[chunk]
        assert spec is not None, f"chunk {chunk} was freed"
        place = self._places[chunk] or self._decoded.get(chunk) or self._decompress(chunk)
        return place.array(self.rows[chunk], spec)

    def _compress(self, chunk: int, codec: str) -> None:
        array = self.array(chunk)
        if array.dtype.kind not in "iub":
            codec = codec.removesuffix("+delta")  # differences are for integers
        data = encode(array, codec)
        if len(data) < array.nbytes:
            self._hold(chunk, codec, data)

    def _hold(self, chunk: int, codec: str, data: bytes) -> None:
        """Keep a chunk's rows in this form only."""
        place = self._places[chunk]
        if place is None:
            return
        self._encoded[chunk] = Encoded(codec, data, self.rows[chunk])
        self._resize(chunk, len(data))
        self.arrays.address[chunk] = 0
        self._places[chunk] = None
        self._retire(place)

    def _resize(self, chunk: int, nbytes: int) -> None:
        """Correct the bytes that tables count for a chunk."""
        change = nbytes - int(self.arrays.nbytes[chunk])
        self.arrays.nbytes[chunk] = nbytes
        for table in self._tables:
            table.chunk_resized(chunk, change)

    def _decompress(self, chunk: int) -> RowLocation:
        spec, encoded = self.specs[chunk], self._encoded[chunk]
        assert spec is not None
        place = RowLocation(self.pool.take(spec.cell_bytes * encoded.rows), 0, spec.cell_bytes)
        decode(encoded.data, encoded.codec, place.array(encoded.rows, spec))
        self._decoded[chunk] = place
        self._decoded_bytes += place.block.slab.size
        self.arrays.address[chunk], self.arrays.stride[chunk] = place.address, place.stride
        return place

    def _forget(self, chunk: int) -> None:
        """Let go of a decompressed copy."""
        place = self._decoded.pop(chunk)
        self._decoded_bytes -= place.block.slab.size
        self.arrays.address[chunk] = 0
        self._retire(place)

    # Checkpoints see groups of chunks, some of whose members may be gone.

    def groups(self) -> Iterator[tuple[int, list[int | None]]]:
        """The first id of every live group and its members, None for those that were freed."""
        for first, (_, count) in self._left.items():
            yield first, [c if self.specs[c] is not None else None for c in range(first, first + count)]

    def stored(self, chunk: int) -> tuple[Spec, int, str, Any]:
        """A chunk's cell, rows, codec, and bytes or an array; its rows stay valid while a reader is registered."""
        spec = self.specs[chunk]
        assert spec is not None
        encoded = self._encoded.get(chunk)
        if encoded is not None:
            return spec, encoded.rows, encoded.codec, encoded.data
        return spec, self.rows[chunk], "none", self.array(chunk)

    def restore(self, specs: Sequence[Spec | None], rows: Sequence[int]) -> int:
        """A group as `groups` described it, its live members held by the caller; returns its first id."""
        first = self._extend(len(specs))
        live = [at for at, spec in enumerate(specs) if spec is not None]
        self._left[first] = (len(live), len(specs))
        self.live += len(live)
        for count in {rows[at] for at in live}:
            alike = [(at, spec) for at, spec in enumerate(specs) if spec is not None and rows[at] == count]
            for (at, spec), place in zip(alike, self._take([spec for _, spec in alike], count), strict=True):
                self._put(first + at, spec, count, first, place)
        return first

    def fill(self, chunk: int, codec: str, data: bytes) -> None:
        """Write the rows of a restored chunk, and compress them as this store does."""
        array, spec = self.array(chunk), self.specs[chunk]
        assert spec is not None
        if codec == "none":
            array[...] = np.frombuffer(data, array.dtype).reshape(array.shape)
        else:
            rows = np.empty_like(array, order="C")
            decode(data, codec, rows)
            array[...] = rows
        wanted = self.compression.get(spec.path, "none")
        if wanted == codec != "none":
            self._hold(chunk, codec, data)  # as it was saved
        elif wanted != "none":
            self._compress(chunk, wanted)

    def materialize(self, chunks: Iterable[int]) -> None:
        """Make encoded chunks readable by compiled code; those whose rows were compressed by themselves are for `decode_rows`."""
        for chunk in chunks:
            if chunk in self._decoded:
                self._decoded.move_to_end(chunk)
            elif chunk in self._encoded and not self._encoded[chunk].codec.endswith(ROWS):
                self._decompress(chunk)

    def decode_rows(self, plan: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Carry out the rows of a plan whose chunks are encoded (gather_plan.py). Each cell is decompressed once, to the first
        place that wants it; returns the copies that bring it to the others."""
        counts = plan[:, 2]
        of, cell = np.repeat(np.arange(len(plan)), counts), np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        chunks = -1 - plan[of, 1]
        numbers, kinds = np.unique(chunks, return_inverse=True)
        sizes = np.array([spec.cell_bytes for number in numbers.tolist() if (spec := self.specs[number]) is not None])[kinds]
        to, row = plan[of, 0] + cell * sizes, plan[of, 3] + cell * plan[of, 4]
        cells, first, same = np.unique(chunks << 32 | row, return_index=True, return_inverse=True)
        ends = np.searchsorted(cells, (numbers + 1) << 32)
        for number, begin, end in zip(numbers.tolist(), [0, *ends[:-1].tolist()], ends.tolist(), strict=True):
            encoded, there = self._encoded[number], first[begin:end]
            nbytes, rows = int(sizes[there[0]]), row[there].tolist()
            for address, data in zip(to[there].tolist(), decode_rows(encoded.data, encoded.codec, rows, nbytes), strict=True):
                ctypes.memmove(address, data, nbytes)
        again = first[same] != np.arange(len(same))
        size = sizes[again]
        return np.stack([to[again], to[first[same]][again], np.ones_like(size), size, size], 1)

    def trim(self) -> None:
        """Forget the longest unused decompressed copies."""
        while len(self._decoded) > DECODED_CHUNKS or self._decoded_bytes > DECODED_BYTES:
            self._forget(next(iter(self._decoded)))
