"""Looking for what is wrong with a recording: every finding names the episode, and the step where there is one.

    NaN or infinite numbers · actions outside the space · illegal actions · episodes without an end, or with one in the middle ·
    fields that never change · episodes that are there twice
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass, field

import gymnasium as gym
import numpy as np

from shoal.envs.space_codecs import ActionCodec
from shoal.errors import ConfigError
from shoal.offline.recorded_episodes import Demos, Episode, RecordingInfo
from shoal.slots import leaves

__all__ = ["BARS", "RecordingReport", "check_demos", "histogram"]

MOST = 5  # findings of one kind that are told one by one
BARS = 10


@dataclass
class RecordingReport:
    """What a look at all episodes has found."""

    findings: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    returns: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not self.findings

    def lines(self) -> list[str]:
        """The findings in words, the first few of each kind."""
        told = []
        for kind, found in self.findings.items():
            told += [f"{kind}: {one}" for one in found[:MOST]]
            if len(found) > MOST:
                told.append(f"{kind}: {len(found) - MOST:,} more")
        return told


def check_demos(demos: Demos, path: str) -> RecordingReport:
    report, spans, number = RecordingReport(), _Spans(), -1
    seen: dict[bytes, int] = {}
    try:
        for number, episode in enumerate(demos.episodes(checked=False)):
            where = f"{path}, episode {number}"
            report.returns.append(episode.total)
            report.lengths.append(len(episode))
            for kind, step, words in _faults(episode, demos.info):
                report.findings[kind].append(where + (f", step {step}: " if step is not None else ": ") + words)
            digest = _digest(episode)
            if digest in seen:
                report.findings["duplicate"].append(f"{where} is the same as episode {seen[digest]}")
            seen.setdefault(digest, number)
            spans.add(episode)
    except ConfigError as error:
        report.findings["unreadable"].append(f"{error} (after episode {number})" if number >= 0 else str(error))
    if len(report.lengths) > 1:
        report.findings.update({"constant": found} if (found := [f"{path}: {name} is {value} everywhere"
                                                                 for name, value in spans.constant()]) else {})
    return report


def _faults(episode: Episode, info: RecordingInfo) -> list[tuple[str, int | None, str]]:
    """(kind, step, words) of one episode."""
    found: list[tuple[str, int | None, str]] = []
    for name, array in _fields(episode):
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            rows = ~np.isfinite(array).reshape(len(array), -1).all(1)
            found.append(("not finite", int(rows.argmax()), f"{name} has {int(rows.sum()):,} rows with NaN or infinity"))
    outside = _outside(episode.action, info)
    if outside.any():
        step = int(outside.argmax())
        found.append(("action outside the space", step, f"{episode.action[step]} is not in {info.action_space}"))
    if episode.mask is not None and ActionCodec(info.action_space).kind == "discrete" and not outside.any():
        illegal = ~episode.mask[np.arange(len(episode)), episode.action]
        if illegal.any():
            found.append(("illegal action", int(illegal.argmax()), "the action is not legal by its own mask"))
    if not (episode.terminated[-1] or episode.truncated[-1]):
        found.append(("no end", len(episode) - 1, "the last step is neither terminated nor truncated"))
    if episode.truncated[:-1].any():
        found.append(("end in the middle", int(episode.truncated[:-1].argmax()), "truncated, and the episode continues"))
    return found


def _outside(action: np.ndarray, info: RecordingInfo) -> np.ndarray:
    """Which actions [T] are not in the space; those of a Box are outside its bounds."""
    codec, space = ActionCodec(info.action_space), info.action_space
    if isinstance(space, gym.spaces.Box):
        wrong = np.isfinite(action) & ((action < space.low) | (action > space.high))
    else:
        wrong = (action < 0) | (action >= np.asarray(codec.sizes).reshape(codec.shape))
    flat: np.ndarray = wrong.reshape(len(action), -1).any(1)
    return flat


def _fields(episode: Episode) -> list[tuple[str, np.ndarray]]:
    seen = [("/".join(("observation", *path)), leaf) for path, leaf in leaves(episode.observation)]
    return [*seen, ("action", episode.action), ("reward", episode.reward)]


def _digest(episode: Episode) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for _, array in _fields(episode):
        digest.update(np.ascontiguousarray(array).data)
    return digest.digest()


class _Spans:
    """The least and the greatest value of each number of each field."""

    def __init__(self) -> None:
        self.spans: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def add(self, episode: Episode) -> None:
        for name, array in _fields(episode):
            rows = array[: len(episode)].reshape(len(episode), -1)
            low, high = rows.min(0), rows.max(0)
            if name in self.spans:
                low, high = np.minimum(self.spans[name][0], low), np.maximum(self.spans[name][1], high)
            self.spans[name] = low, high

    def constant(self) -> list[tuple[str, float]]:
        return [(name if len(low) == 1 else f"{name}[{k}]", float(low[k])) for name, (low, high) in self.spans.items()
                for k in np.flatnonzero(low == high).tolist()]


def histogram(values: list[float] | list[int], width: int = 40) -> list[str]:
    """A picture of how values are spread, in text: one bar for each of ten ranges."""
    numbers = np.asarray(values, float)
    numbers = numbers[np.isfinite(numbers)]
    if not len(numbers):
        return []
    if numbers.min() == numbers.max():
        return [f"{numbers[0]:>12.4g}  {'█' * width} {len(numbers):,}"]
    counts, edges = np.histogram(numbers, BARS)
    return [f"{edge:>12.4g}  {'█' * round(width * count / counts.max())}{' ' if count else ''}{count:,}"
            for edge, count in zip(edges, counts, strict=False)]
