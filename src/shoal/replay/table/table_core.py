"""One table: its items in arrays, with operations that never block. Not safe for threads.

    writer ── records, priority ──▶ try_insert ──▶ limiter ──▶ items ──▶ remover takes the excess
    reader ◀── plan of copies ◀── try_draw ◀── limiter ◀── selector

A `try_` form does what the limiter allows and says how much that was.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.replay.errors import InvalidItem, SignatureMismatch
from shoal.replay.table import fields, item_kernels
from shoal.replay.table.arrays import ITEM_FIELDS, LINKS, META, TableArrays, write_addresses
from shoal.replay.table.chunks import ChunkStore
from shoal.replay.table.columns import Array, Column, check_signature, signature_of
from shoal.replay.table.gather_plan import encoded_chunks, lay_out
from shoal.replay.table.limiters import Rates
from shoal.replay.table.memory_pool import zeros
from shoal.replay.table.ordering import bounds
from shoal.replay.table.sampled_batch import BatchLayout, Info, padded_lengths, reaching
from shoal.replay.table.selectors import MAX_HEAP, MIN_HEAP, PRIORITIZED
from shoal.replay.table.sum_tree import rebuild, total, tree_arrays
from shoal.replay.table.table import Table

__all__ = ["Drawn", "TableCore"]

FIRST_SLOTS = 1024
DIRTY_LEAVES = 4096
REMEMBERED_BATCHES, REMEMBERED_DRAWS = 4, 4096
"""Batches whose slots are remembered for the updates that follow, and the largest of them."""
NO_LIMIT = 1 << 62
NONE_DRAWN = np.empty((3, 0), np.int64)


class Drawn(NamedTuple):
    """Drawn items: what is known about them, and the copies that bring their data into a batch."""

    info: Info
    layout: BatchLayout
    slots: npt.NDArray[np.int64]
    doomed: int
    rows: int


class TableCore:
    """Items of one table. Not safe for threads: its owner holds a lock."""

    def __init__(self, table: Table, store: ChunkStore, seed: int = 0, first_key: int = 1) -> None:
        self.table, self.store, self.limiter = table, store, table.limiter
        self.signature: dict[str, Array] | None = table.signature
        self.unknown_updates = self.refused_updates = self.refused_items = 0
        self._layouts: dict[tuple[tuple[Column, ...], bool], int] = {}
        self._last_layout: tuple[tuple[Column, ...], bool, int] = ((), False, -1)
        self.columns: list[tuple[Column, ...]] = []
        self._scratch: dict[str, Any] = {}
        self._batch_layouts: dict[Any, BatchLayout] = {}
        self._recent: deque[npt.NDArray[np.int64]] = deque(maxlen=REMEMBERED_BATCHES)
        self._last_batch: tuple[tuple[Column, ...], BatchLayout, npt.NDArray[np.int64]] | None = None
        self.first_key = first_key
        self._most = NO_LIMIT if table.soft else table.max_size
        self._most_bytes = NO_LIMIT if table.soft or table.max_bytes is None else table.max_bytes
        self.rates = Rates(self.limiter)
        self.rng = np.array([np.uint64(seed)], np.uint64)
        self._reset_arrays()
        store.watch(self)

    # -- arrays

    def _reset_arrays(self) -> None:
        slots = min(self._most + 1, FIRST_SLOTS)
        meta = np.zeros(META, np.int64)
        meta[[fields.HEAD, fields.TAIL, fields.FREE]] = -1
        meta[fields.REC_FREE :] = -1
        meta[fields.NEXT_KEY] = self.first_key
        meta[fields.SELECT], meta[fields.REMOVE] = self.table.selector.kind, self.table.remover.kind
        chosen = (self.table.selector, self.table.remover)
        meta[fields.STAMPED] = any(order.kind in (MIN_HEAP, MAX_HEAP) for order in chosen)
        drawn = [order.power for order in chosen if order.kind == PRIORITIZED]
        state = TableArrays(
            meta=meta,
            powers=np.array([*(order.power for order in chosen), *bounds(*drawn), self.table.selector.uniform_mix]),
            **_item_arrays(slots, None),
            links=np.zeros((slots, LINKS), np.int32),
            stamps=np.zeros(slots, np.int64),
            dense=np.zeros(slots, np.int64),
            index=_empty_index(slots),
            records=np.zeros((0, 4), np.int32),
            refs=np.zeros(self.store.capacity, np.int32),
            **self._orders(slots, None),
            dirty=np.zeros(DIRTY_LEAVES, np.int64),
            rng=self.rng,
            groups=np.zeros(0, np.int64),
            lengths=np.zeros((0, 0), np.int64),
            extents=np.zeros((0, 0), np.int64),
            sizes=np.zeros((0, 0), np.int64),
        )
        self._take(state)

    def _take(self, state: TableArrays) -> None:
        """Use these arrays from now on."""
        self.state = state
        self._addresses = write_addresses(state, self.store.arrays)

    def _orders(self, slots: int, old: TableArrays | None) -> dict[str, Any]:
        """Trees and heaps for selector and remover with room for `slots` slots, filled from the old ones."""
        select = None if old is None else (old.sel_tree, old.sel_offsets, old.sel_heap)
        remove = None if old is None else (old.rem_tree, old.rem_offsets, old.rem_heap)
        made: dict[str, Any] = {}
        made["sel_tree"], made["sel_offsets"], made["sel_heap"] = _order_arrays(self.table.selector.kind, slots, select)
        made["rem_tree"], made["rem_offsets"], made["rem_heap"] = _order_arrays(self.table.remover.kind, slots, remove)
        return made

    def grow_refs(self, chunks: int) -> None:
        refs = np.zeros(chunks, np.int32)
        refs[: self.state.refs.shape[0]] = self.state.refs
        self._take(self.state._replace(refs=refs))

    def chunk_resized(self, chunk: int, change: int) -> None:
        if self.state.refs[chunk] > 0:
            self.state.meta[fields.BYTES] += change

    def _make_room(self, count: int, records: int) -> None:
        """Room in the arrays for `count` more items and `records` more rows of records."""
        state = self.state
        meta, slots = state.meta, state.items.shape[0]
        wanted = slots if slots > self._most else min(int(meta[fields.SIZE]) + count, self._most) + 1
        if wanted > slots:
            grown = min(max(2 * slots, wanted), self._most + 1)
            index = _empty_index(grown)
            item_kernels.reindex(self._addresses, index)
            state = state._replace(
                **_item_arrays(grown, state.items), links=_grown(state.links, grown),
                stamps=_grown(state.stamps, grown), dense=_grown(state.dense, grown), index=index,
                **self._orders(grown, state),
            )  # fmt: skip
        if records and meta[fields.REC_TOP] + records > state.records.shape[0]:
            grown = max(2 * state.records.shape[0], int(meta[fields.REC_TOP]) + records)
            state = state._replace(records=_grown(state.records, grown))
        if state is not self.state:
            self._take(state)

    # -- layouts

    def layout(self, columns: tuple[Column, ...], grouped: bool, bounded: bool = True) -> int:
        """The number of an item layout; the first item fixes the signature of a table that has none.

        bounded: an item that alone has more bytes than the table may hold is refused; one of a checkpoint is kept.
        """
        if columns is self._last_layout[0] and grouped is self._last_layout[1]:
            return self._last_layout[2]  # hashing the columns of every insert would cost more than the insert
        number = self._layouts.get((columns, grouped))
        if number is not None:
            self._last_layout = (columns, grouped, number)
            return number
        if not columns:
            raise InvalidItem("an item needs at least one column")
        if self.signature is not None:
            check_signature(self.signature, columns, self.table.name)
        nbytes = sum(column.length * column.spec.cell_bytes for column in columns)
        if bounded and nbytes > self._most_bytes:
            raise InvalidItem(
                f"table {self.table.name!r} holds at most {self._most_bytes} bytes (max_bytes), this item alone has {nbytes}"
            )
        if any(a.spec.path >= b.spec.path for a, b in itertools.pairwise(columns)):
            raise InvalidItem("columns must come in the order of their paths, each once")
        for column, known in zip(columns, self.columns[0] if self.columns else columns, strict=True):
            if column.shape[1:] != known.shape[1:] or len(column.shape) != len(known.shape):
                raise SignatureMismatch(
                    f"table {self.table.name!r}, column {column.spec.path!r}: items of shapes {list(known.shape)} and "
                    f"{list(column.shape)} cannot be in one batch; only the first axis may vary"
                )
        number = len(self.columns)
        self._layouts[(columns, grouped)] = number
        self.columns.append(columns)
        groups = np.append(self.state.groups, len(columns) if grouped else 0)
        by_column = list(zip(*self.columns, strict=True))
        lengths = np.array([[column.length for column in layouts] for layouts in by_column], np.int64)
        extents = np.array([[column.extent for column in layouts] for layouts in by_column], np.int64)
        sizes = np.array([[column.spec.cell_bytes for column in layouts] for layouts in by_column], np.int64)
        self._take(self.state._replace(groups=groups, lengths=lengths, extents=extents, sizes=sizes))
        return number

    def shapes(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Of every column of a batch: its shape without the batch axis, as long as the longest item's, and its dtype."""
        known = {}
        for column, extents in zip(self.columns[0] if self.columns else (), self.state.extents, strict=True):
            reached, length = reaching(column, int(extents.max()))
            spec = reached.spec
            known[spec.path] = (spec.shape if reached.squeeze else (length, *spec.shape), spec.dtype)
        return known

    # -- operations

    @property
    def size(self) -> int:
        return int(self.state.meta[fields.SIZE])

    @property
    def nbytes(self) -> int:
        return int(self.state.meta[fields.BYTES])

    @property
    def mass(self) -> float:
        """The sum that a prioritized selector draws from, else the number of items."""
        if self.table.selector.kind == PRIORITIZED:
            return float(total(self.state.sel_tree, self.state.sel_offsets))
        return float(self.size)

    def try_insert(
        self,
        layout: int,
        priorities: npt.NDArray[np.float64],
        records: npt.NDArray[np.int32],
        keys: npt.NDArray[np.int64],
        status: npt.NDArray[np.int8],
        first: int = 0,
        fresh: bool = False,
    ) -> int:
        """Insert items first.. as far as the limiter allows; returns how many were handled (status says how).

        records is int32[n, k, 4]; keys are those of the items, or with fresh=True new ones are written there.
        """
        n, limiter, handled = len(priorities), self.limiter, 0
        if self.signature is None:
            self.signature = signature_of(self.columns[layout])
        while first + handled < n:
            rest = n - first - handled
            allowed = limiter.insertable(rest)
            self._make_room(rest, _record_rows(records))
            done, used, removed, refused = item_kernels.insert(
                self._addresses, keys, fresh, priorities, records, first + handled, allowed, time.time(), layout, self._most,
                self._most_bytes, status,
            )  # fmt: skip
            self.refused_items += refused
            limiter.inserts += used
            limiter.deletes += removed
            handled += done
            self.rates.note()
            if done == 0 or (allowed < rest and not limiter.can_insert(1)):
                break
        self.store.collect()
        return handled

    def restore(
        self, layout: int, priorities: npt.NDArray[np.float64], records: npt.NDArray[np.int32], keys: npt.NDArray[np.int64]
    ) -> None:
        """Insert items of a checkpoint past the limiter."""
        status = np.empty(len(keys), np.int8)
        self.signature = self.signature or signature_of(self.columns[layout])
        self._make_room(len(keys), _record_rows(records))
        item_kernels.insert(
            self._addresses, keys, False, priorities, records, 0, len(keys), time.time(), layout, self._most,
            self._most_bytes, status,
        )  # fmt: skip
        self.store.collect()

    def restored(
        self,
        keys: npt.NDArray[np.int64],
        times: npt.NDArray[np.int64],
        born: npt.NDArray[np.float64],
        stamps: npt.NDArray[np.int64],
        priorities: npt.NDArray[np.float64],
    ) -> None:
        """After the last `restore`: counts, ages, and the order in which priorities were last touched."""
        item_kernels.restore(self._addresses, keys, times, born)
        order = np.argsort(stamps, kind="stable")
        item_kernels.update(self._addresses, keys[order], priorities[order], self._slots_drawn(keys[:0]))

    def try_draw(self, n: int, counted: bool = True, limited: bool = True) -> Drawn | None:
        """Draw up to n items; None when the limiter allows none. The caller copies, then calls `finish`.

        Draws that are not `limited` are not held back by the limiter, and it does not count them.
        """
        allowed = self.limiter.sampleable(n) if limited else n
        if allowed <= 0:
            return None
        counts, numbers, size = np.empty((3, allowed), np.int64), np.empty((2, allowed)), self.size
        doomed = self._buffer("doomed", allowed if self.table.max_times_sampled else 1, 1, np.int64)
        longest = np.empty(self.state.lengths.shape[0], np.int64)
        drawn, gone, rows, alike = item_kernels.draw(
            self._addresses, allowed, self.limiter.min_size, self.table.max_times_sampled, counted and limited, counts, numbers,
            doomed[:, 0], longest,
        )  # fmt: skip
        if drawn == 0:
            return None
        if limited and counted:
            self.limiter.samples += drawn
        elif limited:
            self.limiter.reserved += drawn
        self.limiter.deletes += gone
        self.rates.note()
        if drawn < allowed:
            counts, numbers = counts[:, :drawn].copy(), numbers[:, :drawn].copy()
        info = Info(counts[1], numbers[0], numbers[1], counts[2], size)
        if drawn <= REMEMBERED_DRAWS:
            self._recent.appendleft(counts)
        return Drawn(info, self._batch_layout(counts[0], longest, info, alike), counts[0], gone, rows)

    def consume(self, keys: npt.NDArray[np.int64]) -> None:
        """Uncounted draws were consumed after all."""
        self.limiter.reserved -= len(keys)
        self.limiter.samples += len(keys)
        item_kernels.count_sampled(self._addresses, keys)

    def release(self, count: int) -> None:
        """Uncounted draws will not be consumed."""
        self.limiter.reserved -= count

    def _batch_layout(
        self, slots: npt.NDArray[np.int64], longest: npt.NDArray[np.int64], info: Info, alike: bool
    ) -> BatchLayout:
        columns = self.columns[int(self.state.items[slots[0], fields.SHAPE]) >> 32]
        if not alike:
            layouts = self.state.items[slots, fields.SHAPE] >> 32
            info.lengths = padded_lengths(columns, self.state.extents[:, layouts])
        known = self._last_batch
        if known is not None and columns is known[0] and len(slots) == known[1].count and (longest == known[2]).all():
            return known[1]  # hashing the columns costs more than the draw
        key = (columns, len(slots), longest.tobytes())
        layout = self._batch_layouts.get(key)
        if layout is None:
            if len(self._batch_layouts) > 256:
                self._batch_layouts.clear()
            reached = [reaching(column, extent) for column, extent in zip(columns, longest.tolist(), strict=True)]
            layout = BatchLayout(tuple(column for column, _ in reached), len(slots), tuple(length for _, length in reached))
            self._batch_layouts[key] = layout
        self._last_batch = (columns, layout, longest)
        return layout

    def plan(self, drawn: Drawn, address: int) -> tuple[npt.NDArray[np.int64], int]:
        """The copies that gather the drawn items at an address; call before `finish`. Rows that were compressed by themselves are
        brought there at once."""
        count = drawn.layout.count
        if self.store.compression:
            found = np.empty(max(1, drawn.rows), np.int64)
            some = encoded_chunks(self._addresses, drawn.slots, count, found)
            self.store.materialize(set(found[:some].tolist()))
        plan = np.empty((drawn.rows, 5), np.int64)
        lay_out(self._addresses, drawn.slots, count, address, drawn.layout.geometry, plan)
        if self.store.compression and (encoded := plan[:, 1] < 0).any():
            plan = np.concatenate([plan[~encoded], self.store.decode_rows(plan[encoded])])
        return plan, len(plan)

    def finish(self, drawn: Drawn) -> None:
        """Let go of items whose last sample this was; their chunks stay readable until the reader ends."""
        if drawn.doomed:
            doomed = self._buffer("doomed", drawn.doomed, 1, np.int64)
            item_kernels.release(self._addresses, doomed[:, 0], drawn.doomed)
            self.store.collect()

    def update(self, keys: npt.NDArray[np.int64], priorities: npt.NDArray[np.float64]) -> tuple[int, int]:
        """Set priorities; returns (unknown keys, refused priorities), both also counted."""
        unknown, refused = item_kernels.update(self._addresses, keys, priorities, self._slots_drawn(keys))
        self.unknown_updates += unknown
        self.refused_updates += refused
        return unknown, refused

    def _slots_drawn(self, keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Slots and keys of the batch these keys were drawn in (a learner updates what it has just sampled), else of none."""
        if len(keys):
            first = keys[0]
            for counts in self._recent:
                if counts[1, 0] == first:
                    return counts
        return NONE_DRAWN

    def delete(self, keys: npt.NDArray[np.int64]) -> int:
        """Delete the items of known keys; returns how many there were."""
        removed = item_kernels.remove(self._addresses, keys)
        self.limiter.deletes += removed
        self.store.collect()
        return int(removed)

    def trim(self) -> int:
        """Let the remover take what is above max_size and max_bytes; returns how many items that were."""
        max_bytes = self.table.max_bytes if self.table.max_bytes is not None else NO_LIMIT
        removed = int(item_kernels.trim(self._addresses, self.table.max_size, max_bytes))
        self.limiter.deletes += removed
        self.store.collect()
        return removed

    def reset(self) -> None:
        """Remove all items, zero the limiter's counters and forget a signature that was only inferred."""
        item_kernels.remove(self._addresses, self.keys())
        self.store.collect()
        self.first_key = int(self.state.meta[fields.NEXT_KEY])
        self._reset_arrays()
        self.limiter.reset()
        self.signature = self.table.signature
        self._layouts.clear()
        self._recent.clear()
        self._last_layout = ((), False, -1)
        self.columns = []

    def number_from(self, key: int) -> None:
        """Give new items keys from here on, if none of that size was given yet."""
        self.state.meta[fields.NEXT_KEY] = max(int(self.state.meta[fields.NEXT_KEY]), key)

    def keys(self) -> npt.NDArray[np.int64]:
        """Keys of all items, oldest first."""
        keys: npt.NDArray[np.int64] = self.state.items[self.slots(), fields.KEY]
        return keys

    def slots(self) -> npt.NDArray[np.int64]:
        """Slots of all items, oldest first."""
        order = np.empty(self.size, np.int64)
        item_kernels.walk(self._addresses, order)
        return order

    def _buffer(self, name: str, rows: int, columns: int, dtype: Any) -> npt.NDArray[Any]:
        """Scratch memory, kept between calls."""
        array: npt.NDArray[Any] | None = self._scratch.get(name)
        if array is None or array.shape[0] < rows:
            array = self._scratch[name] = np.empty((max(rows, 256), columns), dtype)
        return array

    def info(self) -> dict[str, Any]:
        """Sizes, counters, ages and priorities."""
        live = self.state.dense[: self.size]
        priorities, ages = self.state.values[live, fields.PRIORITY], time.time() - self.state.values[live, fields.BORN]
        summary = {"min": 0.0, "mean": 0.0, "max": 0.0}
        return {
            "size": self.size,
            "max_size": self.table.max_size,
            "bytes": self.nbytes,
            "max_bytes": self.table.max_bytes,
            "unknown_updates": self.unknown_updates,
            "refused_updates": self.refused_updates,
            "refused_items": self.refused_items,
            "mass": self.mass,
            "priorities": _summary(priorities) if len(live) else summary,
            "age_seconds": _summary(ages) if len(live) else summary,
            "limiter": self.limiter.config(),
            **self.limiter.counters(),
            **self.rates.now(),
        }


def _summary(values: npt.NDArray[np.float64]) -> dict[str, float]:
    return {"min": float(values.min()), "mean": float(values.mean()), "max": float(values.max())}


def _record_rows(records: npt.NDArray[np.int32]) -> int:
    """Rows of the table's records that these items need; a single one lies with its item."""
    count, width, _ = records.shape
    return 0 if width == 1 else count * _power_of_two(width)


def _power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()


def _item_arrays(slots: int, old: npt.NDArray[np.int64] | None) -> dict[str, npt.NDArray[Any]]:
    """Item rows, each on a cache line of its own, and the same memory as floats and as small integers."""
    items = zeros((slots, ITEM_FIELDS), np.int64)
    if old is not None:
        items[: len(old)] = old
    return {"items": items, "values": items.view(np.float64), "words": items.view(np.int32)}


def _order_arrays(kind: int, slots: int, old: tuple[Any, Any, Any] | None) -> tuple[Any, Any, Any]:
    """The tree, its offsets and the heap of a selector or remover; of one place each where its kind needs none."""
    tree, offsets = tree_arrays(slots if kind == PRIORITIZED else 1)
    heap = np.zeros((2, slots if kind in (MIN_HEAP, MAX_HEAP) else 1), np.int64)
    if old is not None:
        leaves, old_offsets, old_heap = old
        used = min(int(old_offsets[1]), int(offsets[1]))
        tree[:used] = leaves[:used]
        rebuild(tree, offsets)
        heap[:, : old_heap.shape[1]] = old_heap
    return tree, offsets, heap


def _empty_index(slots: int) -> npt.NDArray[np.int64]:
    index = zeros((_power_of_two(2 * slots + 2), 2), np.int64)
    index.fill(-1)
    return index


def _grown(array: npt.NDArray[Any], rows: int) -> npt.NDArray[Any]:
    grown = zeros((rows, *array.shape[1:]), array.dtype)
    grown[: array.shape[0]] = array
    return grown
