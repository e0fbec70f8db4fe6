"""A large state is written while its role goes on, and the reply comes when it is on disk."""

from __future__ import annotations

import pytest

from shoal.core import Pieces, any_of
from shoal.runtime import Program
from tests.runtime.harness import RUNTIMES, Files, Watch, drive, eventually


class Keeper:
    """Has much to save, and counts how often it was told that it is written."""

    def __init__(self, me):
        self.me = me

    async def step(self):
        await any_of(timeout=0.001)

    def state(self):
        return {"large": Pieces([b"ab", b"c"], lambda: self.me.stats.add("env_steps"))}

    def load(self, state):
        self.me.note(bytes(state["large"]).decode())


class Slow(Files):
    """Writes nothing before `gate` is there."""

    def __init__(self, gate):
        self.gate = gate

    def save(self, path, state):
        assert eventually(self.gate.exists, 120)
        super().save(path, state)


class Full:
    """A disk without room."""

    def save(self, path, state):
        raise OSError("no space left on device")


def test_role_goes_on_while_saving(tmp_path):
    """The role goes on while its state is written."""
    gate, folder, seen = tmp_path / "gate", tmp_path / "save", []
    program = Program("saving", store=Slow(gate))
    program.add("keeper", Keeper)

    def act(control):
        steps = control.total("steps")
        if not seen and steps:
            folder.mkdir()
            control.checkpoint(folder)
            seen.append(steps)
        elif seen and steps >= seen[0] + 50 and not gate.exists():
            assert not watch.saves and not control.total("env_steps")
            gate.touch()

    watch = Watch(lambda control: watch.saves, act)
    drive(program, "local", tmp_path, watch)
    assert watch.saves == [(folder, True)] and watch.final["keeper-0"]["env_steps"] == 1
    again = Watch(lambda control: again.texts("note"))
    again.folder = folder
    drive(program, "local", tmp_path, again)
    assert again.texts("note") == ["abc"]


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_full_disk(runtime, tmp_path):
    """A full disk is reported and the pieces are let go."""
    program, asked = Program("saving", store=Full()), []
    program.add("keeper", Keeper)

    def act(control):
        if not asked and control.total("steps"):
            asked.append(True)
            control.checkpoint(tmp_path)

    watch = Watch(lambda control: watch.saves, act)
    drive(program, runtime, tmp_path, watch)
    assert watch.saves == [(tmp_path, False)] and watch.final["keeper-0"]["env_steps"] == 1
    assert "no space left" in watch.texts("checkpoint failed")[0]


def test_stopped_while_saving(tmp_path):
    """A role that is stopped while it saves finishes what it writes."""
    gate, folder = tmp_path / "gate", tmp_path / "save"
    program = Program("saving", store=Slow(gate))
    program.add("keeper", Keeper)

    def act(control):
        if not folder.exists() and control.total("steps"):
            folder.mkdir()
            control.checkpoint(folder)
            gate.touch()

    watch = Watch(lambda control: folder.exists(), act)
    drive(program, "local", tmp_path, watch)
    assert watch.reason == "until"
