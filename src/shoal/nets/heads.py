"""Action heads: what the policy parameters ``[..., P]`` mean for an action space.

A head owns no weights. Actions are canonical (`shoal.envs.space_codecs`): Discrete counts from 0, MultiDiscrete and
MultiBinary are flat ``[..., len(nvec)]``, Box actions are in the environment's own units and unclipped (the stream
clips them). ``mask`` is bool ``[..., logits]``, True where legal; ``mix`` is the share of uniform actions per row (see
`shoal.ops.distributions.mix_uniform`): with it, log-probabilities are those of the mixture that acted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import gymnasium as gym
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import Generator, Tensor

from shoal.errors import ConfigError
from shoal.ops import distributions as dist

__all__ = ["ActionHead", "ActionRange", "Categorical", "Gaussian", "LatentActionHead", "MultiCategorical", "TanhGaussian",
           "action_head"]


class ActionHead(Protocol):
    """What learners and actors call; results drop the last axis of ``params``."""

    size: int
    """P, parameters of the policy."""
    outputs: int
    """How many of them the net computes; the rest is a learnt vector that does not depend on the state (log std)."""
    mask_size: int
    """Length of an action mask; 0 if these actions cannot have one."""
    encoded: int
    """Length of what `encode` gives."""

    def sample(
        self, params: Tensor, generator: Generator | None = None, mask: Tensor | None = None, mix: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Actions and their log-probabilities."""
        ...

    def log_prob(
        self, params: Tensor, action: Tensor, mask: Tensor | None = None, mix: Tensor | None = None
    ) -> Tensor: ...
    def entropy(self, params: Tensor, mask: Tensor | None = None) -> Tensor: ...
    def kl(self, params: Tensor, other: Tensor, mask: Tensor | None = None) -> Tensor:
        """KL(params || other)."""
        ...

    def mode(self, params: Tensor, mask: Tensor | None = None) -> Tensor: ...
    def encode(self, action: Tensor) -> Tensor:
        """Floats ``[..., encoded]`` for a net that sees its previous action."""
        ...


@runtime_checkable
class LatentActionHead(ActionHead, Protocol):
    """A head that squashes a latent action. Log-probabilities are exact only from the latent action: rounding loses it.

    Where log-probabilities of two policies are compared (importance ratios), record the latent action and use these methods.
    """

    latent_size: int
    """Length of a latent action."""

    def sample_latent(self, params: Tensor, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
        """Latent actions ``[..., latent_size]`` and the log-probabilities of `squash` of them."""
        ...

    def latent_mode(self, params: Tensor) -> Tensor:
        """The latent action of `mode`."""
        ...

    def squash(self, latent: Tensor) -> Tensor:
        """The actions of latent actions."""
        ...

    def latent_log_prob(self, params: Tensor, latent: Tensor) -> Tensor:
        """Log-probabilities of `squash` of these latent actions: to the bit those of `sample_latent` for the same params."""
        ...


class Categorical:
    """Discrete actions: P logits."""

    def __init__(self, n: int) -> None:
        self.size = self.outputs = self.mask_size = self.encoded = n

    def _log_p(self, params: Tensor, mask: Tensor | None, mix: Tensor | None) -> Tensor:
        if mix is not None:
            return dist.mix_uniform(params, mix, mask)
        return dist.log_softmax(dist.mask_logits(params, mask))

    def sample(
        self, params: Tensor, generator: Generator | None = None, mask: Tensor | None = None, mix: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        log_p = self._log_p(params, mask, mix)
        action = dist.categorical_sample(log_p, generator)
        return action, log_p.gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def log_prob(self, params: Tensor, action: Tensor, mask: Tensor | None = None, mix: Tensor | None = None) -> Tensor:
        return self._log_p(params, mask, mix).gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def entropy(self, params: Tensor, mask: Tensor | None = None) -> Tensor:
        return dist.categorical_entropy(dist.mask_logits(params, mask))

    def kl(self, params: Tensor, other: Tensor, mask: Tensor | None = None) -> Tensor:
        return dist.categorical_kl(dist.mask_logits(params, mask), dist.mask_logits(other, mask))

    def mode(self, params: Tensor, mask: Tensor | None = None) -> Tensor:
        return dist.categorical_mode(dist.mask_logits(params, mask))

    def encode(self, action: Tensor) -> Tensor:
        return F.one_hot(action.long(), self.encoded).float()


class MultiCategorical:
    """Several discrete actions at once: the logits of all parts side by side. ``mix`` mixes each part on its own."""

    def __init__(self, nvec: Sequence[int]) -> None:
        self.nvec = tuple(int(n) for n in nvec)
        self.size = self.outputs = self.mask_size = self.encoded = sum(self.nvec)

    def _logits(self, params: Tensor, mask: Tensor | None, mix: Tensor | None) -> Tensor:
        logits = dist.mask_logits(params, mask)
        if mix is None:
            return logits
        parts = torch.split(logits, list(self.nvec), -1)
        return torch.cat([dist.mix_uniform(part, mix) for part in parts], -1)

    def sample(
        self, params: Tensor, generator: Generator | None = None, mask: Tensor | None = None, mix: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        logits = self._logits(params, mask, mix)
        action = dist.multi_categorical_sample(logits, self.nvec, generator)
        return action, dist.multi_categorical_log_prob(logits, self.nvec, action)

    def log_prob(self, params: Tensor, action: Tensor, mask: Tensor | None = None, mix: Tensor | None = None) -> Tensor:
        return dist.multi_categorical_log_prob(self._logits(params, mask, mix), self.nvec, action)

    def entropy(self, params: Tensor, mask: Tensor | None = None) -> Tensor:
        return dist.multi_categorical_entropy(dist.mask_logits(params, mask), self.nvec)

    def kl(self, params: Tensor, other: Tensor, mask: Tensor | None = None) -> Tensor:
        return dist.multi_categorical_kl(dist.mask_logits(params, mask), dist.mask_logits(other, mask), self.nvec)

    def mode(self, params: Tensor, mask: Tensor | None = None) -> Tensor:
        return dist.multi_categorical_mode(dist.mask_logits(params, mask), self.nvec)

    def encode(self, action: Tensor) -> Tensor:
        parts = zip(action.unbind(-1), self.nvec, strict=True)
        return torch.cat([F.one_hot(part.long(), n) for part, n in parts], -1).float()


class Gaussian:
    """Box actions: D means, then D logarithms of the standard deviation."""

    mask_size = 0

    def __init__(self, shape: Sequence[int], state_std: bool = False) -> None:
        self.shape = tuple(shape)
        self.encoded = torch.Size(self.shape).numel()
        self.size = 2 * self.encoded
        self.outputs = self.size if state_std else self.encoded

    def _flat(self, action: Tensor) -> Tensor:
        return action if len(self.shape) == 1 else action.reshape(*action.shape[: action.dim() - len(self.shape)], -1)

    def _shaped(self, action: Tensor) -> Tensor:
        return action if len(self.shape) == 1 else action.reshape(*action.shape[:-1], *self.shape)

    def sample(
        self, params: Tensor, generator: Generator | None = None, mask: Tensor | None = None, mix: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        _refuse(mask, mix)
        mean, log_std = _halves(params)
        action = dist.gaussian_sample(mean, log_std, generator)
        return self._shaped(action), dist.gaussian_log_prob(mean, log_std, action)

    def log_prob(self, params: Tensor, action: Tensor, mask: Tensor | None = None, mix: Tensor | None = None) -> Tensor:
        _refuse(mask, mix)
        return dist.gaussian_log_prob(*_halves(params), self._flat(action))

    def entropy(self, params: Tensor, mask: Tensor | None = None) -> Tensor:
        return dist.gaussian_entropy(*_halves(params))

    def kl(self, params: Tensor, other: Tensor, mask: Tensor | None = None) -> Tensor:
        return dist.gaussian_kl(*_halves(params), *_halves(other))

    def mode(self, params: Tensor, mask: Tensor | None = None) -> Tensor:
        return self._shaped(_halves(params)[0])

    def encode(self, action: Tensor) -> Tensor:
        return self._flat(action).float()


class ActionRange:
    """The range [low, high] of bounded Box actions, and [-1, 1] scaled to it. Actions are flat here: [..., D]."""

    def __init__(self, space: spaces.Box, who: str, instead: str) -> None:
        low, high = torch.as_tensor(space.low).float().flatten(), torch.as_tensor(space.high).float().flatten()
        if not bool(torch.isfinite(high - low).all()):
            raise ConfigError(f"{who} needs bounded actions, but the action space is {space}; {instead}")
        if not bool((high > low).all()):
            raise ConfigError(f"{who} needs bounds that leave a choice, but the action space {space} has a lower bound that is not "
                              "below the upper one; drop that part of the action")
        middle, half = (low + high) / 2, (high - low) / 2
        self._copies = {middle.device: (middle, half)}
        self.log_volume = float(half.log().sum())
        """The logarithm of how much scaling from [-1, 1] changes a volume."""

    def scaled(self, unit: Tensor) -> Tensor:
        """From [-1, 1] to the range."""
        middle, half = self._on(unit.device)
        return middle + half * unit

    def unit(self, action: Tensor) -> Tensor:
        """From the range to [-1, 1]."""
        middle, half = self._on(action.device)
        return (action - middle) / half

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Middle and half width. Each device keeps its copy: CUDA graphs read them there, and cannot capture the copying."""
        if device not in self._copies:
            middle, half = next(iter(self._copies.values()))
            self._copies[device] = middle.to(device), half.to(device)
        return self._copies[device]


class TanhGaussian(Gaussian):
    """Box actions squashed into their bounds: tanh of a Gaussian, scaled to [low, high].

    KL is that of the Gaussians, since both are squashed by the same map; `mode` is the median.
    """

    def __init__(self, space: spaces.Box, state_std: bool = False) -> None:
        super().__init__(space.shape, state_std)
        self._range = ActionRange(space, "--net.continuous tanh_gaussian", "use --net.continuous gaussian")
        self.latent_size = self.encoded

    def sample(
        self, params: Tensor, generator: Generator | None = None, mask: Tensor | None = None, mix: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        _refuse(mask, mix)
        latent, log_prob = self.sample_latent(params, generator)
        return self.squash(latent), log_prob

    def log_prob(self, params: Tensor, action: Tensor, mask: Tensor | None = None, mix: Tensor | None = None) -> Tensor:
        """For actions whose latent action is not known; less exact where tanh is saturated."""
        _refuse(mask, mix)
        unit = self._range.unit(self._flat(action))
        return dist.tanh_gaussian_log_prob(*_halves(params), unit) - self._range.log_volume

    def entropy(self, params: Tensor, mask: Tensor | None = None) -> Tensor:
        return dist.tanh_gaussian_entropy(*_halves(params)) + self._range.log_volume

    def mode(self, params: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.squash(self.latent_mode(params))

    def sample_latent(self, params: Tensor, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
        latent = dist.gaussian_sample(*_halves(params), generator)
        return latent, self.latent_log_prob(params, latent)

    def latent_mode(self, params: Tensor) -> Tensor:
        return _halves(params)[0]

    def squash(self, latent: Tensor) -> Tensor:
        return self._shaped(self._range.scaled(torch.tanh(latent)))

    def latent_log_prob(self, params: Tensor, latent: Tensor) -> Tensor:
        return dist.tanh_gaussian_latent_log_prob(*_halves(params), latent) - self._range.log_volume


def action_head(space: gym.Space[Any], continuous: str = "gaussian") -> ActionHead:
    """The head of an action space; ``continuous`` is NetConfig.continuous."""
    if isinstance(space, spaces.Discrete):
        return Categorical(int(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        return MultiCategorical(space.nvec.ravel().tolist())
    if isinstance(space, spaces.MultiBinary):
        return MultiCategorical([2] * int(torch.Size(space.shape).numel()))
    if isinstance(space, spaces.Box):
        if continuous == "tanh_gaussian":
            return TanhGaussian(space, state_std=True)
        return Gaussian(space.shape, state_std=continuous == "gaussian_state_std")
    raise ConfigError(f"the action space {space} has no policy head; use Discrete, MultiDiscrete, MultiBinary or Box")


def _halves(params: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and log std."""
    mean, log_std = params.chunk(2, -1)
    return mean, log_std


def _refuse(mask: Tensor | None, mix: Tensor | None) -> None:
    if mask is not None or mix is not None:
        what = "an action mask" if mask is not None else "a mixture with uniform actions"
        raise ConfigError(f"Box actions cannot have {what}; only Discrete and MultiDiscrete actions can")
