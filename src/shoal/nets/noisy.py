"""Noisy layers: weights with noise whose size is learned, so that a net explores by itself (Fortunato et al. 2018, 1706.10295).

    y = W x + b  +  out * (S (in * x) + s)          in, out: f(normal), one number for each input and for each output

This is the paper's factorised noise, W + S * (out in^T), written so that no noisy matrix is made: every row of a batch may have
noise of its own. Noise is an argument, not a part of the net: weights that are published or saved have none, and without it a layer
is a plain one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.nets.torsos import orthogonal

__all__ = ["NoisyHead", "NoisyLinear", "noise_factors"]


def noise_factors(normal: Tensor) -> Tensor:
    """f(x) = sign(x) sqrt|x| of normal numbers: what noisy layers multiply with."""
    return normal.sign() * normal.abs().sqrt()


class NoisyLinear(nn.Linear):
    """A dense layer. Means begin as those of plain layers do, deviations at sigma / sqrt(inputs)."""

    def __init__(self, inputs: int, outputs: int, sigma: float, gain: float = math.sqrt(2)) -> None:
        super().__init__(inputs, outputs)
        orthogonal(self, gain)
        begin = sigma / math.sqrt(inputs)
        self.weight_sigma = nn.Parameter(torch.full((outputs, inputs), begin))
        self.bias_sigma = nn.Parameter(torch.full((outputs,), begin))

    def forward(self, x: Tensor, factors: Tensor | None = None) -> Tensor:
        """`factors` [inputs + outputs] are for all rows, [N, inputs + outputs] for each its own; None computes with the means."""
        y = F.linear(x, self.weight, self.bias)
        if factors is None:
            return y
        enter, leave = factors.split([self.in_features, self.out_features], -1)
        noisy: Tensor = y + leave * F.linear(enter * x, self.weight_sigma, self.bias_sigma)
        return noisy


class NoisyHead(nn.Module):
    """A head of noisy layers: one from features to outputs, or two streams with `hidden` units each, of state and actions."""

    def __init__(self, features: int, state_outputs: int, outputs: int, sigma: float, gain: float, hidden: int = 0) -> None:
        super().__init__()
        self.value_hidden = self.hidden = self.value_out = None
        if hidden:
            self.value_hidden, self.hidden = NoisyLinear(features, hidden, sigma), NoisyLinear(features, hidden, sigma)
            self.value_out = NoisyLinear(hidden, state_outputs, sigma, gain)
        self.out = NoisyLinear(hidden or features, outputs, sigma, gain)
        layers = [layer for layer in (self.value_hidden, self.hidden, self.value_out, self.out) if layer is not None]
        self._sizes = [layer.in_features + layer.out_features for layer in layers]
        self.noise_size = sum(self._sizes)
        """How many normal random numbers its noise is made of."""

    def forward(self, x: Tensor, noise: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """`noise` [noise_size] is for all rows, [N, noise_size] for each its own; None computes with the means."""
        factors: Sequence[Tensor | None] = [None] * len(self._sizes)
        if noise is not None:
            factors = noise_factors(noise).split(self._sizes, -1)
        if self.value_hidden is None or self.hidden is None or self.value_out is None:
            return None, self.out(x, factors[0])
        value, advantage = torch.relu(self.value_hidden(x, factors[0])), torch.relu(self.hidden(x, factors[1]))
        return self.value_out(value, factors[2]), self.out(advantage, factors[3])
