"""Many copies of one policy net, each with parameters of its own, computed in one pass: a row of observations for each copy.

    copies = BatchedPolicy(net, rows=64)
    copies.params[r] = theta + sigma * noise       # the flat parameters of row r, in the order of `flat.py`
    outputs = copies(observation)                  # [R, ...] -> [R, outputs]

Dense nets are a few batched matrix products. Anything else (convolutions, a module of the user's) goes through torch.func.vmap,
which takes 10 to 50 times as long for a small net.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from shoal.nets.continuous import PolicyNetwork
from shoal.nets.encoder import Encoder, Observation
from shoal.nets.flat import parameter_views
from shoal.nets.virtual_norm import VirtualNorm, statistics_of
from shoal.slots import map_tree

__all__ = ["BatchedPolicy"]


class BatchedPolicy:
    """R copies of a PolicyNetwork. `params` [R, P] is theirs: write it in place. With virtual batch normalisation (`norms`) call
    `refer_to` afterwards."""

    def __init__(self, net: PolicyNetwork, rows: int, norms: Mapping[str, VirtualNorm] | None = None) -> None:
        self.net, self.norms = net, norms or {}
        self.params = torch.zeros(rows, sum(p.numel() for p in net.parameters()))
        self._views = parameter_views(net, self.params)
        self._statistics = {f"{name}.{what}": torch.zeros(rows, *buffer.shape)
                            for name, norm in self.norms.items() for what, buffer in norm.named_buffers()}
        self._pass = _dense(net, self._views) or vmap(self._one, randomness="error")

    def __call__(self, observation: Observation) -> Tensor:
        if isinstance(self._pass, DensePass):
            return self._pass(observation)
        outputs: Tensor = self._pass(self._views | self._statistics, observation)
        return outputs

    def refer_to(self, reference: Observation, owners: Sequence[int]) -> None:
        """Measure the statistics of a batch of observations in every copy. Neighbours with the same owner are the same copy."""
        for row, owner in enumerate(owners):
            if row and owner == owners[row - 1]:
                found = {name: rows[row - 1] for name, rows in self._statistics.items()}
            else:
                params = {name: views[row] for name, views in self._views.items()}
                found = statistics_of(self.norms, partial(functional_call, self.net, params, (reference,)))
            for name, rows in self._statistics.items():
                rows[row] = found[name]

    def _one(self, params: dict[str, Tensor], observation: Observation) -> Tensor:
        outputs: Tensor = functional_call(self.net, params, (map_tree(lambda x: x.unsqueeze(0), observation),))
        return outputs.squeeze(0)


class DensePass:
    """The pass of nets that are nothing but dense layers."""

    def __init__(self, encoder: Encoder, layers: list[tuple[Tensor, Tensor]], activation: Callable[[Tensor], Tensor]) -> None:
        self._encoder, self._activation = encoder, activation
        *self._hidden, self._last = [(bias.unsqueeze(1), weight.mT) for weight, bias in layers]

    def __call__(self, observation: Observation) -> Tensor:
        x = self._encoder.vector(observation).unsqueeze(1)
        for bias, weight in self._hidden:
            x = self._activation(torch.baddbmm(bias, x, weight))
        bias, weight = self._last
        return torch.baddbmm(bias, x, weight).squeeze(1)


def _dense(net: PolicyNetwork, views: dict[str, Tensor]) -> DensePass | None:
    """None where the net has other layers."""
    torso = net.torso
    if not isinstance(torso, Encoder) or torso.mlp is None or len(torso.cnns):
        return None
    names = [*(f"torso.mlp.layers.{k}" for k in range(len(torso.mlp.layers))), "out"]
    return DensePass(torso, [(views[f"{name}.weight"], views[f"{name}.bias"]) for name in names], torso.mlp.activation)
