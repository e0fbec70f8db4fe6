"""What a replay table takes of a machine's memory: which columns it compresses, what it will come to, and a word in time.

Compressing and decompressing images takes longer than all else that a table does, so `auto` compresses only where the full table
would take a good part of the memory. Without compression its size is known before a run begins (`table_bytes`); with it only what
the table has come to says what it will be, so its role looks at that on the way (`MemoryForecast`), long before the memory is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from shoal.replay.table.columns import Column
from shoal.replay.table.table_core import TableCore
from shoal.roles.replay_config import ReplayConfig

__all__ = ["SLOT_BYTES", "MemoryForecast", "capacity_for", "chosen_compression", "codecs", "table_bytes"]

IMAGE_BYTES = 4096
"""Columns of bytes whose cells have this size or more are taken for images."""
SLOT_BYTES = 200
"""What a table keeps of an item besides its data: a row, links, its place in the index and in the sums of priorities."""
FIRST_LOOK, FEW = 5_000, 0.02
"""A table is judged when it has this many items, or this part of its capacity, or takes this part of the free memory."""
ROOMY = 0.5
"""A table that takes at most this part of the free memory when it is full is not compressed by `auto`."""
SURE = 0.9
"""Of the memory that there is: wires and batches take theirs only when they are used."""


def codecs(columns: tuple[Column, ...], compression: str) -> dict[str, str]:
    """How image columns are compressed: every item by itself, since batches are drawn item by item."""
    if compression == "none":
        return {}
    codec = "lz4" if compression == "auto" else compression
    return {column.spec.path: f"{codec}+rows" for column in columns
            if column.spec.dtype == np.uint8 and column.spec.cell_bytes >= IMAGE_BYTES}


def item_bytes(columns: tuple[Column, ...], config: ReplayConfig) -> int:
    """What an item takes: exact, or without the columns that are compressed the least."""
    squeezed = codecs(columns, config.compression)
    kept = sum(column.length * column.spec.cell_bytes for column in columns if column.spec.path not in squeezed)
    return kept + SLOT_BYTES


def table_bytes(columns: tuple[Column, ...], config: ReplayConfig, budget: int | None = None) -> int:
    """What one shard takes when it is full, or when `budget` env steps have been made: each ends at most one item."""
    return item_bytes(columns, config) * config.part(min(config.capacity, budget or config.capacity))


def capacity_for(columns: tuple[Column, ...], config: ReplayConfig, nbytes: int) -> int:
    """The largest capacity with which a shard takes at most `nbytes`."""
    return nbytes // item_bytes(columns, config) * config.shards


def chosen_compression(columns: tuple[Column, ...], config: ReplayConfig, budget: int | None, free: int) -> str:
    """What `auto` means for a table with all its shards: none where there is room."""
    if config.compression != "auto":
        return config.compression
    plain = config.shards * table_bytes(columns, replace(config, compression="none"), budget)
    return "none" if plain <= ROOMY * free else "lz4"


class MemoryForecast:
    """Says once if a table will not fit into the memory that there is, with the capacity that would."""

    def __init__(self, table: TableCore, config: ReplayConfig, together: int, free: Callable[[], int],
                 say: Callable[[str], None], budget: int | None = None) -> None:
        """`together` tables or shards share the memory of this machine; `free` says how much of it is free. A run of `budget` env
        steps makes no more items than that."""
        self._table, self._config, self._together, self._free, self._say = table, config, together, free, say
        self._part = config.part(min(config.capacity, budget or config.capacity))
        self._items = max(1.0, min(FIRST_LOOK, FEW * self._part))
        self._bytes = FEW * free() / together

    def look(self) -> None:
        """Judge when enough is in, then whenever that has doubled, until there was something to say."""
        size, nbytes = self._table.size, self._table.nbytes
        if not size or (size < self._items and nbytes < self._bytes):
            return
        self._items, self._bytes = 2.0 * size, 2.0 * nbytes
        config, taken, free = self._config, nbytes + SLOT_BYTES * size, self._free()
        each = self._together * taken / size  # what one more item in every shard takes of this machine
        there = SURE * (free + self._together * taken)
        if each * self._part <= there:
            return
        self._items = self._bytes = float("inf")
        self._say(f"--replay.capacity {config.capacity} is too much for the memory that there is: {size:,} items take "
                  f"{taken / 1e9:.3g} GB, so a full table would take {each * self._part / 1e9:.3g} GB, and {free / 1e9:.3g} GB are "
                  f"free; give --replay.capacity {int(there / each) * config.shards} or fewer")
