"""Seconds of training until CartPole's return is 475, by one rule for all: `python -m benchmarks.race`.

The rule. Weights pass when the mean return of 100 fresh greedy episodes is at least the goal and that of another 100, played
at once, is too. They are judged about every 0.1 s of training. What is reported is the time of training, by the wall clock, from
when everything is ready for the first environment step until the weights that passed were there; playing the episodes is not
counted.

    a peer      its clock stands still while it is judged (drivers/)
    shoal       its Evaluator plays beside the training, in a process of its own, and takes the newest weights whenever it is
                free; an evaluation lasts about 0.1 s. Learning goes on meanwhile, so the time is that at which the version
                that passed was first seen, read every 5 ms and therefore never too early

The episodes' seeds have nothing to do with those of the training.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.process_monitor import last_json
from benchmarks.results import parser_for, save, say, where
from shoal import runtime
from shoal.bench import machine
from shoal.bench.child_processes import ChildProcesses
from shoal.bench.jobs import run_job
from shoal.bench.rates import tail
from shoal.bench.suite import Job, SuiteCase
from shoal.bench.text_tables import markdown, spread
from shoal.coordination.trial_session import TrialSession
from shoal.experiment.prepare import prepare
from shoal.experiment.run import plan_of
from shoal.runtime import Supervisor
from shoal.telemetry.short_numbers import short

__all__ = ["PublishTimes", "main", "race", "race_table"]

LOOK_SECONDS = 0.005


class PublishTimes(TrialSession):
    """A session that keeps nothing but the times at which weights were published."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._seen: list[tuple[float, float]] = []  # (time, version)
        self._over = threading.Event()
        self.result: dict[str, Any] = {"seconds": None, "eval_return": None, "env_steps": None}

    def begin(self, control: Supervisor) -> None:
        threading.Thread(target=self._look, args=(control,), daemon=True).start()

    def _look(self, control: Supervisor) -> None:
        while not self._over.wait(LOOK_SECONDS):
            now, version = time.monotonic(), control.total("weights_version")
            if version and (not self._seen or version > self._seen[-1][1]):
                self._seen.append((now, version))  # the first one is there before the first environment step

    def tick(self, control: Supervisor) -> None:
        if self._seen and time.monotonic() - self._seen[0][0] > self._seconds:
            control.stop("seconds")

    def end(self, control: Supervisor, reason: str, error: str | None) -> None:
        self._over.set()
        judge = next(row for name, row in control.snapshot().items() if name.startswith("evaluator"))
        if reason == "return":
            passed = next(at for at, version in self._seen if version >= judge["eval_version"])
            self.result = {"seconds": passed - self._seen[0][0], "eval_return": judge["eval_return"],
                           "env_steps": int(control.total("env_steps"))}


def race(arguments: dict[str, Any], goal: float, seconds: float) -> dict[str, Any]:
    """One run of shoal; seconds are None where the goal was not reached in time."""
    values = {**arguments, "until_return": goal}
    prepared = prepare(plan_of(values.pop("preset"), values.pop("env"), None, None, values))
    clock = PublishTimes(seconds)
    with tempfile.TemporaryDirectory(prefix="shoal-race-") as folder:
        runtime.run(prepared.program(), clock, "local", Path(folder))
    return clock.result


# ---------------------------------------------------------------------------------------------- beside others
GOAL, SEEDS, MOST_SECONDS = 475.0, (1, 2, 3), 60.0
OURS = "shoal ppo_quick"
PEERS = {"SB3 PPO, 4 epochs": "4 epochs", "SB3 PPO, rl-zoo's settings (20 epochs)": "rl-zoo, 20 epochs",
         "SB3 PPO, tuned for this race": "tuned"}
"""Who races against ours, by the settings' name in drivers/drive_sb3.py."""


def run(who: str, seed: int, children: ChildProcesses) -> dict[str, Any]:
    """One seed of one runner, in a process of its own."""
    if who == OURS:
        arguments = {"preset": "ppo_quick", "env": "CartPole-v1", "seed": seed}
        done = children.run([sys.executable, "-m", "benchmarks.race", "--one", json.dumps(arguments)], MOST_SECONDS + 120.0)
        found = last_json(done.stdout)
        if done.returncode or found is None:
            error = f"exit code {done.returncode}: {tail(done.stderr)}"
            return {"seed": seed, "seconds": None, "eval_return": None, "error": error}
        return {"seed": seed, "seconds": found["seconds"], "eval_return": found["eval_return"], "error": None}
    case = SuiteCase(who, peer="sb3", env="CartPole-v1", until_return=GOAL, max_seconds=MOST_SECONDS, order={"race": PEERS[who]})
    row = run_job(Job(case, seed), children)
    reached = row.get("seconds_to_threshold")
    mean = None if reached is None else row["final_return"]
    return {"seed": seed, "seconds": reached, "eval_return": mean, "error": row["error"]}


def race_table(results: Mapping[str, Any]) -> str:
    """Seconds of everybody, and shoal's share of them, seed by seed."""
    ours = results["runs"].get(OURS, [])
    rows = [[who, spread([run["seconds"] for run in runs]), ", ".join(_shown(run) for run in runs), _shares(ours, runs)]
            for who, runs in results["runs"].items()]
    head = ("who", "seconds", "each seed: seconds, mean over 100 episodes", "shoal's share of it")
    return f"{where(results)}\n\n{markdown(head, rows)}"


def _shown(run: Mapping[str, Any]) -> str:
    if run["error"]:
        return f"failed ({run['error']})"
    return f"{short(run['seconds'])} s, {run['eval_return']:.0f}" if run["seconds"] is not None else "not reached"


def _shares(ours: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]) -> str:
    pairs = [(our["seconds"], run["seconds"]) for our, run in zip(ours, runs, strict=False)]
    return ", ".join(f"{our / seconds:.2f}" if our is not None and seconds else "-" for our, seconds in pairs) or "-"


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_for("race", __doc__, "race.json", only="runners")
    parser.add_argument("--one", metavar="JSON", help="one run of shoal with these arguments of shoal.train, and nothing else")
    given = parser.parse_args(words)
    if given.one:
        say(json.dumps(race(json.loads(given.one), GOAL, MOST_SECONDS)))
        return 0
    names, children = [name for name in (OURS, *PEERS) if given.only.lower() in name.lower()], ChildProcesses()
    results: dict[str, Any] = {**machine.describe(), "env": "CartPole-v1", "goal": GOAL, "runs": {name: [] for name in names}}
    for seed in SEEDS:
        for name in names:
            results["runs"][name].append(run(name, seed, children))
            say(f"  seed {seed}  {name}: {_shown(results['runs'][name][-1])}")
    say("\n" + race_table(results))
    if not given.no_save:
        say(f"wrote {save('race.json', results)}")
    return int(any(run["error"] for runs in results["runs"].values() for run in runs))


if __name__ == "__main__":
    sys.exit(main())
