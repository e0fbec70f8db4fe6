"""shoal's own format: a folder with demos.json and files of whole episodes.

    demos.json                    what is in it: environment, spaces, counts, returns, how it was made, and the list of files
    episodes-000000.safetensors   observation[/path] [sum(T + 1), ...], action, reward, terminated, truncated, mask [sum(T), ...],
    episodes-000001.safetensors   length [E]: many episodes one behind the other

demos.json is the truth: a file that it does not name does not count. A file is written under another name, brought to disk and
renamed, and only then is demos.json replaced, in one step too. So whatever happens, the folder holds whole episodes, and a kill -9
costs at most what was recorded since the last file: FLUSH_SECONDS or FLUSH_BYTES. Ctrl-C costs nothing that was finished.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from shoal.envs.spaces import Layout
from shoal.errors import ConfigError
from shoal.offline.episodes import About, Episode, Spread, check_episode, plain
from shoal.offline.spaces import difference, space_from_json, space_to_json
from shoal.slots import leaves

__all__ = ["META", "Folder", "Writer"]

META = "demos.json"
FORMAT, VERSION = "shoal demonstrations", 1
FLUSH_SECONDS = 2.0
FLUSH_BYTES = 32 << 20


def _replace(path: Path, write: Callable[[Path], None]) -> None:
    """Whole or not at all."""
    draft = path.with_name(f".{path.name}.new")
    try:
        write(draft)
        descriptor = os.open(draft, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(draft, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}; what was there before is whole") from None


def read_meta(path: Path) -> dict[str, Any]:
    try:
        meta: dict[str, Any] = json.loads((path / META).read_text(encoding="utf-8"))
        if meta["format"] != FORMAT or meta["version"] != VERSION:
            raise ValueError(f"it is {meta['format']!r}, version {meta['version']}, and not {FORMAT!r}, version {VERSION}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path / META} cannot be read: {error}; give a folder that `shoal data record` has made") from None
    return meta


class Folder:
    """A recording in shoal's own format."""

    def __init__(self, path: Path) -> None:
        self.path = path
        meta = read_meta(path)
        try:
            self.files: list[dict[str, Any]] = meta["files"]
            spreads = {name: Spread(**meta[name]) if meta[name] else None for name in ("returns", "lengths")}
            self.about = About(
                meta["env"]["name"], space_from_json(meta["observation_space"]), space_from_json(meta["action_space"]),
                meta["mask_size"], meta["env"]["kwargs"], meta["episodes"], meta["steps"], meta["terminated"], **spreads,
                nbytes=sum(file["bytes"] for file in self.files), made=tuple(meta["made"]))
            counted = tuple(sum(file[name] for file in self.files) for name in ("episodes", "steps"))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{path / META} is not whole: {error!r}; copy the recording again") from None
        if counted != (self.about.episodes, self.about.steps):
            raise ConfigError(f"{path / META} tells of {self.about.episodes:,} episodes with {self.about.steps:,} steps, and its "
                              f"files of {counted[0]:,} with {counted[1]:,}; copy the recording again")
        self._paths = ["/".join(("observation", *leaf.names)) for leaf in Layout(self.about.observation_space).leaves]
        for file in self.files:
            found = path / file["name"]
            if not found.is_file() or found.stat().st_size != file["bytes"]:
                what = "is missing" if not found.is_file() else f"has {found.stat().st_size:,} of {file['bytes']:,} bytes"
                raise ConfigError(f"{found} {what}; copy the recording again, whole")

    def episodes(self) -> Iterator[Episode]:
        number = 0
        for file in self.files:
            arrays = _load(self.path / file["name"])
            if fault := _fault(arrays, file, self._paths):
                raise ConfigError(f"{self.path / file['name']} {fault}; copy the recording again, whole")
            for episode in _episodes(arrays, self._paths):
                check_episode(episode, self.about, f"{self.path}, episode {number}")
                number += 1
                yield episode


def _fault(arrays: Mapping[str, np.ndarray], file: Mapping[str, Any], paths: list[str]) -> str | None:
    """Why a file is not what demos.json and its own lengths tell of; its episodes are looked at one by one later."""
    missing = {"length", "action", "reward", "terminated", "truncated", *paths} - set(arrays)
    if missing:
        return f"has no {sorted(missing)[0]}"
    length = arrays["length"]
    if length.dtype != np.int64 or length.ndim != 1 or (length < 1).any():
        return "has lengths that are none"
    found, steps = len(length), int(length.sum())
    if (found, steps) != (file["episodes"], file["steps"]):
        return f"has {found:,} episodes with {steps:,} steps, and {META} tells of {file['episodes']:,} with {file['steps']:,}"
    rows = dict.fromkeys(("action", "reward", "terminated", "truncated", "mask"), steps) | dict.fromkeys(paths, steps + found)
    wrong = [name for name, count in rows.items() if name in arrays and arrays[name].shape[:1] != (count,)]
    return f"has {wrong[0]} of shape {arrays[wrong[0]].shape} and not {rows[wrong[0]]:,} rows of it" if wrong else None


def _load(path: Path) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; copy the recording again, whole") from None


def _episodes(arrays: Mapping[str, np.ndarray], paths: list[str]) -> Iterator[Episode]:
    begin = 0
    for number, length in enumerate(arrays["length"].tolist()):
        rows, seen = slice(begin, begin + length), slice(begin + number, begin + number + length + 1)
        yield Episode(_tree({path: arrays[path][seen] for path in paths}),
                      *(arrays[name][rows] for name in ("action", "reward", "terminated", "truncated")),
                      arrays["mask"][rows] if "mask" in arrays else None)
        begin += length


def _tree(flat: Mapping[str, np.ndarray]) -> Any:
    """From paths to the tree that is called observation."""
    tree: dict[str, Any] = {}
    for path, array in flat.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = array
    return tree["observation"]


def _joined(episodes: list[Episode]) -> dict[str, np.ndarray]:
    flat = [{"/".join(("observation", *path)): leaf for path, leaf in leaves(one.observation)} for one in episodes]
    arrays = {name: np.concatenate([one[name] for one in flat]) for name in flat[0]}
    for name in ("action", "reward", "terminated", "truncated"):
        arrays[name] = np.concatenate([getattr(one, name) for one in episodes])
    if episodes[0].mask is not None:
        arrays["mask"] = np.concatenate([one.mask for one in episodes])  # type: ignore[misc]
    return {**arrays, "length": np.array([len(one) for one in episodes], np.int64)}


class Writer:
    """Writes episodes into a folder while they come; a context that ends by an error keeps what it was given."""

    def __init__(self, path: Path, about: About, made: Mapping[str, Any], before: Folder | None) -> None:
        self.path, self.about, self.made = path, about, dict(made)
        self._kept = before
        self._old: list[str] = []  # files of a recording that is replaced
        self._files: list[dict[str, Any]] = []
        self._waiting: list[Episode] = []
        self._bytes, self._since = 0, time.monotonic()
        self._returns: list[float] = []
        self._lengths: list[int] = []
        self._terminated = 0
        self._number = 0

    @classmethod
    def create(cls, path: Path, about: About, made: Mapping[str, Any], *, append: bool = False, overwrite: bool = False) -> Writer:
        """A writer for a new folder; for one that has a recording only with `append` or `overwrite`."""
        if not (path / META).exists():
            if path.exists() and (not path.is_dir() or any(one.suffix != ".new" for one in path.iterdir())):
                what = "is a file" if not path.is_dir() else "has other things in it"
                raise ConfigError(f"--out {path} {what}; give a folder that is empty or does not exist")
            try:
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"--out {path} cannot be made: {error.strerror or error}; give another folder") from None
            return cls(path, about, made, None)
        if not (append or overwrite):
            raise ConfigError(f"--out {path} has a recording already; add to it with --append, replace it with --overwrite, or "
                              "give another folder")
        if append:
            before = Folder(path)
            _same(before.about, about, path)
            writer = cls(path, about, made, before)
            writer._take_over(before)
            return writer
        writer = cls(path, about, made, None)
        with contextlib.suppress(ConfigError, KeyError, TypeError):  # what is to be replaced may be broken
            writer._old = [file["name"] for file in read_meta(path)["files"]]
        writer._number = 1 + max((_number(one.name) for one in path.glob("episodes-*.safetensors")), default=-1)
        return writer

    def _take_over(self, before: Folder) -> None:
        self._files = list(before.files)
        for episode in before.episodes():
            self._note(episode)
        self._number = 1 + max((_number(one.name) for one in self.path.glob("episodes-*.safetensors")), default=-1)

    def _note(self, episode: Episode) -> None:
        self._returns.append(episode.total)
        self._lengths.append(len(episode))
        self._terminated += bool(episode.terminated[-1])

    def add(self, episode: Episode) -> None:
        """Keep an episode; every few seconds a file of them is written."""
        check_episode(episode, self.about, f"episode {len(self._returns)}")
        self._note(episode)
        self._waiting.append(episode)
        self._bytes += episode.nbytes
        if self._bytes >= FLUSH_BYTES:
            self.flush()
        self.tick()

    def tick(self) -> None:
        """Bring to disk what has waited for long, also while no other episode ends."""
        if self._waiting and time.monotonic() >= self._since + FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Bring what was added to disk, and then to demos.json."""
        from safetensors.numpy import save_file

        self._since = time.monotonic()
        if not self._waiting:
            return
        arrays = {name: np.ascontiguousarray(array) for name, array in _joined(self._waiting).items()}
        file = self.path / f"episodes-{self._number:06d}.safetensors"
        _replace(file, lambda draft: save_file(arrays, draft))
        self._files.append({"name": file.name, "episodes": len(self._waiting), "steps": int(arrays["length"].sum()),
                            "bytes": file.stat().st_size})
        self._number += 1
        self._waiting, self._bytes = [], 0
        meta = json.dumps(self._meta(), indent=2)
        _replace(self.path / META, lambda draft: draft.write_text(meta + "\n", encoding="utf-8") and None)
        for name in self._old:
            (self.path / name).unlink(missing_ok=True)
        self._old = []

    def _meta(self) -> dict[str, Any]:
        about = self.written
        spreads = {name: asdict(getattr(about, name)) for name in ("returns", "lengths")}
        return {"format": FORMAT, "version": VERSION, "env": {"name": about.env, "kwargs": plain(about.kwargs)},
                "observation_space": space_to_json(about.observation_space), "action_space": space_to_json(about.action_space),
                "mask_size": about.mask_size, "episodes": about.episodes, "steps": about.steps, "terminated": about.terminated,
                **spreads, "made": list(about.made), "files": self._files}

    @property
    def written(self) -> About:
        """What is known of all that was added so far, earlier parts included."""
        returns, lengths = np.array(self._returns), np.array(self._lengths)
        kept, own = (), len(returns)
        if self._kept is not None:
            kept, own = self._kept.about.made, own - self._kept.about.episodes
        return replace(self.about, episodes=len(returns), steps=int(lengths.sum()), terminated=self._terminated,
                       returns=Spread.of(returns) if len(returns) else None, lengths=Spread.of(lengths) if len(returns) else None,
                       nbytes=sum(file["bytes"] for file in self._files), made=(*kept, {**self.made, "episodes": own}))

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()


def _number(name: str) -> int:
    digits = name.removeprefix("episodes-").removesuffix(".safetensors")
    return int(digits) if digits.isdigit() else -1


def _same(before: About, about: About, path: Path) -> None:
    """What is added must be of the same environment."""
    if (before.env, plain(before.kwargs)) != (about.env, plain(about.kwargs)):
        raise ConfigError(f"--append: {path} was recorded in {before.env} {plain(before.kwargs) or ''}, not in {about.env} "
                          f"{plain(about.kwargs) or ''}; give another --out")
    found = difference(before.observation_space, about.observation_space) or difference(before.action_space, about.action_space)
    if found or before.mask_size != about.mask_size:
        raise ConfigError(f"--append: {path} has other spaces ({found or 'action masks'}); give another --out")
