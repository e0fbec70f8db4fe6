"""Rate limiters: how far sampling may run ahead of inserting, and the other way round.

With I inserts, S samples, D deletes and spi samples per insert:

    can_sample(n)   I - D >= min_size   and   I*spi - S - n >= min_diff
    can_insert(n)   I - D + n <= min_size   or   (I + n)*spi - S <= max_diff

A prefetching reader reserves its draws: they hold back others like samples, but count as samples only when consumed.
"""

from __future__ import annotations

import math
import time
import warnings
from collections import deque
from collections.abc import Sequence
from typing import Any

from shoal.errors import ConfigError

__all__ = ["MinSize", "Queue", "RateLimiter", "Rates", "SampleToInsertRatio", "Stack"]


WINDOW_SECONDS = 10.0


class RateLimiter:
    """The general limiter; the others are ways to choose its four numbers."""

    narrowest = 2.0
    """The least width of the band, in units of max(1, samples_per_insert)."""

    def __init__(
        self, samples_per_insert: float, min_size: int, min_diff: float = -math.inf, max_diff: float = math.inf
    ) -> None:
        spi, lo, hi = float(samples_per_insert), float(min_diff), float(max_diff)
        if not (spi > 0 and math.isfinite(spi)):
            raise ConfigError(f"samples_per_insert must be positive and finite, got {samples_per_insert}")
        if min_size < 1:
            raise ConfigError(f"min_size must be at least 1, got {min_size}")
        if math.isnan(lo) or math.isnan(hi) or hi - lo < self.narrowest * max(1.0, spi):
            raise ConfigError(
                f"max_diff {hi} - min_diff {lo} must be at least {self.narrowest:g} * max(1, samples_per_insert) = "
                f"{self.narrowest * max(1.0, spi)}, or both sides block for ever; widen the error buffer"
            )
        if lo > spi * min_size:
            raise ConfigError(
                f"min_diff {lo} is above samples_per_insert * min_size = {spi * min_size}: sampling could not start"
            )
        if hi < spi * min_size:
            warnings.warn(
                f"max_diff {hi} is below samples_per_insert * min_size = {spi * min_size}: "
                "inserting will block as soon as min_size is reached",
                stacklevel=3,
            )
        self.samples_per_insert, self.min_size, self.min_diff, self.max_diff = spi, int(min_size), lo, hi
        self._waiting = [0, 0]
        self._since = [0.0, 0.0]
        self.begin()

    def begin(self) -> None:
        """Start again from zero: its table has a new server."""
        self.insert_blocked_seconds = self.sample_blocked_seconds = 0.0
        self.reset()

    def reset(self) -> None:
        """Zero the counters."""
        self.inserts = self.samples = self.deletes = self.reserved = 0

    def can_insert(self, n: int = 1) -> bool:
        if self.inserts - self.deletes + n <= self.min_size:
            return True
        return (self.inserts + n) * self.samples_per_insert - self.samples - self.reserved <= self.max_diff

    def can_sample(self, n: int = 1) -> bool:
        if self.inserts - self.deletes < self.min_size:
            return False
        return self.inserts * self.samples_per_insert - self.samples - self.reserved - n >= self.min_diff

    def insertable(self, n: int) -> int:
        """The largest k <= n with can_insert(k)."""
        if self.can_insert(n):
            return n
        room = (self.max_diff + self.samples + self.reserved) / self.samples_per_insert - self.inserts
        return self._settle(max(self.min_size - self.inserts + self.deletes, math.floor(room)), n, self.can_insert)

    def sampleable(self, n: int) -> int:
        """The largest k <= n with can_sample(k)."""
        if self.can_sample(n):
            return n
        if self.inserts - self.deletes < self.min_size:
            return 0
        room = self.inserts * self.samples_per_insert - self.samples - self.reserved - self.min_diff
        return self._settle(math.floor(room), n, self.can_sample)

    @staticmethod
    def _settle(guess: int, n: int, allowed: Any) -> int:
        """Correct a guess that division may have rounded, with the exact inequality."""
        k = min(max(guess, 0), n)
        while k > 0 and not allowed(k):
            k -= 1
        while k < n and allowed(k + 1):
            k += 1
        return k

    def insert(self, n: int = 1) -> None:
        self.inserts += n

    def sample(self, n: int = 1) -> None:
        self.samples += n

    def delete(self, n: int = 1) -> None:
        self.deletes += n

    def begin_wait(self, side: str) -> None:
        """Somebody waits on this side ('insert' or 'sample'); overlapping waits count once."""
        at = side == "sample"
        if self._waiting[at] == 0:
            self._since[at] = time.monotonic()
        self._waiting[at] += 1

    def end_wait(self, side: str) -> None:
        at = side == "sample"
        self._waiting[at] -= 1
        if self._waiting[at] == 0:
            self._count(side, time.monotonic() - self._since[at])

    def _count(self, side: str, seconds: float) -> None:
        if side == "sample":
            self.sample_blocked_seconds += seconds
        else:
            self.insert_blocked_seconds += seconds

    def become(self, other: RateLimiter) -> None:
        """Keep to the numbers of another limiter from now on."""
        before = list(self.config().values())
        self.samples_per_insert, self.min_size = other.samples_per_insert, other.min_size
        self.min_diff, self.max_diff = other.min_diff, other.max_diff
        self.continue_from(before)

    def continue_from(self, before: Sequence[float]) -> None:
        """Take over counters that were kept with other numbers (the values of `config`): sampling stays as far ahead or behind
        as it was. If the new ratio counted for all earlier inserts, one side would wait until the other had made up for them."""
        spi, min_size, min_diff, _ = before
        ahead = 0.0 if math.isinf(min_diff) else self.samples - spi * max(0.0, self.inserts - min_size)
        self.samples = max(0, round(self.samples_per_insert * max(0, self.inserts - self.min_size) + ahead))

    def config(self) -> dict[str, float]:
        return {
            "samples_per_insert": self.samples_per_insert,
            "min_size": self.min_size,
            "min_diff": self.min_diff,
            "max_diff": self.max_diff,
        }

    def counters(self) -> dict[str, float]:
        """What info() reports; the time of waits still under way is included."""
        now = time.monotonic()
        open_wait = [now - self._since[i] if self._waiting[i] else 0.0 for i in range(2)]
        return {
            "inserts": self.inserts,
            "samples": self.samples,
            "deletes": self.deletes,
            "reserved": self.reserved,
            "insert_blocked_seconds": self.insert_blocked_seconds + open_wait[0],
            "sample_blocked_seconds": self.sample_blocked_seconds + open_wait[1],
        }

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(samples_per_insert={self.samples_per_insert}, min_size={self.min_size}, "
            f"min_diff={self.min_diff}, max_diff={self.max_diff})"
        )


class Rates:
    """Inserts and samples per second over the last ten seconds."""

    def __init__(self, limiter: RateLimiter) -> None:
        self._limiter = limiter
        self._marks: deque[tuple[float, int, int]] = deque([(time.monotonic(), limiter.inserts, limiter.samples)])

    def note(self) -> None:
        """Something happened: remember the counters, once a second."""
        now = time.monotonic()
        if now - self._marks[-1][0] >= 1.0:
            self._marks.append((now, self._limiter.inserts, self._limiter.samples))
            while len(self._marks) > 1 and self._marks[1][0] <= now - WINDOW_SECONDS:
                self._marks.popleft()

    def now(self) -> dict[str, float]:
        self.note()
        began, inserts, samples = self._marks[0]
        seconds = max(time.monotonic() - began, 1e-3)
        done = (self._limiter.inserts - inserts, self._limiter.samples - samples)
        return {"inserts_per_second": max(0, done[0]) / seconds, "samples_per_second": max(0, done[1]) / seconds}


class MinSize(RateLimiter):
    """Sampling waits for n items; nothing else is bounded."""

    def __init__(self, n: int) -> None:
        super().__init__(1.0, n)


class SampleToInsertRatio(RateLimiter):
    """Keep samples per insert within a band around a ratio.

    error_buffer e gives the bounds s*m - e and s*m + e; a pair gives them directly.
    """

    def __init__(self, samples_per_insert: float, min_size: int, error_buffer: float | tuple[float, float]) -> None:
        if isinstance(error_buffer, tuple):
            lo, hi = error_buffer
        else:
            lo, hi = samples_per_insert * min_size - error_buffer, samples_per_insert * min_size + error_buffer
        super().__init__(samples_per_insert, min_size, lo, hi)


class Queue(RateLimiter):
    """Every item is inserted before it is sampled, and at most n wait."""

    narrowest = 1.0  # one place is enough for a strict turn of insert and sample

    def __init__(self, n: int) -> None:
        super().__init__(1.0, 1, 0.0, float(n))


class Stack(Queue):
    """The same bounds as Queue; the table's selector makes it a stack."""
