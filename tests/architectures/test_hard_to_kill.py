"""Whole experiments under faults, really done: deaths at telling moments, a full disk, broken environments, NaN policies.

Deaths at any other moment: tests/runtime (test_stream, test_broadcast, test_call, test_group; test_crashes dies at every line of a
wire's code). Exit codes and Ctrl-C: tests/test_cli.py. All of it for minutes: evidence/chaos.py.
"""

import contextlib
import io
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

import shoal
from shoal import cli, runtime
from shoal.errors import ConfigError, RoleFailed
from shoal.experiment.checkpoints import TensorFiles, read_meta
from shoal.experiment.prepare import plan_to_json, prepare
from shoal.experiment.run import plan_of
from shoal.experiment.rundir import RunDir
from shoal.experiment.session import Goals, RunSession
from shoal.runtime import Faults
from shoal.telemetry.console import Plain
from shoal.telemetry.outputs import JsonLines, read_lines
from shoal.telemetry.snapshot import COUNTERS
from tests.runtime.harness import PATIENCE, Farm

SMALL = {"net": {"hidden": (8,)}, "eval": {"enabled": False}, "architecture": {"envs_per_actor": 4, "batch_slots": 1}, "actors": 1}
EVALUATED = {"eval": {"episodes": 4, "every_env_steps": 400}, "actors": 2}


class Steered(RunSession):
    """The session of a real run, with hands: `act` at every tick, an end when `until` is true, a limit for a test that fails."""

    def __init__(self, rundir, *, act=None, until=None, seconds=PATIENCE, goals=None, every=0.3):
        self.screen = io.StringIO()
        sinks = [Plain(self.screen, "a test", {}, 1.0), JsonLines(rundir.metrics_file)]
        super().__init__(rundir, {"runtime": "local"}, goals or Goals(), checkpoint_seconds=every, keep=3, outputs=sinks)
        self.act, self.until, self.limit = act, until, time.monotonic() + seconds

    def tick(self, control):
        super().tick(control)
        if self.act:
            self.act(control)
        if self.until and self.until(control):
            control.stop("until")
        elif time.monotonic() > self.limit:
            control.stop("too late")


def go(folder, preset, env, change=None, faults=None, overrides=None, **hands):
    """Run a preset as `shoal train` does, but on the tests' fork server, and with a hand in it."""
    prepared = prepare(plan_of(preset, env, None, None, {**SMALL, **(overrides or {})}))
    program = prepared.program()
    if change:
        change(program)
    session = Steered(RunDir.create(folder, plan_to_json(prepared.plan)), **hands)
    session.reason = runtime.run(program, session, "local", session.rundir.logs, faults, fork_server=Farm.get())
    return session


# ---------------------------------------------------------------------------------------------- deaths at telling moments
def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


class Fatal:
    """An array in a published tree: a process that copies it dies, with the leaves before it already copied."""

    def __array__(self, *_, **__):
        die()


def at_call(owner, name, count, death=die):
    """The `count`-th call of a method is its process's last."""
    method, calls = getattr(owner, name), []

    def mortal(*values, **named):
        calls.append(1)
        if len(calls) == count:
            death(*values, **named)
        return method(*values, **named)

    setattr(owner, name, mortal)


def half_a_file(store, path, state):
    """A checkpoint that is cut off in the middle."""
    Path(path).write_bytes(b"half a file")
    die()


def within_publish(role):
    published = role.learn.published

    def poisoned(progress):
        tree = published(progress)
        return tree if role.weights.version < 5 else {**tree, "progress": Fatal()}

    role.learn.published = poisoned


def with_unsent_items(role):
    """An actor that has sent some items, and holds others that are finished."""
    recorder = role.player.recorder
    write = recorder.write

    def mortal(*values):
        write(*values)
        if role.sent >= 2 and recorder.ready:
            die()

    recorder.write = mortal


LEARNER = (lambda role: at_call(role.learn, "gradients", 5), within_publish,
           lambda role: at_call(TensorFiles, "save", 1, half_a_file))
MOMENTS = {  # role -> what its first, second, ... life dies of: within a slot, an update, a publication, a checkpoint, ...
    "impala": {"actor": (lambda role: at_call(role.player.recorder, "write", 30),), "learner": LEARNER,
               "evaluator": (lambda role: at_call(role.env, "step", 20),)},
    "seed": {"actor": (lambda role: at_call(role.envs[0], "step", 30),), "learner": LEARNER[:1],
             "inference": (lambda role: at_call(role.policy, "act", 20),)},
    "apex": {"actor": (with_unsent_items,), "learner": LEARNER,
             "replay": (lambda role: at_call(role, "_answer_added", 5),  # items are in, and nobody was told
                        lambda role: at_call(role.core, "try_gather", 8), lambda role: at_call(role.table, "update", 5))},
}
REPLAY = {"replay": {"capacity": 2_000, "min_size": 100, "batch_size": 16, "insert_batch": 10, "samples_per_insert": 4.0,
                     "trim_updates": 10, "checkpoint": True}}


def doomed(make, moments):
    def made(me, **arguments):
        role = make(me, **arguments)
        if me.index == 0 and me.incarnation < len(moments):
            moments[me.incarnation](role)
        return role

    return made


@pytest.mark.parametrize("preset", MOMENTS)
def test_killed_at_every_moment(preset, tmp_path):
    """Every role comes back each time, nothing is lost, no counter or version runs backwards, and it goes on learning."""
    places, versions, seen = {}, [], {}

    def change(program):
        for name, moments in MOMENTS[preset].items():
            program.nodes[name].role = doomed(program.nodes[name].role, moments)
            places[f"{name}-0"] = len(moments)

    def lives(control):
        return {name: control.snapshot()[name]["restarts"] for name in places}

    def act(control):
        versions.append(control.wires()["weights"]["version"])
        if not seen and lives(control) == places:
            seen.update(steps=control.total("learner_steps"), newest=control.session.newest())

    def until(control):
        return seen and control.total("learner_steps") >= seen["steps"] + 5 and control.session.newest() != seen["newest"] \
            and control.complete() and control.total("alive") == len(control.running)

    overrides = {**EVALUATED, **(REPLAY if preset == "apex" else {})}
    session = go(tmp_path / "run", preset, "CartPole-v1", change, overrides=overrides, act=act, until=until)
    assert session.reason == "until", (session.screen.getvalue(), places)
    assert session.summary["slots"]["conserved"] and session.summary["restarts"] == sum(places.values())
    assert versions == sorted(versions)
    rows = [row for row in read_lines(session.rundir.metrics_file) if row["kind"] == "snapshot"]
    for name in COUNTERS:
        counted = [row[name] for row in rows if name in row]  # a run shows only what its roles have
        assert counted == sorted(counted), name
    newest = session.newest()
    for file in read_meta(newest)["files"]:
        assert TensorFiles().load(newest / file)
    said = session.screen.getvalue()
    for place, count in places.items():  # each restart once, with its reason and count
        for k in range(1, count + 1):
            assert said.count(f"restart: {place}: killed by SIGKILL; restarted ({k} so far)\n") == 1, said
        assert (session.rundir.logs / f"{place}.log").exists()


# ---------------------------------------------------------------------------------------------- a full disk
@pytest.fixture
def disk(tmp_path):
    """A disk of 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"mounting a small disk is refused: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(path):
    with path.open("wb") as file, contextlib.suppress(OSError):
        while True:
            os.write(file.fileno(), bytes(4096))


def test_full_disk(disk):
    """While it is full the previous checkpoint stays whole and training goes on; when there is room again, so do checkpoints.
    Then it is full again, and the run ends."""
    filler, seen = disk / "filler", {}

    def act(control):
        newest, failed, steps = control.session.newest(), control.session._checkpoint_failed, control.total("learner_steps")
        if "full" not in seen:
            if newest is not None and steps > 20:
                seen["full"] = newest
                fill(filler)
        elif "failed" not in seen:
            if failed:
                seen.update(failed=steps)
                assert TensorFiles().load(newest / "learner-0.safetensors")
        elif "room" not in seen:
            if steps > seen["failed"] + 20:
                seen["room"] = newest
                filler.unlink()
        elif "again" not in seen and newest != seen["room"] and not failed:
            seen["again"] = newest
            fill(filler)

    session = go(disk / "run", "impala", "CartPole-v1", act=act,
                 until=lambda control: "again" in seen and control.session._checkpoint_failed)
    assert session.reason == session.summary["stopped_by"] == "until", seen
    assert session.summary["restarts"] == 0 and session.summary["checkpoint_failed"]
    said = session.screen.getvalue()
    assert "learner-0: Error while serializing: I/O error: No space left on device" in said and "the previous one stays" in said
    assert not list((disk / "run" / "checkpoints").glob(".writing*"))
    assert TensorFiles().load(session.newest() / "learner-0.safetensors")


def test_resuming_on_a_full_disk(disk, capsys):
    """Resuming on a full disk is one sentence and changes nothing."""
    folder = disk / "run"
    shoal.train("a2c", "CartPole-v1", runtime="inline", max_env_steps=100, run_dir=str(folder), tensorboard=False,
                **{"console.mode": "none", "eval.enabled": False, "net.hidden": (8,), "actors": 1})
    before = (folder / "config.json").read_bytes()
    fill(disk / "filler")
    assert cli.main(["resume", str(folder), "--max-env-steps", "2000"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"shoal: {folder} cannot be written: No space left on device") and said.count("\n") == 1
    assert (folder / "config.json").read_bytes() == before and {path.name for path in folder.glob(".*")} <= {".lock"}
    (disk / "filler").unlink()
    assert cli.main(["resume", str(folder), "--max-env-steps", "2000", "--console.mode", "none"]) == 0


# ---------------------------------------------------------------------------------------------- environments
class Faulty(gym.Env):
    """Does something wrong at its 45th step, in the middle of an episode."""

    observation_space = gym.spaces.Box(-9.0, 9.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, fault, folder):
        """`fault` is one, or "each": another one in each process."""
        self.fault, self.folder, self.resets, self.steps = fault, folder, 0, 0
        if fault == "each":
            (folder / f"process-{os.getpid()}").touch()
            self.fault = [*BROKEN][min(len(list(folder.glob("process-*"))) - 2, len(BROKEN) - 1)]  # the first one is the test's own

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.resets += 1
        first = "first reset" in self.fault and "shoal" in Path("/proc/self/cmdline").read_text()  # not in the tests' own process
        if first or (self.fault == "reset" and self.resets == 8 and not (self.folder / "hung").exists()):
            (self.folder / "hung").touch()
            time.sleep(300)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        observation, reward = np.zeros(2, np.float32), 1.0
        if self.steps == 45:
            if self.fault == "raise":
                raise ZeroDivisionError("engine on fire")
            observation, reward = BROKEN.get(self.fault, ((observation, reward),))[0]
        return observation, reward, self.steps % 10 == 0, False, {}


BROKEN = {
    "nan": ((np.array([0, np.nan], np.float32), 1.0), r"at step 45: .*\[1\] is nan"),
    "reward": ((np.zeros(2, np.float32), float("nan")), "at step 45: reward is nan"),
    "shape": ((np.zeros(3, np.float32), 1.0), r"at step 45: .*shape \(3,\)"),
    "dtype": ((np.array([1j, 0]), 1.0), "at step 45: .*dtype complex128"),
    "raise": ((None, None), "at step 45: raised ZeroDivisionError: engine on fire"),
}


def test_broken_environment(tmp_path):
    """One actor, and another fault in each of its lives."""
    screens = []
    with pytest.raises(RoleFailed) as caught:
        go(tmp_path / "run", "impala", lambda: Faulty("each", tmp_path), faults=Faults(exceptions_per_minute=len(BROKEN)),
           act=lambda control: screens.append(control.session.screen.getvalue()))
    text = str(caught.value)
    assert "actor-0 failed 5 times within a minute" in text and "Traceback" in text and str(tmp_path / "run" / "logs") in text
    for k, (_, words) in enumerate(BROKEN.values(), 1):
        said = text if k == len(BROKEN) else screens[-1]
        told = "" if said is text else rf".*restarted \({k} so far\)"
        assert re.search(rf"<lambda>, environment 0, {words}{told}", said), said
    assert '"stopped_by": "failure"' in (tmp_path / "run" / "summary.json").read_text()


def test_hang_in_a_reset(tmp_path):
    """An environment that hangs in a reset is replaced."""
    session = go(tmp_path / "run", "impala", lambda: Faulty("reset", tmp_path), faults=Faults(hang_seconds=1.5),
                 until=lambda c: c.total("restarts") and c.total("episodes") > 200)
    assert session.reason == "until"
    assert re.search(r"no sign of life for [\d.]+ s; restarted \(1 so far\)", session.screen.getvalue())


def test_hang_in_every_first_reset(tmp_path):
    """An environment that always hangs in its first reset ends the run."""
    with pytest.raises(RoleFailed, match="died 2 times without completing a step, last: not started within 1 s"):
        go(tmp_path / "run", "impala", lambda: Faulty("first reset", tmp_path),
           faults=Faults(start_seconds=1.0, deaths_without_step=2))


def test_hang_before_anything_starts(tmp_path):
    """Its spaces are looked at in the user's own process."""

    class Stuck(Faulty):
        def __init__(self):
            super().__init__("", tmp_path)

        def reset(self, *, seed=None, options=None):
            time.sleep(300)

    with pytest.raises(ConfigError, match=r"Stuck: creating and resetting it took longer than 1 s; .*--faults.start-seconds"):
        prepare(plan_of("impala", Stuck, None, None, {**SMALL, "faults": {"start_seconds": 1.0}}))


# ---------------------------------------------------------------------------------------------- numbers that are not finite
class NanNet(torch.nn.Module):
    """log of something negative."""

    def __init__(self, observation_space):
        super().__init__()
        self.layer = torch.nn.Linear(observation_space.shape[0], 4)

    def forward(self, observation):
        return torch.log(self.layer(observation) * 0 - 1)


@pytest.mark.parametrize(("env", "words"), [("CartPole-v1", "10 updates in a row had a loss or gradient that is not finite"),
                                            ("Pendulum-v1", "was given an action that is not finite: nan")])
def test_policy_that_yields_nan_ends_the_run(env, words, tmp_path):
    overrides = {"net": {"module": NanNet}, "algorithm": {"unroll": 8}}
    with pytest.raises(RoleFailed, match=words):
        go(tmp_path / "run", "impala", env, overrides=overrides)


def nan_gradients(updates):
    """A learner some of whose gradients are NaN."""

    def change(program):
        make = program.nodes["learner"].role

        def made(me, **arguments):
            role = make(me, **arguments)
            gradients, calls = role.learn.gradients, []

            def bad(*values):
                calls.append(1)
                gradient, metrics = gradients(*values)
                return (gradient * np.nan if len(calls) in updates else gradient), metrics

            role.learn.gradients = bad
            return role

        program.nodes["learner"].role = made

    return change


def test_update_that_is_not_finite(tmp_path):
    """An update that is not finite is skipped and counted."""
    session = go(tmp_path / "run", "impala", "CartPole-v1", nan_gradients({3, 4, 5, *range(10, 19)}),
                 until=lambda c: c.total("learner_steps") >= 40)
    assert session.reason == "until" and session.summary["updates_skipped"] == 12
    state = TensorFiles().load(session.newest() / "learner-0.safetensors")
    assert all(np.isfinite(array).all() for name, array in state.items() if name.startswith("learn/"))


def test_ten_in_a_row_end_the_run(tmp_path):
    with pytest.raises(RoleFailed, match="learner-0: 10 updates in a row"):
        go(tmp_path / "run", "impala", "CartPole-v1", nan_gradients(set(range(5, 15))))


# ---------------------------------------------------------------------------------------------- the page
def test_page_of_faults_names_tests():
    """The page of faults names tests that exist."""
    tests, file = Path(__file__).parents[1], ""
    text = (tests.parent / "docs" / "faults.md").read_text(encoding="utf-8")
    named = re.findall(r"`(?:tests/)?([\w/]+\.py)?(?:::(test_\w+))?`", text)
    assert len(named) > 20
    for path, test in named:
        file = path or file  # `::test` alone is of the file named before
        there = next(folder / file for folder in (tests, tests.parent) if (folder / file).exists())
        assert not test or f"def {test}(" in there.read_text(encoding="utf-8"), (file, test)
