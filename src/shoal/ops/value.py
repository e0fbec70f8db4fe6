"""Targets and losses of Q-learning, per element: DQN, Double DQN, Ape-X, R2D2.

Papers: DQN (Mnih et al. 2015), Double DQN (van Hasselt et al. 2016, 1509.06461), dueling heads (Wang et al. 2016,
1511.06581), value rescaling (Pohlen et al. 2018, 1805.11593), R2D2 (Kapturowski et al. 2019). ``q_t`` are the action
values ``[..., A]`` of the observation that the step led to. Nothing that makes a target carries a gradient. Losses have
the shape of the errors: importance weights and priorities are applied by the learner, never inside.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy.typing as npt
import torch
from torch import Tensor

from shoal.ops.returns import n_step_returns

__all__ = [
    "chosen",
    "delta_q",
    "double_q_values",
    "dueling",
    "huber",
    "legal",
    "n_step_transition",
    "polyak_",
    "q_values",
    "rescale",
    "squared",
    "transformed_targets",
    "unrescale",
]

RESCALE_EPSILON = 1e-3
Values = TypeVar("Values", Tensor, "npt.NDArray[Any]")
"""Actors rescale in NumPy, learners in torch."""


def chosen(q: Tensor, action: Tensor) -> Tensor:
    """q(s, a) of the actions, ``[..., A]`` and ``[...]`` -> ``[...]``."""
    return q.gather(-1, action.unsqueeze(-1)).squeeze(-1)


def legal(q: Tensor, mask: Tensor | None) -> Tensor:
    """The q-values with -inf where an action is illegal, for choosing among them."""
    return q if mask is None else q.masked_fill(~mask, -torch.inf)


@torch.no_grad()
def q_values(target_q_t: Tensor) -> Tensor:
    """The bootstrap of DQN: max_a Q(s', a) of the target net."""
    return target_q_t.amax(-1)


@torch.no_grad()
def double_q_values(online_q_t: Tensor, target_q_t: Tensor) -> Tensor:
    """The bootstrap of Double DQN: the online net selects the action, the target net evaluates it."""
    return chosen(target_q_t, online_q_t.argmax(-1))


def n_step_transition(r_t: Values, discount_t: Values) -> tuple[Values, Values]:
    """n steps ``[n, ...]`` as one: the discounted sum of rewards, and the discount of what follows.

    ``discount_t`` contains gamma; it is 0 after a termination, and the rewards behind it do not count.
    """
    total, product = r_t[0] + 0.0, discount_t[0] + 0.0
    for reward, discount in zip(r_t[1:], discount_t[1:], strict=True):
        total = total + product * reward
        product = product * discount
    return total, product


def rescale(x: Values, epsilon: float = RESCALE_EPSILON) -> Values:
    """h(x) = sign(x) (sqrt(|x| + 1) - 1) + epsilon x, in a form that keeps its digits near 0 in float32."""
    squashed: Values = x / ((abs(x) + 1) ** 0.5 + 1) + epsilon * x
    return squashed


def unrescale(y: Values, epsilon: float = RESCALE_EPSILON) -> Values:
    """The inverse of `rescale`, exact to rounding; the textbook form loses 6 % at 1e-4 in float32.

    With x = z (|z| + 2), that is z = sign(x) (sqrt(|x| + 1) - 1), h is the quadratic epsilon z |z| + (1 + 2 epsilon) z = y.
    """
    middle = 1 + 2 * epsilon
    z = 2 * y / (middle + (middle * middle + 4 * epsilon * abs(y)) ** 0.5)
    spread: Values = z * (abs(z) + 2)
    return spread


@torch.no_grad()
def transformed_targets(
    r_t: Tensor, discount_t: Tensor, v_t: Tensor, n: int, keep_t: Tensor | None = None, rescaled: bool = True
) -> Tensor:
    """n-step targets of a sequence ``[T, B]`` whose values ``v_t`` are in the space of `rescale` (or are not).

    ``keep_t`` = 0 marks a truncation, or the last real step before padding: no window crosses it.
    """
    if not rescaled:
        return n_step_returns(r_t, discount_t, v_t, n, keep_t)
    return rescale(n_step_returns(r_t, discount_t, unrescale(v_t), n, keep_t))


def squared(error: Tensor) -> Tensor:
    """Half the square."""
    return 0.5 * error.square()


def huber(error: Tensor, delta: float = 1.0) -> Tensor:
    """Half the square up to ``delta``, then a line: this clips the gradient, not the error (DQN's "clip to [-1, 1]")."""
    size = error.abs()
    inside = size.clamp(max=delta)
    return inside * (size - 0.5 * inside)


def dueling(value: Tensor, advantage: Tensor, axis: int = -1) -> Tensor:
    """Q = V + A - mean A: ``[..., 1]`` and ``[..., A]`` -> ``[..., A]``. ``axis`` is that of the actions."""
    return value + advantage - advantage.mean(axis, keepdim=True)


@torch.no_grad()
def delta_q(recomputed: Tensor, stored: Tensor, scale: Tensor) -> Tensor:
    """How wrong a recurrent state is (R2D2, section 3): the distance of two rows of q-values over the largest of the window.

    ``recomputed`` and ``stored`` are ``[..., A]``; ``scale`` is max over actions and time of the recomputed ones.
    """
    distance: Tensor = torch.linalg.vector_norm(recomputed - stored, dim=-1)
    return distance / scale.abs()


@torch.no_grad()
def polyak_(target: Tensor, params: Tensor, tau: float) -> None:
    """target <- (1 - tau) target + tau params; tau = 1 copies."""
    if tau == 1.0:
        target.copy_(params)
    else:
        target.lerp_(params, tau)
