"""Fields that go straight from slots elsewhere: a slot is not written again before its copy is done, and nobody waits in vain."""

import numpy as np
import pytest

from shoal.runtime import Program, run
from shoal.slots import Field, Layout
from tests.runtime.harness import Watch

LAYOUT = Layout({"frames": Field((2, 3), "i8", 1), "number": Field((1,), "i8")})


class Copier:
    """Copies late: only when it is waited for, as a slow bus would."""

    fields = ("frames",)

    def __init__(self):
        self.under_way, self.stage = [], None

    def begin(self, count):
        self.stage = np.zeros((2, 3 * count), np.int64)

    def copy(self, position, slot):
        self.under_way.append((self.stage, position, slot["frames"]))

    def finish(self):
        return {"frames": self.stage}

    def wait(self):
        for stage, position, frames in self.under_way:
            stage[:, 3 * position : 3 * position + 3] = frames
        self.under_way.clear()


class Producer:
    def __init__(self, me, unrolls):
        self.unrolls, self.number = unrolls, 0

    async def step(self):
        slot = await self.unrolls.slot()
        slot.data["frames"][...] = slot.data["number"][0] = self.number
        self.number += 1
        slot.send()


class Consumer:
    def __init__(self, me, unrolls, count):
        self.me, self.unrolls, self.count, self.before, self.taken = me, unrolls, count, None, 0
        unrolls.direct = Copier()

    async def step(self):
        batch = await self.unrolls.take(self.count)
        if self.before is not None:  # its copies were waited for before this batch was begun
            frames, numbers = self.before
            np.testing.assert_array_equal(frames, np.repeat(numbers, 3)[None].repeat(2, 0))
        self.before = batch["frames"], batch["number"].copy()
        np.testing.assert_array_equal(batch["number"], np.arange(self.taken, self.taken + self.count))
        self.taken += self.count
        if self.taken >= 40 * self.count:
            self.me.finish("counted")


@pytest.mark.parametrize("kind", ["inline", "local"])
@pytest.mark.parametrize("count", [2, 5], ids=["a batch", "a batch of more slots than there are"])
def test_copies_whole_slots_come_back(kind, count, tmp_path):
    program = Program("direct")
    unrolls = program.stream("unrolls", LAYOUT, depth=3)
    program.add("producer", Producer, unrolls=unrolls.sink)
    program.add("consumer", Consumer, unrolls=unrolls.source, count=count)
    assert run(program, Watch(), kind, tmp_path) == "counted"
