"""The control handle (core.Control): a coordinating role changes the graph that it is part of.

    await self.control.scale("actor", 6)            await self.control.set("learner-3", lr=1e-3)
    await self.control.copy_state("learner-0", "learner-3")     await self.control.pause("actor")
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from shoal.core import Wait
from shoal.errors import ProgramError

__all__ = ["ControlHandle", "ControlRequest"]


class ControlRequest:
    """A request that was sent to the supervisor."""

    def __init__(self, replies: dict[int, Any], identity: int, op: str) -> None:
        self._replies, self._identity, self._op = replies, identity, op

    def answered(self) -> Wait:
        return Wait(lambda: self._identity in self._replies, "control", f"{self._op} to be carried out")

    async def result(self) -> Any:
        await self.answered()
        reply = self._replies.pop(self._identity)
        if reply["error"]:
            raise ProgramError(reply["error"])
        return reply["result"]


class ControlHandle:
    """Sends a request to the supervisor and waits until it has been carried out; raises ProgramError if that is impossible.

    Roles obey between two steps, so a request about the asking role itself is not waited for.
    """

    def __init__(self, emit: Callable[[dict[str, Any]], None], replies: dict[int, Any], incarnation: int) -> None:
        self._emit, self._replies = emit, replies
        self._identity = itertools.count(incarnation << 32)  # so a reply to a predecessor is not taken for ours

    def _send(self, op: str, *arguments: Any, **values: Any) -> ControlRequest:
        identity = next(self._identity)
        self._emit({"kind": "control", "op": op, "id": identity, "arguments": arguments, "values": values})
        return ControlRequest(self._replies, identity, op)

    async def _request(self, op: str, *arguments: Any, **values: Any) -> Any:
        return await self._send(op, *arguments, **values).result()

    async def scale(self, role: str, count: int) -> None:
        await self._request("scale", role, count)

    def begin_scale(self, role: str, count: int) -> ControlRequest:
        return self._send("scale", role, count)

    async def pause(self, role: str) -> None:
        await self._request("pause", role)

    async def resume(self, role: str) -> None:
        await self._request("resume", role)

    async def set(self, role: str, **values: Any) -> None:
        await self._request("set", role, **values)

    async def copy_state(self, source: str, target: str) -> None:
        await self._request("copy_state", source, target)

    async def permit(self, counter: str, units: float, counted: float, round_number: int) -> float:
        """How far this role may count, or which round it may begin last (`RoleContext.permit`)."""
        return float(await self._request("permit", counter, units, counted, round_number))
