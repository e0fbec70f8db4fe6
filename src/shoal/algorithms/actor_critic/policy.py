"""The acting side of actor-critics: B seats in, actions and their log-probabilities out."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shoal.acting import StepView
from shoal.algorithms.actor_critic.model import ActorCriticModel
from shoal.algorithms.common.policy import ModelPolicy
from shoal.core import Tree
from shoal.nets.heads import LatentActionHead
from shoal.slots import leaves

__all__ = ["ActorCriticPolicy"]


class ActorCriticPolicy(ModelPolicy[ActorCriticModel]):
    """Samples from the network's policy, mixed with uniform actions."""

    def initial_state(self, seats: int) -> Tree:
        return self.model.net.initial_state(seats)

    def act(self, view: StepView, state: Tree, explore: np.ndarray | None, rng: torch.Generator) -> tuple[Tree, Tree, Tree]:
        """`explore` is the share of uniform actions per seat; None acts greedily. The extras hold log mu(a|x) and the latent
        action of a squashed one.

        Arrays are answered with arrays, tensors with tensors.
        """
        with torch.inference_mode():
            output = self.model.step(view, state)
            latent_head = self.model.latent_head
            if latent_head is not None:
                action, extras = self._squashed(latent_head, output.params, explore is None, rng)
            else:
                action, extras = self._chosen(output.params, view, explore, rng)
            if isinstance(next(leaves(view.observation))[1], torch.Tensor):
                return action, output.state, extras
            return action.cpu().numpy(), output.state, {name: x.cpu().numpy() for name, x in extras.items()}

    def outputs(self, seen: Tree, state: Tree, mask: torch.Tensor | None) -> dict[str, Any]:
        net, head = self.model.net, self.model.net.head
        output = net(seen, None, net.begun(seen, state))
        found: dict[str, Any] = {"action": head.mode(output.params, mask)}
        if head.mask_size:
            found["logits"] = output.params
        else:
            found["mean"], found["log_std"] = output.params.chunk(2, -1)
        if not (net.central or net.stateful):
            found["value"] = output.value
        return {**found, "state": output.state} if net.recurrent else found

    def probabilities(self, view: StepView) -> np.ndarray:
        """Of every action, [B, A]; for discrete actions and nets without memory."""
        with torch.inference_mode():
            head, params = self.model.net.head, self.model.step(view, {}).params
            mask = None if view.action_mask is None else self.model.tensor(view.action_mask)
            actions = torch.arange(params.shape[-1])
            each = [head.log_prob(params, action.expand(len(params)), mask).exp() for action in actions]
            return np.asarray(torch.stack(each, 1).cpu().numpy())

    def log_prob(self, view: StepView, action: np.ndarray, explore: np.ndarray | None) -> np.ndarray | None:
        """Of what it samples, mixed with uniform actions; greedily it takes the likeliest of discrete actions."""
        with torch.inference_mode():
            head, params = self.model.net.head, self.model.step(view, {}).params
            taken = self.model.tensor(action)
            mask = None if view.action_mask is None else self.model.tensor(view.action_mask)
            if explore is not None:
                mix = self.model.tensor(explore) if explore.any() else None
                return np.asarray(head.log_prob(params, taken, mask, mix).cpu().numpy())
            if not head.mask_size:
                return None
            same = (head.mode(params, mask) == taken).reshape(len(taken), -1).all(1)
            return np.asarray(same.float().log().cpu().numpy())

    def _chosen(self, params: torch.Tensor, view: StepView, explore: np.ndarray | None,
                rng: torch.Generator) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        head = self.model.net.head
        mask = None if view.action_mask is None else self.model.tensor(view.action_mask)
        if explore is None:
            action = head.mode(params, mask)
            return action, {"log_prob": head.log_prob(params, action, mask)}
        none = isinstance(explore, np.ndarray) and not explore.any()
        action, log_prob = head.sample(params, rng, mask, None if none else self.model.tensor(explore))
        return action, {"log_prob": log_prob}

    def _squashed(self, head: LatentActionHead, params: torch.Tensor, greedy: bool,
                  rng: torch.Generator) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The learner needs the latent action: what tanh rounds to 1 cannot be inverted."""
        if greedy:
            latent = head.latent_mode(params)
            log_prob = head.latent_log_prob(params, latent)
        else:
            latent, log_prob = head.sample_latent(params, rng)
        return head.squash(latent), {"log_prob": log_prob, "latent": latent}
