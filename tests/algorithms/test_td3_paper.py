"""td3 against a transcription of its paper (algorithm 1 of 1802.09477) in plain torch: modules, autograd, torch.optim.Adam."""

from __future__ import annotations

import copy
from itertools import pairwise

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from shoal.acting import Progress
from shoal.algorithms import td3
from shoal.envs import EnvSpec
from shoal.learning import phases_due
from shoal.nets import NetConfig

LOW, HIGH = np.array([-2.0, 0.0], np.float32), np.array([2.0, 3.0], np.float32)
SPEC = EnvSpec("box", gym.spaces.Box(-5, 5, (3,), np.float32), gym.spaces.Box(LOW, HIGH), 100, 1, 1, False, "none", "", 0)
CONFIG = td3.Config(actor_lr=1e-3, critic_lr=1e-3, target_tau=0.01, target_noise=0.3)
B = 32


class Actor(nn.Module):
    """3 -> 16 -> 8 -> 2, in the units of the environment."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2), nn.Tanh())

    def forward(self, state):
        return self.layers(state)


def mlp(*sizes):
    layers = [part for i, o in pairwise(sizes) for part in (nn.Linear(i, o), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class Paper:
    """Algorithm 1. Actions lie in [-1, 1] here; its own are scaled before."""

    def __init__(self, learn):
        net = learn.model.net
        self.actor = Actor()
        self.critics = [mlp(5, 16, 8, 1) for _ in range(2)]
        with torch.no_grad():
            mine = [*net.actor.torso.mlp.layers, net.actor.out]
            for layer, source in zip((part for part in self.actor.layers if isinstance(part, nn.Linear)), mine, strict=True):
                layer.weight.copy_(source.weight)
                layer.bias.copy_(source.bias)
            for k, critic in enumerate(self.critics):
                stacked = [*net.critic.values.mlp.layers, net.critic.values.mlp.out]
                for layer, source in zip((part for part in critic if isinstance(part, nn.Linear)), stacked, strict=True):
                    layer.weight.copy_(source.weight[k])
                    layer.bias.copy_(source.bias[k, 0])
        self.actor_target, self.critic_targets = copy.deepcopy(self.actor), copy.deepcopy(self.critics)
        self.actor_adam = torch.optim.Adam(self.actor.parameters(), lr=CONFIG.actor_lr)
        self.critic_adam = torch.optim.Adam([p for critic in self.critics for p in critic.parameters()], lr=CONFIG.critic_lr)
        self.steps = 0

    def update(self, items, noise):
        self.steps += 1
        s, a, r, d, s2 = (torch.from_numpy(items[name]) for name in ("observation", "action", "reward", "discount",
                                                                      "next_observation"))
        a = 2 * (a - torch.from_numpy(LOW)) / torch.from_numpy(HIGH - LOW) - 1
        with torch.no_grad():
            epsilon = torch.clamp(CONFIG.target_noise * noise, -CONFIG.target_noise_limit, CONFIG.target_noise_limit)
            a2 = torch.clamp(self.actor_target(s2) + epsilon, -1, 1)
            q1, q2 = (critic(torch.cat([s2, a2], 1))[:, 0] for critic in self.critic_targets)
            y = r + d * torch.minimum(q1, q2)
        loss = sum(torch.mean((y - critic(torch.cat([s, a], 1))[:, 0]) ** 2) for critic in self.critics)
        self.critic_adam.zero_grad()
        loss.backward()
        self.critic_adam.step()
        if self.steps % CONFIG.policy_delay == 0:
            objective = -self.critics[0](torch.cat([s, self.actor(s)], 1)).mean()
            self.actor_adam.zero_grad()
            objective.backward()
            self.actor_adam.step()
            with torch.no_grad():
                for target, net in [(self.actor_target, self.actor), *zip(self.critic_targets, self.critics, strict=True)]:
                    for old, new in zip(target.parameters(), net.parameters(), strict=True):
                        old.copy_(CONFIG.target_tau * new + (1 - CONFIG.target_tau) * old)

    def flat(self, actor, critics):
        """In the order of shoal's vector: of the critics' layers both, side by side."""
        layers = zip(*(critic.parameters() for critic in critics), strict=True)
        return torch.cat([*(p.detach().flatten() for p in actor.parameters()),
                          *(torch.stack(pair).detach().flatten() for pair in layers)])


def batch(rng):
    seen, following = rng.normal(size=(2, B, 3)).astype(np.float32)
    action, reward = LOW + (HIGH - LOW) * rng.random((B, 2)), rng.normal(size=B)
    items = {"observation": seen, "next_observation": following, "action": action.astype(np.float32),
             "reward": reward.astype(np.float32),
             "discount": np.where(rng.random(B) < 0.2, 0, 0.99).astype(np.float32), "weights_version": np.zeros(B, np.int32)}
    return {**items, "probability": np.full(B, 1e-3), "table_size": np.array([1000])}


@pytest.mark.parametrize("changed", [None, "target_noise", "target_tau", "policy_delay"])
def test_twenty_updates_of_the_paper(changed):
    """And are not, where one of its parts is changed."""
    more = {"target_noise": 0.29, "target_tau": 0.011, "policy_delay": 1}
    config = CONFIG if changed is None else td3.Config(**{**CONFIG.__dict__, changed: more[changed]})
    learn = td3.TD3(config, SPEC, NetConfig(hidden=(16, 8), activation="relu"), 1).learn(3)
    paper, data = Paper(learn), np.random.default_rng(1)
    mine, its = np.random.default_rng(2), np.random.default_rng(2)
    begun = learn.state["params"].detach().clone()
    np.testing.assert_array_equal(paper.flat(paper.actor, paper.critics), begun)
    for step in range(20):
        items, progress = batch(data), Progress(learner_steps=step)
        (minibatch,) = learn.minibatches(items, learn.sums(items), progress, mine)
        for phase in phases_due(learn, progress):
            assert learn.apply(learn.gradients(minibatch, phase)[0], phase)
        paper.update(items, torch.from_numpy(its.standard_normal((B, 2), np.float32)))
    found, expected = learn.state["params"].detach(), paper.flat(paper.actor, paper.critics)
    targets, followed = learn.state["target"], paper.flat(paper.actor_target, paper.critic_targets)
    assert float((found - begun).abs().max()) > 5e-3
    furthest = max(float((found - expected).abs().max()), float((targets - followed).abs().max()))
    assert furthest <= 1e-6 if changed is None else furthest > 1e-5
