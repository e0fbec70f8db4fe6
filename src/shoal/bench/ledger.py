"""results.jsonl: what a suite has measured so far. Only ever appended to, so that an interruption costs one run at most.

    {"kind": "session", ...}    at every start: commit, machine, versions, load, date
    {"kind": "limit", ...}      the composed limit of a workload with its whole grid, once
    {"kind": "row", ...}        one job; a failed one is tried again at the next start, and the newest row of a job counts
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError
from shoal.telemetry.sinks import jsonable, read_lines

__all__ = ["Ledger"]


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

    def append(self, kind: str, values: Mapping[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        torn = self.path.exists() and self.path.stat().st_size > 0 and self.path.read_bytes()[-1:] != b"\n"
        with self.path.open("a", encoding="utf-8") as file:
            file.write(("\n" if torn else "") + json.dumps(jsonable({"kind": kind, **values}), separators=(",", ":")) + "\n")

    def _all(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in read_lines(self.path) if line.get("kind") == kind]

    def sessions(self) -> list[dict[str, Any]]:
        return self._all("session")

    def limits(self) -> dict[str, dict[str, Any]]:
        """Workload -> its limit."""
        return {line["workload"]: line for line in self._all("limit")}

    def rows(self) -> list[dict[str, Any]]:
        """The newest row of every group and seed, in the order in which they came first: an edited case replaces what it was."""
        return list({(line["group"], line["seed"]): line for line in self._all("row")}.values())

    def finished(self) -> set[str]:
        return {row["key"] for row in self.rows() if not row["error"]}

    def groups(self) -> dict[str, list[dict[str, Any]]]:
        """Rows that differ in their seed only, as the suite has them: runs that go side by side end in another order."""
        found: dict[str, list[dict[str, Any]]] = {}
        for row in sorted(self.rows(), key=lambda row: (row.get("place", 0), row["seed"])):
            found.setdefault(row["group"], []).append(row)
        return found
