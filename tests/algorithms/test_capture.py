"""An update over fixed tensors is the update itself, whatever changes from batch to batch. (tests/gpu has the graphs.)"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from shoal import algorithms, envs
from shoal.acting import Progress
from shoal.algorithms import a2c, appo, ppo, vtrace
from shoal.device.cuda_graph import CapturedFunction
from shoal.device.placement import Hardware
from shoal.nets import NetConfig
from tests.algorithms.loop import Actor, join

ANNEALED = {"unroll": 6, "lr_final": 1e-5, "entropy_final": 0.0}
CONFIGS = {"a2c": a2c.Config(**ANNEALED), "vtrace": vtrace.Config(**ANNEALED, optimiser="rmsprop"),
           "ppo": ppo.Config(**ANNEALED, epochs=2, minibatches=2, clip_final=0.01),
           "appo": appo.Config(**ANNEALED, epochs=2, minibatches=3, clip_final=0.01)}
LSTM = NetConfig(hidden=(16,), recurrent="lstm", lstm_size=16, prev_action_reward=True)


@pytest.mark.parametrize("net", [NetConfig(hidden=(16,)), LSTM], ids=["mlp", "lstm"])
@pytest.mark.parametrize("name", CONFIGS)
def test_captured_updates_are_the_same(name, net):
    """A captured learner makes the same updates."""
    env = envs.make("CartPole-v1", 4, backend="compiled", max_episode_steps=20)  # some batches have truncated episodes
    algorithm = algorithms.make(CONFIGS[name], envs.describe("CartPole-v1", backend="compiled", max_episode_steps=20), net, 4)
    plain, captured = algorithm.learn(0), algorithm.learn(0)
    for learn in (plain, captured):
        learn.to(Hardware())
    captured.capture()
    actor, regular = Actor(algorithm, env, 0), []
    for update in range(8):
        batch = join(algorithm.record, [actor.unroll() for _ in range(1 + update % 2)])
        regular.append((batch["final_index"] < 0).all())
        if update == 5:
            batch["valid"][0] = False
        seen = []
        for learn in (plain, captured):
            sums = learn.sums(batch)
            for minibatch in learn.minibatches(batch, sums, Progress(fraction=update / 8), np.random.default_rng(update)):
                gradient, metrics = learn.gradients(minibatch, "all")
                assert learn.apply(gradient, "all")
            seen.append(dict(metrics.items()))
        assert seen[0] == pytest.approx(seen[1], rel=1e-4, abs=1e-6, nan_ok=True)
        params = [learn.published(Progress())["params"] for learn in (plain, captured)]
        np.testing.assert_allclose(*params, atol=1e-6)
    assert any(regular) and not all(regular)


@dataclass
class Given:
    x: torch.Tensor
    parts: dict[str, torch.Tensor]
    weight: float
    none: None = None


def test_a_frame_for_each_shape():
    """Numbers and tensors may change and shapes get a frame each."""
    calls = []

    def work(given: Given, sign: int) -> torch.Tensor:
        calls.append(given)
        return sign * given.weight * (given.x.sum() + given.parts["y"].sum())

    captured = CapturedFunction(work)
    for size in (2, 3, 2):
        for weight in (1.0, 0.5):
            x, y = torch.rand(size), torch.rand(2)
            assert captured(Given(x, {"y": y}, weight), -1) == pytest.approx(-weight * float(x.sum() + y.sum()), rel=1e-6)
    assert len({id(given) for given in calls}) == 2
    assert float(captured(Given(torch.ones(2), {"y": torch.ones(2)}, 1.0), 1)) == 4.0


def test_too_many_shapes():
    """Too many shapes are computed without a frame."""
    captured = CapturedFunction(lambda x: x.sum())
    assert [float(captured(torch.ones(size))) for size in range(1, 12)] == list(range(1, 12))
    assert len(captured._shapes) == 4
