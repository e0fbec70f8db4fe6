"""What is made of results.jsonl: tables, the offline report, and comparisons that know noise when they see it."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path
from xml.etree import ElementTree

import pytest

from shoal.bench import html
from shoal.bench.columns import results_table
from shoal.bench.compare import comparison, differences
from shoal.bench.html import modelled, page
from shoal.bench.ledger import Ledger
from shoal.bench.svg import Line, lines, nice_ticks

LIMIT = {"env_steps_per_second": 1000.0, "e": 4000.0, "i": 4000.0, "l": 2000.0, "passes": 1, "cores": 2}
SESSION = {"suite": "t", "title": "A <title>", "date": "2026-01-01T00:00:00Z", "commit": "0123456789abcdef",
           "uncommitted_changes": False, "machine": {"cores": 2, "cpu": "A CPU", "load": [0.1, 0.1, 0.1]},
           "versions": {"torch": "2.13.0", "ale-py": "not installed"}}


def row(group, seed, **values):
    return {"key": f"{group} {seed}", "group": group, "case": group, "seed": seed, "env": "E-v0", "error": None,
            "until_return": None, "asked_actors": None, "load": 0.5, **values}


def ledger(folder: Path, rows) -> Ledger:
    book = Ledger(folder)
    book.append("session", SESSION)
    for one in rows:
        book.append("row", one)
    return book


def learning(group, seed, steps, goal=475.0):
    reached = {"env_steps_to_threshold": steps, "seconds_to_threshold": None if steps is None else steps / 1000}
    return row(group, seed, until_return=goal, final_return=480.0 if steps else 100.0,
               curve=[[100, 1.0, 50.0], [900, 2.0, 300.0]], **reached)


def test_the_table_marks_misses_and_says_what_failed(tmp_path):
    book = ledger(tmp_path, [learning("good", 1, 5000), learning("good", 2, 7000), learning("bad", 1, None),
                             row("peer", 1, error="could not be installed: no wheel")])
    text = results_table(book.groups())
    table = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("|")}
    assert "reached 475: 2 of 2" in table["good"] and "6 k (5 k - 7 k)" in table["good"]
    assert "🔴 missed 475: 1 of 1" in table["bad"] and "no wheel" in text and "nan" not in text
    assert "efficiency" not in text  # a column that nobody fills is not shown


def test_replay_has_a_table_of_operations(tmp_path):
    book = ledger(tmp_path, [row("small, shoal", 1, rates={"insert": 1e6, "sample": 2e6}),
                             row("small, cpprb", 1, rates={"insert": 5e5})])
    text = results_table(book.groups())
    assert "| insert | sample |" in text and "1 M" in text and "500 k" in text


def test_the_report_needs_nothing_but_itself(tmp_path):
    rows = [row("impala E-v0, 1 actors", s, case="impala E-v0", asked_actors=1, env_steps_per_second=400.0 + s, limit=LIMIT,
                efficiency=0.4) for s in (1, 2)]
    rows += [row("impala E-v0, 2 actors", 1, case="impala E-v0", asked_actors=2, env_steps_per_second=700.0, limit=LIMIT,
                 efficiency=0.7)]
    rows += [learning("ppo E-v0", 1, 5000), learning("ppo E-v0", 2, None), row("sb3 <b>", 1, error="broke & stopped")]
    text = page("A <title>", "where", ledger(tmp_path, rows).groups())
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


def test_the_model_is_drawn_where_it_says_something(tmp_path, monkeypatch):
    monkeypatch.setattr(html, "predicted", lambda by_actors: [(float(n), 300.0 * n) for n in by_actors])
    rows = [row(f"impala E-v0, {n} actors", 1, case="impala E-v0", asked_actors=n, env_steps_per_second=350.0 * n) for n in (1, 2)]
    text = page("T", "where", ledger(tmp_path, rows).groups())
    assert text.count(">model<") == 2 and ">parts alone<" not in text  # the line and the legend; no limit was measured


def test_the_model_of_scaling_by_hand():
    """e = i = 2000 and l = 1000 per core: an actor makes 1000 a second, the learner takes 1000, the cores allow 1000."""
    assert modelled({**LIMIT, "env_steps_per_second": 5000.0}, 1) == 1000.0
    assert modelled({**LIMIT, "l": 20_000.0, "env_steps_per_second": 5000.0}, 4) == 4000.0
    assert modelled({**LIMIT, "l": 20_000.0, "passes": 4, "env_steps_per_second": 5000.0}, 4) == 2500.0
    assert modelled({**LIMIT, "l": 20_000.0}, 8) == 1000.0


def test_ticks_are_round_and_inside():
    assert nice_ticks(0.0, 10.0) == [0, 2, 4, 6, 8, 10]
    assert nice_ticks(-300.0, 0.0) == [-300, -200, -100, 0]
    assert lines("empty", [Line("a", [])], "x", "y") == ""
    ElementTree.fromstring(lines("one point", [Line("a", [(0.0, 0.0)], dots=True)], "x", "y", threshold=-5.0))


# ---------------------------------------------------------------------------------------------- compare
def speeds(group, values):
    return [row(group, seed, env_steps_per_second=value, startup_seconds=2.0) for seed, value in enumerate(values)]


def judged(a, b):
    return {(d.group, d.column.name): d.judgement() for d in differences(a, b)}


def test_a_difference_is_noise_better_or_worse(tmp_path):
    a = {"calm": speeds("calm", [100.0, 101.0, 99.0]), "wild": speeds("wild", [50.0, 100.0, 150.0]),
         "few": speeds("few", [1.0, 2.0]), "gone": speeds("gone", [1.0] * 3)}
    b = {"calm": speeds("calm", [120.0, 121.0, 119.0]), "wild": speeds("wild", [60.0, 110.0, 160.0]),
         "few": speeds("few", [9.0, 9.0]), "new": speeds("new", [1.0] * 3)}
    found = judged(a, b)
    assert found["calm", "env_steps_per_second"] == "better" and found["wild", "env_steps_per_second"] == "noise"
    assert found["calm", "startup_seconds"] == "noise"  # the very same
    assert found["few", "env_steps_per_second"].startswith("too few runs")
    assert judged(b, a)["calm", "env_steps_per_second"] == "WORSE"
    text = comparison(ledger(tmp_path / "a", chain(*a.values())), ledger(tmp_path / "b", chain(*b.values())))
    assert "1.20 (1.1" in text and "Only in A: gone." in text and "Only in B: new." in text and "geometric mean" in text


def test_with_few_runs_the_ranges_must_not_overlap():
    """Three runs of which one overlaps: the bootstrap alone would call it a difference."""
    a, b = {"c": speeds("c", [100.0, 101.0, 111.0])}, {"c": speeds("c", [110.0, 121.0, 120.0])}
    (difference,) = [d for d in differences(a, b) if d.column.name == "env_steps_per_second"]
    assert difference.ratio().excludes(1.0) and difference.judgement() == "noise"


def test_less_is_better_where_it_is_and_failed_runs_do_not_count():
    a = {"c": [learning("c", s, 5000 + s) for s in range(3)]}
    b = {"c": [*(learning("c", s, 2500 + s) for s in range(3)), row("c", 9, error="x", env_steps_to_threshold=10**9)]}
    assert judged(a, b)["c", "env_steps_to_threshold"] == "better"


def test_negative_returns_are_compared_without_a_ratio():
    a = {"p": [row("p", s, final_return=-300.0 - s) for s in range(4)]}
    b = {"p": [row("p", s, final_return=-150.0 - s) for s in range(4)]}
    (difference,) = differences(a, b)
    assert difference.ratio() is None and difference.judgement() == "better"


def test_nothing_in_common_is_said(tmp_path):
    text = comparison(ledger(tmp_path / "a", speeds("x", [1.0])), ledger(tmp_path / "b", speeds("y", [1.0])))
    assert "nothing that both have measured" in text


@pytest.mark.parametrize("operation", ["insert", "sample"])
def test_replay_operations_are_compared(operation):
    a = {"r": [row("r", s, rates={operation: 1e6 + s}) for s in range(3)]}
    b = {"r": [row("r", s, rates={operation: 2e6 + s}) for s in range(3)]}
    assert judged(a, b) == {("r", operation): "better"}
