"""Marks to rates, results to tables, tables into the page."""

from __future__ import annotations

import json
import math
import sys

import pytest

from shoal.bench import __main__ as bench
from shoal.bench import feed_tables as feed
from shoal.bench import machine, report
from shoal.bench.cases import CASES
from shoal.bench.columns import results_table
from shoal.bench.limits import Cell, Layout, Limit
from shoal.bench.measure import Outcome, Spread, alternate, last_json, phases, rate, reported, start
from shoal.bench.peers import __main__ as peers
from shoal.bench.peers import on_ray
from shoal.bench.peers.__main__ import Yard, with_earlier
from shoal.bench.peers.install import PEERS
from shoal.bench.peers.lineup import DRIVERS, LINEUP, RACE, Runner
from shoal.bench.startup import GOALS
from shoal.bench.tables import LIMIT as LIMITED
from shoal.bench.tables import UNMEASURED, bench_tables, markdown, means_tables, peer_tables, short, spread, startup_tables

RUN = {"env_steps_per_second": 60.0, "error": None, "details": {
    "learner_idle": 0.25, "policy_lag": {"mean": 1.5, "p95": 2.0, "max": 3.0}, "startup_seconds": 2.0, "verdict": "balanced: so",
    "phases": {"actor": {"env": 0.5, "wait unrolls": 0.25}}}}
LIMIT = {"env_steps_per_second": 100.0, "passes": 1, **{part: {"frames_per_second": 300.0} for part in "eil"}}


def results(**more):
    about = {"date": "2026-01-01T00:00:00Z", "commit": "0123456789abcdef", "uncommitted_changes": False,
             "machine": {"cores": 2, "cpu": "A CPU", "load": [0.1, 0.1, 0.1]}, "versions": {"torch": "2.13.0+cpu"}}
    return {**about, **more}


def test_rate_leaves_out_the_warm_up():
    marks = [(0.0, 0), (1.0, 5), (2.0, 10), (3.0, 110), (4.0, 210)]
    assert rate(marks, 2.0) == pytest.approx(100.0)
    assert math.isnan(rate(marks, 4.0)) and math.isnan(rate([], 0.0))
    assert math.isnan(rate([(2.0, 10), (9.0, 10)], 2.0))  # a long update, and nothing else


def test_rate_goes_from_jump_to_jump():
    marks = [(float(second), 400 * (second // 4)) for second in range(15)]  # 100 a second, 400 at a time
    assert rate(marks, 2.0) == rate(marks, 4.0) == rate(marks[:-2], 2.0) == pytest.approx(100.0)


def test_spread_is_median_and_range():
    assert Spread.of([3.0, 1.0, math.nan, 2.0]) == Spread(2.0, 1.0, 3.0, 3)
    assert spread([1000.0, 3000.0, 2000.0]) == "2 k (1 k - 3 k)" and spread([]) == "-" and spread([None]) == "-"


def test_short_numbers():
    assert [short(x) for x in (512_345, 1_210, 348, 10.2e6, 0.53, None)] == ["512 k", "1.21 k", "348", "10.2 M", "0.53", "-"]


def test_markdown_is_aligned():
    lines = markdown(("a", "long head"), [["wide cell", "x"]]).splitlines()
    assert len({len(line) for line in lines}) == 1 and lines[0] == "| a         | long head |"


def test_bench_tables():
    case = {"name": "CartPole impala", "efficiency_goal": 0.6, "limits": [LIMIT, LIMIT], "runs": [RUN, RUN],
            "reference": [{**RUN, "env_steps_per_second": 50.0}]}
    failed = {"name": "Pong ppo", "efficiency_goal": None, "limits": [], "reference": [],
              "runs": [{"env_steps_per_second": None, "error": "there is no preset", "details": {}}]}
    text = bench_tables(results(cases=[case, failed]))
    row = next(line for line in text.splitlines() if line.startswith("| CartPole impala"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1] == "60 (60 - 60)" and cells[7] == "0.60 (0.60 - 0.60)" and cells[-1] == "1.20"
    assert "25 %" in text and "1.5 / 2 / 3" in text and "actor: env 50 %, wait unrolls 25 %" in text
    assert "- Pong ppo: 1 of 1 runs failed: there is no preset" in text and "nan" not in text


def test_peer_tables_say_what_failed():
    runs = {"shoal impala": [RUN], "SB3 PPO": [{**RUN, "env_steps_per_second": 6.0}],
            "RLlib PPO": [{"env_steps_per_second": None, "error": "could not be installed: no wheel", "details": {}}]}
    ours = [{"seconds": 3.5, "eval_return": 500.0, "error": None}] * 2
    race = {"env": "CartPole-v1", "goal": 475.0, "runs": {"shoal": ours, "SB3": [
        {"seconds": 7.0, "eval_return": 480.0, "error": None}, {"seconds": None, "eval_return": None, "error": None}]}}
    text = peer_tables(results(peers={"sb3": "stable-baselines3 2.9"}, scenes=[{"name": "CartPole-v1", "runs": runs}], race=race))
    assert "10.00" in next(line for line in text.splitlines() if line.startswith("| SB3 PPO"))
    assert "0.50, -" in next(line for line in text.splitlines() if line.startswith("| SB3  "))
    assert "no wheel" in text and "7 s, 480, not reached" in text and "nan" not in text


def test_the_page_misses_no_run_of_ray_that_was_made():
    """A sentence about a run without a rate is stale where every run has one."""
    scenes = machine.load("bench_ray.json")["scenes"]
    assert all(run["env_steps_per_second"] for scene in scenes for runs in scene["runs"].values() for run in runs)
    assert "has no rate" not in report.PAGE.read_text()


def test_the_page_is_generated(tmp_path):
    page = tmp_path / "page.md"
    others = "".join(f"<!-- {name}: begin -->\n<!-- {name}: end -->\n" for name in report.SECTIONS if name != "bench")
    page.write_text(f"# P\n<!-- bench: begin -->\nold\n<!-- bench: end -->\nrest\n{others}")
    report.write(page, tmp_path)
    assert page.read_text().count("Not measured yet") == len(report.SECTIONS) and "old" not in page.read_text()
    machine.save("bench.json", results(cases=[]), tmp_path)
    report.write(page, tmp_path)
    assert page.read_text().count("Not measured yet") == len(report.SECTIONS) - 1
    assert "A CPU" in page.read_text() and "rest" in page.read_text()
    with pytest.raises(ValueError, match="needs the lines"):
        report.insert("no markers", "bench", "x")


def startup_run(actors, seconds, mb):
    return {"actors": actors, "seconds": seconds, "error": None, "load": 0.5, "actor_mb": [mb] * actors}


def test_startup_tables_judge_by_medians_and_the_largest_actor():
    runs = [startup_run(2, 3.0, 60.0), startup_run(16, 5.0, 40.0), startup_run(2, 3.5, 60.0), startup_run(16, 9.0, 151.0)]
    text = startup_tables(results(goals=GOALS, runs=runs, parts={"torch": [1.0, 2.0]}))
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("|")}
    few = rows["first environment step, 2 actors (s)"]
    assert "3.25 (3.00, 3.50)" in few and "yes" in few
    assert "2.15" in rows["16 actors / 2 actors, medians"] and "no" in rows["16 actors / 2 actors, medians"]
    assert "151" in rows["largest of 16 actors, MB (PSS)"] and "no " in rows["largest of 16 actors, MB (PSS)"].split("|")[-2]


def test_means_tables_have_ratios_of_the_same_round():
    row = {"name": "threads", "without": "many", "with": "one", "unit": "frames/s", "note": "", "off": [1.0, 10.0],
           "on": [2.0, 30.0]}
    assert "2.50 (2.00 - 3.00)" in means_tables(results(means=[row]))


def test_feed_tables_judge_the_first_case_by_medians():
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


def ray_runs(*speeds, date="d"):
    return [{"env_steps_per_second": speed, "error": None if speed else "broken", "date": date} for speed in speeds]


def test_ray_tables_divide_within_a_round_by_the_faster_rllib():
    runs = {"shoal local, apart": ray_runs(100.0, 400.0, 100.0), "shoal ray, apart": ray_runs(80.0, 260.0, 60.0),
            "RLlib IMPALA": ray_runs(10.0, 100.0, None), "RLlib APPO": ray_runs(40.0, 20.0, 30.0)}
    text = on_ray.ray_tables(results(peers={"rllib": "ray 2.60"}, scenes=[{"name": "ALE/Pong-v5", "runs": runs}]))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")]
    assert ["shoal ray, apart", "80 (60 - 260)", "2.00 (2.00 - 2.60)", "65% (60% - 80%)"] in rows
    assert ["ALE/Pong-v5", "shoal ray, apart / the faster RLlib", "2.00 (2.00 - 2.60)", ">= 1.5", "yes"] in rows
    assert ["ALE/Pong-v5", "shoal ray, apart / local", "0.65 (0.60 - 0.80)", ">= 0.7", "no"] in rows
    assert "- RLlib IMPALA: 1 of 3 runs failed: broken" in text and "nan" not in text and UNMEASURED in text


def test_ray_tables_do_not_compare_rounds_of_different_runs():
    runs = {"shoal ray, apart": ray_runs(80.0), "RLlib APPO": ray_runs(40.0, date="another")}
    text = on_ray.ray_tables(results(peers={}, scenes=[{"name": "CartPole-v1", "runs": runs}]))
    verdict = next(line for line in text.splitlines() if ">= 5" in line)
    assert [cell.strip() for cell in verdict.strip("|").split("|")][2:] == ["-", ">= 5", "not measured"]


def test_rows_on_ray_have_the_settings_of_their_local_twins():
    assert on_ray.ON_RAY.keys() == on_ray.GOALS.keys()
    for runners in on_ray.ON_RAY.values():
        settings = {runner.name: runner.case.arguments() for runner in runners if runner.case is not None}
        for name, values in settings.items():
            twin = settings.get(name.replace("local", "ray"), {})
            assert {key for key in values if values[key] != twin[key]} <= {"runtime"}
        assert [runner.order["algorithm"] for runner in runners if runner.peer] == ["impala", "appo"]


def test_parts_measured_apart_are_merged():
    def of(commit, scenes, race=None):
        rows = [{"name": name, "runs": {who: [{"commit": commit, "n": n} for n in runs] for who, runs in table.items()}}
                for name, table in scenes.items()]
        return {"commit": commit, "scenes": rows, **({"race": {"goal": 1, "runs": race}} if race else {})}

    first = with_earlier(of("a", {"CartPole": {"x": [1], "y": [2]}, "Pong": {"x": [3]}}, {"x": ["r"]}), {})
    more = with_earlier(of("a", {"CartPole": {"x": [4]}}, {"y": ["s"]}), first)
    shown = {scene["name"]: {who: [run["n"] for run in runs] for who, runs in scene["runs"].items()} for scene in more["scenes"]}
    assert shown == {"CartPole": {"x": [1, 4], "y": [2]}, "Pong": {"x": [3]}} and more["race"]["runs"] == {"x": ["r"], "y": ["s"]}
    other = with_earlier(of("b", {"CartPole": {"x": [5]}}), more)
    known = {"commit": "a", "uncommitted_changes": False}
    clean = with_earlier({**of("a", {"CartPole": {"x": [6]}}), **known}, more)
    assert [run["n"] for run in clean["scenes"][0]["runs"]["x"]] == [6], "of the others it is not known whether they had changes"
    clean["scenes"][0]["runs"]["x"][0] |= known
    changed = {**of("a", {"CartPole": {"x": [7]}}), **known, "uncommitted_changes": True}
    assert [run["n"] for run in with_earlier(changed, clean)["scenes"][0]["runs"]["x"]] == [7]
    again = {**of("a", {"CartPole": {"x": [8]}}), **known}
    assert [run["n"] for run in with_earlier(again, clean)["scenes"][0]["runs"]["x"]] == [6, 8]
    assert [run["n"] for run in other["scenes"][0]["runs"]["x"]] == [5] and other["race"] == more["race"]


def test_every_row_of_a_file_of_several_runs_has_its_own_stamp():
    row = {"name": "CartPole impala", "efficiency_goal": None, "limits": [LIMIT], "runs": [RUN], "reference": []}
    old = results(cases=[{**row}, {**row, "name": "Pong ppo"}])  # from before rows had stamps
    new = results(date="2026-02-02T00:00:00Z", commit="fedcba9876543210", uncommitted_changes=True, cases=[{**row}])
    joined = machine.with_earlier_rows(new, old, "cases")
    assert [(case["name"], case["date"][:10], case["commit"][:4]) for case in joined["cases"]] == [
        ("CartPole impala", "2026-02-02", "fedc"), ("Pong ppo", "2026-01-01", "0123")]
    assert all(case["machine"] == "2 cores of A CPU, torch 2.13.0+cpu" and case["load"] == 0.1 for case in joined["cases"])
    text = bench_tables(joined)
    assert "- CartPole impala: 2026-02-02T00:00:00Z, commit fedcba9876 with uncommitted changes, 2 cores of A CPU" in text
    assert "- Pong ppo: 2026-01-01T00:00:00Z, commit 0123456789, 2 cores of A CPU, torch 2.13.0+cpu (load 0.1)." in text
    third = machine.with_earlier_rows(results(date="2026-03-03T00:00:00Z", cases=[]), joined, "cases")
    assert third["cases"] == joined["cases"]
    whole = bench_tables(machine.with_earlier_rows(old, {}, "cases"))
    assert whole.startswith("2026-01-01T00:00:00Z, commit 0123456789, 2 cores"), "one line where all are of one run"


def test_a_row_of_which_it_is_not_known_whether_there_were_changes_says_so():
    run = {**RUN, "date": "2026-01-01", "commit": "0123456789abcdef"}

    def shown(**more):
        return peer_tables(results(peers={}, scenes=[{"name": "C", "runs": {"shoal": [{**run, **more}]}}]))

    assert "commit 0123456789 (whether with uncommitted changes was not written down)." in shown()
    assert "commit 0123456789 with uncommitted changes." in shown(uncommitted_changes=True)
    assert "commit 0123456789." in shown(uncommitted_changes=False)


@pytest.mark.parametrize(("words", "kept"), [([], True), (["--no-save"], False), (["--scale", "0.1"], False)])
def test_what_was_shortened_is_not_written_down(words, kept, monkeypatch, capsys):
    """All three write into docs/results."""
    saved = []
    monkeypatch.setattr(machine, "save", lambda name, values, *_: saved.append(name) or name)
    monkeypatch.setattr("shoal.bench.__main__.measure_scene", lambda *_: [])
    monkeypatch.setattr(peers, "install", lambda peer, say: (True, "1.0"))
    monkeypatch.setattr(peers, "LINEUP", {})
    monkeypatch.setattr(on_ray, "install", lambda peer, say: (True, "1.0"))
    monkeypatch.setattr(Runner, "run", lambda self, scale: Outcome(1.0))
    assert bench.main(words) == 0 and peers.main([*words, "--only", "nothing"]) == 0
    assert on_ray.main([*words, "--only", "CartPole", "--rounds", "1"]) == 0
    assert saved == (["bench.json", "peers.json", on_ray.FILE] if kept else [])
    assert ("docs/performance.md" in capsys.readouterr().out) is kept


def test_the_page_shows_the_results_beside_it(tmp_path):
    """`python -m shoal.bench.report` would change nothing: what is committed belongs together."""
    page = tmp_path / "performance.md"
    page.write_text(report.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    report.write(page)
    assert page.read_text(encoding="utf-8") == report.PAGE.read_text(encoding="utf-8"), "run `python -m shoal.bench.report`"


def test_a_throughput_has_its_limit_beside_it_or_a_word_that_it_has_none():
    runs = {"shoal impala": [RUN], "SB3 PPO": [{**RUN, "env_steps_per_second": 6.0}]}
    assert UNMEASURED in peer_tables(results(peers={}, scenes=[{"name": "CartPole-v1", "runs": runs}]))
    runs[f"{LIMITED} of shoal impala"] = [{"env_steps_per_second": 100.0, "error": None, "details": {"passes": 1}}]
    text = peer_tables(results(peers={}, scenes=[{"name": "CartPole-v1", "runs": runs}]))
    assert UNMEASURED not in text
    assert "0.60" in next(line for line in text.splitlines() if line.startswith(f"| {LIMITED} of shoal impala"))
    means = {"name": "pinning", "without": "off", "with": "on", "note": "", "off": [1.0], "on": [2.0]}
    assert UNMEASURED in means_tables(results(means=[{**means, "unit": "env steps/s"}]))
    assert UNMEASURED not in means_tables(results(means=[{**means, "unit": "unrolls/s"}]))
    row = {"error": None, "seed": 1, "env_steps_per_second": 60.0}
    limited = {**row, "limit": {"env_steps_per_second": 240.0}, "efficiency": 0.25}
    table = results_table({"a": [limited], "b": [row]})
    assert "| limit" in table and "240" in table and "25 %" in table
    assert "The composed limit was not measured in this run beside: b." in table
    assert "The composed limit was not measured in this run." in results_table({"a": [row], "b": [row]})
    assert "not measured" not in results_table({"a": [limited]})


def test_the_layout_that_auto_chose_is_in_the_tables():
    layout = {"chosen": "1 actor of 1024 environments in the learner's process", "how": "by trying", "tried": {}}
    run = {**RUN, "details": {**RUN["details"], "layout": layout}}
    case = {"name": "CartPole impala", "efficiency_goal": 0.6, "limits": [LIMIT], "runs": [run, run, RUN], "reference": []}
    words = "`--actors auto` chose 1 actor of 1024 environments in the learner's process (2 of 3 runs)"
    assert f"- CartPole impala: {words}" in bench_tables(results(cases=[case]))
    assert f"- shoal: {words}" in peer_tables(results(peers={}, scenes=[{"name": "C", "runs": {"shoal": [run, run, RUN]}}]))
    row = {"error": None, "seed": 1, "env_steps_per_second": 60.0, "layout": layout}
    assert "- a: 1 actor of 1024 environments in the learner's process (1 of 1 runs)" in results_table({"a": [row]})


def test_limits_take_their_turns_beside_the_peers(monkeypatch):
    """The grid once, its best cells in every round; a limit that cannot be measured is a row that says so."""
    calls = []

    def measure(case, probes, known=None, seconds=0.0):
        calls.append(known is not None)
        return Limit(*(Cell(what, 1, Layout(1, 1), "", 300.0) for what in ("env", "act", "learn")), 1)

    monkeypatch.setattr("shoal.bench.limits.measure", measure)
    yard = Yard(CASES[0], None, 1.0)
    assert yard().env_steps_per_second == yard().env_steps_per_second == pytest.approx(100.0)
    assert calls == [False, True, True]

    def broken(*_, **__):
        raise RuntimeError("the probe ended")

    monkeypatch.setattr("shoal.bench.limits.measure", broken)
    assert "the probe ended" in yard().error


def test_results_are_plain_json(tmp_path):
    path = machine.save("x.json", {"a": math.nan, "run": Outcome(math.nan, "why").record(), **machine.describe()}, tmp_path)
    loaded = json.loads(path.read_text())
    assert loaded["a"] is None and loaded["run"]["env_steps_per_second"] is None and loaded["machine"]["cores"] >= 1


def test_a_run_that_fails_is_an_outcome():
    done = start([sys.executable, "-c", "import sys; sys.stderr.write('broken\\n'); sys.exit(5)"], 1.0)
    assert "exit code 5" in (reported(done, 0.0).error or "") and "broken" in (reported(done, 0.0).error or "")
    words = "print('noise'); print('{\"marks\": [[0, 0], [1, 10], [2, 20]], \"version\": \"1\"}'); print('more')"
    good = reported(start([sys.executable, "-c", words], 1.0), 0.0)
    assert good.env_steps_per_second == 10.0 and good.details == {"version": "1"}
    assert last_json("nothing") is None


def test_runs_alternate():
    order: list[str] = []

    def runner(name):
        return lambda: order.append(name) or Outcome(1.0)

    found = alternate({"a": runner("a"), "b": runner("b")}, 2)
    assert order == ["a", "b", "a", "b"] and len(found["a"]) == 2


def test_phases_keep_what_matters():
    assert phases({"actor": {"phases": {"env": 0.4, "write": 0.001}, "waits": {"unrolls": 0.2}}}) == {
        "actor": {"env": 0.4, "wait unrolls": 0.2}}


def test_cases_and_lineup_are_whole():
    assert len({case.name for case in CASES}) == len(CASES)
    peers = {peer.name for peer in PEERS}
    for runners in LINEUP.values():
        assert {runner.peer for runner in runners if runner.peer} == peers
        assert any(runner.case is not None and ":" in runner.case.scene.env for runner in runners)
    assert all((DRIVERS / f"drive_{name}.py").exists() for name in peers)
    assert any("preset" in order for order in RACE.runners.values())
