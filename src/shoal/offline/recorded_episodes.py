"""What is recorded: whole episodes, in canonical form (see shoal.envs.space_codecs)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import gymnasium as gym
import numpy as np

from shoal.envs.interface import Tree
from shoal.envs.space_codecs import ActionCodec, ObservationCodec, ignore_overflow
from shoal.errors import ConfigError
from shoal.slots import leaves

__all__ = ["Demos", "Episode", "EpisodeStatistics", "OneShard", "RecordingInfo", "ShardedDemos", "action_dtype", "check_episode",
           "joined_log_probs", "json_arguments", "known_log_prob"]


@dataclass(frozen=True)
class Episode:
    """One episode of T decisions."""

    observation: Tree
    """[T + 1, ...]. The last one matters where the episode was truncated; a terminated episode may have zeros there."""
    action: np.ndarray
    """[T, ...] what the environment really did."""
    reward: np.ndarray
    """[T] float32."""
    terminated: np.ndarray
    """[T] bool: the value ends here. Normally only in the last row; with life_loss=discount also where a life was lost."""
    truncated: np.ndarray
    """[T] bool: the last row, where the episode was cut short."""
    mask: np.ndarray | None = None
    """[T, M] bool: which actions were legal, if the environment reports masks."""
    final_mask: np.ndarray | None = None
    """[M] bool: which actions were legal at the last observation of a truncated episode; None where that is not known."""
    log_prob: np.ndarray | None = None
    """[T] float32: log-probability of each action as it was chosen (Box: log-density); None where that is not known."""

    def __len__(self) -> int:
        return len(self.reward)

    @property
    def total(self) -> float:
        """The undiscounted return."""
        return float(np.sum(self.reward, dtype=np.float64))

    @property
    def nbytes(self) -> int:
        arrays = [leaf for _, leaf in leaves(self.observation)] + [self.action, self.reward, self.terminated, self.truncated]
        known = [array for array in (self.mask, self.final_mask, self.log_prob) if array is not None]
        return sum(int(array.nbytes) for array in (*arrays, *known))


@dataclass(frozen=True)
class EpisodeStatistics:
    """Mean, standard deviation, minimum and maximum over episodes; the fields are named as in demos.json."""

    mean: float
    std: float
    least: float
    most: float

    @classmethod
    def of(cls, values: np.ndarray) -> EpisodeStatistics:
        return cls(*(float(x) for x in (values.mean(), values.std(), values.min(), values.max())))


@dataclass(frozen=True)
class RecordingInfo:
    """What is known about a recording."""

    env: str | None
    """The environment's id or name; None if unknown."""
    observation_space: gym.Space[Any]
    """In canonical form."""
    action_space: gym.Space[Any]
    mask_size: int = 0
    """Length of a row of the action mask; 0 without one."""
    kwargs: Mapping[str, Any] | None = None
    """Arguments of the environment; None if unknown."""
    episodes: int = 0
    steps: int = 0
    terminated: int = 0
    """Episodes that ended by themselves; the others were truncated."""
    returns: EpisodeStatistics | None = None
    lengths: EpisodeStatistics | None = None
    nbytes: int = 0
    """On disk."""
    kind: str = "shoal"
    inferred: bool = False
    """Whether the spaces are only what the data show."""
    made: tuple[Mapping[str, Any], ...] = field(default=())
    """How it was made: one entry for each `shoal data record` that added to it."""


class Demos(Protocol):
    """A recording that can be read again and again."""

    info: RecordingInfo

    def episodes(self, order: np.random.Generator | None = None, checked: bool = True) -> Iterator[Episode]:
        """All of them, as they were recorded or in a random `order`. One that is wrong raises, unless nothing is `checked`."""
        ...


class ShardedDemos(Demos, Protocol):
    """A recording that can be read in pieces."""

    @property
    def shard_steps(self) -> list[int]: ...  # decisions in each of its pieces
    def read_shard(self, number: int) -> list[Episode]: ...


class OneShard:
    """A recording that is read as a whole, as one piece."""

    def __init__(self, demos: Demos) -> None:
        self._demos, self.info = demos, demos.info

    @property
    def shard_steps(self) -> list[int]:
        return [self.info.steps]

    def read_shard(self, number: int) -> list[Episode]:
        return list(self._demos.episodes())

    def episodes(self, order: np.random.Generator | None = None, checked: bool = True) -> Iterator[Episode]:
        return self._demos.episodes(order, checked)


def joined_log_probs(episodes: Iterable[Episode]) -> np.ndarray:
    """Of all their steps, one behind the other; NaN where it is not known."""
    return np.concatenate([np.full(len(one), np.nan, np.float32) if one.log_prob is None else one.log_prob for one in episodes])


def known_log_prob(rows: np.ndarray | None) -> np.ndarray | None:
    """Of one episode, from what `joined_log_probs` gave."""
    return None if rows is None or np.isnan(rows).any() else rows.astype(np.float32, copy=False)


def json_arguments(kwargs: Mapping[str, Any] | None) -> Any:
    """Arguments of an environment as JSON returns them: a tuple becomes a list."""
    return json.loads(json.dumps(dict(kwargs or {}), default=str))


def action_dtype(space: gym.Space[Any]) -> np.dtype[Any]:
    """The dtype in which actions of a canonical space are stored."""
    return space.dtype if isinstance(space, gym.spaces.Box) else np.dtype(np.int64)


def check_episode(episode: Episode, info: RecordingInfo, where: str) -> None:
    """Raise a ConfigError that names the episode unless its arrays fit together and fit the spaces."""
    _check_types(episode, info, where)
    _check_lengths(episode, where)
    if not np.isfinite(episode.reward).all():
        step = int(np.isfinite(episode.reward).argmin())
        raise ConfigError(f"{where}, step {step}: the reward is {episode.reward[step]}; remove the episode")
    if not (episode.terminated[-1] or episode.truncated[-1]) or episode.truncated[:-1].any():
        raise ConfigError(f"{where}: its last step must be terminated or truncated, and no other step truncated; record it again")
    _check_observations(episode.observation, info, where)
    codec = ActionCodec(info.action_space)
    if episode.action.shape[1:] != codec.shape:
        raise ConfigError(f"{where}: actions of shape {episode.action.shape[1:]} are not in {info.action_space}; record it again")
    if not codec.contains(episode.action):
        step = next(t for t in range(len(episode)) if not codec.contains(episode.action[t]))
        raise ConfigError(f"{where}, step {step}: the action {episode.action[step]} is not in {info.action_space}; record it again")
    if episode.mask is not None and codec.kind == "discrete":
        legal = episode.mask[np.arange(len(episode)), episode.action]
        if not legal.all():
            raise ConfigError(f"{where}, step {int(legal.argmin())}: the action was illegal according to its own mask; record it "
                              "again")


def _check_types(episode: Episode, info: RecordingInfo, where: str) -> None:
    arrays = {"action": (episode.action, action_dtype(info.action_space)), "reward": (episode.reward, np.dtype(np.float32)),
              "terminated": (episode.terminated, np.dtype(bool)), "truncated": (episode.truncated, np.dtype(bool)),
              "mask": (episode.mask, np.dtype(bool)), "final_mask": (episode.final_mask, np.dtype(bool)),
              "log_prob": (episode.log_prob, np.dtype(np.float32))}
    for name, (array, dtype) in arrays.items():
        if array is None:
            continue
        if array.dtype != dtype:
            raise ConfigError(f"{where}: its {name} has dtype {array.dtype} instead of {dtype}; record it again")
        if name in ("reward", "terminated", "truncated", "log_prob") and array.ndim != 1:
            raise ConfigError(f"{where}: its {name} has shape {array.shape} instead of one value per step; record it again")
    masked = None if episode.mask is None else episode.mask.shape[1:]
    if masked != ((info.mask_size,) if info.mask_size else None):
        has = "has no action mask" if masked is None else f"has an action mask of shape {masked}"
        wants = f"masks of {info.mask_size}" if info.mask_size else "no masks"
        raise ConfigError(f"{where}: it {has}, but the recording says that there are {wants}; record it again")
    if episode.final_mask is not None and episode.final_mask.shape != masked:
        raise ConfigError(f"{where}: its final_mask has shape {episode.final_mask.shape} instead of {masked}; record it again")


def _check_lengths(episode: Episode, where: str) -> None:
    T = len(episode)
    lengths = {"action": len(episode.action), "terminated": len(episode.terminated), "truncated": len(episode.truncated)}
    lengths |= {name: len(array) for name, array in (("mask", episode.mask), ("log_prob", episode.log_prob)) if array is not None}
    wrong = [f"{name} has {length} rows" for name, length in lengths.items() if length != T]
    wrong += [f"{'.'.join(('observation', *path))} has {len(leaf)} rows instead of {T + 1}"
              for path, leaf in leaves(episode.observation) if len(leaf) != T + 1]
    if T == 0 or wrong:
        raise ConfigError(f"{where}: reward has {T} rows{', but ' + ', '.join(wrong) if wrong else ''}; record it again")


def _check_observations(observation: Tree, info: RecordingInfo, where: str) -> None:
    codec = ObservationCodec(info.observation_space)
    arrays = [_leaf(observation, leaf.names) for leaf in codec.leaves]
    for leaf, array in zip(codec.leaves, arrays, strict=True):
        if array.shape[1:] != leaf.shape or array.dtype != leaf.dtype:
            raise ConfigError(f"{where}: an observation is not in {info.observation_space}; record it again")
    with ignore_overflow():
        fault = codec.fault(arrays)
    if fault is not None:
        raise ConfigError(f"{where}, step {fault[0]}: {fault[1]}; remove the episode")


def _leaf(tree: Any, names: tuple[str, ...]) -> np.ndarray:
    for name in names:
        tree = tree[name]
    leaf: np.ndarray = tree
    return leaf
