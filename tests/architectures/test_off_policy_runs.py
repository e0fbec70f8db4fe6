"""ddpg, td3 and sac as programs: under every architecture that has tables, between processes, in turns, from the command line."""

from __future__ import annotations

import json
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest

from shoal import cli
from shoal.algorithms import ddpg, sac, td3
from shoal.architectures import ARCHITECTURES, named
from shoal.errors import ConfigError
from shoal.nets import NetConfig
from shoal.roles.replay_config import ReplayConfig
from tests.architectures.graphs import NeverBackwards, Weights, WorksAgain, draw, go, train
from tests.runtime.harness import Killer, Saver

PENDULUM = "Pendulum-v1"
NET = NetConfig(hidden=(16,), activation="relu")
TABLE = ReplayConfig(capacity=2000, min_size=64, batch_size=16, insert_batch=4, samples_per_insert=8.0, exponent=0.0)
APEX = ReplayConfig(capacity=300, min_size=64, batch_size=16, insert_batch=10, samples_per_insert=8.0, evict_exponent=-0.4)
CASES = {
    "ddpg": (ddpg.Config(noise="ou", random_steps=50), PENDULUM, TABLE),
    "apex_dpg": (ddpg.Config(n_step=3, actor_priorities=True, target_tau=1.0, target_period_updates=10, random_steps=50), PENDULUM,
                 APEX),
    "td3": (td3.Config(random_steps=50, normalise_observations=True), PENDULUM, TABLE),
    "sac": (sac.Config(random_steps=50), PENDULUM, TABLE),
    "discrete": (sac.Config(random_steps=50, actor_priorities=True), "shoal/Catch-v0", APEX),
}
TABLED = [name for name in ARCHITECTURES if named(name).takes_replay and name != "offline"
          and not (named(name).needs_relabel or named(name).needs_encoder)]


class Unbounded(gym.Env):
    """Any force at all."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (2,), np.float32), gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 0.0, True, False, {}


@pytest.mark.parametrize("architecture", TABLED)
@pytest.mark.parametrize("case", CASES)
def test_every_pair_learns_something(case, architecture, tmp_path):
    config, env, table = CASES[case]
    if architecture == "parameter_server":  # whose shards publish everything
        if not config.actor_priorities:
            with pytest.raises(ConfigError, match="its policies take a part of them"):
                train(tmp_path, config, architecture, env, "inline", replay=table, net=NET)
        config = replace(config, actor_priorities=True)
    first, more = (train(tmp_path, config, architecture, env, "inline", actors=1 if architecture == "synchronous" else 2,
                         updates=updates, replay=table, net=NET) for updates in (1, 30))
    assert more.reason == "counted" and np.isfinite(more.published["params"]).all()
    assert np.abs(more.published["params"] - first.published["params"]).max() > 1e-4


@pytest.mark.parametrize("case", CASES)
def test_runtimes_give_the_same_bits(case, tmp_path):
    """In turns, all runtimes give the same bits for the same seed."""
    config, env, table = CASES[case]
    runs = [train(tmp_path, config, "synchronous", env, kind, updates=40, replay=table, net=NET) for kind in ("inline", "local")]
    assert runs[0].hash == runs[1].hash
    assert train(tmp_path, config, "synchronous", env, "inline", updates=40, replay=table, net=NET, seed=8).hash != runs[0].hash


@pytest.mark.parametrize(("case", "architecture", "options"), [
    ("apex_dpg", "actor_learner", {"learners": 2}), ("sac", "actor_learner", {"learners": 2}), ("ddpg", "central_inference", {})])
def test_between_processes(case, architecture, options, tmp_path):
    config, env, table = CASES[case]
    run = train(tmp_path, config, architecture, env, "local", actors=2, updates=40, replay=table, net=NET, **options)
    assert run.reason == "counted" and np.isfinite(run.published["params"]).all()


def test_sac_goes_on_after_kills(tmp_path):
    """What a table has saved comes back with it, so its inserts are those of all its lives together."""
    config, env, table = CASES["sac"]
    own = {"actor-0": "env_steps", "replay-0": "replay_inserts", "learner-0": "learner_steps"}
    victims = tuple(own)
    program, _ = draw(config, "actor_learner", env, actors=2, replay=replace(table, checkpoint=True), net=NET)
    killer, save = Killer(victims, times=len(victims), progress="learner_steps", every=30), Saver(tmp_path, every=20)
    again = WorksAgain(killer, own)
    counts = NeverBackwards("env_steps", "learner_steps", "replay_inserts", "replay_samples", "samples_consumed", "episodes")

    def act(control):
        counts(control)
        save(control)
        again(control)

    watch = go(program, "local", tmp_path, Weights(again.done, act, seconds=240))
    assert watch.reason == "until" and killer.kills == len(victims), (watch.reason, killer.kills, counts.highest)
    assert not [event for event in watch.events if event["kind"] == "error"]
    assert counts.highest["replay_inserts"] <= counts.highest["env_steps"], "an item was counted twice"


def test_plain_apex_dpg_is_ddpg(tmp_path):
    """Whatever makes it Ape-X is turned off but the priorities of its actors: these are uniform draws' business no more."""
    plain = ddpg.Config(random_steps=50, target_tau=0.01)
    dpg = replace(CASES["apex_dpg"][0], n_step=1, target_tau=0.01, target_period_updates=1, importance=0.7)
    ours, theirs = (train(tmp_path, config, "synchronous", PENDULUM, "inline", updates=60, replay=TABLE,
                          net=NET).published["params"] for config in (plain, dpg))
    np.testing.assert_array_equal(theirs[: len(ours)], ours)  # it publishes the critic too
    for changed in ({"n_step": 2}, {"target_tau": 0.02}):
        other = train(tmp_path, replace(dpg, **changed), "synchronous", PENDULUM, "inline", updates=60, replay=TABLE, net=NET)
        assert not np.array_equal(other.published["params"][: len(ours)], ours)


@pytest.mark.parametrize("preset", ["ddpg", "td3", "sac", "apex_dpg"])
def test_every_preset(preset, tmp_path, monkeypatch):
    """Every preset runs, resumes and is evaluated."""
    monkeypatch.chdir(tmp_path)
    quick = ["--runtime", "inline", "--console.mode", "none", "--no-tensorboard", "--eval.episodes", "2", "--replay.min-size",
             "100", "--algorithm.random-steps", "100"]
    assert cli.main(["train", preset, PENDULUM, "--run-dir", "run", "--max-env-steps", "300", *quick]) == 0
    assert cli.main(["resume", "run", "--max-env-steps", "600", "--console.mode", "none"]) == 0
    assert cli.main(["eval", "run", "--episodes", "2"]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["learner_steps"] > (1 if preset == "apex_dpg" else 100)  # whose batches are large
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    seen = {name for name, value in last["losses"].items() if value is not None}
    assert {"critic_loss", "actor_loss", "td_error", "q_mean"} <= seen


@pytest.mark.parametrize(("words", "said"), [
    (["td3", "CartPole-v1"], "td3 cannot act in CartPole-v1: its actions are continuous"),
    (["ddpg", "shoal/Catch-v0"], "use an environment with Box actions"),
    (["sac", PENDULUM, "--algorithm.target-entropy", "1"], "has the wrong sign"),
    (["sac", PENDULUM, "--algorithm.alpha", "-1"], "--algorithm.alpha is -1"),
    (["sac", PENDULUM, "--net.recurrent", "lstm"], "which have no past"),
    *((["--algorithm", name, "--architecture", "synchronous", f"{__name__}:Unbounded"], "needs finite bounds")
      for name in ("ddpg", "td3", "sac")),
    (["qtopt", f"{__name__}:Unbounded"], "needs bounded actions")])
def test_bad_input(words, said, capsys, tmp_path, monkeypatch):
    """Bad input is refused with one sentence, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", *words]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("env", ["InvertedPendulum-v5", "HalfCheetah-v5"])
@pytest.mark.parametrize("preset", ["sac", "td3", "apex_dpg"])
def test_presets_start_on_mujoco(preset, env, tmp_path, monkeypatch):
    pytest.importorskip("mujoco")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", preset, env, "--runtime", "inline", "--max-env-steps", "160", "--run-dir", "run", "--net.hidden", "8",
                     "--replay.min-size", "64", "--replay.batch-size", "16", "--replay.samples-per-insert", "8",
                     "--replay.insert-batch", "1", "--algorithm.random-steps", "50", "--eval.episodes", "1",
                     "--eval.max-episode-steps", "20", "--console.mode", "none", "--no-tensorboard"]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["env_steps"] >= 160 and summary["learner_steps"] > 10, summary
