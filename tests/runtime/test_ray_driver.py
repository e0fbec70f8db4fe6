"""The driver of a run on Ray, with a cluster that does what the test says: deaths, waiting for room, the end of the cluster."""

import time

import numpy as np
import pytest

from shoal.core import any_of
from shoal.errors import RoleFailed
from shoal.runtime import Faults, Program, RayConfig
from shoal.slots import Field, Layout
from tests.runtime.harness import Watch

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]

LAYOUT = Layout({"x": Field((1,), "i8")})


class Waits:
    """Never made: the fake cluster has no processes."""

    async def step(self):
        await any_of(timeout=1.0)


class Call:
    def __init__(self):
        self.result = None

    @property
    def done(self):
        return self.result is not None


class Method:
    def __init__(self, calls):
        self.calls = calls

    def remote(self, *arguments):
        self.calls.append((call := Call(), arguments))
        return call


class Handle:
    def __init__(self):
        self.lives, self.lines, self.told, self.killed = [], [], [], False
        self.live, self.listen, self.tell = Method(self.lives), Method(self.lines), Method(self.told)

    def report(self, **values):
        """What the place says now."""
        nothing = {"said": [], "files": {}, "log": b"", "logged": 0, "node": "n1", "pid": 7, "address": "here", "pages": {},
                   "wires": {}, "traffic": (0, 0)}
        self.lines[-1][0].result = {**nothing, **values}

    def die(self, error):
        for call, _ in (self.lives[-1], self.lines[-1]):
            call.result = error


class FakeRay:
    def put(self, value):
        return value

    def wait(self, calls, num_returns=1, timeout=None):
        return [call for call in calls if call.done], []

    def get(self, call, timeout=None):
        if isinstance(call.result, Exception):
            raise call.result
        return call.result

    def kill(self, handle, no_restart=True):
        handle.killed = True


class FakeCluster:
    """The nodes that Ray knows, those that really live, and whether anything does."""

    def __init__(self, program, config, names):
        self.handles, self.known, self.alive, self.there, self.gone = {}, {"n1", "n2"}, {"n1", "n2"}, True, False
        self.address, self.head, self.why_gone = "here", "head:6379", "nothing listens at that address"

    def start(self, place, incarnation):
        self.handles.setdefault(place, []).append(Handle())
        return self.handles[place][-1]

    def used(self, node):
        pass

    def listed(self, node):
        return node in self.known

    def reachable(self, node):
        return node in self.alive

    def answers(self):
        return self.there

    def read_tail(self, node, life, offset):
        return b""

    def waits_for(self):
        return "the cluster has 0 CPUs and 0 GPUs free on 1 node"

    def surroundings(self, calls, moved):
        return {"nodes": 1.0}

    def close(self):
        pass


@pytest.fixture
def make(tmp_path, monkeypatch):
    from shoal.runtime.ray import ray_supervisor as supervisor

    monkeypatch.setattr(supervisor, "ray", FakeRay())
    monkeypatch.setattr(supervisor, "RayCluster", FakeCluster)
    monkeypatch.setattr(supervisor, "TICK_SECONDS", 0.0)
    monkeypatch.setattr(supervisor, "AGAIN_SECONDS", 0.0)

    def made(session=None, roles=("learner", "evaluator"), **faults):
        program = Program("t")
        weights = program.broadcast("weights", LAYOUT)
        for name in roles:
            program.add(name, Waits, weights=weights.publisher if name == "learner" else weights.reader)
        control = supervisor.RaySupervisor(program, session or Watch(), tmp_path / "logs", Faults(**faults), RayConfig())
        for node, index in program.instances():
            control.enrol(node, index)
            control._spawn(node, index)
        return control

    return made


def come(control, place, **values):
    """The newest process of a place says that it lives, and what else."""
    said = [{"kind": "ready", "from": place, "stateful": True, "shares": False}]
    control.cluster.handles[place][-1].report(**{"said": said, **values})
    control.turn()


def events(control, kind):
    return [(event["role"], event["text"]) for event in control.events() if event["kind"] == kind]


def dead(text="the worker process has died"):
    from ray.exceptions import RayActorError

    return RayActorError(error_msg=text)


def test_waiting_for_cpus_is_not_a_failure(make):
    control = make(start_seconds=5.0)
    come(control, "learner-0")
    waiting = control.children["evaluator-0"]
    assert not control.complete()
    waiting.started_at -= 1000
    for _ in range(3):
        control.turn()
    assert not waiting.hung and not control.cluster.handles["evaluator-0"][0].killed
    assert len(control.cluster.handles["evaluator-0"]) == 1
    found = control.events()
    assert [(e["kind"], e["role"]) for e in found] == [("waiting", "evaluator-0")] and "0 CPUs" in found[0]["text"]
    assert control.unheard() == ["evaluator-0"] and control.complete()  # a checkpoint does not wait for it
    come(control, "evaluator-0", said=[])  # it has room now, and begins to start
    assert events(control, "placed")[0][1].startswith("started after waiting 10")
    control.turn()
    assert not waiting.hung
    waiting.started_at -= 6
    control.turn()
    assert waiting.hung == "not started within 5 s" and control.cluster.handles["evaluator-0"][0].killed


def test_a_checkpoint_does_not_wait_for_cpus(make, tmp_path):
    watch = Watch()
    control = make(watch)
    for place in ("learner-0", "evaluator-0"):
        come(control, place)
    control.cluster.handles["evaluator-0"][-1].die(dead())
    control.turn()  # it is started again, and there is no room
    assert len(control.cluster.handles["evaluator-0"]) == 2
    control.checkpoint(tmp_path / "saved")
    control.turn()
    told = [message for _, (messages, *_) in control.cluster.handles["learner-0"][-1].told for message in messages]
    (order,) = [message for message in told if message["op"] == "checkpoint"]
    file = str(tmp_path / "saved" / "learner-0.safetensors")
    said = [{"kind": "done", "op": "checkpoint", "from": "learner-0", "id": order["id"], "result": "learner-0.safetensors",
             "error": None}]
    come(control, "learner-0", said=said, files={file: np.zeros(3, np.uint8)})
    assert watch.saves == [(tmp_path / "saved", True)]
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["learner-0.safetensors"]


def test_the_death_of_a_node_is_one_restart(make):
    control = make()
    for place in ("learner-0", "evaluator-0"):
        come(control, place)
    control.cluster.alive = {"n2"}
    for place in ("learner-0", "evaluator-0"):
        control.cluster.handles[place][-1].die(dead())
    for _ in range(3):
        control.turn()
    assert [len(handles) for handles in control.cluster.handles.values()] == [1, 1]  # Ray would put them onto the dead node
    control.cluster.known = {"n2"}
    control.turn()
    assert [len(handles) for handles in control.cluster.handles.values()] == [2, 2]
    for place in ("learner-0", "evaluator-0"):
        come(control, place, node="n2")
    assert events(control, "restart") == [(place, "its node died; restarted (1 so far)") for place in ("learner-0", "evaluator-0")]
    assert control.snapshot()["learner-0"]["restarts"] == 1


def test_unnoticed_node_death(make, monkeypatch):
    """An unnoticed node death is not waited for."""
    from shoal.runtime.ray import ray_supervisor as supervisor

    control = make()
    come(control, "learner-0")
    control.cluster.alive = {"n2"}
    control.cluster.handles["learner-0"][-1].die(dead())
    control.turn()
    control.turn()
    assert len(control.cluster.handles["learner-0"]) == 1
    monkeypatch.setattr(supervisor, "MOVE_SECONDS", 0.0)
    time.sleep(0.001)
    control.turn()
    assert len(control.cluster.handles["learner-0"]) == 2


def test_node_that_dies_early_is_not_counted(make):
    """However often: a run must not end of it."""
    control = make()
    come(control, "learner-0")
    for number in range(12):
        control.cluster.handles["evaluator-0"][-1].die(dead("The actor died because its node has died. Node Id: 123"))
        control.turn()
        control.turn()
        assert len(control.cluster.handles["evaluator-0"]) == number + 2
    assert control.snapshot()["evaluator-0"]["restarts"] == 0 and not events(control, "restart")


def test_a_killed_process_is_called_one(make):
    control = make()
    for place in ("learner-0", "evaluator-0"):
        come(control, place)
    control.cluster.handles["learner-0"][-1].die(dead())
    control.turn()
    assert events(control, "restart") == [("learner-0", "its process was killed; restarted (1 so far)")]
    assert len(control.cluster.handles["learner-0"]) == 2


def test_reported_outlives_a_kill(make):
    """A killed place has no last report; its successor counts on from the one before."""
    control = make()
    page, where = control.program.page("learner", 0).copy(), control.program.stats("learner", 0).position("env_steps")
    page[where] = 10.0
    come(control, "learner-0", pages={"learner-0": page})
    control.cluster.handles["learner-0"][-1].die(dead())
    control.turn()
    _, second = control.cluster.handles["learner-0"]
    (_, (order, _)), = second.lives
    assert order["pages"]["learner-0"][where] == control.total("env_steps") == 10.0


def test_broken_connection_is_no_kill(make):
    from ray.exceptions import ActorUnavailableError

    control = make()
    for place in ("learner-0", "evaluator-0"):
        come(control, place)
    control.cluster.handles["learner-0"][-1].die(ActorUnavailableError("the call failed", None))
    control.turn()
    assert events(control, "restart") == [("learner-0", "the connection to its node broke; restarted (1 so far)")]


@pytest.mark.parametrize("saved, advice", [(True, "the newest checkpoint is whole.*shoal resume"),
                                           (False, "there is no checkpoint yet: start a cluster and a new run")])
def test_death_of_the_cluster_ends_the_run(make, tmp_path, saved, advice):
    watch = Watch()
    watch.folder = tmp_path if saved else None
    control = make(watch)
    for place in ("learner-0", "evaluator-0"):
        come(control, place)
    control.cluster.there = False
    for place in ("learner-0", "evaluator-0"):
        control.cluster.handles[place][-1].die(dead())
    for _ in range(20):
        control.turn()
    assert not control.events() and [len(handles) for handles in control.cluster.handles.values()] == [1, 1]
    control.cluster.gone = True
    with pytest.raises(RoleFailed, match=f"the Ray cluster at head:6379 is gone.*{advice}"):
        control.turn()


def test_a_run_ends_at_once_with_its_cluster(make, tmp_path):
    """As of a signal to the whole process group: a last checkpoint is asked for, and nobody is there to write it."""
    watch = Watch()
    control = make(watch)
    for place in ("learner-0", "evaluator-0"):
        come(control, place)
    control.ending = control.cluster.gone = True
    control.checkpoint(tmp_path / "saved")
    begun = time.monotonic()
    control.settle(60.0)
    control.close()
    assert watch.saves == [(tmp_path / "saved", False)] and time.monotonic() - begun < 30


class Table(Waits):
    """A shard: its state is its own."""


class Learner(Waits):
    shares_state = True

    def state(self):
        return {}

    def load(self, state):
        """There is nothing to load."""


def test_files_sent_for_shared_state(make, tmp_path):
    control = make()
    for name, role in (("replay", Table), ("trainer", Learner), ("made", lambda me: Waits())):
        control.program.add(name, role, replicas=2)
        (tmp_path / f"{name}-0.safetensors").write_bytes(b"123")
    found = {(name, index): set(control._files([{"node": name, "index": index, "newest": str(tmp_path)}]))
             for name in ("replay", "trainer", "made") for index in (0, 1)}
    own = {(name, 0): {f"{name}-0.safetensors"} for name in ("replay", "trainer", "made")}
    assert found == own | {("replay", 1): set(), ("trainer", 1): {"trainer-0.safetensors"}, ("made", 1): {"made-0.safetensors"}}


def test_cores_of_this_machine_only(make):
    control = make()
    come(control, "learner-0")
    assert "cores_busy" in control.surroundings()
    come(control, "evaluator-0", address="elsewhere")
    assert control.surroundings() == {"nodes": 1.0}
