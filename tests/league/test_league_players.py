"""Players of a league that begin late and end early: their learners start and stop, and nobody waits for one that is stopped."""

from __future__ import annotations

import json

import numpy as np
import pytest

import shoal
from shoal.cli import main
from shoal.errors import ConfigError
from shoal.experiment.league_record import LeagueRecord
from shoal.experiment.rundir import RunDir
from shoal.league.matchmaking import League, LeagueOptions
from shoal.runtime import run
from tests.architectures.test_league_kills import drawn, league_of
from tests.runtime.harness import Farm, Killer, Saver, Watch

QUIET = {"console": {"mode": "none"}, "tensorboard": False, "runtime": "inline", "actors": 1}
SMALL = {"algorithm": {"unroll": 4}, "net": {"hidden": (8,)}, "architecture": {"envs_per_actor": 4},
         "eval": {"episodes": 2, "every_env_steps": 10_000, "last_env_steps": 10}}
PERIODS = ("main_exploiter=100:300", "league_exploiter_0=0:200", "league_exploiter_1=100000:")


def train(folder, periods, env_steps=1500):
    return shoal.train("league", "shoal/RockPaperScissors-v0", run_dir=str(folder), **QUIET, **SMALL, max_env_steps=env_steps,
                       league={"least_steps": 40, "most_steps": 80, "snapshot_share": 0.5, "verification_share": 0.15,
                               "hard_power": 2.0, "periods": periods})


def events(folder):
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return [line["text"] for line in lines if line.get("kind") == "event"]


def test_periods():
    league = League(LeagueOptions(periods=PERIODS))
    assert league.wanted() == {"main", "league_exploiter_0"}
    league.players["main"].steps = 100
    assert league.wanted() == {"main", "main_exploiter", "league_exploiter_0"}
    league.players["main"].steps = 300
    assert league.wanted() == {"main"}
    for words, said in [("main_exploiter=5", "write it like"), ("main=5:9", "main, which plays all the time"),
                        ("nobody=5:9", "no such player"), ("main_exploiter=9:5", "ends before it begins")]:
        with pytest.raises(ConfigError, match=said):
            LeagueOptions(periods=(words,)).validate()
    with pytest.raises(ConfigError, match="twice"):
        LeagueOptions(periods=("main_exploiter=0:1", "main_exploiter=5:9")).validate()


def test_those_that_do_not_play_are_left_alone():
    league = League(LeagueOptions(main=2, least_steps=10, most_steps=20))
    league.playing = {"main_0", "main_exploiter"}
    league.players["main_1"].steps = 100
    assert not league.due("main_1")
    rng = np.random.default_rng(0)
    assert {league.match("main_exploiter", rng).away for _ in range(20)} == {"main_0"}


def test_players_begin_and_end(tmp_path, capsys):
    folder = tmp_path / "run"
    run = train(folder, PERIODS)
    said = [text for text in events(folder) if "saved" not in text and "anew" not in text]
    assert said == ["0 -> 1 replicas", "league_exploiter_0 begins", "0 -> 1 replicas", "main_exploiter begins",
                    "league_exploiter_0 ends", "1 -> 0 replicas", "main_exploiter ends", "1 -> 0 replicas"]
    done = {name: policy["env_steps"] for name, policy in run.summary["policies"].items()}
    assert done["main"] > 400 and 100 <= done["main_exploiter"] < 260 and 100 <= done["league_exploiter_0"] < 260
    assert done["league_exploiter_1"] == 0 and list(run.policies) == ["main", "main_exploiter", "league_exploiter_0"]
    record = LeagueRecord(RunDir.open(folder))
    assert record.playing == {"main"} and record.table.played == record.table.reports
    for name in ("main_exploiter", "league_exploiter_0"):  # saved at the end; its learner may have had a few slots left
        saved = record.vault.about(record.players[name][2][-1])["steps"]
        assert 0 <= done[name] - saved <= 16 and record.players[name][1] == saved
    assert main(["league", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "has ended" in out and "has not begun" in out
    assert main(["eval", str(folder), "--policy", "main_exploiter", "--episodes", "2"]) == 0
    assert main(["eval", str(folder), "--policy", "league_exploiter_1", "--episodes", "2"]) == 2
    assert "league_exploiter_1 has not begun to learn" in capsys.readouterr().err
    assert main(["set", str(folder), "league.periods=('main_exploiter=400:',)"]) == 0  # it begins again
    again = shoal.resume(folder, max_env_steps=2500)
    then = {name: policy["env_steps"] for name, policy in again.summary["policies"].items()}
    assert then["main_exploiter"] > done["main_exploiter"] + 100 and then["league_exploiter_1"] > 0
    assert then["league_exploiter_0"] > done["league_exploiter_0"]
    after = LeagueRecord(RunDir.open(folder))
    assert after.resets["main_exploiter"] > record.resets["main_exploiter"] and after.table.played == after.table.reports


def test_late_player_is_not_given_all_games(tmp_path):
    run = train(tmp_path / "run", ("main_exploiter=400:", "league_exploiter_0=0:0", "league_exploiter_1=0:0"), 2000)
    main_steps, late = (run.summary["policies"][name]["env_steps"] for name in ("main", "main_exploiter"))
    assert abs(main_steps - 400 - late) < 150


def test_kills(tmp_path):
    """The Coordinator dies before, while and after a player plays."""
    (tmp_path / "saved").mkdir()
    killer, saver = Killer(("coordinator-0",), 3, "league_reports", every=150), Saver(tmp_path / "saved", 60, "league_reports")
    seen = set()

    def act(control):
        saver(control)
        killer(control)
        seen.add("main_exploiter.learner-0" in control.running)

    watch = Watch(lambda control: killer.done(control) and watch.folder is not None and seen == {True, False}
                  and "main_exploiter.learner-0" not in control.running, act)
    program = drawn(tmp_path, periods=("main_exploiter=200:2000",))  # long enough for a process to start on a busy machine
    assert run(program, watch, "local", tmp_path / "logs", fork_server=Farm.get()) == "until"
    league = league_of(watch.folder)
    assert league["players"]["main"][0] > 400 and 0 < league["players"]["main_exploiter"][0] < 5400
    assert (watch.folder / "main_exploiter.learner-0.safetensors").exists()  # its last state is kept


def test_a_stopped_learner_holds_nobody_up(tmp_path):
    """A learner takes nothing any more, so that all actors wait for it; when its player ends they go on."""
    program, reports = drawn(tmp_path, periods=()), []

    def act(control):
        reports.append(control.total("league_reports"))
        if reports[-1] > 100 and not hasattr(act, "paused"):
            act.paused = len(reports)
            control.pause("main_exploiter.learner")
        if hasattr(act, "paused") and not hasattr(act, "stuck") and len(reports) > act.paused + 30 and len(set(reports[-20:])) == 1:
            act.stuck = reports[-1]
            control.change({"league.periods": ("main_exploiter=0:0",)})

    watch = Watch(lambda control: hasattr(act, "stuck") and control.total("league_reports") > act.stuck + 300
                  and "main_exploiter.learner-0" not in control.running, act)
    assert run(program, watch, "local", tmp_path / "logs", fork_server=Farm.get()) == "until"
