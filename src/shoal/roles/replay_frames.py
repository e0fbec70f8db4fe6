"""Items that share frames (`learning.FrameStacks`), from an actor's insert into a table.

    insert   frames [F, H, W], each once          items: action, reward, ..., and for each stack the place of its first frame
    table    one chunk of F frames                records: one row of every other column, and for each stack the rows of its frames
    batch    whole stacks [B, 4, H, W]            as if they had been stored whole: the gathering of a batch makes them

An insert has all frames of its items, so it goes in whole or not at all, into any shard. Overlapping items of one insert share;
those of different inserts do not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shoal.acting import FramedItems, FrameStacks, StoredItems
from shoal.core import Tree
from shoal.replay.table.columns import Column, Spec, flatten
from shoal.replay.table.replay_core import Core, PendingInserts
from shoal.replay.table.table_core import TableCore
from shoal.slots import Field

__all__ = ["FrameTable", "frame_stacks", "insert_fields", "kept_columns", "unused_bytes"]

FRAMES, COUNT = "frames", "frame_count"


def frame_stacks(stored: StoredItems) -> FrameStacks | None:
    """What the items of a table share; None where they share nothing."""
    return stored.stacks if isinstance(stored, FramedItems) else None


def insert_fields(stored: StoredItems, count: int) -> dict[str, Any]:
    """The fields of `count` items as an insert carries them."""
    fields: dict[str, Any] = dict(stored.layout.joined(count).fields)
    stacks = frame_stacks(stored)
    if stacks is None:
        return fields
    for name in stacks.fields:
        fields[name] = Field(fields[name].shape[: -1 - len(stacks.shape)], "i4")
    frames = count * stacks.most + stacks.size  # each item on its own, and a stack of zeros
    return {**fields, FRAMES: Field((frames, *stacks.shape), stacks.dtype), COUNT: Field((1,), "i4")}


def unused_bytes(items: Tree) -> int:
    """Room for frames that an insert did not need."""
    return (len(items[FRAMES]) - int(items[COUNT][0])) * items[FRAMES][0].nbytes if FRAMES in items else 0


def kept_columns(stored: StoredItems, whole: tuple[Column, ...], count: int) -> tuple[Column, ...]:
    """What a table keeps of an item, of inserts of `count`: `whole` are its columns where nothing is shared."""
    stacks = frame_stacks(stored)
    if stacks is None:
        return whole
    each = max(1, round(stacks.frames(count) / count))
    return (*(column for column in whole if column.spec.path not in stacks.fields),
            Column(Spec(FRAMES, np.dtype(stacks.dtype), stacks.shape), each, False))


class FrameTable:
    """How inserts of `count` items that share frames go into a table."""

    def __init__(self, stacks: FrameStacks, whole: tuple[Column, ...], count: int) -> None:
        """`whole` are the columns of the same items where nothing is shared."""
        self._stacks, self._count = stacks, count
        self.columns = tuple(self._of_frames(column) if self._stacked(column) else column for column in whole)
        self._single = [column.spec for column in whole if not self._stacked(column)]
        self._frame = Spec(FRAMES, np.dtype(stacks.dtype), stacks.shape)
        lengths = [column.length // stacks.size if self._stacked(column) else 1 for column in self.columns]
        self._records = np.ones((count, sum(lengths), 4), np.int32)
        self._records[:, :, 1] = np.arange(count)[:, None]
        self._records[:, np.repeat([self._stacked(column) for column in self.columns], lengths), 2] = stacks.size

    def _stacked(self, column: Column) -> bool:
        return column.spec.path in self._stacks.fields

    def _of_frames(self, column: Column) -> Column:
        """The same bytes as rows of single frames."""
        spec, shape = column.spec, self._stacks.shape
        return Column(Spec(spec.path, spec.dtype, shape), int(np.prod(spec.shape[: -len(shape)])), False)

    def put(self, core: Core, table: TableCore, items: Tree, priority: np.ndarray, torn: Callable[[], bool] | None = None) -> bool:
        """Put all items of an insert into a table, or none, and say which: `torn` tells whether they have changed while they were
        copied."""
        given, records, store = flatten(items), self._records, core.store
        filled = int(given[COUNT][0])
        group, frames = store.open(self._single, self._count), store.open([self._frame], filled)
        for spec, into in zip(self._single, group.arrays, strict=True):
            into[...] = given[spec.path]
        frames.arrays[0][...] = given[FRAMES][:filled]
        at, chunk = 0, group.first
        for column in self.columns:
            if self._stacked(column):
                places = given[column.spec.path].reshape(self._count, -1)
                there = slice(at, at + places.shape[1])
                records[:, there, 0], records[:, there, 1] = frames.first, places
                at = there.stop
            else:
                records[:, at, 0] = chunk
                at, chunk = at + 1, chunk + 1
        insert = PendingInserts(table, self.columns, False, priority.copy(), records)
        whole = torn is None or not torn()
        if whole:
            insert.push()
        store.close(group, self._count)
        store.close(frames, filled)
        return whole
