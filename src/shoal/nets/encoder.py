"""From observation spaces to torsos: every leaf of an observation becomes features, side by side.

    Box of rank 1, Discrete (one-hot), MultiDiscrete (one-hot), MultiBinary, others flattened  -> one MLP over all
    images: Box of rank 3, uint8 (or float from 36 x 36 on, or as net.torso says)               -> one CNN each

Images are (channels, height, width). Where a space clearly has its channels last, as (96, 96, 3), they are moved; that
is only a view, since the convolutions run channels-last anyway.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import Tensor, nn

from shoal.errors import ConfigError
from shoal.nets.config import NetConfig
from shoal.nets.torsos import MLP, ImpalaResNet, NatureCNN, SmallConv

__all__ = ["Encoder", "encoder", "zeros_like_space"]

Observation = Any  # a tensor, or nested dictionaries of tensors

CNNS: dict[str, Any] = {"nature": NatureCNN, "impala": ImpalaResNet, "small_conv": SmallConv}


def encoder(space: gym.Space, config: NetConfig) -> nn.Module:
    """The torso for an observation space: the user's own, or an Encoder. Has ``features``."""
    return _own(space, config.module) if config.module is not None else Encoder(space, config)


class Encoder(nn.Module):
    """observation [N, ...] (tensor or nested dict) -> features [N, F]."""

    def __init__(self, space: gym.Space, config: NetConfig) -> None:
        super().__init__()
        leaves = list(_leaves(space))
        images = [leaf for leaf in leaves if _is_image(leaf[1], config.torso)]
        vectors = [leaf for leaf in leaves if not any(leaf is image for image in images)]
        if config.torso in CNNS and not images:
            raise ConfigError(
                f"net.torso = {config.torso!r} reads images, but no part of the observation {space} is one"
            )
        self.cnns = nn.ModuleList()
        self._images: list[tuple[tuple[str, ...], bool]] = []
        for path, leaf in images:
            shape, moved = _image_shape(leaf.shape)
            self.cnns.append(_cnn(shape, config.torso))
            self._images.append((path, moved))
        self._vectors = [(path, _Floats(leaf)) for path, leaf in vectors]
        width = sum(floats.size for _, floats in self._vectors)
        self.mlp = MLP(width, config.hidden, config.activation) if width else None
        self.features = sum(cnn.features for cnn in self.cnns) + (self.mlp.features if self.mlp else 0)
        if self.features == 0:
            raise ConfigError(f"the observation space {space} is empty; there is nothing to learn from")
        self._plain = len(leaves) == 1 and not images and self._vectors[0][1].plain and not leaves[0][0]
        self._cnns = list(self.cnns)

    def forward(self, observation: Observation) -> Tensor:
        if self._plain:  # one vector of float32: nothing to convert
            return self.mlp(observation)
        parts = []
        for (path, moved), cnn in zip(self._images, self._cnns, strict=True):
            image = _pick(observation, path)
            if image.dim() == 3:
                image = image.unsqueeze(1)
            parts.append(cnn(image.permute(0, 3, 1, 2) if moved else image))
        if self.mlp is not None:
            floats = [floats(_pick(observation, path)) for path, floats in self._vectors]
            parts.append(self.mlp(floats[0] if len(floats) == 1 else torch.cat(floats, 1)))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


class _Floats:
    """One leaf as float32 [N, size]."""

    def __init__(self, space: gym.Space) -> None:
        self.nvec: list[int] | None = None
        self.scale = 1.0
        self.plain = isinstance(space, spaces.Box) and len(space.shape) == 1 and space.dtype == np.float32
        if isinstance(space, spaces.Discrete):
            self.nvec = [int(space.n)]
        elif isinstance(space, spaces.MultiDiscrete):
            self.nvec = space.nvec.ravel().tolist()
        elif isinstance(space, spaces.Box) and space.dtype == np.uint8:
            self.scale = 1 / 255
        self.size = sum(self.nvec) if self.nvec is not None else int(np.prod(space.shape))

    def __call__(self, x: Tensor) -> Tensor:
        x = x.reshape(x.shape[0], self.size if self.nvec is None else len(self.nvec))
        if self.nvec is None:
            return x.float() if self.scale == 1 else x.float() * self.scale
        return torch.cat([F.one_hot(part.long(), n) for part, n in zip(x.unbind(1), self.nvec, strict=True)], 1).float()


def _leaves(space: gym.Space, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], gym.Space]]:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        items = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        for key, part in items:
            yield from _leaves(part, (*path, str(key)))
    elif isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        yield path, space
    else:
        raise ConfigError(f"observation space {type(space).__name__} at {'.'.join(path) or 'the top'} is not supported")


def _pick(observation: Observation, path: tuple[str, ...]) -> Tensor:
    for key in path:
        observation = observation[key]
    return observation


def _is_image(space: gym.Space, torso: str) -> bool:
    if torso == "mlp" or not isinstance(space, spaces.Box) or len(space.shape) not in (2, 3):
        return False
    if torso in CNNS:
        return True
    if len(space.shape) != 3:
        return False
    (_, height, width), _ = _image_shape(space.shape)
    return min(height, width) >= (3 if space.dtype == np.uint8 else 36)


def _image_shape(shape: Sequence[int]) -> tuple[tuple[int, int, int], bool]:
    """(channels, height, width), and whether the channels are last in the data."""
    if len(shape) == 2:
        return (1, shape[0], shape[1]), False
    a, b, c = shape
    channels_last = c <= 4 < min(a, b) or (a == b and c < a)
    return ((c, a, b), True) if channels_last else ((a, b, c), False)


def _cnn(shape: tuple[int, int, int], torso: str) -> nn.Module:
    if torso == "auto":
        torso = "nature" if min(shape[1:]) >= 36 else "small_conv"
    return CNNS[torso](shape)


# --- a torso of the user's own ---


def _own(space: gym.Space, module: str | type) -> nn.Module:
    cls = _load(module) if isinstance(module, str) else module
    name = f"net.module = {module if isinstance(module, str) else cls.__name__}"
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ConfigError(f"{name} is {cls!r}, not a class derived from torch.nn.Module")
    try:
        torso = cls(space)
        with torch.no_grad():
            features = torso(zeros_like_space(space, 2))
    except Exception as error:
        raise ConfigError(
            f"{name} failed on the observation space {space}: {type(error).__name__}: {error}; it is made with "
            "(observation_space) and called with a batch of observations, for instance of shape "
            f"{_shapes(zeros_like_space(space, 2))}"
        ) from error
    if (
        not isinstance(features, Tensor)
        or features.dim() != 2
        or features.shape[0] != 2
        or not features.is_floating_point()
    ):
        got = f"{features.dtype} {tuple(features.shape)}" if isinstance(features, Tensor) else type(features).__name__
        raise ConfigError(f"{name} returned {got} for 2 observations; it must return floats [2, F]")
    if getattr(torso, "features", features.shape[1]) != features.shape[1]:
        raise ConfigError(f"{name} says features = {torso.features}, but returned {features.shape[1]} of them")
    torso.features = features.shape[1]
    return torso


def _load(spec: str) -> Any:
    package, _, name = spec.partition(":")
    if not package or not name:
        raise ConfigError(f"net.module = {spec!r}: write it as package.module:Class")
    try:
        return getattr(importlib.import_module(package), name)
    except ImportError as error:
        raise ConfigError(
            f"net.module = {spec!r}: cannot import {package!r} ({error}); "
            "run from the directory that holds it, or install it"
        ) from error
    except AttributeError as error:
        raise ConfigError(f"net.module = {spec!r}: {package!r} has no class {name!r}") from error


def zeros_like_space(space: gym.Space, rows: int) -> Observation:
    """A batch of zero observations ``[rows, ...]``, nested as the stream's observations are."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        items = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        return {str(key): zeros_like_space(part, rows) for key, part in items}
    dtype = np.float32 if space.dtype == np.float64 else space.dtype
    return torch.from_numpy(np.zeros((rows, *space.shape), dtype))


def _shapes(observation: Observation) -> Any:
    if isinstance(observation, dict):
        return {key: _shapes(part) for key, part in observation.items()}
    return tuple(observation.shape)
