"""Parquet files with an episode in each row, as RLDS has it."""

from __future__ import annotations

import json

import gymnasium as gym
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal import cli
from shoal.errors import ConfigError
from shoal.offline import open_demos

LENGTHS = (3, 1, 5, 4, 2, 7, 6)


def steps(length, seed, terminated):
    """One more than decisions: beside the last observation stand numbers that mean nothing."""
    rng = np.random.default_rng(seed)
    return [{"observation": {"item": rng.normal(size=3).tolist(), "image": rng.integers(0, 255, (2, 4)).tolist()},
             "action": int(rng.integers(2)) if t < length else -1, "reward": float(t) if t < length else np.nan, "discount": 1.0,
             "is_first": t == 0, "is_last": t == length, "is_terminal": terminated and t == length} for t in range(length + 1)]


EPISODES = [steps(length, seed, seed % 2 == 0) for seed, length in enumerate(LENGTHS)]


def turned(episode):
    """Lists of a step's fields instead of a list of steps."""
    first = episode[0]
    return {name: turned([step[name] for step in episode]) if isinstance(first[name], dict) else [step[name] for step in episode]
            for name in first}


def written(path, rows, **options):
    pq.write_table(pa.table({"episode_id": list(range(len(rows))), "steps": rows}), path, **options)
    return path


@pytest.mark.parametrize("layout", [list, turned])
@pytest.mark.parametrize("size", [1, 3, 100])
def test_every_step_comes_back(tmp_path, layout, size):
    path = written(tmp_path / "x.parquet", [layout(episode) for episode in EPISODES], row_group_size=size)
    found = open_demos(str(path))
    assert found.info.action_space == gym.spaces.Discrete(2) and found.info.steps == sum(LENGTHS) and found.info.terminated == 4
    assert found.info.observation_space["image"].shape == (2, 4)
    assert found.info.returns.mean == np.mean([length * (length - 1) / 2 for length in LENGTHS])
    for number, (one, wanted) in enumerate(zip(found.episodes(), EPISODES, strict=True)):
        decisions, ended = wanted[:-1], number % 2 == 0
        assert one.action.tolist() == [step["action"] for step in decisions]
        assert one.reward.tolist() == [step["reward"] for step in decisions]
        assert one.terminated.tolist() == [False] * (len(decisions) - 1) + [ended]
        assert one.truncated.tolist() == [False] * (len(decisions) - 1) + [not ended]
        for name in ("item", "image"):  # what a terminal state looks like is not kept
            seen = np.array([step["observation"][name] for step in (decisions if ended else wanted)], np.float32)
            np.testing.assert_array_equal(one.observation[name][: len(seen)], seen)


def test_they_train_and_convert(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flat = [[{**step, "observation": step["observation"]["item"]} for step in episode] for episode in EPISODES]
    written(tmp_path / "x.parquet", flat)
    assert cli.main(["data", "check", "x.parquet"]) == 0
    assert cli.main(["data", "convert", "x.parquet", "logs"]) == 0
    assert cli.main(["train", "bc", "x.parquet", "--max-learner-steps", "3", "--runtime", "inline", "--console.mode", "none",
                     "--run-dir", "run", "--no-tensorboard", "--replay.min-size", "1"]) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["learner_steps"] == 3


@pytest.mark.parametrize(("spoil", "words"), [
    (lambda step: {key: value for key, value in step.items() if key != "is_terminal"}, "have no field is_terminal"),
    (lambda step: {key: value for key, value in step.items() if key != "reward"}, "has no column rewards"),
    (lambda step: {**step, "is_last": False}, "7 episodes, and is_last in 0 of their steps"),
    (lambda step: {**step, "action": None}, "column steps/action has 35 missing values"),
    (lambda step: {**step, "observation": [0.0] * (1 + step["is_first"])}, "rows of column steps/observation have 1 to 2 numbers")])
def test_wrong_steps_are_named(tmp_path, spoil, words):
    path = written(tmp_path / "x.parquet", [[spoil(step) for step in episode] for episode in EPISODES])
    with pytest.raises(ConfigError, match=words):
        open_demos(str(path))
