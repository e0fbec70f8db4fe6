"""What goes with a Learn wherever it lives: how far it is, which updates were refused, what a checkpoint holds.

    LearnerState  a private Learn: of a learner, a parameter server, a gossiping learner
    SharedModel   a Learn whose whole state lies on a `shared` wire: of Hogwild's workers, of GA3C's trainers
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np
import torch

from shoal.acting import Progress
from shoal.algorithms.common.gradients import Readings
from shoal.core import Me, Shared, Tree, Vector
from shoal.device.transfer import to_host
from shoal.learning import Learn, Updater
from shoal.roles.parts import Parts
from shoal.roles.recorded_moments import COLUMNS, UNKNOWN
from shoal.slots import Field, Layout

__all__ = ["SKIPS_IN_A_ROW", "LearnerState", "SharedModel", "learner_arrays", "model_layout"]

SKIPS_IN_A_ROW = 10  # updates that were not finite before the run is given up

U = TypeVar("U", bound=Updater)
Metrics = Sequence[Mapping[str, float]]  # of one minibatch: of each of its phases


def learner_arrays(learn: Updater, counts: np.ndarray, windows: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """A learner's state as arrays; `windows` of a recording that it has counted (recorded_moments.py)."""
    counted = {} if windows is None or not len(windows) else {"windows": windows}
    return {"counts": counts, **counted, **{f"learn/{name}": tensor.cpu().numpy() for name, tensor in learn.state.items()}}


class LearnerState(Generic[U]):
    """A Learn, or the slice of one that a parameter server owns, and its counts: env_steps learned from, learner_steps."""

    def __init__(self, me: Me, parts: Parts, learn: U, counts: np.ndarray | None = None, peers: int = 1) -> None:
        """`counts` has one row per instance; the totals are theirs together. `peers` learners are assumed to be equally far."""
        self.me, self.budget, self.peers = me, parts.max_env_steps, peers
        self.horizon = parts.max_env_steps or parts.anneal_env_steps
        self.offline, self.updates = parts.offline, parts.max_learner_steps
        self.learn = learn
        self.counts = np.zeros((1, 2), np.int64) if counts is None else counts
        self.row = 0 if counts is None else me.index
        self.windows = np.zeros((parts.counted_readers, COLUMNS), np.int64)  # of each reader of a recording: what is counted of it
        self.skipped = 0
        self.unseen: list[torch.Tensor] = []  # of updates on a GPU: whether they were finite

    @property
    def totals(self) -> np.ndarray:
        if self.peers == 1 and len(self.counts) == 1:  # a sum takes longer than all else that is done with it
            return np.array(self.counts[0])
        total: np.ndarray = self.peers * self.counts.sum(0)
        return total

    @property
    def progress(self) -> Progress:
        env_steps, learner_steps = self.totals.tolist()
        done, horizon = (learner_steps, self.updates) if self.offline else (env_steps, self.horizon)
        return Progress(env_steps, learner_steps, min(1.0, done / horizon) if horizon else 0.0)

    def enough(self, made: int = 0) -> bool:
        """Whether no other update is wanted after `made` that are not counted yet."""
        return self.updates is not None and bool(self.totals[1] + made >= self.updates)

    def count(self, env_steps: int, learner_steps: int, windows: np.ndarray | None = None) -> None:
        """`windows` of a recording are added to those that are counted."""
        self.counts[self.row] += (env_steps, learner_steps)
        if windows is not None:
            self.windows += windows

    # ------------------------------------------------------------------ updates
    def apply(self, gradient: Vector, phase: str) -> None:
        """Update one phase's parameters. A gradient that is not finite is left out; too many in a row end the run."""
        finite = self.learn.apply(gradient, phase)
        if isinstance(finite, torch.Tensor):  # it lies on a GPU: see `look`
            self.unseen.append(finite)
        else:
            self._judge(finite)

    def send(self, metrics: Metrics) -> Callable[[], None]:
        """Start the copies of an update's metrics and verdicts to the host; call what it returns when they have arrived."""
        for phase in metrics:
            if isinstance(phase, Readings):
                phase.send()
        verdicts, self.unseen = to_host(torch.hstack(self.unseen)), []

        def look() -> None:
            self._judge_all(verdicts.tolist())
            self.show(metrics)

        return look

    def look(self) -> None:
        """Wait for the updates on a GPU and see what became of them."""
        if self.unseen:
            verdicts, self.unseen = torch.hstack(self.unseen), []
            self._judge_all(verdicts.tolist())

    def forget(self) -> None:
        """Discard what is not known yet of updates on a GPU."""
        self.unseen = []

    def _judge_all(self, verdicts: Iterable[bool]) -> None:
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

    def show(self, metrics: Metrics) -> None:
        """Report the metrics of all phases of an update."""
        for phase in metrics:
            for name, value in phase.items():
                self.me.stats.set(name, value)

    # ------------------------------------------------------------------ what a checkpoint holds
    def arrays(self) -> dict[str, np.ndarray]:
        return learner_arrays(self.learn, self.counts.sum(0), self.windows)

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.counts[:] = 0
        self.counts[self.row] = arrays["counts"]
        if len(self.windows):
            self._load_windows(arrays)
        with torch.no_grad():
            for name, tensor in self.learn.state.items():
                tensor.copy_(torch.from_numpy(np.asarray(arrays[f"learn/{name}"])))

    def _load_windows(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Of other readers than these nothing is known: they begin anew."""
        if "windows" not in arrays:  # an earlier version has saved it
            self.windows[:] = UNKNOWN if arrays["learn/observations.count"].any() else 0
        else:
            self.windows[:] = arrays["windows"] if arrays["windows"].shape == self.windows.shape else 0


def model_layout(parts: Parts, rows: int) -> Layout:
    """What lies on the `shared` wire: a Learn's whole state, counts of `rows` instances, whether anything is there yet."""
    state = {name: tensor.numpy() for name, tensor in parts.algorithm.learn(parts.seed).state.items()}
    return Layout({"learn": Layout.of(state).fields, "counts": Field((rows, 2), "i8"), "ready": Field((1,), "i8")})


class SharedModel(LearnerState[Learn]):
    """One model for many: parameters, optimiser moments and statistics in shared memory, written without a lock.

    Each instance counts in its own row, so no count is ever lost. The first instance fills the memory; an instance that is
    restarted finds it filled.
    """

    def __init__(self, me: Me, parts: Parts, shared: Shared) -> None:
        self.memory: Tree = shared.data
        learn = parts.new_learn()
        self.first = {name: array.copy() for name, array in learner_arrays(learn, np.zeros(2, np.int64)).items()}
        learn.bind(self.memory["learn"])
        super().__init__(me, parts, learn, self.memory["counts"])

    @property
    def version(self) -> int:
        """How many learner steps have been made, by all."""
        return int(self.counts[:, 1].sum())

    @property
    def filled(self) -> bool:
        return bool(self.memory["ready"][0])

    def arrays(self) -> dict[str, np.ndarray]:
        return super().arrays() if self.filled else dict(self.first)

    def fill(self, arrays: Mapping[str, np.ndarray] | None = None) -> None:
        """Put a checkpoint's values, or those that training begins with, into memory that holds nothing yet."""
        if not self.filled:
            self.load(arrays or self.first)
            self.memory["ready"][0] = 1
