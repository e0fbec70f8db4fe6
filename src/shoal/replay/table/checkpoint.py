"""All tables of a core as plain values and rows, and back. The files are in `service.checkpoint_files`.

Compiled code has no bounds checks, so nothing that is loaded reaches it unchecked: a checkpoint may be damaged or made by hand.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt

from shoal.errors import CheckpointError
from shoal.replay.errors import InvalidItem, Refused, SignatureMismatch
from shoal.replay.table import fields
from shoal.replay.table.columns import Column, Spec, signature_of
from shoal.replay.table.compression import CODECS, check_encoded
from shoal.replay.table.descriptions import check_records, columns_of, reach, read_columns, read_spec, write_columns, write_spec
from shoal.replay.table.replay_core import Core
from shoal.replay.table.table_core import TableCore

__all__ = ["UnknownFormat", "check_lengths", "fill", "limiter_numbers", "packed", "snapshot", "unpacked"]

FORMAT = 1
MOST = 1 << 62
MOST_ROWS = 1 << 31
MOST_ITEM_BYTES = 1 << 40


class UnknownFormat(CheckpointError):
    """A checkpoint of another version of shoal: it is whole, but this version cannot read it."""


# -- saving


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
            described.append([*write_spec(spec), rows, codec, size])
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
        "layouts": [[write_columns(c), bool(g)] for c, g in zip(table.columns, state.groups, strict=True)],
        "keys": items[:, fields.KEY].tobytes(),
        "times": items[:, fields.TIMES].tobytes(),
        "shapes": items[:, fields.SHAPE].tobytes(),
        "priorities": state.values[slots, fields.PRIORITY].tobytes(),
        "born": state.values[slots, fields.BORN].tobytes(),
        "stamps": state.stamps[slots].tobytes(),
        "records": _records(table, slots).tobytes(),
        "counters": [table.limiter.inserts, table.limiter.samples, table.limiter.deletes],
        "next_key": int(state.meta[fields.NEXT_KEY]),
        "rng": int(table.rng[0]),
    }  # fmt: skip


def _records(table: TableCore, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """The records of all items, one after the other."""
    counts = table.state.items[slots, fields.SHAPE] & 0xFFFFFFFF
    ends = np.cumsum(counts)
    within = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
    records = np.empty((len(within), 4), np.int32)
    alone = np.repeat(counts == 1, counts)
    records[alone] = table.state.words[slots[counts == 1], fields.RECORD : fields.RECORD + 4]
    records[~alone] = table.state.records[(np.repeat(table.state.items[slots, fields.REC], counts) + within)[~alone]]
    return records


# -- loading


def unpacked(data: bytes, where: str) -> dict[str, Any]:
    """What `packed` made an index into; `where` names it in an error."""
    try:
        index: dict[str, Any] = msgpack.unpackb(data, strict_map_key=False)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise CheckpointError(f"{where} cannot be read: {type(error).__name__}: {error}") from error
    form = index.get("format") if isinstance(index, dict) else None
    if form != FORMAT:
        raise UnknownFormat(f"{where} has format {form!r}, this version reads {FORMAT}")
    return index


def check_lengths(index: dict[str, Any], nbytes: int, where: str) -> None:
    """Refuse an index that speaks of more rows than there are bytes."""
    try:
        told = sum(member[5] for _, members in index["groups"] for member in members if member is not None)
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise CheckpointError(f"{where} is damaged: its index is not one of groups of chunks") from error
    if told > nbytes:
        raise CheckpointError(f"{where} is damaged: its chunks are shorter than its index says")


def fill(core: Core, index: dict[str, Any], chunks: BinaryIO, where: str) -> None:
    """Fill an empty core from an index and the chunks it speaks of, one after the other."""
    try:
        _fill(core, index, chunks)
    except (
        Refused, InvalidItem, KeyError, ValueError, TypeError, IndexError, AttributeError, OverflowError, MemoryError,
    ) as error:  # fmt: skip
        raise CheckpointError(f"{where} is damaged: {type(error).__name__}: {error}") from error


def limiter_numbers(index: dict[str, Any], table: str, where: str) -> list[float]:
    """The values of `RateLimiter.config` that a table was saved with."""
    try:
        (found,) = (saved["config"]["limiter"] for saved in index["tables"] if saved["name"] == table)
        ratio, min_size, lo, hi = map(float, found)
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        raise CheckpointError(f"{where} is damaged: it does not say what its limiter was") from error
    if not (0 < ratio < math.inf and 1 <= min_size < math.inf and lo < hi):
        raise CheckpointError(f"{where} is damaged: a limiter cannot be {found}")
    return [ratio, min_size, lo, hi]


def _fill(core: Core, index: dict[str, Any], chunks: BinaryIO) -> None:
    saved = _SavedChunks.load(core, index["groups"], chunks)
    for table in index["tables"]:
        if table["name"] in core.tables:
            _load_table(core.tables[table["name"]], table, saved)
    core.store.drop(saved.stored.tolist())
    core.writers = {_whole(writer, "writer"): _whole(number, "a writer's number") for writer, number in index["writers"]}
    core.lost = _whole(index["lost"], "lost")


def _whole(value: Any, what: str, least: int = 0, most: int = MOST) -> int:
    """A whole number within bounds."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{what} is {str(value)[:40]}, not a whole number from {least} to {most}")
    return value


class _SavedChunks(NamedTuple):
    """The chunks of a checkpoint, each held once by the loader; arrays [n] in the order of the saved ids."""

    ids: npt.NDArray[np.int64]
    stored: npt.NDArray[np.int64]
    """Their ids in the store."""
    rows: npt.NDArray[np.int64]
    groups: npt.NDArray[np.int64]
    cells: npt.NDArray[np.int64]
    """The number of their dtype and shape in `kinds`."""
    kinds: dict[tuple[str, tuple[int, ...]], int]

    @classmethod
    def load(cls, core: Core, groups: list[Any], chunks: BinaryIO) -> _SavedChunks:
        """Read all chunks into the store."""
        kinds: dict[tuple[str, tuple[int, ...]], int] = {}
        found: list[tuple[int, int, int, int, int]] = []
        for number, (first, members) in enumerate(groups):
            specs, counts = _read_members(_whole(first, "a chunk id", most=MOST_ROWS), members)
            blobs = [None if member is None else chunks.read(member[5]) for member in members]
            for spec, count, member, data in zip(specs, counts, members, blobs, strict=True):
                if spec is not None and data is not None:
                    check_encoded(data, member[4], count, spec.cell_bytes)
            start = core.store.restore(specs, counts)
            for at, (spec, data) in enumerate(zip(specs, blobs, strict=True)):
                if spec is not None and data is not None:
                    core.store.fill(start + at, members[at][4], data)
                    kind = kinds.setdefault((spec.dtype.str, spec.shape), len(kinds))
                    found.append((first + at, start + at, counts[at], number, kind))
        table = np.array(sorted(found), np.int64).reshape(-1, 5)
        if len(np.unique(table[:, 0])) != len(table):
            raise ValueError("two chunks have the same id")
        ids, stored, rows, homes, cells = (np.ascontiguousarray(column) for column in table.T)
        return cls(ids, stored, rows, homes, cells, kinds)

    def find(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The places of saved ids in these arrays."""
        if not len(self.ids):
            raise IndexError("an item refers to a chunk, but there is none")
        places = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        if (self.ids[places] != ids).any():
            raise IndexError("an item refers to a chunk that is not there")
        return places

    def check(self, records: npt.NDArray[np.int32], columns: tuple[Column, ...], grouped: bool) -> None:
        """Refuse records int32[n, k, 4] that do not lie in rows of chunks of the right columns."""
        check_records(records, columns, grouped)
        low, high = reach(records)
        kinds = np.array([self.kinds.get((c.spec.dtype.str, c.spec.shape), -1) for c in columns], np.int64)
        first = self.find(records[:, :, 0].astype(np.int64))
        for at in range(len(columns)) if grouped else (0,):
            places = self.find(records[:, :, 0].astype(np.int64) + at)
            wanted = kinds[at] if grouped else kinds[columns_of(records, columns)]
            if (self.cells[places] != wanted).any():
                raise IndexError("a column refers to a chunk of another column")
            if (low < 0).any() or (high >= self.rows[places]).any():
                raise IndexError("an item refers to rows outside its chunk")
            if (self.groups[places] != self.groups[first]).any():
                raise IndexError("grouped columns lie in different groups")


def _read_members(first: int, members: Any) -> tuple[list[Spec | None], list[int]]:
    """The columns and rows of a group of chunks; None and 0 for members that were freed."""
    if not isinstance(members, list) or not members or first + len(members) > MOST_ROWS:
        raise ValueError("a group of chunks is not a list of chunks")
    specs: list[Spec | None] = []
    rows = []
    for member in members:
        if member is None:
            specs.append(None)
            rows.append(0)
            continue
        if not isinstance(member, list) or len(member) != 6 or member[4] not in CODECS:
            raise ValueError("a chunk is not [path, dtype, shape, rows, codec, bytes]")
        specs.append(read_spec(member[:3]))
        rows.append(_whole(member[3], "the rows of a chunk", most=MOST_ROWS))
        _whole(member[5], "the bytes of a chunk")
    return specs, rows


class _SavedItems(NamedTuple):
    """The items of a table, arrays [n]."""

    keys: npt.NDArray[np.int64]
    times: npt.NDArray[np.int64]
    shapes: npt.NDArray[np.int64]
    stamps: npt.NDArray[np.int64]
    priorities: npt.NDArray[np.float64]
    born: npt.NDArray[np.float64]

    @classmethod
    def read(cls, saved: dict[str, Any], layouts: int) -> _SavedItems:
        whole = [np.frombuffer(saved[name], np.int64).copy() for name in ("keys", "times", "shapes", "stamps")]
        real = [np.frombuffer(saved[name], np.float64).copy() for name in ("priorities", "born")]
        items = cls(whole[0], whole[1], whole[2], whole[3], real[0], real[1])
        if len({len(array) for array in items}) != 1:
            raise ValueError("its items have not as many keys as priorities")
        if not len(items.keys):
            return items
        keys = np.sort(items.keys)
        if keys[0] < 0 or keys[-1] >= MOST or (np.diff(keys) == 0).any() or items.times.min() < 0:
            raise ValueError("an item has a bad key or count")
        if not (np.isfinite(items.priorities).all() and np.isfinite(items.born).all() and items.priorities.min() >= 0):
            raise ValueError("an item has a bad priority or time")
        if items.shapes.min() < 0 or (items.shapes >> 32).max() >= layouts or (items.shapes & 0xFFFFFFFF).min() < 1:
            raise IndexError("an item has a layout that is not there")
        return items


def _load_table(table: TableCore, saved: dict[str, Any], chunks: _SavedChunks) -> None:
    layouts = [_read_layout(table, layout) for layout in saved["layouts"]]
    items = _SavedItems.read(saved, len(layouts))
    records = np.frombuffer(saved["records"], np.int32).reshape(-1, 4).copy()
    counts = items.shapes & 0xFFFFFFFF
    if counts.sum() != len(records):
        raise ValueError("the number of its items' records differs from the stored count")
    starts = np.cumsum(counts) - counts
    for shape in np.unique(items.shapes).tolist():
        count, (columns, grouped, _) = shape & 0xFFFFFFFF, layouts[shape >> 32]
        begin = starts[items.shapes == shape]
        chunks.check(records[begin[:, None] + np.arange(count)], columns, grouped)
    if len(records):
        records[:, 0] = chunks.stored[chunks.find(records[:, 0].astype(np.int64))]
    for begin, end in _alike(items.shapes):
        count, span = int(counts[begin]), slice(starts[begin], starts[end - 1] + counts[end - 1])
        part = records[span].reshape(end - begin, count, 4)
        table.restore(layouts[int(items.shapes[begin]) >> 32][2], items.priorities[begin:end], part, items.keys[begin:end])
    table.restored(items.keys, items.times, items.born, items.stamps, items.priorities)
    _load_counters(table, saved, int(items.keys.max(initial=-1)))


def _read_layout(table: TableCore, saved: Any) -> tuple[tuple[Column, ...], bool, int]:
    """The columns of a layout, whether they are grouped, and the table's number for it."""
    described, grouped = saved
    columns = read_columns(described)
    if type(grouped) is not bool or sum(c.length * c.spec.cell_bytes for c in columns) > MOST_ITEM_BYTES:
        raise ValueError("a layout is too large, or does not say whether its columns are grouped")
    table.signature = table.signature or signature_of(columns)
    try:
        return columns, grouped, table.layout(columns, grouped, bounded=False)
    except SignatureMismatch as error:
        if table.table.signature is not None:
            raise  # it is the table that was declared otherwise since
        raise ValueError(str(error)) from error


def _load_counters(table: TableCore, saved: dict[str, Any], largest_key: int) -> None:
    inserts, samples, _ = saved["counters"]
    limiter = table.limiter
    limiter.inserts, limiter.samples = _whole(inserts, "inserts"), _whole(samples, "samples")
    limiter.deletes = limiter.inserts - table.size
    next_key = _whole(saved["next_key"], "the next key", largest_key + 1)
    table.state.meta[fields.NEXT_KEY] = max(next_key, table.first_key)
    table.rng[0] = np.uint64(_whole(saved["rng"], "the state of the random numbers", most=(1 << 64) - 1))


def _alike(shapes: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Ranges of items with one layout and one number of records."""
    if not len(shapes):
        return
    edges = np.flatnonzero(np.diff(shapes)) + 1
    yield from itertools.pairwise([0, *edges.tolist(), len(shapes)])
