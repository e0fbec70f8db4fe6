"""One part of a workload alone: environment, inference or learner, at full speed, where a run of the workload would compute it (its
--device). Run as a process of its own.

    parent                                    probe (threads set by its environment, before anything is imported)
    {"what", "batch", "backend", ...}  ──▶    builds the part, warms up
                                       ◀──    ready
    go                                 ──▶    works for `seconds`      (several probes begin together)
                                       ◀──    frames per second

Lines of JSON on stdin and stdout, any number of rounds; the end of stdin ends it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from benchmarks.composed_limit import replay_parts
from benchmarks.work_rate import work_rate

if TYPE_CHECKING:
    from shoal.experiment.prepare import Prepared

__all__ = ["passes", "prepared", "refusal", "serve"]

SEATS = 8  # of one slot; a learner's batch is as many of them as it needs
ACTIONS = 16  # different batches of random actions
RAW = ("raw:gymnasium", "raw:ale")  # back-ends without shoal around them

Work = Callable[[], int]  # does one round, returns how many frames


@lru_cache(maxsize=4)
def prepared(workload: str) -> Prepared:
    """The experiment behind a workload: the arguments of shoal.train, as JSON."""
    from shoal.experiment.prepare import prepare
    from shoal.experiment.run import plan_of

    values = json.loads(workload)
    return prepare(plan_of(values.pop("preset"), values.pop("env"), None, None, values))


@runtime_checkable
class LearnsInEpochs(Protocol):
    """The configuration of an algorithm that learns several times from the same data."""

    @property
    def epochs(self) -> int: ...


def passes(experiment: Any, replay: Any = None) -> float:
    """r: how often the learner sees each frame; with `replay`, its options, how many items it sees for each."""
    if replay is not None:
        return float(replay.samples_per_insert * replay_parts.items_per_env_step(experiment))
    return experiment.algorithm.epochs if isinstance(experiment.algorithm, LearnsInEpochs) else 1


# ---------------------------------------------------------------------------------------------- the three parts
def stepping(workload: str, backend: str, batch: int, threads: int) -> Work:
    """e: the environment alone, made with the workload's own arguments, with random actions made beforehand."""
    name, kwargs = json.loads(workload)["env"], prepared(workload).plan.experiment.envs.kwargs
    env = _started(name, backend, batch, threads, kwargs)
    space = env.single_action_space if backend in RAW else env.action_space
    actions = list(np.random.default_rng(0).integers(space.n, size=(ACTIONS, batch)))
    turn = 0

    def work() -> int:
        nonlocal turn
        env.step(actions[turn % ACTIONS])
        turn += 1
        return batch

    return work


@lru_cache(maxsize=16)
def _started(name: str, backend: str, batch: int, threads: int, kwargs: tuple[str, ...]) -> Any:
    """Environments after their first reset. They are kept: Atari's take a tenth of a second each to make and another to reset."""
    env = _made(name, backend, batch, threads, kwargs)
    env.reset(seed=0)
    return env


def _made(name: str, backend: str, batch: int, threads: int, kwargs: tuple[str, ...]) -> Any:
    """Environments of one back-end; `kwargs` are those of --envs.kwargs."""
    from shoal.experiment.config import EnvsConfig

    values = EnvsConfig(kwargs=kwargs).arguments()
    if backend == "raw:gymnasium":
        import gymnasium as gym

        return gym.make_vec(name, batch, vectorization_mode="vector_entry_point", **values)
    if backend == "raw:ale":
        from ale_py.vector_env import AtariVectorEnv

        from shoal.envs.atari import atari_spec
        from shoal.envs.atari_protocol import AtariProtocol

        registered = atari_spec(name).kwargs
        protocol, others = AtariProtocol.of(name, registered, {"num_threads": threads, **values})
        return AtariVectorEnv(registered["game"], batch, **others, **protocol.ale())
    from shoal import envs

    if backend == "ale":
        values["num_threads"] = threads
    return envs.make(name, batch, backend=backend, **values)


def refusal(name: str, backend: str, kwargs: tuple[str, ...]) -> str:
    """Why a back-end cannot make an environment with these arguments; empty where it can."""
    try:
        _made(name, backend, 1, 1, kwargs).close()
    except Exception as error:  # an environment may raise anything
        return f"{type(error).__name__}: {error}"
    return ""


def acting(workload: str, batch: int) -> Work:
    """i: the policy alone, on observations of the environment's first steps; on a GPU as an inference server asks it."""
    import torch

    from shoal import algorithms
    from shoal.acting import DevicePolicy, Progress
    from shoal.device.batched_inference import BatchedInference

    ready = prepared(workload)
    seats = min(batch, SEATS)
    env = ready.source.make(seats)
    algorithm = algorithms.make(ready.plan.experiment.algorithm, ready.spec, ready.plan.experiment.net, seats)
    policy, hardware = algorithm.policy(), ready.hardware()
    rng = torch.Generator(hardware.device).manual_seed(0)
    act: Callable[..., Any] = policy.act
    if hardware.on_gpu and isinstance(policy, DevicePolicy):
        policy.to(hardware)
        act = BatchedInference(policy, hardware, rng).act_one
    view = algorithm.record.viewer(batch).of(_tiled(env.reset(0), batch // seats))
    env.close()
    state, explore = policy.initial_state(batch), algorithm.explore(0, 1, batch, Progress())

    def work() -> int:
        act(view, state, explore, rng)
        return batch

    return work


def _tiled(step: Any, times: int) -> Any:
    """A step of more seats: the same ones again and again."""
    from types import SimpleNamespace

    from shoal.slots import map_tree

    def wide(x: Any) -> Any:
        return None if x is None else np.concatenate([x] * times)

    return SimpleNamespace(observation=map_tree(wide, step.observation), first=wide(step.first),
                           reward=wide(step.reward), action_mask=wide(step.action_mask))


def learning(workload: str, batch: int) -> Work:
    """l: whole updates of the algorithm's own Learn, on one batch in memory; on a GPU in the GPU's memory, minibatch by
    minibatch, because the bus is not part of l."""
    from shoal import algorithms
    from shoal.acting import Progress
    from shoal.roles.parts import Parts

    ready = prepared(workload)
    if ready.algorithm.from_replay:
        return replay_parts.updating(ready)
    experiment = ready.plan.experiment
    algorithm = algorithms.make(experiment.algorithm, ready.spec, experiment.net, SEATS)
    tree, frames = _batch(algorithm, ready.source.make(SEATS), max(1, round(batch / experiment.algorithm.unroll / SEATS)))
    learn = Parts(algorithm, ready.source, SEATS, hardware=ready.hardware()).learn()
    rng, repeat = np.random.default_rng(0), passes(experiment)

    def minibatches() -> Iterator[Any]:
        return learn.minibatches(tree, learn.sums(tree), Progress(), rng)

    there = list(minibatches()) if ready.hardware().on_gpu else None

    def work() -> int:
        replay_parts.update(learn, there or minibatches())
        learn.absorb(learn.moments(tree))
        return int(frames * repeat)

    return work


def _batch(algorithm: Any, env: Any, slots: int) -> tuple[Any, int]:
    """One real unroll, as an actor would write it, side by side `slots` times."""
    import torch

    from shoal.acting import Progress

    policy, recorder, rng = algorithm.policy(), algorithm.record.recorder(SEATS), torch.Generator().manual_seed(0)
    now, state, explore = env.reset(0), policy.initial_state(SEATS), algorithm.explore(0, 1, SEATS, Progress())
    slot = algorithm.record.layout.empty()
    recorder.begin(slot, now, state, 1)
    for t in range(algorithm.record.length):
        action, state, extras = policy.act(recorder.view(now), state, explore, rng)
        now = env.step(action)
        recorder.write(t, action, extras, now, 1)
    env.close()
    stage = algorithm.record.layout.joined(slots).empty()
    for position in range(slots):
        algorithm.record.layout.gather(stage, position, slot)
    return stage, int(np.count_nonzero(stage["valid"]))


# ---------------------------------------------------------------------------------------------- the loop
def part(order: Mapping[str, Any], threads: int) -> Work:
    if order["what"] == "env":
        return stepping(order["workload"], order["backend"], order["batch"], threads)
    if order["what"] in ("insert", "sample"):
        return (replay_parts.inserting if order["what"] == "insert" else replay_parts.sampling)(prepared(order["workload"]))
    return (acting if order["what"] == "act" else learning)(order["workload"], order["batch"])


def serve() -> None:
    """Answer orders until stdin ends."""
    import torch

    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    torch.set_num_threads(threads)
    answers, sys.stdout = sys.stdout, sys.stderr  # what environments print must not be taken for an answer
    for line in sys.stdin:
        order = json.loads(line)
        work = part(order, threads)
        work()
        work_rate(work, order["warm_seconds"])
        answers.write("ready\n")
        answers.flush()
        sys.stdin.readline()
        answers.write(f"{work_rate(work, order['seconds'])}\n")
        answers.flush()


if __name__ == "__main__":
    serve()
