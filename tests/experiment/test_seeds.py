"""Several seeds that were stopped: `shoal resume FOLDER` continues what is not finished."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

import shoal
from shoal import CheckpointError, ConfigError
from tests.experiment.test_first_hour import TINY, WORDS, say

SHORT = {**TINY, "max_env_steps": 200, "eval.every_env_steps": 100, "algorithm.lr": 1e-3 / 3}


class Pressed(gym.Wrapper):
    """CartPole; Ctrl-C is pressed at a step of all its instances, if `press_at` says so."""

    press_at = steps = 0

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))

    def step(self, action):
        Pressed.steps += 1
        if Pressed.steps == Pressed.press_at:
            os.kill(os.getpid(), signal.SIGINT)
        return super().step(action)


class Breaks(gym.Wrapper):
    """CartPole that raises at a step of all its instances, if `break_at` says so."""

    break_at = steps = 0

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))

    def step(self, action):
        Breaks.steps += 1
        if Breaks.steps == Breaks.break_at:
            raise RuntimeError("the simulator is gone")
        return super().step(action)


def weights(folder: Path) -> list[np.ndarray]:
    return [tensor.numpy().copy() for tensor in shoal.load(folder, policy="last", trust=True).module.state_dict().values()]


def ended(folder: Path) -> dict[str, str]:
    """How the runs of a folder ended."""
    return {path.parent.name: json.loads(path.read_text())["stopped_by"] for path in sorted(folder.glob("*/summary.json"))}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Three seeds without a break, and three that were stopped in the second."""
    folder = tmp_path_factory.mktemp("seeds")
    Pressed.press_at, Pressed.steps = 0, 0
    shoal.train("a2c", Pressed, run_dir=str(folder / "first"), **SHORT)
    first = Pressed.steps
    shoal.train("a2c", Pressed, seeds=3, run_dir=str(folder / "whole"), **SHORT)
    Pressed.press_at, Pressed.steps = first + 60, 0
    cut = shoal.train("a2c", Pressed, seeds=3, run_dir=str(folder / "cut"), **SHORT)
    Pressed.press_at = 0
    assert cut.interrupted and ended(folder / "cut") == {"seed-0": "env_steps", "seed-1": "interrupt"}
    assert cut.summary["finished"] == 1
    return folder


def test_by_python(stopped, tmp_path):
    """The second continues, the third begins, the first stays; then there is the summary of all."""
    folder = tmp_path / "cut"
    shutil.copytree(stopped / "cut", folder)
    before = (folder / "seed-0" / "metrics.jsonl").read_bytes()
    runs = shoal.resume(folder, trust=True)
    assert ended(folder) == dict.fromkeys(("seed-0", "seed-1", "seed-2"), "env_steps")
    assert (folder / "seed-0" / "metrics.jsonl").read_bytes() == before
    assert json.loads((folder / "seed-1" / "config.json").read_text())["resumed"] == 1
    assert len(runs) == 3 and not runs.interrupted and runs.summary["finished"] == 3
    assert json.loads((folder / "seeds.json").read_text())["finished"] == 3 == len(runs.summary["eval_return"]["values"])
    for one, other in zip(weights(folder / "seed-2"), weights(stopped / "whole" / "seed-2"), strict=True):
        np.testing.assert_array_equal(one, other, "as without a break")
    with pytest.raises(ConfigError, match=r"all 3 seeds of .* have reached their goal; to continue, give a larger --max-env-steps"):
        shoal.resume(folder, trust=True)
    runs = shoal.resume(folder, trust=True, max_env_steps=300)
    assert len(runs) == 3 and all(run.summary["env_steps"] >= 300 for run in runs)


def test_a_seed_without_its_checkpoints(stopped, tmp_path):
    """What a seed has done is not thrown away without a word."""
    folder = tmp_path / "cut"
    shutil.copytree(stopped / "cut", folder)
    shutil.rmtree(folder / "seed-1" / "checkpoints")
    with pytest.raises(ConfigError, match=r"seed-1 has done \d+ env steps and has no whole checkpoint.*remove that folder"):
        shoal.resume(folder, trust=True)
    assert (folder / "seed-1" / "metrics.jsonl").is_file() and not (folder / "seed-2").exists()


@pytest.mark.parametrize("at_once", [1, 2])
def test_by_command(stopped, tmp_path, capsys, at_once):
    folder = tmp_path / "cut"
    shutil.copytree(stopped / "cut", folder)
    about = json.loads((folder / "seeds.json").read_text())
    (folder / "seeds.json").write_text(json.dumps({**about, "at_once": at_once}))
    shutil.copytree(folder / "seed-1", folder / "seed-2")  # killed before its first checkpoint
    for path in (folder / "seed-2" / "checkpoints").iterdir():
        shutil.rmtree(path)
    (folder / "seed-2" / "summary.json").unlink()  # written with every checkpoint
    code, told = say(capsys, "resume", str(folder))
    assert code == 2 and "--trust" in told
    code, told = say(capsys, "resume", str(folder), "--trust")
    assert code == 0 and "over 3 seeds" in told, told
    assert ended(folder) == dict.fromkeys(("seed-0", "seed-1", "seed-2"), "env_steps")
    assert json.loads((folder / "seed-2" / "config.json").read_text())["resumed"] == 0


def test_the_command_says_how(tmp_path, capsys):
    """Ctrl-C in the first of two seeds: exit code 130, and the command that continues."""
    folder = tmp_path / "two"
    Pressed.press_at, Pressed.steps = 100, 0
    words = ("train", "a2c", "tests.experiment.test_seeds:Pressed", "--seeds", "2", "--run-dir", str(folder), *WORDS)
    code, told = say(capsys, *words)
    assert code == 130 and f"resume  shoal resume {folder} --trust" in told
    Pressed.press_at = 0
    code, told = say(capsys, *words)
    assert code == 2 and f"continue them with `shoal resume {folder}`" in told
    code, told = say(capsys, "resume", str(folder), "--trust", "--max-env-steps", "200")
    assert code == 0 and ended(folder) == {"seed-0": "env_steps", "seed-1": "env_steps"}, told


def test_a_seed_that_fails(tmp_path, capsys):
    """The command that continues is told; the seed that is done keeps its return, with its episodes."""
    loud = ["plain" if word == "none" else word for word in WORDS]
    words = ["train", "a2c", "tests.experiment.test_seeds:Breaks", *loud, "--max-env-steps", "200"]
    Breaks.break_at, Breaks.steps = 0, 0
    code, told = say(capsys, *words, "--seeds", "1", "--run-dir", str(tmp_path / "one"))
    assert code == 0 and "over 1 seed: " in told, told
    Breaks.break_at, Breaks.steps = Breaks.steps + 60, 0
    code, told = say(capsys, *words, "--seeds", "2", "--run-dir", str(tmp_path / "two"))
    assert code == 3 and "the simulator is gone" in told, told
    assert f"`shoal resume {tmp_path / 'two'} --trust` continues with the seeds that are not done\n" in told
    code, told = say(capsys, "watch", str(tmp_path / "two"))
    assert code == 0 and "seed 1  ended by failure" in told
    assert re.search(r"over 1 seed: \S+, of \d+ episodes?\n", told), told
    code, told = say(capsys, "resume", str(tmp_path / "two"), "--trust")
    assert code == 0 and ended(tmp_path / "two") == {"seed-0": "env_steps", "seed-1": "env_steps"}, told


def test_how_one_run_continues(tmp_path, capsys):
    """Ctrl-C: to its own goal. A goal that was reached: with a larger budget of the same kind."""
    folder = tmp_path / "run"
    Pressed.press_at, Pressed.steps = 100, 0
    code, told = say(capsys, "train", "a2c", "tests.experiment.test_seeds:Pressed", "--run-dir", str(folder), *WORDS)
    Pressed.press_at = 0
    assert code == 130 and f"resume  shoal resume {folder} --trust\n" in told
    code, told = say(capsys, "resume", str(folder), "--trust")
    assert code == 0 and f"resume  shoal resume {folder} --trust --max-env-steps 3000\n" in told
    code, told = say(capsys, "train", "a2c", "CartPole-v1", *WORDS, "--max-env-steps", "None", "--max-seconds", "1", "--run-dir",
                     str(tmp_path / "timed"))
    assert code == 0 and f"resume  shoal resume {tmp_path / 'timed'} --max-seconds 20\n" in told


def test_showing_several(tmp_path, capsys, monkeypatch):
    """`shoal show` takes the words of `shoal train`; a file holds one experiment, and the command says how to train all seeds."""
    monkeypatch.chdir(tmp_path)
    code, told = say(capsys, "show", "a2c", "CartPole-v1", "--seeds", "3", "--out", "mine.toml")
    assert code == 0 and "train with it: shoal train --config mine.toml --seeds 3\n" in told
    code, told = say(capsys, "show", "a2c", "CartPole-v1", "--seed", "5", "--seeds=2", "--seeds-at-once", "2")
    assert code == 0 and "--seeds 2 --seeds-at-once 2: 2 runs like this one, with the seeds from 5 on\n" in told
    code, told = say(capsys, "show", "a2c", "CartPole-v1", "--seeds", "many")
    assert code == 2 and "give a whole number" in told


def test_stopped_before_it_began(tmp_path, monkeypatch):
    """Nothing is left of seeds none of which has begun."""
    def refuse(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("shoal.experiment.run.laid_out", refuse)
    with pytest.raises(KeyboardInterrupt):
        shoal.train("a2c", "CartPole-v1", seeds=2, run_dir=str(tmp_path / "two"), **SHORT)
    assert not (tmp_path / "two").exists()


def test_a_folder_that_says_too_little(stopped, tmp_path):
    folder = tmp_path / "cut"
    shutil.copytree(stopped / "cut", folder)
    about = json.loads((folder / "seeds.json").read_text())
    (folder / "seeds.json").write_text(json.dumps({name: value for name, value in about.items() if name != "config"}))
    with pytest.raises(CheckpointError, match=r"resume one by one: shoal resume .*seed-0"):
        shoal.resume(folder, trust=True)
