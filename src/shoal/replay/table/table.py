"""What a table is made of: selector, remover, limiter and limits. Its items are in `table_core`."""

from __future__ import annotations

import contextlib
from typing import Any

from shoal.errors import ConfigError
from shoal.replay.table.columns import Tree, parse_signature
from shoal.replay.table.limiters import MinSize, Queue, RateLimiter, Stack
from shoal.replay.table.selectors import Fifo, Lifo, Prioritized, Selector

__all__ = ["Table"]

MOST = 1 << 62
_EXAMPLES = {"selector": "replay.Uniform()", "remover": "replay.Fifo()", "limiter": "replay.MinSize(1000)"}


class Table:
    """What a table is made of. The data live in the server that the table is given to.

    soft: inserts are always accepted and nothing is removed by them; `trim` takes what is above the limits (Ape-X).
    """

    def __init__(
        self,
        name: str,
        selector: Selector | None = None,
        remover: Selector | None = None,
        max_size: int = 100_000,
        max_bytes: int | None = None,
        max_times_sampled: int = 0,
        limiter: RateLimiter | None = None,
        signature: Tree | None = None,
        soft: bool = False,
    ) -> None:
        if not isinstance(name, str) or not name or "/" in name:
            raise ConfigError(f"a table's name is a non-empty string without '/', got {name!r}")
        max_size, max_times_sampled = _whole(name, "max_size", max_size), _whole(name, "max_times_sampled", max_times_sampled)
        max_bytes = None if max_bytes is None else _whole(name, "max_bytes", max_bytes)
        if max_size < 1 or max_times_sampled < 0 or (max_bytes is not None and max_bytes < 1):
            raise ConfigError(
                f"table {name!r}: max_size {max_size} and max_bytes {max_bytes} must be at least 1, "
                f"max_times_sampled {max_times_sampled} at least 0 (0: no limit)"
            )
        for what, given in (("selector", selector), ("remover", remover), ("limiter", limiter)):
            if given is not None and not isinstance(given, RateLimiter if what == "limiter" else Selector):
                raise ConfigError(f"table {name!r}: a {what} is an object such as {_EXAMPLES[what]}, got {given!r}")
        self.name = name
        self.selector = selector if selector is not None else Prioritized(0.6)
        self.remover = remover if remover is not None else Fifo()
        self.max_size, self.max_bytes, self.max_times_sampled = max_size, max_bytes, max_times_sampled
        self.limiter = limiter if limiter is not None else MinSize(1)
        self.signature = parse_signature(signature)
        self.soft = soft
        if self.remover.uniform_mix:
            raise ConfigError(f"table {name!r}: uniform_mix is for a selector, not for a remover")
        if self.limiter.min_size > self.max_size:
            raise ConfigError(
                f"table {name!r}: the limiter's min_size {self.limiter.min_size} is above max_size {max_size}: "
                "sampling could never start; raise max_size"
            )

    @classmethod
    def queue(cls, name: str, max_size: int = 100, signature: Tree | None = None) -> Table:
        """First in, first out; each item is sampled once and inserting waits while it is full."""
        return cls(name, Fifo(), Fifo(), max_size, None, 1, Queue(max_size), signature)

    @classmethod
    def stack(cls, name: str, max_size: int = 100, signature: Tree | None = None) -> Table:
        """Last in, first out; each item is sampled once and inserting waits while it is full."""
        return cls(name, Lifo(), Fifo(), max_size, None, 1, Stack(max_size), signature)


def _whole(name: str, what: str, value: Any) -> int:
    """A whole number; 1e6 is one."""
    whole = None
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        whole = int(value)
    if whole is None or whole != value or abs(whole) >= MOST:
        raise ConfigError(f"table {name!r}: {what} is a whole number, got {value!r}")
    return whole
