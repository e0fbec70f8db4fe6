"""Where and with what something was measured: every results file says so."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shoal.telemetry.sinks import jsonable

__all__ = ["RESULTS", "ROOT", "describe", "save"]

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "docs" / "results"
PACKAGES = ("shoal", "torch", "numpy", "gymnasium", "numba", "ale-py")


def describe() -> dict[str, Any]:
    """Commit, machine, versions, date."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "machine": {"cores": len(os.sched_getaffinity(0)), "cpu": _cpu(), "load": [round(x, 2) for x in os.getloadavg()],
                    "system": platform.platform(), "python": platform.python_version()},
        "versions": {name: _version(name) for name in PACKAGES},
    }


def save(name: str, values: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Written as JSON; what is not a finite number becomes null."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(json.dumps(jsonable(values), indent=1) + "\n", encoding="utf-8")
    return path


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


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
