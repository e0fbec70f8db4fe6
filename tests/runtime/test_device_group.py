"""Tensors shared across devices: the code that takes nccl on GPUs, with gloo on CPUs; members that really die."""

import time

import numpy as np
import pytest
import torch

from shoal.errors import GroupChanged
from shoal.runtime import Program
from shoal.runtime.device_group import DeviceGroup
from tests.runtime.harness import RUNTIMES, Killer, Watch, drive

SIZE = 2000
CPU = torch.device("cpu")


class Member:
    """Adds the group's mean to a state; everybody's gradient says who made it, so that the mean tells who was there."""

    def __init__(self, me, group, alike=False):
        self.me, self.group = me, DeviceGroup(group, CPU, me.note)
        if alike:  # as if all had one GPU
            import shoal.runtime.device_group as across

            across.identity = lambda device: bytes(16)
        self.state, self.synced = np.full(SIZE, 100.0 * me.index), False

    async def step(self):
        try:
            if not self.synced:
                await self.group.sync(self.state)
                self.synced = True
            gradient = torch.full((SIZE,), float(self.me.index))
            mean = torch.as_tensor(await self.group.mean(gradient))
            members = await self.group.sum(np.ones(1))
            updates = await self.group.sum(self.state[:1])
        except GroupChanged:
            self.synced = False
            return
        assert members[0] == self.group.size
        assert updates[0] == pytest.approx(self.group.size * self.state[0])  # all have the same state
        assert float(gradient[0]) == self.me.index  # what was given is left alone
        assert bool((mean == mean[0]).all())
        if self.group.size == 3:
            assert float(mean[0]) == 1.0
        self.state += mean.numpy()
        self.me.stats.add("learner_steps")
        self.me.stats.set("eval_episodes", self.group.size)


def program_of(members, **options):
    program = Program("t")
    group = program.group("gradients", 8 * SIZE)
    program.add("learner", Member, group=group.member, replicas=members, **options)
    return program


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("kind", RUNTIMES)
def test_the_mean_is_everybodys(kind, members, tmp_path):
    watch = drive(program_of(members), kind, tmp_path, Watch(lambda c: c.total("learner_steps") >= 10 * members, seconds=60))
    assert watch.reason == "until"
    moved = watch.wires["gradients"]["bytes_moved"]
    assert moved < 12 * SIZE * members**2  # states and small sums: no gradient went through the wire


def test_members_of_one_device_use_the_wire(tmp_path):
    watch = drive(program_of(3, alike=True), "local", tmp_path, Watch(lambda c: c.total("learner_steps") >= 60, seconds=60))
    assert watch.reason == "until"
    assert sum("nccl needs one for each" in text for text in watch.texts("note")) == 1
    assert watch.wires["gradients"]["bytes_moved"] > 4 * SIZE * 60


def test_members_go_on_when_one_is_killed(tmp_path):
    killer = Killer(("learner-0", "learner-2", "learner-1"), times=3, progress="learner_steps", every=30)

    def done(control):
        rows = control.snapshot()
        return killer.done(control) and all(rows[f"learner-{k}"]["eval_episodes"] == 3 for k in range(3))

    began = time.monotonic()
    watch = drive(program_of(3), "local", tmp_path, Watch(done, killer, seconds=90))
    assert watch.reason == "until", time.monotonic() - began
    assert killer.kills == 3
