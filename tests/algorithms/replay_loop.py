"""An actor, a table and a learner in one plain loop, without roles, wires or runtime."""

import numpy as np
import torch

from shoal import envs, replay
from shoal.acting import Progress
from shoal.slots import map_tree


class Actor:
    """A batch of environments, a policy and a recorder of items."""

    def __init__(self, algorithm, env, seed=0):
        self.algorithm, self.env = algorithm, env
        self.policy, self.record = algorithm.policy(), algorithm.record
        self.recorder = self.record.recorder(env.num_seats)
        self.rng = torch.Generator().manual_seed(seed)
        self.step = env.reset(seed=seed)
        self.state = self.policy.initial_state(env.num_seats)
        self.recorder.begin(self.step)
        self.env_steps = 0

    def play(self, steps, version=0):
        """So many steps of all environments."""
        explore = self.algorithm.explore(0, 1, self.env.num_seats, Progress(self.env_steps))
        for _ in range(steps):
            action, state, extras = self.policy.act(self.recorder.view(self.step), self.state, explore, self.rng)
            self.step = self.env.step(action)
            self.recorder.write(action, self.state, extras, self.step, version)
            self.state = state
            self.env_steps += self.env.num_seats

    def items(self):
        """All that are finished, and their priorities."""
        into, priority = self.record.layout.joined(self.recorder.ready).empty(), np.zeros(self.recorder.ready)
        self.recorder.take(into, priority)
        return into, priority


def batch_of(items, probability=None, size=1000):
    """Items as a learner gets them."""
    count = len(items["weights_version"])
    probability = np.full(count, 1 / size) if probability is None else probability
    return {**items, "probability": probability, "table_size": np.array([size])}


def batches(algorithm, env, count, size=16):
    """Of what an actor recorded, with probabilities that differ; in the sixth all rewards are NaN."""
    actor, rng = Actor(algorithm, env, 5), np.random.default_rng(0)
    actor.play(80)
    items, _ = actor.items()
    for number in range(count):
        chosen = rng.integers(len(items["reward"]), size=size)
        batch = map_tree(lambda x: x[chosen].copy(), items)  # noqa: B023
        if number == 5:
            batch["reward"][:] = np.nan
        yield batch_of(batch, rng.random(size) / 500 + 1e-4, 500)


def gradient(learn, batch, progress=None):
    """The gradient of a batch, as a copy, and its metrics."""
    (minibatch,) = learn.minibatches(batch, learn.sums(batch), progress or Progress(), np.random.default_rng(0))
    grad, metrics = learn.gradients(minibatch, "all")
    return grad.copy(), metrics


def train(algorithm, name, updates, *, seats=8, exponent=0.6, batch_size=32, start=200, seed=0, flip=False, size=5000, **kwargs):
    """Learn: one update after every step of `seats` environments. Returns the learner."""
    actor, learn = Actor(algorithm, envs.make(name, seats, **kwargs), seed), algorithm.learn(seed)
    client = replay.Server([replay.Table("items", replay.Prioritized(exponent), max_size=size)], seed=seed).client()
    actor.policy.load(learn.published(Progress()))
    inserted = done = 0
    while done < updates:
        actor.play(1, done)
        if actor.recorder.ready:
            items, priority = actor.items()
            client.insert_batch(items, {"items": priority})
            inserted += len(priority)
        if inserted < start:
            continue
        drawn = client.sample("items", batch_size)
        batch = batch_of(drawn.data, drawn.info.probabilities, drawn.info.table_size)
        (minibatch,) = learn.minibatches(batch, learn.sums(batch), Progress(), np.random.default_rng(0))
        for phase in learn.phases:
            grad, _ = learn.gradients(minibatch, phase)
            learn.apply(-grad if flip else grad, phase)
        client.update_priorities("items", drawn.info.keys, learn.priorities)
        actor.policy.load(learn.published(Progress()))
        done += 1
    return learn


def greedy_return(algorithm, learn, name, episodes=100, **kwargs):
    """Mean return of the greedy policy."""
    env, policy = envs.make(name, 50, **kwargs), algorithm.policy()
    policy.load(learn.published(Progress()))
    step, state, viewer, action, got = env.reset(seed=7), policy.initial_state(50), algorithm.record.viewer(50), None, []
    while len(got) < episodes:
        action, state, _ = policy.act(viewer.of(step, action), state, None, torch.Generator())
        step = env.step(action)
        got.extend(step.episode_return)
    return float(np.mean(got))
