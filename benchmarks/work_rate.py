"""How fast a piece of work is, done again and again."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["work_rate"]


def work_rate(work: Callable[[], int], seconds: float, wait: Callable[[], object] = lambda: None) -> float:
    """Units per second of `work`, repeated for `seconds` and at least once. It returns how many units it did; `wait` returns when
    everything that was begun is done, as torch.cuda.synchronize does."""
    wait()
    began, done = time.perf_counter(), 0
    while not done or time.perf_counter() - began < seconds:
        done += work()
    wait()
    return done / (time.perf_counter() - began)
