"""Environments whose episodes are written to a log while somebody acts in them: QT-Opt's collectors.

    actor ──▶ RecordingEnv ──▶ environment
                  └──whole episodes──▶ DIR/actor-0: a recording (offline/demo_folder.py) that is only ever added to
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core import Me
from shoal.envs.interface import BatchedEnv, Step, Tree, env_name
from shoal.errors import ConfigError
from shoal.offline import DemoWriter
from shoal.offline.demo_folder import DemoFolder
from shoal.offline.episode_cutter import EpisodeCutter
from shoal.offline.joined_recordings import recordings_in
from shoal.offline.recording import recording_info
from shoal.roles.parts import EnvSource

__all__ = ["RecordingEnv", "check_log"]


def check_log(folder: str, source: EnvSource) -> None:
    """Raise a ConfigError if this folder holds recordings of another environment."""
    for path in recordings_in(Path(folder)):
        recorded, wanted = DemoFolder(path).info.env, env_name(source.env)
        if recorded != wanted:
            raise ConfigError(f"--architecture.record {folder} holds recordings of {recorded}, not of {wanted}; give another "
                              "folder")


class RecordingEnv:
    """A BatchedEnv that records. A kill loses what was done since the last file, at most two seconds of it."""

    def __init__(self, env: BatchedEnv, me: Me, folder: str, source: EnvSource) -> None:
        self._env, self._source, self._me = env, source, me
        self._path = Path(folder, f"{me.name}-{me.index}")
        self._cutter = EpisodeCutter(env.num_seats, env.action_space)
        self._writer: DemoWriter | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def reset(self, seed: int | None = None) -> Step:
        step = self._env.reset(seed)
        about = replace(recording_info(self._env, step, dict(self._source.kwargs)), env=env_name(self._source.env))
        made = {"source": f"{self._me.name}-{self._me.index}", "incarnation": self._me.incarnation}
        self._writer = DemoWriter.create(self._path, about, made, append=True)
        self._cutter.see(step)
        return step

    def step(self, action: Tree) -> Step:
        assert self._writer is not None
        step = self._env.step(action)
        for episode in self._cutter.add(np.asarray(action), step):
            self._writer.add(episode)
            self._me.stats.add("recorded_episodes")
        self._writer.flush_if_due()
        self._cutter.see(step)
        return step

    def close(self) -> None:
        if self._writer is not None:
            self._writer.flush()
        self._env.close()
