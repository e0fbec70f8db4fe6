"""Opening a recording by its path, and checking that it fits an environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.envs.interface import EnvSpec
from shoal.errors import ConfigError
from shoal.offline.demo_folder import META, DemoFolder
from shoal.offline.joined_recordings import JoinedRecordings, recordings_in
from shoal.offline.minari import MINARI, MinariDataset, is_minari, minari_folder
from shoal.offline.recorded_episodes import Demos, OneShard, RecordingInfo, ShardedDemos, json_arguments
from shoal.offline.space_json import difference, shape_difference
from shoal.offline.step_table import SUFFIXES, StepTable

__all__ = ["check_recording", "found_at", "open_demos", "open_shards"]


def found_at(place: str | Path) -> Path:
    """Where a recording is, as an absolute path: of a path, or of a Minari dataset that is installed (minari:my/dataset-v0)."""
    word = str(place)
    return Path(os.path.abspath(minari_folder(word.removeprefix(MINARI)) if word.startswith(MINARI) else word))


def open_demos(place: str | Path) -> Demos:
    """Open a folder that `shoal data record` made, a folder of such folders, a Minari dataset (its folder, or minari:ID), or a file
    of steps."""
    path = found_at(place) if str(place).startswith(MINARI) else Path(place)
    if not path.exists():
        raise ConfigError(f"there are no demonstrations at {path}: it does not exist; record some with "
                          "`shoal data record SOURCE ENV --out PATH`")
    demos: Demos
    if path.is_file() and path.suffix in SUFFIXES:
        demos = StepTable(path)
    elif (path / META).is_file():
        demos = DemoFolder(path)
    elif is_minari(path):
        demos = MinariDataset(path)
    elif recordings_in(path):
        demos = JoinedRecordings(path)
    else:
        raise ConfigError(f"{path} holds no demonstrations: it has neither {META} (from `shoal data record`) nor "
                          "data/metadata.json (from Minari); give the folder of a recording, or a file of steps "
                          f"({', '.join(SUFFIXES)})")
    if not demos.info.episodes:
        raise ConfigError(f"{path} holds no episodes; record some with `shoal data record SOURCE ENV --out {path} --append`")
    return demos


def open_shards(place: str | Path) -> ShardedDemos:
    """The same, to be read in pieces: the files of a folder, rows of a table, or all of a Minari dataset."""
    demos = open_demos(place)
    return demos if isinstance(demos, DemoFolder | JoinedRecordings | StepTable) else OneShard(demos)


def check_recording(info: RecordingInfo, path: str, spec: EnvSpec, env: str, kwargs: Mapping[str, Any],
                    foreign: bool = False) -> None:
    """Raise a ConfigError if this environment cannot learn from a recording; `foreign` accepts one made in another environment."""
    for name, own, wanted in (("observations", info.observation_space, spec.observation_space),
                              ("actions", info.action_space, spec.action_space)):
        if found := (shape_difference(own, wanted) if info.inferred else difference(own, wanted)):
            raise ConfigError(f"--demos {path} does not fit {env}: its {name} differ from the environment's ({found}); record "
                              "demonstrations in this environment")
    mask_size = spec.mask_size if spec.has_action_mask else 0
    if info.mask_size != mask_size:
        has = "has action masks, but the environment has none" if info.mask_size else "lacks the environment's action masks"
        raise ConfigError(f"--demos {path} does not fit {env}: the recording {has}; record demonstrations in this environment")
    same = info.env in (None, env) and (info.kwargs is None or json_arguments(info.kwargs) == json_arguments(kwargs))
    if not same and not foreign:
        raise ConfigError(f"--demos {path} was recorded in {_words(info.env, info.kwargs)}, but this run is in "
                          f"{_words(env, kwargs)}; record demonstrations in this environment, or add --foreign-demos if they "
                          "mean the same in both")


def _words(env: str | None, kwargs: Mapping[str, Any] | None) -> str:
    inside = ", ".join(f"{name}={value!r}" for name, value in (kwargs or {}).items())
    return f"{env} ({inside})" if inside else str(env)
