"""Demonstrations in a run: a table of their own beside the agents' (R2D3, Gulcehre et al. 2019), or alone (offline).

    recording ──▶ Reel: steps as an actor would have seen them ──▶ the algorithm's own recorder ──▶ items ──▶ a table
                    └──▶ the initial net: recurrent states and first priorities ─┘                            │   ▲
                                          each element of a batch comes from here with probability rho        ▼   │ priorities
                                                                                                             learner

Items of demonstrations are those that an actor with the initial weights would have made of the same episodes, bit for bit, but for
their weights_version, which is -1: nobody of this run has made them. Their keys are small, the agents' begin at 2^40, so that a
priority always finds its own table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from shoal import replay
from shoal.algorithms.records import leaf_tree
from shoal.architectures.parts import Parts
from shoal.architectures.replay import Block, items_layout, samples_wire, store, stored_columns, tell
from shoal.architectures.replay_memory import codecs
from shoal.architectures.replaying import ReplayLearner
from shoal.architectures.roles import Evaluator
from shoal.core import Algorithm, Me, Progress, Server, Tree
from shoal.envs import Step
from shoal.errors import ConfigError
from shoal.offline import Episode, open_demos
from shoal.ops.priorities import draw_demonstrations
from shoal.replay import items as k
from shoal.replay.batch import BatchLayout, Info
from shoal.replay.core import Core
from shoal.runtime import Program
from shoal.slots import map_tree

__all__ = ["Demonstrations", "Shelf", "cut", "draw_offline"]

TABLE = "demonstrations"
SEATS = 32  # episodes that are walked through side by side
SOME, SOME_BYTES = 1024, 1 << 26  # items that are put into the table at once, and what they may take before that
VERSION = -1


class Reel:
    """Recorded episodes as the stream of steps that an actor would have seen: every seat plays one after the other."""

    def __init__(self, episodes: Iterator[Episode], seats: int, observation_space: Any, action: np.ndarray, mask_size: int) -> None:
        self._episodes, self._seats = episodes, range(seats)
        self._playing: list[Episode | None] = [next(episodes, None) for _ in self._seats]
        self._at = [0] * seats
        self._observation = map_tree(lambda leaf: np.zeros((seats, *leaf[0]), leaf[1]), leaf_tree(observation_space))
        self._mask = np.ones((seats, mask_size), bool) if mask_size else None
        self._nothing = action
        self.running = any(one is not None for one in self._playing)

    def begin(self) -> Step:
        first = np.ones(len(self._seats), bool)
        self._show(self._seats)
        return self._step(np.zeros(len(first), np.float32), ~first, first, ~first, ~first, first)

    def step(self) -> tuple[np.ndarray, Step]:
        """What was done, and what came of it."""
        seats = len(self._seats)
        action, reward = self._nothing.copy(), np.zeros(seats, np.float32)
        terminated, first, last, truncated, valid = (np.zeros(seats, bool) for _ in range(5))
        cut: list[Tree] = []
        rows: list[int] = []
        for seat in self._seats:
            episode, t = self._playing[seat], self._at[seat]
            if episode is None:
                continue
            valid[seat] = True
            action[seat], reward[seat], terminated[seat] = episode.action[t], episode.reward[t], episode.terminated[t]
            self._at[seat] = t + 1
            if t + 1 == len(episode):
                last[seat], truncated[seat] = True, episode.truncated[t]
                if truncated[seat]:
                    rows.append(seat)
                    cut.append(map_tree(lambda x: x[-1], episode.observation))
                self._playing[seat], self._at[seat] = next(self._episodes, None), 0
                first[seat] = self._playing[seat] is not None
        self._show(self._seats)
        self.running = any(one is not None for one in self._playing)
        step = self._step(reward, terminated, first, last, truncated, valid)
        if rows:
            step.final_rows = np.array(rows)
            step.final_observation = map_tree(lambda *parts: np.stack(parts), *cut)
        return action, step

    def _show(self, seats: range) -> None:
        """What every seat sees now."""
        for seat in seats:
            episode, t = self._playing[seat], self._at[seat]
            if episode is None:
                continue
            map_tree(lambda into, rows: into.__setitem__(seat, rows[t]), self._observation, episode.observation)  # noqa: B023
            if self._mask is not None and episode.mask is not None:
                self._mask[seat] = episode.mask[t]

    def _step(self, reward: np.ndarray, terminated: np.ndarray, first: np.ndarray, last: np.ndarray, truncated: np.ndarray,
              valid: np.ndarray) -> Step:
        return Step(self._observation, reward, (~terminated).astype(np.float32), first, last, truncated, valid,
                    action_mask=self._mask)


def cut(algorithm: Algorithm, episodes: Iterator[Episode], seed: int, seats: int = SEATS, some: int = SOME,
        version: int = VERSION) -> Iterator[tuple[Tree, np.ndarray]]:
    """Items and their first priorities, up to `some` at a time: what an actor with the weights of `learn(seed)` would send."""
    record = algorithm.record.of_seats(seats)  # type: ignore[attr-defined]
    policy, recorder, rng = algorithm.policy(), record.recorder(), torch.Generator()
    policy.load(algorithm.learn(seed).published(Progress()))
    reel = Reel(episodes, seats, record.scene.observation_space, np.zeros(seats, np.int64), record.mask_size)
    now, state = reel.begin(), policy.initial_state(seats)
    recorder.begin(now)
    while reel.running:
        _, following, extras = policy.act(recorder.view(now), state, None, rng)
        action, now = reel.step()
        recorder.write(action, state, extras, now, version)
        state = following
        while recorder.ready >= some or (recorder.ready and not reel.running):
            count = min(some, recorder.ready)
            items, priority = record.layout.joined(count).empty(), np.zeros(count)
            recorder.take(items, priority)
            yield items, priority


class Demonstrations:
    """The table: filled once, never emptied, drawn from by priorities of its own."""

    def __init__(self, me: Me, parts: Parts) -> None:
        exponent, columns = parts.replay.exponent, stored_columns(parts.algorithm.record.layout)
        self.me, self.ratio, self.rng = me, parts.replay.rho, me.rng("demonstrations")
        self.layout = items_layout(parts.algorithm.record.layout, parts.replay.batch_size)
        self.core = Core([replay.Table(TABLE, replay.Prioritized(exponent) if exponent else replay.Uniform(), max_size=1 << 40,
                                       limiter=replay.MinSize(1))], compression=codecs(columns, parts.replay.compression),
                         seed=int(me.rng("demonstration draws").integers(2**62)))
        self.table = self.core.table(TABLE)
        assert parts.demos is not None
        some = max(1, min(SOME, SOME_BYTES // parts.algorithm.record.layout.nbytes))
        for items, priority in cut(parts.algorithm, open_demos(parts.demos).episodes(), parts.seed, some=some):
            store(self.core, self.table, columns, items, priority)
            me.beat()
        me.stats.set("demo_size", self.table.size)
        me.stats.set("demo_bytes", self.table.nbytes)
        if not self.table.size:
            me.fail(f"{parts.demos} gave no items to learn from: all of its first priorities are not finite")

    def share(self, count: int) -> int:
        """How many of so many elements come from here: each on its own with probability rho."""
        return int(np.count_nonzero(draw_demonstrations(self.rng, count, self.ratio)))

    def draw(self, count: int, memory: np.ndarray, start: int) -> Info:
        """Gather so many into a batch, from its element `start` on."""
        place: BatchLayout = self.layout.part(start, count)
        batch = self.core.try_sample(TABLE, count, Block(memory), True, place)  # type: ignore[arg-type]
        assert batch is not None and len(batch) == count
        self.me.stats.add("demo_samples", count)
        return batch.info

    def update(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        if len(keys):
            unknown, _ = self.table.update(keys.copy(), priorities.copy())
            self.me.stats.add("demo_priority_updates", len(keys) - unknown)

    # ------------------------------------------------------------------ what a checkpoint holds
    def state(self) -> dict[str, np.ndarray]:
        """Priorities alone: the episodes are on disk already."""
        slots = self.table.slots()
        return {"demo_keys": self.table.state.items[slots, k.KEY], "demo_priorities": self.table.state.values[slots, k.PRIORITY]}

    def load(self, state: dict[str, np.ndarray]) -> None:
        if len(state["demo_keys"]) != self.table.size:
            self.me.note(f"the demonstrations have changed since the checkpoint ({len(state['demo_keys']):,} items then, "
                         f"{self.table.size:,} now): their priorities begin anew")
            return
        self.table.update(state["demo_keys"].copy(), state["demo_priorities"].copy())

    def close(self) -> None:
        self.core.close()


def draw_offline(program: Program, parts: Parts) -> None:
    """A learner over demonstrations alone:

        demonstrations ◀── samples (call) ── learner ── weights (broadcast) ──▶ evaluator
    """
    if parts.learners != 1:
        raise ConfigError(f"--learners {parts.learners} with --offline does not fit: there is one learner; leave it out")
    samples = samples_wire(program, parts, turns=False)
    weights = program.broadcast("weights", parts.algorithm.published_layout())
    program.add("demonstrations", Shelf, parts=parts, samples=samples.server)
    program.add("learner", ReplayLearner, parts=parts, samples=samples.client, weights=weights.publisher,
                compute_threads=parts.learner_threads)
    if parts.eval.enabled:
        program.add("evaluator", Evaluator, parts=parts, weights=weights.reader)


class Shelf:
    """Keeps demonstrations for a learner that nobody else feeds: hands batches out and takes new priorities in."""

    def __init__(self, me: Me, parts: Parts, samples: Server) -> None:
        self.me, self.samples, self.config = me, samples, parts.replay
        self.demos = Demonstrations(me, parts)
        self.settled = False

    async def step(self) -> None:
        self.settled = True
        requests = await self.samples.take(32)
        self.settled = False
        for request in requests:
            count, size = int(request.data["count"][0]), self.config.batch_size
            with self.me.stats.phase("write"):
                self.demos.update(request.data["key"][:count], request.data["priority"][:count])
            with self.me.stats.phase("gather"):
                answer = request.answer
                info = self.demos.draw(size, answer["items"], 0)
                tell(answer, slice(0, size), info)
                answer["fresh"][0] = 0
                request.reply(answer)

    def state(self) -> dict[str, np.ndarray] | None:
        return self.demos.state() if self.config.checkpoint else None

    def load(self, state: dict[str, np.ndarray]) -> None:
        self.demos.load(state)

    def close(self) -> None:
        self.demos.close()
