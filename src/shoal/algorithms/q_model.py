"""The acting side of dqn and r2d2, and the net that acting and learning have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shoal.algorithms.hardware import Hardware
from shoal.algorithms.placed import Placed
from shoal.core import StepView, Tree
from shoal.nets.q_network import QOutput, build_q
from shoal.slots import map_tree

if TYPE_CHECKING:
    from shoal.algorithms.q_plan import QPlan

__all__ = ["QModel", "QPolicy"]


class QModel(Placed):
    """A net with its parameters. Action values come in float32 whatever the net was computed in."""

    def __init__(self, plan: QPlan, seed: int) -> None:
        super().__init__(build_q(plan.spec.observation_space, plan.spec.action_space, plan.net, plan.head, seed))
        self._values: Any = None  # compiled
        self._unroll: Any = None

    def to(self, hardware: Hardware) -> None:
        """Compute there from now on."""
        super().to(hardware)
        self._values, self._unroll = self.compiled(self.net), self.compiled(self.net.unroll)

    def values(self, observation: Tree) -> torch.Tensor:
        """[N, A] of observations that stand alone: nets without memory only."""
        if not self._on_gpu:
            return self.net(observation)
        with self.precision():
            return (self._values or self.net)(observation)

    def unroll(self, observation: Tree, first: torch.Tensor | None, state: Tree, *previous: torch.Tensor) -> QOutput:
        """A sequence [T, B, ...]."""
        with self.precision():
            return (self._unroll or self.net.unroll)(observation, first, state, *previous)

    def step(self, view: StepView, state: Tree) -> QOutput:
        """One step of B seats, from arrays or tensors; so may the state be."""
        if not self._on_gpu:
            return self._step(view, state)
        with self.precision():
            return self._step(view, state)

    def _step(self, view: StepView, state: Tree) -> QOutput:
        observation = map_tree(self.tensor, view.observation)
        if not state:
            return self.net.step(observation, None, state)
        state = {name: self.tensor(x) for name, x in state.items()}
        previous = () if view.prev_action is None else (self.tensor(view.prev_action), self.tensor(view.prev_reward))
        return self.net.step(observation, self.tensor(view.first), state, *previous)


class QPolicy:
    """Epsilon-greedy, with private weights as some learner published them."""

    def __init__(self, model: QModel) -> None:
        self.model = model

    def to(self, hardware: Hardware) -> None:
        """Compute there from now on; a GPU is asked in tensors (serving.py does)."""
        self.model.to(hardware)

    def load(self, published: Tree) -> None:
        """From arrays, or from tensors on the same device; always into the same memory, which captured graphs read."""
        self.model.params.copy_(torch.as_tensor(published["params"]))

    def bind(self, published: Tree) -> None:
        """Act with these very arrays from now on."""
        self.model.move(torch.as_tensor(published["params"]))

    def initial_state(self, seats: int) -> Tree:
        return self.model.net.initial_state(seats)

    def act(
        self, view: StepView, state: Tree, explore: np.ndarray | None, rng: torch.Generator
    ) -> tuple[Any, Tree, Tree]:
        """`explore` is epsilon per seat; None acts greedily, the first of the best. The extras hold q, -inf where illegal.

        Arrays are answered with arrays, tensors with tensors; then no number is read, and an array means that nobody explores.
        """
        with torch.inference_mode():
            q, state, _ = self.model.step(view, state)
            if view.action_mask is not None:
                q = q.masked_fill(~self.model.tensor(view.action_mask), -torch.inf)
            action = q.argmax(-1)
            if not isinstance(view.first, np.ndarray):
                if isinstance(explore, torch.Tensor):
                    wild = torch.rand(len(action), generator=rng, device=q.device) < explore
                    action = torch.where(wild, _uniform(q, rng), action)
                return action, state, {"q": q}
            if explore is not None:
                wild = torch.rand(len(action), generator=rng) < torch.from_numpy(explore)
                if wild.any():
                    action = torch.where(wild, _uniform(q, rng), action)
            return action.numpy(), state, {"q": q.numpy()}


def _uniform(q: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    """A legal action each, by the largest of as many random numbers."""
    return torch.rand(q.shape, generator=rng, device=q.device).masked_fill(q == -torch.inf, -1.0).argmax(-1)
