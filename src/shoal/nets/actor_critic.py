"""The actor-critic net: a trunk, and one linear layer that gives policy parameters and value together.

    observation ──Trunk──> features ──linear──> policy parameters, value

With `separate_value` the value has a torso of its own. With `central_value` that torso is applied to what each agent of the
environment sees, and one more layer joins them: own observation first, then those of the agents that follow. With `state_value`
observations are {seen, state}: the policy reads the first part, the value the second. Acting has no values then, and no state.

`unroll` is for learners, `step` for actors and inference servers (see `trunk`); `final_values` gives the bootstrap values of
truncated episodes, whose last observations are in no sequence. Policy outputs start near uniform (gain .01), values with gain 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import gymnasium as gym
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.acting import SEEN, STATE
from shoal.errors import ConfigError
from shoal.nets.cores import State
from shoal.nets.encoder import Observation, encoder
from shoal.nets.heads import ActionHead, action_head
from shoal.nets.net_config import NetConfig
from shoal.nets.torsos import orthogonal
from shoal.nets.trunk import Trunk, TrunkNetwork, fold, seeded

__all__ = ["ActorCriticNetwork", "ActorCriticOutput", "build"]


class ActorCriticOutput(NamedTuple):
    """Of unroll, with a leading T, and of step, without."""

    params: Tensor
    """Policy parameters [T, B, P], to be read by the head."""
    value: Tensor
    """[T, B]."""
    state: State
    """Recurrent state after the last step, [B, H] each; {} for feed-forward nets."""
    states: State | None = None
    """Recurrent state after every step, [T, B, H] each, if asked for."""


def build(
    observation_space: gym.Space[Any],
    action_space: gym.Space[Any],
    config: NetConfig | None = None,
    mask_size: int | None = None,
    seed: int | None = None,
    agents: int = 1,
) -> ActorCriticNetwork:
    """The net for these spaces. ``mask_size``: length of the environment's action masks, checked against the policy. ``agents`` of
    one environment are seen by a central value.

    ``seed`` makes the initial weights reproducible without touching the global generator.
    """
    config = config or NetConfig()
    config.validate()
    head = action_head(action_space, config.continuous)
    if mask_size and mask_size != head.mask_size:
        raise ConfigError(
            f"action masks have {mask_size} entries, but the policy over {action_space} has "
            f"{head.mask_size or 'no'} logits"
        )
    with seeded(seed):
        return ActorCriticNetwork(observation_space, head, config, agents)


def _part(space: gym.Space[Any], name: str) -> gym.Space[Any]:
    """Of an observation with the state of its environment."""
    if not (isinstance(space, gym.spaces.Dict) and set(space.spaces) == {SEEN, STATE}):
        raise ConfigError(f"--net.state-value needs observations with the state of their environment, not {space}")
    return space[name]


class ActorCriticNetwork(TrunkNetwork):
    """See the module. ``head`` (an ActionHead) samples and judges actions from the parameters this net gives."""

    def __init__(self, observation_space: gym.Space[Any], head: ActionHead, config: NetConfig, agents: int = 1) -> None:
        super().__init__()
        self.head, self.central, self.stateful = head, config.central_value, config.state_value
        separate = config.separate_value or self.central or self.stateful
        own, judged = (_part(observation_space, part) if self.stateful else observation_space for part in (SEEN, STATE))
        self.trunk = Trunk(own, config, head.encode, head.encoded)
        self.value_torso = encoder(judged, config) if separate else None
        P = head.outputs
        self.out = orthogonal(nn.Linear(self.trunk.features, P if separate else P + 1))
        nn.init.orthogonal_(self.out.weight.data[:P], 0.01)
        if self.value_torso is not None:
            features = self.value_torso.features
            self.value_join = orthogonal(nn.Linear(agents * features, features)) if self.central else None
            self.value_out = orthogonal(nn.Linear(self.value_torso.features, 1), 1.0)
        else:
            nn.init.orthogonal_(self.out.weight.data[P:], 1.0)
        self.log_std = nn.Parameter(torch.zeros(head.size - P)) if head.size > P else None

    def unroll(
        self,
        observation: Observation,
        first: Tensor | None,
        state: State,
        prev_action: Tensor | None = None,
        prev_reward: Tensor | None = None,
        all_states: bool = False,
        joint: Observation | None = None,
    ) -> ActorCriticOutput:
        """A sequence [T, B, ...]. ``all_states`` also returns the state after every step (for final_values). ``joint``
        [T, B, agents, ...] is what a central value sees."""
        seen = joint if self.central else observation[STATE] if self.stateful else observation
        own = observation[SEEN] if self.stateful else observation
        x, state, states = self.trunk.unroll(own, first, state, prev_action, prev_reward)
        params, value = self._read(x.flatten(0, 1), None if self.value_torso is None or seen is None else fold(seen))
        T, B = x.shape[:2]
        return ActorCriticOutput(params.view(T, B, params.shape[1]), value.view(T, B), state, states if all_states else None)

    def forward(
        self,
        observation: Observation,
        first: Tensor | None,
        state: State,
        prev_action: Tensor | None = None,
        prev_reward: Tensor | None = None,
    ) -> ActorCriticOutput:
        """One step [B, ...]. ``first=None`` means that no episode starts."""
        x, state = self.trunk.step(observation[SEEN] if self.stateful else observation, first, state, prev_action, prev_reward)
        params, value = self._read(x, None if self.central or self.stateful else observation)
        return ActorCriticOutput(params, value, state)

    step = torch.no_grad()(forward)  # for acting

    def final_values(
        self,
        final_observation: Observation,
        states_after: State,
        prev_action: Tensor | None = None,
        prev_reward: Tensor | None = None,
        joint: Observation | None = None,
    ) -> Tensor:
        """Values [K] of the true final observations [K, ...] of truncated episodes, without gradients; ``joint`` [K, agents, ...]
        for a central value.

        ``states_after`` is the state after the truncated step, {} for feed-forward nets, gathered from
        ``unroll(..., all_states=True).states`` as ``{k: s[t, b] for ...}``. Where the net sees them, the previous
        action and reward are those of the truncated step.
        """
        if self.central or self.stateful:
            with torch.no_grad():
                return self._separate_value(joint if self.central else final_observation[STATE])
        return self.step(final_observation, None, states_after, prev_action, prev_reward).value

    def _read(self, x: Tensor, seen: Observation | None) -> tuple[Tensor, Tensor]:
        """Policy parameters and values, of a value torso by what it has `seen`; where it sees nothing they are 0."""
        out = F.linear(x, self.out.weight, self.out.bias)
        if self.value_torso is None:
            params, value = out[:, :-1], out[:, -1]
        else:
            params, value = out, x.new_zeros(x.shape[0]) if seen is None else self._separate_value(seen)
        if self.log_std is not None:
            params = torch.cat([params, self.log_std.expand(params.shape[0], -1)], 1)
        return params, value

    def _separate_value(self, seen: Observation) -> Tensor:
        """By the value torso: of observations [N, ...], or [N, agents, ...] for a central value."""
        assert self.value_torso is not None
        features: Tensor = self.value_torso(seen if self.value_join is None else fold(seen))
        if self.value_join is not None:
            features = torch.tanh(self.value_join(features.reshape(-1, self.value_join.in_features)))
        value: Tensor = self.value_out(features).squeeze(1)
        return value
