"""What the service keeps for one writer: its open groups, and its messages in the order they came."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.replay.errors import InvalidItem, Refused, ReplayError
from shoal.replay.service.messages import MOST_MESSAGE_BYTES, error_fields, field, read_array
from shoal.replay.service.shared_memory import SharedBlocks
from shoal.replay.table.chunks import ChunkGroup
from shoal.replay.table.columns import Column, Spec
from shoal.replay.table.compression import CODECS, LZ4_RATIO, check_encoded, decode
from shoal.replay.table.descriptions import MOST_COLUMNS, check_records, columns_of, reach, read_columns, read_spec
from shoal.replay.table.replay_core import Core, PendingInserts

__all__ = ["WriteRequest", "WriterSession"]

MOST_GROUPS = 4096
MOST_WAITING_WRITES, MOST_WAITING_BYTES = 4096, 1 << 28
"""One writer's messages that wait for a limiter, and their bytes. An honest one has eight of about a megabyte under way."""
FIRST_TRY_SECONDS = 0.5  # less than the client's timings.GRACE_SECONDS


class WriterSession:
    """One writer's connection, as the server sees it."""

    def __init__(self, writer: int, lost: int) -> None:
        self.writer, self.lost = writer, lost
        self.serial = secrets.randbits(62)  # tells a new session from one that was forgotten
        self.groups: dict[int, ChunkGroup] = {}  # the writer's first id -> the store's group
        self.chunks: dict[int, tuple[ChunkGroup, int]] = {}  # the writer's chunk id -> group, column
        self.used: dict[int, int] = {}  # the writer's first id -> one past the last row that items refer to
        self.writes: deque[WriteRequest] = deque()
        self.seen = time.monotonic()

    def drop(self, core: Core) -> None:
        """Give back the groups that the writer holds open."""
        for group in self.groups.values():
            core.store.close(group, group.rows)
        self.groups.clear()
        self.chunks.clear()
        self.used.clear()
        for write in self.writes:
            write.unblock()
        self.writes.clear()

    def check_room(self, write: WriteRequest) -> None:
        """Refuse a message where too many of this writer already wait."""
        waiting = sum(other.nbytes for other in self.writes)
        if self.writes and (len(self.writes) >= MOST_WAITING_WRITES or waiting + write.nbytes > MOST_WAITING_BYTES):
            raise Refused(f"{len(self.writes)} messages of {waiting} bytes of this writer already wait for a limiter")

    def open(self, first: int, group: ChunkGroup) -> None:
        self.groups[first] = group
        for at in range(len(group.specs)):
            self.chunks[first + at] = (group, at)

    def close(self, core: Core, first: int, filled: int) -> None:
        group = self.groups.pop(first)
        self.used.pop(first, None)
        for at in range(len(group.specs)):
            del self.chunks[first + at]
        core.store.close(group, filled)


class WriteRequest:
    """One write message: chunks to open, rows, items and chunks to close. Checked as a whole before it changes anything."""

    def __init__(
        self, session: WriterSession, header: dict[str, Any], buffers: list[Any], deadline: float,
        shared: SharedBlocks | None = None,
    ) -> None:  # fmt: skip
        self.session, self.deadline, self._shared = session, deadline, shared
        self.id = field(header, "id", int, 0)
        self.wants_keys = bool(header.get("keys"))
        self.refused: list[tuple[int, str, str]] = []  # number, kind of error, reason
        self.keys: list[npt.NDArray[np.int64]] = []
        self.inserted = 0
        self._blocked_by: Any = None  # the limiter that it waits for
        self._steps: Iterator[bool] | None = None
        self._buffers = iter(buffers)
        self._decoded = 0  # bytes of the rows that were compressed
        self._used: dict[int, int] = {}  # of groups: one past the last row that items of this message refer to
        self._opened: dict[int, tuple[int, Spec, int]] = {}  # chunks that this message opens: first id of the group, cell, rows
        self.nbytes = 0  # of the items, which stay in memory while they wait
        self._opens = self._read_opens(field(header, "opens", list))
        self._rows = self._read_rows(field(header, "rows", list))
        self._items = [self._read_item(entry) for entry in field(header, "items", list)]
        self._closes = self._read_closes(field(header, "closes", list))
        if next(self._buffers, None) is not None:
            raise Refused("a message has more buffers than it announces")

    def _next(self) -> Any:
        buffer = next(self._buffers, None)
        if buffer is None:
            raise Refused("a message has fewer buffers than it announces")
        return buffer

    def _read_opens(self, entries: list[Any]) -> list[tuple[int, list[Any], int]]:
        if len(self.session.groups) + len(entries) > MOST_GROUPS:
            raise Refused(f"a writer has at most {MOST_GROUPS} open groups")
        opens: list[tuple[int, list[Any], int]] = []
        for entry in entries:
            if not (isinstance(entry, list) and len(entry) == 3 and isinstance(entry[1], list)):
                raise Refused("an opened group is [first id, columns, rows]")
            first, specs, rows = entry
            if type(first) is not int or not 0 <= first < 1 << 31 or type(rows) is not int or not 1 <= rows < 1 << 24:
                raise Refused("an opened group has a bad id or number of rows")
            if not 1 <= len(specs) <= MOST_COLUMNS:
                raise Refused(f"a group has 1 to {MOST_COLUMNS} columns")
            known = [read_spec(spec) for spec in specs]
            if sum(spec.cell_bytes for spec in known) * rows > MOST_MESSAGE_BYTES:
                raise Refused("an opened group is too large")
            for chunk, spec in enumerate(known, first):
                if chunk in self.session.chunks or chunk in self._opened:
                    raise Refused("an opened group has ids in use")
                self._opened[chunk] = first, spec, rows
            opens.append((first, known, rows))
        return opens

    def _shape(self, chunk: int) -> tuple[Any, int]:
        """The cell and rows of one of the writer's chunks, also of those that this message opens."""
        found = self.session.chunks.get(chunk)
        if found is not None:
            return found[0].specs[found[1]], found[0].rows
        if chunk not in self._opened:
            raise InvalidItem(f"chunk {chunk} is not open")
        return self._opened[chunk][1:]

    def _read_rows(self, entries: list[Any]) -> list[tuple[int, int, npt.NDArray[Any]]]:
        rows = []
        for entry in entries:
            if not (isinstance(entry, list) and len(entry) in (4, 6) and all(type(n) is int for n in (*entry[:3], *entry[4:]))):
                raise Refused("rows are [chunk, first row, count, codec] or [..., shared block, offset]")
            chunk, start, count, codec = entry[:4]
            spec, capacity = self._shape(chunk)
            if not (start >= 0 and count >= 1 and start + count <= capacity) or codec not in CODECS:
                raise Refused("rows are outside their chunk, or of an unknown codec")
            shape = (count, *spec.shape)
            if len(entry) == 6:
                if self._shared is None or codec != "none":
                    raise Refused("shared rows are for ipc:// clients, and not compressed")
                raw = self._shared.piece(entry[4], entry[5], count * spec.cell_bytes)
                rows.append((chunk, start, np.ndarray(shape, spec.dtype, raw)))
                continue
            buffer = self._next()
            if codec == "none":
                array = read_array(buffer, np.uint8, count * spec.cell_bytes).view(spec.dtype).reshape(shape)
            else:
                array = self._decompress(buffer, codec, shape, spec)
            rows.append((chunk, start, array))
        return rows

    def _decompress(self, buffer: Any, codec: str, shape: tuple[int, ...], spec: Spec) -> npt.NDArray[Any]:
        """Rows of a buffer. A message must not become much larger than it is: clients compress with lz4, which bounds the ratio."""
        nbytes = shape[0] * spec.cell_bytes
        self._decoded += nbytes
        if self._decoded > MOST_MESSAGE_BYTES or nbytes > LZ4_RATIO * (len(buffer) + 64):
            raise Refused(f"compressed rows of {len(buffer)} bytes would take {nbytes}: send them with codec 'none'")
        check_encoded(buffer, codec, shape[0], spec.cell_bytes)
        array = np.empty(shape, spec.dtype)
        decode(buffer, codec, array)
        return array

    def _read_item(self, entry: Any) -> tuple[str, tuple[Column, ...], bool, int, Any, Any]:
        if not (isinstance(entry, list) and len(entry) == 6 and isinstance(entry[0], str) and type(entry[2]) is bool):
            raise Refused("items are [table, columns, grouped, number, count, records]")
        table, columns, grouped, number, count, width = entry
        if not all(type(n) is int for n in (number, count, width)) or not (
            0 < number < 1 << 62 and 1 <= count <= 1 << 20 and 1 <= width <= 1 << 16
        ):
            raise Refused("items have a bad number, count or width")
        known = read_columns(columns)
        if sum(column.length * column.spec.cell_bytes for column in known) > MOST_MESSAGE_BYTES:
            raise Refused(f"an item has at most {MOST_MESSAGE_BYTES} bytes")
        priorities = read_array(self._next(), np.float64, count)
        records = read_array(self._next(), np.int32, count * width * 4).reshape(count, width, 4)
        check_records(records, known, grouped)
        self._check_rows(records, known, grouped)
        self.nbytes += priorities.nbytes + records.nbytes
        return table, known, grouped, number, priorities, records

    def _check_rows(self, records: npt.NDArray[np.int32], columns: tuple[Column, ...], grouped: bool) -> None:
        """Every record lies in rows of a chunk of the right column."""
        low, high = reach(records)
        owner = np.zeros_like(low) if grouped else columns_of(records, columns)
        pairs = (records[:, :, 0].astype(np.int64) * MOST_COLUMNS + owner).ravel()
        order = np.argsort(pairs, kind="stable")
        kinds, begins = np.unique(pairs[order], return_index=True)
        lowest, highest = np.minimum.reduceat(low.ravel()[order], begins), np.maximum.reduceat(high.ravel()[order], begins)
        for pair, least, last in zip(kinds.tolist(), lowest.tolist(), highest.tolist(), strict=True):
            chunk, at = divmod(pair, MOST_COLUMNS)
            wanted = columns if grouped else (columns[at],)
            shapes = [self._shape(chunk + j) for j in range(len(wanted))]
            for (spec, _), column in zip(shapes, wanted, strict=True):
                if spec.dtype != column.spec.dtype or spec.shape != column.spec.shape:
                    raise InvalidItem(f"column {column.spec.path!r} refers to a chunk of {spec.path!r}")
            if least < 0 or last >= min(rows for _, rows in shapes):
                raise InvalidItem(f"column {wanted[0].spec.path!r} refers to rows outside its chunk")
            first = self._first(chunk)
            self._used[first] = max(self._used.get(first, 0), last + 1)
            if grouped and len({self._first(chunk + j) for j in range(len(wanted))}) > 1:
                raise InvalidItem("grouped columns lie in different groups")

    def _first(self, chunk: int) -> int:
        """The first id of a chunk's group."""
        found = self.session.chunks.get(chunk)
        if found is not None:
            return chunk - found[1]
        return self._opened[chunk][0]

    def _read_closes(self, entries: list[Any]) -> list[tuple[int, int]]:
        closes: list[tuple[int, int]] = []
        closed: set[int] = set()
        for entry in entries:
            if not (isinstance(entry, list) and len(entry) == 2 and all(type(n) is int for n in entry)):
                raise Refused("a closed group is [first id, rows]")
            known = self.session.groups.get(entry[0])
            opened = self._opened.get(entry[0])
            rows = known.rows if known else opened[2] if opened is not None and opened[0] == entry[0] else None
            if rows is None or not 0 <= entry[1] <= rows or entry[0] in closed:
                raise Refused("a closed group is not open, or has more rows than it was given")
            if entry[1] < max(self.session.used.get(entry[0], 0), self._used.get(entry[0], 0)):
                raise Refused("a closed group has fewer rows than its items refer to")
            closed.add(entry[0])
            closes.append((entry[0], entry[1]))
        return closes

    def advance(self, core: Core) -> bool:
        """Continue as far as limiters allow; True when the whole message is applied. The lock is held."""
        if self._steps is None:
            self._steps = self._apply(core)
        return next(self._steps, True)

    def late(self, now: float) -> bool:
        """Whether the deadline has passed. A message that just came gets one try while its client still listens."""
        return now >= self.deadline + (FIRST_TRY_SECONDS if self._steps is None else 0.0)

    def unblock(self) -> None:
        """It waits for no limiter any more."""
        if self._blocked_by is not None:
            self._blocked_by.end_wait("insert")
            self._blocked_by = None

    def abandon(self, core: Core) -> None:
        """The deadline passed: items that are not in stay out; chunks are closed all the same."""
        self.unblock()
        for first, filled in self._closes:
            self.session.close(core, first, filled)

    def fill(self, core: Core) -> None:
        """Open chunks and copy rows, as soon as the message has come: later messages may refer to them."""
        for first, specs, rows in self._opens:
            self.session.open(first, core.store.open(specs, rows))
        for chunk, start, array in self._rows:
            group, at = self.session.chunks[chunk]
            group.arrays[at][start : start + len(array)] = array
        self._rows = []
        for first, end in self._used.items():
            self.session.used[first] = max(self.session.used.get(first, 0), end)

    def _apply(self, core: Core) -> Iterator[bool]:
        for item in self._items:
            yield from self._insert(core, *item)
        for first, filled in self._closes:
            self.session.close(core, first, filled)

    def _refuse(self, core: Core, number: int, last: int, error: Exception) -> None:
        """Items from a number to another one cannot be inserted: tell why, and continue after them."""
        told = error_fields(error)
        self.refused.append((number, told["error"], told["reason"]))
        core.writers[self.session.writer] = last

    def _insert(
        self, core: Core, table: str, columns: tuple[Column, ...], grouped: bool, number: int,
        priorities: npt.NDArray[np.float64], records: npt.NDArray[np.int32],
    ) -> Iterator[bool]:  # fmt: skip
        """Insert numbered items; those with a number that was already seen are confirmed without inserting them."""
        known = max(0, core.writers.get(self.session.writer, 0) - number + 1)
        if known >= len(priorities):
            return
        mapped = records[known:].copy()
        chunks = np.unique(mapped[:, :, 0])
        stored = np.array([g.first + at for g, at in (self.session.chunks[c] for c in chunks.tolist())], np.int32)
        mapped[:, :, 0] = stored[np.searchsorted(chunks, mapped[:, :, 0])]
        try:
            pending = PendingInserts(core.table(table), columns, grouped, priorities[known:].copy(), mapped)
        except ReplayError as error:
            self._refuse(core, number + known, number + len(priorities) - 1, error)
            return
        while True:
            before = pending.handled
            try:
                done = pending.push()
            except ReplayError as error:  # the table was reset while they waited, and has other columns now
                self.unblock()
                self._refuse(core, number + known + before, number + len(priorities) - 1, error)
                return
            if pending.handled > before:
                core.writers[self.session.writer] = number + known + pending.handled - 1
                self.inserted += pending.handled - before
            if done:
                break
            if self._blocked_by is None:
                self._blocked_by = pending.table.limiter
                self._blocked_by.begin_wait("insert")
            yield False
        self.unblock()
        self.refused += [(number + known + at, "InvalidItem", reason) for at, reason in pending.refusals()]
        self.keys.append(pending.keys)
