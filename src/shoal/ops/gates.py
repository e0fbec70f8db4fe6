"""Which gradients a parameter server refuses (GORILA, Nair et al. 2015): those that are too old, and those of an outlier loss.

The paper has both rules but no thresholds. Here the statistics are running averages with a decay of 0.99, the first 100
losses are never refused, and a refused loss enters the statistics clamped to the limit, so that one spike cannot raise it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["LossGate", "judge", "too_old"]


def too_old(current: int, used: int, limit: int) -> bool:
    """Whether a gradient computed from version ``used`` has an age above ``limit`` at version ``current``."""
    return current - used > limit


class LossGate(NamedTuple):
    """Running averages of |loss| and of its square, over ``losses`` losses."""

    mean: float = 0.0
    square: float = 0.0
    losses: int = 0

    def limit(self, width: float = 4.0) -> float:
        """mean + width standard deviations."""
        return self.mean + width * math.sqrt(max(self.square - self.mean**2, 0.0))


def judge(
    gate: LossGate, loss: float, width: float = 4.0, decay: float = 0.99, warmup: int = 100
) -> tuple[bool, LossGate]:
    """Whether to accept a gradient with this loss, and the gate afterwards. A loss that is not finite is refused."""
    size, limit = abs(loss), gate.limit(width)
    if not math.isfinite(size):
        return False, gate
    if gate.losses == 0:
        return True, LossGate(size, size * size, 1)
    accepted = gate.losses < warmup or size <= limit
    seen = size if accepted else limit
    mean, square = (decay * old + (1 - decay) * new for old, new in ((gate.mean, seen), (gate.square, seen * seen)))
    return accepted, LossGate(mean, square, gate.losses + 1)
