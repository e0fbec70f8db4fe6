"""The representation that CURL learns: an encoder of cropped images, and what compares the codes of two crops.

    image ──centre, unless it is cropped already──convolutions──linear──layer norm──> code [N, Z] ──> heads of the algorithm
                                                                                       └──projection──> q, k:   q^T W k

A code is what the nets of an algorithm see in the place of an image. Layer norm, not batch norm: a code must not tell of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from shoal.errors import ConfigError
from shoal.nets.torsos import Conv, flat_features, lay_channels_last, orthogonal, to_channels_last
from shoal.nets.trunk import seeded
from shoal.ops.contrast import bilinear_logits, centre_crop

__all__ = ["CodeEncoder", "Comparison", "RepresentationConfig", "RepresentationNetwork", "build_representation"]

LARGE = 36  # pixels of a side, from which on the encoder is the paper's
SMALLEST = 9


@dataclass(frozen=True)
class RepresentationConfig:
    """Of which images, and how large."""

    shape: tuple[int, int, int]
    """Channels, height and width of whole images."""
    channels_last: bool
    """Whether observations have their channels last."""
    crop: int
    """Side of the square that the encoder sees."""
    code_size: int
    projection: tuple[int, ...] = ()
    """Layers between a code and what is compared; empty compares codes."""


def build_representation(config: RepresentationConfig, seed: int, learns: bool) -> RepresentationNetwork:
    """Policies need only the encoder; who learns needs to compare codes too. The encoder of a seed is the same for both."""
    with seeded(seed):
        encoder = CodeEncoder(config)
        return RepresentationNetwork(encoder, Comparison(config.code_size, config.projection) if learns else None)


class CodeEncoder(nn.Module):
    """image [N, C, H, W] (or channels last, as the config says), whole or cropped -> code [N, Z].

    From 36 x 36 on: four convolutions 3x3 of 32 channels, strides 2, 1, 1, 1 (CURL); below two of 16, strides 2, 1.
    """

    def __init__(self, config: RepresentationConfig) -> None:
        super().__init__()
        if config.crop < SMALLEST:
            raise ConfigError(f"--algorithm.crop {config.crop} is smaller than the encoder can read; give {SMALLEST} or more")
        channels, strides = (32, (2, 1, 1, 1)) if config.crop >= LARGE else (16, (2, 1))
        widths = [config.shape[0], *(channels for _ in strides)]
        convs = [orthogonal(Conv(i, o, 3, stride)) for (i, o), stride in zip(pairwise(widths), strides, strict=True)]
        self.convs = nn.ModuleList(convs)
        side = config.crop
        for stride in strides:
            side = (side - 3) // stride + 1
        self.dense = orthogonal(nn.Linear(channels * side * side, config.code_size), 1.0)
        self.norm = nn.LayerNorm(config.code_size)
        lay_channels_last(self)
        self._crop, self._channels_last = config.crop, config.channels_last

    def forward(self, image: Tensor) -> Tensor:
        x = centre_crop(image.permute(0, 3, 1, 2) if self._channels_last else image, self._crop)
        x = to_channels_last(x)
        for conv in self.convs:
            x = torch.relu(conv(x))
        code: Tensor = self.norm(self.dense(flat_features(x)))
        return code


class Comparison(nn.Module):
    """How alike two codes are: a projection of both, and a bilinear form."""

    def __init__(self, code_size: int, projection: Sequence[int]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i, o in pairwise([code_size, *projection]):
            layers += [nn.ReLU()] if layers else []
            layers += [orthogonal(nn.Linear(i, o)), nn.LayerNorm(o)]
        self.projection = nn.Sequential(*layers)
        size = projection[-1] if projection else code_size
        self.weight = nn.Parameter(torch.rand(size, size))

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Logits [B, B] of projected codes."""
        return bilinear_logits(queries, self.weight, keys)


class RepresentationNetwork(nn.Module):
    """An encoder and, for who learns it, the comparison. The comparison's parameters come first: policies get what follows."""

    def __init__(self, encoder: CodeEncoder, comparison: Comparison | None) -> None:
        super().__init__()
        self.comparison, self.encoder = comparison, encoder

    @property
    def compared_size(self) -> int:
        """How many parameters only the comparison has."""
        return 0 if self.comparison is None else sum(p.numel() for p in self.comparison.parameters())

    def forward(self, image: Tensor) -> Tensor:
        code: Tensor = self.encoder(image)
        return code

    def projected(self, image: Tensor) -> Tensor:
        """What is compared [N, P]."""
        assert self.comparison is not None
        found: Tensor = self.comparison.projection(self(image))
        return found
