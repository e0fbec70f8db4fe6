"""Console, metrics.jsonl, TensorBoard: each shows the same snapshot."""

import io
import json
import math
from pathlib import Path

import pytest

from benchmarks.metrics_page import metrics_page
from shoal.telemetry.console import Live, Plain, console, progress
from shoal.telemetry.outputs import JsonLines, jsonable, read_lines
from shoal.telemetry.snapshot import Reading, ReadingWindow
from shoal.telemetry.tensorboard import TensorBoard, scalars
from tests.telemetry.fakes import WIRES, Pages, second


@pytest.fixture
def shot() -> dict:
    pages, window = Pages("actor-0", "actor-1", "learner-0"), ReadingWindow()
    second(pages, busy=0.5, steps=500)
    window.push(Reading(0.0, pages.read(), WIRES))
    second(pages, busy=0.5, steps=500)
    pages["actor-0"].observe("episode_return", 21.5)
    window.push(Reading(1.0, pages.read(), WIRES))
    return {**window.snapshot(), "seconds": 61.0, "time": 1.0, "best_return": -math.inf, "lowest_return": math.inf,
            "verdict": "balanced: as an example", "training": True, "evaluating": ""}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_json_lines(tmp_path, shot):
    """metrics.jsonl is valid JSON without NaN, and a torn line does no harm."""
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path)
    sink.write(shot)
    sink.close()
    path.write_text(path.read_text() + '{"kind":"snap')  # killed while writing
    sink = JsonLines(path)
    sink.event({"kind": "restart", "role": "actor-1", "text": "killed"})
    sink.close()
    rows = read_lines(path)
    assert [row["kind"] for row in rows] == ["snapshot", "event"]
    assert rows[0]["eval_return"] is None and rows[0]["train_return"] == 21.5
    assert rows[1]["event"] == "restart" and rows[1]["role"] == "actor-1"
    assert "NaN" not in path.read_text()


def test_jsonable_keeps_milliseconds():
    assert jsonable(1794741528.7345) == 1794741528.735 or jsonable(1794741528.7345) == 1794741528.734


def test_jsonable_keeps_integers_whole():
    text = json.dumps(jsonable({"n": 123456789, "x": 1 / 3, "bad": [math.inf, None, True]}))
    assert text == '{"n": 123456789, "x": 0.333333, "bad": [null, null, true]}'


def test_tensorboard_round_trip(tmp_path, shot):
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    sink = TensorBoard(tmp_path)
    sink.write(shot)
    sink.close()
    events = list(EventFileLoader(str(next(tmp_path.iterdir()))).Load())
    values = {value.tag: value.tensor.float_val[0] for event in events for value in event.summary.value}
    assert values["return/train"] == 21.5 and values["speed/learner_idle"] == pytest.approx(0.5)
    assert "return/evaluation" not in values
    assert events[-1].step == shot["env_steps"]


def test_both_files_grow_slower_and_slower(tmp_path, shot, monkeypatch):
    """A snapshot a second for a day: all of the first five minutes, then fewer, down to one a minute, and the last one."""
    now = [0.0]
    monkeypatch.setattr("shoal.telemetry.outputs.time.monotonic", lambda: now[0])
    lines, board = JsonLines(tmp_path / "metrics.jsonl"), TensorBoard(tmp_path / "board")
    records = []
    monkeypatch.setattr(board, "_record", records.append)
    small = {"env_steps": 1, "train_return": 1.0}
    for moment in range(86_400):
        now[0] = float(moment)
        for output in (lines, board):
            output.write(small)
    written = len((tmp_path / "metrics.jsonl").read_text().splitlines())
    assert 300 < written < 3000 and len(records) == written + 1  # and the header
    for output in (lines, board):
        output.write({**small, "last": True})
    assert len(records) == written + 2
    lines.close()
    board.close()


def test_plain_lines_name_what_matters(shot):
    out = io.StringIO()
    sink = console("auto", out, "impala on CartPole-v1", {}, every_seconds=60)
    assert isinstance(sink, Plain)
    sink.write(shot)
    sink.write(shot)  # too soon for another line
    sink.event({"kind": "restart", "role": "actor-1", "text": "killed by SIGKILL"})
    lines = out.getvalue().splitlines()
    assert len(lines) == 3
    for word in ("1:01", "1,000 env steps", "return 21.5", "learner idle 50 %", "lag 1.0", "balanced"):
        assert word in lines[1]
    assert "restart: actor-1: killed" in lines[2]


def test_live_table_shows_the_same(shot):
    out = Terminal()
    sink = console("auto", out, "impala on CartPole-v1", {"max_env_steps": 2000}, every_seconds=5)
    assert isinstance(sink, Live)
    sink.write(shot)
    sink.close()
    for word in ("impala on CartPole-v1", "21.5", "1,000", "idle 50 %", "balanced: as an example", "1,000 of 2,000"):
        assert word in out.getvalue()


def test_cluster_is_shown_where_there_is_one(shot):
    shot |= {"nodes": 3.0, "object_store_mb": 12.34, "carried_mb_per_second": 45.6, "calls_per_second": 78.9}
    for out in (io.StringIO(), Terminal()):
        sink = console("auto", out, "impala on CartPole-v1", {}, every_seconds=5)
        sink.write(shot)
        sink.close()
        assert "3 nodes   object store 12.3 MB   45.6 MB/s in 79 calls/s" in out.getvalue()
    assert dict(scalars(shot))["cluster/object_store_mb"] == 12.34


def test_console_shows_the_algorithm(shot):
    """The console shows what the algorithm measures."""
    own = {"loss": 0.01234, "grad_norm": 1.5, "unknown": math.nan, "learning_rate": 6e-4, "luck": 12.0}
    shot["losses"] = own | {f"further_{i}": float(i) for i in range(20)}
    out = io.StringIO()
    console("plain", out, "", {}, every_seconds=5).write(shot)
    assert "lag 1.0  loss 0.0123   grad_norm 1.5  | balanced" in out.getvalue()
    out = Terminal()
    sink = console("live", out, "", {}, every_seconds=5)
    sink.write(shot)
    sink.close()
    lines = out.getvalue().splitlines()
    first = next(i for i, line in enumerate(lines) if "learning  " in line)
    assert "loss 0.0123   grad_norm 1.5   learning_rate 0.0006   luck 12 " in lines[first] and "unknown" not in out.getvalue()
    assert "further_2" in lines[first + 1] and "policy lag" in lines[first + 2], "two lines, and no more"
    shot["losses"] = {}
    assert "learning" not in written("live", Terminal(), shot) and "loss" not in written("plain", io.StringIO(), shot)


def written(mode: str, out: io.StringIO, shot: dict) -> str:
    sink = console(mode, out, "", {}, every_seconds=5)
    sink.write(shot)
    sink.close()
    return out.getvalue()


def test_plain_lines_wait_for_a_rate(shot):
    early = {**shot, "env_steps_per_second": math.nan}
    assert written("plain", io.StringIO(), early) == "\n" and "1,000 env steps (-/s)" in written(
        "plain", io.StringIO(), {**early, "last": True})


def test_tensorboard_groups(shot):
    """TensorBoard tells losses from what roles measure."""
    shown = dict(scalars({**shot, "losses": {"luck": 1.5}, "role_metrics": {"depth": 7.0}, "replay_size": 9.0}))
    assert (shown["loss/luck"], shown["role/depth"], shown["data/replay_size"]) == (1.5, 7.0, 9.0)


def test_no_console():
    assert console("none", io.StringIO(), "", {}, 1) is None


def test_progress_to_stop_conditions(shot):
    assert progress(shot, {"max_env_steps": 4000})[0] == pytest.approx(0.25)
    assert progress(shot, {"max_env_steps": 4000, "max_seconds": 122})[0] == pytest.approx(0.5)
    shot |= {"best_return": 250.0, "lowest_return": 20.0}
    share, words = progress(shot, {"until_return": 480.0})
    assert share == pytest.approx(0.5) and "250.0 of 480" in words
    assert progress(shot, {})[0] == 0.0


def test_the_page_of_metrics_is_current():
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert page.read_text(encoding="utf-8") == metrics_page(), "run: make docs"
