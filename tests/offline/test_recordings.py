"""What is recorded comes back bit for bit, whole or not at all; what does not fit is refused with a sentence."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from safetensors.numpy import load_file, save_file

from shoal import cli, envs
from shoal.envs.random_policy import RandomPolicy
from shoal.errors import ConfigError
from shoal.offline import DemoWriter, Episode, RecordingInfo, demo_folder, open_demos
from shoal.offline.recording import RecordingOptions, record, recording_info
from shoal.offline.space_json import difference, space_from_json, space_to_json
from shoal.slots import leaves
from tests.algorithms.toys import Toy
from tests.envs.test_final_masks import LENGTH, Masked, mask_at
from tests.offline.recordings import cue, recorded

SHOAL = str(Path(sys.executable).parent / "shoal")


def same(one: Episode, other: Episode) -> None:
    for (path, a), (where, b) in zip(leaves(vars(one)), leaves(vars(other)), strict=True):
        assert path == where
        if a is None or b is None:
            assert a is b
        else:
            assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes(), path


def without(path, name):
    """Take something out of demos.json."""
    meta = json.loads((path / "demos.json").read_text())
    del meta[name]
    (path / "demos.json").write_text(json.dumps(meta))


def says(path, **values):
    """Other counts in demos.json."""
    meta = json.loads((path / "demos.json").read_text())
    (path / "demos.json").write_text(json.dumps({**meta, **values}))


def rewritten(path, **change):
    """Other arrays in the first file, whole as far as demos.json knows."""
    file = path / "episodes-000000.safetensors"
    arrays = load_file(file)
    arrays |= {name: np.ascontiguousarray(new(arrays[name])) for name, new in change.items()}
    save_file(arrays, file)
    meta = json.loads((path / "demos.json").read_text())
    meta["files"][0]["bytes"] = file.stat().st_size
    (path / "demos.json").write_text(json.dumps(meta))


def episode(T=3, truncated=False, mask=None):
    flags = np.zeros(T, bool)
    flags[-1] = True
    seen = {"a": np.random.default_rng(T).random((T + 1, 2), np.float32), "b": {"c": np.arange(T + 1)}}
    return Episode(seen, np.arange(T) % 3, np.linspace(0, 1, T, dtype=np.float32), flags & (not truncated), flags & truncated, mask)


TREE = spaces.Dict({"a": spaces.Box(-1, 1, (2,), np.float32), "b": spaces.Dict({"c": spaces.Discrete(100)})})
INFO = RecordingInfo("Toy-v0", TREE, spaces.Discrete(3), kwargs={"size": (1, 2)})


def test_round_trip(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_folder, "FLUSH_BYTES", 300)
    written = [episode(T, T % 2 == 0) for T in range(1, 12)]
    with DemoWriter.create(tmp_path / "x", INFO, {"source": "test"}) as writer:
        for one in written:
            writer.add(one)
    demos = open_demos(tmp_path / "x")
    assert len(list((tmp_path / "x").glob("episodes-*"))) > 2
    for one, other in zip(written, demos.episodes(), strict=True):
        same(one, other)
    info = demos.info
    assert (info.episodes, info.steps, info.terminated) == (11, 66, 6)
    assert info.returns.mean == pytest.approx(np.mean([one.total for one in written]))
    assert info.kwargs == {"size": [1, 2]} and info.made[0]["episodes"] == 11
    assert info.observation_space == TREE and info.action_space == spaces.Discrete(3)


def test_masks(tmp_path):
    info = RecordingInfo("Toy-v0", TREE, spaces.Discrete(3), 3)
    legal = np.ones((4, 3), bool)
    with DemoWriter.create(tmp_path / "x", info, {}) as writer:
        writer.add(episode(4, mask=legal))
    (found,) = open_demos(tmp_path / "x").episodes()
    same(episode(4, mask=legal), found)
    for wrong, words in ((None, "has no action mask"), (np.ones((4, 2), bool), r"shape \(2,\)"), (np.ones((4, 3)), "float64")):
        with pytest.raises(ConfigError, match=words):
            DemoWriter.create(tmp_path / "z", info, {}).add(episode(4, mask=wrong))
    legal[1, 1] = False
    with pytest.raises(ConfigError, match="illegal"), DemoWriter.create(tmp_path / "y", info, {}) as writer:
        writer.add(episode(4, mask=legal))


def test_append_and_overwrite(tmp_path):
    path = tmp_path / "x"
    for options, expected in (({}, 1), ({"append": True}, 3), ({"overwrite": True}, 1)):
        with DemoWriter.create(path, INFO, {"source": str(options)}, **options) as writer:
            for _ in range(2 if options.get("append") else 1):
                writer.add(episode(5))
        with pytest.raises(ConfigError, match="--append"):
            DemoWriter.create(path, INFO, {})
        info = open_demos(path).info
        assert info.episodes == expected == len(list(open_demos(path).episodes()))
        assert sum(part["episodes"] for part in info.made) == expected
    assert len(list(path.iterdir())) == 2, "the files of the replaced recording are gone"
    with pytest.raises(ConfigError, match="was recorded in Toy-v0"):
        DemoWriter.create(path, RecordingInfo("Other-v0", TREE, spaces.Discrete(3)), {}, append=True)
    (tmp_path / "z").mkdir()
    (tmp_path / "z" / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigError, match="other files"):
        DemoWriter.create(tmp_path / "z", INFO, {}, overwrite=True)


def test_overwrite_is_late(tmp_path):
    cue(tmp_path / "x", 4)
    writer = DemoWriter.create(tmp_path / "x", INFO, {}, overwrite=True)
    assert open_demos(tmp_path / "x").info.env == "shoal/CueLure-v0"
    writer.add(episode(2))
    writer.flush()
    assert open_demos(tmp_path / "x").info.env == "Toy-v0"


@pytest.mark.parametrize(("break_it", "sentence"), [
    (lambda path: (path / "demos.json").write_text("{"), "cannot read"),
    (lambda path: (path / "demos.json").write_text(json.dumps({"format": "x", "version": 1})), "'x' version 1"),
    (lambda path: (path / "episodes-000000.safetensors").unlink(), "is missing"),
    (lambda path: os.truncate(path / "episodes-000000.safetensors", 100), "has 100 of"),
    (lambda path: (path / "demos.json").unlink(), "neither demos.json"),
    *((lambda path, name=name: without(path, name), "is damaged") for name in ("files", "env", "observation_space", "made")),
    (lambda path: says(path, episodes=5), "says 5 episodes with 52 steps, but its list of files adds up to 4 with 52"),
    (lambda path: says(path, steps=51), "says 4 episodes with 51 steps"),
    *((lambda path, name=name, kind=kind: rewritten(path, **{name: lambda x: x.astype(kind)}), words) for name, kind, words in (
        ("action", np.int32, "action has dtype int32 instead of int64"), ("action", np.float32, "action has dtype float32"),
        ("reward", np.float64, "reward has dtype float64 instead of float32"),
        ("terminated", np.uint8, "terminated has dtype uint8"),
        ("truncated", np.float32, "truncated has dtype float32"), ("observation", np.float64, "an observation is no"),
        ("length", np.int32, "lengths that are not positive"))),
    (lambda path: rewritten(path, length=lambda x: x[:3]), "has 3 episodes with 39 steps, but demos.json says 4 with 52"),
    (lambda path: rewritten(path, length=lambda x: x + np.array([1, -1, 0, 0])), "episode 0"),
    (lambda path: rewritten(path, length=lambda x: x * np.array([1, 1, 0, 2])), "lengths that are not positive"),
    (lambda path: rewritten(path, reward=lambda x: x[:50]), r"has reward of shape \(50,\) instead of 52 rows"),
    (lambda path: rewritten(path, reward=lambda x: x[:, None]), "one value per step"),
    (lambda path: rewritten(path, observation=lambda x: x[:-1]), "has observation of shape"),
])
def test_damaged_recording(break_it, sentence, tmp_path):
    path = cue(tmp_path / "x", 4)
    break_it(path)
    with pytest.raises(ConfigError, match=sentence):
        list(open_demos(path).episodes())


@pytest.mark.parametrize("change", [
    {"reward": np.array([0, np.nan, 0], np.float32)}, {"action": np.array([0, 1, 3])}, {"action": np.array([0, 1])},
    {"terminated": np.zeros(3, bool)}, {"truncated": np.ones(3, bool)},
    {"observation": {"a": np.full((4, 2), np.inf, np.float32), "b": {"c": np.arange(4)}}},
    {"observation": {"a": np.zeros((4, 2)), "b": {"c": np.arange(4)}}},
    {"observation": {"a": np.zeros((3, 2), np.float32), "b": {"c": np.arange(4)}}}])
def test_bad_episode(change, tmp_path):
    with pytest.raises(ConfigError, match="episode 0"):
        DemoWriter.create(tmp_path / "x", INFO, {}).add(Episode(**{**vars(episode(3)), **change}))


@pytest.mark.parametrize("space", [
    TREE, spaces.Box(-np.inf, np.inf, (3,), np.float32), spaces.Box(np.float32([-1, 0]), np.float32([1, np.inf])),
    spaces.Discrete(4), spaces.Box(0, 255, (2, 2, 1), np.uint8), spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(3)])
def test_spaces_as_json(space):
    assert space_from_json(json.loads(json.dumps(space_to_json(space)))) == space and difference(space, space) is None
    assert difference(space, spaces.Discrete(17)) is not None


# ---------------------------------------------------------------------------------------------- playing
def test_recording_is_what_happened(tmp_path):
    """Against a second copy of the same environments, stepped with the recorded actions."""
    recorded(tmp_path / "x", "shoal/CartPolePOMDP-v0", 1, rows=1, seed=5)
    (found,) = open_demos(tmp_path / "x").episodes()
    env = envs.make("shoal/CartPolePOMDP-v0", 1)
    step = env.reset(5)
    for t, action in enumerate(found.action):
        np.testing.assert_array_equal(step.observation[0], found.observation[t])
        step = env.step(np.array([action]))
        assert step.reward[0] == found.reward[t] and (step.discount[0] == 0) == found.terminated[t]
        assert bool(step.last[0]) == (t + 1 == len(found))


def test_final_observation(tmp_path):
    recorded(tmp_path / "x", "shoal/LureChain-v0", 6, expert=lambda observation: 1, length=9, max_episode_steps=4)
    for found in open_demos(tmp_path / "x").episodes():
        np.testing.assert_array_equal(found.observation.argmax(1), np.arange(5))
        assert found.truncated.tolist() == [False] * 3 + [True] and not found.terminated.any()


def test_equal_share_per_row(tmp_path):
    """Short episodes count no more than long ones: rows are asked for the same number, not the quickest for all."""
    recorded(tmp_path / "x", "shoal/RiskyChain-v0", 10, rows=4)
    assert open_demos(tmp_path / "x").info.episodes == 10


def test_masks_and_executed_actions(tmp_path):
    env = envs.make(lambda: Toy(masked=True), 3)
    first = env.reset(0)
    with DemoWriter.create(tmp_path / "x", recording_info(env, first, {}), {}) as writer:
        act = RandomPolicy(env.action_space, np.random.default_rng(0))
        done = record(env, first, act, writer, RecordingOptions(7), print, lambda: False)
    assert done == 7 and open_demos(tmp_path / "x").info.mask_size == env.action_codec.mask_size
    assert all(one.mask[np.arange(len(one)), one.action].all() for one in open_demos(tmp_path / "x").episodes())
    recorded(tmp_path / "y", "shoal/TMaze-v0", 8)
    assert all(not one.action[:-1].any() for one in open_demos(tmp_path / "y").episodes()), "the corridor executes action 0"


def test_final_mask(tmp_path):
    """That of the true last observation, through the folder and back; recordings without it still open."""
    path = tmp_path / "x"
    recorded(path, Masked, 4, rows=2)
    assert all(one.final_mask.tolist() == mask_at(LENGTH).tolist() for one in open_demos(path).episodes())
    (file,) = path.glob("episodes-*")
    arrays = load_file(file)
    del arrays["final_mask"]
    save_file(arrays, file)
    says(path, files=[{"name": file.name, "episodes": 4, "steps": 12, "bytes": file.stat().st_size}])
    assert all(one.final_mask is None for one in open_demos(path).episodes())


def test_random_actions(tmp_path):
    rng = np.random.default_rng(0)
    step = envs.make("shoal/Catch-v0", 400).reset(0)
    assert set(RandomPolicy(spaces.Discrete(3), rng)(step).tolist()) == {0, 1, 2}
    assert RandomPolicy(spaces.MultiDiscrete([2, 3]), rng)(step).max(0).tolist() == [1, 2]
    box = RandomPolicy(spaces.Box(np.float32([-1, -np.inf]), np.float32([2, np.inf])), rng)(step)
    assert box.shape == (400, 2) and box[:, 0].min() < -0.9 and 1.8 < box[:, 0].max() <= 2 and box[:, 1].std() > 0.8


# ---------------------------------------------------------------------------------------------- the command
def test_record_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("expert.py").write_text("def policy(observation, memory, first, reward, mask, rng):\n"
                                 "    assert first == (not memory) and mask is None\n"
                                 "    memory['seen'] = True\n    return 1\n\ndef lure(observation):\n    return 0\n")
    quick = ["--episodes", "6", "--num-envs", "2"]
    train = ["train", "dqn", "shoal/LureChain-v0", "--run-dir", "run", "--runtime", "inline", "--max-env-steps", "200",
             "--no-tensorboard", "--console.mode", "none", "--eval.episodes", "2", "--replay.min-size", "100"]
    assert cli.main(train) == 0
    sources = {"expert.py": 1.0, "expert.py:lure": 0.1, "random": None, "dqn": None, "ppo": None, "run": None}
    for number, (source, expected) in enumerate(sources.items()):
        assert cli.main(["data", "record", source, "shoal/LureChain-v0", "--out", f"out{number}", *quick]) == 0
        info = open_demos(f"out{number}").info
        assert info.episodes == 6 and info.env == "shoal/LureChain-v0"
        assert expected is None or info.returns.mean == pytest.approx(expected)
    assert cli.main(["data", "record", "run", "--out", "out9", *quick]) == 0, "a run knows its environment"
    capsys.readouterr()
    assert cli.main(["data", "info", "out0"]) == 0
    shown = capsys.readouterr().out
    for part in ("shoal/LureChain-v0", "6 (6 terminated", "24,", "1 ± 0", "Discrete(2)", "script expert.py"):
        assert part in shown, shown


@pytest.mark.parametrize(("words", "sentence"), [
    (["record"], "SOURCE is a run directory"),
    (["record", "random"], "which environment?"),
    (["record", "dqm", "CartPole-v1"], "did you mean dqn?"),
    (["record", "gone.py", "CartPole-v1"], "there is no script gone.py"),
    (["record", "shoal.envs.experts:nobody", "CartPole-v1"], "cannot be imported"),
    (["record", "random", "CartPole-v1", "--episodes", "0"], "--episodes is 0; it must be at least 1"),
    (["record", "random", "CartPole-v1", "--epsilon", "2"], "at least 0 and at most 1"),
    (["record", "random", "CartPole-v1", "--explore"], "--explore needs a run's policy"),
    (["record", "random", "CartPole-v1", "--append", "--overwrite"], "give one of them"),
    (["record", "random", "Nowhere-v1"], "unknown environment"),
    (["record", "shoal.envs.experts:follow_cue", "CartPole-v1", "--out", "x"], "follow_cue raised"),
    (["info", "gone"], "it does not exist"), (["info"], "give one folder"), (["fly"], "give `record SOURCE ENV`")])
def test_bad_command_lines(words, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["data", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_script_with_a_bad_action(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("expert.py").write_text("def policy(observation):\n    return 7\n")
    assert cli.main(["data", "record", "expert.py", "shoal/LureChain-v0"]) == 2
    assert "expert.py returned 7 as an action" in capsys.readouterr().err


SLOW = """
import time
def policy(observation):
    time.sleep(0.002)
    return 1
"""


def begun(tmp_path, *more):
    (tmp_path / "slow.py").write_text(SLOW)
    words = ["data", "record", "slow.py", "shoal/LureChain-v0", "--out", "x", "--episodes", "100000", *more]
    process = subprocess.Popen([SHOAL, *words], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    return process, tmp_path / "x" / "demos.json"


def test_ctrl_c(tmp_path):
    process, _ = begun(tmp_path, "--num-envs", "1")
    line = process.stdout.readline()  # its first progress: episodes are there, and none is on disk yet
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=180)
    assert process.returncode == 130 and "stopped by hand" in rest
    told = int(line.split()[0].replace(",", ""))
    found = open_demos(tmp_path / "x")
    assert found.info.episodes >= told > 0 and len(list(found.episodes())) == found.info.episodes
    assert f"{found.info.episodes:,} episodes" in rest


def test_kill_9(tmp_path):
    process, meta = begun(tmp_path)
    deadline = time.monotonic() + 90
    while not meta.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.communicate()
    found = open_demos(tmp_path / "x")
    assert len(list(found.episodes())) == found.info.episodes > 0


# ---------------------------------------------------------------------------------------------- Minari
class Maze(gym.Env):
    """Every kind of space that Minari keeps in groups, and actions that count from 1."""

    observation_space = spaces.Dict({"here": spaces.Tuple((spaces.Box(-1, 1, (2,), np.float64), spaces.Discrete(5))),
                                     "near": spaces.Box(0, 9, (3,), np.uint8)})
    action_space = spaces.Discrete(2, start=1)

    def __init__(self, limit=4):
        self.limit = limit

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._see(), {}

    def _see(self):
        return {"here": (self.np_random.uniform(-1, 1, 2), np.int64(self.t % 5)), "near": np.full(3, self.t, np.uint8)}

    def step(self, action):
        self.t += 1
        return self._see(), float(action), bool(self.t == 3 and action == 2), self.t >= self.limit, {}


def test_minari(tmp_path, monkeypatch, capsys):
    minari = pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    env, rng, kept, buffers = Maze(), np.random.default_rng(0), [], []
    for number in range(5):
        observation, _ = env.reset(seed=number)
        seen, done, rewards, over = [observation], [], [], False
        while not over:
            action = int(rng.integers(1, 3))
            observation, reward, terminated, truncated, _ = env.step(action)
            seen, done, rewards, over = [*seen, observation], [*done, action], [*rewards, reward], terminated or truncated
        kept.append((seen, done, rewards, terminated, truncated and not terminated))
        ends = np.arange(len(done)) == len(done) - 1
        here = ([one["here"][0] for one in seen], [one["here"][1] for one in seen])
        buffers.append(minari.data_collector.EpisodeBuffer(
            id=number, observations={"here": here, "near": [one["near"] for one in seen]}, actions=done, rewards=rewards,
            terminations=(ends & terminated).tolist(), truncations=(ends & truncated).tolist()))
    warnings.simplefilter("ignore")  # it would like to know an environment for evaluations
    minari.create_dataset_from_buffers(
        "maze/test-v0", buffers, algorithm_name="coin", description="a test", observation_space=env.observation_space,
        action_space=env.action_space, author="me", author_email="me@x", code_permalink="none", data_format="hdf5")
    path = tmp_path / "maze" / "test-v0"
    demos = open_demos(path)
    assert demos.info.kind == "minari" and demos.info.episodes == 5 and demos.info.steps == sum(len(k[1]) for k in kept)
    spec = envs.describe(Maze)
    assert difference(demos.info.observation_space, spec.observation_space) is None
    assert difference(demos.info.action_space, spec.action_space) is None
    assert {one[3] for one in kept} == {True, False}
    for (seen, done, rewards, terminated, truncated), found in zip(kept, demos.episodes(), strict=True):
        assert found.action.tolist() == [action - 1 for action in done] and found.reward.tolist() == rewards
        assert bool(found.terminated[-1]) is terminated and bool(found.truncated[-1]) is truncated
        np.testing.assert_array_equal(found.observation["here"]["0"], np.stack([one["here"][0] for one in seen]).astype(np.float32))
        np.testing.assert_array_equal(found.observation["here"]["1"], [one["here"][1] for one in seen])
        np.testing.assert_array_equal(found.observation["near"], np.stack([one["near"] for one in seen]))
    assert cli.main(["data", "info", str(path)]) == 0 and "minari recording" in capsys.readouterr().out
    (path / "data" / "main_data.hdf5").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="cannot read"):
        open_demos(path)


def test_minari_refused(tmp_path):
    image = json.dumps({"type": "Box", "dtype": "uint8", "shape": [64, 64, 3],
                        "low": np.zeros((64, 64, 3), int).tolist(), "high": np.full((64, 64, 3), 255).tolist()})
    action = json.dumps({"type": "Discrete", "n": 2, "start": 0})
    for meta, sentence in (({"data_format": "arrow"}, "arrow"), ({"data_format": "hdf5"}, "cannot read"),
                           ({"observation_space": image, "action_space": action}, "JPEG")):
        (tmp_path / "metadata.json").write_text(json.dumps(meta))
        with pytest.raises(ConfigError, match=sentence):
            open_demos(tmp_path)


# ---------------------------------------------------------------------------------------------- the page
def test_demos_page(tmp_path, monkeypatch, capsys):
    text = (Path(__file__).parents[2] / "docs" / "demos.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for command in re.findall(r"^    shoal (.*)$", text, re.MULTILINE):
        words = shlex.split(command)
        if words[0] == "train":
            words[0] = "show"
        assert cli.main(words) == 0, capsys.readouterr().err
    (script,) = re.findall(r"^    (def policy.*?)\n\n", text, re.MULTILINE | re.DOTALL)
    Path("expert.py").write_text(textwrap.dedent("    " + script))
    assert cli.main(["data", "record", "expert.py", "shoal/CueLure-v0", "--episodes", "8", "--out", "mine"]) == 0
    assert open_demos("mine").info.returns.least == 1.0


def test_flush_while_waiting(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_folder, "FLUSH_SECONDS", 0.0)
    writer = DemoWriter.create(tmp_path / "x", INFO, {"source": "a test"})
    monkeypatch.setattr(demo_folder, "FLUSH_SECONDS", 1e9)
    writer.add(episode())
    assert not (tmp_path / "x" / "demos.json").exists()
    monkeypatch.setattr(demo_folder, "FLUSH_SECONDS", 0.0)
    writer.flush_if_due()
    assert open_demos(tmp_path / "x").info.episodes == 1


def test_no_duplicates(tmp_path, capsys):
    words = ["data", "record", "random", "shoal/CueLure-v0", "--episodes", "2", "--out", str(tmp_path / "x")]
    assert cli.main(words) == 0
    assert cli.main([*words, "--append"]) == 2 and "give another --seed" in capsys.readouterr().err
    assert cli.main([*words, "--append", "--seed", "1"]) == 0
    assert open_demos(tmp_path / "x").info.episodes == 4


def test_how_likely_actions_were(tmp_path, capsys):
    """Random actions, and a script of which a share is replaced: by the expert's choice nine of ten times."""
    for source, epsilon, expected in (("random", "0", {0.5}), ("scripted", "0.2", {0.1, 0.9})):
        words = ["data", "record", source, "CartPole-v1", "--episodes", "4", "--steps", "300", "--num-envs", "2", "--out"]
        assert cli.main([*words, str(tmp_path / source), "--epsilon", epsilon]) == 0, capsys.readouterr().err
        found = np.exp(np.concatenate([one.log_prob for one in open_demos(tmp_path / source).episodes()]))
        assert set(np.round(found.astype(float), 5).tolist()) == expected
    assert (found > 0.5).mean() == pytest.approx(0.9, abs=0.06)
