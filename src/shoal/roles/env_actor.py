"""An actor that holds environments only: it sends steps to an inference server and gets actions back (SEED RL)."""

from __future__ import annotations

import numpy as np

from shoal.acting import UnrollRecord
from shoal.core import Call, Me, Pending, Tree
from shoal.envs import Step
from shoal.roles.parts import Parts
from shoal.roles.player import note_step
from shoal.roles.step_report import StepReport
from shoal.slots import Field, Layout, map_tree

__all__ = ["EnvActor", "read_step", "step_layouts", "write_step"]


def step_layouts(record: UnrollRecord) -> tuple[Layout, Layout]:
    """What one step of a group looks like on the wire, and the actions that answer it."""
    unroll, rows = record.layout.fields, record.seats
    per_step = {name: map_tree(lambda field: Field(field.shape[1:], field.dtype), unroll[name])
                for name in ("observation", "first", "reward", "discount", "last", "truncated", "valid")}
    final_mask: dict[str, Field] = {}
    if record.mask_size:
        per_step["action_mask"] = Field(unroll["action_mask"].shape[1:], "bool")
        final_mask["final_action_mask"] = Field((rows, record.mask_size), "bool")
    executed = map_tree(lambda field: Field(field.shape[1:], field.dtype), unroll["action"])
    final = map_tree(lambda field: Field((rows, *field.shape[2:]), field.dtype), unroll["observation"])
    request = {"group": Field((1,), "i8"), "run_id": Field((1,), "i8"), "step": per_step, "executed": executed,
               "has_executed": Field((1,), "bool"), "final_count": Field((1,), "i8"), "final_rows": Field((rows,), "i8"),
               "final_observation": final, **final_mask}
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
        self.pending: list[Pending | None] = [None] * groups
        self.reports = [StepReport(me, parts, env.env_id, group * parts.envs_per_actor) for group, env in enumerate(self.envs)]

    async def step(self) -> None:
        """One round: every group in turn takes its actions and steps, while the other groups' requests are under way."""
        stats = self.me.stats
        for group, env in enumerate(self.envs):
            pending = self.pending[group]
            if pending is not None:
                reply = await pending.result()
                await self.me.permit("env_steps", env.num_seats)
                with stats.phase("env"):
                    now = self.now[group] = env.step(reply["action"])
                note_step(self.reports[group], now, env.frame_skip)
            draft = await self.steps.slot()
            with stats.phase("write"):
                write_step(draft.data, group, self.run_id, self.now[group])
            self.pending[group] = draft.send()

    def close(self) -> None:
        for env, report in zip(self.envs, self.reports, strict=True):
            env.close()
            report.close()


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
        if now.final_action_mask is not None:
            data["final_action_mask"][:count] = now.final_action_mask


def read_step(data: Tree) -> Step:
    """The Step in a request's slot, as views."""
    count = int(data["final_count"][0])
    final = map_tree(lambda rows: rows[:count], data["final_observation"]) if count else None
    masks = data["final_action_mask"][:count] if count and "final_action_mask" in data else None
    return Step(**data["step"], final_rows=data["final_rows"][:count], final_observation=final, final_action_mask=masks,
                executed_action=data["executed"] if data["has_executed"][0] else None)


def _copy(target: Tree, source: Tree) -> None:
    map_tree(np.copyto, target, source)
