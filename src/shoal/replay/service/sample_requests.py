"""Sample requests of all clients: they wait for their limiters and are answered in order, into shared memory where it is mapped."""

from __future__ import annotations

import itertools
import time
from collections import deque
from typing import Any

import numpy as np

from shoal.replay.client.expressions import ByteBudget, apply, check, transform_from
from shoal.replay.errors import Refused, Timeout
from shoal.replay.service.messages import MOST_MESSAGE_BYTES, error_fields, field, pack, read_array, seconds
from shoal.replay.service.server_endpoint import ServerEndpoint
from shoal.replay.service.shared_memory import SharedBlocks
from shoal.replay.table.columns import flatten
from shoal.replay.table.locked_core import LockedCore
from shoal.replay.table.sampled_batch import Batch, Buffers, joined

__all__ = ["MOST_BATCH", "SampleRequest", "SampleRequests"]

MOST_BATCH = 1 << 20
MOST_WAITING = 256  # requests of one client that wait for one table


class SampleRequest:
    """A sample request that waits for its limiter."""

    def __init__(self, client: bytes, header: dict[str, Any], deadline: float | None) -> None:
        self.client, self.id, self.deadline = client, field(header, "id", int, 0), deadline
        self.table = field(header, "table", str)
        self.n: int = field(header, "n", int, 1, MOST_BATCH)
        self.counted = field(header, "counted", bool)
        self.transform = transform_from(header.get("transform"))
        self.into = header.get("into")
        self.owner = header.get("owner")
        self.parts: list[Batch] = []
        self.tried = self.blocked = False

    @property
    def missing(self) -> int:
        return self.n - sum(len(part) for part in self.parts)

    def check(self, shapes: dict[str, Any]) -> None:
        """Refuse a transform that cannot be made of these columns, or would be too large, before items are taken for it."""
        if self.transform is not None:
            check(self.transform, shapes, ByteBudget(MOST_MESSAGE_BYTES, self.n))


class SampleRequests:
    """The sample requests of a service. Only its own thread may use it."""

    def __init__(self, locked: LockedCore, shared: SharedBlocks | None, endpoint: ServerEndpoint) -> None:
        self._locked, self.shared, self._endpoint = locked, shared, endpoint
        self.waiting: dict[str, deque[SampleRequest]] = {}
        self.reserved: dict[int, tuple[float, dict[str, int]]] = {}  # reader -> last seen, draws per table
        self._buffers = Buffers(most=32)
        self.refused = 0  # requests that were refused when their turn came

    def sample(self, client: bytes, header: dict[str, Any]) -> None:
        """Queue a request and answer it as soon as its limiter allows. A request that was sent twice is queued once."""
        timeout = seconds(header)
        waiting = SampleRequest(client, header, None if timeout is None else time.monotonic() + timeout)
        with self._locked.lock:
            self._locked.core.table(waiting.table)
        self._check_size(waiting)
        queue = self.waiting.setdefault(waiting.table, deque())
        mine = [other.id for other in queue if other.client == client]
        if waiting.id in mine:
            return
        if len(mine) >= MOST_WAITING:
            raise Refused(f"{len(mine)} samples of this client already wait for table {waiting.table!r}")
        queue.append(waiting)
        if len(queue) == 1:
            self.serve(waiting.table)

    def serve(self, table: str) -> None:
        """Answer sample requests of a table in their order, as far as its limiter allows."""
        queue = self.waiting[table]
        limiter = self._locked.core.table(table).limiter
        while queue:
            waiting = queue[0]
            try:
                self._endpoint.check_read(waiting.client)
                self._check_size(waiting)
                late = waiting.deadline is not None and time.monotonic() >= waiting.deadline
                if not (late and waiting.tried):  # its client may have given up by now
                    self._draw(waiting)
                if waiting.missing and not late:
                    if not waiting.blocked:
                        waiting.blocked = True
                        limiter.begin_wait("sample")
                    self._expire(queue)
                    return
                reply = self._batch_reply(waiting)
            except Exception as error:
                self.refused += isinstance(error, Refused)
                if not waiting.counted:
                    with self._locked.lock:
                        limiter.reserved -= waiting.n - waiting.missing
                reply = pack({"id": waiting.id, **error_fields(error)})
            if waiting.blocked:
                limiter.end_wait("sample")
            queue.popleft()
            self._endpoint.send(waiting.client, reply)

    def _expire(self, queue: deque[SampleRequest]) -> None:
        """The first request takes all there is and waits for more. Those behind it whose deadline has passed get Timeout."""
        now = time.monotonic()
        for waiting in [w for w in itertools.islice(queue, 1, None) if w.deadline is not None and now >= w.deadline]:
            queue.remove(waiting)
            self._endpoint.send(waiting.client, pack({"id": waiting.id, **error_fields(_nothing(waiting))}))

    def _draw(self, waiting: SampleRequest) -> None:
        waiting.tried = True
        check = None if waiting.transform is None else waiting.check
        memory = self._memory_for(waiting)
        part = self._locked.draw_some(waiting.table, waiting.missing, 0, memory, waiting.counted, check)
        if part is not None:
            waiting.parts.append(part)

    def _check_size(self, waiting: SampleRequest) -> None:
        """Refuse a batch that could not be sent; in memory it would be as large."""
        state = self._locked.core.table(waiting.table).state
        largest = int((state.lengths * state.sizes).max(1, initial=0).sum()) * waiting.n
        if largest > MOST_MESSAGE_BYTES:
            raise Refused(f"a batch of {waiting.n} items may have {largest} bytes, more than {MOST_MESSAGE_BYTES}: ask for fewer")

    def _memory_for(self, waiting: SampleRequest) -> Buffers:
        """The client's own shared block where it has one, else the service's buffers."""
        if self.shared is not None and isinstance(waiting.into, int) and waiting.transform is None:
            block = self.shared.block(waiting.into)
            if block is not None and not waiting.parts:
                return Buffers(lambda nbytes: block if nbytes <= block.nbytes else np.empty(nbytes, np.uint8), most=1)
        return self._buffers

    def _batch_reply(self, waiting: SampleRequest) -> list[Any]:
        if not waiting.parts:
            raise _nothing(waiting)
        batch = waiting.parts[0] if len(waiting.parts) == 1 else joined(waiting.parts)
        data = batch.data if waiting.transform is None else apply(waiting.transform, batch.data, ByteBudget(MOST_MESSAGE_BYTES))
        info = batch.info
        flat = flatten(data)
        header = {
            "id": waiting.id,
            "count": len(batch),
            "table_size": info.table_size,
            "columns": [[path, array.dtype.str, list(array.shape)] for path, array in flat.items()],
            "lengths": None if info.lengths is None else {p: n.tolist() for p, n in info.lengths.items()},
        }
        numbers = [info.keys, info.probabilities, info.priorities, info.times_sampled]
        if not waiting.counted and isinstance(waiting.owner, int):
            draws = self.reserved.setdefault(waiting.owner, (0.0, {}))[1]
            draws[waiting.table] = draws.get(waiting.table, 0) + len(batch)
            self.reserved[waiting.owner] = (time.monotonic(), draws)
        block = self.shared.block(waiting.into) if self.shared is not None and isinstance(waiting.into, int) else None
        offsets = None if block is None else _offsets_in(block, list(flat.values()))
        if offsets is not None:
            return pack(header | {"offsets": offsets}, [np.ascontiguousarray(x) for x in numbers])
        return pack(header, [_buffer(x) for x in (*numbers, *flat.values())])

    def consume(self, header: dict[str, Any], buffers: list[Any]) -> None:
        """A reader took batches that were drawn ahead, or gives them back."""
        name, owner = field(header, "table", str), field(header, "owner", int, 0)
        count = field(header, "count", int, 1, MOST_BATCH)
        if len(buffers) != 1:
            raise Refused("consume carries the keys")
        keys, consumed = read_array(buffers[0], np.int64, count), field(header, "consumed", bool)
        _, draws = self.reserved.get(owner, (0.0, {}))
        held = draws.get(name, 0)
        draws[name] = max(0, held - count)
        if owner in self.reserved:
            self.reserved[owner] = (time.monotonic(), draws)
        with self._locked.lock:
            table = self._locked.core.table(name)
            if held < count:  # the server was restarted since: it has reserved nothing for these
                table.release(held)
                self._locked.wake()
                raise Refused(f"{count} items of table {name!r} were consumed, but only {held} are reserved for this reader")
            if consumed:
                table.consume(keys)
            else:
                table.release(count)
            self._locked.wake()

    def retry(self) -> None:
        """Try all waiting requests again."""
        for table in [name for name, queue in self.waiting.items() if queue]:
            self.serve(table)

    def nearest(self, now: float) -> float:
        """Seconds until the first deadline."""
        rests = [w.deadline - now for queue in self.waiting.values() for w in queue if w.deadline is not None]
        return min(rests, default=3600.0)

    def forget(self, owner: int) -> None:
        """A reader has gone: release what it had drawn ahead."""
        _, draws = self.reserved.pop(owner, (0.0, {}))
        with self._locked.lock:
            for name, count in draws.items():
                self._locked.core.table(name).release(count)
            self._locked.wake()

    def forget_client(self, client: bytes) -> None:
        """A connection has ended: drop its requests."""
        for name, queue in self.waiting.items():
            for waiting in [w for w in queue if w.client == client]:
                queue.remove(waiting)
                limiter = self._locked.core.table(name).limiter
                if waiting.blocked:
                    limiter.end_wait("sample")
                drawn = sum(len(part) for part in waiting.parts)
                if drawn and not waiting.counted:
                    limiter.reserved -= drawn

    def sweep(self, now: float, silence: float) -> None:
        """Forget readers that have been silent for long."""
        for owner, (seen, _) in list(self.reserved.items()):
            if now - seen > silence:
                self.forget(owner)

    def refuse_all(self, error: Exception) -> None:
        for queue in self.waiting.values():
            for waiting in queue:
                self._endpoint.send(waiting.client, pack({"id": waiting.id, **error_fields(error)}))


def _buffer(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The bytes of an array as a buffer; times have none of their own."""
    whole = np.ascontiguousarray(array)
    return whole.view(np.int64) if whole.dtype.kind in "mM" else whole


def _nothing(waiting: SampleRequest) -> Timeout:
    return Timeout(f"table {waiting.table!r}: nothing could be sampled in time")


def _offsets_in(block: np.ndarray[Any, Any], arrays: list[np.ndarray[Any, Any]]) -> list[int] | None:
    """Where arrays lie in a block of memory, or None if they lie elsewhere."""
    start = block.ctypes.data
    offsets = [int(array.ctypes.data) - start for array in arrays]
    return offsets if all(0 <= offset < block.nbytes for offset in offsets) else None
