"""Reuse, staleness and delay (OpenAI Five): controlled, masked in one place, and measured."""

import numpy as np
import pytest

from shoal.algorithms import appo, ppo, vtrace
from shoal.roles.learner import Learner
from tests.architectures.graphs import train

T, SEATS, BATCH = 4, 4, 2
ROWS = T * SEATS


def run(tmp_path, algorithm=None, updates=60, **config):
    config = {"batch_slots": BATCH, "buffer_slots": 8, **config}
    algorithm = algorithm or vtrace.Config(unroll=T)
    done = train(tmp_path, algorithm, "actor_learner", "shoal/Catch-v0", "inline", updates=updates, **config)
    return done, done.final["learner-0"]


@pytest.mark.parametrize("reuse", [0.5, 1.0, 2.0, 4.0])
def test_reuse_is_what_was_asked_for(reuse, tmp_path):
    """specs/policy.md 7e: reuse = samples learned from / samples taken in."""
    done, learner = run(tmp_path, reuse=reuse, updates=200)
    assert learner["samples_consumed"] == 200 * BATCH * ROWS
    taken = done.wires["unrolls"]["consumed"] * ROWS
    assert learner["samples_consumed"] / taken == pytest.approx(reuse, rel=0.06)
    assert done.published["progress"][0] == taken  # env_steps count once, however often they are learned from


def test_weights_are_taken_with_a_slot(tmp_path):
    """One slot: the actor waits for it while the learner learns from the last unroll, and begins with what that has made."""
    _, learner = run(tmp_path, batch_slots=1, buffer_slots=0, slots_per_actor=1)
    assert learner["policy_lag/max"] == 0


def test_delay_and_bound(tmp_path):
    """A delay makes data older, and a bound masks them."""
    lags = []
    for delay in (0, 8, 32):
        _, learner = run(tmp_path, delay_slots=delay, updates=150)
        lags.append(learner["policy_lag/sum"] / learner["policy_lag/count"])
        assert learner["samples_masked"] == 0
    assert lags[0] + 2 < lags[1] and lags[1] + 8 < lags[2]
    _, learner = run(tmp_path, delay_slots=8, max_staleness=5, updates=150)
    assert learner["samples_masked"] > 0 and learner["policy_lag/max"] <= 5


def test_both_bounds_are_one_mask(tmp_path):
    """The bound of the algorithm and of the architecture are one mask."""
    config = {"delay_slots": 8, "updates": 60}
    one, first = run(tmp_path, appo.Config(unroll=T, max_lag=4), **config)
    two, second = run(tmp_path, appo.Config(unroll=T, max_lag=None), max_staleness=4, **config)
    both, third = run(tmp_path, appo.Config(unroll=T, max_lag=9), max_staleness=4, **config)
    assert one.hash == two.hash == both.hash
    assert first["samples_masked"] == second["samples_masked"] == third["samples_masked"] > 0


def test_batch_that_is_too_old(tmp_path):
    """What was made with version 0 is never young enough here: nothing is learned, nothing published, nobody hangs."""

    class Impatient(Learner):
        async def step(self):
            if self.me.stats.get("samples_masked") >= 20 * ROWS:
                self.me.finish("masked")
            self.batches.max_lag = -1
            await super().step()

    from tests.architectures.graphs import draw, go

    program, _ = draw(ppo.Config(unroll=T, epochs=1, minibatches=2), "actor_learner", "shoal/Catch-v0", batch_slots=1)
    program.nodes["learner"].role = Impatient
    done = go(program, "inline", tmp_path)
    assert done.reason == "masked" and done.version == 1 and done.published["progress"][1] == 0
    assert done.final["learner-0"]["samples_consumed"] == done.final["learner-0"]["learner_steps"] == 0


def test_bound_between_processes(tmp_path):
    """The artificial bound holds between processes."""
    done = train(tmp_path, appo.Config(unroll=T, max_lag=2), "actor_learner", "shoal/Catch-v0", "local", actors=2, updates=150,
                 batch_slots=BATCH, buffer_slots=8, reuse=2.0, max_staleness=6)
    learner = done.final["learner-0"]
    assert done.reason == "counted" and learner["policy_lag/max"] <= 2
    assert np.isfinite(done.published["params"]).all()
