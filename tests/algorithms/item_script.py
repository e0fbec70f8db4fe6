"""Scripted episodes, and what a record must make of them: what the tests of transitions and windows share."""

from dataclasses import dataclass, field

import gymnasium as gym
import numpy as np

from shoal.algorithms.records.first_priority import QEstimates
from shoal.algorithms.records.transitions import Transitions
from shoal.algorithms.records.windows import Windows
from shoal.envs.interface import Step
from shoal.ops import value
from shoal.slots import leaves, map_tree

BOX = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
DICT = gym.spaces.Dict({"a": BOX, "b": gym.spaces.Dict({"image": gym.spaces.Box(0, 255, (2, 2), np.uint8)})})
A, H = 3, 2


@dataclass
class Episode:
    """What happened to one seat between `first` and `last`, row t for step t."""

    rows: list = field(default_factory=list)  # dictionaries: observation, mask, prev_action, prev_reward, q, state, action, ...
    over: bool = False
    terminated: bool = False
    last: dict | None = None  # what is known of the last observation
    last_mask: np.ndarray | None = None  # and what would be legal there


class Script:
    """Seats with random episodes, or episodes of the given lengths; x = (seat, episode, age) tells every step apart."""

    def __init__(self, seats, seed, *, space=BOX, lengths=None, terminate=0.5, late=False, masks=False, replaces=False):
        self.rng, self.seats, self.space, self.lengths = np.random.default_rng(seed), seats, space, lengths
        self.terminate, self.late, self.masks, self.replaces = terminate, late, masks, replaces
        self.episode, self.age, self.dead = np.zeros(seats, int), np.zeros(seats, int), np.zeros(seats, bool)
        self.length = np.array([self.draw(b) for b in range(seats)])

    def draw(self, b):
        if self.lengths is not None:
            return self.lengths[self.episode[b] % len(self.lengths)]
        return int(self.rng.integers(1, 12))

    def observe(self, rows=slice(None)):
        x = np.stack([np.arange(self.seats), self.episode, self.age], 1).astype(np.float32)[rows]
        if self.space is BOX:
            return x
        return {"a": x, "b": {"image": np.repeat(x[:, 2:], 4, 1).reshape(-1, 2, 2).astype(np.uint8)}}

    def mask(self):
        if not self.masks:
            return None
        mask = self.rng.random((self.seats, A)) < 0.6
        mask[:, 1] = True
        return mask

    def reset(self):
        none, every = np.zeros(self.seats, bool), np.ones(self.seats, bool)
        zero = np.zeros(self.seats, np.float32)
        return Step(self.observe(), zero, zero + 1, every, none, none, every.copy(), action_mask=self.mask())

    def begin(self, rows):
        self.episode[rows] += 1
        self.age[rows] = 0
        for b in rows:
            self.length[b] = self.draw(b)

    def step(self, action):
        waking, valid = self.dead.copy(), ~self.dead
        self.age[valid] += 1
        over = valid & (self.age >= self.length)
        terminated = over & (self.rng.random(self.seats) < self.terminate)
        cut = np.flatnonzero(over & ~terminated)
        final = self.observe(cut) if len(cut) else None
        first = waking.copy() if self.late else over.copy()
        if self.late:
            self.begin(np.flatnonzero(waking))
            self.dead = over.copy()
        else:
            self.begin(np.flatnonzero(over))
        reward = np.where(valid, self.rng.normal(size=self.seats) * 2, 0).astype(np.float32)
        executed = np.where(self.rng.random(self.seats) < 0.5, 1, action) if self.replaces else None
        return Step(self.observe(), reward, (~terminated).astype(np.float32), first, over, over & ~terminated, valid, cut, final,
                    self.mask(), executed, final_action_mask=self.mask()[cut] if self.masks and len(cut) else None)  # fmt: skip


def play(record, script, steps, take=4):
    """Items in the order they came, their priorities, and every episode by (seat, number)."""
    recorder, rng = record.recorder(), np.random.default_rng(9)
    into, priority = record.layout.joined(take).empty(), np.zeros(take)
    items, found, told, numbers = [], [], {}, np.zeros(script.seats, int)
    step = script.reset()
    recorder.begin(step)
    for version in range(steps):
        view = recorder.view(step)
        q = rng.normal(size=(script.seats, A)).astype(np.float32) * 3
        if step.action_mask is not None:
            q[~step.action_mask] = -np.inf
        state = {name: rng.normal(size=(script.seats, H)).astype(np.float32) for name in "hc"}
        action = np.where(rng.random(script.seats) < 0.5, q.argmax(-1), 1)
        seen = [map_tree(lambda x: x[b].copy(), step.observation) for b in range(script.seats)]  # noqa: B023
        look = {"mask": step.action_mask, "prev_action": view.prev_action, "prev_reward": view.prev_reward}
        look = {name: None if x is None else x.copy() for name, x in look.items()}
        after = script.step(action)
        recorder.write(action, state, {"q": q}, after, version)
        done = action if after.executed_action is None else after.executed_action
        for b in np.flatnonzero(after.valid):
            episode = told.setdefault((int(b), int(numbers[b])), Episode())
            episode.rows.append(
                {"observation": seen[b], "q": q[b], "action": done[b], "reward": float(after.reward[b]), "version": version,
                 "state": {name: x[b].copy() for name, x in state.items()},
                 **{name: None if x is None else x[b] for name, x in look.items()}}
            )  # fmt: skip
            if after.last[b]:
                episode.over, episode.terminated = True, not after.truncated[b]
                where = np.flatnonzero(after.final_rows == b)
                if len(where):
                    episode.last = map_tree(lambda x: x[where[0]].copy(), after.final_observation)  # noqa: B023
                    episode.last_mask = None if after.final_action_mask is None else after.final_action_mask[where[0]].copy()
                numbers[b] += 1
        while recorder.ready >= take:
            recorder.take(into, priority)
            items.append(map_tree(np.copy, into))
            found.append(priority.copy())
        step = after
    rest = recorder.ready
    into, priority = record.layout.joined(rest).empty(), np.zeros(rest)
    recorder.take(into, priority)
    items.append(into)
    found.append(priority)
    assert recorder.ready == 0
    return map_tree(lambda *parts: np.concatenate(parts), *items), np.concatenate(found), told


def common(seats, space=BOX, masks=False, rescale=False, **kwargs):
    return {"seats": seats, "observation_space": space, "action_space": gym.spaces.Discrete(A), "mask_size": A if masks else 0,
            "estimates": QEstimates(rescale), **kwargs}


def transitions(*args, **kwargs):
    return Transitions(**common(*args, **kwargs))


def windows(place, burn_in, length, stride, **kwargs):
    return Windows(**place, burn_in=burn_in, length=length, stride=stride, eta=0.9, **kwargs)


def best(record, row):
    q = float(row["q"].max())
    return float(value.unrescale(np.float64(q))) if record.estimates.rescale else q


def error(record, target, q):
    return abs((float(value.rescale(np.float64(target))) if record.estimates.rescale else target) - float(q))


def clipped(record, reward):
    return float(np.clip(reward, -record.reward_clip, record.reward_clip)) if record.reward_clip else reward


def zeros_like(tree):
    return map_tree(np.zeros_like, tree)


def row_of(items, i):
    return map_tree(lambda x: x[i], items)


def same(got, want):
    for (path, one), (_, other) in zip(leaves(got), leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5, err_msg="/".join(path))
