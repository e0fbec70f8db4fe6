"""Checkpoints: all tables at one instant, written without stopping the writers, loaded whole or not at all.

    DIR/checkpoint-000007/index.msgpack    tables, items, groups of chunks, the last number of every writer
                         /chunks.bin       the chunks' rows, one after the other

Under the lock only the records are copied; the rows are written from the store while it goes on, since a block that is freed
meanwhile is not used again before the last reader has ended. A directory gets its name after its files are on disk.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgpack
import numpy as np
import numpy.typing as npt

from shoal.errors import CheckpointError
from shoal.replay import items as k
from shoal.replay.columns import Array, Column, Spec, unflatten
from shoal.replay.contents import TableCore
from shoal.replay.core import Core
from shoal.replay.limiters import RateLimiter
from shoal.replay.local import Local
from shoal.replay.selectors import selector_from
from shoal.replay.table import Table

__all__ = ["fill", "load", "newest", "packed", "save", "saved_tables", "snapshot", "unpacked"]

FORMAT = 1


class SavedLimiter(RateLimiter):
    """One that was accepted when it was made: also the narrow band of Queue(1)."""

    narrowest = 1.0


NAME = re.compile(r"checkpoint-(\d{6,})")


def numbered(directory: Path) -> list[tuple[int, Path]]:
    """The whole checkpoints in a directory, oldest first."""
    if not directory.is_dir():
        return []
    found = [(int(match[1]), path) for path in directory.iterdir() if (match := NAME.fullmatch(path.name))]
    return sorted(found)


def newest(directory: Path) -> Path | None:
    """The newest whole checkpoint."""
    found = numbered(directory)
    return found[-1][1] if found else None


# -- saving


def save(local: Local, directory: Path, keep: int) -> Path:
    """Write a checkpoint and delete all but the newest `keep`."""
    with local.saving:
        return _save(local, directory, keep)


def _save(local: Local, directory: Path, keep: int) -> Path:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be made: {error}") from error
    for stale in directory.glob(".saving-*"):
        if not _alive(stale):
            shutil.rmtree(stale, ignore_errors=True)
    with local.lock:
        index, blocks = snapshot(local.core)
        ticket = local.core.store.begin_read()
    number = (numbered(directory) or [(0, directory)])[-1][0] + 1
    draft = directory / f".saving-{os.getpid()}-{number}-{id(index):x}"
    sums = 0
    try:
        draft.mkdir()
        with open(draft / "chunks.bin", "wb") as file:
            for data in blocks:
                raw = data if isinstance(data, bytes) else np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
                sums = zlib.crc32(raw, sums)
                file.write(raw)
            _sync(file)
        with open(draft / "index.msgpack", "wb") as file:
            raw = packed(index | {"chunks_crc": sums})
            file.write(raw)
            _sync(file)
        with open(draft / "index.crc", "wb") as file:
            file.write(str(zlib.crc32(raw)).encode())
            _sync(file)
        _sync_directory(draft)
        final = directory / f"checkpoint-{number:06d}"
        draft.rename(final)
        _sync_directory(directory)
    except OSError as error:
        raise CheckpointError(f"checkpoint in {directory} failed, earlier ones are whole: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        with local.lock:
            local.core.store.end_read(ticket)
    for _, old in numbered(directory)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def _alive(draft: Path) -> bool:
    """Whether another process may still be writing a draft."""
    number = draft.name.split("-")[1]
    if not number.isdecimal():
        return True  # not one of ours
    pid = int(number)
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def snapshot(core: Core) -> tuple[dict[str, Any], list[Any]]:
    """Everything but the rows as plain values, and the rows as references; the lock is held."""
    groups, blocks = [], []
    for first, members in core.store.groups():
        described: list[Any] = []
        for chunk in members:
            if chunk is None:
                described.append(None)
                continue
            spec, rows, codec, data = core.store.stored(chunk)
            size = data.nbytes if codec == "none" else len(data)
            described.append([spec.path, spec.dtype.str, list(spec.shape), rows, codec, size])
            blocks.append(data)
        groups.append([first, described])
    index = {
        "format": FORMAT,
        "writers": list(core.writers.items()),
        "lost": core.lost,
        "groups": groups,
        "tables": [_table_to_data(table) for table in core.tables.values()],
    }
    return index, blocks


def packed(index: dict[str, Any]) -> bytes:
    data: bytes = msgpack.packb(index)
    return data


def _columns_to_data(columns: tuple[Column, ...]) -> list[Any]:
    return [[c.spec.path, c.spec.dtype.str, list(c.spec.shape), c.length, c.squeeze] for c in columns]


def _columns_from_data(data: list[Any]) -> tuple[Column, ...]:
    return tuple(
        Column(Spec(path, np.dtype(dtype), tuple(shape)), length, squeeze) for path, dtype, shape, length, squeeze in data
    )


def _table_to_data(table: TableCore) -> dict[str, Any]:
    state, slots = table.state, table.slots()
    items = state.items[slots]
    config = table.table
    return {
        "name": config.name,
        "config": {
            "selector": [type(config.selector).__name__, config.selector.power, config.selector.uniform_mix],
            "remover": [type(config.remover).__name__, config.remover.power, config.remover.uniform_mix],
            "max_size": config.max_size,
            "max_bytes": config.max_bytes,
            "max_times_sampled": config.max_times_sampled,
            "limiter": list(config.limiter.config().values()),
            "soft": config.soft,
            "signature": None if config.signature is None else {
                path: [list(a.shape), a.dtype.str] for path, a in config.signature.items()
            },
        },
        "layouts": [[_columns_to_data(c), bool(g)] for c, g in zip(table.columns, state.groups, strict=True)],
        "keys": items[:, k.KEY].tobytes(),
        "times": items[:, k.TIMES].tobytes(),
        "shapes": items[:, k.SHAPE].tobytes(),
        "priorities": state.values[slots, k.PRIORITY].tobytes(),
        "born": state.values[slots, k.BORN].tobytes(),
        "stamps": state.stamps[slots].tobytes(),
        "records": _records(table, slots).tobytes(),
        "counters": [table.limiter.inserts, table.limiter.samples, table.limiter.deletes],
        "next_key": int(state.meta[k.NEXT_KEY]),
        "rng": int(table.rng[0]),
    }  # fmt: skip


def _records(table: TableCore, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """The records of all items, one after the other."""
    counts = table.state.items[slots, k.SHAPE] & 0xFFFFFFFF
    ends = np.cumsum(counts)
    within = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
    records = np.empty((len(within), 4), np.int32)
    alone = np.repeat(counts == 1, counts)
    records[alone] = table.state.words[slots[counts == 1], k.RECORD : k.RECORD + 4]
    records[~alone] = table.state.records[(np.repeat(table.state.items[slots, k.REC], counts) + within)[~alone]]
    return records


# -- loading


def read_index(path: Path) -> dict[str, Any]:
    try:
        data = (path / "index.msgpack").read_bytes()
        told = path / "index.crc"  # those of earlier versions have none
        if told.exists() and told.read_bytes() != str(zlib.crc32(data)).encode():
            raise CheckpointError(f"{path} is damaged: its index is not what was written")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return unpacked(data, str(path))


def unpacked(data: bytes, where: str) -> dict[str, Any]:
    """What `packed` made an index into; `where` names it in an error."""
    try:
        index: dict[str, Any] = msgpack.unpackb(data, strict_map_key=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise CheckpointError(f"{where} cannot be read: {error}") from error
    form = index.get("format") if isinstance(index, dict) else None
    if form != FORMAT:
        raise CheckpointError(f"{where} has format {form!r}, this version reads {FORMAT}")
    return index


def saved_tables(path: Path) -> list[Table]:
    """The tables as they were configured when the checkpoint was made."""
    tables = []
    for saved in read_index(path)["tables"]:
        config = saved["config"]
        signature = config["signature"]
        tables.append(
            Table(
                saved["name"],
                selector_from(*config["selector"]),
                selector_from(*config["remover"]),
                config["max_size"],
                config["max_bytes"],
                config["max_times_sampled"],
                SavedLimiter(*config["limiter"]),
                None if signature is None else unflatten({p: Array(tuple(s), d) for p, (s, d) in signature.items()}),
                config["soft"],
            )
        )
    return tables


def load(core: Core, path: Path) -> None:
    """Fill an empty core. Items beyond the limits of the core's own tables go to their removers."""
    index = read_index(path)
    try:
        with open(path / "chunks.bin", "rb") as file:
            fill(core, index, file, file.name)
            file.seek(0)
            sums = 0
            while block := file.read(1 << 20):
                sums = zlib.crc32(block, sums)
        if index.get("chunks_crc", sums) != sums:
            raise CheckpointError(f"{path} is damaged: its chunks are not what was written")
    except (OSError, KeyError, ValueError, TypeError, IndexError) as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def fill(core: Core, index: dict[str, Any], chunks: BinaryIO, where: str) -> None:
    """Fill an empty core from an index and the chunks it speaks of, one after the other."""
    ids: dict[int, int] = {}
    opened = [_load_group(core, chunks, first, members, ids, where) for first, members in index["groups"]]
    for saved in index["tables"]:
        if saved["name"] in core.tables:
            _load_table(core.tables[saved["name"]], saved, ids)
    for chunk in (chunk for group in opened for chunk in group):
        core.store.drop([chunk])
    core.writers = {int(writer): int(number) for writer, number in index["writers"]}
    core.lost = int(index["lost"])


def _load_group(
    core: Core, file: BinaryIO, first: int, members: list[Any], ids: dict[int, int], where: str
) -> list[int]:
    """Chunks of one group, held by the loader; returns their ids."""
    specs = [None if m is None else Spec(m[0], np.dtype(m[1]), tuple(m[2])) for m in members]
    rows = [0 if m is None else m[3] for m in members]
    start = core.store.restore(specs, rows)
    kept = []
    for at, member in enumerate(members):
        if member is None:
            continue
        data = file.read(member[5])
        if len(data) != member[5]:
            raise CheckpointError(f"{where} is shorter than its index says")
        core.store.fill(start + at, member[4], data)
        ids[first + at] = start + at
        kept.append(start + at)
    return kept


def _load_table(table: TableCore, saved: dict[str, Any], ids: dict[int, int]) -> None:
    keys = np.frombuffer(saved["keys"], np.int64).copy()
    shapes = np.frombuffer(saved["shapes"], np.int64)
    priorities = np.frombuffer(saved["priorities"], np.float64).copy()
    records = np.frombuffer(saved["records"], np.int32).reshape(-1, 4).copy()
    if len(records):
        renumbered = np.zeros(max(ids) + 1, np.int32)
        renumbered[list(ids)] = list(ids.values())
        records[:, 0] = renumbered[records[:, 0]]
    layouts = [table.layout(_columns_from_data(columns), grouped, bounded=False) for columns, grouped in saved["layouts"]]
    at = 0
    for begin, end in _alike(shapes):
        count, layout = int(shapes[begin]) & 0xFFFFFFFF, int(shapes[begin]) >> 32
        span = (end - begin) * count
        part = records[at : at + span].reshape(end - begin, count, 4)
        table.restore(layouts[layout], priorities[begin:end], part, keys[begin:end])
        at += span
    table.restored(
        keys, np.frombuffer(saved["times"], np.int64), np.frombuffer(saved["born"], np.float64),
        np.frombuffer(saved["stamps"], np.int64), priorities,
    )  # fmt: skip
    limiter = table.limiter
    limiter.inserts, limiter.samples = int(saved["counters"][0]), int(saved["counters"][1])
    limiter.deletes = limiter.inserts - table.size
    table.state.meta[k.NEXT_KEY] = max(int(saved["next_key"]), table.first_key)
    table.rng[0] = np.uint64(saved["rng"])


def _alike(shapes: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Ranges of items with one layout and one number of records."""
    if not len(shapes):
        return
    edges = np.flatnonzero(np.diff(shapes)) + 1
    bounds = [0, *edges.tolist(), len(shapes)]
    yield from itertools.pairwise(bounds)
