"""Comparisons that know noise when they see it, and say what is missing."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path

import pytest

from shoal.bench import compare
from shoal.bench.compare import Difference, comparison, differences, together
from shoal.bench.result_columns import ResultColumn
from shoal.bench.results_folder import ResultsFolder
from tests.bench import false_alarms
from tests.bench.rows import SESSION, learning, results_with, row, speeds

ROOT = Path(__file__).parents[2]


def judged(a, b):
    return {(d.group, d.column.name): d.judgement() for d in differences(a, b)}


def test_difference_is_noise_better_or_worse(tmp_path):
    a = {"calm": speeds("calm", [100.0, 101.0, 99.0]), "wild": speeds("wild", [50.0, 100.0, 150.0]),
         "few": speeds("few", [1.0, 2.0]), "gone": speeds("gone", [1.0] * 3)}
    b = {"calm": speeds("calm", [120.0, 121.0, 119.0]), "wild": speeds("wild", [60.0, 110.0, 160.0]),
         "few": speeds("few", [9.0, 9.0]), "new": speeds("new", [1.0] * 3)}
    found = judged(a, b)
    assert found["calm", "env_steps_per_second"] == "better" and found["wild", "env_steps_per_second"] == "noise"
    assert found["calm", "startup_seconds"] == "noise"  # the very same
    assert found["few", "env_steps_per_second"].startswith("too few runs")
    assert judged(b, a)["calm", "env_steps_per_second"] == "WORSE"
    text = comparison(results_with(tmp_path / "a", chain(*a.values())), results_with(tmp_path / "b", chain(*b.values())))
    assert "1.20 (1.1" in text and "Only in A: gone." in text and "Only in B: new." in text and "geometric mean" in text


def test_few_runs():
    """Three runs of which one overlaps: the bootstrap alone would call it a difference."""
    a, b = {"c": speeds("c", [100.0, 101.0, 111.0])}, {"c": speeds("c", [110.0, 121.0, 120.0])}
    (difference,) = [d for d in differences(a, b) if d.column.name == "env_steps_per_second"]
    assert difference.ratio.excludes(1.0) and difference.judgement() == "noise"


def test_less_is_better():
    """In some columns less is better; failed runs do not count."""
    a = {"c": [learning("c", s, 5000 + s) for s in range(3)]}
    b = {"c": [*(learning("c", s, 2500 + s) for s in range(3)), row("c", 9, error="x", env_steps_to_threshold=10**9)]}
    assert judged(a, b)["c", "env_steps_to_threshold"] == "better"


def test_negative_returns():
    """Negative returns are compared without a ratio."""
    a = {"p": [row("p", s, final_return=-300.0 - s) for s in range(4)]}
    b = {"p": [row("p", s, final_return=-150.0 - s) for s in range(4)]}
    (difference,) = differences(a, b)
    assert difference.ratio is None and difference.judgement() == "better"


def test_nothing_in_common_is_said(tmp_path):
    text = comparison(results_with(tmp_path / "a", speeds("x", [1.0])), results_with(tmp_path / "b", speeds("y", [1.0])))
    assert "A and B have no case in common" in text


@pytest.mark.parametrize("operation", ["insert", "sample"])
def test_replay_operations_are_compared(operation):
    a = {"r": [row("r", s, rates={operation: 1e6 + s}) for s in range(3)]}
    b = {"r": [row("r", s, rates={operation: 2e6 + s}) for s in range(3)]}
    assert judged(a, b) == {("r", operation): "better"}


# ---------------------------------------------------------------------------------------------- what the means do not show
def lines_of(text, case):
    return {cells[1]: cells[2:] for line in text.splitlines()
            if line.startswith("|") and (cells := [cell.strip() for cell in line.strip("|").split("|")])[0] == case}


def test_case_whose_runs_all_failed_is_told(tmp_path):
    a = [learning(group, seed, 5000 + seed) for group in ("ppo", "seed") for seed in (1, 2, 3)]
    b = [{**one, "error": "boom"} if one["group"] == "ppo" else one for one in a]
    text = comparison(results_with(tmp_path / "a", a), results_with(tmp_path / "b", b))
    assert "- ppo: 0 of 3 runs in B (boom)" in text
    assert lines_of(text, "ppo") == {"reached 475": ["3 of 3", "0 of 3", "-", "WORSE"]}
    assert "6 of 6 in A, 3 of 6 in B" in text and lines_of(text, "seed")["reached 475"][-1] == "same"
    text = comparison(results_with(tmp_path / "c", speeds("x", [1.0] * 3)),
                      results_with(tmp_path / "d", [row("x", 1, error="boom")]))
    assert "- x: 0 of 1 run in B (boom)" in text and "A and B have no case in common" in text


def test_late_arrivals_are_waited_for(tmp_path):
    """B's one run that got there was quick: the mean of those who did is no answer."""
    a = [learning("c", seed, 9000 + seed) for seed in range(4)]
    b = [learning("c", seed, 1000 + seed if seed else None) for seed in range(4)]
    table = lines_of(comparison(results_with(tmp_path / "a", a), results_with(tmp_path / "b", b)), "c")
    assert table["reached 475"] == ["4 of 4", "3 of 4", "-", "WORSE"]
    for what in ("steps to threshold", "s to threshold"):
        assert table[what][-2:] == ["-", "not judged: reached 4 of 4 and 3 of 4"]
    back = lines_of(comparison(ResultsFolder(tmp_path / "b"), ResultsFolder(tmp_path / "a")), "c")
    assert back["reached 475"][-1] == "better"


def test_too_few_runs_are_judged_nowhere(tmp_path):
    a = [one for name in "xyz" for one in speeds(name, [100.0])]
    b = [one for name in "xyz" for one in speeds(name, [90.0])]
    text = comparison(results_with(tmp_path / "a", a), results_with(tmp_path / "b", b))
    assert lines_of(text, "env steps/s") == {"3": ["0.90", "0.90", "0.00", "too few runs (3 are needed)"]}
    assert lines_of(text, "x")["env steps/s"][-2:] == ["0.90", "too few runs (1 and 1; 3 are needed)"]
    more = [*b, *speeds("x", [90.0, 91.0, 92.0]), *speeds("y", [90.0, 91.0, 92.0])]
    first = [*a, *speeds("x", [100.0, 101.0, 102.0]), *speeds("y", [100.0, 101.0, 102.0])]
    text = comparison(results_with(tmp_path / "c", first), results_with(tmp_path / "d", more))
    assert re.search(r"\| env steps/s +\| 2 of 3 +\| 0.90 \(0.89 - 0.91\) .*WORSE", text)


def test_probability_of_improvement():
    """6.5 of 9 pairs are less in B, a tie counted half. Of what is neither better nor worse nothing is said."""
    def line(better):
        column = ResultColumn("x", "x", "", better=better)
        return together([Difference(case, column, [200.0, 210.0, 220.0], [100.0, 110.0, 220.0]) for case in "cd"])

    assert line(-1)[4] == "0.72" and line(1)[4] == "0.28" and line(0)[4] == "-"


def test_interquartile_mean():
    """B's runs are all alike, so what is not known comes from A alone."""
    column = ResultColumn("x", "x", "", better=1)
    pairs = ([100.0, 110.0, 120.0], [110.0] * 3), ([110.0] * 3, [100.0, 110.0, 120.0])
    for a, b in pairs:
        _, _, _, middle, *_ = together([Difference(case, column, a, b) for case in "cd"])
        value, low, high = map(float, re.findall(r"[\d.]+", middle))
        assert value == 1.0 and low < 0.97 and high > 1.03


# ---------------------------------------------------------------------------------------------- of what
def test_other_settings_are_said(tmp_path):
    def side(name, **settings):
        rows = speeds("c", [1.0, 2.0, 3.0])
        return results_with(tmp_path / name, [{**one, "settings": {"max_seconds": 6.0, **settings}} for one in rows])

    text = comparison(side("a", **{"overrides.lr": 1}), side("b", **{"overrides.lr": 2, "limit": True}))
    assert "- c: overrides.lr 1 and 2, limit not given and True" in text and "noise (other settings)" in text
    assert "Settings in" not in comparison(side("c"), side("d"))
    x, y = (results_with(tmp_path / mark, [{**one, "key": f"c #{mark}"} for one in speeds("c", [1.0] * 3)]) for mark in "xy")
    assert "- c: not the same; an older" in comparison(x, y) and "Settings in" not in comparison(x, x)


def test_other_suites_are_said(tmp_path):
    books = []
    for variant in ("full", "quick"):
        books.append(ResultsFolder(tmp_path / variant))
        books[-1].append("session", {**SESSION, "variant": variant})
        books[-1].append("row", row("c", 1, env_steps_per_second=5.0))
    assert "A is A <title> (full), B is A <title> (quick)" in comparison(*books)
    assert "different" not in comparison(books[0], books[0])


def test_committed_results_can_be_compared():
    """In a moment: every interval once, all its draws together."""
    folder = ROOT / "docs" / "results" / "learning-suite"
    text = comparison(ResultsFolder.open(folder), ResultsFolder.open(folder))
    assert "better" not in text and "WORSE" not in text and text.count("noise") > 200 and "settings" not in text


def test_an_interval_is_computed_once(monkeypatch):
    made = []
    real = compare.bootstrap
    monkeypatch.setattr(compare, "bootstrap", lambda *given: made.append(1) or real(*given))
    (difference,) = differences(*({"c": [row("c", s, env_steps_per_second=speed + s) for s in range(3)]} for speed in (1.0, 5.0)))
    assert difference.judgement() and difference.cell() and difference.judgement() and len(made) == 1


# ---------------------------------------------------------------------------------------------- false alarms
@pytest.mark.parametrize("noise", false_alarms.DRAWS)
@pytest.mark.parametrize("runs", [3, 5])
def test_equal_programs(noise, runs):
    """Equal programs are told apart once in ten times."""
    alone, rule = false_alarms.rates(noise, runs, 400)
    assert rule < 0.125 and alone > rule + 0.02
    assert false_alarms.over_all(noise, runs, 4, 200) < 0.125


def said_of(runs):
    page = (ROOT / "docs" / "benchmark.md").read_text()
    return re.findall(r"[\d.]+", re.search(rf"\| {runs} runs a side \|(.*)", page)[1])


def test_the_module_says_what_the_page_says():
    (rule3, alone3, *_), (rule5, alone5, *_), words = said_of(3), said_of(5), " ".join(compare.__doc__.split())
    assert f"in {alone3} % of all cases with three runs a side and in {alone5} % with five" in words
    assert f"with the test in {rule3} % and {rule5} %" in words


@pytest.mark.slow
@pytest.mark.parametrize("runs", false_alarms.RUNS)
def test_the_page_says_what_the_script_finds(runs):
    assert said_of(runs) == false_alarms.figures(runs)
