"""Presets that learn from a recording: with and without a simulator, several learners, then online; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import shoal
from shoal import cli
from shoal.envs.experts import balance
from shoal.errors import ConfigError
from shoal.experiment.parse import parse_train
from tests.offline.recordings import cue, recorded

QUICK = ["--runtime", "inline", "--console.mode", "none", "--no-tensorboard", "--seed", "3"]
SMALL = ["--replay.batch-size", "32", "--net.hidden", "32", "--algorithm.actor-lr", "3e-3", "--eval.episodes", "5"]
CARTPOLE = "CartPole-v1"


def summary(run="run"):
    return json.loads((Path(run) / "summary.json").read_text())


@pytest.fixture
def logs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return recorded(Path("logs"), CARTPOLE, 4, expert=balance)


def test_bc_clones_an_expert(logs):
    """Bc clones an expert and is evaluated in the simulator."""
    assert cli.main(["train", "bc", "logs", "--env", CARTPOLE, "--run-dir", "run", "--max-learner-steps", "300",
                     "--eval.every-learner-steps", "100", *SMALL, *QUICK]) == 0
    found = summary()
    assert found["eval_return"] > 200 and found["env_steps"] == 0 and found["stopped_by"] == "learner_steps"


def test_run_without_a_simulator(logs, capsys):
    """The recording may be gone by the time that it acts; the environment's spaces are in config.json."""
    assert cli.main(["train", "iql", "logs", "--run-dir", "run", "--max-learner-steps", "20", *SMALL, *QUICK]) == 0
    assert summary()["learner_steps"] >= 20 and summary()["eval_return"] is None
    assert cli.main(["eval", "run"]) == 2 and "give the simulator with --env" in capsys.readouterr().err
    logs.rename("elsewhere")
    assert shoal.load("run").policy.act(np.zeros(4, np.float32)) in (0, 1)
    assert cli.main(["eval", "run", "--env", CARTPOLE, "--episodes", "2"]) == 0
    Path("elsewhere").rename(logs)
    assert cli.main(["resume", "run", "--online", "--max-env-steps", "60"]) == 2
    assert "give the simulator with --env" in capsys.readouterr().err
    assert cli.main(["resume", "run", "--online", "--env", CARTPOLE, "--max-env-steps", "60", "--console.mode", "none"]) == 0
    assert summary()["env_steps"] == 60


def test_batches_ahead(logs):
    """On a GPU four updates are one launch, and as many batches are on their way."""
    def ahead(*words):
        return parse_train(["td3_bc", "logs", *words]).experiment.replay.prefetch

    assert (ahead(), ahead("--device", "cpu"), ahead("--device", "cuda")) == (2, 2, 8)
    assert ahead("--device", "cuda", "--replay.prefetch", "3") == 3


def test_two_learners_in_processes(logs):
    run = shoal.train("bc", data="logs", learners=2, max_learner_steps=6, run_dir="run", console={"mode": "none"},
                      tensorboard=False)
    assert run.summary["learner_steps"] >= 6 and run.summary["learners"] == 2


def test_the_alias_makes_the_same_run(logs):
    words = ["--max-learner-steps", "10", *SMALL, *QUICK, "--run-dir"]
    assert cli.main(["train", "bc", "logs", "--env", CARTPOLE, *words, "a"]) == 0
    assert cli.main(["train", "bc", CARTPOLE, "--demos", "logs", "--offline", *words, "b"]) == 0
    configs = [json.loads((Path(run) / "config.json").read_text()) for run in "ab"]
    assert all(one.pop("run_dir") for one in configs) and configs[0] == configs[1]


def test_until_fitted_q(logs, capsys):
    """A run without a simulator ends when what it has learned is worth enough, by the recording."""
    words = ["train", "bc", "logs", *SMALL[:-2], *QUICK, "--eval.every-learner-steps", "20", "--max-learner-steps", "2000"]
    assert cli.main([*words, "--run-dir", "run", "--until", "fqe >= 20"]) == 0, capsys.readouterr().err
    assert summary()["stopped_by"] == "until" and summary()["learner_steps"] < 2000
    shots = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [one["fqe"] for one in shots if one.get("fqe") is not None][-1] >= 20
    assert cli.main(["train", "dqn", CARTPOLE, "--until", "fqe >= 20", *QUICK]) == 2
    assert "is estimated from a recording that is learned from alone" in capsys.readouterr().err
    words = ["train", "qtopt", "Pendulum-v1", "--demos", "logs", "--offline", "--until", "fqe >= 20", *QUICK]
    assert cli.main(words) == 2 and "which has no value estimator" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "sentence"), [
    (["bc"], "which recording?"),
    (["bc", "gone"], "it does not exist"),
    (["bc", "minari:no/such-v0"], "minari download no/such-v0"),
    (["bc", "logs", "--until-return", "5"], "known from recordings alone"),
    (["bc", "logs", "--env", "Acrobot-v1"], "does not fit Acrobot-v1"),
    (["bc", "logs", "--env", CARTPOLE, "--no-eval.enabled"], "--offline needs evaluations"),
    (["dqn", CARTPOLE, "--env", CARTPOLE], "there is no option --env")])
def test_senseless_options(words, sentence, logs, capsys):
    """What makes no sense is refused before anything starts."""
    assert cli.main(["train", *words, "--run-dir", "run", *QUICK]) == 2
    assert sentence in capsys.readouterr().err and not Path("run").exists()


def test_python_asks_for_a_recording(tmp_path):
    with pytest.raises(ConfigError, match="which recording"):
        shoal.train("bc")
    with pytest.raises(ConfigError, match="does not fit"):
        shoal.train("bc", data=str(cue(tmp_path / "x", 2)), env=CARTPOLE)
