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

from shoal import cli, envs
from shoal.errors import ConfigError
from shoal.offline import About, Episode, Writer, open_demos
from shoal.offline import folder as folders
from shoal.offline.recording import Order, Random, about_env, record
from shoal.offline.spaces import difference, space_from_json, space_to_json
from shoal.slots import leaves
from tests.algorithms.toys import Toy
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
    from safetensors.numpy import load_file, save_file

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
ABOUT = About("Toy-v0", TREE, spaces.Discrete(3), kwargs={"size": (1, 2)})


def test_episodes_come_back_bit_for_bit_from_many_files(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "FLUSH_BYTES", 300)
    written = [episode(T, T % 2 == 0) for T in range(1, 12)]
    with Writer.create(tmp_path / "x", ABOUT, {"source": "test"}) as writer:
        for one in written:
            writer.add(one)
    demos = open_demos(tmp_path / "x")
    assert len(list((tmp_path / "x").glob("episodes-*"))) > 2
    for one, other in zip(written, demos.episodes(), strict=True):
        same(one, other)
    about = demos.about
    assert (about.episodes, about.steps, about.terminated) == (11, 66, 6)
    assert about.returns.mean == pytest.approx(np.mean([one.total for one in written]))
    assert about.kwargs == {"size": [1, 2]} and about.made[0]["episodes"] == 11
    assert about.observation_space == TREE and about.action_space == spaces.Discrete(3)


def test_masks_come_back_and_an_illegal_action_is_refused(tmp_path):
    about = About("Toy-v0", TREE, spaces.Discrete(3), 3)
    legal = np.ones((4, 3), bool)
    with Writer.create(tmp_path / "x", about, {}) as writer:
        writer.add(episode(4, mask=legal))
    (found,) = open_demos(tmp_path / "x").episodes()
    same(episode(4, mask=legal), found)
    for wrong, words in ((None, "has no action mask"), (np.ones((4, 2), bool), r"shape \(2,\)"), (np.ones((4, 3)), "is float64")):
        with pytest.raises(ConfigError, match=words):
            Writer.create(tmp_path / "z", about, {}).add(episode(4, mask=wrong))
    legal[1, 1] = False
    with pytest.raises(ConfigError, match="not legal"), Writer.create(tmp_path / "y", about, {}) as writer:
        writer.add(episode(4, mask=legal))


def test_a_recording_is_added_to_or_replaced_only_when_told(tmp_path):
    path = tmp_path / "x"
    for options, expected in (({}, 1), ({"append": True}, 3), ({"overwrite": True}, 1)):
        with Writer.create(path, ABOUT, {"source": str(options)}, **options) as writer:
            for _ in range(2 if options.get("append") else 1):
                writer.add(episode(5))
        with pytest.raises(ConfigError, match="--append"):
            Writer.create(path, ABOUT, {})
        about = open_demos(path).about
        assert about.episodes == expected == len(list(open_demos(path).episodes()))
        assert sum(part["episodes"] for part in about.made) == expected
    assert len(list(path.iterdir())) == 2, "the files of the replaced recording are gone"
    with pytest.raises(ConfigError, match="was recorded in Toy-v0"):
        Writer.create(path, About("Other-v0", TREE, spaces.Discrete(3)), {}, append=True)
    (tmp_path / "z").mkdir()
    (tmp_path / "z" / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigError, match="other things"):
        Writer.create(tmp_path / "z", ABOUT, {}, overwrite=True)


def test_until_the_first_file_is_written_the_old_recording_stays(tmp_path):
    cue(tmp_path / "x", 4)
    writer = Writer.create(tmp_path / "x", ABOUT, {}, overwrite=True)
    assert open_demos(tmp_path / "x").about.env == "shoal/CueLure-v0"
    writer.add(episode(2))
    writer.flush()
    assert open_demos(tmp_path / "x").about.env == "Toy-v0"


@pytest.mark.parametrize(("break_it", "sentence"), [
    (lambda path: (path / "demos.json").write_text("{"), "cannot be read"),
    (lambda path: (path / "demos.json").write_text(json.dumps({"format": "x", "version": 1})), "'x', version 1"),
    (lambda path: (path / "episodes-000000.safetensors").unlink(), "is missing"),
    (lambda path: os.truncate(path / "episodes-000000.safetensors", 100), "has 100 of"),
    (lambda path: (path / "demos.json").unlink(), "neither demos.json"),
    *((lambda path, name=name: without(path, name), "is not whole") for name in ("files", "env", "observation_space", "made")),
    (lambda path: says(path, episodes=5), "tells of 5 episodes with 52 steps, and its files of 4 with 52"),
    (lambda path: says(path, steps=51), "tells of 4 episodes with 51 steps"),
    *((lambda path, name=name, kind=kind: rewritten(path, **{name: lambda x: x.astype(kind)}), words) for name, kind, words in (
        ("action", np.int32, "action is int32 and not int64"), ("action", np.float32, "action is float32"),
        ("reward", np.float64, "reward is float64 and not float32"), ("terminated", np.uint8, "terminated is uint8 and not bool"),
        ("truncated", np.float32, "truncated is float32"), ("observation", np.float64, "an observation is no"),
        ("length", np.int32, "lengths that are none"))),
    (lambda path: rewritten(path, length=lambda x: x[:3]), "has 3 episodes with 39 steps, and demos.json tells of 4 with 52"),
    (lambda path: rewritten(path, length=lambda x: x + np.array([1, -1, 0, 0])), "episode 0"),
    (lambda path: rewritten(path, length=lambda x: x * np.array([1, 1, 0, 2])), "lengths that are none"),
    (lambda path: rewritten(path, reward=lambda x: x[:50]), r"has reward of shape \(50,\) and not 52 rows"),
    (lambda path: rewritten(path, reward=lambda x: x[:, None]), "one number a step"),
    (lambda path: rewritten(path, observation=lambda x: x[:-1]), "has observation of shape"),
])
def test_a_broken_recording_is_refused(break_it, sentence, tmp_path):
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
def test_what_is_no_episode_is_refused(change, tmp_path):
    with pytest.raises(ConfigError, match="episode 0"):
        Writer.create(tmp_path / "x", ABOUT, {}).add(Episode(**{**vars(episode(3)), **change}))


@pytest.mark.parametrize("space", [
    TREE, spaces.Box(-np.inf, np.inf, (3,), np.float32), spaces.Box(np.float32([-1, 0]), np.float32([1, np.inf])),
    spaces.Discrete(4), spaces.Box(0, 255, (2, 2, 1), np.uint8), spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(3)])
def test_spaces_travel_through_json(space):
    assert space_from_json(json.loads(json.dumps(space_to_json(space)))) == space and difference(space, space) is None
    assert difference(space, spaces.Discrete(17)) is not None


# ---------------------------------------------------------------------------------------------- playing
def test_a_recording_is_what_happened(tmp_path):
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


def test_of_a_truncated_episode_the_true_last_observation_is_kept(tmp_path):
    recorded(tmp_path / "x", "shoal/LureChain-v0", 6, expert=lambda observation: 1, length=9, max_episode_steps=4)
    for found in open_demos(tmp_path / "x").episodes():
        np.testing.assert_array_equal(found.observation.argmax(1), np.arange(5))
        assert found.truncated.tolist() == [False] * 3 + [True] and not found.terminated.any()


def test_every_row_gives_as_many_episodes(tmp_path):
    """Short episodes count no more than long ones: rows are asked for the same number, not the quickest for all."""
    recorded(tmp_path / "x", "shoal/RiskyChain-v0", 10, rows=4)
    assert open_demos(tmp_path / "x").about.episodes == 10


def test_masked_dictionaries_and_executed_actions_are_recorded(tmp_path):
    env = envs.make(lambda: Toy(masked=True), 3)
    first = env.reset(0)
    with Writer.create(tmp_path / "x", about_env(env, first, {}), {}) as writer:
        done = record(env, first, Random(env.action_space, np.random.default_rng(0)), writer, Order(7), print, lambda: False)
    assert done == 7 and open_demos(tmp_path / "x").about.mask_size == env.codec.mask_size
    assert all(one.mask[np.arange(len(one)), one.action].all() for one in open_demos(tmp_path / "x").episodes())
    recorded(tmp_path / "y", "shoal/TMaze-v0", 8)
    assert all(not one.action[:-1].any() for one in open_demos(tmp_path / "y").episodes()), "the corridor executes action 0"


def test_random_actions_of_every_kind(tmp_path):
    rng = np.random.default_rng(0)
    step = envs.make("shoal/Catch-v0", 400).reset(0)
    assert set(Random(spaces.Discrete(3), rng)(step).tolist()) == {0, 1, 2}
    assert Random(spaces.MultiDiscrete([2, 3]), rng)(step).max(0).tolist() == [1, 2]
    box = Random(spaces.Box(np.float32([-1, -np.inf]), np.float32([2, np.inf])), rng)(step)
    assert box.shape == (400, 2) and box[:, 0].min() < -0.9 and 1.8 < box[:, 0].max() <= 2 and box[:, 1].std() > 0.8


# ---------------------------------------------------------------------------------------------- the command
def test_the_command_records_from_scripts_presets_runs_and_nobody(tmp_path, monkeypatch, capsys):
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
        about = open_demos(f"out{number}").about
        assert about.episodes == 6 and about.env == "shoal/LureChain-v0"
        assert expected is None or about.returns.mean == pytest.approx(expected)
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
    (["record", "random", "CartPole-v1", "--episodes", "0"], "give 1 or more"),
    (["record", "random", "CartPole-v1", "--epsilon", "2"], "from 0 to 1"),
    (["record", "random", "CartPole-v1", "--explore"], "is for a run's policy"),
    (["record", "random", "CartPole-v1", "--append", "--overwrite"], "give one of them"),
    (["record", "random", "Nowhere-v1"], "unknown environment"),
    (["record", "shoal.envs.experts:follow_cue", "CartPole-v1", "--out", "x"], "follow_cue raised"),
    (["info", "gone"], "it does not exist"), (["info"], "give one folder"), (["fly"], "give `record SOURCE ENV`")])
def test_bad_words_get_a_sentence(words, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["data", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_a_script_that_returns_no_action_is_named(tmp_path, monkeypatch, capsys):
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


def test_ctrl_c_keeps_every_finished_episode(tmp_path):
    process, _ = begun(tmp_path, "--num-envs", "1")
    line = process.stdout.readline()  # its first progress: episodes are there, and none is on disk yet
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "stopped by hand" in rest
    told = int(line.split()[0].replace(",", ""))
    found = open_demos(tmp_path / "x")
    assert found.about.episodes >= told > 0 and len(list(found.episodes())) == found.about.episodes
    assert f"{found.about.episodes:,} episodes" in rest


def test_kill_9_leaves_whole_episodes(tmp_path):
    process, meta = begun(tmp_path)
    deadline = time.monotonic() + 90
    while not meta.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.communicate()
    found = open_demos(tmp_path / "x")
    assert len(list(found.episodes())) == found.about.episodes > 0


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


def test_a_minari_dataset_made_by_minari_is_read(tmp_path, monkeypatch, capsys):
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
    assert demos.about.kind == "minari" and demos.about.episodes == 5 and demos.about.steps == sum(len(k[1]) for k in kept)
    spec = envs.describe(Maze)
    assert difference(demos.about.observation_space, spec.observation_space) is None
    assert difference(demos.about.action_space, spec.action_space) is None
    assert {one[3] for one in kept} == {True, False}
    for (seen, done, rewards, terminated, truncated), found in zip(kept, demos.episodes(), strict=True):
        assert found.action.tolist() == [action - 1 for action in done] and found.reward.tolist() == rewards
        assert bool(found.terminated[-1]) is terminated and bool(found.truncated[-1]) is truncated
        np.testing.assert_array_equal(found.observation["here"]["0"], np.stack([one["here"][0] for one in seen]).astype(np.float32))
        np.testing.assert_array_equal(found.observation["here"]["1"], [one["here"][1] for one in seen])
        np.testing.assert_array_equal(found.observation["near"], np.stack([one["near"] for one in seen]))
    assert cli.main(["data", "info", str(path)]) == 0 and "minari recording" in capsys.readouterr().out
    (path / "data" / "main_data.hdf5").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="cannot be read"):
        open_demos(path)


def test_what_minari_keeps_otherwise_is_refused(tmp_path):
    image = json.dumps({"type": "Box", "dtype": "uint8", "shape": [64, 64, 3],
                        "low": np.zeros((64, 64, 3), int).tolist(), "high": np.full((64, 64, 3), 255).tolist()})
    action = json.dumps({"type": "Discrete", "n": 2, "start": 0})
    for meta, sentence in (({"data_format": "arrow"}, "arrow"), ({"data_format": "hdf5"}, "cannot be read"),
                           ({"observation_space": image, "action_space": action}, "JPEG")):
        (tmp_path / "metadata.json").write_text(json.dumps(meta))
        with pytest.raises(ConfigError, match=sentence):
            open_demos(tmp_path)


# ---------------------------------------------------------------------------------------------- the page
def test_the_commands_and_the_script_of_the_page(tmp_path, monkeypatch, capsys):
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
    assert open_demos("mine").about.returns.least == 1.0


def test_what_waits_is_written_also_while_no_other_episode_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "FLUSH_SECONDS", 0.0)
    writer = Writer.create(tmp_path / "x", ABOUT, {"source": "a test"})
    monkeypatch.setattr(folders, "FLUSH_SECONDS", 1e9)
    writer.add(episode())
    assert not (tmp_path / "x" / "demos.json").exists()
    monkeypatch.setattr(folders, "FLUSH_SECONDS", 0.0)
    writer.tick()
    assert open_demos(tmp_path / "x").about.episodes == 1


def test_the_same_episodes_are_not_added_again(tmp_path, capsys):
    words = ["data", "record", "random", "shoal/CueLure-v0", "--episodes", "2", "--out", str(tmp_path / "x")]
    assert cli.main(words) == 0
    assert cli.main([*words, "--append"]) == 2 and "give another --seed" in capsys.readouterr().err
    assert cli.main([*words, "--append", "--seed", "1"]) == 0
    assert open_demos(tmp_path / "x").about.episodes == 4
