"""What users look for in their first hour, each used as a user would: config files, seeds, weights of another run, checkpoints by
name, watching, films, cards, cleaning."""

import json
import shutil
import signal
import subprocess
import sys
import time

import gymnasium as gym
import numpy as np
import pytest
import torch

import shoal
from shoal import ConfigError, cli
from shoal.experiment.config import Names, default_plan
from shoal.experiment.config_file import read_config, write_config
from shoal.experiment.evaluation import learned_arrays
from shoal.experiment.parse import parse_train
from shoal.experiment.presets import load_preset, preset_names
from shoal.experiment.references import EnvRef
from shoal.experiment.run_card import card
from shoal.telemetry.curves import Curve, student_t
from tests.tree import tree_environment

TINY = {"runtime": "inline", "max_env_steps": 1200, "eval.episodes": 2, "eval.every_env_steps": 300, "console.mode": "none",
        "tensorboard": False, "net.hidden": (8,), "actors": 1, "checkpoint.every_seconds": 1.0, "checkpoint.keep": 99,
        "eval.last_env_steps": 50, "architecture.envs_per_actor": 4}
WORDS = ["--no-tensorboard", "--net.hidden", "8"]
WORDS += [word for name, value in TINY.items() if isinstance(value, int | float | str) and value is not False
          for word in (f"--{name.replace('_', '-')}", str(value))]


def say(capsys, *words):
    """A command's exit code and what it wrote."""
    capsys.readouterr()
    code = cli.main(words)
    told = capsys.readouterr()
    return code, told.out + told.err


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    """Two seeds of ppo, one after another, by Python."""
    folder = tmp_path_factory.mktemp("first_hour") / "seeds"
    return shoal.train("ppo", "CartPole-v1", seeds=2, run_dir=str(folder), **TINY)


@pytest.fixture(scope="module")
def run(seeds):
    return seeds.runs[0]


# ---------------------------------------------------------------------------------------------- config files
@pytest.mark.parametrize("words", ["ppo CartPole-v1", "seed ALE/Pong-v5 --until-return 18.5", "sac Pendulum-v1 --max-env-steps 9",
                                   "--algorithm vtrace --architecture gossip Pendulum-v1"])
def test_a_config_file_is_the_same_plan(words, tmp_path):
    plan = parse_train([*words.split(), "--envs.kwargs", "text=a\"b\\c"])
    write_config(plan, tmp_path / "mine.toml")
    again = parse_train(["--config", str(tmp_path / "mine.toml")])
    assert again == plan and again.experiment == plan.experiment


def test_config_files_of_all_presets(tmp_path):
    for name in preset_names():
        env = EnvRef("CartPole-v1")
        preset = load_preset(name)
        plan = default_plan(Names(preset.algorithm, preset.architecture, name), env, preset, {"max_seconds": 0.1 + 0.2})
        write_config(plan, tmp_path / f"{name}.toml")
        again = read_config(tmp_path / f"{name}.toml").plan()
        assert again == plan and again.experiment == plan.experiment, name


def test_what_is_not_set_is_written_too(tmp_path, capsys):
    """gorila's tables have a bound by default; --architecture.max-staleness none takes it away."""
    file = tmp_path / "mine.toml"
    words = ["gorila", "CartPole-v1", "--architecture.max-staleness", "none"]
    code, told = say(capsys, "show", *words, "--out", str(file))
    assert code == 0 and f"shoal train --config {file}" in told and 'max_staleness = "none"' in file.read_text()
    assert parse_train(["--config", str(file)]) == parse_train(words)
    code, told = say(capsys, "show", *words, "--out", str(file))
    assert code == 2 and "exists already" in told


def test_training_with_a_file(tmp_path, capsys):
    file, folder = tmp_path / "mine.toml", tmp_path / "run"
    file.write_text('preset = "a2c"\nenv = "CartPole-v1"\nmax_env_steps = 200\n[algorithm]\nlr = 0.002\n')
    code, told = say(capsys, "train", "--config", str(file), "--seed", "7", "--run-dir", str(folder), *WORDS)
    config = json.loads((folder / "config.json").read_text())
    assert code == 0, told
    assert (config["algorithm"]["lr"], config["seed"], config["max_env_steps"]) == (0.002, 7, 1200), "options win over the file"
    by_python = shoal.train(config=file, run_dir=str(tmp_path / "python"), algorithm={"gamma": 0.9},
                            **{**TINY, "max_env_steps": 64})
    values = by_python.prepared.plan.experiment.algorithm
    assert (values.lr, values.gamma) == (0.002, 0.9) and by_python.summary["env_steps"] < 200


@pytest.mark.parametrize(("text", "said"), [("preset = ", "not a TOML file"), ('env = "CartPole-v1"', "does not say what to train"),
                                            ('preset = "ppo"', "names no environment"),
                                            ('preset = "ppo"\nenv = "CartPole-v1"\n[algorithm]\nlearning_rate = 1', "did you mean"),
                                            ('preset = "ppo"\nenv = "CartPole-v1"\n[algorithm]\nname = "dqn"', "leave out one")])
def test_a_file_that_makes_no_sense(text, said, tmp_path, capsys):
    file = tmp_path / "mine.toml"
    file.write_text(text)
    code, told = say(capsys, "train", "--config", str(file))
    assert code == 2 and said in told and "mine.toml" in told


# ---------------------------------------------------------------------------------------------- seeds
def test_seeds_have_a_mean_and_an_interval(seeds):
    assert [run.directory.name for run in seeds] == ["seed-0", "seed-1"] and len(seeds) == 2
    found = seeds.summary["eval_return"]
    a, b = found["values"]
    assert found["values"] == [run.summary["eval_return"] for run in seeds]
    assert found["mean"] == pytest.approx((a + b) / 2)
    assert found["high"] - found["mean"] == pytest.approx(12.706 * abs(a - b) / 2, rel=1e-3), "t for one degree of freedom"
    assert json.loads((seeds.directory / "seeds.json").read_text())["seeds"] == [0, 1]
    assert seeds.best.summary["eval_return"] == max(a, b) and seeds.policy.act(np.zeros(4, np.float32)) in (0, 1)
    assert len(list(seeds.module.parameters())) and "over 2 seeds" in repr(seeds)
    weights = [next(iter(run.module.parameters())) for run in seeds]
    assert not torch.equal(*weights), "they differ by their seed"


def test_seeds_by_command_side_by_side(tmp_path, capsys):
    code, told = say(capsys, "train", "a2c", "CartPole-v1", "--seed", "3", "--seeds", "2", "--seeds-at-once", "2", "--run-dir",
                     str(tmp_path / "both"), *WORDS, "--max-env-steps", "64")
    assert code == 0, told
    assert "over 2 seeds" in told and "shoal plot" in told
    runs = [json.loads((tmp_path / "both" / f"seed-{seed}" / "config.json").read_text())["seed"] for seed in (3, 4)]
    assert runs == [3, 4]
    code, told = say(capsys, "runs", str(tmp_path))
    assert code == 0 and told.count("a2c") >= 2


def test_students_t():
    assert student_t(1) == 12.706 and student_t(30) == 2.042
    assert abs(student_t(40) - 2.0211) < 0.002 and abs(student_t(120) - 1.9799) < 0.002


# ---------------------------------------------------------------------------------------------- another run's weights
def params(run):
    return learned_arrays(sorted((run.directory / "checkpoints").iterdir())[-1])["params"]


@pytest.mark.parametrize("preset", ["ppo", "a3c"])
def test_a_run_begins_with_anothers_weights(preset, run, tmp_path, capsys):
    """A learning rate of almost nothing shows what it began with."""
    short = {**TINY, "max_env_steps": 200, "console.mode": "plain"}
    source = run if preset == "ppo" else shoal.train(preset, "CartPole-v1", run_dir=str(tmp_path / "a"), **short)
    given = source if preset == "ppo" else str(source.directory)
    again = shoal.train(preset, "CartPole-v1", init_from=given, seed=5, run_dir=str(tmp_path / "b"),
                        **{**short, "algorithm.lr": 1e-12})
    assert np.allclose(params(again), params(source), atol=1e-6)
    newest = max((source.directory / "checkpoints").iterdir()).name
    assert f"--init-from {source.directory} (checkpoint {newest}): the whole network is taken" in capsys.readouterr().out
    assert json.loads((sorted((again.directory / "checkpoints").iterdir())[0] / "checkpoint.json").read_text())["env_steps"] == 0


def test_weights_of_replay_algorithms(tmp_path):
    small = {**TINY, "replay.min_size": 50, "replay.batch_size": 8, "max_env_steps": 150}
    small.pop("architecture.envs_per_actor")
    first = shoal.train("dqn", "CartPole-v1", run_dir=str(tmp_path / "a"), **small)
    again = shoal.train("dqn", "CartPole-v1", init_from=str(first.directory), run_dir=str(tmp_path / "b"),
                        **{**small, "algorithm.lr": 1e-12})
    assert np.allclose(params(again), params(first), atol=1e-6)


def layers(run):
    return {name: tensor.numpy() for name, tensor in shoal.load(run.directory, policy="last").module.state_dict().items()}


class LazyPole(gym.Wrapper):
    """CartPole with a third action: push as before."""

    def __init__(self):
        super().__init__(gym.make("CartPole-v1"))
        self.action_space, self.before = gym.spaces.Discrete(3), 0

    def step(self, action):
        self.before = self.before if action == 2 else int(action)
        return super().step(self.before)


@pytest.mark.parametrize(("env", "hidden", "same", "said"), [
    (LazyPole, (8,), {"trunk.torso.mlp.layers.0"}, "1 of 2 layers fit and are taken; these begin anew: out (4 x 8 here, 3 x 8 "),
    ("CartPole-v1", (8, 8), {"trunk.torso.mlp.layers.0", "out"}, "2 of 3 layers fit and are taken; these begin anew: trunk.torso")])
def test_layers_that_fit_are_taken(run, tmp_path, capsys, env, hidden, same, said):
    """Of another environment, and of another network: a learning rate of almost nothing shows what the run began with."""
    again = shoal.train("ppo", env, init_from=run, seed=5, run_dir=str(tmp_path / "run"),
                        **{**TINY, "net.hidden": hidden, "algorithm.lr": 1e-12, "max_env_steps": 200, "console.mode": "plain"})
    assert said in capsys.readouterr().out
    before, now = layers(run), {name: tensor.numpy() for name, tensor in again.module.state_dict().items()}
    fits = {name.rpartition(".")[0] for name, array in now.items()
            if name in before and before[name].shape == array.shape and np.allclose(before[name], array, atol=1e-6)}
    assert fits == same


def test_layers_of_a_run_that_imports_a_users_module(tmp_path, monkeypatch):
    """What its layers are follows from its environment."""
    (tmp_path / "strange_poles.py").write_text("import gymnasium\n\n\ndef pole():\n    return gymnasium.make('CartPole-v1')\n")
    monkeypatch.syspath_prepend(tmp_path)
    short = {**TINY, "max_env_steps": 200}
    shoal.train("ppo", "strange_poles:pole", run_dir=str(tmp_path / "a"), **short)
    words = {**short, "init_from": str(tmp_path / "a"), "run_dir": str(tmp_path / "b"), "net.hidden": (8, 8)}
    monkeypatch.delitem(sys.modules, "strange_poles")
    with pytest.raises(ConfigError, match=r"cannot be found out: this run imports the module strange_poles.*add --trust"):
        shoal.train("ppo", "CartPole-v1", **words)
    assert shoal.train("ppo", "CartPole-v1", trust=True, **words).summary["env_steps"] >= 200


def test_weights_that_do_not_fit(run, tmp_path):
    with pytest.raises(ConfigError, match="does not fit: none of its layers has the name and the shapes of one of this network's"):
        shoal.train("ppo", "CartPole-v1", init_from=run, run_dir=str(tmp_path / "run"), **{**TINY, "net.hidden": (9,)})
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------------------------------- checkpoints by name
def test_a_checkpoint_by_name(run, capsys):
    names = sorted(path.name for path in (run.directory / "checkpoints").iterdir())
    assert names[0] == "000000000000" and len(names) > 1
    first, last = (shoal.load(run.directory, checkpoint=name).module.state_dict() for name in (names[0], names[-1]))
    assert any(not torch.equal(first[name], last[name]) for name in first)
    code, told = say(capsys, "eval", str(run.directory), "--checkpoint", "0", "--episodes", "2")
    assert code == 0 and "policy last: as it was before training, not evaluated" in told and "over 2 episodes" in told
    code, told = say(capsys, "play", str(run.directory), "--checkpoint", names[-1], "--policy", "best")
    assert code == 0 and "policy best" in told
    with pytest.raises(shoal.CheckpointError, match="no checkpoint 777; there are 000000000000"):
        shoal.load(run.directory, checkpoint="777")


# ---------------------------------------------------------------------------------------------- looking
def test_watching_a_run_that_has_ended(run, capsys):
    code, told = say(capsys, "watch", str(run.directory))
    assert code == 0 and "ppo on CartPole-v1" in told and "env steps (" in told
    assert "ended by env_steps" in told and f"{run.summary['env_steps']:,} env steps" in told


@pytest.mark.parametrize(("checkpoints", "said"), [(True, "it was killed; `shoal resume` continues it"),
                                                   (False, "before its first checkpoint, so it cannot be resumed")])
def test_watching_a_run_that_was_killed(checkpoints, said, run, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(run.directory, folder)
    (folder / "summary.json").unlink()
    if not checkpoints:
        shutil.rmtree(folder / "checkpoints")
    code, told = say(capsys, "watch", str(folder))
    assert code == 0 and said in told


def test_a_run_that_cannot_be_read(run, tmp_path, capsys, monkeypatch):
    """`shoal runs` stays as narrow as it is; the reason is below."""
    for name in ("whole", "broken"):
        shutil.copytree(run.directory, tmp_path / "runs" / name)
    (tmp_path / "runs" / "broken" / "config.json").write_text('{"env": ' + "9" * 300)
    monkeypatch.chdir(tmp_path)
    code, told = say(capsys, "runs")
    assert code == 0 and max(map(len, told.splitlines())) < 140 and "unreadable  runs/broken/config.json" in told


def test_watching_a_run_that_goes_on(tmp_path):
    """From another process, while it trains; it ends with the run."""
    folder = tmp_path / "run"
    shoal_ = [sys.executable, "-m", "shoal.cli"]
    endless = ["train", "a2c", "CartPole-v1", "--run-dir", str(folder), *WORDS, "--max-env-steps", "100000000"]
    with subprocess.Popen([*shoal_, *endless], env=tree_environment(), stdout=subprocess.DEVNULL) as train:
        deadline = time.monotonic() + 90
        while not (folder / "metrics.jsonl").exists() and time.monotonic() < deadline and train.poll() is None:
            time.sleep(0.1)
        with subprocess.Popen([*shoal_, "watch", str(folder), "--every-seconds", "0.5"], env=tree_environment(), text=True,
                              stdout=subprocess.PIPE) as watch:
            lines = [line for line, _ in zip(iter(watch.stdout.readline, ""), range(3), strict=False)]
            going = train.poll() is None
            train.send_signal(signal.SIGINT)
            told = watch.communicate(timeout=120)[0]
        assert train.wait(120) == 130
    assert going and "a2c on CartPole-v1" in lines[0] and any("env steps (" in line for line in lines[1:]), lines
    assert watch.returncode == 0 and "ended by interrupt" in told


def test_a_film(run, tmp_path, capsys):
    pytest.importorskip("imageio_ffmpeg")
    film = tmp_path / "game.mp4"
    code, told = say(capsys, "play", str(run.directory), "--video", str(film))
    assert code == 0, told
    assert film.read_bytes()[4:8] == b"ftyp" and f"wrote {film}" in told
    import imageio_ffmpeg

    frames, seconds = imageio_ffmpeg.count_frames_and_secs(str(film))
    assert frames == int(told.partition(" frames")[0].rpartition("(")[2]) and seconds > 0


def test_a_film_without_ffmpeg(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    code, told = say(capsys, "play", str(run.directory), "--video", str(tmp_path / "game.mp4"))
    assert code == 2 and 'pip install "shoal[render]"' in told


def test_a_card_for_notebooks(run):
    drawn = run._repr_html_()
    assert drawn.count("<svg") == 1 and "ppo on CartPole-v1" in drawn and f"{run.summary['eval_return']:,.2f}" in drawn
    assert "<script" not in drawn and len(repr(run)) < 300


def test_cards_of_seeds_and_policies(seeds, run):
    drawn = seeds._repr_html_()
    assert "ppo on CartPole-v1, 2 seeds" in drawn and f"{seeds.summary['eval_return']['mean']:,.6g} (" in drawn
    curves = [Curve(np.arange(3.0), np.arange(3.0)), Curve(np.arange(2.0), np.ones(2)), Curve(np.zeros(1), np.zeros(1))]
    assert card("two of three have a line", [], "", curves).count("<polyline") == 2
    assert repr(run.policy).startswith("<TrainedPolicy of ppo: Box(") and " env steps>" in repr(run.policy)
    drawn = run.policy._repr_html_()
    assert "a policy of ppo" in drawn and "Discrete(2)" in drawn and " parameters" in drawn


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_observations_that_no_network_can_answer(run, bad):
    observations = np.zeros((3, 4), np.float32)
    observations[1, 2] = bad
    with pytest.raises(ConfigError, match=f"the observation of row 1 contains {bad}, and"):
        run.policy.act(observations)
    with pytest.raises(ConfigError, match=f"the observation contains {bad}, and"):
        run.policy.act(observations[1])
    assert run.policy.act(observations[::2]).shape == (2,)


def test_cleaning(seeds, tmp_path, capsys):
    shutil.copytree(seeds.directory, tmp_path / "runs" / "both")
    runs = tmp_path / "runs"
    before = {path.name: shoal.load(path).evaluate(2).returns.tolist() for path in (runs / "both").glob("seed-*")}
    (runs / "both" / "seed-0" / "checkpoints" / ".writing-3").mkdir()
    code, told = say(capsys, "clean", str(runs))
    assert code == 2 and "--yes" in told, "it cannot ask here"
    assert len(list((runs / "both" / "seed-0" / "checkpoints").iterdir())) > 2
    code, told = say(capsys, "clean", str(runs), "--yes")
    assert code == 0 and "removed" in told
    assert [len(list((path / "checkpoints").iterdir())) for path in (runs / "both").glob("seed-*")] == [1, 1]
    assert before == {path.name: shoal.load(path).evaluate(2).returns.tolist() for path in (runs / "both").glob("seed-*")}
    code, told = say(capsys, "clean", str(runs))
    assert code == 0 and "nothing to remove" in told


# ---------------------------------------------------------------------------------------------- shoal's own environments
def test_the_compiler_is_announced(tmp_path, monkeypatch, capsys):
    """The first use of a compiled environment on a machine takes some seconds; later ones say nothing."""
    code = ("import numpy as np\nfrom shoal.envs.factory import make, must_be_compiled as must\nname = 'shoal/RiskyChain-v0'\n"
            "env, before = make(name, 2), must(name)\nenv.reset(0)\nenv.step(np.zeros(2, np.int64))\n"
            "print(before, must(name), must('shoal/TicTacToe-v0'), must('CartPole-v1'))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300,
                          env={**tree_environment(), "NUMBA_CACHE_DIR": str(tmp_path / "numba")})
    assert done.stdout.split() == ["True", "False", "True", "False"], done.stderr
    monkeypatch.setattr("shoal.experiment.run.must_be_compiled", lambda env: True)
    folder = str(tmp_path / "run")
    code, told = say(capsys, "train", "a2c", "shoal/Catch-v0", *WORDS, "--console.mode", "plain", "--run-dir", folder)
    assert code == 0 and "shoal/Catch-v0 is compiled now, at its first use on this machine" in told
