"""A recording as a log: files are only added, each has a checksum, a torn last one is left out, any other fault is refused."""

from __future__ import annotations

import hashlib
import json
import os
import shutil

import numpy as np
import pytest

from shoal.errors import ConfigError
from shoal.offline import DemoWriter, Episode, demo_folder, open_demos
from shoal.offline.loading import open_shards
from shoal.slots import leaves
from tests.offline.recordings import cue

FILES = [f"episodes-{number:06d}.safetensors" for number in range(3)]


@pytest.fixture
def log(tmp_path, monkeypatch):
    """Three files of four episodes each, however long the recording takes."""
    monkeypatch.setattr(demo_folder, "FLUSH_SECONDS", 1e9)
    path = cue(tmp_path / "log", 4)
    info = open_demos(path).info
    for seed in (1, 2):
        episodes = list(open_demos(cue(tmp_path / str(seed), 4, seed=seed)).episodes())
        with DemoWriter.create(path, info, {"source": f"seed {seed}"}, append=True) as writer:
            for episode in episodes:
                writer.add(episode)
    assert sorted(one.name for one in path.glob("*.safetensors")) == FILES
    return path


def hashed(episode: Episode) -> str:
    digest = hashlib.sha256(episode.action.tobytes() + episode.reward.tobytes())
    for _, leaf in leaves(episode.observation):
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()


def meta_of(path):
    return json.loads((path / "demos.json").read_text())


def test_checksums(log, tmp_path):
    """Every file has a checksum and adding changes no other."""
    before = [(one, (log / one["name"]).read_bytes()) for one in meta_of(log)["files"]]
    assert len({one["checksum"] for one, _ in before}) == 3
    with DemoWriter.create(log, open_demos(log).info, {"source": "more"}, append=True) as writer:
        writer.add(next(open_demos(log).episodes()))
    after = meta_of(log)["files"]
    assert after[:3] == [one for one, _ in before] and len(after) == 4
    assert all((log / one["name"]).read_bytes() == data for one, data in before)


def test_torn_last_file_is_left_out(log, caplog):
    whole = [hashed(one) for one in open_demos(log).episodes()]
    os.truncate(log / FILES[2], (log / FILES[2]).stat().st_size - 1)
    demos = open_demos(log)
    assert [hashed(one) for one in demos.episodes()] == whole[:8]
    assert demos.info.episodes == 8 and demos.info.steps == sum(len(one) for one in demos.episodes())
    assert "so its 4 episodes are left out; the 8 episodes before it are whole" in caplog.text
    with DemoWriter.create(log, demos.info, {"source": "more"}, append=True) as writer:
        writer.add(next(demos.episodes()))
    assert [hashed(one) for one in open_demos(log).episodes()] == [*whole[:8], whole[0]], "the log goes on behind what is whole"


@pytest.mark.parametrize("number", [0, 1])
def test_torn_file_in_the_middle_is_refused(log, number):
    os.truncate(log / FILES[number], 100)
    with pytest.raises(ConfigError, match=rf"{FILES[number]} has 100 of .* bytes; copy the recording again"):
        open_demos(log)


def test_a_bit_that_was_turned_is_found(log):
    data = bytearray((log / FILES[1]).read_bytes())
    at = data.rindex(np.float32(1.0).tobytes())  # a reward, or a part of an observation: still a number that could be true
    data[at + 2] ^= 0x40
    (log / FILES[1]).write_bytes(bytes(data))
    with pytest.raises(ConfigError, match=f"{FILES[1]} is not the file that was recorded: its checksum is"):
        list(open_demos(log).episodes())


def test_file_of_another_recording(log, tmp_path):
    """A file of another recording under the same name is refused."""
    size = (log / FILES[1]).stat().st_size
    for seed in range(3, 40):
        other = cue(tmp_path / f"other-{seed}", 4, seed=seed) / FILES[0]
        if other.stat().st_size == size:
            os.replace(other, log / FILES[1])
            with pytest.raises(ConfigError, match="is not the file that was recorded"):
                list(open_demos(log).episodes())
            return
    pytest.fail("no other recording of the same size; the corridor's episodes should all be as long")


def test_recordings_without_checksums(log):
    """Recordings without checksums are read as before."""
    meta = meta_of(log)
    for file in meta["files"]:
        del file["checksum"]
    (log / "demos.json").write_text(json.dumps(meta))
    assert len(list(open_demos(log).episodes())) == 12


def test_random_order(log):
    """A random order has every episode once and depends on the generator alone."""
    plain = [hashed(one) for one in open_demos(log).episodes()]
    orders = [[hashed(one) for one in open_demos(log).episodes(np.random.default_rng(seed))] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2] and orders[0] != plain
    assert all(sorted(order) == sorted(plain) for order in orders)


def test_logs_of_several_collectors(tmp_path):
    """Logs of several collectors are one recording."""
    for seed in (1, 2):
        cue(tmp_path / "logs" / f"actor-{seed}", 4, seed=seed)
    demos = open_shards(tmp_path / "logs")
    episodes = [hashed(one) for one in demos.episodes()]
    assert demos.info.episodes == len(episodes) == 8
    assert [hashed(one) for number in range(len(demos.shard_steps)) for one in demos.read_shard(number)] == episodes
    assert sum(demos.shard_steps) == demos.info.steps


def test_index_by_episode(log, tmp_path):
    """It says of every episode what reading it says, for one log and for several; a damaged file is named."""
    demos = open_demos(log)
    index = demos.index()
    for number, episode in enumerate(demos.episodes()):
        entry = index[number]
        assert (entry["file"], entry["length"], entry["return"]) == (number // 4, len(episode), episode.total)
        assert entry["terminated"] == episode.terminated[-1] and entry["row"] == index["length"][number // 4 * 4 : number].sum()
        np.testing.assert_array_equal(demos.episode(number).action, episode.action)
    assert len(index) == demos.info.episodes == 12 and (index["return"] == 1).all()
    logs = tmp_path / "logs"
    for name in ("actor-0", "actor-1"):
        shutil.copytree(log, logs / name)
    together = open_demos(logs)
    np.testing.assert_array_equal(together.index()["return"], np.tile(index["return"], 2))
    assert together.index()["file"].tolist() == [number // 4 for number in range(24)]
    (log / FILES[1]).write_bytes(b"\0" * (log / FILES[1]).stat().st_size)
    with pytest.raises(ConfigError, match=rf"cannot read .*{FILES[1]}"):
        demos.index()
