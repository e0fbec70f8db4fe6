"""The run directory: config.json, metrics.jsonl (the truth), summary.json, checkpoints/, logs/, tensorboard/, .lock (lock.py)."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import CheckpointError, ConfigError
from shoal.experiment.checkpoints import Checkpoints, read_json, write_json
from shoal.experiment.lock import alone, holder
from shoal.telemetry.console import counted
from shoal.telemetry.outputs import jsonable, read_lines

__all__ = ["RUNS", "SEEDS", "RunDir", "default_directory", "find_runs", "list_runs", "numbers", "run_or_best_seed",
           "run_row", "runs_at", "seed_runs"]

RUNS = Path("runs")
SEEDS = "seeds.json"  # in a folder with runs of several seeds
TAIL_BYTES = 1 << 18
NAMING = {"env": ("name", "id", "import"), "algorithm": ("name",), "architecture": ("name",), "net": ("module",)}
"""Sections of config.json, and what is imported by their names."""
SEVERAL = ("names", "train", "fixed", "each")  # what config.json says of several policies: lists of text


def default_directory(name: str, env: str, seed: int | str) -> Path:
    """runs/<time>-<preset>-<env>-<seed>."""
    words = re.sub(r"[^A-Za-z0-9_.-]+", "-", f"{name}-{env}-{seed}").strip("-")
    return RUNS / f"{time.strftime('%Y%m%d-%H%M%S')}-{words}"


@dataclass(frozen=True)
class RunDir:
    """One run's files."""

    path: Path
    made: tuple[Path, ...] = ()
    """Of this folder and those above it the ones that were made for this run, innermost first."""

    @property
    def config_file(self) -> Path:
        return self.path / "config.json"

    @property
    def summary_file(self) -> Path:
        return self.path / "summary.json"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def checkpoints(self, keep: int = 3) -> Checkpoints:
        return Checkpoints(self.path / "checkpoints", keep)

    @classmethod
    def check_free(cls, path: Path) -> None:
        """A new run may go into a folder that does not exist, or an empty one."""
        if (path / "config.json").exists():
            if cls(path).checkpoints().newest() is not None:
                raise ConfigError(f"--run-dir {path} already has a run; continue it with `shoal resume {path}`, "
                                  "or give another directory")
            with alone(path, "it ends"):  # its first checkpoint may be about to come
                raise ConfigError(f"--run-dir {path} has a run that ended before its first checkpoint, so it cannot be continued; "
                                  "remove the directory if you do not need its logs, or give another one")
        if (path / SEEDS).is_file():
            raise ConfigError(f"--run-dir {path} already has runs of several seeds; continue them with `shoal resume {path}`, or "
                              "give another directory")
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            what = "is not empty" if path.is_dir() else "is a file"
            raise ConfigError(f"--run-dir {path} {what}; give a directory that is empty or does not exist")

    @classmethod
    def create_default(cls, path: Path, config: Mapping[str, Any]) -> RunDir:
        """At `path`, or with -2, -3, ... behind it where another run has begun in the same second."""
        made = tuple(folder for folder in path.parents if not folder.exists())
        first = path
        for number in itertools.count(2):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.mkdir()  # only one of two that try at once
            except FileExistsError:
                path = first.with_name(f"{first.name}-{number}")
            except OSError as error:
                raise ConfigError(f"{path} cannot be written: {error.strerror or error}; give another --run-dir") from None
            else:
                break
        return cls.create(path, config, (path, *made))

    @classmethod
    def create(cls, path: Path, config: Mapping[str, Any], made: tuple[Path, ...] = ()) -> RunDir:
        cls.check_free(path)
        run = cls(path, made or tuple(folder for folder in (path, *path.parents) if not folder.exists()))
        try:
            run.logs.mkdir(parents=True)
            (path / "checkpoints").mkdir()
            run.save_config(config)
        except OSError as error:
            run.remove()
            raise ConfigError(f"--run-dir {path} cannot be written: {error.strerror or error}; "
                              "give another directory") from None
        return run

    def remove(self) -> None:
        """Take back a run that never began: its files, and the folders that were made for it. What cannot be removed stays."""
        for entry in self.path.iterdir() if self.path.is_dir() else ():
            with contextlib.suppress(OSError):
                if entry.is_dir():
                    shutil.rmtree(entry, ignore_errors=True)
                else:
                    entry.unlink()
        for folder in self.made:
            with contextlib.suppress(OSError):  # it was not made after all, or somebody has put something there
                folder.rmdir()

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """An existing run; exits with the list of runs that there are where this is none."""
        if not (path / "config.json").is_file():
            there = [run.path for run in find_runs()]
            hint = f"the newest run is {there[-1]}" if there else "start a run with `shoal train`"
            what = "has no run in it (no config.json)" if path.exists() else "does not exist"
            if (path / SEEDS).is_file():
                inside = [run.path for run in seed_runs(path)] or [path / "seed-0"]
                what, hint = "holds runs of several seeds", f"give one of them, such as {inside[0]}"
            raise ConfigError(f"{path} {what}; {hint}")
        return cls(path)

    def config(self) -> dict[str, Any]:
        return self.checked(read_json(self.config_file), self.config_file)

    @staticmethod
    def checked(config: dict[str, Any], file: Path) -> dict[str, Any]:
        """What config.json names is text, in objects."""
        for section, names in NAMING.items():
            inside = config.get(section, {})
            if not isinstance(inside, dict) or any(not isinstance(inside.get(name, ""), str | None) for name in names) \
                    or inside.get("name", "") is None:
                raise _damaged(file, section, inside)
        for name, kind in (("policies", str), ("resumed", int)):
            if not isinstance(config.get(name, kind()), kind):
                raise _damaged(file, name, config[name])
        for name in SEVERAL:
            words = config.get(name, [])
            if not isinstance(words, list) or any(not isinstance(word, str) for word in words):
                raise _damaged(file, name, words)
        return config

    def save_config(self, config: Mapping[str, Any]) -> None:
        write_json(self.config_file, config)

    def begin_again(self, config: Mapping[str, Any]) -> None:
        """Write down with what the run is resumed: where that cannot be, nothing else could be kept either."""
        try:
            self.save_config(config)
            self.logs.mkdir(exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be written: {error.strerror or error}; nothing has been changed in it: make "
                                  "room there, or copy the run to another disk, and resume it then") from None

    def summary(self) -> dict[str, Any]:
        return read_json(self.summary_file) if self.summary_file.exists() else {}

    def save_summary(self, summary: Mapping[str, Any]) -> None:
        write_json(self.summary_file, jsonable(summary))

    def last_snapshot(self) -> dict[str, Any]:
        """The last whole line of metrics.jsonl that is a snapshot."""
        for most in (TAIL_BYTES, None):
            rows = read_lines(self.metrics_file, most)
            found: dict[str, Any] = next((row for row in reversed(rows) if row.get("kind") == "snapshot"), {})
            if found:
                return found
        return {}

    def state(self, summary: Mapping[str, Any]) -> str:
        """running, killed (no driver, no end), or why it ended."""
        if holder(self.path) is not None:
            return "running"
        return str(summary.get("stopped_by") or "killed")


def _damaged(file: Path, what: str, value: Any) -> CheckpointError:
    return CheckpointError(f"{file} is damaged: {what} is {str(value)[:60]}; restore it, or train again")


def numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the values that are finite numbers."""
    return {name: value for name, value in values.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf}


def find_runs(root: Path = RUNS) -> list[RunDir]:
    """All runs under a folder, oldest first."""
    if not root.is_dir():
        return []
    inside = [path for path in root.iterdir() if path.is_dir()]
    inside += [path for folder in inside if (folder / SEEDS).is_file() for path in folder.iterdir()]
    found = [path for path in inside if (path / "config.json").is_file()]
    return [RunDir(path) for path in sorted(found, key=lambda path: (path / "config.json").stat().st_mtime)]


def runs_at(path: Path) -> list[RunDir]:
    """A run, or all runs of a folder."""
    if (path / "config.json").is_file():
        return [RunDir(path)]
    return find_runs(path) or [RunDir.open(path)]


def seed_runs(folder: Path) -> list[RunDir]:
    """The runs of a folder of several seeds that have begun, by seed."""
    begun = [path.parent for path in folder.glob("seed-*/config.json") if path.parent.name.removeprefix("seed-").isdecimal()]
    return [RunDir(path) for path in sorted(begun, key=lambda path: int(path.name.removeprefix("seed-")))]


def run_or_best_seed(path: Path, say: Callable[[str], None]) -> RunDir:
    """A run; of a folder of several seeds the one whose policy was evaluated best, and `say` is told which."""
    if (path / "config.json").is_file() or not (path / SEEDS).is_file():
        return RunDir.open(path)
    known = [(value, run) for run in seed_runs(path) if (value := numbers(run.summary()).get("eval_return")) is not None]
    if not known:
        raise ConfigError(f"{path} holds runs of several seeds, and none of them has kept an evaluated policy yet; give one "
                          f"of them, such as {path / 'seed-0'}")
    value, best = max(known, key=lambda pair: float(pair[0]))
    episodes = numbers(best.summary()).get("eval_episodes")
    over = f" over {counted(episodes, 'episode')}" if episodes else ""
    among = f"the best of {len(known)} seeds" if len(known) > 1 else "the only seed with an evaluated policy"
    say(f"{path}: {best.path.name} is used, {among}, evaluated {value:,.2f}{over}")
    return best


def list_runs(root: Path = RUNS) -> list[dict[str, Any]]:
    """One row per run for `shoal runs`."""
    rows: list[dict[str, Any]] = []
    for run in find_runs(root):
        try:
            rows.append(run_row(run))
        except CheckpointError as error:
            rows.append({"run": str(run.path), "state": "unreadable", "why": str(error)})
    return rows


def run_row(run: RunDir) -> dict[str, Any]:
    """What a run is, its state, and how far it is."""
    config, summary = run.config(), run.summary()
    state = run.state(summary)
    newest = {**summary, **run.last_snapshot()} if state in ("running", "killed") else summary
    keys = ("env_steps", "env_steps_per_second", "seconds", "train_return", "eval_return")
    return {"run": str(run.path), "preset": config.get("preset") or config.get("algorithm", {}).get("name"),
            "env": config.get("env", {}).get("name"), "state": state, **{key: newest.get(key) for key in keys}}
