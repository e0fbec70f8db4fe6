"""Actors hold environments only; one server thinks for all of them: SEED RL (Espeholt et al. 2020, 1910.06591, figure 1).

      actor 0: group A | group B ─┐                           ┌──────────────────┐
      actor 1: group A | group B ─┼── steps (call) ─────────▶ │ inference server │ ── unrolls (stream) ──▶ learner
      ...                        ─┘ ◀────────── actions ───── └──────────────────┘                           │
                                                                       ▲────────── weights (broadcast) ◀─────┘

Observations travel to the server and actions back; nothing recurrent or parametric ever does. The server keeps the
recurrent state of every environment, batches whatever is pending when it is free, writes the unrolls itself and hands
them to the learner. Each actor steps two groups of environments in turn: while one waits for actions the other steps.
Parameters may change inside an unroll; every step carries its own version and log-probability. On a GPU server and learner may
share a process (`--gpu.together`): then the weights go from one to the other on the device. With an algorithm that learns
from replay the server sends items to a table (`replaying.py`) in the place of unrolls: SEED's second agent, R2D2.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shoal.algorithms.handoff import Handoff
from shoal.algorithms.serving import Counter
from shoal.architectures.parts import Parts
from shoal.architectures.player import note_episodes
from shoal.architectures.roles import Evaluator, Learner, bundles, learner_group
from shoal.architectures.views import join_rows, join_views, rows_of
from shoal.core import Call, Delivery, Me, Progress, Reader, Request, Server, Sink, Tolerance, Tree
from shoal.envs import Step
from shoal.errors import ConfigError
from shoal.runtime import Program
from shoal.slots import Field, Layout, map_tree

__all__ = ["Config", "delivers", "draw", "has_replay", "takes_demos"]

has_replay = takes_demos = True
MIND = "mind"  # the place of a server and a learner that are together

runs_on_gpu = True


@dataclass(frozen=True)
class Config:
    """Environments here, inference there."""

    envs_per_actor: int = 16
    """Environments of one group: the rows of one request and of one unroll."""
    groups: int = 2
    """Groups of environments per actor: while one waits for actions, the others step."""
    batch_slots: int = 2
    """Unrolls (of one group each) that one learner joins into a batch."""
    queue_slots: int = 2
    """Finished unrolls that may wait for the learner; few of them keep data young."""
    inference_rows: int = 512
    """Most environments in one forward pass."""
    one_place: bool = False
    """Put the actors and an inference server into their learner's process: on few cores nothing is faster."""

    def validate(self) -> None:
        for name in ("envs_per_actor", "groups", "batch_slots", "queue_slots", "inference_rows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--architecture.{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1")
        if self.inference_rows < self.envs_per_actor:
            raise ConfigError(f"--architecture.inference-rows {self.inference_rows} is less than one request of "
                              f"--architecture.envs-per-actor {self.envs_per_actor} rows; raise it")


def delivers(config: Config) -> Delivery:
    return Delivery(Tolerance.LAG, "the server acts on while the learner learns, so data are some versions old")


def draw(program: Program, parts: Parts, config: Config) -> None:
    algorithm = parts.algorithm
    if getattr(algorithm, "from_replay", False):
        _draw_replay(program, parts, config)
        return
    request, reply = step_layouts(algorithm.record)
    steps = program.call("steps", request, reply, depth=config.groups)
    # A server has one unroll of every group open, and some more on their way.
    unrolls = program.stream("unrolls", algorithm.record.layout, depth=parts.actors * config.groups + config.queue_slots,
                             paired=config.one_place)
    weights = program.broadcast("weights", algorithm.published_layout())
    place = bundles(parts) if config.one_place else None
    program.add("actor", EnvActor, parts=parts, steps=steps.client, groups=config.groups, place=place,
                replicas=(1, parts.actors, parts.actors) if place is None else parts.actors)  # clients are dealt by number
    handoff = Handoff() if parts.together else None
    mind = MIND if parts.together and place is None else place
    program.add("inference", InferenceServer, parts=parts, steps=steps.server, unrolls=unrolls.sink, weights=weights.reader,
                groups=config.groups, most_rows=config.inference_rows, place=mind, replicas=parts.learners if place else 1,
                handoff=handoff)
    program.add("learner", Learner, parts=parts, unrolls=unrolls.source, weights=weights.publisher,
                group=learner_group(program, parts), batch_slots=config.batch_slots, replicas=parts.learners, place=mind,
                compute_threads=parts.learner_threads, handoff=handoff)
    if mind == MIND:
        program.threaded(MIND)
    if parts.core_each:
        program.pin("actor")
    if parts.eval.enabled:
        program.add("evaluator", Evaluator, parts=parts, weights=weights.reader)


def _draw_replay(program: Program, parts: Parts, config: Config) -> None:
    """The server writes items in the place of unrolls, and a replay table stands in the place of the queue."""
    from shoal.architectures.replay import replay_wires  # only now: it brings Numba
    from shoal.architectures.replaying import add_replay

    if parts.offline:
        from shoal.architectures.demos import draw_offline

        draw_offline(program, parts)
        return
    if config.one_place:
        raise ConfigError(f"--architecture.one-place with --algorithm {parts.algorithm.name} does not fit here: central_inference "
                          "has its replay table in a process of its own; leave it out, or use --architecture actor_learner")
    request, reply = step_layouts(parts.algorithm.record.steps)  # type: ignore[attr-defined]
    steps = program.call("steps", request, reply, depth=config.groups)
    weights = program.broadcast("weights", parts.algorithm.published_layout())
    inserts, samples = replay_wires(program, parts)
    program.add("actor", EnvActor, parts=parts, steps=steps.client, groups=config.groups, replicas=(1, parts.actors, parts.actors))
    program.add("inference", item_server, parts=parts, steps=steps.server, inserts=inserts.client, weights=weights.reader,
                groups=config.groups, most_rows=config.inference_rows)
    add_replay(program, parts, inserts, samples, weights)
    if parts.eval.enabled:
        program.add("evaluator", Evaluator, parts=parts, weights=weights.reader)


def item_server(me: Me, parts: Parts, steps: Server, inserts: Call, weights: Reader, groups: int,
                most_rows: int) -> InferenceServer:
    """Acts for all actors in batches, keeps their recurrent states and sends finished items to the replay."""
    from shoal.architectures.replay_ends import Inserts

    return InferenceServer(me, parts, steps, Inserts(inserts, parts.replay.shards), weights, groups, most_rows)


def step_layouts(record: Any) -> tuple[Layout, Layout]:
    """What one step of a group looks like on the wire, and the actions that answer it."""
    unroll, rows = record.layout.fields, record.seats
    per_step = {name: map_tree(lambda field: Field(field.shape[1:], field.dtype), unroll[name])
                for name in ("observation", "first", "reward", "discount", "last", "truncated", "valid")}
    if record.mask_size:
        per_step["action_mask"] = Field(unroll["action_mask"].shape[1:], "bool")
    executed = map_tree(lambda field: Field(field.shape[1:], field.dtype), unroll["action"])
    final = map_tree(lambda field: Field((rows, *field.shape[2:]), field.dtype), unroll["observation"])
    request = {"group": Field((1,), "i8"), "run_id": Field((1,), "i8"), "step": per_step, "executed": executed,
               "has_executed": Field((1,), "bool"), "final_count": Field((1,), "i8"), "final_rows": Field((rows,), "i8"),
               "final_observation": final}
    return Layout(request), Layout({"action": executed})


class EnvActor:
    """Steps its environments with the actions it is sent; has no model."""

    def __init__(self, me: Me, parts: Parts, steps: Call, groups: int) -> None:
        self.me, self.steps = me, steps
        self.run_id = int(me.rng("run").integers(2**62))
        source = parts.env.of(me.index)
        self.envs = [source.make(parts.envs_per_actor) for _ in range(groups)]
        seeds = me.rng("environments").integers(2**31, size=groups)
        self.now = [env.reset(int(seed)) for env, seed in zip(self.envs, seeds, strict=True)]
        self.pending: list[Any] = [None] * groups

    async def step(self) -> None:
        """One round: every group in turn takes its actions and steps, while the other groups' requests are under way."""
        stats = self.me.stats
        for group, env in enumerate(self.envs):
            if self.pending[group] is not None:
                reply = await self.pending[group].result()
                with stats.phase("env"):
                    now = self.now[group] = env.step(reply["action"])
                decisions = int(np.count_nonzero(now.valid))
                stats.add("env_steps", decisions)
                stats.add("env_frames", decisions * env.frame_skip)
                note_episodes(stats, now)
            draft = await self.steps.slot()
            with stats.phase("write"):
                write_step(draft.data, group, self.run_id, self.now[group])
            self.pending[group] = draft.send()

    def close(self) -> None:
        for env in self.envs:
            env.close()


def write_step(data: Tree, group: int, run_id: int, now: Step) -> None:
    """A Step into a request's slot."""
    data["group"][0], data["run_id"][0] = group, run_id
    for name, target in data["step"].items():
        _copy(target, getattr(now, name))
    data["has_executed"][0] = now.executed_action is not None
    if now.executed_action is not None:
        _copy(data["executed"], now.executed_action)
    count = len(now.final_rows)
    data["final_count"][0] = count
    if count:
        data["final_rows"][:count] = now.final_rows
        map_tree(lambda target, source: np.copyto(target[:count], source), data["final_observation"], now.final_observation)


def read_step(data: Tree) -> Step:
    """The Step in a request's slot, as views."""
    count = int(data["final_count"][0])
    final = map_tree(lambda rows: rows[:count], data["final_observation"]) if count else None
    return Step(**data["step"], final_rows=data["final_rows"][:count], final_observation=final,
                executed_action=data["executed"] if data["has_executed"][0] else None)


def _copy(target: Tree, source: Tree) -> None:
    map_tree(np.copyto, target, source)


class Desk:
    """What the server keeps of one group of environments: recurrent state, last decision, the unroll being written."""

    def __init__(self, record: Any, client: int, run_id: int, hidden: Tree) -> None:
        self.recorder, self.client, self.run_id, self.hidden = record.recorder(), client, run_id, hidden
        self.slot: Any = None
        self.t = -1  # -1: nothing decided yet
        self.before: Tree = hidden  # the state before the last decision
        self.decisions = 0  # since items were sent
        self.action: Any = None
        self.extras: Any = None
        self.version = 0


class InferenceServer:
    """Acts for all actors in batches, keeps their recurrent states and writes their unrolls."""

    def __init__(self, me: Me, parts: Parts, steps: Server, unrolls: Sink, weights: Reader, groups: int, most_rows: int,
                 handoff: Handoff | None = None) -> None:
        """Through a `handoff` a learner of this process gives it the weights on the device."""
        parts = parts.on(me.index)
        self.me, self.steps, self.unrolls, self.weights, self.handoff = me, steps, unrolls, weights, handoff
        self.algorithm, self.record = parts.algorithm, parts.algorithm.record
        self.policy = self.algorithm.policy()
        self.published = self.algorithm.published_layout().empty()
        self.rng = torch.Generator(parts.hardware.device).manual_seed(int(me.rng("actions").integers(2**31)))
        self.parcel: Any = None
        self.counter: Any = None  # where many rows are answered on a GPU
        if parts.hardware.on_gpu:
            self.policy.to(parts.hardware)  # type: ignore[attr-defined]
            self.counter = Counter(self.policy, parts.hardware, self.rng)
        # A GPU thinks while steps are written down, unless what the policy sees depends on that.
        self.ahead = self.counter is not None and not getattr(self.record, "previous", True)
        self.actors, self.most = parts.actors, max(1, most_rows // self.record.seats)
        self.insert_batch = parts.replay.insert_batch
        self.desks: dict[tuple[int, int], Desk] = {}
        self.file = self._file_items if getattr(self.algorithm, "from_replay", False) else self._file
        self.version = 0
        self.settled = True

    async def step(self) -> None:
        if self.version == 0:
            await self.weights.newer_than(0)
        requests = await self.steps.take(self.most)
        self._refresh()
        steps = [read_step(request.data) for request in requests]
        desks = [self._desk(request) for request in requests]
        if self.ahead:
            with self.me.stats.phase("inference"):
                answer = self._ask(desks, steps)
        for desk, now in zip(desks, steps, strict=True):
            await self.file(desk, now)
        with self.me.stats.phase("inference"):
            action, hidden, extras = (answer if self.ahead else self._ask(desks, steps))()
        rows = self.record.seats
        for k, (desk, request) in enumerate(zip(desks, requests, strict=True)):
            desk.before = desk.hidden
            desk.hidden, desk.action, desk.extras = (rows_of(tree, k, rows) for tree in (hidden, action, extras))
            desk.version = self.version
            request.reply({"action": desk.action})
        self.me.stats.observe("inference_batch", float(rows * len(requests)))

    def _refresh(self) -> None:
        parcel = self.handoff.newest if self.handoff is not None else None  # None: a learner before this one has published
        source: Any = parcel or self.weights
        if source.version == self.version:
            return
        with self.me.stats.phase("pull"), self.counter.aside() if self.counter is not None else nullcontext():
            if parcel is not None:
                parcel.load(self.policy)
                self.parcel = parcel  # its memory is in use until an answer has come
                self.published["progress"][...], self.version = parcel.tree["progress"], parcel.version
            else:
                self.version = self.weights.pull(self.published)
                self.policy.load(self.published)
        self.me.stats.observe("publish_to_use_seconds", source.age_seconds)

    def _desk(self, request: Request) -> Desk:
        """The desk of a group; a new run_id means that its actor was restarted: the half-written unroll is discarded."""
        key, run_id = (request.client, int(request.data["group"][0])), int(request.data["run_id"][0])
        desk = self.desks.get(key)
        if desk is None or desk.run_id != run_id:
            hidden = map_tree(lambda x: x.cpu(), self.policy.initial_state(self.record.seats))
            fresh = Desk(self.record, request.client, run_id, hidden)
            fresh.slot = desk.slot if desk is not None else None
            desk = self.desks[key] = fresh
        return desk

    async def _file(self, desk: Desk, now: Step) -> None:
        """Write what the last decision led to; begin an unroll where one is due, with the state before this step is seen."""
        with self.me.stats.phase("write"):
            if desk.t >= 0:
                desk.recorder.write(desk.t, desk.action, desk.extras, now, desk.version)
                desk.t += 1
        if desk.t == self.record.length:
            desk.slot.send()
            desk.slot = None
        if desk.t in (-1, self.record.length):
            if desk.slot is None:
                desk.slot = await self.unrolls.slot()
            with self.me.stats.phase("write"):
                desk.recorder.begin(desk.slot.data, now, desk.hidden, self.version)
            desk.t = 0

    async def _file_items(self, desk: Desk, now: Step) -> None:
        """The same for items of a replay table: a recorder keeps them until there are enough to send."""
        with self.me.stats.phase("write"):
            if desk.t < 0:
                desk.recorder.begin(now)
                desk.t = 0
            else:
                desk.recorder.write(desk.action, desk.before, desk.extras, now, desk.version)
                desk.decisions += int(np.count_nonzero(now.valid))
        while desk.recorder.ready >= self.insert_batch:
            slot = await self.unrolls.slot()
            with self.me.stats.phase("write"):
                desk.recorder.take(slot.data["items"], slot.data["priority"])
                slot.data["decisions"][0], desk.decisions = desk.decisions, 0
            slot.send()

    def _ask(self, desks: list[Desk], steps: list[Step]) -> Callable[[], tuple[Tree, Tree, Tree]]:
        """One forward pass for all requests; what it returns waits for the answer."""
        views = [desk.recorder.view(now) for desk, now in zip(desks, steps, strict=True)]
        explore = np.concatenate([self._explore(desk) for desk in desks])
        if self.counter is not None:
            answer: Callable[[], tuple[Tree, Tree, Tree]] = self.counter.ask(views, [desk.hidden for desk in desks], explore)
            return answer
        return lambda: self.policy.act(join_views(views), join_rows([desk.hidden for desk in desks]), explore, self.rng)

    def _explore(self, desk: Desk) -> np.ndarray:
        env_steps, learner_steps, fraction = self.published["progress"]
        progress = Progress(int(env_steps), int(learner_steps), float(fraction))
        return self.algorithm.explore(desk.client, self.actors, self.record.seats, progress)
