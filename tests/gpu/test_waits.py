"""A learner on a GPU reads no number back while it makes an update: PyTorch is told to raise an error wherever it would wait."""

import contextlib
import warnings

import numpy as np
import pytest
import torch

from shoal import algorithms, envs
from shoal.acting import Progress
from shoal.algorithms import appo, ppo, vtrace
from shoal.device.placement import GpuConfig, Hardware
from shoal.nets import NetConfig
from shoal.roles.parts import EnvSource
from tests.algorithms.loop import Actor, join

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CONFIGS = {
    "vtrace": vtrace.Config(unroll=6, normalise_observations=True, normalise_returns=True),
    "appo": appo.Config(unroll=6, epochs=2, minibatches=2, normalise_observations=True, normalise_returns=True,
                        normalise_advantage=False),
    "ppo": ppo.Config(unroll=6, epochs=2, minibatches=2, normalise_observations=True, normalise_returns=True,
                      normalise_advantage=False),
}


@contextlib.contextmanager
def no_waiting():
    with warnings.catch_warnings():  # the mode is a prototype, and says so once
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", CONFIGS)
def test_an_update_waits_for_nothing(name):
    env = envs.make("CartPole-v1", 4, backend="compiled")
    algorithm = algorithms.make(CONFIGS[name], EnvSource("CartPole-v1", "compiled", {}).describe(), NetConfig(hidden=(16,)), 4)
    learn = algorithm.learn(0)
    learn.to(Hardware("cuda", GpuConfig(bf16=False)))
    learn.capture()
    actor = Actor(algorithm, env, 0)
    for update in range(8):
        batch = join(algorithm.record, [actor.unroll(), actor.unroll()])
        sums = learn.sums(batch)  # advantages' moments are for all learners: they are read, once for a batch
        with no_waiting() if update > 5 else contextlib.nullcontext():  # by then graphs are captured
            moments = learn.moments(batch)
            for minibatch in learn.minibatches(batch, sums, Progress(), np.random.default_rng(update)):
                gradient, metrics = learn.gradients(minibatch, "all")
                learn.apply(gradient, "all")
            learn.absorb(moments)
            metrics.send()
            snapshot = learn.snapshot(Progress())
        published = snapshot()
    for name, array in learn.published(Progress())["norm"].items():
        np.testing.assert_array_equal(published["norm"][name], array)
    assert learn.statistics.returns.scale.is_cuda and not learn.statistics.returns.seen.mean.is_cuda
