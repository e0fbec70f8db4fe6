"""The developers' results: files, their tables, and the pages that show them."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks import feed_tables as feed
from benchmarks import performance_page
from benchmarks.gpu_pong import phases
from benchmarks.means import means_tables
from benchmarks.race import OURS, race_table
from benchmarks.results import insert, origins, save, with_earlier_rows
from benchmarks.startup import GOALS, SHIPPED, startup_tables
from shoal.bench import machine
from shoal.bench.text_tables import UNMEASURED


def results(**more):
    about = {"date": "2026-01-01T00:00:00Z", "commit": "0123456789abcdef", "uncommitted_changes": False,
             "machine": {"cores": 2, "cpu": "A CPU", "load": [0.1, 0.1, 0.1]}, "versions": {"torch": "2.13.0+cpu"}}
    return {**about, **more}


def startup_run(actors, seconds, mb):
    return {"actors": actors, "seconds": seconds, "error": None, "load": 0.5, "actor_mb": [mb] * actors}


def test_startup_tables():
    """Startup tables judge by medians and the largest actor."""
    runs = [startup_run(2, 3.0, 60.0), startup_run(16, 5.0, 40.0), startup_run(2, 3.5, 60.0), startup_run(16, 9.0, 151.0)]
    text = startup_tables(results(goals=GOALS, runs=runs, parts={"torch": [1.0, 2.0]}))
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("|")}
    few = rows["first environment step, 2 actors (s)"]
    assert "3.25 (3.00, 3.50)" in few and "yes" in few
    assert "2.15" in rows["16 actors / 2 actors, medians"] and "no" in rows["16 actors / 2 actors, medians"]
    assert "151" in rows["largest of 16 actors, MB (PSS)"] and "no " in rows["largest of 16 actors, MB (PSS)"].split("|")[-2]
    shipped = [{"case": case, "when": when, "seconds": seconds, "error": None} for case in SHIPPED
               for when, seconds in (("first", 14.0), ("calibrated", 6.0))]
    text = startup_tables(results(goals=GOALS, runs=runs, shipped=shipped, parts={"torch": [1.0, 2.0]}))
    rows = [line for line in text.splitlines() if "`shoal train" in line]
    assert len(rows) == 2 * len(SHIPPED)
    assert all(("yes" in row) is ("nothing known" in row) and ("6.00" in row) is ("nothing known" not in row) for row in rows)


def test_means_tables():
    """Means tables have ratios of the same round."""
    row = {"name": "threads", "without": "many", "with": "one", "unit": "frames/s", "note": "", "off": [1.0, 10.0],
           "on": [2.0, 30.0]}
    assert "2.50 (2.00 - 3.00)" in means_tables(results(means=[row]))


def test_feed_tables():
    """Feed tables judge the first case by medians."""

    def way(updates, idle, waits):
        return {"updates_per_second": updates, "learner_idle": idle, "env_steps_per_second": 5e3, "actor_waits": waits,
                "actor_hands_over": 0.02, "actor_makes_items": 0.1}

    turns = [{"table": way(table, idle, 0.01), "memory": way(100.0, 0.0, 0.01), "alone": way(110.0, 0.0, 0.0)}
             for table, idle in ((95.0, 0.02), (80.0, 0.09), (93.0, 0.06))]
    cases = [{"name": name, "load": 1.0, "turns": turns} for name in feed.CASES]
    text = feed.feed_tables(results(goals=feed.GOALS, seconds=6.0, cases=cases))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")]
    shown = {(row[0], row[1]): row[2:] for row in rows}
    first, second = feed.CASES
    assert shown[first, "learner idle"] == ["6.0% (2.0% - 9.0%)", "< 5%", "no"]
    assert shown[first, "updates/s, of those from memory"] == ["93.0% (80.0% - 95.0%)", ">= 90%", "yes"]
    assert shown[first, "actors: waiting for replay, handing items over"] == ["3.0% (3.0% - 3.0%)", "< 10%", "yes"]
    assert shown[second, "learner idle"][1:] == ["-", "-"], "it has no goal"


def test_page_shows_the_results_beside_it(tmp_path):
    """`python -m benchmarks.performance_page` would change nothing: what is committed belongs together."""
    page = tmp_path / "performance.md"
    page.write_text(performance_page.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    performance_page.write(page)
    shown = performance_page.PAGE.read_text(encoding="utf-8")
    assert page.read_text(encoding="utf-8") == shown, "run `python -m benchmarks.performance_page`"


def test_phases_keep_what_matters():
    assert phases({"actor": {"phases": {"env": 0.4, "write": 0.001}, "waits": {"unrolls": 0.2}}}) == {
        "actor": {"env": 0.4, "wait unrolls": 0.2}}


def test_the_page_is_generated(tmp_path):
    page = tmp_path / "page.md"
    others = "".join(f"<!-- {name}: begin -->\n<!-- {name}: end -->\n" for name in performance_page.SECTIONS if name != "means")
    page.write_text(f"# P\n<!-- means: begin -->\nold\n<!-- means: end -->\nrest\n{others}")
    performance_page.write(page, tmp_path)
    assert page.read_text().count("Not measured yet") == len(performance_page.SECTIONS) and "old" not in page.read_text()
    save("means.json", results(means=[]), tmp_path)
    performance_page.write(page, tmp_path)
    assert page.read_text().count("Not measured yet") == len(performance_page.SECTIONS) - 1
    assert "A CPU" in page.read_text() and "rest" in page.read_text()
    with pytest.raises(ValueError, match="needs the lines"):
        insert("no markers", "means", "x")


def test_stamps_of_several_runs():
    """Every row of a file of several runs has its own stamp."""
    old = results(means=[{"name": "threads"}, {"name": "pinning"}])  # from before rows had stamps
    new = results(date="2026-02-02T00:00:00Z", commit="fedcba9876543210", uncommitted_changes=True, means=[{"name": "threads"}])
    joined = with_earlier_rows(new, old, "means")
    assert [(row["name"], row["date"][:10], row["commit"][:4]) for row in joined["means"]] == [
        ("threads", "2026-02-02", "fedc"), ("pinning", "2026-01-01", "0123")]
    assert all(row["machine"] == "2 cores of A CPU, torch 2.13.0+cpu" and row["load"] == 0.1 for row in joined["means"])
    text = origins(joined, joined["means"])
    assert "- threads: 2026-02-02T00:00:00Z, commit fedcba9876 with uncommitted changes, 2 cores of A CPU" in text
    assert "- pinning: 2026-01-01T00:00:00Z, commit 0123456789, 2 cores of A CPU, torch 2.13.0+cpu (load 0.1)." in text
    third = with_earlier_rows(results(date="2026-03-03T00:00:00Z", means=[]), joined, "means")
    assert third["means"] == joined["means"]
    whole = with_earlier_rows(old, {}, "means")
    assert origins(whole, whole["means"]).startswith("2026-01-01T00:00:00Z, commit 0123456789, 2 cores"), "one line for one run"


def test_row_silent_on_changes():
    row = {"name": "threads", "date": "2026-01-01", "commit": "0123456789abcdef"}
    assert "commit 0123456789 (whether with uncommitted changes was not written down)." in origins(results(), [row])
    assert "commit 0123456789 with uncommitted changes." in origins(results(), [{**row, "uncommitted_changes": True}])
    assert "commit 0123456789." in origins(results(), [{**row, "uncommitted_changes": False}])


def test_throughput_without_limit():
    means = {"name": "pinning", "without": "off", "with": "on", "note": "", "off": [1.0], "on": [2.0]}
    assert UNMEASURED in means_tables(results(means=[{**means, "unit": "env steps/s"}]))
    assert UNMEASURED not in means_tables(results(means=[{**means, "unit": "unrolls/s"}]))


def test_the_race_is_judged_seed_by_seed():
    ours = [{"seconds": 3.5, "eval_return": 500.0, "error": None}] * 2
    theirs = [{"seconds": 7.0, "eval_return": 480.0, "error": None}, {"seconds": None, "eval_return": None, "error": None}]
    text = race_table(results(runs={OURS: ours, "SB3": theirs}))
    line = next(line for line in text.splitlines() if line.startswith("| SB3"))
    assert "0.50, -" in line and "7 s, 480, not reached" in line and "nan" not in text


def test_results_are_plain_json(tmp_path):
    path = save("x.json", {"a": math.nan, **machine.describe()}, tmp_path)
    loaded = json.loads(path.read_text())
    assert loaded["a"] is None and loaded["machine"]["cores"] >= 1
