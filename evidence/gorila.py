"""GORILA (specs/value.md 5d): it learns, it survives kills, and its two rules against bad gradients matter. Medians of 5 seeds.

    laggard   one of two bundles computes its gradients with the parameters that it began with, for ever
    poison    rewards of one of two bundles are 10,000 with a probability of 1/1000, after its first 500 steps

The preset with one shard, inline and deterministic, one process for each run (`--jobs N` runs N of them side by side). Losses are
squared and gradients are not clipped: either would take the edge off a bad gradient, and what is looked at is the rules alone.
Rewards are 0.3 in the place of 1: against larger ones the values of a new net are nothing, and the gradients of the oldest
parameters point at the reward still, so that a laggard does little harm on Catch. Returns are in units of the reward.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from evidence.faults import survives
from evidence.learning import reaches
from evidence.lines import Line, apart, side_by_side
from evidence.staleness import Quiet
from shoal import runtime
from shoal.experiment.prepare import prepare
from shoal.experiment.run import plan_of
from shoal.roles.episodes import EpisodePlay
from shoal.roles.parameter_shards import first_shard
from tests.architectures.gorila import Poisoned, with_laggard

__all__ = ["LINES", "trial"]

MODULE = "evidence.gorila"
SEEDS = (1, 2, 3, 4, 5)
GRADIENTS, EVERY, EPISODES = 4_000, 250, 200
CLEAN = 500  # steps of its environments before rewards are spoiled: the rule about losses has warmed up
REWARD = 0.3
PLAIN = {"actors": 2, "envs.kwargs": (f"reward_scale={REWARD:g}",), "architecture.shards": 1, "algorithm.loss": "squared",
         "algorithm.grad_norm": 0.0, "eval.enabled": False, "console.mode": "none"}
OFF = {"laggard": {"architecture.max_staleness": None}, "poison": {"architecture.outlier_width": None}}


# ---------------------------------------------------------------------------------------------- one run
def trial(seed: int, overrides: Mapping[str, Any], laggard: bool = False, poison: bool = False) -> dict[str, Any]:
    """Two bundles. The server plays greedily every few gradients of learners that are no laggards, and ends the run."""
    torch.set_num_threads(1)
    prepared = prepare(plan_of("gorila", "shoal/Catch-v0", None, None, {**PLAIN, "seed": seed, **overrides}))
    if poison:
        source = prepared.source
        prepared = replace(prepared, source=Poisoned(source.env, source.backend, source.kwargs, begin=CLEAN, victim=1))
    program, scores, able = prepared.program(), [], []
    make = with_laggard(1 if laggard else -1)

    def learning(me: Any, **arguments: Any) -> Any:
        if not (laggard and me.index == 1):
            able.append(me.stats)
        return make(me, **arguments)

    def examined(me: Any, parts: Any, **arguments: Any) -> Any:
        server = first_shard(me, parts, **arguments)
        policy, env, dice, step = parts.algorithm.policy(), parts.env.make(EPISODES), me.rng("examination"), server.step

        async def stepping() -> None:
            await step()
            gradients = sum(stats.get("steps") for stats in able)
            if gradients >= EVERY * (len(scores) + 1):
                policy.load(server.learn.published(server.learner_state.progress))
                number = int(dice.integers(2**31))
                rng = torch.Generator().manual_seed(number)
                play = EpisodePlay(policy, parts.algorithm.record, env, EPISODES, number, rng).to_the_end()
                scores.append(float(play.returns.mean()) / REWARD)
            if gradients >= GRADIENTS:
                me.finish("over")

        server.step = stepping
        return server

    program.nodes["server"].role, program.nodes["learner"].role = examined, learning
    watch = Quiet()
    with tempfile.TemporaryDirectory() as folder:
        runtime.run(program, watch, "inline", Path(folder))
    server, learners = watch.final["server-0"], [watch.final[f"learner-{k}"] for k in range(2)]
    late = scores[len(scores) // 2:]
    return {"mean": round(statistics.mean(late), 3), "worst": round(min(late), 3), "scores": [round(score, 2) for score in scores],
            "updates": int(server["learner_steps"]), "stale": round(server["gradients_stale"] / learners[1]["steps"], 4),
            "outlying": round(learners[1]["gradients_outlying"] / learners[1]["steps"], 4)}


# ---------------------------------------------------------------------------------------------- with and without the rules
@functools.cache
def runs_of(trouble: str, refused: bool, seeds: tuple[int, ...] = SEEDS) -> list[dict[str, Any]]:
    values = {"overrides": {} if refused else OFF[trouble], **({trouble: True} if trouble else {})}
    return side_by_side(lambda seed: {"seed": seed, **apart(MODULE, seed=seed, **values)}, seeds)


def compare(trouble: str, share: str) -> dict[str, Any]:
    """Medians over the seeds: of a run's second half the mean and the worst evaluation, and the share of the second bundle's
    gradients that the rule in question refused."""
    each = {"healthy": runs_of("", True), f"{trouble}, refused": runs_of(trouble, True),
            f"{trouble}, taken": runs_of(trouble, False)}
    columns = {"mean return": "mean", "worst evaluation": "worst", "share refused": share}
    table = {name: {column: round(statistics.median(run[key] for run in some), 4) for column, key in columns.items()}
             for name, some in each.items()}
    healthy, refused, taken = (row["mean return"] for row in table.values())
    return {"met": refused >= healthy - 0.1 and taken <= refused - 0.3, "medians": table, "each": each}


def line(trouble: str, words: str, share: str) -> Line:
    """All seeds are in one run: what is judged is their median."""
    statement = f"gorila on Catch, {GRADIENTS:,} gradients, medians of 5 seeds: with {words} refused the mean return of " \
        "the second half is within 0.1 of that of healthy bundles, with them taken at least 0.3 lower"
    return Line(f"mechanism-gorila-{trouble}", 6, statement, lambda _: compare(trouble, share), seeds=(0,))


LINES = [
    replace(reaches("gorila-catch", 6, "gorila on Catch", "gorila", "shoal/Catch-v0", goal=0.9, budget=400_000, minutes=5),
            seeds=(1, 2, 3)),
    replace(survives("gorila", ("gorila",), ("actor 1 + replay 1 + learner 1", "shard_1 0", "server 0"), "shoal/Catch-v0", 0.9),
            issue=6, seeds=(1, 2, 3)),
    line("laggard", "a laggard's gradients", "stale"),
    line("poison", "the gradients of outlier losses after poisoned rewards", "outlying"),
]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(trial(**json.loads(sys.argv[1]))) + "\n")
