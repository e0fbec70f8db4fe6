"""Observation normalisation with replay: each observation counts once, however often it is drawn."""

from dataclasses import replace

import numpy as np
import pytest

from shoal.algorithms import dqn, r2d2
from shoal.nets import NetConfig
from shoal.roles.learner import Learner
from shoal.roles.replay_config import ReplayConfig
from tests.architectures.graphs import Weights, draw, go

TABLE = ReplayConfig(capacity=5000, min_size=64, batch_size=16, insert_batch=8, samples_per_insert=8.0)
LSTM = NetConfig(hidden=(16,), recurrent="lstm", lstm_size=16)
CASES = {
    "dqn": (dqn.Config(normalise_observations=True), "synchronous", None, TABLE),
    "apex": (dqn.Config(normalise_observations=True), "actor_learner", None, TABLE),
    "shards": (dqn.Config(normalise_observations=True), "actor_learner", None, replace(TABLE, shards=2)),
    "seed": (dqn.Config(normalise_observations=True), "central_inference", None, TABLE),
    "r2d2": (r2d2.Config(normalise_observations=True, burn_in=2, length=6, stride=3), "actor_learner", LSTM,
             replace(TABLE, min_size=16)),
}


@pytest.mark.parametrize("name", CASES)
def test_each_observation_counts_once(name, tmp_path):
    config, architecture, net, table = CASES[name]
    seen = []

    class Looking(Learner):
        async def step(self):
            await super().step()
            state = self.learn.state
            seen.append((float(state["observations.count"]), int(self.counts[0]), state["observations.mean"].clone().numpy()))

    program, _ = draw(config, architecture, "CartPole-v1", actors=2 if architecture != "synchronous" else 1, replay=table, net=net)
    program.nodes["learner"].role = Looking
    watch = go(program, "inline", tmp_path, Weights(lambda c: c.total("learner_steps") >= 80))
    counted, env_steps, mean = seen[-1]
    assert watch.reason == "until" and counted == env_steps > 100
    assert np.abs(mean).max() > 1e-3 and np.isfinite(mean).all()
    assert np.abs(watch.published["norm"]["mean"] - mean).max() < 0.2 and (watch.published["norm"]["scale"] > 0).all()
