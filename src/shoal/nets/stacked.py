"""Several nets of the same shape, computed together: TD3 and SAC have two critics, and two small products take as long as one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor, nn

from shoal.nets.cores import autocasting
from shoal.nets.encoder import Observation, encoder
from shoal.nets.net_config import NetConfig
from shoal.nets.torsos import ACTIVATIONS, set_orthogonal

__all__ = ["StackedLinear", "StackedMLP", "StackedValues"]


class StackedLinear(nn.Module):
    """The weights of linear layers [count, N, inputs] -> [count, N, outputs]."""

    def __init__(self, count: int, inputs: int, outputs: int, gain: float = math.sqrt(2)) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(count, 1, outputs))
        for weight in self.weight:
            set_orthogonal(weight, gain)


class StackedMLP(nn.Module):
    """[count, N, inputs] -> [count, N, outputs]: dense layers with activations, then a linear one."""

    def __init__(self, count: int, inputs: int, sizes: Sequence[int], outputs: int, activation: str) -> None:
        super().__init__()
        widths = [inputs, *sizes]
        self.layers = nn.ModuleList(StackedLinear(count, i, o) for i, o in pairwise(widths))
        self.out = StackedLinear(count, widths[-1], outputs, 1.0)
        self._activation = ACTIVATIONS[activation]
        *self._hidden, self._last = [(layer.weight, layer.bias) for layer in (*self.layers, self.out)]  # faster than modules

    def forward(self, x: Tensor) -> Tensor:
        for weight, bias in self._hidden:
            x = self._activation(torch.baddbmm(bias, x, weight.mT))
        weight, bias = self._last
        return torch.baddbmm(bias, x, weight.mT)


class StackedValues(nn.Module):
    """observation [N, ...], and `inputs` more numbers [N, inputs] -> values [count, N, outputs]. The nets share no weights.

    The numbers join before the dense layers (Fujimoto et al. 2018). Values are float32 under autocast too, as those of QNetwork.
    """

    def __init__(self, observation_space: gym.Space[Any], inputs: int, outputs: int, config: NetConfig, count: int) -> None:
        super().__init__()
        first = encoder(observation_space, replace(config, hidden=()))  # vectors as they are, images through CNNs
        learned = any(True for _ in first.parameters())
        more = (encoder(observation_space, replace(config, hidden=())) for _ in range(count - 1 if learned else 0))
        self.torsos = nn.ModuleList([first, *more])
        self.mlp = StackedMLP(count, first.features + inputs, config.hidden, outputs, config.activation)
        self.count = count

    def forward(self, observation: Observation, inputs: Tensor | None = None) -> Tensor:
        if len(self.torsos) == 1:
            x = self.torsos[0](observation)
            x = (x if inputs is None else torch.cat([x, inputs], 1)).expand(self.count, -1, -1)
        else:
            seen = [torso(observation) for torso in self.torsos]
            x = torch.stack(seen if inputs is None else [torch.cat([one, inputs], 1) for one in seen])
        if not autocasting():
            return self._values(x)
        with torch.autocast(x.device.type, enabled=False):
            return self._values(x.float())

    def _values(self, x: Tensor) -> Tensor:
        found: Tensor = self.mlp(x)
        return found
