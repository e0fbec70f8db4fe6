"""Permits: roles that count towards a limit of the whole program (max_env_steps, max_learner_steps) ask how far they may count
before they continue.

    role        await me.permit(counter, units)      before it does work that adds `units` to the counter
    supervisor  Permits.ask(...)             answers at once while the limit leaves anything, later or never when it does not

A role is given several portions at a time, so that it seldom asks: about a second's worth, and near the end no more than a part of
what is left. The last permit may exceed the limit by less than the units that were asked for. Roles in lock step (one unit each for
every version of the weights) are given whole rounds, because a batch needs the units of all of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Ask", "Permits"]

PORTION_SECONDS = 1.0     # a role that has used its portion up sooner is given twice as much
PARTS = 4                 # near the end a portion is at most this part of every role's share of what is left
RECONCILE_SECONDS = 0.5   # without progress while somebody waits: what was given to roles that do not use it is given again


class Ask(NamedTuple):
    """What a role asks for."""

    instance: str
    units: float            # that its next work adds
    counted: float          # that it has counted so far
    round: int              # of a role in lock step: which one it is about to begin; -1 for others
    replicas: int           # how many of its kind there are now
    answer: Callable[[float], None]   # takes the count, or in lock step the last round, up to which it may continue


@dataclass
class Holding:
    """What a role was given last."""

    allowed: float = 0.0
    portion: float = 0.0
    given_at: float = -math.inf


class Permits:
    """The supervisor's side of one counter. Without `ahead` every unit is asked for: then nothing depends on time (the inline
    runtime)."""

    def __init__(self, most: float, ahead: bool = True) -> None:
        """`most`: how far all roles together may count."""
        self.most, self._ahead, self._left = most, ahead, most
        self._held: dict[str, Holding] = {}
        self._asking: dict[str, Ask] = {}  # those that wait
        self._rounds = -1                  # the last round that was allowed
        self._round = Holding()            # of all roles in lock step together
        self._seen = (-1.0, 0.0)           # the total at the last look, and since when it has not changed

    def ask(self, ask: Ask) -> None:
        if ask.round < 0:
            holding = self._held.setdefault(ask.instance, Holding(ask.counted))
            self._left += holding.allowed - ask.counted  # what it did not use; less where it counted more than it was given
            holding.allowed = ask.counted
        self._asking[ask.instance] = ask  # the successor of a dead role asks anew
        self._serve()

    def _serve(self) -> None:
        for instance, ask in list(self._asking.items()):
            if ask.round >= 0 and (ask.round <= self._rounds or self._left > 0):
                self._allow_rounds(ask)
            elif ask.round < 0 and self._left > 0:
                self._allow(ask)
            else:
                continue
            del self._asking[instance]

    def _allow(self, ask: Ask) -> None:
        holding = self._held[ask.instance]
        given = self._portion(holding, ask.units, ask.units * max(ask.replicas, len(self._held)))
        self._left -= given
        holding.allowed = ask.counted + given
        ask.answer(holding.allowed)

    def _allow_rounds(self, ask: Ask) -> None:
        if ask.round > self._rounds:
            together = ask.units * ask.replicas
            given = self._portion(self._round, together, together)
            self._left = round(self._left - given, 6)  # the parts of a round need not add up to the last bit
            self._rounds = ask.round - 1 + round(given / together)
        ask.answer(self._rounds)

    def _portion(self, holding: Holding, units: float, of_all: float) -> float:
        """Whole units: one at least, and as many as are used up in about a second."""
        if not self._ahead:
            return units
        now = time.monotonic()
        lasted, holding.given_at = now - holding.given_at, now
        wanted = holding.portion * (2.0 if lasted < PORTION_SECONDS else 1.0 if lasted < 4 * PORTION_SECONDS else 0.5)
        holding.portion = units * max(1.0, min(wanted, self._left * units / of_all / PARTS) // units)
        return holding.portion

    def reconcile(self, counts: Mapping[str, float]) -> bool:
        """Once no role counts any more, take back permits of roles that died or that wait for a role which asks, and hand them
        out again. `counts`: what every instance has counted. Returns whether a role was served."""
        waiting, total = len(self._asking), sum(counts.values())
        if not waiting or total >= self.most:
            return False
        self._left = self.most - total
        for instance, holding in self._held.items():
            holding.allowed = counts[instance]  # what it still uses of its old permit is taken off when it asks again
        self._serve()
        return len(self._asking) < waiting

    def look(self, counts: Callable[[], Mapping[str, float]]) -> None:
        """Call this regularly; it reconciles when somebody has waited for long and nobody has counted."""
        if not self._asking:
            self._seen = -1.0, 0.0
            return
        now, current = time.monotonic(), counts()
        before, since = self._seen
        total = sum(current.values())
        if total != before:
            self._seen = total, now
        elif now - since > RECONCILE_SECONDS:
            self._seen = total, now
            self.reconcile(current)
