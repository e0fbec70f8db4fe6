"""A torso of the user's own: what works, what is refused and in which words."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from shoal.errors import ConfigError
from shoal.nets import NetConfig, build, flat_grad, flatten
from shoal.nets.user_module import zeros_like_space
from tests.nets.intact import intact

VECTOR = spaces.Box(-1, 1, (4,), np.float32)


class Own(nn.Module):
    def __init__(self, observation_space):
        super().__init__()
        self.dense = nn.Linear(observation_space.shape[0], 5)

    def forward(self, observation):
        return torch.relu(self.dense(observation))


class WrongShape(Own):
    def forward(self, observation):
        return self.dense(observation).sum()


class WrongFeatures(Own):
    features = 9


class Fails(Own):
    def forward(self, observation):
        raise RuntimeError("no such layer")


class Normalised(Own):
    def __init__(self, observation_space):
        super().__init__(observation_space)
        self.norm = nn.BatchNorm1d(5, track_running_stats=False)


class Dropping(Own):
    def __init__(self, observation_space):
        super().__init__(observation_space)
        self.drop = nn.Dropout(0.1)


class Attending(Own):
    def __init__(self, observation_space):
        super().__init__(observation_space)
        self.attention = nn.MultiheadAttention(4, 1, dropout=0.1)


class Buffered(Own):
    def __init__(self, observation_space):
        super().__init__(observation_space)
        self.register_buffer("scale", torch.ones(5))


class FunctionalDropout(Own):
    def forward(self, observation):
        return nn.functional.dropout(super().forward(observation), 0.5, self.training)


class Noisy(Own):
    def __init__(self, observation_space):
        super().__init__(observation_space)
        self.relu = nn.RReLU()

    def forward(self, observation):
        return self.relu(self.dense(observation))


class Counting(Own):
    calls = 0

    def forward(self, observation):
        self.calls += 1
        return super().forward(observation) * self.calls


class Acting(Own):
    def forward(self, observation):
        return super().forward(observation) * (2.0 if self.training else 1.0)


class BatchMean(Own):
    def forward(self, observation):
        features = super().forward(observation)
        return features - features.mean(0)


class BatchNormalised(Own):
    def forward(self, observation):
        return nn.functional.batch_norm(super().forward(observation), None, None, training=True)


class Layered(Own):
    """What has no statistics and no randomness is welcome: so is a constant that is a parameter."""

    def __init__(self, observation_space):
        super().__init__(observation_space)
        self.layers = nn.ModuleList([nn.LayerNorm(5), nn.GroupNorm(1, 5)])
        self.attention = nn.TransformerEncoderLayer(5, 1, 8, dropout=0.0, batch_first=True)
        self.scale = nn.Parameter(torch.full((5,), 2.0), requires_grad=False)

    def forward(self, observation):
        x = super().forward(observation) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.attention(x[:, None])[:, 0]


@pytest.mark.parametrize("module", [Own, f"{__name__}:Own"], ids=["class", "path"])
def test_own_module(module):
    net = build(
        VECTOR, spaces.Discrete(2), NetConfig(module=module, recurrent="lstm", lstm_size=4, prev_action_reward=True)
    )
    assert net.trunk.torso.features == 5
    T, B = 2, 3
    args = torch.zeros(T, B, dtype=torch.long), torch.zeros(T, B)
    out = net.unroll(torch.randn(T, B, 4), torch.zeros(T, B, dtype=torch.bool), net.initial_state(B), *args)
    assert out.params.shape == (T, B, 2)


@pytest.mark.parametrize(
    "module, words",
    [
        ("nonsense", "package.module:Class"),
        ("no.such.package:Net", "cannot import"),
        ("torch.nn:NoSuchNet", "has no class"),
        ("math:pi", "not a class derived"),
        (WrongShape, r"must return floats \[2, F\]"),
        (WrongFeatures, "features = 9"),
        (Fails, "no such layer"),
        (Normalised, r"BatchNorm1d layer \(norm\).*LayerNorm"),
        (Dropping, r"Dropout layer \(drop\).*remove it"),
        (Attending, "MultiheadAttention layer .* with dropout"),
        (Buffered, "buffer 'scale'.*nn.Parameter"),
        (FunctionalDropout, "other features when it is called again"),
        (Noisy, "other features when it is called again"),
        (Counting, "other features when it is called again"),
        (Acting, r"other features after \.eval\(\)"),
        (BatchMean, "in a batch of two than alone"),
        (BatchNormalised, "failed on a batch of one observation"),
    ],
)
def test_own_module_that_cannot_work(module, words):
    with pytest.raises(ConfigError, match=words):
        build(VECTOR, spaces.Discrete(2), NetConfig(module=module))


def test_module_with_layer_norm_and_constant():
    net = build(VECTOR, spaces.Discrete(2), NetConfig(module=Layered), seed=0)
    flat, grad = flatten(net), flat_grad(net)
    net.unroll(torch.randn(2, 3, 4), None, {}).value.sum().backward()
    assert intact(net, flat, grad)
    assert bool(grad.any()) and not bool(net.trunk.torso.module.scale.grad.any())


def test_zeros_like_space():
    nested = spaces.Dict({"camera": spaces.Box(0, 255, (3, 40, 40), np.uint8), "body": spaces.Tuple([VECTOR])})
    zeros = zeros_like_space(nested, 2)
    assert zeros["camera"].dtype == torch.uint8 and zeros["body"]["0"].shape == (2, 4)
    assert zeros_like_space(spaces.Discrete(3), 4).shape == (4,)
