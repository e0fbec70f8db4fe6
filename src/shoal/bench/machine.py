"""Where and with what something was measured: every results file says so."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shoal.runtime.start_checks import cpu_name, gpu_names

__all__ = ["ROOT", "describe"]

ROOT = Path(__file__).resolve().parents[3]
NO_CODE = ("docs", "*.md")  # changes there do not change what is measured
PACKAGES = ("shoal", "torch", "numpy", "gymnasium", "numba", "ale-py")


def describe() -> dict[str, Any]:
    """Commit, machine, versions, date. Only a checkout of shoal knows its commit and changes; only changes of code count."""
    changes = _git("status", "--porcelain", "--untracked-files=no", "--", ".", *(f":(exclude){path}" for path in NO_CODE))
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _git("rev-parse", "HEAD") or "unknown",
        "uncommitted_changes": None if changes is None else bool(changes),
        "machine": {"cores": len(os.sched_getaffinity(0)), "cpu": cpu_name(), "memory_gb": _memory_gb(), "gpus": gpu_names(),
                    "load": [round(x, 2) for x in os.getloadavg()],
                    "system": platform.platform(), "python": platform.python_version()},
        "versions": {name: _version(name) for name in PACKAGES},
    }


def _git(*words: str) -> str | None:
    """What git says of this checkout; None where there is none. A repository around an installed copy is not shoal's."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        return None
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _memory_gb() -> float:
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return round(pages * size / 2**30, 1)
