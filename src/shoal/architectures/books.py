"""What goes with a Learn wherever it lives: how far it is, which updates were refused, what a checkpoint holds.

    Books        a private Learn: of a learner, a parameter server, a gossiping learner
    SharedModel  a Learn whose whole state lies on a `shared` wire: of Hogwild's workers, of GA3C's trainers
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from shoal.algorithms.pinning import to_host
from shoal.architectures.parts import Parts
from shoal.core import Learn, Me, Progress, Shared, Tree
from shoal.slots import Field, Layout

__all__ = ["Books", "SharedModel", "bundle", "model_layout"]

SKIPS_IN_A_ROW = 10  # updates that were not finite before the run is given up


def bundle(learn: Learn, counts: np.ndarray) -> dict[str, np.ndarray]:
    """A learner's state as arrays."""
    return {"counts": counts, **{f"learn/{name}": tensor.cpu().numpy() for name, tensor in learn.state.items()}}


class Books:
    """A Learn and its counts: env_steps that were learned from, learner_steps."""

    def __init__(self, me: Me, parts: Parts, learn: Learn | None = None, counts: np.ndarray | None = None, share: int = 1) -> None:
        """`counts` has a row for each of those who count together, this one's first; `share` others count alike, unseen."""
        self.me, self.budget, self.share = me, parts.max_env_steps, share
        self.offline, self.updates = parts.offline, parts.max_learner_steps
        self.learn = learn or parts.learn()  # all begin alike
        self.counts = np.zeros((1, 2), np.int64) if counts is None else counts
        self.row = 0 if counts is None else me.index
        self.skipped = 0
        self.unheard: list[torch.Tensor] = []

    @property
    def totals(self) -> np.ndarray:
        return self.share * self.counts.sum(0)

    @property
    def progress(self) -> Progress:
        env_steps, learner_steps = (int(n) for n in self.totals)
        done, budget = (learner_steps, self.updates) if self.offline else (env_steps, self.budget)
        return Progress(env_steps, learner_steps, min(1.0, done / budget) if budget else 0.0)

    def count(self, env_steps: int, learner_steps: int) -> None:
        self.counts[self.row] += (env_steps, learner_steps)

    def apply(self, gradient: np.ndarray, phase: str) -> None:
        """A loss or gradient that is not finite is left out; too many in a row end the run."""
        finite: Any = self.learn.apply(gradient, phase)
        if isinstance(finite, torch.Tensor):  # it lies on a GPU: look later, see `hear`
            self.unheard.append(finite)
        else:
            self._judge(finite)

    def send(self, metrics: Any) -> Callable[[], None]:
        """Start all that is to be known of an update on its way from the GPU; what is returned looks at it, once it has come."""
        metrics.send()
        verdicts, self.unheard = to_host(torch.stack(self.unheard)), []

        def look() -> None:
            self.hear(verdicts.tolist())
            self.show(metrics)

        return look

    def hear(self, verdicts: Iterable[bool]) -> None:
        """What became of updates that were made on a GPU."""
        for finite in verdicts:
            self._judge(finite)

    def _judge(self, finite: bool) -> None:
        if finite:
            self.skipped = 0
            return
        self.skipped += 1
        self.me.stats.add("updates_skipped")
        if self.skipped >= SKIPS_IN_A_ROW:
            self.me.fail(f"{self.skipped} updates in a row had a loss or gradient that is not finite; lower the learning rate, or "
                         "look for NaN in observations and rewards with `shoal doctor --env`")

    def show(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            if name in self.me.stats:
                self.me.stats.set(name, value)

    # ------------------------------------------------------------------ what a checkpoint holds
    def bundle(self) -> dict[str, np.ndarray]:
        return bundle(self.learn, self.counts.sum(0))

    def unbundle(self, arrays: dict[str, np.ndarray]) -> None:
        self.counts[:] = 0
        self.counts[self.row] = arrays["counts"]
        with torch.no_grad():
            for name, tensor in self.learn.state.items():
                tensor.copy_(torch.from_numpy(np.asarray(arrays[f"learn/{name}"])))


def model_layout(parts: Parts, rows: int) -> Layout:
    """What lies on the `shared` wire: a Learn's whole state, counts of `rows` instances, whether anything is there yet."""
    state = {name: tensor.numpy() for name, tensor in parts.algorithm.learn(parts.seed).state.items()}
    return Layout({"learn": Layout.of(state).fields, "counts": Field((rows, 2), "i8"), "ready": Field((1,), "i8")})


class SharedModel(Books):
    """One model for many: parameters, optimiser moments and statistics in shared memory, written without a lock.

    Each instance counts in its own row, so that no count is ever lost. The first instance fills the memory; whoever
    is restarted finds it filled.
    """

    def __init__(self, me: Me, parts: Parts, shared: Shared) -> None:
        self.memory: Tree = shared.data  # type: ignore[attr-defined]
        learn = parts.algorithm.learn(parts.seed)
        self.first = bundle(learn, np.zeros(2, np.int64))
        self.first = {name: array.copy() for name, array in self.first.items()}
        learn.bind(self.memory["learn"])
        super().__init__(me, parts, learn, self.memory["counts"])

    @property
    def version(self) -> int:
        """How many optimiser steps have been made, by all."""
        return int(self.counts[:, 1].sum())

    @property
    def filled(self) -> bool:
        return bool(self.memory["ready"][0])

    def fill(self, arrays: dict[str, np.ndarray] | None = None) -> None:
        """Put a checkpoint's values, or those that training begins with, into memory that holds nothing yet."""
        if not self.filled:
            self.unbundle(arrays or self.first)
            self.memory["ready"][0] = 1
