"""The group wire: the same bits everywhere, and a group that goes on when a member dies or joins."""

import time
import zlib

import numpy as np
import pytest

from shoal.core import any_of
from shoal.errors import GroupChanged
from shoal.runtime import Program
from shoal.slots import Field, Layout
from tests.runtime.harness import RUNTIMES, Killer, Watch, drive, kill, up

SIZE = 5000


class Learner:
    """Adds the group's mean to a state of its own; after every update all states must have the same bits."""

    def __init__(self, me, group, records, slow=0.0):
        self.me, self.group, self.records, self.slow = me, group, records, slow
        self.rng = me.rng("gradients")
        self.state = self.rng.normal(size=SIZE) * 1000  # everybody begins differently
        self.state[0] = 0  # updates made
        self.state[1] = 100 * me.index + me.incarnation  # whose state this is
        self.synced = False

    async def step(self):
        if not self.synced:
            await self.group.sync(self.state)
            self.synced = True
            self.me.stats.set("eval_version", self.state[1])
            await self.report()
        try:
            gradient = self.rng.normal(size=SIZE).astype(np.float32)
            gradient[:2] = 0
            mean = await self.group.mean(gradient)
            if self.slow:
                time.sleep(self.slow)
            count = await self.group.sum(np.ones(1))
            assert count[0] == self.group.size
        except GroupChanged:
            self.me.stats.add("group_discarded")
            self.synced = False
            return
        self.state += mean
        self.state[0] += 1
        self.me.stats.add("learner_steps")
        self.me.stats.set("eval_episodes", self.group.size)
        await self.report()

    async def report(self):
        slot = await self.records.slot()
        slot.data["epoch"][0], slot.data["update"][0] = self.group._epoch, self.state[0]
        slot.data["hash"][0] = zlib.crc32(self.state.tobytes())
        slot.send()


class Judge:
    """Every state after update n is the same at every member that reports it (until the group changes: then the senior's)."""

    def __init__(self, me, records):
        self.me, self.records, self.hashes = me, records, {}

    async def step(self):
        batch = await self.records.take(1)
        update, digest = (int(batch["epoch"][0]), int(batch["update"][0])), int(batch["hash"][0])
        assert self.hashes.setdefault(update, digest) == digest, f"two states after update {update}"
        self.me.stats.add("samples_consumed")


def program_of(members, replicas=None, **options):
    program = Program("t")
    group = program.group("gradients", 8 * SIZE)
    record = Layout({name: Field((1,), "i8") for name in ("epoch", "update", "hash")})
    records = program.stream("records", record, depth=4)
    program.add("learner", Learner, group=group.member, records=records.sink, replicas=replicas or members, **options)
    program.add("judge", Judge, records=records.source)
    return program




@pytest.mark.parametrize("kind", RUNTIMES)
@pytest.mark.parametrize("members", [1, 2, 4])
def test_all_reduce_has_the_same_bits(kind, members, tmp_path):
    """An all-reduce has the same bits at every member."""
    watch = drive(program_of(members), kind, tmp_path, Watch(lambda c: c.total("learner_steps") >= 100 * members))
    assert watch.reason == "until"
    assert watch.wires["gradients"]["members"] == members and watch.wires["gradients"]["discarded"] == 0
    assert watch.final["judge-0"]["samples_consumed"] >= 90
    assert all(watch.final[f"learner-{k}"]["eval_version"] == 0 for k in range(members))  # the first one's state


@pytest.mark.parametrize("victim", ["learner-0", "learner-3"])
def test_a_group_survives_a_kill(victim, tmp_path):
    """Operations fail fast, the group re-forms around the senior's state, and the restarted one gets that state."""
    times = {}

    def act(control):
        steps = control.total("learner_steps")
        if "killed" not in times:
            if steps >= 40 and up(control):
                kill(control, victim)
                times["killed"], times["steps"] = time.monotonic(), steps
        elif "three" not in times and control.wires()["gradients"]["members"] == 3:
            times["three"] = time.monotonic()
        elif "three" in times and "four" not in times and control.wires()["gradients"]["members"] == 4:
            times["four"], times["steps"] = time.monotonic(), steps

    watch = drive(program_of(4, slow=0.002), "local", tmp_path,
                  Watch(lambda c: "four" in times and c.total("learner_steps") > times["steps"] + 100, act))
    assert watch.reason == "until"
    assert times["three"] - times["killed"] < 2.0  # pending operations failed
    assert watch.wires["gradients"]["discarded"] >= 3  # the interrupted update, at each survivor
    assert all(watch.final[f"learner-{k}"]["eval_episodes"] == 4 for k in range(4))
    senior = 100 if victim == "learner-0" else 0
    assert watch.final[victim]["eval_version"] in (0, senior)  # a survivor's state, not the newcomer's own
    assert watch.final["judge-0"]["restarts"] == 0  # never two states after one update


def test_a_group_of_three_under_many_kills(tmp_path):
    killer = Killer(("learner-0", "learner-1", "learner-2"), times=5, progress="learner_steps", every=30)

    def done(control):
        rows = control.snapshot()
        return killer.done(control) and all(rows[f"learner-{k}"]["eval_episodes"] == 3 for k in range(3))

    watch = drive(program_of(3, slow=0.001), "local", tmp_path, Watch(done, killer))
    assert watch.reason == "until"
    assert watch.final["judge-0"]["restarts"] == 0


@pytest.mark.parametrize("kind", RUNTIMES)
def test_members_join_and_leave_by_scaling(kind, tmp_path):
    wanted, at, sizes = [3, 1, 2], [20], set()

    def act(control):
        sizes.add(control.wires()["gradients"]["members"])
        if wanted and control.total("learner_steps") >= at[0] and control.total("alive") >= len(control.running):
            control.scale("learner", wanted.pop(0))
            at[0] = control.total("learner_steps") + 60

    watch = drive(program_of(3, replicas=(1, 2, 3)), kind, tmp_path,
                  Watch(lambda c: not wanted and c.total("learner_steps") >= at[0], act))
    assert watch.reason == "until"
    assert {1, 2, 3} <= sizes
    assert watch.final["judge-0"]["restarts"] == 0


class Hogwild:
    """Adds one to its own element, and to a common one: the first promise is kept, the second is not given."""

    def __init__(self, me, shared):
        self.me, self.shared = me, shared

    async def step(self):
        data = self.shared.data
        data["own"][self.me.index] += 1
        data["common"][0] += 1
        assert data["own"][self.me.index] == self.me.stats.get("steps") + 1
        await any_of(timeout=0)


@pytest.mark.parametrize("kind", RUNTIMES)
def test_shared_memory_for_all(kind, tmp_path):
    program = Program("t")
    shared = program.shared("shared", Layout({"own": Field((3,), "i8"), "common": Field((1,), "i8")}))
    program.add("worker", Hogwild, shared=shared.view, replicas=3)
    seen = {}

    def act(control):
        view = shared.attach("view", 0, 0).data
        seen.update(own=view["own"].tolist(), common=int(view["common"][0]))

    watch = drive(program, kind, tmp_path, Watch(lambda c: min(seen["own"]) > 200, act))
    assert watch.reason == "until"
    assert max(seen["own"]) <= seen["common"] <= sum(seen["own"]) + 3
