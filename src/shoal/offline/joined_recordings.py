"""Several recordings as one: the logs of the collectors of a run, a folder for each.

    logs/actor-0/demos.json     what the first collector did
    logs/actor-1/demos.json     what the second one did
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from shoal.errors import ConfigError
from shoal.offline.demo_folder import META, DemoFolder
from shoal.offline.episode_index import episode_index
from shoal.offline.recorded_episodes import Episode, EpisodeStatistics, RecordingInfo, json_arguments
from shoal.offline.space_json import difference

__all__ = ["JoinedRecordings", "recordings_in"]


def recordings_in(path: Path) -> list[Path]:
    """The folders in a folder that hold a recording each, in order of their names."""
    return sorted(one.parent for one in path.glob(f"*/{META}"))


class JoinedRecordings:
    """A ShardedDemos. Episodes are numbered from one recording to the next."""

    def __init__(self, path: Path) -> None:
        self.parts = [DemoFolder(folder) for folder in recordings_in(path)]
        first = self.parts[0].info
        for other in (part.info for part in self.parts[1:]):
            if not _alike(first, other):
                raise ConfigError(f"{path} holds recordings of different environments ({first.env} and {other.env}); give the "
                                  "folder of one of them")
        self.info = _together([part.info for part in self.parts])

    def episodes(self, order: np.random.Generator | None = None, checked: bool = True) -> Iterator[Episode]:
        for at in range(len(self.parts)) if order is None else order.permutation(len(self.parts)).tolist():
            yield from self.parts[at].episodes(order, checked)

    @property
    def shard_steps(self) -> list[int]:
        """Decisions in each file, from one recording to the next."""
        return [steps for part in self.parts for steps in part.shard_steps]

    def read_shard(self, number: int) -> list[Episode]:
        places = [(part, at) for part in self.parts for at in range(len(part.files))]
        part, at = places[number]
        return part.read_shard(at)

    def index(self) -> np.ndarray:
        """Where each episode lies and how it went; files are numbered from one recording to the next."""
        return episode_index([part.path / file["name"] for part in self.parts for file in part.files])

    def episode(self, number: int) -> Episode:
        """One of them; only the file that it lies in is read."""
        rest = number
        for part in self.parts:
            if 0 <= rest < part.info.episodes:
                return part.episode(rest)
            rest -= part.info.episodes
        raise IndexError(f"there is no episode {number} of {self.info.episodes}")


def _alike(one: RecordingInfo, other: RecordingInfo) -> bool:
    """Whether both were made in the same environment."""
    spaces = difference(one.observation_space, other.observation_space) or difference(one.action_space, other.action_space)
    made, also = ((info.env, json_arguments(info.kwargs), info.mask_size) for info in (one, other))
    return made == also and not spaces


def _together(infos: list[RecordingInfo]) -> RecordingInfo:
    episodes, steps = sum(info.episodes for info in infos), sum(info.steps for info in infos)
    return replace(infos[0], episodes=episodes, steps=steps, terminated=sum(info.terminated for info in infos),
                   returns=_pooled([(info.episodes, info.returns) for info in infos]),
                   lengths=_pooled([(info.episodes, info.lengths) for info in infos]), nbytes=sum(info.nbytes for info in infos),
                   made=tuple(one for info in infos for one in info.made))


def _pooled(parts: list[tuple[int, EpisodeStatistics | None]]) -> EpisodeStatistics | None:
    """Of all episodes, from those of each recording."""
    known = [(count, one) for count, one in parts if one is not None]
    total = sum(count for count, _ in known)
    if not total:
        return None
    mean = sum(count * one.mean for count, one in known) / total
    square = sum(count * (one.std**2 + one.mean**2) for count, one in known) / total
    least, most = min(one.least for _, one in known), max(one.most for _, one in known)
    return EpisodeStatistics(mean, max(0.0, square - mean**2) ** 0.5, least, most)
