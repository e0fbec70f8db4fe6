"""What users look for in their first hour, each used as a user would: config files, seeds, weights of another run, checkpoints by
name, watching, plotting, films, cards, cleaning, episode logs, numbers of info, environments that fail now and then."""

import csv
import json
import re
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
from shoal import ConfigError, RoleFailed, cli
from shoal.envs import make, make_multi_agent
from shoal.envs.handling import Handling
from shoal.experiment.config import Names, default_plan
from shoal.experiment.config_file import read_config, write_config
from shoal.experiment.evaluation import learned_arrays
from shoal.experiment.parse import parse_train
from shoal.experiment.plotting import lines_of
from shoal.experiment.presets import load_preset, preset_names
from shoal.experiment.references import EnvRef
from shoal.experiment.run_card import card
from shoal.experiment.rundir import RunDir
from shoal.telemetry.curves import Curve, band_of, read_curve, sparkline, student_t
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
    code, told = say(capsys, "eval", str(tmp_path / "both"))
    assert code == 2 and "several seeds" in told and "seed-3" in told


def test_students_t():
    assert student_t(1) == 12.706 and student_t(30) == 2.042
    assert abs(student_t(40) - 2.0211) < 0.002 and abs(student_t(120) - 1.9799) < 0.002


# ---------------------------------------------------------------------------------------------- another run's weights
def params(run):
    return learned_arrays(sorted((run.directory / "checkpoints").iterdir())[-1])["params"]


@pytest.mark.parametrize("preset", ["ppo", "a3c"])
def test_a_run_begins_with_anothers_weights(preset, run, tmp_path):
    """A learning rate of almost nothing shows what it began with."""
    short = {**TINY, "max_env_steps": 200}
    source = run if preset == "ppo" else shoal.train(preset, "CartPole-v1", run_dir=str(tmp_path / "a"), **short)
    given = source if preset == "ppo" else str(source.directory)
    again = shoal.train(preset, "CartPole-v1", init_from=given, seed=5, run_dir=str(tmp_path / "b"),
                        **{**short, "algorithm.lr": 1e-12})
    assert np.allclose(params(again), params(source), atol=1e-6)
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
    assert code == 0 and "policy last" in told and "over 2 episodes" in told
    code, told = say(capsys, "play", str(run.directory), "--checkpoint", names[-1], "--policy", "best")
    assert code == 0 and "policy best" in told
    with pytest.raises(shoal.CheckpointError, match="no checkpoint 777; there are 000000000000"):
        shoal.load(run.directory, checkpoint="777")


# ---------------------------------------------------------------------------------------------- looking
def test_watching_a_run_that_has_ended(run, capsys):
    code, told = say(capsys, "watch", str(run.directory))
    assert code == 0 and "ppo on CartPole-v1" in told and "env steps (" in told
    assert "ended by env_steps" in told and f"{run.summary['env_steps']:,} env steps" in told


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


def test_curves(tmp_path):
    rows = [{"kind": "snapshot", "env_steps": n, "eval_return": v, "eval_version": e, "losses": {"a": n}, "seconds": n / 10}
            for n, v, e in ((10, None, 0), (20, 1.0, 1), (30, 1.0, 1), (40, 3.0, 2))]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + '\n{"torn')
    curve = read_curve(tmp_path / "metrics.jsonl", "eval_return")
    assert curve.x.tolist() == [20, 40] and curve.y.tolist() == [1, 3], "an evaluation counts once"
    assert read_curve(tmp_path / "metrics.jsonl", "losses/a", "seconds").x.tolist() == [1, 2, 3, 4]
    flat = [Curve(np.array([a, b]), np.array([v, v])) for a, b, v in ((0.0, 10.0, 1.0), (0.0, 10.0, 3.0), (2.0, 8.0, 2.0))]
    band = band_of(flat, "std")
    assert (band.x[0], band.x[-1]) == (2, 8)
    assert np.allclose(band.mean, 2) and np.allclose(band.high, 3) and np.allclose(band.low, 1)
    assert np.allclose(band_of(flat, "interval").high, 2 + 4.303 / np.sqrt(3)) and np.allclose(band_of(flat, "range").low, 1)
    assert sparkline(np.array([0.0, 1.0, 2.0]), 3) == "▁▅█" and sparkline(np.zeros(0), 3) == ""


@pytest.mark.parametrize("over", ["steps", "seconds"])
def test_plotting_seeds(over, seeds, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    from PIL import Image

    picture = tmp_path / "curves.png"
    code, told = say(capsys, "plot", str(seeds.directory), "--out", str(picture), "--over", over)
    assert code == 0 and "of 2 runs in 1 line" in told
    colours = Image.open(picture).convert("RGB").getcolors(1 << 20)
    assert len(colours) > 20, "something is drawn"


def test_runs_of_other_values_are_other_lines(seeds, tmp_path):
    """One learning rate is not a seed of another; the same run twice is no second seed."""
    other = tmp_path / "other"
    shutil.copytree(seeds.runs[0].directory, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "algorithm": {**config["algorithm"], "lr": 0.5}, "max_env_steps": 77}))
    runs = [RunDir(path) for path in (*(run.directory for run in seeds.runs), other)]
    lines = lines_of(runs, "train_return", "env_steps", False)
    assert [(line.name.split("lr=")[1], len(line.curves), line.seeds) for line in lines] == [
        (str(config["algorithm"]["lr"]), 2, True), ("0.5", 1, True)]
    assert [len(line.curves) for line in lines_of(runs, "train_return", "env_steps", True)] == [1, 1, 1]
    assert not lines_of(runs[:1] * 2, "train_return", "env_steps", False)[0].seeds


def test_plotting_without_matplotlib(seeds, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, told = say(capsys, "plot", str(seeds.directory), "--out", str(tmp_path / "curves.png"))
    assert code == 2 and 'pip install "shoal[plot]"' in told and not (tmp_path / "curves.png").exists()


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


# ---------------------------------------------------------------------------------------------- environments
class Flaky(gym.Env):
    """Raises at every `every`-th step of all its instances; reports numbers in info; never terminates by itself before 10 steps."""

    observation_space, action_space = gym.spaces.Box(-1e6, 1e6, (2,), np.float32), gym.spaces.Discrete(2)
    made = steps = 0

    def __init__(self, every: int = 25, in_reset: bool = False) -> None:
        Flaky.made += 1
        self.number, self.every, self.in_reset = Flaky.made, every, in_reset

    def _seen(self):
        return np.array([self.number, self.t], np.float32)

    def reset(self, *, seed=None, options=None):
        if self.in_reset and Flaky.steps > 20:
            raise OSError("the simulator does not answer")
        self.t = 0
        return self._seen(), {}

    def step(self, action):
        Flaky.steps += 1
        if self.every and Flaky.steps % self.every == 0:
            raise OSError("the simulator has gone")
        self.t += 1
        info = {"speed": float(self.t), "note": "x"} if self.t % 2 else {}
        return self._seen(), 1.0, self.t == 10, False, info


@pytest.fixture(autouse=True)
def fresh():
    Flaky.made = Flaky.steps = 0


def test_one_environment_is_restarted_alone():
    env = make(Flaky, 3, handling=Handling(restart_on_error=2))
    env.reset(0)
    for _ in range(8):
        step = env.step(np.zeros(3, np.int64))
        assert not step.last.any() and not step.restarts
    step = env.step(np.zeros(3, np.int64))  # the 25th step is that of environment 0
    assert step.last.tolist() == step.truncated.tolist() == step.first.tolist() == [True, False, False]
    assert step.reward.tolist() == [0, 1, 1] and step.discount.tolist() == [1, 1, 1]
    assert step.final_rows.tolist() == [0] and step.final_observation.tolist() == [[1, 8]], "the last one that was seen"
    assert step.observation.tolist() == [[4, 0], [2, 9], [3, 9]], "a new one, the others go on"
    assert step.episode_return.tolist() == [8] and step.episode_length.tolist() == [9]
    assert "environment 0 raised OSError: the simulator has gone" in step.restarts[0]


def test_too_many_in_a_row_end_it():
    env = make(Flaky, 1, handling=Handling(restart_on_error=3), every=1)
    env.reset(0)
    for _ in range(3):
        env.step(np.zeros(1, np.int64))
    with pytest.raises(shoal.EnvironmentError_, match=r"gone.*restarted 3 times in a row"):
        env.step(np.zeros(1, np.int64))


def test_a_reset_that_raises():
    env = make(Flaky, 1, handling=Handling(restart_on_error=2), every=0, in_reset=True)
    env.reset(0)
    with pytest.raises(shoal.EnvironmentError_, match=r"does not answer.*restarted 2 times"):
        for _ in range(40):
            env.step(np.zeros(1, np.int64))


class FlakyPair:
    """A ParallelEnv of two agents, one of whose steps raises."""

    possible_agents = ("a", "b")

    def __init__(self, every=3) -> None:
        self.inner = Flaky(every=every)

    def observation_space(self, agent):
        return Flaky.observation_space

    def action_space(self, agent):
        return Flaky.action_space

    def reset(self, seed=None, options=None):
        seen, _ = self.inner.reset()
        self.agents = ["a", "b"]
        return dict.fromkeys(self.agents, seen), {}

    def step(self, actions):
        seen, reward, over, cut, _ = self.inner.step(0)
        both, self.agents = self.agents, [] if over else self.agents
        return (dict.fromkeys(both, seen), dict.fromkeys(both, reward), dict.fromkeys(both, over), dict.fromkeys(both, cut),
                {"a": {"speed": 2.0}})

    def close(self):
        pass


def test_games_are_restarted_too():
    env = make_multi_agent(FlakyPair, 1, handling=Handling(restart_on_error=1, info=("speed",)))
    env.reset(0)
    for _ in range(2):
        (step,) = env.step([np.zeros(2, np.int64)]).groups
        assert step.info["speed"][0] == 2 and np.isnan(step.info["speed"][1]) and not step.restarts
    found = env.step([np.zeros(2, np.int64)])
    (step,) = found.groups
    assert step.truncated.all() and step.first.all() and found.ended.tolist() == [0] and len(step.restarts) == 1
    assert step.final_observation.tolist() == [[1, 2], [1, 2]] and step.observation.tolist() == [[2, 0], [2, 0]]
    assert step.valid.all() and step.episode_return.tolist() == [2, 2]


@pytest.mark.parametrize("preset", ["a2c", "seed", "dqn"])
def test_a_run_outlives_its_environments(preset, tmp_path):
    """They are counted and told, and their numbers and episodes are logged."""
    small = {**TINY, "max_env_steps": 400, "replay.min_size": 50, "eval.enabled": False} if preset == "dqn" else \
        {**TINY, "max_env_steps": 400, "eval.enabled": False}
    run = shoal.train(preset, Flaky, run_dir=str(tmp_path / "run"), log={"info": ("speed",), "episodes": True},
                      **{**small, "envs.restart_on_error": 3})
    rows = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if row["kind"] == "snapshot"][-1]
    assert last["env_restarts"] > 5 and any("the simulator has gone" in row.get("text", "") for row in rows)
    assert run.summary["env_restarts"] == last["env_restarts"]
    assert 3 < last["info"]["speed"] < 7
    found = []
    for file in (run.directory / "episodes").glob("*.monitor.csv"):
        head, *lines = file.read_text().splitlines()
        assert json.loads(head[1:])["env_id"] == "Flaky" and lines[0] == "r,l,t,env,speed"
        found += csv.DictReader(lines)
    assert len(found) == run.summary["episodes"] and {row["env"] for row in found} <= set("0123456789")
    assert all(float(row["r"]) in (int(row["l"]), int(row["l"]) - 1) for row in found), "a restart costs one reward"
    assert all(not row["speed"] for row in found if row["l"] == "10" and row["r"] == "10"), "info is empty at even steps"


def test_default_is_strict(tmp_path):
    with pytest.raises((RoleFailed, shoal.EnvironmentError_), match=r"the simulator has gone; --envs.restart-on-error N"):
        shoal.train("a2c", Flaky, run_dir=str(tmp_path / "run"), **{**TINY, "eval.enabled": False})


def test_numbers_of_a_vector_environment(tmp_path):
    """gymnasium puts the info of an episode's last step elsewhere."""

    def several(num_envs):
        return gym.vector.SyncVectorEnv([lambda: Flaky(every=0)] * num_envs, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)

    env = make(several, 2, handling=Handling(info=("speed",)))
    env.reset(0)
    seen = [env.step(np.zeros(2, np.int64)).info["speed"].copy() for _ in range(11)]
    assert [row.tolist() for row in seen[::2]] == [[1, 1], [3, 3], [5, 5], [7, 7], [9, 9], [1, 1]] and np.isnan(seen[1]).all()
    env = make(several, 2, handling=Handling(info=("note",)))
    env.reset(0)
    with pytest.raises(shoal.EnvironmentError_, match="not a number"):
        env.step(np.zeros(2, np.int64))


def test_an_episode_log_goes_on(tmp_path):
    options = {**TINY, "eval.enabled": False, "log.episodes": True, "max_env_steps": 300}
    run = shoal.train("a2c", "CartPole-v1", run_dir=str(tmp_path / "run"), **options)
    (file,) = (run.directory / "episodes").iterdir()
    first = file.read_text()
    file.write_text(first + "12,1")  # killed in the middle of a line
    shoal.resume(run.directory, max_env_steps=600)
    assert file.read_text().startswith(first + "12,1\n") and file.read_text().count("r,l,t,env") == 1
    assert len(file.read_text().splitlines()) > len(first.splitlines()) + 1


def several(num_envs=2, every=0):
    return gym.vector.SyncVectorEnv([lambda: Flaky(every=every)] * num_envs)


@pytest.mark.parametrize("env", [Flaky, FlakyPair, several])
def test_a_key_that_no_info_has(env, tmp_path):
    """A typo in --log.info is told, with the keys that there are; once, and not for keys that came late."""
    run = shoal.train("a2c", env, run_dir=str(tmp_path / "run"), log={"info": ("speed", "sped")},
                      **{**TINY, "max_env_steps": 400, "eval.enabled": False, "envs.kwargs": ("every=0",)})
    rows = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    (told,) = [row["text"] for row in rows if "--log.info" in row.get("text", "")]
    assert re.match(r".*--log.info sped: no info has had it in the first [\d,]+ steps; its keys so far: (note, )?speed$", told)


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
