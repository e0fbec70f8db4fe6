"""All 24 pairs run: every actor-critic algorithm under every architecture, recurrent nets included; presets too."""

import numpy as np
import pytest

from shoal import cli
from shoal.algorithms import a2c, appo, ppo, vtrace
from shoal.architectures import ARCHITECTURES, named
from shoal.nets import NetConfig
from tests.architectures.graphs import train

GRID = {
    "a2c": a2c.Config(unroll=4, normalise_advantage=True),
    "ppo": ppo.Config(unroll=8, epochs=2, minibatches=2, normalise_observations=True),
    "vtrace": vtrace.Config(unroll=4),
    "appo": appo.Config(unroll=4, normalise_returns=True),
}
UNROLLED = [name for name in ARCHITECTURES if named(name).takes_unrolls]
PRESETS = ("a3c", "ga3c", "seed", "appo", "rapid_ppo", "gala")
LSTM = NetConfig(hidden=(16,), recurrent="lstm", lstm_size=16, prev_action_reward=True)


@pytest.mark.parametrize("net", [None, LSTM], ids=["mlp", "lstm"])
@pytest.mark.parametrize("architecture", UNROLLED)
@pytest.mark.parametrize("algorithm", GRID)
def test_every_pair_learns_something(algorithm, architecture, net, tmp_path):
    first = train(tmp_path, GRID[algorithm], architecture, "shoal/Catch-v0", "inline", actors=2, updates=1, net=net)
    more = train(tmp_path, GRID[algorithm], architecture, "shoal/Catch-v0", "inline", actors=2, updates=20, net=net)
    assert more.reason == "counted" and np.isfinite(more.published["params"]).all()
    assert np.abs(more.published["params"] - first.published["params"]).max() > 1e-5


@pytest.mark.parametrize(("algorithm", "architecture"), [("appo", "central_inference"), ("ppo", "predictor_trainer"),
                                                         ("vtrace", "gossip"), ("appo", "async_gradients")])
def test_some_pairs_between_processes(algorithm, architecture, tmp_path):
    run = train(tmp_path, GRID[algorithm], architecture, "shoal/Catch-v0", "local", actors=2, updates=20, net=LSTM)
    assert run.reason == "counted" and np.isfinite(run.published["params"]).all()


QUICK = ["--runtime", "inline", "--max-env-steps", "1500", "--console.mode", "none", "--no-tensorboard", "--eval.episodes", "5"]


@pytest.mark.parametrize("architecture", UNROLLED)
@pytest.mark.parametrize("algorithm", GRID)
def test_every_pair_on_the_command_line(algorithm, architecture, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = cli.main(["train", "--algorithm", algorithm, "--architecture", architecture, "shoal/Catch-v0", "--run-dir", "run",
                     "--algorithm.unroll", "8", *QUICK])
    assert code == 0
    assert list((tmp_path / "run" / "checkpoints").glob("*/*.safetensors"))


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset(preset, tmp_path, monkeypatch):
    """Every preset runs, resumes and is evaluated."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", preset, "shoal/Catch-v0", "--run-dir", "run", *QUICK]) == 0
    assert cli.main(["resume", "run", "--max-env-steps", "3000", "--console.mode", "none"]) == 0
    assert cli.main(["eval", "run", "--episodes", "5"]) == 0


def test_the_list_prints_the_grid(capsys):
    assert cli.main(["list"]) == 0
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert all(lines[name][1:7] == ["yes"] * 6 for name in GRID)
    assert all(preset in lines for preset in PRESETS)


@pytest.mark.parametrize("algorithm, fits", [("a2c", False), ("ppo", False), ("appo", False), ("vtrace", True)])
def test_unbounded_reuse_needs_vtrace(algorithm, fits, tmp_path, capsys):
    words = ["show", "--algorithm", algorithm, "--architecture", "actor_learner", "shoal/Catch-v0",
             "--architecture.buffer-slots", "8"]
    assert cli.main(words) == (0 if fits else 2)
    bounded = cli.main([*words, "--architecture.max-staleness", "4"])
    assert bounded == (2 if algorithm == "a2c" else 0)
    capsys.readouterr()
