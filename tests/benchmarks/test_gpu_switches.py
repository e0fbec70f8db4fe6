"""The measurement of the GPU's switches, on a CPU: every kind of work runs with and without each; so do whole programs."""

import json
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from benchmarks import gpu_pong, gpu_switches
from benchmarks.composed_limit.scenes import CARTPOLE, Workload
from benchmarks.performance_page import write
from benchmarks.switch_tables import switch_row, switch_rows, switch_tables

ROOT = Path(__file__).parents[2]


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


def test_the_ratio_is_that_of_the_turns():
    """By the medians of each side the switch would pay, 100 to 90; in two turns of three it costs."""
    row = switch_row("nature", "bf16", "learner", on=[100.0, 60.0, 110.0], off=[80.0, 90.0, 120.0], seconds=1.26)
    assert (row["on"], row["off"], row["ratio"], row["took_seconds"]) == (100, 90, 0.917, 1.3)
    assert "0.92 (1.25, 0.67, 0.92)" in switch_rows([row])
    assert "0.92 (" in switch_rows([{**row, "ratio": 1.111}])  # of an older file: by its turns
    assert gpu_switches.switch_row is switch_row


def test_page_shows_the_ratios_of_the_turns():
    """The page is made from the results: what it shows is the middle one of each line's turns."""
    page = (ROOT / "docs" / "performance.md").read_text()
    results = json.loads((ROOT / "docs" / "results" / "h200_switches.json").read_text())
    assert switch_tables(results) in page
    for row in (row for row in results["rows"] if "turns" in row):
        ratios = sorted(on / off for on, off in zip(*row["turns"].values(), strict=True))
        assert f"| {ratios[1]:.2f} (" in switch_rows([row])


# ---------------------------------------------------------------------------------------------- whole programs
class Program:
    """Stands for Held: says how fast it is only while it runs, and notes whether another one does."""

    running: set[str] = set()  # noqa: RUF012  all of them together
    ended: list[str] = []  # noqa: RUF012
    rates = {"on": iter(()), "off": iter(())}  # noqa: RUF012

    def __init__(self, case, folder):
        self.side, self.on = Path(folder).name, case.overrides["gpu.core_each"]
        assert (self.side == "on") == self.on
        self.go_on()

    def begin(self, warm_seconds):
        if self.rates["on"] is None:
            raise RuntimeError("no 20 updates: no GPU")

    def go_on(self):
        self.running.add(self.side)

    def stop(self):
        self.running.remove(self.side)

    def rate(self, seconds):
        assert self.running == {self.side} and seconds == 0.5
        return next(self.rates[self.side])

    def end(self):
        self.ended.append(self.side)


@pytest.fixture
def programs(monkeypatch):
    monkeypatch.setattr(gpu_pong, "Held", Program)
    monkeypatch.setattr(gpu_pong.signal, "signal", lambda *given: None)  # it is the test's
    Program.running.clear()
    Program.ended.clear()
    return Program


def test_a_switch_of_a_whole_program(programs, capsys, tmp_path):
    """One program at a time, a ratio for each turn; a file keeps what was measured before."""
    programs.rates = {"on": iter([100.0, 60.0, 110.0]), "off": iter([80.0, 90.0, 120.0])}
    out, words = tmp_path / "h200_program_switches.json", ["--switch", "core_each", "--only", "seed", "--seconds", "0.5"]
    gpu_pong.main([*words, "--turns", "3", "--out", str(out)])
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["ratio"] == 0.917 and row["turns"] == {"on": [100, 60, 110], "off": [80, 90, 120]}
    assert (row["torso"], row["switch"], row["what"], row["case"]) == ("nature", "core_each", "program", "seed")
    assert "--switch core_each --only seed" in row["command"] and sorted(programs.ended) == ["off", "on"]
    programs.rates = {"on": iter([30.0]), "off": iter([20.0])}
    gpu_pong.main(["--switch", "core_each", "--only", "impala", "--seconds", "0.5", "--turns", "1", "--out", str(out)])
    assert [row["case"] for row in json.loads(out.read_text())["rows"]] == ["seed", "impala"]
    page = tmp_path / "performance.md"
    page.write_text((ROOT / "docs" / "performance.md").read_text())
    write(page, tmp_path)
    assert "| program, seed   |" in page.read_text() and "| program, impala |" in page.read_text()
    assert "1.50 (1.50)" in page.read_text()


def test_program_that_does_not_begin(programs, capsys):
    """A program that does not begin becomes a row that says so."""
    programs.rates = {"on": None}
    gpu_pong.main(["--switch", "core_each", "--only", "seed"])
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["missing"] == "failed: no 20 updates: no GPU" and programs.ended == ["on"]
    assert "failed: no 20 updates" in switch_rows([row])


def test_switch_that_there_is_not_is_refused(capsys):
    with pytest.raises(SystemExit):
        gpu_pong.main(["--switch", "core-each", "--only", "seed"])
    assert "--switch has 'core-each'; there are bf16, " in capsys.readouterr().err


def test_output_can_be_asked_twice(tmp_path):
    """Of one that does not begin both who waits for it and who ends it ask."""
    held = gpu_pong.Held(Workload("none", CARTPOLE, "no_such_preset"), str(tmp_path))
    with pytest.raises(RuntimeError, match="no_such_preset"):
        held.begin(0.0)
    assert "no_such_preset" in held.end()


@pytest.mark.slow
def test_real_programs_take_turns():
    """On a CPU, where the switch does nothing: the one is stopped while the other is measured, and both end."""
    import psutil

    case = Workload("tiny", CARTPOLE, "impala", {"device": "cpu", "actors": 1, "net.torso": "mlp"})
    row = gpu_pong.switched(case, "core_each", turns=2, seconds=2.0)
    assert len(row["turns"]["on"]) == len(row["turns"]["off"]) == 2 and row["ratio"] > 0
    assert not [one for one in psutil.Process().children() if "training" in " ".join(one.cmdline())]
