"""Minari datasets (https://minari.farama.org) in a local folder, as its HDF5 storage lays them out.

    DATASET/data/metadata.json      spaces, env_spec, total_episodes, data_format
    DATASET/data/main_data.hdf5     episode_<i>/{observations [T + 1], actions, rewards, terminations, truncations [T]}

Observations and actions are converted to canonical form. An episode that ends with neither flag was cut off during recording: it
counts as truncated, and its last observation is there. Reading needs only h5py, not minari.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from shoal.envs.space_codecs import ActionCodec, BadValue, ObservationCodec
from shoal.errors import ConfigError
from shoal.offline.recorded_episodes import Episode, EpisodeStatistics, RecordingInfo, action_dtype, check_episode, known_log_prob

__all__ = ["LOG_PROB", "MINARI", "MinariDataset", "is_minari", "minari_folder", "minari_root"]

DATA, META = "main_data.hdf5", "metadata.json"
LOG_PROB = "action_log_prob"
"""An info of every step: log-probability of the action that led to it."""
MINARI = "minari:"
"""Before the id of a dataset that Minari has installed."""


def minari_root() -> Path:
    """Where Minari keeps its datasets."""
    return Path(os.environ.get("MINARI_DATASETS_PATH") or Path.home() / ".minari" / "datasets")


def minari_folder(name: str) -> Path:
    """Where Minari keeps the dataset with this id."""
    root = minari_root()
    if not (root / name).is_dir():
        raise ConfigError(f"there is no Minari dataset {name} in {root}; get it with `pip install 'minari[hf,hdf5]'` and "
                          f"`minari download {name}`, or set MINARI_DATASETS_PATH to where it is")
    return root / name


def _data_folder(path: Path) -> Path | None:
    return next((folder for folder in (path / "data", path) if (folder / META).is_file()), None)


def is_minari(path: Path) -> bool:
    return _data_folder(path) is not None


class MinariDataset:
    """A recording made by Minari."""

    def __init__(self, path: Path) -> None:
        folder = _data_folder(path)
        assert folder is not None
        self.path, self._file = path, folder / DATA
        try:
            meta = json.loads((folder / META).read_text(encoding="utf-8"))
            if meta.get("data_format", "hdf5") != "hdf5":
                raise ConfigError(f"{path} stores its data as {meta['data_format']}, but shoal reads only hdf5; create the "
                                  'dataset with data_format="hdf5"')
            observation, action = (_space(json.loads(meta[f"{name}_space"])) for name in ("observation", "action"))
            env = json.loads(meta["env_spec"])["id"] if meta.get("env_spec") else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"cannot read {folder / META}: {error!r}; give the folder of a Minari dataset") from None
        if meta.get("jpeg_encoding", True) and _images(observation):
            raise ConfigError(f"{path} stores images as JPEG, which loses detail; create the dataset with jpeg_encoding=False")
        self._observation_codec, self._action_codec = ObservationCodec(observation), ActionCodec(action)
        source = {"source": str(meta.get("algorithm_name") or "Minari"), "dataset": meta.get("dataset_id")}
        self.info = RecordingInfo(env, self._observation_codec.space, self._action_codec.space,
                                  self._action_codec.mask_size if self._observation_codec.masked else 0, kind="minari",
                                  nbytes=self._file.stat().st_size if self._file.is_file() else 0, made=(source,))
        self._summarise()

    def _open(self) -> Any:
        try:
            import h5py
        except ImportError:
            raise ConfigError(f"{self.path} is a Minari dataset; reading it needs h5py: pip install 'shoal[minari]'") from None
        try:
            return h5py.File(self._file, "r")
        except OSError as error:
            raise ConfigError(f"cannot read {self._file}: {error}; download the dataset again") from None

    def _summarise(self) -> None:
        """Counts and returns: the rewards of all episodes."""
        with self._open() as file:
            numbered = [name for name in file if name.startswith("episode_") and name.removeprefix("episode_").isdigit()]
            self._names = sorted(numbered, key=lambda name: int(name.removeprefix("episode_")))
            try:
                rewards = [np.asarray(file[name]["rewards"]) for name in self._names]
                ended = sum(bool(file[name]["terminations"][-1]) for name in self._names if len(file[name]["terminations"]))
            except KeyError as error:
                raise ConfigError(f"{self._file} has an incomplete episode: {error}; download the dataset again") from None
        if not rewards:
            raise ConfigError(f"{self.path} has no episodes; give a dataset that has some")
        lengths = np.array([len(one) for one in rewards])
        returns = np.array([one.sum() for one in rewards])
        self.info = replace(self.info, episodes=len(rewards), steps=int(lengths.sum()), terminated=ended,
                            returns=EpisodeStatistics.of(returns), lengths=EpisodeStatistics.of(lengths))

    def episodes(self, order: np.random.Generator | None = None, checked: bool = True) -> Iterator[Episode]:
        with self._open() as file:
            for at in range(len(self._names)) if order is None else order.permutation(len(self._names)).tolist():
                name = self._names[at]
                where = f"{self.path}, {name}"
                try:
                    episode = self._episode(file[name], checked)
                except (BadValue, KeyError, ValueError) as error:
                    raise ConfigError(f"{where}: {error}; remove the episode") from None
                if checked:
                    check_episode(episode, self.info, where)
                yield episode

    def _episode(self, group: Any, closed: bool) -> Episode:
        """`closed`: one that has no end was cut short."""
        T = len(group["rewards"])
        raw = _read(group["observations"], self._observation_codec.raw_space)
        terminated = np.asarray(group["terminations"], bool)
        truncated = np.asarray(group["truncations"], bool) & ~terminated
        if T and closed and not terminated[-1]:
            truncated[-1] = True
        masks = self._action_codec.mask(raw["action_mask"], (T + 1,)) if self._observation_codec.masked else None
        action = self._action_codec.canonical(np.asarray(group["actions"]), (T,))
        action = action.astype(action_dtype(self._action_codec.space), copy=False)
        observation = self._observation_codec.tree(self._observation_codec.batch(raw, T + 1))
        reward = np.asarray(group["rewards"], np.float32)
        log_prob = known_log_prob(np.asarray(group["infos"][LOG_PROB])[-T:] if T and LOG_PROB in group.get("infos", {}) else None)
        if masks is None:
            return Episode(observation, action, reward, terminated, truncated, log_prob=log_prob)
        final_mask = self._action_codec.open_dead_rows(masks[T:])[0] if T and truncated[-1] else None
        return Episode(observation, action, reward, terminated, truncated, masks[:T], final_mask, log_prob)


def _read(node: Any, space: gym.Space[Any]) -> Any:
    """An observation as its space describes it; HDF5 groups stand for dictionaries and tuples."""
    if isinstance(space, spaces.Dict):
        return {key: _read(node[key], part) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_read(node[f"_index_{i}"], part) for i, part in enumerate(space.spaces))
    return np.asarray(node)


def _space(data: dict[str, Any]) -> gym.Space[Any]:
    """From Minari's JSON of a space."""
    kind = data["type"]
    if kind == "Dict":
        return spaces.Dict({key: _space(part) for key, part in data["subspaces"].items()})
    if kind == "Tuple":
        return spaces.Tuple([_space(part) for part in data["subspaces"]])
    if kind == "Box":
        low, high = (np.array(data[name], data["dtype"]) for name in ("low", "high"))
        return spaces.Box(low, high, tuple(data["shape"]), np.dtype(data["dtype"]).type)
    if kind == "Discrete":
        return spaces.Discrete(data["n"], start=data["start"])
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(np.array(data["nvec"]), start=np.array(data["start"]))
    if kind == "MultiBinary":
        return spaces.MultiBinary(data["n"])
    raise ValueError(f"a space of type {kind!r} is not supported")


def _images(space: gym.Space[Any]) -> bool:
    """Whether Minari would have JPEG-encoded a part of it: bytes, at least 32 x 32."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces
        return any(_images(part) for part in parts)
    if not isinstance(space, spaces.Box) or space.dtype != np.uint8 or len(space.shape) not in (2, 3) or min(space.shape[:2]) < 32:
        return False
    return bool((space.low == 0).all() and (space.high == 255).all())
