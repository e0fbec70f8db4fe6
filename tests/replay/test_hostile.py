"""Clients that send bombs, never read, never end a message or never stop asking: each is bounded, and honest clients go on."""

from __future__ import annotations

import socket as plain
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq
import zstandard

from shoal import replay
from shoal.replay.client.server_connection import Connection
from shoal.replay.service import connection_watch, sample_requests, server_endpoint, socket_service, writer_sessions
from shoal.replay.table.compression import check_encoded, decode, decode_row, encode
from tests.replay.conftest import Start
from tests.replay.test_fuzz import HELLO


@pytest.fixture(params=["ipc", "tcp"])
def server(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[replay.Server]:
    monkeypatch.setattr(socket_service, "SWEEP_SECONDS", 0.05)
    address = f"ipc://{tmp_path}/s" if request.param == "ipc" else "tcp://127.0.0.1:0"
    tables = [replay.Table("t", replay.Fifo()), replay.Table("other", replay.Fifo()), replay.Table.queue("q", 2)]
    with replay.Server(tables, address=address) as made:
        yield made


def still_serves(server: replay.Server) -> None:
    with replay.Client(server.address, timeout=30) as client:
        client.insert({"x": np.arange(3)}, {"other": 1.0})
        assert client.sample("other").data["x"].shape == (1, 3)


class Writer:
    """A writer that sends what it likes."""

    def __init__(self, server: replay.Server, session: int = 5) -> None:
        self.connection, self.session = Connection(server.address or "", None), session
        self.serial = self.ask({"op": "hello", "session": session, "writer": session, "confirmed": 0})["serial"]

    def ask(self, header: dict[str, Any], buffers: Any = ()) -> dict[str, Any]:
        return self.connection.request(header, buffers, 30)[0]

    def write(self, buffers: Any = (), **parts: Any) -> dict[str, Any]:
        empty: dict[str, Any] = {"opens": [], "rows": [], "items": [], "closes": [], "keys": False}
        return self.ask({"op": "write", "session": self.session, "serial": self.serial, **empty, **parts}, buffers)


def item(table: str, number: int = 1) -> list[Any]:
    return [table, [["x", "<i8", [2], 1, True]], True, number, 1, 1]


def record(row: int = 0) -> list[Any]:
    return [np.ones(1), np.array([0, row, 1, 1], np.int32)]


def test_bomb_is_refused_packed(server: replay.Server) -> None:
    writer = Writer(server)
    bomb = zstandard.ZstdCompressor(level=3).compress(bytes(1 << 28))
    opens = [[0, [["x", "|u1", [1 << 20]]], 256]]
    with pytest.raises(replay.Refused, match="would take"):
        writer.write([bomb], opens=opens, rows=[[0, 0, 256, "zstd"]])
    with pytest.raises(replay.Refused, match="are not 1 rows"):
        writer.write([bomb], opens=opens, rows=[[0, 0, 1, "zstd"]])
    zeros = np.zeros((8, 1 << 20), np.uint8)  # what honest clients compress with cannot explode
    assert "error" not in writer.write([encode(zeros, "lz4")], opens=opens, rows=[[0, 0, 8, "lz4"]])
    writer.connection.close()
    still_serves(server)


ROW = 64
BOMB = zstandard.ZstdCompressor(level=3).compress(bytes(1 << 28))
NO_SIZE = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 28))
LIAR = BOMB[:6] + struct.pack("<I", ROW) + BOMB[10:]  # its header has four bytes for the size
BOMBS = {"announced": BOMB, "no size": NO_SIZE, "a wrong size": LIAR}


def rows_of(data: bytes) -> bytes:
    """As one row of those that are compressed one by one."""
    return struct.pack("<2Q", 16, 16 + len(data)) + data


GUARDS: dict[str, Callable[[bytes], Any]] = {
    "check": lambda data: check_encoded(data, "zstd", 1, ROW),
    "check differences": lambda data: check_encoded(data, "zstd+delta", 1, ROW),
    "decode": lambda data: decode(data, "zstd", np.empty((1, ROW), np.uint8)),
    "decode differences": lambda data: decode(data, "zstd+delta", np.empty((1, ROW), np.uint8)),
    "decode rows": lambda data: decode(rows_of(data), "zstd+rows", np.empty((1, ROW), np.uint8)),
    "decode a row": lambda data: decode_row(rows_of(data), "zstd+rows", 0, ROW),
}  # fmt: skip


@pytest.mark.parametrize("kind", BOMBS)
@pytest.mark.parametrize("guard", GUARDS)
def test_each_guard_refuses_bombs(guard: str, kind: str) -> None:
    """Nothing is unpacked but the row that was asked for, whichever guard is asked."""
    if guard.startswith("check") and kind == "a wrong size":
        pytest.skip("only who unpacks it finds out")
    tracemalloc.start()
    try:
        with pytest.raises(replay.Refused):
            GUARDS[guard](BOMBS[kind])
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


def test_unpacked_bytes_are_bounded(server: replay.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes that a message unpacks are bounded."""
    monkeypatch.setattr(writer_sessions, "MOST_MESSAGE_BYTES", 1 << 24)
    writer = Writer(server)
    packed = encode(np.zeros((8, 1 << 20), np.uint8), "lz4")
    opens, rows = [[0, [["x", "|u1", [1 << 20]]], 8]], [0, 0, 8, "lz4"]
    with pytest.raises(replay.Refused, match="would take"):
        writer.write([packed] * 3, opens=opens, rows=[rows] * 3)  # the same rows again and again
    assert "error" not in writer.write([packed] * 2, opens=opens, rows=[rows] * 2)
    writer.connection.close()


def test_group_open_below_its_items(server: replay.Server) -> None:
    """Its rows would be moved to a smaller block, and an item would refer to memory behind it."""
    writer = Writer(server)
    opened = writer.write([np.zeros(1024, np.int64)], opens=[[0, [["x", "<i8", [2]]], 512]], rows=[[0, 0, 512, "none"]])
    assert "error" not in opened
    with pytest.raises(replay.Refused, match="fewer rows"):
        writer.write(record(500), items=[item("t")], closes=[[0, 4]])
    assert "error" not in writer.write(record(500), items=[item("t")])
    with pytest.raises(replay.Refused, match="fewer rows"):
        writer.write(closes=[[0, 4]])
    assert "error" not in writer.write(closes=[[0, 501]])
    writer.connection.close()


def test_reset_while_items_wait(start: Start) -> None:
    """What waited for the limiter must not go in under the columns of another item."""
    _, client = start(replay.Table.queue("q", 1))
    client.insert({"x": np.zeros(1)}, {"q": 1.0})
    failed: list[BaseException] = []

    def insert() -> None:
        try:
            client.insert({"x": np.zeros(1)}, {"q": 1.0}, timeout=20)
        except replay.ReplayError as error:
            failed.append(error)

    thread = threading.Thread(target=insert)
    thread.start()
    wait_until(lambda: client.info()["tables"]["q"]["insert_blocked_seconds"] > 0 or not thread.is_alive())
    client.reset("q")
    thread.join(30)
    assert not failed and client.sample("q", timeout=20).data["x"].shape == (1, 1)


def test_columns_changed_while_items_waited() -> None:
    """Columns that changed while items waited are refused."""
    with replay.Server([replay.Table.queue("q", 1)]) as server:
        client, core = server.client(timeout=5), server.core
        client.insert({"x": np.zeros(1)}, {"q": 1.0})
        blocked = replay_pending(core)
        assert not blocked.push()
        client.reset("q")
        client.insert({"x": np.zeros((64, 64))}, {"q": 1.0})
        client.sample("q")
        with pytest.raises(replay.SignatureMismatch):
            blocked.push()


def replay_pending(core: replay.Core) -> Any:
    from shoal.replay.table.columns import Column, Spec
    from shoal.replay.table.replay_core import PendingInserts

    spec = Spec("x", np.dtype(np.float64), (1,))
    group = core.store.open([spec], 4)
    records = np.array([[[group.first, 0, 1, 1]]], np.int32)
    return PendingInserts(core.table("q"), (Column(spec, 1, True),), True, np.ones(1), records)


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def bare_dealer(server: replay.Server) -> Any:
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.RCVHWM, 1)
    dealer.connect(server.address)
    return dealer


def sample_request(number: int, table: str, n: int) -> bytes:
    asked = {"op": "sample", "id": number, "table": table, "n": n, "timeout": None, "counted": True, "owner": 3}
    data: bytes = msgpack.packb(asked)
    return data


def test_client_that_never_reads(server: replay.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_endpoint, "MOST_UNREAD_BYTES", 1 << 24)
    server.client().insert({"x": np.zeros(1 << 18)}, {"t": 1.0})  # 2 MB
    dealer = bare_dealer(server)
    for number in range(60):
        dealer.send(sample_request(number, "t", 1))
    with replay.Client(server.address, timeout=30) as client:
        wait_until(lambda: client.info()["refused_messages"] > 0)
        wait_until(lambda: client.info()["tables"]["t"]["samples"] + client.info()["refused_messages"] == 60)
        endpoint = server._service._endpoint
        held = sum(size for queue in endpoint._unread.values() for _, size in queue)
        assert held <= (1 << 24) + (1 << 21)
        dealer.close()
        wait_until(lambda: not endpoint._unread)
    still_serves(server)


def test_many_small_frames_that_nobody_reads(server: replay.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """No column of a batch is large, but a batch has many."""
    monkeypatch.setattr(server_endpoint, "MOST_UNREAD_BYTES", 1 << 24)
    server.client().insert({f"x{k}": np.zeros(1 << 12) for k in range(64)}, {"t": 1.0})  # 64 times 32 kB
    dealer = bare_dealer(server)
    for number in range(60):
        dealer.send(sample_request(number, "t", 1))
    with replay.Client(server.address, timeout=30) as client:
        wait_until(lambda: client.info()["tables"]["t"]["samples"] + client.info()["refused_messages"] == 60)
        assert client.info()["tables"]["t"]["samples"] <= 30
        monkeypatch.setattr(server_endpoint, "MOST_UNREAD_BYTES", 1 << 20)
        refused = client.info()["refused_messages"]
        for number in range(60, 90):
            dealer.send(msgpack.packb({"op": "info", "id": number}))
        wait_until(lambda: client.info()["refused_messages"] == refused + 30)  # nothing is told to it any more
    dealer.close()


def test_errors_are_short(server: replay.Server) -> None:
    """They may quote what a client has sent."""
    writer = Writer(server)
    with pytest.raises(replay.ReplayError) as told:
        writer.ask({"op": "reset", "table": "x" * (1 << 20)})
    assert len(str(told.value)) <= 1000
    writer.connection.close()


def test_batches_of_many_columns_are_bounded(server: replay.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch counts as a whole: it is all in memory at once."""
    monkeypatch.setattr(sample_requests, "MOST_MESSAGE_BYTES", 1 << 20)
    with replay.Client(server.address, timeout=30) as client:
        client.insert({f"x{k}": np.zeros(1 << 12) for k in range(8)}, {"t": 1.0})
        assert len(client.sample("t", 4).info.keys) == 4
        with pytest.raises(replay.Refused, match="ask for fewer"):
            client.sample("t", 5)


def test_readers_of_a_connection_are_bounded(server: replay.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_service, "MOST_READERS", 4)
    server.client().insert({"x": np.zeros(3)}, {"t": 1.0})
    dealer = bare_dealer(server)
    for owner in range(10):
        asked = {"op": "sample", "id": owner, "table": "t", "n": 1, "timeout": None, "counted": False, "owner": owner}
        dealer.send(msgpack.packb(asked))
    with replay.Client(server.address, timeout=30) as client:
        wait_until(lambda: client.info()["refused_messages"] == 6)
    dealer.close()


def test_a_message_of_many_chunks(server: replay.Server) -> None:
    """A million items in 65,536 chunks are checked in one pass: nobody waits for minutes because of one message."""
    writer = Writer(server)
    opens = [[16 * group, [[f"x{k}", "|u1", []] for k in range(16)], 1] for group in range(4096)]
    count, columns = 1 << 20, [["x", "|u1", [], 1, True]]
    records = np.ones((count, 4), np.int32)
    records[:, 0], records[:, 1] = np.arange(count) % (16 * len(opens)), 0
    assert "error" not in writer.write([np.ones(count), records], opens=opens, items=[["t", columns, False, 1, count, 1]])
    writer.connection.close()


@pytest.mark.parametrize("together", [False, True])
def test_opened_ids_do_not_overlap(server: replay.Server, together: bool) -> None:
    """Not even by their last columns."""
    writer = Writer(server)
    later, earlier = [[5, [["x", "<i8", []]] * 2, 4]], [[4, [["y", "<i8", []]] * 2, 4]]
    if not together:
        writer.write(opens=later)
    with pytest.raises(replay.Refused, match="ids in use"):
        writer.write(opens=later + earlier if together else earlier)
    writer.connection.close()


def test_requests_that_wait_are_bounded(server: replay.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_requests, "MOST_WAITING", 20)
    dealer = bare_dealer(server)
    for number in range(50):
        dealer.send(sample_request(number, "q", 1))
    with replay.Client(server.address, timeout=30) as client:
        wait_until(lambda: client.info()["refused_messages"] == 30)
    dealer.close()


def test_writes_that_wait_are_bounded(server: replay.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_sessions, "MOST_WAITING_WRITES", 10)
    writer = Writer(server)
    opens = [[0, [["x", "<i8", [2]]], 4]]
    assert "error" not in writer.write([np.zeros(2, np.int64)], opens=opens, rows=[[0, 0, 1, "none"]])
    header = {"op": "write", "session": 5, "serial": writer.serial, "opens": [], "rows": [], "closes": [], "keys": False}
    for number in range(1, 21):
        writer.connection.send({**header, "items": [item("q", number)]}, record())
    with replay.Client(server.address, timeout=30) as client:
        wait_until(lambda: client.info()["refused_messages"] == 8)  # two are in, ten wait
    writer.connection.close()


def test_writers_of_a_connection_are_bounded(server: replay.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_service, "MOST_SESSIONS", 4)
    writer = Writer(server)
    for session in range(6, 9):
        writer.ask({"op": "hello", "session": session, "writer": session, "confirmed": 0})
    with pytest.raises(replay.Refused, match="at most 4 writers"):
        writer.ask({"op": "hello", "session": 9, "writer": 9, "confirmed": 0})
    writer.connection.close()


def test_checkpoints_are_bounded(server: replay.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints that are asked for are bounded."""
    monkeypatch.setattr(socket_service, "MOST_SAVES", 4)
    dealer = bare_dealer(server)
    with server._locked.saving:  # as if the first took long
        monkeypatch.setattr(server, "checkpoint_dir", Path("/dev/null/c"))
        for number in range(10):
            dealer.send(msgpack.packb({"op": "checkpoint", "id": number}))
        with replay.Client(server.address, timeout=30) as client:
            wait_until(lambda: client.info()["refused_messages"] == 6)
    wait_until(lambda: server._service._saves == 0)
    dealer.close()


def test_a_message_without_end_is_cut(server: replay.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames of a megabyte, each of which says that another one follows. Unix sockets count no bytes: there memory counts."""
    monkeypatch.setattr(connection_watch, "MOST_UNFINISHED_BYTES", 1 << 24)
    monkeypatch.setattr(connection_watch, "MOST_GROWTH_BYTES", 1 << 26)
    address = server.address or ""
    where: Any = address.removeprefix("ipc://")
    family = plain.AF_UNIX
    if address.startswith("tcp://"):
        host, port = address.removeprefix("tcp://").split(":")
        where, family = (host, int(port)), plain.AF_INET
    frame = b"\x03" + struct.pack(">Q", 1 << 20) + bytes(1 << 20)
    sent = 0
    with plain.socket(family, plain.SOCK_STREAM) as bare, replay.Client(address, timeout=30) as honest:
        bare.connect(where)
        bare.settimeout(30)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            bare.sendall(HELLO)
            while sent < 4000:
                bare.sendall(frame)
                sent += 1
                if family == plain.AF_UNIX:
                    time.sleep(0.001)
        assert honest.info()["refused_messages"] == 0
    still_serves(server)
