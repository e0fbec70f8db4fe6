"""What only a GPU can show of ddpg, td3 and sac: the CPU's numbers there, every phase as graphs; servers; whole runs."""

import json

import numpy as np
import pytest
import torch

from shoal import algorithms, cli, envs
from shoal.acting import Progress
from shoal.algorithms import ddpg, sac, td3
from shoal.device.batched_inference import BatchedInference
from shoal.learning import phases_due
from shoal.nets import NetConfig
from shoal.roles.parts import Parts
from shoal.roles.replay_config import ReplayConfig
from tests.algorithms.replay_loop import batches
from tests.architectures.graphs import train
from tests.gpu.test_gpu import GPU, replays

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NET = NetConfig(hidden=(16, 16), activation="relu")
# Epsilon of the optimiser is large, so that gradients of nearly nothing, which round differently, move nothing.
FAST = {"actor_lr": 1e-2, "critic_lr": 1e-2, "optimiser_epsilon": 1e-2, "random_steps": 20, "target_tau": 0.1}
CASES = {
    "ddpg": (ddpg.Config(**FAST, n_step=3, noise="ou", actor_grad_limit=0.5, actor_priorities=True), "Pendulum-v1"),
    "td3": (td3.Config(**FAST, normalise_observations=True), "Pendulum-v1"),
    "sac": (sac.Config(**FAST, alpha_lr=1e-2), "Pendulum-v1"),
    "discrete": (sac.Config(**FAST, alpha_lr=1e-2), "CartPole-v1"),
}
TABLE = ReplayConfig(capacity=2000, min_size=100, batch_size=32, insert_batch=10, samples_per_insert=8.0)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("name", CASES)
def test_updates_as_on_the_cpu(name, captured):
    """Fourteen updates of every phase, most of them replayed: gradients, priorities, metrics, parameters and targets agree.
    The batch whose rewards are NaN leaves the critics alone."""
    config, env = CASES[name]
    algorithm = algorithms.make(config, envs.describe(env), NET, 4)
    here, there = algorithm.learn(0), algorithm.learn(0)
    there.to(GPU)
    if captured:
        there.capture()
    for number, batch in enumerate(batches(algorithm, envs.make(env, 4), 14)):
        batch["reward"] /= 10  # Pendulum's are large
        progress = Progress(learner_steps=number, fraction=number / 14)
        mine, its = (next(learn.minibatches(batch, learn.sums(batch), progress, np.random.default_rng(number)))
                     for learn in (here, there))
        for phase in phases_due(here, progress):
            gradient, metrics = here.gradients(mine, phase)
            other, readings = there.gradients(its, phase)
            np.testing.assert_allclose(other.cpu(), gradient, rtol=1e-2, atol=1e-3, err_msg=f"{phase}, update {number}")
            assert dict(readings.items()) == pytest.approx(dict(metrics), rel=1e-2, abs=1e-3, nan_ok=True)
            finite = phase != "critic" or number != 5
            assert bool(there.apply(other, phase)) == here.apply(gradient, phase) == finite
        there.release()
        np.testing.assert_allclose(there.priorities.cpu(), here.priorities, rtol=1e-2, atol=1e-3)
        for key, tensor in here.state.items():
            np.testing.assert_allclose(there.state[key].detach().cpu(), tensor.detach(), rtol=1e-2, atol=5e-4,
                                       err_msg=f"{key}, update {number}")
        np.testing.assert_array_equal(there.snapshot(Progress())()["params"], there.published(Progress())["params"])
    if captured:
        for phase in there.phases:
            assert replays(there._graphs[phase].descend) and replays(there._graphs[phase]._step), phase


@pytest.mark.parametrize("name", CASES)
def test_whole_update_is_one_graph(name):
    """As a learner without others makes it. Of td3 there are two graphs: with the actor and without."""
    config, env = CASES[name]
    algorithm = algorithms.make(config, envs.describe(env), NET, 4)
    here, there = algorithm.learn(0), algorithm.learn(0)
    there.to(GPU)
    there.capture()
    for number, batch in enumerate(batches(algorithm, envs.make(env, 4), 14)):
        batch["reward"] /= 10
        progress = Progress(learner_steps=number, fraction=number / 14)
        mine, its = (next(learn.minibatches(batch, learn.sums(batch), progress, np.random.default_rng(number)))
                     for learn in (here, there))
        due = phases_due(here, progress)
        readings, finite = there.update((its,), (due,))
        for phase in due:
            here.apply(here.gradients(mine, phase)[0], phase)
        there.release()
        assert finite.tolist() == [phase != "critic" or number != 5 for phase in due]
        assert {f"{phase}_loss" for phase in due} <= set(readings) and np.isfinite(readings["critic_loss"]) == (number != 5)
        np.testing.assert_allclose(there.priorities.cpu(), here.priorities, rtol=1e-2, atol=1e-3)
        for key, tensor in here.state.items():
            np.testing.assert_allclose(there.state[key].detach().cpu(), tensor.detach(), rtol=1e-2, atol=5e-4,
                                       err_msg=f"{key}, update {number}")
    assert replays(there._whole) and not any(replays(graphs.descend) for graphs in there._graphs.values())


@pytest.mark.parametrize("name", CASES)
def test_several_updates_are_one_graph(name):
    """As where batches wait: four at a time make the parameters, targets and priorities of one at a time."""
    config, env = CASES[name]
    algorithm = algorithms.make(config, envs.describe(env), NET, 4)
    here, there = algorithm.learn(0), algorithm.learn(0)
    there.to(GPU)
    there.capture()
    drawn = list(batches(algorithm, envs.make(env, 4), 24))
    for start in range(0, 24, 4):
        its, dues, judged = [], [], []
        for number in range(start, start + 4):
            batch, progress = drawn[number], Progress(learner_steps=number, fraction=number / 24)
            batch["reward"] /= 10
            mine, other = (next(learn.minibatches(batch, learn.sums(batch), progress, np.random.default_rng(number)))
                           for learn in (here, there))
            assert not other.weight.is_cuda  # it waits for the launch
            its.append(other)
            dues.append(phases_due(here, progress))
            for phase in dues[-1]:
                here.apply(here.gradients(mine, phase)[0], phase)
            judged.append(here.priorities.copy())
        readings, finite = there.update(tuple(its), tuple(dues))
        assert finite.tolist().count(False) == (start <= 5 < start + 4) and np.isfinite(readings["critic_loss"])
        np.testing.assert_allclose(there.priorities.cpu(), np.concatenate(judged), rtol=1e-2, atol=1e-3)
        for key, tensor in here.state.items():
            np.testing.assert_allclose(there.state[key].detach().cpu(), tensor.detach(), rtol=1e-2, atol=5e-4,
                                       err_msg=f"{key}, update {start}")
    assert replays(there._whole)


@pytest.mark.parametrize("name", CASES)
def test_a_servers_answers_are_the_policys(name):
    """Greedily, kernel by kernel and then through the graph; exploring, within the bounds and not always the same."""
    config, env = CASES[name]
    algorithm = algorithms.make(config, envs.describe(env), NET, 4)
    policy, other, made = algorithm.policy(), algorithm.policy(), envs.make(env, 4)
    for one in (policy, other):
        one.load(algorithm.learn(3).published(Progress()))
    policy.to(GPU)
    inference = BatchedInference(policy, GPU, torch.Generator("cuda").manual_seed(0))
    viewer, action, now = algorithm.record.viewer(4), None, made.reset(seed=0)
    state, wild = {key: x.cpu().numpy() for key, x in other.initial_state(4).items()}, []
    for number in range(24):
        view, explores = viewer.of(now, action), number % 2
        action, after, extras = inference.act([view], [state], np.full(4, explores, np.float32))
        greedy, _, wanted = other.act(view, other.initial_state(4), None, torch.Generator())
        if explores:
            wild.extend(np.abs(action - greedy).ravel().tolist())
        else:
            np.testing.assert_allclose(action, greedy, rtol=1e-3, atol=1e-4)
            for key, x in wanted.items():
                np.testing.assert_allclose(extras[key], x, rtol=1e-2, atol=1e-3)
        state, now = after, made.step(action)
    assert len(set(wild)) > 1 and max(wild) <= 4
    assert all(buffers._graph is not None for buffers in inference._buffers.values())


@pytest.mark.parametrize(("architecture", "name", "options"), [
    ("synchronous", "sac", {}), ("actor_learner", "ddpg", {}), ("actor_learner", "sac", {"learners": 2}),
    ("central_inference", "td3", {})], ids=["in_turns", "apex_dpg", "two_learners", "central"])
def test_programs_on_the_gpu(architecture, name, options, tmp_path, monkeypatch):
    """Programs run with their learner on the GPU."""
    monkeypatch.setattr("tests.architectures.graphs.Parts", lambda *a, **k: Parts(*a, **k, hardware=GPU))
    config, env = CASES[name]
    run = train(tmp_path, config, architecture, env, "local", actors=2, updates=200, replay=TABLE, net=NET, **options)
    assert run.reason == "counted" and np.isfinite(run.published["params"]).all()
    pages = [page for role, page in run.final.items() if role.startswith("learner")]
    assert max(page["td_error"] for page in pages) > 0 and sum(page["updates_skipped"] for page in pages) == 0


@pytest.mark.parametrize("preset", ["ddpg", "td3", "sac", "apex_dpg"])
def test_a_whole_run_ends_well(preset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", preset, "Pendulum-v1", "--device", "cuda", "--run-dir", "run", "--max-env-steps", "3000",
                     "--eval.episodes", "5", "--console.mode", "none", "--no-tensorboard"]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["learner_steps"] >= 500, summary
