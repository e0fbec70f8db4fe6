"""Evaluations hold nothing up: the end of a run, Ctrl-C, checkpoints, environments whose episodes never end."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import shoal
from shoal.telemetry.outputs import read_lines
from tests.experiment.test_run import quick
from tests.experiment.toys import Endless, Gift
from tests.tree import tree_environment

NEVER = {"episodes": 100, "every_env_steps": 256, "max_episode_steps": 1_000_000}
"""Side by side, a hundred episodes are played for some dozen steps while a short inline run trains."""


def events(run: shoal.Run) -> list[str]:
    return [row["text"] for row in read_lines(run.directory / "metrics.jsonl") if row["kind"] == "event"]


# ---------------------------------------------------------------------------------------------- episodes that never end
@pytest.mark.parametrize("preset", ["a2c", "dqn"])
def test_inline_run_without_an_episode(preset, tmp_path):
    """An inline run ends though no episode does."""
    run = quick(preset, Endless, tmp_path / "run", max_env_steps=500, eval={**NEVER, "max_episode_steps": 400})
    assert run.summary["stopped_by"] == "env_steps" and 500 <= run.summary["env_steps"] < 600
    assert (run.summary["eval_return"], run.summary["eval_episodes"]) == (400.0, 1)
    assert any("1 of 1 episodes of an evaluation had not ended after 400 steps" in text for text in events(run))


def test_evaluation_that_never_ends(tmp_path):
    """Inline, its share is bounded by what was trained, and the same every time."""
    states = []
    for name in ("a", "b"):
        run = quick("a2c", Endless, tmp_path / name, max_env_steps=600, eval={**NEVER, "max_episode_steps": 300})
        states.append((run.summary["env_steps"], run.summary["policy_version"], run.summary["eval_return"]))
        steps = read_lines(run.directory / "metrics.jsonl")[-1]["eval_env_steps"]
        assert steps <= 1_000 + 11 * run.summary["env_steps"] + 100 * (2 + run.summary["learner_steps"]) + 300
    assert states[0] == states[1]


def test_return_of_cut_off_episodes(tmp_path):
    """The return stops a run by episodes that were cut off."""
    bounds = {**NEVER, "episodes": 4, "max_episode_steps": 50}
    run = quick("a2c", Endless, tmp_path / "run", until_return=50.0, max_env_steps=20_000, eval=bounds)
    assert run.summary["stopped_by"] == "return"
    assert (run.summary["eval_return"], run.summary["eval_episodes"], run.summary["policy"]) == (50.0, 4, "best")


# ---------------------------------------------------------------------------------------------- the last evaluation
def test_it_is_bounded_in_env_steps(tmp_path):
    plan = {"episodes": 100, "every_env_steps": 10**6}
    run = quick("a2c", Gift, tmp_path / "run", max_env_steps=600, eval=plan)
    assert run.summary["eval_episodes"] == (run.summary["env_steps"] // 10 + 1) // 2  # a tenth of the run, episodes of two steps
    own = quick("a2c", Gift, tmp_path / "own", max_env_steps=600, eval={**plan, "last_env_steps": 7})
    assert own.summary["eval_episodes"] == 4


def test_progress_of_the_last_evaluation(tmp_path, monkeypatch):
    """Reported while it is played, as that of any other."""
    monkeypatch.setattr("shoal.experiment.last_evaluation.LOOK_SECONDS", 0.001)
    monkeypatch.setattr("shoal.experiment.session.SNAPSHOT_SECONDS", 0.0)
    run = quick("a2c", Endless, tmp_path / "run", max_env_steps=160,
                eval={**NEVER, "every_env_steps": 10**6, "max_episode_steps": 300, "last_env_steps": 100})
    said = [row["evaluating"] for row in read_lines(run.directory / "metrics.jsonl") if row["kind"] == "snapshot"]
    assert any(re.fullmatch(r"the last version: 0 episodes in \d+ of about 100 env steps", text) for text in said), said
    assert said[-1] == "", "it is over"


class Interrupting(Endless):
    """Presses Ctrl-C in a long episode: only the last evaluation plays that far."""

    ends_at = 10**9

    def step(self, action):
        observation, reward, _, _, info = super().step(action)
        if self.steps == 300:
            os.kill(os.getpid(), signal.SIGINT)
        return observation, reward, self.steps == self.ends_at, False, info


class EndsThenInterrupts(Interrupting):
    """The first episode of the last evaluation ends, the second one does not."""

    episodes = 0

    def reset(self, *, seed=None, options=None):
        self.episodes += 1
        self.ends_at = 30 if self.episodes == 1 else 10**9
        return super().reset(seed=seed)


@pytest.mark.parametrize(("env", "episodes"), [(Interrupting, 0), (EndsThenInterrupts, 1)])
def test_ctrl_c_in_the_last_evaluation(env, episodes, tmp_path):
    """The episodes that have ended count. The run itself had ended before: its reason and its checkpoint stay."""
    run = quick("a2c", env, tmp_path / "run", max_env_steps=160, eval={**NEVER, "every_env_steps": 10**6, "last_env_steps": 100})
    assert run.summary["stopped_by"] == "env_steps" and run.summary["checkpoint_failed"] is None
    assert run.summary["eval_episodes"] == episodes and (run.summary["eval_return"] == 30.0) == bool(episodes)
    assert run.policy.act(np.zeros(3)) in (5, 6)


class Mortal(Endless):
    """Kills its process in a long episode, which only an evaluation plays."""

    def step(self, action):
        time.sleep(0.002)
        if self.steps == 400:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


# ---------------------------------------------------------------------------------------------- processes
def test_evaluator_that_dies_at_the_end(tmp_path):
    """An evaluator that dies at the end costs only its evaluation."""
    run = quick("a2c", Mortal, tmp_path / "run", runtime="local", max_env_steps=100, eval={**NEVER, "last_env_steps": 1})
    assert run.summary["stopped_by"] == "env_steps" and run.summary["checkpoint_failed"] is None
    assert run.summary["policy"] == "last" and run.summary["eval_return"] is None
    assert any("the last version was not evaluated: evaluator-0" in text for text in events(run))
    assert run.policy.act(np.zeros(3)) in (5, 6)


def command(folder: Path, *words: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "shoal.cli", "train", "impala", "tests.experiment.gyms:Sleepy-v0",
                             "--run-dir", str(folder), "--console.mode", "plain", "--console.every-seconds", "1",
                             "--no-tensorboard", "--net.hidden", "8", "--actors", "1", "--architecture.envs-per-actor", "2",
                             "--architecture.batch-slots", "1", "--eval.episodes", "100", *words],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=tree_environment())


def eventually(condition, process) -> None:
    deadline = time.monotonic() + 120
    while not condition() and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    assert condition()


def evaluating(folder: Path) -> bool:
    rows = [row for row in read_lines(folder / "metrics.jsonl") if row["kind"] == "snapshot"]
    return any(row["env_steps"] > 0 and row["eval_env_steps"] > 0 for row in rows)


def test_nothing_waits_for_an_evaluation(tmp_path):
    """Ctrl-C and checkpoints do not wait for an evaluation."""
    process = command(tmp_path / "run", "--checkpoint.every-seconds", "1")
    try:
        eventually(lambda: evaluating(tmp_path / "run"), process)
        eventually(lambda: len(list((tmp_path / "run" / "checkpoints").glob("0*"))) >= 2, process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert process.returncode == 130 and summary["stopped_by"] == "interrupt", err
    assert summary["checkpoint_failed"] is None and summary["policy"] == "last" and summary["eval_return"] is None
    assert "of 100 episodes" in out  # the progress of the evaluation under way


def test_budget_during_an_evaluation(tmp_path):
    """A budget ends training while an evaluation is under way."""
    process = command(tmp_path / "run", "--max-env-steps", "300", "--eval.max-episode-steps", "40")
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["stopped_by"] == "env_steps" and summary["checkpoint_failed"] is None
    assert 300 <= summary["env_steps"] < 900 and summary["eval_episodes"] == 1
    assert "policy  best: version" in out or "policy  last: version" in out


# ---------------------------------------------------------------------------------------------- a checkpoint of step 0
class Looks(Gift):
    """Writes down at its first step whether there is a checkpoint of step 0."""

    folder: Path
    looked = False

    def step(self, action):
        if not self.looked:
            there = (self.folder / "run" / "checkpoints" / "000000000000").is_dir()
            (self.folder / f"{os.getpid()}-{id(self)}-{there}").touch()
            self.looked = True
        return super().step(action)


@pytest.mark.parametrize(("preset", "runtime"), [("impala", "local"), ("a3c", "local"), ("gala", "inline"), ("a3c", "inline")])
def test_checkpoint_before_the_first_step(preset, runtime, tmp_path):
    """A checkpoint of step 0 is there before the first environment step."""

    class Here(Looks):
        folder = tmp_path

    run = quick(preset, Here, tmp_path / "run", runtime=runtime, actors=2, max_env_steps=300, checkpoint={"keep": 100})
    looks = [path.name for path in tmp_path.iterdir() if path.name != "run"]
    assert len(looks) >= 2 and all(name.endswith("-True") for name in looks)
    first = run.directory / "checkpoints" / "000000000000"
    from shoal.experiment.evaluation import published_of
    from shoal.experiment.policy_choice import PolicyChoice

    published = published_of(run.prepared.algorithm, first, PolicyChoice("last", "learner"))
    assert np.any(published["params"] != 0)
