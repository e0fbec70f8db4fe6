"""Messages that are not messages, over ipc and TCP: each is refused with a reason and changes nothing.

A case is a whole message with one to three mistakes (a field left out or replaced, also deep inside; a buffer cut, added or left
out; bytes flipped or cut off), or mere bytes. Every case goes through the socket to a running server, which must answer it, and
answer a greeting after it. Table KEPT is never named: its bits must be the same at the end.
"""

from __future__ import annotations

import copy
import math
import os
import socket as plain
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from shoal import replay
from shoal.replay.client.server_connection import Connection
from shoal.replay.service import socket_service
from shoal.replay.service.socket_service import Service
from shoal.replay.table.checkpoint import snapshot

KEPT, SCRATCH, EMPTIED = "kept as it is", "scratch", "emptied"
TOGETHER = 20
AT_ONCE = 50
EXAMPLES = int(os.environ.get("SHOAL_FUZZ_MESSAGES", "1000")) // TOGETHER  # for each kind of address; the evidence throws 20,000
PING = 987_654_321
COLUMNS = [["x", "<i8", [2], 1, True]]
TEMPLATES: dict[str, dict[str, Any]] = {
    "hello": {"session": 6, "writer": 8, "confirmed": 0, "given_up": [[1, 2]]},
    "write": {
        "session": 5, "serial": 0, "opens": [[0, [["x", "<i8", [2]]], 4]], "rows": [[0, 0, 1, "none"]],
        "items": [[SCRATCH, COLUMNS, True, 1, 1, 1]], "closes": [[0, 1]], "keys": True, "until": None,
    },
    "sample": {
        "table": SCRATCH, "n": 3, "timeout": 0, "counted": True, "owner": 3, "into": 1,
        "transform": {"y": ["index", [["column", [], {"path": "x"}]], {"at": 0}]},
    },
    "consume": {"table": SCRATCH, "owner": 3, "count": 1, "consumed": True},
    "update": {"table": SCRATCH, "count": 1},
    "delete": {"table": SCRATCH, "count": 1},
    "reset": {"table": EMPTIED},
    "trim": {"table": SCRATCH},
    "info": {},
    "share": {"block": 1, "pid": 1, "fd": 1, "nbytes": 10},
    "unshare": {"block": 1},
    "bye": {"session": 6},
}  # fmt: skip
WORD = np.zeros(1, np.int64).tobytes()
BUFFERS = {
    "write": [np.arange(2).tobytes(), np.ones(1).tobytes(), np.array([0, 0, 1, 1], np.int32).tobytes()],
    "update": [WORD, np.ones(1).tobytes()], "delete": [WORD], "consume": [WORD],
}  # fmt: skip

Junk = st.one_of(
    st.sampled_from([
        None, True, False, -1, 0, 1, 2, 7, 2**20, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63), 2**64 - 1, 0.5, 1e300, -1e300,
        float("nan"), float("inf"), "", "nope", "x/y", "t" * 99, "O", "<f8", "lz4", "zstd+delta", [], {}, [[]], [None],
        {"": []}, b"",
    ]),
    st.integers(-(2**63), 2**63 - 1), st.text(max_size=4), st.binary(max_size=4),
)  # fmt: skip
Mistake = st.one_of(
    st.tuples(st.just("drop"), st.integers(0, 9)),
    st.tuples(st.just("set"), st.integers(0, 9), Junk),
    st.tuples(st.just("inside"), st.integers(0, 40), Junk),
    st.tuples(st.just("flip"), st.integers(0, 3), st.integers(0, 300), st.integers(1, 255)),
    st.tuples(st.just("cut"), st.integers(0, 3), st.integers(0, 300)),
    st.tuples(st.just("without"), st.integers(0, 2)),
    st.tuples(st.just("more"), st.binary(max_size=20)),
)
Case = st.one_of(
    st.tuples(st.sampled_from(sorted(TEMPLATES)), st.lists(Mistake, min_size=1, max_size=3)),
    st.tuples(st.just("write"), st.lists(Mistake, min_size=1, max_size=3)),
    st.tuples(st.none(), st.lists(st.binary(max_size=40), min_size=1, max_size=4)),
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, index) inside a header."""
    for at, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, at
        if isinstance(inner, (list, dict)):
            yield from places(inner)


def spoilt(header: dict[str, Any], buffers: list[bytes], mistakes: list[Any]) -> list[bytes]:
    """The message with its mistakes: first those in the header's values, then those in the bytes."""
    for kind, *rest in mistakes:
        named = [name for name in header if name not in ("op", "id")] or ["id"]
        if kind == "drop":
            header.pop(named[rest[0] % len(named)], None)
        elif kind == "set":
            header[named[rest[0] % len(named)]] = rest[1]
        elif kind == "inside":
            found = list(places(header))
            where, at = found[rest[0] % len(found)]
            where[at] = rest[1]
    frames = [bytearray(msgpack.packb(header)), *map(bytearray, buffers)]
    for kind, *rest in mistakes:
        if kind == "flip":
            frame = frames[rest[0] % len(frames)]
            if frame:
                frame[rest[1] % len(frame)] ^= rest[2]
        elif kind == "cut":
            frame = frames[rest[0] % len(frames)]
            del frame[rest[1] % (len(frame) + 1) :]
        elif kind == "without" and len(frames) > 1:
            del frames[1 + rest[0] % (len(frames) - 1)]
        elif kind == "more":
            frames.append(bytearray(rest[0]))
    return [bytes(frame) for frame in frames]


class Target:
    """A running server, a bare socket to it, and what must not change."""

    def __init__(self, address: str) -> None:
        scratch = replay.Table(SCRATCH, replay.Uniform(), max_size=64)
        self.server = replay.Server([replay.Table(KEPT, replay.Prioritized(0.6)), scratch, replay.Table(EMPTIED)], address=address)
        self.core, self.service, self.local = self.server.core, self.server._service, self.server.client(timeout=10)
        self.thrown = self.refused = 0
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(self.server.address)
        with replay.Client(self.server.address, timeout=60) as client:
            client.insert_batch({"x": np.arange(60.0).reshape(20, 3)}, {KEPT: np.arange(20.0)})
            client.update_priorities(KEPT, client.sample(KEPT, 8).info.keys, np.linspace(0, 9, 8))
        self.local.insert_batch({"x": np.arange(16).reshape(8, 2)}, {SCRATCH: np.ones(8)})
        self.begin()

    def close(self) -> None:
        self.socket.close()
        self.server.close()

    def begin(self) -> None:
        """The writer that cases speak for, with nothing open."""
        self.known: Any = None  # the state, where it is known
        self.ask({"op": "bye", "id": 1, "session": 5})
        self.serial = self.ask({"op": "hello", "id": 1, "session": 5, "writer": 9, "confirmed": 0})["serial"]

    def ask(self, header: dict[str, Any]) -> dict[str, Any]:
        (reply,) = self.replies([msgpack.packb(header)])
        return reply

    def replies(self, frames: list[bytes]) -> list[dict[str, Any]]:
        """What the server answers to a message, and that it answers a greeting after it."""
        self.socket.send_multipart(frames)
        self.socket.send(msgpack.packb({"op": "hello", "id": PING}))
        found: list[dict[str, Any]] = []
        while True:
            assert self.socket.poll(60_000), "the server does not answer any more"
            reply = msgpack.unpackb(self.socket.recv_multipart()[0])
            if reply["id"] == PING and "incarnation" in reply:
                return found
            found.append(reply)

    def build(self, operation: str | None, mistakes: list[Any]) -> list[bytes]:
        if operation is None:
            return mistakes
        header: dict[str, Any] = {"op": operation, "id": 1, **copy.deepcopy(TEMPLATES[operation])}
        buffers = BUFFERS.get(operation, [])
        if operation == "write":
            header["serial"] = self.serial
            header["items"][0][3] = self.core.writers.get(9, 0) + 1
        if operation == "update":
            buffers = [self.core.table(SCRATCH).keys()[:1].tobytes(), buffers[1]]
        return spoilt(header, buffers, mistakes)

    @property
    def refusals(self) -> int:
        """How many the server has counted."""
        return int(self.service.refused_messages + self.service._samples.refused)

    def state(self) -> Any:
        """Everything that a refused message must leave alone."""
        with self.server._locked.lock:
            core, sessions = self.core, self.service._sessions
            tables = tuple(
                (t.size, t.nbytes, t.limiter.inserts, t.limiter.samples, t.limiter.deletes, t.limiter.reserved, t.mass,
                 int(t.rng[0]), len(t.columns), zlib.crc32(t.state.items), zlib.crc32(t.state.records), zlib.crc32(t.state.refs))
                for t in core.tables.values()
            )  # fmt: skip
            held = {number: (session.writer, tuple(session.groups), len(session.writes)) for number, session in sessions.items()}
            return (tables, dict(core.writers), core.lost), held, core.store.live, core.store.stored_bytes

    def throw(self, operation: str | None, mistakes: list[Any]) -> None:
        """One case. Where the answer is an error it says why, is counted if it is a refusal, and nothing has changed."""
        if self.core.table(SCRATCH).size < 4:  # else a sample may wait for ever
            self.local.insert_batch({"x": np.zeros((8, 2), np.int64)}, {SCRATCH: np.ones(8)})
            self.known = None
        before = self.known = self.known or self.state()
        frames, counted = self.build(operation, mistakes), self.refusals
        replies = self.replies(frames)
        self.thrown += 1
        assert len(replies) == 1, "a message has one answer"
        (reply,) = replies
        refusal = reply.get("error") == "Refused"
        self.refused += refusal
        assert self.refusals == counted + refusal
        if "error" in reply:
            assert reply["reason"]
            self.known = self.state()
            assert self.known[0] == before[0]
            assert self.known == before or reply["error"] == "Timeout"  # a write that came too late may have brought rows
        else:
            self.known = None
        if isinstance(reply.get("refused"), list):
            assert all(reason for *_, reason in reply["refused"])

    def kept(self) -> tuple[Any, bytes]:
        """The bits of table KEPT: its items, counters and stream, and the rows of all chunks that its items refer to."""
        with self.server._locked.lock:
            index, _ = snapshot(self.core)
            table = next(table for table in index["tables"] if table["name"] == KEPT)
            chunks = np.unique(np.frombuffer(table["records"], np.int32).reshape(-1, 4)[:, 0]).tolist()
            return table, b"".join(self.core.store.stored(chunk)[3].tobytes() for chunk in chunks)


@pytest.fixture(params=["ipc", "tcp"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Target]:
    made = Target(f"ipc://{tmp_path}/s" if request.param == "ipc" else "tcp://127.0.0.1:0")
    yield made
    made.close()


def memory() -> int:
    """Bytes of this process in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def still_whole(target: Target, before: tuple[Any, bytes]) -> None:
    """Table KEPT is what it was, bit by bit, and the server does all that a server does."""
    assert target.kept() == before and len(before[1]) == 20 * 3 * 8
    with replay.Client(target.server.address, timeout=60) as client:
        assert client.info()["refused_messages"] == target.refused
        assert set(client.sample(KEPT, 500).data["x"][:, 0].tolist()) <= set(range(0, 60, 3))
        client.insert({"x": np.array([1.0, 2.0, 3.0])}, {KEPT: 1.0})
        assert client.info()["tables"][KEPT]["size"] == 21


def test_every_operation_is_thrown() -> None:
    assert set(TEMPLATES) == set(Service.OPERATIONS) - {"checkpoint"}  # which takes nothing but its number


def test_bad_messages_change_nothing(
    target: Target, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_service, "SESSION_SECONDS", 1e6)  # what a silent reader reserved stays reserved
    before, resident = target.kept(), memory()

    for number in range(math.ceil(EXAMPLES / AT_ONCE)):  # the generator remembers every example: 100 MB after 20,000 messages

        @seed(number)
        @settings(
            max_examples=min(AT_ONCE, EXAMPLES), deadline=None, database=None, suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),
        )  # fmt: skip
        @given(st.lists(Case, min_size=TOGETHER, max_size=TOGETHER))
        def throw(cases: list[Any]) -> None:
            target.begin()
            for operation, mistakes in cases:
                target.throw(operation, mistakes)

        throw()
    assert target.thrown >= EXAMPLES * TOGETHER
    assert not caplog.records and memory() - resident < 100 << 20  # no traceback, no growth
    assert 0.3 * target.thrown < target.refused < target.thrown  # some mistakes leave a message that is right
    still_whole(target, before)


def test_whole_messages_are_accepted(target: Target) -> None:
    """The templates themselves have no mistake, so it is the mistakes that are refused."""
    for operation in TEMPLATES:
        if operation not in ("share", "consume"):  # which need memory of this process, and something drawn ahead
            (reply,) = target.replies(target.build(operation, []))
            assert "error" not in reply, (operation, reply)
            target.begin()
    assert target.core.table(SCRATCH).size == 9 and target.refusals == 0


@pytest.mark.parametrize("operation", sorted(set(TEMPLATES) - {"share"}))
def test_message_without_a_number(target: Target, operation: str) -> None:
    """The number of a message is looked at first: what is refused for it has not been done."""
    target.ask({"op": "hello", "id": 1, "session": 6, "writer": 8, "confirmed": 0})
    target.local.insert({"x": np.zeros(2, np.int64)}, {EMPTIED: 1.0})
    drawn = {"op": "sample", "id": 1, "table": SCRATCH, "n": 1, "timeout": 0, "counted": False, "owner": 3}
    assert "error" not in target.ask(drawn)
    before, frames = target.state(), target.build(operation, [])
    header = msgpack.unpackb(frames[0])
    for wrong in (None, -1, "1", True):
        (reply,) = target.replies([msgpack.packb({**header, "id": wrong}), *frames[1:]])
        assert reply["error"] == "Refused" and "'id'" in reply["reason"] and target.state() == before
    if operation == "consume":
        (reply,) = target.replies([msgpack.packb({**header, "consumed": 1}), *frames[1:]])
        assert reply["error"] == "Refused" and target.state() == before
        (reply,) = target.replies(frames)  # what was drawn ahead is still there to be taken
        assert "error" not in reply


@pytest.mark.parametrize("paths", [("a", "a/b"), ("a", "a!", "a/b/c"), ("", "a"), ("a//b",), ("/a",), ("a/",)])
def test_paths_that_no_tree_has_are_refused(target: Target, paths: tuple[str, ...]) -> None:
    """Such an item could be stored, and no batch with it could ever be read."""
    columns = [[path, "<i8", [2]] for path in sorted(paths)]
    header = {
        "op": "write", "id": 1, "session": 5, "serial": target.serial, "opens": [[0, columns, 4]],
        "rows": [[at, 0, 1, "none"] for at in range(len(paths))],
        "items": [[EMPTIED, [[*column, 1, True] for column in columns], True, 1, 1, 1]], "closes": [], "keys": False, "until": None,
    }  # fmt: skip
    before = target.state()
    buffers = [np.arange(2).tobytes() for _ in paths] + BUFFERS["write"][1:]
    (reply,) = target.replies([msgpack.packb(header), *buffers])
    assert reply["error"] == "Refused" and "path" in reply["reason"] and target.state() == before


def test_claims_of_a_client(target: Target) -> None:
    """Ten writers each claim that 2^62 of their items are lost: the sum must still travel."""
    for number in range(100, 110):
        assert "error" not in target.ask({"op": "hello", "id": 1, "session": number, "writer": number, "confirmed": 2**62})
    with replay.Client(target.server.address, timeout=60) as client:
        assert client.info()["lost"] == 2**62


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
HELLO = GREETING + b"\x04" + bytes([len(READY)]) + READY
Stream = st.tuples(
    st.sampled_from([b"", GREETING[:11], GREETING, HELLO]),
    st.one_of(
        st.binary(max_size=64),
        st.integers(0, 2**64 - 1).map(lambda n: b"\x02" + struct.pack(">Q", n)),  # a frame of this many bytes
        st.just(b"\x00\x03abc"), st.just(b"\x01\x00" * 50),
    ),
    st.binary(max_size=16),
).map(b"".join)  # fmt: skip


def test_stray_bytes_change_nothing(target: Target) -> None:
    """Bare connections that speak no ZMTP, half of it, or announce frames of up to 2^64 bytes."""
    before, address = target.kept(), target.server.address or ""

    @settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(Stream)
    def throw(data: bytes) -> None:
        kind = plain.AF_UNIX if address.startswith("ipc") else plain.AF_INET
        where: Any = address.removeprefix("ipc://")
        if kind == plain.AF_INET:
            host, port = address.removeprefix("tcp://").split(":")
            where = (host, int(port))
        with plain.socket(kind, plain.SOCK_STREAM) as bare:
            bare.connect(where)
            bare.sendall(data)

    throw()
    with replay.Client(address, timeout=60) as client:
        while target.refused != (now := client.info()["refused_messages"]):  # b"abc" may have come through as a message
            target.refused = now
            time.sleep(0.5)
    still_whole(target, before)


def test_too_many_frames(target: Target) -> None:
    """A sequence of frames that is too long is refused."""
    before = target.state()
    (reply,) = target.replies([msgpack.packb({"op": "info", "id": 1})] + [b""] * (1 << 16))
    assert reply["error"] == "Refused" and "frames" in reply["reason"] and target.state() == before


def test_sample_too_large_to_send(target: Target) -> None:
    """2^20 items of 2 kB are 2 GB, more than a message may have."""
    target.local.reset(EMPTIED)
    target.local.insert({"x": np.zeros(256)}, {EMPTIED: 1.0})
    before = target.state()
    connection = Connection(target.server.address or "", None)
    with pytest.raises(replay.Refused, match="ask for fewer"):
        connection.request({"op": "sample", "table": EMPTIED, "n": 1 << 20, "timeout": 0, "counted": True}, (), 30)
    connection.close()
    assert target.state() == before and target.refusals == 1
