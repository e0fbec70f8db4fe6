"""Acts and learns on one device, environments included: one role is the whole of Anakin."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from shoal.acting import DevicePolicy, Progress
from shoal.algorithms.records.unroll import Unroll
from shoal.core import Me, Publisher, any_of
from shoal.device.cuda_graph import capturing
from shoal.envs.device import CompilableTensorEnv
from shoal.learning import DeviceLearn
from shoal.roles.device_unroll import DeviceUnroll
from shoal.roles.learner_state import SKIPS_IN_A_ROW, LearnerState
from shoal.roles.parts import Parts

__all__ = ["DeviceLearner"]

WARM_UPS = 3  # updates before the graph is captured: libraries set themselves up in the first ones


class DeviceLearner:
    """Acts and learns on one device: environments, network and optimiser."""

    shares_state = True

    def __init__(self, me: Me, parts: Parts, weights: Publisher | None, updates: int) -> None:
        self.me, self.weights, self.updates, self.hardware = me, weights, updates, parts.hardware
        algorithm, device = parts.algorithm, parts.hardware.device
        learn = parts.new_learn()
        assert isinstance(learn, DeviceLearn)  # the architecture refuses algorithms that do not run on a GPU
        learn.to(parts.hardware)
        self.learner_state, self.learn = LearnerState(me, parts, learn), learn
        policy = algorithm.policy()
        assert isinstance(policy, DevicePolicy)
        policy.to(parts.hardware)
        policy.bind(learn.policy_tensors())
        self.generator = torch.Generator(device).manual_seed(int(me.rng("device").integers(2**31)))
        env = parts.env.tensors(parts.envs_per_actor, device)
        if self.hardware.on_gpu and self.hardware.gpu.compile and isinstance(env, CompilableTensorEnv):
            env.compile()
        explore = algorithm.explore(0, 1, parts.envs_per_actor, Progress())
        assert isinstance(algorithm.record, Unroll)
        self.unroll = DeviceUnroll(algorithm.record, env, policy,
                                   explore if not explore.any() else torch.from_numpy(explore).to(device), self.generator, device)
        self.fraction = torch.zeros((), device=device)  # of the budget; what is annealed is computed from it
        self.skipped = torch.zeros((), device=device)
        self.steps_per_update = 0
        self.graph: Any = None
        self.made = 0  # updates since the start, until the graph is there
        self.metrics: list[Mapping[str, float]] = []  # of the last minibatch, by phase
        self.greeted = self.settled = False

    async def step(self) -> None:
        """Some updates, then one look at what happened."""
        if not self.greeted:
            self._publish()
            self.greeted = True
            return
        if self.learner_state.budget and self.learner_state.totals[0] >= self.learner_state.budget:  # nothing else holds it back
            await any_of(timeout=0.1)
            return
        self.settled = True
        await self.me.permit("learner_steps", 1)
        self.settled = False
        began, stats = time.perf_counter(), self.me.stats
        updates = self._due()
        with stats.phase("learn"):
            for _ in range(updates):
                self._next()
            numbers = torch.cat([self.unroll.episodes, self.skipped.view(1).double()]).tolist()  # waits for the device
        self._count(numbers, updates, (time.perf_counter() - began) / updates)
        self.learner_state.show(self.metrics)
        self._publish()

    def _due(self) -> int:
        """Updates before the next look, the last time no more than the budgets need."""
        state, due = self.learner_state, self.updates
        if state.budget:
            due = min(due, math.ceil((state.budget - state.totals[0]) / self.unroll.decisions))
        if state.updates:  # how many learner steps an update has is known after the first
            due = min(due, math.ceil((state.updates - state.totals[1]) / self.steps_per_update) if self.steps_per_update else 1)
        return max(1, due)

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

    def capture_anew(self) -> None:
        """Constants of the graph have changed: run kernel by kernel, and capture again."""
        self.graph, self.made = None, 0

    def _update(self) -> None:
        """An unroll, and what the algorithm makes of it: the loop of every learner, in tensors."""
        learn = self.learn
        batch = self.unroll.play()
        sums, moments = learn.sums(batch), learn.moments(batch)
        steps = 0
        fraction: Any = self.fraction  # a tensor: what is annealed is computed on the device
        progress = Progress(fraction=fraction) if self.learner_state.horizon else Progress()
        rng: Any = self.generator  # of the device: no random number leaves it
        for minibatch in learn.minibatches(batch, sums, progress, rng):
            self.metrics = []
            for phase in learn.phases:
                gradient, metrics = learn.gradients(minibatch, phase)
                self.metrics.append(metrics)
                finite = learn.apply(gradient, phase)
                assert isinstance(finite, torch.Tensor)
                self.skipped.add_((~finite).float())
            steps += 1
        learn.absorb(moments)
        self.steps_per_update = steps

    def _count(self, numbers: list[float], updates: int, seconds: float) -> None:
        """Book what the last updates did."""
        stats, unroll = self.me.stats, self.unroll
        episodes, returns, lengths, skipped = numbers
        for name, value in (("episode_return/sum", returns), ("episode_return/count", episodes), ("episode_length/sum", lengths),
                            ("episode_length/count", episodes), ("episodes", episodes), ("updates_skipped", skipped)):
            stats.add(name, value)
        unroll.episodes.zero_()
        self.skipped.zero_()
        decisions, steps = updates * unroll.decisions, updates * self.steps_per_update
        for name in ("env_steps", "env_frames", "samples_consumed"):
            stats.add(name, decisions)
        stats.add("learner_steps", steps)
        stats.observe("policy_lag", 0.0)
        stats.observe("data_age_seconds", seconds)
        self.learner_state.count(decisions, steps)
        self.fraction.fill_(self.learner_state.progress.fraction)
        if skipped >= max(steps, SKIPS_IN_A_ROW):
            self.me.fail(f"{int(skipped)} updates in a row had a loss or gradient that is not finite; lower the learning rate, or "
                         "look for NaN in observations and rewards")

    def _publish(self) -> None:
        if self.weights is None:
            return
        with self.me.stats.phase("publish"):
            version = self.weights.publish(self.learn.published(self.learner_state.progress))
        self.me.stats.set("weights_version", version)

    # ------------------------------------------------------------------ what a checkpoint holds
    def state(self) -> dict[str, np.ndarray]:
        return self.learner_state.arrays()

    def load(self, state: dict[str, np.ndarray]) -> None:
        self.learner_state.load(state)
        self.fraction.fill_(self.learner_state.progress.fraction)
