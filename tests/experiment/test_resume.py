"""What a resumed run keeps of the values it had, and what it may be given instead."""

import json

import pytest

import shoal
from shoal import cli
from shoal.errors import ConfigError
from shoal.experiment import run_commands
from shoal.experiment.resuming import resume_plan
from shoal.experiment.rundir import RunDir
from shoal.telemetry.outputs import read_lines

QUIET = {"runtime": "inline", "actors": 1, "max_env_steps": 200, "eval.enabled": False, "tensorboard": False,
         "console.mode": "none", "net.hidden": (8,)}
HERE = "10.0.0.1:6379"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run that says it was made on a cluster."""
    run = tmp_path_factory.mktemp("resume") / "run"
    shoal.train("a2c", "CartPole-v1", run_dir=str(run), **QUIET)
    config = json.loads((run / "config.json").read_text())
    config["runtime"] = "ray"
    config["ray"] |= {"address": HERE, "cpus_per_place": 0.5}
    config["console"]["every_seconds"] = 1.5
    (run / "config.json").write_text(json.dumps(config))
    return run


@pytest.mark.parametrize(("words", "changed"), [
    ([], {}),
    (["--ray.wait-seconds", "60"], {"ray.wait_seconds": 60.0}),
    (["--ray.address", "None"], {"ray.address": None}),
    (["--ray.address", "auto", "--ray.cpus-per-place", "1.0"], {"ray.address": "auto", "ray.cpus_per_place": 1.0}),
    (["--console.mode", "plain"], {"console.mode": "plain"}),
    (["--console.every-seconds", "5.0"], {"console.every_seconds": 5.0}),
    (["--runtime", "local"], {"runtime": "local"}),
    (["--actors", "3"], {"actors": 3}),
    (["--actors", "auto"], {"actors": "auto"})])
def test_what_is_not_given_stays(words, changed, made, monkeypatch):
    plans = []

    def launch(plan, rundir):
        plans.append(plan.experiment)
        raise ConfigError("enough")

    monkeypatch.setattr(run_commands, "launch", launch)
    assert cli.main(["resume", str(made), "--max-env-steps", "400", *words]) == 2
    experiment = plans[0]
    expected = {"runtime": "ray", "actors": 1, "ray.address": HERE, "ray.cpus_per_place": 0.5, "ray.wait_seconds": 0.0,
                "console.mode": "none", "console.every_seconds": 1.5, "max_env_steps": 400, **changed}
    for key, value in expected.items():
        section, _, name = key.rpartition(".")
        assert getattr(getattr(experiment, section) if section else experiment, name) == value, key


def test_cluster_options_in_vain(made, capsys):
    """Options of a cluster that no run would use are refused."""
    words = ["resume", str(made), "--max-env-steps", "400", "--runtime", "local", "--ray.wait-seconds", "60"]
    assert cli.main(words) == 2
    assert "--ray.wait-seconds 60.0 needs --runtime ray, but this run has --runtime local" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"--ray\.address auto needs --runtime ray"):
        resume_plan(RunDir(made), {"runtime": "inline", "ray": {"address": "auto"}, "max_env_steps": 400})


def test_number_of_actors_may_be_found_anew(tmp_path, capsys):
    run = tmp_path / "run"
    shoal.train("a2c", "CartPole-v1", run_dir=str(run), **QUIET)
    assert cli.main(["resume", str(run), "--actors", "auto", "--max-env-steps", "600", "--console.mode", "plain"]) == 0
    assert "by the number of cores (--actors auto)" in capsys.readouterr().out
    assert json.loads((run / "config.json").read_text())["actors"] >= 2


@pytest.mark.parametrize("preset, env", [("impala", "CartPole-v1"), ("gorila", "shoal/Catch-v0")])
def test_versions_and_budgets_go_on(preset, env, tmp_path):
    """weights_version never runs backwards, and what is left of the budget is what the first part has not used."""
    values = {**QUIET, "max_env_steps": 900, "actors": 2}
    if preset == "gorila":
        values["replay.min_size"] = 100
    run = shoal.train(preset, env, run_dir=str(tmp_path / "run"), **values)
    first = [row["weights_version"] for row in read_lines(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "snapshot"]
    again = shoal.resume(run.directory, max_env_steps=1800)
    shown = [row["weights_version"] for row in read_lines(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "snapshot"]
    assert first[-1] > 1 and shown == sorted(shown) and shown[-1] > first[-1]
    assert 1800 <= again.summary["env_steps"] < 1800 + (2 * 20 * 8 if preset == "impala" else 32)
