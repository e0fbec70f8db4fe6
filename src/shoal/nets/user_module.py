"""A torso of the user's own (--net.module): loaded by name, tried on two observations, refused if it cannot work.

A module is created with (observation_space) and called with a batch of observations [N, ...]; it returns features [N, F]. All
that a learner publishes, averages and saves is the vector of parameters. So a module must be a function of its parameters
alone: no buffers (running statistics), and nothing that behaves differently in training and acting (dropout).
"""

from __future__ import annotations

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
        raise ConfigError(
            f"{name} failed on the observation space {space}: {type(error).__name__}: {error}; it is created with "
            f"(observation_space) and called with a batch of observations, for instance of shape {_shapes(batch)}"
        ) from error
    _check_layers(name, made)
    return UserModule(made, _check_features(name, made, features))


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


def _shapes(observation: Observation) -> Any:
    if isinstance(observation, dict):
        return {key: _shapes(part) for key, part in observation.items()}
    return tuple(observation.shape)
