"""What dqn and r2d2 share before anything is learned: checks, the net, the scene of their items, exploration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np

from shoal.algorithms.items import Scene
from shoal.core import Progress
from shoal.errors import ConfigError
from shoal.nets.q_network import HeadConfig
from shoal.ops import priorities, schedules
from shoal.slots import Field, Layout

if TYPE_CHECKING:
    from shoal.algorithms.q_model import QModel
    from shoal.envs import EnvSpec
    from shoal.nets import NetConfig

__all__ = ["QPlan", "explored"]


@dataclass(frozen=True)
class QPlan:
    """Plain data that pickles; each role builds from it the part it needs."""

    spec: EnvSpec
    net: NetConfig
    head: HeadConfig
    scene: Scene

    @classmethod
    def of(cls, name: str, config: Any, spec: EnvSpec, net: NetConfig, seats: int) -> QPlan:
        """Checks the configuration against the environment."""
        net.validate()
        action = spec.action_space
        if not isinstance(action, gym.spaces.Discrete):
            raise ConfigError(
                f"{name} cannot act in {spec.name}: it needs one value for each action, but the action space is {action}; "
                "use an environment with Discrete actions, or ppo or vtrace"
            )
        if net.separate_value:
            raise ConfigError(f"net.separate_value = True: {name} has no value function apart from its q-values; drop it")
        if seats < 1:
            raise ConfigError(f"seats={seats}: an actor needs at least one; raise the number of environments per actor")
        scene = Scene(
            seats,
            spec.observation_space,
            action,
            mask_size=spec.mask_size if spec.has_action_mask else 0,
            gamma=config.gamma,
            n_step=config.n_step,
            reward_clip=config.reward_clip,
            rescale=config.rescale,
        )
        return cls(spec, net, HeadConfig(config.dueling, config.dueling_hidden, config.zero_head), scene)

    def model(self, seed: int = 0) -> QModel:
        """A new net. The same seed gives the same weights."""
        from shoal.algorithms.q_model import QModel

        return QModel(self, seed)

    def published_layout(self) -> Layout:
        params = Field((self.model().params.numel(),), "float32")
        return Layout({"params": params, "norm": {}, "progress": Field((3,), "float64")})


def explored(config: Any, index: int, count: int, seats: int, progress: Progress) -> np.ndarray:
    """Epsilon of every seat of the `index`-th of `count` actors."""
    if config.exploration == "ladder":
        rungs = priorities.ladder(count * seats, config.epsilon, config.ladder_alpha)
        return rungs[index * seats : (index + 1) * seats].astype(np.float32)
    done = progress.env_steps / config.epsilon_steps if config.epsilon_steps else 1.0
    return np.full(seats, schedules.linear(done, config.epsilon, config.epsilon_final), np.float32)
