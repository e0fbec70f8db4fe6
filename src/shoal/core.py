"""The theory of shoal, in one file: what a role is, what the five wires promise, what an algorithm is.

    algorithm      what is learned            Policy, Record, Learn                 knows nothing of processes
    architecture   who does what, with whom   a Program: roles joined by wires      knows nothing of losses
    runtime        where it runs              inline | local | ray                  knows nothing of RL

A **role** is a class with one coroutine, `step()`: one unit of work. Whatever it needs from the world it awaits on a
wire, and nothing else may block, so the same role runs in one thread with all others, in a process of its own, or on
another machine. This file holds protocols only; `runtime/` has the wires, `architectures/` the graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from shoal.slots import Layout, Wait, any_of  # `await any_of(a, b, timeout=1.0)`: False when the time was over

if TYPE_CHECKING:
    import torch

__all__ = ["Algorithm", "Call", "Delivery", "Group", "Learn", "Me", "Policy", "Progress", "Publisher", "Reader", "Record",
           "Request", "Role", "Server", "Shared", "Sink", "Slot", "Source", "StepView", "Tolerance", "Tree", "Wait", "any_of"]

Tree: TypeAlias = Any  # an array, or a dictionary of trees; time-major [T, B, ...] for sequences


# ---------------------------------------------------------------------------------------------- roles
class Me(Protocol):
    """What a role may know of itself. It learns nothing of the runtime."""

    name: str               # "actor"
    index: int              # 0 .. replicas - 1
    replicas: int           # the most there can be
    incarnation: int        # grows with every restart and every resume
    stats: Any              # telemetry.Stats: add(counter, n), set(gauge, x), observe(histogram, values), phase(name)

    def rng(self, salt: str = "") -> np.random.Generator: ...  # its own, from (seed, role, index, incarnation, salt)
    def beat(self) -> None: ...                # a sign of life from within a long step
    def note(self, text: str) -> None: ...     # one line for the run's event log
    def finish(self, reason: str) -> None: ... # the program has reached its goal and may stop
    def fail(self, text: str) -> None: ...     # the run has failed: restarting this role would not help


class Role(Protocol):
    """One unit of work at a time.

        while running:                       # the runtime's loop, the only one there is
            await role.step()                # between two steps is where it is checkpointed, drained or stopped

    Optional: `state() -> dict[str, np.ndarray]` and `load(state)` for what a checkpoint must hold,
    `set(**values)` for hyper-parameters, `drain()` to give back what it holds, `close()`.
    """

    async def step(self) -> None: ...


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


class Source(Protocol):
    """The consuming end of a **stream**.

        batch = await unrolls.take(8)        # producers that have one in turns; gathered once, into [T+1, B]; valid for 3 takes
        batch = await unrolls.take_each(old) # one of every living producer, in their order (a barrier); none that is old(slot)
    """

    async def take(self, count: int) -> Tree: ...
    async def take_each(self, outlived: Callable[[Tree], bool] | None = None) -> Tree: ...


class Publisher(Protocol):
    """The writing end of a **broadcast**: one -> many, latest wins; the version lives in the wire and never decreases."""
    version: int
    def publish(self, tree: Tree) -> int: ...


class Reader(Protocol):
    """The reading end of a **broadcast**.

        await weights.newer_than(version)
        version = weights.pull(into)         # copies the newest whole value, never a torn one
    """

    version: int                             # the newest there is to pull
    age_seconds: float                       # between the publication and the last pull
    def newer_than(self, version: int) -> Wait: ...
    def pull(self, into: Tree) -> int: ...


class Call(Protocol):
    """The asking end of a **call**: many -> one, request and reply, `depth` requests in flight.

        reply = await server.ask({"observation": x}, timeout=5.0)      # raises Timeout; a late reply is dropped
        draft = await server.slot()          # or in place: draft.data; pending = draft.send(to=k); await pending.result()
    """
    depth: int
    async def slot(self, timeout: float | None = None) -> Any: ...
    async def ask(self, request: Tree, timeout: float | None = None) -> Tree: ...


class Request(Protocol):
    """One question; may be kept and answered later, in any order. A server's successor is asked what was not answered."""

    data: Tree
    answer: Tree  # the reply's memory: filled in place and passed to `reply`, it is not copied
    client: int
    void: bool    # nobody waits for the reply any more
    def reply(self, tree: Tree) -> None: ...


class Server(Protocol):
    """The answering end of a **call**: `requests = await clients.take(most=32)` gives whatever is pending, at least one."""

    async def take(self, most: int) -> list[Request]: ...
    def asked(self) -> Wait: ...  # for one who waits for other things too: `await any_of(...)`, then
    def pending(self, most: int) -> list[Request]: ...


class Group(Protocol):
    """A member of a **group**: synchronous all-reduce; the result has the same bits at every member.

        await group.sync(state)              # enter; take over the senior member's state, in place
        gradient = await group.mean(vector)  # GroupChanged when one died or joined: discard the update, sync, go on
    """

    size: int
    leader: bool                             # whether this one's state counts: it publishes and is checkpointed

    async def mean(self, vector: np.ndarray) -> np.ndarray: ...
    async def sum(self, vector: np.ndarray) -> np.ndarray: ...
    async def sync(self, state: np.ndarray) -> None: ...


class Shared(Protocol):
    """**shared**: arrays that many read and write; no consistency is promised (Hogwild)."""
    data: Tree


# ---------------------------------------------------------------------------------------------- algorithms
@dataclass(frozen=True)
class Progress:
    """How far training is. It travels with the weights; every schedule is a function of it."""

    env_steps: int = 0
    learner_steps: int = 0
    fraction: float = 0.0   # of the env_steps budget; 0 without one


class Tolerance:
    """How old data may be. Validity of algorithm x architecture is computed from these, not listed."""

    NOTHING, LAG, BOUNDED_REUSE, REPLAY = range(4)
    NAMES = ("nothing", "lag", "a reuse buffer bounded by a staleness", "any replay")


@dataclass(frozen=True)
class Delivery:
    """What a data path delivers: the tolerance it needs, and in words why."""

    needs: int
    why: str


@dataclass
class StepView:
    """What a policy sees of B seats at one moment (arrays [B, ...])."""

    observation: Tree
    first: np.ndarray
    action_mask: np.ndarray | None = None
    prev_action: Tree | None = None
    prev_reward: np.ndarray | None = None


class Policy(Protocol):
    """Acts. Holds private weights, loaded from what a Learn published."""

    def load(self, published: Tree) -> None: ...
    def bind(self, published: Tree) -> None: ...  # like load, but these very arrays: whoever writes them changes the policy
    def initial_state(self, seats: int) -> Tree: ...
    def act(self, view: StepView, state: Tree, explore: np.ndarray | None, rng: torch.Generator) -> tuple[Tree, Tree, Tree]:
        """-> action [B, ...], next state, extras [B, ...] (log-probabilities, values); explore None means greedily."""


class Record(Protocol):
    """What an item of experience is: a recorder writes steps into a slot. Optional: `priority(item)`, from extras alone."""

    layout: Layout
    def recorder(self, seats: int) -> Any: ...


class Learn(Protocol):
    """The learning side. An architecture acts only between `gradients` and `apply`.

        sums, moments = await group.sum(learn.sums(batch), learn.moments(batch))    # what all learners must share
        for minibatch in learn.minibatches(batch, sums, progress, rng):
            for phase in learn.phases:
                gradient, metrics = learn.gradients(minibatch, phase)     # one flat vector per phase
                learn.apply(await group.mean(gradient), phase)            # clips, steps, refreshes targets
        learn.absorb(moments)                                             # running statistics, before publication
        weights.publish(learn.published(progress))
    """

    phases: tuple[str, ...]
    state: dict[str, torch.Tensor]  # named tensors: parameters, targets, optimiser moments, normalisers
    weights: Mapping[str, torch.Tensor]  # those of them that gradients depend on: all but the optimiser's moments

    def sums(self, batch: Tree) -> np.ndarray: ...
    def moments(self, batch: Tree) -> np.ndarray: ...
    def minibatches(self, batch: Tree, sums: np.ndarray, progress: Progress, rng: np.random.Generator) -> Iterator[Tree]: ...
    def gradients(self, minibatch: Tree, phase: str) -> tuple[np.ndarray, dict[str, float]]: ...
    def apply(self, gradient: np.ndarray, phase: str) -> bool: ...
    def anneal(self, progress: Progress) -> None: ...  # for an `apply` without `minibatches`, which does it itself
    def absorb(self, moments: np.ndarray) -> None: ...
    def bind(self, arrays: Mapping[str, np.ndarray]) -> None: ...
    def published(self, progress: Progress) -> Tree: ...


class Algorithm(Protocol):
    """A description that pickles: configuration and spaces. Each role builds the part it needs."""

    name: str
    tolerates: int
    record: Record

    def policy(self) -> Policy: ...
    def learn(self, seed: int) -> Learn: ...
    def explore(self, index: int, count: int, seats: int, progress: Progress) -> np.ndarray: ...
    def published_layout(self) -> Layout: ...
    # optional: def refresh(self, published: Tree, items: Tree) -> Tree, stored items renewed with newer weights (Reanalyze)
