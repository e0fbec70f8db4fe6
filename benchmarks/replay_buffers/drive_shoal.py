"""shoal's replay buffers at one workload; prints JSON.

    python -m benchmarks.replay_buffers.drive_shoal WAY CASE CAPACITY SECONDS [RECORDING]

WAY is inline, ipc or tcp. Over a socket the server, each writer and the reader are processes of their own.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
from typing import Any

import numpy as np

from benchmarks.replay_buffers.workloads import (
    BATCH,
    INSERT,
    LENGTH,
    PERIOD,
    WARM,
    batch_of,
    measure_writers,
    rate,
    records,
    step_of,
)
from shoal import replay
from shoal.bench.parent_death import end_with_parent

__all__ = ["main"]


def table(capacity: int) -> replay.Table:
    return replay.Table("t", replay.Prioritized(0.6), max_size=capacity)


def inline(kind: str, capacity: int, seconds: float, columns: dict[str, Any]) -> dict[str, float]:
    client = replay.Server([table(capacity)]).client()
    rng = np.random.default_rng(0)
    priorities, new = rng.random(INSERT), rng.random(BATCH)
    found: dict[str, float] = {}
    if kind == "sequences":
        with client.writer(max_history=LENGTH) as writer:
            found["insert"] = rate(lambda turn: _sequence(writer, columns, turn), 1, seconds)
        found["sample"] = rate(lambda _: client.sample("t", 16), 16, seconds)
        return found

    def insert(turn: int) -> None:
        client.insert_batch(batch_of(columns, turn), {"t": priorities})

    for turn in range(capacity // INSERT + 1):
        insert(turn)

    def update(turn: int) -> None:
        batch = client.sample("t", BATCH)
        client.update_priorities("t", batch.info.keys, new)

    found["insert"] = rate(insert, INSERT, seconds)
    fresh = replay.Server([table(capacity)]).client()  # of its own: a table that changes its chunk sizes maps new memory
    with fresh.writer(max_history=2) as writer:

        def append(turn: int) -> None:
            writer.append_batch(batch_of(columns, turn))
            writer.create_items("t", priorities, {name: writer.history[name][-1] for name in columns})

        for turn in range(2 * capacity // INSERT + 1):
            append(turn)
        found["append_batch"] = rate(append, INSERT, seconds)
    found["sample"] = rate(lambda _: client.sample("t", BATCH), BATCH, seconds)
    found["sample+update"] = rate(update, BATCH, seconds)
    if kind == "frames":
        found["bytes per transition"] = _stacked_bytes(columns)
    return found


def _sequence(writer: replay.Writer, columns: dict[str, Any], turn: int) -> None:
    """PERIOD steps and the item that they complete."""
    for at in range(PERIOD if turn else LENGTH):
        writer.append(step_of(columns, turn * PERIOD + at))
    writer.create_item("t", 1.0, {name: writer.history[name][-LENGTH:] for name in columns})


def _stacked_bytes(columns: dict[str, Any]) -> float:
    """Bytes stored per transition of four stacked frames and the four after them."""
    server = replay.Server([replay.Table("t", replay.Uniform())])
    with server.client().writer(max_history=5) as writer:
        for turn in range(1000):
            step = step_of(columns, turn)
            writer.append({**step, "obs": step["obs"][..., -1]})
            if turn >= 4:
                h = writer.history
                data = {"obs": h["obs"][-5:-1], "next_obs": h["obs"][-4:], "action": h["action"][-2], "reward": h["reward"][-2]}
                writer.create_item("t", 1.0, data)
    info = server.info()
    return float(info["stored_bytes"] / info["tables"]["t"]["size"])


# -- over a socket


def serve(address: str, capacity: int, pipe: Any, parent: int) -> None:
    end_with_parent(parent)
    server = replay.Server([table(capacity)], address=address)
    pipe.send(server.address)
    pipe.recv()
    server.close()


def write(address: str, kind: str, path: str | None, seconds: float, queue: Any, ready: Any, parent: int) -> None:
    end_with_parent(parent)
    columns = records(kind, path)
    client = replay.Client(address, timeout=60)
    with client.writer(max_history=LENGTH if kind == "sequences" else 2) as writer:

        def once(turn: int) -> None:
            if kind == "sequences":
                _sequence(writer, columns, turn)
            else:
                writer.append(step_of(columns, turn))
                writer.create_item("t", 1.0, {name: writer.history[name][-1] for name in columns})

        for turn in range(WARM):
            once(turn)
        writer.flush()
        ready.wait()
        began, turn = time.perf_counter(), WARM
        while time.perf_counter() - began < seconds:
            once(turn)
            turn += 1
        writer.flush()
        queue.put((turn - WARM) / (time.perf_counter() - began))


def networked(way: str, kind: str, capacity: int, seconds: float, path: str | None) -> dict[str, float]:
    spawn = multiprocessing.get_context("spawn")
    mine, theirs = spawn.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/replay" if way == "ipc" else "tcp://127.0.0.1:0"
        server = spawn.Process(target=serve, args=(address, capacity, theirs, os.getpid()))
        server.start()
        address = mine.recv()
        found = measure_writers(write, (address, kind, path, seconds), f"{way} writer")
        size = 16 if kind == "sequences" else BATCH
        with replay.Client(address, timeout=30) as client:
            with client.dataset("t", size, prefetch=3) as dataset:
                found[f"{way} dataset"] = rate(lambda _: next(dataset), size, 2 * seconds)
            new = np.random.default_rng(0).random(size)
            if kind != "sequences":

                def update(turn: int) -> None:
                    batch = client.sample("t", size)
                    client.update_priorities("t", batch.info.keys, new[: len(batch)])

                found[f"{way} sample+update"] = rate(update, size, seconds)
        mine.send("stop")
        server.join(10)
    return found


def main() -> int:
    way, kind, capacity, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    path = sys.argv[5] if len(sys.argv) > 5 else None
    if way == "inline":
        found = inline(kind, capacity, seconds, records(kind, path))
    else:
        found = networked(way, kind, capacity, seconds, path)
    sys.stdout.write("\n" + json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
