"""Section 3, Checkpoint: one instant, atomic, the constructor's configuration, memmap storage, kill during a save."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal import replay
from shoal.errors import CheckpointError
from shoal.replay.service import checkpoint_files
from tests.replay.conftest import Start


def contents(server: replay.Server, table: str = "t") -> dict[int, tuple[float, int]]:
    core = server.core.table(table)
    slots = core.slots()
    return {
        int(key): (float(priority), int(times))
        for key, priority, times in zip(
            core.keys(), core.state.values[slots, 7], core.state.items[slots, 1], strict=True
        )
    }


def fill(client: replay.Client, n: int = 50) -> None:
    rng = np.random.default_rng(0)
    with client.writer(max_history=5) as writer:
        for i in range(n):
            writer.append({"x": np.full(100, i), "y": float(i)})
            if i >= 4:
                h = writer.history
                writer.create_item("t", rng.random(), {"x": h["x"][-3:], "y": h["y"][[-1, -5, -5]]})
        writer.flush()
    client.update_priorities("t", client.sample("t", 20).info.keys, rng.random(20))


def test_data_counters_and_stream_come_back(start: Start, tmp_path: Path) -> None:
    make = lambda: replay.Table("t", replay.Prioritized(0.6), replay.MinHeap(), max_size=30)  # noqa: E731
    server, client = start(make(), checkpoint_dir=tmp_path / "c")
    fill(client)
    path = Path(client.checkpoint())
    before, counters = contents(server), client.info()["tables"]["t"]
    again = replay.Server([make()], checkpoint_dir=tmp_path / "c")
    assert contents(again) == before and path.is_dir()
    after = again.info()["tables"]["t"]
    assert all(after[name] == counters[name] for name in ("size", "inserts", "samples", "deletes", "bytes"))
    one, two = client.sample("t", 500), again.client().sample("t", 500)
    first = {int(key): x for key, x in zip(one.info.keys, one.data["x"], strict=True)}
    assert all(np.array_equal(first.get(int(key), x), x) for key, x in zip(two.info.keys, two.data["x"], strict=True))
    assert (two.data["y"][:, 1] == two.data["y"][:, 0] - 4).all()
    fresh = again.client().insert({"x": two.data["x"][0], "y": two.data["y"][0]}, {"t": 9.0})["t"]
    assert fresh not in before
    again.close()


def test_heap_ties_survive(tmp_path: Path) -> None:
    def make() -> replay.Table:
        return replay.Table("t", replay.MinHeap())

    with replay.Server([make()], checkpoint_dir=tmp_path) as server:
        client = server.client()
        keys = [client.insert({"x": i}, {"t": 1.0})["t"] for i in range(3)]
        client.update_priorities("t", keys[:1], [1.0])
        client.checkpoint()
    with replay.Server([make()], checkpoint_dir=tmp_path) as again:
        assert again.client().sample("t").data["x"].tolist() == [1]


def test_configuration_of_the_constructor(tmp_path: Path) -> None:
    """Configuration comes from the constructor unless asked."""
    with replay.Server([replay.Table("t", replay.Fifo(), max_size=10)], checkpoint_dir=tmp_path) as server:
        client = server.client()
        client.insert_batch({"x": np.arange(10)}, {"t": np.ones(10)})
        client.checkpoint()
    with replay.Server([replay.Table("t", replay.Lifo(), max_size=4)], checkpoint_dir=tmp_path) as changed:
        assert changed.info()["tables"]["t"]["size"] == 4
        assert changed.info()["tables"]["t"]["inserts"] - changed.info()["tables"]["t"]["deletes"] == 4
        assert changed.client().sample("t").data["x"].tolist() == [9]
    with replay.Server([replay.Table("t", replay.Lifo(), max_size=4)], checkpoint_dir=tmp_path, restore="saved") as saved:
        assert saved.info()["tables"]["t"]["size"] == 10
        assert saved.client().sample("t").data["x"].tolist() == [0]
    with replay.Server([replay.Table("t", replay.Lifo())], checkpoint_dir=tmp_path, restore="none") as empty:
        assert empty.info()["tables"]["t"]["size"] == 0


def test_newest_k_are_kept(tmp_path: Path) -> None:
    """The latest k are kept and the newest is loaded."""
    with replay.Server([replay.Table("t", replay.Lifo())], checkpoint_dir=tmp_path, keep=2) as server:
        client = server.client()
        for i in range(5):
            client.insert({"x": i}, {"t": 1.0})
            client.checkpoint()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-000004", "checkpoint-000005"]
    with replay.Server([replay.Table("t", replay.Lifo())], checkpoint_dir=tmp_path) as again:
        assert again.client().sample("t").data["x"].tolist() == [4]


def test_all_tables_at_one_instant(tmp_path: Path) -> None:
    """All tables at one instant while writers go on."""

    def make() -> list[replay.Table]:
        return [replay.Table(name, replay.Fifo(), max_size=100_000) for name in ("a", "b")]

    with replay.Server(make(), checkpoint_dir=tmp_path, keep=100) as server:
        stop = threading.Event()

        def write() -> None:
            client = server.client()
            while not stop.is_set():
                client.insert({"x": np.zeros(100)}, {"a": 1.0, "b": 1.0})  # first a, then b

        thread = threading.Thread(target=write)
        thread.start()
        for _ in range(5):
            server.checkpoint()
        stop.set()
        thread.join()
    for path in sorted(tmp_path.iterdir())[::2]:
        single = tmp_path.parent / f"{tmp_path.name}-{path.name}"
        single.mkdir()
        path.rename(single / path.name)
        with replay.Server(make(), checkpoint_dir=single) as again:
            sizes = {name: table["size"] for name, table in again.info()["tables"].items()}
            assert sizes["a"] - sizes["b"] in (0, 1)


def test_work_goes_on_during_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inserts and samples go on while a checkpoint is written."""
    writing, go_on = threading.Event(), threading.Event()
    sync = checkpoint_files._sync

    def slow_disk(file: Any) -> None:
        writing.set()
        assert go_on.wait(60)
        sync(file)

    monkeypatch.setattr(checkpoint_files, "_sync", slow_disk)
    with replay.Server([replay.Table("t", replay.Fifo(), max_size=40)], checkpoint_dir=tmp_path) as server:
        client = server.client(timeout=60)
        client.insert_batch({"x": np.arange(40), "y": np.arange(40.0)}, {"t": np.ones(40)})
        saver = threading.Thread(target=server.checkpoint)
        saver.start()
        assert writing.wait(60)
        client.insert_batch({"x": np.arange(40, 80), "y": np.arange(40.0)}, {"t": np.ones(40)})  # all that is saved goes
        assert client.sample("t").data["x"].tolist() == [40]
        assert saver.is_alive()
        go_on.set()
        saver.join(60)
    monkeypatch.undo()
    with replay.Server([replay.Table("t", replay.Lifo(), max_size=40)], checkpoint_dir=tmp_path) as again:
        assert again.client().sample("t").data["x"].tolist() == [39]  # as of the instant it was asked for


def test_broken_checkpoint(tmp_path: Path) -> None:
    """A broken checkpoint is not read, not even in part."""
    with replay.Server([replay.Table("t")], checkpoint_dir=tmp_path) as server:
        server.client().insert({"x": np.zeros(1000)}, {"t": 1.0})
        path = server.checkpoint()
    (path / "chunks.bin").write_bytes((path / "chunks.bin").read_bytes()[:100])
    with pytest.raises(CheckpointError, match="shorter"):
        replay.Server([replay.Table("t")], checkpoint_dir=tmp_path)


def test_without_a_directory() -> None:
    with replay.Server([replay.Table("t")]) as server, pytest.raises(replay.NotFound, match="checkpoint_dir"):
        server.client().checkpoint()


def test_memmap_leaves_no_files(tmp_path: Path) -> None:
    """Memmap keeps chunks in files and leaves none."""
    server = replay.Server([replay.Table("t", max_size=1000)], storage="memmap", directory=tmp_path)
    client = server.client()
    client.insert_batch({"x": np.arange(500 * 1000).reshape(500, 1000)}, {"t": np.ones(500)})
    assert sum(size for _, size in mapped_files(tmp_path)) >= 4_000_000
    batch = client.sample("t", 50)
    assert (np.diff(batch.data["x"], axis=1) == 1).all()
    server.close()
    del server, client
    gc.collect()
    assert not list(tmp_path.iterdir()) and not mapped_files(tmp_path)
    assert (np.diff(batch.data["x"], axis=1) == 1).all()


def mapped_files(folder: Path) -> list[tuple[str, int]]:
    """The files of a folder that this process maps, also those without a name, and their bytes."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, *_ = line.split()
        if str(folder) in line:
            first, last = (int(part, 16) for part in addresses.split("-"))
            found.append((line, last - first))
    return found


def test_a_server_killed_leaves_no_files(tmp_path: Path) -> None:
    code = """
import sys, time, numpy as np
from shoal import replay
server = replay.Server([replay.Table("t")], storage="memmap", directory=sys.argv[1])
server.client().insert_batch({"x": np.zeros((500, 1000))}, {"t": 1.0})
print("ready", flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    assert str(tmp_path) in Path(f"/proc/{process.pid}/maps").read_text()
    process.kill()
    process.wait()
    process.stdout.close()
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize("codec", ["lz4", "zstd", "lz4+delta", "zstd+delta", "lz4+rows", "zstd+rows"])
def test_compressed_columns(codec: str, tmp_path: Path) -> None:
    def make(**options: Any) -> replay.Server:
        return replay.Server([replay.Table("t")], compression={"x": codec}, checkpoint_dir=tmp_path, **options)

    with make() as server:
        client = server.client()
        with client.writer(max_history=4) as writer:
            for i in range(200):
                writer.append({"x": np.full((40, 40), i, np.uint8), "y": i})
                if i >= 3:
                    writer.create_item("t", 1.0, {"x": writer.history["x"][-4:], "y": writer.history["y"][-1]})
        assert server.core.store.stored_bytes < 200 * 1600 / 3
        for where in (client, None):
            if where is None:
                server.checkpoint()
                again = make()
                where = again.client()
            batch = where.sample("t", 500)
            assert (batch.data["x"][:, 3, 0, 0] == batch.data["y"]).all()
            assert (batch.data["x"][:, 0, 5, 5] == batch.data["y"] - 3).all()
        again.close()


@pytest.mark.parametrize(("saved", "loaded"), [("none", "lz4+rows"), ("lz4+rows", "lz4+rows"), ("lz4+rows", "none"),
                                               ("zstd+rows", "lz4+rows")])
def test_compressed_as_configured_now(saved: str, loaded: str, tmp_path: Path) -> None:
    """A table is compressed as it is configured now."""

    def make(codec: str) -> replay.Server:
        return replay.Server([replay.Table("t")], compression={"x": codec}, checkpoint_dir=tmp_path)

    with make(saved) as server:
        with server.client().writer(max_history=1) as writer:
            for i in range(20):
                writer.append({"x": np.full((64, 64), i, np.uint8), "y": i})
                writer.create_item("t", 1.0, {name: writer.history[name][-1] for name in "xy"})
        server.checkpoint()
    with make(loaded) as server:
        assert (server.core.store.stored_bytes < 20 * 4096 / 10) == (loaded != "none")
        assert server.core.tables["t"].nbytes == server.core.store.stored_bytes
        data = server.client().sample("t", 200).data
        assert set(data["y"]) == set(range(20)) and (data["x"] == data["y"][:, None, None]).all()


def test_checkpoints_at_once(tmp_path: Path) -> None:
    """Checkpoints asked for at once are all made."""
    with replay.Server([replay.Table("t")], checkpoint_dir=tmp_path) as server:
        server.client().insert_batch({"x": np.zeros((50, 100_000))}, {"t": np.ones(50)})
        made: list[Any] = []
        threads = [threading.Thread(target=lambda: made.append(server.checkpoint())) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(made)) == 6
    assert replay.Server([replay.Table("t")], checkpoint_dir=tmp_path).info()["tables"]["t"]["size"] == 50


@pytest.mark.parametrize("file", ["index.msgpack", "chunks.bin"])
def test_one_wrong_bit_is_noticed(file: str, tmp_path: Path) -> None:
    with replay.Server([replay.Table("t")], checkpoint_dir=tmp_path) as server:
        server.client().insert_batch({"x": np.arange(400).reshape(20, 20)}, {"t": np.ones(20)})
        path = Path(server.checkpoint()) / file
    data = bytearray(path.read_bytes())
    for at in range(0, len(data), 97):
        path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        with pytest.raises(CheckpointError, match="damaged"):
            replay.Server([replay.Table("t")], checkpoint_dir=tmp_path)
