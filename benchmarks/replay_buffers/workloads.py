"""The work that all replay buffers are measured at. It imports nothing of shoal: peers run it in their own environments.

    small      obs and next_obs of 4 floats, action, reward; capacity 100k and 1M
    frames     84x84x4 uint8, action, reward; recorded Pong where ale-py is there
    sequences  120 steps of 84x84 uint8, one every 40 steps (R2D2)
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["BATCH", "INSERT", "KINDS", "LENGTH", "PERIOD", "WARM", "batch_of", "check_kind",
           "measure_writers", "rate", "records", "step_of"]

KINDS = ("small", "frames", "sequences")
BATCH, INSERT = 256, 64
LENGTH, PERIOD = 120, 40
WARM = 50


def check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is not possible: give {', '.join(KINDS[:-1])} or {KINDS[-1]}")


def records(kind: str, path: str | None, count: int = 1024) -> dict[str, Any]:
    """Columns of `count` steps."""
    check_kind(kind)
    rng = np.random.default_rng(0)
    columns: dict[str, Any] = {"action": rng.integers(0, 6, count), "reward": rng.random(count, np.float32)}
    if kind == "small":
        obs = rng.random((count + 1, 4), np.float32)
        return {**columns, "obs": obs[:-1], "next_obs": obs[1:]}
    frames = np.load(path)[:count] if path else rng.integers(0, 255, (count, 84, 84), np.uint8)
    frames = np.resize(frames, (count, 84, 84))
    if kind == "sequences":
        return {**columns, "obs": frames}
    stacks = np.stack([np.roll(frames, shift, 0) for shift in (3, 2, 1, 0)], -1)
    return {**columns, "obs": np.ascontiguousarray(stacks)}


def batch_of(columns: dict[str, Any], turn: int, size: int = INSERT) -> dict[str, Any]:
    """The rows of one insert; turn after turn goes through the recording."""
    count = len(columns["action"])
    at = (turn * size) % (count - size + 1)
    return {name: column[at : at + size] for name, column in columns.items()}


def step_of(columns: dict[str, Any], turn: int) -> dict[str, Any]:
    at = turn % len(columns["action"])
    return {name: column[at] for name, column in columns.items()}


def measure_writers(write: Callable[..., None], told: tuple[Any, ...], name: str) -> dict[str, float]:
    """Items per second of 1, 4 and 8 writers together, each a process that calls write(*told, queue, barrier, parent)."""
    spawn = multiprocessing.get_context("spawn")
    found: dict[str, float] = {}
    for writers in (1, 4, 8):
        queue, ready = spawn.Queue(), spawn.Barrier(writers)
        processes = [spawn.Process(target=write, args=(*told, queue, ready, os.getpid())) for _ in range(writers)]
        for process in processes:
            process.start()
        found[f"{name} x{writers}"] = sum(queue.get(timeout=120) for _ in processes)
        for process in processes:
            process.join()
    return found


def rate(act: Callable[[int], Any], items: int, seconds: float, pieces: int = 5) -> float:
    """Items per second: the median of several pieces of time, since others share the machine."""
    act(0)
    found, turn = [], 1
    for _ in range(pieces):
        began, done = time.perf_counter(), 0
        while (spent := time.perf_counter() - began) < seconds / pieces or not done:
            act(turn)
            turn += 1
            done += items
        found.append(done / max(spent, 1e-9))
    return float(np.median(found))
