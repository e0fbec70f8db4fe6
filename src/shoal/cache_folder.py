"""Where shoal keeps on this machine what it would otherwise measure or draw again: $SHOAL_CACHE, else $XDG_CACHE_HOME/shoal, else
~/.cache/shoal."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder() -> Path:
    own = os.environ.get("SHOAL_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal"
