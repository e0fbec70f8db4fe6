"""Servers that stop answering, many processes at once, soft capacity, checkpoints above 2 GB, and what a long run must not do."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal import replay
from tests.replay.conftest import Start
from tests.replay.test_network import SERVER, end, line, spawn

WORKER = """
import os, sys
import numpy as np
from shoal import replay

def work(seed):
    client, rng = replay.Client(sys.argv[1], timeout=60), np.random.default_rng(seed)
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

children = []
for seed in range(int(sys.argv[2])):  # forks of one process: sixteen would import everything sixteen times
    children.append(os.fork())
    if not children[-1]:
        work(seed)
        os._exit(0)
print(sum(os.waitpid(child, 0)[1] == 0 for child in children), flush=True)
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
        workers = spawn(WORKER, server.address or "", "16")
        threads = [threading.Thread(target=draw_and_update, args=(server, seed)) for seed in range(64)]
        try:
            wait_until(lambda: table.limiter.inserts > 0)
            for thread in threads:
                thread.start()
            assert line(workers) == "16"
            for thread in threads:
                thread.join(60)
        finally:
            end(workers)
        assert table.limiter.inserts == 16 * 58 and table.limiter.samples == 16 * 3 * 8 + 64 * 10 * 8
        info = server.info()
        assert info["tables"]["t"]["size"] == 500 and info["lost"] == 0


def test_stopped_server(tmp_path: Path) -> None:
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


def test_messages_behind_a_blocked_one(tmp_path: Path) -> None:
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


def test_killed_reader_gives_back(tmp_path: Path) -> None:
    """A killed reader gives back what it drew ahead."""
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


VICTIMS = """
import os, sys, threading
import numpy as np
from shoal import replay

def live(address):
    client = replay.Client(address, timeout=60)
    writer = client.writer(max_history=2)
    def write(i):
        writer.append({"x": np.full(1 << 17, i)})  # a megabyte
        writer.create_item("t", 1.0, {"x": writer.history["x"][-1]})
    for i in range(80):
        write(i)
    writer.flush()
    dataset = client.dataset("t", 2, prefetch=2)
    next(dataset)
    threading.Thread(target=client.sample, args=("q",), kwargs={"timeout": None}, daemon=True).start()
    print(os.getpid(), flush=True)
    while True:
        write(0)

for _ in sys.stdin:
    pid = os.fork()
    if not pid:
        live(sys.argv[1])
    os.waitpid(pid, 0)
    print("gone", flush=True)
"""
HOST = """
import sys, time
from shoal import replay
server = replay.Server([replay.Table("t", max_size=40), replay.Table.queue("q", 9)], address=sys.argv[1])
print(server.address, flush=True)
time.sleep(600)
"""


def named_memory() -> list[str]:
    """Shared memory with a name, of shoal or Python's own kind."""
    return sorted(name for name in os.listdir("/dev/shm") if name.startswith(("shoal", "psm_")))


@pytest.mark.parametrize("kind", ["ipc", pytest.param("tcp", marks=pytest.mark.slow)])
def test_clients_killed_amid_everything(kind: str, tmp_path: Path) -> None:
    """Six clients, each killed with -9 while it writes, reads ahead and waits: chunks, reservations, requests, descriptors, mapped
    memory, the server's own memory and /dev/shm are as after the first."""
    server = spawn(HOST, f"ipc://{tmp_path}/s" if kind == "ipc" else "tcp://127.0.0.1:0")
    address, proc = line(server), Path(f"/proc/{server.pid}")
    victims = spawn(VICTIMS, address)
    shared = named_memory()
    assert victims.stdin is not None

    def held(client: replay.Client) -> tuple[Any, ...]:
        info = client.info()
        maps = (proc / "maps").read_text()
        return (
            info["sessions"], info["tables"]["t"]["reserved"], info["chunks"], info["stored_bytes"],
            len(os.listdir(proc / "fd")), maps.count("memfd:"), named_memory() == shared,
        )  # fmt: skip

    try:
        with replay.Client(address, timeout=60) as client:
            client.insert({"x": 7}, {"q": 1.0})
            client.sample("q")
            mine = held(client)  # a session of its own, and blocks for its batches
            after: list[tuple[Any, ...]] = []
            memory = []
            for _ in range(6):
                victims.stdin.write("another\n")
                victims.stdin.flush()
                os.kill(int(line(victims)), signal.SIGKILL)
                assert line(victims) == "gone"
                wait_until(lambda: held(client)[:2] == mine[:2])
                client.insert({"x": 7}, {"q": 1.0})  # nobody else waits for it
                assert client.sample("q").data["x"].tolist() == [7]
                client.reset("t")
                wait_until(lambda: held(client)[5] == mine[5])
                if after:
                    wait_until(lambda: held(client) == after[0])
                after.append(held(client))
                memory.append(int((proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
            assert after == [after[0]] * 6 and after[0][6]
            assert memory[5] - memory[1] < 24 << 20  # each of them moved more than 80 MB through the server
    finally:
        end(victims, server)


SAVER = """
import sys
import numpy as np
from shoal import replay
server = replay.Server([replay.Table("t", replay.Fifo(), max_size=10**6)], checkpoint_dir=sys.argv[1], keep=2)
client = server.client()
client.insert_batch({"x": np.arange(60)[:, None] + np.zeros((1, 100_000), np.int64)}, {"t": np.ones(60)})
server.checkpoint()
print("saved", flush=True)
while True:
    server.checkpoint()
"""


@pytest.mark.parametrize("part", [0.0, 0.5])
def test_kill_during_a_save(part: float, tmp_path: Path) -> None:
    """Stopped first, so that it is seen that a draft is there, begun or half of its 48 MB written; then killed with -9."""
    process = spawn(SAVER, str(tmp_path))
    try:
        assert line(process) == "saved"

        def written() -> float:
            sizes = [file.stat().st_size for file in tmp_path.glob(".saving-*/chunks.bin")]
            return max(sizes, default=-1) / 48e6

        def caught() -> bool:
            if not part <= written() < 1.0:
                return False
            os.kill(process.pid, signal.SIGSTOP)
            if part <= written() < 1.0:
                return True
            os.kill(process.pid, signal.SIGCONT)
            return False

        wait_until(caught, pause=0.0005)
    finally:
        end(process)
    assert list(tmp_path.glob(".saving-*"))
    with replay.Server([replay.Table("t", replay.Fifo(), max_times_sampled=1, max_size=10**6)], checkpoint_dir=tmp_path) as again:
        data = again.client().sample("t", 60, timeout=0).data["x"]
        assert data.shape == (60, 100_000) and (data == np.arange(60)[:, None]).all()
        again.checkpoint()
    assert not list(tmp_path.glob(".saving-*"))  # the dead process's draft is gone


def wait_until(condition: Callable[[], bool], seconds: float = 60.0, pause: float = 0.02) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(pause)


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
