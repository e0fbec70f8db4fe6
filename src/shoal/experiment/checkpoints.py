"""Checkpoints: a folder per checkpoint, one safetensors file per stateful role and checkpoint.json. Never pickle.

    checkpoints/.writing-7/     roles write here, each file fsynced; checkpoint.json last
    checkpoints/000000123456/   ... then one atomic rename: a folder with this name is whole or does not exist

A crash or a full disk while saving leaves the previous one as it was; the torn folder is removed at the next start.
checkpoint.json has the size and the SHA-256 of every file: resume, eval, play and load refuse a damaged checkpoint and take the
next older one. (Those of earlier versions have sizes only.)
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core import Pieces
from shoal.errors import CheckpointError
from shoal.files import replacing, sync
from shoal.runtime.background_saving import in_pieces
from shoal.runtime.checkpointing import link

__all__ = ["Checkpoints", "SavedSlices", "TensorFiles", "holds_table", "read_json", "read_meta", "saved_slices", "write_json",
           "write_text"]

META = "checkpoint.json"
WRITING = ".writing-"
DIGEST = ".sha256"  # beside a file, until its checkpoint is whole
DAMAGED = "damaged-"
WORD = 8             # bytes of the length that a safetensors file begins with
LONGEST_HEADER = 1 << 27
MAPPED_BYTES = 1 << 20
PART_BYTES = 1 << 20
TABLES = ("replay", "demonstrations")  # roles whose state is a replay table


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Atomically: readers see the old text or the new one."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


class TensorFiles:
    """How a role's state is written: named arrays in a safetensors file."""

    def save(self, path: Path, state: Mapping[str, np.ndarray | Pieces]) -> None:
        from safetensors import SafetensorError
        from safetensors.numpy import save_file

        if in_pieces(state):
            _save_in_pieces(path, state)
            return
        arrays = {name: np.ascontiguousarray(array).reshape(np.shape(array)) for name, array in state.items()}
        try:
            save_file(arrays, path)
            sync(path)
            path.with_name(path.name + DIGEST).write_text(_digest(path), encoding="ascii")
        except SafetensorError as error:  # it wraps "no space left on device"
            raise OSError(str(error)) from None

    def load(self, path: Path) -> dict[str, np.ndarray]:
        """The arrays. Large ones of bytes, as replay tables are saved, are mapped: they need no memory of their own."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "numpy") as file:  # which also checks the header
                mapped = _large(path)
                small = {name: file.get_tensor(name) for name in file.keys() if name not in mapped}  # noqa: SIM118 (no dictionary)
            return {**small, **{name: np.memmap(path, np.uint8, "r", *place) for name, place in mapped.items()}}
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None


def holds_table(path: Path) -> bool:
    """Whether a role's file holds a replay table; only its beginning is read."""
    return "chunks" in _header(path)[0]


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """What a safetensors file says of its arrays, and where the first one begins."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(WORD), "little")
        text = file.read(min(length, LONGEST_HEADER))
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    return header if isinstance(header, dict) else {}, WORD + length


def _large(path: Path) -> dict[str, tuple[int, tuple[int]]]:
    """The large arrays of bytes in a file: where each begins, and its shape."""
    header, start = _header(path)
    return {name: (start + entry["data_offsets"][0], tuple(entry["shape"])) for name, entry in header.items()
            if entry.get("dtype") == "U8" and len(entry["shape"]) == 1 and entry["shape"][0] >= MAPPED_BYTES}


def _save_in_pieces(path: Path, state: Mapping[str, np.ndarray | Pieces]) -> None:
    """Write a state piece by piece, and its digest along: nothing is copied, and nothing is read again."""
    from safetensors.numpy import save

    pieces = {name: value for name, value in state.items() if isinstance(value, Pieces)}
    arrays = {name: np.ascontiguousarray(value) for name, value in state.items() if not isinstance(value, Pieces)}
    blob = save(arrays)
    start = WORD + int.from_bytes(blob[:WORD], "little")
    header, end = json.loads(blob[WORD:start]), len(blob) - start
    for name, piece in pieces.items():
        header[name] = {"dtype": "U8", "shape": [piece.nbytes], "data_offsets": [end, end + piece.nbytes]}
        end += piece.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % WORD)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        first: list[bytes | memoryview] = [len(text).to_bytes(WORD, "little"), text, blob[start:]]
        for part in _joined(itertools.chain(first, *pieces.values())):
            digest.update(part)
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    path.with_name(path.name + DIGEST).write_text(digest.hexdigest(), encoding="ascii")


def _joined(parts: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """The same bytes in parts that are not small: each write and each digest has its price."""
    few: list[bytes | memoryview] = []
    size = 0
    for part in parts:
        few.append(part)
        size += len(part)
        if size >= PART_BYTES:
            yield few[0] if len(few) == 1 else b"".join(few)
            few, size = [], 0
    yield b"".join(few)


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
        target = self._put(folder, meta)
        for old in self._whole()[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)
        return target

    def _put(self, folder: Path, meta: Mapping[str, Any]) -> Path:
        paths = sorted(folder.glob("*.safetensors"))
        files = {path.name: path.stat().st_size for path in paths}
        if not files:
            raise CheckpointError(f"no role wrote anything into {folder}")
        digests = {path.name: _take_digest(path) for path in paths}
        name, newest = f"{int(meta['env_steps'] or meta.get('learner_steps', 0)):012d}", self.newest()
        if newest is not None and newest.name >= name:  # two without an environment step (offline: an update) between them
            name = _name_after(newest.name)
        target = self.folder / name
        while target.exists():  # torn
            target = target.with_name(f"{target.name}+")
        try:
            whole = {**meta, "files": files, "sha256": digests}
            write_json(folder / META, {**whole, "seal": _seal(whole)})
            sync(folder)
            os.rename(folder, target)
            sync(self.folder)
        except OSError:
            self.abandon(folder)
            raise
        return target

    def amend(self, folder: Path) -> None:
        """Put the files in `folder` into the newest checkpoint, replacing files of the same names. An OSError leaves it
        unchanged."""
        newest = self.newest()
        if newest is None:
            raise CheckpointError(f"{self.folder} has no checkpoint to put {folder.name} into")
        meta = read_json(newest / META)
        try:
            for name, digest in read_meta(newest)["sha256"].items():
                if not (folder / name).exists():
                    link(newest / name, folder / name)
                    (folder / f"{name}{DIGEST}").write_text(digest, encoding="ascii")
        except OSError:
            self.abandon(folder)
            raise
        amended = self._put(folder, {name: value for name, value in meta.items() if name not in ("files", "sha256", "seal")})
        shutil.rmtree(newest, ignore_errors=True)
        if not newest.exists():
            os.rename(amended, newest)

    def newest(self) -> Path | None:
        """The newest whole checkpoint."""
        whole = self._whole()
        return whole[-1] if whole else None

    def sound(self, tables: bool = True) -> Path | None:
        """The newest checkpoint whose files are what was written; damaged ones are named in a warning. Without `tables` saved
        replay tables are not read: nobody needs them to act."""
        damaged: list[str] = []
        for folder in reversed(self._folders()):
            if not (why := _damage(folder, tables)):
                self._warn(damaged, f"{folder.name} is used instead")
                return folder
            damaged.append(f"checkpoint {folder.name} is damaged ({why})")
        if damaged:
            raise CheckpointError(f"{self.folder} has no whole checkpoint left: {'; '.join(damaged)}; start a new run "
                                  "with `shoal train`")
        return None

    def newest_for(self, instance: str) -> tuple[Path | None, list[str]]:
        """The newest whole checkpoint whose file of this role (or, without one, those of its replicas) is what was written; and
        what is damaged in newer ones. Other roles' files are not read."""
        damaged: list[str] = []
        for folder in reversed(self._whole()):
            digests = read_meta(folder)["sha256"]
            own, kind = f"{instance}.safetensors", f"{instance.rpartition('-')[0]}-"
            names = [own] if own in digests else [name for name in digests if name.startswith(kind)]
            why = next((why for name in names if (why := _change(folder, name, digests[name]))), "")
            if not why:
                return folder, damaged
            damaged.append(f"checkpoint {folder.name} is damaged ({why})")
        if damaged:
            raise CheckpointError(f"{instance} cannot continue: {'; '.join(damaged)}; start a new run with `shoal train`")
        return None, []

    def named(self, name: str) -> Path:
        """A checkpoint by its name, or by its number of env steps; CheckpointError where it is not there, or damaged."""
        folders = self._folders()
        found = [folder for folder in folders if folder.name == name] or \
            [folder for folder in folders if name.isdigit() and folder.name.isdigit() and int(folder.name) == int(name)]
        if not found:
            there = ", ".join(folder.name for folder in folders) or "none"
            raise CheckpointError(f"{self.folder} has no checkpoint {name}; there are {there} (--checkpoint.keep N keeps more)")
        if why := _damage(found[0], tables=False):
            raise CheckpointError(f"checkpoint {found[0]} is damaged ({why}); take another one")
        return found[0]

    def set_damaged_aside(self) -> None:
        """Rename what `sound` passes over, so that a run which continues does not load it."""
        sound = self.sound()
        for folder in self._folders():
            if sound is not None and folder.name > sound.name:
                try:
                    folder.rename(folder.with_name(f"{DAMAGED}{folder.name}"))
                except OSError as error:
                    why = error.strerror or error
                    raise CheckpointError(f"{folder} is damaged and cannot be renamed: {why}; remove it") from None

    @staticmethod
    def _warn(damaged: list[str], instead: str) -> None:
        for text in damaged:
            logging.getLogger("shoal").warning("%s; %s", text, instead)

    def sizes(self) -> dict[str, int]:
        """Bytes of the newest whole checkpoint: in all, and of the replay tables in it."""
        newest = self.newest()
        files: dict[str, int] = read_meta(newest)["files"] if newest is not None else {}
        return {"all": sum(files.values()), "replay": sum(size for name, size in files.items() if name.startswith(TABLES))}

    def _folders(self) -> list[Path]:
        """Oldest first."""
        if not self.folder.is_dir():
            return []
        return [path for path in sorted(self.folder.iterdir()) if path.name[:1].isdigit() and path.is_dir()]

    def _whole(self) -> list[Path]:
        """Oldest first. A folder with missing or short files (a disk that lied) is passed over."""
        return [path for path in self._folders() if not _shortage(path)]


def read_json(path: Path) -> dict[str, Any]:
    """An object of a run directory; CheckpointError for anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # not JSON, not UTF-8, nested too deeply
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is damaged: it holds a {type(value).__name__}, not an object")
    return value


def read_meta(folder: Path) -> dict[str, Any]:
    """checkpoint.json; `files`, `sha256` and `totals` are objects in it."""
    meta = read_json(folder / META)
    for name in ("files", "sha256", "totals"):
        if not isinstance(meta.setdefault(name, {}), dict):
            raise CheckpointError(f"{folder / META} is damaged: {name} is not an object")
        if any("\0" in key for key in meta[name]):
            raise CheckpointError(f"{folder / META} is damaged: no file has the names of its {name}")
    return meta


@dataclass(frozen=True)
class SavedSlices:
    """How many parameters each role that learns has saved, and whether each holds a slice of the whole."""

    sizes: tuple[int, ...] = ()
    cut: bool = False


def saved_slices(folder: Path, scope: str = "") -> SavedSlices:
    """Of the parameters in a checkpoint, of the roles whose names begin with `scope`."""
    from safetensors import SafetensorError, safe_open

    sizes, cut = [], False
    for path in sorted(folder.glob(f"{scope}*.safetensors")):
        try:
            with safe_open(path, "numpy") as file:
                names = list(file.keys())
                if "learn/params" in names:
                    sizes.append(int(file.get_slice("learn/params").get_shape()[0]))
                    cut = cut or "learn/begin" in names
        except (OSError, SafetensorError, IndexError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None
    return SavedSlices(tuple(sizes), cut)


def _begins_a_table(path: Path) -> bool:
    with contextlib.suppress(CheckpointError, OSError):
        return holds_table(path)
    return False


def _name_after(name: str) -> str:
    """The next one at the same step: 000000000005, 000000000005+, 000000000005+000002, ... Names sort by age and stay short: an
    offline run that has gone online may save hundreds of times before its env steps exceed its updates."""
    if (parts := re.fullmatch(r"(\d+)(\+*)(\d*)\+*", name)) is None:  # renamed by somebody
        return f"{name}+"
    step, pluses, number = parts.groups()
    return f"{step}+{int(number or len(pluses)) + 1:06d}" if pluses else f"{step}+"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _seal(meta: Mapping[str, Any]) -> str:
    """The digest of all that checkpoint.json says."""
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


def _take_digest(path: Path) -> str:
    """As the role that wrote the file noted it; a file that came from an older checkpoint is read for it."""
    note = path.with_name(path.name + DIGEST)
    if not note.exists():
        return _digest(path)
    text = note.read_text(encoding="ascii")
    note.unlink()
    return text


def _shortage(folder: Path) -> str:
    """What is missing, by the sizes of the files alone; empty where nothing is."""
    try:
        for name, size in read_meta(folder)["files"].items():
            if (folder / Path(name).name).stat().st_size != size:
                return f"{name} does not have its {size} bytes"
    except (CheckpointError, OSError) as error:
        return str(error)
    return "" if read_meta(folder)["files"] else f"{META} names no files"


def _damage(folder: Path, tables: bool) -> str:
    """What is not as it was written; empty where everything is."""
    if why := _shortage(folder):
        return why
    raw = read_json(folder / META)
    if "seal" in raw and raw["seal"] != _seal({name: value for name, value in raw.items() if name != "seal"}):
        return f"{META} has changed since it was written"
    for name, digest in read_meta(folder)["sha256"].items():
        if (tables or not _begins_a_table(folder / Path(name).name)) and (why := _change(folder, name, digest)):
            return why
    return ""


def _change(folder: Path, name: str, digest: str) -> str:
    """Whether a file is not as it was written; empty where it is."""
    try:
        return "" if _digest(folder / Path(name).name) == digest else f"{name} has changed since it was written"
    except OSError as error:
        return str(error)
