"""The replay service under full load for ten minutes: memory and latency must not grow.

SHOAL_SOAK_SECONDS shortens it, to try it out; a shorter one is never met.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from evidence.lines import Line

__all__ = ["LINES"]

SECONDS = 600.0

SERVER = """
import sys
from shoal import replay
server = replay.Server([replay.Table("t", replay.Prioritized(0.6), max_size=50_000)], address=sys.argv[1])
print(server.address, flush=True)
sys.stdin.readline()
"""
WRITER = """
import sys
import numpy as np
from shoal import replay
client, rng = replay.Client(sys.argv[1], timeout=60), np.random.default_rng(int(sys.argv[2]))
writer = client.writer(max_history=4)
step = 0
while True:
    writer.append({"obs": rng.random(16, np.float32), "action": step % 6, "reward": np.float32(0.5)})
    step += 1
    if step >= 4:
        h = writer.history
        writer.create_item("t", rng.random(), {"obs": h["obs"][-4:], "action": h["action"][-1], "reward": h["reward"][-4:]})
    if step % 1000 == 0:
        writer.end_episode()
        step = 0
"""


def resident(pid: int) -> float:
    """Megabytes in RAM."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def slope(times: list[float], values: list[float]) -> float:
    """Growth over the whole span, as a part of the mean."""
    rate = np.polyfit(times, values, 1)[0]
    return float(rate * (times[-1] - times[0]) / np.mean(values))


def soak(kind: str, seed: int) -> dict[str, Any]:
    """Two writers at full rate, a reader that samples and updates; every second memory and the median latency."""
    from shoal import replay

    seconds = float(os.environ.get("SHOAL_SOAK_SECONDS", SECONDS))
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/s" if kind == "ipc" else "tcp://127.0.0.1:0"
        start = [sys.executable, "-c"]
        server = subprocess.Popen([*start, SERVER, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        writers = [subprocess.Popen([*start, WRITER, address, str(seed + w)]) for w in range(2)]
        times: list[float] = []
        memory: list[float] = []
        latency: list[float] = []
        try:
            with replay.Client(address, timeout=60) as client:
                while client.info()["tables"]["t"]["size"] < 50_000:  # the growth of a table that fills up is no leak
                    time.sleep(0.1)
                began, rng = time.monotonic(), np.random.default_rng(seed)
                while (now := time.monotonic() - began) < seconds:
                    took, until = [], time.monotonic() + 1.0
                    while time.monotonic() < until:
                        before = time.perf_counter()
                        batch = client.sample("t", 256)
                        client.update_priorities("t", batch.info.keys, rng.random(256))
                        took.append(time.perf_counter() - before)
                    times.append(now)
                    latency.append(1e3 * float(np.median(took)))
                    memory.append(resident(server.pid) + sum(resident(writer.pid) for writer in writers))
                info = client.info()
                alive = sum(process.poll() is None for process in (*writers, server))
        finally:
            for process in (*writers, server):
                process.send_signal(signal.SIGKILL)
                process.wait()
    settled = len(times) // 10  # buffers find their sizes in the first tenth
    grown = {"memory": slope(times[settled:], memory[settled:]), "latency": slope(times[settled:], latency[settled:])}
    table = info["tables"]["t"]
    lived = alive == len(writers) + 1 and info["lost"] == 0 and seconds >= SECONDS
    return {
        "met": lived and grown["memory"] < 0.05 and grown["latency"] < 0.25, "seconds": seconds, "alive": alive, "growth": grown,
        "memory_mb": [memory[settled], memory[-1]], "latency_ms": [latency[settled], latency[-1]], "inserts": table["inserts"],
        "samples": table["samples"], "inserts_per_second": table["inserts_per_second"], "lost": info["lost"],
    }  # fmt: skip


STATEMENT = "Ten minutes of two writers and a reader at full rate over {}: memory grows < 5 %, median latency < 25 %"
LINES = [
    Line("stress-replay-soak-ipc", 4, STATEMENT.format("ipc"), lambda seed: soak("ipc", seed), seeds=(0,)),
    Line("stress-replay-soak-tcp", 4, STATEMENT.format("TCP"), lambda seed: soak("tcp", seed), seeds=(0,)),
]
