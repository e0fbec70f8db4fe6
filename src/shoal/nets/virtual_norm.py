"""Virtual batch normalisation of convolutional policies (Salimans et al. 2016, 1606.03498; 2017, 1703.03864).

    outputs of a layer  ──▶  (y - mean) * scale + bias      mean and scale are those of a fixed reference batch, in the same net

Other parameters give other statistics, so a small change of them changes what a convolutional policy does. What one observation
gives depends on no other observation of its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from shoal.nets.torsos import Conv

__all__ = ["VirtualNorm", "add_virtual_norm", "statistics_of"]

EPSILON = 1e-5  # of a variance


class VirtualNorm(nn.Module):
    """A layer whose outputs are normalised; its bias is added afterwards. `mean` and `scale` have one number for each channel."""

    mean: Tensor
    scale: Tensor

    def __init__(self, layer: nn.Linear | Conv) -> None:
        super().__init__()
        self.layer = layer
        self.register_buffer("mean", torch.zeros(len(layer.weight)))
        self.register_buffer("scale", torch.ones(len(layer.weight)))
        self.measuring, self.measured = False, (self.mean, self.scale)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)  # with the bias, which the mean takes off again
        if self.measuring:
            over = [0, *range(2, y.dim())]
            self.measured = y.mean(over), torch.rsqrt(y.var(over, correction=0) + EPSILON)
        mean, scale = self.measured if self.measuring else (self.mean, self.scale)
        shape = (-1, *(1,) * (y.dim() - 2))
        return (y - mean.view(shape)) * scale.view(shape) + self._bias().view(shape)

    def _bias(self) -> Tensor:
        bias = self.layer.bias
        assert bias is not None, "our torsos' layers have one"
        return bias


def add_virtual_norm(cnns: nn.ModuleList, prefix: str) -> dict[str, VirtualNorm]:
    """Normalise all layers of these torsos; returns by name what does it."""
    for parent in list(cnns.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Linear | Conv):
                setattr(parent, name, VirtualNorm(layer))
    return {f"{prefix}.{name}": norm for name, norm in cnns.named_modules() if isinstance(norm, VirtualNorm)}


def statistics_of(norms: Mapping[str, VirtualNorm], forward: Callable[[], object]) -> dict[str, Tensor]:
    """By the names of buffers, the statistics of a batch in a net: `forward` computes the net for it."""
    for norm in norms.values():
        norm.measuring = True
    try:
        forward()
    finally:
        for norm in norms.values():
            norm.measuring = False
    return {f"{name}.{what}": found for name, norm in norms.items()
            for what, found in zip(("mean", "scale"), norm.measured, strict=True)}
