"""What a2c, ppo and vtrace share before anything is learned: checks, the net, the record, what is published."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import gymnasium as gym

from shoal.algorithms.records import Unroll, float_size
from shoal.errors import ConfigError
from shoal.slots import Field, Layout

if TYPE_CHECKING:
    import torch

    from shoal.algorithms.model import Model
    from shoal.algorithms.policy import ActorCriticPolicy
    from shoal.envs import EnvSpec
    from shoal.nets import NetConfig

__all__ = ["Blueprint", "check_numbers"]

SPACES = gym.spaces.Discrete | gym.spaces.MultiDiscrete | gym.spaces.Box


@dataclass(frozen=True)
class Blueprint:
    """Plain data that pickles; each role builds from it the part it needs."""

    spec: EnvSpec
    net: NetConfig
    seats: int
    unroll: int
    gamma: float
    normalise_observations: bool
    normalise_returns: bool
    final_rows: int

    @classmethod
    def of(cls, name: str, config: Any, spec: EnvSpec, net: NetConfig, seats: int, mix: float = 0.0) -> Blueprint:
        """Checks the configuration against the environment; `mix` is the share of uniform actions."""
        net.validate()
        action = spec.action_space
        if not isinstance(action, SPACES) or (isinstance(action, gym.spaces.Box) and action.dtype.kind != "f"):
            raise ConfigError(
                f"{name} cannot act in {spec.name}: its action space is {action}; use an environment with Discrete, "
                "MultiDiscrete or floating-point Box actions, or wrap it (gymnasium.wrappers.TransformAction)"
            )
        if mix and isinstance(action, gym.spaces.Box):
            raise ConfigError(
                f"behaviour_mix={mix} mixes uniform actions in, but the actions of {spec.name} are {action}; "
                "set behaviour_mix=0 or use an environment with discrete actions"
            )
        if seats < 1:
            raise ConfigError(f"seats={seats}: an actor needs at least one; raise the number of environments per actor")
        return cls(
            spec,
            net,
            seats,
            config.unroll,
            config.gamma,
            config.normalise_observations,
            config.normalise_returns,
            config.final_rows,
        )

    @cached_property
    def norm_size(self) -> int:
        """How many numbers of an observation are normalised; 0 for none."""
        return float_size(self.spec.observation_space) if self.normalise_observations else 0

    @cached_property
    def record(self) -> Unroll:
        state = {name: tuple(x.shape[1:]) for name, x in self.model().net.initial_state(1).items()}
        return Unroll(
            self.unroll,
            self.seats,
            self.spec.observation_space,
            self.spec.action_space,
            mask_size=self.spec.mask_size if self.spec.has_action_mask else 0,
            state=state,
            previous=self.net.prev_action_reward,
            max_episode_steps=self.spec.max_episode_steps,
            final_rows=self.final_rows,
            observation_moments=self.norm_size > 0,
            return_moments=self.normalise_returns,
            gamma=self.gamma,
        )

    def model(self, seed: int = 0, statistics: tuple[torch.Tensor, torch.Tensor] | None = None) -> Model:
        """A new net. The same seed gives the same weights, and torch's own random state is left alone."""
        from shoal.algorithms.model import Model

        return Model(self.spec, self.net, seed, self.norm_size, statistics)

    def policy(self) -> ActorCriticPolicy:
        from shoal.algorithms.policy import ActorCriticPolicy

        return ActorCriticPolicy(self.model())

    def published_layout(self) -> Layout:
        norm = {"mean": Field((self.norm_size,), "float32"), "scale": Field((self.norm_size,), "float32")}
        return Layout(
            {
                "params": Field((self.model().params.numel(),), "float32"),
                "norm": norm if self.norm_size else {},
                "progress": Field((3,), "float64"),
            }
        )


def check_numbers(
    config: Any, positive: tuple[str, ...] = (), shares: tuple[str, ...] = (), not_negative: tuple[str, ...] = ()
) -> None:
    """Raise a ConfigError for the first field that is out of its range; None is always in range."""
    for names, low, high, words in (
        (positive, 0.0, math.inf, "more than 0"),
        (not_negative, 0.0, math.inf, "0 or more"),
        (shares, 0.0, 1.0, "between 0 and 1"),
    ):
        for name in names:
            value = getattr(config, name)
            if value is None:
                continue
            inside = math.isfinite(value) and low <= value <= high and not (names is positive and value == 0)
            if not inside:
                raise ConfigError(
                    f"{name}={value}: must be {words}, for example {type(config).__dataclass_fields__[name].default}"
                )
