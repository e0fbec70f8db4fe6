"""Updates whose kernels are replayed on a CPU (device/cpu_graph.py) have the bits of updates that run as they are."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from shoal import algorithms, envs
from shoal.acting import Progress
from shoal.algorithms import curl, ddpg, dqn, r2d2, sac, td3
from shoal.device import cpu_graph, kernel_program
from shoal.device.cpu_graph import RecordedFunction
from shoal.learning import phases_due
from shoal.nets import NetConfig
from tests.algorithms.replay_loop import batches

SMALL, SCHEDULES = NetConfig(hidden=(16,)), {"importance": 0.4, "importance_final": 1.0}
LSTM = NetConfig(hidden=(16,), recurrent="lstm", lstm_size=8, prev_action_reward=True)
REPLAYED = {
    "dqn": ("CartPole-v1", dqn.Config(**SCHEDULES, lr_final=1e-5, target_period_updates=3, double=True), SMALL),
    "rainbow": ("CartPole-v1", dqn.Config(dueling=True, n_step=3, atoms=11, noisy_sigma=0.5), SMALL),
    "r2d2": ("CartPole-v1", r2d2.Config(burn_in=2, length=4, stride=2), LSTM),
    "ddpg": ("Pendulum-v1", ddpg.Config(**SCHEDULES, grad_norm=1.0), SMALL),
    "td3": ("Pendulum-v1", td3.Config(), SMALL),
    "sac": ("Pendulum-v1", sac.Config(), SMALL),
    "discrete sac": ("CartPole-v1", sac.Config(), SMALL),
    "curl": ("shoal/PixelCatch-v0", curl.Config(code_size=16), SMALL),
}


@pytest.fixture(autouse=True)
def recorded_soon(monkeypatch):
    monkeypatch.setattr(cpu_graph, "WARM_UPS", 3)


def eager(learn):
    learn._measured = learn._measure
    return learn


def recordings(learn):
    return [one for shape in learn._recorded._shapes.values() for one in shape.recordings.values()]


def step(learn, batch, number, horizon):
    progress, seen = Progress(number, number, number / horizon), []
    for minibatch in learn.minibatches(batch, learn.sums(batch), progress, np.random.default_rng(number)):
        for phase in phases_due(learn, progress):
            gradient, metrics = learn.gradients(minibatch, phase)
            seen.append((gradient.copy(), dict(metrics)))
            learn.apply(gradient, phase)
    learn.absorb(learn.moments(batch))
    return seen


def same(one, other):
    for name, tensor in one.state.items():
        assert torch.equal(tensor, other.state[name]), name


def compared(one, other, stream, count):
    for number, batch in enumerate(stream):
        torch.manual_seed(number)
        first = step(one, batch, number, count)
        torch.manual_seed(number)
        for (here, told), (there, heard) in zip(first, step(other, batch, number, count), strict=True):
            np.testing.assert_array_equal(here, there)
            np.testing.assert_equal(told, heard)
        same(one, other)


@pytest.mark.parametrize("case", REPLAYED)
def test_replayed_update_has_the_same_bits(case):
    """A replayed update from items has the same bits."""
    name, config, net = REPLAYED[case]
    algorithm = algorithms.make(config, envs.describe(name), net, 4)
    plain, replayed = eager(algorithm.learn(1)), algorithm.learn(1)
    compared(plain, replayed, batches(algorithm, envs.make(name, 4), 14), 14)
    np.testing.assert_array_equal(plain.priorities, replayed.priorities)
    made = recordings(replayed)
    assert made and all(made) == (case != "r2d2")  # previous actions are checked before they are encoded: a number is read


def test_without_an_interpreter(monkeypatch):
    """A PyTorch that has lost its interpreter of graphs: kernels are called from Python."""
    monkeypatch.setattr(kernel_program, "INTERPRETED", False)
    test_replayed_update_has_the_same_bits("sac")


def test_parameters_that_lie_elsewhere():
    """Parameters that lie elsewhere are used from there."""
    algorithm = algorithms.make(sac.Config(), envs.describe("Pendulum-v1"), SMALL, 4)
    plain, bound = eager(algorithm.learn(1)), algorithm.learn(1)
    stream = list(batches(algorithm, envs.make("Pendulum-v1", 4), 14))
    compared(plain, bound, stream[:7], 14)
    arrays = {name: tensor.numpy().copy() for name, tensor in bound.state.items()}
    bound.bind(arrays)
    compared(plain, bound, stream[7:], 14)
    np.testing.assert_array_equal(arrays["params"], plain.state["params"].numpy())


def test_function_that_reads_a_number():
    """A function that reads a number is never recorded."""
    function = RecordedFunction(lambda x: x * 2 if x.sum() > 0 else x)
    for sign in (1.0, -1.0) * 4:
        x = torch.full((3,), sign)
        assert torch.equal(function(x), x * 2 if sign > 0 else x)
    assert [one for shape in function._shapes.values() for one in shape.recordings.values()] == [None]


def test_numbers_that_change_every_time():
    """Numbers that change with every call are not recorded."""
    function = RecordedFunction(lambda given: given["x"] * given["scale"])
    for scale in range(20):
        assert torch.equal(function({"x": torch.ones(2), "scale": float(scale)}), torch.full((2,), float(scale)))
    assert len(function._shapes) <= cpu_graph.MAX_SHAPES


def test_recording_that_takes_much_memory(monkeypatch):
    monkeypatch.setattr(cpu_graph, "MAX_BYTES", 100)
    function = RecordedFunction(lambda x: x + 1)
    for _ in range(6):
        assert torch.equal(function(torch.zeros(50)), torch.ones(50))
    assert [one for shape in function._shapes.values() for one in shape.recordings.values()] == [None]


@pytest.mark.parametrize("interpreter", [True, False])
def test_kernels_of_every_kind(interpreter, monkeypatch):
    """Kernels with namesakes that take the same arguments (max of a tensor, max of two), numbers in the place of tensors, results
    without memory of their own, lists, types: replayed on other numbers they have the bits of the function."""
    monkeypatch.setattr(kernel_program, "INTERPRETED", kernel_program.INTERPRETED and interpreter)

    def work(given):
        x, n = given["x"], given["n"]
        joined = torch.cat([x.relu(), (x * 0.1 - 3).clamp(-1, 1), torch.where(x > 0, x, 0.0)])
        best, where = joined.max(0)
        return torch.stack([x.max(), x.min(), x.sum(dtype=torch.float64).float() / 3, (n * 2 + 1).float().mean(), best.mean(),
                            where.double().mean().float(), x.sort()[0][0, 0], (2 - x).square().mean(), torch.ones_like(x).sum()])

    recorded = RecordedFunction(work)
    for seed in range(8):
        rng = torch.Generator().manual_seed(seed)
        given = {"x": torch.randn(5, 7, generator=rng), "n": torch.randint(9, (6,), generator=rng)}
        assert torch.equal(recorded(given), work(given))
    assert [one for shape in recorded._shapes.values() for one in shape.recordings.values() if one is not None]


def test_recording_imports_no_compiler():
    """PyTorch would import its compiler in the middle of a run, which takes seconds."""
    code = ("import sys, torch; from shoal.device import cpu_graph; cpu_graph.WARM_UPS = 1; x = torch.ones(2);"
            "work = cpu_graph.RecordedFunction(lambda given: given @ x); assert [float(work(x)) for _ in range(4)] == [2.0] * 4;"
            "(shape,) = work._shapes.values(); assert all(shape.recordings.values()); assert 'torch._dynamo' not in sys.modules")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
