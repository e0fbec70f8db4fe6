"""What a new user meets: other libraries' words, numbers that make no sense, several runs at once, lists of runs."""

import itertools
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

import shoal
from shoal import cli
from shoal.errors import ConfigError
from shoal.experiment.lock import alone, holder
from shoal.experiment.presets import load_preset, preset_names
from shoal.experiment.references import EnvRef
from shoal.experiment.run import plan_of
from shoal.experiment.rundir import RunDir, list_runs
from shoal.telemetry import outputs
from shoal.telemetry.outputs import JsonLines, read_lines
from tests.experiment import toys

QUICK = {"runtime": "inline", "actors": 1, "console.mode": "none", "tensorboard": False, "eval.enabled": False,
         "net.hidden": (4,), "architecture.envs_per_actor": 2, "max_env_steps": 64}


@pytest.mark.parametrize(("words", "said"), [
    (["impala", "CartPole-v1", "--learning-rate", "3"], "there is no option --learning-rate; did you mean --algorithm.lr?"),
    (["impala", "CartPole-v1", "--algorithm.learning_rate", "3"], "did you mean --algorithm.lr?"),
    (["impala", "CartPole-v1", "--total_timesteps", "3"], "did you mean --max-env-steps?"),
    (["ppo", "CartPole-v1", "--n-steps", "3"], "did you mean --algorithm.unroll?"),
    (["dqn", "CartPole-v1", "--n-steps", "3"], "did you mean --algorithm.n-step?"),
    (["ppo", "CartPole-v1", "--batch-size", "64"], "did you mean --algorithm.minibatches?"),
    (["dqn", "CartPole-v1", "--batch-size", "64"], "did you mean --replay.batch-size?"),
    (["ppo", "CartPole-v1", "--policy-kwargs", "x"], "did you mean --net.hidden?"),
    (["ppo", "CartPole-v1", "--verbose", "1"], "did you mean --console.mode?"),
    (["ppo", "CartPole-v1", "--n-envs", "3"], "did you mean --architecture.envs-per-actor?"),
    (["dqn", "CartPole-v1", "--buffer-size", "3"], "did you mean --replay.capacity?"),
    (["ppo", "CartPole-v1", "--gae-lambda", "1"], "did you mean --algorithm.lambda?"),
    (["tqc", "Pendulum-v1"], "there is no preset 'tqc'; shoal does not have it: there are sac, td3 and ppo"),
    (["sac", "Pendulum-v1", "--ent-coef", "auto"], "did you mean --algorithm.alpha?"),
    (["td3", "Pendulum-v1", "--tau", "0.1"], "did you mean --algorithm.target-tau?"),
    (["ddpg", "Pendulum-v1", "--gradient-steps", "1"], "did you mean --replay.samples-per-insert?"),
    (["--algorithm", "qrdqn", "--architecture", "actor_learner", "CartPole-v1"], "there are dqn, double_dqn, rainbow and apex"),
    (["--algorithm", "rainbow", "--architecture", "actor_learner", "CartPole-v1"], "it is a preset of dqn: shoal train rainbow"),
    (["c51", "CartPole-v1"], "it is an option of dqn: --algorithm.atoms 51"),
    (["rainbow", "CartPole-v1", "--v-max", "100"], "did you mean --algorithm.value-max?"),
    (["impala", "CartPole-v1", "--seed", "12345678901234567890123456"], "--seed has 26 digits; it must be below 2^63"),
    (["impala", "CartPole-v1", "--seed", str(2**60)], "it must be at least 0 and below 9007199254740992"),
    (["rainbow", "CartPole-v1", "--algorithm.noisy-sigma", "1e300"], "--algorithm.noisy-sigma is 1e+300; it must be below 3.4e+38"),
    (["impala", "CartPole-v1", "--algorithm.lr", "1e39"], "--algorithm.lr is 1e+39; it must be below 3.4e+38"),
    (["impala", "CartPole-v1", "--net.hidden", "1000000000"], "every layer must have at least 1 and at most 1000000 units"),
    (["impala", "CartPole-v1", "--net.hidden", "1000000", "1000000"], "the network is too large for this machine: its 1,000,004,"),
    (["impala", "CartPole-v1", "--net.recurrent", "lstm", "--net.lstm-size", "1000000"], "lower --net.hidden or --net.lstm-size"),
    (["rainbow", "CartPole-v1", "--algorithm.atoms", "1000000000"], "--algorithm.atoms is 1000000000; it must be at"),
    (["dqn", "CartPole-v1", "--algorithm.n-step", "1000000000"], "--algorithm.n-step is 1000000000; it must be at"),
    (["impala", "CartPole-v1", "--seeds", "1000000000"], "--seeds is 1000000000; it must be a whole number from 1 to 10000"),
    (["impala", "CartPole-v1", "--learners", "9999"], "--learners 9999 is too much for this machine: learners compute all"),
    (["impala", "CartPole-v1", "--architecture.batch-slots", "1000000000"], "--architecture.batch-slots 1000000000 is too much")])
def test_odd_words_and_huge_numbers(words, said, capsys, tmp_path, monkeypatch):
    """Other words and huge numbers are answered at once."""
    monkeypatch.chdir(tmp_path)
    start = time.process_time()
    assert cli.main(["train", *words]) == 2
    assert time.process_time() - start < 5
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1 and not list(tmp_path.iterdir())


def test_python_knows_other_words_too():
    for key, ours in (("learning_rate", "algorithm.lr"), ("algorithm.learning_rate", "lr"), ("total_timesteps", "max_env_steps")):
        with pytest.raises(ConfigError, match=f"did you mean .*{ours}"):
            plan_of("impala", "CartPole-v1", None, None, {key: 1})
    with pytest.raises(ConfigError, match=r"no setting 'lr'; did you mean algorithm\.lr\? Give algorithm=\{\"lr\": \.\.\.\}"):
        shoal.train("ppo", "CartPole-v1", lr=1e-3)
    with pytest.raises(ConfigError, match=r"there is no setting 'callback'; did you mean callbacks=\[\.\.\.\]\?"):
        shoal.train("impala", "CartPole-v1", callback=print)
    with pytest.raises(ConfigError, match=r"there is no setting 'qqq'; `shoal train PRESET ENV --help` lists them$"):
        plan_of("impala", "CartPole-v1", None, None, {"qqq": 1})


@pytest.mark.parametrize("words", [["list"], ["runs"], ["show"], ["replay"], ["data"], ["data", "info"], ["bench", "compare"],
                                   ["tune", "resume"]])
def test_help_after_every_command(words, capsys):
    assert cli.main([*words, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"  shoal {words[0]}")


def test_python_names_environments_as_commands_do():
    """module:callable is what it names, an id stays one."""
    assert EnvRef.given("tests.experiment.toys:Poison").target is toys.Poison and EnvRef.given(toys.Poison).target is toys.Poison
    assert EnvRef.given("CartPole-v1").target == "CartPole-v1"


def test_columns_of_the_list(capsys):
    """The columns of the list fit the longest name."""
    assert cli.main(["list"]) == 0
    text = capsys.readouterr().out
    presets, grid = text.split("\n\n")[:2]
    assert all(len(line) <= 100 for line in text.splitlines())
    words = " ".join(presets.split())
    assert all(" ".join(load_preset(name).status.split()) in words for name in preset_names()), "what each was trained on"
    rows = presets.splitlines()[1:]
    rows = [row for row in rows if row[2] != " "]  # not those that go on
    assert len({row.index(" x ") - len(row[:row.index(" x ")].split()[-1]) for row in rows}) == 1, "pairs begin in one column"
    assert any(row.startswith("  anakin_throughput  a2c x device  ") for row in rows)
    head, *rows = grid.splitlines()[1:8]
    assert all(row[head.index("tolerates") - 1] == " " != row[head.index("tolerates")] for row in rows)


def test_two_runs_of_the_same_second(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda form: "20250101-000000")
    runs = [shoal.train("a2c", "CartPole-v1", **QUICK) for _ in range(3)]
    assert [run.directory.name.removeprefix("20250101-000000-a2c-CartPole-v1-0") for run in runs] == ["", "-2", "-3"]
    assert repr(runs[1]) == f"<Run {runs[1].directory}: a2c on CartPole-v1, env_steps {runs[1].summary['env_steps']}>"


def test_runs_shows_live_and_killed(tmp_path, capsys):
    config = {"preset": "ppo", "env": {"name": "CartPole-v1"}}
    for name in ("done", "killed", "running"):
        run = RunDir.create(tmp_path / name, config)
        run.save_summary({"stopped_by": "seconds" if name == "done" else None, "env_steps": 10, "seconds": 1.0})
        lines = JsonLines(run.metrics_file)
        lines.write({"env_steps": 70, "env_steps_per_second": 35.0, "train_return": 3.5, "seconds": 2.0})
        lines.close()
    with alone(tmp_path / "running"):
        assert holder(tmp_path / "running") == os.getpid()
        rows = {Path(row["run"]).name: row for row in list_runs(tmp_path)}
        assert cli.main(["runs", str(tmp_path)]) == 0
    assert {name: row["state"] for name, row in rows.items()} == {"done": "seconds", "killed": "killed", "running": "running"}
    assert (rows["running"]["env_steps"], rows["running"]["env_steps_per_second"], rows["done"]["env_steps"]) == (70, 35.0, 10)
    assert holder(tmp_path / "running") is None and "running" in capsys.readouterr().out


def test_a_day_of_metrics_stays_small(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(outputs.time, "monotonic", lambda: now[0])
    lines = JsonLines(tmp_path / "metrics.jsonl")
    shot = {"x": "y" * 2700}
    for second in range(86_400):
        now[0] = float(second)
        lines.write({**shot, "seconds": second})
    now[0] += 1
    lines.write({**shot, "seconds": 86_400, "last": True})
    lines.close()
    assert 3e6 < (tmp_path / "metrics.jsonl").stat().st_size < 10e6
    seconds = [row["seconds"] for row in read_lines(tmp_path / "metrics.jsonl")]
    assert seconds[:300] == list(range(300)) and seconds[-1] == 86_400
    assert max(b - a for a, b in itertools.pairwise(seconds)) <= 61


@pytest.mark.parametrize("module", [torch.nn.Linear(4, 3), lambda space: torch.nn.Linear(4, 3), partial(torch.nn.Linear, 4, 3), 3])
def test_network_that_is_no_class(module):
    with pytest.raises(ConfigError, match=r"net.module is a \w+: give a class of torch.nn.Module, .* or its name as module:Class"):
        plan_of("impala", "CartPole-v1", None, None, {"net": {"module": module}})


def test_network_of_a_script(tmp_path):
    """A network of a script runs in other processes."""
    script = tmp_path / "script.py"
    script.write_text(
        "import shoal, torch\n"
        "class T(torch.nn.Module):\n"
        "    def __init__(self, space):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(4, 3)\n"
        "    def forward(self, x):\n"
        "        return self.layer(x)\n"
        "if __name__ == '__main__':\n"
        f"    shoal.train('impala', 'CartPole-v1', actors=1, max_learner_steps=2, run_dir={str(tmp_path / 'run')!r},\n"
        "                net={'module': '__main__:T'}, **{'console.mode': 'none', 'eval.enabled': False})\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "config.json").read_text())["net"]["module"] == "?T"
