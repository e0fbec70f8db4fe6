"""The network of action values, for acting and for learning, and the policy that acts on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from shoal.acting import StepView
from shoal.algorithms.common.model import Model
from shoal.algorithms.common.plan import AlgorithmPlan
from shoal.algorithms.common.policy import ModelPolicy
from shoal.core import Tree
from shoal.device.placement import Hardware
from shoal.nets.q_network import HeadConfig, QNetwork, QOutput, build_q
from shoal.ops import c51
from shoal.ops.distributions import greedy_log_prob
from shoal.slots import map_tree

__all__ = ["QModel", "QPolicy"]


class Estimated(NamedTuple):
    """What a net makes of one step."""

    q: torch.Tensor
    """[B, A]"""
    state: Tree
    """Of its memory, after the step."""
    logits: torch.Tensor | None = None
    """[B, A, Z] with atoms: the distributions that q are the means of."""


class QModel(Model[QNetwork]):
    """Action values, in float32 whatever the net was computed in."""

    def __init__(self, plan: AlgorithmPlan, head: HeadConfig, seed: int, learns: bool = False) -> None:
        """The same seed gives the same weights, and torch's own random state is left alone. `learns`: not for a policy alone."""
        spec = plan.spec
        representation = None if plan.contrast is None else plan.contrast.representation(seed, learns)
        super().__init__(build_q(plan.seen_space, spec.action_space, plan.net, head, seed), spec.observation_space,
                         plan.norm_size, representation)
        self._values: Callable[..., Any] | None = None  # compiled
        self._logits: Callable[..., Any] | None = None
        self._unroll: Callable[..., Any] | None = None

    def to(self, hardware: Hardware) -> None:
        """Compute there from now on."""
        super().to(hardware)
        self.net.support = self.net.support.to(hardware.device)
        self._values, self._unroll = self.compiled(self.net), self.compiled(self.net.unroll)
        self._logits = self.compiled(self.net.logits)

    def values(self, observation: Tree, noise: torch.Tensor | None = None) -> torch.Tensor:
        """[N, A] of observations that stand alone: nets without memory only."""
        seen = self.see(observation)
        with self.precision():
            found: torch.Tensor = (self._values or self.net)(seen, noise)
        return found

    def logits(self, observation: Tree, noise: torch.Tensor | None = None) -> torch.Tensor:
        """[N, A, Z] of the same, where returns are distributions over atoms."""
        seen = self.see(observation)
        with self.precision():
            found: torch.Tensor = (self._logits or self.net.logits)(seen, noise)
        return found

    def unroll(self, observation: Tree, first: torch.Tensor | None, state: Tree, *previous: torch.Tensor) -> QOutput:
        """A sequence [T, B, ...]."""
        with self.precision():
            output: QOutput = (self._unroll or self.net.unroll)(self.see(observation), first, state, *previous)
        return output

    def step(self, view: StepView, state: Tree, noise: torch.Tensor | None = None) -> Estimated:
        """One step of B seats, to act on; view and state are arrays or tensors. Only nets without memory have noise or atoms."""
        if not self._on_gpu:
            return self._step(view, state, noise)
        with self.precision():
            return self._step(view, state, noise)

    def _step(self, view: StepView, state: Tree, noise: torch.Tensor | None) -> Estimated:
        observation = self.see(map_tree(self.tensor, view.observation))
        if not state and self.net.atoms:
            logits = self.net.logits(observation, noise)
            return Estimated(c51.expected(logits, self.net.support), state, logits)
        if not state:
            return Estimated(self.net(observation, noise), state)
        state = {name: self.tensor(x) for name, x in state.items()}
        previous = () if view.prev_action is None else (self.tensor(view.prev_action), self.tensor(view.prev_reward))
        q, state, _ = self.net.step(observation, self.tensor(view.first), state, *previous)
        return Estimated(q, state)


class QPolicy(ModelPolicy[QModel]):
    """Epsilon-greedy, and with noisy layers by their noise: every seat has its own, drawn again at every step."""

    def initial_state(self, seats: int) -> Tree:
        return self.model.net.initial_state(seats)

    def act(self, view: StepView, state: Tree, explore: np.ndarray | None, rng: torch.Generator) -> tuple[Tree, Tree, Tree]:
        """`explore` is epsilon per seat; None acts greedily and without noise, the first of the best. The extras hold q, -inf where
        illegal, and with atoms the logits.

        Arrays are answered with arrays, tensors with tensors; then no number is read, and `explore` as an array means an epsilon
        of 0.
        """
        with torch.inference_mode():
            noise = self._noise(len(view.first), rng) if explore is not None else None
            q, state, logits = self.model.step(view, state, noise)
            if view.action_mask is not None:
                q = q.masked_fill(~self.model.tensor(view.action_mask), -torch.inf)
            action = q.argmax(-1)
            if not isinstance(view.first, np.ndarray):
                if isinstance(explore, torch.Tensor):
                    wild = torch.rand(len(action), generator=rng, device=q.device) < explore
                    action = torch.where(wild, _uniform(q, rng), action)
                return action, state, {"q": q} if logits is None else {"q": q, "logits": logits}
            if explore is not None:
                wild = torch.rand(len(action), generator=rng) < torch.from_numpy(explore)
                if wild.any():
                    action = torch.where(wild, _uniform(q, rng), action)
            extras = {"q": q.numpy()}
            if logits is not None:
                extras["logits"] = logits.numpy()
            return action.numpy(), state, extras

    def outputs(self, seen: Tree, state: Tree, mask: torch.Tensor | None) -> dict[str, Any]:
        net = self.model.net
        q, state, _ = net.estimate(seen, None, net.begun(seen, state))
        legal = q if mask is None else q.masked_fill(~mask, -torch.inf)
        found: dict[str, Any] = {"action": legal.argmax(-1), "q": q}
        return {**found, "state": state} if net.recurrent else found

    def log_prob(self, view: StepView, action: np.ndarray, explore: np.ndarray | None) -> np.ndarray | None:
        """Of the epsilon-greedy policy; with noisy layers it is not known."""
        if explore is not None and self.model.net.noise_size:
            return None
        with torch.inference_mode():
            q = self.model.step(view, {}).q
            if view.action_mask is not None:
                q = q.masked_fill(~self.model.tensor(view.action_mask), -torch.inf)
            epsilon = torch.zeros(len(q)) if explore is None else torch.as_tensor(explore)
            found = greedy_log_prob(q.argmax(-1).cpu(), torch.as_tensor(action), epsilon, (q > -torch.inf).sum(-1).cpu())
            return found.numpy()

    def _noise(self, seats: int, rng: torch.Generator) -> torch.Tensor | None:
        size = self.model.net.noise_size
        return torch.randn(seats, size, generator=rng, device=self.model.params.device) if size else None


def _uniform(q: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    """A legal action each, by the largest of as many random numbers."""
    return torch.rand(q.shape, generator=rng, device=q.device).masked_fill(q == -torch.inf, -1.0).argmax(-1)
