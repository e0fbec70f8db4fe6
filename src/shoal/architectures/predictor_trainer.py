"""Agents without a model, predictors and trainers over one model: GA3C (Babaeizadeh et al. 2017, 1611.06256, figure 1).

      agent 0 ─┐  predictions (call)   ┌───────────────────────────────────────────┐
      agent 1 ─┼─────────────────────▶ │ predictor 0 ..   ┌───────────────────┐    │
      ...     ─┘ ◀──── actions ─────── │                  │ model (shared)    │    │ ── weights (broadcast) ──▶ evaluator
         │                             │                  └───────────────────┘    │
         └── unrolls (stream, short) ▶ │ trainer 0 ..                              │
                                       └──── one process, a thread for each ───────┘
      coordinator (optional): changes the numbers of agents, predictors and trainers, keeps what trains faster

A predictor answers whatever is pending when it is free, up to a cap; it never waits for a batch to fill. Parameters are never
copied: predictors read those that trainers write. So they change within an unroll, and by how much depends on the length of
the training queue: `queue_slots` is a learning hyper-parameter.

                   paper and its source                    here
    an agent       one environment                         `envs_per_actor`, stepped together
    returns        by the agent, from predicted values     by the trainer, from its own values: right for V-trace and GAE too
    segments       end with the episode; the last          T steps across episode ends; x_T is the next one's x_0
                   experience is withheld
    log pi         of max(pi, 1e-6)                         exact, from the log-softmax; with lag, --algorithm vtrace corrects it
    recurrent nets none                                    the state travels with the request
    adjusting      every 20 s, three steps at once         the same; off unless `adjust_seconds` is given
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shoal.architectures.adjuster import Coordinator
from shoal.architectures.books import SharedModel, model_layout
from shoal.architectures.parts import Parts
from shoal.architectures.player import note_episodes
from shoal.architectures.roles import Evaluator, Learner
from shoal.architectures.views import join_rows, join_views, rows_of
from shoal.core import Call, Delivery, Me, Reader, Server, Shared, Sink, StepView, Tolerance, Tree
from shoal.errors import ConfigError
from shoal.runtime import CONTROL, Program
from shoal.slots import Field, Layout, map_tree

__all__ = ["Agent", "Config", "Predictor", "delivers", "draw"]

PLACE = "model"


@dataclass(frozen=True)
class Config:
    """Agents, predictors and trainers; there are as many agents as --actors."""

    envs_per_actor: int = 8
    """Environments of one agent: the rows of one request and of one unroll."""
    predictors: int = 1
    """Threads that answer agents."""
    trainers: int = 1
    """Threads that learn."""
    batch_slots: int = 1
    """Unrolls that a trainer joins into a batch; more use the processor better and learn more slowly."""
    queue_slots: int = 1
    """Finished unrolls that each agent may have waiting for each trainer: the bound of the lag."""
    prediction_rows: int = 512
    """Most environments in one forward pass."""
    adjust_seconds: float = 0.0
    """Adjust the numbers of agents, predictors and trainers this often, by trainings per second (paper: 20); 0 never."""
    most_agents: int = 8
    """With adjusting: at most so many agents."""
    most_threads: int = 4
    """With adjusting: at most so many predictors and so many trainers."""

    def validate(self) -> None:
        for name in ("envs_per_actor", "predictors", "trainers", "batch_slots", "queue_slots", "prediction_rows", "most_agents",
                     "most_threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--architecture.{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1")
        if self.adjust_seconds < 0:
            raise ConfigError(f"--architecture.adjust-seconds is {self.adjust_seconds}; it must not be negative")
        if self.prediction_rows < self.envs_per_actor:
            raise ConfigError(f"--architecture.prediction-rows {self.prediction_rows} is less than one request of "
                              f"--architecture.envs-per-actor {self.envs_per_actor} rows; raise it")


def delivers(config: Config) -> Delivery:
    return Delivery(Tolerance.LAG, "trainers change the model while agents act and unrolls wait, so data are some versions old")


def draw(program: Program, parts: Parts, config: Config) -> None:
    if parts.learners != 1:
        raise ConfigError(f"--learners {parts.learners}: give --architecture.trainers {parts.learners} instead")
    numbers = {"agent": parts.actors, "predictor": config.predictors, "trainer": config.trainers}
    limits = {role: (number, number) for role, number in numbers.items()}
    if config.adjust_seconds:
        caps = {"agent": config.most_agents, "predictor": config.most_threads, "trainer": config.most_threads}
        limits = {role: (1, max(number, caps[role])) for role, number in numbers.items()}
    replicas = {role: (limits[role][0], number, limits[role][1]) for role, number in numbers.items()}
    record = parts.algorithm.record
    predictions = program.call("predictions", *prediction_layouts(record), depth=1)
    unrolls = program.stream("unrolls", record.layout, depth=config.queue_slots)
    weights = program.broadcast("weights", parts.algorithm.published_layout())
    model = program.shared("model", model_layout(parts, limits["trainer"][1]))
    program.add("agent", Agent, parts=parts, predictions=predictions.client, unrolls=unrolls.sink, replicas=replicas["agent"])
    program.add("predictor", Predictor, parts=parts, predictions=predictions.server, model=model.view, begun=weights.reader,
                agents=limits["agent"][1], most_rows=config.prediction_rows, replicas=replicas["predictor"], place=PLACE)
    program.add("trainer", Learner, parts=parts, unrolls=unrolls.source, weights=weights.publisher, model=model.view,
                batch_slots=config.batch_slots, replicas=replicas["trainer"], place=PLACE, compute_threads=parts.learner_threads)
    program.threaded(PLACE)
    if config.adjust_seconds:
        program.add("coordinator", Coordinator, control=CONTROL, model=model.view, numbers=numbers, limits=limits,
                    seconds=config.adjust_seconds)
    if parts.eval.enabled:
        program.add("evaluator", Evaluator, parts=parts, weights=weights.reader)


def prediction_layouts(record: Any) -> tuple[Layout, Layout]:
    """What an agent shows of its environments, and the decisions that answer it."""
    unroll, rows = record.layout.fields, record.seats
    names = [name for name in ("observation", "first", "action_mask", "prev_action", "prev_reward") if name in unroll]
    view = {name: map_tree(lambda field: Field(field.shape[1:], field.dtype), unroll[name]) for name in names}
    state = map_tree(lambda field: Field(field.shape, field.dtype), unroll["state"])
    action, extras = (map_tree(lambda field: Field(field.shape[1:], field.dtype), unroll[name]) for name in ("action", "extras"))
    reply = {"action": action, "extras": extras, "state": state, "version": Field((1,), "i8")}
    assert all(field.shape[0] == rows for field in view.values() if isinstance(field, Field))
    return Layout({"view": view, "state": state}), Layout(reply)


class Agent:
    """Acts as a predictor tells it, records what happened and sends it to a trainer; has no model."""

    def __init__(self, me: Me, parts: Parts, predictions: Call, unrolls: Sink) -> None:
        self.me, self.predictions, self.unrolls = me, predictions, unrolls
        self.env = parts.env.of(me.index).make(parts.envs_per_actor)
        self.recorder = parts.algorithm.record.recorder(self.env.num_seats)
        self.now = self.env.reset(int(me.rng("environments").integers(2**31)))
        # Zeros stand for no memory: where an episode begins, nets begin with their own initial state.
        self.hidden = Layout(parts.algorithm.record.layout.fields["state"]).empty()

    async def step(self) -> None:
        """One unroll."""
        stats, recorder = self.me.stats, self.recorder
        slot = await self.unrolls.slot()
        with stats.phase("write"):
            recorder.begin(slot.data, self.now, self.hidden, 0)
        for t in range(recorder.record.length):
            reply = await self._ask()
            with stats.phase("env"):
                self.now = self.env.step(reply["action"])
            with stats.phase("write"):
                recorder.write(t, reply["action"], reply["extras"], self.now, int(reply["version"][0]))
            self.hidden = reply["state"]
            decisions = int(np.count_nonzero(self.now.valid))
            stats.add("env_steps", decisions)
            stats.add("env_frames", decisions * self.env.frame_skip)
            note_episodes(stats, self.now)
        slot.send()

    async def _ask(self) -> Tree:
        draft = await self.predictions.slot()  # type: ignore[attr-defined]
        with self.me.stats.phase("write"):
            view = self.recorder.view(self.now)
            for name, target in draft.data["view"].items():
                map_tree(np.copyto, target, getattr(view, name))
            map_tree(np.copyto, draft.data["state"], self.hidden)
        return await draft.send().result()

    def close(self) -> None:
        self.env.close()


class Predictor:
    """Answers whatever agents ask at the moment in one forward pass of the model that trainers train."""

    def __init__(self, me: Me, parts: Parts, predictions: Server, model: Shared, begun: Reader, agents: int,
                 most_rows: int) -> None:
        self.me, self.predictions, self.begun, self.agents = me, predictions, begun, agents
        self.algorithm, self.rows = parts.algorithm, parts.algorithm.record.seats
        self.model = SharedModel(me, parts, model)
        self.policy = self.algorithm.policy()
        self.policy.bind(self.model.learn.published(self.model.progress))
        self.most = max(1, most_rows // self.rows)
        self.rng = torch.Generator().manual_seed(int(me.rng("actions").integers(2**31)))
        self.settled = True

    async def step(self) -> None:
        await self.begun.newer_than(0)  # the first trainer has filled the memory
        requests = await self.predictions.take(self.most)
        progress, version = self.model.progress, self.model.version
        with self.me.stats.phase("inference"):
            views = [StepView(**request.data["view"]) for request in requests]
            explore = [self.algorithm.explore(request.client, self.agents, self.rows, progress) for request in requests]
            hidden = join_rows([request.data["state"] for request in requests])
            action, hidden, extras = self.policy.act(join_views(views), hidden, np.concatenate(explore), self.rng)
        hidden = map_tree(np.asarray, hidden)
        for k, request in enumerate(requests):
            decided = {"action": action, "extras": extras, "state": hidden}
            request.reply({**rows_of(decided, k, self.rows), "version": np.array([version])})
        self.me.stats.observe("inference_batch", float(self.rows * len(requests)))
