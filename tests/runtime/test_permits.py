"""Permits: all roles together keep to a limit, to less than one unit of work, and nobody waits for ever."""

import numpy as np
import pytest

from shoal.algorithms import a2c, dqn, ppo, vtrace
from shoal.roles.replay_config import ReplayConfig
from shoal.runtime.permits import Ask, Permits
from tests.architectures.graphs import draw, go
from tests.runtime.harness import RUNTIMES, Watch


class Counters:
    """Roles that ask and count, in any order, driven by hand."""

    def __init__(self, limit, units, ahead=True):
        self.permits, self.units = Permits(limit, ahead), units
        self.most, self.turns = limit + max(units.values()), 0
        self.counted = dict.fromkeys(units, 0.0)
        self.allowed = dict.fromkeys(units, -1.0)
        self.asking = set()

    def turn(self, name):
        """Count, or ask and count when that is answered. Permits that never end fail here, and so do those that allow nothing."""
        self.turns += 1
        assert self.total < self.most, "the limit is exceeded by a unit"
        assert self.turns < 100 * self.most, "permits are given that allow nothing"
        if self.counted[name] + self.units[name] <= self.allowed[name]:
            self.counted[name] += self.units[name]
        elif name not in self.asking:
            self.asking.add(name)
            self.permits.ask(Ask(name, self.units[name], self.counted[name], -1, len(self.units),
                                 lambda count: self.hear(name, count)))

    def hear(self, name, allowed):
        self.allowed[name] = allowed
        self.asking.discard(name)

    @property
    def total(self):
        return sum(self.counted.values())


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("limit", [1, 999, 100_000])
def test_limit_exceeded_by_less_than_a_unit(limit, ahead):
    """The limit is reached and exceeded by less than a unit."""
    rng = np.random.default_rng(limit)
    counters = Counters(limit, {"a": 7, "b": 7, "c": 7, "slow": 7}, ahead)
    names = ["a", "b", "c"] * 20 + ["slow"]
    while len(counters.asking) < 4:
        counters.turn(rng.choice(names))
    assert limit <= counters.total < limit + 7


def test_unused_is_given_to_others():
    """A role counts less than it asked for (seats that were not valid), and one has died with its portion."""
    counters = Counters(1000, {"a": 10, "b": 10})
    for _ in range(8):
        counters.turn("b")  # then it dies
    while "a" not in counters.asking:
        counters.turn("a")
        counters.counted["a"] -= 3 if "a" not in counters.asking else 0
    held = counters.allowed["b"] - counters.counted["b"]
    assert held > 0 and counters.total < 1000, "the dead one holds a portion"
    for _ in range(100):
        if not counters.permits.reconcile(counters.counted):
            break
        while "a" not in counters.asking:
            counters.turn("a")
    else:
        raise AssertionError("it says that somebody was served, without an end")
    assert 1000 <= counters.total < 1010


def test_round_is_allowed_to_all_or_to_none():
    permits, allowed = Permits(95), []
    for number in range(1, 20):
        for worker in ("w0", "w1"):
            permits.ask(Ask(worker, 10, 10.0 * number, number, 2, lambda last, key=(number, worker): allowed.append((key, last))))
    begun = [key for key, last in allowed if key[0] <= last]
    assert begun == [(number, worker) for number in range(1, 6) for worker in ("w0", "w1")]  # 5 rounds of 20: the fifth began at 80


UNROLL, ENVS = 5, 4
TABLE = ReplayConfig(capacity=400, min_size=64, batch_size=16, insert_batch=4, samples_per_insert=4.0, exponent=0.0)
CASES = {
    "actor_learner": (vtrace.Config(unroll=UNROLL), {"batch_slots": 2}, 2 * UNROLL * ENVS),
    "synchronous": (ppo.Config(unroll=UNROLL, minibatches=1, epochs=1), {}, 3 * UNROLL * ENVS),
    "async_gradients": (a2c.Config(unroll=UNROLL), {}, UNROLL * ENVS),
    "predictor_trainer": (a2c.Config(unroll=UNROLL), {}, UNROLL * ENVS),
    "central_inference": (vtrace.Config(unroll=UNROLL), {}, UNROLL * ENVS),
    "gossip": (a2c.Config(unroll=UNROLL), {}, 3 * UNROLL * ENVS),
    "parameter_server": (dqn.Config(), {"replay": TABLE}, TABLE.batch_size),
}


@pytest.mark.parametrize("kind", RUNTIMES)
@pytest.mark.parametrize("architecture", CASES)
def test_actors_keep_to_the_budget(architecture, kind, tmp_path):
    """The session does not stop them: on the local runtime it looks on for a while after the budget is spent."""
    config, options, batch = CASES[architecture]
    env = "shoal/Catch-v0" if architecture == "parameter_server" else "CartPole-v1"
    program, _ = draw(config, architecture, env, actors=3, **options)
    program.limits, seen = {"env_steps": 509}, []

    def spent(control):
        seen.append(control.total("env_steps"))
        settled = kind == "inline" or seen[-5:] == 5 * seen[-1:]
        return seen[-1] >= 509 + batch or (seen[-1] >= 509 and settled)

    watch = go(program, kind, tmp_path, Watch(spent, seconds=120))
    assert watch.reason == "until"
    assert 509 <= sum(page["env_steps"] for page in watch.final.values()) < 509 + batch


APART = ("actor_learner", "async_gradients", "gossip", "parameter_server")


@pytest.mark.parametrize(("architecture", "kind"), [*((name, "inline") for name in CASES), *((name, "local") for name in APART)])
def test_learners_make_as_many_updates(architecture, kind, tmp_path):
    """Where a batch is one update, not one more is made than was asked for; nobody stops them."""
    config, options, _ = CASES[architecture]
    env = "shoal/Catch-v0" if architecture == "parameter_server" else "CartPole-v1"
    program, _ = draw(config, architecture, env, actors=3, max_learner_steps=7, **options)
    program.limits, seen = {"learner_steps": 7}, []

    def spent(control):
        seen.append(control.total("learner_steps"))
        return seen[-1] > 7 or (seen[-1] == 7 and (kind == "inline" or seen[-10:] == 10 * [7]))

    watch = go(program, kind, tmp_path, Watch(spent, seconds=120))
    assert watch.reason in ("until", "learner_steps") and sum(page["learner_steps"] for page in watch.final.values()) == 7


def test_one_table_keeps_to_the_budget(tmp_path):
    """With replay: an actor cannot know how many decisions its next insert takes; it asks for as many as the last one took."""
    program, _ = draw(dqn.Config(), "actor_learner", "shoal/Catch-v0", actors=3, replay=TABLE)
    program.limits = {"env_steps": 509}
    watch = go(program, "inline", tmp_path, Watch(lambda control: control.total("env_steps") >= 509, seconds=120))
    assert watch.reason == "until"
    assert 509 <= sum(page["env_steps"] for page in watch.final.values()) < 509 + TABLE.batch_size
