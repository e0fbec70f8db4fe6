"""A torso of the user's own (--net.module): loaded by name, tried on two observations, refused if it cannot work.

A module is created with (observation_space) and called with a batch of observations [N, ...]; it returns features [N, F]. All
that a learner publishes, averages and saves is the vector of parameters. So a module must be a function of its parameters
alone: no buffers (running statistics), no randomness, no memory of earlier calls, and nothing that differs between training and
acting (dropout) or between batches of different sizes (batch normalisation).
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from shoal.errors import ConfigError
from shoal.slots import map_tree

__all__ = ["Observation", "UserModule", "children", "user_module", "zeros_like_space"]

Observation: TypeAlias = Any  # a tensor [N, ...], or nested dictionaries of tensors


class UserModule(nn.Module):
    """A module of the user's own, and the number of features it gives."""

    def __init__(self, module: nn.Module, features: int) -> None:
        super().__init__()
        self.module, self.features = module, features

    def forward(self, observation: Observation) -> Tensor:
        features: Tensor = self.module(observation)
        return features


def user_module(space: gym.Space[Any], module: str | type[nn.Module]) -> UserModule:
    """The module for an observation space; ``module`` is a class, or "package.module:Class"."""
    cls = _load(module) if isinstance(module, str) else module
    name = f"--net.module {module if isinstance(module, str) else cls.__name__}"
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ConfigError(f"{name} is {cls!r}, not a class derived from torch.nn.Module")
    batch = zeros_like_space(space, 2)
    try:
        made = cls(space)
        with torch.no_grad():
            features = made(batch)
    except Exception as error:
        shapes = map_tree(lambda rows: tuple(rows.shape), batch)
        raise ConfigError(
            f"{name} failed on the observation space {space}: {type(error).__name__}: {error}; it is created with "
            f"(observation_space) and called with a batch of observations, for instance of shape {shapes}"
        ) from error
    _check_layers(name, made)
    found = _check_features(name, made, features)
    _check_function(name, made, _drawn(space, 2))
    return UserModule(made, found)


def _check_layers(name: str, module: nn.Module) -> None:
    for path, layer in module.named_modules():
        what = f"{name} has a {type(layer).__name__} layer ({path or 'the module itself'})"
        if isinstance(layer, _BatchNorm):
            raise ConfigError(
                f"{what}: its running statistics are not parameters, so actors would never see them; use LayerNorm or GroupNorm"
            )
        if _dropout(layer) > 0:
            raise ConfigError(f"{what} with dropout: policies act in training mode, so it would change their actions; remove it")
        for buffer, _ in layer.named_buffers(recurse=False):
            raise ConfigError(
                f"{what} with the buffer {buffer!r}: only parameters are published and saved; "
                "make it an nn.Parameter, with requires_grad=False if it is a constant"
            )


def _check_function(name: str, module: nn.Module, batch: Observation) -> None:
    """Refuse what the layers do not show: dropout, noise, memory or statistics of the batch in `forward`."""
    with torch.no_grad():
        features = module(batch)
        again = module(batch)
        if not _alike(features, again):
            raise ConfigError(
                f"{name} gives the same observations other features when it is called again: it has dropout, noise or a memory in "
                "its forward; actors and learners would compute different policies, so remove it"
            )
        module.eval()
        acting = module(batch)
        module.train()
        if not _alike(features, acting):
            raise ConfigError(
                f"{name} gives other features after .eval(): policies act in training mode; make its forward independent of "
                "self.training"
            )
        try:
            alone = module(map_tree(lambda rows: rows[:1], batch))
        except Exception as error:
            raise ConfigError(f"{name} failed on a batch of one observation: {type(error).__name__}: {error}") from error
        if not _alike(features[:1], alone):
            raise ConfigError(
                f"{name} gives an observation other features in a batch of two than alone: actors and learners have batches of "
                "different sizes; normalise over features (LayerNorm), not over the batch"
            )


def _alike(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-3, atol=1e-4, equal_nan=True)


def _dropout(layer: nn.Module) -> float:
    """The probability of dropout inside a layer."""
    if isinstance(layer, _DropoutNd):
        return layer.p
    if isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
        return layer.dropout
    return 0.0


def _check_features(name: str, module: nn.Module, features: Any) -> int:
    good = isinstance(features, Tensor) and features.dim() == 2 and len(features) == 2 and features.is_floating_point()
    if not good:
        got = f"{features.dtype} {tuple(features.shape)}" if isinstance(features, Tensor) else type(features).__name__
        raise ConfigError(f"{name} returned {got} for 2 observations; it must return floats [2, F]")
    found = int(features.shape[1])
    says = getattr(module, "features", found)  # a foreign object; it need not say it
    if says != found:
        raise ConfigError(f"{name} says features = {says}, but returned {found} of them")
    return found


def _load(spec: str) -> Any:
    package, _, name = spec.partition(":")
    if not package or not name:
        raise ConfigError(f"--net.module {spec}: write it as package.module:Class")
    try:
        return getattr(importlib.import_module(package), name)
    except ImportError as error:
        raise ConfigError(
            f"--net.module {spec}: cannot import {package!r} ({error}); "
            "run from the directory that contains it, or install it"
        ) from error
    except AttributeError as error:
        raise ConfigError(f"--net.module {spec}: {package!r} has no class {name!r}") from error


def children(space: spaces.Dict | spaces.Tuple[Any]) -> Iterator[tuple[str, gym.Space[Any]]]:
    """The parts of a nested space, named as observations name them: those of a tuple "0", "1", ..."""
    parts = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
    for key, part in parts:
        yield str(key), part


def zeros_like_space(space: gym.Space[Any], rows: int) -> Observation:
    """A batch of zero observations ``[rows, ...]``, nested as the stream's observations are."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return {key: zeros_like_space(part, rows) for key, part in children(space)}
    dtype = np.float32 if space.dtype == np.float64 else space.dtype
    return torch.from_numpy(np.zeros((rows, *(space.shape or ())), dtype))


def _drawn(space: gym.Space[Any], rows: int) -> Observation:
    """A batch of random observations, the same every time."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return {key: _drawn(part, rows) for key, part in children(space)}
    own = copy.deepcopy(space)  # its random numbers are the environment's
    own.seed(0)
    dtype = np.float32 if space.dtype == np.float64 else space.dtype
    return torch.from_numpy(np.array([own.sample() for _ in range(rows)], dtype))
