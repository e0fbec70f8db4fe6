"""What all ferries share: what they need of their place, and what a place needs of them."""

from __future__ import annotations

from typing import Any, Protocol

from shoal.runtime.ray.post import Message
from shoal.runtime.wires.base import Wire

__all__ = ["Ferry", "Ground"]


class Ground(Protocol):
    """What a ferry needs of its place."""

    place: str
    address: str  # of its node

    def place_of(self, wire: Wire, end: str, member: int) -> str: ...
    def here(self, wire: Wire, end: str, member: int) -> bool: ...
    def incarnation(self, wire: Wire, end: str, member: int) -> int: ...
    def send(self, place: str, message: Message, payload: Any = None) -> None: ...
    def wake(self) -> None: ...


class Ferry(Protocol):
    """What a place needs of a ferry."""

    def endpoint(self, end: str, member: int, incarnation: int) -> Any: ...
    def renewed(self, end: str, member: int) -> None: ...
    def receive(self, kind: str, numbers: tuple[Any, ...], payload: Any) -> None: ...
    def numbers(self) -> dict[str, float]: ...
