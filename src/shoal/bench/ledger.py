"""results.jsonl: what a suite has measured so far. Only ever appended to, so that an interruption costs one run at most.

    {"kind": "suite", ...}      what the suite holds, whenever that has changed: rows of other cases, or of one that was another
                                before, do not count any more
    {"kind": "session", ...}    at every start: suite, variant, commit, machine, versions, load, date
    {"kind": "finish", ...}     at its end, also by Ctrl-C: how many seconds it has taken, limits and all
    {"kind": "limit", ...}      the composed limit of a workload with its whole grid, once
    {"kind": "row", ...}        one job; a failed one is tried again at the next start, and the newest row of a job counts

A session with "again" is one of `--again`: of the groups that it names, rows before it do not count, nor do limits. A line that was
torn by a kill is passed over; one that is whole but none of these is another program's, and the folder is left alone.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError
from shoal.telemetry.sinks import jsonable

__all__ = ["Ledger"]

WANTED: dict[str, dict[str, type | tuple[type, ...]]] = {
    "suite": {"cases": dict},
    "session": {"title": str, "date": str, "commit": str, "machine": dict, "versions": dict},
    "finish": {"seconds": (int, float)},
    "limit": {"workload": str, "env": str},
    "row": {"key": str, "group": str, "seed": int, "error": (str, type(None))},
}
"""What every line of a kind has."""
STOPPED = "it ends with what it has measured, and the same command goes on from there"


@dataclass
class Found:
    """What the lines of a file amount to, one after the other."""

    sessions: list[dict[str, Any]] = field(default_factory=list)
    limits: dict[str, dict[str, Any]] = field(default_factory=dict)
    cases: dict[str, str | None] = field(default_factory=dict)
    """Group -> the mark of what is run in it now: by the newest suite line, or by the newest row where there is none."""
    _rows: dict[tuple[str, str | None, int], dict[str, Any]] = field(default_factory=dict)
    """(group, mark, seed) -> its newest row."""

    def add(self, line: dict[str, Any]) -> None:
        if line["kind"] == "suite":
            self.cases = line["cases"]
        elif line["kind"] == "limit":
            self.limits[line["workload"]] = line
        elif line["kind"] == "row":
            _, sign, mark = line["key"].rpartition("#")
            self.cases[line["group"]] = mark if sign else None
            self._rows[line["group"], self.cases[line["group"]], line["seed"]] = {
                **line, "sitting": len(self.sessions) - 1 if self.sessions else None}
        elif line["kind"] == "session":
            self.sessions.append(line)
            if line.get("again") is not None:
                self.limits.clear()
                self._rows = {job: row for job, row in self._rows.items() if row["group"] not in line["again"]}
        elif self.sessions:
            self.sessions[-1] = {**self.sessions[-1], "seconds": line["seconds"]}

    def rows(self) -> list[dict[str, Any]]:
        return [row for (group, mark, _), row in self._rows.items() if group in self.cases and self.cases[group] == mark]

    def left_out(self) -> dict[str, int]:
        gone = [group for group, _, _ in self._rows if group not in self.cases]
        return {group: gone.count(group) for group in gone}


class Ledger:
    """One folder of results."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "results.jsonl"

    @classmethod
    def open(cls, place: str | Path) -> Ledger:
        """Existing results: a folder, or its results.jsonl."""
        path = Path(place)
        folder = path.parent if path.name == "results.jsonl" else path
        if not (folder / "results.jsonl").is_file():
            raise ConfigError(f"{place} has no results.jsonl; give the folder that `shoal bench SUITE --out FOLDER` wrote")
        return cls(folder)

    # ------------------------------------------------------------------------------------------ writing
    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Alone in the folder: two at once would run everything twice and slow each other down."""
        from shoal.experiment.lock import alone

        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            what = "it is a file" if self.folder.is_file() else error.strerror
            raise ConfigError(f"results cannot be written to {self.folder}: {what}; give another folder with --out") from None
        with alone(self.folder, STOPPED):
            yield

    def append(self, kind: str, values: Mapping[str, Any]) -> None:
        line = json.dumps(jsonable({"kind": kind, **values}), separators=(",", ":")) + "\n"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            torn = self.path.exists() and self.path.stat().st_size > 0 and self.path.read_bytes()[-1:] != b"\n"
            with self.path.open("a", encoding="utf-8") as file:
                file.write(("\n" if torn else "") + line)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written: {error.strerror}; give another folder with --out") from None

    # ------------------------------------------------------------------------------------------ reading
    def _lines(self) -> tuple[list[dict[str, Any]], int]:
        """Whole lines, and how many are torn."""
        try:
            raw = self.path.read_bytes()
        except FileNotFoundError:
            return [], 0
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be read: {error.strerror}; give another folder") from None
        found, torn = [], 0
        for number, line in enumerate(raw.split(b"\n"), 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line.decode("utf-8"))
            except ValueError:
                torn += 1
                continue
            found.append(self._checked(number, value))
        if torn and not found and not raw.startswith(b'{"kind":'):
            raise ConfigError(f"{self.path} has no line that `shoal bench` wrote; give another folder, or remove it")
        return found, torn

    def _checked(self, number: int, line: Any) -> dict[str, Any]:
        kind = line.get("kind") if isinstance(line, dict) else None
        wanted = WANTED.get(kind) if isinstance(kind, str) else None
        bad = [name for name, hint in (wanted or {}).items() if name not in line or not isinstance(line[name], hint)]
        if wanted is not None and not bad:
            return line  # type: ignore[no-any-return]
        what = "is no session, limit or row" if wanted is None else f"is a {kind} without {' and '.join(bad)}"
        raise ConfigError(f"{self.path}, line {number}: {json.dumps(line)[:80]} {what}, so `shoal bench` did not write it; "
                          "take the line out, or give another folder")

    def torn(self) -> int:
        """How many lines a kill, or a damaged disk, has made unreadable."""
        return self._lines()[1]

    def _read(self) -> Found:
        found = Found()
        for line in self._lines()[0]:
            found.add(line)
        return found

    def sessions(self) -> list[dict[str, Any]]:
        """With "seconds", how long it has taken, where that was written down: a killed one cannot tell."""
        return self._read().sessions

    def limits(self) -> dict[str, dict[str, Any]]:
        """Workload -> its limit."""
        return self._read().limits

    def cases(self) -> dict[str, str | None]:
        """Group -> the mark of what is run in it, as the suite was when it was last run."""
        return self._read().cases

    def rows(self) -> list[dict[str, Any]]:
        """The newest row of every group and seed of the suite as it is now, in the order in which they came first: what an edited
        case was before does not count. "sitting" is the session that it is from."""
        return self._read().rows()

    def left_out(self) -> dict[str, int]:
        """Group -> its runs, of groups that the suite does not have any more."""
        return self._read().left_out()

    def finished(self) -> set[str]:
        return {row["key"] for row in self.rows() if not row["error"]}

    def groups(self) -> dict[str, list[dict[str, Any]]]:
        """Rows that differ in their seed only, as the suite has them: runs that go side by side end in another order."""
        found: dict[str, list[dict[str, Any]]] = {}
        for row in sorted(self.rows(), key=lambda row: (row.get("place", 0), row["seed"])):
            found.setdefault(row["group"], []).append(row)
        return found

    def belongs(self, title: str, variant: str) -> None:
        """A folder has the results of one suite: a table with those of two would mix what was not measured alike."""
        for session in self.sessions():
            theirs = session["title"], session.get("variant") or variant  # those of before did not say which
            if theirs != (title, variant):
                raise ConfigError(f"{self.folder} has the results of {theirs[0]} ({theirs[1]}), not of {title} ({variant}); "
                                  "give another folder with --out")
