"""Observation normalisation with replay: each observation counts once, however often it is drawn."""

from dataclasses import replace

import numpy as np
import pytest

from shoal.algorithms import dqn, r2d2, td3
from shoal.nets import NetConfig
from shoal.roles.learner import Learner
from shoal.roles.parameter_shards import first_shard
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


def test_parameter_server_counts_once(tmp_path):
    """Of two learners and shards; some gradients are refused for their age, some are never sent for their loss."""
    seen = []

    def looking(me, **arguments):
        server = first_shard(me, **arguments)
        publish = server._publish

        def look():
            seen.append((float(server.learn.state["observations.count"]), int(server.learner_state.counts[0, 0])))
            publish()

        server._publish = look
        return server

    config = td3.Config(random_steps=50, normalise_observations=True, actor_priorities=True)
    program, _ = draw(config, "parameter_server", "Pendulum-v1", actors=2, replay=TABLE, shards=2, max_staleness=0,
                      outlier_width=0.1)
    program.nodes["server"].role = looking
    watch = go(program, "inline", tmp_path, Weights(lambda c: c.total("learner_steps") >= 80))
    assert watch.reason == "until" and all(counted == env_steps for counted, env_steps in seen) and seen[-1][0] > 100
    numbers = {name: sum(page[name] for page in watch.final.values()) for name in ("gradients_outlying", "gradients_stale")}
    assert min(numbers.values()) > 0
