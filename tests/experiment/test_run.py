"""Whole runs on the inline runtime: train, act, evaluate, resume."""

import json

import gymnasium as gym
import numpy as np
import pytest
import torch

import shoal
from shoal.errors import ConfigError
from shoal.experiment.checkpoints import TensorFiles
from shoal.experiment.evaluation import frames, plain_env
from shoal.telemetry.outputs import read_lines
from tests.experiment.toys import Gift, Nested, Unlearnable

QUICK = {"runtime": "inline", "actors": 1, "console": {"mode": "none"}, "tensorboard": False,
         "eval": {"episodes": 4, "every_env_steps": 256}, "net": {"hidden": (8,)}, "architecture": {"envs_per_actor": 4}}


def quick(preset: str, env, folder, **overrides) -> shoal.Run:
    return shoal.train(preset, env, run_dir=str(folder), **{**QUICK, **overrides})


def test_three_lines(tmp_path):
    run = quick("impala", "CartPole-v1", tmp_path / "run", max_env_steps=400)
    assert run.summary["stopped_by"] == "env_steps" and run.summary["env_steps"] >= 400
    assert run.directory == tmp_path / "run"
    action = run.policy.act(np.zeros(4))
    assert gym.make("CartPole-v1").action_space.contains(action)
    assert len(run.evaluate(7).returns) == 7
    assert {"config.json", "metrics.jsonl", "summary.json", "checkpoints", "logs"} <= {
        path.name for path in run.directory.iterdir()}


def test_until_return(tmp_path):
    """`until_return` stops a run after a confirmed evaluation."""
    run = quick("a2c", Gift, tmp_path / "run", until_return=2.0)
    assert run.summary["stopped_by"] == "return" and run.summary["eval_return"] == 2.0
    assert run.summary["eval_episodes"] == 4 and run.summary["env"] == "Gift"


@pytest.mark.parametrize(("preset", "env", "more"), [
    ("ppo", "CartPole-v1", {}), ("a3c", "CartPole-v1", {"runtime": "local", "architecture": {"mode": "master"}}),
    ("anakin", "shoal/Catch-v0", {"runtime": "local", "actors": "auto", "device": "cpu", "architecture": {"envs_per_actor": 8}})])
def test_as_many_updates_as_were_asked_for(preset, env, more, tmp_path):
    """Not one more, also where a batch gives several (ppo); then all is saved, and the last version is evaluated."""
    summary = quick(preset, env, tmp_path / "run", max_learner_steps=5, **more).summary
    assert summary["stopped_by"] == "learner_steps" and summary["learner_steps"] == 5 and summary["eval_return"] is not None
    assert shoal.resume(tmp_path / "run", max_learner_steps=9).summary["learner_steps"] == 9


def test_local_run_keeps_to_its_env_steps(tmp_path):
    """Its actors stop by themselves: the session looks too seldom to stop them in time."""
    run = quick("impala", "CartPole-v1", tmp_path / "run", runtime="local", actors=2, max_env_steps=1000)
    experiment = run.prepared.plan.experiment
    batch = experiment.architecture.batch_slots * experiment.architecture.envs_per_actor * experiment.algorithm.unroll
    assert run.summary["stopped_by"] == "env_steps" and 1000 <= run.summary["env_steps"] < 1000 + batch


def test_the_same_seed_gives_the_same_files(tmp_path):
    states = []
    for name in ("a", "b"):
        run = quick("a2c", "shoal/Catch-v0", tmp_path / name, max_env_steps=600, seed=3)
        folder = sorted((run.directory / "checkpoints").iterdir())[-1]
        states.append((folder.name, TensorFiles().load(folder / "trainer-0.safetensors")))
    assert states[0][0] == states[1][0]
    for key, array in states[0][1].items():
        np.testing.assert_array_equal(array, states[1][1][key])


def test_resume_goes_on_with_everything(tmp_path):
    first = quick("a2c", "CartPole-v1", tmp_path / "run", max_env_steps=500)
    folder = sorted((first.directory / "checkpoints").iterdir())[-1]
    before = TensorFiles().load(folder / "trainer-0.safetensors")
    second = shoal.resume(first.directory, max_env_steps=1500)
    after = TensorFiles().load(sorted((first.directory / "checkpoints").iterdir())[-1] / "trainer-0.safetensors")
    assert second.summary["env_steps"] >= 1500 > first.summary["env_steps"]
    assert second.summary["seconds"] > first.summary["seconds"]
    assert after["learn/adam.count"] == after["counts"][1] > before["learn/adam.count"]
    assert before["counts"][1] < after["counts"][1] <= second.summary["learner_steps"]
    counted = [row["env_steps"] for row in read_lines(first.directory / "metrics.jsonl") if row["kind"] == "snapshot"]
    assert counted == sorted(counted)
    assert json.loads((first.directory / "config.json").read_text())["resumed"] == 1


def test_resume_over_lost_work(tmp_path):
    """Resume does not run backwards over work that was lost."""
    run = quick("a2c", "CartPole-v1", tmp_path / "run", max_env_steps=300)
    with (run.directory / "metrics.jsonl").open("a") as file:  # as after a kill -9, long after the last checkpoint
        file.write(json.dumps({"kind": "snapshot", "env_steps": 700, "seconds": 50.0}) + "\n")
    assert shoal.resume(run.directory, max_env_steps=800).summary["env_steps"] >= 800
    assert shoal.load(run.directory).summary["seconds"] > 50.0


def test_resume_asks_for_what_is_left_to_do(tmp_path):
    run = quick("a2c", Gift, tmp_path / "run", until_return=2.0, max_env_steps=100_000)
    with pytest.raises(ConfigError, match="--trust"):
        shoal.resume(run.directory)  # the tests' modules are not installed
    with pytest.raises(ConfigError, match="has reached its return of 2"):
        shoal.resume(run.directory, trust=True)
    with pytest.raises(ConfigError, match="already done"):
        shoal.resume(run.directory, trust=True, max_env_steps=1)
    again = shoal.resume(run.directory, trust=True, max_env_steps=run.summary["env_steps"] + 500)
    assert again.summary["stopped_by"] == "env_steps"


def test_environments_made_on_the_spot(tmp_path):
    run = quick("a2c", lambda: Gift(), tmp_path / "run", until_return=2.0)
    with pytest.raises(ConfigError, match=r"env=\.\.\."):
        shoal.resume(run.directory, max_env_steps=10_000)
    steps = run.summary["env_steps"]
    assert shoal.resume(run.directory, env=Gift, max_env_steps=steps + 100).summary["env_steps"] >= steps + 100
    assert shoal.load(run.directory, env=Gift).policy.act(np.zeros(3)) in (5, 6)


def test_actions_of_the_policy(tmp_path):
    """The policy takes observations and gives actions as the environment has them."""
    run = quick("ppo", Nested, tmp_path / "run", max_env_steps=600)
    action = run.policy.act((np.zeros(2), 2))
    assert Nested.action_space.contains(np.asarray(action))
    box = quick("ppo", "Pendulum-v1", tmp_path / "box", max_env_steps=600, algorithm={"unroll": 16, "minibatches": 2})
    action = box.policy.act(np.zeros(3, np.float32))
    assert action.shape == (1,) and abs(action[0]) <= 2


def test_policy_with_memory(tmp_path):
    """A policy with memory remembers until it is reset."""
    net = {"recurrent": "lstm", "lstm_size": 8, "hidden": (8,), "prev_action_reward": True}
    policy = quick("a2c", "CartPole-v1", tmp_path / "run", max_env_steps=200, net=net).policy
    states = []
    for _ in range(2):
        policy.reset()
        policy.act(np.ones(4))
        states.append({name: torch.as_tensor(state).clone() for name, state in policy._state.items()})
    policy.act(np.ones(4), reward=1.0)
    for name, state in states[0].items():
        assert torch.equal(state, states[1][name])
        assert not torch.equal(state, torch.as_tensor(policy._state[name]))


def test_a_network_of_the_user_s_own(tmp_path):
    class Torso(torch.nn.Module):
        def __init__(self, observation_space):
            super().__init__()
            self.layer = torch.nn.Linear(observation_space.shape[0], 5)

        def forward(self, observation):
            return torch.relu(self.layer(observation))

    net = {"module": Torso}
    run = quick("a2c", "CartPole-v1", tmp_path / "run", max_env_steps=200, net=net)
    assert run.policy.act(np.zeros(4)) in (0, 1)
    assert json.loads((run.directory / "config.json").read_text())["net"]["module"] == "?Torso"
    with pytest.raises(ConfigError, match="Torso"):
        shoal.load(run.directory)
    assert shoal.load(run.directory, net=net).policy.act(np.zeros(4)) == run.policy.act(np.zeros(4))


def test_frames_of_whole_episodes(tmp_path):
    run = quick("a2c", Gift, tmp_path / "run", until_return=2.0)
    shown = list(frames(run.policy, plain_env(Gift, {}, None), episodes=2, seed=0))
    assert [frame.step for frame in shown] == [0, 1, 2, 0, 1, 2] and shown[-1].total == 2.0


@pytest.mark.parametrize(("arguments", "overrides", "words"), [
    (("impalla", "CartPole-v1"), {}, "did you mean impala"),
    (("impala", "CartPol-v1"), {}, "CartPole-v1"),
    (("impala", None), {}, "which environment"),
    (("impala", 7), {}, "env=7"),
    (("impala", "CartPole-v1"), {"actor": 2}, "did you mean actors"),
    (("impala", "CartPole-v1"), {"actors": 0}, "--actors is 0; it must be at least 1, or auto"),
    (("impala", "CartPole-v1"), {"algorithm": {"lrr": 1}}, "did you mean"),
    (("impala", "CartPole-v1"), {"algorithm": "ppo"}, "give a preset, or an algorithm and an architecture"),
    ((None, "CartPole-v1"), {"algorithm": "ppo"}, "architecture="),
    (("impala", "CartPole-v1"), {"envs": {"kwargs": {"no_such": 1}}}, "no_such"),
    (("impala", Unlearnable), {}, "action space"),
])
def test_bad_input(tmp_path, arguments, overrides, words):
    """Bad input is a config error before anything is written."""
    with pytest.raises(ConfigError) as caught:
        shoal.train(*arguments, run_dir=str(tmp_path / "run"), **overrides)
    assert words in str(caught.value)
    assert not (tmp_path / "run").exists()
