"""What policies of every family share: private weights and statistics, as a learner published them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from shoal.acting import StepView
from shoal.algorithms.common.model import Model
from shoal.algorithms.common.policy_module import PolicyModule
from shoal.core import Tree
from shoal.device.placement import Hardware
from shoal.errors import ConfigError

__all__ = ["ModelPolicy"]

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
        """What the module answers, by the names in policy_module.py: tensors with gradients. `seen` is what the net is shown."""
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
