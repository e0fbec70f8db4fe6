"""All parameters of a module as one flat float32 vector, and all gradients as another.

`flatten` moves every parameter into one contiguous tensor; each Parameter becomes a view of it. Publishing weights,
loading them (``flat.copy_``), clipping, an all-reduce and an optimiser step (`shoal.ops.optimise`) then are one or a
few operations on one vector, whatever the number of layers. Convolution weights lie channels-last inside the vector, so
that their Parameters are permuted views with channels-last strides and the convolutions run in that layout.

    net = build(...); flat = flatten(net); grad = flat_grad(net)
    grad.zero_(); loss.backward(); clip_by_global_norm_(grad, 0.5); adam_(flat, grad, ...)

Initialise before flattening, and afterwards never call anything that replaces parameters or gradients: `.to()`,
`zero_grad(set_to_none=True)` (the default!), `load_state_dict(assign=True)`. `intact` tells whether it still holds.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["adopt", "flat_grad", "flatten", "intact"]


@torch.no_grad()
def flatten(module: nn.Module, into: Tensor | None = None) -> Tensor:
    """Move all parameters into one flat vector (a new one, or ``into``, e.g. in shared memory) and return it."""
    size = sum(p.numel() for p in module.parameters())
    flat = _vector(module, size, into)
    for p, view in _views(module, flat):
        view.copy_(p)
        p.data = view
    return flat


def adopt(module: nn.Module, flat: Tensor) -> Tensor:
    """Let all parameters be views of ``flat``, with the values that are there: others may be using it already."""
    _vector(module, sum(p.numel() for p in module.parameters()), flat)
    for p, view in _views(module, flat):
        p.data = view
    return flat


def flat_grad(module: nn.Module, into: Tensor | None = None) -> Tensor:
    """One zeroed flat gradient whose pieces are every parameter's ``.grad``; backward adds into it. Call it once."""
    size = sum(p.numel() for p in module.parameters())
    flat = _vector(module, size, into).zero_()
    for p, view in _views(module, flat):
        p.grad = view
    return flat


def intact(module: nn.Module, flat: Tensor, grad: Tensor | None = None) -> bool:
    """Whether every parameter (and gradient) still is the view that flatten (and flat_grad) made."""
    for p, view in _views(module, flat):
        if p.data_ptr() != view.data_ptr() or p.stride() != view.stride():
            return False
    if grad is not None:
        for p, view in _views(module, grad):
            if p.grad is None or p.grad.data_ptr() != view.data_ptr() or p.grad.stride() != view.stride():
                return False
    return True


def _vector(module: nn.Module, size: int, into: Tensor | None) -> Tensor:
    device = next(module.parameters()).device
    if into is None:
        return torch.empty(size, dtype=torch.float32, device=device)
    if into.shape != (size,) or into.dtype != torch.float32 or not into.is_contiguous():
        raise ValueError(
            f"flatten: the module has {size} parameters, but `into` is {tuple(into.shape)} of {into.dtype}; "
            "give a contiguous float32 vector of that size"
        )
    return into


def _views(module: nn.Module, flat: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
    """Each parameter with its piece of the vector, in the order of ``module.parameters()``."""
    views, start = [], 0
    for p in module.parameters():
        piece = flat[start : start + p.numel()]
        if p.dim() == 4:
            out, inner, height, width = p.shape
            view = piece.view(out, height, width, inner).permute(0, 3, 1, 2)
        else:
            view = piece.view(p.shape)
        views.append((p, view))
        start += p.numel()
    return views
