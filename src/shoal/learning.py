"""The contract of learning: what an algorithm and an architecture offer. `core.py` has the roles and the wires between them,
`acting.py` policies and records.

    Algorithm ── policy() ──▶ Policy        acts                          actors, evaluators, inference servers
              ── record ────▶ UnrollRecord  what actors write down        sent on a stream, learned from as it comes
                           or ItemRecord                                  kept in replay tables
                           or ScoreRecord                                 added up on a group wire: a population's returns
              ── learn() ───▶ Learn         gradients and updates         learners, workers, parameter servers

    Architecture ── draw() ─▶ a Program: roles joined by wires

An algorithm knows nothing of processes and an architecture knows nothing of losses. Whether the two fit is computed: the
algorithm says which age of data it `tolerates`, the architecture which one it `delivers`. What is optional is a protocol of
its own (`ReplayLearn`, `DeviceLearn`, `SlicedLearn`, `DelayedLearn`, `ComparingLearn`, `Relabels`, `Represents`; `Evolves` and
all about populations is in `population.py`) or a declared field with a default.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, cast, runtime_checkable

import numpy as np

from shoal.acting import ItemRecord, Policy, Progress, StoredItems, UnrollRecord
from shoal.core import Tree, Vector
from shoal.options import Options
from shoal.slots import Layout

if TYPE_CHECKING:
    import torch

    from shoal.device.placement import Hardware
    from shoal.device.weight_handoff import DeviceWeights, WeightSnapshot
    from shoal.envs import EnvSpec
    from shoal.nets import NetConfig
    from shoal.population import ScoreRecord
    from shoal.roles.parts import Parts
    from shoal.runtime import Program
    from shoal.telemetry.metrics import Metric

__all__ = ["Algorithm", "Architecture", "ArchitectureOptions", "ComparingLearn", "DelayedLearn", "Delivery", "DeviceLearn",
           "EncodedLearn", "Learn", "Relabeller", "Relabels", "ReplayLearn", "Represents", "SlicedLearn", "Tolerance", "Updater",
           "UpdaterSlice", "phases_due"]


# ---------------------------------------------------------------------------------------------- learning
class Updater(Protocol):
    """The half of a Learn that owns the parameters: all that a parameter server needs.

    `state["params"]` is one flat vector. A **phase** is an optimiser of its own over its own slice of that vector (`span`): an
    actor, its critics, a temperature. A gradient of a phase has the length of its span.
    """

    phases: tuple[str, ...]
    state: dict[str, torch.Tensor]  # named tensors: parameters, targets, optimiser moments, normalisers

    @property
    def weights(self) -> Mapping[str, torch.Tensor]: ...  # what gradients depend on: all but the optimisers' moments
    def span(self, phase: str) -> slice: ...
    def anneal(self, progress: Progress) -> None: ...  # call it before applying a gradient that came from elsewhere
    def apply(self, gradient: Vector, phase: str) -> bool | torch.Tensor: ...  # clips, steps, refreshes targets; False: not finite
    def moments(self, batch: Tree) -> np.ndarray: ...  # running statistics' share of a batch; a server gets only these fields of it
    def absorb(self, moments: np.ndarray) -> None: ...
    def published(self, progress: Progress) -> Tree: ...  # what policies load; its field "progress" is Progress.numbers


class Learn(Updater, Protocol):
    """The learning side. An architecture acts only between `gradients` and `apply`.

        sums = learn.sums(batch, me.index, me.replicas)                       # several learners add up theirs (group.sum):
        moments = learn.moments(batch)                                        # sums and moments
        for minibatch in learn.minibatches(batch, sums, progress, rng):       # one learner step each, however many phases
            for phase in phases_due(learn, progress):                         # learn.phases, unless some are due less often
                gradient, metrics = learn.gradients(minibatch, phase)         # of this phase's slice of the parameters
                learn.apply(await group.mean(gradient), phase)
        learn.absorb(moments)                                                 # running statistics, before publication
        weights.publish(learn.published(progress))

    `gradients` names only metrics that the algorithm declares. What learners share by adding may need a place for each of them (a
    maximum does), so `sums` is told which of them it is.
    """

    def sums(self, batch: Tree, index: int = 0, learners: int = 1) -> np.ndarray: ...  # of the index-th of all learners
    def minibatches(self, batch: Tree, sums: np.ndarray, progress: Progress, rng: np.random.Generator) -> Iterator[Any]: ...
    def gradients(self, minibatch: Any, phase: str) -> tuple[Vector, Mapping[str, float]]: ...
    def bind(self, arrays: Mapping[str, np.ndarray]) -> None: ...  # keep the whole state in these arrays from now on


@runtime_checkable
class ReplayLearn(Protocol):
    """A Learn that learns from items: `priorities` [B] are those of the batch of the last minibatch, by its last gradients."""

    priorities: Vector


@runtime_checkable
class DeviceLearn(Protocol):
    """A Learn that can compute on a GPU: gradients, metrics and priorities stay there until somebody asks for a number."""

    def to(self, hardware: Hardware) -> None: ...
    def capture(self) -> None: ...                              # replay CUDA graphs from now on, where that is possible
    def update(self, minibatches: tuple[Any, ...], phases: tuple[tuple[str, ...], ...]) -> tuple[Mapping[str, float],
                                                                                              torch.Tensor]: ...
    """`gradients` and `apply` of these phases of each minibatch at once -> the last one's metrics, and whether each gradient was
    finite; `priorities` are then those of all."""
    def release(self) -> None: ...                              # wait until the memory of the last batch is not read any more
    def snapshot(self, progress: Progress) -> WeightSnapshot: ...         # what is published, on its way to the host
    def device_weights(self, progress: Progress) -> DeviceWeights: ...    # the same, left on the device
    def policy_tensors(self) -> Tree: ...                                 # what a policy on this device binds: no copy


@runtime_checkable
class ComparingLearn(Protocol):
    """A Learn with a loss that compares items of a batch with each other (CURL's contrast). Several learners tell them each other:

        told = learn.told(minibatch, phase, me.index, me.replicas)            # empty where this phase compares nothing
        minibatch = learn.with_told(minibatch, await group.sum(told), me.index, me.replicas)    # each learner has a place in it
        gradient, metrics = learn.gradients(minibatch, phase)                 # of its own part of the joined batch
    """

    def told(self, minibatch: Any, phase: str, index: int, learners: int) -> np.ndarray: ...
    def with_told(self, minibatch: Any, told: np.ndarray, index: int, learners: int) -> Any: ...
    def told_bytes(self, batch: int, learners: int) -> int: ...           # at most, of batches of this many items


class UpdaterSlice(Updater, Protocol):
    """A slice of the parameters, which one of several servers owns. Its targets are refreshed by the count of the first server."""

    def updates(self, phase: str) -> int: ...                   # that were made; targets are refreshed by this number
    def go_on_from(self, updates: int, phase: str) -> None: ... # the next one is this one's successor


@runtime_checkable
class SlicedLearn(Protocol):
    """A Learn whose updates work element by element, so that a parameter server may be cut into pieces."""

    def cut(self, where: slice) -> UpdaterSlice: ...            # what a server needs that owns this slice of the parameters
    def clipped(self, gradient: np.ndarray, phase: str) -> np.ndarray: ...  # as `apply` clips it: call it before cutting


@runtime_checkable
class LayeredLearn(Updater, Protocol):
    """A Learn that knows the layers of its network."""

    def layers(self, params: np.ndarray) -> Mapping[str, np.ndarray]: ...  # by name, views of such a flat vector of parameters


@runtime_checkable
class DelayedLearn(Protocol):
    """A Learn of which some phases are not due at every learner step (the delayed policy updates of TD3)."""

    def due(self, progress: Progress) -> tuple[str, ...]: ...   # the phases of the learner step that follows


def phases_due(learn: Learn, progress: Progress) -> tuple[str, ...]:
    """The phases that the next minibatch goes through, in order."""
    return cast(DelayedLearn, learn).due(progress) if _delays(type(learn)) else learn.phases


@cache
def _delays(kind: type) -> bool:
    """Asked once for each class: to look for the methods of a protocol takes tens of microseconds."""
    return issubclass(kind, DelayedLearn)


# ---------------------------------------------------------------------------------------------- relabelling
class Relabeller(Protocol):
    """Recomputes items of one table with newer weights, for another table (QT-Opt's Bellman updaters, MuZero's Reanalyze).

        relabeller.load(published)
        labelled, priority = relabeller.relabel(items, rng)     # items [B, ...] as they were drawn
    """

    def load(self, published: Tree) -> None: ...
    def relabel(self, items: Tree, rng: torch.Generator) -> tuple[Tree, np.ndarray]: ...


@runtime_checkable
class Relabels(Protocol):
    """An algorithm whose items can be recomputed between two tables."""

    @property
    def relabelled(self) -> StoredItems:
        """What the second table holds. Its layout also has the fields that the role fills in itself: `key` [1], that of the item in
        the table it was drawn from, `label_version` [1], of the weights used, `weights_version` [1] and `time` [1]."""
    def relabeller(self) -> Relabeller: ...


# ---------------------------------------------------------------------------------------------- representations
class EncodedLearn(Protocol):
    """A Learn whose nets see codes by an encoder that another Learn owns: one with that encoder as its only parameters.

        learn.take_encoder(params, target)                # the newest
        gradients and updates of all phases               # as with any Learn
        learn.encoder_gradient                            # that these losses have for the encoder: zero where they leave it alone
        learn.contrasted(minibatch)                       # what the other Learn needs of the minibatch, to add its own loss
    """

    @property
    def encoder_gradient(self) -> np.ndarray: ...
    def take_encoder(self, params: np.ndarray, target: np.ndarray) -> None: ...
    def contrasted(self, minibatch: Any) -> Tree: ...


@runtime_checkable
class Represents(Protocol):
    """An algorithm whose encoder can be learned in another role than the rest of it (CURL)."""

    def apart(self, shared: bool) -> Algorithm:
        """The same without the encoder: its Learn is an EncodedLearn, with `shared` one that has a gradient for the encoder too."""
    def representation(self, seed: int) -> Learn:
        """The encoder alone: one phase. It learns from items of the replay table, or from what `contrasted` gives."""
    def contrasted_layout(self, batch: int) -> Layout:
        """Of what `EncodedLearn.contrasted` gives of a minibatch of this many items."""


# ---------------------------------------------------------------------------------------------- algorithms
class Tolerance:
    """How old data may be."""

    NOTHING, LAG, BOUNDED_REUSE, REPLAY = range(4)
    NAMES = ("nothing", "lag", "a reuse buffer bounded by a staleness", "any replay")


class Algorithm(ABC):
    """A description that pickles: options and spaces. Each role builds the part it needs.

    It is made as `MyAlgorithm(config, spec, net, seats)`: its own Config, the environment's `envs.EnvSpec`, the options of the
    network and the seats of one actor.
    """

    name: ClassVar[str]
    config_class: ClassVar[type[Options]]
    tolerates: ClassVar[int]
    from_replay: ClassVar[bool] = False     # the record is an ItemRecord, and learn() gives a ReplayLearn
    relabels: ClassVar[bool] = False        # it is a Relabels
    represents: ClassVar[bool] = False      # it is a Represents
    evolves: ClassVar[bool] = False         # it is an Evolves: the record is a ScoreRecord
    runs_on_gpu: ClassVar[bool] = False     # policy() gives a DevicePolicy and learn() a DeviceLearn
    metrics: tuple[Metric, ...] = ()        # that `Learn.gradients` names; any other name raises

    config: Any
    max_lag: int | None = None              # learners mask steps that are more than this many versions old

    @abstractmethod
    def __init__(self, config: Any, spec: EnvSpec, net: NetConfig, seats: int) -> None: ...

    @property
    @abstractmethod
    def record(self) -> UnrollRecord | ItemRecord | ScoreRecord: ...

    @abstractmethod
    def policy(self) -> Policy: ...
    @abstractmethod
    def learn(self, seed: int) -> Learn: ...
    @abstractmethod
    def explore(self, index: int, count: int, seats: int, progress: Progress) -> np.ndarray:
        """How much each seat [seats] of the index-th of `count` actors explores, as its Policy.act understands it."""
    @abstractmethod
    def published_layout(self) -> Layout: ...  # of what `Learn.published` gives


# ---------------------------------------------------------------------------------------------- architectures
@dataclass(frozen=True)
class Delivery:
    """What a data path delivers: the tolerance it needs, and in words why."""

    needs: int
    why: str


class ArchitectureOptions(Options):
    """The options of an architecture."""

    section = "architecture"
    envs_per_actor: int  # environments that one actor steps together, E


class Architecture(ABC):
    """Who does what, with whom: a drawing like the figure of a paper. The fields say where it fits."""

    name: ClassVar[str]
    config_class: ClassVar[type[Any]]
    takes_unrolls: ClassVar[bool] = True    # runs algorithms that learn from unrolls as they come
    takes_replay: ClassVar[bool] = False    # runs algorithms that learn from replay tables
    needs_relabel: ClassVar[bool] = False   # its replay tables need an algorithm that relabels
    needs_encoder: ClassVar[bool] = False   # has a role for an encoder: needs an algorithm that represents
    takes_scores: ClassVar[bool] = False    # runs algorithms that evolve
    takes_demos: ClassVar[bool] = False     # demonstrations may lie beside the replay table
    draws_offline: ClassVar[bool] = False   # draws the graph of an offline run itself; others get architectures/offline.py
    runs_on_gpu: ClassVar[bool] = False     # its learners, workers and inference servers may compute on a GPU
    prefers_gpu: ClassVar[bool | None] = None  # whether `--device auto` takes one; None: where observations are images
    has_actors: ClassVar[bool] = True       # roles other than the learner act: --actors
    one_place: ClassVar[bool] = False       # has the option one_place: actors in their learner's process
    reports_steps: ClassVar[bool] = True    # its actors report every step: --log.*
    takes_turns: ClassVar[bool] = False     # its actors may play games in which seats take turns
    takes_policies: ClassVar[bool] = False  # its graph may have several named policies, each with a learner of its own
    batch_slots: ClassVar[bool] = False     # has the option batch_slots: unrolls in a batch; otherwise one of every actor
    spreads: ClassVar[Literal["", "actors", "rows"]] = ""  # over more cores with the same batch: more actors; its rows over more
    process_options: ClassVar[tuple[str, ...]] = ()  # options that are numbers of processes or threads
    size_options: ClassVar[tuple[str, ...]] = ("envs_per_actor",)  # options that increase the memory of a role
    scaled_role: ClassVar[str] = "actor"    # whose number follows the learner with --actors auto
    learner_role: ClassVar[str] = "learner" # whose idle time that number follows

    def fixed_actors(self, config: Any) -> str:
        """Why the number of actors cannot follow the learner; empty where it can."""
        return f"--architecture {self.name} has a fixed number of actors"

    @abstractmethod
    def delivers(self, config: Any) -> Delivery: ...
    @abstractmethod
    def draw(self, program: Program, parts: Parts, config: Any) -> None: ...
