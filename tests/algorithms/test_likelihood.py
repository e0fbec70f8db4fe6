"""How likely policies say that actions are: what they do is counted, and densities are those of what they drew."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shoal import algorithms
from shoal.acting import ActionLikelihood, Progress, StepView
from shoal.algorithms import bc, dqn, iql, ppo, sac, td3
from shoal.nets import NetConfig
from tests.algorithms.toys import toy_spec

NET = NetConfig(hidden=(16,), activation="relu")
SEATS = 20_000


def acting(config, **toy):
    """A policy with random weights, and many seats that see the same."""
    algorithm = algorithms.make(config, toy_spec(**toy), NET, 1)
    policy = algorithm.policy()
    learn = algorithm.learn(3)
    with torch.no_grad():
        learn.state["params"] += 0.3 * torch.randn(learn.state["params"].shape, generator=torch.Generator().manual_seed(1))
    policy.load(learn.published(Progress()))
    space = algorithm.plan.spec.observation_space
    seen = np.tile(np.linspace(-1, 1, space.shape[0], dtype=np.float32), (SEATS, 1))
    mask = None
    if toy.get("masked"):
        mask = np.ones((SEATS, algorithm.plan.mask_size), bool)
        mask[:, 0] = False
    return algorithm, policy, StepView(seen, np.zeros(SEATS, bool), mask)


@pytest.mark.parametrize("explore", [None, 0.3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("config", [dqn.Config(), bc.Config(), ppo.Config()], ids=["dqn", "bc", "ppo"])
def test_discrete_likelihood(config, masked, explore):
    _, policy, view = acting(config, masked=masked)
    assert isinstance(policy, ActionLikelihood)
    amount = None if explore is None else np.full(SEATS, explore, np.float32)
    action = np.asarray(policy.act(view, policy.initial_state(SEATS), amount, torch.Generator().manual_seed(0))[0])
    likely = policy.log_prob(view, action, amount)
    for one in np.unique(action):
        share, said = (action == one).mean(), np.exp(likely[action == one])
        assert np.ptp(said) < 1e-6 and said[0] == pytest.approx(share, abs=4 * np.sqrt(0.25 / SEATS))


@pytest.mark.parametrize("config", [sac.Config(), iql.Config(), ppo.Config()], ids=["sac", "iql", "ppo"])
def test_densities_of_box_actions(config):
    """E[1 / density] over drawn actions inside a small box is its volume; greedily there is no density."""
    _, policy, view = acting(config, actions="box")
    amount = np.ones(SEATS, np.float32) if not isinstance(config, ppo.Config) else np.zeros(SEATS, np.float32)
    action = np.asarray(policy.act(view, policy.initial_state(SEATS), amount, torch.Generator().manual_seed(0))[0])
    flat = action.reshape(SEATS, -1)
    low, high = np.quantile(flat, 0.3, 0), np.quantile(flat, 0.7, 0)
    inside = ((flat > low) & (flat < high)).all(1)
    volume = (inside / np.exp(policy.log_prob(view, action, amount))).mean()
    assert volume == pytest.approx(np.prod(high - low), rel=0.1)
    assert policy.log_prob(view, action, None) is None


def test_what_is_not_known():
    """Noisy nets, and noise that remembers."""
    _, noisy, view = acting(dqn.Config(noisy_sigma=0.5))
    action = np.zeros(SEATS, np.int64)
    assert noisy.log_prob(view, action, np.zeros(SEATS, np.float32)) is None
    assert np.isin(noisy.log_prob(view, action, None), [0.0, -np.inf]).all()
    assert not isinstance(acting(td3.Config(), actions="box")[1], ActionLikelihood)


def test_uniform_actions_at_the_beginning():
    for config, toy in ((sac.Config(), {"actions": "box"}), (bc.Config(), {})):
        algorithm, policy, view = acting(config, **toy)
        explore = np.full(SEATS, -1.0, np.float32)
        action = np.asarray(policy.act(view, {}, explore, torch.Generator().manual_seed(0))[0])
        found = np.exp(policy.log_prob(view, action, explore))
        space = algorithm.plan.spec.action_space
        expected = 1 / np.prod(space.high.astype(float) - space.low) if toy else 1 / space.n
        np.testing.assert_allclose(found, expected, rtol=1e-5)
