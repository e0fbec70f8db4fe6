"""Checkpoints: a folder per checkpoint, one safetensors file per stateful role and checkpoint.json. Never pickle.

    checkpoints/.writing-7/     roles write here, each file fsynced; checkpoint.json last
    checkpoints/000000123456/   ... then one atomic rename: a folder with this name is whole or does not exist

A crash or a full disk while saving leaves the previous one as it was; the torn folder is removed at the next start.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.errors import CheckpointError

__all__ = ["Checkpoints", "TensorFiles", "read_meta", "saved_slices", "write_json"]

META = "checkpoint.json"
WRITING = ".writing-"
TABLES = ("replay", "demonstrations")  # roles whose state is a replay table


def fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Atomically: readers see the old text or the new one."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        fsync(temporary)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


class TensorFiles:
    """How a role's state is written: named arrays in a safetensors file."""

    def save(self, path: Path, state: Mapping[str, np.ndarray]) -> None:
        from safetensors import SafetensorError
        from safetensors.numpy import save_file

        arrays = {name: np.ascontiguousarray(array).reshape(np.shape(array)) for name, array in state.items()}
        try:
            save_file(arrays, path)
            fsync(path)
        except SafetensorError as error:  # it wraps "no space left on device"
            raise OSError(str(error)) from None

    def load(self, path: Path) -> dict[str, np.ndarray]:
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None


@dataclass
class Checkpoints:
    """The checkpoints of one run."""

    folder: Path
    keep: int = 3

    def clear_torn(self) -> None:
        """Remove what a crash left half-written."""
        for torn in self.folder.glob(f"{WRITING}*"):
            shutil.rmtree(torn, ignore_errors=True)

    def begin(self, number: int) -> Path:
        """A fresh folder for roles to write into."""
        folder = self.folder / f"{WRITING}{number}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def abandon(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)

    def commit(self, folder: Path, meta: Mapping[str, Any]) -> Path:
        """Make it the newest one, then drop the oldest beyond `keep`. On an OSError nothing has changed."""
        files = {path.name: path.stat().st_size for path in sorted(folder.glob("*.safetensors"))}
        if not files:
            raise CheckpointError(f"no role wrote anything into {folder}")
        name, newest = f"{int(meta['env_steps'] or meta.get('learner_steps', 0)):012d}", self.newest()
        if newest is not None and newest.name >= name:  # two without an environment step (offline: an update) between them
            name = f"{newest.name}+"
        target = self.folder / name
        while target.exists():  # torn
            target = target.with_name(f"{target.name}+")
        try:
            write_json(folder / META, {**meta, "files": files})
            fsync(folder)
            os.rename(folder, target)
            fsync(self.folder)
        except OSError:
            self.abandon(folder)
            raise
        for old in self._whole()[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)
        return target

    def newest(self) -> Path | None:
        """The newest whole checkpoint."""
        whole = self._whole()
        return whole[-1] if whole else None

    def sizes(self) -> dict[str, int]:
        """Bytes of the newest whole checkpoint: in all, and of the replay tables in it."""
        newest = self.newest()
        files: dict[str, int] = read_meta(newest)["files"] if newest is not None else {}
        return {"all": sum(files.values()), "replay": sum(size for name, size in files.items() if name.startswith(TABLES))}

    def _whole(self) -> list[Path]:
        """Oldest first. A folder with missing or short files (a disk that lied) is passed over."""
        if not self.folder.is_dir():
            return []
        return [path for path in sorted(self.folder.iterdir()) if path.name[:1].isdigit() and _is_whole(path)]


def read_meta(folder: Path) -> dict[str, Any]:
    try:
        meta: dict[str, Any] = json.loads((folder / META).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{folder / META} cannot be read: {error}") from None
    return meta


def saved_slices(folder: Path) -> list[int]:
    """How many parameters each role that learns has saved in a checkpoint."""
    from safetensors import safe_open

    found = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "numpy") as file:
            if "learn/params" in list(file.keys()):
                found.append(int(file.get_slice("learn/params").get_shape()[0]))
    return found


def _is_whole(folder: Path) -> bool:
    try:
        files = read_meta(folder)["files"]
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (CheckpointError, KeyError, OSError):
        return False
