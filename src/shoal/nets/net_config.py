"""The network section of an experiment. Imports nothing heavy: the command line reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from shoal.errors import ConfigError
from shoal.options import Options, number

__all__ = ["NetConfig"]

Torso = Literal["auto", "mlp", "nature", "impala", "small_conv"]
Activation = Literal["tanh", "relu", "elu", "gelu", "silu"]
Recurrent = Literal["none", "lstm"]
Continuous = Literal["gaussian", "gaussian_state_std", "tanh_gaussian"]

LARGEST = 1_000_000
"""Units of a layer."""


@dataclass(frozen=True)
class NetConfig(Options):
    """The network: observation -> torso -> core -> policy and value."""

    section = "net"

    torso: Torso = "auto"
    """What reads images: auto chooses nature from 36 x 36 on and small_conv below; mlp flattens everything."""
    hidden: tuple[int, ...] = (64, 64)
    """Layer sizes of the MLP that reads vectors."""
    activation: Activation = "tanh"
    """Activation of the MLP; convolutional torsos use ReLU."""
    recurrent: Recurrent = "none"
    """Memory between the steps of an episode: none or lstm."""
    lstm_size: int = number(256, at_least=1, at_most=LARGEST)
    """Units of the LSTM."""
    separate_value: bool = False
    """Give the value function its own torso (helps PPO on Pendulum); not with lstm."""
    central_value: bool = False
    """Several agents: values have a torso of their own and see what all agents of the environment see, in training only; not with
    lstm."""
    state_value: bool = False
    """PettingZoo's environments with state(): values have a torso of their own and see that state, in training only; not with
    lstm."""
    prev_action_reward: bool = False
    """Also show the net its previous action and clipped reward."""
    continuous: Continuous = "gaussian"
    """Policy over Box actions: gaussian has one std per dimension, gaussian_state_std one per state, tanh_gaussian is squashed."""
    module: str | None = None
    """Your own torso, "package.module:Class": an nn.Module, created with (observation_space), that maps observations to [N, F]."""

    def validate(self) -> None:
        """Raise a ConfigError that names the values that clash and the fix."""
        super().validate()
        for name, allowed in (
            ("torso", Torso),
            ("activation", Activation),
            ("recurrent", Recurrent),
            ("continuous", Continuous),
        ):
            value = getattr(self, name)
            if value not in get_args(allowed):
                raise ConfigError(f"--net.{name} is {value!r}; it must be one of {', '.join(get_args(allowed))}")
        if any(not 1 <= size <= LARGEST for size in self.hidden):
            sizes = " ".join(str(size) for size in self.hidden)
            raise ConfigError(f"--net.hidden is {sizes}; every layer must have at least 1 and at most {LARGEST} units")
        for option, given in (("separate-value", self.separate_value), ("central-value", self.central_value),
                              ("state-value", self.state_value)):
            if self.recurrent == "lstm" and given:
                raise ConfigError(
                    f"--net.{option} does not fit --net.recurrent lstm: two torsos would need two memories; leave one of them out"
                )
        if self.central_value and self.state_value:
            raise ConfigError("--net.central-value and --net.state-value both say what values see; leave one of them out")
        if self.module is not None and self.torso != "auto":
            raise ConfigError(
                f"--net.module {self.module} replaces the torso, but --net.torso {self.torso} is given too; leave one of them out"
            )
