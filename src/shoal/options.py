"""Options: sections of a configuration, frozen dataclasses whose fields declare their bounds.

    @dataclass(frozen=True)
    class Config(Options):
        section = "algorithm"                        # --algorithm.lr on the command line

        lr: float = number(1e-3, above=0)
        \"\"\"Learning rate.\"\"\"                         # becomes the help text

        def validate(self) -> None:
            super().validate()                       # the bounds of single fields
            ...                                      # then what two fields have to do with each other

A value out of bounds is refused before anything starts, in a sentence that names the option, the value and the bound.
"""

from __future__ import annotations

import math
from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar

from shoal.errors import ConfigError

__all__ = ["Bounds", "Options", "change", "flag", "is_live", "number"]

LARGEST = 2**63
"""Whole numbers stay below it: arrays, files and messages hold 64 bits."""
LARGEST_FLOAT = 3.4e38
"""Other numbers stay below it: nets and optimisers compute with float32."""


@dataclass(frozen=True)
class Bounds:
    """Where a number may lie; None is no bound. Numbers are finite, unless `infinite` allows infinity."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    infinite: bool = False

    def hold(self, value: float) -> bool:
        return (
            (abs(value) < (LARGEST if isinstance(value, int) else LARGEST_FLOAT) or (self.infinite and value == math.inf))
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        words = {"at least": self.at_least, "above": self.above, "at most": self.at_most, "below": self.below}
        return " and ".join(f"{word} {_written(bound)}" for word, bound in words.items() if bound is not None) or "finite"


def number(default: float | str | None, *, at_least: float | None = None, above: float | None = None,
           at_most: float | None = None, below: float | None = None, infinite: bool = False, live: bool = False) -> Any:
    """A field with bounds. Where None or a word (auto) is a possible value, it is always within them. A `live` one may be changed
    during a run (`change`): its users read it from these options every time."""
    return field(default=default, metadata={"bounds": Bounds(at_least, above, at_most, below, infinite), "live": live})


class Options:
    """A section of a configuration. `validate` raises a ConfigError that says what to change."""

    section: ClassVar[str] = ""
    """The section's name on the command line; empty for options without one."""

    def validate(self) -> None:
        for entry in fields(self):  # type: ignore[arg-type]  # every section is a dataclass
            _check(self.section, entry, getattr(self, entry.name))


def is_live(options: Any, name: str) -> bool:
    """Whether this field of a dataclass may be changed during a run."""
    return any(entry.name == name and entry.metadata.get("live", False) for entry in fields(options))


def change(options: Any, name: str, value: Any) -> None:
    """Change a live value in place, for all in this process who hold these options. They are frozen otherwise: a copy would not
    reach those who hold the old one."""
    if not is_live(options, name):
        raise ConfigError(f"{name} cannot be changed during a run")
    object.__setattr__(options, name, value)


def flag(name: str, section: str = "") -> str:
    """The command line's spelling of an option."""
    return "--" + (f"{section}.{name}" if section else name).replace("_", "-").rstrip("-")


def _written(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _check(section: str, entry: Field[Any], value: Any) -> None:
    bounds = entry.metadata.get("bounds")
    if bounds is None or value is None or not isinstance(value, int | float) or bounds.hold(value):
        return
    name = flag(entry.name, section)
    if isinstance(value, int) and abs(value) >= LARGEST:
        raise ConfigError(f"{name} has {int(math.log10(abs(value))) + 1} digits; it must be below 2^63")
    if math.isfinite(value) and abs(value) >= LARGEST_FLOAT:
        raise ConfigError(f"{name} is {value:g}; it must be below {LARGEST_FLOAT:g}")
    usual: Any = entry.default
    words = ["none"] if "None" in str(entry.type) else []  # annotations are text here
    words += [usual] if isinstance(usual, str) else []
    others = "".join(f", or {word}" for word in words)
    default = f" (the default is {_written(usual)})" if isinstance(usual, int | float) else ""
    raise ConfigError(f"{name} is {value}; it must be {bounds}{others}{default}")
