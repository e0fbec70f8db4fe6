"""How much of a machine a run takes where the user does not say: actors, environments, and which of a preset's values.

    small     up to 4 cores                       the preset's values; learners of images use all cores
    between                                       the same learning values, with more environments in flight
    large     12 or more cores and a GPU          the preset's values for this size: [env."ALE/*".large]

More cores pay off where a step costs a good part of a millisecond: Atari, and what is measured to do so (step_cost.py). A cheap
environment keeps the numbers that its preset was trained with on any machine, and so does --runtime inline, whose results must not
depend on the machine. What the user gives always wins. --cores and --device say how much of the machine there is for the run.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from shoal.envs.builtin.catalog import CATALOG
from shoal.envs.builtin.games import GAMES
from shoal.errors import ConfigError
from shoal.experiment.components import Components
from shoal.experiment.presets import Preset
from shoal.experiment.step_cost import step_cost
from shoal.experiment.values import with_values
from shoal.roles.replay_config import LAUNCH_UPDATES

if TYPE_CHECKING:
    from shoal.experiment.config import Experiment, Plan
    from shoal.experiment.references import EnvRef

__all__ = ["Machine", "Sizing", "check_cores", "kept_to", "machine_here", "sized", "sizing_lines"]

SMALL_CORES = 4
LARGE_CORES = 12
MOST_ACTORS = 30
"""Of size large: it was trained with 14, and the data of many more would be older."""
SHARDS_PER_CORE = 2
"""Presets have as many shards as keep each busy half of the time, so that none is the limit."""
CORES_PER_LEARNER_THREAD = 4
"""Of images, without a GPU: an update of a batch takes about a third of the time that acting it out takes. Updates from vectors are
too small for several threads."""
MOST_ROUNDING = 0.05
"""Of the rows of a synchronous batch, where they cannot be dealt out evenly."""
EXPENSIVE_SECONDS = 2.5e-4
"""Of a step: acting and handing over cost about as much, so environments that are cheaper are not what actors wait for."""


@dataclass(frozen=True)
class Machine:
    """What a run can take."""

    cores: int
    gpus: int = 0

    def __str__(self) -> str:
        gpus = {0: "no GPU", 1: "a GPU"}.get(self.gpus, f"{self.gpus} GPUs")
        return f"{self.cores} core{'s' if self.cores > 1 else ''} and {gpus}"


@dataclass(frozen=True)
class Sizing:
    """A preset's values for a machine."""

    size: Literal["small", "large"]
    """Whose learning values these are."""
    machine: Machine | None
    """What was found out about it; None where it makes no difference."""
    values: Mapping[str, Any]
    """Dotted keys; what the user gives comes after them."""
    step_seconds: float | None = None
    """Of the environment, where it was measured."""


def machine_here() -> Machine:
    """The cores that this process may use, and the GPUs that PyTorch finds."""
    import torch

    return Machine(len(os.sched_getaffinity(0)), torch.cuda.device_count())


def sized(preset: Preset, chosen: Components, env: EnvRef, wished: Experiment[Any, Any], measure: bool = True) -> Sizing:
    """The preset's values for this machine. `wished` has what the user gave, over the values for a small one. Without `measure`
    only environments that are known to be expensive take more of it."""
    paper, atari = wished.values == "paper", env.name.startswith("ALE/")
    small = {**preset.values(env.name, paper=paper), **_asked_ahead(preset, wished)}
    if wished.runtime == "inline" or (wished.runtime == "ray" and wished.ray.joined):
        return Sizing("small", None, small)
    found = machine_here()
    cores = min(wished.cores or found.cores, found.cores)
    unknown = env.simulated and not atari and env.name not in {*CATALOG, *GAMES}  # the rest are known to be cheap
    decides = unknown and measure and cores > SMALL_CORES and _may_spread(chosen)
    cost = step_cost(env, wished.envs, wished.faults.start_seconds) if decides else None
    if not atari and (cost is None or cost.seconds < EXPENSIVE_SECONDS):
        return Sizing("small", None, small)
    images = cost is None or cost.images
    machine = Machine(cores, found.gpus if _may_use_gpu(chosen, wished, images) else 0)
    if machine.cores <= SMALL_CORES:
        return Sizing("small", machine, {**small, **_threads(chosen, wished, small, machine, images)})
    large = preset.large_values(env.name) if machine.cores >= LARGE_CORES and machine.gpus and not paper else {}
    values = {**small, **large}
    values |= _spread(chosen, wished, values, machine, threaded=images and not machine.gpus)
    return Sizing("large" if large else "small", machine, values, None if cost is None else cost.seconds)


def _asked_ahead(preset: Preset, wished: Experiment[Any, Any]) -> dict[str, Any]:
    """From a recording: on a GPU the batches of two launches, since nothing else decides how many are there. What is learned does
    not depend on it."""
    return {"replay.prefetch": 2 * LAUNCH_UPDATES} if preset.offline and wished.device == "cuda" else {}


def _may_use_gpu(chosen: Components, wished: Experiment[Any, Any], images: bool) -> bool:
    prefers = chosen.architecture.prefers_gpu
    if wished.device == "auto" and not (images if prefers is None else prefers):
        return False
    return wished.device != "cpu" and chosen.algorithm.runs_on_gpu and chosen.architecture.runs_on_gpu


def _may_spread(chosen: Components) -> bool:
    """Whether the number of actors, or of the rows of each, could follow the machine: not where they take turns with a learner from
    replay."""
    takes_turns = chosen.architecture.spreads == "rows" and chosen.algorithm.from_replay
    return bool(chosen.architecture.spreads) and not takes_turns


def _threads(chosen: Components, wished: Experiment[Any, Any], values: Mapping[str, Any], machine: Machine,
             images: bool) -> dict[str, Any]:
    """On a few cores: learners of images have a thread on each, as updates are most of the work and one core would be the limit.
    Threads that wait for each other leave their cores to the actors."""
    if not images or machine.gpus or not chosen.architecture.spreads or _by_trying(chosen, wished, values):
        return {}
    threads = machine.cores // with_values(wished, values, "").learners
    return {"learner_threads": threads} if threads > 1 else {}


def _by_trying(chosen: Components, wished: Experiment[Any, Any], values: Mapping[str, Any]) -> bool:
    """Whether --actors auto looks for the layout."""
    return "auto" in (wished.actors, with_values(wished, values, "").actors)


def _spread(chosen: Components, wished: Experiment[Any, Any], values: Mapping[str, Any], machine: Machine,
            threaded: bool) -> dict[str, Any]:
    """More actors, with the batch as it is: some cores are left for learners, replay tables, inference, and evaluations. `threaded`
    says whether learners gain from several threads."""
    architecture, experiment = chosen.architecture, with_values(wished, values, "")
    if _by_trying(chosen, wished, values) or (architecture.one_place and wished.architecture.one_place):
        return {}
    threads = max(1, machine.cores // CORES_PER_LEARNER_THREAD) if threaded else 1
    several = {"learner_threads": threads} if threads > 1 else {}
    if architecture.spreads == "actors":
        tables = math.ceil(experiment.replay.shards / SHARDS_PER_CORE) if chosen.algorithm.from_replay else 0
        return {"actors": max(2, min(machine.cores - threads * wished.learners - tables - 1, MOST_ACTORS)), **several}
    if architecture.spreads == "rows" and not chosen.algorithm.from_replay:
        rows = experiment.actors * experiment.architecture.envs_per_actor
        least = math.ceil(rows / (machine.cores - 1))
        each = next(share for share in range(least, rows + 1) if abs(round(rows / share) * share - rows) <= MOST_ROUNDING * rows)
        return {"actors": round(rows / each), "architecture.envs_per_actor": each,
                **({"learner_threads": machine.cores - 1} if threaded else {})}
    return {}


def check_cores(experiment: Experiment[Any, Any]) -> None:
    """Refuse more cores than there are."""
    here = len(os.sched_getaffinity(0))
    if experiment.cores is not None and experiment.cores > here and experiment.runtime != "ray":
        raise ConfigError(f"--cores {experiment.cores} is more than the {here} cores that this machine gives a run; give --cores "
                          f"{here} or fewer, or leave it out")


@contextlib.contextmanager
def kept_to(cores: int | None) -> Iterator[None]:
    """Keep this thread, and all processes that it starts meanwhile, on that many cores."""
    before = os.sched_getaffinity(0)
    if cores is None or cores >= len(before):
        yield
        return
    os.sched_setaffinity(0, set(sorted(before)[:cores]))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@runtime_checkable
class _Grouped(Protocol):
    """The options of an architecture whose actors step several groups of environments in turn."""

    envs_per_actor: int
    groups: int


def sizing_lines(plan: Plan) -> Iterator[str]:
    """What a run takes of the machine and why, for people; nothing where the machine makes no difference."""
    sizing, experiment = plan.sizing, plan.experiment
    if sizing is None or sizing.machine is None:
        return
    options, machine = experiment.architecture, sizing.machine
    each = f"{options.groups} x {options.envs_per_actor}" if isinstance(options, _Grouped) else str(options.envs_per_actor)
    actors = "actors to be found by trying" if experiment.actors == "auto" else f"{experiment.actors} actors"
    batch = f"{plan.slots_per_batch} unrolls in a batch" if not plan.algorithm.from_replay else \
        f"batches of {experiment.replay.batch_size} from {_tables(experiment.replay.shards)}"
    yield (f"size {sizing.size}, for {machine}: {actors} of {each} environments, {batch}, {'GPU' if machine.gpus else 'CPU'} "
           f"learner{'' if experiment.learner_threads == 1 else f' of {experiment.learner_threads} threads'}")
    yield f"  {_why(plan, sizing, machine)}"
    if sizing.step_seconds is not None:
        yield (f"  a step of {plan.env.name} takes {1e3 * sizing.step_seconds:.2g} ms here, so actors follow the number of cores; "
               "--actors N for another number")


def _tables(shards: int) -> str:
    return "one replay table" if shards == 1 else f"a replay table in {shards} processes"


def _why(plan: Plan, sizing: Sizing, machine: Machine) -> str:
    names, experiment = plan.names, plan.experiment
    if experiment.values == "paper":
        return "learning values: the paper's, where it gives them (--values paper)"
    if sizing.size == "large":
        return (f"learning values: those of preset {names.preset} for {LARGE_CORES} or more cores and a GPU; --values paper, "
                "--cores N or --device cpu for others")
    if machine.cores >= LARGE_CORES and machine.gpus:
        return f"learning values: those of preset {names.preset} for any machine; it has none for this size"
    if machine.cores > SMALL_CORES:
        return f"learning values: those of a small machine; size large takes {LARGE_CORES} or more cores and a GPU"
    return "as the preset has it for few cores; --actors auto tries what is faster here"
