"""How a remote writer delivers its items: numbered items, a window of unconfirmed ones, and what to do when the server was away.

    insert ──▶ queued ──▶ sent (rows go once, with the first item that needs them) ──▶ confirmed

An item keeps its number, and the server inserts a number once. When the server does not know this writer any
more (it was restarted, or forgot a silent writer), the groups of unconfirmed items are sent again; what was confirmed
but is not in the restored checkpoint is reported as `lost`.

Items made alike are sent as one *run*, many in a message. While a message is under way the writer looks for replies only now and
then, so an item costs a few appends to lists.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.replay.client import timings
from shoal.replay.client.backend import RowRecord
from shoal.replay.client.chunk_uploads import Uploads
from shoal.replay.client.server_connection import Connection
from shoal.replay.errors import Timeout, Unanswered
from shoal.replay.service.messages import MOST_FRAMES, MOST_GIVEN_UP, confirmed_items, error_from
from shoal.replay.table.chunks import ChunkGroup
from shoal.replay.table.columns import Column, Spec
from shoal.replay.table.descriptions import write_columns

__all__ = ["RemoteItemSink"]

MESSAGES_IN_FLIGHT = 8
MESSAGE_ITEMS = 256
MESSAGE_BYTES = 1 << 20
WINDOW_BYTES = 1 << 24
MEET_SECONDS = 0.5
LOOK_SECONDS = 0.001
"""How often replies are looked for while items are made."""


class ItemRun:
    """Items made alike, one after the other, with consecutive numbers."""

    def __init__(self, number: int, table: str, columns: tuple[Column, ...], grouped: bool, width: int) -> None:
        self.number, self.table, self.columns, self.grouped, self.width = number, table, columns, grouped, width
        self.records: list[RowRecord] = []
        self.priorities: list[float] = []
        self.arrays: tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]] | None = None
        self.groups: set[int] = set()  # first ids of the groups they refer to

    @property
    def count(self) -> int:
        return len(self.priorities) if self.arrays is None else len(self.arrays[1])

    @property
    def last(self) -> int:
        return self.number + self.count - 1

    def freeze(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]:
        """Records int32[n, k, 4] and priorities; nothing is added any more."""
        if self.arrays is None:
            records = np.array(self.records, np.int32).reshape(-1, self.width, 4)
            self.arrays = (records, np.array(self.priorities, np.float64))
            self.records, self.priorities = [], []
        return self.arrays


class RemoteItemSink:
    """Where a remote writer's chunks and items go."""

    def __init__(
        self, connection: Connection, max_in_flight: int = 2048, compression: str = "auto", wait: bool = False
    ) -> None:
        self._connection = connection
        self._most, self._window, self._wait = max_in_flight, max_in_flight, wait
        ipc = connection.address.startswith("ipc://")
        self._uploads = Uploads(ipc, "none" if ipc else compression)
        self.writer = secrets.randbits(61)
        self._session = secrets.randbits(61)
        self._number = 0  # of the newest item
        self._settled = 0  # of the newest item that was confirmed or given up
        self._queue: deque[ItemRun] = deque()
        self._queued = 0  # items in the queue
        self._tail: ItemRun | None = None  # the queue's last run, while items can be added to it
        self._message_items = MESSAGE_ITEMS
        self._unconfirmed: deque[ItemRun] = deque()
        self._in_flight: dict[int, int] = {}  # message number -> last item number in it
        self._look_at = 0.0
        self._keys: npt.NDArray[np.int64] | None = None
        self._hello: int | None = None
        self._serial: int | None = None  # of the session that this state belongs to
        self._ready = self._met = self._dead = False
        self._pinged = 0.0
        self._refused: list[tuple[str, str]] = []  # kind of error, reason
        self._until: float | None = None
        self.confirmed = 0
        self.lost = 0
        self._lost_to = 0  # the newest item that was confirmed before the last crash
        self._given_up: list[tuple[int, int]] = []  # first and last numbers of items that were never inserted

    # -- the writer's calls

    def chunk_bytes(self) -> int:
        """What the server's tables ask for; one that does not answer at once is asked no more."""
        if not self._met:
            self._met = True
            self._greet()
            with contextlib.suppress(Timeout):
                self._until_true(lambda: self._ready, time.monotonic() + MEET_SECONDS, "no answer")
        return self._connection.chunk_bytes

    def open(self, specs: Sequence[Spec], rows: int) -> ChunkGroup:
        return self._uploads.open(specs, rows)

    def close(self, group: ChunkGroup, filled: int) -> None:
        self._uploads.close(group.first, filled)
        self._tidy(group.first)

    def insert_one(
        self, table: str, columns: tuple[Column, ...], grouped: bool, records: Sequence[RowRecord], priority: float,
        timeout: float | None,
    ) -> int | None:  # fmt: skip
        """Queue one item, after waiting for room in the window."""
        if self._number + 1 - self._settled > self._window:
            self._make_room(1, timeout)
        run = self._tail
        if (
            run is None or run.columns is not columns or run.table != table or run.grouped != grouped or run.width != len(records)
            or run.count >= self._message_items
        ):  # fmt: skip
            run = self._tail = self._begin(table, columns, grouped, len(records))
        self._number += 1
        self._queued += 1
        run.records.extend(records)
        run.priorities.append(priority)
        owner, groups = self._uploads.owner, run.groups
        for record in records:
            first = owner[record[0]]
            if first not in groups:
                groups.add(first)
                self._uploads.use(first, 1)
        if self._queued >= self._message_items or time.monotonic() >= self._look_at:
            self._pump(0.0)
        if self._refused:
            self._raise_refused()
        return None

    def insert(
        self, table: str, columns: tuple[Column, ...], grouped: bool, records: npt.NDArray[np.int32],
        priorities: npt.NDArray[np.float64], timeout: float | None,
    ) -> npt.NDArray[np.int64]:  # fmt: skip
        """Queue items, after waiting for room in the window. With wait, until they are in."""
        deadline = None if timeout is None else time.monotonic() + timeout
        count = len(priorities)
        if not count:
            return np.empty(0, np.int64)
        if self._outstanding() and self._outstanding() + count > self._window:
            self._make_room(count, timeout)
        run = self._begin(table, columns, grouped, records.shape[1])
        run.arrays = (records.copy(), priorities.copy())
        self._tail = None
        self._number += count
        self._queued += count
        for first in {self._uploads.owner[chunk] for chunk in np.unique(records[:, :, 0]).tolist()}:
            run.groups.add(first)
            self._uploads.use(first, 1)
        if self._wait:
            return self._insert_now(run, deadline)
        if self._queued >= self._message_items or time.monotonic() >= self._look_at:
            self._pump(0.0)
        self._raise_refused()
        return np.empty(0, np.int64)

    def _begin(self, table: str, columns: tuple[Column, ...], grouped: bool, width: int) -> ItemRun:
        run = ItemRun(self._number + 1, table, columns, grouped, width)
        self._queue.append(run)
        row_bytes = max(1, sum(column.spec.cell_bytes for column in columns))
        frames = (MOST_FRAMES >> 1) // (len(columns) + 3)  # an item may be alone in its group
        self._message_items = max(1, min(MESSAGE_ITEMS, MESSAGE_BYTES // row_bytes, frames))
        self._window = min(self._most, max(8, WINDOW_BYTES // row_bytes))
        return run

    def _make_room(self, count: int, timeout: float | None) -> None:
        """Wait until the window has room for `count` items."""
        deadline = None if timeout is None else time.monotonic() + timeout
        self._pump(0.0)
        self._until_true(
            lambda: not self._outstanding() or self._outstanding() + count <= self._window, deadline,
            f"{self._outstanding()} items wait for confirmation; this one is not sent",
        )  # fmt: skip
        self._raise_refused()

    def _insert_now(self, run: ItemRun, deadline: float | None) -> npt.NDArray[np.int64]:
        """One synchronous insert: the server must not apply it after the deadline."""
        self._until = deadline
        self._keys = None
        grace = None if deadline is None else deadline + timings.GRACE_SECONDS
        last = run.last
        try:
            self._until_true(lambda: self.confirmed >= last and not self._outstanding(), grace, "no answer", Unanswered)
        except Timeout:
            self._abandon()
            raise
        self._raise_refused()
        return self._keys if self._keys is not None else np.full(run.count, -1, np.int64)

    def _abandon(self) -> None:
        """Give up unconfirmed items; they are never sent again, and their numbers are never used again."""
        if self._outstanding():
            self._given_up = [*self._given_up[1 - MOST_GIVEN_UP :], (max(self.confirmed, self._settled) + 1, self._number)]
        for run in [*self._unconfirmed, *self._queue]:
            self._release(run)
        self._unconfirmed.clear()
        self._queue.clear()
        self._tail, self._queued = None, 0
        self._in_flight.clear()
        self._settled = self._number

    def flush(self, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        self._until_true(
            lambda: not self._outstanding(), deadline, f"{self._outstanding()} items are not confirmed (they stay queued)"
        )
        self._raise_refused()

    def finish(self, timeout: float | None) -> None:
        """Flush, say goodbye, and tell how many items were not confirmed."""
        try:
            if self._outstanding():
                self.flush(timeout)
            if self._ready:
                for block in self._uploads.blocks():
                    if block.offered:
                        self._connection.send({"op": "unshare", "block": block.number})
                farewell = self._connection.send({"op": "bye", "session": self._session})
                if not self._dead:
                    self._await(farewell)
        except Timeout as error:
            raise Timeout(f"the writer was closed with {self._outstanding()} unconfirmed items") from error
        finally:
            for block in self._uploads.blocks():
                block.close()
            self._connection.close()

    def _await(self, number: int) -> None:
        deadline = time.monotonic() + timings.GRACE_SECONDS
        while (rest := deadline - time.monotonic()) > 0:
            reply = self._connection.receive(rest)
            if reply is not None and reply[0].get("id") == number:
                return

    # -- the pump

    def _outstanding(self) -> int:
        return self._number - self._settled

    def _until_true(self, condition: Any, deadline: float | None, reason: str, error: type[Timeout] = Timeout) -> None:
        """Pump until the condition holds."""
        self._connection.heard = time.monotonic()
        while not condition():
            now = time.monotonic()
            if (deadline is not None and now >= deadline) or (
                deadline is None and now - self._connection.heard > timings.DEAD_SECONDS
            ):
                self._dead = error is Unanswered
                raise error(f"{self._connection.address}: {reason}")
            self._pump(timings.PING_SECONDS if deadline is None else min(timings.PING_SECONDS, max(0.0, deadline - now)))

    def _pump(self, seconds: float) -> None:
        """Take replies, greet the server where needed, send what may be sent; wait at most `seconds` for a reply."""
        self._send_some()
        reply = self._connection.receive(seconds)
        while reply is not None:
            self._take(*reply)
            reply = self._connection.receive(0.0)
        self._send_some()
        self._look_at = time.monotonic() + LOOK_SECONDS if self._in_flight or not self._ready else 0.0

    def _greet(self) -> None:
        self._hello = self._connection.ping(
            session=self._session, writer=self.writer, confirmed=self.confirmed, given_up=self._given_up
        )
        self._pinged = time.monotonic()

    def _send_some(self) -> None:
        silent = time.monotonic() - max(self._pinged, self._connection.heard) > timings.PING_SECONDS
        if (self._hello is None and self._queue and not self._ready) or (silent and self._outstanding()):
            self._greet()
        if not self._ready:
            return
        while self._queue and (
            not self._in_flight or (len(self._in_flight) < MESSAGES_IN_FLIGHT and self._queued >= self._message_items)
        ):
            self._send_runs(self._next_runs())

    def _next_runs(self) -> list[ItemRun]:
        """The oldest runs of the queue, about a message's worth."""
        runs, count = [], 0
        while self._queue and count < self._message_items:
            runs.append(self._queue.popleft())
            count += runs[-1].count
        if not self._queue:
            self._tail = None
        self._queued -= count
        return runs

    def _send_runs(self, runs: list[ItemRun]) -> None:
        """One message: the groups and rows that the server has not seen, the items, and groups that are done."""
        described, buffers = [], []
        for run in runs:
            records, priorities = run.freeze()
            described.append([run.table, write_columns(run.columns), run.grouped, run.number, run.count, run.width])
            buffers += [priorities, records]
        groups = dict.fromkeys(first for run in runs for first in sorted(run.groups))
        waiting = {first for run in self._queue for first in run.groups}
        parcel = self._uploads.parcel(self._needed(runs), groups, waiting)
        self._unconfirmed.extend(runs)
        while self._uploads.retired:
            self._connection.send({"op": "unshare", "block": self._uploads.retired.pop()})
        for block in parcel.offers:
            number = self._connection.share(block.number, block.fd, block.nbytes)
            self._uploads.offers[number] = block
        self._in_flight[self._write(parcel, described, buffers)] = runs[-1].last

    def _write(self, parcel: Any, described: list[Any], buffers: list[Any]) -> int:
        until = None if self._until is None else self._until + self._connection.clock_offset
        header = {
            "op": "write", "session": self._session, "serial": self._serial, "opens": parcel.opens, "rows": parcel.rows,
            "items": described, "closes": parcel.closes, "keys": self._wait, "until": until,
        }  # fmt: skip
        return self._connection.send(header, [*parcel.buffers, *buffers])

    @staticmethod
    def _needed(runs: list[ItemRun]) -> list[tuple[int, int]]:
        """Of every chunk the items refer to: one past the last row they need."""
        needed: dict[int, int] = {}
        for run in runs:
            records = run.freeze()[0].reshape(-1, 4).astype(np.int64)
            ends = records[:, 1] + np.maximum(0, (records[:, 2] - 1) * records[:, 3]) + 1
            chunks, at = np.unique(records[:, 0], return_inverse=True)
            most = np.zeros(len(chunks), np.int64)
            np.maximum.at(most, at, ends)
            for chunk, end in zip(chunks.tolist(), most.tolist(), strict=True):
                for member in range(chunk, chunk + (len(run.columns) if run.grouped else 1)):
                    needed[member] = max(needed.get(member, 0), end)
        return list(needed.items())

    def _take(self, header: dict[str, Any], buffers: list[Any]) -> None:
        number = header.get("id", -1)
        if "incarnation" in header:
            if number == self._hello:
                self._hello = None
                self._greeted(header)
            return
        if number == -1 and "error" in header:  # the server could not even read whose message it was
            self._abandon()
            self._refused.append((header["error"], header["reason"]))
            return
        if self._uploads.answered(number, "error" in header) or number not in self._in_flight:
            return
        last = self._in_flight.pop(number)
        if header.get("unknown"):
            self._ready = False
            self._greet()
            return
        self._refused += [(kind, reason) for _, kind, reason in header.get("refused", [])]
        if "error" in header and header["error"] == "Timeout":
            self.confirmed = max(self.confirmed, int(header["confirmed"]))
            self._abandon()
            raise Timeout(header["reason"])
        if "error" in header:
            self._refused.append((header["error"], header["reason"]))
        if buffers and self._wait:
            self._keys = np.frombuffer(buffers[0], np.int64)
        self._confirm(last)

    def _greeted(self, header: dict[str, Any]) -> None:
        """The server answered: all is well, or it does not know this writer and needs everything unconfirmed again."""
        if header["serial"] != self._serial:
            self._serial = header["serial"]
            since = confirmed_items(self._lost_to, self.confirmed, self._given_up)  # those of an earlier crash were counted then
            self.lost += min(int(header["lost"]), since)
            self._lost_to = self.confirmed if header["lost"] else self._lost_to
            self._uploads.forget()
            self._queue.extendleft(reversed(self._unconfirmed))
            self._queued += sum(run.count for run in self._unconfirmed)
            self._unconfirmed.clear()
            self._in_flight.clear()
        self._confirm(int(header["last"]))
        self._ready = True

    def _confirm(self, last: int) -> None:
        self.confirmed = max(self.confirmed, last)
        while self._unconfirmed and self._unconfirmed[0].last <= last:
            self._release(self._unconfirmed.popleft())
        while self._queue and self._queue[0].last <= last:
            run = self._queue.popleft()
            self._tail = None if run is self._tail else self._tail
            self._queued -= run.count
            self._release(run)

    def _release(self, run: ItemRun) -> None:
        self._settled = max(self._settled, run.last)
        for first in run.groups:
            self._uploads.use(first, -1)
            self._tidy(first)

    def _tidy(self, first: int) -> None:
        """Forget a closed group that no unconfirmed item needs, after telling a server that holds it open."""
        if not self._uploads.tidy(first) and self._ready and not self._queue:  # else the next message says it
            parcel = self._uploads.parcel((), (), set())
            if parcel.closes:
                self._write(parcel, [], [])

    def _raise_refused(self) -> None:
        if self._refused:
            refused, self._refused = self._refused, []
            raise error_from(refused[0][0], "; ".join(reason for _, reason in refused[:5]))
