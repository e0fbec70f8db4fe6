"""Everything on one device, on a CPU: the same algorithms, the same numbers, the same program around them."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from benchmarks.device_limit import measure
from shoal import algorithms, cli
from shoal.acting import Progress
from shoal.algorithms import a2c, appo, ppo, vtrace
from shoal.device.placement import GpuConfig, Hardware, choose_device
from shoal.errors import ConfigError
from shoal.experiment.parse import parse_train
from shoal.experiment.prepare import prepare
from shoal.nets import NetConfig
from shoal.roles.device_learner import DeviceLearner
from shoal.roles.parts import EnvSource, Parts
from shoal.telemetry import Stats
from tests.architectures.graphs import draw, train

LSTM = NetConfig(hidden=(8,), recurrent="lstm", lstm_size=8, prev_action_reward=True)
GRID = {
    "a2c": a2c.Config(unroll=6, normalise_advantage=True, lr_final=1e-4),
    "ppo": ppo.Config(unroll=6, epochs=2, minibatches=1, normalise_observations=True, normalise_returns=True),
    "vtrace": vtrace.Config(unroll=6, behaviour_mix=0.1, entropy_final=0.0, optimiser="rmsprop"),
    "appo": appo.Config(unroll=6, minibatches=1, normalise_returns=True, clip_final=0.1, optimiser="sgd"),
}
BUDGET = 1000


class Me:
    """A role's own, without a program."""

    name, index, replicas, incarnation = "device", 0, 1, 0

    def __init__(self):
        names = Stats.names((), a2c.A2C.metrics)
        self.stats, self.failed = Stats(names, np.zeros(len(names)), a2c.A2C.metrics), None

    def rng(self, salt=""):
        return np.random.default_rng(len(salt))

    def fail(self, text):
        self.failed = text


def device_learner(config, env=("CartPole-v1", {"max_episode_steps": 9}), net=None, seats=8):
    source = EnvSource(env[0], kwargs=env[1])
    parts = Parts(algorithms.make(config, source.describe(), net or NetConfig(hidden=(8,)), seats), source, seats, seed=3,
                  max_env_steps=BUDGET)
    return DeviceLearner(Me(), parts, None, 1), parts


def slot_of(tape, record, batch):
    """The same unroll as an actor would have sent it."""
    data = record.layout.empty()
    for name in ("observation", "first", "action", "reward", "discount", "last", "truncated", "prev_action", "prev_reward"):
        if name in data:
            data[name][...] = tape.data[name].numpy()
    data["extras"]["log_prob"][...] = batch.log_prob.numpy()
    data["valid"][...] = True
    data["final_index"].fill(-1)
    for name, x in tape.data["state"].items():
        data["state"][name][...] = x.numpy()
    columns = np.flatnonzero(tape.data["truncated"].numpy().any(0))
    for row, b in enumerate(columns):
        t = int(np.flatnonzero(tape.data["truncated"][:, b].numpy())[0])
        data["final_index"][t, b], data["final_observation"][row] = row, tape.data["final_observation"][b].numpy()
        if "final_action" in data:
            data["final_action"][row] = tape.data["action"][t, b].numpy()
    for name, moments in batch.moments.items():
        for key, x in moments.items():
            data[name][key][...] = x.numpy()
    return data, len(columns)


@pytest.mark.parametrize("net", [None, LSTM], ids=["mlp", "lstm"])
@pytest.mark.parametrize("name", GRID)
def test_update_of_an_ordinary_learner(name, net):
    """An update is that of an ordinary learner on the same unroll."""
    role, parts = device_learner(GRID[name], net=net)
    ordinary, rng, truncated = parts.algorithm.learn(parts.seed), np.random.default_rng(0), 0
    unroll = role.unroll.play
    for update in range(4):
        batch = unroll()
        slot, cut = slot_of(role.unroll, parts.algorithm.record, batch)
        truncated += cut
        role.unroll.play = lambda batch=batch: batch
        progress = Progress(fraction=role.learner_state.progress.fraction)
        role._update()
        role._count([0.0] * 4, 1, 0.0)
        sums, moments = ordinary.sums(slot), ordinary.moments(slot)
        for minibatch in ordinary.minibatches(slot, sums, progress, rng):
            gradient, metrics = ordinary.gradients(minibatch, "all")
            assert ordinary.apply(gradient, "all")
        ordinary.absorb(moments)
        for key, tensor in ordinary.state.items():
            np.testing.assert_allclose(role.learn.state[key], tensor, rtol=2e-4, atol=2e-6, err_msg=f"{key} at {update}")
        (shown,) = (dict(phase.items()) for phase in role.metrics)
        assert shown.keys() == metrics.keys()
        assert shown["learning_rate"] == pytest.approx(metrics["learning_rate"])
        assert shown["loss"] == pytest.approx(metrics["loss"], rel=1e-3, abs=1e-5)
    assert truncated > 3


def test_a_tape_is_what_happened():
    role, parts = device_learner(vtrace.Config(unroll=6), net=LSTM)
    policy, tape = parts.algorithm.policy(), role.unroll
    policy.bind({"params": role.learn.state["params"], "norm": {}})
    last_row, hidden = None, {name: x.clone() for name, x in tape.hidden.items()}
    for _ in range(3):
        batch = tape.play()
        if last_row is not None:  # the unroll goes on where the one before ended
            torch.testing.assert_close(batch.observation[0], last_row)
            for name, x in hidden.items():
                torch.testing.assert_close(batch.state[name], x)
        output = policy.model.unroll(batch)
        log_prob, _ = policy.model.judge(output, batch)
        torch.testing.assert_close(log_prob, batch.log_prob)
        ended = ~batch.keep.bool()
        torch.testing.assert_close(batch.first[1:], ended)
        torch.testing.assert_close(batch.prev_action[1:], batch.action * ~ended)
        torch.testing.assert_close(batch.prev_reward[1:], batch.reward * ~ended)
        moved = batch.observation[:-1, :, 0] + 0.02 * batch.observation[:-1, :, 1]
        torch.testing.assert_close(batch.observation[1:, :, 0][~ended], moved[~ended], rtol=1e-4, atol=1e-5)
        last_row, hidden = batch.observation[-1].clone(), {name: x.clone() for name, x in tape.hidden.items()}


def test_episodes_are_counted_once():
    role, _ = device_learner(a2c.Config(unroll=9), ("shoal/Catch-v0", {}), seats=5)
    for _ in range(4):
        role.unroll.play()
    episodes, returns, lengths = role.unroll.episodes.tolist()
    assert (episodes, lengths) == (20, 180) and -20 <= returns <= 20


def test_update_that_is_not_finite():
    """An update that is not finite changes nothing."""
    role, _ = device_learner(a2c.Config(unroll=4), ("CartPole-v1", {}))
    role._update()
    before = {name: tensor.clone() for name, tensor in role.learn.state.items()}
    role.unroll.env.state.fill_(torch.nan)
    for _ in range(10):
        role._update()
    for name, tensor in role.learn.state.items():
        torch.testing.assert_close(tensor, before[name])
    role.updates = 10
    role._count([0.0, 0.0, 0.0, float(role.skipped)], 1, 0.0)
    assert "not finite" in role.me.failed and role.me.stats.get("updates_skipped") == 10


def test_it_learns_catch(tmp_path):
    config = a2c.Config(unroll=9, lr=5e-3, lambda_=1.0)
    run = train(tmp_path, config, "device", "shoal/Catch-v0", "inline", updates=160, envs_per_actor=64, updates_per_step=4)
    policy = algorithms.make(config, EnvSource("shoal/Catch-v0").describe(), NetConfig(), 64).policy()
    policy.load(run.published)
    from shoal.roles.episodes import EpisodePlay

    record = algorithms.make(config, EnvSource("shoal/Catch-v0").describe(), NetConfig(), 64).record
    play = EpisodePlay(policy, record, EnvSource("shoal/Catch-v0").make(50), 100, 0, torch.Generator().manual_seed(0))
    assert play.to_the_end().returns.mean() > 0.9


def test_it_runs_resumes_and_is_evaluated(tmp_path, monkeypatch):
    """It runs, stops, resumes and is evaluated like any other."""
    monkeypatch.chdir(tmp_path)
    words = ["--runtime", "inline", "--console.mode", "none", "--no-tensorboard", "--eval.episodes", "5"]
    assert cli.main(["train", "anakin", "CartPole-v1", "--run-dir", "run", "--architecture.envs-per-actor", "16", "--max-env-steps",
                     "4000", "--eval.every-env-steps", "2000", *words]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["stopped_by"] == "env_steps" and summary["env_steps"] == 4096 and summary["learner_steps"] == 16
    assert summary["policy_lag"]["max"] == 0 and summary["samples_per_insert"] == 1 and summary["eval_episodes"] == 5
    assert cli.main(["resume", "run", "--max-env-steps", "6000", "--console.mode", "none"]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["env_steps"] == 6144 and summary["learner_steps"] == 24
    assert cli.main(["eval", "run", "--episodes", "5"]) == 0


def test_same_seed_gives_the_same_weights(tmp_path):
    runs = [train(tmp_path / str(k), GRID["ppo"], "device", "CartPole-v1", "inline", updates=8, seed=seed) for k, seed in
            enumerate((1, 1, 2))]
    assert runs[0].hash == runs[1].hash != runs[2].hash


def test_clashes_are_named_at_once():
    with pytest.raises(ConfigError, match=r"--learners 2: the device architecture has one device"):
        draw(a2c.Config(), "device", "CartPole-v1", learners=2)
    with pytest.raises(ConfigError, match="Acrobot-v1 has no tensor version"):
        draw(a2c.Config(), "device", "Acrobot-v1")
    with pytest.raises(ConfigError, match=r"--algorithm.unroll 16 is longer than an episode of 9 steps"):
        device_learner(a2c.Config(unroll=16))


@pytest.mark.parametrize(("gpus", "arguments", "on_gpu"), [
    (0, ("seed", "ALE/Pong-v5"), False),            # a laptop
    (1, ("seed", "ALE/Pong-v5"), True),             # images
    (1, ("impala", "shoal/PixelCatch-v0"), True),
    (1, ("impala", "CartPole-v1"), False),          # small networks over vectors stay where their data are
    (1, ("anakin", "CartPole-v1"), True),           # environments on the device
    (1, ("gala", "shoal/PixelCatch-v0"), False),    # computes on the CPU only
    (1, ("a3c", "shoal/PixelCatch-v0"), False),     # takes a GPU only when it is told to
    (1, ("a3c", "CartPole-v1", "--device", "cuda"), True),
    (1, ("a3c", "CartPole-v1", "--device", "cuda", "--architecture.mode", "master"), True),
    (1, ("gorila", "shoal/PixelCatch-v0"), False),
    (1, ("apex", "shoal/PixelCatch-v0"), True),
    (1, ("dqn", "shoal/PixelCatch-v0"), True),
    (1, ("seed_r2d2", "shoal/PixelCatch-v0"), True),
    (1, ("r2d2", "shoal/TMaze-v0"), False),
    (1, ("r2d2", "shoal/TMaze-v0", "--device", "cuda"), True),
    (1, ("seed", "ALE/Pong-v5", "--device", "cpu"), False),
])
def test_auto_takes_a_gpu_where_it_pays(gpus, arguments, on_gpu, monkeypatch):
    if arguments[1].startswith("ALE/"):
        pytest.importorskip("ale_py")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert prepare(parse_train(arguments)).program().on_gpu is on_gpu


def test_what_a_device_is(capsys):
    assert choose_device("cpu", GpuConfig(), worth=True) == Hardware("cpu", GpuConfig())
    if torch.cuda.device_count():
        assert choose_device("auto", GpuConfig(), worth=True).on_gpu and not choose_device("auto", GpuConfig(), worth=False).on_gpu
        return
    assert choose_device("auto", GpuConfig(), worth=True) == Hardware()
    assert cli.main(["show", "impala", "CartPole-v1", "--device", "cuda"]) == 2
    assert "finds no GPU here; use --device cpu" in capsys.readouterr().err
    assert cli.main(["show", "gala", "CartPole-v1", "--device", "cuda"]) == 2
    assert "--device cuda does not fit --architecture gossip, which computes on the CPU only" in capsys.readouterr().err
    assert cli.main(["show", "gorila", "shoal/Catch-v0", "--device", "cuda"]) == 2
    assert "--device cuda does not fit --architecture parameter_server, which computes on the CPU only" in capsys.readouterr().err


def test_the_limit_is_measured():
    line = next(measure("shoal/Catch-v0", [8], 4, Hardware(), 0.05))
    assert min(line["acting_env_steps_per_second"], line["update_env_steps_per_second"]) > 0
    assert dataclasses.asdict(GpuConfig())["graphs"] is True


def test_a_budget_is_kept_to_the_update(tmp_path):
    words = ["--runtime", "inline", "--architecture.envs-per-actor", "64", "--max-env-steps", "20000", "--eval.no-enabled"]
    assert cli.main(["train", "anakin", "CartPole-v1", *words, "--console.mode", "none", "--run-dir", str(tmp_path / "a")]) == 0
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["env_steps"] == 20_480


def test_there_are_no_actors_to_choose():
    with pytest.raises(ConfigError, match="--actors 4 does not fit --architecture device, whose learner acts itself; leave it out"):
        prepare(parse_train(["anakin", "CartPole-v1", "--actors", "4"]))
