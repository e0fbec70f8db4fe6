"""Minari datasets (https://minari.farama.org) in a local folder, as its HDF5 storage lays them out.

    DATASET/data/metadata.json      spaces, env_spec, total_episodes, data_format
    DATASET/data/main_data.hdf5     episode_<i>/{observations [T + 1], actions, rewards, terminations, truncations [T]}

Observations and actions are brought into the terms of shoal's step stream. An episode that ends with neither flag was cut off by
whoever recorded it: it counts as truncated, and its last observation is there. h5py alone is needed, not minari.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from shoal.envs.spaces import ActionCodec, BadValue, Layout
from shoal.errors import ConfigError
from shoal.offline.episodes import About, Episode, Spread, action_dtype, check_episode

__all__ = ["MinariDataset", "is_minari"]

DATA, META = "main_data.hdf5", "metadata.json"


def _data_folder(path: Path) -> Path | None:
    return next((folder for folder in (path / "data", path) if (folder / META).is_file()), None)


def is_minari(path: Path) -> bool:
    return _data_folder(path) is not None


class MinariDataset:
    """A recording that Minari has made."""

    def __init__(self, path: Path) -> None:
        folder = _data_folder(path)
        assert folder is not None
        self.path, self._file = path, folder / DATA
        try:
            meta = json.loads((folder / META).read_text(encoding="utf-8"))
            if meta.get("data_format", "hdf5") != "hdf5":
                raise ConfigError(f"{path} keeps its data as {meta['data_format']}, and shoal reads hdf5; make it with "
                                  'data_format="hdf5"')
            observation, action = (_space(json.loads(meta[f"{name}_space"])) for name in ("observation", "action"))
            env = json.loads(meta["env_spec"])["id"] if meta.get("env_spec") else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{folder / META} cannot be read: {error!r}; give the folder of a Minari dataset") from None
        if meta.get("jpeg_encoding", True) and _images(observation):
            raise ConfigError(f"{path} keeps images as JPEG, which is not what the environment showed; make it with "
                              "jpeg_encoding=False")
        self._layout, self._codec = Layout(observation), ActionCodec(action)
        self.about = About(env, self._layout.space, self._codec.space, self._codec.mask_size if self._layout.masked else 0,
                           kind="minari", nbytes=self._file.stat().st_size if self._file.is_file() else 0,
                           made=({"source": str(meta.get("algorithm_name") or "Minari"), "dataset": meta.get("dataset_id")},))
        self._summarise()

    def _open(self) -> Any:
        try:
            import h5py
        except ImportError:
            raise ConfigError(f"{self.path} is a Minari dataset, and reading one needs h5py: pip install 'shoal[minari]'") from None
        try:
            return h5py.File(self._file, "r")
        except OSError as error:
            raise ConfigError(f"{self._file} cannot be read: {error}; download the dataset again") from None

    def _summarise(self) -> None:
        """Counts and returns: the rewards of all episodes."""
        with self._open() as file:
            numbered = [name for name in file if name.startswith("episode_") and name.removeprefix("episode_").isdigit()]
            self._names = sorted(numbered, key=lambda name: int(name.removeprefix("episode_")))
            try:
                rewards = [np.asarray(file[name]["rewards"]) for name in self._names]
                ended = sum(bool(file[name]["terminations"][-1]) for name in self._names if len(file[name]["terminations"]))
            except KeyError as error:
                raise ConfigError(f"{self._file} has an episode that is not whole: {error}; download the dataset again") from None
        if not rewards:
            raise ConfigError(f"{self.path} has no episodes; give a dataset that has some")
        lengths = np.array([len(one) for one in rewards])
        about = vars(self.about) | {"episodes": len(rewards), "steps": int(lengths.sum()), "terminated": ended,
                                    "returns": Spread.of(np.array([one.sum() for one in rewards])), "lengths": Spread.of(lengths)}
        self.about = About(**about)

    def episodes(self) -> Iterator[Episode]:
        with self._open() as file:
            for name in self._names:
                where = f"{self.path}, {name}"
                try:
                    episode = self._episode(file[name])
                except (BadValue, KeyError, ValueError) as error:
                    raise ConfigError(f"{where}: {error}; take the episode out") from None
                check_episode(episode, self.about, where)
                yield episode

    def _episode(self, group: Any) -> Episode:
        T = len(group["rewards"])
        raw = _read(group["observations"], self._layout.raw_space)
        terminated = np.asarray(group["terminations"], bool)
        truncated = np.asarray(group["truncations"], bool) & ~terminated
        if T and not terminated[-1]:
            truncated[-1] = True
        masks = self._codec.mask(raw["action_mask"][:T], (T,)) if self._layout.masked else None
        action = self._codec.executed(np.asarray(group["actions"]), (T,)).astype(action_dtype(self._codec.space), copy=False)
        observation = self._layout.tree(self._layout.batch(raw, T + 1))
        return Episode(observation, action, np.asarray(group["rewards"], np.float32), terminated, truncated, masks)


def _read(node: Any, space: gym.Space) -> Any:
    """An observation as the space has it: groups for dictionaries and tuples."""
    if isinstance(space, spaces.Dict):
        return {key: _read(node[key], part) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_read(node[f"_index_{i}"], part) for i, part in enumerate(space.spaces))
    return np.asarray(node)


def _space(data: dict[str, Any]) -> gym.Space:
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


def _images(space: gym.Space) -> bool:
    """Whether Minari would have encoded some of it: bytes from 32 x 32 on."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces
        return any(_images(part) for part in parts)
    image = isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) in (2, 3) and min(space.shape[:2]) >= 32
    return image and bool((space.low == 0).all() and (space.high == 255).all())
