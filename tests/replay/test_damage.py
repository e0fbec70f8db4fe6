"""Checkpoints taken while writers go on, damaged, made by hand, on a full disk, and servers killed at random."""

from __future__ import annotations

import copy
import errno
import logging
import os
import random
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgpack
import numpy as np
import pytest

from shoal import replay
from shoal.errors import CheckpointError, ShoalError
from shoal.replay.service import checkpoint_files
from tests.replay.conftest import Start
from tests.replay.kills import kill_at_random

MUTATED = int(os.environ.get("SHOAL_FUZZ_CHECKPOINTS", "200"))


def table(**options: Any) -> replay.Table:
    return replay.Table("t", replay.Fifo(), **options)


def sizes(folder: Path, **options: Any) -> int:
    """The items that a server loads from a folder."""
    with replay.Server([table()], checkpoint_dir=folder, **options) as server:
        return int(server.info()["tables"]["t"]["size"])


# -- while writers go on


def test_rows_written_during_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer fills the next row of an open chunk after its bytes were summed."""
    with replay.Server([table()], checkpoint_dir=tmp_path) as server:
        writer = server.client().writer(max_history=4)

        def write() -> None:
            writer.append({"x": np.random.default_rng(0).random(900)})
            writer.create_item("t", 1.0, {"x": writer.history["x"][-1]})

        def sum_and_write(data: Any, start: int = 0) -> int:
            found = zlib.crc32(data, start)
            write()
            return found

        write()
        monkeypatch.setattr(checkpoint_files, "zlib", type("zlib", (), {"crc32": staticmethod(sum_and_write)}))
        server.checkpoint()
        monkeypatch.undo()
    assert sizes(tmp_path) == 1


def test_checkpoints_amid_clients(start: Start, tmp_path: Path) -> None:
    server, client = start(table(max_size=500), checkpoint_dir=tmp_path / "c", keep=100)
    stop = threading.Event()

    def write(seed: int) -> None:
        other = server.client(timeout=60) if server.address is None else replay.Client(server.address, timeout=60)
        rng = np.random.default_rng(seed)
        with other.writer(max_history=2) as writer:
            while not stop.is_set():
                writer.append({"x": rng.random(900)})
                writer.create_item("t", 1.0, {"x": writer.history["x"][-1]})
        other.close()

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    made = [Path(client.checkpoint(timeout=60)) for _ in range(8)]
    stop.set()
    for thread in threads:
        thread.join()
    assert all(checkpoint_files._is_whole(path) for path in made)


# -- damaged


def saved(folder: Path, count: int = 2) -> list[Path]:
    """Checkpoints of 1, 2, ... items."""
    made = []
    with replay.Server([table()], checkpoint_dir=folder, keep=10) as server:
        for i in range(count):
            server.client().insert({"x": np.full(50, i)}, {"t": 1.0})
            made.append(server.checkpoint())
    return made


def flip(file: Path, at: int = 30) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("restore", ["data", "saved"])
@pytest.mark.parametrize("file", ["chunks.bin", "index.msgpack", None])
def test_damaged_gives_way_to_the_one_before(
    file: str | None, restore: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A damaged checkpoint gives way to the one before."""
    made = saved(tmp_path, 3)
    if file is None:
        (made[2] / "chunks.bin").unlink()
    else:
        flip(made[2] / file)
    with caplog.at_level(logging.WARNING):
        assert sizes(tmp_path, restore=restore) == 2
    (told,) = caplog.messages
    assert str(made[2]) in told and made[1].name in told and ("damaged" in told or "cannot be read" in told)


def test_no_whole_checkpoint_is_an_error(tmp_path: Path) -> None:
    for path in saved(tmp_path):
        flip(path / "chunks.bin")
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints .* is whole.*restore='none'"):
        sizes(tmp_path)
    assert sizes(tmp_path, restore="none") == 0


def test_checkpoint_of_another_version(tmp_path: Path) -> None:
    """A checkpoint of another version is not passed over."""
    _, newer = saved(tmp_path)
    rewrite(newer, {"format": 99})
    with pytest.raises(CheckpointError, match="format 99"):
        sizes(tmp_path)


# -- made by hand


def rewrite(path: Path, changes: dict[str, Any]) -> None:
    """Change the index of a checkpoint, with the right checksum."""
    index = msgpack.unpackb((path / "index.msgpack").read_bytes(), strict_map_key=False)
    write_index(path, index | changes)


def write_index(path: Path, index: Any) -> None:
    data = msgpack.packb(index)
    (path / "index.msgpack").write_bytes(data)
    (path / "index.crc").write_bytes(str(zlib.crc32(data)).encode())


def crafted(folder: Path) -> tuple[Path, dict[str, Any]]:
    """A checkpoint of grouped and of other items, and its index."""
    with replay.Server([table()], checkpoint_dir=folder) as server:
        with server.client().writer(max_history=4) as writer:
            for i in range(12):
                writer.append({"x": np.full(3, i), "y": np.full(40, i, np.float32)})
                if i >= 3:
                    h = writer.history
                    writer.create_item("t", 1.0, {"x": h["x"][-2:], "y": h["y"][-2:]})
                    writer.create_item("t", 1.0, {"x": h["x"][[-1, -4]], "y": h["y"][-3:]})
        path = server.checkpoint()
    return path, msgpack.unpackb((path / "index.msgpack").read_bytes(), strict_map_key=False)


def set_records(index: dict[str, Any], field: int, value: int, at: int = 5) -> None:
    records = np.frombuffer(index["tables"][0]["records"], np.int32).reshape(-1, 4).copy()
    records[at, field] = value
    index["tables"][0]["records"] = records.tobytes()


def set_numbers(index: dict[str, Any], name: str, value: Any, kind: Any = np.int64) -> None:
    values = np.frombuffer(index["tables"][0][name], kind).copy()
    values[3] = value
    index["tables"][0][name] = values.tobytes()


def in_pieces(groups: list[Any]) -> list[Any]:
    """Every chunk in a group of its own, under the id that it had."""
    return [[first + at, [member]] for first, members in groups for at, member in enumerate(members)]


CRAFTED: dict[str, Any] = {
    "row too high": lambda index: set_records(index, 1, 10**8),
    "row negative": lambda index: set_records(index, 1, -5),
    "rows too many": lambda index: set_records(index, 2, 10**6),
    "step too wide": lambda index: set_records(index, 3, 10**7),
    "chunk unknown": lambda index: set_records(index, 0, 10**6),
    "chunk of another column": lambda index: set_records(index, 0, 1, at=1),
    "layout unknown": lambda index: set_numbers(index, "shapes", 99 << 32 | 1),
    "layout negative": lambda index: set_numbers(index, "shapes", -1 << 32 | 2),
    "group in pieces": lambda index: index.update(groups=in_pieces(index["groups"])),
    "records without end": lambda index: set_numbers(index, "shapes", 0xFFFFFFFF),
    "key negative": lambda index: set_numbers(index, "keys", -1),
    "key twice": lambda index: set_numbers(index, "keys", np.frombuffer(index["tables"][0]["keys"], np.int64)[0]),
    "priority not a number": lambda index: set_numbers(index, "priorities", np.nan, np.float64),
    "keys used again": lambda index: index["tables"][0].update(next_key=1),
    "fewer times": lambda index: index["tables"][0].update(times=b""),
    "column longer": lambda index: index["tables"][0]["layouts"][0][0][0].__setitem__(3, 1 << 30),
    "cell larger": lambda index: index["tables"][0]["layouts"][0][0][0].__setitem__(2, [1 << 20]),
    "rows of a chunk": lambda index: index["groups"][0][1][0].__setitem__(3, 1 << 30),
    "cell of a chunk": lambda index: index["groups"][0][1][0].__setitem__(2, [1 << 30]),
    "object cells": lambda index: index["groups"][0][1][0].__setitem__(1, "|O"),
    "codec of a chunk": lambda index: index["groups"][0][1][0].__setitem__(4, "zstd"),
    "groups that are none": lambda index: index.update(groups=[3]),
    "tables that are none": lambda index: index.update(tables={"t": 1}),
    "counters too large": lambda index: index["tables"][0].update(counters=[1 << 63, 0, 0]),
    "numbers of no writer": lambda index: index.update(writers=[[1, -1]]),
}


@pytest.mark.parametrize("name", sorted(CRAFTED))
def test_checkpoint_made_by_hand_is_refused(name: str, tmp_path: Path) -> None:
    path, index = crafted(tmp_path)
    CRAFTED[name](index)
    write_index(path, index)
    with pytest.raises(CheckpointError, match=r"is damaged|cannot be read"):
        sizes(tmp_path)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, index) inside an index."""
    for at, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, at
        if isinstance(inner, (list, dict)):
            yield from places(inner)


JUNK = (None, True, -1, 0, 1, 2, 7, 2**31 - 1, 2**31, 2**40, 2**62, 2**64 - 1, -(2**63), 0.5, float("nan"), float("inf"), "", "x",
        "|O", "<i8", "lz4", "zstd+rows", [], {}, [[]], [None], b"", b"\xff" * 8, [2**30, 2**30])  # fmt: skip


def mutate(index: Any, rng: random.Random) -> None:
    """One mistake: a value replaced, or bytes of an array changed or cut."""
    where, at = rng.choice(list(places(index)))
    value = where[at]
    if isinstance(value, bytes) and value and rng.random() < 0.9:
        data = bytearray(value)
        if rng.random() < 0.1:
            del data[rng.randrange(len(data)) :]
        else:
            start = rng.randrange(len(data)) // 4 * 4
            data[start : start + 4] = rng.choice([2**31 - 1, 0, 1, 3, 11, 12, 13, 2**32 - 1, 10**6]).to_bytes(4, "little")
        where[at] = bytes(data)
    else:
        where[at] = rng.choice(JUNK)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.filterwarnings("ignore:max_diff")  # a limiter that was made by hand
def test_mutated_checkpoints(tmp_path: Path) -> None:
    """Mutated checkpoints are loaded or refused with a sentence."""
    path, index = crafted(tmp_path)
    loaded, before = 0, 0
    for case in range(MUTATED):
        rng = random.Random(case)
        changed = copy.deepcopy(index)
        for _ in range(rng.choice([1, 1, 2, 3])):
            mutate(changed, rng)
        write_index(path, changed)
        try:
            with replay.Server([table()], checkpoint_dir=tmp_path, restore=rng.choice(["data", "saved"])) as server:
                loaded += 1
                if "t" in server.core.tables and (size := server.core.table("t").size):
                    server.client().sample("t", 2 * size, timeout=0)
        except ShoalError as error:
            assert str(error)
        if case == MUTATED // 4:
            before = resident()
    assert 0 < loaded < MUTATED and resident() - before < 100 << 20


# -- the disk


def test_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk costs the oldest checkpoint, not the newest."""
    sync = checkpoint_files._sync
    room = 10 << 20

    def full(file: BinaryIO) -> None:
        file.flush()
        if sum(found.stat().st_size for found in tmp_path.rglob("*.bin")) > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(file)

    monkeypatch.setattr(checkpoint_files, "_sync", full)
    with replay.Server([table()], checkpoint_dir=tmp_path, keep=3) as server:
        client = server.client()
        client.insert_batch({"x": np.zeros((4, 1 << 17))}, {"t": np.ones(4)})  # 4 MB
        first, second = server.checkpoint(), server.checkpoint()
        with caplog.at_level(logging.WARNING):
            third = server.checkpoint()
        assert not first.exists() and second.exists() and third.exists() and first.name in caplog.messages[0]
        room = 1 << 20
        with pytest.raises(CheckpointError, match="No space left"):
            server.checkpoint()
        assert third.exists()  # the last one is never given up
    monkeypatch.undo()
    assert sizes(tmp_path) == 4


# -- killed


@pytest.mark.parametrize(("kind", "kills"), [("ipc", ["server", "both"]), ("tcp", ["client", "server"])])
def test_random_kills(kind: str, kills: list[str], tmp_path: Path) -> None:
    """Random kills lose what is counted and nothing else."""
    result = kill_at_random(kind, tmp_path, kills, seed=len(kind))
    assert result["met"], result
