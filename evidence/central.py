"""central_inference against actor_learner with a CNN (issue 5): equal environments, each at its best settings, alternating.

V-trace on shoal/PixelCatch-v0 (28 x 28 pixels), the same net, unroll and number of environments. First every setting of the two
grids is measured once; then the best of either side run in turns, and the medians are compared.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from evidence.lines import Line
from evidence.speed import SpeedWatch
from shoal import runtime
from shoal.experiment.preload import PRELOAD
from shoal.experiment.prepare import prepare
from shoal.experiment.run import plan_of
from shoal.runtime.fork_server_client import ForkServerClient

__all__ = ["LINES"]

ENV, ENVIRONMENTS, TURNS = "shoal/PixelCatch-v0", 32, 5
LOOK, MEASURE = 3.0, 8.0  # seconds: of a setting of the grid, of a run that counts
PRESETS = {"actor_learner": "impala", "central_inference": "seed"}
BUNDLES = {"one_place": True, "learners": 2}
# Actors, rows of a slot, slots of a batch, and what else differs. The environments are actors x rows (x 2 groups).
GRID = {
    "actor_learner": ((1, 32, 1, {}), (2, 16, 1, {}), (2, 16, 2, {}), (1, 32, 1, {"one_place": True}),
                      (1, 32, 1, {"learner_threads": 2}), (2, 16, 1, BUNDLES)),
    "central_inference": ((1, 32, 1, {"groups": 1}), (1, 16, 1, {}), (1, 16, 2, {}), (2, 8, 4, {}),
                          (1, 32, 1, {"groups": 1, "learner_threads": 2}), (2, 16, 1, {"groups": 1, **BUNDLES})),
}
OUTER = ("learner_threads", "learners")  # values of the experiment, not of the architecture
Setting = tuple[int, int, int, dict[str, Any]]


def rate(architecture: str, setting: Setting, seconds: float, seed: int, fork_server: ForkServerClient) -> float:
    """Env steps per second."""
    actors, rows, batch_slots, more = setting
    layout = {key: value for key, value in more.items() if key not in OUTER}
    outer = {key: more.get(key, 1) for key in OUTER}
    plan = plan_of(PRESETS[architecture], ENV, None, {"envs_per_actor": rows, "batch_slots": batch_slots, **layout},
                   {"eval": {"enabled": False}, "actors": actors, "seed": seed, **outer})
    watch = SpeedWatch(seconds)
    with tempfile.TemporaryDirectory() as folder:
        runtime.run(prepare(plan).program(), watch, "local", Path(folder), fork_server=fork_server)
    return float(watch.window.snapshot(whole_run=True)["env_steps_per_second"])


def words(setting: Setting) -> str:
    actors, rows, batch_slots, more = setting
    return ", ".join([f"{actors} x {rows}", f"batch_slots={batch_slots}", *(f"{key}={value}" for key, value in more.items())])


def compare(seed: int) -> dict[str, Any]:
    for architecture, settings in GRID.items():
        for actors, rows, _, more in settings:
            groups = more.get("groups", 2) if architecture == "central_inference" else 1
            assert actors * rows * groups == ENVIRONMENTS, (architecture, actors, rows)
    with ForkServerClient(PRELOAD) as fork_server:
        looked = {side: [round(rate(side, setting, LOOK, seed, fork_server)) for setting in GRID[side]] for side in GRID}
        best = {side: GRID[side][rates.index(max(rates))] for side, rates in looked.items()}
        turns = [{side: round(rate(side, setting, MEASURE, seed, fork_server)) for side, setting in best.items()}
                 for _ in range(TURNS)]
    medians = {side: statistics.median(turn[side] for turn in turns) for side in GRID}
    ratio = medians["central_inference"] / medians["actor_learner"]
    return {"met": ratio >= 0.95, "ratio": round(ratio, 3), "env_steps_per_second": medians, "turns": turns,
            "best": {side: words(setting) for side, setting in best.items()},
            "grid": {side: {words(setting): speed for setting, speed in zip(GRID[side], speeds, strict=True)}
                     for side, speeds in looked.items()}}


LINES = [Line("speed-central-inference", 5, f"{ENV} with a CNN, {ENVIRONMENTS} environments each: central_inference reaches 0.95x "
              "the env steps per second of actor_learner, each at the best of its grid", compare, seeds=(0,))]
