"""The trunk of a net: what the actor-critic and the action-value net do before their heads.

    observation ──torso──> features ──┬──core──> features [T, B, F]
    previous action and reward ───────┘      (where net.prev_action_reward is set)

    unroll   learners: [T, B, ...] in one go; time is folded into the batch for everything but the LSTM
    step     actors and inference servers: [B, ...], with as little Python as possible

Where ``first`` is set an episode starts: the state is reset before that step, and the previous action and reward count as zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor, nn

from shoal.errors import ConfigError
from shoal.nets.cores import LSTMCore, PassThrough, State
from shoal.nets.encoder import Observation, encoder
from shoal.nets.net_config import NetConfig

__all__ = ["Trunk", "TrunkNetwork", "fold", "seeded"]


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Draw initial weights inside: reproducibly and without touching the global generator, unless ``seed`` is None."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class Trunk(nn.Module):
    """Torso and core. ``encode`` turns actions into floats [..., ``encoded``] for a net that sees its previous action."""

    def __init__(
        self, observation_space: gym.Space[Any], config: NetConfig, encode: Callable[[Tensor], Tensor], encoded: int
    ) -> None:
        super().__init__()
        self.torso = encoder(observation_space, config)
        self._encode = encode if config.prev_action_reward else None
        width = self.torso.features + (encoded + 1 if config.prev_action_reward else 0)
        self.core = LSTMCore(width, config.lstm_size) if config.recurrent == "lstm" else PassThrough(width)
        self.features = self.core.features

    @property
    def recurrent(self) -> bool:
        """Whether there is a state to carry."""
        return isinstance(self.core, LSTMCore)

    @property
    def sees_previous(self) -> bool:
        """Whether the previous action and reward are part of what it sees."""
        return self._encode is not None

    def initial_state(self, B: int) -> State:
        """State before the first step of an episode; {} for feed-forward nets."""
        return self.core.initial_state(B)

    def unroll(
        self,
        observation: Observation,
        first: Tensor | None,
        state: State,
        prev_action: Tensor | None = None,
        prev_reward: Tensor | None = None,
    ) -> tuple[Tensor, State, State]:
        """A sequence [T, B, ...] -> features [T, B, F], the state after the last step and the state after every step."""
        x = self.torso(fold(observation))
        x = x.reshape(*leading(observation, 2), x.shape[1])
        if self._encode is not None:
            x = torch.cat([x, _previous_step(self._encode, first, prev_action, prev_reward)], -1)
        unrolled: tuple[Tensor, State, State] = self.core(x, state, first)
        return unrolled

    def step(
        self,
        observation: Observation,
        first: Tensor | None,
        state: State,
        prev_action: Tensor | None = None,
        prev_reward: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """One step [B, ...] -> features [B, F] and the state after it."""
        x = self.torso(observation)
        if self._encode is not None:
            x = torch.cat([x, _previous_step(self._encode, first, prev_action, prev_reward)], 1)
        return self.core.step(x, state, first)


class TrunkNetwork(nn.Module):
    """A net that begins with a trunk, whose memory is its memory."""

    trunk: Trunk

    @property
    def recurrent(self) -> bool:
        """Whether there is a state to carry."""
        return self.trunk.recurrent

    def initial_state(self, B: int) -> State:
        """State before the first step of an episode; {} for feed-forward nets."""
        return self.trunk.initial_state(B)

    def begun(self, observation: Observation, state: State | None) -> State:
        """The state of a call that stands alone: as given, or that of episodes which begin with it."""
        if self.trunk.sees_previous:
            raise ConfigError("this network sees its previous action and reward (--net.prev-action-reward), which a call of the "
                              "module does not have; use run.policy.act")
        (rows,) = leading(observation, 1)
        if state is None:
            return self.initial_state(rows)
        if {len(part) for part in state.values()} - {rows}:
            raise ConfigError(f"state has other rows than the observation, which has {rows}; give the state of the same rows")
        return state


def fold(observation: Observation) -> Observation:
    """[T, B, ...] -> [T B, ...]"""
    if isinstance(observation, dict):
        return {key: fold(part) for key, part in observation.items()}
    return observation.flatten(0, 1)


def leading(observation: Observation, axes: int) -> tuple[int, ...]:
    """The sizes of the first axes, which all parts share: T and B of [T, B, ...], N of [N, ...]."""
    while isinstance(observation, dict):
        observation = next(iter(observation.values()))
    return tuple(observation.shape[:axes])


def _previous_step(
    encode: Callable[[Tensor], Tensor], first: Tensor | None, prev_action: Tensor | None, prev_reward: Tensor | None
) -> Tensor:
    """[..., encoded + 1]: encoded action and clipped reward; zero where an episode starts."""
    if prev_action is None or prev_reward is None:
        raise ConfigError("with --net.prev-action-reward the net needs prev_action and prev_reward at every step")
    reward = prev_reward.float().clamp(-1, 1).unsqueeze(-1)
    x = torch.cat([encode(prev_action), reward], -1)
    return x if first is None else x.masked_fill(first.unsqueeze(-1), 0.0)
