"""The Vault: immutable, content-addressed, whole after a kill at any moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from shoal.errors import CheckpointError
from shoal.league.vault import Vault

WRITER = """
import sys, itertools, numpy as np
from shoal.league.vault import Vault
vault = Vault(sys.argv[1])
for i in itertools.count():
    vault.put(f"main-{i:06d}", {"params": np.full(50_000, i, np.float32)}, {"steps": i})
    print(i, flush=True)
"""


def test_put_and_read(tmp_path):
    vault, weights = Vault(tmp_path), {"params": np.arange(5.0), "norm/mean": np.zeros((2, 3), np.float32)}
    one = vault.put("main-0000", weights, {"steps": 7, "parent": None})
    assert vault.put("exploiter-0000", dict(reversed(weights.items())), {"steps": 9}) == one
    assert len(list((tmp_path / "weights").iterdir())) == 1  # equal weights lie there once
    again = Vault(tmp_path)
    assert again.names() == ["exploiter-0000", "main-0000"] and again.about("main-0000") == {"steps": 7, "parent": None}
    for name, array in again.weights("main-0000").items():
        np.testing.assert_array_equal(array, weights[name])
        assert array.dtype == weights[name].dtype


def test_order(tmp_path):
    """A player's snapshots come in the order of their numbers, whatever their length: a league takes them up as they were made."""
    vault, names = Vault(tmp_path), ["a-1", "main-0002", "main-9999", "main-10000", "main-10001", "main_exploiter-0000"]
    for name in reversed(names):
        vault.put(name, {"params": np.zeros(1)}, {"steps": 1})
    assert vault.names() == names


def test_immutable(tmp_path):
    vault = Vault(tmp_path)
    vault.put("main-0000", {"params": np.zeros(3)}, {"steps": 1})
    vault.put("main-0000", {"params": np.zeros(3)}, {"steps": 1})  # the same again
    for weights, about in (({"params": np.ones(3)}, {"steps": 1}), ({"params": np.zeros(3)}, {"steps": 2})):
        with pytest.raises(CheckpointError, match="never replaced"):
            vault.put("main-0000", weights, about)
    np.testing.assert_array_equal(vault.weights("main-0000")["params"], np.zeros(3))
    for name in ("../escape", "", ".hidden", "a/b"):
        with pytest.raises(CheckpointError, match="cannot be the name of a snapshot"):
            vault.put(name, {}, {})


def test_damage(tmp_path):
    vault = Vault(tmp_path)
    found = vault.put("main-0000", {"params": np.zeros(3)}, {})
    path = tmp_path / "weights" / f"{found}.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="is damaged"):
        vault.weights("main-0000")
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        vault.weights("main-0000")
    with pytest.raises(CheckpointError, match=r"no snapshot main-0009 .*there are main-0000"):
        vault.weights("main-0009")


def test_killed(tmp_path):
    """Writers die by SIGKILL; all that they had reported is there, and whatever is listed is whole."""
    for wanted in (2, 5, 9):
        folder = tmp_path / str(wanted)
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        reported = [int(writer.stdout.readline()) for _ in range(wanted)]
        os.kill(writer.pid, signal.SIGKILL)
        reported += [int(line) for line in writer.stdout if line.endswith("\n")]
        writer.wait()
        writer.stdout.close()
        vault = Vault(folder)
        names = vault.names()
        assert set(names) >= {f"main-{i:06d}" for i in reported}
        for name in names:
            i = vault.about(name)["steps"]
            assert (vault.weights(name)["params"] == i).all()
        following = len(names)
        vault.put(f"main-{following:06d}", {"params": np.full(50_000, following, np.float32)}, {"steps": following})
        assert len(vault.names()) == following + 1
