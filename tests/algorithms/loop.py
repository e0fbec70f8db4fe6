"""Actors and a learner in one plain loop, without roles, wires or runtime: the loop of core.py, taken literally."""

from collections import deque

import numpy as np
import torch

from shoal import algorithms, envs
from shoal.acting import Progress
from shoal.slots import map_tree


class Actor:
    """A batch of environments, a policy and a recorder."""

    def __init__(self, algorithm, env, seed, index=0, count=1):
        self.env, self.policy, self.recorder = env, algorithm.policy(), algorithm.record.recorder()
        self.record = algorithm.record
        self.explore = algorithm.explore(index, count, env.num_seats, Progress())
        self.rng = torch.Generator().manual_seed(seed)
        self.step = env.reset(seed=seed)
        self.state = self.policy.initial_state(env.num_seats)
        self.returns = deque(maxlen=100)

    def unroll(self, version=0):
        data = self.record.layout.empty()
        self.recorder.begin(data, self.step, self.state, version)
        for t in range(self.record.length):
            action, self.state, extras = self.policy.act(
                self.recorder.view(self.step), self.state, self.explore, self.rng
            )
            self.step = self.env.step(action)
            self.recorder.write(t, action, extras, self.step, version)
            self.returns.extend(self.step.episode_return)
        return data


def join(record, slots):
    batch = record.layout.joined(len(slots)).empty()
    for position, slot in enumerate(slots):
        record.layout.gather(batch, position, slot)
    return batch


def update(learn, batch, progress=None, rng=None, flip=False):
    """One batch learned from, alone. `flip` turns every gradient around: whatever is tested must then fail."""
    rows = []
    for minibatch in learn.minibatches(
        batch, learn.sums(batch), progress or Progress(), rng or np.random.default_rng(0)
    ):
        for phase in learn.phases:
            gradient, metrics = learn.gradients(minibatch, phase)
            learn.apply(-gradient if flip else gradient, phase)
            rows.append(metrics)
    learn.absorb(learn.moments(batch))
    return rows


class Loop:
    """Training: `actors` x `seats` environments, `lag` versions between the learner and the weights that act."""

    def __init__(
        self, config, env, net, *, actors=1, seats=8, seed=1, lag=0, budget=None, flip=False, slots=None, **kwargs
    ):
        self.spec = envs.describe(env, **kwargs)
        self.algorithm = algorithms.make(config, self.spec, net, seats)
        self.make = lambda n: envs.make(env, n, **kwargs)
        self.actors = [Actor(self.algorithm, self.make(seats), 1000 * seed + i, i, actors) for i in range(actors)]
        self.learn = self.algorithm.learn(seed)
        self.rng = np.random.default_rng(seed)
        self.weights = deque(maxlen=lag + 1)
        self.budget, self.flip, self.slots = budget, flip, slots or actors
        self.env_steps = self.learner_steps = self.turn = 0
        self.metrics = {}
        self.publish()

    @property
    def progress(self):
        return Progress(
            self.env_steps, self.learner_steps, min(1.0, self.env_steps / self.budget) if self.budget else 0.0
        )

    def publish(self):
        self.weights.append(map_tree(np.copy, self.learn.published(self.progress)))

    def step(self):
        slots = []
        for _ in range(self.slots):
            actor = self.actors[self.turn % len(self.actors)]
            self.turn += 1
            actor.policy.load(self.weights[0])  # the oldest one that is kept
            slots.append(actor.unroll())
        batch = join(self.algorithm.record, slots)
        rows = update(self.learn, batch, self.progress, self.rng, self.flip)
        self.env_steps += int(batch["valid"].sum())
        self.learner_steps += len(rows)
        self.metrics = rows[-1]
        self.publish()

    def run(self, env_steps):
        while self.env_steps < env_steps:
            self.step()
        return self

    def evaluate(self, episodes=100, seed=777, greedy=True):
        """Mean return of one fresh episode in each of `episodes` environments."""
        env = self.make(episodes)
        policy = self.algorithm.policy()
        policy.load(self.weights[-1])
        return evaluate(policy, env, self.algorithm.record, seed, greedy)


def evaluate(policy, env, record, seed, greedy=True):
    step, action, state = env.reset(seed=seed), None, policy.initial_state(env.num_seats)
    rng, viewer = torch.Generator().manual_seed(seed), record.viewer(env.num_seats)
    going, total = np.ones(env.num_seats, bool), np.zeros(env.num_seats)
    explore = None if greedy else np.zeros(env.num_seats, np.float32)
    while going.any():
        action, state, _ = policy.act(viewer.of(step, action), state, explore, rng)
        step = env.step(action)
        total += going * step.reward
        going &= ~step.last
    return float(total.mean())
