"""Suites: what they hold, how they are read, resumed after an interruption, and one really run."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

import psutil
import pytest

from benchmarks import quick_table
from benchmarks.peers.install import DRIVERS, PEERS, peer_named
from shoal.bench import command, jobs
from shoal.bench.jobs import curve, startup, summary_columns
from shoal.bench.results_folder import ResultsFolder
from shoal.bench.suite import Job, SuiteCase, load_suite, parse_suite, suite_names
from shoal.cli import main
from shoal.envs.atari_protocol import AtariProtocol
from shoal.errors import ConfigError
from shoal.experiment.parse import parse_options, parse_train
from shoal.experiment.presets import preset_names
from shoal.experiment.run import plan_of
from tests.bench.rows import SUITE

ROOT = Path(__file__).parents[2]
PARENT_OF_RUN = "import subprocess, sys; subprocess.run([sys.executable, '-m', 'shoal.bench.training', sys.argv[1]])"
CASE = {"preset": "impala", "env": "CartPole-v1", "max_seconds": 1.0}


# ---------------------------------------------------------------------------------------------- what there is
def suite_named(name, variant="full"):
    return loaded(name, variant)


@functools.cache
def loaded(name, variant):
    """To load a suite checks all of its cases, which takes seconds."""
    return load_suite(name, variant)


@pytest.mark.parametrize("variant", ["full", "quick"])
@pytest.mark.parametrize("name", ["throughput", "learning", "scaling", "faults", "replay", "ray"])
def test_every_suite_is_whole(name, variant):
    suite = suite_named(name, variant)
    keys = [job.key for job in suite.jobs()]
    assert len(set(keys)) == len(keys) > 0
    for case in suite.cases:
        if case.preset:
            arguments = Job(case, 1, *case.actors[:1]).arguments()
            if case.expert:
                arguments["demos"] = "recorded when the case is run"
            plan_of(arguments.pop("preset"), arguments.pop("env"), None, None, arguments).validate()
        if case.peer:
            assert (DRIVERS / f"drive_{peer_named(case.peer).name}.py").exists()


def test_there_are_six():
    assert suite_names() == ["faults", "learning", "ray", "replay", "scaling", "throughput"]


@pytest.mark.parametrize("variant", ["full", "quick"])
def test_the_learning_suite_has_every_preset(variant):
    """A preset without a case is an error: add one to bench/suites/learning.toml, with its threshold and budget."""
    cases = suite_named("learning", variant).cases
    missing = set(preset_names()) - {case.preset for case in cases}
    assert not missing, f"bench/suites/learning.toml has no case for {', '.join(sorted(missing))}"
    assert all(case.until_return is not None for case in cases)
    assert variant == "quick" or all(len(case.seeds) == 3 for case in cases)


def test_what_measures_speed_runs_alone():
    assert all(case.alone for name in ("throughput", "scaling", "replay") for case in suite_named(name).cases)
    assert {case.peer for case in suite_named("learning").cases if case.alone} == {"sb3", "sb3_dqn", "cleanrl", "torchrl"}
    assert not any(case.alone for case in suite_named("faults").cases)


def test_scaling_suite():
    """The scaling suite has one to eight actors."""
    assert all(case.actors == (1, 2, 4, 8) and case.limit for case in suite_named("scaling").cases)


def test_throughput_suites():
    """The full throughput suite has every peer and the quick one is short."""
    assert {case.peer for case in suite_named("throughput").cases if case.peer} == {peer.name for peer in PEERS}
    quick = suite_named("throughput", "quick")
    runs = sum((case.max_seconds or 0) + 6.0 for case in quick.cases for _ in case.seeds)  # six seconds to start and stop
    assert runs < 300, "the limits' grids need the other half of ten minutes"


def test_victims_are_named_in_ps():
    """A victim is a place of the preset's graph: a name that nobody has would never be killed."""
    from shoal.experiment.prepare import prepare

    for case in suite_named("faults").cases:
        shown = prepare(plan_of(case.preset, case.env, None, None, {})).program().describe()
        for part in (part for victim in case.kill for part in victim.split(" + ")):
            assert part.split()[0] in shown, (case.name, part)


def test_the_commands_of_the_pages_exist():
    page = (ROOT / "docs" / "benchmark.md").read_text()
    bench = [line.split("#")[0].split()[2:] for line in page.splitlines() if line.startswith("    shoal bench")]
    assert {words[0] for words in bench} == {*suite_names(), "compare"}
    for name, *options in (words for words in bench if words[0] != "compare"):
        suite_named(name, parse_options(command.BenchOptions, command.BenchOptions(), options, "shoal bench").suite)
    (example,) = re.findall(r"```toml\n(.*?)```", page, re.S)
    assert len(parse_suite("example", tomllib.loads(example)).cases) == 2
    page = (ROOT / "docs" / "atari.md").read_text()
    for line in (line for line in page.splitlines() if line.startswith("    shoal train")):
        experiment = parse_train(shlex.split(line)[2:]).experiment
        AtariProtocol.of("ALE/Pong-v5", {}, experiment.envs.arguments())
    protocol = page.partition("## One protocol")[2].partition("\n## ")[0]
    fields = {name for row in re.findall(r"^\| (`.*?) \|", protocol, re.M) for name in re.findall(r"`(\w+)`", row)}
    assert fields == set(AtariProtocol.__dataclass_fields__)


def test_the_readme_gets_the_quick_table(tmp_path):
    page = tmp_path / "benchmark.md"
    page.write_text("# P\n<!-- throughput: begin -->\nold\n<!-- throughput: end -->\n")
    quick_table.write(page, tmp_path / "none")
    assert "make bench-quick" in page.read_text() and "old" not in page.read_text()
    book = ResultsFolder(tmp_path / "out")
    about = {"date": "2026-01-01", "commit": "0123456789ab", "uncommitted_changes": False, "versions": {"torch": "2"},
             "machine": {"cores": 2, "cpu": "A CPU"}}
    book.append("session", {"title": "T", **about})
    book.append("row", {"key": "k", "group": "impala", "seed": 1, "error": None, "env_steps_per_second": 5e4, "load": 0.2})
    quick_table.write(page, tmp_path / "out")
    assert "50 k" in page.read_text() and "A CPU" in page.read_text() and "make bench-quick" not in page.read_text()
    assert (ROOT / "docs/benchmark.md").read_text().count("<!-- throughput: begin -->") == 1


# ---------------------------------------------------------------------------------------------- reading
def test_defaults_and_quick_variant():
    """Cases take defaults and the quick variant overrides both."""
    lr, gamma = "algorithm.lr", "algorithm.gamma"
    table = {"title": "T", "defaults": {"seeds": [1, 2], "overrides": {lr: 1.0, gamma: 0.5}},
             "quick": {"seeds": [7], "overrides": {lr: 2.0}},
             "case": [{**CASE, "actors": [1, 2], "overrides": {gamma: 0.9}}, {**CASE, "name": "other", "quick": False}]}
    full, quick = parse_suite("t", table), parse_suite("t", table, "quick")
    assert full.cases[0].overrides == {lr: 1.0, gamma: 0.9} and full.cases[0].seeds == (1, 2)
    assert quick.cases[0].overrides == {lr: 2.0, gamma: 0.9}
    assert [case.name for case in quick.cases] == ["impala CartPole-v1"] and quick.cases[0].seeds == (7,)
    order = [(job.seed, job.case.name, job.actors) for job in full.jobs()]
    first = [(1, "impala CartPole-v1", 1), (1, "impala CartPole-v1", 2), (1, "other", None)]
    assert order == first + [(2, name, actors) for _, name, actors in first]
    assert full.jobs()[1].arguments()["actors"] == 2 and "actors" not in full.jobs()[2].arguments()


@pytest.mark.parametrize(("case", "words"), [
    ({"preset": "impala", "peer": "sb3", "env": "E"}, "exactly one"),
    ({"env": "E"}, "none of preset"),
    ({"preset": "impala", "max_seconds": 1.0}, "names no environment"),
    ({"preset": "impala", "env": "E"}, "never end"),
    ({"workload": "small"}, "add size"),
    ({**CASE, "seeds": []}, "no seeds"),
    ({**CASE, "sedes": [1]}, "did you mean seeds"),
    ({**CASE, "seeds": ["one"]}, "seeds="),
    ({**CASE, "max_seconds": "long"}, "max_seconds='long'"),
])
def test_senseless_case(case, words):
    """A case that makes no sense is refused with one sentence."""
    with pytest.raises(ConfigError, match=words):
        parse_suite("t", {"case": [case]})


def test_senseless_suite(tmp_path, capsys):
    """A suite that makes no sense is refused with one sentence."""
    with pytest.raises(ConfigError, match="two cases called"):
        parse_suite("t", {"case": [CASE, CASE]})
    with pytest.raises(ConfigError, match="cases"):
        parse_suite("t", {"cases": [CASE]})
    (tmp_path / "torn.toml").write_text("[[case")
    for words, said in ((["throughputt"], "did you mean throughput?"), (["throughput", "--suite", "fast"], "full or quick"),
                        (["learning", "--jobs", "0"], "--jobs is 0; it must be at least 1"),
                        (["none.toml"], "there is no file none.toml"),
                        (["compare", "a"], "give two folders"),
                        (["compare", "a", "b"], "no results.jsonl"), (["throughput", "--only", "xyz"], "matches no case"),
                        ([str(tmp_path / "torn.toml")], "is not valid TOML")):
        assert main(["bench", *words]) == 2
        assert said in capsys.readouterr().err
    assert main(["bench", "--help"]) == 0 and "shoal bench SUITE" in capsys.readouterr().out


def test_a_key_changes_with_what_is_run():
    one, other = SuiteCase("c", preset="impala", env="E"), SuiteCase("c", preset="impala", env="E", overrides={"a": 1})
    assert Job(one, 1).key != Job(other, 1).key != Job(other, 2).key
    assert Job(one, 1).key == Job(SuiteCase("c", preset="impala", env="E", seeds=(1,)), 1).key


# ---------------------------------------------------------------------------------------------- results
def test_an_interruption_costs_one_run(tmp_path, monkeypatch):
    suite = parse_suite("t", {"case": [{**CASE, "name": name, "seeds": [1, 2]} for name in "ab"]})
    ran: list[str] = []

    def run(job, children, results):
        ran.append(f"{job.case.name}{job.seed}")
        if ran == ["a1", "b1", "a2"]:
            raise KeyboardInterrupt
        return {"error": "broken" if ran == ["a1", "b1"] else None, "env_steps_per_second": 10.0, "load": 0.1}

    monkeypatch.setattr(jobs, "run_job", run)
    with pytest.raises(KeyboardInterrupt):
        command.run_suite(suite, ResultsFolder(tmp_path))
    before = (tmp_path / "results.jsonl").read_text()
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"kind":"row","ke')  # killed in the middle of a line
    assert command.run_suite(suite, ResultsFolder(tmp_path)) == 0
    assert ran == ["a1", "b1", "a2", "b1", "a2", "b2"]  # a1 is not run again; b1, which failed, is
    assert (tmp_path / "results.jsonl").read_text().startswith(before)
    assert [len(rows) for rows in ResultsFolder(tmp_path).groups().values()] == [2, 2]
    assert command.run_suite(suite, ResultsFolder(tmp_path)) == 0 and len(ran) == 6
    edited = parse_suite("t", {"case": [{**CASE, "name": "a", "seeds": [1, 2], "warm_seconds": 0.5}]})
    assert command.run_suite(edited, ResultsFolder(tmp_path)) == 0 and ran[6:] == ["a1", "a2"]
    assert {name: len(rows) for name, rows in ResultsFolder(tmp_path).groups().items()} == {"a": 2}  # b has left the suite
    assert len(ResultsFolder(tmp_path).sessions()) == 3
    assert "| a    | 2" in (tmp_path / "results.md").read_text() and "<table>" in (tmp_path / "report.html").read_text()


def runs_of(pid: int) -> list[psutil.Process]:
    """The training runs that a process has started; others come and go."""
    found = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.Error):
            if "shoal.bench.training" in child.cmdline():
                found.append(child)
    return found


def ended(process: psutil.Process) -> bool:
    """Whether it is gone within a minute; nobody may have reaped it."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def test_jobs_at_once(tmp_path, monkeypatch):
    """Rows come as runs end; the table has the suite's order."""
    timed = {**CASE, "name": "timed", "warm_seconds": 0.5, "seeds": [1]}
    suite = parse_suite("t", {"case": [timed, *({**CASE, "name": name, "seeds": [1]} for name in "abc")]})
    now: set[str] = set()
    seen: dict[str, set[str]] = {}
    meet, late = threading.Barrier(2), threading.Event()

    def run(job, children, results):
        now.add(job.case.name)
        if job.case.name in "ab":
            meet.wait(60)  # both at the same time, or never
        seen[job.case.name] = set(now)
        if job.case.name == "c":
            late.set()
        elif job.case.name == "a":
            late.wait(60)  # c begins when b has ended, and ends before a
        now.discard(job.case.name)
        return {"error": None, "env_steps_per_second": 10.0, "load": 0.1}

    monkeypatch.setattr(jobs, "run_job", run)
    assert command.run_suite(suite, ResultsFolder(tmp_path), many=2) == 0
    assert {"a", "b"} <= seen["a"] | seen["b"] and seen["timed"] == {"timed"}
    assert list(ResultsFolder(tmp_path).groups()) == ["timed", "a", "b", "c"]
    assert "2 runs at once" in (tmp_path / "results.md").read_text()


def test_everything_ends_with_the_suite(tmp_path):
    """SIGTERM to `shoal bench --jobs 2`: two real runs end, and the next command goes on."""
    (tmp_path / "s.toml").write_text(SUITE + '[[case]]\nname = "other"\n')
    words = [sys.executable, "-m", "shoal.cli", "bench", str(tmp_path / "s.toml"), "--jobs", "2", "--out", str(tmp_path / "out")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as bench:
        deadline, children = time.monotonic() + 60, runs_of(bench.pid)
        while len(children) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
            children = runs_of(bench.pid)
        bench.send_signal(signal.SIGTERM)
        assert bench.stdout is not None and "continues from" in bench.stdout.read()
    assert bench.returncode == 130 and len(children) == 2 and all(ended(child) for child in children)
    assert not ResultsFolder(tmp_path / "out").rows()


def test_run_ends_with_a_killed_suite(tmp_path):
    """kill -9 of the process that started it."""
    order = json.dumps({"preset": "a2c", "env": "shoal/Catch-v0", "runtime": "inline", "max_seconds": 600.0, "actors": 1,
                        "console.mode": "none", "tensorboard": False, "run_dir": str(tmp_path / "run")})
    with subprocess.Popen([sys.executable, "-c", PARENT_OF_RUN, order]) as parent:
        deadline = time.monotonic() + 60
        while not (tmp_path / "run" / "metrics.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        children = runs_of(parent.pid)
        parent.kill()
    assert len(children) == 1 and ended(children[0])


def test_case_for_a_gpu_says_so_without_one(tmp_path, monkeypatch):
    """It is no failure and no miss, and it is said."""
    monkeypatch.setattr(jobs, "_has_gpu", lambda: False)
    case = {"preset": "anakin", "env": "CartPole-v1", "max_seconds": 1.0, "gpu": True, "seeds": [1], "until_return": 5.0}
    assert command.run_suite(parse_suite("t", {"case": [case]}), ResultsFolder(tmp_path)) == 0
    text = (tmp_path / "results.md").read_text()
    assert "needs a GPU" in text and "not run" in text and "🔴" not in text
    assert "class=bad" not in (tmp_path / "report.html").read_text()


def test_columns_of_a_summary():
    summary = {"env_steps": 500_000, "seconds": 20.0, "stopped_by": "return", "eval_return": 480.0, "train_return": 400.0,
               "cpu_seconds": 30.0, "peak_memory_mb": 400.0, "policy_lag": {"mean": 1.0, "p95": 2.0, "max": 3.0},
               "data_age_seconds": {"mean": 0.1, "p95": 0.2}}
    row = summary_columns(summary)
    assert row["cpu_seconds_per_million"] == 60.0 and row["peak_memory_mb_per_million"] == 800.0
    assert row["env_steps_to_threshold"] == 500_000 and row["seconds_to_threshold"] == 20.0 and row["final_return"] == 480.0
    missed = summary_columns({**summary, "stopped_by": "env_steps", "eval_return": None})
    assert missed["seconds_to_threshold"] is None and missed["final_return"] == 400.0


def test_start_up_begins_with_the_process():
    shots = [{"seconds": 0.0, "time": 103.0}, {"seconds": 2.0, "time": 106.0}, {"seconds": 3.0, "time": 107.0}]
    assert startup(shots, 100.0) == 4.0 and startup(shots[:1], 100.0) is None


def test_a_curve_has_each_evaluation_once():
    shots = [{"evaluations": n, "eval_return": r, "env_steps": s, "seconds": s / 10} for n, r, s in
             ((0, None, 5), (1, 3.0, 10), (1, 3.0, 20), (2, 4.0, 30))]
    assert curve(shots) == [[10, 1.0, 3.0], [30, 3.0, 4.0]]


# ---------------------------------------------------------------------------------------------- real processes
def test_a_suite_is_really_run(tmp_path, capsys):
    """By the command, inline, to a threshold that is reached at once and one that cannot be."""
    (tmp_path / "s.toml").write_text("""
title = "Small"
[defaults]
preset = "a2c"
env = "shoal/Catch-v0"
runtime = "inline"
seeds = [1]
max_env_steps = 600
overrides = { "eval.episodes" = 4, "eval.every_env_steps" = 200, "net.hidden" = [8], "actors" = 1 }
[[case]]
name = "easy"
until_return = -1.0
[[case]]
name = "impossible"
until_return = 5.0
""")
    assert main(["bench", str(tmp_path / "s.toml"), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    easy, impossible = ResultsFolder.open(tmp_path / "out").rows()
    assert easy["error"] is None and easy["env_steps_to_threshold"] <= 600 and easy["final_return"] >= -1
    assert impossible["seconds_to_threshold"] is None and impossible["curve"]
    for name in ("env_steps_per_second", "bytes_per_env_step", "cpu_seconds_per_million", "peak_memory_mb", "startup_seconds",
                 "samples_per_insert", "policy_lag_mean", "data_age_p95", "learner_idle"):
        assert impossible[name] is not None, name
    assert "missed 5: 1 of 1" in said and "missed 5" in (tmp_path / "out" / "results.md").read_text()
    assert Path(tmp_path / "out" / "report.html").read_text().count("<svg") >= 2
