"""What a link needs of its place, and what a place needs of a link."""

from __future__ import annotations

from typing import Any, Protocol

from shoal.runtime.ray.messenger import Message
from shoal.runtime.wires.wire import Wire

__all__ = ["Link", "LinkContext"]


class LinkContext(Protocol):
    """What a link needs of its place."""

    place: str
    address: str  # of its node

    def place_of(self, wire: Wire, end: str, member: int) -> str: ...
    def here(self, wire: Wire, end: str, member: int) -> bool: ...
    def incarnation(self, wire: Wire, end: str, member: int) -> int: ...
    def send(self, place: str, message: Message, payload: Any = None) -> None: ...
    def wake(self) -> None: ...


class Link(Protocol):
    """What a place needs of a link."""

    def endpoint(self, end: str, member: int, incarnation: int) -> Any: ...
    def renewed(self, end: str, member: int) -> None: ...
    def receive(self, kind: str, numbers: tuple[Any, ...], payload: Any) -> None: ...
    def numbers(self) -> dict[str, float]: ...
