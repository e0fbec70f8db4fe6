"""The Ray runtime: the same wires, roles and faults as on one machine, between the nodes of a real cluster."""

from dataclasses import replace

import numpy as np
import pytest

from shoal.core import any_of
from shoal.errors import ConfigError, RoleFailed
from shoal.experiment.prepare import OPTIONS
from shoal.roles.replay_config import ReplayConfig
from shoal.runtime import Faults, Program, run
from shoal.runtime.ray import cluster
from shoal.slots import Field, Layout
from tests.architectures import replay_table
from tests.runtime import test_broadcast, test_call, test_device_group, test_group, test_stream
from tests.runtime.harness import Files, Killer, Watch, drive, kill, up

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.filterwarnings("ignore")]

PATIENCE = 100.0


def streamed(full="block", producers=2, layout=test_stream.LAYOUT, **options):
    program = Program("t")
    stream = program.stream("items", layout, depth=2, full=full)
    program.add("producer", test_stream.Producer, out=stream.sink, replicas=producers)
    program.add("consumer", test_stream.Consumer, source=stream.source, **options)
    return program


def balanced(row):
    """But for what moved in each of two lanes while it was counted."""
    return abs(row["written"] - row["consumed"] - row["dropped"] - row["occupied"]) <= 2


def nodes_of(control):
    return {child.node for child in control.children.values() if child.node}


def test_stream_between_nodes(tmp_path, monkeypatch):
    """All slots arrive whole and in order; nodes, object stores and traffic are reported."""
    monkeypatch.setattr(cluster, "LOOK_SECONDS", 0.2)
    used, seen, moved = set(), {}, []

    def act(control):
        used.update(nodes_of(control))
        seen.update(control.surroundings())
        if seen["carried_mb_per_second"] > 0 and seen["calls_per_second"] > 0:
            moved.append(True)

    watch = drive(streamed(count=2), "ray", tmp_path,
                  Watch(lambda c: c.total("samples_consumed") >= 300 and moved and up(c, "producer-0", "producer-1"), act,
                        seconds=PATIENCE))
    assert watch.reason == "until" and watch.unbalanced == 0
    assert len(used) == 2  # producers were spread
    assert balanced(watch.wires["items"]) and watch.wires["items"]["dropped"] == 0
    assert all(watch.final[name]["restarts"] == 0 for name in watch.final)
    assert seen["nodes"] == 2 and seen["object_store_mb"] >= 0


def test_dropping_stream_counts(tmp_path):
    watch = drive(streamed("drop_oldest", pause=0.05), "ray", tmp_path,
                  Watch(lambda c: c.total("samples_consumed") >= 30 and c.wires()["items"]["dropped"] > 30, seconds=PATIENCE))
    assert watch.reason == "until" and watch.unbalanced == 0
    assert balanced(watch.wires["items"])


def test_a_stream_survives_kills(tmp_path):
    """The consumer's role checks the order of every producer's numbers: a successor begins anew, so both are killed."""
    killer = Killer(("consumer-0", "producer-0"), times=2, progress="samples_consumed", every=40)
    watch = drive(streamed(pause=0.002), "ray", tmp_path, Watch(killer.done, killer, seconds=PATIENCE))
    assert watch.reason == "until" and watch.unbalanced == 0
    assert watch.final["consumer-0"]["restarts"] == watch.final["producer-0"]["restarts"] == 1
    assert [text.partition(";")[0] for text in watch.texts("restart")] == ["its process was killed"] * 2


def test_requests_are_answered_after_kills(tmp_path):
    killer = Killer(("server-0", "client-0"), times=2, progress="samples_consumed", every=40)
    watch = drive(test_call.program_of(clients=2, batch=2), "ray", tmp_path, Watch(killer.done, killer, seconds=PATIENCE))
    assert watch.reason == "until"
    assert watch.final["server-0"]["restarts"] == watch.final["client-0"]["restarts"] == 1
    assert watch.final["client-1"]["restarts"] == 0


def test_a_killed_publisher_tears_no_value(tmp_path):
    program = Program("t")
    weights = program.broadcast("weights", test_broadcast.BIG)
    program.add("publisher", test_broadcast.Publisher, weights=weights.publisher)
    program.add("reader", test_broadcast.Reader, weights=weights.reader, replicas=2)
    killer = Killer(("publisher-0",), times=1, progress="learner_steps", every=30)

    def done(control):
        return killer.done(control) and control.wires()["weights"]["bytes_moved"] > 40 * test_broadcast.BIG.nbytes

    watch = drive(program, "ray", tmp_path, Watch(done, killer, seconds=PATIENCE))
    assert watch.reason == "until"
    assert watch.final["publisher-0"]["restarts"] == 1
    assert watch.final["reader-0"]["restarts"] == watch.final["reader-1"]["restarts"] == 0  # nobody saw a torn or an older one


def test_a_group_survives_a_kill_and_scaling(tmp_path):
    """The group has the same bits everywhere, re-forms around the senior member when the first one is killed, and lets members
    join and leave: a process group in which a member still waits cannot be interrupted, so the next one forms beside it."""
    killer = Killer(("learner-0",), times=1, progress="learner_steps", every=30)
    wanted, at, sizes, versions = [3, 1, 2], [0], set(), []

    def act(control):
        killer(control)
        rows = control.snapshot()
        if not versions and killer.done(control) and all(rows[f"learner-{k}"]["eval_episodes"] == 2 for k in range(2)):
            versions.append(rows["learner-0"]["eval_version"])
            assert control.wires()["gradients"]["members"] == 2 and control.wires()["gradients"]["epoch"] >= 4
        if not versions:
            return
        sizes.add(control.wires()["gradients"]["members"])
        if wanted and control.total("learner_steps") >= at[0] and control.total("alive") >= len(control.running):
            control.scale("learner", wanted.pop(0))
            at[0] = control.total("learner_steps") + 60

    watch = drive(test_group.program_of(3, replicas=(1, 2, 3), slow=0.001), "ray", tmp_path,
                  Watch(lambda c: not wanted and c.total("learner_steps") >= at[0], act, seconds=PATIENCE))
    assert watch.reason == "until" and {1, 2, 3} <= sizes
    assert watch.final["judge-0"]["restarts"] == 0  # never two states after one update
    assert versions[0] in (0, 100)  # the survivor's state, not the newcomer's own
    assert [watch.final[f"learner-{k}"]["restarts"] for k in range(3)] == [1, 0, 0]


def test_tensors_are_averaged_across_nodes(tmp_path):
    """What takes nccl where each learner has a GPU, with gloo."""
    killer = Killer(("learner-1",), times=1, progress="learner_steps", every=30)

    def done(control):
        return killer.done(control) and all(control.snapshot()[f"learner-{k}"]["eval_episodes"] == 2 for k in range(2))

    watch = drive(test_device_group.program_of(2), "ray", tmp_path, Watch(done, killer, seconds=PATIENCE))
    assert watch.reason == "until" and watch.final["learner-1"]["restarts"] == 1
    updates = watch.final["learner-0"]["learner_steps"]
    assert watch.wires["gradients"]["bytes_moved"] < updates * 4 * test_device_group.SIZE  # states and small sums alone


def test_replay_shards_spread(tmp_path):
    """Its roles check every item, key and priority; the shard that is killed is filled again from what the driver holds."""
    config = ReplayConfig(capacity=2000, min_size=60, batch_size=16, insert_batch=10, samples_per_insert=4.0, shards=2,
                          checkpoint=True)
    killer, homes = Killer(("replay-1",), times=1, progress="learner_steps", every=20), {}

    def act(control):
        if len(homes) < 2 and up(control, "replay-0", "replay-1"):
            homes.update({name: control.children[name].node for name in ("replay-0", "replay-1")})
            control.checkpoint(tmp_path / "checkpoint")
        if watch.saves:
            killer(control)

    watch = Watch(killer.done, act, seconds=PATIENCE)
    drive(replay_table.program_of(config, producers=1), "ray", tmp_path, watch)
    assert watch.reason == "until" and watch.saves[0][1] and len(set(homes.values())) == 2
    assert {name: page["restarts"] for name, page in watch.final.items() if page["restarts"]} == {"replay-1": 1}
    assert [text.partition(";")[0] for text in watch.texts("restart")] == ["its process was killed"]
    inserts, samples = (sum(page[name] for page in watch.final.values()) for name in ("replay_inserts", "replay_samples"))
    slack = 2 * (config.band(2) + 4.0 * config.min_size) + 4.0 * config.insert_batch * config.shards  # of either life
    assert abs(samples - 4.0 * (inserts - config.min_size)) <= slack


def test_a_ratio_that_changes(tmp_path):
    program = replay_table.program_of(replace(replay_table.SMALL))
    change = replay_table.RatioChange(program)
    assert drive(program, "ray", tmp_path, Watch(change.done, change, seconds=PATIENCE)).reason == "until"
    assert change.ratios[0] > 2 and max(change.ratios[1:]) < 1.7  # 4 and 1, read while both counts move


class Counter:
    """Counts, has a state, and says what it began with."""

    def __init__(self, me, start=0):
        self.me, self.count = me, start
        print(f"begins with {start}")

    async def step(self):
        self.count += 1
        self.me.stats.set("eval_return", self.count)
        await any_of(timeout=0.02)

    def state(self):
        return {"count": np.array([self.count])}

    def load(self, state):
        self.count = int(state["count"][0])
        print(f"loads {self.count}")

    def set(self, count):
        self.count = count


def test_state_set_copied_saved(tmp_path):
    program = Program("t", store=Files())
    program.add("counter", Counter, replicas=(1, 2, 2))
    plan = []

    def act(control):
        if not up(control) or (plan and not plan[-1][1]):
            return
        done = [None, False]
        plan.append(done)

        def finished(result, error):
            assert error is None, error
            done[1] = True

        if len(plan) == 1:
            control.set("counter-0", finished, count=10_000)
        elif len(plan) == 2:
            control.copy_state("counter-0", "counter-1", finished)
        elif len(plan) == 3:
            control.checkpoint(tmp_path / "checkpoint")
            done[1] = True
        elif len(plan) == 4 and watch.folder is not None:
            kill(control, "counter-1")
            done[1] = True
        elif len(plan) == 4:
            plan.pop()

    watch = Watch(lambda c: c.snapshot()["counter-1"]["restarts"] == 1 and up(c) and len(plan) >= 4
                  and "loads" in (tmp_path / "logs" / "counter-1.log").read_text().rpartition("begins")[2], act, seconds=PATIENCE)
    drive(program, "ray", tmp_path, watch)
    assert watch.reason == "until" and watch.saves[0][1]
    log = (tmp_path / "logs" / "counter-1.log").read_text()
    assert log.count("begins with 0") == 2
    assert all(int(line.split()[1]) >= 10_000 for line in log.splitlines() if line.startswith("loads"))


class Failing:
    """Raises."""

    def __init__(self, me):
        print("here I am")

    async def step(self):
        raise ArithmeticError("seven is not prime")


def test_a_failing_role_ends_the_run(tmp_path):
    program = Program("t")
    program.add("failing", Failing)
    with pytest.raises(RoleFailed, match="seven is not prime") as failure:
        drive(program, "ray", tmp_path, Watch(seconds=PATIENCE), Faults(exceptions_per_minute=1))
    assert "in step" in str(failure.value)
    log = (tmp_path / "logs" / "failing-0.log").read_text()
    assert "here I am" in log and "ArithmeticError: seven is not prime" in log


def test_missing_resources_are_said_at_once(tmp_path):
    program = streamed(producers=64)
    program.options = OPTIONS
    with pytest.raises(ConfigError, match=r"asked for 65 CPUs and 0 GPUs, the cluster has 16 CPUs .* use --actors 15"):
        run(program, Watch(), "ray", tmp_path)
    program = streamed()
    program.on_gpu, program.options = True, OPTIONS
    with pytest.raises(ConfigError, match=r"asked for 3 CPUs and 1 GPUs, .* use --device cpu"):
        run(program, Watch(), "ray", tmp_path)


def test_shared_memory_is_refused_on_ray(tmp_path):
    program = Program("t")
    layout = Layout({"own": Field((3,), "i8"), "common": Field((1,), "i8")})
    shared = program.shared("model", layout, instead="--architecture.mode master")
    program.add("worker", test_group.Hogwild, shared=shared.view, replicas=3)
    with pytest.raises(ConfigError, match=r"wire model.* --architecture.mode master"):
        run(program, Watch(), "ray", tmp_path)
