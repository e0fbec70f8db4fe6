"""From observation spaces to torsos: every leaf of an observation becomes features, side by side.

    Box of rank 1, Discrete (one-hot), MultiDiscrete (one-hot), MultiBinary, others flattened  -> one MLP over all
    images: Box of rank 3, uint8 (or float from 36 x 36 on, or as net.torso says)               -> one CNN each

Images are (channels, height, width). Where a space clearly has its channels last, as (96, 96, 3), they are moved; that
is only a view, since the convolutions run channels-last anyway.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import Tensor, nn

from shoal.errors import ConfigError
from shoal.nets.net_config import NetConfig
from shoal.nets.torsos import MLP, ImpalaResNet, NatureCNN, SmallConv
from shoal.nets.user_module import Observation, UserModule, children, user_module
from shoal.slots import leaf_at

__all__ = ["Encoder", "Observation", "encoder", "image_shape", "is_image"]

CNN: TypeAlias = NatureCNN | ImpalaResNet | SmallConv
CNNS: dict[str, type[CNN]] = {"nature": NatureCNN, "impala": ImpalaResNet, "small_conv": SmallConv}
Leaf: TypeAlias = spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary
Path: TypeAlias = tuple[str, ...]  # of a leaf in nested dictionaries


def encoder(space: gym.Space[Any], config: NetConfig) -> Encoder | UserModule:
    """The torso for an observation space: the user's own module, or an Encoder."""
    return user_module(space, config.module) if config.module is not None else Encoder(space, config)


class Encoder(nn.Module):
    """observation [N, ...] (tensor or nested dict) -> features [N, F]."""

    def __init__(self, space: gym.Space[Any], config: NetConfig) -> None:
        super().__init__()
        leaves = list(_leaves(space))
        images = [(path, leaf) for path, leaf in leaves if isinstance(leaf, spaces.Box) and is_image(leaf, config.torso)]
        of_images = {path for path, _ in images}
        vectors = [(path, leaf) for path, leaf in leaves if path not in of_images]
        if config.torso in CNNS and not images:
            raise ConfigError(f"--net.torso {config.torso} reads images, but no part of the observation {space} is one; drop it")
        self._images: list[tuple[Path, bool, CNN]] = []  # faster to walk than a ModuleList
        for path, leaf in images:
            shape, channels_last = image_shape(leaf.shape)
            self._images.append((path, channels_last, _cnn(shape, config.torso)))
        self.cnns = nn.ModuleList(cnn for _, _, cnn in self._images)
        self._vectors = [(path, _Floats(leaf)) for path, leaf in vectors]
        width = sum(floats.size for _, floats in self._vectors)
        self.mlp = MLP(width, config.hidden, config.activation) if width else None
        self.features = sum(cnn.features for _, _, cnn in self._images) + (self.mlp.features if self.mlp is not None else 0)
        if self.features == 0:
            raise ConfigError(f"the observation space {space} is empty; there is nothing to learn from")
        self._plain = len(leaves) == 1 and not images and self._vectors[0][1].plain and not leaves[0][0]

    def forward(self, observation: Observation) -> Tensor:
        mlp = self.mlp
        if mlp is not None and self._plain:  # one vector of float32: nothing to convert
            features: Tensor = mlp(observation)
            return features
        parts: list[Tensor] = []
        for path, channels_last, cnn in self._images:
            image = leaf_at(observation, path)
            if image.dim() == 3:
                image = image.unsqueeze(1)
            parts.append(cnn(image.permute(0, 3, 1, 2) if channels_last else image))
        if mlp is not None:
            parts.append(mlp(self.vector(observation)))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def vector(self, observation: Observation) -> Tensor:
        """What the MLP reads: all leaves but images, as one float32 vector [N, width]."""
        if self._plain:
            only: Tensor = observation  # one vector of float32
            return only
        floats = [floats(leaf_at(observation, path)) for path, floats in self._vectors]
        return floats[0] if len(floats) == 1 else torch.cat(floats, 1)


class _Floats:
    """One leaf as float32 [N, size]."""

    def __init__(self, leaf: Leaf) -> None:
        self.nvec: list[int] | None = None  # sizes of the one-hot parts, of discrete leaves
        self.plain = isinstance(leaf, spaces.Box) and len(leaf.shape) == 1 and leaf.dtype == np.float32
        self.scale = 1 / 255 if isinstance(leaf, spaces.Box) and leaf.dtype == np.uint8 else 1.0
        if isinstance(leaf, spaces.Discrete):
            self.nvec = [int(leaf.n)]
        elif isinstance(leaf, spaces.MultiDiscrete):
            self.nvec = [int(n) for n in leaf.nvec.ravel()]
        self.size = sum(self.nvec) if self.nvec is not None else math.prod(leaf.shape or ())

    def __call__(self, x: Tensor) -> Tensor:
        x = x.reshape(x.shape[0], self.size if self.nvec is None else len(self.nvec))
        if self.nvec is None:
            return x.float() if self.scale == 1 else x.float() * self.scale
        return torch.cat([F.one_hot(part.long(), n) for part, n in zip(x.unbind(1), self.nvec, strict=True)], 1).float()


def _leaves(space: gym.Space[Any], path: Path = ()) -> Iterator[tuple[Path, Leaf]]:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        for key, part in children(space):
            yield from _leaves(part, (*path, key))
    elif isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        yield path, space
    else:
        raise ConfigError(f"observation space {type(space).__name__} at {'.'.join(path) or 'the top'} is not supported")


def is_image(space: spaces.Box, torso: str) -> bool:
    """Whether a CNN reads it, with this --net.torso."""
    if torso == "mlp" or len(space.shape) not in (2, 3):
        return False
    if torso in CNNS:
        return True
    if len(space.shape) != 3:
        return False
    (_, height, width), _ = image_shape(space.shape)
    return min(height, width) >= (3 if space.dtype == np.uint8 else 36)


def image_shape(shape: Sequence[int]) -> tuple[tuple[int, int, int], bool]:
    """(channels, height, width), and whether the channels are last in the data."""
    if len(shape) == 2:
        return (1, shape[0], shape[1]), False
    a, b, c = shape
    channels_last = c <= 4 < min(a, b) or (a == b and c < a)
    return ((c, a, b), True) if channels_last else ((a, b, c), False)


def _cnn(shape: tuple[int, int, int], torso: str) -> CNN:
    if torso == "auto":
        torso = "nature" if min(shape[1:]) >= 36 else "small_conv"
    return CNNS[torso](shape)
