"""The same algorithm in one plain loop, without roles, wires or runtime: what one worker alone must equal bit for bit."""

from __future__ import annotations

import zlib

import numpy as np
import torch

from shoal import algorithms, envs
from shoal.acting import Progress
from shoal.nets import NetConfig


def stream_of(seed, role, salt):
    """The random stream that a role's first life derives from its name."""
    words = (seed, zlib.crc32(role.encode()), 0, 0, zlib.crc32(salt.encode()))
    return np.random.default_rng(np.random.SeedSequence(words))


def sequential(config, env, *, updates, role="worker", seed=7, seats=4, net=None, env_seed=None, action_seed=None):
    """Act T steps, learn from them, again; returns the learner after `updates` optimiser steps."""
    algorithm = algorithms.make(config, envs.describe(env), net or NetConfig(), seats)
    seeds = stream_of(seed, role, "actor").integers(2**31, size=2)
    world, policy, recorder = envs.make(env, seats), algorithm.policy(), algorithm.record.recorder()
    now = world.reset(int(seeds[1] if env_seed is None else env_seed))
    generator = torch.Generator().manual_seed(int(seeds[0] if action_seed is None else action_seed))
    learn, rng = algorithm.learn(seed), stream_of(seed, role, "minibatches")
    state, data = policy.initial_state(seats), algorithm.record.layout.empty()
    env_steps = steps = 0
    while steps < updates:
        progress = Progress(env_steps, steps, 0.0)
        policy.load(learn.published(progress))
        explore = algorithm.explore(0, 1, seats, progress)
        recorder.begin(data, now, state, 0)
        for t in range(algorithm.record.length):
            action, state, extras = policy.act(recorder.view(now), state, explore, generator)
            now = world.step(action)
            recorder.write(t, action, extras, now, 0)
        for minibatch in learn.minibatches(data, learn.sums(data), progress, rng):
            for phase in learn.phases:
                learn.apply(learn.gradients(minibatch, phase)[0], phase)
                steps += 1
        learn.absorb(learn.moments(data))
        env_steps += int(data["valid"].sum())
    return learn
