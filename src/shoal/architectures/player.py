"""Environments, a policy and a recorder: what an Actor and a Worker act with."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from shoal.algorithms.serving import Counter
from shoal.architectures.parts import Parts
from shoal.core import Me, Progress, Tree
from shoal.envs import Step

__all__ = ["Player", "note_episodes"]


class Player:
    """Plays unrolls, or items for a replay table, into any memory of their layout; environments and recurrent states go on
    from one to the next."""

    def __init__(self, me: Me, parts: Parts) -> None:
        parts = parts.on(me.index)
        self.me, self.algorithm = me, parts.algorithm
        seeds = me.rng("actor").integers(2**31, size=2)
        self.env = parts.env.of(me.index).make(parts.envs_per_actor)
        self.policy = self.algorithm.policy()
        self.recorder = self.algorithm.record.recorder(self.env.num_seats)
        self.rng = torch.Generator().manual_seed(int(seeds[0]))
        self.act: Any = self.policy.act
        self.aside: Any = nullcontext
        self.hidden = self.policy.initial_state(self.env.num_seats)  # on the CPU
        if parts.hardware.on_gpu and parts.hardware.gpu.actors:
            self.policy.to(parts.hardware)  # type: ignore[attr-defined]
            self.rng = torch.Generator(parts.hardware.device).manual_seed(int(seeds[0]))
            counter = Counter(self.policy, parts.hardware, self.rng)
            self.act, self.aside = counter.answer, counter.aside
        self.now = self.env.reset(int(seeds[1]))
        self.begun = False
        self.explore: Any = None
        self.version = 0

    def load(self, published: Tree, version: int, index: int, count: int) -> None:
        """Act with these weights from now on, exploring like the `index`-th of `count` actors."""
        with self.aside():
            self.policy.load(published)
        self.version = version
        env_steps, learner_steps, fraction = published["progress"]
        progress = Progress(int(env_steps), int(learner_steps), float(fraction))
        self.explore = self.algorithm.explore(index, count, self.env.num_seats, progress)

    def unroll(self, data: Tree) -> int:
        """Fill `data` with one unroll; returns how many decisions it holds."""
        recorder, act, env, stats, now, state = self.recorder, self.act, self.env, self.me.stats, self.now, self.hidden
        inference, world, write = stats.phase("inference"), stats.phase("env"), stats.phase("write")
        with write:
            recorder.begin(data, now, state, self.version)
        decisions = 0
        for t in range(recorder.record.length):
            with inference:
                action, state, extras = act(recorder.view(now), state, self.explore, self.rng)
            with world:
                now = env.step(action)
            with write:
                recorder.write(t, action, extras, now, self.version)
            decisions += int(np.count_nonzero(now.valid))
            note_episodes(stats, now)
            self.me.beat()  # a slow environment is not one that hangs
        self.now, self.hidden = now, state
        stats.add("env_steps", decisions)
        stats.add("env_frames", decisions * env.frame_skip)
        return decisions

    def collect(self, data: Tree) -> int:
        """Play until as many items are finished as `data` holds, and fill it; returns how many decisions that took."""
        recorder, act, env, stats, now, state = self.recorder, self.act, self.env, self.me.stats, self.now, self.hidden
        inference, world, write = stats.phase("inference"), stats.phase("env"), stats.phase("write")
        gather = stats.phase("gather")
        if not self.begun:
            self.begun = True
            recorder.begin(now)
        decisions = 0
        while recorder.ready < len(data["priority"]):
            before = state
            with inference:
                action, state, extras = act(recorder.view(now), before, self.explore, self.rng)
            with world:
                now = env.step(action)
            with write:
                recorder.write(action, before, extras, now, self.version)
            decisions += int(np.count_nonzero(now.valid))
            note_episodes(stats, now)
            self.me.beat()  # a slow environment is not one that hangs
        self.now, self.hidden = now, state
        with write:
            recorder.catch_up()
        with gather:
            recorder.take(data["items"], data["priority"])
            data["decisions"][0] = decisions
        stats.add("env_steps", decisions)
        stats.add("env_frames", decisions * env.frame_skip)
        return decisions

    def close(self) -> None:
        self.env.close()


def note_episodes(stats: Any, now: Step) -> None:
    """Write down the episodes that ended with this step."""
    if len(now.episode_return):
        stats.add("episodes", len(now.episode_return))
        stats.observe("episode_return", now.episode_return)
        stats.observe("episode_length", now.episode_length)
