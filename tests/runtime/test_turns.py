"""Inline: a role that cuts its work into steps keeps its turn, the session looks in between, and nobody starves."""

import pytest

from shoal.runtime import Program
from shoal.runtime.program import SideWork
from tests.runtime.harness import Files, Watch, drive

ORDER: list[str] = []


class Plain:
    """Works in steps."""

    def __init__(self, me):
        self.me, self.saved = me, 0

    async def step(self):
        self.me.stats.add("env_steps", 5)
        ORDER.append("work")

    def state(self):
        self.saved += 1
        ORDER.append("saved")
        return {}

    def load(self, state):
        """Nothing is kept."""


class Long:
    """One piece of work of 40 steps, or without an end."""

    def __init__(self, me, steps):
        self.me, self.left = me, steps

    @property
    def keeps_turn(self):
        return self.left > 0

    async def step(self):
        self.left -= 1
        self.me.stats.add("eval_env_steps")
        ORDER.append("side")


def program(steps, side=None):
    ORDER.clear()
    drawn = Program("t", store=Files(), work_counters=("env_steps",))
    drawn.side_work = side
    drawn.add("plain", Plain)
    drawn.add("long", Long, steps=steps)
    return drawn


def test_it_keeps_its_turn(tmp_path):
    """It goes on before the others get their turn."""
    drive(program(40), "inline", tmp_path, Watch(lambda control: control.total("env_steps") >= 10))
    assert ORDER[:42] == ["work", *["side"] * 40, "work"]


def test_stopped_between_steps(tmp_path):
    watch = drive(program(10**9), "inline", tmp_path, Watch(lambda control: control.total("eval_env_steps") >= 7))
    assert watch.reason == "until" and ORDER[:8] == ["work", *["side"] * 7] and len(ORDER) == 8


def test_others_are_checkpointed_meanwhile(tmp_path):
    (tmp_path / "save").mkdir()

    def act(control):
        if control.total("eval_env_steps") == 20:
            control.checkpoint(tmp_path / "save")

    watch = drive(program(40), "inline", tmp_path, Watch(lambda control: control.total("env_steps") >= 10, act))
    assert watch.saves == [(tmp_path / "save", True)]
    assert ORDER[:23] == ["work", *["side"] * 20, "saved", "side"]


@pytest.mark.parametrize("free", [0, 30])
def test_work_without_an_end_has_a_share(free, tmp_path):
    drive(program(10**9, SideWork("eval_env_steps", free=free, share=2)), "inline", tmp_path,
          Watch(lambda control: control.total("env_steps") >= 100))
    assert ORDER.count("side") <= free + 2 * 100 + 20 and ORDER.count("side") >= free + 2 * 95
    assert ORDER.index("side") == 1 and ORDER[1 : free + 12].count("work") == 0


@pytest.mark.parametrize("kind", ["inline", "local"])
def test_no_role_begins_before_it_is_let(kind, tmp_path):
    looks = []

    def act(control):
        if control.complete() and len(looks) < 5:
            looks.append(control.total("steps"))
            if len(looks) == 5:
                control.start_steps()

    drawn = program(3)
    drawn.starts_paused = True
    watch = drive(drawn, kind, tmp_path, Watch(lambda control: control.total("env_steps") >= 10, act))
    assert watch.reason == "until" and looks == [0.0] * 5


def test_who_was_paused_stays_so(tmp_path):
    looks = []

    def act(control):
        if not looks:
            for role in control.program.nodes:
                control.pause(role)
            control.start_steps()
        looks.append(control.total("steps"))
        if len(looks) == 20:
            for role in control.program.nodes:
                control.resume(role)

    drawn = program(3)
    drawn.starts_paused = True
    watch = drive(drawn, "inline", tmp_path, Watch(lambda control: control.total("env_steps") >= 10, act))
    assert watch.reason == "until" and looks[:20] == [0.0] * 20
