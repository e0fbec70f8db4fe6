"""The session against a runtime that is only numbers: stop conditions, checkpoints, summary, resumed totals."""

import json
import time

import numpy as np
import pytest

from shoal.experiment import session as module
from shoal.experiment.checkpoints import TensorFiles
from shoal.experiment.rundir import RunDir
from shoal.experiment.session import Base, Goals, RunSession
from tests.telemetry.fakes import WIRES, Pages, second

KEYS = {"preset", "algorithm", "architecture", "env", "runtime", "seed", "stopped_by", "seconds", "env_steps",
        "env_frames", "learner_steps", "env_steps_per_second", "learner_steps_per_second", "train_return",
        "eval_return", "eval_episodes", "learner_idle", "policy_lag", "data_age_seconds", "samples_per_insert",
        "restarts", "peak_memory_mb", "startup_seconds", "slots", "cpu_seconds", "bytes_per_env_step"}
LABELS = {"preset": "impala", "algorithm": "vtrace", "architecture": "actor_learner", "env": "E", "runtime": "local",
          "seed": 0}


class Control:
    """What the runtime offers, without roles."""

    def __init__(self, session: RunSession) -> None:
        self.session, self.pages, self.reason = session, Pages("actor-0", "actor-1", "learner-0"), None
        self.pending: list = []
        self.news: list[dict] = []
        self.broken = False
        self.running: dict = {}
        self.stateful: set = set()

    def start_steps(self):
        """No role is kept back here."""

    def wait(self, until, seconds):
        self.settle(seconds)

    def snapshot(self):
        return self.pages.read()

    def surroundings(self):
        return {}

    def wires(self):
        return WIRES

    def total(self, name):
        return sum(stats.get(name) for stats in self.pages.stats.values())

    def events(self):
        news, self.news = self.news, []
        return news

    def stop(self, reason):
        self.reason = self.reason or reason

    def complete(self):
        return self.total("alive") == len(self.pages.stats)

    def checkpoint(self, folder):
        self.pending.append(folder)

    def settle(self, seconds):
        for folder in self.pending:
            if not self.broken:
                TensorFiles().save(folder / "learner-0.safetensors", {"params": np.zeros(3)})
            self.session.saved(folder, not self.broken)
        self.pending = []


class Listener:
    def __init__(self):
        self.shots, self.events, self.closed = [], [], False

    def write(self, shot):
        self.shots.append(shot)

    def event(self, event):
        self.events.append(event)

    def close(self):
        self.closed = True


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

        def monotonic(self):
            return self.now

        time = staticmethod(time.time)

    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def start(tmp_path, goals: Goals, base: Base | None = None, **kwargs):
    rundir = RunDir(tmp_path / "run") if (tmp_path / "run").exists() else RunDir.create(tmp_path / "run", {})
    listener = Listener()
    session = RunSession(rundir, LABELS, goals, checkpoint_seconds=60, keep=3, outputs=[listener], base=base, **kwargs)
    control = Control(session)
    session.begin(control)
    control.settle(0)
    return session, control, listener


def play(session, control, clock, seconds: int) -> None:
    """Seconds of a run, ten ticks each, until it stops."""
    for _ in range(seconds):
        second(control.pages, busy=0.5)
        for _ in range(10):
            clock.now += 0.1
            session.tick(control)
            control.settle(0)
            if control.reason:
                return


def test_first_batch_never_fills(tmp_path, clock, monkeypatch):
    session, control, listener = start(tmp_path, Goals(), batch_slots=100_000)
    monkeypatch.setattr(control, "wires", lambda: {**WIRES, "unrolls": {**WIRES["unrolls"], "written": 1234.0, "consumed": 1200.0}})

    def verdicts(seconds):
        for _ in range(seconds):
            control.pages["actor-0"].add("env_steps", 100)
            clock.now += 1.0
            session.tick(control)
        return listener.shots[-1]["verdict"]

    assert verdicts(20) == "warming up"
    assert verdicts(20).startswith("no batch yet: 1,234 of 100,000 unrolls after ") and "--architecture.batch-slots" in verdicts(1)
    session.end(control, "seconds", None)
    assert session.summary["verdict"].startswith("no batch yet")
    control.pages["learner-0"].add("learner_steps", 1)
    assert not verdicts(2).startswith("no batch yet")


def test_summary_has_every_key_of_the_design(tmp_path, clock):
    session, control, listener = start(tmp_path, Goals(max_env_steps=3000))
    control.pages["actor-0"].observe("episode_return", 7.0)
    play(session, control, clock, 20)
    session.end(control, control.reason, None)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary.keys() >= KEYS
    assert summary["stopped_by"] == "env_steps" and summary["env_steps"] == 3000 and summary["train_return"] == 7.0
    assert summary["policy_lag"].keys() == {"mean", "p95", "max"} and summary["eval_return"] is None
    assert isinstance(summary["restarts"], int) and summary["peak_memory_mb"] > 1
    assert listener.closed and listener.shots[-1]["env_steps"] == 3000


def test_times_of_checkpoints(tmp_path, clock):
    """There is a checkpoint at step 0, then every minute, then at the end."""
    session, control, _ = start(tmp_path, Goals())
    steps = [int(path.name) for path in sorted((tmp_path / "run" / "checkpoints").iterdir())]
    assert steps == [0]
    play(session, control, clock, 130)
    session.interrupt()
    play(session, control, clock, 1)
    assert control.reason == "interrupt"
    session.end(control, control.reason, None)
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert len(names) == 3 and names[-1] == "000000131000" and session.newest().name == names[-1]


def test_no_checkpoint_before_all_roles(tmp_path, clock):
    session = RunSession(RunDir.create(tmp_path / "run", {}), LABELS, Goals(), checkpoint_seconds=60, keep=3, outputs=[])
    control = Control(session)
    control.pages["learner-0"].set("alive", 0)
    session.begin(control)
    assert not control.pending
    control.pages["learner-0"].set("alive", 1)
    clock.now += 1
    session.tick(control)
    assert len(control.pending) == 1


def test_seconds_count_from_the_first_step(tmp_path, clock):
    session, control, _ = start(tmp_path, Goals(max_seconds=2.0), started=clock.now - 3)
    for _ in range(50):  # five seconds of start-up
        clock.now += 0.1
        session.tick(control)
    assert control.reason is None
    play(session, control, clock, 10)
    session.end(control, control.reason, None)
    assert control.reason == "seconds"
    assert session.summary["seconds"] == pytest.approx(2.0, abs=0.2)
    assert session.summary["startup_seconds"] == pytest.approx(8.1, abs=0.2)


def test_env_steps_every_round(tmp_path, clock):
    session, control, _ = start(tmp_path, Goals(max_env_steps=100))
    control.pages["actor-0"].add("env_steps", 99)
    session.tick(control)
    assert control.reason is None
    control.pages["actor-0"].add("env_steps", 1)
    session.tick(control)  # the clock has not moved
    assert control.reason == "env_steps"


def test_a_resumed_run_goes_on_counting(tmp_path, clock):
    base = Base({"env_steps": 5000, "learner_steps": 50, "restarts": 2}, seconds=100.0, peak_memory_mb=9e9,
                snapshot={"train_return": 12.0, "eval_return": 0.0})
    session, control, listener = start(tmp_path, Goals(max_env_steps=7000), base)
    session.tick(control)
    assert listener.shots[0]["env_steps"] == 5000 and listener.shots[0]["train_return"] == 12.0
    assert listener.shots[0]["eval_return"] == 0.0
    play(session, control, clock, 10)
    session.end(control, control.reason, None)
    counted = [shot["env_steps"] for shot in listener.shots]
    assert counted == sorted(counted)
    summary = session.summary
    assert summary["env_steps"] == 7000 and summary["restarts"] == 2 and summary["peak_memory_mb"] == 9e9
    assert summary["seconds"] == pytest.approx(101, abs=1.1)
    assert summary["env_steps_per_second"] == pytest.approx(7000 / summary["seconds"])


def test_failed_checkpoint_is_tried_again(tmp_path, clock):
    session, control, listener = start(tmp_path, Goals())
    whole = session.newest()
    control.broken = True
    play(session, control, clock, 62)
    assert session.newest() == whole and listener.events[-1]["kind"] == "checkpoint failed"
    control.broken = False
    play(session, control, clock, 10)
    assert session.newest() != whole


def test_failure_is_written_down(tmp_path, clock):
    """A failure is written down without another checkpoint."""
    session, control, _ = start(tmp_path, Goals())
    play(session, control, clock, 2)
    session.end(control, "failure", "RoleFailed: actor-0 kept dying")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["stopped_by"] == "failure" and "actor-0" in summary["error"]
    assert session.newest().name == "000000000000"


def test_a_run_may_fail_before_it_has_begun(tmp_path, clock):
    """A role that cannot be made: its error is written down, and not hidden by another one."""
    session = RunSession(RunDir.create(tmp_path / "run", {}), LABELS, Goals(), checkpoint_seconds=60, keep=3, outputs=[Listener()])
    session.end(Control(session), "failure", "RuntimeError: no such tensor")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["stopped_by"] == "failure" and "no such tensor" in summary["error"] and session.newest() is None


@pytest.mark.parametrize("saved", [False, True])
def test_interrupted_start(saved, tmp_path, clock):
    """While roles are still starting, a checkpoint would lack some of them, and be newer than one that has all."""
    rundir, listener = RunDir.create(tmp_path / "run", {}), Listener()
    if saved:
        folder = rundir.checkpoints().begin(1)
        TensorFiles().save(folder / "learner-0.safetensors", {"params": np.zeros(3)})
        rundir.checkpoints().commit(folder, {"env_steps": 7})
    session = RunSession(rundir, LABELS, Goals(), checkpoint_seconds=60, keep=3, outputs=[listener])
    control = Control(session)
    control.pages["actor-1"].set("alive", 0)
    session.begin(control)
    session.end(control, "interrupt", None)
    assert not control.pending and session.summary["checkpoint_failed"] is None and not listener.events
    assert (session.newest() is not None and session.newest().name == "000000000007") == saved


def test_actors_pause_for_the_last_checkpoint(tmp_path, clock, monkeypatch):
    """Else they would act on while roles write, beyond the run's end."""
    session, control, _ = start(tmp_path, Goals(max_seconds=3))
    play(session, control, clock, 20)
    control.running, control.stateful = dict.fromkeys(("actor-0", "actor-1", "learner-0")), {"learner-0"}
    calls, checkpoint = [], control.checkpoint
    control.pause = calls.append

    def save(folder):
        calls.append("checkpoint")
        checkpoint(folder)

    monkeypatch.setattr(control, "checkpoint", save)
    session.end(control, control.reason, None)
    assert control.reason == "seconds" and calls == ["actor-0", "actor-1", "checkpoint"]


def test_words_of_a_failed_checkpoint(tmp_path, clock):
    """The message of a failed checkpoint says what is kept."""
    session = RunSession(RunDir.create(tmp_path / "run", {}), LABELS, Goals(), checkpoint_seconds=60, keep=3, outputs=[Listener()])
    control, listener = Control(session), session._outputs[0]
    control.broken = True
    session.begin(control)
    control.settle(0)
    control.broken = False
    play(session, control, clock, 10)
    control.broken = True
    session.end(control, "seconds", None)
    said = [event["text"] for event in listener.events if event["kind"] == "checkpoint failed"]
    assert [text.partition("; ")[2] for text in said] == ["there is none yet", "the previous one stays"]


def test_checkpoint_after_the_end(tmp_path, clock):
    """A role may answer while the places are being stopped."""
    session, control, _ = start(tmp_path, Goals())
    play(session, control, clock, 59)
    for _ in range(30):
        clock.now += 0.1
        session.tick(control)
    assert control.pending
    session.end(control, "failure", "RoleFailed: actor-0 kept dying")
    control.settle(0)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["stopped_by"] == "failure" and "actor-0" in summary["error"]


def test_summary_of_a_killed_run(tmp_path, clock):
    """A killed run leaves a summary without a reason."""
    session, control, _ = start(tmp_path, Goals())
    play(session, control, clock, 61)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped_by"] is None


def test_events_and_a_broken_sink(tmp_path, clock):
    """Events reach the sinks and a broken sink is dropped."""

    class Broken(Listener):
        def write(self, shot):
            raise OSError("No space left on device")

    rundir, listener = RunDir.create(tmp_path / "run", {}), Listener()
    session = RunSession(rundir, LABELS, Goals(), checkpoint_seconds=60, keep=3, outputs=[Broken(), listener])
    control = Control(session)
    control.news = [{"kind": "restart", "role": "actor-1", "text": "killed"}]
    session.begin(control)
    control.settle(0)
    play(session, control, clock, 3)
    session.end(control, "interrupt", None)
    kinds = [event["kind"] for event in listener.events]
    assert kinds.count("restart") == 1 and sum("Broken stopped" in event["text"] for event in listener.events) == 1
    assert len(listener.shots) >= 3
