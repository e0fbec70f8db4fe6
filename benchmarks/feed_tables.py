"""What `benchmarks.feed` has measured, as docs/performance.md shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.results import origins
from shoal.bench.rates import Spread
from shoal.bench.text_tables import UNMEASURED, markdown, spread

__all__ = ["CASES", "GOALS", "WAYS", "feed_tables"]

CASES = ("CartPole-v1", "shoal/PixelCatch-v0")  # the first one has the goals
WAYS = ("table", "memory", "alone")
GOALS = {"learner_idle": 0.05, "share": 0.9, "actor_replay": 0.1}


def feed_tables(results: Mapping[str, Any]) -> str:
    """The goals, then what was measured in every turn."""
    goals, rows, body = results["goals"], [], []
    for case in results["cases"]:
        turns = case["turns"]
        bound = case["name"] == CASES[0]
        rows += [[case["name"], *row] for row in (
            _row("learner idle", [turn["table"]["learner_idle"] for turn in turns], goals["learner_idle"], below=True, bound=bound),
            _row("updates/s, of those from memory", _ratios(turns, "memory"), goals["share"], below=False, bound=bound),
            _row("updates/s, of those from memory with nothing else running", _ratios(turns, "alone"), None, False, False),
            _row("actors: waiting for replay, handing items over", [_replay(turn["table"]) for turn in turns],
                 goals["actor_replay"], below=True, bound=bound),
            _row("actors: the same, and making items and priorities",
                 [_replay(turn["table"]) + turn["table"]["actor_makes_items"] for turn in turns], None, False, False))]
        body += [[case["name"], way, *(spread([turn[way][key] for turn in turns])
                                       for key in ("updates_per_second", "env_steps_per_second"))] for way in turns[0]]
    loads = ", ".join(f"{case['name']} {case['load']:g}" for case in results["cases"])
    about = f"Median (lowest - highest) of turns of {results['seconds']:g} s. Load average at the end: {loads}."
    return "\n\n".join([origins(results, results["cases"]), about, markdown(("env", "what", "share", "goal", "met"), rows),
                        markdown(("env", "batches from", "updates/s", "env steps/s"), body), UNMEASURED])


def _ratios(turns: Sequence[Mapping[str, Any]], way: str) -> list[float]:
    return [turn["table"]["updates_per_second"] / turn[way]["updates_per_second"] for turn in turns]


def _replay(numbers: Mapping[str, float]) -> float:
    return numbers["actor_waits"] + numbers["actor_hands_over"]


def _row(what: str, values: Sequence[float], goal: float | None, below: bool, bound: bool) -> list[str]:
    found = Spread.of(values)
    shown = f"{found.median:.1%} ({found.low:.1%} - {found.high:.1%})"
    if goal is None or not bound:
        return [what, shown, "-", "-"]
    met = found.median < goal if below else found.median >= goal
    return [what, shown, f"{'<' if below else '>='} {goal:.0%}", "yes" if met else "no"]
