"""Games and environments of several agents, of issue 19: boards, PettingZoo's environments, policies on several Ray nodes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from evidence.cluster import TrainingProcess, cluster, on
from evidence.league import finished
from evidence.lines import Line
from shoal.algorithms.vtrace import VTrace
from shoal.envs import make_multi_agent
from shoal.envs.opponent_env import random_opponent
from shoal.experiment.league_record import LeagueRecord
from shoal.experiment.loaded_run import Run
from shoal.experiment.run import load
from shoal.experiment.rundir import RunDir

__all__ = ["LINES"]

QUIET = ("--no-tensorboard", "--console.mode", "none")
BOARDS = ("--league.league-exploiters", "0", "--runtime", "inline", *QUIET)
LINE_UP = "shoal/ConnectFour-v0", "--envs.kwargs", "rows=4", "columns=5"
SPREAD, SPEAKER = "pettingzoo:mpe2.simple_spread_v3", "pettingzoo:mpe2.simple_speaker_listener_v4"
CLASSICS = tuple(f"pettingzoo.classic.{name}"
                 for name in ("tictactoe_v3", "connect_four_v3", "leduc_holdem_v4", "rps_v2", "chess_v6"))
DEFECT = 1
PAIRS = 9
MPE = ("mpe2.simple_spread_v3", "mpe2.simple_tag_v3", "mpe2.simple_speaker_listener_v4")


def tic_tac_toe(seed: int) -> dict[str, Any]:
    """Losses of the main agent, played greedily, to random play and to each of its snapshots."""
    with finished("league", "shoal/TicTacToe-v0", *BOARDS, "--max-seconds", "600", "--until", "loss_rate(random) <= 0",
                  seed=seed) as (command, run, summary):
        loaded, record = _without_random_moves(load(run)), LeagueRecord(RunDir.open(run))
        lost = {"random": float(np.mean(loaded.evaluate(1000).returns < 0))}
        for name in record.players["main"][2]:
            lost[name] = float(np.mean(loaded.evaluate(400, against=loaded.as_opponent(loaded, name)).returns < 0))
    return {"met": max(lost.values()) <= 0.02, "command": command, "losses": lost, "seconds": summary["seconds"],
            "env_steps": summary["env_steps"]}


def connect_four(seed: int) -> dict[str, Any]:
    """Against random play on each side, and against the snapshot nearest to a tenth of training, which ends when two evaluations
    in a row (both sides together, draws count half) reach a goal that is above the statement's, at the latest after 20 minutes."""
    words = ("league", *LINE_UP, *BOARDS, "--max-seconds", "1200", "--until", "win_rate(random) >= 0.985")
    with finished(*words, seed=seed) as (command, run, summary):
        loaded, record = _without_random_moves(load(run)), LeagueRecord(RunDir.open(run))
        sides = [_wins(loaded, side, 500) for side in range(2)]
        steps = record.players["main"][0]
        early = min(record.players["main"][2], key=lambda name: abs(record.vault.about(name)["steps"] - steps / 10))
        about = record.vault.about(early)
        against = loaded.evaluate(1000, against=loaded.as_opponent(loaded, early)).returns
    score = float(np.mean(against > 0) + np.mean(against == 0) / 2)
    return {"met": min(sides) >= 0.95 and score >= 0.55, "command": command, "wins_against_random_by_side": sides,
            "snapshot": early, "snapshot_steps": about["steps"], "main_steps": steps, "score_against_it": score,
            "seconds": summary["seconds"], "env_steps": summary["env_steps"]}


def _without_random_moves(run: Run) -> Run:
    """Let its snapshots sample from their policies alone, without the random moves of training."""
    algorithm = run.prepared.algorithm
    assert isinstance(algorithm, VTrace)
    algorithm.mix = 0.0
    return run


def _wins(run: Run, side: int, games: int) -> float:
    """Share of its games on this side of the board that a run's policy, played greedily, wins against random play."""
    env = make_multi_agent(LINE_UP[0], games, rows=4, columns=5)
    (group,), step = env.groups, env.reset(seed=side)
    random, own = random_opponent(group, side), np.arange(games) * 2 + side
    won = np.full(games, np.nan)  # of every environment its first game
    while np.isnan(won).any():
        (now,) = step.groups
        assert now.acts is not None and now.action_mask is not None
        actions = np.array(random(now, now.acts))
        mine = own[now.acts[own]]
        if len(mine):
            actions[mine] = run.policy.act(now.observation[mine], mask=now.action_mask[mine], first=np.ones(len(mine), bool))
        step = env.step([actions])
        new = np.isnan(won[step.ended])
        won[step.ended[new]] = step.returns[new, side] > 0
    return float(won.mean())


def above_random(env: str, policies: str, margin: float, env_steps: int) -> Line:
    """The mean return of all agents beside that of random play. The margins are about two thirds of the least that seeds 11 and 12
    gained: spread 6.5 and 7.6 (shared), 8.7 and 7.0 (independent), speaker and listener 26.9 and 26.3."""

    def run(seed: int) -> dict[str, Any]:
        words = ("ppo", env, "--policies", policies, "--max-env-steps", str(env_steps), "--runtime", "inline", *QUIET)
        with finished(*words, seed=seed) as (command, folder, summary):
            loaded = load(folder)
            learned = [float(loaded.evaluate(200, policy=name).returns.mean()) for name in loaded.policies]
        found, random = float(np.mean(learned)), random_play(env, 500, seed)
        return {"met": found >= random + margin, "command": command, "returns": learned, "return": found, "random": random,
                "above_random": found - random, "env_steps": summary["env_steps"], "seconds": summary["seconds"]}

    name = env.rpartition(".")[2].removeprefix("simple_").partition("_v")[0].replace("_", "-")
    return Line(f"learning-mpe-{name}-{policies}", 19, f"ppo --policies {policies} on {env.removeprefix('pettingzoo:')}: the mean "
                f"return is at least {margin:g} above that of random play after {env_steps:,} env steps", run, (21, 22, 23))


def random_play(name: str, episodes: int, seed: int) -> float:
    """The mean return of all agents when each action is drawn uniformly."""
    env = make_multi_agent(name, 50)
    step, found = env.reset(seed=seed), np.zeros((0, len(env.agents)))
    players = [random_opponent(group, seed + place) for place, group in enumerate(env.groups)]
    while len(found) < episodes:
        step = env.step([player(now, np.arange(group.num_seats))
                         for player, now, group in zip(players, step.groups, env.groups, strict=True)])
        found = np.concatenate([found, step.returns])
    env.close()
    return float(found.mean())


def speeds(seed: int) -> dict[str, Any]:
    """Env steps/s of games in self-play and in a league of four, beside an environment with one agent: one thread, the same net and
    number of environments. Decisions of all seats count, those that nobody learns from included."""
    ways = {"alone": ("--policies", "shared"), "self-play": ("--policies", "self-play"), "league": ()}
    one, *games = "shoal/Catch-v0", "shoal/RockPaperScissors-v0", "shoal/TicTacToe-v0", "shoal/ConnectFour-v0"
    found: dict[str, dict[str, float]] = {}
    for env in (one, *games):
        for way in ("alone",) if env == one else ("self-play", "league"):
            words = ("league", env, *ways[way], "--architecture.envs-per-actor", "256", "--max-seconds", "15", "--runtime",
                     "inline", "--no-eval.enabled", *QUIET)
            with finished(*words, seed=seed) as (_, _, summary):
                found.setdefault(env, {})[way] = round(summary["env_steps_per_second"])
    limit = found[one]["alone"]
    shares = {name: {way: round(rate / limit, 3) for way, rate in rates.items()} for name, rates in found.items()}
    return {"met": True, "env_steps_per_second": found, "share_of_one_agent": shares}


def one_policy(seed: int) -> dict[str, Any]:
    """Pairs of runs in turns, one thread: the plain program, and the same with its policy named. Env steps per second of processor
    time, which hold beside other work; the median of a pair's ratios counts."""
    found: dict[str, dict[str, Any]] = {}
    for env in ("CartPole-v1", "shoal/TicTacToe-v0"):
        rates: list[tuple[float, float]] = []
        for number in range(PAIRS):
            pair = {}
            for named in ((False, True), (True, False))[number % 2]:
                words = ("ppo", env, *(("--names", "walker") if named else ()), "--max-seconds", "8", "--runtime", "inline",
                         "--no-eval.enabled", *QUIET)
                with finished(*words, seed=seed) as (_, _, summary):
                    pair[named] = summary["env_steps"] / summary["cpu_seconds"]
            rates.append((pair[False], pair[True]))
        found[env] = {"plain": [round(plain) for plain, _ in rates], "named": [round(named) for _, named in rates],
                      "ratio": round(float(np.median([named / plain for plain, named in rates])), 4)}
    return {"met": all(one["ratio"] >= 0.97 for one in found.values()), "env_steps_per_cpu_second": found}


def soak(seed: int) -> dict[str, Any]:
    """Two minutes each; no restart, no failure. Two of the classics need `pip install chess rlcard`."""
    runs = {}
    for module in (*CLASSICS, *MPE):
        words = ("ppo", f"pettingzoo:{module}", "--policies", "independent" if "speaker" in module or "tag" in module else "shared")
        with finished(*words, "--max-seconds", "120", *QUIET, seed=seed) as (_, _, summary):
            runs[module] = {key: summary[key] for key in ("stopped_by", "env_steps", "env_steps_per_second", "restarts")}
    return {"met": all(run["stopped_by"] == "seconds" and not run["restarts"] and run["env_steps"] for run in runs.values()),
            "runs": runs}


def two_nodes(seed: int) -> dict[str, Any]:
    """Both prisoners learn to defect, each by a learner on a node of its own: beside an actor a node has room for one learner."""
    with cluster(2, cpus=4) as made, tempfile.TemporaryDirectory() as folder:
        running = TrainingProcess(Path(folder), "impala", "shoal/PrisonersDilemma-v0", "--policies", "independent", "--actors",
                                  "2", "--learner-threads", "2", "--envs.kwargs", "rounds=1", "--max-env-steps", "100000",
                                  "--seed", str(seed), *on(made))
        running.further(5)
        nodes = {name: running.where(f"{name}.learner-0")[0] for name in ("player_0", "player_1")}
        result = running.end()
        loaded = load(running.directory)
        seen = np.zeros(loaded.prepared.spec.observation_space.shape or (), np.float32)
        seen[0] = 1  # the first round
        actions = {name: int(policy.act(seen)) for name, policy in loaded.policies.items()}
    return {"met": len(set(nodes.values())) == 2 and set(actions.values()) == {DEFECT}, "nodes": nodes, "actions": actions,
            "policies": loaded.summary["policies"], **result}


LINES = [
    Line("learning-league-tictactoe", 19, "a league on tic-tac-toe within 10 minutes: the main agent loses at most 2 % to random "
         "play and to each of its snapshots", tic_tac_toe, (21, 22, 23, 24, 25)),
    Line("learning-league-connectfour", 19, "a league on connect four with 4 rows and 5 columns within 20 minutes: the main agent "
         "beats random play at least 95 % on both sides, and scores at least 55 % against its snapshot at a tenth of training",
         connect_four, (21, 22, 23, 24, 25), together=True),  # inline: a core each
    Line("speed-games", 19, "env steps/s of rock-paper-scissors, tic-tac-toe and connect four in self-play and in a league, beside "
         "an environment with one agent (reported, no bound)", speeds, (1,)),
    Line("speed-one-policy", 19, "a program with one named policy makes at least 97 % of the env steps per second of processor "
         "time of the plain program, median of 9 alternating pairs of runs", one_policy, (1,)),
    Line("ray-two-policies", 19, "two named policies with learners on two Ray nodes: both learn", two_nodes, (1,)),
    above_random(SPREAD, "shared", 4, 300_000), above_random(SPREAD, "independent", 4, 300_000),
    above_random(SPEAKER, "independent", 17, 300_000),
    Line("stress-pettingzoo", 19, "5 of PettingZoo's classics and 3 of mpe2's environments train for 2 minutes each without a "
         "fault", soak, (1,)),
]
