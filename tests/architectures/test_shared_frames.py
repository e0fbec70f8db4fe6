"""Items that share frames: each frame is sent and stored once, and batches have the bits of items that were stored whole."""

from __future__ import annotations

from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest

from shoal import envs, replay
from shoal.algorithms.records.frame_runs import FrameRuns
from shoal.algorithms.records.transitions import Transitions
from shoal.algorithms.records.windows import Windows
from shoal.envs.interface import Step
from shoal.replay.table.replay_core import Core
from shoal.roles.replay_frames import FrameTable, frame_stacks, insert_fields, kept_columns, unused_bytes
from shoal.roles.replay_memory import codecs
from shoal.roles.replay_wires import Block, items_layout, store, stored_columns
from shoal.slots import Layout, leaves

SEATS, STACK, SIDE = 3, 4, 64
SPACE = gym.spaces.Box(0, 255, (STACK, SIDE, SIDE), np.uint8)


class Film:
    """Environments that show the newest of random frames; `ends` has the probabilities of a termination and of a truncation."""

    def __init__(self, seed: int, ends: tuple[float, float]) -> None:
        self.rng, self.ends = np.random.default_rng(seed), ends
        self.stacks = np.zeros((SEATS, STACK, SIDE, SIDE), np.uint8)

    def frame(self) -> np.ndarray:
        return self.rng.integers(0, 256, (SIDE, SIDE), np.uint8)

    def begin(self, seat: int) -> None:
        self.stacks[seat] = 0
        self.stacks[seat, -1] = self.frame()

    def reset(self) -> Step:
        for seat in range(SEATS):
            self.begin(seat)
        no, yes = np.zeros(SEATS, bool), np.ones(SEATS, bool)
        return Step(self.stacks.copy(), np.zeros(SEATS, np.float32), np.ones(SEATS, np.float32), yes, no, no, yes)

    def step(self) -> Step:
        luck = self.rng.random(SEATS)
        terminated, truncated = luck < self.ends[0], (luck >= self.ends[0]) & (luck < sum(self.ends))
        self.stacks[:, :-1] = self.stacks[:, 1:].copy()
        self.stacks[:, -1] = [self.frame() for _ in range(SEATS)]
        cut = np.flatnonzero(truncated)
        final = self.stacks[cut].copy() if len(cut) else None
        over = terminated | truncated
        for seat in np.flatnonzero(over):
            self.begin(seat)
        reward = self.rng.normal(size=SEATS).astype(np.float32)
        return Step(self.stacks.copy(), reward, (~terminated).astype(np.float32), over, over, truncated, np.ones(SEATS, bool), cut,
                    final)


def transitions(n: int) -> Transitions:
    return Transitions(SEATS, SPACE, gym.spaces.Discrete(3), n_step=n, frame_stack=STACK)


RECORDS = {"one step": transitions(1), "three steps": transitions(3), "five steps": transitions(5),
           "windows": Windows(SEATS, SPACE, gym.spaces.Discrete(3), burn_in=3, length=6, stride=4, eta=0.9, frame_stack=STACK)}
ENDS = {"long": (0.002, 0.002), "short": (0.2, 0.2), "cut": (0.0, 0.3)}


def tables(record, count, compression):
    """Tables of items that share frames and of whole ones, and what puts an insert into each."""
    columns = stored_columns(record.layout)
    shared = FrameTable(frame_stacks(record), columns, count)
    cores = [Core([replay.Table("t", replay.Prioritized(0.6), replay.Fifo(), max_size=200, limiter=replay.MinSize(1))],
                  compression=codecs(kept, compression), seed=3) for kept in (kept_columns(record, columns, count), columns)]
    return cores, (lambda items, p: shared.put(cores[0], cores[0].table("t"), items, p),
                   lambda items, p: store(cores[1], cores[1].table("t"), columns, items, p))


def batch_of(core, layout):
    block = Block(np.full(layout.nbytes, 7, np.uint8))
    info = core.try_sample("t", layout.count, block).info
    return {"/".join(path): leaf.copy() for path, leaf in leaves(layout.views(block.memory))}, info


def test_torn_insert_leaves_nothing():
    """Frames whose actor has a successor: no item, and their memory is free again."""
    record, count = RECORDS["one step"], 7
    (core, _), _ = tables(record, count, "none")
    shared = FrameTable(frame_stacks(record), stored_columns(record.layout), count)
    items, table = Layout(insert_fields(record, count)).empty(), core.table("t")
    items["frame_count"][0] = 11
    assert not shared.put(core, table, items, np.ones(count), lambda: True)
    assert table.size == 0 and table.nbytes == 0
    assert shared.put(core, table, items, np.ones(count), lambda: False) and table.size == count and table.nbytes > 0


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("name", RECORDS)
def test_batches_have_the_bits_of_items(name, ends):
    record, count, rng = RECORDS[name], 7, np.random.default_rng(5)
    recorders = [record.recorder(), replace(record, frame_stack=1).recorder()]
    inserts = [Layout(insert_fields(record, count)).empty(), record.layout.joined(count).empty()]
    cores, put = tables(record, count, "lz4" if ends == "long" else "none")
    layout, film, sent, taken = items_layout(record.layout, 16), Film(1, ENDS[ends]), 0, 0
    now = film.reset()
    for recorder in recorders:
        recorder.begin(now)
    for step in range(500):
        action, now = rng.integers(0, 3, SEATS), film.step()
        for recorder in recorders:
            recorder.write(action, {}, {}, now, step)
        wanted = count if step < 300 else 40 * count  # later on items wait, and room must be made for their frames
        while recorders[0].ready >= wanted:
            for recorder, into, one in zip(recorders, inserts, put, strict=True):
                priority = np.zeros(count)
                recorder.take(into, priority)
                into["time"][:] = step
                one(into, priority)
            sent, taken = sent + int(inserts[0]["frame_count"][0]), taken + count
            (shared, info), (whole, same) = (batch_of(core, layout) for core in cores)
            assert (info.keys == same.keys).all()
            for field, rows in whole.items():
                np.testing.assert_array_equal(shared[field], rows, field)
    stacks = sum(np.prod(leaf.shape[1:-3], dtype=int) for path, leaf in leaves(inserts[1]) if path[0] in record.observed)
    assert taken > 100 and recorders[0].ready == recorders[1].ready < 40 * count
    assert cores[0].table("t").size == cores[1].table("t").size == min(200, taken)
    assert sent < (0.6 if ends == "long" else 1) * STACK * stacks * taken, "frames were sent more than once"


def test_room_is_made_and_grows():
    runs = FrameRuns(2, STACK, (1,), "u1")
    seats, stacks, anew = np.arange(2), np.zeros((2, STACK, 1), np.uint8), np.ones(2, bool)
    names: list[np.ndarray] = []
    for step in range(400):
        if runs.full:
            runs.make_room(np.concatenate(names[-3:]) if step < 200 else np.concatenate(names), names)
        stacks[:, :-1] = stacks[:, 1:].copy()
        stacks[:, -1] = [[step % 250], [step % 250 + 1]]
        names.append(runs.push(seats, stacks, anew))
        anew = np.zeros(2, bool)
        got = np.zeros((2 * STACK, 1), np.uint8)
        places = names[-1].copy()
        assert runs.collect([places], got) == 2 * STACK
        np.testing.assert_array_equal(got[places[:, None] + np.arange(STACK)], stacks)
    kept = [one for one in names if (one > 0).all()]
    assert 200 < len(kept) < 400, "those in use are there, others are gone"


def test_unused_room_is_not_counted():
    insert = Layout(insert_fields(transitions(3), 5)).empty()
    insert["frame_count"][0] = 9
    assert insert["frames"].shape == (5 * 7 + 4, SIDE, SIDE) and unused_bytes(insert) == 30 * SIDE * SIDE
    assert unused_bytes({"reward": np.zeros(5)}) == 0


@pytest.mark.atari
def test_only_stacked_frames_say_so():
    pytest.importorskip("ale_py")
    assert envs.describe("ALE/Pong-v5").frame_stack == 4 and envs.describe("CartPole-v1").frame_stack == 1


@pytest.mark.atari
def test_ale_moves_its_stacks_by_one_frame():
    pytest.importorskip("ale_py")
    env = envs.make("ALE/Pong-v5", num_envs=2)
    rng, before = np.random.default_rng(0), env.reset(seed=1).observation.copy()
    for _ in range(300):
        step = env.step(rng.integers(0, 6, 2))
        goes_on = ~step.first
        np.testing.assert_array_equal(step.observation[goes_on, :-1], before[goes_on, 1:])
        before = step.observation.copy()
    env.close()
