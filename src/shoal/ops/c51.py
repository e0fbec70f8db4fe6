"""C51: a return as probabilities of Z fixed numbers, the atoms (Bellemare, Dabney and Munos 2017, 1707.06887).

The atoms ``support [Z]`` lie evenly between the smallest and the largest return that can be told apart. A net gives logits
``[..., Z]``; a target is the distribution of what an action led to, shrunk by the discount, moved by the rewards and spread over
the atoms again.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["divergence", "expected", "moved", "project"]


def expected(logits: Tensor, support: Tensor) -> Tensor:
    """The mean return, ``[..., Z]`` -> ``[...]``."""
    return (logits.softmax(-1) * support).sum(-1)


def moved(support: Tensor, r_t: Tensor, discount_t: Tensor) -> Tensor:
    """Where the atoms of what followed lie now: ``[...]`` -> ``[..., Z]``, maybe outside the support."""
    return r_t.unsqueeze(-1) + discount_t.unsqueeze(-1) * support


@torch.no_grad()
def project(support: Tensor, places: Tensor, probabilities: Tensor) -> Tensor:
    """Spread probabilities ``[..., Z]`` of returns ``places`` over the atoms: each is shared by the two nearest ones, the nearer
    gets more; what lies outside goes to the end.

    Written as a product with a triangle around every atom: no index is computed, so nothing depends on how a place on an atom is
    rounded, and the order of sums is always the same.
    """
    width = support[1] - support[0]
    inside = places.clamp(support[0], support[-1])
    share = (1 - (inside.unsqueeze(-2) - support.unsqueeze(-1)).abs() / width).clamp(min=0)  # [..., atom, place]
    return (share * probabilities.unsqueeze(-2)).sum(-1)


def divergence(target: Tensor, logits: Tensor) -> Tensor:
    """KL(target || softmax(logits)), ``[..., Z]`` -> ``[...]``; its gradient is that of the cross-entropy."""
    return (torch.xlogy(target, target) - target * logits.log_softmax(-1)).sum(-1)
