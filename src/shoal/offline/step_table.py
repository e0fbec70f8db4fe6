"""Recordings as plain tables of steps, in the layout of D4RL: Parquet, HDF5 or NumPy files.

    observations, actions, rewards, terminals [N]    one row per decision; nested observations are observations/<path>
    timeouts [N]                                     where an episode was cut short; terminals, on the other hand, end its value
    next_observations [N]                            what each decision led to
    infos/action_log_probs [N]                       log-probability of each action as it was chosen; NaN where it is not known

Rows of an episode follow each other; it ends where `terminals` or `timeouts` says so, and with the file. Without
next_observations the last decision of an episode that was cut short is left out: what it led to is not known. The singular names
(observation, action, reward, terminated, truncated, next_observation) are read too. A table that shoal wrote also holds the
environment and its spaces, as JSON in the file's metadata. Of others the spaces are inferred: actions are in [-1, 1], or within
the bounds of the data if some are outside; whole numbers are Discrete.

Only rewards and ends are kept in memory. Everything else is read a piece at a time: a few thousand rows of whole episodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from shoal.envs.space_codecs import ObservationCodec
from shoal.errors import ConfigError
from shoal.offline.demo_folder import replace_file
from shoal.offline.recorded_episodes import (
    Demos,
    Episode,
    EpisodeStatistics,
    RecordingInfo,
    action_dtype,
    check_episode,
    joined_log_probs,
    known_log_prob,
)
from shoal.offline.space_json import space_from_json, space_to_json
from shoal.offline.table_files import SUFFIXES, Column, Columns, open_table, write_columns
from shoal.slots import leaves

__all__ = ["SUFFIXES", "StepTable", "write_table"]

SINGULAR = {"observation": "observations", "next_observation": "next_observations", "action": "actions", "reward": "rewards",
            "terminated": "terminals", "truncated": "timeouts"}
LOG_PROBS = "infos/action_log_probs"
PIECE = 4096  # rows, at least, that are read or written together


class StepTable:
    """A ShardedDemos in one file of steps."""

    def __init__(self, path: Path) -> None:
        self.path, self._file = path, open_table(path)
        known = {_plural(name): name for name in self._file.columns}
        self._names = {name: own for name, own in known.items() if name.partition("/")[0] in SINGULAR.values() or name == LOG_PROBS}
        self._check_columns()
        self._following = any(name.startswith("next_observations") for name in self._names)
        self._rows = self._file.rows[self._names["rewards"]]
        self._rewards, self._ended = (self._whole(name) for name in ("rewards", "terminals"))
        self._ended = self._ended.astype(bool)
        self._spans = self._episode_spans()
        about = self._file.about
        self.info = self._summed(_declared(path, about) if about else self._inferred())
        self._leaves = [("/".join(leaf.names), leaf) for leaf in ObservationCodec(self.info.observation_space).leaves]
        self._shards = self._pieces()

    def _column(self, name: str) -> Column:
        return self._file.columns[self._names[name]]

    def _whole(self, name: str) -> np.ndarray:
        return self._file.read(self._names[name], 0, self._file.rows[self._names[name]])

    def _check_columns(self) -> None:
        missing = {"observations", "actions", "rewards", "terminals"} - {name.partition("/")[0] for name in self._names}
        if missing:
            raise ConfigError(f"{self.path} has no column {sorted(missing)[0]}; it has {', '.join(sorted(self._file.columns))}")
        count = {name: self._file.rows[own] for name, own in self._names.items()}
        rows = count["rewards"]
        wrong = [name for name, found in count.items() if found != rows]
        text = [name for name in self._names if self._column(name)[0].kind not in "fiub"]
        if text:
            raise ConfigError(f"{self.path}: {text[0]} does not hold numbers ({self._column(text[0])[0]}); write the file again")
        if wrong or not rows:
            but = f", but {wrong[0]} has {count[wrong[0]]:,}" if wrong else ""
            raise ConfigError(f"{self.path}: rewards has {rows:,} rows{but}; write the file again")

    def _episode_spans(self) -> np.ndarray:
        """First row, row behind the last decision that is kept, and last row of every episode of which something is left."""
        over = self._ended.copy()
        if "timeouts" in self._names:
            over |= self._whole("timeouts").astype(bool)
        self._without_end = not over[-1]
        over[-1] = True
        last = np.flatnonzero(over)
        first = np.concatenate([[0], last[:-1] + 1])
        stop = np.where(self._ended[last] | self._following, last + 1, last)
        spans = np.stack([first, stop, last], 1)[stop > first]
        if not len(spans):
            raise ConfigError(f"{self.path} has no whole episode: each has one decision, and what it led to is not known; add "
                              "next_observations")
        return spans

    def _summed(self, info: RecordingInfo) -> RecordingInfo:
        first, stop, _ = self._spans.T
        sums = np.concatenate([[0.0], np.cumsum(self._rewards, dtype=np.float64)])
        return replace(info, episodes=len(first), steps=int((stop - first).sum()), lengths=EpisodeStatistics.of(stop - first),
                       returns=EpisodeStatistics.of(sums[stop] - sums[first]), nbytes=self.path.stat().st_size,
                       terminated=int(self._ended[stop - 1].sum()))

    # ------------------------------------------------------------------ pieces
    def _pieces(self) -> list[slice]:
        """Episodes that are read together: as few as have PIECE rows, or as many as Parquet reads anyway."""
        least, pieces, begin = max(PIECE, self._file.chunk), [], 0
        first, _, last = self._spans.T
        for number in range(len(first)):
            if last[number] + 1 - first[begin] >= least or number + 1 == len(first):
                pieces.append(slice(begin, number + 1))
                begin = number + 1
        return pieces

    @property
    def shard_steps(self) -> list[int]:
        lengths = self._spans[:, 1] - self._spans[:, 0]
        return [int(lengths[piece].sum()) for piece in self._shards]

    def read_shard(self, number: int) -> list[Episode]:
        return list(self._read(number, checked=True))

    def episodes(self, order: np.random.Generator | None = None, checked: bool = True) -> Iterator[Episode]:
        """With an `order` the pieces come in random order, and the episodes within each."""
        for number in range(len(self._shards)) if order is None else order.permutation(len(self._shards)).tolist():
            inside = list(self._read(number, checked))
            for at in range(len(inside)) if order is None else order.permutation(len(inside)).tolist():
                yield inside[at]

    def _read(self, number: int, checked: bool) -> Iterator[Episode]:
        spans = self._spans[self._shards[number]]
        begin, end = int(spans[0, 0]), int(spans[-1, 2]) + 1
        wanted = self._names.keys() - {"rewards", "terminals", "timeouts"}
        columns = {name: self._file.read(self._names[name], begin, end) for name in wanted}
        short = [name for name, array in columns.items() if len(array) != end - begin]
        if short:
            raise ConfigError(f"{self.path} has changed: {short[0]} has no rows {begin:,} to {end:,} any more; copy the file again")
        for at, span in enumerate(spans.tolist(), self._shards[number].start):
            episode = self._episode(columns, begin, *span)
            if self._without_end and at + 1 == len(self._spans) and not checked:
                episode.truncated[-1] = False  # as the file has it
            if checked:
                check_episode(episode, self.info, f"{self.path}, episode {at}")
            yield episode

    def _episode(self, columns: Columns, begin: int, first: int, stop: int, last: int) -> Episode:
        rows, end = slice(first - begin, stop - begin), last - begin
        tree: dict[str, Any] = {}
        for path, leaf in self._leaves:
            seen = columns[_joined("observations", path)]
            final = columns[_joined("next_observations", path)][end] if self._following else \
                seen[end] if not self._ended[last] else np.zeros_like(seen[end])
            _put(tree, path, np.concatenate([seen[rows], final[None]]).astype(leaf.dtype, copy=False))
        terminated = self._ended[first:stop].copy()
        truncated = np.zeros(stop - first, bool)
        truncated[-1] = not terminated[-1]
        action = columns["actions"][rows].astype(action_dtype(self.info.action_space), copy=False)
        log_prob = known_log_prob(columns[LOG_PROBS][rows] if LOG_PROBS in columns else None)
        return Episode(tree.get("", tree), action, self._rewards[first:stop].astype(np.float32), terminated, truncated,
                       log_prob=log_prob)

    # ------------------------------------------------------------------ what a table is about
    def _inferred(self) -> RecordingInfo:
        seen: dict[str, gym.Space[Any]] = {
            name.partition("/")[2]: _box(self._column(name)) for name in self._names if name.startswith("observations")}
        observation = seen[""] if "" in seen else spaces.Dict(seen)
        low, high = self._action_bounds()
        if self._column("actions")[0].kind in "iub" and not self._column("actions")[1]:
            return RecordingInfo(None, observation, spaces.Discrete(int(high) + 1), kind=self.path.suffix[1:], inferred=True)
        low, high = low.astype(np.float32), high.astype(np.float32)
        inside = bool((low >= -1).all() and (high <= 1).all())
        space = spaces.Box(np.full_like(low, -1) if inside else low, np.full_like(high, 1) if inside else high, dtype=np.float32)
        return RecordingInfo(None, observation, space, kind=self.path.suffix[1:], inferred=True)

    def _action_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        size = max(PIECE, self._file.chunk)
        parts = [self._file.read(self._names["actions"], at, min(at + size, self._rows)) for at in range(0, self._rows, size)]
        if parts[0].dtype.kind == "f":  # NaN and infinity are in no space; readers say where they are
            parts = [np.where(np.isfinite(part), part, np.nan) for part in parts]
        low, high = (side.reduce([side.reduce(part, 0) for part in parts], 0) for side in (np.fmin, np.fmax))
        return np.nan_to_num(low), np.nan_to_num(high)


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


def _declared(path: Path, meta: Mapping[str, Any]) -> RecordingInfo:
    try:
        return RecordingInfo(meta["env"], space_from_json(meta["observation_space"]), space_from_json(meta["action_space"]), 0,
                             meta["kwargs"], kind=path.suffix[1:], made=tuple(meta["made"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: what it says about itself is damaged: {error!r}; convert the recording again") from None


def _box(column: Column) -> spaces.Box:
    dtype, shape = column
    return spaces.Box(0, 255, shape, np.uint8) if dtype == np.uint8 else spaces.Box(-np.inf, np.inf, shape, np.float32)


# ---------------------------------------------------------------------------------------------- writing
def write_table(demos: Demos, path: Path) -> None:
    """Write a recording as one file of steps, by the suffix of its name; the file is whole or not there."""
    info = demos.info
    if info.mask_size:
        raise ConfigError(f"{path.suffix} files have no room for action masks, which this recording has; convert it to a folder")
    about = {"env": info.env, "kwargs": info.kwargs, "observation_space": space_to_json(info.observation_space),
             "action_space": space_to_json(info.action_space), "made": list(info.made)}
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, partial(write_columns, pieces=_columns(demos), about=about, rows=info.steps))


def _columns(demos: Demos) -> Iterator[Columns]:
    """A few thousand rows at a time."""
    some: list[Episode] = []
    for episode in demos.episodes():
        some.append(episode)
        if sum(map(len, some)) >= PIECE:
            yield _rows(some)
            some = []
    if some:
        yield _rows(some)


def _rows(episodes: list[Episode]) -> Columns:
    parts: dict[str, list[np.ndarray]] = {}
    for episode in episodes:
        for leaf_path, leaf in leaves(episode.observation):
            name = "/".join(leaf_path)
            parts.setdefault(_joined("observations", name), []).append(leaf[:-1])
            parts.setdefault(_joined("next_observations", name), []).append(leaf[1:])
        for name, array in (("actions", episode.action), ("rewards", episode.reward), ("terminals", episode.terminated),
                            ("timeouts", episode.truncated)):
            parts.setdefault(name, []).append(array)
    columns = {name: np.concatenate(arrays) for name, arrays in parts.items()}
    return {**columns, LOG_PROBS: joined_log_probs(episodes)}
