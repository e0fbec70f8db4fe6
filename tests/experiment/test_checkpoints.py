"""Whole or not there: nothing that happens while saving harms the previous checkpoint."""

import errno
import hashlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file

from shoal.core import Pieces
from shoal.errors import CheckpointError, ConfigError
from shoal.experiment import checkpoints as module
from shoal.experiment.checkpoints import Checkpoints, TensorFiles, holds_table, read_meta, write_json
from shoal.experiment.lock import alone
from shoal.experiment.rundir import RunDir, default_directory, list_runs

STATE = {"params": np.arange(6, dtype=np.float32).reshape(2, 3), "count": np.array(3.0),
         "rng": np.frombuffer(b"{}", np.uint8)}


def save(checkpoints: Checkpoints, env_steps: int) -> None:
    folder = checkpoints.begin(env_steps)
    TensorFiles().save(folder / "learner-0.safetensors", STATE)
    checkpoints.commit(folder, {"env_steps": env_steps})


def test_state_comes_back_as_it_was(tmp_path):
    path = tmp_path / "x.safetensors"
    TensorFiles().save(path, {**STATE, "turned": STATE["params"].T})
    back = TensorFiles().load(path)
    for name, array in STATE.items():
        assert back[name].dtype == array.dtype and back[name].shape == array.shape
        np.testing.assert_array_equal(back[name], array)
    np.testing.assert_array_equal(back["turned"], STATE["params"].T)


def test_file_written_in_pieces(tmp_path):
    """A file that is written in pieces reads like any other."""
    path, parts = tmp_path / "x.safetensors", [b"", b"abc", np.arange(300_000)[::2], np.zeros((0, 3)), b"z" * 2_000_000]
    raw = b"".join(np.ascontiguousarray(part).tobytes() if isinstance(part, np.ndarray) else part for part in parts)
    TensorFiles().save(path, {**STATE, "chunks": Pieces(parts, lambda: None)})
    back = TensorFiles().load(path)
    assert back.keys() == {*STATE, "chunks"} and bytes(back["chunks"]) == raw
    assert isinstance(back["chunks"], np.memmap) and not isinstance(back["params"], np.memmap)
    others = load_file(path)
    for name, array in {**STATE, "chunks": np.frombuffer(raw, np.uint8)}.items():
        np.testing.assert_array_equal(others[name], array)
        np.testing.assert_array_equal(back[name], array)
    assert path.with_name(path.name + module.DIGEST).read_text() == hashlib.sha256(path.read_bytes()).hexdigest()
    TensorFiles().save(path, {"chunks": Pieces([], lambda: None)})
    assert len(TensorFiles().load(path)["chunks"]) == 0 and holds_table(path)


def test_newest_and_keep(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.newest() is None
    for steps in (0, 900, 1000, 20000):
        save(checkpoints, steps)
    assert checkpoints.newest() == tmp_path / "000000020000"
    assert sorted(os.listdir(tmp_path)) == ["000000001000", "000000020000"]
    assert read_meta(checkpoints.newest())["files"].keys() == {"learner-0.safetensors"}


def test_two_at_the_same_step_are_both_whole(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 5)
    save(checkpoints, 5)
    assert checkpoints.newest().name == "000000000005+"


def test_many_at_the_same_step(tmp_path):
    """Many at the same step keep their order and short names."""
    checkpoints = Checkpoints(tmp_path, keep=3)
    (tmp_path / "000000000005++").mkdir()  # torn, and named as by earlier versions
    for number in range(20):
        save(checkpoints, 5)
        assert checkpoints.newest() == max(checkpoints._whole(), key=lambda path: path.stat().st_mtime_ns), number
    assert len(checkpoints.newest().name) < 25
    save(checkpoints, 6)
    assert checkpoints.newest().name == "000000000006"


def test_a_torn_folder_is_never_the_newest(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    half = checkpoints.begin(2)
    (half / "learner-0.safetensors").write_bytes(b"half")
    save(checkpoints, 3)
    with open(tmp_path / "000000000003" / "learner-0.safetensors", "r+b") as file:
        file.truncate(10)  # a disk that lied about fsync
    assert checkpoints.newest() == tmp_path / "000000000001"
    checkpoints.clear_torn()
    assert not half.exists()


def test_a_full_disk_leaves_the_previous_one(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1)

    def full(path, value):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "write_json", full)
    with pytest.raises(OSError, match="No space"):
        save(checkpoints, 2)
    assert checkpoints.newest() == tmp_path / "000000000001"
    assert sorted(os.listdir(tmp_path)) == ["000000000001"]


def test_failed_write_is_an_oserror(tmp_path):
    """The kernel refuses the bytes (a limit on the size of files, in a process of its own); the old file stays."""
    program = """
import resource, signal, sys
import numpy as np
from pathlib import Path
from shoal.experiment.checkpoints import TensorFiles

path = Path(sys.argv[1]) / "learner-0.safetensors"
TensorFiles().save(path, {"params": np.ones(4, np.float32)})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    TensorFiles().save(path.with_name("bigger.safetensors"), {"params": np.zeros(1 << 20, np.float32)})
except OSError as error:
    print("refused", TensorFiles().load(path)["params"].sum())
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["refused", "4.0"], done.stderr


def test_pickles_are_refused(tmp_path):
    import pickle

    path = tmp_path / "learner-0.safetensors"
    path.write_bytes(pickle.dumps(STATE))
    with pytest.raises(CheckpointError, match="cannot be read"):
        TensorFiles().load(path)


@pytest.mark.parametrize("header", [[], {"x": 3}, {"x": {"dtype": "U8"}},
                                    {"x": {"dtype": "U8", "shape": [1 << 21], "data_offsets": [0, 9]}}])
def test_header_that_makes_no_sense(header, tmp_path):
    """JSON, but not what a safetensors file begins with."""
    text = json.dumps(header).encode()
    path = tmp_path / "learner-0.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(9))
    with pytest.raises(CheckpointError, match="cannot be read"):
        TensorFiles().load(path)


def test_json_is_replaced_atomically(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    write_json(path, {"a": 1})
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no")))
    with pytest.raises(OSError):
        write_json(path, {"a": 2})
    assert '"a": 1' in path.read_text() and os.listdir(tmp_path) == ["summary.json"]


# ---------------------------------------------------------------------------------------------- run directories
def test_default_directories_do_not_collide(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "20260101-000000")
    first = default_directory("impala", "shoal/Catch-v0", 3)
    assert first.name == "20260101-000000-impala-shoal-Catch-v0-3"
    made = [RunDir.create_default(first, {}) for _ in range(3)]
    assert [run.path.name.removeprefix(first.name) for run in made] == ["", "-2", "-3"]
    for run in reversed(made):
        run.remove()
    assert not list(tmp_path.iterdir())


def test_a_run_goes_only_where_there_is_room(tmp_path):
    run = RunDir.create(tmp_path / "run", {"preset": "ppo", "env": {"name": "E"}})
    with pytest.raises(ConfigError, match=r"ended before its first checkpoint.*remove the directory"):
        RunDir.create(run.path, {})
    with alone(run.path), pytest.raises(ConfigError, match=r"is running \(pid"):
        RunDir.create(run.path, {})
    save(run.checkpoints(), 10)
    with pytest.raises(ConfigError, match=r"already has a run.*shoal resume"):
        RunDir.create(run.path, {})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="not empty"):
        RunDir.create(tmp_path / "other", {})
    with pytest.raises(ConfigError, match="is a file"):
        RunDir.create(tmp_path / "other" / "thesis.tex", {})
    with pytest.raises(ConfigError, match="cannot be written"):
        RunDir.create(tmp_path / "other" / "thesis.tex" / "run", {})


def test_open_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        RunDir.open(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        RunDir.open(tmp_path)
    RunDir.create(tmp_path / "runs" / "a", {"preset": "ppo", "env": {"name": "E"}})
    with pytest.raises(ConfigError, match="newest run is runs/a"):
        RunDir.open(tmp_path)
    assert [row["run"] for row in list_runs()] == ["runs/a"]
    (tmp_path / "runs" / "a" / "config.json").write_text("{")
    assert "unreadable" in list_runs()[0]["state"]


# ---------------------------------------------------------------------------------------------- damage
def flip(path, at=-3):
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("name", ["learner-0.safetensors", "checkpoint.json"])
def test_flipped_byte(name, tmp_path, caplog):
    """A flipped byte makes the older one the newest."""
    checkpoints = Checkpoints(tmp_path)
    for steps in (1, 2, 3):
        save(checkpoints, steps)
    assert checkpoints.sound() == tmp_path / "000000000003" and not caplog.messages
    flip(tmp_path / "000000000003" / name, 60)
    (tmp_path / "000000000002" / "learner-0.safetensors").unlink()
    assert checkpoints.sound() == tmp_path / "000000000001"
    assert [text.split(" (")[0] for text in caplog.messages] == [f"checkpoint 00000000000{n} is damaged" for n in (3, 2)]
    assert all(text.endswith("; 000000000001 is used instead") for text in caplog.messages)
    checkpoints.set_damaged_aside()
    assert sorted(os.listdir(tmp_path)) == ["000000000001", "damaged-000000000002", "damaged-000000000003"]
    assert checkpoints.newest() == checkpoints.sound() == tmp_path / "000000000001"
    flip(tmp_path / "000000000001" / "learner-0.safetensors")
    with pytest.raises(CheckpointError, match="no whole checkpoint left"):
        checkpoints.sound()


def test_damaged_checkpoint_by_its_name(tmp_path):
    """Nothing else is taken where one was asked for."""
    checkpoints = Checkpoints(tmp_path)
    for steps in (1, 2):
        save(checkpoints, steps)
    assert checkpoints.named("2") == checkpoints.named("000000000002") == tmp_path / "000000000002"
    flip(tmp_path / "000000000002" / "learner-0.safetensors")
    with pytest.raises(CheckpointError, match=r"000000000002 is damaged \(learner-0.safetensors has changed .*; take another one"):
        checkpoints.named("2")
    assert checkpoints.named("1") == tmp_path / "000000000001"
    with pytest.raises(CheckpointError, match="has no checkpoint 7; there are 000000000001, 000000000002"):
        checkpoints.named("7")


def test_changed_metadata(tmp_path):
    """A changed number of the metadata is noticed."""
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 7)
    meta = json.loads((tmp_path / "000000000007" / "checkpoint.json").read_text())
    (tmp_path / "000000000007" / "checkpoint.json").write_text(json.dumps({**meta, "env_steps": 8}))
    with pytest.raises(CheckpointError, match=r"checkpoint.json has changed since it was written"):
        checkpoints.sound()
    (tmp_path / "000000000007" / "checkpoint.json").write_text(json.dumps({**meta, "files": {"\0": 8}}))
    with pytest.raises(CheckpointError, match="no whole checkpoint left"):
        checkpoints.sound()


def test_checkpoints_of_earlier_versions(tmp_path):
    """Checkpoints of earlier versions have sizes only."""
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 7)
    path = tmp_path / "000000000007" / "checkpoint.json"
    meta = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in meta.items() if name not in ("sha256", "seal")}))
    assert checkpoints.sound() == path.parent
    assert not list(path.parent.glob("*.sha256"))  # they are in checkpoint.json


def test_files_join_newest_checkpoint(tmp_path):
    """Those that stay are not copied, and what the checkpoint says of itself is true."""
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 3)
    folder = checkpoints.begin(5)
    for name in ("learner-0", "evaluator-0"):
        TensorFiles().save(folder / f"{name}.safetensors", STATE)
    newest = checkpoints.commit(folder, {"env_steps": 7, "seconds": 1.5})
    kept = (newest / "learner-0.safetensors").stat().st_ino
    folder = checkpoints.begin(6)
    TensorFiles().save(folder / "evaluator-0.safetensors", {"count": np.array(4.0)})
    checkpoints.amend(folder)
    assert sorted(os.listdir(tmp_path)) == ["000000000003", "000000000007"] and checkpoints.sound() == newest
    assert (newest / "learner-0.safetensors").stat().st_ino == kept
    assert TensorFiles().load(newest / "evaluator-0.safetensors")["count"] == 4.0
    meta = read_meta(newest)
    assert meta["env_steps"] == 7 and meta["seconds"] == 1.5
    assert set(meta["files"]) == {"learner-0.safetensors", "evaluator-0.safetensors"}


def test_full_disk(tmp_path, monkeypatch):
    """A full disk leaves the newest checkpoint as it was."""
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 7)
    folder = checkpoints.begin(6)
    TensorFiles().save(folder / "evaluator-0.safetensors", STATE)

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "write_json", full)
    with pytest.raises(OSError):
        checkpoints.amend(folder)
    assert os.listdir(tmp_path) == ["000000000007"] and checkpoints.sound() is not None


def test_deeply_nested_header(tmp_path):
    (tmp_path / "learner-0.safetensors").write_bytes(b"[" * 5000 + b"]" * 5000)
    with pytest.raises(CheckpointError, match="cannot be read"):
        holds_table(tmp_path / "learner-0.safetensors")


def test_newest_for_a_role(tmp_path):
    """A role that starts again is given the newest checkpoint whose file of it is what was written; others' files do not matter."""
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.newest_for("learner-0") == (None, [])
    for env_steps in (1, 2):
        folder = checkpoints.begin(env_steps)
        for name in ("learner-0", "evaluator-0"):
            TensorFiles().save(folder / f"{name}.safetensors", STATE)
        checkpoints.commit(folder, {"env_steps": env_steps})
    old, new = sorted(tmp_path.iterdir())
    flip(new / "learner-0.safetensors")
    assert checkpoints.newest() == new and checkpoints.newest_for("evaluator-0") == (new, [])
    for role in ("learner-0", "learner-1"):  # the second has no file, and may start from that of another replica
        found, (why,) = checkpoints.newest_for(role)
        assert found == old and why == f"checkpoint {new.name} is damaged (learner-0.safetensors has changed since it was written)"
    assert checkpoints.newest_for("actor-0") == (new, [])
    flip(old / "learner-0.safetensors")
    with pytest.raises(CheckpointError, match="learner-0 cannot continue"):
        checkpoints.newest_for("learner-0")
