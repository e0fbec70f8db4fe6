"""The policy of an evolution strategy: a net without randomness or memory, alone or in perturbed copies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from shoal.acting import StepView
from shoal.algorithms.common.model import Model
from shoal.algorithms.common.plan import AlgorithmPlan
from shoal.algorithms.common.policy import ModelPolicy
from shoal.algorithms.evolution.noise import NoiseTable, draw_indices
from shoal.core import Tree
from shoal.errors import ConfigError
from shoal.nets import PolicyNetwork, build_policy
from shoal.nets.batched import BatchedPolicy
from shoal.nets.continuous import bounded_range
from shoal.nets.encoder import Encoder
from shoal.nets.heads import action_head
from shoal.nets.virtual_norm import VirtualNorm, add_virtual_norm, statistics_of
from shoal.slots import map_tree

if TYPE_CHECKING:
    from shoal.algorithms.es import Config

__all__ = ["ActionReader", "EvolutionModel", "EvolutionPolicy", "PerturbedMembers"]


class ActionReader:
    """Reads actions [B, ...] from outputs [B, `outputs`]. Bounded Box actions are squashed by tanh."""

    def __init__(self, space: gym.Space[Any], name: str) -> None:
        self.box = space if isinstance(space, gym.spaces.Box) else None
        if self.box is None:
            self._head = action_head(space)
            self.outputs = self._head.outputs
            return
        if self.box.dtype is None or self.box.dtype.kind != "f":
            raise ConfigError(f"es cannot act in {name}: its action space is {space}; use an environment with Discrete, "
                              "MultiDiscrete or floating-point Box actions, or wrap it (gymnasium.wrappers.TransformAction)")
        self.outputs = int(np.prod(self.box.shape))
        bounded = bool(np.isfinite(self.box.low).all() and np.isfinite(self.box.high).all())
        self._range = bounded_range(self.box) if bounded else None

    def read(self, outputs: Tensor, mask: Tensor | None, noise: Tensor | None) -> Tensor:
        """`noise` [B, outputs] is added to Box actions, in units of half their range."""
        if self.box is None:
            return self._head.mode(outputs, mask)
        unit = outputs if self._range is None else torch.tanh(outputs)
        if noise is not None:
            unit = unit + noise
        flat = unit if self._range is None else self._range.scaled(unit.clamp(-1, 1))
        return flat.reshape(len(flat), *self.box.shape)


class EvolutionModel(Model[PolicyNetwork]):
    """A policy net and how its outputs are read. With `reference_size` observations in a reference batch its convolutional layers
    are normalised (virtual batch normalisation)."""

    def __init__(self, plan: AlgorithmPlan, seed: int, reference_size: int = 0) -> None:
        spec = plan.spec
        self.actions = ActionReader(spec.action_space, spec.name)
        net = build_policy(spec.observation_space, self.actions.outputs, plan.net, seed)
        self.norms: dict[str, VirtualNorm] = {}
        if reference_size:
            pixels = isinstance(spec.observation_space, gym.spaces.Box)
            if not isinstance(net.torso, Encoder) or not len(net.torso.cnns) or not pixels:
                raise ConfigError(f"--algorithm.reference-batch {reference_size} normalises convolutional layers over images, and "
                                  f"the network for {spec.name} is another one; leave it out")
            self.norms = add_virtual_norm(net.torso.cnns, "torso.cnns")
        super().__init__(net, spec.observation_space, plan.norm_size)

    def refer_to(self, reference: Tree) -> None:
        """Normalise with the statistics of these observations from now on."""
        with torch.inference_mode():
            found = statistics_of(self.norms, lambda: self.net(self.see(reference)))
            for name, norm in self.norms.items():
                norm.mean.copy_(found[f"{name}.mean"])
                norm.scale.copy_(found[f"{name}.scale"])

    def seen(self, view: StepView) -> tuple[Tree, torch.Tensor | None]:
        """What the net is shown, and the action mask."""
        mask = None if view.action_mask is None else self.tensor(view.action_mask)
        return self.see(map_tree(self.tensor, view.observation)), mask


class EvolutionPolicy(ModelPolicy[EvolutionModel]):
    """Acts with the parameters themselves; `explore` is the deviation of noise on Box actions, in units of half their range."""

    reference: torch.Tensor | None = None  # observations of the reference batch, [N, ...]

    def load(self, published: Tree) -> None:
        super().load(published)
        if "reference" in published:
            self.reference = torch.tensor(published["reference"])
            self.model.refer_to(self.reference)

    def act(self, view: StepView, state: Tree, explore: np.ndarray | None, rng: torch.Generator) -> tuple[Tree, Tree, Tree]:
        with torch.inference_mode():
            observation, mask = self.model.seen(view)
            outputs = self.model.net(observation)
            noise = None
            if explore is not None and explore.any():
                noise = torch.randn(outputs.shape, generator=rng) * torch.from_numpy(explore)[:, None]
            return self.model.actions.read(outputs, mask, noise).numpy(), state, {}

    def outputs(self, seen: Tree, state: Tree, mask: torch.Tensor | None) -> dict[str, torch.Tensor]:
        found = self.model.net(seen)
        return {"action": self.model.actions.read(found, mask, None), "outputs": found}


class PerturbedMembers:
    """A learning.Members: theta + sigma eps or theta - sigma eps on every row, eps a slice of the noise table."""

    def __init__(self, config: Config, model: EvolutionModel, rows: int, table: NoiseTable, seed: int) -> None:
        self.config, self.model, self.table, self.seed = config, model, table, seed
        self.action_noise = config.action_noise if model.actions.box is not None else 0.0
        self.copies = BatchedPolicy(model.net, rows, model.norms)
        self._policy = EvolutionPolicy(model)

    def load(self, published: Tree) -> None:
        self._policy.load(published)

    def perturb(self, iteration: int, numbers: np.ndarray) -> None:
        draws, opposite = (numbers // 2, numbers % 2) if self.config.mirrored else (numbers, np.zeros_like(numbers))
        indices = draw_indices(self.seed, iteration, draws, self.table)
        for row, index, turned in zip(self.copies.params, indices.tolist(), opposite.tolist(), strict=True):
            sigma = -self.config.sigma if turned else self.config.sigma
            torch.add(self.model.params, self.table.slice(index), alpha=sigma, out=row)
        if self._policy.reference is not None:
            with torch.inference_mode():
                self.copies.refer_to(self.model.see(self._policy.reference), numbers.tolist())

    def act(self, view: StepView, rng: torch.Generator) -> Tree:
        with torch.inference_mode():
            observation, mask = self.model.seen(view)
            outputs = self.copies(observation)
            noise = self.action_noise * torch.randn(outputs.shape, generator=rng) if self.action_noise else None
            return self.model.actions.read(outputs, mask, noise).numpy()
