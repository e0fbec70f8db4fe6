"""Learning from recordings alone (issue 21, specs/value.md 13d): what each preset makes of the same data.

    CartPole     20,000 decisions, half random, half of a dqn that was stopped at a return of 150; bc, iql, cql, and dqn unchanged
    PointGrasp   20,000 scripted episodes, a quarter of them successful; bc (samples of its policy, as it clones) and iql (its mean)
    Pendulum     what a sac run did in its first 20,000 decisions; bc, td3_bc, iql and cql

Returns are those of the last version over fresh episodes, and so is the largest q-value over all recorded states. Everything runs
inline, so results depend on the seed and not on the machine.

Values of the presets were chosen on seeds 11 to 14. Of CartPole, seeds 1, 2 and 21 to 25 were seen with earlier values, so its
line has others.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evidence.lines import Line, shoal, side_by_side
from evidence.recorded_runs import LOGS
from shoal import offline

__all__ = ["LINES"]

CARTPOLE, GRASP, PENDULUM = "CartPole-v1", "shoal/PointGrasp-v0", "Pendulum-v1"
HALF, UPDATES, GRASPS, GRASP_UPDATES, SWINGS = 10_000, 10_000, 20_000, 5_000, 20_000
BOUND = 99.3  # no q-value of CartPole with a discount of 0.99 and 500 steps is larger
INLINE = ("--runtime", "inline", "--console.mode", "none", "--no-tensorboard")
QUIET = (*INLINE, "--policy", "last", "--eval.every-learner-steps", "1000000000")


def command(*words: str, **more: str) -> None:
    done = shoal(*words, timeout=7200, more={"OMP_NUM_THREADS": "1", **more})
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])


def learned(preset: str, logs: str, env: str, seed: int, updates: int, *more: str) -> dict[str, Any]:
    """Train on the logs; what the last version gets, and what its values promise."""
    with tempfile.TemporaryDirectory() as folder:
        run = f"{folder}/run"
        words = (logs, "--env", env) if preset != "dqn" else (env, "--demos", logs, "--offline")
        command("train", preset, *words, "--max-learner-steps", str(updates), "--seed", str(seed), "--run-dir", run, *QUIET,
                "--eval.last-env-steps", "20000", *more)
        summary = json.loads(Path(run, "summary.json").read_text())
        found = {"return": summary["eval_return"], "seconds": summary["seconds"]}
        return {**found, "max_q": largest_q(run, logs)} if preset in ("dqn", "cql") and env == CARTPOLE else found


def all_learned(presets: Sequence[str], *rest: Any) -> dict[str, dict[str, Any]]:
    """The same of several presets, side by side where --jobs allows it."""
    return dict(zip(presets, side_by_side(lambda preset: learned(preset, *rest), presets), strict=True))


def largest_q(run: str, logs: str) -> float:
    """Over all recorded states and all actions."""
    import shoal as library

    loaded = library.load(run)
    policy: Any = loaded.prepared.algorithm.policy()
    policy.load(loaded.published)
    seen = np.concatenate([one.observation[:-1] for one in offline.open_demos(logs).episodes()])
    with torch.inference_mode():
        return float(policy.model.values(torch.from_numpy(seen)).max())


# ---------------------------------------------------------------------------------------------- CartPole
def mixed(folder: str, seed: int) -> str:
    """Half random, half medium."""
    logs, run = f"{folder}/logs", f"{folder}/medium"
    command("data", "record", "random", CARTPOLE, "--episodes", "100000", "--steps", str(HALF), "--seed", str(seed), "--out", logs)
    command("train", "dqn", CARTPOLE, "--until-return", "150", "--max-env-steps", "100000", "--seed", str(seed), "--run-dir", run,
            *INLINE, "--eval.every-env-steps", "1000")
    command("data", "record", run, CARTPOLE, "--episodes", "100000", "--steps", str(HALF), "--seed", str(seed), "--out", logs,
            "--append")
    return logs


def cartpole(seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        logs = mixed(folder, seed)
        info = offline.open_demos(logs).info
        assert info.returns is not None
        found = all_learned(("dqn", "iql", "cql", "bc"), logs, CARTPOLE, seed, 2 * UPDATES)
    wanted = max(300.0, 1.5 * info.returns.mean)
    met = all(found[name]["return"] >= wanted for name in ("iql", "cql")) and found["dqn"]["max_q"] > BOUND > found["cql"]["max_q"]
    return {"met": met, "data_mean": info.returns.mean, "wanted": wanted, "each": found}


# ---------------------------------------------------------------------------------------------- PointGrasp
def grasps(seed: int) -> dict[str, Any]:
    """A grasp succeeded if its episode returned more than 0.5: success gives 1 less 0.05 for each step before."""
    with tempfile.TemporaryDirectory() as folder:
        logs = f"{folder}/logs"
        command("data", "record", "scripted", GRASP, "--episodes", str(GRASPS), "--num-envs", "64", "--seed", str(seed),
                "--out", logs)
        for name in ("bc", "iql"):
            command("train", name, logs, "--env", GRASP, "--max-learner-steps", str(GRASP_UPDATES), "--seed", str(seed),
                    "--run-dir", f"{folder}/{name}", *QUIET, "--eval.last-env-steps", "100")
        found = {"bc": success(f"{folder}/bc", seed, sampled=True), "bc, its mean": success(f"{folder}/bc", seed, sampled=False),
                 "iql": success(f"{folder}/iql", seed, sampled=False)}
    return {"met": 0.25 <= found["bc"] <= 0.45 and found["iql"] >= 0.7, "success": found}


def success(run: str, seed: int, sampled: bool) -> float:
    """Of samples of the policy, or of its means."""
    import shoal as library
    from shoal.acting import Progress
    from shoal.roles.episodes import EpisodePlay

    loaded = library.load(run)
    algorithm, env = loaded.prepared.algorithm, loaded.prepared.source.make(100)
    policy = algorithm.policy()
    policy.load(loaded.published)
    explore = algorithm.explore(0, 1, env.num_seats, Progress()) if sampled else None
    play = EpisodePlay(policy, algorithm.record, env, 1_000, seed, torch.Generator().manual_seed(seed), explore)
    while not play.over:
        play.step()
    return float((np.asarray(play.returns) > 0.5).mean())


# ---------------------------------------------------------------------------------------------- Pendulum
AS_PENDULUM = ("--net.hidden", "64", "64", "--algorithm.actor-lr", "1e-3", "--algorithm.critic-lr", "1e-3", "--algorithm.alpha-lr",
               "1e-3", "--replay.batch-size", "128", "--replay.samples-per-insert", "128")  # the values of sac for Pendulum-v1


def pendulum(seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        logs = f"{folder}/logs"
        command("train", "sac", "evidence.recorded_runs:pendulum", "--max-env-steps", str(SWINGS), "--seed", str(seed), "--run-dir",
                f"{folder}/sac", *INLINE, "--no-eval.enabled", *AS_PENDULUM, **{LOGS: logs})
        info = offline.open_demos(logs).info
        assert info.returns is not None
        found = all_learned(("cql", "iql", "td3_bc", "bc"), logs, PENDULUM, seed, UPDATES, "--net.hidden", "64", "64")
    met = all(found[name]["return"] >= -350 for name in ("iql", "cql"))
    return {"met": met, "data_mean": info.returns.mean, "each": found}


def line(name: str, words: str, run: Any, seeds: Sequence[int] = (1, 2, 3, 4, 5)) -> Line:
    return Line(f"offline-{name}", 21, words, run, seeds=tuple(seeds), together=True)


LINES = [
    line("cartpole-mix", "CartPole-v1, half random and half medium data: iql and cql >= 300 and >= 1.5 times the data's mean "
         f"after {2 * UPDATES:,} updates; the largest q-value of dqn is above {BOUND}, that of cql below",
         cartpole, seeds=range(31, 36)),
    line("pointgrasp", "PointGrasp, scripted logs: bc succeeds in 25 to 45 % (samples of its policy, whose mean never closes the "
         "hand), iql in >= 70 %", grasps),
    line("pendulum", f"Pendulum-v1, the first {SWINGS:,} decisions of sac: iql and cql >= -350", pendulum),
]
