"""The value Q(s, a) of many actions for each state, for methods that search for the best action (QT-Opt).

    observation ──CNNs, or as it is──linear──┐
                                             + ──activation──dense layers──linear──> one number for each action
    actions, scaled to [-1, 1] ──────linear──┘

The state is encoded once, however many actions are compared; the embedded action is added to it (Kalashnikov et al. 2018).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gymnasium as gym
import torch
from gymnasium import spaces
from torch import Tensor, nn

from shoal.errors import ConfigError
from shoal.nets.encoder import Observation, encoder
from shoal.nets.heads import ActionRange
from shoal.nets.net_config import NetConfig
from shoal.nets.torsos import ACTIVATIONS, MLP, orthogonal
from shoal.nets.trunk import seeded

__all__ = ["ActionValue", "build_action_value"]


def build_action_value(observation_space: gym.Space[Any], action_space: gym.Space[Any], config: NetConfig | None = None,
                       seed: int | None = None) -> ActionValue:
    """The net for these spaces. ``seed`` makes the initial weights reproducible without touching the global generator."""
    config = config or NetConfig()
    config.validate()
    if not isinstance(action_space, spaces.Box):
        raise ConfigError(f"a search over actions needs Box actions, but the action space is {action_space}; use dqn or r2d2 for "
                          "Discrete ones")
    if not config.hidden:
        raise ConfigError("--net.hidden is empty, but the value of an action needs at least one layer; give --net.hidden 128 128")
    if config.recurrent != "none" or config.prev_action_reward:
        raise ConfigError(f"--net.recurrent is {config.recurrent!r} and --net.prev-action-reward is {config.prev_action_reward}, "
                          "but the value of an action has no memory; turn both off")
    with seeded(seed):
        return ActionValue(observation_space, action_space, config)


class ActionValue(nn.Module):
    """``encode`` the observations once, then ask for the values of actions [N, K, D]."""

    def __init__(self, observation_space: gym.Space[Any], action_space: spaces.Box, config: NetConfig) -> None:
        super().__init__()
        self.torso = encoder(observation_space, replace(config, hidden=()))  # vectors as they are, images through CNNs
        self.size = torch.Size(action_space.shape).numel()
        first, *rest = config.hidden
        joined = orthogonal(nn.Linear(self.torso.features + self.size, first))  # as one layer over both begins
        self.state, self.action = nn.Linear(self.torso.features, first), nn.Linear(self.size, first, bias=False)
        with torch.no_grad():
            self.state.weight.copy_(joined.weight[:, : self.torso.features])
            self.action.weight.copy_(joined.weight[:, self.torso.features :])
            self.state.bias.zero_()
        self.mlp = MLP(first, rest, config.activation)
        self.out = orthogonal(nn.Linear(self.mlp.features, 1), 1.0)
        self.range = ActionRange(action_space, "a search over actions", "use a Gaussian policy, for instance with ppo")
        self._activation = ACTIVATIONS[config.activation]

    def encode(self, observation: Observation) -> Tensor:
        """observation [N, ...] -> [N, H]."""
        found: Tensor = self.state(self.torso(observation))
        return found

    def forward(self, encoded: Tensor, unit: Tensor) -> Tensor:
        """encoded [N, H], actions in [-1, 1] [N, K, D] -> values [N, K]."""
        x = self._activation(encoded.unsqueeze(1) + self.action(unit))
        found: Tensor = self.out(self.mlp(x.flatten(0, 1)))
        return found.view(unit.shape[:2])
