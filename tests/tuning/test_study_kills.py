"""Studies whose processes are killed: members, the server that forks them, the coordinator, a node of a Ray cluster."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

import shoal
from shoal import cli
from shoal.runtime.ray.ray_config import set_defaults
from shoal.tuning.study import Study
from tests.runtime.harness import PATIENCE

WORDS = ["a2c", "shoal/Catch-v0", "--vary", "algorithm.lr=loguniform(0.0001,0.01)", "--population", "2", "--every-env-steps",
         "2000", "--max-env-steps", "6000", "--exploit", "tournament", "--no-tensorboard", "--eval.episodes", "5"]


def eventually(condition):
    until = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < until
        time.sleep(0.02)
    return found


def below(pid):
    """The processes that members run in: what the server has forked."""
    return [child for child in psutil.Process(pid).children(recursive=True) if psutil.Process(pid) not in (child, child.parent())]


def slices(study):
    return [row for row in study.lineage() if row["event"] == "slice"] if (study.path / "lineage.jsonl").exists() else []


def test_kills_of_member_and_server(tmp_path, capsys):
    """A killed member goes on, a killed coordinator leaves nobody behind, and the study is resumed to its end."""
    path = tmp_path / "study"
    command = [sys.executable, "-m", "shoal.cli", "tune", *WORDS, "--study", str(path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        eventually(lambda: process.poll() is not None or slices(Study(path)))
        victim = eventually(lambda: process.poll() is not None or below(process.pid))
        assert process.poll() is None, process.stderr.read()
        victim[0].send_signal(signal.SIGKILL)
        (server,) = psutil.Process(process.pid).children()
        seen = len(slices(Study(path)))
        eventually(lambda: len(slices(Study(path))) > seen or process.poll() is not None)
        server.send_signal(signal.SIGKILL)
        eventually(lambda: process.poll() is not None or below(process.pid))
        left = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))] \
            if process.poll() is None else []
        process.kill()
    eventually(lambda: not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in left))
    assert cli.main(["tune", "resume", str(path)]) == 0
    members = Study.open(path).members()
    assert len(members) == 2 and all(one.env_steps >= 6000 and not one.copying for one in members)
    assert "report.html" in capsys.readouterr().out


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
def test_node_of_a_cluster_is_lost(tmp_path):
    """Members train on nodes without a common disk; slices on a node that is removed are done again on another one."""
    set_defaults()
    import ray
    from ray.cluster_utils import Cluster

    size = {"num_cpus": 1, "object_store_memory": 80_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
    try:
        lost = cluster.add_node(**size)
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        path = tmp_path / "study"
        remover = threading.Thread(target=lambda: (eventually(lambda: slices(Study(path))),
                                                   cluster.remove_node(lost, allow_graceful=False)))
        remover.start()
        study = shoal.tune("a2c", "shoal/Catch-v0", vary={"algorithm.lr": shoal.loguniform(1e-4, 1e-2)}, population=2, study=path,
                           search="random", every_env_steps=2000, max_env_steps=4000, cluster=cluster.address, tensorboard=False,
                           **{"eval.episodes": 5})
        remover.join()
        assert [len([row for row in slices(study) if row["member"] == k]) >= 2 for k in (0, 1)] == [True, True]
        assert all(one.env_steps >= 4000 and one.fitness is not None for one in study.members()) and study.best.policy is not None
        assert sum(node["Alive"] for node in ray.nodes()) == 1
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert not [name for name in os.listdir(path / "members") if name.endswith((".new", ".old"))]
