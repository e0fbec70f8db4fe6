"""What is wrong in a suite's file is said when it is read, with the case and what to write."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path

import pytest

from benchmarks.peers import cases as peer_cases
from benchmarks.replay_buffers import workloads
from shoal.bench.jobs import run_job
from shoal.bench.suite import Job, SuiteCase, load_suite, parse_suite
from shoal.cli import main
from shoal.errors import ConfigError

SHOAL = {"preset": "impala", "env": "CartPole-v1", "max_seconds": 3.0}
PEER = {"peer": "sb3", "env": "CartPole-v1", "max_seconds": 3.0, "order": {"epochs": 1}}
REPLAY = {"workload": "small", "size": 100, "who": ["shoal inline"]}


@pytest.mark.parametrize(("case", "words"), [
    ({**REPLAY, "workload": "huge"}, "workload='huge' is not possible: give small, frames or sequences"),
    ({**REPLAY, "who": ["shoal inline", "shoal foo"]}, "who='shoal foo' is not possible: give shoal inline, shoal ipc"),
    ({**REPLAY, "size": -5}, "size=-5 is not possible"),
    ({**REPLAY, "who": ["cpprb", "cpprb"]}, "'cpprb' twice"),
    ({**PEER, "peer": "acme"}, "there is no peer 'acme'; there are sample_factory"),
    ({**PEER, "env": "Pendulum-v1"}, "the drivers of peers know ALE/Pong-v5 and CartPole-v1"),
    ({"peer": "sb3", "env": "CartPole-v1"}, "add max_seconds"),
    ({**PEER, "max_seconds": math.nan}, "max_seconds=nan is not possible"),
    ({**SHOAL, "preset": "impalla"}, "did you mean impala?"),
    ({**SHOAL, "env": "CartPole-v9"}, "unknown environment 'CartPole-v9' ("),
    ({**SHOAL, "env": "no.such.module:make"}, "unknown environment 'no.such.module:make' (No module named 'no')"),
    ({**SHOAL, "runtime": "clown"}, "runtime='clown' is not possible: give 'local' or"),
    ({**SHOAL, "overrides": {"algorithm.lrr": 1e-3}}, "there is no setting 'algorithm.lrr'; did you mean"),
    ({**SHOAL, "overrides": {"seed": 3}}, "overrides has 'seed', which the case gives itself; write seeds ="),
    ({**SHOAL, "actors": [0]}, "--actors is 0; it must be at least 1"),
    ({**SHOAL, "actors": ["many"]}, "actors='many' is not possible"),
    ({**SHOAL, "actors": [1, 1]}, "has 1 twice"),
    ({**SHOAL, "seeds": [1, 2, 1]}, "has 1 twice"),
    ({**SHOAL, "seeds": [-1]}, "give 0 or more"),
    ({**SHOAL, "max_seconds": -3.0}, "max_seconds=-3.0 is not possible: give more than 0"),
    ({**SHOAL, "warm_seconds": 3.0}, "warm_seconds=3 leaves nothing of max_seconds=3"),
    ({**SHOAL, "until_return": math.nan}, "until_return=nan"),
    ({**SHOAL, "expert": "shoal.envs.experts:follow_cue"}, "--demos does not fit --algorithm vtrace"),
    ({**SHOAL, "kill": ["nobody 7"]}, "kill='nobody 7' is not possible: no process is called that; there are actor 0, actor"),
    ({**SHOAL, "kill": ["actor 2"]}, "kill='actor 2' is not possible"),
    ({**SHOAL, "kill": ["actor 1"], "actors": [4, 1]}, "kill='actor 1' is not possible: no process is called that"),
    ({**SHOAL, "kill": ["learner 0", "actor 0"], "runtime": "inline"}, "kill with runtime='inline' is not possible"),
    ({**SHOAL, "kill": ["worker 0"], "actors": ["auto"]}, "kill='worker 0' is not possible"),
    ({**SHOAL, "limit": True, "env": "Acrobot-v1"}, "limit=true is not possible: the parts of a limit are known for ALE/Pong-v5"),
    ({**SHOAL, "limit": True, "preset": "apex", "overrides": {"replay.samples_per_insert": None}},
     "limit=true is not possible: dqn learns from replay"),
    ({**SHOAL, "preset": "r2d3", "env": "shoal/CueLure-v0", "expert": "no.such:thing"}, "expert='no.such:thing' is not possible"),
    ({**SHOAL, "preset": "dqn", "env": "Pendulum-v1"}, "Pendulum-v1"),
])
def test_case_that_cannot_run(case, words):
    """A case that could not be run is refused by name."""
    with pytest.raises(ConfigError) as error:
        parse_suite("t", {"case": [{**SHOAL, "name": "fine"}, {**case, "name": "the bad one"}]})
    assert words in str(error.value) and str(error.value).startswith("suite t, case 2 (the bad one): ")


@pytest.mark.parametrize(("case", "key"), [
    *(({**PEER, **given}, *given) for given in (
        {"max_env_steps": 9}, {"actors": [1, 2]}, {"overrides": {"algorithm.lr": 1.0}}, {"runtime": "inline"},
        {"kill": ["actor 1"]}, {"expert": "m:f"}, {"limit": True})),
    ({**SHOAL, "order": {"epochs": 1}}, "order"), ({**SHOAL, "who": ["cpprb"]}, "who"),
    ({**REPLAY, "env": "CartPole-v1"}, "env"), ({**REPLAY, "until_return": 1.0}, "until_return"),
])
def test_what_does_not_apply_is_refused(case, key):
    with pytest.raises(ConfigError, match=f"case 1: {key}=.* does not apply to a"):
        parse_suite("t", {"case": [case]})


def test_defaults_of_each_case():
    """The defaults give each case what it takes."""
    table = {"defaults": {"overrides": {"eval.enabled": False}, "limit": True, "actors": [1, 2], "max_env_steps": 9,
                          "order": {"epochs": 1, "threads": 2}},
             "quick": {"order": {"threads": 1}},
             "case": [SHOAL, {**PEER, "order": {"epochs": 4}}, {**PEER, "peer": "torchrl", "limit": False, "order": {}}, REPLAY]}
    shoal, sb3, torchrl, replay = parse_suite("t", table).cases
    assert shoal.limit and shoal.actors == (1, 2) and shoal.overrides == {"eval.enabled": False} and shoal.order == {}
    assert sb3 == SuiteCase("sb3 CartPole-v1", peer="sb3", env="CartPole-v1", max_seconds=3.0, order={"epochs": 4, "threads": 2})
    assert torchrl.order == {"epochs": 1, "threads": 2} and replay.order == replay.overrides == {} and not replay.limit
    assert parse_suite("t", table, "quick").cases[1].order == {"epochs": 4, "threads": 1}


@pytest.mark.parametrize(("quick", "words"), [
    ({"sedes": [1]}, "[quick] has 'sedes'; did you mean seeds?"),
    ({"overrides": {"algorithm.lrr": 1.0}}, "case 1 with [quick] (impala CartPole-v1): there is no setting 'algorithm.lrr'"),
    ({"warm_seconds": 5.0}, "with [quick] (impala CartPole-v1): warm_seconds=5 leaves nothing"),
])
def test_mistake_in_quick_is_seen(quick, words):
    with pytest.raises(ConfigError) as error:
        parse_suite("t", {"quick": quick, "case": [SHOAL]}, "full")
    assert words in str(error.value)
    left_out = parse_suite("t", {"quick": {"warm_seconds": 5.0}, "case": [{**SHOAL, "quick": False}]})
    assert len(left_out.cases) == 1


GOOD = '[[case]]\npreset = "impala"\nenv = "CartPole-v1"\nmax_seconds = 3.0\n'


@pytest.mark.parametrize(("text", "words"), [
    (GOOD.replace("[[case]]", "[case]"), "write [[case]], with two brackets"),
    ("case = 3", "case=3 is not possible: write [[case]] above each case"),
    ("case = [3]", "case=[3] is not possible: write [[case]]"),
    ("defaults = 4\n" + GOOD, "[defaults] is 4; write it as a table"),
    ("quick = 4\n" + GOOD, "[quick] is 4; write it as a table"),
    (GOOD + "overrides = 4", 'overrides=4 is not possible: write overrides = { "algorithm.lr" = 1e-3 }'),
    ("[defaults]\norder = 4\n" + GOOD, "order=4 is not possible: write order = { epochs = 1 }"),
    ("title = 3\n" + GOOD, "title=3 is not possible: give text"),
    ("", "has no [[case]]"),
    (b"\xff\xfecase = []", "is not UTF-8 text"),
])
def test_file_that_is_no_suite(tmp_path, text, words):
    """A file that is no suite says what to write."""
    path = tmp_path / "s.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as error:
        load_suite(str(path))
    assert words in str(error.value)


def test_suite_without_a_quick_case_says_so():
    with pytest.raises(ConfigError, match="no case for --suite quick"):
        parse_suite("t", {"case": [{**SHOAL, "quick": False}]}, "quick")


def test_faulty_suite_runs_nothing(tmp_path, capsys):
    """Its first case is whole; the peer of its second does not exist."""
    (tmp_path / "s.toml").write_text(GOOD + '[[case]]\npeer = "acme"\nenv = "CartPole-v1"\nmax_seconds = 3.0\n')
    assert main(["bench", str(tmp_path / "s.toml"), "--out", str(tmp_path / "out")]) == 2
    assert "there is no peer 'acme'" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_unknown_workload():
    """An unknown workload is not taken for another."""
    with pytest.raises(ValueError, match="'huge' is not possible: give small, frames or sequences"):
        workloads.records("huge", None)


# ---------------------------------------------------------------------------------------------- a run without a rate
class Ran:
    """ChildProcesses that have run: shoal writes what is given as its snapshots, a peer prints it as its marks."""

    def __init__(self, marks):
        self.marks = marks

    def run(self, words, seconds, beside=None, cwd=None, env=None):
        told = json.dumps({"marks": self.marks, "began_at": 0.0, "train_return": 1.0})
        if "shoal.bench.training" in words:
            folder = Path(json.loads(words[-1])["run_dir"])
            folder.mkdir()
            about = {"env_steps": 10, "seconds": 2.0, "cpu_seconds": 1.0, "peak_memory_mb": 1.0, "stopped_by": "seconds",
                     "env_steps_per_second": 5.0}
            shots = [{"kind": "snapshot", "seconds": at, "env_steps": steps, "time": at} for at, steps in self.marks]
            for name, text in (("summary.json", json.dumps(about)), ("config.json", "{}"),
                               ("metrics.jsonl", "".join(json.dumps(shot) + "\n" for shot in shots))):
                (folder / name).write_text(text)
        return subprocess.CompletedProcess(words, 0, told, "")


@pytest.mark.parametrize("case", [SHOAL, PEER], ids=["shoal", "peer"])
def test_timed_run_without_a_rate(case, monkeypatch):
    monkeypatch.setattr(peer_cases, "installed", lambda peer: (True, "1.0"))
    timed = Job(SuiteCase("c", **{**case, "warm_seconds": 1.0}), 1)
    short, long = [[0.5, 5], [1.5, 10]], [[at / 10, at] for at in range(5, 30)]
    assert "too short to have a rate after 1 s" in run_job(timed, Ran(short))["error"]
    row = run_job(timed, Ran(long))
    assert row["error"] is None and row["env_steps_per_second"] == 10.0
    assert run_job(Job(SuiteCase("c", **case), 1), Ran(short))["error"] is None  # nobody asked for a rate


# ---------------------------------------------------------------------------------------------- who is known by the same words
@pytest.mark.parametrize("cases", [
    [{**SHOAL, "name": "x", "actors": [1, 2]}, {**SHOAL, "name": "x, 1 actor"}],
    [{**REPLAY, "name": "small", "who": ["shoal inline", "cpprb"]}, {**SHOAL, "name": "small, cpprb"}],
])
def test_cases_with_the_same_rows(cases):
    """Two cases whose rows would hide each other are refused."""
    with pytest.raises(ConfigError, match="two cases whose runs are called"):
        parse_suite("t", {"case": cases})
    parse_suite("t", {"case": [cases[0], {**cases[1], "name": "another"}]})


def test_same_rows_in_the_full_variant():
    """Two that meet in the full variant only are refused in both."""
    cases = [{**SHOAL, "name": "x", "actors": [1, 2], "quick": False}, {**SHOAL, "name": "x, 1 actor"}]
    with pytest.raises(ConfigError, match="two cases whose runs are called 'x, 1 actor'"):
        parse_suite("t", {"case": cases}, "quick")


def test_missing_package(monkeypatch):
    """Its case becomes a row that says so."""
    def without(self):
        try:
            raise ImportError("no such package")
        except ImportError as error:
            raise ConfigError("pip install it") from error

    monkeypatch.setattr("shoal.roles.parts.EnvSource.describe", without)
    assert parse_suite("t", {"case": [{**SHOAL, "overrides": {"algorithm.lr": 0.123}}]}).cases  # not known from before
