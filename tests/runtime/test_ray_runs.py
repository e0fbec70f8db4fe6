"""Whole experiments on Ray: exactness between nodes, and the command line with a cluster of its own."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import numpy as np
import pytest

import shoal
from shoal.algorithms import ddpg, dqn, sac, td3, vtrace
from shoal.coordination import calibration
from shoal.experiment.league_record import LeagueRecord
from shoal.experiment.rundir import RunDir
from shoal.nets import NetConfig
from shoal.roles.learner import Learner
from shoal.roles.parts import EvalPlan
from shoal.roles.replay_config import ReplayConfig
from shoal.runtime import RayConfig, run
from shoal.telemetry.outputs import read_lines
from tests.architectures.graphs import draw
from tests.coordination.test_autoscale import Slow
from tests.runtime.harness import Watch, eventually
from tests.test_extending import FILES

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]

PATIENCE = 120.0
SHOAL = str(Path(sys.executable).parent / "shoal")


def remembered(path, updates):
    """A learner that writes its parameters down after a number of updates and ends the program."""

    def make(me, **arguments):
        role = Learner(me, **arguments)
        step = role.step

        async def counting():
            if role.counts[1] >= updates and not me.stats.get("eval_episodes"):
                if role.leader:
                    np.save(path, np.asarray(role.learn.published(role.learner_state.progress)["params"]))
                    me.finish("counted")
                me.stats.set("eval_episodes", 1)
            await step()

        role.step = counting
        return role

    return make


def trained(folder, kind, updates=6, **options):
    """The parameters after this many updates in lock-step."""
    program, _ = draw(vtrace.Config(unroll=8, optimiser="sgd", lr=0.05), "actor_learner", "CartPole-v1", lockstep=True, **options)
    return learned(program, folder, kind, updates)


def learned(program, folder, kind, updates):
    path = folder / f"{kind}-{uuid.uuid4().hex}.npy"
    program.nodes["learner"].role = remembered(str(path), updates)
    watch = Watch(seconds=PATIENCE)
    assert run(program, watch, kind, folder / "logs") == "counted"
    assert all(row["restarts"] == 0 for row in watch.final.values())
    return np.load(path)


@pytest.mark.usefixtures("ray_cluster")
def test_two_learners_equal_one(tmp_path):
    """And one learner on Ray makes that of the inline runtime, bit for bit."""
    inline = trained(tmp_path, "inline", actors=2, batch_slots=2)
    start = trained(tmp_path, "inline", updates=0, actors=2, batch_slots=2)
    assert np.abs(inline - start).max() > 1e-3
    double = trained(tmp_path, "ray", actors=2, learners=2, batch_slots=1)
    np.testing.assert_allclose(double, inline, atol=1e-6)
    single = trained(tmp_path, "ray", actors=1, batch_slots=1)
    assert np.array_equal(single, trained(tmp_path, "inline", actors=1, batch_slots=1))


CONTROL = {"synchronous": (sac.Config(random_steps=20), {}), "central_inference": (td3.Config(random_steps=20), {"actors": 2}),
           "actor_learner": (ddpg.Config(n_step=3, random_steps=20), {"actors": 2, "learners": 2})}


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("architecture", CONTROL)
def test_continuous_control(architecture, tmp_path):
    """From replay between nodes; in turns with the numbers of the inline runtime."""
    config, options = CONTROL[architecture]
    table = ReplayConfig(capacity=500, min_size=40, batch_size=16, insert_batch=4, samples_per_insert=8.0, exponent=0.0)
    start, inline, ray = (
        learned(draw(config, architecture, "Pendulum-v1", net=NetConfig(hidden=(16,)), replay=table, **options)[0], tmp_path, kind,
                updates) for kind, updates in (("inline", 0), ("inline", 20), ("ray", 20)))
    assert np.isfinite(ray).all() and np.abs(ray - start).max() > 1e-4
    if architecture == "synchronous":
        np.testing.assert_allclose(ray, inline, rtol=1e-4, atol=1e-6)


def test_demands_follow_from_the_graph():
    from shoal.runtime.ray.resources import demands, replicas_that_fit

    program, _ = draw(vtrace.Config(unroll=8), "actor_learner", "CartPole-v1", actors=2, eval=EvalPlan(enabled=True))
    program.on_gpu = True
    found = {d.place: (d.cpus, d.gpus, d.spread) for d in demands(program, RayConfig(cpus_per_place=0.5), program.places.values())}
    assert found == {"actor-0": (0.5, 0.0, True), "actor-1": (0.5, 0.0, True), "learner-0": (0.5, 1.0, False),
                     "evaluator-0": (0.5, 0.0, False)}
    program, _ = draw(vtrace.Config(unroll=8), "async_gradients", "CartPole-v1", actors=2, mode="master", eval=EvalPlan())
    program.on_gpu = True  # workers compute there, though they only ask; the server computes on the CPU
    found = {d.place: d.gpus for d in demands(program, RayConfig(), program.places.values())}
    assert found == {"worker-0": 1.0, "worker-1": 1.0, "server-0": 0.0, "evaluator-0": 0.0}
    program, _ = draw(vtrace.Config(unroll=8), "central_inference", "CartPole-v1", actors=2, eval=EvalPlan(enabled=False))
    assert {d.place for d in demands(program, RayConfig(), program.places.values()) if d.spread} == {"actor-0", "actor-1"}
    for shards, spread in ((1, []), (2, ["replay-0", "replay-1"])):
        program, _ = draw(dqn.Config(), "actor_learner", "CartPole-v1", actors=2, replay=ReplayConfig(shards=shards))
        found = demands(program, RayConfig(), program.places.values())
        assert [d.place for d in found if d.shard] == [d.place for d in found if d.spread][2:] == spread
        assert replicas_that_fit(program, RayConfig(), 16.0) == 16 - 1 - shards  # actors are what there may be more of


def marked(mark):
    """Processes that were started, by whomever, under a mark in the environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes() and b"Z" not in (entry / "stat").read_bytes().split()[2:3]:
                    found.append(int(entry.name))
            except OSError:
                pass
    return found


def names(mark):
    """The command lines of these processes."""
    found = []
    for pid in marked(mark):
        with contextlib.suppress(OSError):
            found.append((Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").strip().decode()[:120])
    return found


def guarded(mark):
    """Whether the processes of a cluster ask each other for the token."""
    modes = [(Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0") for pid in marked(mark)
             if b"gcs_server" in (Path("/proc") / str(pid) / "cmdline").read_bytes()]
    return bool(modes) and all(b"RAY_AUTH_MODE=token" in mode for mode in modes)


def wait_for(path, condition, process, seconds=PATIENCE):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        if path.exists() and any(condition(json.loads(line)) for line in path.read_text().splitlines() if line.endswith("}")):
            return True
        time.sleep(0.1)
    return False


def test_train_kill_interrupt_and_resume(tmp_path):
    mark = f"shoal-test-{uuid.uuid4().hex}"
    env = clean(mark)
    directory = tmp_path / "run"
    command = [SHOAL, "train", "impala", "CartPole-v1", "--runtime", "ray", "--actors", "1", "--run-dir", str(directory),
               "--console.mode", "plain", "--no-tensorboard", "--architecture.batch-slots", "1", "--no-eval.enabled"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    try:
        # The actor's counts come about once a second; what it has not told when it is killed is lost.
        assert wait_for(directory / "metrics.jsonl", lambda row: row.get("learner_steps", 0) > 5 and row["env_steps"] > 0, process)
        assert guarded(mark), "Ray's own authentication is not on"
        assert all(os.getpriority(os.PRIO_PROCESS, pid) == os.nice(0) for pid in marked(mark)), "Ray's workers are niced"
        log = (directory / "logs" / "actor-0.log").read_text()
        os.kill(int(re.search(r"process (\d+)", log)[1]), signal.SIGKILL)
        assert wait_for(directory / "metrics.jsonl", lambda row: row.get("event") == "restart", process)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=180)
    finally:
        process.kill()
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["stopped_by"] == "interrupt" and summary["env_steps"] > 0 and summary["nodes"] == 1
    assert "actor-0: its process was killed; restarted (1 so far)" in output
    assert "raylet" not in output and "ray start" not in output and "Traceback" not in output
    assert eventually(lambda: not marked(mark), 20), f"left behind: {names(mark)}"
    before = summary["env_steps"]
    more = ["--max-env-steps", str(before + 1000), "--actors", "2", "--console.mode", "none"]
    done = subprocess.run([SHOAL, "resume", str(directory), *more], env=env,
                          capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    summary = json.loads((directory / "summary.json").read_text())
    config = json.loads((directory / "config.json").read_text())
    batch = config["algorithm"]["unroll"] * config["architecture"]["envs_per_actor"]  # of one slot
    assert summary["stopped_by"] == "env_steps" and summary["restarts"] == 1
    assert before + 1000 <= summary["env_steps"] < before + 1000 + batch
    assert summary["actors"] == 2 and (directory / "logs" / "actor-1.log").exists()
    assert eventually(lambda: not marked(mark), 20), f"left behind: {names(mark)}"


def test_modules_of_the_working_directory(tmp_path, ray_cluster):
    """An algorithm and a network of the user's own, from a folder that the cluster's nodes know nothing of. It makes as many
    updates as it was asked for, and not one more."""
    for name in ("my_algorithm.py", "my_net.py"):
        (tmp_path / name).write_text(FILES[name])
    command = [SHOAL, "train", "--algorithm", "my_algorithm:Luck", "--architecture", "actor_learner", "CartPole-v1",
               "--net.module", "my_net:Fourier", "--runtime", "ray", "--ray.address", ray_cluster.address, "--actors", "1",
               "--architecture.batch-slots", "1", "--max-learner-steps", "7", "--no-eval.enabled", "--console.mode", "none",
               "--no-tensorboard", "--run-dir", "run"]
    done = subprocess.run(command, cwd=tmp_path, env=clean(""), capture_output=True, text=True, timeout=2 * PATIENCE)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["stopped_by"] == "learner_steps" and summary["learner_steps"] == 7 and summary["restarts"] == 0
    assert (tmp_path / "run" / "logs" / "learner-0.log").read_text().count("on node") == 1


@pytest.mark.usefixtures("ray_cluster")
def test_a_league_on_a_cluster(tmp_path):
    """Coordinator, vault and players on two nodes; a resume goes on with the table and the snapshots."""
    run = shoal.train("league", "shoal/RockPaperScissors-v0", runtime="ray", actors=1, run_dir=str(tmp_path / "run"),
                      max_env_steps=2500, **{"league.least_steps": 100, "league.most_steps": 200, "league.league_exploiters": 0,
                                             "algorithm.unroll": 4, "net.hidden": (8,), "eval.episodes": 4, "console.mode": "none",
                                             "tensorboard": False, "architecture.envs_per_actor": 16})  # many small slots
    record = LeagueRecord(RunDir.open(run.directory))
    assert run.summary["error"] is None and all(policy["learner_steps"] for policy in run.summary["policies"].values())
    assert 0 < record.table.played == record.table.reports and set(record.snapshots) <= set(record.vault.names())
    assert {name.rpartition("-")[0] for name in record.snapshots} == {"main", "main_exploiter"}
    shoal.resume(run.directory, max_env_steps=4000)
    after = LeagueRecord(RunDir.open(run.directory))
    assert after.table.played == after.table.reports > record.table.reports
    assert after.snapshots[: len(record.snapshots)] == record.snapshots


# ---------------------------------------------------------------------------------------------- --actors auto
SMALL = {"autoscale.every_seconds": 0.2, "eval.enabled": False, "architecture.envs_per_actor": 1, "algorithm.unroll": 4,
         "console.mode": "plain", "tensorboard": False}


def autoscaled(folder, **overrides):
    """A run of sleeping environments with --actors auto: its decisions, and how many actors there were."""
    found = shoal.train("impala", Slow, runtime="ray", actors="auto", run_dir=str(folder / "run"), max_seconds=PATIENCE,
                        **{**SMALL, **overrides})
    rows = read_lines(found.directory / "metrics.jsonl")
    assert found.summary["error"] is None and found.summary["restarts"] == 0 and found.summary["slots"]["conserved"]
    numbers = [row["roles"]["actor"]["instances"] for row in rows if row.get("kind") == "snapshot" and "actor" in row["roles"]]
    return [row["text"] for row in rows if row.get("event") == "autoscale"], numbers


@pytest.mark.usefixtures("ray_cluster")
def test_actors_follow_on_a_cluster(tmp_path, capsys):
    events, numbers = autoscaled(tmp_path, max_env_steps=3200, **{"autoscale.start": 1, "architecture.batch_slots": 1})
    assert "the number of actors follows the learner: 1 at first, 1 to 15" in capsys.readouterr().out  # of 16, one is the learner's
    assert events[0].startswith("1 -> 2 actors: learners waited ") and max(numbers) > 1


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_bounds_hold_on_a_cluster(tmp_path):
    """The bound and the lag limit hold on a cluster."""
    events, numbers = autoscaled(tmp_path, max_env_steps=6000, **{"autoscale.start": 1, "architecture.batch_slots": 1,
                                                                  "autoscale.most": 2})
    assert max(numbers) == 2 and any("2 are the most (--autoscale.most)" in text for text in events)
    late = tmp_path / "late"
    late.mkdir()
    events, numbers = autoscaled(late, max_env_steps=3000, **{"autoscale.start": 2, "architecture.batch_slots": 1,
                                                              "autoscale.max_lag": 1e-6})
    assert max(numbers) <= 2 and "versions old, the limit is 1e-06" in events[0]


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_calibration_on_a_cluster(tmp_path, monkeypatch, capsys):
    """Calibration on a cluster gives the starting point."""
    monkeypatch.setattr(calibration, "TRIAL_SECONDS", 0.5)
    _, numbers = autoscaled(tmp_path, max_env_steps=600, **{"architecture.batch_slots": 2})
    said = capsys.readouterr().out
    tried = [line for line in said.splitlines() if line.endswith("env steps/s") and "in processes of their own" in line]
    assert "on 15 cores" in said and {line.split()[0] for line in tried} == {"1", "2"} and "failed" not in said
    assert "the number of actors follows the learner: 2 at first, 1 to 15" in said and numbers  # two sleep at once


# ---------------------------------------------------------------------------------------------- beginnings and ends
def clean(mark):
    """The environment of a command of a user who has set nothing of Ray's."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN")}
    return {**kept, "SHOAL_TEST_MARK": mark}


BROKEN = """
import os
import gymnasium as gym
import numpy as np
import shoal

HERE = os.getpid()


class Broken(gym.Env):
    observation_space = gym.spaces.Box(0.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        if os.getpid() != HERE:
            raise ArithmeticError("seven is not prime")
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 0.0, False, False, {}


shoal.train("impala", Broken, runtime="ray", actors=1, run_dir="run", tensorboard=False)
"""


@pytest.mark.slow
def test_a_failed_start_leaves_a_traceback(tmp_path):
    mark = f"shoal-test-{uuid.uuid4().hex}"
    (tmp_path / "broken.py").write_text(BROKEN)
    done = subprocess.run([sys.executable, "broken.py"], cwd=tmp_path, env=clean(mark), capture_output=True, text=True,
                          timeout=PATIENCE)
    assert done.returncode != 0 and "seven is not prime" in done.stderr
    log = (tmp_path / "run" / "logs" / "actor-0.log").read_text()
    assert log.count("ArithmeticError: seven is not prime") >= 3 and log.count("on node") >= 3  # three lives, each with its end
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped_by"] == "failure"
    assert eventually(lambda: not marked(mark), 20), f"left behind: {names(mark)}"


@pytest.mark.slow
def test_a_cluster_that_cannot_start(tmp_path):
    mark = f"shoal-test-{uuid.uuid4().hex}"
    command = [SHOAL, "train", "impala", "CartPole-v1", "--runtime", "ray", "--ray.object-store-mb", "90000000", "--run-dir",
               str(tmp_path / "run"), "--actors", "1"]
    done = subprocess.run(command, env=clean(mark), capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2 and "cannot start a Ray cluster on this machine" in done.stderr
    assert eventually(lambda: not marked(mark), 20), f"left behind: {names(mark)}"


def started(folder, *arguments, mark=""):
    """A run with one actor in a process group of its own, which has begun to learn; and its directory."""
    directory = folder / "run"
    command = [SHOAL, "train", "impala", "CartPole-v1", "--runtime", "ray", "--actors", "1", "--run-dir", str(directory),
               "--console.mode", "plain", "--no-tensorboard", "--architecture.batch-slots", "1", "--checkpoint.every-seconds", "2",
               *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=clean(mark),
                               start_new_session=True)
    assert wait_for(directory / "metrics.jsonl", lambda row: row.get("learner_steps", 0) > 20, process), process.communicate()[0]
    return process, directory


def scratches():
    return {path.name for path in Path("/tmp").glob("shoal-*") if re.fullmatch(r"shoal-[0-9a-f]{12}", path.name)}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["a second Ctrl-C", "kill -9"])
def test_a_killed_driver_leaves_no_cluster(tmp_path, how):
    mark, before = f"shoal-test-{uuid.uuid4().hex}", scratches()
    process, _ = started(tmp_path, mark=mark)
    try:
        assert len(marked(mark)) > 5 and scratches() > before
        if how == "kill -9":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.3)
            os.killpg(process.pid, signal.SIGINT)
        assert process.wait(PATIENCE) in (130, -signal.SIGKILL)
        assert eventually(lambda: not marked(mark), 15), f"left behind: {names(mark)}"
        assert eventually(lambda: scratches() <= before, 15)
    finally:
        process.kill()
        process.stdout.close()


@pytest.mark.slow
def test_the_end_of_the_cluster_ends_the_run(tmp_path):
    """Its servers are killed under the run: Ray itself would wait for a minute, and end the driver without a summary."""
    mark = f"shoal-test-{uuid.uuid4().hex}"
    process, directory = started(tmp_path, mark=mark)
    try:
        assert eventually(lambda: list((directory / "checkpoints").glob("0*")), PATIENCE)
        begun = time.monotonic()
        for pid in marked(mark):
            if any(name in (Path("/proc") / str(pid) / "cmdline").read_bytes() for name in (b"gcs_server", b"raylet/raylet")):
                os.kill(pid, signal.SIGKILL)
        output, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 3 and time.monotonic() - begun < 45  # Ray's own limit is 60
        assert "shoal: the run failed: the Ray cluster at " in output
        assert "Traceback" not in output and "rpc_client" not in output
        summary = json.loads((directory / "summary.json").read_text())
        assert summary["stopped_by"] == "failure" and summary["restarts"] == 0 and "is gone" in summary["error"]
        assert eventually(lambda: not marked(mark), 15), f"left behind: {names(mark)}"
    finally:
        process.kill()


@pytest.mark.slow
def test_a_signal_to_the_process_group(tmp_path):
    mark = f"shoal-test-{uuid.uuid4().hex}"
    process, directory = started(tmp_path, mark=mark)
    try:
        os.killpg(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=50)  # Ray's own limit is 60
        assert process.returncode == 130, output
        assert json.loads((directory / "summary.json").read_text())["stopped_by"] == "interrupt"
        assert "rpc_client" not in output and "Traceback" not in output
        assert eventually(lambda: not marked(mark), 15), f"left behind: {names(mark)}"
    finally:
        process.kill()


NOISY = BROKEN.replace("""        if os.getpid() != HERE:
            raise ArithmeticError("seven is not prime")
""", "").replace("""        return np.zeros(2, np.float32), 0.0, False, False, {}
""", """        self.steps = getattr(self, "steps", 0) + 1
        if os.getpid() != HERE and self.steps == 50:
            for number in range(20_000):
                print(f"line {number} " + "x" * 40)
            print("THE LAST LINE")
            raise ArithmeticError("seven is not prime")
        return np.zeros(2, np.float32), 0.0, False, False, {}
""")


@pytest.mark.slow
def test_log_reaches_the_driver(tmp_path):
    """A log reaches the driver to its last line."""
    (tmp_path / "broken.py").write_text(NOISY)
    mark = f"shoal-test-{uuid.uuid4().hex}"
    done = subprocess.run([sys.executable, "broken.py"], cwd=tmp_path, env=clean(mark), capture_output=True, text=True,
                          timeout=PATIENCE)
    assert done.returncode != 0 and "seven is not prime" in done.stderr
    log = (tmp_path / "run" / "logs" / "actor-0.log").read_text()
    lives = log.split("[shoal] incarnation ")[1:]
    for life in lives:
        assert [int(n) for n in re.findall(r"^line (\d+)", life, re.M)] == list(range(20_000))
        assert "THE LAST LINE" in life and "ArithmeticError: seven is not prime" in life
    assert len(lives) >= 2


@pytest.mark.slow
def test_a_lost_node_costs_one_restart_each(tmp_path):
    """What lived on it waits for room, longer than a role may take to start; the run goes on, is saved, and is stopped by hand."""
    from evidence.cluster import TrainingProcess, cluster, on

    with cluster(2, cpus=2) as made:
        running = TrainingProcess(tmp_path, "impala", "CartPole-v1", "--actors", "2", "--architecture.batch-slots", "1",
                                  "--checkpoint.every-seconds", "2", "--faults.start-seconds", "20", *on(made))
        try:
            running.further(20)
            learner = running.where("learner-0")[0]
            lost = [place for place in ("actor-0", "actor-1", "evaluator-0") if running.where(place)[0] != learner]
            made.remove_node(next(node for node in made.worker_nodes if node.node_id != learner), allow_graceful=False)
            running.wait(lambda: {row["role"] for row in running.rows("event") if row["event"] == "waiting"} >= set(lost))
            before, begun, steps = running.updates(), time.monotonic(), running.rows("snapshot")[-1]["env_steps"]
            running.wait(lambda: time.monotonic() - begun > 25 and running.updates() > before)
            running.process.send_signal(signal.SIGINT)
            result = running.end()
        finally:
            running.process.kill()
    assert result["stopped_by"] == "interrupt" and result["restarts"] == len(lost)
    assert result["restarts_explained"] == ["its node died; restarted (1 so far)"] * len(lost)
    summary = json.loads((running.directory / "summary.json").read_text())
    newest = sorted((running.directory / "checkpoints").glob("0*"))[-1]
    assert summary["checkpoint_failed"] is None and int(newest.name.partition("+")[0]) > steps
    assert {path.stem for path in newest.glob("*.safetensors")} >= {"learner-0", "evaluator-0"}


@pytest.mark.slow
def test_resume_on_a_smaller_cluster(tmp_path):
    """Two nodes at first, then another cluster of one, on which the first layout has no room: that is said, and the way out."""
    from evidence.cluster import TrainingProcess, cluster, on

    few = ("--architecture.batch-slots", "1", "--no-eval.enabled")
    with cluster(2, cpus=2) as made:
        running = TrainingProcess(tmp_path, "impala", "CartPole-v1", "--actors", "3", *few, *on(made))
        try:
            running.further(20)
            assert len({running.where(f"actor-{k}")[0] for k in range(3)}) == 2
            running.process.send_signal(signal.SIGINT)
            assert running.end()["stopped_by"] == "interrupt"
        finally:
            running.process.kill()
    before = json.loads((running.directory / "summary.json").read_text())["env_steps"]
    with cluster(1, cpus=2) as made:
        resume = [SHOAL, "resume", str(running.directory), "--ray.address", made.address, "--max-env-steps", str(before + 2000),
                  "--console.mode", "none"]
        done = subprocess.run(resume, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 2 and "asked for 4 CPUs and 0 GPUs, the cluster has 2 CPUs" in done.stderr
        assert "use --actors 1" in done.stderr
        done = subprocess.run([*resume, "--actors", "1"], capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr
    summary = json.loads((running.directory / "summary.json").read_text())
    assert summary["stopped_by"] == "env_steps" and summary["env_steps"] >= before + 2000 and summary["actors"] == 1
