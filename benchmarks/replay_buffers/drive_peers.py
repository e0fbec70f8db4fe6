"""The peers' side of `shoal bench replay`, run by each peer's own Python: PEER CASE CAPACITY SECONDS [RECORDING]; prints JSON."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from workloads import BATCH, INSERT, LENGTH, PERIOD, WARM, batch_of, measure_writers, rate, records, step_of

sys.path.append(str(Path(__file__).parents[2] / "src" / "shoal" / "bench"))  # last: its statistics.py hides the standard one

from parent_death import end_with_parent


def cpprb(kind: str, capacity: int, seconds: float, columns: dict[str, Any]) -> dict[str, float]:
    """The C++ prioritized buffer."""
    from cpprb import PrioritizedReplayBuffer

    shapes = {name: {"shape": c.shape[1:] or 1, "dtype": c.dtype} for name, c in columns.items()}
    buffer = PrioritizedReplayBuffer(capacity, shapes, alpha=0.6)
    rng = np.random.default_rng(0)
    priorities, new = rng.random(INSERT), rng.random(BATCH)

    def insert(turn: int) -> None:
        buffer.add(**batch_of(columns, turn), priorities=priorities)

    for turn in range(capacity // INSERT + 1):
        insert(turn)

    def update(turn: int) -> None:
        batch = buffer.sample(BATCH, beta=0.4)
        buffer.update_priorities(batch["indexes"], new)

    found = {"insert": rate(insert, INSERT, seconds), "sample": rate(lambda _: buffer.sample(BATCH, beta=0.4), BATCH, seconds),
             "sample+update": rate(update, BATCH, seconds)}
    return found


def sb3(kind: str, capacity: int, seconds: float, columns: dict[str, Any]) -> dict[str, float]:
    """The uniform buffer. It inserts fastest with many environments and samples fastest with one and without its option to save
    memory (six times as fast on frames), so each is measured in the set-up that suits it; bytes are those of the saving one."""
    import gymnasium as gym
    from stable_baselines3.common.buffers import ReplayBuffer

    obs = columns["obs"]
    space = gym.spaces.Box(0, 255, obs.shape[1:], obs.dtype.type)

    def filled(envs: int) -> tuple[Any, Any]:
        buffer = ReplayBuffer(capacity, space, gym.spaces.Discrete(6), "cpu", n_envs=envs, handle_timeout_termination=False)
        done = np.zeros(envs, bool)
        infos: list[dict[str, Any]] = [{}] * envs

        def insert(turn: int) -> None:
            part = batch_of(columns, turn, envs)
            buffer.add(part["obs"], part.get("next_obs", part["obs"]), part["action"][:, None], part["reward"], done, infos)

        for turn in range(capacity // envs + 1):
            insert(turn)
        return buffer, insert

    found = {"insert": rate(filled(INSERT)[1], INSERT, seconds)}
    buffer, _ = filled(1)
    found["sample"] = rate(lambda _: buffer.sample(BATCH), BATCH, seconds)
    if kind == "frames":
        small = ReplayBuffer(1024, space, gym.spaces.Discrete(6), "cpu", optimize_memory_usage=True,
                             handle_timeout_termination=False)
        found["bytes per transition"] = sum(a.nbytes for a in (small.observations, small.actions, small.rewards)) / 1024
    return found


def torchrl(kind: str, capacity: int, seconds: float, columns: dict[str, Any]) -> dict[str, float]:
    """The prioritized buffer over lazy tensor storage."""
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer

    buffer = TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=LazyTensorStorage(capacity), batch_size=BATCH)

    def insert(turn: int) -> None:
        part = {name: torch.from_numpy(np.ascontiguousarray(rows)) for name, rows in batch_of(columns, turn).items()}
        buffer.extend(TensorDict(part, [INSERT]))

    for turn in range(capacity // INSERT + 1):
        insert(turn)

    def update(turn: int) -> None:
        batch = buffer.sample()
        batch["td_error"] = torch.rand(BATCH)
        buffer.update_tensordict_priority(batch)

    return {"insert": rate(insert, INSERT, seconds), "sample": rate(lambda _: buffer.sample(), BATCH, seconds),
            "sample+update": rate(update, BATCH, seconds)}


# -- dm-reverb: always through its server on localhost


def reverb_serve(port: int, capacity: int, pipe: Any, parent: int) -> None:
    end_with_parent(parent)
    import reverb

    table = reverb.Table("t", reverb.selectors.Prioritized(0.6), reverb.selectors.Fifo(), capacity, reverb.rate_limiters.MinSize(1))
    server = reverb.Server([table], port=port)
    pipe.send(server.port)
    pipe.recv()
    server.stop()


def reverb_write(address: str, kind: str, path: str | None, seconds: float, queue: Any, ready: Any, parent: int) -> None:
    end_with_parent(parent)
    import reverb

    columns = records(kind, path)
    client = reverb.Client(address)
    span = LENGTH if kind == "sequences" else 1
    with client.trajectory_writer(num_keep_alive_refs=span + 1) as writer:
        items = turn = 0

        def once() -> None:
            nonlocal items, turn
            for _ in range(1 if span == 1 else PERIOD):
                writer.append(step_of(columns, turn))
                turn += 1
            if turn >= span:
                data = {name: writer.history[name][-span:] if span > 1 else writer.history[name][-1] for name in columns}
                writer.create_item("t", 1.0, data)
                items += 1
                if items % 256 == 0:
                    writer.flush(block_until_num_items=128)

        for _ in range(WARM):
            once()
        writer.flush()
        ready.wait()
        items, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            once()
        writer.flush()
        queue.put(items / (time.perf_counter() - began))


def reverb(kind: str, capacity: int, seconds: float, columns: dict[str, Any], path: str | None) -> dict[str, float]:
    """Trajectory writers in their own processes, a batched TrajectoryDataset here."""
    spawn = multiprocessing.get_context("spawn")
    mine, theirs = spawn.Pipe()
    server = spawn.Process(target=reverb_serve, args=(None, capacity, theirs, os.getpid()), daemon=True)
    server.start()
    theirs.close()
    address = f"localhost:{mine.recv()}"  # EOFError if the server dies
    found: dict[str, float] = measure_writers(reverb_write, (address, kind, path, seconds), "tcp writer")
    import reverb as package
    import tensorflow as tf

    size = 16 if kind == "sequences" else BATCH
    lead = (LENGTH,) if kind == "sequences" else ()
    dataset = package.TrajectoryDataset(
        address, "t", {name: tf.as_dtype(c.dtype) for name, c in columns.items()},
        {name: tf.TensorShape((*lead, *c.shape[1:])) for name, c in columns.items()}, max_in_flight_samples_per_worker=2 * size)
    batches = dataset.batch(size).prefetch(2).as_numpy_iterator()
    found["tcp dataset"] = rate(lambda _: next(batches), size, 2 * seconds)
    mine.send("stop")
    server.join(10)
    server.kill()
    return found


def main() -> None:
    peer, kind, capacity, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    path = sys.argv[5] if len(sys.argv) > 5 else None
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    columns = records(kind, path)
    if peer == "reverb":
        try:
            found = reverb(kind, capacity, seconds, columns, path)
        except Exception as error:  # its threads would keep the process alive
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            for child in multiprocessing.active_children():
                child.kill()
            os._exit(1)
    else:
        found = {"cpprb": cpprb, "sb3": sb3, "torchrl": torchrl}[peer](kind, capacity, seconds, columns)
    sys.stdout.write("\n" + json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)  # reverb's threads do not always end


if __name__ == "__main__":
    main()
