"""Unrolls that never leave their device: a policy, environments of tensors, and the memory that both write.

The same numbers as an actor's slot (algorithms/records/unroll.py), but as an UnrollBatch of tensors with shapes that never change:
each column has room for one truncated episode, and all of it is written in place, so that a CUDA graph may repeat it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shoal.acting import Policy, StepView
from shoal.algorithms.actor_critic.unroll_batch import Finals, UnrollBatch
from shoal.algorithms.records.unroll import Unroll
from shoal.core import Tree
from shoal.envs.device import TensorEnv
from shoal.errors import ConfigError
from shoal.slots import Field, leaves, map_tree

__all__ = ["DeviceUnroll"]


class DeviceUnroll:
    """Plays T steps of E environments at a time; environments, recurrent states and episodes continue from one to the next."""

    def __init__(self, record: Unroll, env: TensorEnv, policy: Policy, explore: Any, generator: torch.Generator,
                 device: torch.device) -> None:
        self.record, self.env, self.policy, self.explore, self.generator = record, env, policy, explore, generator
        self.T, self.B = record.length, record.seats
        if env.max_episode_steps is not None and env.max_episode_steps < self.T:
            raise ConfigError(f"--algorithm.unroll {self.T} is longer than an episode of {env.max_episode_steps} steps: here a row "
                              f"has room for one truncated episode; use --algorithm.unroll {env.max_episode_steps} or less")

        def blank(field: Field) -> torch.Tensor:
            return torch.from_numpy(np.zeros(field.shape, field.dtype)).to(device)

        fields = {name: part for name, part in record.layout.fields.items() if not name.endswith("moments")}
        fields["final_observation"] = map_tree(lambda f: Field((self.B, *f.shape[2:]), f.dtype), fields["observation"])
        self.data = map_tree(blank, fields)
        self.columns = torch.arange(self.B, device=device)
        self.final_t = torch.zeros(self.B, dtype=torch.int64, device=device)
        self.hidden = {name: tensor.clone() for name, tensor in policy.initial_state(self.B).items()}
        self.episode = torch.zeros((2, self.B), device=device)  # return and length so far
        self.episodes = torch.zeros(3, dtype=torch.float64, device=device)  # episodes that ended, their returns, their lengths
        self.running = torch.zeros(self.B, dtype=torch.float64, device=device)  # discounted return, for its moments
        self._see(self.T, env.reset(generator), torch.ones(self.B, dtype=torch.bool, device=device))

    @property
    def decisions(self) -> int:
        return self.T * self.B

    def play(self) -> UnrollBatch:
        """T more steps. The UnrollBatch is the same memory every time."""
        data, T = self.data, self.T
        with torch.no_grad():
            self._begin()
            state: Tree = self.hidden
            for t in range(T):
                action, state, extras = self.policy.act(self._view(t), state, self.explore, self.generator)
                self._write(t, action, extras["log_prob"], self.env.step(action, self.generator))
            for name, tensor in self.hidden.items():
                tensor.copy_(state[name])
            moments = self._moments()
        return UnrollBatch(
            observation=data["observation"], first=data["first"], action_mask=None, prev_action=data.get("prev_action"),
            prev_reward=data.get("prev_reward"), state=data["state"], action=data["action"], log_prob=data["extras"]["log_prob"],
            reward=data["reward"], discount=data["discount"], keep=(~data["last"]).float(), valid=None, finals=self._finals(),
            moments=moments,
        )

    def _begin(self) -> None:
        """What came last comes first."""
        data = self.data
        for name in ("observation", "first", "prev_action", "prev_reward"):
            if name in data:
                map_tree(lambda x: x[0].copy_(x[self.T]), data[name])
        for name, tensor in self.hidden.items():
            data["state"][name].copy_(tensor)

    def _view(self, t: int) -> StepView:
        data = self.data
        view = StepView(map_tree(lambda x: x[t], data["observation"]), data["first"][t])
        if "prev_action" in data:
            view.prev_action, view.prev_reward = data["prev_action"][t], data["prev_reward"][t]
        return view

    def _write(self, t: int, action: torch.Tensor, log_prob: torch.Tensor, step: Any) -> None:
        data = self.data
        last = step.terminated | step.truncated
        data["action"][t].copy_(action)
        data["extras"]["log_prob"][t].copy_(log_prob)
        data["reward"][t].copy_(step.reward)
        data["discount"][t].copy_(~step.terminated)
        data["last"][t].copy_(last)
        if self.env.max_episode_steps is not None:
            cut = step.truncated
            data["truncated"][t].copy_(cut)
            self.final_t.copy_(torch.where(cut, t, self.final_t))
            map_tree(lambda old, new: old.copy_(torch.where(cut.view(-1, *(1,) * (new.dim() - 1)), new, old)),
                     data["final_observation"], step.final_observation)
        self._see(t + 1, step.observation, last)
        if "prev_action" in data:
            data["prev_action"][t + 1].copy_(action * (~last).view(-1, *(1,) * (action.dim() - 1)))
            data["prev_reward"][t + 1].copy_(step.reward * ~last)
        self._count(step.reward, last)

    def _see(self, t: int, observation: Tree, first: torch.Tensor) -> None:
        map_tree(lambda target, source: target[t].copy_(source), self.data["observation"], observation)
        self.data["first"][t].copy_(first)

    def _count(self, reward: torch.Tensor, last: torch.Tensor) -> None:
        """Returns and lengths of the episodes that ended."""
        self.episode[0].add_(reward)
        self.episode[1].add_(1.0)
        self.episodes[0].add_(last.sum())
        self.episodes[1:].add_((self.episode * last).sum(1))
        self.episode.mul_(~last)

    def _finals(self) -> Finals | None:
        if self.env.max_episode_steps is None:
            return None
        data, previous = self.data, "prev_action" in self.data
        at = (self.final_t, self.columns)
        return Finals(*at, data["final_observation"], data["action"][at] if previous else None,
                      data["reward"][at] if previous else None, where=data["truncated"])

    def _moments(self) -> Tree:
        """What a recorder sends along, where observations or returns are normalised."""
        data, record, moments = self.data, self.record, {}
        if record.observation_moments:
            floats = [x[: self.T].flatten(0, 1).flatten(1) for _, x in leaves(data["observation"]) if x.is_floating_point()]
            moments["observation_moments"] = _sums(torch.cat(floats, 1).double())
        if record.return_moments:
            returns = torch.empty((self.T, self.B), dtype=torch.float64, device=self.running.device)
            for t in range(self.T):
                torch.add(self.running * record.gamma, data["reward"][t], out=returns[t])
                self.running.copy_(returns[t] * ~data["last"][t])
            moments["return_moments"] = _sums(returns.view(-1, 1))
        return moments


def _sums(values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Relative to the values' own mean: nothing cancels."""
    shift = values.mean(0, keepdim=True)
    delta = values - shift
    count = torch.full((1, 1), float(len(values)), dtype=torch.float64, device=values.device)
    return {"count": count, "shift": shift, "sum": delta.sum(0, keepdim=True), "square": delta.square().sum(0, keepdim=True)}
