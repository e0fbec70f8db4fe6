"""The acting side of dqn and r2d2, and the net that acting and learning have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from shoal.core import StepView, Tree
from shoal.nets.flat import adopt, flat_grad, flatten
from shoal.nets.q_network import QOutput, build_q
from shoal.slots import map_tree

if TYPE_CHECKING:
    from shoal.algorithms.q_plan import QPlan

__all__ = ["QModel", "QPolicy"]


class QModel:
    """A net and `params`, the flat vector of which its parameters are views."""

    def __init__(self, plan: QPlan, seed: int) -> None:
        self.net = build_q(plan.spec.observation_space, plan.spec.action_space, plan.net, plan.head, seed)
        self.params = flatten(self.net)
        self._grad: torch.Tensor | None = None

    def move(self, into: torch.Tensor) -> None:
        """Let the parameters live in `into`, with the values that are there."""
        self.params = adopt(self.net, into)

    @property
    def grad(self) -> torch.Tensor:
        """The flat gradient; made when first asked for, because actors and target nets need none."""
        if self._grad is None:
            self._grad = flat_grad(self.net)
        return self._grad

    def step(self, view: StepView, state: Tree) -> QOutput:
        """One step of B seats from NumPy; the state may come as arrays or as the tensors that the last step gave."""
        observation = map_tree(torch.from_numpy, view.observation)
        if not state:
            return self.net.step(observation, None, state)
        state = {name: torch.as_tensor(x) for name, x in state.items()}
        previous = () if view.prev_action is None else (torch.from_numpy(view.prev_action), torch.from_numpy(view.prev_reward))
        return self.net.step(observation, torch.from_numpy(view.first), state, *previous)


class QPolicy:
    """Epsilon-greedy, with private weights as some learner published them."""

    def __init__(self, model: QModel) -> None:
        self.model = model

    def load(self, published: Tree) -> None:
        self.model.params.copy_(torch.from_numpy(published["params"]))

    def bind(self, published: Tree) -> None:
        """Act with these very arrays from now on."""
        self.model.move(torch.from_numpy(published["params"]))

    def initial_state(self, seats: int) -> Tree:
        return self.model.net.initial_state(seats)

    def act(
        self, view: StepView, state: Tree, explore: np.ndarray | None, rng: torch.Generator
    ) -> tuple[np.ndarray, Tree, Tree]:
        """`explore` is epsilon per seat; None acts greedily, the first of the best. The extras hold q, -inf where illegal."""
        with torch.inference_mode():
            q, state, _ = self.model.step(view, state)
            mask = None if view.action_mask is None else torch.from_numpy(view.action_mask)
            if mask is not None:
                q = q.masked_fill(~mask, -torch.inf)
            action = q.argmax(-1)
            if explore is not None:
                wild = torch.rand(len(action), generator=rng) < torch.from_numpy(explore)
                if wild.any():
                    action = torch.where(wild, _uniform(q, rng), action)
            return action.numpy(), state, {"q": q.numpy()}


def _uniform(q: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    """A legal action each, by the largest of as many random numbers."""
    return torch.rand(q.shape, generator=rng).masked_fill(q == -torch.inf, -1.0).argmax(-1)
