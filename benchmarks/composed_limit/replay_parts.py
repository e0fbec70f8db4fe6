"""The parts of a workload that learns from replay, each alone: items into a table, batches out of it, updates from them.

    inserting   a Replay's own table, made as a run would make it, takes inserts of --replay.insert-batch items
    sampling    it gathers batches of --replay.batch-size and takes their new priorities
    updating    the algorithm's own Learn makes updates of one such batch in memory

Rates are items per second. Items come from real steps of the environment, so that images compress as they do in a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    from shoal.experiment.prepare import Prepared
    from shoal.learning import Learn

__all__ = ["inserting", "items_per_env_step", "sampling", "updating"]

SEATS = 8
FILLED = 2_000  # items in the table that is drawn from; a larger one costs no more

Work = Callable[[], int]


@runtime_checkable
class _Strided(Protocol):
    """The options of an algorithm whose items are windows that begin some steps apart."""

    @property
    def stride(self) -> int: ...


def items_per_env_step(experiment: Any) -> float:
    """q: how many items a decision adds, episodes' ends aside."""
    return 1 / experiment.algorithm.stride if isinstance(experiment.algorithm, _Strided) else 1.0


class _Table:
    """A table like that of the workload's Replay, and items to put into it."""

    def __init__(self, ready: Prepared) -> None:
        from shoal import replay
        from shoal.replay.table.replay_core import Core
        from shoal.roles.replay_frames import FrameTable, frame_stacks, kept_columns
        from shoal.roles.replay_memory import chosen_compression, codecs
        from shoal.roles.replay_wires import TableWriter, stored_columns
        from shoal.runtime.start_checks import free_memory

        self.config, self.algorithm = ready.plan.experiment.replay, _algorithm(ready)
        record, count = self.algorithm.record, self.config.insert_batch
        whole, stacks = stored_columns(record.layout), frame_stacks(record)
        kept = kept_columns(record, whole, count)
        compression = chosen_compression(kept, self.config, ready.plan.experiment.max_env_steps, free_memory())
        selector = replay.Prioritized(self.config.exponent) if self.config.exponent else replay.Uniform()
        self.core = Core([replay.Table("t", selector, replay.Fifo(), max_size=max(FILLED, self.config.batch_size),
                                       limiter=replay.MinSize(1))], compression=codecs(kept, compression))
        self.table = self.core.table("t")
        self._items, self._priority = _items(self.algorithm, ready, count), np.ones(count)
        if stacks is None:
            self._put = TableWriter(self.core, self.table, whole, count).put
        else:
            self._put = partial(FrameTable(stacks, whole, count).put, self.core, self.table)

    def insert(self) -> int:
        self._put(self._items, self._priority)
        return len(self._priority)

    def fill(self) -> None:
        while self.table.size < self.table.table.max_size:
            self.insert()


def _algorithm(ready: Prepared) -> Any:
    from shoal import algorithms

    return algorithms.make(ready.plan.experiment.algorithm, ready.spec, ready.plan.experiment.net, SEATS)


def _items(algorithm: Any, ready: Prepared, count: int) -> Any:
    """Items of real steps, as an insert carries them."""
    import torch

    from shoal.acting import Progress
    from shoal.roles.replay_frames import insert_fields
    from shoal.slots import Layout

    env, policy, recorder = ready.source.make(SEATS), algorithm.policy(), algorithm.record.recorder(SEATS)
    rng, explore = torch.Generator().manual_seed(0), algorithm.explore(0, 1, SEATS, Progress())
    now, state = env.reset(0), policy.initial_state(SEATS)
    recorder.begin(now)
    while recorder.ready < count:
        before = state
        action, state, extras = policy.act(recorder.view(now), state, explore, rng)
        now = env.step(action)
        recorder.write(action, before, extras, now, 1)
    env.close()
    items = Layout(insert_fields(algorithm.record, count)).empty()
    recorder.take(items, np.zeros(count))
    return items


def inserting(ready: Prepared) -> Work:
    """n: items into the table."""
    return _Table(ready).insert


def sampling(ready: Prepared) -> Work:
    """s: items out of the table, and their new priorities into it."""
    kept = _Table(ready)
    kept.fill()
    draw = _drawing(kept)

    def work() -> int:
        _, info = draw()
        kept.table.update(info.keys, np.ones(len(info.keys)))
        return len(info.keys)

    return work


def _drawing(kept: _Table) -> Callable[[], tuple[Any, Any]]:
    """Draws a batch into the same memory every time."""
    from shoal.roles.replay_wires import Block, items_layout

    size = kept.config.batch_size
    layout = items_layout(kept.algorithm.record.layout, size)
    memory = np.zeros(layout.nbytes, np.uint8)

    def draw() -> tuple[Any, Any]:
        batch = kept.core.try_sample("t", size, Block(memory), True, None, False)
        assert batch is not None
        return layout.views(memory), batch.info

    return draw


def updating(ready: Prepared) -> Work:
    """l: items learned from; on a GPU in the GPU's memory, because the bus is not part of l."""
    from shoal.acting import Progress
    from shoal.roles.parts import Parts

    kept = _Table(ready)
    kept.fill()
    items, info = _drawing(kept)()
    batch = {**items, "probability": info.probabilities, "table_size": np.full(len(info.keys), info.table_size)}
    learn, rng = Parts(kept.algorithm, ready.source, SEATS, hardware=ready.hardware()).learn(), np.random.default_rng(0)

    def minibatches() -> Iterator[Any]:
        return learn.minibatches(batch, learn.sums(batch), Progress(), rng)

    there = list(minibatches()) if ready.hardware().on_gpu else None

    def work() -> int:
        update(learn, there or minibatches())
        return kept.config.batch_size

    return work


def update(learn: Learn, minibatches: Iterable[Any]) -> None:
    """One whole update."""
    applied = []
    for minibatch in minibatches:
        for phase in learn.phases:
            gradient, _ = learn.gradients(minibatch, phase)
            applied.append(learn.apply(gradient, phase))
    if not all(applied):  # asked at the end: a GPU is waited for here
        raise FloatingPointError("the learner's gradient is not finite")
