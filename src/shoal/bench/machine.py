"""Where and with what something was measured: every results file says so."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shoal.telemetry.sinks import jsonable

__all__ = ["RESULTS", "ROOT", "describe", "kept", "load", "merged", "save", "stamp", "with_earlier_rows"]

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "docs" / "results"
NO_CODE = ("docs", "*.md")  # what is written there changes nothing that is measured
PACKAGES = ("shoal", "torch", "numpy", "gymnasium", "numba", "ale-py")


def describe() -> dict[str, Any]:
    """Commit, machine, versions, date. Of a commit and its changes only a checkout of shoal's can tell, and only code counts."""
    changes = _git("status", "--porcelain", "--untracked-files=no", "--", ".", *(f":(exclude){path}" for path in NO_CODE))
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _git("rev-parse", "HEAD") or "unknown",
        "uncommitted_changes": None if changes is None else bool(changes),
        "machine": {"cores": len(os.sched_getaffinity(0)), "cpu": _cpu(), "memory_gb": _memory_gb(), "gpus": _gpus(),
                    "load": [round(x, 2) for x in os.getloadavg()],
                    "system": platform.platform(), "python": platform.python_version()},
        "versions": {name: _version(name) for name in PACKAGES},
    }


def stamp(about: Mapping[str, Any]) -> dict[str, Any]:
    """What a row (or a run) says of its own origin: a file may hold those of several days, commits and machines."""
    machine = about["machine"]
    return {**{key: about[key] for key in ("date", "commit", "uncommitted_changes")}, "load": machine["load"][0],
            "machine": f"{machine['cores']} cores of {machine['cpu']}, torch {about['versions']['torch']}"}


def with_earlier_rows(results: Mapping[str, Any], before: Mapping[str, Any], key: str) -> dict[str, Any]:
    """This run's rows beside those of an earlier file that were not measured again; all with their stamps."""
    old, new = ([{**stamp(about), **row} for row in about.get(key, [])] for about in (before, results))
    return {**results, key: merged(old, new, "name")}


def kept(given: argparse.Namespace) -> bool:
    """Whether what was measured is written down: not if that was not wanted, nor if the windows were shortened to try it out."""
    return not given.no_save and given.scale == 1.0


def save(name: str, values: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Written as JSON; what is not a finite number becomes null."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(json.dumps(jsonable(values), indent=1) + "\n", encoding="utf-8")
    return path


def load(name: str, folder: Path = RESULTS) -> dict[str, Any]:
    """What was saved under this name; nothing if there is none."""
    path = folder / name
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def merged(before: list[dict[str, Any]], now: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Rows of an earlier file with those of this run in their places, new ones at the end: parts may be measured apart."""
    new = {row[key]: row for row in now}
    kept = [new.pop(row[key], row) for row in before]
    return kept + list(new.values())


def _git(*words: str) -> str | None:
    """What git says of this checkout; None where there is none: a repository around an installed copy is somebody else's."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        return None
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _memory_gb() -> float:
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return round(pages * size / 2**30, 1)


def _gpus() -> list[str]:
    """What NVIDIA's driver knows; torch need not be imported for it."""
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model")]
