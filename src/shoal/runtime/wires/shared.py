"""**shared**: a tree of arrays that many read and write, with no consistency promised (Hogwild parameters)."""

from __future__ import annotations

from shoal.core import Shared
from shoal.runtime.wires.wire import Port, Wire
from shoal.slots import Allocator, Layout

__all__ = ["SharedWire"]


class SharedWire(Wire):
    kind, ends = "shared", ("view",)

    def __init__(self, name: str, layout: Layout, instead: str = "") -> None:
        super().__init__(name)
        self.layout, self.instead = layout, instead

    @property
    def view(self) -> Port:
        return self.port("view")

    def lay_out(self, allocator: Allocator) -> None:
        self.check_ends(view=1)
        self.memory = allocator.memory(self.layout.nbytes)

    def attach(self, end: str, member: int, incarnation: int) -> Shared:
        return SharedView(self)

    def numbers(self) -> dict[str, float]:
        return {"bytes": self.layout.nbytes}


class SharedView:
    """The arrays themselves."""

    def __init__(self, wire: SharedWire) -> None:
        self.name = wire.name
        self.data = wire.layout.views(wire.array())
