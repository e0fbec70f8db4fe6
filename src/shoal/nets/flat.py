"""All parameters of a module as one flat float32 vector, and all gradients as another.

`flatten` moves every parameter into one contiguous tensor; each Parameter becomes a view of it. Publishing weights,
loading them (``flat.copy_``), clipping, an all-reduce and an optimiser step (`shoal.ops.optimise`) then are one or a
few operations on one vector, whatever the number of layers. Convolution weights lie channels-last inside the vector, so
that their Parameters are permuted views with channels-last strides and the convolutions run in that layout.

    net = build(...); flat = flatten(net); grad = flat_grad(net)
    grad.zero_(); loss.backward(); clip_by_global_norm_(grad, 0.5); adam_(flat, grad, ...)

Initialise before flattening, and afterwards never call anything that replaces parameters or gradients: `.to()`,
`zero_grad(set_to_none=True)` (the default!), `load_state_dict(assign=True)`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["adopt", "flat_grad", "flatten", "parameter_views"]


@torch.no_grad()
def flatten(module: nn.Module) -> Tensor:
    """Move all parameters into one new flat vector and return it."""
    flat = _vector(module)
    for p, view in _views(module, flat):
        view.copy_(p)
        p.data = view
    return flat


def adopt(module: nn.Module, flat: Tensor) -> Tensor:
    """Let all parameters be views of ``flat``, with the values that are there: others may be using it already."""
    size = _size(module)
    if flat.shape != (size,) or flat.dtype != torch.float32 or not flat.is_contiguous():
        raise ValueError(
            f"adopt: the module has {size} parameters, but `flat` is {tuple(flat.shape)} of {flat.dtype}; "
            "give a contiguous float32 vector of that size"
        )
    for p, view in _views(module, flat):
        p.data = view
    return flat


def flat_grad(module: nn.Module) -> Tensor:
    """One zeroed flat gradient whose pieces are every parameter's ``.grad``; backward adds into it. Call it once."""
    flat = _vector(module).zero_()
    for p, view in _views(module, flat):
        p.grad = view
    return flat


def parameter_views(module: nn.Module, rows: Tensor) -> dict[str, Tensor]:
    """By name the parameters of several copies of the module, [R, ...] each: views of their flat vectors, ``rows`` [R, P]."""
    views, start = {}, 0
    for name, p in module.named_parameters():
        views[name] = _shaped(rows[:, start : start + p.numel()], p)
        start += p.numel()
    return views


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _vector(module: nn.Module) -> Tensor:
    return torch.empty(_size(module), dtype=torch.float32, device=next(module.parameters()).device)


def _views(module: nn.Module, flat: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
    """Each parameter with its piece of the vector, in the order of ``module.parameters()``."""
    views, start = [], 0
    for p in module.parameters():
        views.append((p, _shaped(flat[start : start + p.numel()], p)))
        start += p.numel()
    return views


def _shaped(pieces: Tensor, p: nn.Parameter) -> Tensor:
    """Pieces [..., numel] of flat vectors in the shape of a parameter; convolution weights lie channels-last in them."""
    lead = pieces.shape[:-1]
    if p.dim() == 4:
        out, inner, height, width = p.shape
        return pieces.view(*lead, out, height, width, inner).movedim(-1, -3)
    return pieces.view((*lead, *p.shape))  # a tuple: a parameter may be a single number
