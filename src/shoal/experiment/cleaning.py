"""`shoal clean runs/`: remove what is not needed to act, evaluate or resume.

The newest checkpoint of a run holds the best and the last version of its policy, and all that resuming needs; it stays. Older ones,
half-written ones and damaged ones go. Runs that go on are left alone.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import CheckpointError, ConfigError
from shoal.experiment.lock import holder
from shoal.experiment.parse import parse_command
from shoal.experiment.rundir import RUNS, RunDir, find_runs
from shoal.options import Options

__all__ = ["clean_command"]


@dataclass(frozen=True)
class Clean(Options):
    """Remove checkpoints that are not needed."""

    yes: bool = False
    """Do not ask."""


@dataclass(frozen=True)
class Waste:
    """What may go of one run."""

    run: RunDir
    folders: tuple[Path, ...]
    nbytes: int


def clean_command(arguments: list[str]) -> int:
    usage = "shoal clean [DIR]"
    words, options = parse_command(Clean, arguments, 1, usage)
    root = Path(words[0]) if words else RUNS
    if len(words) > 1 or not root.is_dir():
        raise ConfigError(f"{usage}: {' '.join(words) or root} is not a folder that holds runs")
    runs = [RunDir(root)] if (root / "config.json").is_file() else find_runs(root)
    found = [waste for run in runs if (waste := waste_of(run)) is not None]
    if not found:
        sys.stdout.write(f"nothing to remove under {root}: every run has only its newest checkpoint\n")
        return 0
    for waste in found:
        names = ", ".join(folder.name for folder in waste.folders)
        sys.stdout.write(f"{waste.run.path}: {waste.nbytes / 1e6:,.1f} MB in {len(waste.folders)} checkpoint folders ({names})\n")
    total = sum(waste.nbytes for waste in found)
    if not (options.yes or _agreed(total)):
        sys.stdout.write("nothing was removed\n")
        return 0
    for waste in found:
        for folder in waste.folders:
            shutil.rmtree(folder)
    sys.stdout.write(f"removed {total / 1e6:,.1f} MB; the newest checkpoint of every run, with its best and last policy, is kept\n")
    return 0


def _agreed(total: int) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError(f"shoal clean would remove {total / 1e6:,.1f} MB and cannot ask here; look at the list, then add --yes")
    sys.stdout.write(f"remove {total / 1e6:,.1f} MB? [y/N] ")
    sys.stdout.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def waste_of(run: RunDir) -> Waste | None:
    """Checkpoints other than the newest whole one; None where there are none, or the run goes on."""
    checkpoints = run.path / "checkpoints"
    if holder(run.path) is not None or not checkpoints.is_dir():
        return None
    try:
        newest = run.checkpoints().sound()
    except CheckpointError:
        return None  # nothing whole is left: somebody may want to rescue something
    if newest is None:
        return None
    folders = tuple(sorted(path for path in checkpoints.iterdir() if path.is_dir() and path != newest))
    nbytes = sum(file.stat().st_size for folder in folders for file in folder.rglob("*") if file.is_file())
    return Waste(run, folders, nbytes) if folders else None
