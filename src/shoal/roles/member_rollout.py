"""Whole episodes of perturbed policies, side by side: a row of the environment for each episode, one forward pass for all rows."""

from __future__ import annotations

import numpy as np
import torch

from shoal.algorithms.records.moments import MomentSums
from shoal.algorithms.records.spaces import float_paths
from shoal.core import Me, Tree
from shoal.envs import BatchedEnv, Step
from shoal.envs.random_policy import RandomPolicy
from shoal.population import Members, ScoreRecord
from shoal.roles.step_report import note_restarts
from shoal.slots import leaf_at

__all__ = ["MemberRollout", "random_observations", "rows_of"]

KEPT = 0.1  # of the observations of random play


def rows_of(envs: int, record: ScoreRecord) -> int:
    """How many episodes are played at once: as many as there are environments, in whole members."""
    most = min(envs, record.members * record.episodes)
    return max(1, most // record.episodes) * record.episodes


def random_observations(me: Me, env: BatchedEnv, count: int, seed: int) -> np.ndarray:
    """Observations [count, ...] of random play: a tenth of those that it sees. They follow from the seed and the rows of `env`."""
    rng = np.random.default_rng([seed, count])
    policy, found, seen = RandomPolicy(env.action_space, rng), [], 0
    now = env.reset(int(rng.integers(2**31)))
    while seen < count:
        kept = now.valid & (rng.random(env.num_seats) < KEPT)
        found.append(np.asarray(now.observation)[kept])
        seen += int(kept.sum())
        now = env.step(policy(now))
        me.beat()
    return np.concatenate(found)[:count]


class MemberRollout:
    """Plays the members of an iteration chunk by chunk. All chunks have the same number of rows; a chunk's environments and noise
    follow from (seed, iteration, chunk): every worker would find the same returns, to the bit."""

    def __init__(self, me: Me, env: BatchedEnv, members: Members, record: ScoreRecord, seed: int) -> None:
        self.me, self.env, self.members, self.record, self.seed = me, env, members, record, seed
        self.rows = env.num_seats
        self.chunks = -(-record.members * record.episodes // self.rows)
        self._viewer, self._floats = record.viewer(self.rows), float_paths(env.observation_space)

    def play(self, iteration: int, chunk: int, longest: int, into: Tree) -> int:
        """Add what a chunk's members did to a record of this iteration; returns how many decisions that took. Episodes are cut off
        after `longest` of them."""
        record, rows = self.record, self.rows
        episode = chunk * rows + np.arange(rows)
        playing = episode < record.members * record.episodes
        number = np.minimum(episode, record.members * record.episodes - 1) // record.episodes
        # One chunk's observations count in each iteration, in turns: a sum of several would depend on who adds it up.
        return self._chunk(iteration, chunk, longest, number, playing, iteration % self.chunks == chunk, 0, into)

    def play_any(self, iteration: int, chunk: int, longest: int, counted: bool, into: Tree) -> int:
        """The same of a chunk with any number: `into` has room for its own members only, and is told who they are."""
        first = chunk * self.rows // self.record.episodes
        for name in ("score", "decisions"):
            into[name][...] = 0
        into["number"][:] = first + np.arange(len(into["number"]))
        number = first + np.arange(self.rows) // self.record.episodes
        return self._chunk(iteration, chunk, longest, number, np.ones(self.rows, bool), counted, first, into)

    def _chunk(self, iteration: int, chunk: int, longest: int, number: np.ndarray, playing: np.ndarray, count: bool, first: int,
               into: Tree) -> int:
        """Play the members with these numbers, and add what they did to a record that begins with the `first` one."""
        env_seed, noise_seed = np.random.SeedSequence([self.seed, iteration, chunk]).generate_state(2)
        with self.me.stats.phase("prepare"):
            self.members.perturb(iteration, number)
        counted = MomentSums(into["observation_moments"]["sum"].shape[1]) if count and "observation_moments" in into else None
        score, length = self._episodes(int(env_seed >> 1), int(noise_seed), playing, longest, counted)
        np.add.at(into["score"], number[playing] - first, score[playing] / self.record.episodes)
        np.add.at(into["decisions"], number[playing] - first, length[playing])
        if counted is not None:
            counted.take(into["observation_moments"])
        stats = self.me.stats
        stats.add("episodes", int(playing.sum()))
        stats.observe("episode_return", score[playing])
        stats.observe("episode_length", length[playing])
        return int(length.sum())

    def _episodes(self, env_seed: int, noise_seed: int, playing: np.ndarray, longest: int,
                  counted: MomentSums | None) -> tuple[np.ndarray, np.ndarray]:
        """Returns and lengths [R] of one episode on each row that is `playing`. Rows that are not only fill the batch."""
        stats, env, members, viewer = self.me.stats, self.env, self.members, self._viewer
        inference, world = stats.phase("inference"), stats.phase("env")
        rng = torch.Generator().manual_seed(noise_seed)
        playing = playing.copy()
        score, length = np.zeros(self.rows), np.zeros(self.rows, np.int64)
        now = env.reset(env_seed)
        while playing.any():
            if counted is not None:
                counted.add(self._numbers(now)[playing])
            with inference:
                action = members.act(viewer.of(now), rng)
            with world:
                now = env.step(action)
            moved = playing & now.valid
            score[moved] += now.reward[moved]
            length[moved] += 1
            ended = moved & now.last
            if ended.any():
                score[ended] = now.episode_return[ended[now.last & now.valid]]  # from unclipped rewards
            playing &= ~ended & (length < longest)
            decisions = int(np.count_nonzero(moved))
            stats.add("env_steps", decisions)
            stats.add("env_frames", decisions * env.frame_skip)
            if now.restarts:
                note_restarts(self.me, now)
            self.me.beat()  # a slow environment is not one that hangs
        return score, length

    def _numbers(self, now: Step) -> np.ndarray:
        """The floating-point numbers of all rows' observations, [R, size]."""
        parts = [leaf_at(now.observation, path).reshape(self.rows, -1) for path in self._floats]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, 1)

    def close(self) -> None:
        self.env.close()
