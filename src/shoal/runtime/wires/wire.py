"""What all five wires share: a name, ends that roles hold, memory that is laid out once for the most members there can be."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from shoal.errors import ProgramError
from shoal.slots import Allocator, MemoryBlock

if TYPE_CHECKING:
    from shoal.runtime.program import RoleNode

__all__ = ["Port", "Wire", "int64_words"]


@dataclass(frozen=True)
class Port:
    """One end of a wire, as an architecture passes it to a role. The runtime replaces it by the end itself (core.Sink, ...)."""

    wire: Wire
    end: str

    def __repr__(self) -> str:
        return f"{self.wire.name}.{self.end}"


def int64_words(memory: np.ndarray, offset: int, count: int) -> np.ndarray:
    """`count` 64-bit words of a block: aligned, so that each is read and written whole."""
    return memory[offset : offset + 8 * count].view(np.int64)


class Wire(ABC):
    """A wire of a Program. Subclasses lay out their memory in `lay_out` and create ends in `attach`."""

    kind: ClassVar[str] = ""
    ends: ClassVar[tuple[str, ...]] = ()

    def __init__(self, name: str) -> None:
        self.name = name
        self._users: dict[str, list[tuple[str, int, int]]] = {end: [] for end in self.ends}  # node, first member, count
        self.memory: MemoryBlock | None = None
        self._kept: dict[str, Any] = {}  # views that are created once; they stay in this process

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}}

    def port(self, end: str) -> Port:
        return Port(self, end)

    def join(self, end: str, node: RoleNode) -> None:
        """A node holds this end: each of its replicas gets a member number for life."""
        if any(name == node.name for name, _, _ in self._users[end]):
            raise ProgramError(f"the role {node.name} holds {self.name}.{end} twice; pass it once")
        self._users[end].append((node.name, self.members(end), node.most))

    def members(self, end: str) -> int:
        return sum(count for _, _, count in self._users[end])

    def member_number(self, end: str, node: str, index: int) -> int:
        for name, first, _ in self._users[end]:
            if name == node:
                return first + index
        raise ProgramError(f"the role {node} does not hold {self.name}.{end}")

    def users(self, end: str) -> list[tuple[str, int]]:
        """Every (node, replica) that may hold this end, in the order of member numbers."""
        return [(name, index) for name, _, count in self._users[end] for index in range(count)]

    # ------------------------------------------------------------------ for the runtimes
    def build(self, allocator: Allocator) -> None:
        """Create the memory and the channels; a program that runs again gets new ones."""
        self._kept.clear()
        self.lay_out(allocator)

    @abstractmethod
    def lay_out(self, allocator: Allocator) -> None:
        """Allocate what the members need."""

    def release(self) -> None:
        """Release the memory: the run is over."""
        self._kept.clear()
        self.memory = None

    def array(self) -> np.ndarray:
        """The bytes of the memory, once it is laid out."""
        assert self.memory is not None
        return self.memory.array()

    @abstractmethod
    def attach(self, end: str, member: int, incarnation: int) -> Any:
        """The end that a member holds in its `incarnation`-th life; called where it runs."""

    def enlist(self, end: str, member: int, here: bool) -> None:  # noqa: B027 - a hook: most wires need not know
        """The supervisor says that the graph now has this member (alive or being restarted), or no longer has it."""

    def membership(self, end: str, member: int, alive: bool) -> None:  # noqa: B027 - a hook: most wires need not know
        """The supervisor says that a member has started, or is dead and reaped."""

    def conserved(self) -> bool:
        """Whether no slot was lost, by the wire's own counts (the supervisor checks this)."""
        return True

    def numbers(self) -> dict[str, float]:
        """Cumulative numbers for telemetry; reading them disturbs no role."""
        return {}

    def check_ends(self, **least: int) -> None:
        for end, count in least.items():
            if self.members(end) < count:
                raise ProgramError(f"no role holds {self.name}.{end}; pass that port to a role")
