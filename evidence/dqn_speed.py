"""DQN's speed with small networks (issue 16): `shoal train dqn CartPole-v1` as it is shipped, beside Stable-Baselines3.

speed-dqn-cartpole   updates/s at the same network, batch, number of environments and ratio of updates to env steps, in turns: a
                     turn is one run of each, one after the other, so that a machine that is slower for a while is slower for all
race-dqn-cartpole    seconds of training until the return is 450, by the rule of benchmarks.race: weights are judged about every
                     0.1 s, and playing the episodes is not counted. SB3 has RL Zoo's values; a run that fails counts as the
                     seconds that it has trained

Nobody evaluates in the first; both make one update per four env steps, so env steps/s have the same ratio as updates/s.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import Any

from evidence.lines import ROOT, Line
from shoal.bench.child_processes import ChildProcesses
from shoal.bench.jobs import run_job
from shoal.bench.suite import Job, SuiteCase

__all__ = ["LINES"]

ENV = "CartPole-v1"
TURNS, SECONDS, WARM_SECONDS, FASTER = 5, 6.0, 3.0, 3.0
GOAL, RACE_SEEDS, MOST_SECONDS, SHARE = 450.0, (61, 62, 63, 64, 65), 240.0, 0.5
ENV_STEPS_PER_UPDATE = 4


def rate(case: SuiteCase, seed: int) -> float:
    """Updates/s."""
    row = run_job(Job(case, seed), ChildProcesses())
    if row["error"]:
        raise RuntimeError(f"{case.name}: {row['error']}")
    return round(row["env_steps_per_second"] / ENV_STEPS_PER_UPDATE, 1)


def beside_sb3(_: int) -> dict[str, Any]:
    timed = {"env": ENV, "max_seconds": WARM_SECONDS + SECONDS, "warm_seconds": WARM_SECONDS}
    cases = [SuiteCase("shoal", preset="dqn", overrides={"eval.enabled": False}, **timed),
             *(SuiteCase(f"sb3, {threads} thread{'s' * (threads > 1)}", peer="sb3_dqn", order={"threads": threads}, **timed)
               for threads in (1, 2))]
    turns = [{case.name: rate(case, seed) for case in cases} for seed in range(1, TURNS + 1)]
    middle = {case.name: statistics.median(turn[case.name] for turn in turns) for case in cases}
    faster = middle["shoal"] / max(middle["sb3, 1 thread"], middle["sb3, 2 threads"])
    return {"met": faster >= FASTER, "times as fast as SB3": round(faster, 3), "medians": middle, "turns": turns}


def ours(seed: int) -> dict[str, Any]:
    """One race of shoal, judged as often as SB3."""
    given = {"preset": "dqn", "env": ENV, "seed": seed, "eval.every_env_steps": 200}
    code = f"import json; from benchmarks.race import race; print(json.dumps(race({given!r}, {GOAL}, {MOST_SECONDS})))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT,
                          timeout=MOST_SECONDS + 60)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "counted": MOST_SECONDS if found["seconds"] is None else found["seconds"]}


def theirs(seed: int) -> dict[str, Any]:
    case = SuiteCase("sb3", peer="sb3_dqn", env=ENV, until_return=GOAL, max_seconds=MOST_SECONDS, order={"race": "rl-zoo"})
    row = run_job(Job(case, seed), ChildProcesses())
    if row["error"]:
        raise RuntimeError(row["error"])
    reached = row["seconds_to_threshold"]
    return {"seconds": reached, "eval_return": row["final_return"], "env_steps": row["env_steps"],
            "counted": row["env_steps"] / row["env_steps_per_second"] if reached is None else reached}


def raced(_: int) -> dict[str, Any]:
    runs = [{"seed": seed, "shoal": ours(seed), "sb3": theirs(seed)} for seed in RACE_SEEDS]
    middle = {who: round(statistics.median(run[who]["counted"] for run in runs), 2) for who in ("shoal", "sb3")}
    share = middle["shoal"] / middle["sb3"]
    return {"met": share <= SHARE, "share of SB3's seconds": round(share, 3), "medians": middle, "races": runs}


LINES = [
    Line("speed-dqn-cartpole", 16, f"dqn on {ENV} as it is shipped (64-64, batches of 64, an update per 4 env steps), two cores, "
         f"medians of {TURNS} turns: at least {FASTER:g} times the updates/s of SB3's DQN at the same network, batch and ratio, "
         "with one thread or two", beside_sb3, seeds=(0,)),
    Line("race-dqn-cartpole", 16, f"seconds of training of dqn as it is shipped until {ENV}'s return is {GOAL:g}: the median of "
         f"{len(RACE_SEEDS)} seeds is at most half of SB3's DQN with RL Zoo's values", raced, seeds=(0,)),
]
