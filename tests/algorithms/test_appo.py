"""APPO: Sample Factory's clip range by its golden numbers, V-trace targets, and masked steps that change nothing."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from shoal import algorithms
from shoal.acting import Progress
from shoal.algorithms import appo, ppo
from shoal.algorithms.actor_critic.advantages import Advantages
from shoal.algorithms.actor_critic.proximal import ProximalMinibatch
from shoal.errors import ConfigError
from shoal.nets import NetConfig
from shoal.ops import returns
from tests.algorithms.loop import Actor, join, update
from tests.algorithms.toys import toy_env, toy_spec

LSTM = NetConfig(recurrent="lstm", lstm_size=16)


def setup(config, net=None, seats=4, actors=2):
    algorithm = algorithms.make(config, toy_spec(), net or NetConfig(), seats)
    learn = algorithm.learn(3)
    people = [Actor(algorithm, toy_env(seats), 3 + i) for i in range(actors)]
    for actor in people:
        actor.policy.load(learn.published(Progress()))
    return algorithm, learn, join(algorithm.record, [actor.unroll() for actor in people])


def whole(learn, batch):
    return next(learn.minibatches(batch, learn.sums(batch), Progress(), np.random.default_rng(0)))


# specs/policy.md section 14: ratio, advantage -> objective; None where the gradient is blocked
SF = [(0.7, 2, 1.4, True), (0.7, -2, -1.8182, False), (0.9, -2, -1.8182, False), (1.1, 2, 2.2, True), (1.3, 2, 2.2, False),
      (1.3, -2, -2.6, True)]
PPO = [(0.7, 2, 1.4, True), (0.7, -2, -1.6, False), (0.9, -2, -1.8, True), (1.1, 2, 2.2, True), (1.3, 2, 2.4, False),
       (1.3, -2, -2.6, True)]


@pytest.mark.parametrize("config, rows", [(appo.Config(unroll=1, clip=0.1, value_weight=0.0, entropy=0.0), SF),
                                          (ppo.Config(unroll=1, clip=0.2, value_weight=0.0, entropy=0.0), PPO)], ids=["sf", "ppo"])
def test_objective_has_the_golden_numbers(config, rows):
    """One step whose ratio and advantage are given; the whole path from the learner down."""
    _, learn, batch = setup(config, seats=1, actors=1)
    given = whole(learn, batch)
    with torch.no_grad():
        log_prob, _ = learn.model.judge(learn.model.unroll(given.batch), given.batch)
    for ratio, advantage, objective, moves in rows:
        # a hair inside the bound where the table's ratio is the bound itself
        behaviour = log_prob - math.log(ratio) + (1e-6 if ratio == 1.1 else 0)
        one = replace(given.batch, log_prob=behaviour)
        advantages = Advantages(torch.full((1, 1), float(advantage)), torch.zeros(1, 1), torch.zeros(1, 1))
        gradient, metrics = learn.gradients(ProximalMinibatch(one, advantages, 1.0, config.clip, 0.0), "all")
        assert -metrics["policy_loss"] == pytest.approx(objective, abs=1e-4)
        assert bool(np.abs(gradient).max() > 1e-6) == moves


def test_the_ratio_is_held():
    _, learn, batch = setup(appo.Config(unroll=4))
    batch["extras"]["log_prob"] -= 50.0  # pi / mu is astronomic
    metrics = learn.gradients(whole(learn, batch), "all")[1]
    assert metrics["mean_rho"] == pytest.approx(20.0, rel=1e-5)


@pytest.mark.parametrize("net", [NetConfig(), LSTM], ids=["mlp", "lstm"])
def test_targets_are_v_trace(net):
    """Targets are V-trace with the newest values and the ratio to the policy that acted."""
    config = appo.Config(unroll=6, lr=1e-2, normalise_advantage=False)
    _, learn, batch = setup(config, net)
    for _ in range(3):
        update(learn, batch)  # so that pi is no longer mu
    tensors = learn.batch(batch)
    model = learn.model
    with torch.no_grad():
        output = model.unroll(tensors)
        log_prob, _ = model.judge(output, tensors)
    assert (log_prob - tensors.log_prob).abs().max() > 1e-3
    expected = returns.vtrace(log_prob - tensors.log_prob, tensors.reward, 0.99 * tensors.discount, output.value[:-1],
                              model.next_values(tensors, output), keep_t=tensors.keep)
    got = learn.objective.advantages(tensors)
    torch.testing.assert_close(got.advantage, expected.pg_advantage)
    torch.testing.assert_close(got.target, expected.vs)


def test_ppo_with_another_clip_range():
    """Without V-trace on fresh data it is PPO with another clip range."""
    same = {"unroll": 6, "clip": 0.1, "epochs": 1, "minibatches": 1, "lr": 1e-2, "value_clip": 1.0, "grad_norm": 0.5,
            "optimiser_epsilon": 1e-5, "entropy": 0.01}
    _, one, batch = setup(appo.Config(vtrace=False, **same))
    _, two, _ = setup(ppo.Config(**same))
    update(one, batch)
    update(two, batch)
    torch.testing.assert_close(one.state["params"], two.state["params"], rtol=0, atol=1e-7)


@pytest.mark.parametrize("vtrace", [False, True])
@pytest.mark.parametrize("net", [NetConfig(), LSTM], ids=["mlp", "lstm"])
def test_masked_columns_change_no_gradient(vtrace, net):
    config = appo.Config(unroll=6, lr=1e-2, vtrace=vtrace)
    algorithm, learn, batch = setup(config, net, actors=1)
    alone, _ = learn.gradients(whole(learn, batch), "all")
    alone = alone.copy()
    _, _, noise = setup(config, net, actors=1)
    noise["reward"] *= 100
    noise["extras"]["log_prob"] -= 7
    noise["valid"][:] = False
    both = algorithm.record.layout.joined(2).empty()
    for position, part in enumerate((batch, noise)):
        algorithm.record.layout.gather(both, position, part)
    masked, _ = learn.gradients(whole(learn, both), "all")
    np.testing.assert_allclose(masked, alone, rtol=0, atol=1e-6)
    both["valid"][:] = True
    unmasked, _ = learn.gradients(whole(learn, both), "all")
    assert np.abs(unmasked - alone).max() > 1e-3  # the noise is loud enough to be heard


@pytest.mark.parametrize("net", [NetConfig(), LSTM], ids=["mlp", "lstm"])
def test_fewer_columns_than_minibatches(net):
    _, learn, batch = setup(appo.Config(unroll=4, minibatches=4, epochs=2), net)
    batch["valid"][:] = False
    batch["valid"][:2, 0] = True
    rows = update(learn, batch)
    assert len(rows) == 8 and all(np.isfinite(row["grad_norm"]) for row in rows)


def test_clamp_inside_clip_range():
    with pytest.raises(ConfigError, match="ratio_least"):
        appo.Config(ratio_least=0.95).validate()
