"""A folder of several seeds, used as a run is: evaluated, watched, played, loaded, begun from, and recorded."""

import json
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

import shoal
from shoal import ConfigError
from tests.experiment.test_first_hour import TINY, WORDS, say
from tests.tree import tree_environment


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("folders") / "three"
    return shoal.train("ppo", "CartPole-v1", seeds=3, run_dir=str(folder), **{**TINY, "max_env_steps": 600})


@pytest.fixture
def folder(seeds, tmp_path):
    """A copy in which the second seed is the best."""
    shutil.copytree(seeds.directory, tmp_path / "three")
    for seed, value in enumerate((10.0, 90.0, 30.0)):
        about = {"eval_return": value, "eval_episodes": 7}
        file = tmp_path / "three" / f"seed-{seed}" / "summary.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **about}))
    return tmp_path / "three"


def test_eval_of_every_seed(seeds, capsys):
    code, told = say(capsys, "eval", str(seeds.directory), "--episodes", "3")
    assert code == 0, told
    means = [shoal.load(run.directory).evaluate(3).returns.mean() for run in seeds]
    assert told.splitlines()[-1].startswith(f"return {np.mean(means):,.2f} (95 % interval ")
    assert told.splitlines()[-1].endswith(f"over 3 seeds: {', '.join(f'{mean:,.1f}' for mean in means)}, of 3, 3, 3 episodes")
    assert [line for line in told.splitlines() if line.startswith("seed-")] == ["seed-0", "seed-1", "seed-2"]
    assert told.count("policy best: version") == 3


def test_eval_of_seeds_that_have_not_begun(folder, capsys):
    shutil.rmtree(folder / "seed-1" / "checkpoints")
    shutil.rmtree(folder / "seed-2")
    code, told = say(capsys, "eval", str(folder), "--episodes", "2")
    assert code == 0 and "seed-1\nit has no checkpoint yet\n" in told and "over 1 seed:" in told
    shutil.rmtree(folder / "seed-0")
    code, told = say(capsys, "eval", str(folder))
    assert code == 2 and "no seed of" in told
    code, told = say(capsys, "eval", str(folder), "--best-response", "10")
    assert code == 2 and "give one of them" in told


def test_play_takes_the_best(folder, capsys):
    code, told = say(capsys, "play", str(folder))
    assert code == 0 and "episode 1: return" in told
    assert f"{folder}: seed-1 is used, the best of 3 seeds, evaluated 90.00 over 7 episodes\n" in told


def test_load_takes_the_best(folder, capsys):
    run = shoal.load(folder)
    assert run.directory == folder / "seed-1" and "seed-1 is used, the best of 3 seeds" in capsys.readouterr().out
    assert run.policy.act(np.zeros(4, np.float32)) in (0, 1)
    for seed in range(3):
        (folder / f"seed-{seed}" / "summary.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"none of them has kept an evaluated policy yet; give one of them, such as .*seed-0"):
        shoal.load(folder)


def test_the_only_one_that_was_evaluated(folder, capsys):
    for seed in (0, 2):
        (folder / f"seed-{seed}" / "summary.json").write_text("{}")
    assert shoal.load(folder).directory == folder / "seed-1"
    assert "seed-1 is used, the only seed with an evaluated policy, evaluated 90.00 over 7 episodes\n" in capsys.readouterr().out


def test_beginning_with_the_best(folder, tmp_path, capsys):
    short = {**TINY, "max_env_steps": 200, "console.mode": "plain"}
    shoal.train("ppo", "CartPole-v1", init_from=folder, run_dir=str(tmp_path / "again"), **short)
    told = capsys.readouterr().out
    assert "seed-1 is used" in told and f"--init-from {folder / 'seed-1'} (checkpoint " in told
    assert "the whole network is taken, 2 layers" in told


def test_recording_the_best(folder, tmp_path, capsys):
    code, told = say(capsys, "data", "record", str(folder), "CartPole-v1", "--episodes", "2", "--out", str(tmp_path / "data"))
    assert code == 0 and "seed-1 is used" in told and f"run {folder / 'seed-1'} (" in told
    code, told = say(capsys, "data", "evaluate", str(folder), str(tmp_path / "data"), "--updates", "20")
    assert code == 0 and "seed-1 is used" in told and f"{folder / 'seed-1'}, greedy: value" in told


def test_watching_seeds_that_have_ended(folder, capsys):
    code, told = say(capsys, "watch", str(folder))
    assert code == 0 and told.startswith("ppo on CartPole-v1, 3 seeds\n")
    assert told.count("ended by env_steps  env steps ") == 3 and "evaluation 90.0" in told
    assert "over 3 seeds: 10.0, 90.0, 30.0" in told and "3 of 3 seeds have reached their goal\n" in told
    shutil.rmtree(folder / "seed-2")
    (folder / "seed-1" / "summary.json").unlink()
    code, told = say(capsys, "watch", str(folder))
    assert code == 0 and "seed 1  killed" in told and "seed 2  has not begun" in told
    assert f"1 of 3 seeds have reached their goal; `shoal resume {folder}` continues with the others" in told


def test_a_live_table_of_seeds(folder, capsys):
    code, told = say(capsys, "watch", str(folder), "--mode", "live")
    assert code == 0 and all(word in told for word in ("evaluation", "ended by env_steps", "90.0"))


def test_watching_seeds_that_train(tmp_path):
    """From another process: one trains, the other waits; it ends with them."""
    folder = tmp_path / "two"
    shoal_ = [sys.executable, "-m", "shoal.cli"]
    words = ["train", "a2c", "CartPole-v1", "--run-dir", str(folder), "--seeds", "2", *WORDS, "--max-env-steps", "100000000"]
    with subprocess.Popen([*shoal_, *words], env=tree_environment(), stdout=subprocess.DEVNULL) as train:
        deadline = time.monotonic() + 90
        while not (folder / "seed-0" / "metrics.jsonl").exists() and time.monotonic() < deadline and train.poll() is None:
            time.sleep(0.1)
        with subprocess.Popen([*shoal_, "watch", str(folder), "--every-seconds", "0.5"], env=tree_environment(), text=True,
                              stdout=subprocess.PIPE) as watch:
            lines = [line for line, _ in zip(iter(watch.stdout.readline, ""), range(5), strict=False)]
            train.send_signal(2)
            told = watch.communicate(timeout=120)[0]
        assert train.wait(120) == 130
    assert lines[0] == "a2c on CartPole-v1, 2 seeds\n" and lines[2] == "  seed 1  waits\n", lines
    assert any(line.startswith("  seed 0  running  env steps ") for line in lines), lines
    assert "seed 0  ended by interrupt" in told and "0 of 2 seeds have reached their goal; `shoal resume" in told
