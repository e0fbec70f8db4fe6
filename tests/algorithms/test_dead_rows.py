"""An episode's end with the reset in the same step, or a step later with a dead row between: the same gradient."""

from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest

from shoal import algorithms
from shoal.acting import Progress
from shoal.algorithms import a2c, ppo, vtrace
from shoal.envs import EnvSpec, Step
from shoal.nets import NetConfig

OBSERVED = np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32)  # x_0 .. x_3 | x_4 .. x_7: two episodes
ACTIONS, REWARDS = [0, 1, 1, 0, 1, 0], [1.0, 2.0, -3.0, 0.5, 4.0, 1.0]
LOG_PROBS = [-0.9, -0.4, -0.7, -0.8, -0.6, -0.3]
# Episode one: x_0 a_0 x_1 a_1 x_2 a_2 x_3 (its end). Episode two: x_4 a_3 x_5 a_4 x_6 a_5 x_7.


def step(x, reward=0.0, first=False, last=False, truncated=False, valid=True, final=None):
    flag = np.array([last])
    discount = np.array([0.0 if last and not truncated else 1.0], np.float32)
    rows = np.flatnonzero([final is not None])
    return Step(OBSERVED[[x]], np.array([reward], np.float32), discount, np.array([first]), flag,
                np.array([truncated]), np.array([valid]), rows, None if final is None else OBSERVED[[final]])  # fmt: skip


def same_step(truncated):
    final = 3 if truncated else None
    ended = step(4, REWARDS[2], first=True, last=True, truncated=truncated, final=final)
    later = [step(5, REWARDS[3]), step(6, REWARDS[4]), step(7, REWARDS[5])]
    return step(0, first=True), [0, 1, 2, 3, 4, 5], [step(1, REWARDS[0]), step(2, REWARDS[1]), ended, *later]


def next_step(truncated):
    final = 3 if truncated else None
    ended = step(3, REWARDS[2], last=True, truncated=truncated, final=final)
    dead = step(4, first=True, valid=False)
    later = [step(5, REWARDS[3]), step(6, REWARDS[4]), step(7, REWARDS[5])]
    return step(0, first=True), [0, 1, 2, None, 3, 4, 5], [step(1, REWARDS[0]), step(2, REWARDS[1]), ended, dead, *later]


def learned(config, net, form):
    start, choices, steps = form
    box = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    spec = EnvSpec("scripted", box, gym.spaces.Discrete(2), None, 1, 1, False, "none", "", 2)
    algorithm = algorithms.make(replace(config, unroll=len(steps)), spec, net, 1)
    learn, recorder, data = algorithm.learn(5), algorithm.record.recorder(), algorithm.record.layout.empty()
    recorder.begin(data, start, algorithm.policy().initial_state(1), 0)
    for t, (choice, now) in enumerate(zip(choices, steps, strict=True)):
        action, log_prob = (1, -9.0) if choice is None else (ACTIONS[choice], LOG_PROBS[choice])
        recorder.write(t, np.array([action]), {"log_prob": np.array([log_prob], np.float32)}, now, 0)
    minibatch = next(learn.minibatches(data, learn.sums(data), Progress(), np.random.default_rng(0)))
    gradient, metrics = learn.gradients(minibatch, "all")
    return gradient.copy(), metrics, learn.moments(data)


@pytest.mark.parametrize("truncated", [False, True], ids=["terminated", "truncated"])
@pytest.mark.parametrize("net", [NetConfig(), NetConfig(recurrent="lstm", lstm_size=8)], ids=["mlp", "lstm"])
@pytest.mark.parametrize(
    "config",
    [
        vtrace.Config(normalise_observations=True, normalise_returns=True),
        ppo.Config(minibatches=1, normalise_observations=True, normalise_returns=True),
        a2c.Config(normalise_advantage=True, normalise_observations=True, normalise_returns=True),
    ],
    ids=["vtrace", "ppo", "a2c"],
)
def test_a_dead_row_changes_nothing(config, net, truncated):
    gradient, metrics, moments = learned(config, net, same_step(truncated))
    other, other_metrics, other_moments = learned(config, net, next_step(truncated))
    assert np.abs(gradient).max() > 1e-3
    np.testing.assert_allclose(other, gradient, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(other_moments, moments, rtol=1e-9, atol=1e-9)
    for name in ("loss", "entropy", "mean_rho", "explained_variance"):
        assert other_metrics[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-6), name
