"""A folder of results: whose it is, what is read of a damaged one, and measuring again."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.peers import cases
from shoal.bench import command, jobs, machine
from shoal.bench.compare import comparison
from shoal.bench.result_columns import failed, missed, verdict_of, where_line
from shoal.bench.results_folder import ResultsFolder
from shoal.bench.suite import parse_suite
from shoal.cli import main
from shoal.errors import ConfigError
from tests.bench.rows import SESSION, SUITE, learning, results_with, row

CASE = {"preset": "impala", "env": "CartPole-v1", "max_seconds": 1.0, "seeds": [1, 2]}
HOLDER = """
import signal, sys
from pathlib import Path
from shoal.bench.results_folder import ResultsFolder
with ResultsFolder(Path(sys.argv[1])).locked():
    print("held", flush=True)
    signal.pause()
"""


def suite_of(*names, title="T", **values):
    return parse_suite("t", {"title": title, "case": [{**CASE, "name": name, **values} for name in names]})


@pytest.fixture
def ran(monkeypatch):
    """Which jobs were run; those called bad fail."""
    found: list[str] = []

    def run(job, children, results):
        found.append(f"{job.case.name}{job.seed}")
        return {"error": "broken" if job.case.name == "bad" else None, "env_steps_per_second": 10.0 + len(found), "load": 0.1}

    monkeypatch.setattr(jobs, "run_job", run)
    return found


# ---------------------------------------------------------------------------------------------- whose it is
def test_two_benches_in_one_folder(tmp_path, capsys):
    """Another process has it; the second is told which, and may begin when the first is dead."""
    (tmp_path / "s.toml").write_text(SUITE)
    out = tmp_path / "out"
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(out)], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None and first.stdout.readline() == "held\n"
        assert main(["bench", str(tmp_path / "s.toml"), "--out", str(out)]) == 2
        said = capsys.readouterr()
        first.kill()
    assert f"is running (pid {first.pid}); wait, or stop it with `kill {first.pid}`: it ends with what it has measured" in said.err
    assert "checkpoint" not in said.err and not said.out and not (out / "results.jsonl").exists()
    with ResultsFolder(out).locked():
        pass


def test_folder_is_locked_during_a_suite(tmp_path, monkeypatch):
    def run(job, children, results):
        with pytest.raises(ConfigError, match="is running"), ResultsFolder(tmp_path).locked():
            pass
        return {"error": None, "env_steps_per_second": 10.0, "load": 0.1}

    monkeypatch.setattr(jobs, "run_job", run)
    assert command.run_suite(suite_of("a"), ResultsFolder(tmp_path)) == 0


def test_a_folder_is_of_one_suite(tmp_path, ran):
    assert command.run_suite(suite_of("a"), ResultsFolder(tmp_path)) == 0
    before = (tmp_path / "results.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"has the results of T \(full\), not of Other \(full\); give another folder with --out"):
        command.run_suite(suite_of("b", title="Other"), ResultsFolder(tmp_path))
    with pytest.raises(ConfigError, match=r"of T \(full\), not of T \(quick\)"):
        command.run_suite(suite_of("a"), ResultsFolder(tmp_path), variant="quick", again=True)
    assert (tmp_path / "results.jsonl").read_bytes() == before and ran == ["a1", "a2"]
    old = results_with(tmp_path / "old", [])  # of before: it does not say which variant
    old.check_suite(SESSION["title"], "quick")


def test_rows_say_what_they_were_given(tmp_path, ran):
    for name, lr in (("a", 1e-3), ("b", 2e-3)):
        command.run_suite(suite_of("c", overrides={"algorithm.lr": lr}), ResultsFolder(tmp_path / name))
    (first, _) = ResultsFolder(tmp_path / "a").rows()
    assert first["settings"] == {"preset": "impala", "env": "CartPole-v1", "max_seconds": 1.0, "overrides.algorithm.lr": 1e-3}
    assert "- c: overrides.algorithm.lr 0.001 and 0.002" in comparison(ResultsFolder(tmp_path / "a"), ResultsFolder(tmp_path / "b"))


def test_exit_code_is_of_what_was_asked_for(tmp_path, ran, capsys):
    suite = suite_of("good", "bad")
    assert command.run_suite(suite, ResultsFolder(tmp_path)) == 1
    assert command.run_suite(suite, ResultsFolder(tmp_path), only="good") == 0
    assert command.run_suite(suite, ResultsFolder(tmp_path), only="bad") == 1
    assert command.run_suite(suite_of("good", seeds=[7]), ResultsFolder(tmp_path)) == 0 and "T: 1 run\n" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------- again
def test_again(tmp_path, ran, monkeypatch):
    """Again measures again and can be interrupted."""
    suite = suite_of("a", "b")
    command.run_suite(suite, ResultsFolder(tmp_path))
    ResultsFolder(tmp_path).append("limit", {"workload": "w", "env": "E", "name": "a"})
    command.run_suite(suite, ResultsFolder(tmp_path), only="a", again=True)
    assert ran == ["a1", "b1", "a2", "b2", "a1", "a2"] and not ResultsFolder(tmp_path).limits()
    speeds = {name: [one["env_steps_per_second"] for one in rows] for name, rows in ResultsFolder(tmp_path).groups().items()}
    assert speeds == {"a": [15.0, 16.0], "b": [12.0, 14.0]}
    assert (tmp_path / "results.jsonl").read_text().count('"kind":"row"') == 6  # nothing is lost

    def stop(job, children, results):
        ran.append("stopped")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(jobs, "run_job", stop)
        command.run_suite(suite, ResultsFolder(tmp_path), again=True)
    assert not ResultsFolder(tmp_path).rows()
    assert command.run_suite(suite, ResultsFolder(tmp_path)) == 0 and ran[7:] == ["a1", "b1", "a2", "b2"]


def test_again_is_what_make_uses(tmp_path, ran, capsys):
    (tmp_path / "s.toml").write_text(SUITE)
    words = ["bench", str(tmp_path / "s.toml"), "--out", str(tmp_path / "out")]
    assert main(words) == 0 and main(words) == 0 and ran == ["one1"]
    assert "give --again to measure it again" in capsys.readouterr().out
    assert main([*words, "--again"]) == 0 and ran == ["one1", "one1"]
    makefile = (machine.ROOT / "Makefile").read_text()
    assert "bench throughput --suite quick --again --out docs/results/throughput-quick" in makefile


# ---------------------------------------------------------------------------------------------- damaged
def test_torn_line_is_run_again(tmp_path, ran, capsys):
    """A torn line is run again, and nothing is lost."""
    suite = suite_of("a")
    command.run_suite(suite, ResultsFolder(tmp_path))
    whole = (tmp_path / "results.jsonl").read_bytes().splitlines(keepends=True)
    damaged = b"".join(whole[:-2]) + b'\xff\xfe{"kind":"row","gr\n\xc3'
    (tmp_path / "results.jsonl").write_bytes(damaged)
    assert command.run_suite(suite, ResultsFolder(tmp_path)) == 0 and ran == ["a1", "a2", "a2"]
    assert "2 lines of" in capsys.readouterr().out and (tmp_path / "results.jsonl").read_bytes().startswith(damaged)
    assert len(ResultsFolder(tmp_path).rows()) == 2 and "2 lines of" in comparison(ResultsFolder(tmp_path), ResultsFolder(tmp_path))
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "results.jsonl").write_bytes(whole[0][:30])  # killed in its first line
    assert command.run_suite(suite, ResultsFolder(tmp_path / "new")) == 0


def test_a_lost_session_is_no_reason_to_stop(tmp_path, ran):
    command.run_suite(suite_of("a"), ResultsFolder(tmp_path))
    rows = [line for line in (tmp_path / "results.jsonl").read_text().splitlines() if '"kind":"row"' in line]
    (tmp_path / "results.jsonl").write_text("\n".join(rows) + "\n")
    assert command.run_suite(suite_of("a"), ResultsFolder(tmp_path)) == 0 and len(ran) == 2
    assert "the session's line is lost" in (tmp_path / "results.md").read_text()


@pytest.mark.parametrize(("line", "words"), [
    ("[1]", r"line 6: \[1\] is not a session, limit or row"),
    ("null", "line 6: null is not a session"),
    ('{"kind":"snapshot","env_steps":3}', "is not a session, limit or row"),
    ('{"kind":["row"]}', "is not a session, limit or row"),
    ('{"kind":"row","x":1}', "is a row without key and group and seed and error"),
    ('{"kind":"row","key":"k","group":"g","seed":"one","error":null}', "is a row without seed"),
    ('{"kind":"session","title":"T"}', "is a session without date and commit"),
    ('{"kind":"limit","workload":5,"env":"E"}', "is a limit without workload"),
    ('{"kind":"suite","cases":["a"]}', "is a suite without cases"),
    ('{"kind":"finish","seconds":"many"}', "is a finish without seconds"),
])
def test_line_of_another_program(tmp_path, ran, line, words):
    command.run_suite(suite_of("a"), ResultsFolder(tmp_path))
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write(line + "\n")
    before = (tmp_path / "results.jsonl").read_bytes()
    for attempt in (lambda: command.run_suite(suite_of("a"), ResultsFolder(tmp_path)),
                    lambda: comparison(ResultsFolder(tmp_path), ResultsFolder(tmp_path))):
        with pytest.raises(ConfigError, match=words):
            attempt()
    assert (tmp_path / "results.jsonl").read_bytes() == before


def test_impossible_folder(tmp_path, capsys):
    """A folder that cannot hold results is refused with one sentence."""
    (tmp_path / "s.toml").write_text(SUITE)
    (tmp_path / "file").write_text("a file")
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "results.jsonl").write_bytes(b"\x7fELF\x02\x01")
    (tmp_path / "deep" / "results.jsonl").mkdir(parents=True)
    for out, said in (("file", "it is a file; give another folder with --out"), ("file/below", "Not a directory"),
                      ("strange", "has no line that `shoal bench` wrote"), ("deep", "cannot be read: Is a directory")):
        assert main(["bench", str(tmp_path / "s.toml"), "--out", str(tmp_path / out)]) == 2
        assert said in capsys.readouterr().err, out
    assert main(["bench", "compare", str(tmp_path / "file"), str(tmp_path / "strange")]) == 2
    assert (tmp_path / "file").read_text() == "a file"


def test_value_that_is_no_number_is_no_value(tmp_path):
    book = results_with(tmp_path, [row("a", s, env_steps_per_second="fast", limit=7, startup_seconds=2.0) for s in range(3)])
    text = comparison(book, book)
    assert "start-up s" in text and "env steps/s" not in text
    assert json.loads((tmp_path / "results.jsonl").read_text().splitlines()[1])["env_steps_per_second"] == "fast"


# ---------------------------------------------------------------------------------------------- an edited suite
def test_edited_case(tmp_path, ran):
    """Three seeds, then one of other settings: the table has that one alone, and the old ones when they are asked for again."""
    seeds, lr = [1, 2, 3], "algorithm.lr"
    command.run_suite(suite_of("a", seeds=seeds, overrides={lr: 1e-3}), ResultsFolder(tmp_path))
    edited = suite_of("a", seeds=[1], overrides={lr: 2e-3})
    command.run_suite(edited, ResultsFolder(tmp_path))
    (row,) = ResultsFolder(tmp_path).rows()
    assert row["env_steps_per_second"] == 14.0 and "| a    | 1 " in (tmp_path / "results.md").read_text()
    command.run_suite(suite_of("a", seeds=seeds, overrides={lr: 1e-3}), ResultsFolder(tmp_path))
    assert len(ran) == 4 and [one["env_steps_per_second"] for one in ResultsFolder(tmp_path).rows()] == [11.0, 12.0, 13.0]
    assert "| a    | 3 " in (tmp_path / "results.md").read_text()


def test_edited_case_before_it_is_run(tmp_path, ran, monkeypatch):
    """What was edited does not count before it is run."""
    command.run_suite(suite_of("a", "b"), ResultsFolder(tmp_path))

    def stop(job, children, results):
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs, "run_job", stop)
    with pytest.raises(KeyboardInterrupt):
        command.run_suite(suite_of("a", "b", max_env_steps=7), ResultsFolder(tmp_path))
    assert not ResultsFolder(tmp_path).rows()


def test_rows_without_a_suite_line(tmp_path):
    """Files of before have no line of the suite: the newest row says what its group is now."""
    rows = [{**row("a", seed, env_steps_per_second=speed), "key": f"a, seed {seed} #{mark}"}
            for seed, mark, speed in ((1, "old", 1.0), (2, "old", 2.0), (1, "new", 3.0))]
    assert [one["env_steps_per_second"] for one in results_with(tmp_path, rows).rows()] == [3.0]


def test_case_removed_from_the_suite(tmp_path, ran):
    """A case that left the suite is left out, and the report says so."""
    command.run_suite(suite_of("a", "b"), ResultsFolder(tmp_path))
    command.run_suite(suite_of("a"), ResultsFolder(tmp_path))
    assert list(ResultsFolder(tmp_path).groups()) == ["a"] and len(ran) == 4
    for name in ("results.md", "report.html"):
        assert "No longer in the suite, and left out here: b (2 runs)." in (tmp_path / name).read_text()
    command.run_suite(suite_of("a", "b"), ResultsFolder(tmp_path), only="a")  # the suite has it, whatever is asked for
    assert list(ResultsFolder(tmp_path).groups()) == ["a", "b"] and len(ran) == 4
    assert "left out" not in (tmp_path / "results.md").read_text()


# ---------------------------------------------------------------------------------------------- how long, and how quiet
def test_a_session_says_how_long_it_took(tmp_path, ran, monkeypatch):
    command.run_suite(suite_of("a"), ResultsFolder(tmp_path))
    (session,) = ResultsFolder(tmp_path).sessions()
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert lines[-1] == {"kind": "finish", "seconds": session["seconds"]} and 0 <= session["seconds"] < 600
    text = (tmp_path / "results.jsonl").read_text().replace(f'"seconds":{session["seconds"]}', '"seconds":485.2')
    (tmp_path / "results.jsonl").write_text(text)

    def stop(job, children, results):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(jobs, "run_job", stop)
        command.run_suite(suite_of("a", "b"), ResultsFolder(tmp_path))
    assert len(ResultsFolder(tmp_path).sessions()) == 2 and "seconds" in ResultsFolder(tmp_path).sessions()[1]
    command.run_suite(suite_of("a"), ResultsFolder(tmp_path))  # nothing to do, so no session
    assert ", took 485 s, commit" in (tmp_path / "results.md").read_text()


def test_killed_session(tmp_path):
    """A killed session does not say how long it took."""
    book = results_with(tmp_path, [row("a", 1)])
    assert "took" not in where_line(book.sessions(), book.rows())
    book.append("session", SESSION)
    book.append("row", row("a", 2))
    book.append("finish", {"seconds": 1234.5})
    assert ", took 1,234 s and an unknown time in 1 session without an end, " in where_line(book.sessions(), book.rows())


@pytest.mark.parametrize(("load", "busy"), [(0.3, False), (2.0, False), (12.3, True)])
def test_machine_that_is_not_quiet_is_named(tmp_path, ran, monkeypatch, capsys, load, busy):
    about = {key: SESSION[key] for key in ("date", "commit", "uncommitted_changes", "versions")}
    monkeypatch.setattr(machine, "describe", lambda: {**about, "machine": {"cores": 2, "cpu": "A CPU", "load": [load, 0.0, 0.0]}})
    command.run_suite(suite_of("a"), ResultsFolder(tmp_path))
    assert ("the load is 12.3 on 2 cores: other programs are running" in capsys.readouterr().out) is busy
    assert ("BESIDE OTHER WORK: it began at a load of 12.3" in (tmp_path / "results.md").read_text()) is busy


# ---------------------------------------------------------------------------------------------- who could not be run
def test_peer_that_cannot_be_installed(tmp_path, monkeypatch):
    """It is neither a failure nor a miss, and tried again at the next start."""
    monkeypatch.setattr(cases, "installed", lambda peer: (False, "could not be installed: no wheel"))
    race = {"env": "CartPole-v1", "peer": "torchrl", "max_seconds": 9.0, "until_return": 475.0}
    buffer = {"workload": "small", "size": 100, "who": ["cpprb"]}
    suite = parse_suite("t", {"case": [race, buffer], "defaults": {"seeds": [1]}})
    assert command.run_suite(suite, ResultsFolder(tmp_path)) == 0 and not ResultsFolder(tmp_path).finished()
    rows = ResultsFolder(tmp_path).rows()
    assert len(rows) == 2 and all(one["skipped"] for one in rows) and not missed(rows) and not failed(rows)
    text = (tmp_path / "results.md").read_text()
    assert "not run" in text and text.count("no wheel") == 2 and "🔴" not in text
    page = (tmp_path / "report.html").read_text()
    assert page.count("no wheel") == 2 and "class=bad" not in page


def test_runs_not_made_are_not_missed():
    """A run that was not made does not count as missed."""
    rows = [learning("a", 1, 5000), {**learning("a", 2, None), "error": "not installed", "skipped": True}]
    assert verdict_of(rows) == "reached 475: 1 of 1"
    assert verdict_of([*rows, learning("a", 3, None)]) == "🔴 missed 475: 1 of 2"
