"""Recordings in other formats: every field comes back; what is wrong with a recording is found and named."""

from __future__ import annotations

import json
import struct
import tempfile
import zlib
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from shoal import cli
from shoal.envs.experts import swing_up
from shoal.errors import ConfigError
from shoal.experiment import data_commands
from shoal.offline import DemoWriter, Episode, RecordingInfo, open_demos
from shoal.offline.check_picture import draw_picture
from shoal.offline.checking import check_demos, histogram
from shoal.slots import leaves
from tests.offline.recordings import recorded

INFO = RecordingInfo("my/Env-v0", gym.spaces.Dict({"a": gym.spaces.Box(-1, 1, (2, 3), np.float32),
                                                   "b": gym.spaces.Box(0, 255, (4,), np.uint8)}), gym.spaces.Discrete(3), kwargs={})
FORMATS = ["steps.parquet", "steps.hdf5", "steps.npz", "minari:my/test-v0"]


def episode(length, seed, terminated=True, **changes):
    rng, ends = np.random.default_rng(seed), np.arange(length) == length - 1
    made = Episode({"a": rng.random((length + 1, 2, 3), np.float32), "b": rng.integers(0, 255, (length + 1, 4), np.uint8)},
                   rng.integers(0, 3, length), rng.random(length, np.float32), ends & terminated, ends & (not terminated))
    return replace(made, **changes)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    with DemoWriter.create(Path("logs"), INFO, {"source": "test"}) as writer:
        for number in range(6):
            likely = np.linspace(-2, 0, 1 + number, dtype=np.float32) if number else None  # of the first one it is not known
            writer.add(episode(1 + number, number, terminated=number % 2 == 0, log_prob=likely))
    return Path("logs")


@pytest.mark.parametrize("target", FORMATS)
def test_every_field_comes_back(folder, target):
    assert cli.main(["data", "convert", "logs", target]) == 0
    assert cli.main(["data", "convert", target, "again"]) == 0
    for place in (target, "again"):
        found = open_demos(place)
        assert (found.info.observation_space, found.info.action_space) == (INFO.observation_space, INFO.action_space)
        for one, other in zip(open_demos(folder).episodes(), found.episodes(), strict=True):
            for (path, leaf), (_, same) in zip(leaves(one.observation), leaves(other.observation), strict=True):
                np.testing.assert_array_equal(leaf, same, err_msg=f"{place} {path}")
            for name in ("action", "reward", "terminated", "truncated"):
                mine, theirs = getattr(one, name), getattr(other, name)
                assert mine.dtype == theirs.dtype and (mine == theirs).all(), f"{place}: {name}"
            assert (one.log_prob is None) == (other.log_prob is None), place
            assert one.log_prob is None or (one.log_prob == other.log_prob).all(), place
    assert cli.main(["data", "convert", "logs", target]) == 2  # it is there


def test_minari_reads_our_recording(folder, capsys):
    minari = pytest.importorskip("minari")
    words = ["data", "record", "scripted", "CartPole-v1", "--episodes", "2", "--steps", "20", "--num-envs", "1"]
    assert cli.main([*words, "--format", "minari", "--out", "cart/expert-v0"]) == 0, capsys.readouterr().err
    dataset = minari.load_dataset("cart/expert-v0")
    (first, *_), (mine, *_) = dataset.iterate_episodes(), open_demos("minari:cart/expert-v0").episodes()
    for name, array in (("observations", mine.observation), ("actions", mine.action), ("rewards", mine.reward),
                        ("terminations", mine.terminated), ("truncations", mine.truncated)):
        np.testing.assert_array_equal(getattr(first, name), array, err_msg=name)
    assert cli.main(["data", "convert", "minari:cart/expert-v0", "minari:bad"]) == 2
    assert "bad is not the id of a Minari dataset; write it like my/dataset-v0" in capsys.readouterr().err
    assert cli.main([*words, "--format", "parquet", "--out", "x.npz"]) == 2
    assert cli.main([*words, "--format", "parquet"]) == 2


@pytest.mark.parametrize(("out", "format", "sentence"), [("there.npz", "npz", "there.npz exists already"),
                                                         ("my/there-v0", "minari", "there is a Minari dataset my/there-v0 already"),
                                                         ("there", "minari", "there is not the id of a Minari dataset")])
def test_files_that_cannot_be_written_are_refused_before_anything_is_recorded(folder, monkeypatch, capsys, out, format, sentence):
    pytest.importorskip("minari")
    Path("there.npz").touch()
    (Path("minari") / "my" / "there-v0").mkdir(parents=True)
    monkeypatch.setattr(data_commands, "_play", None)
    assert cli.main(["data", "record", "random", "CartPole-v1", "--format", format, "--out", out]) == 2
    assert sentence in capsys.readouterr().err


def test_ctrl_c_while_a_file_is_recorded(folder, monkeypatch):
    """Every finished episode is in it."""
    asked = iter(range(10**9))
    monkeypatch.setattr(data_commands, "_interruptible", lambda: nullcontext(lambda: next(asked) > 100))
    words = ["data", "record", "random", "CartPole-v1", "--episodes", "100000", "--num-envs", "1"]
    assert cli.main([*words, "--format", "npz", "--out", "x.npz"]) == 130
    assert 0 < open_demos("x.npz").info.episodes < 100


def test_recording_stays_where_its_file_cannot_be_written(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("shoal.offline.step_table.write_table", failing_write)
    words = ["data", "record", "random", "CartPole-v1", "--episodes", "3", "--num-envs", "1", "--format", "npz", "--out", "x.npz"]
    assert cli.main(words) == 2
    (kept,) = tmp_path.glob("shoal-recording-*/recording")
    assert f"what was recorded is in {kept}: `shoal data convert {kept} x.npz`" in capsys.readouterr().out
    monkeypatch.undo()
    assert open_demos(kept).info.episodes == 3


def failing_write(demos, path):
    raise ConfigError(f"cannot write {path}: No space left on device")


# ---------------------------------------------------------------------------------------------- D4RL's layout
def test_terminals_and_timeouts_apart(tmp_path):
    """Without next observations the last decision of an episode that was cut short is left out; of others the end is not seen."""
    seen = np.arange(14, dtype=np.float32).reshape(7, 2)
    table = {"observations": seen, "actions": np.linspace(-0.5, 0.5, 7)[:, None].astype(np.float32), "rewards": np.ones(7),
             "terminals": np.array([0, 0, 1, 0, 0, 0, 0], bool), "timeouts": np.array([0, 0, 0, 0, 1, 0, 0], bool)}
    np.savez(tmp_path / "d4rl.npz", **table)
    demos = open_demos(tmp_path / "d4rl.npz")
    ended, cut, rest = demos.episodes()
    assert [len(one) for one in (ended, cut, rest)] == [3, 1, 1]
    assert ended.terminated[-1] and cut.truncated[-1] and rest.truncated[-1]
    np.testing.assert_array_equal(cut.observation, seen[3:5])
    assert demos.info.inferred and demos.info.action_space == gym.spaces.Box(-1, 1, (1,), np.float32)
    np.savez(tmp_path / "next.npz", **table, next_observations=seen + 1)
    ended, cut, rest = open_demos(tmp_path / "next.npz").episodes()
    assert [len(one) for one in (ended, cut, rest)] == [3, 2, 2]
    np.testing.assert_array_equal(cut.observation, [*seen[3:5], seen[4] + 1])


def test_numbers_that_are_not_finite_are_in_no_space(tmp_path):
    """Of a table that does not say what its spaces are: the others tell the space, and they are found by episode and step."""
    actions = np.array([[3.0, -2], [np.nan, 4], [5, np.inf], [4, -3]], np.float32)
    np.savez(tmp_path / "x.npz", observations=np.arange(8.0).reshape(4, 2), actions=actions, rewards=np.arange(4.0),
             terminals=np.array([0, 1, 0, 1], bool))
    demos = open_demos(tmp_path / "x.npz")
    assert (demos.info.action_space.low == [3, -3]).all() and (demos.info.action_space.high == [5, 4]).all()
    assert check_demos(demos, "x").findings["not finite"] == [f"x, episode {one}: action has 1 rows with NaN or infinity"
                                                              for one in ("0, step 1", "1, step 0")]
    with pytest.raises(ConfigError, match=r"x.npz, episode 0, step 1: the action \[nan"):
        list(demos.episodes())


@pytest.mark.parametrize("following", [True, False])
def test_episodes_without_end_in_files(tmp_path, folder, following):
    """They are learned from as if they were cut short, and found all the same."""
    table = {"observations": np.arange(12.0).reshape(6, 2), "actions": np.array([0, 1] * 3), "rewards": np.arange(6.0),
             "terminals": np.arange(6) == 2}
    np.savez(tmp_path / "x.npz", **table, **({"next_observations": table["observations"] + 2} if following else {}))
    demos = open_demos(tmp_path / "x.npz")
    assert [bool(one.truncated[-1]) for one in demos.episodes()] == [False, True]
    assert check_demos(demos, "x").findings == {"no end": [
        f"x, episode 1, step {2 if following else 1}: the last step is neither terminated nor truncated"]}
    np.savez(tmp_path / "cut.npz", **table, timeouts=np.arange(6) == 5)
    assert check_demos(open_demos(tmp_path / "cut.npz"), "x").clean


def test_episodes_without_end_in_minari(folder):
    h5py = pytest.importorskip("h5py")
    pytest.importorskip("minari")
    assert cli.main(["data", "convert", "logs", "minari:my/test-v0"]) == 0
    with h5py.File("minari/my/test-v0/data/main_data.hdf5", "r+") as file:
        file["episode_3/truncations"][-1] = False
    demos = open_demos("minari:my/test-v0")
    assert list(demos.episodes())[3].truncated[-1]
    found = check_demos(demos, "x").findings
    assert list(found) == ["no end"] and "x, episode 3, step 3: " in found["no end"][0]


def test_table_without_spaces(tmp_path, monkeypatch):
    """A table trains in the simulator whose spaces it does not know."""
    monkeypatch.chdir(tmp_path)
    recorded(Path("logs"), "Pendulum-v1", 1, rows=1, expert=swing_up)
    assert cli.main(["data", "convert", "logs", "steps.npz"]) == 0
    with np.load("steps.npz") as file:
        np.savez("plain.npz", **{name: file[name] for name in file.files if name != "shoal"})
    assert open_demos("plain.npz").info.observation_space != open_demos("logs").info.observation_space
    assert cli.main(["train", "td3_bc", "plain.npz", "--env", "Pendulum-v1", "--max-learner-steps", "3", "--runtime", "inline",
                     "--console.mode", "none", "--run-dir", "run", "--no-tensorboard", "--eval.episodes", "1"]) == 0


@pytest.mark.parametrize("name", ["steps.parquet", "steps.hdf5", "steps.npz"])
def test_file_cut_short(folder, name):
    assert cli.main(["data", "convert", "logs", name]) == 0
    data = Path(name).read_bytes()
    Path(name).write_bytes(data[: len(data) // 2])
    with pytest.raises(ConfigError, match=f"cannot read {name}"):
        open_demos(name)


def test_a_column_of_words(tmp_path):
    steps = {"observations": np.zeros((3, 2), np.float32), "actions": np.zeros(3, np.int64), "terminals": np.array([0, 0, 1], bool)}
    np.savez(tmp_path / "odd.npz", **steps, rewards=np.array(["a", "b", "c"]))
    with pytest.raises(ConfigError, match=r"odd.npz: rewards does not hold numbers \(<U1\)"):
        open_demos(tmp_path / "odd.npz")


def test_missing_column_is_named(tmp_path):
    np.savez(tmp_path / "x.npz", observations=np.zeros((2, 1)), actions=np.zeros(2), rewards=np.zeros(2))
    with pytest.raises(ConfigError, match="has no column terminals"):
        open_demos(tmp_path / "x.npz")


# ---------------------------------------------------------------------------------------------- checking
class Kept:
    """A recording in memory."""

    def __init__(self, *episodes):
        self.info, self.kept = INFO, episodes

    def episodes(self, order=None, checked=True):
        return iter(self.kept)


def spoilt(kind):
    one = episode(4, 7)
    if kind == "not finite":
        one.reward[2] = np.nan
    if kind == "action outside the space":
        one.action[1] = 3
    if kind == "no end":
        one.terminated[-1] = False
    if kind == "end in the middle":
        one.truncated[1] = True
    return one


@pytest.mark.parametrize(("kind", "step"), [("not finite", 2), ("action outside the space", 1), ("no end", 3),
                                            ("end in the middle", 1)])
def test_faults_by_episode_and_step(kind, step):
    """What is wrong is found with its episode and step."""
    report = check_demos(Kept(episode(3, 0), spoilt(kind)), "logs")
    assert list(report.findings) == [kind] and f"logs, episode 1, step {step}: " in report.findings[kind][0]


def test_duplicates_and_constants_found(folder, capsys):
    flat = [replace(episode(3, k), reward=np.ones(3, np.float32)) for k in (1, 2, 1)]
    report = check_demos(Kept(*flat), "logs")
    assert report.findings["duplicate"] == ["logs, episode 2 is the same as episode 0"]
    assert report.findings["constant"] == ["logs: reward is 1.0 everywhere"]
    assert cli.main(["data", "check", "logs"]) == 0 and "nothing found" in capsys.readouterr().out
    np.savez("one.npz", observations=np.arange(8.0)[:, None], actions=np.array([0, 1] * 4), rewards=np.ones(8),
             terminals=np.arange(8) % 4 == 3)
    assert cli.main(["data", "check", "one.npz"]) == 1 and "one.npz: 1 finding, see above" in capsys.readouterr().out
    meta = json.loads((folder / "demos.json").read_text())
    broken = folder / meta["files"][0]["name"]
    data = bytearray(broken.read_bytes())
    data[-1] ^= 1
    broken.write_bytes(data)
    assert cli.main(["data", "check", "logs"]) == 1 and "is not the file that was recorded" in capsys.readouterr().out


def test_a_picture_in_text():
    assert histogram([1.0, 1.0])[0].endswith("2") and len(histogram([0.0, 1.0, 9.0])) == 10 and histogram([]) == []


def test_pictures_in_files(folder, capsys):
    """HTML with the findings, and a PNG that another program reads."""
    spoil = replace(episode(4, 7), reward=np.full(4, np.nan, np.float32))
    report = check_demos(Kept(episode(3, 0), episode(9, 1), spoil), "<logs>")
    draw_picture(report, Path("x.html"), "<logs>")
    page = Path("x.html").read_text()
    assert page.count("<svg") == 2 and page.count("<rect") == 20 and "not finite: &lt;logs&gt;, episode 2, step 0" in page
    assert cli.main(["data", "check", "logs", "--picture", "x.png"]) == 0 and "picture in x.png" in capsys.readouterr().out
    data = Path("x.png").read_bytes()
    width, height = struct.unpack(">2I", data[16:24])
    at = data.index(b"IDAT")
    pixels = np.frombuffer(zlib.decompress(data[at + 4 : at + 4 + struct.unpack(">I", data[at - 4 : at])[0]]), np.uint8)
    rows = pixels.reshape(height, 1 + 3 * width)
    assert data.startswith(b"\x89PNG") and (rows[:, 0] == 0).all() and len(np.unique(rows[:, 1:].reshape(-1, 3), axis=0)) == 3
    assert cli.main(["data", "check", "logs", "--picture", "x.gif"]) == 2 and "ends in .html or .png" in capsys.readouterr().err


@pytest.mark.parametrize(("spoil", "words"), [("not finite", "step 2: the reward is nan"),
                                              ("action outside the space", "step 1: the action 3 is not in Discrete")])
def test_wrong_data_name_file_episode_and_step(folder, spoil, words):
    """Also where a run reads them."""
    one = spoilt(spoil)
    table = {"observations/a": one.observation["a"][:-1], "observations/b": one.observation["b"][:-1], "actions": one.action,
             "rewards": one.reward, "terminals": one.terminated}
    assert cli.main(["data", "convert", "logs", "good.npz"]) == 0
    with np.load("good.npz") as file:
        np.savez("bad.npz", **{name: np.concatenate([file[name][:1], array]) for name, array in table.items()}, shoal=file["shoal"])
    with pytest.raises(ConfigError, match=f"bad.npz, episode 1, {words}"):
        list(open_demos("bad.npz").episodes())
