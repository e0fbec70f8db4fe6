"""The run of a member: the command that trains it up to a number of env steps, the copy of another one's state, other values."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.errors import CheckpointError
from shoal.experiment.checkpoints import DIGEST, read_meta
from shoal.experiment.rundir import RunDir

__all__ = ["copy_checkpoint", "set_values", "slice_words", "value_words"]

TRIES = 5  # to copy a checkpoint whose run continues and may drop it meanwhile


def value_words(values: Mapping[str, Any]) -> list[str]:
    """As options of `shoal train`. A section of values may be a dictionary, and so may name=value pairs."""
    words: list[str] = []
    for name, value in values.items():
        *section, last = name.replace("_", "-").split(".")
        if isinstance(value, Mapping) and not section:
            words += value_words({f"{name}.{key}": one for key, one in value.items()})
        elif isinstance(value, Mapping):
            words += ["--" + ".".join([*section, last]), *(f"{key}={one!r}" for key, one in value.items())]
        elif isinstance(value, bool):
            words.append("--" + ".".join([*section, last if value else f"no-{last}"]))
        else:
            words += ["--" + ".".join([*section, last]), *map(str, value if isinstance(value, list | tuple) else [value])]
    return words


def slice_words(start: Sequence[str], values: Mapping[str, Any], seed: int, path: Path, until: int,
                goal: float | None) -> list[str]:
    """The arguments of `shoal` that train the run in `path` until it has made `until` env steps. `start` are a preset, an
    environment and options, for a run that does not exist yet."""
    if RunDir(path).checkpoints().newest() is None:
        words = ["train", *start, *value_words(values), "--run-dir", str(path), "--seed", str(seed), "--policy", "last"]
    else:
        words = ["resume", str(path), "--trust"]  # who resumes a study is asked before anything is imported
    if goal is not None:
        words += ["--until-return", str(goal)]
    return [*words, "--max-env-steps", str(until), "--console.mode", "none"]


def copy_checkpoint(parent: RunDir, child: RunDir) -> int:
    """Give a run all that is in another one's newest checkpoint, optimiser state too; returns its env steps."""
    source, target = parent.checkpoints(), child.checkpoints()
    target.clear_torn()
    for left in reversed(range(TRIES)):
        newest = source.sound()  # a damaged one must not get checksums of its own here
        if newest is None:
            raise CheckpointError(f"{parent.path} has no checkpoint that {child.path} could copy; resume the study")
        folder = target.begin(0)
        try:
            meta = read_meta(newest)
            for name in meta["files"]:
                shutil.copyfile(newest / name, folder / name)
                if name in meta["sha256"]:
                    (folder / f"{name}{DIGEST}").write_text(meta["sha256"][name], encoding="ascii")
            target.commit(folder, {key: value for key, value in meta.items() if key not in ("files", "sha256", "seal")})
            return int(meta.get("env_steps", 0))
        except (FileNotFoundError, CheckpointError):  # the parent continues, and has dropped it
            target.abandon(folder)
            if not left:
                raise
    raise AssertionError("the last try returns or raises")


def set_values(run: RunDir, values: Mapping[str, Any]) -> None:
    """Let a run continue with other values when it is resumed; those that only a restart can change too."""
    config = run.config()
    for key, value in values.items():
        *path, name = key.split(".")
        inside: Any = config
        for part in path:
            inside = inside.get(part) if isinstance(inside, dict) else None
        if not isinstance(inside, dict):
            raise CheckpointError(f"{run.config_file} is damaged: it has no {key}; restore it, or start the study again")
        inside[name] = value
    run.save_config(config)
