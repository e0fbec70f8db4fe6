"""Recorded episodes as the stream of steps that an actor would have seen, and the items that it would have made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from shoal.acting import ItemRecord, Progress, UnrollRecord
from shoal.algorithms.records.moments import MOMENTS, observation_moment_fields
from shoal.core import Tree
from shoal.envs import Step
from shoal.learning import Algorithm
from shoal.offline import Episode
from shoal.slots import Layout, map_tree

__all__ = ["EpisodePlayback", "items_of"]

SEATS = 32  # episodes that are played side by side
VERSION = -1
NOTHING: Tree = {}


class EpisodePlayback:
    """Recorded episodes as the stream of steps that an actor would have seen: every seat plays one after the other."""

    def __init__(self, episodes: Iterator[Episode], steps: UnrollRecord) -> None:
        """`steps` is the record of one step of all seats."""
        fields, seats = steps.layout.fields, steps.seats
        self._episodes, self._seats = episodes, range(seats)
        self._playing: list[Episode | None] = [next(episodes, None) for _ in self._seats]
        self._at = [0] * seats
        self._observation = map_tree(lambda field: np.zeros(field.shape[1:], field.dtype), fields["observation"])
        self._mask = np.ones((seats, steps.mask_size), bool) if steps.mask_size else None
        self._nothing = np.zeros(fields["action"].shape[1:], fields["action"].dtype)
        self.running = any(one is not None for one in self._playing)

    def begin(self) -> Step:
        first = np.ones(len(self._seats), bool)
        self._show(self._seats)
        return self._step(np.zeros(len(first), np.float32), ~first, first, ~first, ~first, first)

    def step(self) -> tuple[np.ndarray, Step]:
        """What was done, and what came of it."""
        seats = len(self._seats)
        action, reward = self._nothing.copy(), np.zeros(seats, np.float32)
        terminated, first, last, truncated, valid = (np.zeros(seats, bool) for _ in range(5))
        cut: list[Tree] = []
        masks: list[np.ndarray] = []
        rows: list[int] = []
        for seat in self._seats:
            episode, t = self._playing[seat], self._at[seat]
            if episode is None:
                continue
            valid[seat] = True
            action[seat], reward[seat], terminated[seat] = episode.action[t], episode.reward[t], episode.terminated[t]
            self._at[seat] = t + 1
            if t + 1 == len(episode):
                last[seat], truncated[seat] = True, episode.truncated[t]
                if truncated[seat]:
                    rows.append(seat)
                    cut.append(map_tree(lambda x: x[-1], episode.observation))
                    if self._mask is not None:
                        unknown = np.ones(self._mask.shape[1], bool)
                        masks.append(unknown if episode.final_mask is None else episode.final_mask)
                self._playing[seat], self._at[seat] = next(self._episodes, None), 0
                first[seat] = self._playing[seat] is not None
        self._show(self._seats)
        self.running = any(one is not None for one in self._playing)
        step = self._step(reward, terminated, first, last, truncated, valid)
        if rows:
            step.final_rows = np.array(rows)
            step.final_observation = map_tree(lambda *parts: np.stack(parts), *cut)
            step.final_action_mask = np.stack(masks) if masks else None
        return action, step

    def _show(self, seats: range) -> None:
        """What every seat sees now."""
        for seat in seats:
            episode, t = self._playing[seat], self._at[seat]
            if episode is None:
                continue
            map_tree(lambda into, rows: into.__setitem__(seat, rows[t]), self._observation, episode.observation)  # noqa: B023
            if self._mask is not None and episode.mask is not None:
                self._mask[seat] = episode.mask[t]

    def _step(self, reward: np.ndarray, terminated: np.ndarray, first: np.ndarray, last: np.ndarray, truncated: np.ndarray,
              valid: np.ndarray) -> Step:
        return Step(self._observation, reward, (~terminated).astype(np.float32), first, last, truncated, valid,
                    action_mask=self._mask)


def items_of(algorithm: Algorithm, record: ItemRecord, episodes: Iterator[Episode], seed: int, some: int,
             seats: int = SEATS, version: int = VERSION,
             moments: Callable[[Tree], None] | None = None) -> Iterator[tuple[Tree, np.ndarray]]:
    """Items and their first priorities, up to `some` at a time: what an actor with the weights of `learn(seed)` would send.

    `moments` is given the sums of the observations that went into them, where the record has them.
    """
    record = record.of_seats(seats)
    recorder, rng = record.recorder(), torch.Generator()
    policy = None
    if not record.from_steps_alone:
        policy = algorithm.policy()
        policy.load(algorithm.learn(seed).published(Progress()))
    playback = EpisodePlayback(episodes, record.steps)
    now: Step = playback.begin()
    state: Tree = {} if policy is None else policy.initial_state(seats)
    following, extras = state, NOTHING
    recorder.begin(now)
    sums = Layout(observation_moment_fields(record.observation_moments)).empty()
    while playback.running:
        if policy is not None:
            _, following, extras = policy.act(recorder.view(now), state, None, rng)
        action, now = playback.step()
        recorder.write(action, state, extras, now, version)
        state = following
        while recorder.ready >= some or (recorder.ready and not playback.running):
            count = min(some, recorder.ready)
            items, priority = record.layout.joined(count).empty(), np.zeros(count)
            recorder.take(items, priority)
            if moments is not None and sums:
                recorder.take_moments(sums[MOMENTS])
                moments(sums)
            yield items, priority
