"""A folder of results: results.jsonl has what a suite has measured so far. Lines are only appended, so an interruption costs at
most one run.

    {"kind": "suite", ...}      the suite's cases, whenever they have changed: rows of cases that were removed or edited since do
                                not count any more
    {"kind": "session", ...}    at every start: suite, variant, commit, machine, versions, load, date
    {"kind": "finish", ...}     at its end, also by Ctrl-C: how many seconds it has taken, limits included
    {"kind": "limit", ...}      the composed limit of a workload with its whole grid, once
    {"kind": "row", ...}        one job; a failed one is tried again at the next start, and the newest row of a job counts

A session with "again" comes from `--again`: rows of the groups that it names, and limits, do not count if they are older. A line
that a kill has cut short is skipped. Any other whole line comes from another program, and the folder is left alone.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.bench import checkout
from shoal.bench.result_columns import left_line, results_table, where_line
from shoal.errors import ConfigError
from shoal.telemetry.outputs import jsonable

__all__ = ["ResultsFolder", "write_files"]

WANTED: dict[str, dict[str, type | tuple[type, ...]]] = {
    "suite": {"cases": dict},
    "session": {"title": str, "date": str, "commit": str, "machine": dict, "versions": dict},
    "finish": {"seconds": (int, float)},
    "limit": {"workload": str, "env": str},
    "row": {"key": str, "group": str, "seed": int, "error": (str, type(None))},
}
"""The keys that every line of a kind has."""
STOPPED = "it ends with what it has measured, and the same command continues from there"


@dataclass
class ResultLines:
    """What the lines of a file add up to, read one after the other."""

    sessions: list[dict[str, Any]] = field(default_factory=list)
    limits: dict[str, dict[str, Any]] = field(default_factory=dict)
    cases: dict[str, str | None] = field(default_factory=dict)
    """Group -> the hash of its settings now: by the newest suite line, or by the newest row where there is none."""
    _rows: dict[tuple[str, str | None, int], dict[str, Any]] = field(default_factory=dict)
    """(group, hash of its settings, seed) -> its newest row."""

    def add(self, line: dict[str, Any]) -> None:
        if line["kind"] == "suite":
            self.cases = line["cases"]
        elif line["kind"] == "limit":
            self.limits[line["workload"]] = line
        elif line["kind"] == "row":
            _, sign, settings = line["key"].rpartition("#")
            self.cases[line["group"]] = settings if sign else None
            self._rows[line["group"], self.cases[line["group"]], line["seed"]] = {
                **line, "session_index": len(self.sessions) - 1 if self.sessions else None}
        elif line["kind"] == "session":
            self.sessions.append(line)
            if line.get("again") is not None:
                self.limits.clear()
                self._rows = {job: row for job, row in self._rows.items() if row["group"] not in line["again"]}
        elif self.sessions:
            self.sessions[-1] = {**self.sessions[-1], "seconds": line["seconds"]}

    def rows(self) -> list[dict[str, Any]]:
        return [row for (group, settings, _), row in self._rows.items() if group in self.cases and self.cases[group] == settings]

    def left_out(self) -> dict[str, int]:
        gone = [group for group, _, _ in self._rows if group not in self.cases]
        return {group: gone.count(group) for group in gone}


class ResultsFolder:
    """One folder of results."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "results.jsonl"

    @classmethod
    def open(cls, place: str | Path) -> ResultsFolder:
        """Existing results: a folder, or its results.jsonl."""
        path = Path(place)
        folder = path.parent if path.name == "results.jsonl" else path
        if not (folder / "results.jsonl").is_file():
            raise ConfigError(f"{place} has no results.jsonl; give the folder that `shoal bench SUITE --out FOLDER` wrote")
        return cls(folder)

    # ------------------------------------------------------------------------------------------ writing
    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else may write meanwhile: two at once would run everything twice and slow each other down."""
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
            cut = self.path.exists() and self.path.stat().st_size > 0 and self.path.read_bytes()[-1:] != b"\n"
            with self.path.open("a", encoding="utf-8") as file:
                file.write(("\n" if cut else "") + line)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written: {error.strerror}; give another folder with --out") from None

    # ------------------------------------------------------------------------------------------ reading
    def _lines(self) -> tuple[list[dict[str, Any]], int]:
        """The lines, and how many cannot be read."""
        try:
            raw = self.path.read_bytes()
        except FileNotFoundError:
            return [], 0
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be read: {error.strerror}; give another folder") from None
        found, unreadable = [], 0
        for number, line in enumerate(raw.split(b"\n"), 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line.decode("utf-8"))
            except ValueError:
                unreadable += 1
                continue
            found.append(self._checked(number, value))
        if unreadable and not found and not raw.startswith(b'{"kind":'):
            raise ConfigError(f"{self.path} has no line that `shoal bench` wrote; give another folder, or remove it")
        return found, unreadable

    def _checked(self, number: int, line: Any) -> dict[str, Any]:
        kind = line.get("kind") if isinstance(line, dict) else None
        wanted = WANTED.get(kind) if isinstance(kind, str) else None
        bad = [name for name, hint in (wanted or {}).items() if name not in line or not isinstance(line[name], hint)]
        if isinstance(line, dict) and wanted is not None and not bad:
            return line
        what = "is not a session, limit or row" if wanted is None else f"is a {kind} without {' and '.join(bad)}"
        raise ConfigError(f"{self.path}, line {number}: {json.dumps(line)[:80]} {what}, so `shoal bench` did not write it; "
                          "take the line out, or give another folder")

    def unreadable_lines(self) -> int:
        """How many lines were cut short by a kill or damaged on disk."""
        return self._lines()[1]

    def _read(self) -> ResultLines:
        found = ResultLines()
        for line in self._lines()[0]:
            found.add(line)
        return found

    def sessions(self) -> list[dict[str, Any]]:
        """Sessions; with "seconds", how long one took, unless it was killed."""
        return self._read().sessions

    def limits(self) -> dict[str, dict[str, Any]]:
        """Workload -> its limit."""
        return self._read().limits

    def cases(self) -> dict[str, str | None]:
        """Group -> the hash of its settings, as the suite was when it was last run."""
        return self._read().cases

    def rows(self) -> list[dict[str, Any]]:
        """The newest row of every group and seed that the suite has now, in the order in which they first appeared. Rows of a case
        that was edited since do not count. "session_index" says which session a row is from."""
        return self._read().rows()

    def left_out(self) -> dict[str, int]:
        """Group -> number of runs, for groups that the suite no longer has."""
        return self._read().left_out()

    def finished(self) -> set[str]:
        return {row["key"] for row in self.rows() if not row["error"]}

    def groups(self) -> dict[str, list[dict[str, Any]]]:
        """Rows by group, in the suite's order; rows of a group differ only in their seed."""
        found: dict[str, list[dict[str, Any]]] = {}
        for row in sorted(self.rows(), key=lambda row: (row.get("place", 0), row["seed"])):
            found.setdefault(row["group"], []).append(row)
        return found

    def check_suite(self, title: str, variant: str) -> None:
        """Refuse a folder that has the results of another suite: one table would mix what was measured differently."""
        for session in self.sessions():
            theirs = session["title"], session.get("variant") or variant  # older files do not say which
            if theirs != (title, variant):
                raise ConfigError(f"{self.folder} has the results of {theirs[0]} ({theirs[1]}), not of {title} ({variant}); "
                                  "give another folder with --out")


def write_files(results: ResultsFolder) -> str:
    """Write results.md beside results.jsonl, and report.html in a checkout; returns the table."""
    sessions, groups = results.sessions(), results.groups()
    where = where_line(sessions, results.rows()) + left_line(results.left_out())
    table = f"{where}\n\n{results_table(groups)}"
    title = sessions[0]["title"] if sessions else results.folder.name
    try:
        (results.folder / "results.md").write_text(f"# {title}\n\n{table}\n", encoding="utf-8")
        if found := checkout.benchmarks():
            (results.folder / "report.html").write_text(found.page(title, where, groups), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written: {error.strerror}; the results are safe in {results.path}") from None
    return table
