"""Environments whose episodes are written down while a run trains in them: what a replay table has seen, as a recording.

    SHOAL_EVIDENCE_LOGS=DIR shoal train sac evidence.recorded_runs:pendulum

What the evaluator plays is not written down; an inline run, whose roles share a process, needs --no-eval.enabled.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import setproctitle

from shoal import offline
from shoal.envs.space_codecs import ObservationCodec

__all__ = ["LOGS", "hopper", "pendulum"]

LOGS = "SHOAL_EVIDENCE_LOGS"  # the environment variable with the folder; without it nothing is written


class Recorded(gym.Wrapper):  # type: ignore[type-arg]
    """Adds every episode that ends to a recording. One that is only looked at writes nothing."""

    def __init__(self, env: gym.Env[Any, Any], name: str, path: str) -> None:
        super().__init__(env)
        self.name, self.path = name, path
        self.writer: offline.DemoWriter | None = None
        self.rows: list[tuple[Any, ...]] = []

    def reset(self, **kwargs: Any) -> Any:
        seen, info = self.env.reset(**kwargs)
        self.rows, self.first = [], seen
        return seen, info

    def step(self, action: Any) -> Any:
        seen, reward, terminated, truncated, info = self.env.step(action)
        self.rows.append((np.array(action), reward, terminated, truncated, seen))
        if terminated or truncated:
            self._write()
        return seen, reward, terminated, truncated, info

    def _write(self) -> None:
        if self.writer is None:
            codec = ObservationCodec(self.env.observation_space)
            info = offline.RecordingInfo(self.name, codec.space, self.env.action_space, kwargs={})
            self.writer = offline.DemoWriter.create(Path(self.path), info, {"source": "a run while it trained"}, append=True)
        actions, rewards, ends, cuts, rest = (np.array(column) for column in zip(*self.rows, strict=True))
        ends = ends.astype(bool)
        self.writer.add(offline.Episode(np.concatenate([self.first[None], rest]).astype(np.float32), actions.astype(np.float32),
                                        rewards.astype(np.float32), ends, cuts.astype(bool) & ~ends))

    def close(self) -> None:
        if self.writer is not None:
            self.writer.flush()
        super().close()


def pendulum() -> gym.Env[Any, Any]:
    return _made("Pendulum-v1")


def hopper() -> gym.Env[Any, Any]:
    return _made("Hopper-v5")


def _made(name: str) -> gym.Env[Any, Any]:
    env, path = gym.make(name), os.environ.get(LOGS)
    return Recorded(env, name, path) if path and "evaluator" not in setproctitle.getproctitle() else env
