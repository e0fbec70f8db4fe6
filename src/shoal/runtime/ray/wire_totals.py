"""The numbers of every wire on a cluster: each place counts its own part; the driver adds up the parts, also of dead places."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

__all__ = ["WireTotals"]

STATIC = ("slots", "slot_bytes", "bytes", "epoch", "members")  # the driver knows these itself
Numbers = Mapping[str, float]


class WireTotals:
    """What places that died had counted, and how parts add up."""

    def __init__(self) -> None:
        self._past: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def keep(self, parts: Mapping[str, Numbers]) -> None:
        """A place has died with these numbers, by wire. The slots that it held died with it: they count as dropped."""
        for name, numbers in parts.items():
            past = self._past[name]
            for key, value in numbers.items():
                if key == "occupied":
                    past["dropped"] += value
                elif key == "version":
                    past[key] = max(past[key], value)
                elif key not in STATIC and key != "conserved":
                    past[key] += value

    def add_up(self, name: str, own: Numbers, parts: Iterable[Numbers]) -> dict[str, float]:
        """The numbers of a wire: the driver's own, those of dead places, and those of living ones."""
        row = dict(own)
        for part in (self._past.get(name, {}), *parts):
            for key, value in part.items():
                if key == "version":
                    row[key] = max(row[key], value)
                elif key not in STATIC and key != "conserved":
                    row[key] = row.get(key, 0.0) + value
        return row
