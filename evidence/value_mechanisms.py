"""What makes Ape-X and R2D2 work (specs/value.md 3, 6d, 9d): each mechanism with and without it, medians of 5 seeds.

    ladder   lure chain: a ladder of epsilons against one epsilon for all
    alpha    lure chain and Blind Cliffwalk: prioritized against uniform draws
    state    T-maze: windows that begin with a zero state, with the stored one, with and without burn-in

The presets as shipped, inline and deterministic, one process for each run (`--jobs N` runs N of them side by side); only what
is compared differs. The learner itself plays greedily every few updates, and ends the run.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from evidence.lines import Line, apart, side_by_side
from evidence.staleness import Quiet
from shoal import replay, runtime
from shoal.experiment.prepare import prepare
from shoal.experiment.run import plan_of
from shoal.roles.episodes import EpisodePlay
from shoal.roles.learner import Learner
from shoal.roles.replay import Replay

__all__ = ["LINES", "trial"]

MODULE = "evidence.value_mechanisms"
SEEDS = (1, 2, 3, 4, 5)
SOLVED = 0.95
LURE_STEPS = 60_000        # env steps of one run on the lure chain; nearly as many episodes while the lure is taken
TMAZE_UPDATES = 2_000
MEAN_RUNG = 0.083          # the mean of the ladder's 8 rungs


# ---------------------------------------------------------------------------------------------- one run
class GreedyTestedLearner(Learner):
    """Plays greedily every `every` updates; ends the run when it is good enough, if that is asked, or when its time is over."""

    every, episodes, goal, most_updates, most_env_steps = 10, 20, 2.0, 10**9, 10**9

    def __init__(self, me: Any, parts: Any, **arguments: Any) -> None:
        super().__init__(me, parts, **arguments)
        self.policy, self.record, self.env = parts.algorithm.policy(), parts.algorithm.record, parts.env.make(self.episodes)
        self.dice, self.scores = me.rng("examination"), []

    async def step(self) -> None:
        await super().step()
        env_steps, updates = (int(n) for n in self.counts)
        if updates % self.every == 0:
            self.scores.append(self.examine())
            if self.scores[-1] >= self.goal:
                self.me.finish("solved")
        if updates >= self.most_updates or env_steps >= self.most_env_steps:
            self.me.finish("over")

    def examine(self) -> float:
        self.policy.load(self.learn.published(self.learner_state.progress))
        seed = int(self.dice.integers(2**31))
        rng = torch.Generator().manual_seed(seed)
        play = EpisodePlay(self.policy, self.record, self.env, self.episodes, seed, rng)
        return float(play.to_the_end().returns.mean())


class Noting(Replay):
    """Notes when the first item came in whose episode ended with the large reward."""

    first: tuple[int, int] | None = None  # env steps, updates

    def _store(self, data: Any) -> None:
        super()._store(data)
        if self.first is None and (data["items"]["reward"] > 0.5).any():
            self.first = (int(self.counts[0]), self.limiter.samples // self.config.batch_size)


def trial(preset: str, env: str, seed: int, overrides: Mapping[str, Any], **limits: Any) -> dict[str, Any]:
    """One run; `limits` are those of GreedyTestedLearner."""
    torch.set_num_threads(1)
    values = {"eval.enabled": False, "console.mode": "none", "seed": seed, **overrides}
    program = prepare(plan_of(preset, env, None, None, values)).program()
    roles: dict[str, Any] = {}

    def kept(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
        def made(me: Any, **arguments: Any) -> Any:
            roles[name] = make(me, **arguments)
            return roles[name]

        return made

    program.nodes["learner"].role = kept("learner", type("GreedyTestedLearner", (GreedyTestedLearner,), limits))
    if preset == "apex":
        program.nodes["replay"].role = kept("replay", Noting)
    watch = Quiet()
    with tempfile.TemporaryDirectory() as folder:
        reason = runtime.run(program, watch, "inline", Path(folder))
    learner = roles["learner"]
    found = {"solved": reason == "solved", "env_steps": int(learner.counts[0]), "updates": int(learner.counts[1]),
             "episodes": int(sum(page["episodes"] for page in watch.final.values())),
             "score": round(statistics.mean(learner.scores[-3:]), 3)}
    first = getattr(roles.get("replay"), "first", None)
    return {**found, "first_reward": {"env_steps": first[0], "updates": first[1]}} if first else found


def compared(settings: Mapping[str, Mapping[str, Any]], seeds: tuple[int, ...] = SEEDS) -> dict[str, list[dict[str, Any]]]:
    """Every setting with every seed."""
    cases = [(name, {**values, "seed": seed}) for name, values in settings.items() for seed in seeds]
    runs = side_by_side(lambda case: {"seed": case[1]["seed"], **apart(MODULE, **case[1])}, cases)
    return {name: [run for (whose, _), run in zip(cases, runs, strict=True) if whose == name] for name in settings}


def medians(runs: Mapping[str, list[dict[str, Any]]], key: Callable[[dict[str, Any]], float]) -> dict[str, float]:
    return {name: round(statistics.median(key(run) for run in some), 3) for name, some in runs.items()}


# ---------------------------------------------------------------------------------------------- the ladder
def one_epsilon(epsilon: float) -> dict[str, Any]:
    return {"algorithm.exploration": "schedule", "algorithm.epsilon": epsilon, "algorithm.epsilon_final": epsilon}


def ladder(_: int) -> dict[str, Any]:
    """Env steps until the greedy policy goes past the lure; those that never do count with the whole budget."""
    base = {"preset": "apex", "env": "shoal/LureChain-v0", "goal": SOLVED, "most_env_steps": LURE_STEPS}
    settings = {"ladder": {}, f"epsilon {MEAN_RUNG:g}": one_epsilon(MEAN_RUNG), "epsilon 0.01": one_epsilon(0.01)}
    runs = compared({name: {**base, "overrides": values} for name, values in settings.items()})
    steps, scores = medians(runs, lambda run: run["env_steps"]), medians(runs, lambda run: run["score"])
    solved = {name: sum(run["solved"] for run in some) for name, some in runs.items()}
    first, mean, small = settings
    met = solved[first] == len(SEEDS) and steps[mean] >= 3 * steps[first] and scores[small] <= 0.15
    return {"met": met, "medians": {name: {"env steps until solved": steps[name], "return": scores[name],
                                           "seeds that solved it": solved[name]} for name in settings}, "each": runs}


# ---------------------------------------------------------------------------------------------- alpha
def alpha(_: int) -> dict[str, Any]:
    """Updates from the first rewarded item in the table to a greedy policy that goes for it."""
    base = {"preset": "apex", "env": "shoal/LureChain-v0", "goal": SOLVED, "most_env_steps": 4 * LURE_STEPS, "every": 2}
    settings = {f"alpha {alpha:g}": {**base, "overrides": {"replay.exponent": alpha}} for alpha in (0.0, 0.6)}
    runs = compared(settings)
    updates = medians(runs, lambda run: run["updates"] - run.get("first_reward", {"updates": 0})["updates"])
    solved = {name: sum(run["solved"] for run in some) for name, some in runs.items()}
    uniform, prioritized = settings
    return {"met": solved[prioritized] == len(SEEDS) and updates[uniform] >= 3 * updates[prioritized],
            "medians": {name: {"updates from the first reward to the solution": updates[name], "seeds that solved it": solved[name]}
                        for name in settings}, "each": runs}


def cliffwalk(_: int) -> dict[str, Any]:
    """Tabular, one item per update, through the real server: updates until the values are right."""
    from tests.replay.test_statistics import updates_needed

    lengths, ratios = (8, 10), {8: 3.0, 10: 5.0}
    selectors = {"alpha 0": replay.Uniform(), "alpha 0.6": replay.Prioritized(0.6)}
    with tempfile.TemporaryDirectory() as folder:
        each = {f"n = {n}": {name: [updates_needed(n, selector, seed, f"ipc://{folder}/s-{n}-{seed}-{k}") for seed in SEEDS]
                             for k, (name, selector) in enumerate(selectors.items())} for n in lengths}
    found = {name: {who: statistics.median(some) for who, some in row.items()} for name, row in each.items()}
    rows = {name: {**row, "ratio": round(row["alpha 0"] / row["alpha 0.6"], 2)} for name, row in found.items()}
    return {"met": all(rows[f"n = {n}"]["ratio"] >= least for n, least in ratios.items()), "medians": rows, "each": each}


# ---------------------------------------------------------------------------------------------- recurrent state
STATES = {"zero": ("zero", 0), "zero + burn-in": ("zero", 2), "stored": ("stored", 0), "stored + burn-in": ("stored", 2)}


def state(_: int) -> dict[str, Any]:
    """Windows of 4 loss steps. In a T-maze of 8 none holds both cue and junction; in one of 4 a burn-in of 2 reaches the cue."""
    base = {"preset": "r2d2", "env": "shoal/TMaze-v0", "every": 100, "episodes": 200, "most_updates": TMAZE_UPDATES}
    settings = {}
    for length in (8, 4):
        for name, (kind, burn_in) in STATES.items():
            values = {"algorithm.state": kind, "algorithm.burn_in": burn_in, "envs.kwargs": [f"length={length}"]}
            settings[f"L = {length}, {name}"] = {**base, "overrides": values}
    runs = compared(settings)
    scores = medians(runs, lambda run: run["score"])
    means = {name: round(statistics.mean(run["score"] for run in some), 3) for name, some in runs.items()}
    high = {"L = 8, stored + burn-in": 0.9, "L = 8, stored": 0.8, "L = 4, zero + burn-in": 0.9}
    low = {"L = 8, zero": 0.4, "L = 8, zero + burn-in": 0.4, "L = 4, zero": 0.4}
    met = all(scores[name] >= least and means[name] >= least for name, least in high.items()) \
        and all(scores[name] <= most and means[name] <= most for name, most in low.items())
    return {"met": met, "medians": {name: {"return": scores[name], "mean of the seeds": means[name]} for name in settings},
            "each": runs}


def line(name: str, words: str, run: Callable[[int], dict[str, Any]]) -> Line:
    """All seeds are in one run: what is judged is their median."""
    return Line(f"mechanism-{name}", 6, words, run, seeds=(0,))


LINES = [
    line("ladder", "lure chain (L = 4), apex, medians of 5 seeds: the ladder solves it on every seed; one epsilon with the mean of "
         f"the ladder's ({MEAN_RUNG:g}) needs at least 3 times the env steps (cut off at {LURE_STEPS:,}); with 0.01 it stays at "
         "the lure", ladder),
    line("alpha", "lure chain (L = 4), apex, medians of 5 seeds: from the first reward in the table to the solution alpha 0 needs "
         "at least 3 times the updates of alpha 0.6", alpha),
    line("alpha-cliffwalk", "Blind Cliffwalk through a real replay server, medians of 5 seeds: uniform draws need at least 3 times "
         "(n = 8) and 5 times (n = 10) the updates of alpha 0.6", cliffwalk),
    line("state", f"T-maze, r2d2, {TMAZE_UPDATES:,} updates, 5 seeds, medians and means: L = 8 stored >= 0.8, with burn-in >= 0.9, "
         "zero with or without burn-in <= 0.4; L = 4 zero with burn-in >= 0.9, without <= 0.4", state),
]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(trial(**json.loads(sys.argv[1]))) + "\n")
