"""Where snapshots go. An output may fail (disk full, closed pipe): the run drops it with a note and continues."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Protocol, runtime_checkable

__all__ = ["JsonLines", "Output", "Thinning", "Watcher", "follow_lines", "jsonable", "read_lines", "say"]


FULL_RATE_SECONDS = 300.0
SPARSEST_SECONDS = 60.0
SPARSER = 0.004  # of the time so far, between two lines


class Output(Protocol):
    """Takes what the session reports."""

    def write(self, shot: Mapping[str, Any]) -> None:
        """One snapshot, about once a second."""

    def event(self, event: Mapping[str, Any]) -> None:
        """Something that happened: a restart, a note, a checkpoint."""

    def close(self) -> None: ...


@runtime_checkable
class Watcher(Output, Protocol):
    """An output that also follows the run itself. It may complain, but never raises."""

    def begin(self, directory: Path, config: Mapping[str, Any]) -> None: ...
    def checkpoint(self, folder: Path) -> None: ...
    def end(self, summary: Mapping[str, Any]) -> None: ...
    def complaints(self) -> list[str]:
        """What went wrong since the last time."""


def jsonable(value: Any) -> Any:
    """Plain JSON values; what is not a finite number becomes null."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, int):
        return value
    number = float(value)
    if not math.isfinite(number):
        return None
    return round(number, 3) if abs(number) >= 1000 else float(f"{number:.6g}")  # times keep their milliseconds


class Thinning:
    """Which snapshots to write: all of the first minutes, then fewer and fewer, down to one a minute; and the last one."""

    def __init__(self) -> None:
        self._began, self._next = time.monotonic(), 0.0

    def due(self, shot: Mapping[str, Any]) -> bool:
        now = time.monotonic() - self._began
        if now < self._next and not shot.get("last"):
            return False
        self._next = 0.0 if now < FULL_RATE_SECONDS else now + min(SPARSEST_SECONDS, SPARSER * now)
        return True


class JsonLines:
    """metrics.jsonl, the truth: one JSON object a line, each with `kind` snapshot or event; appended to on resume.

    Snapshots are thinned: a day stays below about 10 MB.
    """

    def __init__(self, path: Path) -> None:
        self._thinning = Thinning()
        torn = path.exists() and path.stat().st_size > 0 and path.read_bytes()[-1:] != b"\n"
        self._file: IO[str] = path.open("a", encoding="utf-8")
        if torn:  # the run was killed in the middle of a line
            self._file.write("\n")

    def write(self, shot: Mapping[str, Any]) -> None:
        if self._thinning.due(shot):
            self._line({"kind": "snapshot", **shot})

    def event(self, event: Mapping[str, Any]) -> None:
        self._line({**event, "kind": "event", "event": event.get("kind", "note")})

    def _line(self, value: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(jsonable(value), separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """All whole lines of a metrics.jsonl, or those of its end."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        if last_bytes is not None:
            file.seek(max(0, path.stat().st_size - last_bytes))
        text = file.read().decode("utf-8", errors="replace")
    rows = []
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue  # torn by a kill, or damaged: the next line is whole
        if isinstance(row, dict):
            rows.append(row)
    return rows


def follow_lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """The whole lines of a metrics.jsonl, also those that are added later; None whenever there are no more for now."""
    position, rest = 0, b""
    while True:
        if path.exists():
            with path.open("rb") as file:
                file.seek(position)
                added = file.read()
            position += len(added)
            *lines, rest = (rest + added).split(b"\n")
            for line in lines:
                with contextlib.suppress(ValueError, RecursionError):  # torn by a kill
                    row = json.loads(line)
                    if isinstance(row, dict):
                        yield row
        yield None


def say(line: str) -> None:
    """Print a line at once, also where the output is not a terminal."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
