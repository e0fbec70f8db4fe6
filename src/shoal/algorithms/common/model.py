"""A network with its flat parameters and the statistics through which it sees observations, on any hardware."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from shoal.algorithms.records.spaces import leaf_tree
from shoal.core import Tree
from shoal.device.placement import Hardware
from shoal.nets.flat import adopt, flat_grad, flatten, parameter_views
from shoal.nets.representation import RepresentationNetwork
from shoal.nets.torsos import Conv
from shoal.slots import leaf_at, leaves

__all__ = ["Model", "normalised"]

OBSERVATION_CLIP = 10.0  # of normalised observations, in standard deviations

N = TypeVar("N", bound=nn.Module)


class Model(Generic[N]):
    """A net and `params`, the flat vector of which its parameters are views. `mean` and `scale` are those that observations are
    normalised with; they are the model's own until it `watch`es others. With a `representation` the net sees codes of images, and
    the vector begins with the representation's parameters."""

    def __init__(self, net: N, observation_space: gym.Space[Any], norm_size: int = 0,
                 representation: RepresentationNetwork | None = None) -> None:
        """`norm_size` numbers of an observation are normalised: all floating-point ones, or none."""
        self.net, self.norm_size, self.representation = net, norm_size, representation
        self.detached = False  # whether losses of the net have no gradient for the representation
        self.whole: nn.Module = net if representation is None else nn.ModuleList([representation, net])
        self.params = flatten(self.whole)
        self.observation_space = observation_space
        self._grad: torch.Tensor | None = None
        self._hardware, self._on_gpu = Hardware(), False
        self._convolutional = any(p.dim() == 4 for p in self.whole.parameters())
        self.watch(torch.zeros(norm_size), torch.ones(norm_size))

    def move(self, into: torch.Tensor) -> None:
        """Let the parameters live in `into`, with the values that are there."""
        self.params = adopt(self.whole, into)

    def watch(self, mean: torch.Tensor, scale: torch.Tensor) -> None:
        """See observations through these statistics from now on."""
        self.mean, self.scale = mean, scale
        self._slices = _slices(self.observation_space, mean, scale) if self.norm_size else None

    def to(self, hardware: Hardware) -> None:
        """Compute there from now on."""
        self._hardware, self._on_gpu, self._grad = hardware, hardware.on_gpu, None
        self.move(self.params.to(hardware.device))
        self.watch(self.mean.to(hardware.device), self.scale.to(hardware.device))
        if hardware.on_gpu:
            torch.backends.cudnn.benchmark = True  # batches have few sizes: the fastest convolution of each is looked for once
            for module in self.whole.modules():
                if isinstance(module, Conv):
                    module.channels_last = hardware.gpu.channels_last

    def span(self, part: str) -> slice:
        """The slice of `params` that belongs to this part: a child of the net, "head" for all of it, or "encoder" for the
        representation in front of it."""
        begin = 0 if self.representation is None else sum(p.numel() for p in self.representation.parameters())
        if self.representation is not None and part in ("encoder", "head"):
            return slice(0, begin) if part == "encoder" else slice(begin, self.params.numel())
        start = begin + sum(p.numel() for p in self.net.parameters(recurse=False))
        for name, child in self.net.named_children():
            size = sum(p.numel() for p in child.parameters())
            if name == part:
                return slice(start, start + size)
            start += size
        raise ValueError(f"the network has no part {part!r}; it has {', '.join(name for name, _ in self.net.named_children())}")

    def part(self, name: str) -> nn.Module:
        """What `span` says the place of."""
        if self.representation is not None and name in ("encoder", "head"):
            return self.representation if name == "encoder" else self.net
        return self.net.get_submodule(name)

    def layers(self, params: np.ndarray) -> dict[str, np.ndarray]:
        """By name, the pieces of such a flat vector of parameters, as views."""
        rows = parameter_views(self.whole, torch.from_numpy(params)[None])
        return {name: row[0].numpy() for name, row in rows.items()}

    def published(self, part: str | None) -> slice:
        """The slice of `params` that policies need: the encoder, where there is one, and this part of the net; None for all."""
        if self.representation is None:
            return slice(0, self.params.numel()) if part is None else self.span(part)
        return slice(self.representation.compared_size, self.span(part or "head").stop)

    def see(self, observation: Tree) -> Tree:
        """What the net is shown: codes of images, or floating-point numbers normalised and everything else as it is."""
        if self.representation is not None:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.detached):
                return self.representation(observation)
        return observation if self._slices is None else _scale(observation, self._slices)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any] | None:
        """A function of the net, fused by torch.compile; None where that is not wanted."""
        return torch.compile(function, dynamic=False) if self._on_gpu and self._hardware.gpu.compile else None

    def precision(self) -> AbstractContextManager[Any]:
        """In what the net is computed."""
        return self._hardware.precision(self._convolutional)

    def tensor(self, x: Any) -> torch.Tensor:
        """`x` on the device of the parameters. On a CPU, an array is copied only if it is not in C order.

        Arrays from slots are in C order; those straight from an environment may not be (gymnasium's CartPole transposes its
        state). Some CPUs multiply a small transposed matrix with a kernel that rounds differently, so without the copy the
        same observation could give other bits.
        """
        tensor: torch.Tensor = torch.from_numpy(x).contiguous() if isinstance(x, np.ndarray) else x
        return tensor.to(self.params.device) if self._on_gpu else tensor

    @property
    def grad(self) -> torch.Tensor:
        """The flat gradient; made when first asked for, because actors and target nets need none."""
        if self._grad is None:
            self._grad = flat_grad(self.whole)
        return self._grad


def normalised(observation: Tree, space: gym.Space[Any], mean: torch.Tensor, scale: torch.Tensor) -> Tree:
    """Floating-point numbers of an observation through these statistics, and everything else as it is."""
    return _scale(observation, _slices(space, mean, scale))


def _slices(space: gym.Space[Any], mean: torch.Tensor, scale: torch.Tensor) -> Tree:
    """For each leaf of an observation its views of mean and scale, None where it is not normalised."""
    tree: dict[str, Any] = {"": leaf_tree(space)}
    start = 0
    for path, (shape, dtype) in list(leaves(tree)):
        found = None
        if np.dtype(dtype).kind == "f":
            end = start + math.prod(shape)
            found = (mean[start:end].view(shape), scale[start:end].view(shape))
            start = end
        leaf_at(tree, path[:-1])[path[-1]] = found
    return tree[""]


def _scale(observation: Tree, slices: Any) -> Tree:
    if isinstance(observation, dict):
        return {key: _scale(part, slices[key]) for key, part in observation.items()}
    if slices is None:
        return observation
    return ((observation - slices[0]) * slices[1]).clamp_(-OBSERVATION_CLIP, OBSERVATION_CLIP)
