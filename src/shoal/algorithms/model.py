"""The net, its flat parameters and the statistics through which it sees observations, for acting and for learning."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from shoal.algorithms.hardware import Hardware
from shoal.algorithms.placed import Placed
from shoal.core import StepView, Tree
from shoal.nets import NetConfig, Output, build
from shoal.slots import leaves, map_tree

if TYPE_CHECKING:
    from shoal.algorithms.batch import Batch
    from shoal.envs import EnvSpec

__all__ = ["Model"]

OBSERVATION_CLIP = 10.0  # of normalised observations, in standard deviations


class Model(Placed):
    """A net with its parameters, and the observation statistics in use.

    `statistics` are tensors owned by somebody else (the learner's normaliser), or None: then private ones.
    """

    def __init__(
        self,
        spec: EnvSpec,
        config: NetConfig,
        seed: int,
        norm_size: int,
        statistics: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        super().__init__(
            build(spec.observation_space, spec.action_space, config, spec.mask_size if spec.has_action_mask else None, seed)
        )
        self.recurrent = self.net.recurrent
        self._compiled: Any = None
        self._space, self._norm_size = spec.observation_space, norm_size
        self.watch(*(statistics or (torch.zeros(norm_size), torch.ones(norm_size))))

    def watch(self, mean: torch.Tensor, scale: torch.Tensor) -> None:
        """See observations through these statistics from now on."""
        self.mean, self.scale = mean, scale
        self._slices = _slices(self._space, mean, scale) if self._norm_size else None

    def to(self, hardware: Hardware) -> None:
        """Compute there from now on."""
        super().to(hardware)
        self.watch(self.mean.to(hardware.device), self.scale.to(hardware.device))
        self._compiled = self.compiled(self.net.unroll)

    def see(self, observation: Tree) -> Tree:
        """What the net is shown: floating-point numbers normalised, everything else as it is."""
        if self._slices is None:
            return observation
        return _scale(observation, self._slices)

    # -------------------------------------------------------------------------------- acting
    def step(self, view: StepView, state: Tree) -> Output:
        """One step of B seats, from arrays or tensors; so may the state be."""
        if self._hardware.on_gpu:
            with self.precision():
                return _full(self._step(view, state))
        return self._step(view, state)

    def _step(self, view: StepView, state: Tree) -> Output:
        observation = self.see(map_tree(self.tensor, view.observation))
        if not state and view.prev_action is None:
            return self.net.step(observation, None, state)
        first = self.tensor(view.first)
        state = {name: self.tensor(x) for name, x in state.items()}
        if view.prev_action is None:
            return self.net.step(observation, first, state)
        return self.net.step(observation, first, state, self.tensor(view.prev_action), self.tensor(view.prev_reward))

    # -------------------------------------------------------------------------------- learning
    def unroll(self, batch: Batch) -> Output:
        """All rows of a batch, from its initial recurrent state."""
        with self.precision():
            output = (self._compiled or self.net.unroll)(
                self.see(batch.observation),
                batch.first,
                batch.state,
                batch.prev_action,
                batch.prev_reward,
                all_states=self.recurrent and batch.finals is not None,
            )
        return _full(output) if self._hardware.on_gpu else output

    def judge(self, output: Output, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability of the actions that were taken, and entropy, both [T, B]."""
        T, head = batch.length, self.net.head
        params = output.params[:T]
        mask = None if batch.action_mask is None else batch.action_mask[:T]
        return head.log_prob(params, batch.action, mask), head.entropy(params, mask)

    @torch.no_grad()
    def next_values(self, batch: Batch, output: Output) -> torch.Tensor:
        """V(x_{t+1}) [T, B] from an unroll of T + 1 rows; of the true last observation where one was truncated."""
        values = output.value.detach()[1:]
        finals = batch.finals
        if finals is None:
            return values
        states = {name: x[finals.t, finals.b] for name, x in (output.states or {}).items()}
        with self.precision():
            found = self.net.final_values(self.see(finals.observation), states, finals.prev_action, finals.prev_reward)
        return finals.put(values, found.float())


def _full(output: Output) -> Output:
    """Losses and samples are computed in float32 whatever the net was computed in."""
    return output._replace(params=output.params.float(), value=output.value.float())


def _slices(space: Any, mean: torch.Tensor, scale: torch.Tensor) -> Tree:
    """For each leaf of an observation its views of mean and scale, None where it is not normalised."""
    from shoal.algorithms.records import leaf_tree

    tree: dict[str, Any] = {"": leaf_tree(space)}
    start = 0
    for path, (shape, dtype) in list(leaves(tree)):
        found = None
        if dtype == "float32":
            end = start + math.prod(shape)
            found = (mean[start:end].view(shape), scale[start:end].view(shape))
            start = end
        node = tree
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = found
    return tree[""]


def _scale(observation: Tree, slices: Any) -> Tree:
    if isinstance(observation, dict):
        return {key: _scale(part, slices[key]) for key, part in observation.items()}
    if slices is None:
        return observation
    return ((observation - slices[0]) * slices[1]).clamp_(-OBSERVATION_CLIP, OBSERVATION_CLIP)
