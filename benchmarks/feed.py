"""How well a replay table feeds its learner, with Ape-X running free: `python -m benchmarks.feed`.

    core A   the learner                     core B   actors, Replay, supervisor: everything else

    table    apex as shipped with --replay.samples-per-insert None
    memory   the same program, whose learner keeps its first batches and learns from them again and again; the others go on
    alone    the same, and once the batches are there the actors are paused: only the learner has anything to do

In turn, five times, each for some seconds that begin when the table has reached its minimum and the learner is warm. All three
have the same learner: it looks at its data, makes an update, computes priorities, publishes weights. The Evaluator is off.
Written to docs/results/feed.json.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.feed_tables import CASES, GOALS, WAYS, feed_tables
from benchmarks.results import load, parser_for, save, say, with_earlier_rows
from shoal import runtime
from shoal.bench import machine
from shoal.coordination.calibration import Stopwatch
from shoal.core import Tree
from shoal.errors import ShoalError
from shoal.experiment.preload import PRELOAD
from shoal.experiment.prepare import prepare
from shoal.experiment.run import plan_of
from shoal.roles.learner import Learner
from shoal.roles.replay_endpoints import ReplaySampler
from shoal.runtime.fork_server_client import ForkServerClient
from shoal.slots import map_tree
from shoal.telemetry.snapshot import Reading, ReadingWindow

__all__ = ["KeptSamples", "main", "measure"]

KEPT = 64            # batches that lie in memory
WARM_UPDATES = 300   # by then the table has its minimum, and the memory its batches
WARM_SECONDS = 2.0
SECONDS = 6.0


class KeptSamples:
    """The first batches of a ReplaySampler, again and again; priorities go nowhere."""

    def __init__(self, samples: ReplaySampler) -> None:
        self._samples, self._turn = samples, 0
        self._kept: list[tuple[np.ndarray, Tree]] = []
        self.fresh = 0

    async def take(self) -> tuple[np.ndarray, Tree]:
        if len(self._kept) < KEPT:
            keys, batch = await self._samples.take()
            self._kept.append((keys.copy(), map_tree(np.copy, batch)))
        self._turn = (self._turn + 1) % len(self._kept)
        return self._kept[self._turn]

    def update(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Nobody asks for them."""


def from_memory(me: Any, **arguments: Any) -> Learner:
    """The learner of the program, fed from memory."""
    learner = Learner(me, **arguments)
    learner.batches.samples = KeptSamples(learner.batches.samples)
    return learner


class PinnedLearner(Stopwatch):
    """Gives the learner a core of its own, and reads everything twice: when it is warm, and `seconds` later."""

    def __init__(self, core: int, seconds: float, paused: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.core, self.seconds, self.paused, self.window = core, seconds, paused, ReadingWindow()
        self.warm = self.began = self.updates = 0.0

    def tick(self, control: Any) -> None:
        now, updates = time.monotonic(), control.total("learner_steps")
        if self.began:
            if now - self.began >= self.seconds and updates > self.updates:
                self._read(control, now)
                control.stop("measured")
        elif self.warm:
            if now - self.warm >= WARM_SECONDS:
                self.began, self.updates = now, updates
                self._read(control, now)
        elif updates >= WARM_UPDATES:
            self.warm = now
            pid = control.children["learner-0"].pid
            for task in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(task.name), {self.core})
            for role in self.paused:
                control.pause(role)

    def _read(self, control: Any, now: float) -> None:
        self.window.push(Reading(now, control.snapshot(), control.wires()))


def measure(env: str, way: str, cores: Sequence[int], seconds: float, fork_server: ForkServerClient) -> dict[str, float]:
    """One run, and what the learner and the actors did in it."""
    overrides = {"replay.samples_per_insert": None, "eval.enabled": False, "console.mode": "none", "device": "cpu"}
    program = prepare(plan_of("apex", env, None, None, overrides)).program()
    if way != "table":
        program.nodes["learner"].role = from_memory
    watch = PinnedLearner(cores[0], seconds, ("actor",) if way == "alone" else ())
    with tempfile.TemporaryDirectory(prefix="shoal-feed-") as folder:
        runtime.run(program, watch, "local", Path(folder), fork_server=fork_server)
    shot = watch.window.snapshot(whole_run=True)
    actor, learner = shot["roles"]["actor"], shot["roles"]["learner"]
    waited, acted = actor["waits"].get("inserts", 0.0), sum(actor["phases"].get(name, 0.0) for name in ("inference", "env", "pull"))
    made, handed = actor["phases"].get("write", 0.0), actor["phases"].get("gather", 0.0)
    rest = max(0.0, actor["busy"] - acted - made - handed)  # between the phases: sending, and the books of the loop
    return {"updates_per_second": shot["learner_steps_per_second"], "learner_idle": shot["learner_idle"],
            "samples_waited": learner["waits"].get("samples", 0.0), "env_steps_per_second": shot["env_steps_per_second"],
            "actor_waits": waited, "actor_hands_over": handed + rest, "actor_makes_items": made, "actor_acts": acted}


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_for("feed", __doc__, "feed.json", only="environments", rounds=5)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each measurement, once warm")
    given = parser.parse_args(words)
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise ShoalError("this measurement needs two cores: one for the learner, one for everything else")
    results: dict[str, Any] = {**machine.describe(), "goals": GOALS, "seconds": given.seconds, "cases": []}
    os.sched_setaffinity(0, {cores[1]})  # every process started from here stays there, except the learner
    with ForkServerClient(PRELOAD) as fork_server:
        for env in (name for name in CASES if given.only.lower() in name.lower()):
            turns = []
            for number in range(given.rounds):
                turns.append({way: measure(env, way, cores, given.seconds, fork_server) for way in WAYS})
                rates = ", ".join(f"{way} {numbers['updates_per_second']:.0f}" for way, numbers in turns[-1].items())
                say(f"  round {number + 1}  {env}: {rates} updates/s, idle {turns[-1]['table']['learner_idle']:.1%}")
            results["cases"].append({"name": env, "load": round(os.getloadavg()[0], 2), "turns": turns})
    say("\n" + feed_tables(results))
    if not given.no_save:
        results = with_earlier_rows(results, load("feed.json"), "cases")
        say(f"wrote {save('feed.json', results)}; `python -m benchmarks.performance_page` puts it into docs/performance.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
