"""One policy on all sides of a game: matches as evaluation, goals, exploitability, and what is refused."""

from __future__ import annotations

import hashlib
import json
import re

import numpy as np
import pytest

import shoal
from shoal.cli import main
from shoal.envs.builtin.game_trees import tree_of
from shoal.errors import ConfigError
from shoal.experiment.config import Experiment
from shoal.roles.evaluator import Evaluator
from shoal.roles.goals import Goal
from shoal.roles.matches import exploitability_of, match_rates, rate_interval
from shoal.roles.policy_opponent import script_opponent

QUIET = {"console": {"mode": "none"}, "tensorboard": False, "runtime": "inline", "actors": 1}


@pytest.mark.parametrize(("text", "want"), [
    ("return >= 475", Goal("return", 475.0)),
    (" win_rate(random)>=0.95 ", Goal("win_rate", 0.95, True, "random")),
    ("loss_rate( perfect ) <= 1e-2", Goal("loss_rate", 0.01, False, "perfect")),
    ("exploitability <= .05", Goal("exploitability", 0.05, False)),
])
def test_goals(text, want):
    goal = Goal.parse(text)
    assert goal == want and Goal.parse(str(goal)) == goal
    assert goal.reason == ("return" if goal.metric == "return" else "until")
    scores = {goal.metric: goal.bound}
    assert goal.reached(scores) and not goal.reached({goal.metric: goal.bound - 0.1 if goal.at_least else goal.bound + 0.1})
    assert goal.rank({goal.metric: goal.bound + 1}) > goal.rank(scores) or not goal.at_least


@pytest.mark.parametrize(("text", "words"), [
    ("return", "cannot be read"), ("return > 3", "cannot be read"), ("return >= nan", "cannot be read"),
    ("return >= high", "cannot be read"), ("elo >= 3", "elo is not measured; use one of return"),
    ("return(strong) >= 3", "no opponent strong"), ("exploitability(random) <= 0", "best response"),
    ("win_rate >= 95", "is never reached: win_rate is between 0 and 1"), ("loss_rate(random) <= -0.1", "between 0 and 1"),
    ("exploitability <= -1", "exploitability is at least 0"),
])
def test_goals_that_cannot_be_read(text, words):
    with pytest.raises(ConfigError, match=words):
        Goal.parse(text)


def test_match_rates():
    assert match_rates(np.array([1, 1, 0, -1])) == {"win_rate": 0.625, "loss_rate": 0.25}
    assert match_rates(np.array([-2.0, 0.5])) == {"win_rate": 0.5, "loss_rate": 0.5}


@pytest.mark.parametrize(("env", "options", "words"), [
    ("CartPole-v1", {"policies": "self-play"}, "needs a game of several agents"),
    ("shoal/Kuhn-v0", {"until": "win_rate >= 0.9"}, "give --policies self-play"),
    ("shoal/Kuhn-v0", {"until": "return >= 1", "until_return": 1.0}, "two goals"),
    ("shoal/Kuhn-v0", {"until": "return(perfect) >= 1", "policies": "self-play"}, "no perfect player of shoal/Kuhn-v0"),
    ("shoal/ConnectFour-v0", {"until": "return(perfect) >= 1", "policies": "self-play"}, "no perfect player of shoal/Conn"),
    ("shoal/ConnectFour-v0", {"until": "exploitability <= 1", "policies": "self-play"}, "cannot be computed during a run"),
    ("shoal/Kuhn-v0", {"until": "exploitability <= 1", "policies": "self-play", "net": {"recurrent": "lstm"}}, "without memory"),
    ("shoal/Kuhn-v0", {"until": "return >= 1", "policies": "self-play", "eval": {"enabled": False}}, "needs evaluations"),
    ("pettingzoo:mpe2.simple_speaker_listener_v4", {}, "different spaces"),
])
def test_refused(env, options, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        shoal.train("ppo", env, max_env_steps=100, run_dir=str(tmp_path / "run"), **QUIET, **options)
    assert not (tmp_path / "run").exists()


def test_refused_by_architecture(tmp_path, capsys):
    assert main(["train", "seed", "shoal/TicTacToe-v0", "--run-dir", str(tmp_path / "run")]) == 2
    assert "its agents take turns" in capsys.readouterr().err and not (tmp_path / "run").exists()


@pytest.mark.parametrize(("words", "said"), [
    (["data", "record", "random", "shoal/TicTacToe-v0", "--out", "OUT"], "its agents take turns, and recordings hold"),
    (["train", "ppo", "shoal/Kuhnn-v0", "--run-dir", "OUT"], "did you mean shoal/Kuhn-v0"),
    (["train", "ppo", "pettingzoo:pettingzoo.mpe.simple_v3", "--run-dir", "OUT"], "cannot be imported"),
    (["train", "ppo", "shoal/Kuhn-v0", "--policies", "independant", "--run-dir", "OUT"], "give shared, self-play, league"),
])
def test_said_in_a_sentence(words, said, tmp_path, capsys):
    out = tmp_path / "out"
    assert main([str(out) if word == "OUT" else word for word in words]) == 2
    assert said in capsys.readouterr().err and not out.exists()


def kuhn(folder, **options):
    return shoal.train("ppo", "shoal/Kuhn-v0", policies="self-play", seed=3, run_dir=str(folder), **QUIET,
                       **{"eval": {"every_env_steps": 4000, "episodes": 40}, **options})


def digest(run):
    return hashlib.sha256(np.ascontiguousarray(run.published["params"])).hexdigest()


def test_until_exploitability(tmp_path, capsys):
    run = kuhn(tmp_path / "run", until="exploitability <= 0.3", max_env_steps=150_000)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["stopped_by"] == "until" and summary["exploitability"] <= 0.3 and summary["eval_episodes"] == 40
    assert 0 <= summary["win_rate"] <= 1 and summary["policies"]["main"]["exploitability"] == summary["exploitability"]
    assert run.policies == {"main": run.policy}
    policy = run.prepared.algorithm.policy()
    policy.load(run.published)
    assert abs(exploitability_of(policy, tree_of("shoal/Kuhn-v0")) - summary["exploitability"]) < 1e-6
    shots = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any(shot.get("exploitability") for shot in shots)
    assert main(["eval", str(tmp_path / "run"), "--episodes", "20"]) == 0
    assert "against random: return" in capsys.readouterr().out
    assert main(["play", str(tmp_path / "run"), "--against", "random", "--episodes", "2"]) == 0
    said = capsys.readouterr().out
    assert "game 2: player_0" in said and "; the run was player_1" in said and "player_1: " in said
    assert main(["resume", str(tmp_path / "run")]) == 2
    assert 'has reached its goal "exploitability <= 0.3"' in capsys.readouterr().err


def test_best_is_least_exploitable(tmp_path, monkeypatch):
    """Without a goal too: the return against random play says little of a policy, and in rock-paper-scissors nothing."""
    found, report = [], Evaluator._report

    def noted(self, play):
        found.append(report(self, play))
        return found[-1]

    monkeypatch.setattr(Evaluator, "_report", noted)
    summary = kuhn(tmp_path / "run", max_env_steps=40_000, eval={"every_env_steps": 2000, "episodes": 40}).summary
    least, best = min(found, key=lambda scores: scores["exploitability"]), max(found, key=lambda scores: scores["return"])
    assert least["exploitability"] < best["exploitability"] - 0.01, "they must differ, or this shows nothing"
    assert summary["exploitability"] == pytest.approx(least["exploitability"], abs=1e-5)
    assert summary["eval_return"] == pytest.approx(least["return"])


def test_same_seed_same_weights(tmp_path):
    one, two = (kuhn(tmp_path / name, max_env_steps=3000) for name in ("one", "two"))
    assert digest(one) == digest(two) and one.summary["env_steps"] == two.summary["env_steps"]


def test_run_against_run(tmp_path, capsys):
    """Against itself a deterministic policy gets what the other side loses; another game's run is refused."""
    one = kuhn(tmp_path / "one", max_env_steps=1000, net={"recurrent": "lstm", "lstm_size": 8})
    two = kuhn(tmp_path / "two", max_env_steps=1000)
    found, back = one.evaluate(600, seed=1, against=two), two.evaluate(600, seed=1, against=one)
    assert abs(found.returns.mean() + back.returns.mean()) < 0.35 and "win rate" in found.sentence()
    assert abs(two.evaluate(600, seed=2, against=two).returns.mean()) < 0.3
    assert main(["eval", str(one.directory), "--against", str(two.directory), "--episodes", "20"]) == 0
    assert f"against {two.directory}" in capsys.readouterr().out
    assert main(["eval", str(one.directory), "--against", "strong"]) == 2
    assert "--against strong is not an opponent; use one of random, perfect, or" in capsys.readouterr().err
    assert main(["eval", str(one.directory), "--against", "random", "--best-response", "100"]) == 2
    assert "--against random names one; give one of them" in capsys.readouterr().err
    policy = two.prepared.algorithm.policy()
    policy.load(two.published)
    exact = exploitability_of(policy, tree_of("shoal/Kuhn-v0"))
    assert main(["eval", str(two.directory), "--best-response", "30000", "--episodes", "2000"]) == 0
    said = capsys.readouterr().out
    learned = float(said.rpartition("at least about ")[2])
    assert "a best response learned in 30,000 env steps gets return" in said and exact / 2 < learned < exact + 0.1
    other = shoal.train("ppo", "shoal/TicTacToe-v0", max_env_steps=500, run_dir=str(tmp_path / "other"), **QUIET)
    with pytest.raises(ConfigError, match="give a run of the same game"):
        other.evaluate(10, against=one)


def always_first(observation):
    return 0


@pytest.mark.parametrize("greedy", [True, False])
def test_eval_plays_as_the_run_was_evaluated(greedy, tmp_path, capsys):
    """With sampled actions where the run's evaluations had them, whoever has them: home, a run as opponent, and in `shoal play`."""
    run = shoal.train("ppo", "shoal/RockPaperScissors-v0", policies="self-play", max_env_steps=100, run_dir=str(tmp_path / "run"),
                      eval={"greedy": greedy}, **QUIET)
    script = f"{__name__}:always_first"
    assert len(set(run.evaluate(60, against=script_opponent(always_first, script)).returns)) == (1 if greedy else 3)
    assert len(set(run.evaluate(60, against=run).returns)) == (1 if greedy else 3)
    assert main(["play", str(run.directory), "--against", script, "--episodes", "30", "--trust"]) == 0
    told = capsys.readouterr().out
    acted = set(re.findall(r"player_[01]: (\d)", told))
    assert len(acted) <= 2 if greedy else len(acted) == 3


def test_rate_interval():
    low, high = rate_interval(0.5, 100)
    assert round(low, 4) == 0.4038 and round(high, 4) == 0.5962
    low, high = rate_interval(1.0, 50)
    assert round(low, 4) == 0.9286 and high == pytest.approx(1.0)


@pytest.mark.parametrize(("preset", "env"), [
    ("impala", "shoal/TicTacToe-v0"), ("a2c", "pettingzoo:pettingzoo.classic.tictactoe_v3"), ("ppo", "shoal/RockPaperScissors-v0")])
def test_games_are_trained(preset, env, tmp_path):
    """Turns, masks, compiled and PettingZoo's: everything runs, and evaluations are matches."""
    if env.startswith("pettingzoo"):
        pytest.importorskip("pettingzoo")
    run = shoal.train(preset, env, policies="self-play", max_env_steps=3000, seed=1, run_dir=str(tmp_path / "run"), **QUIET,
                      eval={"episodes": 20})
    assert run.summary["stopped_by"] == "env_steps" and run.summary["win_rate"] is not None
    assert len(run.evaluate(10, against="random").returns) == 10


def test_replay_with_turns(tmp_path):
    run = shoal.train("dqn", "shoal/TicTacToe-v0", policies="self-play", max_env_steps=300, seed=1, run_dir=str(tmp_path / "run"),
                      **QUIET, replay={"min_size": 100, "batch_size": 32}, eval={"episodes": 10})
    assert run.summary["learner_steps"] > 0 and run.summary["win_rate"] is not None


def test_default_is_as_before():
    assert Experiment(None, None).policies == "shared" and Experiment(None, None).goal is None
    assert Experiment(None, None, until_return=3.0).goal == Goal("return", 3.0)


@pytest.mark.parametrize("preset", ["ppo", "impala"])
def test_rewards_between_turns(preset, tmp_path):
    """With gamma 0 a decision is learned from its own row alone; what it earned came after the other agent's move."""
    pytest.importorskip("pettingzoo")
    from tests.experiment.paid_later import PaidLater

    for other in (False, True):  # no policy is good at both before it has learned
        run = shoal.train(preset, PaidLater, algorithm={"gamma": 0.0}, until_return=2.9, max_env_steps=60_000, seed=1,
                          run_dir=str(tmp_path / str(other)), **QUIET, eval={"episodes": 20, "every_env_steps": 4000},
                          envs={"kwargs": [f"other={other}"]})
        assert run.summary["stopped_by"] == "return" and run.summary["eval_return"] >= 2.9
