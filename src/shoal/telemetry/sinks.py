"""Where snapshots go. A sink may fail (disk full, closed pipe): it is then dropped with a note, and the run goes on."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Protocol

__all__ = ["JsonLines", "Sink", "jsonable", "read_lines"]


class Sink(Protocol):
    """Takes what the session reports."""

    def write(self, shot: Mapping[str, Any]) -> None:
        """One snapshot, about once a second."""

    def event(self, event: Mapping[str, Any]) -> None:
        """Something that happened: a restart, a note, a checkpoint."""

    def close(self) -> None: ...


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


class JsonLines:
    """metrics.jsonl, the truth: one JSON object a line, each with `kind` snapshot or event; appended to on resume."""

    def __init__(self, path: Path) -> None:
        torn = path.exists() and path.stat().st_size > 0 and path.read_bytes()[-1:] != b"\n"
        self._file: IO[str] = path.open("a", encoding="utf-8")
        if torn:  # the run was killed in the middle of a line
            self._file.write("\n")

    def write(self, shot: Mapping[str, Any]) -> None:
        self._line({"kind": "snapshot", **shot})

    def event(self, event: Mapping[str, Any]) -> None:
        self._line({**event, "kind": "event", "event": event.get("kind", "note")})

    def _line(self, value: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(jsonable(value), separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a metrics.jsonl."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # torn by a kill: the next line is whole
    return rows
