"""Exactness before learning: same seed, same bits; local equals inline in lock-step; two learners equal one."""

import numpy as np
import pytest

from shoal.algorithms import a2c, ppo, vtrace
from shoal.errors import ConfigError
from shoal.nets import NetConfig
from tests.architectures.graphs import train

SHORT = {
    "vtrace": vtrace.Config(unroll=8),
    "a2c": a2c.Config(unroll=5, normalise_observations=True),
    "ppo": ppo.Config(unroll=16, epochs=2, minibatches=2, normalise_observations=True, normalise_returns=True),
}
PAIRS = [("vtrace", "actor_learner", {"lockstep": True, "batch_slots": 1}), ("ppo", "synchronous", {}), ("a2c", "synchronous", {}),
         ("vtrace", "synchronous", {})]


@pytest.mark.parametrize(("algorithm", "architecture", "config"), PAIRS)
def test_inline_gives_the_same_bits(algorithm, architecture, config, tmp_path):
    """Inline gives the same bits for the same seed."""
    first = train(tmp_path, SHORT[algorithm], architecture, "CartPole-v1", "inline", **config)
    again = train(tmp_path, SHORT[algorithm], architecture, "CartPole-v1", "inline", **config)
    other = train(tmp_path, SHORT[algorithm], architecture, "CartPole-v1", "inline", seed=8, **config)
    assert first.reason == "counted" and first.version > 3
    assert first.hash == again.hash
    assert first.hash != other.hash


@pytest.mark.parametrize(("algorithm", "architecture", "config"), PAIRS)
def test_local_equals_inline_in_lock_step(algorithm, architecture, config, tmp_path):
    inline = train(tmp_path, SHORT[algorithm], architecture, "CartPole-v1", "inline", **config)
    local = train(tmp_path, SHORT[algorithm], architecture, "CartPole-v1", "local", **config)
    assert (local.version, local.hash) == (inline.version, inline.hash)


def test_local_equals_inline_recurrent(tmp_path):
    net = NetConfig(recurrent="lstm", lstm_size=16)
    runs = [train(tmp_path, SHORT["vtrace"], "synchronous", "CartPole-v1", kind, net=net) for kind in ("inline", "local")]
    assert runs[0].hash == runs[1].hash


@pytest.mark.parametrize("kind", ["inline", "local"])
@pytest.mark.parametrize(("algorithm", "architecture", "one", "two"), [
    (vtrace.Config(unroll=8, optimiser="sgd", lr=0.05), "actor_learner", {"batch_slots": 2}, {"batch_slots": 1}),
    (ppo.Config(unroll=8, epochs=1, minibatches=1, normalise_observations=True, optimiser="sgd", lr=0.05), "actor_learner",
     {"batch_slots": 2}, {"batch_slots": 1}),
    (vtrace.Config(unroll=8, optimiser="sgd", lr=0.05), "actor_learner", {"batch_slots": 2}, {"batch_slots": 1, "one_place": True}),
])
def test_two_learners_equal_one(kind, algorithm, architecture, one, two, tmp_path):
    """Two actors in lock-step: their unrolls go to one learner, or to one of two learners each."""
    single = train(tmp_path, algorithm, architecture, "CartPole-v1", kind, actors=2, lockstep=True, updates=6, **one)
    double = train(tmp_path, algorithm, architecture, "CartPole-v1", kind, actors=2, learners=2, lockstep=True, updates=6, **two)
    assert double.version == single.version
    start = train(tmp_path, algorithm, architecture, "CartPole-v1", "inline", actors=2, lockstep=True, updates=0, **one)
    moved = np.abs(single.published["params"] - start.published["params"]).max()
    assert moved > 1e-3
    np.testing.assert_allclose(double.published["params"], single.published["params"], atol=1e-6)


@pytest.mark.parametrize("kind", ["inline", "local"])
def test_two_bundles_equal_one_trainer(kind, tmp_path):
    """Each trainer learns from the worker in its own process, and they share gradients."""
    config = ppo.Config(unroll=8, epochs=1, minibatches=1, normalise_observations=True, optimiser="sgd", lr=0.05)
    single = train(tmp_path, config, "synchronous", "CartPole-v1", kind, actors=2, updates=6)
    double = train(tmp_path, config, "synchronous", "CartPole-v1", kind, actors=2, learners=2, one_place=True, updates=6)
    assert double.version == single.version
    np.testing.assert_allclose(double.published["params"], single.published["params"], atol=1e-6)


def test_learner_without_an_actor(tmp_path):
    """A learner without an actor in its process is refused."""
    with pytest.raises(ConfigError, match="2 learners and 1 actors"):
        train(tmp_path, "vtrace", "actor_learner", "CartPole-v1", "inline", actors=1, learners=2, one_place=True)
