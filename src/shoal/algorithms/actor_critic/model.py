"""The network of an actor-critic, for acting and for learning, and the policy that acts on it: B seats in, actions and their
log-probabilities out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shoal.acting import StepView
from shoal.algorithms.common.model import Model
from shoal.algorithms.common.plan import AlgorithmPlan
from shoal.algorithms.common.policy import ModelPolicy
from shoal.core import Tree
from shoal.device.placement import Hardware
from shoal.nets import ActorCriticNetwork, ActorCriticOutput, build
from shoal.nets.heads import LatentActionHead
from shoal.slots import leaves, map_tree

if TYPE_CHECKING:
    from shoal.algorithms.actor_critic.unroll_batch import UnrollBatch

__all__ = ["ActorCriticModel", "ActorCriticPolicy"]


class ActorCriticModel(Model[ActorCriticNetwork]):
    """Policy parameters and values, in float32 whatever the net was computed in."""

    def __init__(self, plan: AlgorithmPlan, seed: int) -> None:
        """The same seed gives the same weights, and torch's own random state is left alone."""
        spec = plan.spec
        self.agents, self.central = spec.seats_per_env, plan.net.central_value
        super().__init__(build(spec.observation_space, spec.action_space, plan.net, plan.mask_size or None, seed, self.agents),
                         spec.observation_space, plan.norm_size)
        self.recurrent = self.net.recurrent
        self.latent_head = self.net.head if isinstance(self.net.head, LatentActionHead) else None
        self._compiled: Callable[..., Any] | None = None

    def to(self, hardware: Hardware) -> None:
        """Compute there from now on."""
        super().to(hardware)
        self._compiled = self.compiled(self.net.unroll)

    # -------------------------------------------------------------------------------- acting
    def step(self, view: StepView, state: Tree) -> ActorCriticOutput:
        """One step of B seats; view and state are arrays or tensors."""
        if self._on_gpu:
            with self.precision():
                return _full(self._step(view, state))
        return self._step(view, state)

    def _step(self, view: StepView, state: Tree) -> ActorCriticOutput:
        observation = self.see(map_tree(self.tensor, view.observation))
        if not state and view.prev_action is None:
            return self.net.step(observation, None, state)
        first = self.tensor(view.first)
        state = {name: self.tensor(x) for name, x in state.items()}
        if view.prev_action is None:
            return self.net.step(observation, first, state)
        return self.net.step(observation, first, state, self.tensor(view.prev_action), self.tensor(view.prev_reward))

    # -------------------------------------------------------------------------------- learning
    def unroll(self, batch: UnrollBatch) -> ActorCriticOutput:
        """All rows of a batch, from its initial recurrent state."""
        with self.precision():
            output: ActorCriticOutput = (self._compiled or self.net.unroll)(
                self.see(batch.observation),
                batch.first,
                batch.state,
                batch.prev_action,
                batch.prev_reward,
                all_states=self.recurrent and batch.finals is not None,
                **self._joint(batch.joint),
            )
        return _full(output) if self._on_gpu else output

    def _joint(self, joint: Tree) -> dict[str, Tree]:
        """What a central value sees, for a net that has one."""
        return {} if joint is None else {"joint": self.see(joint)}

    def judge(self, output: ActorCriticOutput, batch: UnrollBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability of the actions that were taken, and entropy, both [T, B]."""
        T, head = batch.length, self.net.head
        params = output.params[:T]
        if self.latent_head is not None and batch.latent is not None:
            return self.latent_head.latent_log_prob(params, batch.latent), head.entropy(params)
        mask = None if batch.action_mask is None else batch.action_mask[:T]
        return head.log_prob(params, batch.action, mask), head.entropy(params, mask)

    @torch.no_grad()
    def next_values(self, batch: UnrollBatch, output: ActorCriticOutput) -> torch.Tensor:
        """V(x_{t+1}) [T, B] from an unroll of T + 1 rows; of the true last observation where one was truncated."""
        values: torch.Tensor = output.value.detach()[1:]
        finals = batch.finals
        if finals is None:
            return values
        states = {name: x[finals.t, finals.b] for name, x in (output.states or {}).items()}
        with self.precision():
            found = self.net.final_values(self.see(finals.observation), states, finals.prev_action, finals.prev_reward,
                                          **self._joint(finals.joint))
        return finals.put(values, found.float())


def _full(output: ActorCriticOutput) -> ActorCriticOutput:
    return output._replace(params=output.params.float(), value=output.value.float())


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
