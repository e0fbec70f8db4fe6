"""Patterns: a program makes its items in few ways, again and again; what does not change between them is worked out once.

The key of a pattern is what was selected relative to the newest step, and the kind of the values given with the item. Knowing it,
an item's records follow from the segment under way by additions. A selection that reaches into an earlier segment, or a step that
is only partly appended, goes the long way (`Writer._resolve`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.replay.client.backend import RowRecord
from shoal.replay.client.history import Cells, History, Segment
from shoal.replay.table.chunks import CHUNK_BYTES, ChunkGroup
from shoal.replay.table.columns import Column, Spec, Tree, flatten

__all__ = ["Literals", "Pattern", "Patterns", "chunk_rows"]

MOST_ROWS = 256
FEWEST_STEPS = 4
MOST_PATTERNS = 1024
LARGEST_BATCH, LARGEST_BATCH_BYTES = 1 << 16, 1 << 24

def fewest_steps(chunk_bytes: int) -> int:
    """Steps that a chunk has at least, however large they are; one, where a table's byte limit asks for small chunks."""
    return FEWEST_STEPS if chunk_bytes >= CHUNK_BYTES else 1


def chunk_rows(specs: Sequence[Spec], envs: int = 1, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Rows of a chunk: about a megabyte of the whole group, within bounds; small rows of E environments get 32 steps."""
    row_bytes = max(1, sum(spec.cell_bytes for spec in specs))
    return max(fewest_steps(chunk_bytes), min(max(MOST_ROWS, 32 * envs), chunk_bytes // row_bytes))


class Literals:
    """Rows for values that are not in the history: computed by an expression, or given with the item."""

    def __init__(self, sink: Any, specs: tuple[Spec, ...], batch: int) -> None:
        self.sink, self.specs = sink, specs
        self.columns = tuple(Column(spec, 1, True) for spec in specs)
        bounded = sink.chunk_bytes()
        row_bytes = max(1, sum(spec.cell_bytes for spec in specs))
        most_bytes = LARGEST_BATCH_BYTES if bounded >= CHUNK_BYTES else bounded
        self.most = max(1, min(LARGEST_BATCH, most_bytes // row_bytes))
        """Rows at once: a chunk stays as long as one of its rows is used, so a larger batch makes several."""
        self.batch = min(batch, self.most)
        self.group: ChunkGroup | None = None
        self.filled = 0
        self._records: npt.NDArray[np.int32] | None = None

    def takes(self, values: Mapping[str, npt.NDArray[Any]]) -> bool:
        """Whether these values [n, ...] are of the columns kept here."""
        if len(values) != len(self.specs):
            return False
        for spec in self.specs:
            value = values.get(spec.path)
            if value is None or value.shape[1:] != spec.shape or (value.dtype is not spec.dtype and value.dtype != spec.dtype):
                return False
        return True

    def records(self, group: ChunkGroup, first: int, count: int) -> npt.NDArray[np.int32]:
        """Records of items of one row each, int32[count, 1, 4]; the same array is used again."""
        records = self._records
        if records is None or len(records) != count:
            records = self._records = np.ones((count, 1, 4), np.int32)
        records[:, 0, 0] = group.first
        records[:, 0, 1] = np.arange(first, first + count, dtype=np.int32)
        return records

    def add(self, arrays: Sequence[Any], count: int) -> tuple[ChunkGroup, int]:
        """Store [count, ...] rows; returns the group and the first row."""
        group = self.group
        if group is None or self.filled + count > group.rows:
            self.close()
            rows = chunk_rows(self.specs, self.batch, self.sink.chunk_bytes())
            group = self.group = self.sink.open(self.specs, max(rows, self.batch, count))
        first = self.filled
        self.filled = end = first + count
        for rows, values in zip(group.arrays, arrays, strict=True):
            rows[first:end] = values
        return group, first

    def close(self) -> None:
        if self.group is not None:
            self.sink.close(self.group, self.filled)
            self.group = None
        self.filled = 0


class RecordSource(NamedTuple):
    """Where one record of an item comes from: a value given with the item, or a selection from the history."""

    literal: int
    """The place among the values, or -1 for a selection."""
    path: str
    start: int
    """Relative to the end of the history."""
    cells: int
    step: int


class Pattern(NamedTuple):
    """What the items made in one way have in common."""

    columns: tuple[Column, ...]
    grouped: bool
    sources: tuple[RecordSource, ...]
    literals: Literals | None
    literal_paths: tuple[str, ...]
    reach: int
    """The oldest step, relative to the end."""
    shifts: dict[int, npt.NDArray[np.int32]]
    """For n items: the parts of their records that never change, int32[n, k, 4]."""
    last: list[int]
    """Of a pattern with one source: the chunk and first row that its records have now."""


class Patterns:
    """The patterns of one writer."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Pattern] = {}
        self._paths: tuple[str, ...] = ()

    def opened(self, group: ChunkGroup, alone: bool) -> None:
        """A segment has a new group: patterns hold for segments with one group of the same columns."""
        paths = tuple(spec.path for spec in group.specs)
        if not alone or paths != self._paths:
            self._known.clear()
            self._paths = paths if alone else ()

    @staticmethod
    def key(history: History, data: Tree, single: bool) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The key of these items and the values given with them; None where no pattern can serve."""
        if type(data) is not dict:
            data = flatten(data)
        end, newest = history.steps, history.newest()
        key: list[tuple[Any, ...]] = []
        values: dict[str, Any] = {}
        for path, leaf in data.items():
            if type(leaf) is Cells:
                if leaf.runs is newest and leaf.squeeze:
                    key.append((path, leaf.path, -1, 1, 1, True))
                    continue
                if len(leaf.runs) != 1 or leaf.zeros:
                    return None
                start, cells, step = leaf.runs[0]
                key.append((path, leaf.path, start - end, cells, step, leaf.squeeze))
            elif isinstance(leaf, (np.ndarray, np.generic, float, int)):
                value: Any = leaf if isinstance(leaf, (np.ndarray, np.generic)) else np.asarray(leaf)
                values[path] = value
                key.append((path, value.dtype, value.shape if single else value.shape[1:]))
            elif isinstance(leaf, Mapping):
                return Patterns.key(history, flatten(data), single)
            else:
                return None
        return tuple(key), values

    def find(self, key: tuple[Any, ...], history: History, begun: int) -> Pattern | None:
        """The pattern of a key, if the segment under way holds all that it selects; begun is where the episode began."""
        pattern = self._known.get(key)
        if pattern is None or history.open_paths or not history.segments:
            return None
        segment, first = history.segments[-1], history.steps + pattern.reach
        if segment.absent or first < segment.first or first < begun or pattern.reach < -history.max_history:
            return None
        return pattern

    def learn(
        self, key: tuple[Any, ...], columns: tuple[Column, ...], grouped: bool, data: Mapping[str, Any],
        literals: Literals | None,
    ) -> None:  # fmt: skip
        """Remember how items of this key are made."""
        entries = {entry[0]: entry for entry in key}
        places = tuple(path for path in sorted(data) if len(entries[path]) == 3)
        sources: list[RecordSource] = []
        for column in columns[:1] if grouped else columns:
            entry = entries[column.spec.path]
            if len(entry) == 3:
                sources.append(RecordSource(places.index(entry[0]), "", 0, 1, 1))
            else:
                sources.append(RecordSource(-1, entry[1], entry[2], entry[3], entry[4]))
        reach = min((min(e[2], e[2] + (e[3] - 1) * e[4]) for e in key if len(e) == 6), default=-1)
        if len(self._known) >= MOST_PATTERNS:
            self._known.clear()
        self._known[key] = Pattern(columns, grouped, tuple(sources), literals, places, reach, {}, [-1, 0])


def one_record(pattern: Pattern, history: History, values: Mapping[str, Any]) -> list[RowRecord]:
    """The records of one item of one environment."""
    segment = history.segments[-1]
    where, end = segment.where, history.steps - segment.first
    if pattern.literals is None:
        return [(where[path][0], end + start, cells, step if cells > 1 else 1) for _, path, start, cells, step in pattern.sources]
    group, row = pattern.literals.add([values[path] for path in pattern.literal_paths], 1)
    return [
        (group.first + literal, row, 1, 1) if literal >= 0 else (where[path][0], end + start, cells, step if cells > 1 else 1)
        for literal, path, start, cells, step in pattern.sources
    ]


def many_records(pattern: Pattern, history: History, values: Mapping[str, Any], envs: int) -> npt.NDArray[np.int32]:
    """The records of one item of every environment, int32[E, k, 4]; the next call may use the same array again."""
    segment: Segment = history.segments[-1]
    base = pattern.shifts.get(envs)
    if base is not None and len(pattern.sources) == 1 and pattern.literals is None:
        _, path, start, _, _ = pattern.sources[0]
        chunk, first, last = segment.where[path][0], (history.steps - segment.first + start) * envs, pattern.last
        base[:, 0, 1] += first - last[1]
        if last[0] != chunk:
            base[:, 0, 0] = chunk
        last[:] = chunk, first
        return base
    if base is None:
        base = np.zeros((envs, len(pattern.sources), 4), np.int32)
        base[:, :, 1] = np.arange(envs)[:, None]
        base[:, :, 2] = [source.cells for source in pattern.sources]
        base[:, :, 3] = [source.step * envs if source.cells > 1 else 1 for source in pattern.sources]
        pattern.shifts[envs] = base
    stored = None if pattern.literals is None else pattern.literals.add([values[p] for p in pattern.literal_paths], envs)
    moved = np.zeros((len(pattern.sources), 4), np.int32)
    end = history.steps - segment.first
    for at, (literal, path, start, _, _) in enumerate(pattern.sources):
        if literal >= 0:
            assert stored is not None
            moved[at, 0], moved[at, 1] = stored[0].first + literal, stored[1]
        else:
            moved[at, 0], moved[at, 1] = segment.where[path][0], (end + start) * envs
    records: npt.NDArray[np.int32] = base + moved
    return records
