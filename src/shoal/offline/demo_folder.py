"""shoal's own format: a folder with demos.json and files of whole episodes.

    demos.json                    what is in it: environment, spaces, counts, returns, how it was made, and the list of files with
                                  the episodes, steps, bytes and checksum (CRC-32) of each
    episodes-000000.safetensors   observation[/path] [sum(T + 1), ...], action, reward, terminated, truncated, mask [sum(T), ...],
    episodes-000001.safetensors   log_prob [sum(T)], length [E], final_mask [E, M]: many episodes one behind the other

demos.json decides what counts: a file that it does not name is ignored. A file is written under another name, synced to disk and
renamed; only then is demos.json replaced, in one step too. So the folder always holds whole episodes, and a kill -9 loses at most
what was recorded since the last file: FLUSH_SECONDS or FLUSH_BYTES. Ctrl-C loses no finished episode. Files are only ever added
(--append). A reader leaves out a last file that is shorter than demos.json says, as a disk that lost power may leave it, and says
so; any other file that is not as it was written is refused.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from shoal.envs.space_codecs import ObservationCodec
from shoal.errors import ConfigError
from shoal.files import replacing
from shoal.offline.episode_index import episode_index
from shoal.offline.recorded_episodes import (
    Episode,
    EpisodeStatistics,
    RecordingInfo,
    check_episode,
    joined_log_probs,
    json_arguments,
    known_log_prob,
)
from shoal.offline.space_json import difference, space_from_json, space_to_json
from shoal.slots import leaves

__all__ = ["META", "DemoFolder", "DemoWriter", "replace_file"]

LOG = logging.getLogger(__name__)
META = "demos.json"
FORMAT, VERSION = "shoal demonstrations", 1
FLUSH_SECONDS = 2.0
FLUSH_BYTES = 32 << 20


def replace_file(path: Path, write: Callable[[Path], None]) -> None:
    """Replace a file in one step: it is written whole or not at all."""
    try:
        with replacing(path) as draft:
            write(draft)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}; what was there before is unharmed") from None


def read_demos_json(path: Path) -> dict[str, Any]:
    try:
        meta: dict[str, Any] = json.loads((path / META).read_text(encoding="utf-8"))
        if meta["format"] != FORMAT or meta["version"] != VERSION:
            raise ValueError(f"its format is {meta['format']!r} version {meta['version']}, not {FORMAT!r} version {VERSION}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot read {path / META}: {error}; give a folder that `shoal data record` made") from None
    return meta


class DemoFolder:
    """A recording in shoal's own format."""

    def __init__(self, path: Path) -> None:
        self.path = path
        meta = read_demos_json(path)
        try:
            self.files: list[dict[str, Any]] = meta["files"]
            returns, lengths = (EpisodeStatistics(**meta[name]) if meta[name] else None for name in ("returns", "lengths"))
            self.info = RecordingInfo(
                meta["env"]["name"], space_from_json(meta["observation_space"]), space_from_json(meta["action_space"]),
                meta["mask_size"], meta["env"]["kwargs"], meta["episodes"], meta["steps"], meta["terminated"], returns, lengths,
                nbytes=sum(file["bytes"] for file in self.files), made=tuple(meta["made"]))
            counted = tuple(sum(file[name] for file in self.files) for name in ("episodes", "steps"))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{path / META} is damaged: {error!r}; copy the recording again") from None
        if counted != (self.info.episodes, self.info.steps):
            raise ConfigError(f"{path / META} says {self.info.episodes:,} episodes with {self.info.steps:,} steps, but its list of "
                              f"files adds up to {counted[0]:,} with {counted[1]:,}; copy the recording again")
        self._paths = ["/".join(("observation", *leaf.names)) for leaf in ObservationCodec(self.info.observation_space).leaves]
        self._leave_out_torn_tail()
        for file in self.files:
            found = path / file["name"]
            if not found.is_file() or found.stat().st_size != file["bytes"]:
                what = "is missing" if not found.is_file() else f"has {found.stat().st_size:,} of {file['bytes']:,} bytes"
                raise ConfigError(f"{found} {what}; copy the recording again")

    def _leave_out_torn_tail(self) -> None:
        """Go without the last file if it is shorter than it was written: what comes before it is whole."""
        *rest, last = self.files or [{}]
        found = self.path / str(last.get("name"))
        if not rest or not found.is_file() or found.stat().st_size >= last["bytes"]:
            return
        self.files = rest
        kept = self.index()
        self.info = replace(self.info, episodes=len(kept), steps=int(kept["length"].sum()),
                            terminated=int(kept["terminated"].sum()), returns=EpisodeStatistics.of(kept["return"]),
                            lengths=EpisodeStatistics.of(kept["length"]), nbytes=sum(file["bytes"] for file in rest))
        LOG.warning("%s has %s of %s bytes, so its %s episodes are left out; the %s episodes before it are whole", found,
                    f"{found.stat().st_size:,}", f"{last['bytes']:,}", f"{last['episodes']:,}", f"{len(kept):,}")

    def episodes(self, order: np.random.Generator | None = None, checked: bool = True) -> Iterator[Episode]:
        """With an `order` the files come in random order, and the episodes within each: one file is in memory at a time."""
        counts = [file["episodes"] for file in self.files]
        first = np.cumsum([0, *counts])
        for at in range(len(counts)) if order is None else order.permutation(len(counts)).tolist():
            inside = self._read(self.files[at], int(first[at]), checked)
            for number in range(len(inside)) if order is None else order.permutation(len(inside)).tolist():
                yield inside[number]

    def index(self) -> np.ndarray:
        """Where each episode lies and how it went (`episode_index.ENTRY`); observations and actions are not read."""
        return episode_index([self.path / file["name"] for file in self.files])

    def episode(self, number: int) -> Episode:
        """One of them; only the file that it lies in is read."""
        ends = np.cumsum([file["episodes"] for file in self.files])
        if not 0 <= number < self.info.episodes:
            raise IndexError(f"there is no episode {number} of {self.info.episodes}")
        at = int(np.searchsorted(ends, number, side="right"))
        first = int(ends[at]) - int(self.files[at]["episodes"])
        return self._read(self.files[at], first)[number - first]

    @property
    def shard_steps(self) -> list[int]:
        """Decisions in each file."""
        return [file["steps"] for file in self.files]

    def read_shard(self, number: int) -> list[Episode]:
        return self._read(self.files[number], sum(file["episodes"] for file in self.files[:number]))

    def _read(self, file: Mapping[str, Any], first: int, checked: bool = True) -> list[Episode]:
        """The episodes of a file, numbered from `first` on. Its checksum comes last: other faults say more."""
        path = self.path / file["name"]
        arrays, checksum = _load(path)
        if fault := _fault(arrays, file, self._paths):
            raise ConfigError(f"{path} {fault}; copy the recording again")
        episodes = list(_episodes(arrays, self._paths))
        for number, episode in enumerate(episodes if checked else ()):
            check_episode(episode, self.info, f"{self.path}, episode {first + number}")
        if file.get("checksum", checksum) != checksum:  # recordings of earlier versions have none
            raise ConfigError(f"{path} is not the file that was recorded: its checksum is {checksum}, but {META} says "
                              f"{file['checksum']}; copy the recording again")
        return episodes


def _fault(arrays: Mapping[str, np.ndarray], file: Mapping[str, Any], paths: list[str]) -> str | None:
    """How a file disagrees with demos.json or with its own lengths; None if it agrees. check_episode checks each episode later."""
    missing = {"length", "action", "reward", "terminated", "truncated", *paths} - set(arrays)
    if missing:
        return f"has no {sorted(missing)[0]}"
    length = arrays["length"]
    if length.dtype != np.int64 or length.ndim != 1 or (length < 1).any():
        return "has episode lengths that are not positive integers"
    found, steps = len(length), int(length.sum())
    if (found, steps) != (file["episodes"], file["steps"]):
        return f"has {found:,} episodes with {steps:,} steps, but {META} says {file['episodes']:,} with {file['steps']:,}"
    rows = dict.fromkeys(("action", "reward", "terminated", "truncated", "mask", "log_prob"), steps)
    rows |= dict.fromkeys(paths, steps + found)
    rows["final_mask"] = found
    wrong = [name for name, count in rows.items() if name in arrays and arrays[name].shape[:1] != (count,)]
    return f"has {wrong[0]} of shape {arrays[wrong[0]].shape} instead of {rows[wrong[0]]:,} rows" if wrong else None


def _load(path: Path) -> tuple[dict[str, np.ndarray], str]:
    """The arrays of a file, and its checksum."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        data = path.read_bytes()
        return load(data), _checksum(data)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read {path}: {error}; copy the recording again") from None


def _checksum(data: bytes) -> str:
    return f"{zlib.crc32(data):08x}"


def _episodes(arrays: Mapping[str, np.ndarray], paths: list[str]) -> Iterator[Episode]:
    begin = 0
    for number, length in enumerate(arrays["length"].tolist()):
        rows, seen = slice(begin, begin + length), slice(begin + number, begin + number + length + 1)
        action, reward, terminated, truncated = (arrays[name][rows] for name in ("action", "reward", "terminated", "truncated"))
        yield Episode(_tree({path: arrays[path][seen] for path in paths}), action, reward, terminated, truncated,
                      arrays["mask"][rows] if "mask" in arrays else None,
                      arrays["final_mask"][number] if "final_mask" in arrays and truncated[-1] else None,
                      known_log_prob(arrays["log_prob"][rows] if "log_prob" in arrays else None))
        begin += length


def _tree(flat: Mapping[str, np.ndarray]) -> Any:
    """The observation tree from arrays by path."""
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
    arrays["action"] = np.concatenate([one.action for one in episodes])
    arrays["reward"] = np.concatenate([one.reward for one in episodes])
    arrays["terminated"] = np.concatenate([one.terminated for one in episodes])
    arrays["truncated"] = np.concatenate([one.truncated for one in episodes])
    if episodes[0].mask is not None:
        arrays["mask"] = np.concatenate([one.mask for one in episodes if one.mask is not None])
        anything = np.ones(arrays["mask"].shape[1], bool)
        arrays["final_mask"] = np.stack([anything if one.final_mask is None else one.final_mask for one in episodes])
    if any(one.log_prob is not None for one in episodes):
        arrays["log_prob"] = joined_log_probs(episodes)
    return {**arrays, "length": np.array([len(one) for one in episodes], np.int64)}


class DemoWriter:
    """Writes episodes into a folder as they come. A `with` block that ends in an error keeps the episodes added before it."""

    def __init__(self, path: Path, info: RecordingInfo, made: Mapping[str, Any], before: DemoFolder | None) -> None:
        self.path, self.info, self.made = path, info, dict(made)
        self._kept = before
        self._old: list[str] = []  # files of the recording that this one replaces
        self._files: list[dict[str, Any]] = []
        self._waiting: list[Episode] = []
        self._bytes, self._since = 0, time.monotonic()
        self._returns: list[float] = []
        self._lengths: list[int] = []
        self._terminated = 0
        self._number = 1 + max((_number(one.name) for one in path.glob("episodes-*.safetensors")), default=-1)

    @classmethod
    def create(cls, path: Path, info: RecordingInfo, made: Mapping[str, Any], *, append: bool = False,
               overwrite: bool = False) -> DemoWriter:
        """A writer for a new folder. If the folder has a recording already, give `append` or `overwrite`."""
        if not (path / META).exists():
            if path.exists() and (not path.is_dir() or any(not _draft(one.name) for one in path.iterdir())):
                what = "is a file" if not path.is_dir() else "holds other files"
                raise ConfigError(f"--out {path} {what}; give a folder that is empty or does not exist")
            try:
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"cannot create --out {path}: {error.strerror or error}; give another folder") from None
            return cls(path, info, made, None)
        if not (append or overwrite):
            raise ConfigError(f"--out {path} already has a recording; add to it with --append, replace it with --overwrite, or "
                              "give another folder")
        if append:
            before = DemoFolder(path)
            _check_same_env(before.info, info, path)
            writer = cls(path, info, made, before)
            writer._take_over(before)
            return writer
        writer = cls(path, info, made, None)
        with contextlib.suppress(ConfigError, KeyError, TypeError):  # the recording to replace may be damaged
            writer._old = [file["name"] for file in read_demos_json(path)["files"]]
        return writer

    def _take_over(self, before: DemoFolder) -> None:
        self._files, known = list(before.files), before.index()
        self._returns, self._lengths = known["return"].tolist(), known["length"].tolist()
        self._terminated = int(known["terminated"].sum())

    def add(self, episode: Episode) -> None:
        """Keep an episode; every few seconds a file of them is written."""
        check_episode(episode, self.info, f"episode {len(self._returns)}")
        self._returns.append(episode.total)
        self._lengths.append(len(episode))
        self._terminated += bool(episode.terminated[-1])
        self._waiting.append(episode)
        self._bytes += episode.nbytes
        if self._bytes >= FLUSH_BYTES:
            self.flush()
        self.flush_if_due()

    def flush_if_due(self) -> None:
        """Write what has waited for FLUSH_SECONDS. Call it also while no episode ends."""
        if self._waiting and time.monotonic() >= self._since + FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write the episodes added so far to a file, and then name it in demos.json."""
        from safetensors.numpy import save

        self._since = time.monotonic()
        if not self._waiting:
            return
        arrays = {name: np.ascontiguousarray(array) for name, array in _joined(self._waiting).items()}
        file, data = self.path / f"episodes-{self._number:06d}.safetensors", save(arrays)
        replace_file(file, lambda draft: _write_bytes(draft, data))
        self._files.append({"name": file.name, "episodes": len(self._waiting), "steps": int(arrays["length"].sum()),
                            "bytes": len(data), "checksum": _checksum(data)})
        self._number += 1
        self._waiting, self._bytes = [], 0
        meta = json.dumps(self._meta(), indent=2)
        replace_file(self.path / META, lambda draft: _write_text(draft, meta + "\n"))
        for name in self._old:
            (self.path / name).unlink(missing_ok=True)
        self._old = []

    def _meta(self) -> dict[str, Any]:
        info = self.written
        assert info.returns is not None and info.lengths is not None  # flush() has episodes to write
        return {"format": FORMAT, "version": VERSION, "env": {"name": info.env, "kwargs": json_arguments(info.kwargs)},
                "observation_space": space_to_json(info.observation_space), "action_space": space_to_json(info.action_space),
                "mask_size": info.mask_size, "episodes": info.episodes, "steps": info.steps, "terminated": info.terminated,
                "returns": asdict(info.returns), "lengths": asdict(info.lengths), "made": list(info.made), "files": self._files}

    @property
    def written(self) -> RecordingInfo:
        """What is known about all episodes added so far, those of an appended recording included."""
        returns, lengths = np.array(self._returns), np.array(self._lengths)
        kept: tuple[Mapping[str, Any], ...] = ()
        own = len(returns)
        if self._kept is not None:
            kept, own = self._kept.info.made, own - self._kept.info.episodes
        return replace(self.info, episodes=len(returns), steps=int(lengths.sum()), terminated=self._terminated,
                       returns=EpisodeStatistics.of(returns) if len(returns) else None,
                       lengths=EpisodeStatistics.of(lengths) if len(returns) else None,
                       nbytes=sum(file["bytes"] for file in self._files), made=(*kept, {**self.made, "episodes": own}))

    def __enter__(self) -> DemoWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()


def _draft(name: str) -> bool:
    """Whether it is a file of a recording that was killed before its first demos.json."""
    return name.endswith(".new") or _number(name) >= 0


def _number(name: str) -> int:
    digits = name.removeprefix("episodes-").removesuffix(".safetensors")
    return int(digits) if digits.isdigit() else -1


def _write_bytes(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _check_same_env(before: RecordingInfo, info: RecordingInfo, path: Path) -> None:
    """Raise a ConfigError unless what is added is from the same environment."""
    if (before.env, json_arguments(before.kwargs)) != (info.env, json_arguments(info.kwargs)):
        raise ConfigError(f"--append: {path} was recorded in {before.env} {json_arguments(before.kwargs) or ''}, not in {info.env} "
                          f"{json_arguments(info.kwargs) or ''}; give another --out")
    found = difference(before.observation_space, info.observation_space) or difference(before.action_space, info.action_space)
    if found or before.mask_size != info.mask_size:
        raise ConfigError(f"--append: {path} has other spaces ({found or 'action masks'}); give another --out")
