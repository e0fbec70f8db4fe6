"""Delivery, reconnection, dead servers and clients, and encryption."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal import replay
from shoal.errors import ConfigError
from shoal.replay.client.server_connection import Connection
from shoal.replay.service import socket_service
from shoal.replay.service.messages import is_loopback
from shoal.slots import memory
from shoal.slots.memory import LocalMemory

SERVER = """
import sys, time
from shoal import replay
tables = [replay.Table("t", replay.Fifo(), max_size=10**6)]
server = replay.Server(tables, address=sys.argv[1], checkpoint_dir=sys.argv[2])
print(server.address, flush=True)
time.sleep(600)
"""

WRITER = """
import sys, time
import numpy as np
from shoal import replay
client = replay.Client(sys.argv[1], timeout=30)
seed, count = int(sys.argv[2]), int(sys.argv[3])
writer = client.writer(max_history=3)
print("ready", flush=True)
sys.stdin.readline()
for i in range(count):
    writer.append({"who": seed, "i": i})
    if i >= 2:
        writer.create_item("t", 1.0, {"who": writer.history["who"][-1], "i": writer.history["i"][-3:]})
    if i % 50 == 49:
        writer.flush()
    time.sleep(0.001)
writer.flush()
print("lost", writer._sink.lost, flush=True)
writer.close()
"""


def spawn(code: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None and process.stdin is not None
        process.stdout.close()
        process.stdin.close()


def go(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        assert line(process) == "ready"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()


def test_repeated_number_is_not_inserted() -> None:
    """A repeated number is confirmed without inserting."""
    with replay.Server([replay.Table("t")], address="tcp://127.0.0.1:0") as server:
        connection = Connection(server.address or "", None)
        hello, _ = connection.request({"op": "hello", "session": 5, "writer": 9, "confirmed": 0}, (), 5)
        columns = [["x", "<i8", [], 1, True]]
        header = {
            "op": "write", "session": 5, "serial": hello["serial"], "opens": [[0, [["x", "<i8", []]], 4]],
            "rows": [[0, 0, 1, "none"]],
            "items": [["t", columns, True, 1, 1, 1]], "closes": [], "keys": True, "until": None,
        }  # fmt: skip
        buffers = [np.array([7]), np.array([1.0]), np.array([[0, 0, 1, 1]], np.int32)]
        reply, keys = connection.request(header, buffers, 5)
        assert reply["confirmed"] == 1 and len(keys) == 1
        reply, keys = connection.request({**header, "opens": [], "rows": []}, buffers[1:], 5)
        assert reply["confirmed"] == 1 and not keys
        assert server.info()["tables"]["t"]["size"] == 1
        connection.close()


def test_a_dead_server_gives_timeout(impatient: None) -> None:
    server = replay.Server([replay.Table("t")], address="tcp://127.0.0.1:0")
    client = replay.Client(server.address, timeout=0.3)
    client.insert({"x": 1}, {"t": 1.0}, timeout=5)
    writer = client.writer(max_history=1)
    server.close()
    for call in (lambda: client.sample("t"), lambda: client.insert({"x": 1}, {"t": 1.0}), client.info):
        began = time.monotonic()
        with pytest.raises(replay.Timeout):
            call()
        assert time.monotonic() - began < 30
    for i in range(3):
        writer.append({"x": i})
        writer.create_item("t", 1.0, {"x": writer.history["x"][-1]})
    with pytest.raises(replay.Timeout, match="not confirmed"):
        writer.flush(timeout=0.2)
    with pytest.raises(replay.Timeout, match="closed with 3 unconfirmed items"):
        writer.close(timeout=0.2)
    client.close()


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_a_client_killed_leaks_nothing(kind: str, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/s" if kind == "ipc" else "tcp://127.0.0.1:0"
    with replay.Server([replay.Table("t", max_size=3)], address=address) as server:
        process = spawn(WRITER, server.address or "", "1", "100000")
        go(process)
        with replay.Client(server.address, timeout=10) as client:
            while client.info()["tables"]["t"]["inserts"] < 50:
                time.sleep(0.02)
            assert client.info()["sessions"] == 1
            end(process)
            deadline = time.monotonic() + 30  # not after a silence of SESSION_SECONDS
            while client.info()["sessions"] and time.monotonic() < deadline:
                time.sleep(0.02)
            assert client.info()["sessions"] == 0
            client.reset("t")
            assert client.info()["stored_bytes"] == 0


def test_no_descriptors_left(tmp_path: Path) -> None:
    counts = []
    for _ in range(4):
        with replay.Server([replay.Table("t")], address=f"ipc://{tmp_path}/s") as server:
            with replay.Client(server.address, timeout=5) as client:
                client.insert({"x": np.zeros(100_000)}, {"t": 1.0})
                kept = [client.sample("t", 4) for _ in range(12)]
                assert len(kept) == 12
                assert len(server._service._shared._blocks) <= 7  # six of the reader, one of the writer
            del kept, client
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[1] == counts[3]


def test_a_silent_writer_is_welcome_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_service, "SESSION_SECONDS", 0.2)
    monkeypatch.setattr(socket_service, "SWEEP_SECONDS", 0.1)
    with replay.Server([replay.Table("t", replay.Lifo())], address="tcp://127.0.0.1:0") as server:
        client = replay.Client(server.address, timeout=10)
        with client.writer(max_history=4) as writer:
            for i in range(6):
                writer.append({"x": i})
                if i >= 2:
                    writer.create_item("t", 1.0, {"x": writer.history["x"][-3:]})
                    writer.flush()
                    assert client.sample("t").data["x"].tolist() == [[i - 2, i - 1, i]]
                time.sleep(0.5 if i in (3, 4) else 0)
        info = client.info()
        assert info["lost"] == 0 and info["tables"]["t"]["size"] == 4
        client.close()


def test_dead_writers_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_service, "MOST_WRITERS", 8)
    with replay.Server([replay.Table("t")], address="tcp://127.0.0.1:0") as server:
        living = Connection(server.address or "", None)
        living.request({"op": "hello", "session": 1, "writer": 1, "confirmed": 7}, (), 60)
        for writer in range(2, 40):
            dead = Connection(server.address or "", None)
            dead.request({"op": "hello", "session": writer, "writer": writer, "confirmed": 0}, (), 60)
            dead.close()
            while len(server._service._sessions) > 1:
                time.sleep(0.002)
        assert len(server.core.writers) <= 10
        assert server.core.writers[1] == 7 and 39 in server.core.writers  # who is here, and who has just left
        living.close()


def test_ipc_batches_in_shared_memory(tmp_path: Path) -> None:
    with replay.Server([replay.Table("t")], address=f"ipc://{tmp_path}/s") as server:
        client = replay.Client(server.address, timeout=10)
        client.insert_batch({"x": np.arange(3000).reshape(3, 1000)}, {"t": np.ones(3)})
        for _ in range(20):
            batch = client.sample("t", 64)
            assert (np.diff(batch.data["x"], axis=1) == 1).all()
        base: Any = batch.data["x"]
        while isinstance(base.base, np.ndarray):
            base = base.base
        assert base.nbytes > 64 * 8000 and "memfd" in Path("/proc/self/maps").read_text()
        client.close()


@pytest.mark.parametrize("name", ["memory", "directory"])
def test_shared_block_is_anonymous(tmp_path: Path, name: str) -> None:
    with replay.Server([replay.Table("t")], address=f"ipc://{tmp_path}/s") as server:
        connection = Connection(server.address or "", None)
        with open(tmp_path / "file", "wb+") as file:
            fields = {"op": "share", "block": 1, "pid": os.getpid(), "fd": file.fileno(), "nbytes": 100}
            fields |= {"fd": 9999} if name == "directory" else {}
            with pytest.raises(replay.Refused):
                connection.request(fields, (), 5)
        connection.close()


def test_client_shortens_its_memory(tmp_path: Path) -> None:
    """A client that shortens its memory cannot end the server."""
    server = spawn(SERVER, f"ipc://{tmp_path}/s", str(tmp_path / "c"))
    try:
        address = line(server)
        with replay.Client(address, timeout=30) as client:
            client.insert({"x": np.arange(4096)}, {"t": 1.0})
            connection = Connection(address, None)
            open_fd = os.memfd_create("mine")
            os.ftruncate(open_fd, 1 << 16)
            share = {"op": "share", "pid": os.getpid(), "nbytes": 1 << 16}
            with pytest.raises(replay.Refused, match="F_SEAL_SHRINK"):
                connection.request({**share, "block": 1, "fd": open_fd}, (), 30)
            os.ftruncate(open_fd, 0)
            sealed = LocalMemory(1 << 16)
            connection.request({**share, "block": 2, "fd": sealed.fd}, (), 30)
            with pytest.raises(PermissionError):
                os.ftruncate(sealed.fd, 0)
            for block in (1, 2):  # a block that was refused is not written to
                header = {"op": "sample", "table": "t", "n": 1, "timeout": 30, "counted": True, "into": block}
                fields, parts = connection.request(header, (), 30)
                assert ("offsets" in fields) == (block == 2) and len(parts) == (4 if block == 2 else 5)
            at = fields["offsets"][0]
            assert sealed.array()[at : at + 8 * 4096].view(np.int64).tolist() == list(range(4096))
            assert server.poll() is None and client.info()["tables"]["t"]["size"] == 1
            connection.close()
            os.close(open_fd)
            os.close(sealed.fd)
    finally:
        end(server)


def test_memory_that_cannot_be_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory cannot be shared it goes through the socket."""
    monkeypatch.setattr(memory, "SEALS", 0)  # the server refuses every block
    with (
        replay.Server([replay.Table("t", replay.Fifo())], address=f"ipc://{tmp_path}/s") as server,
        replay.Client(server.address, timeout=30) as client,
    ):
        with client.writer(max_history=2) as writer:
            for i in range(600):
                writer.append({"x": i})
                writer.create_item("t", 1.0, {"x": writer.history["x"][-1]})
        batch = client.sample("t", 1)
        assert batch.data["x"].tolist() == [0] and client.sample("t", 1).data["x"].tolist() == [0]
        assert client.info()["tables"]["t"]["size"] == 600 and not server._service._shared._blocks


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_rows_compressed_where_it_pays(kind: str, tmp_path: Path) -> None:
    """Rows are compressed over TCP where it pays."""
    address = f"ipc://{tmp_path}/s" if kind == "ipc" else "tcp://127.0.0.1:0"
    rng = np.random.default_rng(0)
    with (
        replay.Server([replay.Table("t", replay.Fifo(), max_times_sampled=1)], address=address) as server,
        replay.Client(server.address, timeout=30) as client,
        client.writer(max_history=8) as writer,
    ):
        frames, noise = np.zeros((8, 84, 84), np.uint8), rng.integers(0, 256, (8, 84, 84), np.uint8)
        frames[np.arange(8), 10 * np.arange(8), 7] = 255
        for frame, other in zip(frames, noise, strict=True):
            writer.append({"frame": frame, "noise": other})
        writer.create_item("t", 1.0, {name: writer.history[name][:] for name in ("frame", "noise")})
        writer.flush()
        chosen = writer._sink._uploads._codecs
        assert chosen == {} if kind == "ipc" else chosen["frame"].startswith("lz4") and chosen["noise"] == "none"
        data = client.sample("t").data
        assert np.array_equal(data["frame"][0], frames) and np.array_equal(data["noise"][0], noise)


def test_off_loopback_needs_keys() -> None:
    with pytest.raises(ConfigError, match="key"):
        replay.Server([replay.Table("t")], address="tcp://0.0.0.0:0")
    with pytest.raises(ConfigError, match="key"):
        replay.Client("tcp://10.1.2.3:5")


def test_curve_lets_in_known_clients_only() -> None:
    server_key, good = replay.Key.generate(), replay.Key.generate()
    client_key = replay.Key(good.public, good.secret, server_key.public)
    with replay.Server(
        [replay.Table("t")], address="tcp://0.0.0.0:0", key=server_key.allowing(good.public)
    ) as server:
        address = (server.address or "").replace("0.0.0.0", "127.0.0.1")
        with replay.Client(address, key=client_key, timeout=5) as client:
            client.insert({"x": 1}, {"t": 1.0})
            assert client.sample("t").data["x"].tolist() == [1]
        unknown = replay.Key.generate(server=server_key.public)
        wrong_server = replay.Key(good.public, good.secret, replay.Key.generate().public)
        for key in (unknown, wrong_server, None):
            with replay.Client(address, key=key, timeout=0.3) as client, pytest.raises(replay.Timeout):
                client.info()
        assert server.info()["tables"]["t"]["size"] == 1


@pytest.mark.parametrize(("address", "near"), [("tcp://127.0.0.1:1", True), ("tcp://localhost:1", True), ("tcp://[::1]:1", True),
                                               ("tcp://127.evil.example:1", False), ("tcp://10.0.0.1:1", False)])
def test_plain_text_on_this_machine_only(address: str, near: bool) -> None:
    """Plain text is for this machine only."""
    assert is_loopback(address) is near


def test_abandoned_batch(tmp_path: Path) -> None:
    """The reply to a sample that timed out may still come: into a block that nobody uses any more."""
    with replay.Server([replay.Table("t"), replay.Table.queue("q", 4)], address=f"ipc://{tmp_path}/s") as server:
        client, other = replay.Client(server.address, timeout=10), replay.Client(server.address, timeout=10)
        client.insert_batch({"x": np.full((20, 50), 7)}, {"t": np.ones(20)})
        other.insert({"x": np.full(50, 1)}, {"q": 1.0})
        assert (client.sample("q").data["x"] == 1).all()
        lock = server._locked.lock  # while it is held the server cannot answer
        with lock, pytest.raises(replay.Timeout):
            client.sample("q", 1, timeout=0.5)
        batch = client.sample("t", 1)
        other.insert({"x": np.full(50, 99)}, {"q": 1.0})
        other.info()
        assert (batch.data["x"] == 7).all()
        client.close()
        other.close()
