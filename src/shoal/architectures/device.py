"""Acting and learning on one device, environments included: Podracer's Anakin (Hessel et al. 2021, 2104.06272, section 3).

      ┌─ device ─────────────────────────────────────────────────────┐
      │  T times: net -> actions -> E environments, all at once      │
      │  the algorithm's gradients and steps on these T x E decisions│   captured as one CUDA graph, replayed
      └──────────────────────────────┬───────────────────────────────┘
                                     └── weights (broadcast) ──▶ evaluator (CPU, ordinary environments)

For environments that are tensor code (shoal.envs.device): nothing is copied between two updates, and no number is read back.
The algorithm is the same as everywhere: its Learn and its Policy are called as by any other learner and actor, with tensors in
place of arrays. On a CPU the same code runs without the graph.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from shoal.algorithms.capture import capturing
from shoal.architectures.books import SKIPS_IN_A_ROW, Books
from shoal.architectures.parts import Parts
from shoal.architectures.roles import Evaluator
from shoal.architectures.tape import Tape
from shoal.core import Delivery, Me, Progress, Publisher, Tolerance, any_of
from shoal.errors import ConfigError
from shoal.runtime import Program

__all__ = ["Config", "delivers", "draw"]

runs_on_gpu = worth_a_gpu = True  # whatever the observations are

WARM_UPS = 3  # updates before the graph is captured: libraries set themselves up in the first ones


@dataclass(frozen=True)
class Config:
    """Everything on one device."""

    has_actors: ClassVar[bool] = False  # the learner is the one who acts

    envs_per_actor: int = 1024
    """Environments that step together, E."""
    updates_per_step: int = 8
    """Updates between two looks at what happened: then numbers are read and weights are published."""

    def validate(self) -> None:
        for name in ("envs_per_actor", "updates_per_step"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--architecture.{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1")


def delivers(config: Config) -> Delivery:
    return Delivery(Tolerance.NOTHING, "acting and learning take turns, so data are never old")


def draw(program: Program, parts: Parts, config: Config) -> None:
    if parts.learners > 1:
        raise ConfigError(f"--learners {parts.learners}: the device architecture has one device and one learner; raise "
                          "--architecture.envs-per-actor instead")
    if not getattr(parts.algorithm, "runs_on_gpu", False):
        raise ConfigError(f"{type(parts.algorithm).__name__} works on arrays only: the device architecture needs an algorithm "
                          "whose parts take tensors (runs_on_gpu); any other architecture runs it")
    if parts.env.varied:
        raise ConfigError(f"environments that vary from actor to actor ({', '.join(parts.env.varied)}): the device architecture "
                          "has no actors; any other architecture takes them")
    parts.env.tensors(1, "cpu")  # says what is wrong before anything starts
    weights = program.broadcast("weights", parts.algorithm.published_layout()) if parts.eval.enabled else None
    program.add("device", DeviceLearner, parts=parts, weights=weights and weights.publisher, updates=config.updates_per_step,
                compute_threads=parts.learner_threads)
    if weights is not None:  # nobody else needs them
        program.add("evaluator", Evaluator, parts=parts, weights=weights.reader)


class DeviceLearner:
    """Acts and learns on one device: environments, network and optimiser."""

    shares_state = True

    def __init__(self, me: Me, parts: Parts, weights: Publisher | None, updates: int) -> None:
        self.me, self.weights, self.updates, self.hardware = me, weights, updates, parts.hardware
        algorithm, device = parts.algorithm, parts.hardware.device
        learn = algorithm.learn(parts.seed)
        learn.to(parts.hardware)  # type: ignore[attr-defined]
        self.books, self.learn = Books(me, parts, learn), learn
        policy = algorithm.policy()
        policy.to(parts.hardware)  # type: ignore[attr-defined]
        policy.bind({"params": learn.state["params"], "norm": _statistics(learn)})
        self.generator = torch.Generator(device).manual_seed(int(me.rng("device").integers(2**31)))
        env = parts.env.tensors(parts.envs_per_actor, device)
        if self.hardware.on_gpu and self.hardware.gpu.compile and hasattr(env, "compile"):
            env.compile()
        explore = algorithm.explore(0, 1, parts.envs_per_actor, Progress())
        self.tape = Tape(algorithm.record, env, policy, explore if not explore.any() else torch.from_numpy(explore).to(device),
                         self.generator, device)
        self.fraction = torch.zeros((), device=device)  # of the budget; what is annealed is computed from it
        self.skipped = torch.zeros((), device=device)
        self.steps_per_update = 0
        self.graph: Any = None
        self.made = 0  # updates since the start, until the graph is there
        self.metrics: Any = None
        self.greeted = False

    async def step(self) -> None:
        """Some updates, then one look at what happened."""
        if not self.greeted:
            self._publish()
            self.greeted = True
            return
        if self.books.budget and self.books.totals[0] >= self.books.budget:  # nothing else holds it back
            await any_of(timeout=0.1)
            return
        began, stats = time.perf_counter(), self.me.stats
        updates = self._due()
        with stats.phase("learn"):
            for _ in range(updates):
                self._next()
            numbers = torch.cat([self.tape.ledger, self.skipped.view(1).double()]).tolist()  # waits for the device
        self._count(numbers, updates, (time.perf_counter() - began) / updates)
        self.books.show(self.metrics)
        self._publish()

    def _due(self) -> int:
        """Updates before the next look, the last time no more than the budget needs."""
        if not self.books.budget:
            return self.updates
        left = math.ceil((self.books.budget - self.books.totals[0]) / self.tape.decisions)
        return min(self.updates, int(left))

    def _next(self) -> None:
        """One update: as a graph where there is one, kernel by kernel before that."""
        if self.graph is not None:
            self.graph.replay()
            return
        if not self.hardware.on_gpu:
            self._update()
            return
        side = torch.cuda.Stream()  # capture forbids the default stream, and libraries remember the one they were set up on
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._update()
        torch.cuda.current_stream().wait_stream(side)
        self.made += 1
        if self.hardware.gpu.graphs and self.made >= WARM_UPS:
            self._capture()

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        torch.cuda.synchronize()
        with capturing(graph):
            self._update()
        self.graph = graph

    def _update(self) -> None:
        """An unroll, and what the algorithm makes of it: the loop of every learner, in tensors."""
        learn = self.learn
        batch = self.tape.unroll()
        sums, moments = learn.sums(batch), learn.moments(batch)
        steps = 0
        progress: Any = Progress(fraction=self.fraction) if self.books.budget else Progress()
        for minibatch in learn.minibatches(batch, sums, progress, self.generator):  # type: ignore[arg-type]
            for phase in learn.phases:
                gradient, self.metrics = learn.gradients(minibatch, phase)
                finite: Any = learn.apply(gradient, phase)
                self.skipped.add_((~finite).float())
                steps += 1
        learn.absorb(moments)
        self.steps_per_update = steps

    def _count(self, numbers: list[float], updates: int, seconds: float) -> None:
        """Book what the last updates did."""
        stats, tape = self.me.stats, self.tape
        episodes, returns, lengths, skipped = numbers
        for name, value in (("episode_return/sum", returns), ("episode_return/count", episodes), ("episode_length/sum", lengths),
                            ("episode_length/count", episodes), ("episodes", episodes), ("updates_skipped", skipped)):
            stats.add(name, value)
        tape.ledger.zero_()
        self.skipped.zero_()
        decisions, steps = updates * tape.decisions, updates * self.steps_per_update
        for name in ("env_steps", "env_frames", "samples_consumed"):
            stats.add(name, decisions)
        stats.add("learner_steps", steps)
        stats.observe("policy_lag", 0.0)
        stats.observe("data_age_seconds", seconds)
        self.books.count(decisions, steps)
        self.fraction.fill_(self.books.progress.fraction)
        if skipped >= max(steps, SKIPS_IN_A_ROW):
            self.me.fail(f"{int(skipped)} updates in a row had a loss or gradient that is not finite; lower the learning rate, or "
                         "look for NaN in observations and rewards")

    def _publish(self) -> None:
        if self.weights is None:
            return
        with self.me.stats.phase("publish"):
            version = self.weights.publish(self.learn.published(self.books.progress))
        self.me.stats.set("weights_version", version)

    # ------------------------------------------------------------------ what a checkpoint holds
    def state(self) -> dict[str, np.ndarray]:
        return self.books.bundle()

    def load(self, state: dict[str, np.ndarray]) -> None:
        self.books.unbundle(state)
        self.fraction.fill_(self.books.progress.fraction)


def _statistics(learn: Any) -> dict[str, torch.Tensor]:
    """The numbers that observations are seen through, where they are normalised."""
    if "observations.used_mean" not in learn.state:
        return {}
    return {"mean": learn.state["observations.used_mean"], "scale": learn.state["observations.used_scale"]}
