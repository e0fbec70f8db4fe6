"""What may go wrong with recordings while they are read or made: killed readers, a file cut short, a full disk."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from shoal import cli
from shoal.offline import demo_folder, open_demos
from shoal.offline.step_table import write_table
from tests.architectures import test_hard_to_kill
from tests.architectures.test_dataset_reader import BATCH, EPISODES, FILES, ITEM, STEPS, TOTAL, drawn, failing, numbered, reader_of
from tests.architectures.test_hard_to_kill import fill, go
from tests.runtime.harness import Killer

disk = test_hard_to_kill.disk


def test_two_killed_readers(tmp_path):
    """Both are restarted, again and again, and learning goes on."""
    killer = Killer(("reader-0", "reader-1"), 4, "learner_steps", 30)
    session = go(tmp_path / "run", "bc", "CartPole-v1", act=killer, until=killer.done,
                 overrides={"demos": str(cart(tmp_path / "logs")), "offline": True, "data": {"readers": 2},
                            "architecture": {}, "eval": {"episodes": 2}})
    assert session.reason == "until" and session.summary["restarts"] == 4
    said = session.screen.getvalue()
    assert all(f"restart: reader-{k}: killed by SIGKILL; restarted (2 so far)" in said for k in range(2))


def cart(path):
    """CartPole in two files."""
    for number in range(2):
        words = ["data", "record", "random", "CartPole-v1", "--episodes", "5", "--seed", str(number), "--out", str(path)]
        assert cli.main([*words, *(["--append"] if number else [])]) == 0
    return path


@pytest.mark.parametrize("name", ["x.parquet", "x.hdf5"])
def test_table_that_is_larger_than_the_memory(tmp_path, monkeypatch, name):
    """It is read in pieces, each item once in an epoch; cut short meanwhile, it ends the run with a sentence."""
    monkeypatch.setattr("shoal.offline.step_table.PIECE", EPISODES * STEPS)
    write_table(open_demos(numbered(tmp_path / "folder")), tmp_path / name)
    failures: list[str] = []
    made = reader_of(tmp_path / name, failures, memory_mb=5 * EPISODES * STEPS * ITEM / 1e6)
    assert len(made.sizes) == FILES and made.most < TOTAL
    for _ in range(2):
        seen = np.concatenate([rows for rows, _ in drawn(made, TOTAL, count=1)])
        assert len(np.unique(seen)) == TOTAL
    os.truncate(tmp_path / name, (tmp_path / name).stat().st_size // 2)
    failing(made, TOTAL // BATCH)
    assert f"cannot read {tmp_path / name}: " in failures[0] and "copy the file again" in failures[0]


def test_disk_that_is_full_while_recording(disk, monkeypatch, capsys):
    """What was written before it was full is whole, and recording goes on behind it when there is room."""
    monkeypatch.setattr(demo_folder, "FLUSH_BYTES", 1 << 16)
    filler, logs = disk / "filler", disk / "logs"
    fill(filler)
    os.truncate(filler, filler.stat().st_size - (1 << 18))
    words = ["data", "record", "random", "CartPole-v1", "--out", str(logs)]
    assert cli.main([*words, "--episodes", "100000"]) == 2
    said = capsys.readouterr().err
    assert "No space left on device; what was there before is unharmed" in said and said.count("\n") == 1
    before = open_demos(logs).info.episodes
    assert before > 0 and len(list(open_demos(logs).episodes())) == before and not list(Path(logs).glob(".*"))
    filler.unlink()
    assert cli.main([*words, "--episodes", "3", "--seed", "1", "--append"]) == 0
    assert open_demos(logs).info.episodes == before + 3


@pytest.mark.parametrize("name", ["x.parquet", "x.hdf5", "x.npz", "minari:my/x-v0"])
def test_disk_that_is_full_while_converting(disk, tmp_path, monkeypatch, capsys, name):
    """A sentence, and no part of a file; HDF5 itself would end the process."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(disk))
    assert cli.main(["data", "record", "random", "CartPole-v1", "--episodes", "600", "--out", str(tmp_path / "logs")]) == 0
    filler = disk / "filler"
    fill(filler)
    os.truncate(filler, filler.stat().st_size - (1 << 18))
    assert cli.main(["data", "convert", str(tmp_path / "logs"), name if ":" in name else str(disk / name)]) == 2
    assert "No space left on device" in capsys.readouterr().err and [path.name for path in disk.iterdir()] == ["filler"]
    filler.unlink()
    if ":" not in name:  # minari's own takes more than the disk has
        assert cli.main(["data", "convert", str(tmp_path / "logs"), str(disk / name)]) == 0
