"""The roles that architectures put together: Actor, Learner, Evaluator. None of them knows where it runs."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import torch

from shoal.architectures.parts import Parts
from shoal.architectures.reuse import Reuse
from shoal.core import Group, Learn, Me, Progress, Publisher, Reader, Sink, Source, Tree, any_of
from shoal.errors import GroupChanged
from shoal.runtime import Program
from shoal.slots import Layout, leaves, map_tree

__all__ = ["Actor", "Evaluator", "Learner", "learner_group"]

SKIPS_IN_A_ROW = 10  # updates that were not finite before the run is given up



def learner_group(program: Program, parts: Parts) -> Any:
    """The port through which several learners share gradients, and their whole state when one has died; None for one."""
    if parts.learners == 1:
        return None
    learn = parts.algorithm.learn(parts.seed)
    nbytes = Layout.of(bundle(learn, np.zeros(2, np.int64))).nbytes
    return program.group("gradients", nbytes).port("member")


def bundle(learn: Learn, counts: np.ndarray) -> dict[str, np.ndarray]:
    """A learner's state as arrays."""
    return {"counts": counts, **{f"learn/{name}": tensor.numpy() for name, tensor in learn.state.items()}}


class Actor:
    """Acts in its environments with the newest weights and sends what happened."""

    def __init__(self, me: Me, parts: Parts, unrolls: Sink, weights: Reader, per_version: int = 0) -> None:
        """`per_version` unrolls are made with each version of the weights, then it waits for the next (0: never waits)."""
        self.me, self.unrolls, self.weights, self.per_version = me, unrolls, weights, per_version
        seeds = me.rng("actor").integers(2**31, size=2)
        self.algorithm = parts.algorithm
        self.env = parts.env.make(parts.envs_per_actor)
        self.policy = self.algorithm.policy()
        self.recorder = self.algorithm.record.recorder(self.env.num_seats)
        self.published = self.algorithm.published_layout().empty()
        self.rng = torch.Generator().manual_seed(int(seeds[0]))
        self.now = self.env.reset(int(seeds[1]))
        self.hidden = self.policy.initial_state(self.env.num_seats)
        self.version, self.sent = 0, 0

    async def step(self) -> None:
        if self.version == 0 or (self.per_version and self.sent >= self.per_version):
            await self.weights.newer_than(self.version)
        self._refresh()
        slot = await self.unrolls.slot()
        self._unroll(slot.data)
        slot.send()
        self.sent += 1

    def _refresh(self) -> None:
        """Newer weights, if there are any, at the start of an unroll (IMPALA, section 3)."""
        if self.weights.version == self.version:
            return
        with self.me.stats.phase("pull"):
            self.version, self.sent = self.weights.pull(self.published), 0
            self.policy.load(self.published)
        env_steps, learner_steps, fraction = self.published["progress"]
        progress = Progress(int(env_steps), int(learner_steps), float(fraction))
        self.explore = self.algorithm.explore(self.me.index, self.me.replicas, self.env.num_seats, progress)
        self.me.stats.observe("publish_to_use_seconds", self.weights.age_seconds)

    def _unroll(self, data: Tree) -> None:
        recorder, policy, env, stats, now, state = self.recorder, self.policy, self.env, self.me.stats, self.now, self.hidden
        inference, world, write = stats.phase("inference"), stats.phase("env"), stats.phase("write")
        with write:
            recorder.begin(data, now, state, self.version)
        decisions = 0
        for t in range(recorder.record.length):
            with inference:
                action, state, extras = policy.act(recorder.view(now), state, self.explore, self.rng)
            with world:
                now = env.step(action)
            with write:
                recorder.write(t, action, extras, now, self.version)
            decisions += int(np.count_nonzero(now.valid))
            if len(now.episode_return):
                stats.add("episodes", len(now.episode_return))
                stats.observe("episode_return", now.episode_return)
                stats.observe("episode_length", now.episode_length)
        self.now, self.hidden = now, state
        stats.add("env_steps", decisions)
        stats.add("env_frames", decisions * env.frame_skip)

    def close(self) -> None:
        self.env.close()


class Learner:
    """Takes batches, makes updates, publishes weights. With others in a group it makes the update of the joined batch."""

    shares_state = True  # a restarted learner may begin from any learner's checkpoint

    def __init__(self, me: Me, parts: Parts, unrolls: Source, weights: Publisher, group: Group | None = None,
                 batch_slots: int | None = None, reuse: dict[str, Any] | None = None) -> None:
        """`batch_slots` slots make a batch; None takes one from every living producer. `reuse` puts a buffer in between."""
        self.me, self.weights, self.group, self.batch_slots = me, weights, group, batch_slots
        self.unrolls = Reuse(me, unrolls, weights, parts.algorithm.record.layout, **reuse) if reuse else unrolls
        self.budget = parts.max_env_steps
        self.learn = parts.algorithm.learn(parts.seed)  # all learners begin alike
        self.rng = me.rng("minibatches")
        self.counts = np.zeros(2, np.int64)  # env_steps consumed, learner_steps: by all learners together
        self.skipped = 0
        self.settled = self.greeted = False

    @property
    def leader(self) -> bool:
        return self.group is None or self.group.leader

    @property
    def progress(self) -> Progress:
        env_steps, learner_steps = (int(n) for n in self.counts)
        return Progress(env_steps, learner_steps, min(1.0, env_steps / self.budget) if self.budget else 0.0)

    async def step(self) -> None:
        self.settled = True  # nothing is changed before a batch is here
        if not self.greeted:
            await self._greet()
        batch = await (self.unrolls.take(self.batch_slots) if self.batch_slots else self.unrolls.take_each())
        self.settled = False
        try:
            await self._update(batch)
        except GroupChanged:
            self.me.stats.add("group_discarded")
            self.greeted = False
            return
        self._publish()

    async def _greet(self) -> None:
        """Agree with the group on one state, then publish it."""
        if self.group is not None:
            bundle = self._bundle()
            layout = Layout.of(bundle)
            flat = np.zeros(layout.nbytes, np.uint8)
            layout.copy(layout.views(flat), bundle)
            await self.group.sync(flat)
            self._unbundle(layout.views(flat))
        self.greeted = True
        self._publish()

    async def _update(self, batch: Tree) -> None:
        stats, learn = self.me.stats, self.learn
        decisions = self._measure(batch)
        with stats.phase("prepare"):
            sums, moments = learn.sums(batch), learn.moments(batch)
            if self.group is not None:
                joined = await self.group.sum(np.concatenate([[decisions], sums, moments]))
                decisions, sums, moments = int(joined[0]), joined[1 : 1 + len(sums)], joined[1 + len(sums) :]
        steps = 0
        for minibatch in learn.minibatches(batch, sums, self.progress, self.rng):
            for phase in learn.phases:
                with stats.phase("learn"):
                    gradient, metrics = learn.gradients(minibatch, phase)
                    if self.group is not None:
                        gradient = await self.group.mean(gradient)
                    applied = learn.apply(gradient, phase)
                self._judge(applied)
                steps += 1
        learn.absorb(moments)
        self.counts += (decisions, steps)
        if self.leader:
            stats.add("learner_steps", steps)
        for name, value in metrics.items():
            if name in stats:
                stats.set(name, value)

    def _measure(self, batch: Tree) -> int:
        """How old the batch is; returns how many decisions it holds."""
        valid = batch["valid"]
        decisions = int(np.count_nonzero(valid))
        self.me.stats.add("samples_consumed", decisions)
        lag = self.weights.version - batch["weights_version"]
        self.me.stats.observe("policy_lag", lag if decisions == lag.size else lag[valid])
        self.me.stats.observe("data_age_seconds", time.time() - batch["time"])
        return decisions

    def _judge(self, applied: bool) -> None:
        """A loss or gradient that is not finite was left out; too many in a row end the run."""
        self.skipped = 0 if applied else self.skipped + 1
        if not applied:
            self.me.stats.add("updates_skipped")
        if self.skipped >= SKIPS_IN_A_ROW:
            self.me.fail(f"{self.skipped} updates in a row had a loss or gradient that is not finite; lower the learning rate, or "
                         "look for NaN in observations and rewards with `shoal doctor --env`")

    def _publish(self) -> None:
        if not self.leader:
            return
        with self.me.stats.phase("publish"):
            version = self.weights.publish(self.learn.published(self.progress))
        self.me.stats.set("weights_version", version)

    # ------------------------------------------------------------------ what a checkpoint holds
    def _bundle(self) -> dict[str, np.ndarray]:
        return bundle(self.learn, self.counts)

    def _unbundle(self, bundle: dict[str, np.ndarray]) -> None:
        self.counts[:] = bundle["counts"]
        with torch.no_grad():
            for name, tensor in self.learn.state.items():
                tensor.copy_(torch.from_numpy(bundle[f"learn/{name}"]))

    def state(self) -> dict[str, np.ndarray] | None:
        if not self.leader:
            return None
        words = np.frombuffer(json.dumps(self.rng.bit_generator.state).encode(), np.uint8)
        return {**self._bundle(), "rng": words}

    def load(self, state: dict[str, np.ndarray]) -> None:
        self._unbundle(state)
        self.rng.bit_generator.state = json.loads(bytes(state["rng"]))


class Evaluator:
    """Plays fresh episodes with one published version; ends the run when the return is reached twice."""

    def __init__(self, me: Me, parts: Parts, weights: Reader) -> None:
        self.me, self.weights, self.plan = me, weights, parts.eval
        self.policy, self.record = parts.algorithm.policy(), parts.algorithm.record
        self.published = parts.algorithm.published_layout().empty()
        self.best = map_tree(np.copy, self.published)
        self.best_return = np.full(1, -np.inf)
        self.seeds = me.rng("evaluation")
        self.rng = torch.Generator().manual_seed(int(self.seeds.integers(2**31)))
        self.explore = None if self.plan.greedy else parts.algorithm.explore
        self.env = parts.env.make(min(self.plan.episodes, 100))
        self.version, self.due = 0, 0
        self.done = False

    async def step(self) -> None:
        if self.done:  # what was confirmed stays the result
            await any_of(timeout=1.0)
            return
        await self.weights.newer_than(self.version)
        self.version = self.weights.pull(self.published)
        progress = Progress(*(int(n) for n in self.published["progress"][:2]), float(self.published["progress"][2]))
        if progress.env_steps < self.due:
            return
        self.due = progress.env_steps + self.plan.every_env_steps
        self.policy.load(self.published)
        result, goal = self._evaluate(progress), self.plan.until_return
        if goal is not None and result >= goal:
            confirmed = self._evaluate(progress)
            if confirmed >= goal:
                self._keep(confirmed)
                self.done = True
                self.me.finish("return")
                return
            result = min(result, confirmed)
        self._keep(result)

    def _evaluate(self, progress: Progress) -> float:
        """The mean return of `episodes` episodes: of each row the first ones, so that short episodes count no more than long ones."""
        stats, seats = self.me.stats, self.env.num_seats
        quota = np.full(seats, self.plan.episodes // seats)
        quota[: self.plan.episodes % seats] += 1
        totals, returns = np.zeros(seats), []
        explore = None if self.explore is None else self.explore(0, 1, seats, progress)
        now, action = self.env.reset(int(self.seeds.integers(2**31))), None
        state, sight = self.policy.initial_state(seats), self.record.sight(seats)
        with stats.phase("evaluate"):
            while quota.any():
                action, state, _ = self.policy.act(sight.of(now, action), state, explore, self.rng)
                now = self.env.step(action)
                totals += now.reward * now.valid
                for row in np.flatnonzero(now.last & now.valid):
                    if quota[row]:
                        quota[row] -= 1
                        returns.append(totals[row])
                    totals[row] = 0.0
                stats.add("eval_env_steps", int(np.count_nonzero(now.valid)))
                self.me.beat()
        for name, value in (("eval_return", np.mean(returns)), ("eval_std", np.std(returns)), ("eval_episodes", len(returns)),
                            ("eval_version", self.version)):
            stats.set(name, float(value))
        stats.add("evaluations")
        return float(np.mean(returns))

    def _keep(self, result: float) -> None:
        """Remember the best version: what `shoal play` and `run.policy` use."""
        if result >= self.best_return[0]:
            self.best_return[0] = result
            for (_, target), (_, source) in zip(leaves(self.best), leaves(self.published), strict=True):
                target[...] = source

    def state(self) -> dict[str, np.ndarray]:
        return {"best_return": self.best_return, **{f"best/{'/'.join(path)}": leaf for path, leaf in leaves(self.best)}}

    def load(self, state: dict[str, np.ndarray]) -> None:
        self.best_return[:] = state["best_return"]
        for path, leaf in leaves(self.best):
            leaf[...] = state[f"best/{'/'.join(path)}"]

    def close(self) -> None:
        self.env.close()
