"""An algorithm and an architecture from outside run on every pair that fits, without a change in shoal."""

from pathlib import Path

import numpy as np
import pytest

from shoal import algorithms, architectures, cli
from shoal.errors import ConfigError
from shoal.nets import NetConfig
from tests.architectures import third_party_algorithm
from tests.architectures.graphs import train

HERE = "tests.architectures.third_party"
UNROLLED = [name for name in architectures.ARCHITECTURES if getattr(architectures.named(name), "has_unrolls", True)]
PAIRS = [*(("luck", name) for name in (*UNROLLED, "freshest") if name != "device"),  # it takes arrays
         *((name, "freshest") for name in algorithms.ALGORITHMS if not getattr(algorithms.named(name)[1], "from_replay", False))]
LSTM = NetConfig(hidden=(16,), recurrent="lstm", lstm_size=16)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(algorithms.ALGORITHMS, "luck", (f"{HERE}_algorithm", "Luck"))
    monkeypatch.setitem(architectures.ARCHITECTURES, "freshest", f"{HERE}_architecture")


def test_the_algorithm_is_short():
    assert len(Path(third_party_algorithm.__file__).read_text().splitlines()) <= 100


@pytest.mark.parametrize("net", [None, LSTM], ids=["mlp", "lstm"])
@pytest.mark.parametrize(("algorithm", "architecture"), PAIRS)
def test_it_runs_on_every_pair(algorithm, architecture, net, tmp_path):
    run = train(tmp_path, algorithm, architecture, "shoal/Catch-v0", "inline", actors=2, updates=6, net=net)
    assert run.reason == "counted" and np.isfinite(run.published["params"]).all()


def test_an_algorithm_of_arrays_is_refused_on_a_device(tmp_path):
    with pytest.raises(ConfigError, match="Luck works on arrays only"):
        train(tmp_path, "luck", "device", "shoal/Catch-v0", "inline", updates=1)


@pytest.mark.parametrize(("algorithm", "architecture"), [("luck", "predictor_trainer"), ("vtrace", "freshest")])
def test_it_runs_between_processes(algorithm, architecture, tmp_path):
    run = train(tmp_path, algorithm, architecture, "shoal/Catch-v0", "local", actors=2, updates=20)
    assert run.reason == "counted"


def test_it_runs_from_the_command_line_and_is_listed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["list"]) == 0
    shown = capsys.readouterr().out
    assert "luck" in shown and "freshest: actors go on" in shown
    assert cli.main(["train", "--algorithm", "luck", "--architecture", "freshest", "shoal/Catch-v0", "--runtime", "inline",
                     "--run-dir", "run", "--max-env-steps", "500", "--console.mode", "none", "--no-tensorboard",
                     "--eval.episodes", "5"]) == 0
