"""Whether a net is still flat: used by the tests of every net."""

from __future__ import annotations

from torch import Tensor, nn

from shoal.nets.flat import _views


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
