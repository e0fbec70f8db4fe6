"""A remote writer's delivery: numbered items, a window of unconfirmed ones, and what to do when the server was away.

    insert ──▶ queued ──▶ sent (rows go once, with the first item that needs them) ──▶ confirmed

An item keeps its number whatever happens, and the server inserts a number once. When the server does not know this writer any
more (it was restarted, or forgot a silent writer), the groups of unconfirmed items are sent again; what was confirmed
but is not in the restored checkpoint is reported as `lost`.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.replay.chunks import Group
from shoal.replay.codec import choose, encode
from shoal.replay.columns import Column, Spec
from shoal.replay.errors import InvalidItem, Timeout
from shoal.replay.remote import DEAD_SECONDS, GRACE_SECONDS, PING_SECONDS, Connection
from shoal.replay.wire import write_columns, write_spec

__all__ = ["RemoteSink"]

MESSAGES_IN_FLIGHT = 8
MESSAGE_ITEMS = 64


class Item(NamedTuple):
    """Items that were made together, with consecutive numbers."""

    number: int
    table: str
    columns: tuple[Column, ...]
    grouped: bool
    records: npt.NDArray[np.int32]
    priorities: npt.NDArray[np.float64]
    groups: tuple[int, ...]  # first ids of the groups it refers to

    @property
    def last(self) -> int:
        return self.number + len(self.priorities) - 1


class Sent:
    """What the server has of one of the writer's groups."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.opened = False
        self.rows = [0] * len(group.specs)
        self.filled: int | None = None  # set when the writer has closed it
        self.close_sent = False
        self.users = 0  # unconfirmed items


class RemoteSink:
    """Where a remote writer's chunks and items go."""

    def __init__(
        self, connection: Connection, max_in_flight: int = 256, compression: str = "auto", wait: bool = False
    ) -> None:
        if compression not in ("auto", "none"):
            raise InvalidItem(f"compression must be 'auto' or 'none', got {compression!r}")
        self._connection = connection
        self._window, self._wait = max_in_flight, wait
        self._compression = compression if connection.address.startswith("tcp://") else "none"
        self._codecs: dict[str, str] = {}
        self.writer = secrets.randbits(61)
        self._session = secrets.randbits(61)
        self._groups: dict[int, Sent] = {}
        self._owner: dict[int, int] = {}  # chunk id -> first id of its group
        self._next_chunk = 0
        self._number = 0
        self._queue: deque[Item] = deque()
        self._unconfirmed: deque[Item] = deque()
        self._in_flight: dict[int, int] = {}  # message number -> last item number in it
        self._keys: npt.NDArray[np.int64] | None = None
        self._hello: int | None = None
        self._serial: int | None = None  # of the session that this state belongs to
        self._ready = False
        self._pinged = 0.0
        self._refused: list[str] = []
        self._until: float | None = None
        self.confirmed = 0
        self.lost = 0

    # -- the writer's calls

    def open(self, specs: Sequence[Spec], rows: int) -> Group:
        first = self._next_chunk
        self._next_chunk += len(specs)
        group = Group(first, tuple(specs), rows, tuple(np.empty((rows, *s.shape), s.dtype) for s in specs))
        self._groups[first] = Sent(group)
        for at in range(len(specs)):
            self._owner[first + at] = first
        return group

    def close(self, group: Group, filled: int) -> None:
        self._groups[group.first].filled = filled
        self._tidy(group.first)

    def insert(
        self, table: str, columns: tuple[Column, ...], grouped: bool, records: npt.NDArray[np.int32],
        priorities: npt.NDArray[np.float64], timeout: float | None,
    ) -> npt.NDArray[np.int64]:  # fmt: skip
        """Queue items, after waiting for room in the window. With wait, until they are in."""
        deadline = None if timeout is None else time.monotonic() + timeout
        self._pump(0.0)
        if self._outstanding() and self._outstanding() + len(priorities) > self._window:
            self._until_true(
                lambda: not self._outstanding() or self._outstanding() + len(priorities) <= self._window,
                deadline, f"{self._outstanding()} items wait for confirmation; this one is not sent",
            )  # fmt: skip
        number = self._number + 1
        self._number += len(priorities)
        groups = tuple({self._owner[chunk] for chunk in np.unique(records[:, :, 0]).tolist()})
        item = Item(number, table, columns, grouped, records.copy(), priorities.copy(), groups)
        for first in groups:
            self._groups[first].users += 1
        self._queue.append(item)
        if self._wait:
            return self._insert_now(item, deadline)
        self._pump(0.0)
        self._raise_refused()
        return np.empty(0, np.int64)

    def _insert_now(self, item: Item, deadline: float | None) -> npt.NDArray[np.int64]:
        """One synchronous insert: the server must not apply it after the deadline."""
        self._until = None if deadline is None else time.time() + max(0.0, deadline - time.monotonic())
        self._keys = None
        grace = None if deadline is None else deadline + GRACE_SECONDS
        try:
            self._until_true(lambda: self.confirmed >= item.last and not self._outstanding(), grace, "no answer")
        except Timeout:
            self._abandon()
            raise
        self._raise_refused()
        return self._keys if self._keys is not None else np.full(len(item.priorities), -1, np.int64)

    def _abandon(self) -> None:
        """Give up unconfirmed items; they are never sent again, and their numbers are never used again."""
        for item in [*self._unconfirmed, *self._queue]:
            self._release(item)
        self._unconfirmed.clear()
        self._queue.clear()
        self._in_flight.clear()

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
                self._connection.send({"op": "bye", "session": self._session})
                self._connection.receive(GRACE_SECONDS)
        except Timeout as error:
            raise Timeout(f"the writer was closed with {self._outstanding()} unconfirmed items") from error
        finally:
            self._connection.close()

    # -- the pump

    def _outstanding(self) -> int:
        return sum(len(i.priorities) for i in self._unconfirmed) + sum(len(i.priorities) for i in self._queue)

    def _until_true(self, condition: Any, deadline: float | None, reason: str) -> None:
        """Pump until the condition holds."""
        self._connection.heard = time.monotonic()
        while not condition():
            now = time.monotonic()
            if (deadline is not None and now >= deadline) or (
                deadline is None and now - self._connection.heard > DEAD_SECONDS
            ):
                raise Timeout(f"{self._connection.address}: {reason}")
            self._pump(PING_SECONDS if deadline is None else min(PING_SECONDS, max(0.0, deadline - now)))

    def _pump(self, seconds: float) -> None:
        """Take replies, greet the server where needed, send what may be sent; wait at most so long for a reply."""
        self._send_some()
        reply = self._connection.receive(seconds)
        while reply is not None:
            self._take(*reply)
            reply = self._connection.receive(0.0)
        self._send_some()

    def _greet(self) -> None:
        self._hello = self._connection.ping(session=self._session, writer=self.writer, confirmed=self.confirmed)
        self._pinged = time.monotonic()

    def _send_some(self) -> None:
        silent = time.monotonic() - max(self._pinged, self._connection.heard) > PING_SECONDS
        if (self._hello is None and self._queue and not self._ready) or (silent and self._outstanding()):
            self._greet()
        if not self._ready:
            return
        while self._queue and (
            not self._in_flight or (len(self._in_flight) < MESSAGES_IN_FLIGHT and len(self._queue) >= MESSAGE_ITEMS)
        ):
            self._send_items([self._queue.popleft() for _ in range(min(MESSAGE_ITEMS, len(self._queue)))])

    def _send_items(self, items: list[Item]) -> None:
        """One message: the groups and rows that the server has not seen, the items, and groups that are done."""
        opens: list[Any] = []
        rows: list[Any] = []
        closes: list[Any] = []
        buffers: list[Any] = []
        for first in dict.fromkeys(first for item in items for first in item.groups):
            sent = self._groups[first]
            if not sent.opened:
                sent.opened = True
                opens.append([first, [write_spec(spec) for spec in sent.group.specs], sent.group.rows])
        for chunk, end in self._needed(items).items():
            self._add_rows(chunk, end, rows, buffers)
        described = []
        for item in items:
            described.append([
                item.table, write_columns(item.columns), item.grouped, item.number, len(item.priorities),
                item.records.shape[1],
            ])  # fmt: skip
            buffers += [item.priorities, item.records]
        self._unconfirmed.extend(items)
        for first, sent in self._groups.items():
            if sent.opened and sent.filled is not None and not sent.close_sent and not self._queued(first):
                sent.close_sent = True
                closes.append([first, sent.filled])
        number = self._connection.send(
            {
                "op": "write", "session": self._session, "serial": self._serial, "opens": opens, "rows": rows, "items": described,
                "closes": closes, "keys": self._wait,
                "until": None if self._until is None else self._until + self._connection.clock_offset,
            },
            buffers,
        )  # fmt: skip
        self._in_flight[number] = items[-1].last

    def _queued(self, first: int) -> bool:
        return any(first in item.groups for item in self._queue)

    def _needed(self, items: list[Item]) -> dict[int, int]:
        """Of every chunk the items refer to: one past the last row they need."""
        needed: dict[int, int] = {}
        for item in items:
            records = item.records.astype(np.int64)
            last = records[:, :, 1] + np.maximum(0, (records[:, :, 2] - 1) * records[:, :, 3])
            for chunk in np.unique(records[:, :, 0]).tolist():
                end = int(last[records[:, :, 0] == chunk].max()) + 1
                for at in range(len(item.columns) if item.grouped else 1):
                    needed[chunk + at] = max(needed.get(chunk + at, 0), end)
        return needed

    def _add_rows(self, chunk: int, end: int, rows: list[Any], buffers: list[Any]) -> None:
        sent = self._groups[self._owner[chunk]]
        at = chunk - sent.group.first
        start = sent.rows[at]
        if end <= start:
            return
        array, spec = sent.group.arrays[at][start:end], sent.group.specs[at]
        codec = self._codecs.get(spec.path)
        if codec is None:
            codec = self._codecs[spec.path] = choose(array) if self._compression == "auto" else "none"
        # A message is sent by zmq's own thread while the writer goes on, but rows are never written twice.
        buffers.append(array.reshape(-1).view(np.uint8) if codec == "none" else encode(array, codec))
        rows.append([chunk, start, end - start, codec])
        sent.rows[at] = end

    def _take(self, header: dict[str, Any], buffers: list[Any]) -> None:
        number = header.get("id", -1)
        if "incarnation" in header:
            if number == self._hello:
                self._hello = None
                self._greeted(header)
            return
        if number not in self._in_flight:
            return
        last = self._in_flight.pop(number)
        if header.get("unknown"):
            self._ready = False
            self._greet()
            return
        self._refused += [reason for _, reason in header.get("refused", [])]
        if "error" in header and header["error"] == "Timeout":
            self._abandon()
            raise Timeout(header["reason"])
        if "error" in header:
            self._refused.append(header["reason"])
        if buffers and self._wait:
            self._keys = np.frombuffer(buffers[0], np.int64)
        self._confirm(last)

    def _greeted(self, header: dict[str, Any]) -> None:
        """The server answered: all is well, or it does not know this writer and needs everything unconfirmed again."""
        if header["serial"] != self._serial:
            self._serial = header["serial"]
            self.lost += int(header["lost"])
            for sent in self._groups.values():
                sent.opened = sent.close_sent = False
                sent.rows = [0] * len(sent.rows)
            self._queue.extendleft(reversed(self._unconfirmed))
            self._unconfirmed.clear()
            self._in_flight.clear()
        self._confirm(int(header["last"]))
        self._ready = True

    def _confirm(self, last: int) -> None:
        self.confirmed = max(self.confirmed, last)
        while self._unconfirmed and self._unconfirmed[0].last <= last:
            self._release(self._unconfirmed.popleft())
        while self._queue and self._queue[0].last <= last:
            self._release(self._queue.popleft())

    def _release(self, item: Item) -> None:
        for first in item.groups:
            self._groups[first].users -= 1
            self._tidy(first)

    def _tidy(self, first: int) -> None:
        """Forget a closed group that no unconfirmed item needs and that the server does not hold open."""
        sent = self._groups.get(first)
        if sent is None or sent.filled is None or sent.users:
            return
        if sent.opened and not sent.close_sent and self._ready:
            sent.close_sent = True
            self._connection.send(
                {
                    "op": "write", "session": self._session, "serial": self._serial, "opens": [], "rows": [], "items": [],
                    "closes": [[first, sent.filled]], "keys": False, "until": None,
                }
            )  # fmt: skip
        del self._groups[first]
        for at in range(len(sent.group.specs)):
            del self._owner[first + at]

    def _raise_refused(self) -> None:
        if self._refused:
            reasons, self._refused = self._refused, []
            raise InvalidItem("; ".join(reasons[:5]))
