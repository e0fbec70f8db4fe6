"""Algorithms, architectures and presets from outside the package: by command and from Python, on inline and on local."""

import json
import sys
from dataclasses import dataclass, replace

import pytest

import shoal
from shoal import cli
from shoal.algorithms import vtrace
from shoal.architectures.actor_learner import ActorLearner
from shoal.envs import describe
from shoal.errors import ConfigError
from shoal.experiment.config import Names
from shoal.nets.net_config import NetConfig
from shoal.options import number
from shoal.telemetry.outputs import read_lines

PARTS = '''
from dataclasses import dataclass

from shoal.algorithms import vtrace
from shoal.architectures import actor_learner
from shoal.options import number
from shoal.telemetry.metrics import Metric


@dataclass(frozen=True)
class Config(vtrace.Config):
    """Options of my own."""

    luck: int = number(7, at_least=1)
    """A number that only this algorithm has."""


class MyAlgorithm(vtrace.VTrace):
    name, config_class = "mine", Config
    metrics = (*vtrace.VTrace.metrics, Metric("my_luck", "gauge", "", "As much as was asked for."))

    def learn(self, seed):
        learn = super().learn(seed)
        inner = learn.gradients

        def gradients(minibatch, phase):
            gradient, metrics = inner(minibatch, phase)
            return gradient, {**metrics, "my_luck": float(self.config.luck)}

        learn.gradients = gradients
        return learn


class MyArchitecture(actor_learner.ActorLearner):
    name = "my_drawing"


class Forgotten(vtrace.VTrace):
    metrics = ()


from shoal.learning import Algorithm
class Half(Algorithm):
    name = "half"
'''
QUICK = ["--actors", "1", "--max-learner-steps", "3", "--console.mode", "none", "--no-tensorboard", "--no-eval.enabled",
         "--net.hidden", "8"]
VALUES = {"actors": 1, "max_learner_steps": 3, "console.mode": "none", "tensorboard": False, "eval.enabled": False,
          "net": {"hidden": (8,)}, "architecture.envs_per_actor": 4}
RUNTIMES = pytest.mark.parametrize("runtime", ["inline", "local"])


@pytest.fixture
def parts(tmp_path, monkeypatch, request) -> str:
    """A module in the current folder; each test has one of its own name."""
    name = f"own_parts_{abs(hash(request.node.nodeid))}"
    (tmp_path / f"{name}.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return name


def shown(run) -> dict:
    return [row for row in read_lines(run / "metrics.jsonl") if row["kind"] == "snapshot"][-1]["losses"]


@RUNTIMES
def test_algorithm_by_command(parts, runtime, tmp_path, capsys):
    """An algorithm given by command is resumed, evaluated and played."""
    words = ["train", "--algorithm", f"{parts}:MyAlgorithm", "--architecture", "actor_learner", "CartPole-v1", "--runtime", runtime,
             "--algorithm.luck", "13", *QUICK]
    assert cli.main([*words, "--run-dir", "run", "--console.mode", "plain"]) == 0
    assert shown(tmp_path / "run")["my_luck"] == 13.0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["algorithm"]["name"] == f"{parts}:MyAlgorithm" and config["algorithm"]["luck"] == 13
    said = capsys.readouterr().out
    assert said.startswith("mine x actor_learner on CartPole-v1") and "--trust" in said  # in the commands to go on with
    assert cli.main(["eval", "run", "--episodes", "2"]) == 2
    assert f"imports the module {parts}" in capsys.readouterr().err
    if runtime == "inline":
        assert cli.main(["eval", "run", "--episodes", "2", "--trust"]) == 0
        assert cli.main(["play", "run", "--trust"]) == 0
        assert cli.main(["resume", "run", "--trust", "--max-learner-steps", "6", "--console.mode", "none"]) == 0
    assert cli.main([*words, "--algorithm.luck", "0"]) == 2
    assert "--algorithm.luck is 0; it must be at least 1" in capsys.readouterr().err


@RUNTIMES
def test_an_architecture_by_command(parts, runtime, tmp_path):
    assert cli.main(["train", "--algorithm", "vtrace", "--architecture", f"{parts}:MyArchitecture", "CartPole-v1",
                     "--runtime", runtime, *QUICK]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert "vtracexmy_drawing-CartPole-v1" in run.name
    assert json.loads((run / "summary.json").read_text())["architecture"] == f"{parts}:MyArchitecture"
    assert shoal.load(run, trust=True).prepared.plan.architecture.name == "my_drawing"


@RUNTIMES
def test_a_preset_file(parts, runtime, tmp_path, capsys):
    (tmp_path / "my_preset.toml").write_text(f'algorithm = "{parts}:MyAlgorithm"\narchitecture = "actor_learner"\n'
                                             "[tuned]\nalgorithm.luck = 3\n[env.\"CartPole-*\".tuned]\nalgorithm.luck = 5\n")
    assert cli.main(["train", "./my_preset.toml", "CartPole-v1", "--runtime", runtime, *QUICK]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert "my_preset-CartPole-v1" in run.name and shown(run)["my_luck"] == 5.0
    capsys.readouterr()
    assert cli.main(["show", "./my_preset.toml"]) == 0
    said = capsys.readouterr().out
    assert "algorithm.luck" in said and "learner" in said
    assert cli.main(["list"]) == 0


@RUNTIMES
def test_classes_from_python(parts, runtime, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    module = __import__(parts)
    run = shoal.train(algorithm=module.MyAlgorithm, architecture=module.MyArchitecture, env="CartPole-v1", runtime=runtime,
                      run_dir=str(tmp_path / "run"), **VALUES, **{"algorithm.luck": 4})
    assert shown(run.directory)["my_luck"] == 4.0
    names = run.prepared.plan.names
    assert (names.algorithm, names.architecture) == (f"{parts}:MyAlgorithm", f"{parts}:MyArchitecture")


def test_config_and_instance(parts, tmp_path, monkeypatch):
    """A config and an instance bring their values."""
    from shoal.experiment.run import plan_of

    monkeypatch.syspath_prepend(tmp_path)
    module = __import__(parts)
    spec = describe("CartPole-v1")
    config = module.Config(luck=9, lr=0.5)
    for given, sizes in ((config, (64, 64)), (module.MyAlgorithm(config, spec, NetConfig(hidden=(5,)), 8), (5,))):
        plan = plan_of(None, "CartPole-v1", given, "actor_learner", {"algorithm.lr": 0.25})
        assert plan.algorithm is module.MyAlgorithm and plan.experiment.net.hidden == sizes
        assert plan.experiment.algorithm == replace(config, lr=0.25)
    own = plan_of(None, "CartPole-v1", vtrace.Config(lr=0.5), ActorLearner, {})
    assert own.names == Names("vtrace", "actor_learner") and own.experiment.algorithm.lr == 0.5
    assert plan_of(None, "CartPole-v1", vtrace.VTrace, ActorLearner(), {}).names == own.names


def test_titles_and_folders(parts, tmp_path, monkeypatch):
    """Titles have the declared names and folders the same joined."""
    from shoal.experiment.run import plan_of

    monkeypatch.syspath_prepend(tmp_path)
    module = __import__(parts)
    mine = plan_of(None, "CartPole-v1", module.MyAlgorithm, "actor_learner", {})
    assert (mine.title, mine.folder_name) == ("mine x actor_learner", "minexactor_learner")
    inherited = plan_of(None, "CartPole-v1", f"{parts}:Forgotten", "actor_learner", {})  # its declared name is that of vtrace
    assert inherited.title == "Forgotten x actor_learner"
    registered = plan_of(None, "CartPole-v1", "ppo", "synchronous", {})
    assert (registered.title, registered.folder_name) == ("ppo x synchronous", "ppoxsynchronous")
    assert plan_of("impala", "CartPole-v1", None, None, {}).folder_name == "impala"


@RUNTIMES
def test_class_of_a_script(runtime, tmp_path):
    """A class of a script trains and is refused at resume."""

    @dataclass(frozen=True)
    class Config(vtrace.Config):
        luck: int = number(7, at_least=1)

    class Mine(vtrace.VTrace):
        name, config_class = "mine", Config

    run = shoal.train(algorithm=Mine, architecture="actor_learner", env="CartPole-v1", runtime=runtime,
                      run_dir=str(tmp_path / "run"), **VALUES)
    assert run.summary["algorithm"] == "?Mine" and run.summary["learner_steps"] >= 3
    with pytest.raises(ConfigError, match=r"the algorithm Mine of this run was defined in a script or notebook.*into a module"):
        shoal.resume(run.directory, max_learner_steps=9)
    assert cli.main(["resume", str(run.directory), "--max-learner-steps", "9"]) == 2


def test_undeclared_metric(parts, tmp_path, capsys):
    """An undeclared metric ends the run with its name."""
    assert cli.main(["train", "--algorithm", f"{parts}:Forgotten", "--architecture", "actor_learner", "CartPole-v1", "--runtime",
                     "inline", "--run-dir", "run", *QUICK]) == 3
    assert "there is no metric" in capsys.readouterr().err


@pytest.mark.parametrize(("algorithm", "words"), [
    ("PARTS:Nobody", "PARTS:Nobody cannot be imported"),
    ("PARTS:PARTS", "cannot be imported"),
    ("nowhere_at_all:Nobody", "No module named 'nowhere_at_all'; run from the folder that has it"),
    ("PARTS:MyArchitecture", "is not an algorithm: write a subclass of shoal.learning.Algorithm"),
    ("PARTS:Half", "PARTS:Half lacks config_class, tolerates, "),
    ("broken:Half", "broken:Half cannot be imported: ZeroDivisionError")])
def test_what_is_no_algorithm_is_refused(algorithm, words, parts, tmp_path, capsys):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    given = algorithm.replace("PARTS", parts)
    assert cli.main(["train", "--algorithm", given, "--architecture", "actor_learner", "CartPole-v1"]) == 2
    said = capsys.readouterr().err
    assert words.replace("PARTS", parts) in said and said.count("\n") == 1


@pytest.mark.parametrize(("text", "words"), [
    ("algorithm = 3", "preset ./bad.toml names no algorithm"),
    ("", "preset ./bad.toml names no algorithm; write a line such as algorithm = 'ppo'"),
    ("algorithm = ", "preset ./bad.toml is not a TOML file"),
    ("\xff", "preset ./bad.toml is not a TOML file"),
    ("HEAD actors = 2", "preset ./bad.toml: actors stands alone; put values under [paper], [tuned] or [large]"),
    ("HEAD env = 2", "preset ./bad.toml: env is 2; it must be a table"),
    ("HEAD tuned = 2", "preset ./bad.toml: tuned stands alone"),
    ("HEAD [tuned]\nactors = 'many'", "in preset ./bad.toml: actors='many' is not possible"),
    ("HEAD [tuned]\nalgorithm.lrr = 1", "in preset ./bad.toml: there is no setting 'algorithm.lrr'"),
    (None, "preset ./bad.toml cannot be read: No such file")])
def test_a_bad_preset_file_is_named(text, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        whole = text.replace("HEAD ", 'algorithm = "ppo"\narchitecture = "synchronous"\n')
        (tmp_path / "bad.toml").write_bytes(whole.encode("latin-1"))
    assert cli.main(["train", "./bad.toml", "CartPole-v1"]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1
