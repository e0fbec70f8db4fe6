"""The algorithm and the architecture of docs/extending.md, known by name only, run on every pair that fits."""

import sys
from dataclasses import replace

import numpy as np
import pytest

from shoal import algorithms, architectures
from shoal.errors import ConfigError
from shoal.nets import NetConfig
from tests.architectures.graphs import draw, train
from tests.test_extending import FILES

LUCK, FRESHEST = "my_algorithm:Luck", "my_architecture:Freshest"
UNROLLED = [name for name in architectures.ARCHITECTURES if architectures.named(name).takes_unrolls]
PAIRS = [*((LUCK, name) for name in (*UNROLLED, FRESHEST)),
         *((name, FRESHEST) for name in algorithms.ALGORITHMS if not algorithms.named(name).from_replay and name != "es")]
LSTM = NetConfig(hidden=(16,), recurrent="lstm", lstm_size=16)


@pytest.fixture(scope="module", autouse=True)
def importable(tmp_path_factory):
    folder = tmp_path_factory.mktemp("outside")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


@pytest.mark.parametrize("net", [None, LSTM], ids=["mlp", "lstm"])
@pytest.mark.parametrize(("algorithm", "architecture"), PAIRS)
def test_every_pair(algorithm, architecture, net, tmp_path):
    actors = 1 if architecture == "device" else 2
    run = train(tmp_path, algorithm, architecture, "shoal/Catch-v0", "inline", actors=actors, updates=6, net=net)
    assert run.reason == "counted" and np.isfinite(run.published["params"]).all()


def test_arrays_only_is_refused_on_a_device(monkeypatch):
    monkeypatch.setattr(algorithms.named(LUCK), "runs_on_gpu", False)
    with pytest.raises(ConfigError, match="Luck works on arrays only"):
        draw(LUCK, "device", "shoal/Catch-v0")


@pytest.mark.parametrize(("algorithm", "architecture"), [(LUCK, "predictor_trainer"), ("vtrace", FRESHEST)])
def test_between_processes(algorithm, architecture, tmp_path):
    run = train(tmp_path, algorithm, architecture, "shoal/Catch-v0", "local", actors=2, updates=20)
    assert run.reason == "counted"


def test_a_config_finds_its_class():
    config = replace(algorithms.named(LUCK).config_class(), lr=1e-2)
    assert algorithms.class_of(config) is algorithms.named(LUCK)
