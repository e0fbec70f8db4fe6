"""`make bench`: the efficiency table of CartPole and Pong with impala and ppo, in under ten minutes.

For each scene: the full grid of each case's limit once, then rounds of (reference loop, every case, every case's limit
again at its best cells), so that each efficiency divides two numbers taken within a minute of each other.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from shoal.bench import limits, machine
from shoal.bench.cases import CASES, Case, Scene
from shoal.bench.measure import Outcome, run_reference, run_shoal
from shoal.bench.tables import bench_tables

__all__ = ["main"]

ROUNDS = {"cartpole": 3, "pong": 2}


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def missing(case: Case) -> str | None:
    """Why a case cannot be run at all, if so."""
    from shoal.errors import ShoalError
    from shoal.experiment.presets import load_preset

    try:
        load_preset(case.preset)
    except ShoalError as error:
        return str(error)
    return None


def measure_scene(scene: Scene, cases: Sequence[Case], rounds: int, scale: float) -> list[dict[str, Any]]:
    """Rounds of everything that belongs to one environment."""
    known: dict[str, limits.Limit] = {}
    again: dict[str, list[limits.Limit]] = {case.name: [] for case in cases}
    runs: dict[str, list[Outcome]] = {case.name: [] for case in cases}
    reference: list[Outcome] = []
    able = []
    with limits.Probes() as probes:
        for case in cases:
            why = missing(case)
            if why:
                runs[case.name].append(Outcome(error=why))
                say(f"{case.name}: cannot run: {why}")
                continue
            able.append(case)
            shared = next(iter(known.values()), None)
            say(f"{case.name}: the grid of its limit")
            known[case.name] = limits.measure(case, probes, same_env=shared, seconds=limits.SECONDS * scale, say=say)
        for number in range(rounds):
            reference.append(run_reference(scene, scale))
            _tell(number, f"{scene.env} reference loop", reference[-1])
            for case in able:
                runs[case.name].append(run_shoal(case, scale))
                _tell(number, case.name, runs[case.name][-1])
                again[case.name].append(limits.measure(case, probes, known=known[case.name], seconds=limits.SECONDS * scale))
    return [_record(case, known.get(case.name), again[case.name], runs[case.name], reference) for case in cases]


def _tell(number: int, name: str, outcome: Outcome) -> None:
    words = f"FAILED: {outcome.error}" if outcome.error else f"{outcome.env_steps_per_second:,.0f} env steps/s"
    say(f"  round {number + 1}  {name}: {words}")


def _record(case: Case, grid: limits.Limit | None, again: Sequence[limits.Limit], runs: Sequence[Outcome],
            reference: Sequence[Outcome]) -> dict[str, Any]:
    return {"name": case.name, "env": case.scene.env, "arguments": case.arguments(), "efficiency_goal": case.efficiency_goal,
            "grid": None if grid is None else grid.record(), "limits": [limit.record() for limit in again],
            "runs": [run.record() for run in runs], "reference": [run.record() for run in reference]}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shoal.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only cases whose name holds these words")
    parser.add_argument("--rounds", type=int, default=0, help=f"rounds of each scene; {ROUNDS} by default")
    parser.add_argument("--scale", type=float, default=1.0, help="shorten all windows, to try it out")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    parser.add_argument("--no-save", action="store_true", help="do not write docs/results/bench.json; so is it with --scale")
    given = parser.parse_args(words)
    started, results = time.monotonic(), machine.describe()
    chosen = [case for case in CASES if given.only.lower() in case.name.lower()]
    if given.list:
        say("\n".join(case.name for case in chosen))
        return 0
    results["cases"] = []
    for scene in dict.fromkeys(case.scene for case in chosen):
        cases = [case for case in chosen if case.scene is scene]
        results["cases"] += measure_scene(scene, cases, given.rounds or ROUNDS.get(scene.reference, 3), given.scale)
    results["seconds"] = round(time.monotonic() - started, 1)
    say("\n" + bench_tables(results) + f"\n\nmeasured in {results['seconds']:.0f} s")
    failed = any(run["error"] for case in results["cases"] for run in case["runs"])
    if machine.kept(given):
        results = machine.with_earlier_rows(results, machine.load("bench.json"), "cases")
        say(f"wrote {machine.save('bench.json', results)}; `python -m shoal.bench.report` puts it into docs/performance.md")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
