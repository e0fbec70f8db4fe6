"""A league whose vault is damaged, or on a full disk, goes on without the snapshots that cannot be read or written."""

from __future__ import annotations

import errno
import json
import re

import numpy as np
import pytest

import shoal
from shoal import cli
from shoal.errors import CheckpointError
from shoal.experiment.checkpoints import TensorFiles
from shoal.league.matchmaking import League, LeagueOptions
from shoal.league.vault import Vault

WEIGHTS = {"params": np.arange(4.0)}
SMALL = {"runtime": "inline", "actors": 1, "console": {"mode": "none"}, "tensorboard": False, "net": {"hidden": (4,)},
         "algorithm": {"unroll": 4}, "architecture": {"envs_per_actor": 4}, "eval": {"enabled": False},
         "league": {"league_exploiters": 0, "least_steps": 100, "most_steps": 200}}


def saved(folder, times=3):
    league, vault = League(LeagueOptions()), Vault(folder)
    for number in range(times):
        league.save("main", {"params": np.full(4, float(number))}, vault, np.random.default_rng(0))
    return league, vault


@pytest.mark.parametrize("record", [b"", b"[]", b"{}", b"[" * 5000, b"\xff", b'{"weights": 3, "about": {}}',
                                    b'{"weights": "x", "about": 3}', b'{"weights": "x", "about": {"player": "nobody", "steps": 1}}',
                                    b'{"weights": "x", "about": {"player": "main", "steps": "x"}}'])
def test_damaged_record_is_left_out(record, tmp_path):
    _, vault = saved(tmp_path)
    (tmp_path / "snapshots" / "main-0001.json").write_bytes(record)
    league = League(LeagueOptions())
    assert league.adopt(vault) == ["main-0000", "main-0002"]
    with pytest.raises(CheckpointError):
        vault.weights("main-0001")
    assert league.save("main", WEIGHTS, vault, np.random.default_rng(0)) == "main-0003"  # its name stays taken


def test_retired(tmp_path):
    """A retired snapshot is drawn no more, and matches against it that are under way do not count."""
    league, _ = saved(tmp_path, 2)
    rng = np.random.default_rng(0)
    matches = [league.match("main", rng) for _ in range(50)]
    assert league.retire("main-0001") and not league.retire("main-0001")
    assert not any(match.away == "main-0001" for match in (league.match("main", rng) for _ in range(50)))
    counted = {match.away for match in matches if league.report(match.number, "win")}
    assert {match.away for match in matches} - counted == {"main-0001"}


def test_league_without_damaged_snapshots(tmp_path, capsys):
    run = shoal.train("league", "shoal/RockPaperScissors-v0", run_dir=str(tmp_path / "run"), max_env_steps=2000, **SMALL)
    weights = sorted((tmp_path / "run" / "vault" / "weights").iterdir())
    assert len(weights) > 4
    for path in weights[::2]:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    (tmp_path / "run" / "vault" / "snapshots" / "main-0000.json").write_text("half")
    assert cli.main(["league", str(tmp_path / "run")]) == 0  # shows the others
    told = capsys.readouterr().out
    assert "it is damaged" in told and "exploitability of the Nash mixture" in told
    run = shoal.resume(tmp_path / "run", max_env_steps=6000)
    assert run.summary["stopped_by"] == "env_steps" and run.summary["env_steps"] >= 6000
    events = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any("is left out from now on" in str(row) for row in events)


CHANGES = [(b'"main"', b'"ma\xff"'), (b'"reports": ', b'"reports": "x", "r": '), (b'"parent": {', b'"parent": 3, "p": {'),
           (b'"counts": [[', b'"counts": [["a", "b", "x", 1, 1, 1], ['), (b'"players": {', b'"players": [], "p": {')]


def write_league(newest, text):
    """The coordinator's file as of somebody who changed it by hand, and its checksums with it."""
    path = newest / "coordinator-0.safetensors"
    arrays = dict(TensorFiles().load(path))
    arrays["league"] = np.frombuffer(text, np.uint8)
    TensorFiles().save(path, arrays)
    path.with_name(path.name + ".sha256").unlink()
    meta = json.loads((newest / "checkpoint.json").read_text())
    kept = {name: value for name, value in meta.items() if name not in ("seal", "sha256")}
    (newest / "checkpoint.json").write_text(json.dumps({**kept, "files": {**meta["files"], path.name: path.stat().st_size}}))


def test_state_of_another_kind(tmp_path, capsys):
    """One sentence from `shoal league`, and from resume, whatever the file of the coordinator holds."""
    folder, small = tmp_path / "run", ["--runtime", "inline", "--console.mode", "none"]
    shoal.train("league", "shoal/RockPaperScissors-v0", run_dir=str(folder), max_env_steps=400, **SMALL)
    newest = sorted((folder / "checkpoints").glob("0*"))[-1]
    whole = bytes(TensorFiles().load(newest / "coordinator-0.safetensors")["league"])
    said = []
    for before, after in CHANGES:
        assert before in whole
        write_league(newest, whole.replace(before, after, 1))
        for words in (["league", str(folder)], ["resume", str(folder), "--max-env-steps", "600", *small]):
            assert cli.main(words) == 2, (after, words)
            said.append(capsys.readouterr().err)
    assert all(text.count("\n") == 1 and "is not what" in text for text in said), said
    write_league(newest, whole)
    snapshot = folder / "vault" / "snapshots" / "main-0000.json"
    snapshot.write_text(snapshot.read_text().replace('"steps"', '"stops"'))
    assert cli.main(["league", str(folder)]) == 0
    assert re.search(r"main-0000 +\?   it is damaged", capsys.readouterr().out)


def test_full_disk(tmp_path, monkeypatch):
    """A player that cannot be saved learns on, and is saved when there is room."""
    put, refused = Vault.put, []

    def full(self, name, weights, about):
        if len(self.names()) >= 2 and len(refused) < 3:
            refused.append(name)
            raise OSError(errno.ENOSPC, "No space left on device")
        return put(self, name, weights, about)

    monkeypatch.setattr(Vault, "put", full)
    run = shoal.train("league", "shoal/RockPaperScissors-v0", run_dir=str(tmp_path / "run"), max_env_steps=4000, **SMALL)
    assert run.summary["stopped_by"] == "env_steps" and len(refused) == 3 and len(Vault(tmp_path / "run" / "vault").names()) > 3
