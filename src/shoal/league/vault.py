"""The Vault: snapshots of players on disk, immutable and content-addressed.

    vault/weights/<sha256>.safetensors       weights; equal ones lie there once
    vault/snapshots/<name>.json              whose they are: {"weights": <sha256>, "about": {...}}

A file is written under another name, synced, and then linked to its own name, which fails where that exists: nothing is ever half
there, and nothing is ever replaced. The weights come before the snapshot that names them. So after `kill -9` at any moment every
snapshot that is listed is whole, and `put` may simply be called again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from shoal.errors import CheckpointError
from shoal.files import sync

__all__ = ["Vault"]

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class Vault:
    """Snapshots by name. Any number of processes may read it and write to it."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._weights, self._snapshots = self.folder / "weights", self.folder / "snapshots"
        for each in (self._weights, self._snapshots):
            each.mkdir(parents=True, exist_ok=True)

    def put(self, name: str, weights: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> str:
        """Keep a snapshot; returns the hash of its weights. The same one again changes nothing, another one of this name raises."""
        if not NAME.fullmatch(name):
            raise CheckpointError(f"{name!r} cannot be the name of a snapshot; use letters, digits, '_', '-' and '.'")
        data = save({key: np.ascontiguousarray(array) for key, array in sorted(weights.items())})
        found = hashlib.sha256(data).hexdigest()
        record = json.dumps({"weights": found, "about": dict(about)}, sort_keys=True).encode()
        _write_new(self._weights / f"{found}.safetensors", data)
        path = self._snapshots / f"{name}.json"
        _write_new(path, record)
        if path.read_bytes() != record:
            raise CheckpointError(f"{path} exists and is another snapshot; snapshots are never replaced")
        return found

    def names(self) -> list[str]:
        """All snapshots, sorted: those of a player by their numbers."""
        return sorted((path.stem for path in self._snapshots.glob("*.json")), key=_player_and_number)

    def about(self, name: str) -> dict[str, Any]:
        """What was put down about a snapshot."""
        about: dict[str, Any] = self._record(name)["about"]
        return about

    def weights(self, name: str) -> dict[str, np.ndarray]:
        """The weights of a snapshot, after checking that they are what was put there."""
        path = self._weights / f"{self._record(name)['weights']}.safetensors"
        try:
            data = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"the weights of snapshot {name} cannot be read: {error}") from error
        if hashlib.sha256(data).hexdigest() != path.stem:
            raise CheckpointError(f"{path} is damaged: its content does not have the hash that it is named by")
        return dict(load(data))

    def _record(self, name: str) -> dict[str, Any]:
        path = self._snapshots / f"{name}.json"
        try:
            record = json.loads(path.read_bytes())
        except FileNotFoundError:
            known = ", ".join(self.names()) or "none"
            raise CheckpointError(f"there is no snapshot {name} in {self.folder}; there are {known}") from None
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if not (isinstance(record, dict) and isinstance(record.get("weights"), str) and isinstance(record.get("about"), dict)):
            raise CheckpointError(f"{path} is damaged: it does not say whose weights it is about")
        return record


def _player_and_number(name: str) -> tuple[str, int, str]:
    player, _, number = name.rpartition("-")
    return (player, int(number), name) if number.isdecimal() else (name, -1, name)


def _write_new(path: Path, data: bytes) -> None:
    """Make a file with this content, whole or not at all; one that exists stays as it is."""
    if path.exists():
        return
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        draft.write_bytes(data)
        sync(draft)
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    sync(path.parent)
