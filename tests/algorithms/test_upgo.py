"""AlphaStar's learner: V-trace, a second policy gradient by upgoing returns, TD(lambda) value targets, KL to the initial policy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shoal import algorithms, envs
from shoal.acting import Progress
from shoal.algorithms import vtrace
from shoal.nets import NetConfig
from shoal.ops import losses, returns
from tests.algorithms.loop import Actor, join, update

GAMMA = 0.9


def setup(**options):
    config = vtrace.Config(unroll=6, gamma=GAMMA, lr=1e-2, **options)
    algorithm = algorithms.make(config, envs.describe("shoal/Catch-v0"), NetConfig(), 4)
    actor = Actor(algorithm, envs.make("shoal/Catch-v0", 4), seed=3)
    learn = algorithm.learn(1)
    actor.policy.load(learn.published(Progress()))
    return learn, join(algorithm.record, [actor.unroll() for _ in range(2)])


def gradients(learn, batch):
    (minibatch,) = learn.minibatches(batch, learn.sums(batch), Progress(), np.random.default_rng(0))
    return learn.gradients(minibatch, "all")


def test_losses():
    learn, batch = setup(upgo=0.7, td_lambda=0.8)
    for _ in range(3):
        update(learn, batch)  # so that pi is no longer mu
    tensors, model = learn.batch(batch), learn.model
    with torch.no_grad():
        output = model.unroll(tensors)
        log_prob, _ = model.judge(output, tensors)
        v_tm1, v_t, discount = output.value[:-1], model.next_values(tensors, output), GAMMA * tensors.discount
        log_rho = log_prob - tensors.log_prob
        assert log_rho.abs().max() > 1e-3
        first = returns.vtrace(log_rho, tensors.reward, discount, v_tm1, v_t, keep_t=tensors.keep).pg_advantage
        upgoing = returns.upgo_returns(tensors.reward, discount, v_tm1, v_t, tensors.keep)
        second = log_rho.exp().clamp(max=1.0) * (upgoing - v_tm1)
        target = returns.lambda_returns(tensors.reward, discount, v_t, 0.8, tensors.keep)
        policy = losses.masked_mean(losses.policy_gradient_loss(log_prob, first + 0.7 * second), tensors.valid)
        value = losses.masked_mean(losses.value_loss(v_tm1, target), tensors.valid)
    metrics = gradients(learn, batch)[1]
    assert metrics["policy_loss"] == pytest.approx(float(policy), rel=1e-4)
    assert metrics["value_loss"] == pytest.approx(float(value), rel=1e-4)


def test_without_them_it_is_v_trace():
    plain, batch = setup()
    same, _ = setup(upgo=0.0, td_lambda=None)
    other, _ = setup(upgo=1.0)
    assert torch.equal(torch.as_tensor(gradients(plain, batch)[0]), torch.as_tensor(gradients(same, batch)[0]))
    assert not torch.equal(torch.as_tensor(gradients(plain, batch)[0]), torch.as_tensor(gradients(other, batch)[0]))


def test_kl_to_the_initial_policy():
    """Its gradient is that of the formula, 0 at the beginning; a restarted learner knows it too."""
    learn, batch = setup(initial_kl=0.5)
    plain, _ = setup()
    assert np.allclose(gradients(learn, batch)[0], gradients(plain, batch)[0], atol=1e-7)
    tensors = learn.batch(batch)
    with torch.no_grad():
        before = torch.log_softmax(learn.model.unroll(tensors).params[:-1], -1)
    for _ in range(5):
        update(learn, batch)
    again, _ = setup(initial_kl=0.5)
    for one in (plain, again):
        one.state["params"].copy_(learn.state["params"])
    now = torch.log_softmax(learn.model.unroll(tensors).params[:-1], -1)
    kl = (before.exp() * (before - now)).sum(-1).mean()
    assert kl > 1e-3
    learn.model.grad.zero_()
    (0.5 * kl).backward()
    want = gradients(plain, batch)[0] + learn.model.grad.numpy()
    learn.model.grad.zero_()
    for one in (learn, again):
        assert np.allclose(gradients(one, batch)[0], want, atol=1e-6)
