"""A net and its flat parameters, on whatever hardware they are: what the models of actor-critics and of action values share."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from shoal.algorithms.hardware import Hardware
from shoal.nets.flat import adopt, flat_grad, flatten
from shoal.nets.torsos import Conv

__all__ = ["Placed"]


class Placed:
    """A net and `params`, the flat vector of which its parameters are views."""

    def __init__(self, net: Any) -> None:
        self.net = net
        self.params = flatten(net)
        self._grad: torch.Tensor | None = None
        self._hardware, self._on_gpu = Hardware(), False
        self._convolutional = any(p.dim() == 4 for p in net.parameters())

    def move(self, into: torch.Tensor) -> None:
        """Let the parameters live in `into`, with the values that are there."""
        self.params = adopt(self.net, into)

    def to(self, hardware: Hardware) -> None:
        """Compute there from now on."""
        self._hardware, self._on_gpu, self._grad = hardware, hardware.on_gpu, None
        self.move(self.params.to(hardware.device))
        if hardware.on_gpu:
            torch.backends.cudnn.benchmark = True  # batches have few sizes: the fastest convolution of each is looked for once
            for module in self.net.modules():
                if isinstance(module, Conv):
                    module.channels_last = hardware.gpu.channels_last

    def compiled(self, function: Any) -> Any:
        """A function of the net, fused by torch.compile; None where that is not wanted."""
        return torch.compile(function, dynamic=False) if self._on_gpu and self._hardware.gpu.compile else None

    def precision(self) -> AbstractContextManager[Any]:
        """In what the net is computed."""
        return self._hardware.precision(self._convolutional)

    def tensor(self, x: Any) -> torch.Tensor:
        """Where the parameters are; an array there is only looked at, not copied."""
        x = torch.from_numpy(x) if isinstance(x, np.ndarray) else x
        return x.to(self.params.device) if self._on_gpu else x

    @property
    def grad(self) -> torch.Tensor:
        """The flat gradient; made when first asked for, because actors and target nets need none."""
        if self._grad is None:
            self._grad = flat_grad(self.net)
        return self._grad
