"""What is made of results.jsonl: tables and the offline report."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from benchmarks import html_report
from benchmarks.html_report import modelled, page
from shoal.bench.result_columns import results_table, where_line
from shoal.bench.results_folder import ResultsFolder, write_files
from shoal.telemetry.svg import Polyline, lines, log_ticks, nice_ticks
from tests.bench.rows import SESSION, learning, results_with, row

LIMIT = {"env_steps_per_second": 1000.0, "e": 4000.0, "i": 4000.0, "l": 2000.0, "passes": 1, "cores": 2}


def test_misses_and_failures(tmp_path):
    """The table marks misses and says what failed."""
    book = results_with(tmp_path, [learning("good", 1, 5000), learning("good", 2, 7000), learning("bad", 1, None),
                             row("peer", 1, error="could not be installed: no wheel")])
    text = results_table(book.groups())
    table = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("|")}
    assert "reached 475: 2 of 2" in table["good"] and "6 k (5 k - 7 k)" in table["good"]
    assert "🔴 missed 475: 1 of 1" in table["bad"] and "no wheel" in text and "nan" not in text
    assert "efficiency" not in text  # a column that nobody fills is not shown


def test_replay_has_a_table_of_operations(tmp_path):
    book = results_with(tmp_path, [row("small, shoal", 1, rates={"insert": 1e6, "sample": 2e6}),
                             row("small, cpprb", 1, rates={"insert": 5e5})])
    text = results_table(book.groups())
    assert "| insert | sample |" in text and "1 M" in text and "500 k" in text


def test_the_report_needs_nothing_but_itself(tmp_path):
    rows = [row("impala E-v0, 1 actors", s, case="impala E-v0", asked_actors=1, env_steps_per_second=400.0 + s, limit=LIMIT,
                efficiency=0.4) for s in (1, 2)]
    rows += [row("impala E-v0, 2 actors", 1, case="impala E-v0", asked_actors=2, env_steps_per_second=700.0, limit=LIMIT,
                 efficiency=0.7)]
    rows += [learning("ppo E-v0", 1, 5000), learning("ppo E-v0", 2, None), row("sb3 <b>", 1, error="broke & stopped")]
    text = page("A <title>", "where", results_with(tmp_path, rows).groups())
    assert not re.search(r"https?://|<script|<link|src=|@import|url\(", text)
    assert "A &lt;title&gt;" in text and "broke &amp; stopped" in text and "<b>sb3" not in text
    drawings = re.findall(r"<svg.*?</svg>", text, re.S)
    assert len(drawings) == 4  # bars, scaling, one learning curve, the profile
    for drawing in drawings:
        ElementTree.fromstring(drawing)
        assert "nan" not in drawing and "inf" not in drawing
    assert re.search(r"class=bad>ppo E-v0<", text) and "1 of 2 runs reach it" in text
    assert "Interquartile mean of the efficiency" in text
    assert ">parts alone<" in text and ">model<" not in text  # nothing to calibrate it with


def test_curve_of_the_model(tmp_path, monkeypatch):
    """The model is drawn where it says something."""
    monkeypatch.setattr(html_report, "predicted", lambda by_actors: [(float(n), 300.0 * n) for n in by_actors])
    rows = [row(f"impala E-v0, {n} actors", 1, case="impala E-v0", asked_actors=n, env_steps_per_second=350.0 * n) for n in (1, 2)]
    text = page("T", "where", results_with(tmp_path, rows).groups())
    assert text.count(">model<") == 2 and ">parts alone<" not in text  # the line and the legend; no limit was measured


def test_the_model_of_scaling_by_hand():
    """e = i = 2000 and l = 1000 per core: an actor makes 1000 a second, the learner takes 1000, the cores allow 1000."""
    assert modelled({**LIMIT, "env_steps_per_second": 5000.0}, 1) == 1000.0
    assert modelled({**LIMIT, "l": 20_000.0, "env_steps_per_second": 5000.0}, 4) == 4000.0
    assert modelled({**LIMIT, "l": 20_000.0, "passes": 4, "env_steps_per_second": 5000.0}, 4) == 2500.0
    assert modelled({**LIMIT, "l": 20_000.0}, 8) == 1000.0


def test_the_model_of_scaling_with_a_gpu():
    """e = 2000 per core, i and l of the one device, whatever the cores: more actors step more until the limit is reached."""
    limit = {**LIMIT, "e": 8000.0, "i": 4000.0, "l": 12_000.0, "cores": 4, "gpu": True, "env_steps_per_second": 3000.0}
    assert [modelled(limit, actors) for actors in (1, 2, 4)] == [2000.0, 3000.0, 3000.0]


def test_scaling_bound_of_the_case(tmp_path, monkeypatch):
    """The parts differ from run to run: their medians make one bound, which does not fall where there are more actors."""
    rates = {1: 4000.0, 2: 8000.0, 4: 3000.0, 8: 5000.0}
    rows = [row(f"c, {n} actors", 1, case="c", asked_actors=n, env_steps_per_second=9.0 * n, limit={
        **LIMIT, "env_steps_per_second": rate / 4, "e": rate, "i": rate, "l": rate / 2}) for n, rate in rates.items()]
    rows.append(row("c, 8 actors", 2, case="c", asked_actors=8, error="stopped", limit={**LIMIT, "e": 9e9, "i": 9e9, "l": 9e9}))
    drawn = []
    monkeypatch.setattr(html_report, "lines", lambda name, chart, *words, **more: drawn.extend(chart) or "")
    page("T", "where", results_with(tmp_path, rows).groups())
    (bound,) = [one.points for one in drawn if one.name == "parts alone"]
    assert bound == [(float(n), pytest.approx(1125.0)) for n in rates]  # of 4500, 4500 and 2250 on two cores


def test_ticks_are_round_and_inside():
    assert nice_ticks(0.0, 10.0) == [0, 2, 4, 6, 8, 10]
    assert nice_ticks(-300.0, 0.0) == [-300, -200, -100, 0]
    assert lines("empty", [Polyline("a", [])], "x", "y") == ""
    ElementTree.fromstring(lines("one point", [Polyline("a", [(0.0, 0.0)], dots=True)], "x", "y", threshold=-5.0))
    assert log_ticks(3.2, 6.5) == [1e4, 1e5, 1e6] and log_ticks(3.2, 4.4) == [2e3, 5e3, 1e4, 2e4]
    assert log_ticks(3.01, 3.02) == [10**3.01, 10**3.02]


# ---------------------------------------------------------------------------------------------- what must not count
def test_failed_run_does_not_count(tmp_path):
    """Neither in a cell nor in a plot: it may have stopped at any moment."""
    broken = {"error": "stopped", "env_steps_per_second": 9e6, "limit": LIMIT, "observed": {"batch": 1}}
    rows = [row("a", 1, env_steps_per_second=1000.0), row("a", 2, **broken), learning("b", 1, 5000),
            {**learning("b", 2, 50), "error": "stopped"}, row("buffer", 1, rates={"insert": 1e3}),
            row("buffer", 2, rates={"insert": 7e6}, error="stopped")]
    groups = results_with(tmp_path, rows).groups()
    for text in (results_table(groups), page("T", "where", groups)):
        assert "9 M" not in text and "7 M" not in text and "3.5 M" not in text and "4.5 M" not in text
        assert "1 k" in text and "5 k" in text and " k (" not in text
    assert "1 of 2 runs reach it" in page("T", "where", groups) and "seed 2</title>" not in page("T", "where", groups)


def test_failed_replay_buffer(tmp_path):
    """A peer that could not be installed has no rates; it has no preset and no peer either."""
    gone = row("small, cpprb", 1, preset=None, peer=None, error="could not be installed")
    groups = results_with(tmp_path, [row("small, shoal", 1, preset=None, peer=None, rates={"insert": 1e6}), gone]).groups()
    text = results_table(groups)
    assert "| small, cpprb | -" in text and "| runs" not in text and "could not be installed" in text
    text = page("T", "where", groups)
    assert text.count("<table>") == 1 and "class=bad>small, cpprb<" in text
    groups = results_with(tmp_path / "all", [gone]).groups()
    assert "| small, cpprb |" in results_table(groups) and "<table>" in page("T", "where", groups)


def test_bar_in_a_name_does_not_end_the_cell(tmp_path):
    head, _, body = results_table(results_with(tmp_path, [row("a|b", 1, env_steps_per_second=5.0)]).groups()).splitlines()[:3]
    assert body.startswith("| a\\|b |") and head.count("|") == body.replace("\\|", "").count("|")


# ---------------------------------------------------------------------------------------------- when and where
def test_machine_commit_and_date(tmp_path):
    """A suite that was interrupted went on elsewhere."""
    book = results_with(tmp_path, [row("a", 1), row("b", 1)])
    book.append("session", {**SESSION, "date": "2026-02-02T00:00:00Z"})
    book.append("row", row("a", 2))
    line = where_line(book.sessions(), book.rows())
    assert line.startswith("2026-01-01T00:00:00Z and 2026-02-02T00:00:00Z, commit 0123456789, 2 cores of A CPU")
    other = {"cores": 64, "cpu": "Other CPU", "gpus": ["H200"], "load": [0.1]}
    book.append("session", {**SESSION, "date": "2027-01-01T00:00:00Z", "commit": "f" * 40, "machine": other})
    book.append("row", row("b", 2))
    book.append("row", row("b", 3))
    first, second = where_line(book.sessions(), book.rows()).splitlines()
    assert first.startswith("- 3 runs (a; b): 2026-01-01") and "0123456789" in first and "2 cores of A CPU" in first
    assert second.startswith("- 2 runs (b): 2027-01-01") and "ffffffffff, 64 cores of Other CPU, H200" in second
    table = write_files(book)
    assert "64 cores of Other CPU" in table and "64 cores of Other CPU" in (tmp_path / "report.html").read_text()
    book.append("session", {**SESSION, "again": ["a", "b"]})
    book.append("row", row("a", 1))
    assert where_line(book.sessions(), book.rows()).startswith("2026-01-01T00:00:00Z, commit")  # what still counts


def test_results_without_a_session_say_so(tmp_path):
    book = ResultsFolder(tmp_path / "results")
    book.append("row", row("a", 1, env_steps_per_second=5.0))
    assert "the session's line is lost" in write_files(book)
    assert (tmp_path / "results" / "results.md").read_text().startswith("# results\n")


# ---------------------------------------------------------------------------------------------- plots
def test_the_profile_has_cases_of_all_sizes(tmp_path):
    """On a linear axis a case of ten million steps would push one of ten thousand to the edge."""
    rows = [learning("small", 1, 10_000), learning("middle", 1, 100_000), learning("large", 1, 10**7)]
    text = page("T", "where", results_with(tmp_path, rows).groups())
    (drawing,) = [one for one in re.findall(r"<svg.*?</svg>", text, re.S) if "all cases and seeds" in one]
    points = [tuple(map(float, one.split(","))) for one in re.search(r'points="(.*?)"', drawing)[1].split()]
    left, right = points[0][0], points[-1][0]
    steps = [x for (x, y), (_, after) in pairwise(points) if after != y]
    assert [(x - left) / (right - left) for x in steps] == [0.0, *(pytest.approx(share, abs=0.02) for share in (0.33, 0.99))]
    assert ">10 k<" in drawing and ">10 M<" in drawing


def test_a_curve_without_the_model_says_why(tmp_path):
    def curve(*counts, **values):
        rows = [row(f"c, {n} actors", 1, case="c", asked_actors=n, env_steps_per_second=9.0 * n, **values) for n in counts]
        return page("T", "where", results_with(tmp_path / str(counts), rows).groups())

    assert "there is no finished run of 2." in curve(1, 4, 8) and "no finished run of 1 or 2." in curve(4, 8)
    assert "cannot calibrate it" in curve(1, 2)


def test_limit_beside_throughput():
    """A throughput has its limit beside it or a word that it has none."""
    plain = {"error": None, "seed": 1, "env_steps_per_second": 60.0}
    limited = {**plain, "limit": {"env_steps_per_second": 240.0}, "efficiency": 0.25}
    table = results_table({"a": [limited], "b": [plain]})
    assert "| limit" in table and "240" in table and "25 %" in table
    assert "The composed limit was not measured in this run beside: b." in table
    assert "The composed limit was not measured in this run." in results_table({"a": [plain], "b": [plain]})
    assert "not measured" not in results_table({"a": [limited]})


def test_layout_that_auto_chose():
    """The layout that auto chose is in the table."""
    layout = {"chosen": "1 actor of 1024 environments in the learner's process", "how": "by trying", "tried": {}}
    plain = {"error": None, "seed": 1, "env_steps_per_second": 60.0}
    words = "- a: 1 actor of 1024 environments in the learner's process (2 of 3 runs)"
    assert words in results_table({"a": [{**plain, "layout": layout}, {**plain, "layout": layout}, plain]})
