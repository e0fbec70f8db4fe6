"""Checkpoints on disk: all tables at one instant, written while writers continue, loaded whole or not at all.

    DIR/checkpoint-000007/index.msgpack    tables, items, groups of chunks, the last number of every writer
                         /chunks.bin       the chunks' rows, one after the other
                         /index.crc        the index's checksum; that of the rows is in the index

Under the lock only the records are copied. The rows are written from the store while it stays in use: a block that is freed
meanwhile is not reused before the last reader has ended, and rows that items refer to are never written again. A directory gets
its name after its files are on disk.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from shoal.errors import CheckpointError, ConfigError, ShoalError
from shoal.files import sync
from shoal.replay.table.checkpoint import UnknownFormat, check_lengths, fill, packed, snapshot, unpacked
from shoal.replay.table.columns import Array, unflatten
from shoal.replay.table.limiters import RateLimiter
from shoal.replay.table.locked_core import LockedCore
from shoal.replay.table.replay_core import Core
from shoal.replay.table.selectors import selector_from
from shoal.replay.table.table import Table

__all__ = ["check_writable", "load", "newest_first", "restored", "save", "saved_tables"]

LOG = logging.getLogger("shoal.replay")
NAME = re.compile(r"checkpoint-(\d{6,})")
PIECE_BYTES = 1 << 20
FULL = (errno.ENOSPC, errno.EDQUOT)


class SavedLimiter(RateLimiter):
    """One that was accepted when it was made: also the narrow band of Queue(1)."""

    narrowest = 1.0


def numbered(directory: Path) -> list[tuple[int, Path]]:
    """The finished checkpoints in a directory, oldest first."""
    if not directory.is_dir():
        return []
    found = [(int(match[1]), path) for path in directory.iterdir() if (match := NAME.fullmatch(path.name))]
    return sorted(found)


def newest_first(directory: Path) -> list[Path]:
    """The finished checkpoints in a directory, newest first."""
    return [path for _, path in reversed(numbered(directory))]


def check_writable(directory: Path) -> None:
    """Refuse a directory that cannot hold checkpoints, before anything is served."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"checkpoint")
    except OSError as error:
        raise ConfigError(f"checkpoints cannot be written to {directory}: {error.strerror}; choose another directory") from error


# -- saving


def save(locked: LockedCore, directory: Path, keep: int) -> Path:
    """Write a checkpoint and delete all but the newest `keep`."""
    with locked.saving:
        return _save(locked, directory, keep)


def _save(locked: LockedCore, directory: Path, keep: int) -> Path:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be made: {error}") from error
    for stale in directory.glob(".saving-*"):
        if not _alive(stale):
            shutil.rmtree(stale, ignore_errors=True)
    with locked.lock:
        index, blocks = snapshot(locked.core)
        ticket = locked.core.store.begin_read()
    try:
        final = _write_with_room(directory, index, blocks)
    finally:
        with locked.lock:
            locked.core.store.end_read(ticket)
    for _, old in numbered(directory)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def _write_with_room(directory: Path, index: dict[str, Any], blocks: Sequence[Any]) -> Path:
    """Write a checkpoint; on a full disk delete the oldest ones for it, but never the newest whole one."""
    number = (numbered(directory) or [(0, directory)])[-1][0] + 1
    while True:
        try:
            return _write(directory, number, index, blocks)
        except OSError as error:
            dropped = _make_room(directory, sum(_size(data) for data in blocks)) if error.errno in FULL else None
            if dropped is None:
                raise CheckpointError(f"checkpoint in {directory} failed, earlier ones are whole: {error}") from error
            LOG.warning("%s: the disk is full, so %s was deleted to save the newest tables", directory, dropped.name)


def _make_room(directory: Path, wanted: int) -> Path | None:
    """Delete the oldest checkpoint that is not needed; None where that cannot help."""
    found = newest_first(directory)
    whole = next((path for path in found if _is_whole(path)), None)
    spare = [path for path in reversed(found) if path != whole]
    room = shutil.disk_usage(directory).free + sum(file.stat().st_size for path in spare for file in path.iterdir())
    if not spare or room < wanted:
        return None
    shutil.rmtree(spare[0], ignore_errors=True)
    return None if spare[0].exists() else spare[0]


def _write(directory: Path, number: int, index: dict[str, Any], blocks: Sequence[Any]) -> Path:
    draft = directory / f".saving-{os.getpid()}-{number}-{id(index):x}"
    try:
        draft.mkdir()
        with open(draft / "chunks.bin", "wb") as file:
            sums = _write_rows(file, blocks)
            _sync(file)
        with open(draft / "index.msgpack", "wb") as file:
            raw = packed(index | {"chunks_crc": sums})
            file.write(raw)
            _sync(file)
        with open(draft / "index.crc", "wb") as file:
            file.write(str(zlib.crc32(raw)).encode())
            _sync(file)
        sync(draft)
        final = directory / f"checkpoint-{number:06d}"
        draft.rename(final)
        sync(directory)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return final


def _write_rows(file: BinaryIO, blocks: Iterable[Any]) -> int:
    """Write the rows and return their checksum.

    Writers fill the rows of open chunks meanwhile, so memory is read once: the same copy is summed and written.
    """
    sums = 0
    for data in blocks:
        raw = memoryview(data) if isinstance(data, bytes) else np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
        for start in range(0, len(raw), PIECE_BYTES):
            piece = bytes(raw[start : start + PIECE_BYTES])
            sums = zlib.crc32(piece, sums)
            file.write(piece)
    return sums


def _size(data: Any) -> int:
    return len(data) if isinstance(data, bytes) else int(data.nbytes)


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


# -- loading


def restored(paths: Sequence[Path], settings: bool, make: Callable[[Sequence[Table] | None], Core]) -> Core:
    """A core filled from the first whole checkpoint of these; a warning names every damaged one before it.

    `make` makes an empty core, of the saved tables where `settings` are to be restored too.
    """
    damaged: list[CheckpointError] = []
    for at, path in enumerate(paths):
        core: Core | None = None
        try:
            core = make(saved_tables(path) if settings else None)
            load(core, path)
            return core
        except BaseException as error:
            if core is not None:
                core.close()
            if not isinstance(error, CheckpointError) or isinstance(error, UnknownFormat):
                raise
            damaged.append(error)
            if at + 1 < len(paths):
                LOG.warning("%s; falling back to %s, which is older", error, paths[at + 1].name)
    if len(damaged) == 1:
        raise damaged[0]
    raise CheckpointError(
        f"none of the {len(damaged)} checkpoints in {paths[0].parent} is whole. The newest: {damaged[0]}. "
        "Start empty with restore='none' (--restore none), or name another directory"
    )


def read_index(path: Path) -> dict[str, Any]:
    try:
        data = (path / "index.msgpack").read_bytes()
        told = path / "index.crc"  # those of earlier versions have none
        if told.exists() and told.read_bytes() != str(zlib.crc32(data)).encode():
            raise CheckpointError(f"{path} is damaged: its index is not what was written")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return unpacked(data, str(path))


def saved_tables(path: Path) -> list[Table]:
    """The tables as they were configured when the checkpoint was made."""
    try:
        return [_saved_table(saved["name"], saved["config"]) for saved in read_index(path)["tables"]]
    except CheckpointError:
        raise
    except (ShoalError, KeyError, ValueError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{path} is damaged: its tables cannot be read: {type(error).__name__}: {error}") from error


def _saved_table(name: str, config: dict[str, Any]) -> Table:
    signature = config["signature"]
    return Table(
        name,
        selector_from(*config["selector"]),
        selector_from(*config["remover"]),
        config["max_size"],
        config["max_bytes"],
        config["max_times_sampled"],
        SavedLimiter(*config["limiter"]),
        None if signature is None else unflatten({p: Array(tuple(s), d) for p, (s, d) in signature.items()}),
        bool(config["soft"]),
    )


def load(core: Core, path: Path) -> None:
    """Fill an empty core. Items beyond the limits of the core's own tables go to their removers."""
    index = read_index(path)
    try:
        with open(path / "chunks.bin", "rb") as file:
            _check_rows(path, index, file)
            file.seek(0)
            fill(core, index, file, str(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _is_whole(path: Path) -> bool:
    try:
        with open(path / "chunks.bin", "rb") as file:
            _check_rows(path, read_index(path), file)
    except (OSError, CheckpointError):
        return False
    return True


def _check_rows(path: Path, index: dict[str, Any], file: BinaryIO) -> None:
    """Refuse rows that are not those that were written."""
    check_lengths(index, os.fstat(file.fileno()).st_size, str(path))
    sums = 0
    while block := file.read(PIECE_BYTES):
        sums = zlib.crc32(block, sums)
    if index.get("chunks_crc", sums) != sums:
        raise CheckpointError(f"{path} is damaged: its chunks are not what was written")
