"""Servers that stop answering, many processes at once, soft capacity, checkpoints above 2 GB, and what a long run must not do."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from shoal import replay

from .conftest import Start
from .test_network import SERVER, end, go, line, spawn

WORKER = """
import sys
import numpy as np
from shoal import replay
client = replay.Client(sys.argv[1], timeout=60)
seed = int(sys.argv[2])
rng = np.random.default_rng(seed)
print("ready", flush=True)
sys.stdin.readline()
with client.writer(max_history=3) as writer:
    for i in range(60):
        writer.append({"who": seed, "i": i})
        if i >= 2:
            writer.create_item("t", rng.random(), {"who": writer.history["who"][-3:], "i": writer.history["i"][-3:]})
        if i % 20 == 19:
            writer.flush()
            batch = client.sample("t", 8)
            assert (batch.data["who"] == batch.data["who"][:, :1]).all() and (np.diff(batch.data["i"]) == 1).all()
            client.update_priorities("t", batch.info.keys, rng.random(8))
print("done", flush=True)
"""


def draw_and_update(server: replay.Server, seed: int) -> None:
    """A thread beside the worker processes: every batch it sees is whole."""
    client, rng = server.client(timeout=60), np.random.default_rng(seed)
    for _ in range(10):
        batch = client.sample("t", 8)
        assert (batch.data["who"] == batch.data["who"][:, :1]).all() and (np.diff(batch.data["i"]) == 1).all()
        client.update_priorities("t", batch.info.keys, rng.random(8))


@pytest.mark.parametrize("kind", ["ipc", pytest.param("tcp", marks=pytest.mark.slow)])
def test_16_processes_and_64_threads_at_once(kind: str, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/s" if kind == "ipc" else "tcp://127.0.0.1:0"
    table = replay.Table("t", replay.Prioritized(0.6), max_size=500)
    with replay.Server([table], address=address) as server:
        workers = [spawn(WORKER, server.address or "", str(seed)) for seed in range(16)]
        threads = [threading.Thread(target=draw_and_update, args=(server, seed)) for seed in range(64)]
        try:
            go(*workers)
            wait_until(lambda: table.limiter.inserts > 0)
            for thread in threads:
                thread.start()
            assert [line(worker) for worker in workers] == ["done"] * 16
            for thread in threads:
                thread.join(60)
        finally:
            end(*workers)
        assert table.limiter.inserts == 16 * 58 and table.limiter.samples == 16 * 3 * 8 + 64 * 10 * 8
        info = server.info()
        assert info["tables"]["t"]["size"] == 500 and info["lost"] == 0


def test_a_stopped_server_gives_timeout_and_is_found_again(tmp_path: Path) -> None:
    """SIGSTOP: the connection stays open and nothing answers."""
    server = spawn(SERVER, f"ipc://{tmp_path}/s", str(tmp_path / "c"))
    try:
        client = replay.Client(line(server), timeout=0.5)
        client.insert({"x": 1}, {"t": 1.0}, timeout=10)
        writer = client.writer(max_history=1)
        os.kill(server.pid, signal.SIGSTOP)
        for call in (lambda: client.sample("t"), client.info, lambda: client.insert({"x": 1}, {"t": 1.0})):
            began = time.monotonic()
            with pytest.raises(replay.Timeout):
                call()
            assert time.monotonic() - began < 30
        writer.append({"x": 2})
        writer.create_item("t", 1.0, {"x": writer.history["x"][-1]})
        with pytest.raises(replay.Timeout, match="1 items are not confirmed"):
            writer.flush(timeout=0.3)
        os.kill(server.pid, signal.SIGCONT)
        writer.flush(timeout=10)
        writer.close()
        sizes = client.info(timeout=10)["tables"]["t"]["size"]
        assert sizes == 2  # the insert that timed out stayed out; the writer's item is in once
        client.close()
    finally:
        os.kill(server.pid, signal.SIGCONT)
        end(server)


def test_messages_behind_a_blocked_one_may_use_its_chunks(tmp_path: Path) -> None:
    """Many messages of one writer wait for the limiter; later ones refer to chunks that earlier ones open."""
    with replay.Server([replay.Table.queue("q", 5)], address=f"ipc://{tmp_path}/s") as server:
        client = replay.Client(server.address, timeout=20)
        with client.writer(max_history=4) as writer:
            for i in range(1500):
                writer.append({"x": i})
                if i >= 3:
                    writer.create_item("q", 1.0, {"x": writer.history["x"][-4:]})
            seen: list[list[int]] = []
            reader = threading.Thread(target=lambda: seen.extend(c.sample("q", 1).data["x"][0].tolist() for c in [client] * 1497))
            reader.start()
            writer.flush()
            reader.join(20)
            assert seen == [[i, i + 1, i + 2, i + 3] for i in range(1497)]
        client.close()


def test_a_reader_killed_gives_back_what_it_drew_ahead(tmp_path: Path) -> None:
    reader = """
import sys, time
from shoal import replay
client = replay.Client(sys.argv[1], timeout=30)
dataset = client.dataset("t", 4, prefetch=3)
next(dataset)
print("ready", flush=True)
time.sleep(60)
"""
    with replay.Server([replay.Table("t", replay.Uniform())], address=f"ipc://{tmp_path}/s") as server:
        server.client().insert_batch({"x": np.arange(10)}, {"t": np.ones(10)})
        process = spawn(reader, server.address or "")
        try:
            assert line(process) == "ready"
            wait_until(lambda: server.info()["tables"]["t"]["reserved"] > 0)
        finally:
            end(process)
        wait_until(lambda: server.info()["tables"]["t"]["reserved"] == 0)
        assert server.info()["tables"]["t"]["samples"] == 4


def wait_until(condition, seconds: float = 60.0) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_soft_capacity_is_restored_by_trim(start: Start) -> None:
    _, client = start(replay.Table("t", replay.Uniform(), max_size=10, soft=True))
    keys = client.insert_batch({"x": np.arange(3000)}, {"t": np.ones(3000)})["t"]
    assert client.info()["tables"]["t"]["size"] == 3000  # inserts are always accepted
    assert client.trim("t") == 2990
    info = client.info()["tables"]["t"]
    assert (info["size"], info["deletes"]) == (10, 2990)
    assert set(client.sample("t", 200).info.keys.tolist()) <= set(keys[-10:].tolist())  # the oldest went
    assert client.trim("t") == 0


def test_rates_are_those_of_the_last_seconds(start: Start) -> None:
    server, client = start(replay.Table("t", replay.Uniform()))
    client.insert_batch({"x": np.arange(50)}, {"t": np.ones(50)})
    clock, rates = time.monotonic(), server.core.table("t").rates
    rates._marks.clear()
    rates._marks.extend([(clock - 100.0, 0, 0), (clock - 20.0, 0, 0), (clock - 5.0, 10, 0)])  # a long silence before
    info = client.info()["tables"]["t"]
    assert info["inserts_per_second"] == pytest.approx(50 / 20, rel=0.3)  # since the last mark before the window


@pytest.mark.slow
def test_a_checkpoint_above_2_gb(tmp_path: Path) -> None:
    """2.5 GB of rows, mostly zeros, kept in files; written and read back whole."""
    def make() -> replay.Server:
        return replay.Server(
            [replay.Table("t", replay.Fifo())], checkpoint_dir=tmp_path / "c", storage="memmap", directory=tmp_path
        )

    with make() as server:
        client = server.client()
        for i in range(20):
            rows = np.zeros((128, 1 << 20), np.uint8)
            rows[:, 0], rows[:, -1] = np.arange(128), i
            client.insert_batch({"x": rows}, {"t": np.ones(128)})
        path = server.checkpoint()
    assert (path / "chunks.bin").stat().st_size > 2.5e9
    with make() as again:
        table = again.core.table("t")
        assert table.size == 20 * 128
        client = again.client()
        for i in (0, 700, 2559):
            client.delete("t", table.keys()[: i - (2560 - table.size)])
            batch = client.sample("t")
            assert (batch.data["x"][0, 0], batch.data["x"][0, -1]) == (i % 128, i // 128)
