"""GA3C's agents, which have no model, and the predictors that answer them."""

from __future__ import annotations

import numpy as np
import torch

from shoal.acting import StepView, UnrollRecord
from shoal.core import Call, Me, Reader, Server, Shared, Sink, Tree
from shoal.roles.learner_state import SharedModel
from shoal.roles.parts import Parts
from shoal.roles.player import note_step
from shoal.roles.rows import join_rows, join_views, rows_of
from shoal.roles.step_report import StepReport
from shoal.slots import Field, Layout, map_tree

__all__ = ["Agent", "Predictor", "prediction_layouts"]


def prediction_layouts(record: UnrollRecord) -> tuple[Layout, Layout]:
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

    def __init__(self, me: Me, parts: Parts, predictions: Call, experience: Sink) -> None:
        self.me, self.predictions, self.unrolls = me, predictions, experience
        self.env = parts.env.of(me.index).make(parts.envs_per_actor)
        self.report = StepReport(me, parts, self.env.env_id)
        record = parts.unroll_record
        self.recorder, self.length = record.recorder(self.env.num_seats), record.length
        self.now = self.env.reset(int(me.rng("environments").integers(2**31)))
        # Zeros stand for no memory: where an episode begins, nets begin with their own initial state.
        self.hidden = Layout(record.layout.fields["state"]).empty()

    async def step(self) -> None:
        """One unroll."""
        stats, recorder = self.me.stats, self.recorder
        slot = await self.unrolls.slot()
        await self.me.permit("env_steps", self.length * self.env.num_seats)
        with stats.phase("write"):
            recorder.begin(slot.data, self.now, self.hidden, 0)
        for t in range(self.length):
            reply = await self._ask()
            with stats.phase("env"):
                self.now = self.env.step(reply["action"])
            with stats.phase("write"):
                recorder.write(t, reply["action"], reply["extras"], self.now, int(reply["version"][0]))
            self.hidden = reply["state"]
            note_step(self.report, self.now, self.env.frame_skip)
        slot.send()

    async def _ask(self) -> Tree:
        draft = await self.predictions.slot()
        with self.me.stats.phase("write"):
            view = self.recorder.view(self.now)
            for name, target in draft.data["view"].items():
                map_tree(np.copyto, target, getattr(view, name))
            map_tree(np.copyto, draft.data["state"], self.hidden)
        return await draft.send().result()

    def close(self) -> None:
        self.report.close()
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
