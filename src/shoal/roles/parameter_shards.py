"""A parameter server in pieces: each shard owns a slice of the flat parameter vector, of the target and of the optimiser's moments.

    learner ──▶ server (shard 0): the first slice, counts, which gradients are applied ──▶ weights (broadcast)   ──▶ actors,
            ──▶ shard_1: the second slice ─────────────────────────────────────────────▶ weights_1 (broadcast) ──▶ evaluator
            ──▶ ...

Shards know nothing of each other: a reader may get slices of neighbouring versions, as in GORILA. A shard that died continues from
its slice in the newest checkpoint, while the others continue from where they are. The first shard's counts travel with every
gradient, so all shards refresh their slices of the target with the same gradient, also after one of them has died.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.core import Me, Publisher, Reader, Server, Tree, Wait
from shoal.errors import ConfigError
from shoal.learning import SlicedLearn, Updater, UpdaterSlice
from shoal.roles.learner_state import LearnerState
from shoal.roles.parameter_server import ParameterServer, longest_span, push_layouts
from shoal.roles.parts import Parts
from shoal.runtime import Program
from shoal.runtime.wires import Port
from shoal.slots import Field, Layout

__all__ = ["JoinedWeights", "Shard", "cuts_of", "draw_server", "first_shard"]

GRAIN = 64  # a slice begins at a multiple of this, so that vector registers hold the same elements as in the whole


def cuts_of(size: int, shards: int) -> list[slice]:
    """As many slices of a vector, of about the same size."""
    grains = -(-size // GRAIN)
    if shards > grains:
        raise ConfigError(f"--architecture.shards {shards} is more than {size} parameters can be cut into; use {grains} or fewer")
    edges = [min(size, GRAIN * (grains * k // shards)) for k in range(shards + 1)]
    return [slice(edges[k], edges[k + 1]) for k in range(shards)]


def draw_server(program: Program, parts: Parts, shards: int,
                max_staleness: int | None) -> tuple[list[Port], list[Port], list[slice]]:
    """Adds the shards; returns the ports that send gradients, the ports that read weights, and the slices."""
    size, layout = len(parts.algorithm.learn(parts.seed).state["params"]), parts.algorithm.published_layout()
    if layout.fields["params"].shape != (size,):
        part = layout.fields["params"].shape < (size,)
        all_of_them = "" if parts.algorithm.represents else "give --algorithm.actor-priorities, with which they take all, or "
        why = f"a part of them; {all_of_them}use" if part else "its target nets instead; use"
        raise ConfigError(f"--algorithm {parts.algorithm.name} with --architecture parameter_server does not fit: shards publish "
                          f"all parameters, and its policies take {why} --architecture actor_learner")
    cuts = cuts_of(size, shards)
    clients, readers = [], []
    for k, cut in enumerate(cuts):
        slice_of_it = slice_of(parts, cut)
        published = Layout.of({"params": slice_of_it.weights["params"].numpy()})
        if k == 0:
            gradients = program.call("gradients", *push_layouts(parts, slice_of_it), depth=1)
            weights = program.broadcast("weights", Layout({**layout.fields, **published.fields}))
            program.add("server", first_shard, parts=parts, cut=cut, gradients=gradients.server, weights=weights.publisher,
                        max_staleness=max_staleness, compute_threads=parts.learner_threads)
        else:
            gradients = program.call(f"gradients_{k}", *shard_layouts(slice_of_it), depth=1)
            weights = program.broadcast(f"weights_{k}", published)
            program.add(f"shard_{k}", Shard, parts=parts, cut=cut, gradients=gradients.server, weights=weights.publisher)
        clients.append(gradients.client)
        readers.append(weights.reader)
    return clients, readers, cuts


def slice_of(parts: Parts, cut: slice) -> UpdaterSlice:
    """What a server needs that owns this slice of the parameters."""
    learn = parts.new_learn()
    if not isinstance(learn, SlicedLearn):
        raise ConfigError(f"--algorithm {parts.algorithm.name} with --architecture parameter_server does not fit: its parameters "
                          "cannot be cut into slices (its Learn is not a SlicedLearn); use --architecture actor_learner")
    return learn.cut(cut)


def shard_layouts(learn: Updater) -> tuple[Layout, Layout]:
    """A slice of a gradient that was accepted, with what the first shard had counted before it (env_steps, learner_steps, updates
    of the phase), and the slice of the parameters that answers it."""
    weights = {name: tensor.numpy() for name, tensor in learn.weights.items()}
    request = {"gradient": Field((longest_span(learn),), "f4"), "phase": Field((1,), "i8"), "empty": Field((1,), "bool"),
               "before": Field((3,), "i8")}
    return Layout(request), Layout({"weights": Layout.of(weights).fields})


def first_shard(me: Me, parts: Parts, cut: slice, **arguments: Any) -> ParameterServer:
    """Owns the first slice of the parameters; counts, and decides which gradients are applied."""
    return ParameterServer(me, parts, learn=slice_of(parts, cut), age="gradient_age", **arguments)


class Shard:
    """Owns a slice of the parameters; applies its part of every gradient that the first shard has accepted."""

    def __init__(self, me: Me, parts: Parts, cut: slice, gradients: Server, weights: Publisher) -> None:
        self.me, self.gradients, self.weights = me, gradients, weights
        self.learner_state: LearnerState[UpdaterSlice] = LearnerState(me, parts, slice_of(parts, cut))
        self.learn = self.learner_state.learn
        self.greeted = False
        self.settled = True  # whatever it awaits, its parameters are whole

    async def step(self) -> None:
        if not self.greeted:
            self._publish()
            self.greeted = True
        for request in await self.gradients.take(most=64):
            if not request.data["empty"][0]:
                self._apply(request.data)
            request.reply({"weights": {name: tensor.numpy() for name, tensor in self.learn.weights.items()}})

    def _apply(self, data: Tree) -> None:
        self.learner_state.counts[0] = data["before"][:2]  # the first shard's, so that all make a step of the same size
        phase = self.learn.phases[int(data["phase"][0])]
        with self.me.stats.phase("learn"):
            self.learn.anneal(self.learner_state.progress)
            self.learn.go_on_from(int(data["before"][2]), phase)  # and refresh their targets together
            span = self.learn.span(phase)
            self.learn.apply(data["gradient"][: span.stop - span.start], phase)  # the first shard counts those that are not finite
        self._publish()

    def _publish(self) -> None:
        with self.me.stats.phase("publish"):
            self.weights.publish({"params": self.learn.state["params"].numpy()})

    def state(self) -> dict[str, np.ndarray]:
        return self.learner_state.arrays()

    def load(self, state: dict[str, np.ndarray]) -> None:
        self.learner_state.load(state)


class JoinedWeights:
    """A core.Reader of weights that several shards publish: the newest slice of each, with the version of the first."""

    def __init__(self, readers: Sequence[Reader], cuts: Sequence[slice]) -> None:
        self.readers, self.cuts = readers, cuts

    @property
    def version(self) -> int:
        return self.readers[0].version

    @property
    def age_seconds(self) -> float:
        return self.readers[0].age_seconds

    def newer_than(self, version: int) -> Wait:
        """Of the first shard; of the others there must be any at all."""
        first, *others = self.readers
        waits = [first.newer_than(version), *(reader.newer_than(0) for reader in others)]
        return Wait(lambda: all(wait.ready() for wait in waits), waits[0].wire, " and ".join(wait.why for wait in waits),
                    [fd for wait in waits for fd in wait.fds])

    def pull(self, into: Tree) -> int:
        first, *others = self.readers
        version = first.pull({**into, "params": into["params"][self.cuts[0]]})
        for reader, cut in zip(others, self.cuts[1:], strict=True):
            reader.pull({"params": into["params"][cut]})
        return version
