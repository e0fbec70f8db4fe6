"""Sentences of the specification that no other file holds, with numbers worked by hand (all: docs/replay_conformance.md)."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal import replay
from shoal.replay import column
from shoal.replay.client import timings
from shoal.replay.client.server_connection import Connection
from tests.replay.conftest import Start
from tests.replay.test_network import end, go, line, spawn

SELECTORS = [replay.Fifo(), replay.Lifo(), replay.Uniform(), replay.Prioritized(0.6), replay.MinHeap(), replay.MaxHeap()]
BAD = [float("nan"), float("inf"), float("-inf"), -1.0]


# -- limiters and tables


def test_waiting_samplers_are_counted(start: Start) -> None:
    """A client of any kind that waits to sample is counted."""
    _, client = start(replay.Table.queue("q", 1))
    with pytest.raises(replay.Timeout):
        client.sample("q", timeout=0.3)
    info = client.info()["tables"]["q"]
    assert info["sample_blocked_seconds"] > 0.2 and info["insert_blocked_seconds"] == 0


def test_bytes_and_trim_count_as_deletes(start: Start) -> None:
    """Items of 8,000 bytes each in a chunk of its own: 40,000 bytes hold five."""
    _, client = start(replay.Table("t", max_bytes=40_000), replay.Table("soft", max_size=3, soft=True))
    for i in range(9):
        client.insert_batch({"x": np.full((1, 1000), i)}, {"t": np.ones(1), "soft": np.ones(1)})
    info = client.info()["tables"]["t"]
    assert info["inserts"] == 9 and info["deletes"] == 9 - info["size"] > 0 and info["bytes"] <= 40_000
    assert client.trim("soft") == 6 and client.info()["tables"]["soft"]["deletes"] == 6


def test_bad_priorities_from_anywhere(start: Start) -> None:
    """NaN, both infinities and -1, inserted, written and set, in a table of every selector; the others of a request are applied."""
    _, client = start(*(replay.Table(type(selector).__name__, selector) for selector in SELECTORS))
    for table in (type(selector).__name__ for selector in SELECTORS):
        keys = client.insert_batch({"x": np.arange(2)}, {table: np.array([1.0, 2.0])})[table]
        for bad in BAD:
            with pytest.raises(replay.InvalidItem, match="priority"):
                client.insert({"x": 7}, {table: bad})
            writer = client.writer(max_history=1)
            writer.append({"x": 8})
            with pytest.raises(replay.InvalidItem, match="priority"):
                writer.create_item(table, bad, {"x": writer.history["x"][-1]})
                writer.flush()
            writer.close()
            with pytest.raises(replay.InvalidItem, match="1 priorities"):
                client.update_priorities(table, keys, [bad, 5.0])
        info = client.info()["tables"][table]
        assert (info["size"], info["inserts"], info["refused_items"], info["refused_updates"]) == (2, 2, 8, 4)
        assert (info["priorities"]["min"], info["priorities"]["max"]) == (1.0, 5.0)
        client.insert({"x": 3}, {table: 4.0})
        assert set(client.sample(table, 50).data["x"].tolist()) <= {0, 1, 3}


def test_sums_of_what_is_there() -> None:
    """1 + 10^16 - 10^16 is 0 in float64: a sum that were kept by differences would be wrong, or below zero."""
    with replay.Server([replay.Table("t", replay.Prioritized(1.0))]) as server:
        client = server.client()
        keys = client.insert_batch({"x": np.arange(3)}, {"t": np.array([1.0, 1e16, 0.5])})["t"]
        client.update_priorities("t", keys[1:2], [3.0])
        assert client.info()["tables"]["t"]["mass"] == 4.5
        client.update_priorities("t", keys[1:2], [1e16])
        client.delete("t", keys[1:2])
        assert client.info()["tables"]["t"]["mass"] == 1.5
        batch = client.sample("t", 300)
        assert set(batch.data["x"].tolist()) == {0, 2}
        assert np.allclose(batch.info.probabilities, np.where(batch.data["x"] == 0, 2 / 3, 1 / 3), rtol=1e-12)


def stream(server: replay.Server, client: replay.Client) -> list[Any]:
    """Of every table: what is drawn while items come, go, and change their priorities."""
    found, rng = [], np.random.default_rng(3)
    for name in server.core.tables:
        turns = []
        for turn in range(12):
            client.insert_batch({"x": np.arange(5) + 5 * turn}, {name: rng.integers(1, 4, 5).astype(float)})
            batch = client.sample(name, 7)
            turns.append((batch.data["x"].tolist(), batch.info.probabilities.tolist(), batch.info.priorities.tolist()))
            client.update_priorities(name, batch.info.keys, rng.random(7))
        found.append(turns)
    return found


def test_same_seed_same_stream(start: Start) -> None:
    """Over every way the stream of a server in this process with the same seed; another seed changes what is random."""
    def tables() -> list[replay.Table]:
        pairs = [(SELECTORS[i], SELECTORS[(i + shift) % 6]) for i in range(6) for shift in (1, 3)]
        return [replay.Table(str(at), selector, remover, max_size=20) for at, (selector, remover) in enumerate(pairs)]

    streams = [stream(*start(*tables(), seed=5))]
    for seed in (5, 6):
        with replay.Server(tables(), seed=seed) as server:
            streams.append(stream(server, server.client()))
    assert streams[0] == streams[1]
    chance = (replay.Uniform, replay.Prioritized)
    for at, table in enumerate(tables()):
        if isinstance(table.selector, chance):
            assert streams[1][at] != streams[2][at]
        elif not isinstance(table.remover, chance):
            assert streams[1][at] == streams[2][at]


# -- delivery


def test_the_gap_after_each_of_two_crashes(tmp_path: Path) -> None:
    """Items 1-3 are saved, 4 and 5 confirmed. Both crashes go back to 3: lost are 2 of 5, then 3 of 6 in all, not 2 + 3."""
    def serve() -> replay.Server:
        return replay.Server([replay.Table("t")], address="tcp://127.0.0.1:0", checkpoint_dir=tmp_path)

    def greet(server: replay.Server, confirmed: int) -> tuple[Connection, dict[str, Any]]:
        connection = Connection(server.address or "", None)
        header = {"op": "hello", "session": 100 + confirmed, "writer": 9, "confirmed": confirmed}
        return connection, connection.request(header, (), 60)[0]

    def write(connection: Connection, hello: dict[str, Any], session: int, first: int, count: int) -> int:
        header = {
            "op": "write", "session": session, "serial": hello["serial"], "opens": [[0, [["x", "<i8", []]], 4]],
            "rows": [[0, 0, count, "none"]], "items": [["t", [["x", "<i8", [], 1, True]], True, first, count, 1]],
            "closes": [[0, count]], "keys": False, "until": None,
        }  # fmt: skip
        records = np.array([[[0, row, 1, 1]] for row in range(count)], np.int32)
        reply, _ = connection.request(header, [np.arange(first, first + count), np.ones(count), records], 60)
        return int(reply["confirmed"])

    with serve() as server:
        connection, hello = greet(server, 0)
        assert (hello["lost"], hello["last"]) == (0, 0)
        assert write(connection, hello, 100, 1, 3) == 3
        server.checkpoint()
        assert write(connection, hello, 100, 4, 2) == 5
        connection.close()
    with serve() as server:
        connection, hello = greet(server, 5)
        assert (hello["lost"], hello["last"]) == (2, 5) and server.info()["lost"] == 2
        assert write(connection, hello, 105, 5, 2) == 6  # 5 is a repeat: confirmed, and not inserted
        assert server.info()["tables"]["t"]["size"] == 4
        connection.close()
    with serve() as server:
        connection, hello = greet(server, 6)
        assert (hello["lost"], hello["last"]) == (3, 6) and server.info()["lost"] == 3
        assert write(connection, hello, 106, 7, 1) == 7
        assert sorted(server.client().sample("t", 200).data["x"].tolist())[-1] == 7 and server.info()["tables"]["t"]["size"] == 4
        connection.close()


SERVER = """
import sys, time
from shoal import replay
tables = [replay.Table("t", replay.Fifo(), max_size=10**6), replay.Table.queue("q", 100)]
server = replay.Server(tables, address=sys.argv[1], checkpoint_dir=sys.argv[2])
print(server.address, flush=True)
time.sleep(600)
"""
WRITERS = """
import json, sys, threading, time
from shoal import replay
client, stop, told = replay.Client(sys.argv[1], timeout=120), threading.Event(), [None] * 8
def write(who):
    writer, made = client.writer(max_history=1), 0
    while not stop.is_set():
        writer.append({"who": who, "i": made})
        writer.create_item("t", 1.0, {name: writer.history[name][-1] for name in ("who", "i")})
        made += 1
        if made % 20 == 0:
            writer.flush()
        time.sleep(0.002)
    writer.flush()
    told[who] = (made, writer.lost)
    writer.close()
threads = [threading.Thread(target=write, args=(who,)) for who in range(8)]
print("ready", flush=True)
sys.stdin.readline()
for thread in threads:
    thread.start()
sys.stdin.readline()
stop.set()
for thread in threads:
    thread.join()
print(json.dumps(told), flush=True)
"""


def saved_items(folder: Path) -> list[tuple[int, int]]:
    """(who, i) of every item of the newest checkpoint."""
    with replay.Server([replay.Table("t", replay.Fifo(), max_times_sampled=1, max_size=10**6)], checkpoint_dir=folder) as server:
        data = server.client().sample("t", server.info()["tables"]["t"]["size"], timeout=0).data
        return list(zip(data["who"].tolist(), data["i"].tolist(), strict=True))


@pytest.mark.parametrize(("kind", "saves"), [("tcp", 1), pytest.param("ipc", 2, marks=pytest.mark.slow)])
def test_two_crashes_amid_eight_writers(kind: str, saves: int, tmp_path: Path) -> None:
    """Killed with -9 twice, with one checkpoint before both crashes or one before each: exact for every writer."""
    address, folder = f"ipc://{tmp_path}/s" if kind == "ipc" else "tcp://127.0.0.1:0", tmp_path / "c"
    server = spawn(SERVER, address, str(folder))
    address = line(server)
    writers = spawn(WRITERS, address)
    try:
        go(writers)
        saved: list[tuple[int, int]] = []
        for life in range(3):
            with replay.Client(address, timeout=60) as client:
                begun = client.info()["tables"]["t"]["inserts"]
                for more in (200, 400):  # writers go on by themselves, in every life
                    while client.info()["tables"]["t"]["inserts"] < begun + more:
                        time.sleep(0.02)
                    if more == 200 and life < saves:
                        client.checkpoint()
                        saved = saved_items(folder)
            if life < 2:
                end(server)
                server = spawn(SERVER, address, str(folder))
                assert line(server) == address
        assert writers.stdin is not None
        writers.stdin.write("stop\n")
        writers.stdin.flush()
        told = json.loads(line(writers))
        with replay.Client(address, timeout=60) as client:
            lost = client.info()["lost"]
            client.checkpoint()
        there = saved_items(folder)
        assert len(there) == len(set(there))  # no item twice
        assert set(saved) <= set(there) and len(saved) >= 200  # what was confirmed before the last checkpoint
        for who, (made, missing) in enumerate(told):
            assert sum(item[0] == who for item in there) + missing == made
        assert lost == sum(missing for _, missing in told) > 0
    finally:
        end(server, writers)


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_iterator_over_a_dead_server(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed with -9 amid iteration: with a timeout and without one, reading ahead ("t") and not ("q")."""
    server = spawn(SERVER, f"ipc://{tmp_path}/s" if kind == "ipc" else "tcp://127.0.0.1:0", str(tmp_path / "c"))
    try:
        with replay.Client(line(server), timeout=None) as client:
            client.insert_batch({"x": np.arange(8)}, {"t": np.ones(8), "q": np.ones(8)})
            datasets = [client.dataset(table, 2, timeout=timeout) for table, timeout in (("t", None), ("t", 0.5), ("q", None))]
            for dataset in datasets:
                assert len(next(dataset)) == 2
            end(server)
            monkeypatch.setattr(timings, "DEAD_SECONDS", 0.2)
            monkeypatch.setattr(timings, "PING_SECONDS", 0.05)
            monkeypatch.setattr(timings, "GRACE_SECONDS", 0.2)
            monkeypatch.setattr(timings, "LATE_SECONDS", 0.1)
            for dataset in datasets:
                with pytest.raises(replay.Timeout):
                    for _ in range(10):  # those that had come already may still be handed out
                        next(dataset)
                dataset.close()
    finally:
        end(server)


# -- compression, storage


def test_compression_by_default(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 frames with a moving dot are 451,584 bytes. What travels is counted; what is stored is as it came."""
    frames = np.zeros((64, 84, 84), np.uint8)
    frames[np.arange(64), np.arange(64), 7] = 255
    travelled = 0
    send = Connection.send

    def counting(self: Connection, header: dict[str, Any], buffers: Any = ()) -> int:
        nonlocal travelled
        travelled += sum(memoryview(buffer).nbytes for buffer in buffers)
        return send(self, header, buffers)

    monkeypatch.setattr(Connection, "send", counting)
    server, client = start(replay.Table("t"))
    sent = {}
    for options in ({}, {"compression": "none"}):
        travelled = 0
        with client.writer(max_history=4, **options) as writer:
            for at, frame in enumerate(frames):
                writer.append({"frame": frame})
                if at >= 3:
                    writer.create_item("t", 1.0, {"frame": writer.history["frame"][-4:]})
                if at % 16 == 15:
                    writer.flush()
        sent[len(options)] = travelled
    address = server.address or ""
    if address.startswith("tcp"):
        assert sent[0] < 0.2 * frames.nbytes and sent[1] >= frames.nbytes
    elif not address:
        assert sent[0] == sent[1] == 0
    assert server.core.store.stored_bytes >= 2 * frames.nbytes and not server.core.store._encoded


LIMITED = """
import gc, resource, shutil, sys
import numpy as np
from shoal import replay
folder = sys.argv[1]

def make(storage, where):
    return replay.Server([replay.Table("t", replay.Fifo(), max_size=10**6)], checkpoint_dir=f"{folder}/{where}", storage=storage,
                         directory=folder)

def fill_and_save(storage, where, count):
    with make(storage, where) as server:
        client = server.client()
        for i in range(count):
            client.insert({"x": np.full(1 << 17, i)}, {"t": 1.0})  # a megabyte
        server.checkpoint()

def read(storage, where, count):
    with make(storage, where) as server:
        table, client = server.core.table("t"), server.client()
        assert table.size == count
        for i in (0, count // 2, count - 1):
            client.delete("t", table.keys()[: i - (count - table.size)])
            assert (client.sample("t").data["x"] == i).all()

for storage in ("memory", "memmap"):
    fill_and_save(storage, "warm", 2)
    read(storage, "warm", 2)
    shutil.rmtree(f"{folder}/warm")
gc.collect()
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
limit = (int(status["VmData"].split()[0]) << 10) + (192 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    np.empty(200 << 20, np.uint8)
except MemoryError:
    print("limited", flush=True)
for storage, megabytes in (("memory", 120), ("memmap", 300)):
    fill_and_save(storage, storage, megabytes)
    gc.collect()
    read(storage, storage, megabytes)
    shutil.rmtree(f"{folder}/{storage}")
    gc.collect()
    print(storage, flush=True)
"""


def test_more_than_half_of_the_memory(tmp_path: Path) -> None:
    """A process that may have 192 MB: 120 in memory cannot be copied for a checkpoint; 300 fit only into files."""
    process = spawn(LIMITED, str(tmp_path))
    try:
        assert [line(process) for _ in range(3)] == ["limited", "memory", "memmap"]
    finally:
        end(process)


# -- data operations


def test_transform_that_does_not_fit(start: Start) -> None:
    """Shapes are checked up front: the only item of a queue is still there after a sample with a wrong transform."""
    _, client = start(replay.Table.queue("q", 4))
    client.insert({"x": np.arange(6).reshape(3, 2)}, {"q": 1.0})
    x = column("x")
    wrong = [(column("nope"), replay.NotFound), (x[3], replay.InvalidItem), (x.reshape(7), replay.InvalidItem)]
    for expression, error in [*wrong, (x.window(4).sum(), replay.InvalidItem)]:
        with pytest.raises(error):
            client.sample("q", transform={"y": expression})
    info = client.info()["tables"]["q"]
    assert (info["size"], info["samples"], info["reserved"]) == (1, 0, 0)
    assert client.sample("q", transform={"y": x[2], "z": x.sum(0)}).data["z"].tolist() == [[6, 9]]


def test_a_priority_may_be_an_expression(start: Start) -> None:
    """T12: 0.9 * 2.0 + 0.1 * 3.0 / 4 = 1.875; of the last two steps 0.9 * 2.0 + 0.1 * 1.2 = 1.92."""
    _, client = start(*(replay.Table(name, replay.Fifo(), max_times_sampled=1) for name in ("t", "many")))
    td = abs(column("td"))
    with client.writer(max_history=4) as writer:
        for value in (0.1, -0.5, 2.0, 0.4):
            writer.append({"td": value})
        for chosen in (td, td[-2:]):
            writer.create_item("t", 0.9 * chosen.max() + 0.1 * chosen.mean(), {"td": writer.history["td"][:]})
        with pytest.raises(replay.InvalidItem, match="one number"):
            writer.create_item("t", td, {"td": writer.history["td"][:]})
    with client.writer(max_history=2) as many:
        for values in ([1.0, -2.0, 3.0], [4.0, 0.0, -6.0]):
            many.append_batch({"td": np.array(values)})
        many.create_items("many", td.max() + td.mean(), {"td": many.history["td"][0]})
    batch = client.sample("t", 2)
    assert batch.info.priorities.tolist() == pytest.approx([1.875, 1.92])
    assert client.sample("many", 3).info.priorities.tolist() == pytest.approx([4 + 2.5, 2 + 1, 6 + 4.5])
