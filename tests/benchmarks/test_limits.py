"""The composed limit: the formula worked by hand, the grid, and real probes at work."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.composed_limit import limits, probe, replay_parts
from benchmarks.composed_limit.limits import Cell, ComposedLimit, CoreLayout, Probes, composed, layouts
from benchmarks.composed_limit.scenes import CARTPOLE, PONG, Grid, Workload
from shoal.experiment.prepare import prepare
from shoal.experiment.run import plan_of


def test_times_of_a_frame_add_up():
    assert composed(e=4.0, i=4.0, l=2.0) == pytest.approx(1.0)  # 1/4 + 1/4 + 1/2
    assert composed(e=4.0, i=4.0, l=2.0, r=3) == pytest.approx(0.5)  # 1/4 + 1/4 + 3/2


def test_a_gpu_works_beside_the_environments():
    assert composed(e=10.0, i=4.0, l=4.0, gpu=True) == pytest.approx(2.0)  # the device is the limit
    assert composed(e=1.0, i=4.0, l=4.0, gpu=True) == pytest.approx(1.0)  # the environments are
    assert composed(e=3.0, i=math.inf, l=math.inf, gpu=True) == pytest.approx(3.0)


def test_limit_with_replay():
    """Replay adds an insert and as many samples as belong to it."""
    assert composed(4.0, 4.0, 8.0, 2, n=8.0, s=16.0, q=1.0) == pytest.approx(1.0)  # 1/4 + 1/4 + 1/8 + 2/16 + 2/8
    assert composed(4.0, 4.0, 8.0, 2, n=8.0, s=16.0, q=0.0) == pytest.approx(1 / 0.875)
    assert composed(4.0, 4.0, 8.0, 2, True, n=8.0, s=16.0) == pytest.approx(2.0)  # the cores; the device does 1/4 + 2/8 too
    assert composed(4.0, 2.0, 8.0, 2, True, n=8.0, s=16.0) == pytest.approx(4 / 3)  # the device: 1/2 + 2/8


@pytest.mark.parametrize(("preset", "env", "q", "r"), [("dqn", "CartPole-v1", 1.0, 16.0), ("r2d2", "CartPole-v1", 0.1, 0.8)])
def test_replay_s_parts_are_really_measured(preset, env, q, r, monkeypatch):
    scene = replace(CARTPOLE, grid=Grid((16,), (16,), (64,), ("compiled",)))
    case = Workload("tiny", scene, preset, {"replay.batch_size": 16, "replay.capacity": 300, "replay.min_size": 16})
    monkeypatch.setattr(limits, "layouts", lambda cores: [CoreLayout(1, 1)])
    with Probes() as probes:
        limit = limits.measure(case, probes, seconds=0.05)
        again = limits.measure_again(case, probes, limit, 0.05)
    assert (limit.items_per_env_step, limit.passes) == (q, pytest.approx(r))
    assert {cell.what for cell in limit.grid} == {"env", "act", "learn", "insert", "sample"}
    assert all(0 < again.env_steps_per_second < cell.frames_per_second for cell in (again.e, again.i))
    read = ComposedLimit.read(json.loads(json.dumps(limit.record())))
    assert read == limit and "/n" in limit.formula and "/s" in limit.formula


@pytest.mark.atari
@pytest.mark.parametrize("preset", ["dqn", "apex"])
def test_replay_s_parts_share_frames(preset, monkeypatch):
    """As a run's own table does, where observations are stacks."""
    pytest.importorskip("ale_py")
    monkeypatch.setattr(replay_parts, "FILLED", 200)
    small = {"replay.batch_size": 8, "replay.capacity": 200, "replay.min_size": 8}
    ready = prepare(plan_of(preset, "ALE/Pong-v5", None, None, small))
    kept = replay_parts._Table(ready)
    count = kept.insert()
    assert count == ready.plan.experiment.replay.insert_batch
    assert 0 < kept.table.nbytes / count < 0.8 * 2 * 4 * 84 * 84, "not two whole stacks an item"
    for part in (replay_parts.inserting, replay_parts.sampling, replay_parts.updating):
        assert part(ready)() > 0


def test_figures_of_the_issue():
    assert composed(10e6, 2e6, 1.4e6) == pytest.approx(761e3, rel=0.01)
    assert composed(6300, 8500, 3000) == pytest.approx(1641, rel=0.01)


def test_no_part_can_be_beaten():
    for e, i, l in ((1.0, 5.0, 9.0), (9.0, 1.0, 5.0), (5.0, 9.0, 1.0)):  # noqa: E741
        assert composed(e, i, l) < min(e, i, l)
    assert composed(math.inf, 3.0, math.inf) == pytest.approx(3.0)


@pytest.mark.parametrize("cores", [1, 2, 3, 4, 6, 16])
def test_layouts_use_the_cores_and_no_more(cores):
    found = layouts(cores)
    assert CoreLayout(cores, 1) in found and CoreLayout(1, cores) in found and len(set(found)) == len(found)
    assert all(layout.processes * layout.threads <= cores for layout in found)


def test_the_limit_uses_the_passes():
    rates = [Cell(what, 1, CoreLayout(1, 1), frames_per_second=rate) for what, rate in (("env", 4.0), ("act", 4.0), ("learn", 2.0))]
    assert ComposedLimit(*rates, passes=3).env_steps_per_second == pytest.approx(0.5)
    assert ComposedLimit(*rates, passes=3).record()["e"]["frames_per_second"] == 4.0
    beside = ComposedLimit(*rates, passes=1, gpu=True)
    assert beside.env_steps_per_second == pytest.approx(4 / 3) and beside.record()["gpu"] is True  # 1/4 + 1/2 on the GPU


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_limit_on_a_gpu(device, monkeypatch):
    """The device is chosen as a run's would be; here by a driver that claims to have a GPU, or not."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: int(device == "cuda"))
    speeds, asked = {"env": 1000.0, "act": 800.0, "learn": 800.0}, []

    class Stub(Probes):
        def rate(self, workload, cell, seconds=0.0):
            asked.append(cell)
            return speeds[cell.what]

    case, said = Workload("images", PONG, "impala", {"net.torso": "nature"}), []
    probe.prepared.cache_clear()
    found = limits.measure(case, Stub(), say=said.append)
    again = limits.measure_again(case, Stub(), found)
    probe.prepared.cache_clear()
    gpu = device == "cuda"
    assert found.gpu == again.gpu == gpu
    assert found.env_steps_per_second == again.env_steps_per_second == pytest.approx(400.0 if gpu else 1000 / 3.5)
    assert ("min(e, 1 / (1/i + 1/l))" in said[-1]) == gpu
    computing = {cell.layout for cell in asked if cell.what != "env"}
    assert computing == ({CoreLayout(1, 1)} if gpu else {cell.layout for cell in asked if cell.what == "env"})


@pytest.mark.gpu
def test_probes_compute_on_a_gpu():
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    case = Workload("images", PONG, "impala", {"net.torso": "nature"})
    on_cpu = replace(case, overrides={**case.overrides, "device": "cpu"})
    with Probes() as probes:
        for what, batch in (("act", 1024), ("learn", 8192)):
            cell = Cell(what, batch, CoreLayout(1, 1))
            assert probes.rate(case, cell, 1.0) > 10 * probes.rate(on_cpu, cell, 1.0)


def test_probes_measure_each_part(monkeypatch):
    """Really: two layouts' processes, each part at one batch size, in windows of a few hundredths of a second."""
    grid = Grid((16,), (16,), (64,), ("compiled", "raw:gymnasium"))
    scene = replace(CARTPOLE, grid=grid)
    case = Workload("tiny", scene, "ppo", {"algorithm.unroll": 8, "algorithm.epochs": 2})
    monkeypatch.setattr(limits, "cells", lambda case, cores, gpu: [
        Cell("env", 16, CoreLayout(2, 1), "compiled"), Cell("env", 16, CoreLayout(2, 1), "raw:gymnasium"),
        Cell("act", 16, CoreLayout(2, 1)), Cell("learn", 64, CoreLayout(2, 1))])
    lines: list[str] = []
    with Probes() as probes:
        limit = limits.measure(case, probes, seconds=0.05, say=lines.append)
        again = limits.measure_again(case, probes, limit, 0.05)
        sessions = {os.getsid(one.pid) for one in probes._all()}
    assert os.getsid(0) not in sessions and len(sessions) == 2  # Ctrl-C is ours alone
    assert limit.passes == 2 and len(limit.grid) == 4 and len(lines) == 5
    assert all(cell.frames_per_second > 0 for cell in limit.grid)
    assert 0 < again.env_steps_per_second < min(again.e.frames_per_second, again.i.frames_per_second)
    json.dumps(limit.record())


def test_a_probe_that_dies_is_named():
    cell = Cell("env", 4, CoreLayout(1, 1), "no such back-end")
    with Probes() as probes, pytest.raises(RuntimeError, match="no such back-end"):
        probes.rate(Workload("one", CARTPOLE, "ppo"), cell, 0.01)


# ---------------------------------------------------------------------------------------------- with the case's own arguments
def asked(case):
    """The cells that are measured for a case, and what is said."""
    found, said = [], []

    class Stub(Probes):
        def rate(self, workload, cell, seconds=0.0):
            found.append(cell)
            return 1000.0

    limits.measure(case, Stub(), say=said.append)
    return found, said


def with_kwargs(scene, *pairs):
    return Workload("own", scene, "ppo", {"envs.kwargs": list(pairs), "device": "cpu"})


def test_arguments_of_the_environment():
    """The environment is made with the case's own arguments."""
    pairs = ("stack_num=2", "frameskip=1")
    env = probe._started("ALE/Pong-v5", "raw:ale", 2, 1, pairs)
    assert env.single_observation_space.shape == (2, 84, 84)
    work = probe.stepping(with_kwargs(PONG, *pairs).key(), "raw:ale", 2, 1)  # it has the same ones
    frames = []
    for _ in range(2):
        frames.append(env.step(np.zeros(2, np.int64))[-1]["frame_number"])
        work()
    assert (frames[1] - frames[0] == 2).all()  # two decisions of one frame, not of four
    usual = probe._started("ALE/Pong-v5", "raw:ale", 2, 1, ())
    assert usual.single_observation_space.shape == (4, 84, 84)
    cartpole = probe._started("CartPole-v1", "raw:gymnasium", 2, 1, ("sutton_barto_reward=True",))
    assert (cartpole.step(np.zeros(2, np.int64))[1] == 0).all()


def test_back_end_without_the_arguments():
    """A back end that does not know the arguments is left out."""
    cells, said = asked(with_kwargs(CARTPOLE, "render_mode=rgb_array"))
    assert {cell.backend for cell in cells if cell.what == "env"} == {"raw:gymnasium"}
    assert "compiled cannot make CartPole-v1 with render_mode=rgb_array" in said[0]
    cells, said = asked(with_kwargs(CARTPOLE))
    assert {cell.backend for cell in cells if cell.what == "env"} == {"compiled", "raw:gymnasium"} and "cannot" not in said[0]


def test_limit_without_a_back_end():
    """A limit that no back end can have is refused in words."""
    scene = replace(CARTPOLE, grid=replace(CARTPOLE.grid, backends=("compiled",)))
    with pytest.raises(RuntimeError, match=r"no back-end of the limit \(compiled\) can make CartPole-v1 with render_mode"):
        asked(with_kwargs(scene, "render_mode=rgb_array"))
