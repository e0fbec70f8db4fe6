"""What is recorded: whole episodes, in the terms of shoal's step stream (see shoal.envs.spaces)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import gymnasium as gym
import numpy as np

from shoal.envs.spaces import QUIET, ActionCodec, Layout
from shoal.envs.stream import Tree
from shoal.errors import ConfigError
from shoal.slots import leaves

__all__ = ["About", "Demos", "Episode", "Spread", "action_dtype", "check_episode", "plain"]


@dataclass(frozen=True)
class Episode:
    """One episode of T decisions."""

    observation: Tree
    """[T + 1, ...]. The last one counts where the episode was truncated; of a terminated one it may be unknown: zeros then."""
    action: np.ndarray
    """[T, ...] what the environment really did."""
    reward: np.ndarray
    """[T] float32."""
    terminated: np.ndarray
    """[T] bool: the value ends here. Normally the last row at most; with life_loss=discount also where a life was lost."""
    truncated: np.ndarray
    """[T] bool: the last row, where the episode was cut short."""
    mask: np.ndarray | None = None
    """[T, M] bool: which actions were legal, where the environment says so."""

    def __len__(self) -> int:
        return len(self.reward)

    @property
    def total(self) -> float:
        """The undiscounted return."""
        return float(np.sum(self.reward, dtype=np.float64))

    @property
    def nbytes(self) -> int:
        arrays = [leaf for _, leaf in leaves(self.observation)] + [self.action, self.reward, self.terminated, self.truncated]
        return sum(array.nbytes for array in arrays) + (0 if self.mask is None else self.mask.nbytes)


@dataclass(frozen=True)
class Spread:
    """Numbers of many episodes in four."""

    mean: float
    std: float
    least: float
    most: float

    @classmethod
    def of(cls, values: np.ndarray) -> Spread:
        return cls(*(float(x) for x in (values.mean(), values.std(), values.min(), values.max())))


@dataclass(frozen=True)
class About:
    """What is known of a recording."""

    env: str | None
    """The environment's id or name; None where nobody wrote it down."""
    observation_space: gym.Space
    """In canonical form, as in the stream of steps."""
    action_space: gym.Space
    mask_size: int = 0
    """Length of a row of the action mask; 0 without one."""
    kwargs: Mapping[str, Any] | None = None
    """Arguments of the environment; None where they are unknown."""
    episodes: int = 0
    steps: int = 0
    terminated: int = 0
    """Episodes that ended by themselves; the others were truncated."""
    returns: Spread | None = None
    lengths: Spread | None = None
    nbytes: int = 0
    """On disk."""
    kind: str = "shoal"
    made: tuple[Mapping[str, Any], ...] = field(default=())
    """How it was made: one entry for each time something was added."""


class Demos(Protocol):
    """A recording that can be read again and again."""

    about: About

    def episodes(self) -> Iterator[Episode]: ...


def plain(kwargs: Mapping[str, Any] | None) -> Any:
    """Arguments of an environment as JSON gives them back: a tuple is a list."""
    return json.loads(json.dumps(dict(kwargs or {}), default=str))


def action_dtype(space: gym.Space) -> np.dtype:
    """What actions of a canonical space are kept as."""
    return np.dtype(space.dtype if isinstance(space, gym.spaces.Box) else np.int64)


def check_episode(episode: Episode, about: About, where: str) -> None:
    """Whether the arrays fit together and the spaces; raises a ConfigError that names the episode."""
    T = len(episode)
    _check_kinds(episode, about, where)
    lengths = {"action": len(episode.action), "terminated": len(episode.terminated), "truncated": len(episode.truncated)}
    if episode.mask is not None:
        lengths["mask"] = len(episode.mask)
    wrong = [f"{name} has {length} rows" for name, length in lengths.items() if length != T]
    wrong += [f"{'.'.join(('observation', *path))} has {len(leaf)} rows and not one more"
              for path, leaf in leaves(episode.observation) if len(leaf) != T + 1]
    if T == 0 or wrong:
        raise ConfigError(f"{where}: reward has {T} rows{', but ' + ', '.join(wrong) if wrong else ''}; record it again")
    if not np.isfinite(episode.reward).all():
        raise ConfigError(f"{where}: a reward is {episode.reward[~np.isfinite(episode.reward)][0]}; take the episode out")
    if not (episode.terminated[-1] or episode.truncated[-1]) or episode.truncated[:-1].any():
        raise ConfigError(f"{where}: its last step must be terminated or truncated, and no other one truncated; record it again")
    layout, codec = Layout(about.observation_space), ActionCodec(about.action_space)
    rows = [_leaf(episode.observation, leaf.names) for leaf in layout.leaves]
    shapes = [array.shape[1:] == leaf.shape and array.dtype == leaf.dtype for leaf, array in zip(layout.leaves, rows, strict=True)]
    if not all(shapes):
        raise ConfigError(f"{where}: an observation is no {about.observation_space}; record it again")
    with np.errstate(**QUIET):
        fault = layout.fault(rows)
    if fault is not None:
        raise ConfigError(f"{where}, step {fault[0]}: {fault[1]}; take the episode out")
    if codec.kind != "box":
        size = about.action_space.n if codec.kind == "discrete" else np.asarray(about.action_space.nvec)  # type: ignore[attr-defined]
        if episode.action.shape[1:] != codec.shape or (episode.action < 0).any() or (episode.action >= size).any():
            raise ConfigError(f"{where}: an action is none of {about.action_space}; record it again")
    elif episode.action.shape[1:] != codec.shape or not np.isfinite(episode.action).all():
        raise ConfigError(f"{where}: an action is none of {about.action_space}; record it again")
    if episode.mask is not None and codec.kind == "discrete" and not episode.mask[np.arange(T), episode.action].all():
        raise ConfigError(f"{where}: an action was not legal by its own mask; record it again")


def _check_kinds(episode: Episode, about: About, where: str) -> None:
    """What is kept of every step, and as what."""
    kinds = {"action": action_dtype(about.action_space), "reward": np.dtype(np.float32), "terminated": np.dtype(bool),
             "truncated": np.dtype(bool), "mask": np.dtype(bool)}
    for name, kind in kinds.items():
        array = getattr(episode, name)
        if array is not None and array.dtype != kind:
            raise ConfigError(f"{where}: its {name} is {array.dtype} and not {kind}; record it again")
        if name in ("reward", "terminated", "truncated") and array.ndim != 1:
            raise ConfigError(f"{where}: its {name} has the shape {array.shape} and not one number a step; record it again")
    masked = None if episode.mask is None else episode.mask.shape[1:]
    if masked != ((about.mask_size,) if about.mask_size else None):
        has = "has no action mask" if masked is None else f"has an action mask of shape {masked}"
        wants = f"masks of {about.mask_size}" if about.mask_size else "none"
        raise ConfigError(f"{where}: it {has}, and the recording says that there are {wants}; record it again")


def _leaf(tree: Any, names: tuple[str, ...]) -> np.ndarray:
    for name in names:
        tree = tree[name]
    return tree
