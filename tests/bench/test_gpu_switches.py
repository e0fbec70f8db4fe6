"""The measurement of the GPU's switches, on a CPU: every kind of work runs with and without each."""

import json

import gymnasium as gym
import numpy as np
import pytest

from shoal.bench import gpu_switches
from shoal.bench.switch_tables import switch_tables


@pytest.fixture
def small(monkeypatch):
    images = gym.spaces.Box(0, 255, (4, 10, 10), np.uint8)
    for name, value in {"UNROLL": 3, "SEATS": 2, "SLOTS": 2, "FRAMES": images}.items():
        monkeypatch.setattr(gpu_switches, name, value)
    monkeypatch.setattr(gpu_switches, "LINES", [(switch, kind, rows and 4) for switch, kind, rows in gpu_switches.LINES])
    gpu_switches.staged.cache_clear()
    yield
    gpu_switches.staged.cache_clear()


def test_every_switch_has_its_line(small, tmp_path, capsys):
    out = tmp_path / "switches.json"
    gpu_switches.main(["--device", "cpu", "--torsos", "small_conv", "--seconds", "0.001", "--turns", "1", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert {row["switch"] for row in rows} == {"bf16", "channels_last", "graphs", "pinned", "fused", "together", "compile"}
    assert all(row["ratio"] > 0 and row["on"] > 0 for row in rows)
    table = capsys.readouterr().out
    assert "`graphs`" in table and "inference, 4 rows" in table and len(table.strip().splitlines()) == 2 + len(rows)
    assert table.strip() in switch_tables({**json.loads(out.read_text())})


def test_what_there_is_no_time_for_is_said(small, capsys):
    gpu_switches.main(["--device", "cpu", "--torsos", "small_conv", "--only", "fused", "--most-seconds", "-1"])
    assert "not measured: the time was over" in capsys.readouterr().out
