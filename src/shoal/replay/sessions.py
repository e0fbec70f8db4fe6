"""What the service keeps for one writer: its open groups, and its messages in the order they came."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.replay.chunks import Group
from shoal.replay.codec import CODECS, decode
from shoal.replay.columns import Column
from shoal.replay.core import Core, Pending
from shoal.replay.errors import InvalidItem, NotFound, Refused, ReplayError
from shoal.replay.shared import SharedBlocks
from shoal.replay.wire import (
    MOST_MESSAGE_BYTES,
    check_records,
    error_fields,
    field,
    read_array,
    read_columns,
    read_spec,
)

__all__ = ["Session", "Write"]

MOST_GROUPS = 4096
MOST_COLUMNS = 1024
FIRST_TRY_SECONDS = 0.5  # less than remote.GRACE_SECONDS


class Session:
    """One writer's connection, as the server sees it."""

    def __init__(self, writer: int, lost: int) -> None:
        self.writer, self.lost = writer, lost
        self.serial = secrets.randbits(62)  # tells a new session from one that was forgotten
        self.groups: dict[int, Group] = {}  # the writer's first id -> the store's group
        self.chunks: dict[int, tuple[Group, int]] = {}  # the writer's chunk id -> group, column
        self.writes: deque[Write] = deque()
        self.seen = time.monotonic()

    def drop(self, core: Core) -> None:
        """Give back the groups that the writer holds open."""
        for group in self.groups.values():
            core.store.close(group, group.rows)
        self.groups.clear()
        self.chunks.clear()
        for write in self.writes:
            write.unblock()
        self.writes.clear()

    def open(self, first: int, group: Group) -> None:
        self.groups[first] = group
        for at in range(len(group.specs)):
            self.chunks[first + at] = (group, at)

    def close(self, core: Core, first: int, filled: int) -> None:
        group = self.groups.pop(first)
        for at in range(len(group.specs)):
            del self.chunks[first + at]
        core.store.close(group, filled)


class Write:
    """One write message: chunks to open, rows, items and chunks to close. Checked as a whole before it changes anything."""

    def __init__(
        self, session: Session, header: dict[str, Any], buffers: list[Any], deadline: float,
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
            if first in self.session.chunks or any(first < o + len(s) and o < first + len(known) for o, s, _ in opens):
                raise Refused("an opened group has ids in use")
            opens.append((first, known, rows))
        return opens

    def _shape(self, chunk: int) -> tuple[Any, int]:
        """The cell and rows of one of the writer's chunks, also of those that this message opens."""
        found = self.session.chunks.get(chunk)
        if found is not None:
            return found[0].specs[found[1]], found[0].rows
        for first, specs, rows in self._opens:
            if first <= chunk < first + len(specs):
                return specs[chunk - first], rows
        raise InvalidItem(f"chunk {chunk} is not open")

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
                array = np.empty(shape, spec.dtype)
                decode(buffer, codec, array)
            rows.append((chunk, start, array))
        return rows

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
        return table, known, grouped, number, priorities, records

    def _check_rows(self, records: npt.NDArray[np.int32], columns: tuple[Column, ...], grouped: bool) -> None:
        """Every record lies in rows of a chunk of the right column."""
        begin = records[:, :, 1].astype(np.int64)
        end = begin + (records[:, :, 2].astype(np.int64) - 1) * records[:, :, 3]
        low, high = np.minimum(begin, end), np.maximum(begin, end)
        ends = np.cumsum(records[:, :, 2].astype(np.int64), 1)
        borders = np.cumsum([column.length for column in columns])
        owner = np.searchsorted(borders, ends, side="left") if not grouped else np.zeros_like(ends)
        pairs = records[:, :, 0].astype(np.int64) * MOST_COLUMNS + owner
        for chunk, at in (divmod(pair, MOST_COLUMNS) for pair in np.unique(pairs).tolist()):
            wanted = columns if grouped else (columns[at],)
            shapes = [self._shape(chunk + j) for j in range(len(wanted))]
            for (spec, _), column in zip(shapes, wanted, strict=True):
                if spec.dtype != column.spec.dtype or spec.shape != column.spec.shape:
                    raise InvalidItem(f"column {column.spec.path!r} refers to a chunk of {spec.path!r}")
            mine = pairs == chunk * MOST_COLUMNS + at
            if low[mine].min() < 0 or high[mine].max() >= min(rows for _, rows in shapes):
                raise InvalidItem(f"column {wanted[0].spec.path!r} refers to rows outside its chunk")
            if grouped and len({id(self._home(chunk + j)) for j in range(len(wanted))}) > 1:
                raise InvalidItem("grouped columns lie in different groups")

    def _home(self, chunk: int) -> Any:
        found = self.session.chunks.get(chunk)
        if found is not None:
            return found[0]
        return next(specs for first, specs, _ in self._opens if first <= chunk < first + len(specs))

    def _read_closes(self, entries: list[Any]) -> list[tuple[int, int]]:
        closes: list[tuple[int, int]] = []
        for entry in entries:
            if not (isinstance(entry, list) and len(entry) == 2 and all(type(n) is int for n in entry)):
                raise Refused("a closed group is [first id, rows]")
            known = self.session.groups.get(entry[0])
            rows = known.rows if known else next((r for f, _, r in self._opens if f == entry[0]), None)
            if rows is None or not 0 <= entry[1] <= rows or any(entry[0] == first for first, _ in closes):
                raise Refused("a closed group is not open, or has more rows than it was given")
            closes.append((entry[0], entry[1]))
        return closes

    def advance(self, core: Core) -> bool:
        """Go on as far as limiters allow; True when the whole message is applied. The lock is held."""
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

    def _apply(self, core: Core) -> Iterator[bool]:
        for item in self._items:
            yield from self._insert(core, *item)
        for first, filled in self._closes:
            self.session.close(core, first, filled)

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
            pending = Pending(core.table(table), columns, grouped, priorities[known:].copy(), mapped)
        except (NotFound, ReplayError) as error:
            told = error_fields(error)
            self.refused.append((number + known, told["error"], told["reason"]))
            core.writers[self.session.writer] = number + len(priorities) - 1
            return
        while True:
            before = pending.handled
            done = pending.push()
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
