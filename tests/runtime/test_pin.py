"""A pinned role has a core to itself and gives way there; the others, and those who share a place, may run anywhere."""

import os

from shoal.core import any_of
from shoal.runtime import Program
from tests.runtime.harness import Watch, drive


class Resident:
    def __init__(self, me):
        me.note(f"{me.name}-{me.index} {sorted(os.sched_getaffinity(0))} {os.nice(0)}")

    async def step(self):
        await any_of(timeout=0.05)


def test_pinned_roles_keep_to_their_cores(tmp_path):
    program = Program("pinned")
    program.add("actor", Resident, replicas=2)
    program.add("learner", Resident)
    program.add("guest", Resident, place="learner-0")
    program.pin("actor")
    program.pin("guest")
    watch = Watch(until=lambda control: len(watch.texts("note")) == 4)
    drive(program, "local", tmp_path, watch)
    cores, nice = sorted(os.sched_getaffinity(0)), os.nice(0)
    given_way = min(nice + 10, 19)
    assert sorted(watch.texts("note")) == [
        f"actor-0 {[cores[0]]} {given_way}", f"actor-1 {[cores[1 % len(cores)]]} {given_way}", f"guest-0 {cores} {nice}",
        f"learner-0 {cores} {nice}"]
