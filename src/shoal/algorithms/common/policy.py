"""What policies of every family share: private weights and statistics, as a learner published them; and `run.module`, a policy's
network as a torch module that is called with observations as environments give them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from shoal.acting import StepView
from shoal.algorithms.common.model import Model, normalised
from shoal.algorithms.records.spaces import leaf_tree
from shoal.core import Tree
from shoal.device.placement import Hardware
from shoal.errors import ConfigError

__all__ = ["ModelPolicy", "Outputs", "PolicyModule"]

M = TypeVar("M", bound=Model[Any])


class ModelPolicy(ABC, Generic[M]):
    """A learning.DevicePolicy that lacks only `act`; `outputs` is optional."""

    def __init__(self, model: M) -> None:
        self.model = model

    @cached_property
    def module(self) -> PolicyModule:
        """The network, with the representation in front of it where there is one."""
        return PolicyModule(self.model, self.outputs)

    def outputs(self, seen: Tree, state: Tree, mask: torch.Tensor | None) -> dict[str, Any]:
        """What the module answers, by the names in PolicyModule: tensors with gradients. `seen` is what the net is shown."""
        raise ConfigError(f"{type(self).__name__} has no outputs(), so its network cannot be called; use run.policy.act")

    def to(self, hardware: Hardware) -> None:
        """Compute there from now on."""
        self.model.to(hardware)

    def load(self, published: Tree) -> None:
        """From arrays, or from tensors on the same device; always into the same memory, which captured graphs read."""
        self.model.params.copy_(torch.as_tensor(published["params"]))
        if published["norm"]:
            self.model.mean.copy_(torch.as_tensor(published["norm"]["mean"]))
            self.model.scale.copy_(torch.as_tensor(published["norm"]["scale"]))

    def bind(self, published: Tree) -> None:
        """Act with these very arrays (or tensors) from now on: writing them changes this policy."""
        self.model.move(torch.as_tensor(published["params"]))
        if published["norm"]:
            self.model.watch(torch.as_tensor(published["norm"]["mean"]), torch.as_tensor(published["norm"]["scale"]))

    def initial_state(self, seats: int) -> Tree:
        """Of the network's memory; {} where it has none."""
        return {}

    @abstractmethod
    def act(self, view: StepView, state: Tree, explore: np.ndarray | None, rng: torch.Generator) -> tuple[Tree, Tree, Tree]: ...


Outputs = Callable[[Tree, Tree, Tensor | None], dict[str, Any]]
"""What the net is shown, its memory and the mask of legal actions -> the likeliest action and what it rests on."""


class PolicyModule(nn.Module):
    """The network of a policy, under its own names of layers, with the statistics that observations are normalised with.

        found = run.module(observations)          # [N, ...], tensors or arrays; nested dictionaries for Dict and Tuple
        found["action"], found["logits"]

    Everything is a tensor with N rows, and gradients flow where torch computes them:

        action       the likeliest one, as `run.policy.act` chooses it; Discrete counts from 0, Box actions are not clipped
        logits       discrete actions of actor-critics (of all parts side by side for MultiDiscrete)
        mean, log_std   of Box actions; in [-1, 1] and, where actions are squashed, before the tanh (sac, bc, iql and others)
        q            action values (dqn and others)
        outputs      of the net of es
        value        of actor-critics whose value is not central
        state        memory after this step, to be given to the next call
    """

    observation_mean: Tensor
    observation_scale: Tensor

    def __init__(self, model: Model[Any], outputs: Outputs) -> None:
        super().__init__()
        whole = model.whole
        for name, child in whole.named_children():
            self.add_module(name, child)
        for name, parameter in whole.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        self._model, self._outputs = model, outputs
        self._normalises = bool(model.norm_size)
        if self._normalises:
            self.register_buffer("observation_mean", model.mean)
            self.register_buffer("observation_scale", model.scale)

    def forward(self, observation: Tree, state: Tree | None = None, mask: Tensor | None = None) -> dict[str, Any]:
        """`state` is that of the last call, None where episodes begin; `mask` [N, A] says which actions are legal."""
        model = self._model
        seen = _tensors(observation, leaf_tree(model.observation_space), "observation")
        if self._normalises:
            seen = normalised(seen, model.observation_space, self.observation_mean, self.observation_scale)
        elif model.representation is not None:
            seen = model.representation(seen)
        return self._outputs(seen, state, mask)


def _tensors(value: Any, leaf: Any, name: str) -> Tree:
    """A batch as the net takes it: floating-point numbers as float32."""
    if isinstance(leaf, dict):
        try:
            return {key: _tensors(value[int(key)] if isinstance(value, tuple) else value[key], part, key)
                    for key, part in leaf.items()}
        except (KeyError, IndexError, TypeError, ValueError):
            raise ConfigError(f"{name} has no parts {', '.join(leaf)}; give a dictionary with them") from None
    shape, dtype = leaf
    tensor = torch.as_tensor(value)
    if tuple(tensor.shape[1:]) != shape or not tensor.dim():
        hint = f"; it is a single one: give a batch, as {name}[None]" if tuple(tensor.shape) == shape else ""
        raise ConfigError(f"{name} has the shape {tuple(tensor.shape)}, and the network takes {('N', *shape)}{hint}")
    return tensor.float() if dtype.startswith("float") else tensor
