"""Results of the developers' measurements: JSON files in docs/results, whose rows say where each comes from; and parts of the pages
that show them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.bench.machine import ROOT
from shoal.telemetry.outputs import jsonable

__all__ = ["RESULTS", "ROOT", "insert", "load", "origins", "parser_for", "save", "say", "stamp", "where", "with_earlier_rows"]

RESULTS = ROOT / "docs" / "results"
UNKNOWN = " (whether with uncommitted changes was not written down)"


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def parser_for(module: str, doc: str | None, file: str, only: str = "", rounds: int = 0) -> argparse.ArgumentParser:
    """The options that the measurements share: --only where there is something to choose, --rounds, --no-save."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}", description=(doc or "").splitlines()[0])
    if only:
        parser.add_argument("--only", default="", help=f"{only} whose name contains these words")
    if rounds:
        parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--no-save", action="store_true", help=f"do not write docs/results/{file}")
    return parser


# ---------------------------------------------------------------------------------------------- files
def save(name: str, values: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Write JSON; a number that is not finite becomes null."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(json.dumps(jsonable(values), indent=1) + "\n", encoding="utf-8")
    return path


def load(name: str, folder: Path = RESULTS) -> dict[str, Any]:
    """What was saved under this name; nothing if there is none."""
    path = folder / name
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def stamp(about: Mapping[str, Any]) -> dict[str, Any]:
    """What a row says of its own origin: a file may hold rows of several days, commits and machines."""
    machine = about["machine"]
    return {**{key: about[key] for key in ("date", "commit", "uncommitted_changes")}, "load": machine["load"][0],
            "machine": f"{machine['cores']} cores of {machine['cpu']}, torch {about['versions']['torch']}"}


def with_earlier_rows(results: Mapping[str, Any], before: Mapping[str, Any], key: str) -> dict[str, Any]:
    """This run's rows beside those of an earlier file that were not measured again, all with their stamps."""
    old, new = ([{**stamp(about), **row} for row in about.get(key, [])] for about in (before, results))
    fresh = {row["name"]: row for row in new}
    kept = [fresh.pop(row["name"], row) for row in old]
    return {**results, key: kept + list(fresh.values())}


# ---------------------------------------------------------------------------------------------- pages
def insert(page: str, marker: str, text: str) -> str:
    """The page with `text` between the marker's two comments."""
    begin, end = f"<!-- {marker}: begin -->", f"<!-- {marker}: end -->"
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(end) < page.index(begin):
        raise ValueError(f"the page needs the lines {begin} and {end}, once each and in this order")
    return page[: page.index(begin) + len(begin)] + f"\n{text}\n" + page[page.index(end) :]


def where(results: Mapping[str, Any]) -> str:
    """Date, commit and machine of a file, in one line."""
    machine, versions = results["machine"], results["versions"]
    changed = " with uncommitted changes" if results["uncommitted_changes"] else ""
    return (f"{results['date']}, commit {results['commit'][:10]}{changed}, {machine['cores']} cores of {machine['cpu']} "
            f"(load {machine['load'][0]} at the start), torch {versions['torch']}.")


def origins(results: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Where rows come from: one line, or one for each run that some of them come from."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        groups.setdefault(_origin(row) if "commit" in row else where(results), []).append(row["name"])
    if len(groups) < 2:
        return next(iter(groups), where(results))
    return "\n".join(f"- {', '.join(names)}: {line}" for line, names in groups.items())


def _origin(row: Mapping[str, Any]) -> str:
    changed = {True: " with uncommitted changes", False: ""}.get(row.get("uncommitted_changes"), UNKNOWN)
    place = f", {row['machine']} (load {row['load']:g})" if "machine" in row else ""
    return f"{row['date']}, commit {row['commit'][:10]}{changed}{place}."
