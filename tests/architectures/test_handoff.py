"""Weights that stay where they are: parcels that nobody changes, a policy whose memory never moves, a server that pulls nothing."""

import numpy as np
import pytest
import torch

from shoal import algorithms, envs
from shoal.acting import Progress
from shoal.algorithms import ppo, vtrace
from shoal.architectures import central_inference
from shoal.device.weight_handoff import DeviceWeights, WeightHandoff
from shoal.nets import NetConfig
from shoal.roles.parts import Parts
from tests.architectures.graphs import Weights, draw, go, train
from tests.runtime.harness import Killer

NET = NetConfig(hidden=(16,))


@pytest.fixture
def together(monkeypatch):
    """What is drawn on a GPU, on a CPU."""
    monkeypatch.setattr(Parts, "together", True)


def test_weights_are_of_one_version():
    """Weights that are handed over are of one version, and go into the same memory."""
    algorithm = algorithms.make(ppo.Config(normalise_observations=True), envs.describe("CartPole-v1"), NET, 4)
    learn, policy, handoff = algorithm.learn(3), algorithm.policy(), WeightHandoff()
    learn.statistics.observations.mean.fill_(0.5)
    device_weights = learn.device_weights(Progress(640, 2, 0.25))
    expected = {"params": learn.published(Progress())["params"].copy(), "mean": np.full(4, 0.5, np.float32)}
    with torch.no_grad():  # the next update
        learn.model.params.add_(1.0)
        learn.statistics.observations.mean.fill_(9.0)
    handoff.put(7, device_weights)
    addresses = [x.data_ptr() for x in (policy.model.params, policy.model.mean, *policy.model.net.parameters())]
    handoff.newest.load(policy)
    assert handoff.newest.version == 7 and handoff.newest.tree["progress"].tolist() == [640, 2, 0.25]
    np.testing.assert_array_equal(policy.model.params.numpy(), expected["params"])
    np.testing.assert_array_equal(policy.model.mean.numpy(), expected["mean"])
    assert addresses == [x.data_ptr() for x in (policy.model.params, policy.model.mean, *policy.model.net.parameters())]


def test_a_policy_copies_device_weights():
    algorithm = algorithms.make(vtrace.Config(), envs.describe("shoal/Catch-v0"), NET, 4)
    policy = algorithm.policy()
    device_weights = DeviceWeights({"params": algorithm.learn(1).state["params"], "norm": {}, "progress": np.zeros(3)})
    device_weights.load(policy)
    policy.model.params.zero_()
    assert bool(device_weights.tree["params"].any())


def test_handed_over_weights_change_nothing(tmp_path, monkeypatch):
    """A run in which weights are handed over is the same run."""

    def run(folder):
        watch = train(folder, vtrace.Config(unroll=4), "central_inference", "shoal/Catch-v0", "inline", actors=2, net=NET)
        return watch.hash, watch.version, watch.wires["weights"]["bytes_moved"]

    apart = run(tmp_path / "apart")
    monkeypatch.setattr(Parts, "together", True)
    joined = run(tmp_path / "joined")
    assert joined[:2] == apart[:2]
    assert joined[2] == 0 < apart[2]  # the server has read nothing from the wire


def test_server_and_learner_in_two_threads(together, tmp_path):
    """Killed as a whole; what comes back goes on from the version that was published last."""
    program, _ = draw(vtrace.Config(unroll=4), "central_inference", "shoal/Catch-v0", actors=2, net=NET)
    assert program.place_of("inference", 0) is program.place_of("learner", 0) is program.places[central_inference.TOGETHER]
    assert program.places[central_inference.TOGETHER].threads
    versions, killer = [], Killer((central_inference.TOGETHER,), times=2, progress="learner_steps", every=40)

    def act(control):
        versions.append(control.wires()["weights"]["version"])
        killer(control)

    watch = go(program, "local", tmp_path, Weights(killer.done, act, seconds=60))
    assert watch.reason == "until" and killer.kills == 2
    assert versions == sorted(versions) and versions[-1] > 80
    assert watch.wires["weights"]["bytes_moved"] <= 2 * watch.wires["weights"]["bytes"]  # at most one pull after each kill
