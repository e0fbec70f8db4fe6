"""The options that roles hold and that may change while they run, wherever a process has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.options import change

__all__ = ["OF_ROLES", "LiveValues"]

OF_ROLES = ("algorithm", "eval", "league", "replay")
"""Sections that roles hold; the others are the supervisor's own."""


class LiveValues:
    """A runtime.program.Settings: the options that roles hold, by section. It travels with the program, so that in every process it
    holds the very objects that the roles there hold."""

    def __init__(self, **sections: Any) -> None:
        self.sections = sections

    def change(self, values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            section, *path, name = key.split(".")
            options = self.sections[section]
            for part in path:
                options = getattr(options, part)
            change(options, name, value)
