"""What only a GPU can show of dqn and r2d2: the CPU's numbers there, as graphs; priorities that come later; servers; whole runs."""

import json
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch

from shoal import algorithms, cli, envs
from shoal.acting import Progress, StepView
from shoal.algorithms import dqn, r2d2
from shoal.device.batched_inference import BatchedInference
from shoal.device.placement import GpuConfig, Hardware
from shoal.device.transfer import DeviceEvent, to_host
from shoal.envs import EnvSpec
from shoal.nets import NetConfig
from shoal.roles.parts import Parts
from shoal.roles.replay_config import ReplayConfig
from tests.algorithms.replay_loop import batch_of, batches
from tests.architectures.graphs import train
from tests.gpu.test_gpu import FRAMES, GPU, LSTM, replays

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SMALL = NetConfig(hidden=(16,))
# Epsilon of the optimiser is large, so that gradients of nearly nothing, which round differently, move nothing.
DQN = dqn.Config(dueling=True, n_step=3, lr=1e-2, lr_final=1e-3, optimiser_epsilon=1e-2, target_period_updates=4)
R2D2 = r2d2.Config(burn_in=2, length=4, stride=2, lr=1e-2, lr_final=1e-3, optimiser_epsilon=1e-2, target_period_updates=4)
RAINBOW = replace(DQN, atoms=11, value_min=-2.0, value_max=2.0, noisy_sigma=0.5)
CASES = {"dqn": (DQN, "shoal/Catch-v0", SMALL), "c51": (replace(RAINBOW, noisy_sigma=0.0), "shoal/Catch-v0", SMALL),
         "rainbow": (RAINBOW, "shoal/Catch-v0", SMALL), "r2d2": (R2D2, "shoal/TMaze-v0", LSTM)}
APEX = dqn.Config(n_step=3, dueling=True, exploration="ladder", epsilon=0.4, target_period_updates=20)
TABLE = ReplayConfig(capacity=2000, min_size=100, batch_size=32, insert_batch=10, samples_per_insert=8.0)


def update(learn, batch, progress=None):
    """One update: gradient, metrics, priorities, all before the step; whether it was made."""
    (minibatch,) = learn.minibatches(batch, learn.sums(batch), progress or Progress(), np.random.default_rng(0))
    gradient, metrics = learn.gradients(minibatch, "all")
    seen = torch.as_tensor(gradient).cpu().clone()
    made = learn.apply(gradient, "all")
    return seen, metrics, learn.priorities, made


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("name", CASES)
def test_updates_as_on_the_cpu(name, captured):
    """Twelve updates: gradients, priorities, metrics, parameters, the target net (refreshed after every fourth) and the optimiser's
    moments agree; the batch whose rewards are NaN changes nothing and does not count."""
    config, env, net = CASES[name]
    algorithm = algorithms.make(config, envs.describe(env), net, 4)
    here, there = algorithm.learn(0), algorithm.learn(0)
    there.to(GPU)
    if captured:
        there.capture()
    for number, batch in enumerate(batches(algorithm, envs.make(env, 4), 12)):
        progress = Progress(learner_steps=number, fraction=number / 12)
        gradient, metrics, priorities, made = update(here, batch, progress)
        other, readings, heard, verdict = update(there, batch, progress)
        there.release()
        assert bool(verdict) == made == (number != 5)
        np.testing.assert_allclose(other, gradient, rtol=1e-2, atol=1e-4)
        np.testing.assert_allclose(heard.cpu(), priorities, rtol=1e-2, atol=1e-4)
        assert dict(readings.items()) == pytest.approx(metrics, rel=1e-2, abs=1e-3, nan_ok=True)
        for key, tensor in here.state.items():
            np.testing.assert_allclose(there.state[key].cpu(), tensor, rtol=1e-2, atol=3e-4, err_msg=f"{key}, update {number}")
        np.testing.assert_array_equal(there.snapshot(Progress())()["params"], there.published(Progress())["params"])
    assert int(there.state["updates"]) == 11
    if captured:
        assert replays(there._graphs["all"].descend) and replays(there._graphs["all"]._step)


def test_priorities_outlive_the_next_update():
    """They are sent for before the next update runs, and looked at after it."""
    algorithm = algorithms.make(DQN, envs.describe("shoal/Catch-v0"), SMALL, 4)
    here, there = algorithm.learn(0), algorithm.learn(0)
    there.to(GPU)
    there.capture()
    before = None
    for number, batch in enumerate(batches(algorithm, envs.make("shoal/Catch-v0", 4), 12)):
        _, metrics, priorities, _ = update(here, batch)
        _, readings, device, _ = update(there, batch)
        readings.send()
        sent = to_host(device), readings, DeviceEvent(torch.device("cuda")), priorities, metrics
        if before is not None and number != 6:
            host, told, mark, expected, numbers = before
            mark.wait()
            np.testing.assert_allclose(host.numpy(), expected, rtol=1e-2, atol=1e-4)
            assert dict(told.items()) == pytest.approx(numbers, rel=1e-2, abs=1e-3)
        before = sent


def frames_learner(name="dqn", **gpu):
    hardware = Hardware("cuda", GpuConfig(**gpu))
    net = NetConfig(torso="nature") if name == "dqn" else NetConfig(torso="nature", recurrent="lstm", lstm_size=32)
    config = replace(DQN if name == "dqn" else R2D2, lr=1e-3, lr_final=None)  # small steps: rounding must not grow
    algorithm = algorithms.make(config, FRAMES, net, 4)
    learn = algorithm.learn(0)
    learn.to(hardware)
    if hardware.gpu.graphs:
        learn.capture()
    return algorithm, learn


def noise(algorithm, count=16, seed=1):
    """A batch of random frames."""
    rng, items = np.random.default_rng(seed), algorithm.record.layout.joined(count).empty()
    items["observation"][...] = rng.integers(256, size=items["observation"].shape)
    if "next_observation" in items:
        items["next_observation"][...] = rng.integers(256, size=items["observation"].shape)
    else:
        items["valid"][...] = True
    items["action"][...] = rng.integers(6, size=items["action"].shape)
    items["reward"][...] = rng.normal(size=items["reward"].shape)
    items["discount"][...] = 0.99
    return batch_of(items)


@pytest.mark.parametrize("name", ["dqn", "r2d2"])
@pytest.mark.parametrize("switch", ["channels_last", "fused", "graphs", "pinned"])
def test_a_switch_changes_no_number(switch, name):
    """Updates with it and without it go the same way; convolutions round differently."""
    moved = []
    for on in (True, False):
        algorithm, learn = frames_learner(name, bf16=False, **{switch: on})
        begun, batch = learn.published(Progress())["params"].copy(), noise(algorithm)
        for _ in range(6):
            assert bool(update(learn, batch)[3])
        moved.append(learn.published(Progress())["params"] - begun)
    assert np.abs(moved[0]).max() > 1e-3 and np.corrcoef(*moved)[0, 1] > 0.97


@pytest.mark.parametrize("name", ["dqn", "r2d2"])
def test_bfloat16(name):
    """In bfloat16 errors stay close and updates go the same way."""
    seen = []
    for bf16 in (True, False):
        algorithm, learn = frames_learner(name, bf16=bf16)
        begun, batch = learn.published(Progress())["params"].copy(), noise(algorithm)
        first = update(learn, batch)[2].cpu().numpy()
        for _ in range(5):
            assert bool(update(learn, batch)[3])
        seen.append((first, learn.published(Progress())["params"] - begun))
    (rough, moved), (exact, other) = seen
    np.testing.assert_allclose(rough, exact, rtol=0.05, atol=0.05)
    assert np.corrcoef(moved, other)[0, 1] > 0.95


@pytest.mark.parametrize("name", ["dqn", "c51", "r2d2"])
def test_a_servers_answers_are_the_policys(name):
    """Actions, q-values and recurrent states, kernel by kernel and then through the graph; TMaze's server looks back."""
    config, env, net = CASES[name]
    algorithm = algorithms.make(config, envs.describe(env), net, 4)
    policy, other = algorithm.policy(), algorithm.policy()
    policy.load(other_weights := algorithm.learn(3).published(Progress()))
    other.load(other_weights)
    policy.to(GPU)
    inference = BatchedInference(policy, GPU, torch.Generator("cuda").manual_seed(0))
    made, viewer, action = envs.make(env, 4), algorithm.record.viewer(4), None
    now, state = made.reset(seed=0), {key: x.cpu().numpy() for key, x in policy.initial_state(4).items()}
    for _ in range(20):
        view = viewer.of(now, action)
        action, after, extras = inference.act([view], [state], np.zeros(4, np.float32))
        _, expected, wanted = other.act(view, state, None, torch.Generator())
        np.testing.assert_allclose(extras["q"], wanted["q"], rtol=1e-3, atol=1e-4)
        np.testing.assert_array_equal(action, extras["q"].argmax(1))
        for key, x in expected.items():
            np.testing.assert_allclose(after[key], x, rtol=1e-3, atol=1e-4)
        state, now = after, made.step(action)
    assert any(buffers._graph is not None for buffers in inference._buffers.values())


def test_server_explores_as_told():
    """A server explores as often as it is told, through its graph too."""
    spec = EnvSpec("v", gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces.Discrete(4), 100, 1, 1, True, "none", "", 4)
    policy, seats = algorithms.make(dqn.Config(), spec, SMALL, 4).policy(), 4096
    policy.to(GPU)
    inference = BatchedInference(policy, GPU, torch.Generator("cuda").manual_seed(0))
    view = StepView(np.zeros((seats, 3), np.float32), np.zeros(seats, bool), np.tile([True, True, True, False], (seats, 1)))
    explore, counts = np.where(np.arange(seats) < seats // 2, 0.3, 0.0).astype(np.float32), np.zeros(4)
    for _ in range(10):
        action, _, extras = inference.act([view], [{}], explore)
        greedy = int(extras["q"][0].argmax())
        assert (action[seats // 2 :] == greedy).all()
        counts += np.bincount(action[: seats // 2], minlength=4)
    share, want = counts / counts.sum(), np.array([0.1, 0.1, 0.1, 0.0])
    want[greedy] = 0.8
    assert (np.abs(share - want) <= 5 * np.sqrt(want * (1 - want) / counts.sum())).all()


def test_noise_of_a_server():
    """A server has noise for every row and every step, through its graph too."""
    policy = algorithms.make(RAINBOW, envs.describe("shoal/Catch-v0"), SMALL, 4).policy()
    policy.to(GPU)
    inference, seats = BatchedInference(policy, GPU, torch.Generator("cuda").manual_seed(0)), 40
    view, seen = StepView(np.ones((seats, 50), np.float32), np.zeros(seats, bool)), []
    for _ in range(10):
        _, _, extras = inference.act([view], [{}], np.zeros(seats, np.float32))
        seen.append(extras["q"][:, 0])
    assert len(np.unique(seen)) == 10 * seats
    assert any(buffers._graph is not None for buffers in inference._buffers.values())


@pytest.mark.parametrize(("architecture", "config", "options"), [
    ("actor_learner", APEX, {}), ("actor_learner", RAINBOW, {"learners": 2}), ("central_inference", RAINBOW, {}),
    ("synchronous", APEX, {}), ("actor_learner", R2D2, {"learners": 2}),
    ("central_inference", R2D2, {})], ids=["apex", "rainbow_two_learners", "rainbow_seed", "in_turns", "two_learners", "seed_r2d2"])
def test_programs_on_the_gpu(architecture, config, options, tmp_path, monkeypatch):
    """Two learners share one GPU through the host, where there is one."""
    monkeypatch.setattr("tests.architectures.graphs.Parts", lambda *a, **k: Parts(*a, **k, hardware=GPU))
    run = train(tmp_path, config, architecture, "shoal/PixelCatch-v0", "local", actors=2, updates=200, replay=TABLE,
                net=LSTM if config is R2D2 else None, **options)
    assert run.reason == "counted" and np.isfinite(run.published["params"]).all()
    pages = [page for role, page in run.final.items() if role.startswith("learner")]
    assert max(page["loss"] for page in pages) > 0 and sum(page["updates_skipped"] for page in pages) == 0
    assert run.final["replay-0"]["priority_updates"] >= 100 * TABLE.batch_size


@pytest.mark.parametrize(("preset", "samples"), [
    ("dqn", "8"), ("rainbow", "8"), ("apex", "8"), ("r2d2", "32"), ("seed_r2d2", "32")])
def test_a_whole_run_ends_well(preset, samples, tmp_path, monkeypatch):
    """From the command line, on images, with all switches as they are by default."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", preset, "shoal/PixelCatch-v0", "--device", "cuda", "--run-dir", "run", "--max-env-steps", "3000",
                     "--replay.min-size", "100", "--replay.capacity", "2000", "--replay.samples-per-insert", samples,
                     "--eval.episodes", "10", "--console.mode", "none", "--no-tensorboard"]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["learner_steps"] >= 100, summary
