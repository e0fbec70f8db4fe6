"""What all five wires share: a name, ends that roles hold, memory laid out once for the most members there can be."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from shoal.errors import ProgramError
from shoal.slots import Medium, Memory

if TYPE_CHECKING:
    from shoal.runtime.program import Node

__all__ = ["Port", "Wire", "int64_words"]


@dataclass(frozen=True)
class Port:
    """One end of a wire, as an architecture hands it to a role. The runtime replaces it by the endpoint itself."""

    wire: Wire
    end: str

    def __repr__(self) -> str:
        return f"{self.wire.name}.{self.end}"


def int64_words(memory: np.ndarray, offset: int, count: int) -> np.ndarray:
    """`count` 64-bit words of a block: aligned, so that each is read and written whole."""
    return memory[offset : offset + 8 * count].view(np.int64)


class Wire(ABC):
    """A wire of a Program. Subclasses lay out their memory in `lay_out` and make endpoints in `attach`."""

    kind: ClassVar[str] = ""
    ends: ClassVar[tuple[str, ...]] = ()

    def __init__(self, name: str) -> None:
        self.name = name
        self._users: dict[str, list[tuple[str, int, int]]] = {end: [] for end in self.ends}  # node, first member, count
        self.memory: Memory | None = None
        self._kept: dict[str, Any] = {}  # views that are made once; they stay in this process

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}}

    def port(self, end: str) -> Port:
        return Port(self, end)

    def join(self, end: str, node: Node) -> None:
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
    def build(self, medium: Medium) -> None:
        """Make the memory and the channels; a program that runs again gets new ones."""
        self._kept.clear()
        self.lay_out(medium)

    @abstractmethod
    def lay_out(self, medium: Medium) -> None:
        """Take from the medium what the members need."""

    def release(self) -> None:
        """Let the memory go: the run is over."""
        self._kept.clear()
        self.memory = None

    @abstractmethod
    def attach(self, end: str, member: int, incarnation: int) -> Any:
        """The endpoint of a member, in its `incarnation`-th life, where it runs."""

    def enlist(self, end: str, member: int, here: bool) -> None:  # noqa: B027 - a hook: most wires need not know
        """The supervisor's word that the graph has this member now (alive or being restarted), or has it no more."""

    def membership(self, end: str, member: int, alive: bool) -> None:  # noqa: B027 - a hook: most wires need not know
        """The supervisor's word that a member has come to life or is dead and reaped."""

    def conserved(self) -> bool:
        """Whether the wire's own books balance (checked by the supervisor)."""
        return True

    def numbers(self) -> dict[str, float]:
        """Cumulative numbers for telemetry, read without disturbing anybody."""
        return {}

    def check_ends(self, **least: int) -> None:
        for end, count in least.items():
            if self.members(end) < count:
                raise ProgramError(f"nobody holds {self.name}.{end}; pass that port to a role")
