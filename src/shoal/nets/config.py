"""The network section of an experiment. Imports nothing heavy: the command line reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from shoal.errors import ConfigError

__all__ = ["NetConfig"]

Torso = Literal["auto", "mlp", "nature", "impala", "small_conv"]
Activation = Literal["tanh", "relu", "elu", "gelu", "silu"]
Recurrent = Literal["none", "lstm"]
Continuous = Literal["gaussian", "gaussian_state_std", "tanh_gaussian"]


@dataclass(frozen=True)
class NetConfig:
    """The network: observation -> torso -> core -> policy and value."""

    torso: Torso = "auto"
    """What reads images: auto chooses nature from 36 x 36 on and small_conv below; mlp flattens everything."""
    hidden: tuple[int, ...] = (64, 64)
    """Layer sizes of the MLP that reads vectors."""
    activation: Activation = "tanh"
    """Activation of the MLP; convolutional torsos use ReLU."""
    recurrent: Recurrent = "none"
    """Memory between the steps of an episode: none or lstm."""
    lstm_size: int = 256
    """Units of the LSTM."""
    separate_value: bool = False
    """Give the value function a torso of its own (helps PPO on Pendulum); not together with lstm."""
    prev_action_reward: bool = False
    """Also show the net its previous action and clipped reward."""
    continuous: Continuous = "gaussian"
    """Policy over Box actions: gaussian has one std per dimension, gaussian_state_std one per state, tanh_gaussian is squashed."""
    module: str | None = None
    """Your own torso, "package.module:Class": an nn.Module made with (observation_space), called with a batch of observations, returning [N, F]."""  # noqa: E501

    def validate(self) -> None:
        """Raise a ConfigError that names the values that clash and the fix."""
        for name, allowed in (
            ("torso", Torso),
            ("activation", Activation),
            ("recurrent", Recurrent),
            ("continuous", Continuous),
        ):
            value = getattr(self, name)
            if value not in get_args(allowed):
                raise ConfigError(f"net.{name} = {value!r}: choose one of {', '.join(get_args(allowed))}")
        if any(size < 1 for size in self.hidden):
            raise ConfigError(f"net.hidden = {self.hidden}: every layer needs at least 1 unit")
        if self.recurrent == "lstm" and self.lstm_size < 1:
            raise ConfigError(f"net.lstm_size = {self.lstm_size}: an LSTM needs at least 1 unit")
        if self.recurrent == "lstm" and self.separate_value:
            raise ConfigError(
                "net.separate_value = True clashes with net.recurrent = 'lstm': two torsos would need two memories; "
                "turn one of them off"
            )
        if self.module is not None and self.torso != "auto":
            raise ConfigError(
                f"net.module = {self.module!r} replaces the torso, but net.torso = {self.torso!r} is set too; drop one"
            )
