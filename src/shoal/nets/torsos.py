"""Torsos: one observation leaf in, features out. Time is folded into the batch before they are called.

Nature CNN: Mnih et al. 2015. IMPALA ResNet: Espeholt et al. 2018, figure 3 right. Small convolution: MinAtar (Young &
Tian 2019). Images are ``[N, C, H, W]``, uint8 (scaled by 1/255 here) or float, and run channels-last.
Initialisation: orthogonal with gain sqrt(2) and bias 0 (PPO practice), except the ResNet's convolutions, whose residual
sums would grow with it and which keep PyTorch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor  # nothing public says it

from shoal.errors import ConfigError

__all__ = ["ACTIVATIONS", "MLP", "Conv", "ImpalaResNet", "NatureCNN", "SmallConv", "flat_features", "lay_channels_last",
           "orthogonal", "set_orthogonal", "tanh", "to_channels_last"]


class _Tanh(torch.autograd.Function):
    """tanh(x) = 2 sigmoid(2x) - 1, with tanh's own derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.sigmoid(x + x).mul_(2).sub_(1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        slope: Tensor = torch.ops.aten.tanh_backward(grad, *ctx.saved_tensors)
        return slope


_sigmoid_tanh: Callable[[Tensor], Tensor] = _Tanh.apply


def tanh(x: Tensor) -> Tensor:
    """tanh to 2e-7. Large tensors go through 2 sigmoid(2x) - 1, 3.5 times faster than PyTorch's CPU kernel.

    That kernel otherwise is most of a small MLP's time: 172 us, and the matrix product 93 us, at 1024 x 64.
    """
    if x.numel() < 8192 or x.is_cuda:
        return torch.tanh(x)
    if torch.is_grad_enabled() and x.requires_grad:
        return _sigmoid_tanh(x)
    return torch.sigmoid(x + x).mul_(2).sub_(1)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": tanh,
    "relu": torch.relu,
    "elu": F.elu,
    "gelu": F.gelu,
    "silu": F.silu,
}


Layer = TypeVar("Layer", bound=nn.Linear | nn.Conv2d)


@torch.no_grad()
def set_orthogonal(weight: Tensor, gain: float) -> None:
    """Orthogonal weights [outputs, ...], in place."""
    nn.init.orthogonal_(weight, gain)


def orthogonal(layer: Layer, gain: float = math.sqrt(2)) -> Layer:
    """Orthogonal weights, bias 0, in place."""
    set_orthogonal(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def to_channels_last(image: Tensor) -> Tensor:
    """float32 channels-last images; bytes become [0, 1]. Under torch.func.vmap, which knows no memory formats, as they lie."""
    if is_batchedtensor(image):
        return image.float() * (1 / 255) if image.dtype == torch.uint8 else image.float()
    x = image.to(dtype=torch.float32, memory_format=torch.channels_last)
    return x.mul_(1 / 255) if image.dtype == torch.uint8 else x


class Conv(nn.Conv2d):
    """A convolution that runs channels-last, as its weights lie in the flat vector (`flat.py`), unless that is turned off."""

    channels_last = True

    def forward(self, x: Tensor) -> Tensor:
        if self.channels_last:
            return super().forward(x)
        y: Tensor = self._conv_forward(x.contiguous(), self.weight.contiguous(), self.bias)
        return y


def lay_channels_last(module: nn.Module) -> None:
    """Let the weights of convolutions lie as they are computed with."""
    for p in module.parameters():
        if p.dim() == 4:
            p.data = p.data.contiguous(memory_format=torch.channels_last)


def flat_features(x: Tensor) -> Tensor:
    """[N, C, H, W] -> [N, H*W*C]: in the order of channels-last memory this is a view, not a copy."""
    return x.permute(0, 2, 3, 1).flatten(1)


class MLP(nn.Module):
    """Dense layers, each followed by the activation. ``sizes`` are those of the layers, without the input's."""

    def __init__(self, inputs: int, sizes: Sequence[int], activation: str = "tanh") -> None:
        super().__init__()
        widths = [inputs, *sizes]
        self._layers = [orthogonal(nn.Linear(i, o)) for i, o in pairwise(widths)]  # faster to walk than a ModuleList, when acting
        self.layers = nn.ModuleList(self._layers)
        self.features = widths[-1]
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:  # [N, inputs] -> [N, features]
        for layer in self._layers:
            x = self.activation(F.linear(x, layer.weight, layer.bias))
        return x


class NatureCNN(nn.Module):
    """8x8 stride 4 x 32, 4x4 stride 2 x 64, 3x3 x 64, dense 512."""

    features = 512

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        channels = _check_image("nature", shape, 36)
        self.convs = nn.ModuleList(
            orthogonal(conv)
            for conv in (Conv(channels, 32, 8, 4), Conv(32, 64, 4, 2), Conv(64, 64, 3, 1))
        )
        height, width = (((((n - 8) // 4 + 1) - 4) // 2 + 1) - 2 for n in shape[1:])
        self.dense = orthogonal(nn.Linear(64 * height * width, self.features))
        lay_channels_last(self)

    def forward(self, image: Tensor) -> Tensor:  # [N, C, H, W] -> [N, 512]
        x = to_channels_last(image)
        for conv in self.convs:
            x = torch.relu(conv(x))
        return torch.relu(self.dense(flat_features(x)))


class SmallConv(nn.Module):
    """3x3 x 16, dense 128: for boards and planes of about 10 x 10."""

    features = 128

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        channels = _check_image("small_conv", shape, 3)
        self.conv = orthogonal(Conv(channels, 16, 3))
        self.dense = orthogonal(nn.Linear(16 * (shape[1] - 2) * (shape[2] - 2), self.features))
        lay_channels_last(self)

    def forward(self, image: Tensor) -> Tensor:  # [N, C, H, W] -> [N, 128]
        x = torch.relu(self.conv(to_channels_last(image)))
        return torch.relu(self.dense(flat_features(x)))


class _Residual(nn.Module):
    """x + two convolutions of x."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = Conv(channels, channels, 3, padding=1)
        self.second = Conv(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        residual: Tensor = self.second(torch.relu(self.first(torch.relu(x))))
        return x + residual


class ImpalaResNet(nn.Module):
    """Three sections (16, 32, 32 channels) of conv 3x3, max-pool 3x3 stride 2, two residual blocks; dense 256."""

    features = 256

    def __init__(self, shape: Sequence[int], channels: Sequence[int] = (16, 32, 32)) -> None:
        super().__init__()
        inputs = _check_image("impala", shape, 8)
        sections: list[nn.Module] = []
        height, width = shape[1], shape[2]
        for outputs in channels:
            sections.append(
                nn.Sequential(
                    Conv(inputs, outputs, 3, padding=1),
                    nn.MaxPool2d(3, 2, padding=1),
                    _Residual(outputs),
                    _Residual(outputs),
                )
            )
            inputs, height, width = outputs, (height + 1) // 2, (width + 1) // 2
        self.sections = nn.Sequential(*sections)
        self.dense = orthogonal(nn.Linear(inputs * height * width, self.features))
        lay_channels_last(self)

    def forward(self, image: Tensor) -> Tensor:  # [N, C, H, W] -> [N, 256]
        x = torch.relu(self.sections(to_channels_last(image)))
        return torch.relu(self.dense(flat_features(x)))


def _check_image(torso: str, shape: Sequence[int], smallest: int) -> int:
    if len(shape) != 3 or min(shape[1:]) < smallest:
        raise ConfigError(
            f"--net.torso {torso} needs images (channels, height, width) of at least {smallest} x {smallest}, "
            f"but the observation has shape {tuple(shape)}; move the channels to the front or choose another torso"
        )
    return shape[0]
