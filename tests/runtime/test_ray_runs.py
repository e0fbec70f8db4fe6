"""Whole experiments on Ray: exactness between nodes, and the command line with a cluster of its own."""

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

from shoal.algorithms import vtrace
from shoal.architectures.parts import EvalPlan
from shoal.architectures.roles import Learner
from shoal.runtime import RayConfig, run
from tests.architectures.graphs import draw
from tests.runtime.harness import Watch, eventually

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]

PATIENCE = 120.0
SHOAL = str(Path(sys.executable).parent / "shoal")


def remembered(path, updates):
    """A learner that writes its parameters down after so many updates and ends the program."""

    def make(me, **arguments):
        role = Learner(me, **arguments)
        step = role.step

        async def counting():
            if role.counts[1] >= updates and not me.stats.get("eval_episodes"):
                if role.leader:
                    np.save(path, np.asarray(role.learn.published(role.books.progress)["params"]))
                    me.finish("counted")
                me.stats.set("eval_episodes", 1)
            await step()

        role.step = counting
        return role

    return make


def trained(folder, kind, updates=6, **options):
    """The parameters after so many updates in lock-step."""
    program, _ = draw(vtrace.Config(unroll=8, optimiser="sgd", lr=0.05), "actor_learner", "CartPole-v1", lockstep=True, **options)
    path = folder / f"{kind}-{uuid.uuid4().hex}.npy"
    program.nodes["learner"].role = remembered(str(path), updates)
    watch = Watch(seconds=PATIENCE)
    assert run(program, watch, kind, folder / "logs") == "counted"
    assert all(row["restarts"] == 0 for row in watch.final.values())
    return np.load(path)


@pytest.mark.usefixtures("ray_cluster")
def test_two_learners_on_two_nodes_make_the_update_of_one_on_the_joined_batch(tmp_path):
    """And one learner on Ray makes that of the inline runtime, bit for bit."""
    inline = trained(tmp_path, "inline", actors=2, batch_slots=2)
    start = trained(tmp_path, "inline", updates=0, actors=2, batch_slots=2)
    assert np.abs(inline - start).max() > 1e-3
    double = trained(tmp_path, "ray", actors=2, learners=2, batch_slots=1)
    np.testing.assert_allclose(double, inline, atol=1e-6)
    single = trained(tmp_path, "ray", actors=1, batch_slots=1)
    assert np.array_equal(single, trained(tmp_path, "inline", actors=1, batch_slots=1))


def test_what_a_run_asks_of_a_cluster_is_computed_from_its_graph():
    from shoal.runtime.ray.cluster import demands

    program, _ = draw(vtrace.Config(unroll=8), "actor_learner", "CartPole-v1", actors=2, eval=EvalPlan(enabled=True))
    program.on_gpu = True
    found = {d.place: (d.cpus, d.gpus, d.spread) for d in demands(program, RayConfig(cpus_per_place=0.5), program.places.values())}
    assert found == {"actor-0": (0.5, 0.0, True), "actor-1": (0.5, 0.0, True), "learner-0": (0.5, 1.0, False),
                     "evaluator-0": (0.5, 0.0, False)}
    program, _ = draw(vtrace.Config(unroll=8), "central_inference", "CartPole-v1", actors=2, eval=EvalPlan(enabled=False))
    assert {d.place for d in demands(program, RayConfig(), program.places.values()) if d.spread} == {"actor-0", "actor-1"}


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


def wait_for(path, condition, process, seconds=PATIENCE):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        if path.exists() and any(condition(json.loads(line)) for line in path.read_text().splitlines() if line.endswith("}")):
            return True
        time.sleep(0.1)
    return False


def test_the_command_line_starts_a_cluster_survives_a_kill_stops_with_ctrl_c_and_resumes(tmp_path):
    mark = f"shoal-test-{uuid.uuid4().hex}"
    env = {**os.environ, "SHOAL_TEST_MARK": mark}
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        env.pop(name, None)
    directory = tmp_path / "run"
    command = [SHOAL, "train", "impala", "CartPole-v1", "--runtime", "ray", "--actors", "1", "--run-dir", str(directory),
               "--console.mode", "plain", "--no-tensorboard", "--architecture.batch-slots", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    try:
        assert wait_for(directory / "metrics.jsonl", lambda row: row.get("learner_steps", 0) > 5, process)
        log = (directory / "logs" / "actor-0.log").read_text()
        os.kill(int(re.search(r"process (\d+)", log)[1]), signal.SIGKILL)
        assert wait_for(directory / "metrics.jsonl", lambda row: row.get("event") == "restart", process)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["stopped_by"] == "interrupt" and summary["env_steps"] > 0 and summary["nodes"] == 1
    assert "actor-0: its process was killed; restarted (1 so far)" in output
    assert "raylet" not in output and "ray start" not in output and "Traceback" not in output
    assert eventually(lambda: not marked(mark), 20), "Ray left processes behind"
    before = summary["env_steps"]
    more = ["--max-env-steps", str(before + 3000), "--actors", "2", "--console.mode", "none"]
    done = subprocess.run([SHOAL, "resume", str(directory), *more], env=env,
                          capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["stopped_by"] == "env_steps" and summary["env_steps"] >= before + 3000 and summary["restarts"] == 1
    assert summary["actors"] == 2 and (directory / "logs" / "actor-1.log").exists()
    assert eventually(lambda: not marked(mark), 20), "Ray left processes behind"
