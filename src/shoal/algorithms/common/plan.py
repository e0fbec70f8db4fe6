"""What an algorithm is made for: environment, network and seats, checked against each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gymnasium as gym

from shoal.algorithms.records.spaces import float_size
from shoal.errors import ConfigError
from shoal.slots import Field, Layout

if TYPE_CHECKING:
    from shoal.algorithms.common.contrast import Contrast
    from shoal.envs import EnvSpec
    from shoal.nets import NetConfig

__all__ = ["AlgorithmPlan", "weights_layout"]


@dataclass(frozen=True)
class AlgorithmPlan:
    """Plain data that pickles; each role builds from it the part it needs."""

    spec: EnvSpec
    net: NetConfig
    seats: int
    norm_size: int
    """How many numbers of an observation are normalised; 0 for none."""
    contrast: Contrast | None = None
    """How an encoder of images is learned beside the algorithm (CURL); None: nets read observations themselves."""

    @classmethod
    def of(cls, spec: EnvSpec, net: NetConfig, seats: int, normalise_observations: bool = False,
           contrast: Contrast | None = None) -> AlgorithmPlan:
        net.validate()
        if seats < 1:
            raise ConfigError(f"seats={seats}: an actor needs at least one; raise the number of environments per actor")
        return cls(spec, net, seats, float_size(spec.observation_space) if normalise_observations else 0, contrast)

    @property
    def seen_space(self) -> gym.Space[Any]:
        """What nets read: observations, or codes of them."""
        return self.spec.observation_space if self.contrast is None else self.contrast.codes

    @property
    def mask_size(self) -> int:
        """Length of a row of the action mask; 0 where there is none."""
        return self.spec.mask_size if self.spec.has_action_mask else 0


def weights_layout(parameters: int, norm_size: int = 0) -> Layout:
    """What a Learn publishes and a Policy loads: the parameters, the statistics of observations in use, the progress."""
    one = Field((norm_size,), "float32")
    norm = {"mean": one, "scale": one} if norm_size else {}
    return Layout({"params": Field((parameters,), "float32"), "norm": norm, "progress": Field((3,), "float64")})
