"""The contract of roles and wires: what a role is and what the five wires promise. `acting.py` has policies and records,
`learning.py` algorithms and architectures.

    algorithm      what is learned            Policy, Record, Learn                 knows nothing of processes
    architecture   who does what, with whom   a Program: roles joined by wires      knows nothing of losses
    runtime        where it runs              inline | local | ray                  knows nothing of RL

A **role** is a class with one coroutine, `step()`: one unit of work. It awaits everything that it needs from other roles on
a wire and blocks nowhere else, so the same role runs in one thread with all others, in a process of its own, or on another
machine. This file holds protocols (and Pieces of a state): `runtime/` implements the wires, `architectures/` draws the graphs. A
Program, its ports and CONTROL are in `runtime/program.py`, exceptions (Timeout, GroupChanged) in `errors.py`, what a role awaits
(Wait: a condition, its descriptors, words) in `slots/waiting.py`. A role whose step raises is restarted; docs/faults.md says how
often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from shoal.slots import Wait, any_of  # `await any_of(a, b, timeout=1.0)` gives False when the time is over

if TYPE_CHECKING:
    from pathlib import Path

    from shoal.telemetry import Stats

__all__ = ["Adjustable", "Asked", "Call", "Captures", "Closable", "Control", "DirectCopy", "Draft", "Drainable", "Group",
           "GroupMember", "KeepsTurn", "Me", "Pending", "Pieces", "Publisher", "Reader", "Request", "Role", "Server", "Settles",
           "Shared", "SharesState", "Sink", "Slot", "Source", "Stateful", "StreamEnd", "Tree", "Vector", "Wait", "any_of"]

Tree: TypeAlias = Any    # an array, or a dictionary of trees; time-major [T, B, ...] for sequences
Vector: TypeAlias = Any  # a flat np.ndarray; between learners that compute on GPUs, a torch.Tensor


# ---------------------------------------------------------------------------------------------- roles
class Me(Protocol):
    """What a role may know of itself: its place in the graph, and nothing of the runtime."""

    name: str               # "actor"
    index: int              # 0 .. replicas - 1
    replicas: int           # the most there can be
    incarnation: int        # grows with every restart and every resume
    folder: Path | None     # where the program keeps files that outlive it; None: nowhere
    stats: Stats            # add(counter, n), set(gauge, x), observe(histogram, values), phase(name)

    def rng(self, salt: str = "") -> np.random.Generator: ...  # its own, from (seed, role, index, incarnation, salt)
    def beat(self) -> None: ...                # a sign of life from within a long step
    async def permit(self, counter: str, units: float, round_number: int = -1) -> None: ...
    # Wait until the program's limit of this counter, if it has one, allows this role to count `units` more. Roles in lock step
    # name the round that they begin, so that a round is allowed to all of them or to none.
    def note(self, text: str) -> None: ...     # one line for the run's event log
    def finish(self, reason: str) -> None: ... # the program has reached its goal and may stop
    def fail(self, text: str) -> None: ...     # the run has failed: restarting this role would not help


class Role(Protocol):
    """One unit of work at a time.

        role = Actor(me, **arguments)        # in the process where it will live; ports have become ends of wires
        while running:                       # the runtime's loop, the only one there is
            await role.step()                # between two steps it is checkpointed, adjusted, drained or stopped

    The protocols below are optional abilities; a role has one by having its methods.
    """

    async def step(self) -> None: ...


class Pieces:
    """Bytes of a state that is too large to be copied: they are written as they lie in memory, while the role continues. Nobody may
    change them until `release` is called, in the role's own thread; from a file they come back as one array."""

    def __init__(self, parts: Sequence[bytes | np.ndarray], release: Callable[[], None]) -> None:
        self.parts, self.release = parts, release
        self.nbytes = sum(part.nbytes if isinstance(part, np.ndarray) else len(part) for part in parts)

    def __iter__(self) -> Iterator[memoryview]:
        """Each part as bytes, without a copy where it is contiguous."""
        for part in self.parts:
            yield np.ascontiguousarray(part).reshape(-1).view(np.uint8).data if isinstance(part, np.ndarray) else memoryview(part)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.frombuffer(b"".join(self), np.uint8)


@runtime_checkable
class Stateful(Protocol):
    """A role that a checkpoint holds: `state()` is saved between two steps, `load(state)` restores it before the first one."""

    def state(self) -> Mapping[str, np.ndarray | Pieces] | None: ...  # None: nothing to save, for instance as another replica does
    def load(self, state: dict[str, np.ndarray]) -> None: ...


@runtime_checkable
class SharesState(Stateful, Protocol):
    """A role whose replicas all hold the same state: each may start from the file of any other one."""

    shares_state: bool  # declared in the class: shares_state = True


@runtime_checkable
class Settles(Protocol):
    """A role that may be checkpointed in the middle of a step.

        self.settled = True                  # nothing has changed yet
        batch = await unrolls.take(8)        # a checkpoint need not wait for this batch
        self.settled = False
    """

    settled: bool


@runtime_checkable
class KeepsTurn(Protocol):
    """A role that cuts one piece of work into many short steps, so that it can be checkpointed and stopped between them.

    Where all roles share one thread it continues while `keeps_turn` is true, and the others wait: see `Program.side_work`.
    """

    @property
    def keeps_turn(self) -> bool: ...


@runtime_checkable
class Adjustable(Protocol):
    """A role whose hyper-parameters can be changed: `await control.set("learner-3", lr=1e-3)` calls `role.set(lr=1e-3)`."""

    def set(self, **values: Any) -> None: ...


@runtime_checkable
class Captures(Protocol):
    """A role that has captured shared settings (`Program.settings`), as in a CUDA graph; others read them at every use."""

    def capture_anew(self) -> None: ...      # they have changed


@runtime_checkable
class Drainable(Protocol):
    """A role that gives back what it holds before it leaves the graph, when the role is scaled down."""

    def drain(self) -> None: ...


@runtime_checkable
class Closable(Protocol):
    """A role that releases resources (environments, files) when it ends."""

    def close(self) -> None: ...


class Asked(Protocol):
    """A request to the supervisor that is not waited for."""

    def answered(self) -> Wait: ...          # to wait for several things at once: `await any_of(asked.answered(), ...)`
    async def result(self) -> Any: ...       # raises ProgramError if it was impossible


class Control(Protocol):
    """The graph in the hands of a coordinating role: `program.add(..., control=CONTROL)`. Names are "actor" or "actor-3"."""

    async def scale(self, role: str, count: int) -> None: ...  # a role with a state is saved before its last replica ends
    def begin_scale(self, role: str, count: int) -> Asked: ...
    async def pause(self, role: str) -> None: ...
    async def resume(self, role: str) -> None: ...
    async def set(self, role: str, **values: Any) -> None: ...
    async def copy_state(self, source: str, target: str) -> None: ...


# ---------------------------------------------------------------------------------------------- the five wires
class Slot(Protocol):
    """A producer's fixed piece of memory, written in place."""

    data: Tree
    def send(self) -> None: ...


class Sink(Protocol):
    """The producing end of a **stream**: many -> few, bounded.

        slot = await unrolls.slot()          # waits when full (or drops this producer's own oldest, counted)
        slot.data["reward"][t] = ...         # written in place
        slot.send()                          # once; only the slot's number travels
    """

    async def slot(self) -> Slot: ...


class StreamEnd(Sink, Protocol):
    """What the stream wire itself offers beyond Sink."""

    def free(self) -> Wait: ...              # to wait for several things at once: `await any_of(unrolls.free(), ...)`


class Source(Protocol):
    """The consuming end of a **stream**.

        batch = await unrolls.take(8)        # slots of producers in turns, gathered into [T+1, B]; two more takes leave it whole
        batch = await unrolls.take_each(outlived)    # a barrier: one slot of every living producer; outlived(slot) are skipped
    """

    direct: DirectCopy | None                # set it to copy large fields to a device without gathering them first
    async def take(self, count: int) -> Tree: ...
    async def take_each(self, outlived: Callable[[Tree], bool] | None = None) -> Tree: ...
    def waiting(self, count: int) -> bool: ...  # whether `take(count)` would return at once


class DirectCopy(Protocol):
    """Copies some fields of a batch straight from the slots to elsewhere (a GPU). A Source drives it:

        copy.begin(count); copy.copy(0, slot); copy.copy(1, other); ...; batch |= copy.finish(); later: copy.wait()
    """

    fields: tuple[str, ...]
    def begin(self, count: int) -> None: ...
    def copy(self, position: int, slot: Tree) -> None: ...
    def finish(self) -> Tree: ...            # the fields of the batch; copies may still be under way
    def wait(self) -> None: ...              # until the slots may be written again


class Publisher(Protocol):
    """The writing end of a **broadcast**: one -> many, latest wins; the wire keeps the version, which never decreases.

        version = weights.publish(tree)      # copies; never waits
    """

    @property
    def version(self) -> int: ...
    def publish(self, tree: Tree) -> int: ...


class Reader(Protocol):
    """The reading end of a **broadcast**.

        await weights.newer_than(version)
        version = weights.pull(into)         # copies the newest whole value, never a torn one
    """

    @property
    def version(self) -> int: ...            # the newest there is to pull; 0: nothing was published yet
    @property
    def age_seconds(self) -> float: ...      # between the publication and the last pull
    def newer_than(self, version: int) -> Wait: ...
    def pull(self, into: Tree) -> int: ...


class Call(Protocol):
    """The asking end of a **call**: many -> one, request and reply, `depth` requests in flight.

        reply = await server.ask({"observation": x}, timeout=5.0)      # raises Timeout; a late reply is dropped

        draft = await server.slot()          # or in place: wait for a free slot,
        draft.data["observation"][:] = x     # write the request into it,
        pending = draft.send()               # send it, do other work,
        reply = await pending.result()       # and wait for the reply
    """

    depth: int
    async def slot(self, timeout: float | None = None) -> Draft: ...
    async def ask(self, request: Tree, timeout: float | None = None) -> Tree: ...


class Draft(Protocol):
    """A free slot of a call: a request that is being written."""

    data: Tree
    def send(self, to: int | None = None, unused: int = 0) -> Pending: ...
    """To this client's server, or to the server with this number. `unused` bytes of the request do not count as moved."""


class Pending(Protocol):
    """A request that was sent. `result` copies the reply and frees the slot; `look` reads it in place until `done` frees it."""

    def answered(self) -> Wait: ...          # to wait for several things at once: `await any_of(pending.answered(), ...)`
    async def result(self, timeout: float | None = None) -> Tree: ...
    async def look(self, timeout: float | None = None) -> Tree: ...
    def done(self) -> None: ...


class Request(Protocol):
    """One question; may be kept and answered later, in any order. A restarted server receives unanswered requests again."""

    data: Tree
    client: int
    @property
    def answer(self) -> Tree: ...            # the reply's memory: fill it in place and pass it to `reply`, and nothing is copied
    @property
    def void(self) -> bool: ...              # the client no longer waits for a reply
    def reply(self, tree: Tree) -> None: ...


class Server(Protocol):
    """The answering end of a **call**.

        for request in await clients.take(most=32):    # the pending requests, at least one, at most 32
            request.reply({"action": ...})
    """

    async def take(self, most: int) -> Sequence[Request]: ...
    def asked(self) -> Wait: ...             # to wait for several things at once: `await any_of(clients.asked(), ...)`, then
    def pending(self, most: int) -> Sequence[Request]: ...  # what there is now, perhaps nothing


class Group(Protocol):
    """The end of a **group**: synchronous all-reduce; the result has the same bits at every member.

        await group.sync(state)              # enter; take over the senior member's state, in place
        gradient = await group.mean(vector)  # GroupChanged when one died or joined: discard the update, sync, continue
    """

    @property
    def size(self) -> int: ...
    @property
    def leader(self) -> bool: ...            # whether this member's state counts: it publishes and is checkpointed
    async def mean(self, vector: Vector) -> Vector: ...
    async def sum(self, vector: np.ndarray) -> np.ndarray: ...
    async def sync(self, state: np.ndarray) -> None: ...


class GroupMember(Group, Protocol):
    """What the group wire itself offers beyond Group, for building another group on it (a group of GPUs)."""

    name: str
    @property
    def address(self) -> str: ...            # where other members reach this machine
    @property
    def rank(self) -> int: ...               # 0 is the senior member
    def changed(self) -> bool: ...           # whether members died or joined since the last `sync`


class Shared(Protocol):
    """**shared**: arrays that many read and write; no consistency is promised (Hogwild)."""

    data: Tree
