"""A writer's history: the last steps of every column, and selections from it.

    writer.history["obs"][-3:]        a slice, with any step
    writer.history["obs"][-1]         one cell, without the time axis
    writer.history["obs"][[2, 0, 0]]  a list in any order, also with repeats

Steps are numbered from the writer's first; a negative index counts from the end. Cells of E environments lie side by side:
the row of step t and environment e in its segment is (t - first) * E + e.
"""

from __future__ import annotations

import contextlib
import operator
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.replay.errors import InvalidItem, NotFound
from shoal.replay.table.chunks import ChunkGroup
from shoal.replay.table.columns import Spec, unflatten

__all__ = ["Cells", "ColumnHistory", "History", "Segment", "StepRange"]


class StepRange(NamedTuple):
    """Steps start, start + step, ... (count of them)."""

    start: int
    cells: int
    step: int


class Cells(NamedTuple):
    """A selection from one column: runs of steps, whether the time axis is dropped, and zero cells that follow."""

    path: str
    runs: tuple[StepRange, ...]
    squeeze: bool
    zeros: int = 0

    @property
    def length(self) -> int:
        return sum(run.cells for run in self.runs) + self.zeros

    @property
    def oldest(self) -> int:
        return min(min(run.start, run.start + (run.cells - 1) * run.step) for run in self.runs)


class Segment:
    """Consecutive steps in one open or closed group of chunks."""

    def __init__(self, first: int, capacity: int, envs: int) -> None:
        self.first, self.capacity, self.envs = first, capacity, envs
        self.steps = 0
        self.groups: list[ChunkGroup] = []
        self.row_plan: tuple[Any, ...] | None = None  # made by the writer: how a whole step is written
        self.where: dict[str, tuple[int, npt.NDArray[Any]]] = {}  # path -> chunk, rows
        self.absent: dict[str, set[int]] = {}

    def add(self, group: ChunkGroup) -> None:
        self.groups.append(group)
        for at, spec in enumerate(group.specs):
            self.where[spec.path] = (group.first + at, group.arrays[at])


class History:
    """The steps that can still be referred to."""

    def __init__(self, max_history: int) -> None:
        self.max_history = max_history
        self.segments: deque[Segment] = deque()
        self.specs: dict[str, Spec] = {}
        self.steps = 0  # complete ones
        self.open_paths: set[str] = set()  # columns of a step under way
        self.start = 0  # steps before this one were forgotten by end_episode
        self._columns: dict[str, ColumnHistory] = {}
        self._newest = (StepRange(-1, 1, 1),)

    def __getitem__(self, path: str) -> ColumnHistory:
        found = self._columns.get(path)
        if found is not None:
            return found
        known = path in self.specs or any(other.startswith(path + "/") for other in self.specs)
        if not known:
            raise NotFound(f"no column {path!r} in the history; there are {sorted(self.specs)}")
        column = ColumnHistory(self, path)
        if path in self.specs:
            self._columns[path] = column  # what lies under a longer path may still grow
        return column

    def newest(self) -> tuple[StepRange, ...]:
        """The newest complete step, the same object as long as it is the newest."""
        if self._newest[0].start != self.steps - 1:
            self._newest = (StepRange(self.steps - 1, 1, 1),)
        return self._newest

    def __len__(self) -> int:
        """Steps that can be referred to, in this episode."""
        return self.end("") - self.oldest

    @property
    def oldest(self) -> int:
        return max(self.start, self.steps + bool(self.open_paths) - self.max_history)

    def end(self, path: str) -> int:
        """One past the newest step of a column; a column filled in a step under way is ahead of the others."""
        return self.steps + (path in self.open_paths)

    def select(self, path: str, index: Any) -> Any:
        """The cells that an index means; a path above several columns gives a tree of them."""
        if path not in self.specs:
            below = [other for other in self.specs if other.startswith(path + "/")]
            return unflatten({other[len(path) + 1 :]: self.select(other, index) for other in below})
        begin, end = self.oldest, self.end(path)
        if isinstance(index, slice):
            start, stop, step = index.indices(end - begin)
            count = len(range(start, stop, step))
            cells = Cells(path, (StepRange(begin + start, count, step),) if count else (), False)
        elif isinstance(index, (list, tuple, np.ndarray)):
            wanted = [self._step(path, _whole(i), begin, end) for i in index]
            cells = Cells(path, runs_of(wanted), False)
        else:
            cells = Cells(path, (StepRange(self._step(path, _whole(index), begin, end), 1, 1),), True)
        if not cells.runs:
            raise InvalidItem(f"column {path!r}: the selection {index!r} of {end - begin} steps is empty")
        return cells

    def _step(self, path: str, index: int, begin: int, end: int) -> int:
        step = end + index if index < 0 else begin + index
        if not begin <= step < end:
            raise InvalidItem(
                f"column {path!r}: step {index} is outside the history of {end - begin} steps "
                f"(max_history {self.max_history})"
            )
        return step

    def locate(self, cells: Cells) -> list[tuple[int, int, int, int]]:
        """The selection as records (chunk, first row, rows, row step) for environment 0."""
        if cells.oldest < self.oldest:
            raise InvalidItem(f"column {cells.path!r}: a cell of the selection has left the history")
        records = []
        for run in cells.runs:
            start, count = run.start, run.cells
            while count:
                segment = self.segment(start)
                fit = _within(segment, start, run.step, count)
                chunk, _ = self._at(segment, cells.path, start, run.step, fit)
                row = (start - segment.first) * segment.envs
                step = run.step * segment.envs if fit > 1 else 1
                records.append((chunk, row, fit, step))
                start += fit * run.step
                count -= fit
        return records

    def read(self, cells: Cells, env: int | None = None) -> npt.NDArray[Any]:
        """The selected values: [L, ...], with the environments [L, E, ...] where there are several."""
        parts = []
        for run in cells.runs:
            for step in range(run.start, run.start + run.cells * run.step, run.step):
                segment = self.segment(step)
                _, rows = self._at(segment, cells.path, step, 1, 1)
                row = (step - segment.first) * segment.envs
                parts.append(rows[row : row + segment.envs])
        values = np.stack(parts)  # [L, E, ...]
        if env is not None:
            values = values[:, env]
        return values[0] if cells.squeeze else values

    def segment(self, step: int) -> Segment:
        for segment in reversed(self.segments):
            if segment.first <= step:
                return segment
        raise InvalidItem(f"step {step} has left the history")

    def _at(self, segment: Segment, path: str, start: int, step: int, count: int) -> tuple[int, npt.NDArray[Any]]:
        absent = segment.absent.get(path)
        missing = path not in segment.where or (
            absent is not None and any(at in absent for at in range(start, start + count * step, step))
        )
        if missing:
            raise InvalidItem(f"column {path!r} was not appended in step {start} (or one selected with it)")
        return segment.where[path]

    def forget(self) -> list[Segment]:
        """Take out segments that no selection can reach any more."""
        gone = []
        while len(self.segments) > 1 and self.segments[1].first <= self.oldest:
            gone.append(self.segments.popleft())
        return gone


class ColumnHistory:
    """One column of a writer's history (or several under one path)."""

    def __init__(self, history: History, path: str) -> None:
        self._history, self._path = history, path
        self._newest = Cells(path, (), True)

    def __getitem__(self, index: Any) -> Any:
        history = self._history
        if type(index) is int and index == -1 and not history.open_paths and history.steps > history.start:
            cells, newest = self._newest, history.newest()  # the commonest selection, made for every column of every item
            if cells.runs is not newest:
                cells = self._newest = Cells(self._path, newest, True)
            if self._path in history.specs:
                return cells
        return history.select(self._path, index)

    def __len__(self) -> int:
        return self._history.end(self._path) - self._history.oldest


def runs_of(steps: Sequence[int]) -> tuple[StepRange, ...]:
    """Any list of steps as the fewest runs a left-to-right reading finds."""
    runs: list[StepRange] = []
    at = 0
    while at < len(steps):
        if at + 1 == len(steps):
            runs.append(StepRange(steps[at], 1, 1))
            break
        step, count = steps[at + 1] - steps[at], 2
        while at + count < len(steps) and steps[at + count] - steps[at + count - 1] == step:
            count += 1
        if step != 0 and count == 2 and at + 2 < len(steps):
            count = 1  # the second may begin a longer run
        runs.append(StepRange(steps[at], count, step if count > 1 else 1))
        at += count
    return tuple(runs)


def _whole(index: Any) -> int:
    if not isinstance(index, (bool, np.bool_)):
        with contextlib.suppress(TypeError):
            return operator.index(index)
    raise InvalidItem(f"a step is chosen by a whole number, a slice or a list of whole numbers, got {index!r}")


def _within(segment: Segment, start: int, step: int, count: int) -> int:
    """How many steps of a run lie in a segment."""
    if step == 0:
        return count
    last = segment.first + segment.capacity if step > 0 else segment.first - 1
    room = -(-(last - start) // step)
    return max(1, min(count, room))
