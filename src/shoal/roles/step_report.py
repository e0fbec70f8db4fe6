"""What those who act report of every step: episodes, numbers of `info`, environments that were restarted, and the episode log.

    RUN/episodes/worker-0.monitor.csv       # {"t_start": ..., "env_id": ...}
                                            r,l,t,env,KEY,...
                                            return, length, seconds since t_start, environment, info[KEY] at the end

These are the files of Stable-Baselines3's Monitor with a column more, so that what reads those reads these.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from shoal.core import Me
from shoal.envs import Step
from shoal.envs.interface import env_name
from shoal.roles.parts import EnvSource, Parts
from shoal.telemetry import Metric, Stats
from shoal.telemetry.metrics import INFO

__all__ = ["StepReport", "info_metrics", "note_restarts"]

FLUSH_SECONDS = 1.0
LOOK_EPISODES, LOOK_STEPS = 3, 10_000  # of a role, whichever comes first, until a key that no `info` had is told


def info_metrics(keys: tuple[str, ...]) -> tuple[Metric, ...]:
    """What a program declares for --log.info."""
    what = "Mean of info[{!r}] over the steps that gave it."
    return tuple(Metric(f"{INFO}.{key}", "mean", "", what.format(key), measured_by=INFO) for key in keys)


class StepReport:
    """Reports the steps of the environments of one role."""

    def __init__(self, me: Me, parts: Parts, env_id: np.ndarray, first: int = 0, group: int | None = None) -> None:
        """`env_id`: the environment of each seat; `first`: how many environments the role has before them; `group`: which of
        several groups of agents they are."""
        self.me = me
        part = f"-{group}" if group is not None else f"-{first}" if first else ""
        self._log = EpisodeLog.of(me, parts.env, env_id + first, part) if parts.log_episodes and me.folder is not None else None

        self._missing = parts.env.handling.info if me.index == 0 and not first and not group else ()
        self._unfit = set(parts.env.handling.info) if me.index == 0 else set()
        self._episodes = self._steps = 0

    def note(self, now: Step) -> None:
        stats = self.me.stats
        if len(now.episode_return):
            stats.add("episodes", len(now.episode_return))
            stats.observe("episode_return", now.episode_return)
            stats.observe("episode_length", now.episode_length)
            if self._log is not None:
                self._log.add(now)
        if now.info is not None:
            note_info(stats, now.info)
            if self._missing:
                self._look_for_missing(now)
            if now.info_unfit and self._unfit:
                self._tell_unfit(now.info_unfit)
        if now.restarts:
            note_restarts(self.me, now)

    def _look_for_missing(self, now: Step) -> None:
        """Tell once which keys of --log.info no `info` had: a name that is spelled wrongly, mostly."""
        self._missing = tuple(key for key in self._missing if key not in now.info_keys)
        self._episodes, self._steps = self._episodes + len(now.episode_return), self._steps + len(now.reward)
        if self._missing and (self._episodes >= LOOK_EPISODES or self._steps >= LOOK_STEPS):
            missing, there = " ".join(self._missing), ", ".join(sorted(now.info_keys)) or "none"
            self.me.note(f"--log.info {missing}: no info has had it in the first {self._steps:,} steps; its keys so far: {there}")
            self._missing = ()

    def _tell_unfit(self, unfit: Mapping[str, str]) -> None:
        """Tell once of a key of --log.info whose value is not a number; it is left out, and training goes on."""
        for key in sorted(self._unfit & unfit.keys()):
            self._unfit.remove(key)
            self.me.note(f"--log.info {key}: info[{key!r}] is a {unfit[key]}, not a number, so it is not logged; leave "
                         "it out, or let the environment give a number")

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


def note_info(stats: Stats, info: dict[str, np.ndarray]) -> None:
    for key, values in info.items():
        given = values[np.isfinite(values)]
        if given.size:
            stats.observe(f"{INFO}.{key}", given)


def note_restarts(me: Me, now: Step) -> None:
    """Count environments that were restarted; the first, second, fourth, eighth, ... of an actor is an event of the run."""
    for text in now.restarts:
        me.stats.add("env_restarts")
        count = int(me.stats.get("env_restarts"))
        if count & (count - 1) == 0:
            me.note(f"{text}; it was restarted" + (f" ({count} restarts here so far)" if count > 1 else ""))


class EpisodeLog:
    """One CSV file of one role; a role that is restarted, or a run that is resumed, adds to it."""

    def __init__(self, path: Path, header: dict[str, Any], columns: tuple[str, ...], env_id: np.ndarray) -> None:
        self._keys, self._env_id = columns, env_id
        path.parent.mkdir(parents=True, exist_ok=True)
        known = path.read_text(encoding="utf-8") if path.exists() else ""
        self._file: IO[str] = path.open("a", encoding="utf-8")
        if not known.startswith("#"):
            self._file.write(f"#{json.dumps(header)}\n{','.join(('r', 'l', 't', 'env', *columns))}\n")
            self._start = float(header["t_start"])
        else:
            self._start = float(json.loads(known[1:].splitlines()[0])["t_start"])
            if not known.endswith("\n"):  # killed in the middle of a line
                self._file.write("\n")
        self._flushed = 0.0

    @classmethod
    def of(cls, me: Me, source: EnvSource, env_id: np.ndarray, part: str) -> EpisodeLog:
        assert me.folder is not None
        path = Path(me.folder) / "episodes" / f"{me.name}-{me.index}{part}.monitor.csv"
        return cls(path, {"t_start": time.time(), "env_id": env_name(source.env)}, source.handling.info, env_id)

    def add(self, now: Step) -> None:
        seconds = time.time() - self._start
        rows = np.flatnonzero(now.last & now.valid)
        for row, earned, length in zip(rows, now.episode_return, now.episode_length, strict=True):
            more = "".join("," + _written((now.info or {})[key][row]) for key in self._keys)
            self._file.write(f"{earned:.6g},{length},{seconds:.3f},{self._env_id[row]}{more}\n")
        if seconds >= self._flushed + FLUSH_SECONDS:
            self._flushed = seconds
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def _written(value: float) -> str:
    return f"{value:.6g}" if np.isfinite(value) else ""
