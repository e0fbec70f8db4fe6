"""Issue 7: presets on a Ray cluster of several nodes on this machine (each with its own object store), and what they survive."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from evidence.lines import KEPT, Line, train
from shoal.runtime.ray.ray_config import set_defaults

__all__ = ["LINES", "TrainingProcess", "cluster", "on"]

SEEDS = (1, 2, 3)
GOALS: dict[str, tuple[tuple[str, ...], float, int]] = {
    "impala": (("impala", "CartPole-v1"), 475, 400_000),
    "a3c-master": (("a3c", "CartPole-v1", "--architecture.mode", "master"), 450, 400_000),
    "seed": (("seed", "CartPole-v1"), 450, 400_000),
    "apex": (("apex", "CartPole-v1"), 450, 200_000),
    "r2d2": (("r2d2", "shoal/TMaze-v0"), 0.9, 200_000),
    "ppo": (("ppo", "CartPole-v1"), 475, 300_000),
    "gala": (("gala", "CartPole-v1"), 450, 400_000),
}
SAVED = ("--actors", "2", "--checkpoint.every-seconds", "5")
PATIENCE_SECONDS = 900
STORE_SECONDS = 600
STORE_GROWTH_MB = 20.0
OPEN_GROWTH = 50
LOOK_SECONDS = 5.0


@contextlib.contextmanager
def cluster(nodes: int, cpus: int = 8) -> Iterator[Any]:
    """A head without CPUs, and this many nodes to work on."""
    set_defaults()
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 100_000_000}
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(nodes):
            add(made, cpus)
        yield made
    finally:
        made.shutdown()


def add(made: Any, cpus: int = 8) -> Any:
    return made.add_node(num_cpus=cpus, object_store_memory=200_000_000)


def on(made: Any) -> tuple[str, ...]:
    return ("--runtime", "ray", "--ray.address", made.address, "--console.mode", "plain", "--no-tensorboard")


def reaches(name: str) -> Line:
    arguments, goal, budget = GOALS[name]

    def run(seed: int) -> dict[str, Any]:
        with cluster(2) as made:
            limit = ("--until-return", str(goal), "--max-env-steps", str(budget))
            result = train(*arguments, "--actors", "2", *limit, *on(made), seed=seed, timeout=PATIENCE_SECONDS)
        return {"met": result["stopped_by"] == "return" and result["eval_return"] >= goal, **result}

    words = f"{' '.join(arguments)} with --runtime ray on two nodes >= {goal:g} within {budget:,} env steps"
    return Line(f"ray-{name}", 7, words, run, SEEDS)


class TrainingProcess:
    """A training run in a process of its own, whose places can be found."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.directory = folder / "run"
        command = [str(Path(sys.executable).parent / "shoal"), "train", *arguments, "--run-dir", str(self.directory)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def rows(self, kind: str) -> list[dict[str, Any]]:
        path = self.directory / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [row for row in (json.loads(line) for line in lines if line.endswith("}")) if row.get("kind") == kind]

    def updates(self) -> float:
        return self.rows("snapshot")[-1]["learner_steps"] if self.rows("snapshot") else 0

    def where(self, place: str) -> tuple[str, int]:
        """The node and the process that a place lives in now."""
        found = re.findall(r"on node (\w+) .*process (\d+)", (self.directory / "logs" / f"{place}.log").read_text())
        return found[-1][0], int(found[-1][1])

    def wait(self, condition: Any) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the run ended too early: {self.said()[-2000:]}")
            time.sleep(0.2)

    def said(self) -> str:
        """What it printed; waits for its end."""
        return (self.process.stdout or sys.stdin).read()

    def further(self, updates: int) -> None:
        start = self.updates()
        self.wait(lambda: self.updates() >= start + updates)

    def end(self) -> dict[str, Any]:
        self.process.communicate(timeout=PATIENCE_SECONDS)
        summary = json.loads((self.directory / "summary.json").read_text())
        events = [row["text"] for row in self.rows("event") if row.get("event") == "restart"]
        return {**{key: summary.get(key) for key in KEPT}, "restarts_explained": events}


def removes(first: str, second: str) -> Line:
    """Nodes are removed under a run: the one with an actor that the learner does not live on, and the learner's."""

    def run(seed: int) -> dict[str, Any]:
        with cluster(2) as made, tempfile.TemporaryDirectory() as folder:
            running = TrainingProcess(Path(folder), *GOALS["impala"][0], *SAVED, "--until-return", "475",
                                      "--max-env-steps", "2000000", "--eval.every-env-steps", "400000",
                                      "--seed", str(seed), *on(made))
            try:
                for victim in (first, second):
                    running.further(150)
                    learner = running.where("learner-0")[0]
                    wanted = [n for n in made.worker_nodes if (n.node_id == learner) == (victim == "learner")]
                    restarts = running.rows("snapshot")[-1]["restarts"]
                    made.remove_node(wanted[0], allow_graceful=False)
                    add(made)
                    running.wait(lambda before=restarts: running.rows("snapshot")[-1]["restarts"] > before)
                result = running.end()
            finally:
                running.process.kill()
        return {"met": result["stopped_by"] == "return" and result["restarts"] >= 2, **result}

    return Line(f"ray-nodes-{first}-{second}", 7, f"impala on CartPole-v1 goes on and reaches 475 when the node of the {first} is "
                f"removed, then that of the {second}", run, (1,))


def shards(seed: int) -> dict[str, Any]:
    """One of two shards of the table is killed, later the other one; which is first depends on the seed."""
    order = ("replay-1", "replay-0") if seed % 2 else ("replay-0", "replay-1")
    with cluster(2) as made, tempfile.TemporaryDirectory() as folder:
        running = TrainingProcess(Path(folder), *GOALS["apex"][0], *SAVED, "--replay.checkpoint", "--replay.shards", "2",
                                  "--until-return", "450", "--eval.every-env-steps", "30000", "--max-env-steps", "400000",
                                  "--seed", str(seed), *on(made))
        try:
            running.further(300)
            nodes = {running.where(victim)[0] for victim in order}
            for count, victim in enumerate(order, 1):
                os.kill(running.where(victim)[1], signal.SIGKILL)
                running.wait(lambda n=count: running.rows("snapshot")[-1]["restarts"] == n)
                running.further(100)
            result = running.end()
        finally:
            running.process.kill()
    return {"met": result["stopped_by"] == "return" and result["restarts"] == len(result["restarts_explained"]) == 2
            and len(nodes) == 2, "killed": order, "nodes_of_shards": len(nodes), **result}


class Looks:
    """What each node's object store holds, and what the processes of the cluster and of its run have open, look by look."""

    def __init__(self, made: Any) -> None:
        from ray._private.internal_api import get_state_from_address

        self._state = get_state_from_address(made.address)
        self.begun = time.monotonic()
        self.held: dict[str, list[tuple[float, float]]] = {}  # node -> (seconds, megabytes)
        self.open: list[tuple[float, float]] = []             # (seconds, descriptors)
        self.spilled = 0.0

    def look(self) -> None:
        from ray._private.internal_api import node_stats

        now = time.monotonic() - self.begun
        for node in (node for node in self._state.node_table() if node["Alive"]):
            stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], False).store_stats
            self.held.setdefault(node["NodeID"][:8], []).append((now, stats.object_store_bytes_used / 1e6))
            self.spilled = max(self.spilled, stats.spilled_bytes_total / 1e6)
        self.open.append((now, float(sum(map(descriptors, below())))))


def below() -> list[psutil.Process]:
    """All processes that this one has started, and those have."""
    return psutil.Process().children(recursive=True)


def descriptors(process: psutil.Process) -> int:
    try:
        return int(process.num_fds())
    except psutil.Error:  # it has just ended
        return 0


def dead(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def by_minute(looks: list[tuple[float, float]]) -> list[float]:
    """Medians of whole minutes."""
    whole = range(int(looks[-1][0] // 60))
    return [round(statistics.median([value for at, value in looks if 60 * m <= at < 60 * (m + 1)]), 1) for m in whole]


def growth(minutes: list[float]) -> float:
    """From the second to the fourth minute to the last three; the first one is the start."""
    return max(minutes[-3:]) - max(minutes[1:4])


def store(seed: int) -> dict[str, Any]:
    """The object store of each node, minute by minute, from outside; and what Ray's processes have open, and the dead ones."""
    with cluster(2) as made, tempfile.TemporaryDirectory() as folder:
        running = TrainingProcess(Path(folder), "impala", "ALE/Pong-v5", "--actors", "2", "--max-seconds", str(STORE_SECONDS),
                                  "--seed", str(seed), *on(made))
        try:
            running.further(5)
            looks = Looks(made)
            while running.process.poll() is None:
                looks.look()
                time.sleep(LOOK_SECONDS)
            result = running.end()
        finally:
            running.process.kill()
        patience = time.monotonic() + 20
        while (zombies := sum(map(dead, below()))) and time.monotonic() < patience:
            time.sleep(0.5)
    nodes = {node: by_minute(held) for node, held in looks.held.items()}
    opened = by_minute(looks.open)
    grown = {node: round(growth(minutes), 1) for node, minutes in nodes.items()}
    used = max(max(minutes) for minutes in nodes.values()) > 0
    return {"met": used and max(grown.values()) <= STORE_GROWTH_MB and looks.spilled == 0 and growth(opened) <= OPEN_GROWTH
            and not zombies and result["stopped_by"] == "seconds",
            "megabytes_by_node_and_minute": nodes, "grown_mb": grown, "spilled_mb": looks.spilled,
            "descriptors_by_minute": opened, "zombies": zombies, **result}


LINES = [
    *(reaches(name) for name in GOALS),
    removes("actor", "learner"), removes("learner", "actor"),
    Line("ray-replay-killed", 7, "apex on CartPole-v1, its replay table in two shards on two nodes, goes on and reaches 450 when "
         "one of them is killed, then the other one; in both orders", shards, (1, 2)),
    Line("ray-object-store", 7, f"in {STORE_SECONDS} s of impala on Pong no node's object store grows by more than "
         f"{STORE_GROWTH_MB:g} MB and nothing is spilled, all processes together open at most {OPEN_GROWTH} more files, and no "
         "zombies are left", store, (1,)),
]
