"""The trajectory writer: appends steps, slices its history, makes items.

It is written once over a `ItemSink`: in-process the rows are written straight into the chunk store; a remote sink keeps them
until the server has confirmed the items that refer to them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.replay.client.backend import ItemSink
from shoal.replay.client.expressions import Expression
from shoal.replay.client.fork_safety import EndsAtFork
from shoal.replay.client.history import Cells, History, Segment
from shoal.replay.client.item_patterns import Literals, Patterns, chunk_rows, fewest_steps, many_records, one_record
from shoal.replay.errors import InvalidItem, SignatureMismatch
from shoal.replay.table.chunks import ChunkGroup
from shoal.replay.table.columns import Column, Spec, Tree, arrays_of, as_array, flatten

__all__ = ["Writer"]

SHORT_SEGMENT, SHORT_BYTES = 128, 1 << 15
"""Steps and bytes (of one environment) that a chunk may have however short the history is; a longer one makes for longer chunks."""


class Writer(EndsAtFork):
    """Appends steps of one environment (`append`) or of E at once (`append_batch`) and makes items of them."""

    def __init__(self, sink: ItemSink, max_history: int, timeout: float | None = None) -> None:
        super().__init__()
        if max_history < 1:
            raise InvalidItem(f"max_history must be at least 1, got {max_history}")
        self.history = History(max_history)
        self.timeout = timeout
        self._sink = sink
        self._envs: int | None = None
        self._literals: dict[Any, Literals] = {}
        self._last_literals: Literals | None = None
        self._zeros: dict[str, ChunkGroup] = {}
        self._patterns = Patterns()
        self._all_envs = np.arange(1)
        self._begun = np.zeros(1, np.int64)  # of every environment: the first step of its episode
        self._begun_last = 0

    @property
    def lost(self) -> int:
        """Confirmed items that a server lost in a crash, being newer than its last checkpoint."""
        return self._sink.lost

    # -- steps

    def append(self, step: Tree, partial: bool = False) -> None:
        """Append one step. With partial=True the step stays open: the next append gives more of its columns."""
        if self._append_again(step, 1, partial):
            return
        arrays = {path: leaf[None] for path, leaf in arrays_of(step).items()}
        self._append(arrays, 1, partial)

    def append_batch(self, step: Tree, partial: bool = False) -> None:
        """Append one step of E environments at once: every leaf is [E, ...]."""
        if self._append_again(step, self._envs or 0, partial):
            return
        arrays = arrays_of(step)
        sizes = {array.shape[0] if array.ndim else 0 for array in arrays.values()}
        if len(sizes) != 1 or 0 in sizes:
            raise SignatureMismatch(f"append_batch needs the same number of environments in every leaf, got {sizes}")
        self._append(arrays, sizes.pop(), partial)

    def _append_again(self, step: Tree, envs: int, partial: bool) -> bool:
        """A step like the one before, into the same segment; False where that is not so, or something is wrong with it."""
        history = self.history
        segment = history.segments[-1] if history.segments else None
        if segment is None or segment.row_plan is None or partial or history.open_paths or self._closed:
            return False
        if type(step) is not dict or len(step) != len(segment.row_plan) or segment.steps == segment.capacity or envs != self._envs:
            return False
        row = segment.steps * envs
        for path, dtype, shape, rows in segment.row_plan:
            value = step.get(path)
            if not isinstance(value, (np.ndarray, np.generic)):
                value = np.asarray(value)
            if value.dtype is not dtype and value.dtype != dtype:
                return False
            if envs == 1 and value.shape == shape[1:]:
                rows[row] = value
            elif value.shape == shape and envs > 1:
                rows[row : row + envs] = value
            else:
                return False  # a row that is not counted is written again
        segment.steps += 1
        history.steps += 1
        if len(history.segments) > 1:
            self._close_groups(history.forget())
        return True

    def _append(self, arrays: Mapping[str, npt.NDArray[Any]], envs: int, partial: bool) -> None:
        self._check_open()
        if self._envs is None:
            self._envs, self._begun, self._all_envs = envs, np.zeros(envs, np.int64), np.arange(envs)
        if envs != self._envs:
            raise SignatureMismatch(f"a step of {envs} environments; this writer began with {self._envs}")
        history = self.history
        for path, array in arrays.items():
            spec = history.specs.get(path)
            if spec is not None:
                spec.check(array, 1)
            if path in history.open_paths:
                raise InvalidItem(f"column {path!r} was already given in this step")
        if not history.specs:
            check_paths(arrays)
        for path, array in arrays.items():
            if path not in history.specs:
                history.specs[path] = Spec(path, array.dtype, array.shape[1:])
        segment = self._segment(arrays, envs)
        row = segment.steps * envs
        for path, array in arrays.items():
            segment.where[path][1][row : row + envs] = array
        history.open_paths.update(arrays)
        if not partial:
            self._end_step(segment)

    def _segment(self, arrays: Mapping[str, Any], envs: int) -> Segment:
        """The segment of the step under way, with chunks for all these columns."""
        history = self.history
        segment = history.segments[-1] if history.segments else None
        if segment is None or segment.steps == segment.capacity:
            specs = tuple(history.specs.values())
            row_bytes = max(1, sum(spec.cell_bytes for spec in specs))
            most = self._sink.chunk_bytes()
            short = min(SHORT_SEGMENT, SHORT_BYTES // row_bytes)
            capacity = max(fewest_steps(most), min(chunk_rows(specs, envs, most) // envs, max(short, 4 * history.max_history)))
            segment = Segment(history.steps, capacity, envs)
            history.segments.append(segment)
        new = sorted(path for path in arrays if path not in segment.where)
        if new:
            group = self._sink.open([history.specs[path] for path in new], segment.capacity * envs)
            segment.add(group)
            self._patterns.opened(group, len(segment.groups) == 1)
            for path in new:
                if segment.steps:
                    segment.absent[path] = set(range(segment.first, segment.first + segment.steps))
        return segment

    def _end_step(self, segment: Segment) -> None:
        history = self.history
        for path in segment.where.keys() - history.open_paths:
            segment.absent.setdefault(path, set()).add(history.steps)
        segment.steps += 1
        history.steps += 1
        if len(history.open_paths) == len(segment.where) and not segment.absent:
            segment.row_plan = tuple(
                (path, history.specs[path].dtype, (segment.envs, *history.specs[path].shape), rows)
                for path, (_, rows) in segment.where.items()
            )
        else:
            segment.row_plan = None
        history.open_paths.clear()
        self._close_groups(history.forget())

    def _close_groups(self, segments: Sequence[Segment]) -> None:
        """Nothing can be selected from these segments any more."""
        for segment in segments:
            for group in segment.groups:
                self._sink.close(group, segment.steps * segment.envs)

    @property
    def episode_steps(self) -> npt.NDArray[np.int64]:
        """Of every environment: how many steps of its episode the history holds, [E]."""
        return self.history.steps - np.maximum(self._begun, self.history.oldest)

    # -- items

    def create_item(
        self, table: str, priority: float | Expression, data: Tree, timeout: float | None = -1.0
    ) -> int | None:
        """Make one item of history cells, expressions over the history, or values. Returns its key where it is known.

        The priority may be an expression with one value, such as 0.9 * abs(td).max() + 0.1 * abs(td).mean().
        """
        if self._envs not in (None, 1):
            raise InvalidItem("this writer appends batches: use create_items")
        self._check_open()
        if isinstance(priority, Expression):
            priority = float(self._priorities(priority, self._all_envs)[0])
        wait = self.timeout if timeout is not None and timeout < 0 else timeout
        found = self._patterns.key(self.history, data, True)
        pattern = None if found is None else self._patterns.find(found[0], self.history, self._begun_last)
        if found is not None and pattern is not None:
            records = one_record(pattern, self.history, found[1])
            return self._sink.insert_one(table, pattern.columns, pattern.grouped, records, _as_priority(priority), wait)
        keys = self._create_items(table, [priority], data, self._all_envs, wait, True)
        return int(keys[0]) if len(keys) else None

    def create_items(
        self, table: str, priorities: Any, data: Tree, where: Any = None, timeout: float | None = -1.0
    ) -> npt.NDArray[np.int64]:
        """One item for every environment (those chosen by `where`, a mask or indices), without a loop over them.

        Values that are not history cells have the shape [n, ...], n being the number of items.
        """
        self._check_open()
        wait = self.timeout if timeout is not None and timeout < 0 else timeout
        return self._create_items(table, priorities, data, self._chosen(where), wait, False)

    def _create_items(
        self, table: str, priorities: Any, data: Tree, envs: npt.NDArray[np.int64], timeout: float | None, single: bool
    ) -> npt.NDArray[np.int64]:  # fmt: skip
        if isinstance(priorities, Expression):
            priorities = self._priorities(priorities, envs)
        values = _as_priorities(priorities, len(envs))
        found = self._patterns.key(self.history, data, single)
        pattern = None
        if found is not None and envs is self._all_envs and (
            single or not found[1] or all(len(value) == len(envs) for value in found[1].values())
        ):
            pattern = self._patterns.find(found[0], self.history, self._begun_last)
        if found is not None and pattern is not None and not single:
            columns, grouped = pattern.columns, pattern.grouped
            records = many_records(pattern, self.history, found[1], len(envs))
        else:
            flat = flatten(data)
            columns, grouped, records, literals = self._resolve(flat, envs, single)
            if found is not None:
                self._patterns.learn(found[0], columns, grouped, flat, literals)
        return self._sink.insert(table, columns, grouped, records, values, timeout)

    def _chosen(self, where: Any) -> npt.NDArray[np.int64]:
        count = self._envs or 1
        if where is None:
            return self._all_envs
        chosen = np.asarray(where)
        if chosen.dtype == np.bool_:
            chosen = np.flatnonzero(chosen)
        if chosen.size and not (chosen.min() >= 0 and chosen.max() < count):
            raise InvalidItem(f"where names environments outside 0..{count - 1}")
        return chosen.astype(np.int64)

    def _resolve(
        self, data: Mapping[str, Any], envs: npt.NDArray[np.int64], single: bool
    ) -> tuple[tuple[Column, ...], bool, npt.NDArray[np.int32], Literals | None]:
        """Columns in the order of their paths, records int32[n, k, 4], and where values were stored."""
        if not data:
            raise InvalidItem("an item needs at least one column")
        literals: dict[str, npt.NDArray[Any]] = {}
        found: dict[str, tuple[Column, list[tuple[int, int, int, int]]]] = {}
        for path, leaf in data.items():
            if isinstance(leaf, Cells):
                spec = self.history.specs[leaf.path]
                self._check_episodes(leaf, envs)
                column = Column(Spec(path, spec.dtype, spec.shape), leaf.length, leaf.squeeze)
                found[path] = (column, self.history.locate(leaf) + self._zero_records(leaf))
            elif isinstance(leaf, Expression):
                literals[path] = self._evaluate(leaf, envs)
            else:
                literals[path] = as_array(leaf, path)[None] if single else as_array(leaf, path)
        shifts: dict[str, npt.NDArray[np.int64]] = dict.fromkeys(found, envs)
        store = None
        if literals:
            store, group, first = self._store_literals(literals, len(envs))
            for at, column in enumerate(store.columns):
                found[column.spec.path] = (column, [(group.first + at, first, 1, 1)])
                shifts[column.spec.path] = np.arange(len(envs))
        paths = sorted(found)
        columns = tuple(found[path][0] for path in paths)
        grouped = self._grouped([found[path][1] for path in paths])
        used = paths[:1] if grouped else paths
        base = np.array([record for path in used for record in found[path][1]], np.int32)
        records = np.repeat(base[None], len(envs), axis=0)
        if len(envs) > 1 or envs.any():
            records[:, :, 1] += np.repeat(
                np.stack([shifts[path] for path in used], 1), [len(found[path][1]) for path in used], axis=1
            )
        return columns, grouped, records, store

    def _zero_records(self, cells: Cells) -> list[tuple[int, int, int, int]]:
        """Zero cells after a selection: one row for each environment, stored once and referred to again and again."""
        if not cells.zeros:
            return []
        group = self._zeros.get(cells.path)
        if group is None:
            group = self._zeros[cells.path] = self._sink.open([self.history.specs[cells.path]], self._envs or 1)
            group.arrays[0][...] = np.zeros((), group.arrays[0].dtype)
        return [(group.first, 0, cells.zeros, 0 if cells.zeros > 1 else 1)]

    @staticmethod
    def _grouped(records: list[list[tuple[int, int, int, int]]]) -> bool:
        """Whether all columns select the same rows of chunks with consecutive ids."""
        first = records[0]
        return all(
            len(other) == len(first)
            and all(b[0] == a[0] + at and b[1:] == a[1:] for a, b in zip(first, other, strict=True))
            for at, other in enumerate(records)
        )

    def _check_episodes(self, cells: Cells, envs: npt.NDArray[np.int64]) -> None:
        late = envs[self._begun[envs] > cells.oldest]
        if late.size:
            raise InvalidItem(
                f"column {cells.path!r}: the selection reaches before the episode of environment {int(late[0])}"
            )

    def _priorities(self, expression: Expression, envs: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """An expression as priorities, [n]."""
        values = self._evaluate(expression, envs)
        if values.shape != envs.shape:
            raise InvalidItem(f"a priority is one number, but {expression!r} has the shape {list(values.shape[1:])}")
        return values.astype(np.float64)

    def _evaluate(self, expression: Expression, envs: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """An expression over the whole history of each environment, [n, ...]."""
        count = int(self.episode_steps[envs].min())
        if count < 1:
            raise InvalidItem("an expression needs at least one step of history")
        wanted = {path: self.history.select(path, slice(-count, None)) for path in expression.columns()}
        columns = {path: np.moveaxis(self.history.read(cells), 0, 1)[envs] for path, cells in wanted.items()}
        return expression.batch(columns)

    def _store_literals(
        self, values: Mapping[str, npt.NDArray[Any]], count: int
    ) -> tuple[Literals, ChunkGroup, int]:
        """Where values [count, ...] are stored, the group and the first row."""
        store = self._store_for(values, count)
        return store, *store.add([values[spec.path] for spec in store.specs], count)

    def _store_for(self, values: Mapping[str, npt.NDArray[Any]], count: int) -> Literals:
        """Where values [count, ...] belong."""
        store = self._last_literals
        if store is None or not store.takes(values):
            paths = sorted(values)
            arrays = [values[path] for path in paths]
            key = (*paths, *((a.dtype, a.shape[1:]) for a in arrays))
            store = self._literals.get(key)
            if store is None:
                specs = tuple(Spec(p, a.dtype, a.shape[1:]) for p, a in zip(paths, arrays, strict=True))
                store = self._literals[key] = Literals(self._sink, specs, count)
            self._last_literals = store
        for path, array in values.items():
            if len(array) != count:
                raise InvalidItem(f"column {path!r} has {len(array)} values for {count} items")
        return store

    def insert_rows(
        self, leaves: Mapping[str, npt.NDArray[Any]], count: int, priorities: Mapping[str, Any], timeout: float | None
    ) -> dict[str, npt.NDArray[np.int64]]:
        """Items of one step each, from rows [count, ...] that are stored once for all the tables."""
        self._check_open()
        values = {table: _as_priorities(given, count) for table, given in priorities.items()}
        store = self._store_for(leaves, count)
        if count > store.most:
            return self._insert_pieces(leaves, count, values, timeout, store.most)
        group, first = store.add([leaves[spec.path] for spec in store.specs], count)
        records = store.records(group, first, count)
        return {table: self._sink.insert(table, store.columns, True, records, given, timeout) for table, given in values.items()}

    def _insert_pieces(
        self, leaves: Mapping[str, npt.NDArray[Any]], count: int, priorities: Mapping[str, npt.NDArray[np.float64]],
        timeout: float | None, most: int,
    ) -> dict[str, npt.NDArray[np.int64]]:  # fmt: skip
        """Many rows, some at a time."""
        deadline = None if timeout is None else time.monotonic() + timeout
        keys: dict[str, list[npt.NDArray[np.int64]]] = {table: [] for table in priorities}
        for start in range(0, count, most):
            piece = slice(start, start + most)
            rows = {path: leaf[piece] for path, leaf in leaves.items()}
            rest = None if deadline is None else max(0.0, deadline - time.monotonic())
            given = {table: values[piece] for table, values in priorities.items()}
            for table, made in self.insert_rows(rows, min(most, count - start), given, rest).items():
                keys[table].append(made)
        return {table: np.concatenate(parts) for table, parts in keys.items()}

    # -- ends

    def end_episode(self, envs: Any = None) -> None:
        """The next step begins an episode: earlier ones cannot be selected. For some environments only, or for all."""
        self._check_open()
        history = self.history
        if history.open_paths:
            self._end_step(history.segments[-1])
        if envs is not None:
            self._begun[self._chosen(envs)] = self._begun_last = history.steps
            return
        self._begun[:] = self._begun_last = history.steps
        history.start = history.steps
        self._close_groups(tuple(history.segments))
        history.segments.clear()
        for store in self._literals.values():
            store.close()

    def flush(self, timeout: float | None = -1.0) -> None:
        """Wait until every item is confirmed."""
        self._check_open()
        self._sink.flush(self.timeout if timeout is not None and timeout < 0 else timeout)

    def close(self, timeout: float | None = -1.0) -> None:
        """Send what is left and let go of the chunks; an error says how many items were not confirmed."""
        if self._closed:
            return
        self.end_episode()
        for group in self._zeros.values():
            self._sink.close(group, group.rows)
        self._zeros.clear()
        self._closed = True
        self._sink.finish(self.timeout if timeout is not None and timeout < 0 else timeout)


def _as_priority(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InvalidItem(f"a priority is a number, got {value!r}") from None


def _as_priorities(given: Any, count: int) -> npt.NDArray[np.float64]:
    """One priority for each of `count` items."""
    try:
        values = np.ascontiguousarray(given, np.float64)
        return values if values.shape == (count,) else np.ascontiguousarray(np.broadcast_to(values, count))
    except (TypeError, ValueError):
        raise InvalidItem(f"priorities are numbers, one for all or one for each of {count} items, got {given!r}"[:300]) from None


def check_paths(paths: Mapping[str, Any]) -> None:
    if not paths:
        raise InvalidItem("a step needs at least one column")
