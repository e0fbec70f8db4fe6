"""`make bench-ray`: shoal's Ray runtime beside RLlib, which is made for Ray, and beside shoal's own local runtime; in turns.

Settings are the same on both runtimes, in two layouts for two cores:

    together    a place for each core, with an actor and a learner; only gradients go from one to the other (gloo, shared memory)
    apart       an actor and a learner, a place each: every unroll goes through the object store (local: through shared memory)

RLlib steps environments in Python, one by one, or gymnasium's vectorised CartPole where that is faster for it
(drivers/drive_rllib.py). One row is shoal in the very environments that are stepped one by one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from shoal.bench import machine
from shoal.bench.__main__ import say
from shoal.bench.cases import CARTPOLE, NATURE, PONG, Case
from shoal.bench.measure import Outcome, Spread, alternate
from shoal.bench.peers.__main__ import with_earlier
from shoal.bench.peers.install import PEERS, install
from shoal.bench.peers.lineup import SAME_ENV, Runner, same_env
from shoal.bench.tables import UNMEASURED, failures, markdown, origins, speeds, spread

__all__ = ["GOALS", "ON_RAY", "main", "ray_tables"]

FILE = "bench_ray.json"
RAY, LOCAL, PEER = "shoal ray", "shoal local", "RLlib"
TOGETHER = {"actors": 2, "learners": 2, "architecture.one_place": True, "architecture.batch_slots": 1}
APART = {"actors": 1, "architecture.one_place": False, "architecture.batch_slots": 2}


@dataclass(frozen=True)
class Goal:
    """What issue 7 asks: times RLlib's faster one, and the share of the local runtime."""

    rllib: float
    local: float | None = None


GOALS = {"CartPole-v1": Goal(5.0), "ALE/Pong-v5": Goal(1.5, 0.7)}


def lineup(case: Case, scene: str) -> tuple[Runner, ...]:
    """shoal on both runtimes in both layouts, then in RLlib's environments, then RLlib."""
    cases = {}
    for layout, settings in (("together", TOGETHER), ("apart", APART)):
        for name, runtime in ((LOCAL, "local"), (RAY, "ray")):
            cases[f"{name}, {layout}"] = replace(case, overrides={**case.overrides, **settings, "runtime": runtime})
    stepped = {**(SAME_ENV[scene] or TOGETHER), "runtime": "ray"}
    cases[f"{RAY}, per-step Python environment"] = same_env(case, scene.lower(), stepped)
    peers = [Runner(f"{PEER} {name}", case.scene, "rllib", {"algorithm": name.lower()}) for name in ("IMPALA", "APPO")]
    return (*(Runner(name, case.scene, case=made) for name, made in cases.items()), *peers)


_pong = replace(PONG, seconds=12.0)  # RLlib needs a few seconds for one batch
ON_RAY: dict[str, tuple[Runner, ...]] = {
    "CartPole-v1": lineup(Case("CartPole", CARTPOLE, "impala_throughput", {"architecture.envs_per_actor": 512}), "CartPole"),
    "ALE/Pong-v5": lineup(Case("Pong", _pong, "impala", {**NATURE, "architecture.envs_per_actor": 64}), "Pong"),
}


# ---------------------------------------------------------------------------------------------- ratios
Runs = Sequence[Mapping[str, Any]]


def by_round(runs: Runs) -> dict[tuple[str, int], float]:
    """Speeds by the run of this script that they belong to and their round in it."""
    dates = [run["date"] for run in runs]
    return {(run["date"], dates[:number].count(run["date"])): run["env_steps_per_second"] for number, run in enumerate(runs)
            if run["env_steps_per_second"] is not None}


def ratios(ours: Runs, others: Sequence[Runs]) -> Spread:
    """Round by round: our speed divided by the fastest of the others'."""
    rivals = [by_round(runs) for runs in others]
    best = {turn: max(speed[turn] for speed in rivals if turn in speed) for turn in {turn for speed in rivals for turn in speed}}
    return Spread.of([speed / best[turn] for turn, speed in by_round(ours).items() if turn in best])


def beside(runs: Mapping[str, Runs], name: str) -> tuple[Spread, Spread]:
    """A row as a multiple of RLlib, and as a share of the same row on the local runtime."""
    peers = [rows for who, rows in runs.items() if who.startswith(PEER)]
    twins = [runs[twin]] if name.startswith(RAY) and (twin := name.replace(RAY, LOCAL)) in runs else []
    return ratios(runs[name], peers), ratios(runs[name], twins)


def ray_tables(results: Mapping[str, Any]) -> str:
    """One table per scene; then what was asked for, judged by medians over the rounds."""
    parts = ["\n".join(f"- {name}: {words}" for name, words in results["peers"].items())]
    judged = []
    for scene in results["scenes"]:
        rows = []
        for name, runs in scene["runs"].items():
            times, share = beside(scene["runs"], name)
            ours = name.startswith((RAY, LOCAL))
            rows.append([name, spread(speeds(runs)), _shown(times, "") if ours else "-", _shown(share, "%")])
            goal = GOALS[scene["name"]]
            if name.startswith(RAY):
                judged.append(_judged(scene["name"], f"{name} / the faster RLlib", times, goal.rllib))
                if goal.local is not None and share.count:
                    judged.append(_judged(scene["name"], f"{name} / local", share, goal.local))
        parts += [f"### {scene['name']}", origins(results, [{**runs[-1], "name": who} for who, runs in scene["runs"].items()])]
        parts += [markdown(("who", "env steps/s", "times the faster RLlib", "of the local runtime"), rows),
                  "\n".join(failures(scene["runs"]))]
    head = ("env", "what", "median (lowest - highest) of the rounds", "goal", "met")
    parts += [markdown(head, judged) if judged else "", UNMEASURED]
    return "\n\n".join(part for part in parts if part)


def _shown(found: Spread, unit: str) -> str:
    if not found.count:
        return "-"
    low, middle, high = ((f"{100 * x:.0f}%" if unit else f"{x:.2f}") for x in (found.low, found.median, found.high))
    return f"{middle} ({low} - {high})"


def _judged(scene: str, what: str, found: Spread, goal: float) -> list[str]:
    met = "yes" if found.median >= goal else "no" if found.count else "not measured"
    return [scene, what, _shown(found, ""), f">= {goal:g}", met]


# ---------------------------------------------------------------------------------------------- running
def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shoal.bench.peers.on_ray", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only scenes whose name holds these words")
    parser.add_argument("--who", default="", help="only rows whose name holds these words")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="shorten all windows, to try it out")
    parser.add_argument("--no-save", action="store_true", help=f"do not write docs/results/{FILE}; so is it with --scale")
    given = parser.parse_args(words)
    started, results, before = time.monotonic(), machine.describe(), machine.load(FILE)
    able, about = install(next(peer for peer in PEERS if peer.name == "rllib"), say)
    results |= {"peers": {"rllib": about}, "scenes": []}
    for name, runners in ON_RAY.items():
        chosen = {runner.name: partial(_run, runner, able, about, given.scale) for runner in runners
                  if given.who.lower() in runner.name.lower()}
        if not chosen or given.only.lower() not in name.lower():
            continue
        runs: dict[str, list[dict[str, Any]]] = {who: [] for who in chosen}
        results["scenes"].append({"name": name, "runs": runs})
        for number in range(given.rounds):
            say(f"{name}, round {number + 1} of {given.rounds}")
            for who, outcomes in alternate(chosen, 1, say).items():
                runs[who] += [{**outcome.record(), **machine.stamp(results)} for outcome in outcomes]
            results["seconds"] = round(time.monotonic() - started, 1)
            if machine.kept(given):  # after every round: an hour of measuring is not lost with its last minute
                machine.save(FILE, with_earlier(deepcopy(results), before))
    where = "\n\n`python -m shoal.bench.report` puts it into docs/performance.md" if machine.kept(given) else ""
    say("\n" + ray_tables(results) + where)
    return int(any(run["error"] for scene in results["scenes"] for runs in scene["runs"].values() for run in runs))


def _run(runner: Runner, able: bool, about: str, scale: float) -> Outcome:
    return Outcome(error=about) if runner.peer is not None and not able else runner.run(scale)


if __name__ == "__main__":
    sys.exit(main())
