"""The acting side of a2c, ppo and vtrace: B seats in, actions and their log-probabilities out."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shoal.algorithms.hardware import Hardware
from shoal.algorithms.model import Model
from shoal.core import StepView, Tree
from shoal.slots import leaves

__all__ = ["ActorCriticPolicy"]


class ActorCriticPolicy:
    """Private weights and statistics, as some learner published them."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def to(self, hardware: Hardware) -> None:
        """Compute there from now on. What comes as arrays is moved there and answered in arrays."""
        self.model.to(hardware)

    def load(self, published: Tree) -> None:
        """From arrays, or from tensors on the same device; always into the same memory, which captured graphs read."""
        self.model.params.copy_(torch.as_tensor(published["params"]))
        if published["norm"]:
            self.model.mean.copy_(torch.as_tensor(published["norm"]["mean"]))
            self.model.scale.copy_(torch.as_tensor(published["norm"]["scale"]))

    def bind(self, published: Tree) -> None:
        """Act with these very arrays (or tensors) from now on: whoever writes them changes this policy (GA3C's one model)."""
        self.model.move(torch.as_tensor(published["params"]))
        if published["norm"]:
            self.model.watch(torch.as_tensor(published["norm"]["mean"]), torch.as_tensor(published["norm"]["scale"]))

    def initial_state(self, seats: int) -> Tree:
        return self.model.net.initial_state(seats)

    def act(
        self, view: StepView, state: Tree, explore: np.ndarray | None, rng: torch.Generator
    ) -> tuple[Any, Tree, Tree]:
        """`explore` is the share of uniform actions per seat; None acts greedily. The extras hold log mu(a|x).

        Arrays are answered with arrays, tensors with tensors.
        """
        with torch.inference_mode():
            output = self.model.step(view, state)
            head, mask = self.model.net.head, view.action_mask
            if mask is not None:
                mask = self.model.tensor(mask)
            if explore is None:
                action = head.mode(output.params, mask)
                log_prob = head.log_prob(output.params, action, mask)
            else:
                none = isinstance(explore, np.ndarray) and not explore.any()
                mix = None if none else self.model.tensor(explore)
                action, log_prob = head.sample(output.params, rng, mask, mix)
            if isinstance(next(leaves(view.observation))[1], torch.Tensor):
                return action, output.state, {"log_prob": log_prob}
            return action.cpu().numpy(), output.state, {"log_prob": log_prob.cpu().numpy()}
