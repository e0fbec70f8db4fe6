"""The control handle in a coordinator's hands: elastic graphs, from inside the program.

    await self.control.scale("actor", 6)            await self.control.set("learner-3", lr=1e-3)
    await self.control.copy_state("learner-0", "learner-3")     await self.control.pause("actor")
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from shoal.core import Wait
from shoal.errors import ProgramError

__all__ = ["ControlHandle"]


class ControlHandle:
    """Sends a wish to the supervisor and waits until it has been carried out; a wish that cannot be raises ProgramError.

    Roles obey between two steps, so a role that asks something of itself is not waited for.
    """

    def __init__(self, emit: Callable[[dict[str, Any]], None], replies: dict[int, Any], incarnation: int) -> None:
        self._emit, self._replies = emit, replies
        self._identity = itertools.count(incarnation << 32)  # an answer to a predecessor is nobody's

    async def _wish(self, op: str, *arguments: Any, **values: Any) -> None:
        identity = next(self._identity)
        self._emit({"kind": "control", "op": op, "id": identity, "arguments": arguments, "values": values})
        await Wait(lambda: identity in self._replies, "control", f"{op} to be carried out")
        if error := self._replies.pop(identity):
            raise ProgramError(error)

    async def scale(self, role: str, count: int) -> None:
        await self._wish("scale", role, count)

    async def pause(self, role: str) -> None:
        await self._wish("pause", role)

    async def resume(self, role: str) -> None:
        await self._wish("resume", role)

    async def set(self, role: str, **values: Any) -> None:
        await self._wish("set", role, **values)

    async def copy_state(self, source: str, target: str) -> None:
        await self._wish("copy_state", source, target)
