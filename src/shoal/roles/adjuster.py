"""GA3C's dynamic adjustment: change the numbers of agents, predictors and trainers a little, keep what trains faster.

Every `seconds` each number moves by -1, 0 or +1; if trainings per second then fall, all three go back (Babaeizadeh et al.
2017, 1611.06256, section 4.3 and its source).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from shoal.core import Me, Shared, any_of

__all__ = ["Adjuster", "NumberAdjuster"]


class Adjuster:
    """The rule alone: tell it the rate that the present numbers give, and it says which numbers to continue with."""

    def __init__(self, numbers: Mapping[str, int], limits: Mapping[str, tuple[int, int]], rng: np.random.Generator) -> None:
        self.kept, self.limits, self.rng = dict(numbers), limits, rng
        self.tried: dict[str, int] | None = None
        self.rate = 0.0  # of the kept numbers, as last measured

    def hear(self, rate: float) -> dict[str, int]:
        if self.tried is not None and rate < self.rate:
            self.tried = None  # taken back; measured anew before the next change
            return self.kept
        self.kept, self.rate = self.tried or self.kept, rate
        self.tried = self._propose()
        return self.tried

    def _propose(self) -> dict[str, int]:
        deltas = self.rng.integers(-1, 2, size=len(self.kept))
        return {role: int(np.clip(number + delta, *self.limits[role]))
                for delta, (role, number) in zip(deltas, self.kept.items(), strict=True)}


class NumberAdjuster:
    """Adjusts the numbers of agents, predictors and trainers by what they do to trainings per second."""

    def __init__(self, me: Me, control: Any, model: Shared, numbers: Mapping[str, int], limits: Mapping[str, tuple[int, int]],
                 seconds: float) -> None:
        self.me, self.control, self.seconds = me, control, seconds
        self.counts = model.data["counts"]
        self.adjuster = Adjuster(numbers, limits, me.rng("adjust"))
        self.numbers = dict(numbers)
        self.settled = True

    async def step(self) -> None:
        rate = await self._measure()
        if rate == 0:
            return  # nothing is trained yet: there is nothing to judge by
        before = dict(self.numbers)
        await self._become(self.adjuster.hear(rate))
        verdict = "kept" if self.adjuster.tried is not None else "taken back"
        self.me.note(f"{rate:.1f} trainings/s with {_words(before)}: {verdict}; now {_words(self.numbers)}")

    async def _measure(self) -> float:
        """Trainings per second, over the second half of the time: the first half is for settling down."""
        await any_of(timeout=self.seconds / 2)
        begun, before = time.monotonic(), int(self.counts[:, 1].sum())
        await any_of(timeout=self.seconds / 2)
        return (int(self.counts[:, 1].sum()) - before) / (time.monotonic() - begun)

    async def _become(self, numbers: Mapping[str, int]) -> None:
        for role, number in numbers.items():
            if number != self.numbers[role]:
                await self.control.scale(role, number)
                self.numbers[role] = number


def _words(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {role}{'s' if number != 1 else ''}" for role, number in numbers.items())
