"""Heads whose actions are squashed: log-probabilities come from the latent action, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from shoal.nets.heads import Categorical, Gaussian, LatentActionHead, TanhGaussian

BOX = spaces.Box(np.array([-2.0, 0.0, 1.0], np.float32), np.array([2.0, 10.0, 3.0], np.float32))


def seeded():
    return torch.Generator().manual_seed(3)


def test_which_have_a_latent():
    assert isinstance(TanhGaussian(BOX), LatentActionHead)
    assert not isinstance(Gaussian((3,)), LatentActionHead) and not isinstance(Categorical(3), LatentActionHead)


@pytest.mark.parametrize("mean", [0.0, 4.0, 9.0, 50.0])
def test_actor_and_learner_agree(mean):
    """Same weights: a ratio of exactly 1, also where tanh is saturated. From the action alone it is far from 1 there."""
    head = TanhGaussian(BOX, state_std=True)
    params = torch.cat([torch.full((500, 3), mean), torch.zeros(500, 3)], -1)
    latent, log_prob = head.sample_latent(params, seeded())
    action, again = head.sample(params, seeded())
    assert latent.shape == (500, head.latent_size) and torch.equal(action, head.squash(latent)) and torch.equal(log_prob, again)
    assert torch.equal(head.latent_log_prob(params, latent), log_prob)
    assert bool((action >= torch.tensor(BOX.low)).all() and (action <= torch.tensor(BOX.high)).all())
    error = (head.log_prob(params, action) - log_prob).abs().max()
    assert error < 1e-3 if mean == 0.0 else mean < 9 or error > 1


def test_mode():
    head, params = TanhGaussian(BOX, state_std=True), torch.randn(5, 6, generator=seeded())
    assert torch.equal(head.mode(params), head.squash(head.latent_mode(params)))
    plane = TanhGaussian(spaces.Box(-1, 1, (2, 2)), state_std=True)
    assert plane.mode(torch.zeros(7, 8)).shape == (7, 2, 2) and plane.latent_mode(torch.zeros(7, 8)).shape == (7, 4)
