"""Recordings as plain tables of steps, in the layout of D4RL: Parquet, HDF5 or NumPy files.

    observations, actions, rewards, terminals [N]    one row per decision; nested observations are observations/<path>
    timeouts [N]                                     where an episode was cut short; terminals, on the other hand, end its value
    next_observations [N]                            what each decision led to

Rows of an episode follow each other; it ends where `terminals` or `timeouts` says so, and with the file. Without
next_observations the last decision of an episode that was cut short is left out: what it led to is not known. The singular names
(observation, action, reward, terminated, truncated, next_observation) are read too. A table that shoal wrote also holds the
environment and its spaces, as JSON in the file's metadata. Of others the spaces are inferred: actions are in [-1, 1], or within
the bounds of the data if some are outside; whole numbers are Discrete.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from shoal.envs.space_codecs import ObservationCodec
from shoal.errors import ConfigError
from shoal.offline.demo_folder import replace_file
from shoal.offline.recorded_episodes import Demos, Episode, EpisodeStatistics, RecordingInfo, action_dtype, check_episode
from shoal.offline.space_json import space_from_json, space_to_json
from shoal.slots import leaves

__all__ = ["SUFFIXES", "StepTable", "write_table"]

SUFFIXES = (".parquet", ".hdf5", ".h5", ".npz")
SINGULAR = {"observation": "observations", "next_observation": "next_observations", "action": "actions", "reward": "rewards",
            "terminated": "terminals", "truncated": "timeouts"}
META = "shoal"
Columns = dict[str, np.ndarray]


class StepTable:
    """A recording in one file of steps."""

    def __init__(self, path: Path) -> None:
        self.path = path
        found, meta = _read(path)
        self.columns = {_plural(name): array for name, array in found.items()}
        self._check_columns()
        self.info = _declared(path, meta) if meta else _inferred(path, self.columns)
        self._leaves = [("/".join(leaf.names), leaf) for leaf in ObservationCodec(self.info.observation_space).leaves]
        self._ends = self._episode_ends()
        self._summarise()

    def _check_columns(self) -> None:
        names = {name.partition("/")[0] for name in self.columns}
        missing = {"observations", "actions", "rewards", "terminals"} - names
        if missing:
            raise ConfigError(f"{self.path} has no column {sorted(missing)[0]}; it has {', '.join(sorted(self.columns))}")
        rows = len(self.columns["rewards"])
        wrong = [name for name, array in self.columns.items() if len(array) != rows]
        text = [name for name, array in self.columns.items() if array.dtype.kind not in "fiub"]
        if text:
            raise ConfigError(f"{self.path}: {text[0]} does not hold numbers ({self.columns[text[0]].dtype}); write the file again")
        if wrong or not rows:
            raise ConfigError(f"{self.path}: rewards has {rows:,} rows" + (f", but {wrong[0]} has {len(self.columns[wrong[0]]):,}"
                                                                            if wrong else "") + "; write the file again")

    def _episode_ends(self) -> np.ndarray:
        """The last row of every episode."""
        over = self.columns["terminals"].astype(bool) | self.columns.get("timeouts", np.zeros(1, bool)).astype(bool)
        over = over.copy()
        over[-1] = True
        return np.flatnonzero(over)

    def _summarise(self) -> None:
        kept = [one for number in range(len(self._ends)) if (one := self._episode(number)) is not None]
        if not kept:
            raise ConfigError(f"{self.path} has no whole episode: each has one decision, and what it led to is not known; add "
                              "next_observations")
        lengths = np.array([len(one) for one in kept])
        self.info = replace(self.info, episodes=len(kept), steps=int(lengths.sum()), lengths=EpisodeStatistics.of(lengths),
                            returns=EpisodeStatistics.of(np.array([one.total for one in kept])), nbytes=self.path.stat().st_size,
                            terminated=sum(bool(one.terminated[-1]) for one in kept))

    def episodes(self, order: np.random.Generator | None = None, checked: bool = True) -> Iterator[Episode]:
        count = len(self._ends)
        for number in range(count) if order is None else order.permutation(count).tolist():
            episode = self._episode(number)
            if episode is None:
                continue
            if checked:
                check_episode(episode, self.info, f"{self.path}, episode {number}")
            yield episode

    def _episode(self, number: int) -> Episode | None:
        """None where nothing is left of it."""
        first, last = int(self._ends[number - 1]) + 1 if number else 0, int(self._ends[number])
        ended = bool(self.columns["terminals"][last])
        following = any(name.startswith("next_observations") for name in self.columns)
        stop = last + 1 if ended or following else last
        if stop == first:
            return None
        rows = slice(first, stop)
        tree: dict[str, Any] = {}
        for path, leaf in self._leaves:
            seen = self.columns[_joined("observations", path)]
            final = self.columns[_joined("next_observations", path)][last] if following else \
                seen[last] if not ended else np.zeros_like(seen[last])
            _put(tree, path, np.concatenate([seen[rows], final[None]]).astype(leaf.dtype, copy=False))
        terminated = self.columns["terminals"][rows].astype(bool)
        truncated = np.zeros(stop - first, bool)
        truncated[-1] = not terminated[-1]
        action = self.columns["actions"][rows].astype(action_dtype(self.info.action_space), copy=False)
        reward = self.columns["rewards"][rows].astype(np.float32, copy=False)
        return Episode(tree.get("", tree), action, reward, terminated, truncated)


def _plural(name: str) -> str:
    head, slash, rest = name.partition("/")
    return SINGULAR.get(head, head) + slash + rest


def _joined(head: str, path: str) -> str:
    return f"{head}/{path}" if path else head


def _put(tree: dict[str, Any], path: str, array: np.ndarray) -> None:
    *parents, name = path.split("/")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[name] = array


# ---------------------------------------------------------------------------------------------- what a table is about
def _declared(path: Path, meta: Mapping[str, Any]) -> RecordingInfo:
    try:
        return RecordingInfo(meta["env"], space_from_json(meta["observation_space"]), space_from_json(meta["action_space"]), 0,
                             meta["kwargs"], kind=path.suffix[1:], made=tuple(meta["made"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: what it says about itself is damaged: {error!r}; convert the recording again") from None


def _inferred(path: Path, columns: Columns) -> RecordingInfo:
    seen = {name.partition("/")[2]: array for name, array in columns.items() if name.partition("/")[0] == "observations"}
    observation: gym.Space[Any] = _box(seen[""]) if "" in seen else spaces.Dict({name: _box(array) for name, array in seen.items()})
    action = columns["actions"]
    if action.dtype.kind in "iub" and action.ndim == 1:
        space: gym.Space[Any] = spaces.Discrete(int(action.max()) + 1)
    else:
        low, high = action.min(0).astype(np.float32), action.max(0).astype(np.float32)
        inside = bool((low >= -1).all() and (high <= 1).all())
        space = spaces.Box(np.full_like(low, -1) if inside else low, np.full_like(high, 1) if inside else high, dtype=np.float32)
    return RecordingInfo(None, observation, space, kind=path.suffix[1:], inferred=True)


def _box(array: np.ndarray) -> spaces.Box:
    if array.dtype == np.uint8:
        return spaces.Box(0, 255, array.shape[1:], np.uint8)
    return spaces.Box(-np.inf, np.inf, array.shape[1:], np.float32)


# ---------------------------------------------------------------------------------------------- files
def _read(path: Path) -> tuple[Columns, dict[str, Any] | None]:
    readers = {".parquet": _read_parquet, ".npz": _read_npz}
    try:
        columns, text = readers.get(path.suffix, _read_hdf5)(path)
        return columns, json.loads(text) if text else None
    except ImportError as error:
        extra = "parquet" if path.suffix == ".parquet" else "minari"
        raise ConfigError(f"reading {path} needs {error.name}: pip install 'shoal[{extra}]'") from None
    except ConfigError:
        raise
    except Exception as error:  # each library has its own for a file that is cut short or something else
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"cannot read {path}: {why}; copy the file again, or convert the recording again") from None


def _read_npz(path: Path) -> tuple[Columns, str | None]:
    with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
        return {name: file[name] for name in file.files if name != META}, str(file[META]) if META in file.files else None


def _read_hdf5(path: Path) -> tuple[Columns, str | None]:
    import h5py

    columns: Columns = {}

    def keep(name: str, node: Any) -> None:
        if isinstance(node, h5py.Dataset) and node.ndim:
            columns[name] = np.asarray(node)

    with h5py.File(path, "r") as file:
        file.visititems(keep)
        known = {name: array for name, array in columns.items() if _plural(name).partition("/")[0] in (*SINGULAR.values(),)}
        return known, file.attrs.get(META)


def _read_parquet(path: Path) -> tuple[Columns, str | None]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    columns: Columns = {}
    for name in table.column_names:
        column = table.column(name).combine_chunks()
        if column.null_count:
            raise ConfigError(f"{path}: column {name} has {column.null_count:,} missing values; fill them in or leave them out")
        if isinstance(column, pa.FixedSizeListArray | pa.ListArray):
            flat = column.flatten().to_numpy(zero_copy_only=False)
            columns[name] = flat.reshape(len(column), -1)
        else:
            columns[name] = column.to_numpy(zero_copy_only=False)
    text = (table.schema.metadata or {}).get(META.encode())
    meta = text.decode() if text else None
    for name, shape in (json.loads(meta).get("shapes", {}) if meta else {}).items():
        columns[name] = columns[name].reshape(-1, *shape)
    return columns, meta


def write_table(demos: Demos, path: Path) -> None:
    """Write a recording as one file of steps, by the suffix of its name; the file is whole or not there."""
    info = demos.info
    if info.mask_size:
        raise ConfigError(f"{path.suffix} files have no room for action masks, which this recording has; convert it to a folder")
    columns = _columns(demos)
    meta = json.dumps({"env": info.env, "kwargs": info.kwargs, "observation_space": space_to_json(info.observation_space),
                       "action_space": space_to_json(info.action_space), "made": list(info.made),
                       "shapes": {name: list(array.shape[1:]) for name, array in columns.items() if array.ndim > 2}})
    writers = {".parquet": _write_parquet, ".npz": _write_npz}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, lambda draft: writers.get(path.suffix, _write_hdf5)(draft, columns, meta))
    except ImportError as error:
        extra = "parquet" if path.suffix == ".parquet" else "minari"
        raise ConfigError(f"writing {path} needs {error.name}: pip install 'shoal[{extra}]'") from None


def _columns(demos: Demos) -> Columns:
    parts: dict[str, list[np.ndarray]] = {}
    for episode in demos.episodes():
        for leaf_path, leaf in leaves(episode.observation):
            name = "/".join(leaf_path)
            parts.setdefault(_joined("observations", name), []).append(leaf[:-1])
            parts.setdefault(_joined("next_observations", name), []).append(leaf[1:])
        for name, array in (("actions", episode.action), ("rewards", episode.reward), ("terminals", episode.terminated),
                            ("timeouts", episode.truncated)):
            parts.setdefault(name, []).append(array)
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


def _write_npz(path: Path, columns: Columns, meta: str) -> None:
    with path.open("wb") as file:
        np.savez(file, **columns, **{META: np.array(meta)})  # type: ignore[arg-type]  # numpy takes allow_pickle for any name


def _write_hdf5(path: Path, columns: Columns, meta: str) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        for name, array in columns.items():
            file.create_dataset(name, data=array)
        file.attrs[META] = meta


def _write_parquet(path: Path, columns: Columns, meta: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def column(array: np.ndarray) -> Any:
        if array.ndim == 1:
            return pa.array(array)
        flat = np.ascontiguousarray(array).reshape(len(array), -1)
        return pa.FixedSizeListArray.from_arrays(pa.array(flat.reshape(-1)), flat.shape[1])

    table = pa.table({name: column(array) for name, array in columns.items()})
    pq.write_table(table.replace_schema_metadata({META: meta}), path)
