"""A league in one thread: matches are counted once, snapshots come before resets, and everything goes on after a resume."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

import shoal
from evidence.league import CYCLE, LEAGUE, RATES, ROCK
from shoal.cli import main
from shoal.errors import ConfigError
from shoal.experiment.checkpoints import TensorFiles
from shoal.experiment.league_record import LeagueRecord
from shoal.experiment.parse import parse_train
from shoal.experiment.rundir import RunDir
from shoal.league.matchmaking import LeagueOptions
from shoal.league.payoff import PayoffTable
from shoal.league.vault import Vault

QUIET = {"console": {"mode": "none"}, "tensorboard": False, "runtime": "inline", "actors": 1}
SMALL = {"algorithm": {"unroll": 4}, "net": {"hidden": (8,)}, "architecture": {"envs_per_actor": 4},
         "eval": {"episodes": 4, "every_env_steps": 200, "last_env_steps": 20}}
SOON = {"least_steps": 40, "most_steps": 80}


def league(folder, env="shoal/RockPaperScissors-v0", **options):
    return shoal.train("league", env, run_dir=str(folder), **QUIET, **{**SMALL, "league": SOON, "max_env_steps": 900, **options})


def consistent(folder):
    """The payoff table, after a look at whether it has as many games as reports."""
    record = LeagueRecord(RunDir.open(folder))
    table = record.table
    shots = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    shot = next(shot for shot in reversed(shots) if shot.get("league_games"))
    assert table.played == table.reports <= shot["league_reports"] <= shot["league_games"]
    assert all(table.rate(a, b) + table.rate(b, a) == pytest.approx(1) for a in record.players for b in record.snapshots)
    return record, table


def test_league(tmp_path, capsys):
    run = league(tmp_path / "run")
    players = ["main", "main_exploiter", "league_exploiter_0", "league_exploiter_1"]
    assert list(run.summary["policies"]) == list(run.policies) == players
    assert run.summary["exploitability"] is not None and run.summary["policies"]["main"]["win_rate"] is not None
    assert all(policy["learner_steps"] > 0 for policy in run.summary["policies"].values())
    record, table = consistent(tmp_path / "run")
    vault, snapshots = Vault(tmp_path / "run" / "vault"), record.snapshots
    assert snapshots[0] == "main-0000" and {name.rpartition("-")[0] for name in snapshots} >= {"main", "main_exploiter"}
    assert set(vault.names()) >= set(snapshots) and record.resets["main_exploiter"] >= 1 and record.resets["main"] == 0
    assert vault.weights("main_exploiter-0000")["params"].shape == run.published_by("main")["params"].shape
    assert main(["league", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert f"{len(snapshots)} snapshots, {table.reports:,} games" in said and "exploitability of the current main agent" in said
    assert f"the Nash mixture over {len(snapshots)} snapshots: 0.0" in said
    page = (tmp_path / "run" / "league.html").read_text()
    assert page.count("<polyline") == 2 + 2 * len(players) and "[4] " in page and "http" not in page
    shoal.resume(tmp_path / "run", max_env_steps=1300)
    later, more = consistent(tmp_path / "run")
    assert more.reports > table.reports and later.snapshots[: len(snapshots)] == snapshots
    assert main(["eval", str(tmp_path / "run"), "--policy", "main_exploiter", "--episodes", "4"]) == 0
    assert "against random" in capsys.readouterr().out
    assert main(["eval", str(tmp_path / "run"), "--against", f"{tmp_path}/run:main-0000", "--episodes", "4"]) == 0
    assert "run:main-0000: return" in capsys.readouterr().out
    assert main(["eval", str(tmp_path / "run"), "--against", f"{tmp_path}/run:main-9999"]) == 2
    newest = ", ".join([name for name in vault.names() if name.startswith(f"{player}-")][-1] for player in players)
    assert f"has no policy main-9999; there are {', '.join(players)}, and {len(vault.names())} snapshots (newest: {newest})" \
        in capsys.readouterr().err
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert main(["league", str(tmp_path / "run")]) == 2
    assert "has no checkpoint yet" in capsys.readouterr().err


def test_snapshots_after_the_last_checkpoint(tmp_path):
    """A snapshot that no checkpoint knows, as of a league that was killed, is played after a resume, and others come after it."""
    league(tmp_path / "run")
    vault = Vault(tmp_path / "run" / "vault")
    vault.put("main-0500", vault.weights("main-0000"), {"player": "main", "kind": "main", "steps": 1, "parent": "main-0000"})
    shoal.resume(tmp_path / "run", max_env_steps=1800)
    record, table = consistent(tmp_path / "run")
    mains = record.players["main"][2]
    assert mains.index("main-0500") not in (0, len(mains) - 1) and table.games("main", "main-0500") > 0


def test_fictitious_play_uses_the_same_vault(tmp_path):
    alone = {**SOON, "main_exploiters": 0, "league_exploiters": 0, "snapshot_share": 1.0, "verification_share": 0.0}
    league(tmp_path / "run", "shoal/TicTacToe-v0", league={**alone, "weighting": "uniform"}, max_env_steps=600)
    record, table = consistent(tmp_path / "run")
    assert list(record.players) == ["main"] and len(record.snapshots) > 1
    assert all(name.startswith("main-") for name in record.snapshots) and table.reports > 0


def test_snapshots_drawn_by_quality(tmp_path):
    """`--league.weighting quality`, resumed: what the checkpoint holds of qualities goes on."""
    def qualities():
        state = TensorFiles().load(RunDir.open(tmp_path / "run").checkpoints().newest() / "coordinator-0.safetensors")["league"]
        return json.loads(bytes(state))["league"]["qualities"]

    league(tmp_path / "run", league={**SOON, "weighting": "quality", "quality_rate": 0.1})
    record, _ = consistent(tmp_path / "run")
    before = qualities()
    assert list(before) == ["main"] and set(before["main"]) == set(record.snapshots) and min(before["main"].values()) < 0
    shoal.resume(tmp_path / "run", max_env_steps=1800)
    record, _ = consistent(tmp_path / "run")
    after = qualities()["main"]
    assert set(after) == set(record.snapshots) > set(before["main"])
    assert all(after[name] <= quality for name, quality in before["main"].items())


@pytest.mark.parametrize(("env", "options", "words"), [
    ("CartPole-v1", {}, "needs a game of several agents"),
    ("shoal/Kuhn-v0", {"architecture": {"envs_per_actor": 2}}, "a league of 4 players needs an environment for each"),
    ("shoal/Kuhn-v0", {"architecture": {"lockstep": True}}, "players learn at their own pace"),
    ("shoal/Kuhn-v0", {"league": {"least_steps": 50, "most_steps": 20}}, "raise the second"),
])
def test_refused(env, options, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        league(tmp_path / "run", env, **options)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="speaks of a league, but --policies is shared"):
        shoal.train("ppo", "shoal/Kuhn-v0", league={"main": 2}, run_dir=str(tmp_path / "run"), **QUIET)
    with pytest.raises(ConfigError, match="use --architecture actor_learner"):
        shoal.train("ppo", "shoal/Kuhn-v0", policies="league", run_dir=str(tmp_path / "run"), **QUIET)


@pytest.mark.parametrize("way", ["self-play", "shared"])
def test_its_preset_without_a_league(way, tmp_path):
    """What the preset says of leagues concerns those alone."""
    plan = parse_train(["league", "shoal/TicTacToe-v0", "--policies", way])
    plan.validate()
    assert plan.experiment.league == LeagueOptions() != parse_train(["league", "shoal/TicTacToe-v0"]).experiment.league
    run = shoal.train("league", "shoal/TicTacToe-v0", policies=way, max_env_steps=2000, run_dir=str(tmp_path / "run"), **QUIET,
                      architecture={"envs_per_actor": 4}, eval={"episodes": 4})
    assert run.summary["env_steps"] >= 2000


@pytest.mark.parametrize("game", [ROCK, CYCLE])
def test_the_preset_has_the_values_that_were_measured(game):
    """`shoal train league shoal/RockPaperScissors-v0` is the league of mechanism-league-rps, with its league exploiters."""
    words = ["league", game, "--league.league-exploiters", "0"]
    plain, measured = (parse_train([*words, *more]).experiment for more in ((), (*RATES, *LEAGUE)))
    assert (plain.algorithm, plain.net, plain.architecture, plain.league, plain.anneal_env_steps) \
        == (measured.algorithm, measured.net, measured.architecture, measured.league, measured.anneal_env_steps)


def test_elo():
    table = PayoffTable(decay=1.0)
    for _ in range(300):
        table.report("strong", "weak", "win")
    for _ in range(100):
        table.report("weak", "strong", "win")
    strong, weak = table.elo(["strong", "weak"])
    assert strong == pytest.approx(-weak) and abs(strong - weak - 400 * np.log10(3)) < 2
    assert table.elo(["nobody"]).tolist() == [0.0]
