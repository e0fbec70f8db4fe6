"""`make bench-peers`: shoal, the hand-written loop and the peers in turn; medians and spread."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from shoal.bench import limits, machine
from shoal.bench.__main__ import say
from shoal.bench.cases import Case
from shoal.bench.measure import Outcome, alternate
from shoal.bench.peers.install import PEERS, install
from shoal.bench.peers.lineup import LINEUP, RACE, Runner, race
from shoal.bench.tables import LIMIT, peer_tables, short

__all__ = ["Yard", "main", "with_earlier"]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shoal.bench.peers", description=__doc__)
    parser.add_argument("--only", default="", help="only scenes whose name holds these words; 'race' for the seconds to 475")
    parser.add_argument("--who", default="", help="only runners whose name holds these words")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="shorten all windows, to try it out")
    parser.add_argument("--list", action="store_true", help="print scenes and runners, and stop")
    parser.add_argument("--install-only", action="store_true")
    parser.add_argument("--no-save", action="store_true", help="do not write docs/results/peers.json; so is it with --scale")
    given = parser.parse_args(words)
    if given.list:
        say("\n".join([*(f"{name}: {runner.name}" for name, runners in LINEUP.items() for runner in runners),
                       *(f"race: {name}" for name in RACE.runners)]))
        return 0
    started, results = time.monotonic(), machine.describe()
    able = {}
    results["peers"] = {}
    for peer in PEERS:
        able[peer.name], results["peers"][peer.name] = install(peer, say)
        say(f"{peer.name}: {results['peers'][peer.name]}")
    if given.install_only:
        return int(not all(able.values()))
    results["scenes"] = []
    for name, runners in LINEUP.items():
        chosen = {runner.name: partial(_run, runner, able, results["peers"], given.scale) for runner in runners
                  if given.who.lower() in runner.name.lower()}
        if chosen and given.only.lower() in name.lower():
            say(name)
            with limits.Probes() as probes:
                yards = {f"{LIMIT} of {runner.name}": Yard(runner.case, probes, given.scale) for runner in runners
                         if runner.case is not None and ":" not in runner.case.scene.env and runner.name in chosen}
                found = alternate({**chosen, **yards}, given.rounds, say)
            stamp = machine.stamp(results)
            results["scenes"].append({"name": name, "runs": {who: [{**outcome.record(), **stamp} for outcome in runs]
                                                             for who, runs in found.items()}})
    if given.only.lower() in "race":
        results["race"] = _race(given.who, able, results["peers"], machine.stamp(results))
    results["seconds"] = round(time.monotonic() - started, 1)
    say("\n" + peer_tables(results) + f"\n\nmeasured in {results['seconds']:.0f} s")
    if machine.kept(given):
        results = with_earlier(results, machine.load("peers.json"))
        say(f"wrote {machine.save('peers.json', results)}; `python -m shoal.bench.report` puts it into docs/performance.md")
    return 0


class Yard:
    """The composed limit as one of those who run in turns: its grid once, then its best cells in every round."""

    def __init__(self, case: Case, probes: limits.Probes, scale: float) -> None:
        self._case, self._probes, self._seconds = case, probes, limits.SECONDS * scale
        self._known: limits.Limit | None = None

    def __call__(self) -> Outcome:
        try:
            self._known = self._known or limits.measure(self._case, self._probes, seconds=self._seconds)
            now = limits.measure(self._case, self._probes, known=self._known, seconds=self._seconds)
        except (RuntimeError, OSError) as error:
            return Outcome(error=f"the limit could not be measured: {error}")
        parts = {part: getattr(now, part).frames_per_second for part in ("e", "i", "l")}
        return Outcome(now.env_steps_per_second, details={**parts, "passes": now.passes})


def with_earlier(results: dict[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """This run's rows beside those of earlier ones: scenes, runners and rounds may be measured apart.

    Rounds of the same commit, with or without uncommitted changes, add up; others are replaced, and so are those of which it is not
    known. A ratio is taken between rows of one scene, so what is to be
    compared belongs into one run; each run has its date.
    """
    earlier = {scene["name"]: scene["runs"] for scene in before.get("scenes", [])}
    for scene in results["scenes"]:
        rows = dict(earlier.get(scene["name"], {}))
        for who, runs in scene["runs"].items():
            rows[who] = [run for run in rows.get(who, []) if _source(run) == _source(results)] + runs
        scene["runs"] = rows
    joined = {**results, "scenes": machine.merged(before.get("scenes", []), results["scenes"], "name")}
    races = [race for race in (before.get("race"), results.get("race")) if race]
    if races:
        joined["race"] = {**races[-1], "runs": {who: runs for race in races for who, runs in race["runs"].items()}}
    return joined


def _source(about: Mapping[str, Any]) -> tuple[str, bool | None]:
    """Which code was measured."""
    return about["commit"], about.get("uncommitted_changes")


def _run(runner: Runner, able: dict[str, bool], words: dict[str, str], scale: float) -> Outcome:
    """A peer that could not be installed is a row that says so."""
    if runner.peer is not None and not able[runner.peer]:
        return Outcome(error=words[runner.peer])
    return runner.run(scale)


def _race(who: str, able: dict[str, bool], words: dict[str, str], stamp: Mapping[str, Any]) -> dict:
    """Seconds to the goal, seed by seed, everybody in turn."""
    names = [name for name in RACE.runners if who.lower() in name.lower()]
    runs: dict[str, list] = {name: [] for name in names}
    say(f"seconds to {RACE.goal:g} on {RACE.env}")
    for seed in RACE.seeds:
        for name in names:
            peer = RACE.runners[name].get("peer")
            if peer and not able[peer]:
                run = {"seed": seed, "seconds": None, "eval_return": None, "error": words[peer]}
            else:
                run = race(RACE, name, seed)
            runs[name].append({**run, **stamp})
            say(f"  seed {seed}  {name}: {run['error'] or short(run['seconds']) + ' s'}")
    return {"env": RACE.env, "goal": RACE.goal, "runs": runs}


if __name__ == "__main__":
    sys.exit(main())
