"""Action heads: what the policy parameters ``[..., P]`` mean for an action space.

A head owns no weights. Actions are canonical (`shoal.envs.spaces`): Discrete counts from 0, MultiDiscrete and
MultiBinary are flat ``[..., len(nvec)]``, Box actions are in the environment's own units and unclipped (the stream
clips them). ``mask`` is bool ``[..., logits]``, True where legal; ``mix`` is the share of uniform actions per row (see
`shoal.ops.distributions.mix_uniform`): with it, log-probabilities are those of the mixture that acted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import gymnasium as gym
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import Generator, Tensor

from shoal.errors import ConfigError
from shoal.ops import distributions as dist

__all__ = ["ActionHead", "Categorical", "Gaussian", "MultiCategorical", "TanhGaussian", "action_head"]


class ActionHead(Protocol):
    """What learners and actors call; results drop the last axis of ``params``."""

    size: int
    """P, parameters of the policy."""
    outputs: int
    """Of these, how many the net computes; the rest is a learnt vector that no state changes (log std)."""
    mask_size: int
    """Length of an action mask; 0 where there cannot be one."""
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
        mean, log_std = params.chunk(2, -1)
        action = dist.gaussian_sample(mean, log_std, generator)
        return self._shaped(action), dist.gaussian_log_prob(mean, log_std, action)

    def log_prob(self, params: Tensor, action: Tensor, mask: Tensor | None = None, mix: Tensor | None = None) -> Tensor:
        _refuse(mask, mix)
        return dist.gaussian_log_prob(*params.chunk(2, -1), self._flat(action))

    def entropy(self, params: Tensor, mask: Tensor | None = None) -> Tensor:
        return dist.gaussian_entropy(*params.chunk(2, -1))

    def kl(self, params: Tensor, other: Tensor, mask: Tensor | None = None) -> Tensor:
        return dist.gaussian_kl(*params.chunk(2, -1), *other.chunk(2, -1))

    def mode(self, params: Tensor, mask: Tensor | None = None) -> Tensor:
        return self._shaped(params.chunk(2, -1)[0])

    def encode(self, action: Tensor) -> Tensor:
        return self._flat(action).float()


class TanhGaussian(Gaussian):
    """Box actions squashed into their bounds: tanh of a Gaussian, scaled to [low, high]."""

    def __init__(self, space: spaces.Box, state_std: bool = False) -> None:
        super().__init__(space.shape, state_std)
        low, high = torch.as_tensor(space.low).float().flatten(), torch.as_tensor(space.high).float().flatten()
        if not bool(torch.isfinite(high - low).all()):
            raise ConfigError(
                f"net.continuous = 'tanh_gaussian' needs bounded actions, but the action space is {space}; "
                "use net.continuous = 'gaussian'"
            )
        self._middle, self._half = (low + high) / 2, (high - low) / 2
        self._log_scale = float(self._half.log().sum())

    def sample(
        self, params: Tensor, generator: Generator | None = None, mask: Tensor | None = None, mix: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        _refuse(mask, mix)
        unit, log_prob = dist.tanh_gaussian_sample_and_log_prob(*params.chunk(2, -1), generator)
        return self._scaled(unit), log_prob - self._log_scale

    def log_prob(self, params: Tensor, action: Tensor, mask: Tensor | None = None, mix: Tensor | None = None) -> Tensor:
        _refuse(mask, mix)
        unit = (self._flat(action) - self._middle.to(params.device)) / self._half.to(params.device)
        return dist.tanh_gaussian_log_prob(*params.chunk(2, -1), unit) - self._log_scale

    def entropy(self, params: Tensor, mask: Tensor | None = None) -> Tensor:
        return dist.tanh_gaussian_entropy(*params.chunk(2, -1)) + self._log_scale

    def mode(self, params: Tensor, mask: Tensor | None = None) -> Tensor:
        return self._scaled(dist.tanh_gaussian_mode(*params.chunk(2, -1)))

    def _scaled(self, unit: Tensor) -> Tensor:
        return self._shaped(self._middle.to(unit.device) + self._half.to(unit.device) * unit)


def action_head(space: gym.Space, continuous: str = "gaussian") -> ActionHead:
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
    raise ConfigError(f"action space {space} has no policy head; use Discrete, MultiDiscrete, MultiBinary or Box")


def _refuse(mask: Tensor | None, mix: Tensor | None) -> None:
    if mask is not None or mix is not None:
        what = "an action mask" if mask is not None else "a mixture with uniform actions"
        raise ConfigError(f"Box actions cannot have {what}; it needs Discrete or MultiDiscrete actions")
