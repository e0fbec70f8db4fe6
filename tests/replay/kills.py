"""A replay server and its writers killed at random; afterwards nothing is missing that was not counted."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from shoal import replay

__all__ = ["kill_at_random"]

SERVER = "import sys; from shoal.replay.service import replay_commands as c; sys.exit(c.serve_command(sys.argv[1:]))"
WRITER = """
import json, select, sys, time
import numpy as np
from shoal import replay
who = int(sys.argv[2])
writer = replay.Client(sys.argv[1], timeout=60).writer(max_history=2)
created = 0
while True:
    writer.append({"who": who, "i": created, "x": np.full(700, created % 251, np.int64)})
    writer.create_item("t", 1.0, {name: writer.history[name][-1] for name in ("who", "i", "x")})
    created += 1
    if created % 10 == 0:
        writer.flush()
        if created == 10:
            print("begun", flush=True)
        if select.select([sys.stdin], [], [], 0)[0]:
            break
    time.sleep(0.002)
writer.flush()
print(json.dumps({"who": who, "created": created, "lost": writer.lost}), flush=True)
sys.stdin.readline()
sys.stdin.readline()
"""


def table() -> replay.Table:
    return replay.Table("t", replay.Fifo(), max_size=10**6, max_times_sampled=1)


def saved_items(folder: Path) -> Counter[tuple[int, int]]:
    """The items (writer, number) of the newest whole checkpoint; each has the row that was written for it."""
    with replay.Server([table()], checkpoint_dir=folder) as server:
        size = server.info()["tables"]["t"]["size"]
        if not size:
            return Counter()
        data = server.client().sample("t", size, timeout=0).data
        assert (data["x"] == data["i"][:, None] % 251).all()
        return Counter(zip(data["who"].tolist(), data["i"].tolist(), strict=True))


class Scene:
    """One server, its checkpoints, and two writers at a time."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.folder = folder / "checkpoints"
        if kind == "ipc":
            self.address = f"ipc://{folder}/s"
        else:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self.address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        self.writers: list[subprocess.Popen[str]] = []
        self.new: list[subprocess.Popen[str]] = []  # writers that have not said yet that they began
        self.count = self.dead_writers = 0
        self.held: Counter[tuple[int, int]] = Counter()  # items of all checkpoints that a server came back with
        self.server = self.serve()
        for _ in range(2):
            self.write()
        self.await_server()

    def serve(self) -> subprocess.Popen[str]:
        words = ["--table", "t:fifo:1000000", "--address", self.address, "--checkpoint-dir", str(self.folder),
                 "--checkpoint-seconds", "0.15"]  # fmt: skip
        return subprocess.Popen([sys.executable, "-c", SERVER, *words], stdout=subprocess.PIPE, text=True)

    def await_server(self) -> None:
        assert self.server.stdout is not None and self.server.stdout.readline().startswith("serving")

    def write(self) -> None:
        self.count += 1
        command = [sys.executable, "-c", WRITER, self.address, str(self.count)]
        self.writers.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        self.new.append(self.writers[-1])

    def await_writers(self) -> None:
        """Until every writer has had items confirmed."""
        while self.new:
            pipe = self.new.pop().stdout
            assert pipe is not None and pipe.readline() == "begun\n"

    def kill_writer(self, rng: random.Random) -> None:
        victim = self.writers.pop(rng.randrange(len(self.writers)))
        _kill(victim)
        self.dead_writers += 1
        self.write()

    def kill_server(self) -> None:
        _kill(self.server)
        self.held |= saved_items(self.folder)
        self.server = self.serve()
        self.await_server()

    def finish(self) -> dict[str, Any]:
        """Let the writers that live confirm all, and compare what they and the checkpoints say with what is there."""
        for writer in self.writers:
            _say(writer)
        told = [json.loads(writer.stdout.readline()) for writer in self.writers if writer.stdout is not None]
        with replay.Client(self.address, timeout=60) as client:
            client.checkpoint()
            lost = client.info()["lost"]
        found = saved_items(self.folder)
        gaps = {}
        for one in told:
            present = sum(who == one["who"] for who, _ in found)
            gaps[one["who"]] = (one["created"] - present, one["lost"])
        return {
            "missing": len(self.held - found), "twice": sum(count > 1 for count in found.values()), "items": len(found),
            "gaps": gaps, "exact": all(gap == counted for gap, counted in gaps.values()), "lost": lost,
            "summed": self.dead_writers > 0 or lost == sum(counted for _, counted in gaps.values()),
        }  # fmt: skip

    def close(self) -> None:
        for process in (*self.writers, self.server):
            _kill(process)


def _say(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("stop\n")
    process.stdin.flush()


def _kill(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.kill(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def kill_at_random(kind: str, folder: Path, kills: list[str], seed: int) -> dict[str, Any]:
    """Kill the server, a client or both at random times; `met` says whether every promise was kept."""
    rng, scene = random.Random(seed), Scene(kind, folder)
    try:
        for victim in kills:
            scene.await_writers()
            time.sleep(rng.uniform(0.1, 0.7))
            if victim != "server":
                scene.kill_writer(rng)
            if victim != "client":
                scene.kill_server()
        scene.await_writers()
        time.sleep(0.3)
        result = scene.finish()
    finally:
        scene.close()
    whole = not result["missing"] and not result["twice"] and result["items"] > 0
    return {"met": whole and result["exact"] and result["summed"], "kills": kills, **result}
