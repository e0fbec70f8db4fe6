"""`make bench-peers`: shoal, the hand-written loop and the peers in turn; medians and spread."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial

from shoal.bench import machine
from shoal.bench.__main__ import say
from shoal.bench.measure import Outcome, alternate
from shoal.bench.peers.install import PEERS, install
from shoal.bench.peers.lineup import LINEUP, RACE, Runner, race
from shoal.bench.tables import peer_tables, short

__all__ = ["main"]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shoal.bench.peers", description=__doc__)
    parser.add_argument("--only", default="", help="only scenes whose name holds these words; 'race' for the seconds to 475")
    parser.add_argument("--who", default="", help="only runners whose name holds these words")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="shorten all windows, to try it out")
    parser.add_argument("--install-only", action="store_true")
    parser.add_argument("--no-save", action="store_true", help="do not write docs/results/peers.json")
    given = parser.parse_args(words)
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
            found = alternate(chosen, given.rounds, say)
            results["scenes"].append({"name": name, "runs": {who: [o.record() for o in runs] for who, runs in found.items()}})
    if given.only.lower() in "race":
        results["race"] = _race(given.who, able, results["peers"])
    results["seconds"] = round(time.monotonic() - started, 1)
    say("\n" + peer_tables(results) + f"\n\nmeasured in {results['seconds']:.0f} s")
    if not given.no_save:
        say(f"wrote {machine.save('peers.json', results)}; `python -m shoal.bench.report` puts it into docs/performance.md")
    return 0


def _run(runner: Runner, able: dict[str, bool], words: dict[str, str], scale: float) -> Outcome:
    """A peer that could not be installed is a row that says so."""
    if runner.peer is not None and not able[runner.peer]:
        return Outcome(error=words[runner.peer])
    return runner.run(scale)


def _race(who: str, able: dict[str, bool], words: dict[str, str]) -> dict:
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
            runs[name].append(run)
            say(f"  seed {seed}  {name}: {run['error'] or short(run['seconds']) + ' s'}")
    return {"env": RACE.env, "goal": RACE.goal, "runs": runs}


if __name__ == "__main__":
    sys.exit(main())
