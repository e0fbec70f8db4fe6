"""Several learners on one replay table: the update of their joined batch, one state, and it goes on when one is killed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from shoal.acting import Progress
from shoal.algorithms import curl, dqn
from shoal.nets import NetConfig
from shoal.roles.learner import Learner
from shoal.roles.replay_config import ReplayConfig
from shoal.slots import map_tree
from tests.architectures.graphs import Weights, draw, go
from tests.runtime.harness import Files, Killer

CATCH = "shoal/Catch-v0"
PLAIN = dqn.Config(double=False, epsilon_steps=500, target_period_updates=10, optimiser="sgd", lr=0.05, grad_norm=0.0)
TABLE = ReplayConfig(capacity=400, min_size=64, batch_size=16, insert_batch=10, samples_per_insert=8.0, exponent=0.0)


def test_two_learners_equal_one(tmp_path):
    """Two learners make the update of their joined batch, where items have different probabilities."""
    seen = {0: [], 1: []}

    class Noting(Learner):
        async def _update(self, batch):
            kept, before = map_tree(np.copy, batch), self.learn.state["params"].detach().clone()
            steps = await super()._update(batch)
            seen[self.me.index].append((kept, before, self.learn.state["params"].detach().clone()))
            return steps

    program, parts = draw(PLAIN, "actor_learner", CATCH, actors=2, learners=2, replay=replace(TABLE, exponent=0.6))
    program.nodes["learner"].role = Noting
    done = go(program, "inline", tmp_path, Weights(lambda control: control.total("learner_steps") >= 25))
    updates = list(zip(*seen.values(), strict=False))
    assert done.reason == "until" and len(updates) >= 25
    learn = parts.algorithm.learn(0)
    for k, ((mine, before, after), (other, other_before, other_after)) in enumerate(updates[:9]):  # the target has not changed
        assert torch.equal(before, other_before) and torch.equal(after, other_after)
        assert not np.array_equal(mine["observation"], other["observation"])
        joined = {name: np.concatenate([mine[name], other[name]]) for name in mine}
        with torch.no_grad():
            learn.state["params"].copy_(before)
            learn.state["target"].copy_(updates[0][0][1])
        (minibatch,) = learn.minibatches(joined, learn.sums(joined), Progress(), np.random.default_rng(0))
        gradient, _ = learn.gradients(minibatch, "all")
        learn.apply(gradient, "all")
        np.testing.assert_allclose(learn.state["params"].detach(), after, atol=1e-6, err_msg=str(k))
    steps = sum(page["env_steps"] for page in done.final.values())
    assert steps - 60 <= done.published["progress"][0] <= steps, "each env step is counted once"


@pytest.mark.parametrize("kind", ["inline", "local"])
def test_updates_counted_once(kind, tmp_path):
    program, _ = draw(PLAIN, "actor_learner", CATCH, actors=2, learners=2, replay=replace(TABLE, exponent=0.6))
    done = go(program, kind, tmp_path, Weights(lambda control: control.total("learner_steps") >= 40, seconds=60))
    pages = [done.final[f"learner-{k}"] for k in range(2)]
    assert done.reason == "until" and sorted(page["learner_steps"] for page in pages)[0] == 0
    assert all(page["samples_consumed"] >= 39 * TABLE.batch_size for page in pages)
    assert done.published["progress"][1] >= 40 and np.isfinite(done.published["params"]).all()


def test_kill_of_either_learner(tmp_path):
    program, _ = draw(PLAIN, "actor_learner", CATCH, actors=2, learners=2, replay=TABLE)
    program.store = Files()
    killer = Killer(("learner-0", "learner-1", "replay-0"), times=3, progress="learner_steps", every=30)
    versions = []

    def act(control):
        versions.append(control.wires()["weights"]["version"])
        killer(control)

    watch = go(program, "local", tmp_path, Weights(killer.done, act, seconds=90))
    assert watch.reason == "until" and killer.kills == 3
    assert versions == sorted(versions) and np.isfinite(watch.published["params"]).all()


def test_learners_that_compare_their_items(tmp_path):
    """CURL's learners tell each other their keys, and stay one."""
    heard, params = [], {0: [], 1: []}

    class Noting(Learner):
        async def _compared(self, learn, minibatch, phase):
            given = await super()._compared(learn, minibatch, phase)
            if phase == "encoder":
                heard.append(given.items["contrast_keys"].clone())
            return given

        async def _update(self, batch):
            done = await super()._update(batch)
            params[self.me.index].append(self.learn.state["params"].detach().clone())
            return done

    table = replace(TABLE, min_size=32, insert_batch=4)
    program, _ = draw(curl.Config(code_size=8), "actor_learner", "shoal/PixelCatch-v0", actors=2, learners=2, replay=table,
                      net=NetConfig(hidden=(16,), activation="relu"))
    program.nodes["learner"].role = Noting
    done = go(program, "inline", tmp_path, Weights(lambda control: control.total("learner_steps") >= 8))
    assert done.reason == "until" and min(len(seen) for seen in params.values()) >= 8
    assert all(torch.equal(*both) for both in zip(*params.values(), strict=False))
    assert all(keys.shape == (2 * table.batch_size, 1 + 8) and bool((keys[:, 0] == 1).all()) for keys in heard)
