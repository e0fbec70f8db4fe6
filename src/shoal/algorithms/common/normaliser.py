"""Running statistics of observations and returns, as the learner keeps them.

    actor     sums of its new data, with the shift they are relative to (records/moments.py)
    learner   sums(moments)  brings the slots' sums to its own mean: vectors that an all-reduce may add
              merge(total)   adds them to the running moments;   freeze()   makes the result the one in use

The numbers in use change only in `freeze`, which every learner calls after the last minibatch of a batch, just before
the weights are published: the policy and the loss always see observations scaled by the same numbers.

The numbers in use lie where the learner computes, the running moments where the sums come from: a learner on a GPU that is fed by
the host keeps them on the host, and neither waits for the other.
"""

from __future__ import annotations

import numpy as np
import torch

from shoal.core import Tree, Vector
from shoal.device.transfer import to_device
from shoal.ops import running

__all__ = ["LearnerNormalisers", "Normaliser"]

EPSILON = 1e-8


class Normaliser:
    """Mean and scale of `size` numbers. All that it knows lies in named tensors of the learner's state."""

    def __init__(self, state: dict[str, torch.Tensor], name: str, size: int) -> None:
        self.size = size
        self._moments = running.empty((size,))
        self.mean, self.scale = torch.zeros(size), torch.ones(size)  # in use
        count, mean, m2 = self._moments
        state.update({f"{name}.count": count, f"{name}.mean": mean, f"{name}.m2": m2})
        state.update({f"{name}.used_mean": self.mean, f"{name}.used_scale": self.scale})

    @property
    def seen(self) -> running.Moments:
        """What has been seen so far, as opposed to what is in use."""
        return self._moments

    @property
    def width(self) -> int:
        """Length of what `sums` gives."""
        return 1 + 2 * self.size

    def sums(self, moments: Tree) -> Vector:
        """Count, sum and sum of squares around this normaliser's running mean, over all slots of a batch."""
        count = moments["count"]  # [slots, 1]
        tensors = isinstance(count, torch.Tensor)
        if tensors:
            self._settle(count.device)
        offset = moments["shift"] - (self._moments.mean if tensors else self._moments.mean.numpy())
        s1 = moments["sum"] + count * offset
        s2 = moments["square"] + 2 * offset * moments["sum"] + count * offset**2
        parts = [count.sum(0), s1.sum(0), s2.sum(0)]
        return torch.cat(parts) if tensors else np.concatenate(parts)

    def merge(self, total: Vector) -> None:
        """Add the (summed) result of `sums`; in place, because the tensors are the learner's state."""
        added = running.unpack(torch.as_tensor(total), (self.size,))
        merged = running.merge_sums(self._moments, added, self._moments.mean)
        for mine, new in zip(self._moments, merged, strict=True):
            mine.copy_(new)

    def freeze(self) -> None:
        """Use the running moments from now on."""
        enough = self._moments.count >= 2  # a GPU is not asked
        device = self.mean.device
        for used, new in ((self.mean, self._moments.mean), (self.scale, torch.rsqrt(running.variance(self._moments) + EPSILON))):
            used.copy_(torch.where(to_device(enough, device), to_device(new.float(), device), used))

    def _settle(self, device: torch.device) -> None:
        """Keep the running moments there, in the same tensors: they are the learner's state."""
        for mine in self._moments:
            if mine.device != device:
                mine.data = mine.data.to(device)


class LearnerNormalisers:
    """The normalisers of a learner: of observations, of returns, of both or of none."""

    def __init__(self, observations: int = 0, returns: bool = False) -> None:
        """`observations`: how many numbers of an observation are normalised."""
        self.state: dict[str, torch.Tensor] = {}
        self.observations = Normaliser(self.state, "observations", observations) if observations else None
        self.returns = Normaliser(self.state, "returns", 1) if returns else None
        found = {"observation_moments": self.observations, "return_moments": self.returns}
        self._by_field = {name: normaliser for name, normaliser in found.items() if normaliser is not None}

    @property
    def seen(self) -> list[torch.Tensor]:
        """The running moments, which stay on the host."""
        return [moment for normaliser in self._by_field.values() for moment in normaliser.seen]

    @property
    def published(self) -> dict[str, torch.Tensor]:
        """What policies see observations through."""
        return {} if self.observations is None else {"mean": self.observations.mean, "scale": self.observations.scale}

    def moments(self, source: Tree) -> Vector:
        """Sums of a batch's observations and returns, around the running means: what learners add up and absorb."""
        if not self._by_field:
            return np.zeros(0)
        parts = [normaliser.sums(source[name]) for name, normaliser in self._by_field.items()]
        if parts and isinstance(parts[0], torch.Tensor):
            return torch.cat(parts)
        return np.concatenate([np.zeros(0), *parts])

    def absorb(self, moments: Vector) -> None:
        """Merge the moments of all learners and use them from now on."""
        start = 0
        for normaliser in self._by_field.values():
            normaliser.merge(moments[start : start + normaliser.width])
            normaliser.freeze()
            start += normaliser.width
