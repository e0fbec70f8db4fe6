"""**shared**: a tree of arrays that many read and write, with no consistency promised (Hogwild parameters)."""

from __future__ import annotations

from shoal.runtime.wires.base import Port, Wire
from shoal.slots import Layout, Medium

__all__ = ["Shared"]


class Shared(Wire):
    kind, ends = "shared", ("view",)

    def __init__(self, name: str, layout: Layout) -> None:
        super().__init__(name)
        self.layout = layout

    @property
    def view(self) -> Port:
        return self.port("view")

    def lay_out(self, medium: Medium) -> None:
        self.check_ends(view=1)
        self.memory = medium.memory(self.layout.nbytes)

    def attach(self, end: str, member: int, incarnation: int) -> View:
        return View(self)

    def numbers(self) -> dict[str, float]:
        return {"bytes": self.layout.nbytes}


class View:
    """The arrays themselves."""

    def __init__(self, wire: Shared) -> None:
        assert wire.memory is not None
        self.name = wire.name
        self.data = wire.layout.views(wire.memory.array())
