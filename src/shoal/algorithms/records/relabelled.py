"""Items that were recomputed on their way from one replay table to another: what the second table holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shoal.slots import Field, Layout

__all__ = ["RelabelledItems"]


@dataclass(frozen=True)
class RelabelledItems:
    """A learning.StoredItems. The role that relabels fills in the fields that every such item has (see learning.Relabels)."""

    fields: Mapping[str, Any]
    """What the algorithm makes of an item, with a leading axis of 1."""
    decisions: int = 1
    observation_moments: int = 0

    @cached_property
    def layout(self) -> Layout:
        own = {"key": Field((1,), "int64"), "label_version": Field((1,), "int32"), "weights_version": Field((1,), "int32"),
               "time": Field((1,), "float64")}
        return Layout({**self.fields, **own})
